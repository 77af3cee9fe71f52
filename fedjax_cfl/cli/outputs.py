"""Standard output and error that cannot end a run: where no process reads them or nothing
can be written, further output is dropped, and the run's files are written all
the same.
"""

import io
import os
import sys
from typing import Any

from fedjax_cfl.errors import SaidBefore
from fedjax_cfl.formatting import escape_text


class ForgivingOutput(io.FileIO):
    """Writes to a file descriptor until that fails, and nothing from then on."""

    error: OSError | None = None

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Returns how many bytes are dealt with: all."""
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return len(data)


def guard_outputs() -> dict[str, ForgivingOutput]:
    """Replaces sys.stdout and sys.stderr, where they are the process's own, by ones that never
    fail; returns what they write to by name. Those that are closed are opened, with stdin, so that
    no file of a run becomes one of them.
    """
    guarded = {}
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free
        stream, own = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))
            stream = getattr(sys, name)
        elif stream is not own:
            continue  # a test's, or a notebook's
        if name == "stdin":
            continue
        stream.flush()
        guarded[name] = ForgivingOutput(descriptor)
        text = io.TextIOWrapper(
            io.BufferedWriter(guarded[name]),
            stream.encoding,
            "backslashreplace",  # a name that an ASCII terminal has no letters for ends no run
            # a line on stderr is shown at once
            line_buffering=stream.line_buffering or stream.write_through or name == "stderr",
        )
        setattr(sys, name, text)
    return guarded


def report_lost_output(guarded: dict[str, ForgivingOutput]) -> bool:
    """Flushes both outputs. Returns whether some of stdout was lost, which it reports on
    stderr. A reader that has gone, as in `| head`, does not count.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    lost = guarded["stdout"].error if "stdout" in guarded else None
    if lost is None or isinstance(lost, BrokenPipeError):
        return False
    print_error(f"stdout: {lost.strerror}; not all could be printed")
    return True


def print_error(error: Exception | str, status: int = 2) -> int:
    """Prints what went wrong as one line and returns the exit status, that of bad input."""
    if not isinstance(error, SaidBefore):
        print("fedjax-cfl: " + escape_text(" ".join(str(error).split())), file=sys.stderr)
    return status
