"""The command line: a verb, a flag that shows something, or a run that Hydra composes.

What a run needs is imported only for a run: `--help` and `--version` answer without JAX.
"""

import argparse
import contextlib
import gc
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import yaml

from fedjax_cfl.cli.conf import COMMAND, CONF, GC_THRESHOLD, HERE, open_hydra
from fedjax_cfl.cli.outputs import guard_outputs, print_error, report_lost_output
from fedjax_cfl.errors import InputError, RunError, as_command
from fedjax_cfl.runs.labels import find_version

COMMANDS = {
    "compare": "fedjax_cfl.analysis.compare",
    "doctor": "fedjax_cfl.cli.doctor",
    "download": "fedjax_cfl.data.datasets.download",
    "list": "fedjax_cfl.cli.names",
    "look": "fedjax_cfl.cli.look",
    "paper": "fedjax_cfl.cli.paper",
    "predict": "fedjax_cfl.cli.predict",
    "rank": "fedjax_cfl.analysis.ranks",
    "report": "fedjax_cfl.analysis.report",
    "study": "fedjax_cfl.cli.study",
    "tune": "fedjax_cfl.cli.tune",
}


def enter() -> None:
    """Is the process of the command. `predict` starts no processes and leaves no files open, and
    ends at once: threads of JAX and Arrow that are still at work then could abort a usual exit,
    after its last line.
    """
    os.environ[COMMAND] = "1"
    gc.set_threshold(*GC_THRESHOLD)
    status = main()
    if sys.argv[1:2] == ["predict"]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


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
    except RunError as error:
        status = print_error(error, 1)
    except OSError as error:  # of a name, a folder or a disk that nothing looks at before
        if error.strerror is None:
            raise
        status = print_error(f"{error.filename or 'the current folder'}: {error.strerror}", 1)
    except (ValueError, RuntimeError) as error:  # of JAX, which reads variables of its own
        read = [name for name in os.environ if name.startswith("JAX_")]
        wrong = next((name for name in read if name.lower() in str(error).lower()), None)
        if wrong is None:
            raise
        used = f"{wrong}={os.environ[wrong]}: JAX cannot use it: {error}; correct or unset it"
        status = print_error(used)
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
    before = dict(os.environ)
    os.environ["PYTHONSAFEPATH"] = "1"
    if find_version("fedjax-cfl") is None:
        named = before.get("PYTHONPATH", "").split(os.pathsep)
        paths = dict.fromkeys([*filter(None, named), str(HERE.parent)])
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        yield
    finally:
        for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def run_arguments(arguments: list[str]) -> int:
    """Runs a verb, shows something, or checks and runs what is asked for; returns the exit
    status.
    """
    if arguments and arguments[0] in COMMANDS:  # plotting alone takes a second to import
        return importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:]) or 0
    if arguments == ["--version"]:
        print(f"fedjax-cfl {find_version('fedjax-cfl') or '(source tree, not installed)'}")
        return 0
    parser, given = parse_flags(arguments)
    if given.help:
        text = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["hydra"]["help"]
        print(f"{text['header']}\n\n{text['footer']}")
        return 0
    with open_hydra() as app:
        if given.hydra_help:
            app.hydra_help("config", parser, given)
        elif given.shell_completion:
            app.shell_completion("config", given.overrides)
        elif given.info:
            app.show_info(given.info, "config", given.overrides)
        else:
            return run_settings(app, given)
    return 0


def parse_flags(arguments: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Returns Hydra's parser, and its reading of the arguments. Raises InputError for flags that
    do not exist, contradict one another or are not allowed.
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
    return parser, given


def _refuse_flag(message: str):
    raise InputError(
        f"{message.removeprefix('unrecognized arguments: ')}: no such flag; settings are KEY=VALUE"
        " without dashes; see --help"
    )


def run_settings(app: Any, given: argparse.Namespace) -> int:
    """Checks settings, and runs or shows what they describe; returns the exit status."""
    from fedjax_cfl.cli.names import read_line, text_of

    line = read_line(given.overrides, given.multirun, COMMANDS)  # before JAX is imported
    from fedjax_cfl.cli.settings import check_line

    check_line(line)  # before files and plots can be written
    if given.multirun:
        return run_sweep(app, line)
    if given.cfg:
        overrides = list(map(text_of, line.asked))
        app.show_cfg("config", overrides, given.cfg, given.package, given.resolve)
        return 0
    for override in line.asked:
        if override.key_or_group.startswith("hydra"):
            raise InputError(
                f"{text_of(override)}: settings of Hydra are for sweeps; use -m, or leave it out"
            )
    from hydra.core.hydra_config import HydraConfig

    from fedjax_cfl.cli.sweep import check_folders

    check_folders(line.configs[0])
    HydraConfig.instance().set_config(line.composed)
    return run_config(line.composed)


def run_sweep(app: Any, line: Any) -> int:
    """Runs a sweep, batch by batch of Hydra's; returns its exit status. Raises InputError where
    Hydra cannot use what the command line says of Hydra's own settings.
    """
    from fedjax_cfl.cli import launch, names, sweep

    sweep.suggest_room(line)
    launch.STORE.varied = sweep.vary_data(line.configs)
    folder, overrides = sweep.begin_sweep(line)
    if line.composed.hydra.launcher._target_.endswith(".BasicLauncher"):  # in this process
        app.config_loader.load_sweep_config = names.compose_run
    try:
        batches = app.multirun("config", run_config, overrides)
    except Exception as error:
        own = [names.text_of(each) for each in line.asked if each.key_or_group.startswith("hydra")]
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not own or run_config.__code__ in frames:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{' '.join(own)}: Hydra cannot use it: {reason}") from None
    curves = line.configs[0]["curves"]
    status = launch.end_runs([job.return_value for jobs in batches for job in jobs], folder, curves)
    if not curves and folder.exists():
        print(f"all runs in one table: fedjax-cfl compare {shlex.quote(str(folder))}")
    return status


def run_config(config: Any) -> int:
    """Runs one configuration; returns its exit status. Hydra calls it once per run of a sweep, then
    maybe in another process.
    """
    from fedjax_cfl.cli import launch

    return launch.run(config)
