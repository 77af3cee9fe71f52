"""The command line: a verb, a flag that shows something, or a run that Hydra composes.

What a run needs is imported only for a run: `--help` and `--version` answer without JAX.
"""

import argparse
import contextlib
import importlib
import io
import os
import shlex
import sys
import textwrap
import traceback
from collections.abc import Iterator
from typing import Any

from fedjax_cfl.cli.conf import CONF, HERE
from fedjax_cfl.cli.outputs import guard_outputs, print_error, report_lost_output
from fedjax_cfl.errors import InputError, as_command
from fedjax_cfl.runs.labels import find_version

COMMANDS = {
    "compare": "fedjax_cfl.analysis.compare",
    "doctor": "fedjax_cfl.cli.doctor",
    "download": "fedjax_cfl.cli.download",
    "paper": "fedjax_cfl.cli.paper",
    "predict": "fedjax_cfl.cli.predict",
    "rank": "fedjax_cfl.analysis.ranks",
    "report": "fedjax_cfl.analysis.report",
    "tune": "fedjax_cfl.cli.tune",
}
SAFE, PATH = "PYTHONSAFEPATH", "PYTHONPATH"
INFO_FLAGS = ("help", "hydra_help", "shell_completion", "info")  # which show something


def main() -> int:
    """Runs what the command line asks for; returns the exit status: 0 done, 1 it could
    not go on, 2 bad input (one line on stderr), 130 interrupted.
    """
    guarded = guard_outputs()
    try:
        with guard_children(), as_command():
            status = run_arguments(sys.argv[1:])
    except InputError as error:
        status = print_error(error)
    except KeyboardInterrupt:
        print("fedjax-cfl: interrupted", file=sys.stderr)
        status = 130
    except SystemExit as ended:  # of argparse, Hydra, or a run
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return (status or 1) if report_lost_output(guarded) else status


@contextlib.contextmanager
def guard_children() -> Iterator[None]:
    """Lets no process that is started meanwhile import what lies in the current folder.

    Workers of a launcher are started as `python -m`, with the current folder first on their
    path: a file joblib.py or pickle.py there would be executed. In the environment it holds for
    their own processes as well. A checkout that is not installed has to be named then.
    """
    before = {name: os.environ.get(name) for name in (SAFE, PATH)}
    os.environ[SAFE] = "1"
    if find_version("fedjax-cfl") is None:
        named = (before[PATH] or "").split(os.pathsep)
        os.environ[PATH] = os.pathsep.join(dict.fromkeys([*filter(None, named), str(HERE.parent)]))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_arguments(arguments: list[str]) -> int:
    """Runs a verb, or hands checked arguments to Hydra; returns the exit status."""
    if arguments and arguments[0] in COMMANDS:
        return run_command(*arguments)
    if arguments == ["--version"]:
        print(f"fedjax-cfl {find_version('fedjax-cfl') or '(source tree, not installed)'}")
        return 0
    given, flags = parse_flags(arguments)
    own = [text for text in given.overrides if text.lstrip("+~").startswith("hydra")]
    sweep = None
    if any(getattr(given, flag) for flag in INFO_FLAGS):
        sys.argv[1:] = flags + given.overrides
    else:
        from fedjax_cfl.cli.names import check_names

        asked, choices = check_names(given, COMMANDS)  # before anything imports JAX
        from fedjax_cfl.cli.overrides import precheck
        from fedjax_cfl.cli.sweep import write_index

        request = precheck(given, asked, choices)
        sweep = request.sweep
        if sweep:
            write_index(sweep.folder, sweep.points)
        if not flags and not own:
            run_composed(request.config)
            return 0
        sys.argv[1:] = flags + request.overrides
    with wrap_help() if given.help else contextlib.nullcontext():
        run_hydra([] if given.multirun else own)
    if sweep:
        print(f"all runs in one table: fedjax-cfl compare {shlex.quote(str(sweep.folder))}")
    return 0


def parse_flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns Hydra's reading of the arguments, and those of them that are flags. Raises
    InputError for flags that do not exist, contradict one another or are not allowed.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse_flag
    given = parser.parse_intermixed_args(arguments)
    if given.experimental_rerun is not None:
        raise InputError(
            "--experimental-rerun: not allowed, because a pickle can run any code; the same"
            " command with the same run_dir goes on with a run"
        )
    if given.shell_completion and not any("=" in text for text in given.overrides):
        raise InputError(
            "--shell-completion: say for which shell, as in"
            ' eval "$(fedjax-cfl --shell-completion install=bash)"; bash, fish or zsh'
        )
    if given.run + given.multirun + bool(given.cfg) > 1 or (given.resolve and not given.cfg):
        raise InputError(
            "--run, --multirun and --cfg exclude one another, and --resolve goes with --cfg; see"
            " --help"
        )
    return given, [argument for argument in arguments if argument not in given.overrides]


def _refuse_flag(message: str):
    raise InputError(
        f"{message.removeprefix('unrecognized arguments: ')}: no such flag; settings are KEY=VALUE"
        " without dashes; see --help"
    )


def run_composed(config: Any) -> None:
    """Runs a configuration that has been composed already, as Hydra would."""
    from hydra.core.hydra_config import HydraConfig

    config.hydra.runtime.output_dir = os.getcwd()
    HydraConfig.instance().set_config(config)
    run_config(config)


def run_hydra(own: list[str]) -> None:
    """Lets Hydra compose what `sys.argv` asks for and call `run_config`. Raises InputError where
    it cannot use `own`, what the command line says of its own settings.
    """
    import hydra

    if own:  # else it shows by itself where in its own code it failed
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run_config)()
    except Exception as error:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not own or run_config.__code__ in frames:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{' '.join(own)}: Hydra cannot use it: {reason}") from None


def run_config(config: Any) -> None:
    """Runs one configuration; Hydra calls it once, or once per run of a sweep, then maybe
    in another process.
    """
    from fedjax_cfl.cli import launch

    launch.run(config)


def run_command(name: str, *arguments: str) -> int:
    """Runs a verb, a module of its own that is imported only here: plotting alone takes
    a second to import.
    """
    return importlib.import_module(COMMANDS[name]).main(list(arguments)) or 0


@contextlib.contextmanager
def wrap_help() -> Iterator[None]:
    """Folds what is printed meanwhile: Hydra gives each group of choices one line,
    however many there are.
    """
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held):
            yield
    finally:  # Hydra exits by itself
        for line in held.getvalue().splitlines():
            print(textwrap.fill(line, 130, subsequent_indent="  ") if len(line) > 140 else line)
