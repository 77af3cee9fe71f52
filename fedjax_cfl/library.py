"""What callers from Python have of the command line: a run in a directory, comparisons and
reports, as data frames and figures.

What writes files and draws is imported when it is first used, so that a run in memory needs none
of it.
"""

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Required, TypedDict, Unpack, overload

import flax.linen as nn
import jax
from jax.sharding import Mesh

from fedjax_cfl.algorithms import SELECTIONS
from fedjax_cfl.client import Local, make_execution
from fedjax_cfl.data import federate, partition
from fedjax_cfl.data.drift import Drift
from fedjax_cfl.data.drift import none as no_drift
from fedjax_cfl.data.scaling import Scaling, check_scaling, describe_scales
from fedjax_cfl.errors import FinishedRun, InputError
from fedjax_cfl.formatting import shorten, to_frame
from fedjax_cfl.keys import find_seed
from fedjax_cfl.models import MCLR, as_task
from fedjax_cfl.scores import pick_columns
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.simulation import driver
from fedjax_cfl.simulation.callback import Callback
from fedjax_cfl.simulation.driver import Result
from fedjax_cfl.simulation.program import OF_OBJECTS, Inputs, check_data, hold_numbers
from fedjax_cfl.simulation.rounds import Plan, Setup
from fedjax_cfl.simulation.width import choose_width
from fedjax_cfl.system.select import full_participation, uniform
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tasks import count_outputs, kind_of
from fedjax_cfl.types import Algorithm, FederatedData, Key, Partition, Pool, Task
from fedjax_cfl.validation import PositiveInt, Seed, check_value, checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedjax_cfl.runs.load import LoadedRun

CLIENTS_PER_ROUND = 20  # as in conf/dataset/npz.yaml


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


class Options(TypedDict, total=False):
    """What every call of `run` takes."""

    rounds: Required[int]
    eval_every: int
    drift: Drift | None
    discard: Literal["rounds", "met", "none"]
    mesh: Mesh | None
    callbacks: Sequence[Callback]


class DirOptions(Options, total=False):
    """What it takes with a `run_dir` besides."""

    settings: Mapping[str, Any] | None
    scaling: Scaling | None
    verbose: bool


class PartOptions(DirOptions, total=False):
    """What it takes with a recipe besides."""

    run_dir: str | Path | None
    model: nn.Module | None
    local: Local | None
    system: SystemLike | None
    key: Key | None


class Runs(NamedTuple):
    """What `run` returns for several seeds."""

    by_seed: "dict[int, Any]"  # a `Result`, or with a run_dir a `LoadedRun`, of each

    def frame(self) -> "DataFrame":
        """Returns the rows of all as a pandas.DataFrame: a row per seed and test."""
        each = self.by_seed.items()
        return to_frame({"seed": seed} | row for seed, run in each for row in run.rows)

    def __repr__(self) -> str:
        """Shows the last test of each."""
        return "\n".join(f"seed {seed}: {run}" for seed, run in self.by_seed.items())

    def _repr_html_(self) -> str:
        """Shows the last test of each in a notebook."""
        last = ({"seed": seed} | pick_columns(run.rows[-1]) for seed, run in self.by_seed.items())
        return to_frame(last).to_html(index=False)


Data = FederatedData | Pool | tuple[Pool, Partition | Callable[..., Partition]]


@overload
def run(
    algorithm: Algorithm, task: Task, data: FederatedData, key: Key, **options: Unpack[Options]
) -> Result: ...


@overload
def run(
    algorithm: Algorithm,
    task: Task,
    data: FederatedData,
    key: Key,
    *,
    run_dir: str | Path,
    **options: Unpack[DirOptions],
) -> "LoadedRun": ...


@overload
def run(
    algorithm: Callable[..., Algorithm],
    task: Data,
    *,
    seeds: int | Sequence[int],
    **options: Unpack[PartOptions],
) -> Runs: ...


@overload
def run(
    algorithm: Callable[..., Algorithm], task: Data, **options: Unpack[PartOptions]
) -> "Result | LoadedRun": ...


