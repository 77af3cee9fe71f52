"""Builds, runs and records what one configuration describes: a run, or a grid of runs.

Nothing below `cli` sees a configuration object.
"""

import contextlib
import copy
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedjax_cfl.cli.build import (
    build,
    build_algorithm,
    build_callbacks,
    build_settings,
    find_inputs,
    shrink_cohort,
)
from fedjax_cfl.cli.conf import resolve_config
from fedjax_cfl.cli.extras import build_extras
from fedjax_cfl.cli.outputs import print_error
from fedjax_cfl.cli.settings import complete_settings
from fedjax_cfl.cli.sweep import find_obstacle, grid_axes, run_folders, write_index
from fedjax_cfl.client.local import Local
from fedjax_cfl.errors import FinishedRun, InputError, RunError, is_new
from fedjax_cfl.library import draw_curves
from fedjax_cfl.runs.finish import Member, attempt
from fedjax_cfl.runs.grid import common_step, grid_points, train_grid
from fedjax_cfl.runs.results import INDEX_FILE
from fedjax_cfl.runs.resume import resume_grid
from fedjax_cfl.runs.run_dir import lock, make_dir
from fedjax_cfl.runs.session import make_console, train_in_dir, write_settings
from fedjax_cfl.runs.settings import digest_data
from fedjax_cfl.simulation.compiler import explain_cache, use_compile_cache
from fedjax_cfl.simulation.program import Store
from fedjax_cfl.simulation.rounds import Setup
from fedjax_cfl.simulation.vectorize import NotMapped

STORE = Store()  # of all runs of a sweep, which Hydra runs in one process, one after another


@explain_cache()
def run(config: DictConfig) -> int:
    """Builds and runs one configuration in its directory, or several below it; returns the exit
    status: 0, or 1 or 2 after one line on stderr that says why. Ends the process where a signal
    stops the run, which a sweep does not outlive.
    """
    if not gc.get_freeze_count():
        # what is imported stays: looking through it for garbage takes a tenth of tracing's time
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
    show_notes()
    resolved = complete_settings(resolve_config(config))
    alone = HydraConfig.get().mode == RunMode.RUN
    run_dir = Path(
        str(resolved["run_dir"]) if alone else HydraConfig.get().runtime.output_dir
    ).absolute()
    try:
        use_compile_cache()
        axes = grid_axes(resolved)
        # a cohort that was asked for is not made smaller
        may_shrink = OmegaConf.is_interpolation(config, "clients_per_round")
        if axes:
            status = run_several(config, axes, run_dir, may_shrink, alone)
        else:
            status = run_one(resolved, list_overrides(), run_dir, may_shrink, alone)
        if status >= 128:
            folder = run_dir if alone else run_dir.parent
            make_console().print(
                f"the same command with run_dir={folder} goes on from there", markup=False
            )
            sys.exit(status)
        return status
    except FinishedRun as error:
        if alone:
            return print_error(error)
        pass_over(error)
        return 0
    except (RunError, InputError, OSError) as error:
        status = report_failure(error, run_dir)
        if not alone:  # Hydra makes the numbered folder of a run within a sweep
            with contextlib.suppress(OSError):
                run_dir.rmdir()
        elif status == 2:
            remove_unused(run_dir)
        return status


def report_failure(error: Exception, run_dir: Path) -> int:
    """Prints why a run has failed, once where many runs of a command fail alike; returns its exit
    status: 2 for bad input, or 1.
    """
    line = str(error)
    if isinstance(error, OSError):
        line = f"run_dir={run_dir}: {error.strerror or error}"
    if is_new(line):
        print_error(line)
    return 2 if isinstance(error, InputError) else 1


def pass_over(finished: FinishedRun) -> None:
    """Says that a run of several is there already."""
    print(f"{str(finished).partition(';')[0]}; passed over")


class Notes(logging.Handler):
    """Prints what the parts of a run note about it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one line."""
        print(record.getMessage())


def show_notes() -> None:
    """Lets this process print notes of `build`, which other programs leave to their logging."""
    notes = logging.getLogger(build.__module__)
    notes.handlers, notes.propagate = [Notes(logging.INFO)], False
    notes.setLevel(logging.INFO)


