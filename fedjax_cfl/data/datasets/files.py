"""The user's own arrays: an .npz, a folder of .npy (memory-mapped), LEAF's JSON, or from Python."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets import leaf_json, readers
from fedjax_cfl.data.datasets.pool import (
    COUNTED,
    MAX_CLASSES,
    check_pool,
    number_owners,
    number_words,
    read_test_mask,
    to_array,
)
from fedjax_cfl.errors import InputError, warn_of_file
from fedjax_cfl.formatting import clean_name, name_columns
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, checked

# (labels, samples of each): more labels, each in fewer samples, are no classes
UNLIKELY_CLASSES = ((1000, 10), (50, 2))
OPTIONAL = ("client", "split", "concept", "time")
CHECK_BYTES = 2**27  # bytes checked at once


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


def leaf(path: str | Path, num_classes: NaturalInt | None = None) -> Pool:
    """Returns any LEAF JSON data set of arrays: a file, a folder of shards, or a folder
    with train/ and test/ (then `test` is set).

    With `num_classes` 0 y are numbers to regress, but those of text.
    Of windows of text (Shakespeare) x [N, T] are the numbers of their characters, and the label is
    the one that follows, of `leaf_json.CHARACTERS`; others, if there are any, are one more class.
    Raises InputError for files that cannot be read and for what does not fit; a `num_samples` that
    is not what is there is said, and what is there is read.
    """
    root = Path(os.path.expanduser(path))  # Path.expanduser and is_dir raise errors of their own
    folders = [root / "train", root / "test"] if os.path.isdir(root / "train") else [root]
    parts = [leaf_json.read_users([folder], leaf_json.read_user) for folder in folders]
    sizes = [sum(len(y) for _, y, _ in part.values()) for part in parts]
    if 0 in sizes:
        raise InputError(
            f"{folders[sizes.index(0)]}: user_data holds no samples, expected at least one"
        )
    held = [(user, *part[user]) for part in parts for user in sorted(part) if len(part[user][1])]
    first = held[0][1]
    for user, x, _, file in held:
        said = f"{file}: x of user {readers.shorten(user)}"
        if x.dtype != first.dtype:
            raise InputError(f"{said} and of another one hold text and numbers, expected either")
        if x.shape[1:] != first.shape[1:]:
            raise InputError(
                f"{said} has samples of shape {x.shape[1:]}, expected {first.shape[1:]} as in"
                " other users"
            )
    x = np.concatenate([x for _, x, _, _ in held])
    y = np.concatenate([y for _, _, y, _ in held])
    names = sorted({user for user, *_ in held})
    number = {user: place for place, user in enumerate(names)}
    client = np.repeat([number[user] for user, *_ in held], [len(y) for _, _, y, _ in held])
    test = np.repeat([False, True], sizes) if len(sizes) == 2 else None
    classes, class_names = _count_classes(str(path), num_classes), None
    if x.dtype == np.int32:
        class_names = name_characters(str(path), x, y)
        classes = num_classes or len(class_names)
    pool = Pool(x, y, classes, client, test, class_names=class_names, client_names=tuple(names))
    return check_pool(pool, str(path))


def name_characters(path: str, x: np.ndarray, y: np.ndarray) -> tuple[str, ...]:
    """Returns what the classes of text are called, and says if there are unknown characters."""
    unknown = [(part == leaf_json.UNKNOWN).mean() for part in (x, y)]
    if not any(unknown):
        return tuple(leaf_json.CHARACTERS)
    warn_of_file(
        f"{path}: {unknown[0]:.2%} of the characters are not among LEAF's"
        f" {len(leaf_json.CHARACTERS)}; all of them are one more, 'unknown'"
    )
    return (*leaf_json.CHARACTERS, "unknown")


def npy(path: str | Path, num_classes: NaturalInt | None = None) -> Pool:
    """Returns `x.npy` [N, ...] (uint8, read as x / 255, or float32), which stays on the
    disk, and `y.npy`, `client.npy`, `split.npy`, `time.npy` [N], `concept.npy` [K].

    All but y may be missing; all are as in `npz`. Raises InputError for what `npz`
    would refuse, and for an x of another type, which could not stay on the disk.
    """
    folder = Path(os.path.expanduser(path))
    names = readers.list_folder(folder, "a folder with x.npy and y.npy")
    if not {"x.npy", "y.npy"} <= set(names):
        raise InputError(
            f"{folder}: has no x.npy or no y.npy, expected both; found"
            f" {readers.list_names(names) or 'none'}: rename them, or use numpy.save"
        )
    arrays = {name: _map_array(folder / f"{name}.npy") for name in ("x", "y")}
    for name in OPTIONAL:
        if f"{name}.npy" in names:
            arrays[name] = _map_array(folder / f"{name}.npy")
    x, y = arrays["x"], arrays["y"]
    if x.dtype not in (np.uint8, np.float32) or not x.dtype.isnative:
        raise InputError(
            f"{folder / 'x.npy'}: x has dtype {x.dtype}, expected uint8 or float32 in this"
            " machine's byte order"
        )
    if x.ndim < 2 or not x.size or len(x) != len(np.atleast_1d(y)):
        raise InputError(
            f"{folder}: y has shape {y.shape}, x has shape {x.shape}, expected [N] and [N, ...]"
            " with the same N >= 1"
        )
    rows = max(CHECK_BYTES // x[:1].nbytes, 1)
    for begin in range(0, len(x) if x.dtype == np.float32 else 0, rows):
        bad = ~np.isfinite(x[begin : begin + rows]).reshape(min(rows, len(x) - begin), -1).all(
            axis=1
        )
        if bad.any():
            raise InputError(
                f"{folder / 'x.npy'}: x is NaN or infinite in sample {begin + bad.argmax()},"
                " expected finite values"
            )
    stand_in = np.zeros((len(x), 1), np.uint8)  # x has been checked; the rest as in any pool
    return build_pool(str(folder), arrays | {"x": stand_in}, num_classes)._replace(x=x)


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
    whole seconds since the first; `num_classes` None is the largest label + 1, 0 that `y` are
    numbers to regress, or labels [N, T], 0 or 1. An array of uint8 or float32 is not copied.
    Raises InputError for what `npz` would refuse.
    """
    given = {"x": x, "y": y, "client": client, "split": split, "time": time, "concept": concept}
    arrays = {name: _plain_array(name, value) for name, value in given.items() if value is not None}
    for name in ("x", "y"):
        if name not in arrays:
            raise InputError(f"arrays: {name} is None, expected an array")
    if "time" in arrays and arrays["time"].dtype.kind == "M":
        arrays["time"] = count_seconds("arrays", arrays["time"])
    names = name_columns(x)
    pool = build_pool("arrays", arrays, num_classes)
    return pool if names is None else pool._replace(columns=tuple(names))