@checked()
def run(
    algorithm: Algorithm | Callable[..., Algorithm],
    task: Any,
    data: FederatedData | None = None,
    key: Key | None = None,
    *,
    rounds: int,
    seeds: Any = None,
    model: nn.Module | None = None,
    local: Local | None = None,
    system: SystemLike | None = None,
    eval_every: int = 1,
    drift: Drift | None = None,
    discard: Literal["rounds", "met", "none"] = "rounds",
    mesh: Mesh | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    scaling: Scaling | None = None,
    verbose: bool = True,
) -> Any:
    """Runs `rounds` rounds, with an evaluation after every `eval_every` and the last: as
    `run(algorithm, task, data, key, rounds=...)` of parts that are made, or as
    `run(cfl.algorithms.ifca(m=4), data, rounds=...)` of a recipe, whose other parts have defaults,
    those of the command line for files of your own; the result names them, in its `settings`.

    With a `run_dir` it is the command line's run: its files are written, a run that was stopped
    goes on, a finished one is read, and what is returned is what `load_run` reads.

    Args: `algorithm` is a method that is made, or a function of (task, local, system) that makes
    one, such as a method of the catalogue called with its settings alone; `data` are on the device
    or on the host, see `prefetch`, and follow a recipe at once, where they may be a pool as well,
    which is dealt by the seed as `partition.auto` does, or (pool, partition); `key` fixes all
    draws, None: that of seed 0; `seeds` is how many seeds are run, from that of `key` on, or a
    list of them, with the same compiled programs, None: one.
    With a recipe: `model` is a Flax module, None: `models.MCLR`; `local` and `system` are as in
    the methods, None: `Local()`, and 20 clients a round, or all, selected as the method's file in
    conf/ says.
    `drift` of None: no data change; `discard` is as in `Plan`; `mesh` of None: every device JAX
    shows; `callbacks` are told of every evaluation as soon as it is known, and where the run stands
    then, see `Callback`.
    With `run_dir`: `settings` are names and values that tell the run from others in tables:
    `algorithm`, `dataset`, `partition` and `model` name its parts, all others are yours; `scaling`
    is what `standardize` returned with `data`: the run keeps it, and its predictions scale samples
    by it; `verbose` shows progress and the final table. Of several seeds each has a folder.
    Raises InputError for data without test samples, for a run that does not fit into memory, and
    for a `run_dir` with another run, or with other settings, in it; NonFiniteUpdate where the
    faults ask for it; KeyboardInterrupt where Ctrl-C stopped it, with a checkpoint.
    """
    plan = Plan(rounds, eval_every, discard)
    kept = {"scaling: is kept in": scaling, "settings: are written to": settings}
    numbers = None if seeds is None else list_seeds(seeds, key)
    key, mesh = jax.random.key(0) if key is None else key, mesh or make_mesh()
    names: dict[str, Any] = {}
    parts = model, local, system
    check_form(algorithm, task, data, parts, kept if run_dir is None else {})
    source = task if data is None else data
    if not isinstance(algorithm, Algorithm):
        data = deal(source, numbers[0] if numbers else find_seed(key))
        algorithm, task, names = make_parts(algorithm, data, *parts, mesh)
    assert data is not None  # see `check_form`
    setup = Setup(algorithm, task, data, drift or no_drift(), mesh, scaling)
    more = {**names, **(settings or {})}, verbose, callbacks
    folder = None if run_dir is None else Path(run_dir).expanduser().absolute()
    if numbers is None:
        return _run_one(setup, plan, key, folder, *more)
    OF_OBJECTS.varied = not isinstance(source, FederatedData)  # each seed deals them otherwise
    runs = {}
    for place, seed in enumerate(numbers):
        dealt = setup._replace(data=deal(source, seed) if place else data)
        inside = folder and folder / str(place)
        key = jax.random.key(seed)
        runs[seed] = _run_one(dealt, plan, key, inside, *more, hold_numbers(setup))
        if folder:  # the same data, also where each seed deals them otherwise
            more[0].setdefault("dataset", runs[seed].summary["dataset"])
    return Runs(runs)


def check_form(algorithm: Any, task: Any, data: Any, parts: tuple, kept: dict[str, Any]) -> None:
    """Raises InputError for a method that is made without its task and data, or with `parts` of a
    recipe, for a recipe with a task, and for what could only be `kept` in a directory.
    """
    for what, given in kept.items():
        if given is not None:
            raise InputError(f"{what} a run_dir; name one, as run_dir='runs/one'")
    if not isinstance(algorithm, Algorithm) and data is not None:
        raise InputError(
            f"algorithm={shorten(algorithm)}: must be Algorithm, with a task; a recipe has data"
            " alone, as run(cfl.algorithms.ifca(m=4), data, model=...)"
        )
    if isinstance(algorithm, Algorithm):
        if data is None or parts != (None, None, None):
            raise InputError(
                "algorithm: is made already; give run(algorithm, task, data, key), or a recipe, as"
                " run(cfl.algorithms.ifca(m=4), data)"
            )
        check_value("task", task, Task)
        check_value("data", data, FederatedData)


def list_seeds(seeds: Any, key: Key | None) -> list[int]:
    """Returns the seeds of a call of `run`. Raises InputError for what are none."""
    if not isinstance(seeds, list | tuple | range):
        first = 0 if key is None else find_seed(key)
        return list(range(first, first + check_value("seeds", seeds, PositiveInt)))
    numbers = [check_value("seeds", seed, Seed) for seed in seeds]
    if not numbers or len({*numbers}) < len(numbers) or key is not None:
        raise InputError(f"seeds={numbers}: must be different whole numbers, without a key")
    return numbers


