"""Builds, runs and records what one configuration describes: a run, or a grid of runs.

Nothing below `cli` sees a configuration object.
"""

import contextlib
import copy
import functools
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedjax_cfl.cli import build
from fedjax_cfl.cli.conf import GC_THRESHOLD, resolve_config
from fedjax_cfl.cli.extras import measure_extras
from fedjax_cfl.cli.outputs import print_error
from fedjax_cfl.cli.settings import complete_settings, grid_axes
from fedjax_cfl.cli.sweep import find_obstacle, run_folders, vary_data, write_index
from fedjax_cfl.client.local import Local
from fedjax_cfl.errors import FinishedRun, InputError, RunError, is_new
from fedjax_cfl.library import draw_curves
from fedjax_cfl.runs.finish import Member, attempt
from fedjax_cfl.runs.results import INDEX_FILE
from fedjax_cfl.runs.resume import resume_grid
from fedjax_cfl.runs.run_dir import lock, make_dir
from fedjax_cfl.runs.session import grid_points, make_console, train_grid, train_in_dir
from fedjax_cfl.runs.settings import CheckpointSettings, RunSettings, digest_data
from fedjax_cfl.simulation.compiler import explain_cache, use_compile_cache
from fedjax_cfl.simulation.program import Store
from fedjax_cfl.simulation.rounds import Plan, Setup
from fedjax_cfl.simulation.vectorize import NotMapped

STORE = Store()  # of all runs of a sweep, which Hydra runs in one process, one after another


class Job(NamedTuple):
    """What Hydra starts: one configuration, of one run or of several in folders of their own."""

    config: DictConfig
    settings: dict[str, Any]  # the same, resolved
    run_dir: Path
    alone: bool  # the command starts no other, with which it will be compared


class Run(NamedTuple):
    """One run: the settings that it would have alone, its overrides and its directory."""

    settings: dict[str, Any]
    overrides: list[str]
    run_dir: Path
    may_shrink: bool  # see `build.shrink_cohort`


@explain_cache()
def run(config: DictConfig) -> int:
    """Builds and runs one configuration in its directory, or several below it; returns the exit
    status: 0, or 1 or 2 after one line on stderr that says why. Ends the process where a signal
    stops the run, which a sweep does not outlive.
    """
    if not gc.get_freeze_count():
        # what is imported stays: looking through it for garbage takes a tenth of tracing's time
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)
    show_notes()
    settings = complete_settings(resolve_config(config))
    alone = HydraConfig.get().mode == RunMode.RUN
    run_dir = settings["run_dir"] if alone else HydraConfig.get().runtime.output_dir
    job = Job(config, settings, Path(str(run_dir)).absolute(), alone)
    try:
        use_compile_cache()
        axes = grid_axes(settings)
        status = run_several(job, axes) if axes else run_one(*list_runs(job, axes), draws=alone)
    except FinishedRun as error:
        if alone:
            return print_error(error)
        return pass_over(error)
    except (RunError, InputError, OSError) as error:
        status = report_failure(error, job.run_dir)
        if not alone:  # Hydra makes the numbered folder of a run within a sweep
            with contextlib.suppress(OSError):
                job.run_dir.rmdir()
        elif status == 2:
            remove_unused(job.run_dir)
        return status
    if status >= 128:
        folder = job.run_dir if alone else job.run_dir.parent
        line = f"the same command with run_dir={folder} goes on from there"
        make_console().print(line, markup=False)
        sys.exit(status)
    return status


class Notes(logging.Handler):
    """Prints what the parts of a run note about it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one line."""
        print(record.getMessage())


def show_notes() -> None:
    """Lets this process print notes of `build`, which other programs leave to their logging."""
    notes = logging.getLogger(build.__name__)
    notes.handlers, notes.propagate = [Notes()], False
    notes.setLevel(logging.INFO)


def list_runs(job: Job, axes: dict[str, list]) -> list[Run]:
    """Returns the runs of a configuration, one for each combination of the values of `axes`."""
    asked: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    # a cohort that was asked for is not made smaller
    may_shrink = OmegaConf.is_interpolation(job.config, "clients_per_round")
    if not axes:
        return [Run(job.settings, list(map(str, asked)), job.run_dir, may_shrink)]
    several = (*axes, "vectorize", "seeds", "run_dir")
    shared = [str(text) for text in asked if str(text).partition("=")[0] not in several]
    runs = []
    for point, folder in zip(grid_points(axes), run_folders(job.run_dir, axes), strict=True):
        own = copy.deepcopy(job.config)
        for name, value in {**point, "vectorize": [], "seeds": 1, "run_dir": str(folder)}.items():
            OmegaConf.update(own, name, value)
        overrides = [*shared, *(f"{name}={value}" for name, value in point.items())]
        runs.append(Run(complete_settings(resolve_config(own)), overrides, folder, may_shrink))
    return runs


