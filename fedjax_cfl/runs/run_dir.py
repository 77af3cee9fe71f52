"""The directory of a run: whether it may be used, and what an unfinished run has in it."""

from pathlib import Path

from fedjax_cfl.errors import InputError

# what an unfinished run has in its directory
RUN_FILES = {
    ".hydra",
    ".lock",
    "metrics.jsonl",
    "assignments.part",
    "run.log",
    "checkpoints",
    "best",
    "tensorboard",
    "wandb",
    "mlflow-run.txt",
}


def check_run_dir(run_dir: str, resume: str) -> Path:
    """Returns the path of a run directory. Raises InputError if it holds something that
    `resume` (auto | must | never) does not allow.
    """
    path = Path(run_dir)
    try:
        if path.exists() and not path.is_dir():
            raise InputError(
                f"run_dir={run_dir}: already exists and is not a directory; choose another"
            )
        found = list(path.iterdir()) if path.exists() else []
        names = {inside.name for inside in found} - {".lock"}
        for inside in found:  # a pipe would never answer
            if inside.exists() and not (inside.is_file() or inside.is_dir()):
                raise InputError(
                    f"run_dir={run_dir}: {inside.name} in it is neither a file nor a folder;"
                    " remove it, or choose another"
                )
    except OSError as error:
        raise InputError(f"run_dir={run_dir}: cannot be used: {error.strerror}") from None
    if resume == "must" and "checkpoints" not in names:
        raise InputError(f"resume=must: {run_dir} has no checkpoint to resume from")
    if names and (resume == "never" or not ("checkpoints" in names or names <= RUN_FILES)):
        raise InputError(f"run_dir={run_dir}: already exists and is not empty; choose another")
    return path


def make_dir(path: Path) -> Path:
    """Makes a run directory and returns its path."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run_dir={path}: cannot be made: {error.strerror}") from None
    return path
