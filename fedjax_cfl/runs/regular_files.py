"""Files of a run directory, read and hashed: a pipe among them would never answer."""

import contextlib
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from fedjax_cfl.errors import InputError


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file for reading. Raises ValueError for a pipe or a device, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is opened at once
    with open(descriptor, "rb") as handle:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        yield handle


def read_regular(path: Path) -> bytes:
    """Returns the bytes of a file. Raises ValueError as `open_regular` does."""
    with open_regular(path) as handle:
        return handle.read()


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file. Raises ValueError as `open_regular` does."""
    with open_regular(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Raises InputError, in a line, for whatever damage does to a reader of a file."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{path}: cannot be read: {explain(error)}") from None


def check_run(written: str | None, run_id: str | None) -> None:
    """Raises ValueError for a file in which another run than `run_id` is noted; None: any."""
    if written and run_id and written != run_id:
        raise ValueError("it is of another run than the files beside it; put back this run's own")


def explain(error: Exception) -> str:
    """Returns why a file cannot be read or written, in a line."""
    if system := re.search(r"os_error_code='(\d+)'", str(error)):  # at the end of Orbax's long text
        return os.strerror(int(system[1]))
    said = error.strerror if isinstance(error, OSError) else None
    text = said or str(error) or type(error).__name__
    return " ".join(text.split())[:300]