def remove_unused(folder: Path) -> None:
    """Removes what a run, a grid or a sweep that never began has written, if that is all there is,
    and its folder, unless that is the current one or holds it.
    """
    folder, here = folder.absolute(), Path.cwd()
    inside = sorted(folder.rglob("*"), reverse=True)  # what a folder holds comes before it
    files = [path for path in inside if path.is_symlink() or not path.is_dir()]
    ours = [p.parent.name == ".hydra" or p.name in ("multirun.yaml", INDEX_FILE) for p in files]
    if not files or not all(ours):  # an empty folder may be the user's own
        return
    for path in [*inside, *([] if folder in (here, *here.parents) else [folder])]:
        path.rmdir() if path.is_dir() else path.unlink()


def run_one(
    resolved: dict[str, Any],
    overrides: list[str],
    run_dir: Path,
    may_shrink: bool,
    draws: bool,
) -> int:
    """Builds and runs one configuration in its directory; returns the exit status.

    Args: `resolved` are its settings, `overrides` those of the command line; `may_shrink`: see
    `build.shrink_cohort`; `draws`: it has curves of its own, no other run is compared with it.
    """
    setup, local = build(resolved, may_shrink)
    inputs = find_inputs(resolved, setup, local, STORE)
    digest = digest_data(setup.data)
    member = make_member(resolved, overrides, run_dir, setup, local, digest, draws)
    return train_in_dir(member, setup, inputs, write_settings)


def run_several(
    settings: DictConfig, axes: dict[str, list], run_dir: Path, may_shrink: bool, alone: bool
) -> int:
    """Runs a grid, as one program where `vectorize` asks for it and it can be; returns the exit
    status. The arguments are those of `run_series`.
    """
    if settings["vectorize"]:
        try:
            if (obstacle := find_obstacle(resolve_config(settings), axes)) is not None:
                raise NotMapped(obstacle)
            return run_grid(settings, axes, run_dir, may_shrink, alone)
        except NotMapped as error:
            print(f"vectorize: the runs follow one another: {error}")
    return run_series(settings, axes, run_dir, may_shrink, alone)


def run_series(
    settings: DictConfig, axes: dict[str, list], run_dir: Path, may_shrink: bool, alone: bool
) -> int:
    """Runs the seeds of a command one after another, by the same compiled programs, and compares
    them; returns the exit status. Raises FinishedRun where all have been run before.

    Args: `axes` has the seeds; `may_shrink`: see `build.shrink_cohort`; `alone`: the command has no
    other runs, with which they will be compared.
    """
    passed, statuses, members = [], [], list_members(settings, axes, run_dir)
    for config, overrides, folder in members:
        try:
            statuses.append(run_one(config, overrides, folder, may_shrink, draws=False))
        except FinishedRun as error:
            passed.append(error)
            statuses.append(0)
        except (RunError, InputError, OSError) as error:
            statuses.append(report_failure(error, folder))
            continue
        write_index(run_dir, grid_points(axes))
        if statuses[-1] >= 128:
            return statuses[-1]
    if len(passed) == len(members):
        raise FinishedRun(f"run_dir={run_dir}: {str(passed[-1]).partition(': ')[2]}")
    for finished in passed:
        pass_over(finished)
    return end_runs(statuses, run_dir, settings["curves"] and alone)


def end_runs(statuses: Sequence[int], folder: Path, curves: bool) -> int:
    """Compares the runs of a folder, if there shall be `curves`, and names those that failed, by
    their exit statuses; returns the exit status of all.
    """
    failed = [str(number) for number, status in enumerate(statuses) if status]
    if len(failed) == len(statuses):
        remove_unused(folder)
        return max(statuses)
    if curves:
        compare_runs(folder)
    if failed:
        print_error(
            f"{len(failed)} of {len(statuses)} runs failed, {', '.join(failed)}; the same command"
            f" with run_dir={folder} runs these again"
        )
    return max(statuses)