def run_one(run: Run, draws: bool) -> int:
    """Builds and trains one run in its directory; returns the exit status. `draws`: it has curves
    of its own, no other run is compared with it.
    """
    setup, local = build.build(run.settings, run.may_shrink)
    inputs = build.find_inputs(run.settings, setup, local, STORE)
    member = make_member(run, setup, local, digest_data(setup.data))
    if draws and run.settings["curves"]:
        member = member._replace(draw=draw_curves)
    return train_in_dir(member, setup, inputs)


def make_member(run: Run, setup: Setup, local: Local, data_digest: str) -> Member:
    """Returns one run of a session; `local` is how the clients of its `setup` train, `data_digest`
    is that of its data.
    """
    config = run.settings
    settings = RunSettings(
        **{name: config[name] for name in ("seed", "clients_per_round", "assignments", "resume")},
        **{name: config["evaluate"][name] for name in ("choose", "patience")},
        plan=Plan(**{name: config[name] for name in Plan._fields}),
        width=local.execution.width,
        checkpoint=CheckpointSettings(**config["checkpoint"]),
        data_digest=data_digest,
        choices=dict(HydraConfig.get().runtime.choices),
        everything=config,
    )
    trackers, callbacks = build.build_callbacks(config)
    extras = functools.partial(measure_extras, config, setup, local)
    return Member(settings, run.overrides, run.run_dir, trackers, callbacks, extras)


# several runs


def run_several(job: Job, axes: dict[str, list]) -> int:
    """Runs a grid, as one program where `vectorize` asks for it and it can be; returns the exit
    status. `axes` has the values of each setting.
    """
    if job.settings["vectorize"]:
        try:
            if (obstacle := find_obstacle(job.settings, axes)) is not None:
                raise NotMapped(obstacle)
            return run_grid(job, axes)
        except NotMapped as error:
            print(f"vectorize: the runs follow one another: {error}")
    return run_series(job, axes)


def run_series(job: Job, axes: dict[str, list]) -> int:
    """Runs several runs one after another, by the same compiled programs, and compares them;
    returns the exit status. Raises FinishedRun where all have been run before.
    """
    passed, statuses, runs = [], [], list_runs(job, axes)
    STORE.varied = vary_data([run.settings for run in runs])
    for run in runs:
        try:
            statuses.append(run_one(run, draws=False))
        except FinishedRun as error:
            passed.append(error)
            statuses.append(0)
        except (RunError, InputError, OSError) as error:
            statuses.append(report_failure(error, run.run_dir))
            continue
        write_index(job.run_dir, grid_points(axes))
        if statuses[-1] >= 128:
            return statuses[-1]
    if len(passed) == len(runs):
        raise FinishedRun(f"run_dir={job.run_dir}: {str(passed[-1]).partition(': ')[2]}")
    for finished in passed:
        pass_over(finished)
    return end_runs(statuses, job.run_dir, job.settings["curves"] and job.alone)


def run_grid(job: Job, axes: dict[str, list]) -> int:
    """Builds the runs of a grid and trains them as one program; returns the exit status. Raises
    NotMapped where they cannot be one.
    """
    runs = list_runs(job, axes)
    built: dict[int, tuple[Setup, Local]] = {}  # of each seed
    for run in runs:
        if run.settings["seed"] not in built:
            built[run.settings["seed"]] = build.build(run.settings, run.may_shrink)
    digests = {seed: digest_data(setup.data) for seed, (setup, _) in built.items()}
    members = []
    for run in runs:
        seed = run.settings["seed"]
        setup, local = built[seed]
        if run.may_shrink:
            build.shrink_cohort(run.settings, setup.data.num_clients)  # `build` did for one
        local = local.replace(lr=run.settings["local"]["lr"])  # which members may differ in
        members.append(make_member(run, setup, local, digests[seed]))
    config = runs[0].settings
    first, local = built[config["seed"]]

    def make(values):
        parts = first.task, first.data, local
        return build.build_algorithm(config, *parts, values=values, runs_as_one=True), first.drift

    # some rules are between two values, and see no traced ones
    for point in grid_points({name: each for name, each in axes.items() if name != "seed"}):
        make(point)
    setups = {seed: setup for seed, (setup, _) in built.items()}
    with contextlib.ExitStack() as locks:
        for member in members:
            locks.enter_context(lock(make_dir(member.run_dir)))
        begun = [(each.settings, each.run_dir, setups[each.settings.seed]) for each in members]
        starts = resume_grid(begun)
        write_index(job.run_dir, grid_points(axes))
        status = train_grid(members, axes, list(setups.values()), make, starts)
    if not status and config["curves"] and job.alone:
        compare_runs(job.run_dir)
    return status


# how runs end


def report_failure(error: Exception, run_dir: Path) -> int:
    """Prints why a run has failed, once where many runs of a command fail alike; returns its exit
    status: 2 for bad input, or 1.
    """
    status = 2 if isinstance(error, InputError) else 1
    if isinstance(error, OSError):
        return print_error(f"run_dir={run_dir}: {error.strerror or error}", status)
    return print_error(error, status) if is_new(str(error)) else status


def pass_over(finished: FinishedRun) -> int:
    """Says that a run of several is there already; returns the exit status."""
    print(f"{str(finished).partition(';')[0]}; passed over")
    return 0


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
