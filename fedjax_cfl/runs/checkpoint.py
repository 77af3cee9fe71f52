"""Checkpoints of a run, by Orbax's `CheckpointManager`: nothing here is a pickle.

Of each round that is kept there is a folder `<round>/`, Orbax's own, with the leaves of the tree,
whole rather than per device, and beside it `<round>.header`, two lines: a SHA-256 of the second,
and a JSON object with the format, what a restore must repeat (`identity`), what the run wants back
besides arrays (`facts`), name, type and shape of every leaf, and the SHA-256 of every file of the
folder, because Orbax alone does not see every flipped bit. The header is written last: a round
without one was not saved to its end, and does not count.
"""

import contextlib
import errno
import glob
import hashlib
import json
import operator
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
from fedjax_cfl.runs.regular_files import explain, hash_file, read_regular
from fedjax_cfl.runs.results import write_text

FORMAT = 5  # up to 4 each checkpoint was a numbered folder of the package's own
HEADER = ".header"
NOTHING = {"nothing": np.zeros(1)}  # Orbax refuses empty trees
AS_LIST = operator.methodcaller("tolist")  # of arrays among facts, as JSON has them
NAME = re.compile(r"(\d+)\.header")


class Checkpoint(NamedTuple):
    """What a restore returns."""

    step: int
    tree: Any  # the structure, types and shardings of `like`
    facts: dict[str, Any]


# writing


def save(
    folder: str | Path, step: int, tree: Any, facts: dict, identity: dict, *, keep: int = 3
) -> None:
    """Saves a pytree of arrays (typed keys included) and two JSON dicts as the checkpoint of a
    round; those of later rounds, from which the run went back, are removed.

    Args: `step` >= 0 is the round; `tree` has the arrays; `facts` is what the run wants back,
    as its counters; `identity` is what a restore must repeat: algorithm, model, sizes; `keep`
    >= 1 is how many checkpoints remain, the newest ones.
    Raises RunError when it cannot be written; earlier ones are untouched. One process of a
    multi-host run saves.
    """
    assert keep >= 1 and step >= 0
    folder, named = Path(folder).absolute(), name_leaves(tree)
    stored = {  # Orbax refuses empty arrays
        str(n): to_plain_array(name, leaf)
        for n, (name, leaf) in enumerate(named.items())
        if leaf.size
    }
    header = {
        "format": FORMAT,
        "identity": identity,
        "facts": facts,
        "leaves": {name: describe_leaf(leaf) for name, leaf in named.items()},
        "keys": {
            name: str(jax.random.key_impl(leaf)) for name, leaf in named.items() if is_key(leaf)
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size = sum(array.nbytes for array in stored.values())
        # Orbax notices a full disk too, but leaves threads behind that print tracebacks
        if shutil.disk_usage(folder).free < size + 2**20:  # metadata and whole blocks
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if endless := [path for path in folder.rglob("*") if path.is_fifo()]:
            raise OSError(errno.EINVAL, f"{endless[0]} in it is a pipe")
        with open_manager(folder) as (ocp, manager):
            for later in [there for there in manager.all_steps() if there >= step]:
                remove(folder, manager, later)
            manager.save(step, args=ocp.args.PyTreeSave(stored or NOTHING))
            write_header(folder, step, header)
            kept = list_steps(folder)[-keep:]
            for before in [there for there in manager.all_steps() if there not in kept]:
                remove(folder, manager, before)
    except Exception as error:  # a full disk reaches us as Orbax's ValueError as well as an OSError
        raise RunError(
            f"checkpoint of round {step} in {folder} could not be written: {explain(error)}"
        ) from None


def write_header(folder: Path, step: int, header: dict[str, Any]) -> None:
    """Writes the header of a round whose folder is complete."""
    files = {name: hash_file(folder / str(step) / name) for name in list_files(folder / str(step))}
    # NaN and infinities come back as they were
    text = json.dumps(header | {"files": files}, default=AS_LIST) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_text(folder / f"{step}{HEADER}", f"{digest}\n{text}")


def list_files(path: Path) -> list[str]:
    """Returns what is in a folder and is no folder itself, by its name there."""
    inside = sorted(path.rglob("*"))
    return [
        one.relative_to(path).as_posix() for one in inside if one.is_symlink() or not one.is_dir()
    ]


def remove(folder: Path, manager: Any, step: int) -> None:
    """Removes a checkpoint; its header goes first, so that no half of one counts. What cannot be
    removed stays until the next save.
    """
    with contextlib.suppress(OSError):
        (folder / f"{step}{HEADER}").unlink(missing_ok=True)
        manager.delete(step)


# reading


def list_steps(folder: str | Path) -> list[int]:
    """Returns the rounds of the checkpoints of a folder, ascending. Raises InputError for a folder
    that cannot be listed, or that an earlier version has written.
    """
    try:
        names = [path.name for path in Path(folder).iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"checkpoints in {folder}: {explain(error)}") from None
    if old := [name for name in names if re.fullmatch(r"\d+-step-\d+", name)]:
        raise InputError(
            f"checkpoint {Path(folder) / old[0]}: an earlier version wrote it, format"
            f" {FORMAT - 1} or before; go on with that version, or choose another run_dir"
        )
    return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))