def _plain_array(name: str, value: Any) -> np.ndarray:
    """Returns an array of numbers, text or dates from anything that NumPy can read."""
    try:
        if hasattr(value, "__dataframe__") and not hasattr(value, "__array__"):
            from pyarrow import interchange  # takes a while, and few have such a frame

            columns = interchange.from_dataframe(value).columns
            value = np.column_stack([column.to_numpy() for column in columns])
        array = to_array(f"arrays: {name}", value)
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
    text = bool(values) and isinstance(values[0], str | bytes)
    kinds = (type(values[0]),) if text else (bool, int, float)
    for i, entry in enumerate(values):
        if not isinstance(entry, kinds):
            sample = i // max(array[0].size if array.ndim > 1 else 1, 1)
            raise InputError(
                f"arrays: {name} is {readers.shorten(entry)} in sample {sample}, expected"
                f" {'text' if text else 'a number'} as in the others"
            )
    return np.array(values).reshape(array.shape)


def count_seconds(path: str, dates: np.ndarray) -> np.ndarray:
    """Returns dates [N] of NumPy as whole seconds since the first of them."""
    if np.isnat(dates).any():
        raise InputError(
            f"{path}: time is missing in sample {np.isnat(dates).argmax()}, expected a date in each"
        )
    seconds = dates.astype("datetime64[us]").astype(np.int64)
    return (seconds - seconds.min(initial=np.iinfo(np.int64).max)) // 10**6


def _map_array(path: Path) -> np.ndarray:
    readers.check_file(path, b"\x93NUMPY")
    with readers.report_damage(path, f"what numpy.save writes: {readers.PLAIN}"):
        return np.lib.format.open_memmap(path, mode="r").view(np.ndarray)


def build_pool(path: str, arrays: dict[str, np.ndarray], num_classes: int | None) -> Pool:
    """Returns the checked pool of a user's arrays; text is numbered in sorted order."""
    y, class_names = _number_labels(path, arrays["y"], num_classes)
    test = read_test_mask(path, arrays["split"], y) if "split" in arrays else None
    pool = Pool(arrays["x"], y, _count_classes(path, num_classes), None, test)
    pool = pool._replace(time=arrays.get("time"), class_names=class_names)
    if "client" not in arrays:
        if "concept" in arrays:
            raise InputError(f"{path}: concept is there without client, expected both or neither")
        return check_pool(pool, path)
    ids, client = number_clients(path, arrays["client"], len(y))
    names = None if np.array_equal(ids, np.arange(len(ids))) else tuple(ids.tolist())
    if (concept := arrays.get("concept")) is not None:
        if concept.shape != ids.shape or concept.dtype.kind not in "buiUS":
            raise InputError(
                f"{path}: concept has shape {concept.shape} and dtype {concept.dtype}, expected"
                f" ({len(ids)},) integers or text, one entry a client in the sorted order of the"
                " ids"
            )
        concept = number_owners(concept)
    return check_pool(pool._replace(client=client, client_names=names, concept=concept), path)


