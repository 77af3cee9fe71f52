"""What callers from Python have of the command line: a run in a directory, comparisons and
reports, as data frames and figures.

What writes files and draws is imported when it is first used, so that a run in memory needs none
of it.
"""

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from jax.sharding import Mesh

from fedjax_cfl.data.drift import Drift
from fedjax_cfl.data.drift import none as no_drift
from fedjax_cfl.data.scaling import Scaling, check_scaling
from fedjax_cfl.errors import FinishedRun, InputError
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.simulation import driver
from fedjax_cfl.simulation.callback import Callback
from fedjax_cfl.simulation.driver import Result
from fedjax_cfl.simulation.program import check_data
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.simulation.setup import Setup
from fedjax_cfl.types import Algorithm, FederatedData, Key, Task
from fedjax_cfl.validation import checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedjax_cfl.runs.load import LoadedRun


class Comparison(NamedTuple):
    """What `compare` returns. Accuracies are fractions."""

    table: "DataFrame"  # a row per set of runs that differ in nothing but the seed
    differences: "DataFrame"  # a row per pair of sets and measure, over the seeds that both have
    # a row per cell of the table of one setting by another; None: not asked for
    pivot: "DataFrame | None"
    figure: "Figure"  # accuracy against rounds and other costs


class Report(NamedTuple):
    """What `report` returns."""

    page: Path | None  # where the page was written, None: nowhere
    results: "DataFrame"  # `Comparison.table`
    differences: "DataFrame"  # `Comparison.differences`
    figures: dict[str, "Figure"]  # by name: costs, and of each run, as ifca-seed-0-curves


@overload
def run(
    algorithm: Algorithm,
    task: Task,
    data: FederatedData,
    key: Key,
    *,
    rounds: int,
    eval_every: int = 1,
    drift: Drift | None = None,
    discard: Literal["rounds", "met", "none"] = "rounds",
    mesh: Mesh | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result: ...


@overload
def run(
    algorithm: Algorithm,
    task: Task,
    data: FederatedData,
    key: Key,
    *,
    rounds: int,
    eval_every: int = 1,
    drift: Drift | None = None,
    discard: Literal["rounds", "met", "none"] = "rounds",
    mesh: Mesh | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir: str | Path,
    settings: Mapping[str, Any] | None = None,
    scaling: Scaling | None = None,
    verbose: bool = True,
) -> "LoadedRun": ...


@checked()
def run(
    algorithm: Algorithm,
    task: Task,
    data: FederatedData,
    key: Key,
    *,
    rounds: int,
    eval_every: int = 1,
    drift: Drift | None = None,
    discard: Literal["rounds", "met", "none"] = "rounds",
    mesh: Mesh | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    scaling: Scaling | None = None,
    verbose: bool = True,
) -> "Result | LoadedRun":
    """Runs `rounds` rounds, with an evaluation after every `eval_every` and the last. With a
    `run_dir` it is the command line's run: its files are written, a run that was stopped goes on,
    a finished one is read, and what is returned is what `load_run` reads.

    Args: `data` are on the device or on the host, see `prefetch`; `key` fixes all draws;
    `drift` of None: no data change; `discard` is as in `Plan`; `mesh` of None: every device JAX
    shows; `callbacks` are told of every evaluation as soon as it is known, and where the run stands
    then, see `Callback`.
    With `run_dir`: `settings` are names and values that tell the run from others in tables:
    `algorithm`, `dataset`, `partition` and `model` name its parts, all others are yours; `scaling`
    is what `standardize` returned with `data`: the run keeps it, and its predictions scale samples
    by it; `verbose` shows progress and the final table.
    Raises InputError for data without test samples, for a run that does not fit into memory, and
    for a `run_dir` with another run, or with other settings, in it; NonFiniteUpdate where the
    faults ask for it; KeyboardInterrupt where Ctrl-C stopped it, with a checkpoint.
    """
    if not isinstance(callbacks, list | tuple) or not all(
        isinstance(one, Callback) for one in callbacks
    ):
        raise InputError(f"callbacks={callbacks!r}: must be a list of cfl.Callback")
    plan = Plan(rounds, eval_every, discard)
    setup = Setup(algorithm, task, data, drift or no_drift(), mesh or make_mesh(), scaling)
    if run_dir is not None:
        more = dict(settings or {}), verbose, callbacks
        return _run_in_dir(setup, plan, key, Path(run_dir), *more)
    if scaling is not None:
        raise InputError("scaling: is kept in a run_dir; name one, as run_dir='runs/one'")
    if settings is not None:
        raise InputError("settings: are written to a run_dir; name one, as run_dir='runs/one'")
    return driver.run_setup(setup, plan, key, callbacks)


def _run_in_dir(
    setup: Setup,
    plan: Plan,
    key: Key,
    run_dir: Path,
    given: dict[str, Any],
    verbose: bool,
    callbacks: Sequence[Callback],
) -> "LoadedRun":
    """Runs what `run` describes as the command line would, and reads it."""
    from fedjax_cfl.runs.finish import Member
    from fedjax_cfl.runs.from_python import find_module, list_given, make_settings
    from fedjax_cfl.runs.load import load_run
    from fedjax_cfl.runs.session import train_in_dir, write_settings
    from fedjax_cfl.simulation.compiler import use_compile_cache

    check_data(setup.algorithm, setup.task, setup.drift, setup.data)
    check_scaling(setup.scaling, setup.data)
    use_compile_cache()
    run_dir = run_dir.expanduser().absolute()
    own = make_settings(setup, plan, key, given)
    member = Member(
        own, list_given(given), run_dir, {}, callbacks, draw=draw_curves, verbose=verbose
    )
    with contextlib.suppress(FinishedRun):
        status = train_in_dir(member, setup, None, write_settings)
        if status:
            raise KeyboardInterrupt if status == 130 else SystemExit(status)
    return load_run(run_dir, find_module(setup.task), setup.task.targets)


def draw_curves(run_dir: Path, summary: dict[str, Any]) -> None:
    """Draws curves.png of a run that has ended."""
    from fedjax_cfl.analysis import plot  # it takes as long to import as a run to start

    plot.plot_curves(run_dir, summary)


def to_frame(table: Iterable[Mapping[str, Any]] | Mapping[str, Any]) -> "DataFrame":
    """Returns a table as a pandas.DataFrame.

    `table` are rows, as `load_run(...).rows`, or columns, as `load_run(...).table`. Values that a
    row does not have are None or NaN; a column of lists, as `group_accuracy`, stays one.
    """
    if isinstance(table, Mapping):
        columns = {name: list(values) for name, values in table.items()}
    else:
        rows = list(table)
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: [row.get(name) for row in rows] for name in names}
    import pandas  # only now: a run needs none of it

    return pandas.DataFrame(columns)


