"""The one exception for bad input: its text is a single line that names the field, the
value and what is allowed. And warnings, a line each.
"""

import argparse
import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator


class InputError(ValueError):
    """Bad config, data, file or checkpoint. The command line prints it as one line and
    exits with status 2.
    """


class SaidBefore(InputError):
    """What another line on stderr has said; the command line prints nothing more."""


class FinishedRun(InputError):
    """A directory holds the run already, finished. A sweep passes over it."""


class RunError(RuntimeError):
    """A run cannot go on. The command line prints it as one line and exits with status 1."""


class NonFiniteUpdate(RunError):
    """A client sent an update that is not finite and `faults.nonfinite` is raise; names
    round, client and layer.
    """


def suggest_nearest(name: str, options: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the closest of `options`, or an empty string."""
    close = difflib.get_close_matches(str(name), list(options), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def suggest_options(name: str, options: Iterable[str]) -> str:
    """Returns the rest of a message about an unknown name: the nearest option, or all of them."""
    options = sorted(options)
    return suggest_nearest(name, options) or f"; allowed: {', '.join(options)}"


def parse_arguments(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Returns what a verb of the command line was given. Raises InputError for what it does
    not take.
    """

    def refuse(message: str):
        raise InputError(f"{message}; see {parser.prog} --help")

    parser.error = refuse
    return parser.parse_intermixed_args(arguments)


def warn(line: str) -> None:
    """Prints a warning on stderr: something is missing or lost, and the run goes on."""
    print(f"fedjax-cfl: warning: {line}", file=sys.stderr)


# what the command that runs has said; None: a program calls, and every call says what
# it has found
_said: set[str] | None = None


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """Lets lines be new once in all that runs meanwhile, as the runs of a sweep."""
    global _said
    _said = set()
    try:
        yield
    finally:
        _said = None


def is_new(line: str) -> bool:
    """Returns whether a line has not been said yet by the command that runs, which is to say it."""
    if _said is None:
        return True
    new = line not in _said
    _said.add(line)
    return new


def warn_of_file(line: str) -> None:
    """Prints a warning about what a file holds; in a command, whose runs may all read it, once."""
    if is_new(line):
        warn(line)