def _count_classes(path: str, num_classes: int | None) -> int:
    """Returns the number of classes, `COUNTED` where it is that of the labels."""
    if num_classes is not None and num_classes < 0:
        raise InputError(f"{path}: num_classes={num_classes}, expected at least 1, or null")
    return COUNTED if num_classes is None else num_classes


def _number_labels(
    path: str, y: np.ndarray, num_classes: int | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns class numbers [N] and the names of the classes, None for numbers, or numbers to
    regress, or labels [N, T]. Raises InputError, with the remedy, for labels in a form that is
    common but not ours.
    """
    if num_classes == 0:
        if y.ndim not in (1, 2) or y.dtype.kind not in "buif":
            raise InputError(
                f"{path}: y has shape {y.shape} and dtype {y.dtype}, expected numbers to regress"
                " [N], one a sample, or labels, 0 or 1, [N, T]"
            )
        return y, None
    if y.ndim == 2 and y.shape[1] > 1:
        raise InputError(
            f"{path}: y has shape {y.shape}, one-hot or several labels a sample; expected class"
            " numbers [N]: of one-hot labels store y.argmax(axis=1); of several labels, 0 or 1,"
            " use task=multilabel, in Python num_classes=0"
        )
    if y.ndim != 1:
        raise InputError(f"{path}: y has shape {y.shape}, expected [N], one label a sample")
    if y.dtype.kind in "US":
        names, y = number_words(path, "y", y)
        return y, tuple(names.tolist())
    if num_classes is None and y.dtype.kind in "iuf" and y.size and y.min() == 1:
        last = y.max()
        if np.array_equal(np.unique(y), np.arange(1, last + 1)):
            raise InputError(
                f"{path}: y is 1 .. {last:g} and never 0, expected class numbers from 0 on: store"
                f" y - 1, or set num_classes={last + 1:g} if class 0 has no samples here"
            )
    return _close_gaps(path, y, num_classes)


def _close_gaps(
    path: str, y: np.ndarray, num_classes: int | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns class numbers without gaps, where it is not said how many classes there are, and the
    labels as names of the classes. Raises InputError for what looks like no classes at all.
    """
    whole = y.dtype.kind in "iuf" and y.size > 0 and np.isfinite(y).all()
    if num_classes is not None or not whole:
        return y, None  # `check_pool` says what is wrong
    labels = np.unique(y)
    continuous = (labels != np.floor(labels)).any()
    if continuous or any(labels.size > max(n, y.size // each) for n, each in UNLIKELY_CLASSES):
        kind = "numbers that are not whole" if continuous else f"{labels.size:,} different values"
        raise InputError(
            f"{path}: y has {kind} in {y.size:,} samples, which looks like a target to regress"
            " (task=regression, in Python num_classes=0); expected class numbers, or num_classes if"
            " these are classes"
        )
    if labels[0] < 0 or labels[-1] > MAX_CLASSES or np.array_equal(labels, np.arange(labels.size)):
        return y, None
    return np.searchsorted(labels, y), tuple(map(clean_name, labels.tolist()))


def number_clients(path: str, client: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of the clients [K], sorted, and each sample's client number [N]."""
    if client.shape != (samples,):
        raise InputError(
            f"{path}: client has shape {client.shape}, expected ({samples},), one entry a sample"
        )
    if client.dtype.kind in "SU":
        ids, number = number_words(path, "client", client)
        return ids, number.astype(np.int32)
    if client.dtype.kind not in "buif":
        raise InputError(f"{path}: client has dtype {client.dtype}, expected integers or text")
    if client.dtype.kind == "f":
        bad = ~((np.abs(client) < 2**53) & (client == np.floor(client)))  # NaN is bad, too
        if bad.any():
            raise InputError(
                f"{path}: client is {client[bad][0]} in sample {bad.argmax()}, expected whole"
                " numbers below 2^53, or text"
            )
    if client.dtype == np.uint64 and client.max(initial=0) >= 2**63:
        client = client.astype(str)  # results have no such integers
    if client.dtype.kind in "bf":
        client = client.astype(np.int64)
    ids, number = np.unique(client, return_inverse=True)
    return ids, number.astype(np.int32)