def compare_runs(folder: Path) -> None:
    """Prints and draws what compares the runs of a folder, in it. They have been written, and it
    can be asked for again: where it fails, a line says so.
    """
    from fedjax_cfl.analysis import compare  # a run alone needs no pandas

    attempt(
        "the runs are not compared", lambda: compare.compare([folder], folder), without_disk=True
    )


def make_member(
    resolved: dict[str, Any],
    overrides: list[str],
    run_dir: Path,
    setup: Setup,
    local: Local,
    data_digest: str,
    draws: bool,
) -> Member:
    """Returns one run of a session.

    Args: `resolved` are its settings, `overrides` those of the command line; `run_dir` is where it
    is written; `setup` is what it is made of, `local` how its clients train; `data_digest` is that
    of the setup's data; `draws`: it draws curves, if its settings want them.
    """
    choices = dict(HydraConfig.get().runtime.choices)
    settings = build_settings(resolved, choices, local.execution.width, data_digest)
    trackers, callbacks = build_callbacks(resolved)
    extras = build_extras(resolved, setup, local)
    member = Member(settings, overrides, run_dir, trackers, callbacks, extras)
    return member._replace(draw=draw_curves) if draws and resolved["curves"] else member


def list_overrides() -> list[str]:
    """Returns the overrides as the command line has them: `${...}` in one is not resolved."""
    asked = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(asked, list)
    return [str(text) for text in asked]


def run_grid(
    settings: DictConfig, axes: dict[str, list], run_dir: Path, may_shrink: bool, alone: bool
) -> int:
    """Builds the runs of a grid and trains them as one program; returns the exit status. The
    arguments are those of `run_series`. Raises NotMapped where they cannot be one.
    """
    described = list_members(settings, axes, run_dir)
    built: dict[int, tuple[Setup, Local]] = {}  # of each seed
    for config, _, _ in described:
        if config["seed"] not in built:
            built[config["seed"]] = build(config, may_shrink)
    setups = {seed: setup for seed, (setup, _) in built.items()}
    for config, _, _ in described if may_shrink else ():
        shrink_cohort(config, setups[config["seed"]].data.num_clients)  # `build` did for one
    digests = {seed: digest_data(setup.data) for seed, setup in setups.items()}
    members = []
    for config, overrides, folder in described:
        setup, local = built[config["seed"]]
        local = local.replace(lr=config["local"]["lr"])  # which members may differ in
        digest = digests[config["seed"]]
        of = setup, local, digest
        members.append(make_member(config, overrides, folder, *of, draws=False))
    config = described[0][0]
    first, local = built[config["seed"]]

    def make(values):
        parts = first.task, first.data, local
        return build_algorithm(config, *parts, values, runs_as_one=True), first.drift

    # some rules are between two values, and see no traced ones
    for point in grid_points({name: each for name, each in axes.items() if name != "seed"}):
        make(point)
    with contextlib.ExitStack() as locks:
        for member in members:
            locks.enter_context(lock(make_dir(member.run_dir)))
        starts = resume_grid(
            [(each.settings, each.run_dir, setups[each.settings.seed]) for each in members],
            common_step(run_folders(run_dir, axes)),
        )
        for member in members:
            write_settings(member)
        write_index(run_dir, grid_points(axes))
        status = train_grid(members, axes, list(setups.values()), make, starts)
    if not status and config["curves"] and alone:
        compare_runs(run_dir)
    return status


def list_members(
    config: DictConfig, axes: dict[str, list], run_dir: Path
) -> list[tuple[dict[str, Any], list[str], Path]]:
    """Returns (settings that it would have alone, overrides, directory) of each run of a grid."""
    shared = [
        text
        for text in list_overrides()
        if text.partition("=")[0] not in (*axes, "vectorize", "seeds", "run_dir")
    ]
    members = []
    for point, folder in zip(grid_points(axes), run_folders(run_dir, axes), strict=True):
        own = copy.deepcopy(config)
        for name, value in {**point, "vectorize": [], "seeds": 1, "run_dir": str(folder)}.items():
            OmegaConf.update(own, name, value)
        overrides = [*shared, *(f"{name}={value}" for name, value in point.items())]
        members.append((complete_settings(resolve_config(own)), overrides, folder))
    return members