def read_header(folder: Path, step: int) -> dict[str, Any]:
    """Returns the header of a checkpoint. Raises ValueError if it has changed since it was
    written.
    """
    digest, _, text = read_regular(folder / f"{step}{HEADER}").partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError(f"{step}{HEADER} has changed since it was written")
    return json.loads(text)


def load_arrays(folder: str | Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Returns the arrays of the checkpoint of a round, None: of the last, by leaf name; empty ones
    are left out. Raises ValueError for files that are not as they were written, or where there is
    none.
    """
    folder = Path(folder).absolute()
    if step is None:
        step = max(list_steps(folder), default=None)
    if step is None:
        raise ValueError(f"there is no checkpoint in {folder}")
    header = read_header(folder, step)
    if list_files(folder / str(step)) != sorted(header["files"]):
        raise ValueError("its files are not those that were written")
    for name, digest in header["files"].items():
        if hash_file(folder / str(step) / name) != digest:
            raise ValueError(f"{step}/{name} has changed since it was written")
    names = {
        str(n): name
        for n, (name, spec) in enumerate(header["leaves"].items())
        if "0" not in re.findall(r"\d+", spec.rpartition("[")[2])
    }
    if not names:
        return {}
    with open_orbax(folder) as (ocp, plain, alone):  # not all of the folder: others may be damaged
        as_numpy = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            found = checkpointer.restore(
                plain / str(step) / "default", args=ocp.args.PyTreeRestore(restore_args=as_numpy)
            )
    return {names[n]: array for n, array in found.items()}


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
    checkpoint; `until` is the latest round that counts, None: any.
    Raises InputError if there are checkpoints and none can be read, or if the newest readable
    one is of a different run.
    """
    folder, named = Path(folder), name_leaves(like)
    identity = json.loads(json.dumps(identity, default=AS_LIST))  # as a header has it
    steps = [step for step in list_steps(folder) if until is None or step <= until]
    for step in reversed(steps):
        path = folder / str(step)
        try:
            header = read_header(folder, step)
            check_same(path, header, named, identity)
            stored = load_arrays(folder, step)
            leaves = [place_array(header, stored, name, leaf) for name, leaf in named.items()]
        except InputError:
            raise
        except Exception as error:  # whatever damage does to a reader
            warn(f"checkpoint {path} cannot be read and is skipped: {explain(error)}")
        else:
            tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
            return Checkpoint(step, tree, header["facts"])
    if steps:
        raise InputError(
            f"checkpoints in {folder}: none of {len(steps)} can be read; remove the folder to start"
            " again"
        )
    return None


def check_same(path: Path, header: dict, named: dict[str, Any], identity: dict) -> None:
    """Raises InputError for a checkpoint of a different run, or of other shapes."""
    if header["format"] != FORMAT:
        raise InputError(
            f"checkpoint {path} has format {header['format']}, this version reads {FORMAT}: go on"
            " with the version that wrote it, or choose another run_dir"
        )
    fields = dict(flatten_settings(header["identity"])), dict(flatten_settings(identity))
    shapes = header["leaves"], {name: describe_leaf(leaf) for name, leaf in named.items()}
    for there, here in (fields, shapes):  # a different field explains different shapes
        pairs = {n: (there.get(n, "absent"), here.get(n, "absent")) for n in {**there, **here}}
        said = [f"{n}: {one} there, {two} here" for n, (one, two) in pairs.items() if one != two]
        if said:
            rest = f"; and {len(said) - 6} more" if len(said) > 6 else ""
            said = "; ".join(said[:6]) + rest
            raise InputError(f"checkpoint {path} is of a different run ({said})")


# Orbax


@contextlib.contextmanager
def open_manager(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yields Orbax's module and a manager of a folder's checkpoints."""
    with open_orbax(folder) as (ocp, plain, alone):
        options = ocp.CheckpointManagerOptions(
            create=False,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
            multiprocessing_options=alone,
        )
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        with ocp.CheckpointManager(plain, options=options, item_handlers=handler) as manager:
            yield ocp, manager


@contextlib.contextmanager
def open_orbax(folder: Path) -> Iterator[tuple[Any, Path, Any]]:
    """Yields Orbax's module, a path of the folder that it can read, and options by which this
    process does not wait for others. It logs nothing meanwhile.
    """
    import orbax.checkpoint as ocp  # here: it takes a third of a second, and a run may save nothing
    from absl import logging

    mine = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=mine, active_processes={mine})
    logger = logging.get_absl_logger()
    # it logs a traceback for each thread of a save that fails; we report one line
    before, logger.disabled = logger.disabled, True
    try:
        with plain_name(folder) as plain:
            yield ocp, plain, alone
    finally:
        logger.disabled = before


@contextlib.contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
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
    value = np.asarray(stored[name]) if name in stored else np.zeros(raw.shape, raw.dtype)
    assert value.shape == raw.shape and value.dtype == raw.dtype, name
    if isinstance(leaf, np.ndarray | np.generic):
        return value if isinstance(leaf, np.ndarray) else value[()]
    value = jax.device_put(value, leaf.sharding if getattr(leaf, "committed", True) else None)
    return jax.random.wrap_key_data(value, impl=header["keys"][name]) if is_key(leaf) else value
