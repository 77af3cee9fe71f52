"""The user's own arrays: an .npz, a folder of .npy (memory-mapped), or from Python."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets import pool as pools
from fedjax_cfl.data.datasets import readers
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import clean_name, name_columns, shorten
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, checked

# (labels, samples of each): more labels, each in fewer samples, are no classes
UNLIKELY_CLASSES = ((1000, 10), (50, 2))
OPTIONAL = ("client", "split", "concept", "time")


@checked("dataset.source")
def npz(path: str | Path, num_classes: NaturalInt | None = None) -> Pool:
    """Returns the user's own arrays `x` [N, ...] and `y` [N], with optional `client`
    [N], `split` [N] (0 train, 1 test), `time` [N] and `concept` [K].

    uint8 features are read as x / 255; all others become float32 as they are. `y` and
    `split` may be of any type of number, also bool, as long as they are whole. Labels,
    client ids and concepts may be text: they are numbered in sorted order. Client ids may
    be any whole numbers. Labels with gaps, as 10, 20, 30, are numbered too, and name the
    classes, unless `num_classes` says how many there are; of 0 `y` are numbers to regress, which
    become float32. `concept` is the true group of each client, in the sorted order of their ids.
    `time` is when a sample came into being, a whole number in any unit.
    Raises InputError for anything else.
    """
    arrays = readers.read_npz(os.path.expanduser(path), ("x", "y"), OPTIONAL)
    return build_pool(str(path), arrays, num_classes)


@checked("dataset.source")
def npy(path: str | Path, num_classes: NaturalInt | None = None) -> Pool:
    """Returns `x.npy` [N, ...] (uint8, read as x / 255, or float32), which stays on the
    disk, and `y.npy`, `client.npy`, `split.npy`, `time.npy` [N], `concept.npy` [K].

    All but y may be missing; all are as in `npz`. Raises InputError for what `npz`
    would refuse, and for an x of another type, which could not stay on the disk.
    """
    folder = Path(os.path.expanduser(path))
    with readers.report_damage(folder, "a folder with x.npy and y.npy", "folder"):
        names = sorted(os.listdir(folder))
    if not {"x.npy", "y.npy"} <= set(names):
        raise InputError(
            f"{folder}: has no x.npy or no y.npy, expected both; found"
            f" {readers.list_names(names) or 'none'}: rename them, or use numpy.save"
        )
    present = [name for name in ("x", "y", *OPTIONAL) if f"{name}.npy" in names]
    arrays: dict[str, np.ndarray] = {}
    for name in present:
        path = folder / f"{name}.npy"
        readers.check_file(path, b"\x93NUMPY")
        with readers.report_damage(path, f"what numpy.save writes: {readers.PLAIN}"):
            arrays[name] = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    x = arrays["x"]
    if x.dtype not in (np.uint8, np.float32) or not x.dtype.isnative:
        raise InputError(
            f"{folder / 'x.npy'}: x has dtype {x.dtype}, expected uint8 or float32 in this"
            " machine's byte order"
        )
    return build_pool(str(folder), arrays, num_classes)


@checked()
def from_arrays(
    x: Any,
    y: Any,
    client: Any = None,
    split: Any = None,
    time: Any = None,
    concept: Any = None,
    num_classes: NaturalInt | None = None,
) -> Pool:
    """Returns the arrays of a program as a pool, checked and read as those of a file by `npz`.

    Args: `x` [N, ...], `y`, `client`, `split` and `time` [N] and `concept` [K] are arrays,
    lists, or columns and frames of pandas, polars or Arrow; `time` may hold dates, which become
    whole seconds since the first; `concept` may be a dict {name of the client: group};
    `num_classes` None is the largest label + 1, 0 that `y` are numbers to regress, or labels
    [N, T], 0 or 1. An array of uint8 or float32 is not copied.
    Raises InputError for what `npz` would refuse.
    """
    given = {"x": x, "y": y, "client": client, "split": split, "time": time, "concept": concept}
    arrays = {
        name: value if isinstance(value, dict) and name == "concept" else _plain_array(name, value)
        for name, value in given.items()
        if value is not None
    }
    for name in ("x", "y"):
        if name not in arrays:
            raise InputError(f"arrays: {name} is None, expected an array")
    pool, names = build_pool("arrays", arrays, num_classes), name_columns(x)
    return pool if names is None else pool._replace(columns=tuple(names))


def _plain_array(name: str, value: Any) -> np.ndarray:
    """Returns an array of numbers, text or dates from anything that NumPy can read."""
    try:
        if hasattr(value, "__dataframe__") and not hasattr(value, "__array__"):
            from pyarrow import interchange  # takes a while, and few have such a frame

            columns = interchange.from_dataframe(value).columns
            value = np.column_stack([column.to_numpy() for column in columns])
        array = pools.to_array(f"arrays: {name}", value)
        if array.dtype.kind == "T" or (isinstance(value, list | tuple) and array.dtype.kind == "U"):
            array = np.array(value, dtype=object)  # else NaN in it were text as well
    except InputError:
        raise
    except Exception as error:  # lists of unequal lengths, and whatever else can be given
        raise InputError(
            f"arrays: {name} cannot be made an array ({readers.line_of(error)}), expected numbers"
            " or text, as many in every sample"
        ) from None
    if array.dtype.kind != "O":
        return array
    values = array.ravel().tolist()
    text = name != "x" and bool(values) and isinstance(values[0], str | bytes)
    kinds = (type(values[0]),) if text else (bool, int, float)
    wrong = next(
        (place for place, entry in enumerate(values) if not isinstance(entry, kinds)), None
    )
    if wrong is None:
        return np.array(values).reshape(array.shape)
    row, column = divmod(wrong, max(array[0].size if array.ndim > 1 else 1, 1))
    columns, hint = list(name_columns(value) or ()) if name == "x" else [], ""
    if columns:
        hint = (
            f": column {shorten(columns[column])} holds it; leave it out, or use cfl.from_frame,"
            " which takes text with number_text=True"
        )
    raise InputError(
        f"arrays: {name} is {shorten(values[wrong])} in sample {row}, expected"
        f" {'text' if text else 'a number'} as in the others{hint}"
    )


def build_pool(path: str, arrays: dict[str, Any], num_classes: int | None) -> Pool:
    """Returns the checked pool of a user's arrays, as `npz` describes them; `concept` may be a dict
    of the groups of clients by their names.
    """
    y, class_names = _number_labels(path, arrays["y"], num_classes)
    pool = Pool(arrays["x"], y, pools.COUNTED if num_classes is None else num_classes)
    if "split" in arrays:
        pool = pool._replace(test=pools.read_test_mask(path, arrays["split"], y))
    if (time := arrays.get("time")) is not None and time.dtype.kind == "M":
        pools.refuse_first(np.isnat(time), f"{path}: time", "missing", "a date in each")
        seconds = time.astype("datetime64[us]").astype(np.int64)
        time = (seconds - seconds.min(initial=np.iinfo(np.int64).max)) // 10**6
    pool = pool._replace(time=time, class_names=class_names)
    if "client" in arrays:
        ids, client = number_clients(path, arrays["client"], len(y))
        names = None if np.array_equal(ids, np.arange(len(ids))) else tuple(ids.tolist())
        pool = pool._replace(client=client, client_names=names)
        if "concept" in arrays:
            pool = pool._replace(concept=_number_groups(path, arrays["concept"], ids))
    elif "concept" in arrays:
        raise InputError(f"{path}: concept is there without client, expected both or neither")
    return pools.check_pool(pool, path)


def _number_groups(path: str, concept: Any, ids: np.ndarray) -> np.ndarray:
    """Returns the true group of each client [K] int32, of whom `ids` [K] are the sorted names."""
    if isinstance(concept, dict):
        named = {clean_name(name): group for name, group in concept.items()}
        clients = list(map(clean_name, ids.tolist()))
        lost = [name for name in clients if name not in named]
        more = [name for name in named if name not in clients]
        if lost or more:
            said = f"no group of client {shorten(lost[0])}" if lost else shorten(more[0])
            raise InputError(
                f"{path}: concept has {said}, expected a group of each client that samples name,"
                f" and no other: {readers.list_names(clients)}"
            )
        concept = np.array([named[name] for name in clients])
    if concept.shape != ids.shape or concept.dtype.kind not in "buiUS":
        raise InputError(
            f"{path}: concept has shape {concept.shape} and dtype {concept.dtype}, expected"
            f" ({len(ids)},) integers or text, one entry a client in the sorted order of the"
            " ids, or a dict of groups by ids"
        )
    return pools.number_names(path, "concept", concept)[1].astype(np.int32)


def _number_labels(
    path: str, y: np.ndarray, num_classes: int | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns class numbers [N] and the names of the classes, None for numbers, or numbers to
    regress, or labels [N, T]. Raises InputError, with the remedy, for labels in a form that is
    common but not ours.
    """
    if num_classes == 0:
        return y, None  # `check_pool` looks at them
    if y.ndim == 2 and y.shape[1] > 1:
        raise InputError(
            f"{path}: y has shape {y.shape}, one-hot or several labels a sample; expected class"
            " numbers [N]: of one-hot labels store y.argmax(axis=1); of several labels, 0 or 1,"
            " use task=multilabel, in Python num_classes=0"
        )
    if y.ndim != 1:
        raise InputError(f"{path}: y has shape {y.shape}, expected [N], one label a sample")
    if y.dtype.kind in "USO":
        names, number = pools.number_names(path, "y", y)
        if (values := pools.read_numbers(names)) is None:
            if num_classes is None:
                refuse_stray_signs(path, names)
            return number, tuple(names)
        y = values[number]
    if num_classes is not None or y.dtype.kind not in "iuf" or not np.isfinite(y).all():
        return y, None  # `check_pool` says what is wrong
    return _close_gaps(path, y)


