"""Checkpoints of a run, written whole or not at all and verified when read. Nothing
here is a pickle.

A checkpoint is a folder `<number>-step-<step>`; numbers only grow, so the newest is the
one saved last, whatever its step:
  arrays/          the leaves of the tree, whole rather than per device, in Orbax's format
  large/           leaves of more than LARGE bytes, each a file of NumPy's: written and read without
                   a second copy in memory
  checkpoint.json  format, step, identity, facts; name, type and shape of every leaf
  manifest.json    the SHA-256 of every other file: Orbax alone does not see a flipped byte
It is written as `.unfinished`, flushed to the disk and renamed: a killed run leaves at
most that one folder, for the next save to remove.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.formatting import flatten_settings
from fedjax_cfl.runs import atomic_folder
from fedjax_cfl.runs.atomic_folder import ARRAYS, HEADER

# 1: no SHA-256 of the rows, other fields of the state; 2: no SHA-256 of the groups; 3: clients
# shuffled their samples in another way
FORMAT = 4
NAME = re.compile(r"(\d+)-step-\d+")
LARGE, LARGE_ARRAYS = 2**28, "large"
UNFINISHED = ".unfinished"  # being written or being deleted


class Checkpoint(NamedTuple):
    """What a restore returns."""

    step: int
    tree: Any  # the structure, types and shardings of `like`
    facts: dict[str, Any]


# writing


def save(
    folder: str | Path, step: int, tree: Any, facts: dict, identity: dict, *, keep: int = 3
) -> Path:
    """Saves a pytree of arrays (typed keys included) and two JSON dicts as the newest
    checkpoint of `folder`; returns its path.

    Args: `step` >= 0 is the round; `tree` has the arrays; `facts` is what the run wants back,
    as its counters; `identity` is what a restore must repeat: algorithm, model, sizes; `keep`
    >= 1 is how many checkpoints remain, the newest ones.
    Raises RunError when it cannot be written; what was there before is untouched. One process
    of a multi-host run saves.
    """
    assert keep >= 1 and step >= 0
    folder = Path(folder).absolute()
    named = name_leaves(tree)
    # Orbax refuses empty arrays
    stored = {
        str(n): to_plain_array(name, leaf)
        for n, (name, leaf) in enumerate(named.items())
        if leaf.size
    }
    header = {
        "format": FORMAT,
        "step": int(step),
        "identity": identity,
        "facts": facts,
        "leaves": {name: describe_leaf(leaf) for name, leaf in named.items()},
        "keys": {
            name: str(jax.random.key_impl(leaf)) for name, leaf in named.items() if is_key(leaf)
        },
    }
    text = atomic_folder.to_json(header)
    try:
        path = _write(folder, header["step"], text, stored)
    except Exception as error:  # a full disk reaches us as Orbax's ValueError as well as an OSError
        raise RunError(
            f"checkpoint of step {step} in {folder} could not be written:"
            f" {atomic_folder.explain(error)}"
        ) from None
    finally:
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    _retain(folder, keep)
    return path


def _write(folder: Path, step: int, text: str, stored: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    before = list_checkpoints(folder)
    path = folder / f"{_number(before[-1]) + 1 if before else 1:06d}-step-{step}"
    staging = folder / UNFINISHED
    atomic_folder.remove(staging)
    size = len(text) + sum(array.nbytes for array in stored.values())
    # Orbax notices a full disk too, but leaves threads behind that print tracebacks
    if shutil.disk_usage(folder).free < size + 2**20:  # metadata and whole blocks
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging.mkdir()
    if large := {n: stored.pop(n) for n in [*stored] if stored[n].nbytes > LARGE}:
        (staging / LARGE_ARRAYS).mkdir()
        for n, array in large.items():
            np.save(staging / LARGE_ARRAYS / f"{n}.npy", array, allow_pickle=False)
    if stored:  # Orbax refuses an empty tree
        with _orbax() as (ocp, checkpointer), _plain_name(staging) as plain:
            checkpointer.save(plain / ARRAYS, args=ocp.args.PyTreeSave(stored))
    atomic_folder.write_file(staging / HEADER, text)
    atomic_folder.write_manifest(staging)
    os.replace(staging, path)
    atomic_folder.flush(folder)
    return path


def _retain(folder: Path, keep: int) -> None:
    # A checkpoint leaves its name before its files go, so a killed run shows no half of one.
    # What cannot be deleted now is tried again at the next save: the new checkpoint is safe
    # either way.
    with contextlib.suppress(OSError, InputError):
        for path in list_checkpoints(folder)[:-keep]:
            os.replace(path, folder / UNFINISHED)
            atomic_folder.remove(folder / UNFINISHED)


# reading


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Returns the checkpoints of a folder, the newest last. Raises InputError for a
    folder that cannot be listed.
    """
    try:
        return sorted(
            (path for path in Path(folder).iterdir() if NAME.fullmatch(path.name)), key=_number
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"checkpoints in {folder}: {atomic_folder.explain(error)}") from None


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def load_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the arrays of one checkpoint by leaf name, verified; empty ones are left
    out. For reading a finished run's models.
    """
    path = Path(path).absolute()
    specs = read_header(path)["leaves"]
    return _arrays(
        path,
        {
            str(n): name
            for n, (name, spec) in enumerate(specs.items())
            if "0" not in re.findall(r"\d+", spec.partition("[")[2])
        },
    )


def read_back(path: Path) -> None:
    """Raises RunError unless a checkpoint that was just saved can be read."""
    try:
        load_arrays(path)
    except Exception as error:  # whatever a disk, its names or a reader do
        raise RunError(
            f"checkpoint {path} was written and cannot be read back:"
            f" {atomic_folder.explain(error)}; choose another run_dir"
        ) from None


def list_steps(folder: str | Path) -> list[int]:
    """Returns the steps of the checkpoints of a folder, the newest last."""
    return [_step(path) for path in list_checkpoints(folder)]


def restore_latest(
    folder: str | Path,
    like: Any,
    identity: dict,
    warn: Callable[[str], None] = warnings.warn,
    until: int | None = None,
) -> Checkpoint | None:
    """Returns the newest checkpoint that can be read, None if there are none.

    Args: `like` is a pytree of arrays or ShapeDtypeStructs: NumPy leaves come back as NumPy, the
    others on the sharding they name; `identity` is as in `save`; `warn` gets a line per skipped
    checkpoint; `until` is the latest step that counts, None: any.
    Raises InputError if there are checkpoints and none can be read, or if the newest readable
    one is of a different run.
    """
    found = [path for path in list_checkpoints(folder) if until is None or _step(path) <= until]
    for path in reversed(found):
        checkpoint, reason = _attempt(path, like, identity)
        if checkpoint is not None:
            return checkpoint
        warn(f"checkpoint {path} cannot be read and is skipped: {reason}")
    if found:
        raise InputError(
            f"checkpoints in {folder}: none of {len(found)} can be read; remove the folder to start"
            " again"
        )
    return None


def _attempt(path: Path, like, identity: dict) -> tuple[Checkpoint | None, str]:
    """Returns (checkpoint, "") or (None, why it cannot be read). Raises InputError for
    a different run.
    """
    named, identity = name_leaves(like), json.loads(atomic_folder.to_json(identity))
    try:
        header = read_header(path)
        _check_same(path, header, named, identity)
        stored = _arrays(
            path.absolute(),
            {str(n): name for n, name in enumerate(header["leaves"]) if named[name].size},
        )
    except InputError:
        raise
    except Exception as error:  # whatever damage does to a reader
        return None, atomic_folder.explain(error)
    tree = jax.tree.unflatten(
        jax.tree.structure(like),
        [place_array(header, stored, name, leaf) for name, leaf in named.items()],
    )
    return Checkpoint(header["step"], tree, header["facts"]), ""


def _arrays(path: Path, names: dict[str, str]) -> dict[str, np.ndarray]:
    """Returns the stored arrays by leaf name, once every file is known to be as it was written."""
    atomic_folder.check_folder(path)
    files = {n: path / LARGE_ARRAYS / f"{n}.npy" for n in names}
    found = {n: np.load(file, allow_pickle=False) for n, file in files.items() if file.exists()}
    if rest := [n for n in names if n not in found]:
        with _orbax() as (ocp, checkpointer), _plain_name(path) as plain:
            as_numpy = dict.fromkeys(rest, ocp.RestoreArgs(restore_type=np.ndarray))
            found |= checkpointer.restore(
                plain / ARRAYS, args=ocp.args.PyTreeRestore(restore_args=as_numpy)
            )
    return {name: found[n] for n, name in names.items()}


def read_header(path: Path) -> dict[str, Any]:
    """Returns what checkpoint.json says. Raises ValueError if it has changed since."""
    text = atomic_folder.read_regular(path / HEADER)
    if hashlib.sha256(text).hexdigest() != atomic_folder.read_manifest(path)[HEADER]:
        raise ValueError(f"{HEADER} has changed since it was written")
    return json.loads(text)


def _check_same(path: Path, header: dict, named: dict[str, Any], identity: dict) -> None:
    if header["format"] != FORMAT:
        raise InputError(
            f"checkpoint {path} has format {header['format']}, this version reads {FORMAT}: go on"
            " with the version that wrote it, or choose another run_dir"
        )
    fields = dict(flatten_settings(header["identity"])), dict(flatten_settings(identity))
    shapes = header["leaves"], {name: describe_leaf(leaf) for name, leaf in named.items()}
    for there, here in (fields, shapes):  # a different field explains different shapes
        names = [
            name
            for name in {**there, **here}
            if there.get(name, "absent") != here.get(name, "absent")
        ]
        if names:
            said = [
                f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
                for name in names[:6]
            ]
            rest = f"; and {len(names) - 6} more" if len(names) > 6 else ""
            raise InputError(f"checkpoint {path} is of a different run ({'; '.join(said)}{rest})")


# Orbax


@contextlib.contextmanager
def _plain_name(folder: Path) -> Iterator[Path]:
    """Yields a path of a folder without *, ? and [, which Orbax would read as a pattern: where
    there are some, a link to it.
    """
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="fedjax-cfl-") as room:
        if glob.escape(room) != room:
            raise OSError(f"neither it nor TMPDIR={room} may have *, ? or [ in its name")
        link = Path(room) / "folder"
        link.symlink_to(folder, target_is_directory=True)
        yield link


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """Yields the module and a checkpointer that neither waits for other hosts nor logs."""
    import orbax.checkpoint as ocp  # here: it takes a fifth of a second, and a run may save nothing
    from absl import logging

    mine = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=mine, active_processes={mine})
    logger = logging.get_absl_logger()
    # it logs a traceback for each thread of a save that fails; we report one line
    before, logger.disabled = logger.disabled, True
    try:
        with ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
            multiprocessing_options=alone,
        ) as checkpointer:
            yield ocp, checkpointer
    finally:
        logger.disabled = before


def name_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree of arrays by their path."""
    leaves_with_path = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves_with_path}
    assert len(named) == len(leaves_with_path), "two leaves of one name"
    for name, leaf in named.items():
        assert hasattr(leaf, "dtype"), (
            f"{name} is a {type(leaf).__name__}: a checkpoint holds arrays, facts hold plain values"
        )
    return named


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe_leaf(leaf: Any) -> str:
    """Returns the type and the shape of a leaf, as a header has them."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def to_plain_array(name: str, leaf: Any) -> np.ndarray:
    """Returns a leaf as it is stored; of typed keys their words."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    assert array.dtype.isnative and not array.dtype.hasobject, (
        f"{name}: {array.dtype} cannot be saved"
    )
    return array


def place_array(header: dict, stored: dict[str, np.ndarray], name: str, leaf: Any) -> Any:
    """Returns a stored array with the type and sharding of `leaf`."""
    raw = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    value = stored[name] if name in stored else np.zeros(raw.shape, raw.dtype)
    assert value.shape == raw.shape and value.dtype == raw.dtype, name
    if isinstance(leaf, np.ndarray | np.generic):
        return value if isinstance(leaf, np.ndarray) else value[()]
    value = jax.device_put(value, leaf.sharding if getattr(leaf, "committed", True) else None)
    return jax.random.wrap_key_data(value, impl=header["keys"][name]) if is_key(leaf) else value
