"""The lock of a run directory: one process at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fedjax_cfl.errors import InputError

LOCK = ".lock"


@contextlib.contextmanager
def lock(run_dir: str | Path) -> Iterator[None]:
    """Holds a run directory, made if missing, for this process. Raises InputError that
    names the process that holds it.

    The operating system lets go of the lock when its process ends, however it ends, so
    none is ever stale.
    """
    path = Path(run_dir) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    except BlockingIOError as error:
        raise InputError(f"run_dir={run_dir}: in use by {error.strerror}") from None
    except OSError as error:
        raise InputError(f"run_dir={run_dir}: cannot be locked: {error.strerror}") from None
    try:
        yield
    finally:
        if _is_at(descriptor, path):
            # while the lock is held: who opened it meanwhile finds it gone and tries again
            path.unlink()
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """Returns the descriptor of the locked file, with this process's name in it. Raises
    BlockingIOError with the holder's name.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
                return descriptor
            os.close(descriptor)
        except OSError as error:
            holder = os.read(descriptor, 300).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise (
                BlockingIOError(error.errno, holder)
                if isinstance(error, BlockingIOError)
                else error
            ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