def deal(data: Any, seed: int) -> FederatedData:
    """Returns the data of a run: those of a pool are dealt by its seed, unless a partition is
    given. Raises InputError for what are no data.
    """
    if isinstance(data, FederatedData):
        return data
    pair: Any = (data, partition.auto) if isinstance(data, Pool) else data
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Pool):
        pool, holdings = pair
        if isinstance(holdings, Partition):
            return federate(pool, holdings)
        if callable(holdings):
            dealt: Any = holdings(pool, seed=seed)
            return federate(pool, dealt)
    raise InputError(
        f"data={shorten(data)}: give what cfl.federate returns, a pool, such as"
        " cfl.from_frame(df, y='label', client='user'), or (pool, partition)"
    )


def make_parts(
    recipe: Callable[..., Algorithm],
    data: FederatedData,
    model: nn.Module | None,
    local: Local | None,
    system: SystemLike | None,
    mesh: Mesh,
) -> tuple[Algorithm, Task, dict[str, Any]]:
    """Returns the method that a recipe makes, its task, and what they are by name; what is None
    has its default, see `run`. Raises InputError where they do not go together.
    """
    if hint := describe_scales(data, "none"):
        warnings.warn(f"{hint}; from Python cfl.standardize(data, 'pool')", stacklevel=3)
    module = model or MCLR()
    targets = None if data.num_classes else kind_of(data)._replace(outputs=count_outputs(data))
    task = as_task(module, data.x.shape[1:], data.num_classes, targets=targets)
    cohort = min(CLIENTS_PER_ROUND, data.num_clients)
    if local is None:
        local = Local(execution=make_execution(mesh))
        local = local.replace(batch_size=min(local.batch_size, data.max_client_samples))
        width = choose_width(local, task, data, cohort)
        local = local.replace(execution=make_execution(mesh, width))
    method: Any = getattr(recipe, "func", recipe)
    name = getattr(method, "__name__", type(method).__name__)
    choose = SELECTIONS.get(name.partition("+")[0], uniform)
    names = {"algorithm": name, "model": type(module).__name__}
    names |= {f"algorithm.{name}": v for name, v in getattr(recipe, "keywords", {}).items()}
    names |= {f"model.{name}": v for name, v in list_changes(module).items()}
    names |= {f"local.{name}": getattr(local, name) for name in ("lr", "epochs", "batch_size")}
    names["selection"] = "as given"
    if system is None:
        drawn = [cohort] * (choose is not full_participation)
        system = choose(*drawn)
        names["selection"] = f"{choose.__name__}({', '.join(map(str, drawn))})"
    return recipe(task, local, system), task, names


def list_changes(module: nn.Module) -> dict[str, Any]:
    """Returns the fields of a module that differ from their defaults, by name."""
    names = [one for one in dataclasses.fields(module) if one.name not in ("parent", "num_classes")]
    values = {one.name: (getattr(module, one.name), one.default) for one in names}
    return {name: value for name, (value, default) in values.items() if value != default}


def _run_one(
    setup: Setup,
    plan: Plan,
    key: Key,
    run_dir: Path | None,
    given: dict[str, Any],
    verbose: bool,
    callbacks: Sequence[Callback],
    inputs: Inputs | None = None,
) -> "Result | LoadedRun":
    """Runs what `run` describes: in memory, or as the command line would."""
    if run_dir is None:
        return driver.run_setup(setup, plan, key, callbacks, inputs)._replace(settings=given)
    from fedjax_cfl.runs.finish import Member
    from fedjax_cfl.runs.from_python import find_module, list_given, make_settings
    from fedjax_cfl.runs.load import load_run
    from fedjax_cfl.runs.session import train_in_dir
    from fedjax_cfl.simulation.compiler import use_compile_cache

    check_data(setup.algorithm, setup.task, setup.drift, setup.data)
    check_scaling(setup.scaling, setup.data)
    use_compile_cache()
    own = make_settings(setup, plan, key, given)
    member = Member(
        own, list_given(given), run_dir, {}, callbacks, draw=draw_curves, verbose=verbose
    )
    with contextlib.suppress(FinishedRun):
        if status := train_in_dir(member, setup, inputs):
            raise KeyboardInterrupt if status == 130 else SystemExit(status)
    return load_run(run_dir, find_module(setup.task), setup.task.targets)


def draw_curves(run_dir: Path, summary: dict[str, Any]) -> None:
    """Draws curves.png of a run that has ended."""
    from fedjax_cfl.analysis import plot  # it takes as long to import as a run to start

    plot.plot_curves(run_dir, summary)


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

    found = command.make_report(list_paths(paths), out, pictures)
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

    return command.draw_run(read_run(Path(run_dir).expanduser()))
