"""The directory of a run: whether it may be used, what an unfinished run has in it, and its lock:
one process at a time.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedjax_cfl.errors import InputError

LOCK = ".lock"
# what an unfinished run has in its directory
RUN_FILES = {
    ".hydra",
    LOCK,
    "metrics.jsonl",
    "assignments.jsonl",
    "run.log",
    "checkpoints",
    "best.npz",
    "tensorboard",
    "wandb",
    "mlflow-run.txt",
}


def check_run_dir(run_dir: str, resume: str) -> None:
    """Raises InputError for a run directory that holds something that `resume` (auto | must |
    never) does not allow.
    """
    path = Path(run_dir)
    try:
        if path.exists() and not path.is_dir():
            raise InputError(
                f"run_dir={run_dir}: already exists and is not a directory; choose another"
            )
        names = {inside.name for inside in refuse_links(path)} - {LOCK}
    except OSError as error:
        raise InputError(f"run_dir={run_dir}: cannot be used: {error.strerror}") from None
    if resume == "must" and "checkpoints" not in names:
        raise InputError(f"resume=must: {run_dir} has no checkpoint to resume from")
    if names and (resume == "never" or not ("checkpoints" in names or names <= RUN_FILES)):
        raise InputError(f"run_dir={run_dir}: already exists and is not empty; choose another")


def refuse_links(path: Path) -> list[Path]:
    """Returns what a directory holds, [] where it is missing. Raises InputError for a symbolic
    link in it, for a run would write to what it leads to, and for a pipe, which would never answer.
    """
    inside = list(path.iterdir()) if path.exists() else []
    for each in inside:
        odd = each.exists() and not (each.is_file() or each.is_dir())
        if each.is_symlink() or odd:
            what = "a link" if each.is_symlink() else "neither a file nor a folder"
            raise InputError(
                f"run_dir={path}: {each.name} in it is {what}; remove it, or choose another"
            )
    return inside


def check_writable(path: Path, given: str) -> None:
    """Raises InputError, which begins with what was `given`, unless a folder can be written, or
    made, at `path`.
    """
    there = next(above for above in (path, *path.absolute().parents) if above.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"{given}: {there} is not a folder that can be written to")


def common_folder(paths: Iterable[str | Path]) -> Path:
    """Returns the folder that all of `paths` lie in, or are: files about runs go there unless
    another is named.
    """
    each = [*map(Path, paths)]
    if len(each) == 1:
        return each[0]
    folder = Path(os.path.commonpath([path.absolute() for path in each]))
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def make_dir(path: Path) -> Path:
    """Makes a run directory and returns its path."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run_dir={path}: cannot be made: {error.strerror}") from None
    return path


@contextlib.contextmanager
def lock(run_dir: str | Path) -> Iterator[None]:
    """Holds a run directory, made if missing, for this process. Raises InputError that names the
    process that holds it.

    The operating system lets go of the lock when its process ends, however it ends, so
    none is ever stale.
    """
    path = Path(run_dir) / LOCK
    guard = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_links(path.parent)
        guard.acquire(timeout=0)
        path.write_text(f"process {os.getpid()} on {os.uname().nodename}")
    except Timeout:
        holder = path.read_text(errors="replace")[:300] if path.is_file() else ""
        raise InputError(f"run_dir={run_dir}: in use by {holder or 'another process'}") from None
    except OSError as error:
        raise InputError(f"run_dir={run_dir}: cannot be locked: {error.strerror}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        guard.release()