def compare(
    paths: str | Path | Iterable[str | Path],
    *,
    out: str | Path | None = None,
    target: float | None = None,
    baseline: str | None = None,
    pivot: tuple[str, str] | None = None,
    measure: str = "final",
) -> Comparison:
    """Compares finished runs, as `fedjax-cfl compare` does; prints nothing but notes.

    Args: `paths` are run directories and folders of them; `out` is a folder for the command's
    files, None: none are written; the others are as in `analysis.compare`. Raises InputError.
    """
    from fedjax_cfl.analysis import compare as command
    from fedjax_cfl.analysis import plot_costs, sets, statistics
    from fedjax_cfl.analysis.runs import list_paths

    paths = list_paths(paths)
    asked = target, baseline, pivot, measure
    if out is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            command.compare(paths, out, *asked)
    runs, table = command.compare_runs(paths, *asked)
    found = sets.list_measures(runs), statistics.list_differences(runs)
    return Comparison(*found, table, plot_costs.draw_costs(runs))


def report(
    paths: str | Path | Iterable[str | Path],
    out: str | Path | None = None,
    pictures: str | Path | None = None,
) -> Report:
    """Returns what the page of `fedjax-cfl report` shows, and writes the page to `out` and its
    pictures to the folder `pictures`, where they are named. Raises InputError.
    """
    from fedjax_cfl.analysis import report as command
    from fedjax_cfl.analysis import sets, statistics
    from fedjax_cfl.analysis.runs import list_paths

    paths = list_paths(paths)
    found = command.make_report(paths)
    page = None
    if out is not None or pictures is not None:
        page = command.write_report(found, out, pictures)
    tables = sets.list_measures(found.runs), statistics.list_differences(found.runs)
    return Report(page, *tables, found.figures)


@checked()
def draw_run(run_dir: str | Path) -> dict[str, "Figure"]:
    """Returns the pictures of a finished run by name: curves and, where it has groups, alluvial
    (who moved where) and groups (found against true groups). Raises InputError.
    """
    from fedjax_cfl.analysis import report as command
    from fedjax_cfl.analysis.runs import read_run

    figures = command.draw_run(read_run(Path(run_dir).expanduser(), None))
    return {name: figure for name, figure in figures.items() if figure is not None}