def refuse_stray_signs(path: str, names: Sequence[str]) -> None:
    """Raises InputError for two classes that differ in case, blanks, or a sign at the end alone."""
    known: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"\s+", " ", name).strip(" .,;:'\"")
        plain = plain.casefold() if len(plain) > 1 else plain  # letters are classes of both cases
        other = known.setdefault(plain or name, name)
        if other != name:
            raise InputError(
                f"{path}: classes {shorten(other)} and {shorten(name)} look like one, expected"
                f" one spelling; if they are two, set num_classes={len(names)}"
            )


def _close_gaps(path: str, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns labels [N] as class numbers without gaps, and as names of the classes where there
    were some. Raises InputError for what looks like no classes at all.
    """
    labels = np.unique(y)
    if labels.size and np.array_equal(labels, np.arange(1, labels.size + 1)):
        raise InputError(
            f"{path}: y is 1 .. {labels[-1]:g} and never 0, expected class numbers from 0 on: store"
            f" y - 1, or set num_classes={labels[-1] + 1:g} if class 0 has no samples here"
        )
    continuous = (labels != np.floor(labels)).any()
    if continuous or any(labels.size > max(n, y.size // each) for n, each in UNLIKELY_CLASSES):
        kind = "numbers that are not whole" if continuous else f"{labels.size:,} different values"
        raise InputError(
            f"{path}: y has {kind} in {y.size:,} samples, which looks like a target to regress"
            " (task=regression, in Python num_classes=0); expected class numbers, or num_classes if"
            " these are classes"
        )
    outside = labels.size and (labels[0] < 0 or labels[-1] > pools.MAX_CLASSES)
    if outside or np.array_equal(labels, np.arange(labels.size)):
        return y, None
    return np.searchsorted(labels, y), tuple(map(clean_name, labels.tolist()))


def number_clients(path: str, client: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of the clients [K], sorted, and each sample's client number [N]."""
    pools.check_length(f"{path}: client", client, samples)
    if client.dtype.kind not in "buifUSO":
        raise InputError(f"{path}: client has dtype {client.dtype}, expected integers or text")
    if client.dtype.kind == "f":
        bad = ~((np.abs(client) < 2**53) & (client == np.floor(client)))  # NaN is bad, too
        pools.refuse_first(bad, f"{path}: client", client, "whole numbers below 2^53, or text")
    if client.dtype.kind in "buif" and client.max(initial=0) < 2**63:
        ids, number = np.unique(client.astype(np.int64, copy=False), return_inverse=True)
    else:
        names, number = pools.number_names(path, "client", client)
        ids = np.array(pools.name_clients(names))
    return ids, number.astype(np.int32)
