"""The flags of the command line: which there are, and which only show something.

Imports neither JAX nor, but for `errors`, anything of the library, so that `--help` answers at
once.
"""

import argparse

from hydra._internal.utils import get_args_parser

from fedjax_cfl.errors import InputError

INFO_FLAGS = ("help", "hydra_help", "shell_completion", "info")


def parse_flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns Hydra's reading of the arguments, and those of them that are flags. Raises
    InputError for flags that do not exist, contradict one another or are not allowed.
    """
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
