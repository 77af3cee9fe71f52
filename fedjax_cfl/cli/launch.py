"""Builds, runs and records what one configuration describes: a run, or a grid of runs.

The only file, with `overrides` and `conf`, that sees a configuration object; nothing below `cli`
does.
"""

import contextlib
import copy
import gc
import shutil
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedjax_cfl.cli.build import build, build_algorithm, build_trackers, find_inputs
from fedjax_cfl.cli.conf import resolve_config
from fedjax_cfl.cli.extras import build_extras
from fedjax_cfl.cli.outputs import print_error
from fedjax_cfl.cli.sweep import INDEX_FILE, write_index
from fedjax_cfl.errors import FinishedRun, InputError, RunError
from fedjax_cfl.runs import grid
from fedjax_cfl.runs.finish import Member
from fedjax_cfl.runs.lock import lock
from fedjax_cfl.runs.results import atomic_write
from fedjax_cfl.runs.resume import resume_grid, resume_run, sync_resume
from fedjax_cfl.runs.run_dir import make_dir
from fedjax_cfl.runs.session import make_console, train_run
from fedjax_cfl.simulation.compiler import use_compile_cache
from fedjax_cfl.simulation.setup import Setup


def run_config(config: DictConfig) -> None:
    """Builds and runs one configuration in its directory, or a grid below it. Exits with
    1 or 2 and one line on stderr where it cannot.
    """
    if not gc.get_freeze_count():
        # what is imported stays: looking through it for garbage takes a tenth of tracing's time
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
    resolved = resolve_config(config)
    alone = HydraConfig.get().mode == RunMode.RUN
    run_dir = Path(
        str(resolved["run_dir"]) if alone else HydraConfig.get().runtime.output_dir
    ).absolute()
    try:
        use_compile_cache()
        axes = grid.grid_axes(resolved)
        status = run_grid(config, axes, run_dir) if axes else run_one(resolved, run_dir)
        if status:
            folder = run_dir if alone else run_dir.parent
            make_console().print(
                f"the same command with run_dir={folder} goes on from there", markup=False
            )
            sys.exit(status)
    except FinishedRun as error:
        if alone:
            sys.exit(print_error(error))
        print(error)
    except (RunError, OSError) as error:
        print_error(
            f"run_dir={run_dir}: {error.strerror or error}" if isinstance(error, OSError) else error
        )
        sys.exit(1)
    except InputError as error:
        if not alone:
            remove_unused_sweep(run_dir)
        sys.exit(print_error(error))


def remove_unused_sweep(run_dir: Path) -> None:
    """Removes the folder of a sweep that never began: all it holds is what was there
    before its first run.
    """
    left = {path.name for path in run_dir.parent.rglob("*")}
    if left == {"multirun.yaml", INDEX_FILE, run_dir.name}:
        shutil.rmtree(run_dir.parent)


def run_one(resolved: dict[str, Any], run_dir: Path) -> int:
    """Builds and runs one configuration in its directory; returns the exit status."""
    setup = build(resolved)
    inputs = find_inputs(resolved, setup)
    asked = list_overrides()
    with contextlib.ExitStack() as locks:

        def begin():
            locks.enter_context(lock(make_dir(run_dir)))
            start = resume_run(resolved, run_dir, setup)
            record(resolved, asked, run_dir)
            return start

        start = sync_resume(begin, resolved, setup)
        extras = build_extras(resolved, setup)
        member = Member(resolved, asked, run_dir, build_trackers(resolved), extras)
        return train_run(member, HydraConfig.get().runtime.choices, setup, inputs, start)


def list_overrides() -> list[str]:
    """Returns the overrides as the command line has them: `${...}` in one is not resolved."""
    asked = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(asked, list)
    return [str(text) for text in asked]


def run_grid(settings: DictConfig, axes: dict[str, list], run_dir: Path) -> int:
    """Builds the runs of a grid and trains them as one program; returns the exit status."""
    members = list_members(settings, axes, run_dir)
    setups: dict[int, Setup] = {}  # of each seed
    for member in members:
        if member.config["seed"] not in setups:
            setups[member.config["seed"]] = build(member.config)
    members = [
        member._replace(extras=build_extras(member.config, setups[member.config["seed"]]))
        for member in members
    ]
    config = members[0].config
    first = setups[config["seed"]]

    def make(values):
        parts = first.task, first.data, first.mesh
        return build_algorithm(config, *parts, values, vmap_runs=True), first.drift

    with contextlib.ExitStack() as locks:
        for member in members:
            locks.enter_context(lock(make_dir(member.run_dir)))
        starts = resume_grid(
            [(member.config, member.run_dir, setups[member.config["seed"]]) for member in members],
            grid.common_step(grid.run_folders(run_dir, axes)),
        )
        for member in members:
            record(member.config, member.overrides, member.run_dir)
        write_index(run_dir, grid.grid_points(axes))
        return grid.train_grid(
            members,
            HydraConfig.get().runtime.choices,
            axes,
            list(setups.values()),
            make,
            starts,
            run_dir,
        )


def list_members(config: DictConfig, axes: dict[str, list], run_dir: Path) -> list[Member]:
    """Returns the runs of a grid with the settings that each would have alone."""
    shared = [
        text
        for text in list_overrides()
        if text.partition("=")[0] not in (*axes, "vectorize", "seeds", "run_dir")
    ]
    members = []
    for point, folder in zip(grid.grid_points(axes), grid.run_folders(run_dir, axes), strict=True):
        own = copy.deepcopy(config)
        for name, value in {**point, "vectorize": [], "seeds": 1, "run_dir": str(folder)}.items():
            OmegaConf.update(own, name, value)
        overrides = [*shared, *(f"{name}={value}" for name, value in point.items())]
        settings = resolve_config(own)
        members.append(Member(settings, overrides, folder, build_trackers(settings)))
    return members


def record(resolved: dict[str, Any], overrides: list[str], run_dir: Path) -> None:
    """Writes settings and overrides to .hydra/, as Hydra itself would, with every setting's
    value instead of where it comes from.
    """
    folder = run_dir / ".hydra"
    folder.mkdir(exist_ok=True)
    for name, value in (
        ("config", OmegaConf.create(resolved)),
        ("overrides", OmegaConf.create(overrides)),
        ("hydra", HydraConfig.get()),
    ):
        with atomic_write(folder / f"{name}.yaml") as temporary:
            OmegaConf.save(value, temporary)
