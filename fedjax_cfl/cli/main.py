"""The command line: Hydra composes a configuration, the parts are built from it, the
run writes its directory.

With `command_line` the only file that imports hydra; nothing below sees a configuration
object.
"""

import contextlib
import copy
import importlib.metadata
import io
import os
import shutil
import sys
import textwrap
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedjax_cfl.cli.build import assemble, build, build_algorithm, resolve_settings
from fedjax_cfl.cli.overrides import CONF, precheck
from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.runs import grid
from fedjax_cfl.runs.lock import lock
from fedjax_cfl.runs.results import atomic_write
from fedjax_cfl.runs.resume import resume_run, sync_resume
from fedjax_cfl.runs.run_dir import make_dir
from fedjax_cfl.runs.session import Member, train_run
from fedjax_cfl.simulation.compilation import use_compile_cache

COMMANDS = {
    "compare": "fedjax_cfl.runs.compare",
    "doctor": "fedjax_cfl.cli.doctor",
    "download": "fedjax_cfl.cli.download",
    "paper": "fedjax_cfl.papers.runner",
}


def main() -> int:
    """Runs a verb, or a run; returns the exit status: 0 done, 2 bad input (one line on stderr)."""
    arguments = sys.argv[1:]
    sys.path.append(
        os.getcwd()
    )  # for a `_target_` of the user's own; last, so that it shadows nothing
    try:
        if arguments and arguments[0] in COMMANDS:
            return run_command(*arguments)
        if arguments == ["--version"]:
            print(f"fedjax-cfl {importlib.metadata.version('fedjax-cfl')}")
            return 0
        sys.argv[1:] = precheck(arguments, COMMANDS)
        with wrap_help() if {"--help", "-h"} & set(arguments) else contextlib.nullcontext():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(
                run_config
            )()
        return 0
    except InputError as error:
        return print_error(error)
    except KeyboardInterrupt:
        print("fedjax-cfl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_command(name: str, *arguments: str) -> int:
    """Runs a verb, a module of its own that is imported only here: plotting alone takes
    a second to import.
    """
    own = importlib.import_module(COMMANDS[name])
    return (
        own.main(list(arguments), CONF, resolve_settings, assemble)
        if name == "paper"
        else own.main(list(arguments))
    )


@contextlib.contextmanager
def wrap_help():
    """Folds what is printed meanwhile: Hydra gives each group of choices one line,
    however many there are.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()) as held:
            yield
    finally:  # Hydra exits by itself
        for line in held.getvalue().splitlines():
            print(textwrap.fill(line, 130, subsequent_indent="  ") if len(line) > 140 else line)


def print_error(error: Exception | str) -> int:
    """Prints bad input as one line and returns its exit status."""
    if str(error):  # empty: process 0 has said it
        print("fedjax-cfl: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


def run_config(config: DictConfig) -> None:
    """Builds and runs one configuration; Hydra calls it once, or once per run of a sweep."""
    resolved = OmegaConf.to_container(config, resolve=True)
    alone = HydraConfig.get().mode == RunMode.RUN
    run_dir = Path(
        str(resolved["run_dir"]) if alone else HydraConfig.get().runtime.output_dir
    ).absolute()
    try:
        use_compile_cache()
        axes = grid.grid_axes(resolved)
        status = run_grid(config, axes, run_dir) if axes else run_one(config, resolved, run_dir)
        if status:
            sys.exit(status)
    except (RunError, OSError) as error:
        print_error(
            f"run_dir={run_dir}: {error.strerror or error}" if isinstance(error, OSError) else error
        )
        sys.exit(1)
    except InputError as error:
        if not alone and sorted(path.name for path in run_dir.parent.rglob("*")) == sorted(
            ["multirun.yaml", run_dir.name]
        ):
            shutil.rmtree(
                run_dir.parent
            )  # of a sweep that never began Hydra has left just these two
        sys.exit(print_error(error))


def run_one(config: DictConfig, resolved: dict, run_dir: Path) -> int:
    """Builds and runs one configuration in its directory; returns the exit status."""
    algorithm, _, data, drift, mesh = parts = build(config, resolved)
    asked = list(HydraConfig.get().overrides.task)
    with contextlib.ExitStack() as locks:

        def begin():
            locks.enter_context(lock(make_dir(run_dir)))
            start = resume_run(resolved, run_dir, *parts)
            record(config, asked, run_dir)
            return start

        start = sync_resume(begin, resolved, algorithm, data, drift, mesh)
        member = Member(resolved, asked, run_dir)
        return train_run(member, HydraConfig.get().runtime.choices, parts, start)


def run_grid(config: DictConfig, axes: dict[str, list], run_dir: Path) -> int:
    """Builds the runs of a grid and trains them as one program; returns the exit status."""
    shared = [
        text
        for text in HydraConfig.get().overrides.task
        if text.partition("=")[0] not in (*axes, "vectorize", "seeds", "run_dir")
    ]
    members, parts = [], {}
    for point, folder in zip(grid.grid_points(axes), grid.run_folders(run_dir, axes), strict=True):
        own = copy.deepcopy(config)
        for name, value in {**point, "vectorize": [], "seeds": 1, "run_dir": str(folder)}.items():
            OmegaConf.update(own, name, value)
        resolved = OmegaConf.to_container(own, resolve=True)
        members.append(
            Member(
                resolved, [*shared, *(f"{name}={value}" for name, value in point.items())], folder
            )
        )
        if resolved["seed"] not in parts:
            parts[resolved["seed"]] = own, build(own, resolved)
    own, (_, task, data, _, mesh) = next(iter(parts.values()))
    resolved = OmegaConf.to_container(own, resolve=True)

    def make(values):
        return build_algorithm(own, resolved, task, data, mesh, values)

    with contextlib.ExitStack() as locks:
        for member in members:
            locks.enter_context(lock(make_dir(member.run_dir)))
        until, starts = grid.common_step(grid.run_folders(run_dir, axes)), []
        for member in members:
            _, built = parts[member.config["seed"]]
            starts.append(resume_run(member.config, member.run_dir, *built, until=until))
            record(OmegaConf.create(member.config), member.overrides, member.run_dir)
        built = [built for _, built in parts.values()]
        return grid.train_grid(
            members, HydraConfig.get().runtime.choices, axes, built, make, starts, run_dir
        )


def record(config: DictConfig, overrides: list[str], run_dir: Path) -> None:
    """Writes what was asked for to .hydra/, as Hydra itself would."""
    folder = run_dir / ".hydra"
    folder.mkdir(exist_ok=True)
    for name, value in (
        ("config", config),
        ("overrides", OmegaConf.create(overrides)),
        ("hydra", HydraConfig.get()),
    ):
        with atomic_write(folder / f"{name}.yaml") as temporary:
            OmegaConf.save(value, temporary)
