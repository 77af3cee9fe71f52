"""Checks of what every data set returns: a `Pool` of labelled samples."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import clean_name, shorten
from fedjax_cfl.types import Pool

# a label beyond this is no label, and tables of classes should not end in a lack of memory
MAX_CLASSES = 1_000_000
CHECK_BYTES = 2**27  # of samples that are looked at at once: they may stay on the disk
COUNTED = -1  # of `Pool.num_classes`: the largest label + 1
# words that stand where a number is missing
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "-nan", "NULL", "null", "None", "NaT", "?")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)
SPLITS = {word: False for word in ("train", "training", "0", "false")}
SPLITS |= {word: True for word in ("test", "testing", "1", "true")}
# what to do with whole numbers that are negative or too large
REMEDIES = {
    "client": ": store numpy.unique(client, return_inverse=True)[1]",
    "time": ": store time - time.min(), in seconds or another unit that is coarse enough",
    "y": ": store numpy.unique(y, return_inverse=True)[1]",
}


def check_pool(pool: Pool, name: str) -> Pool:
    """Returns the pool with x as in `Pool`, y, client and time int32, test bool, or raises an
    `InputError` that names the fault.

    `num_classes` may be `COUNTED`; where it is 0 y becomes float32, and [N, T] are labels. Clients
    are 0 .. K - 1; one without samples keeps its number.
    """
    x, y = (to_array(f"{name}: {each}", getattr(pool, each)) for each in ("x", "y"))
    if x.dtype.kind not in "buif":
        raise InputError(f"{name}: x has dtype {x.dtype}, expected numbers (uint8 or float32)")
    several = y.ndim == 2 and not pool.num_classes  # labels of each sample
    if not (y.ndim == 1 or several) or x.ndim < 1 or len(x) != len(y):
        raise InputError(
            f"{name}: y has shape {y.shape}, x has shape {x.shape}, expected [N] and [N, ...] with"
            " the same N"
        )
    if len(x) == 0:
        raise InputError(f"{name}: x has 0 samples, expected at least one")
    if x.ndim == 1 or x[0].size == 0:
        raise InputError(
            f"{name}: x has samples of shape {x.shape[1:]}, expected at least one feature"
        )
    if x.dtype != np.uint8:
        x, rows = read_features(x), max(CHECK_BYTES // x[:1].nbytes, 1)
        blocks = (to_float32(x[begin : begin + rows]) for begin in range(0, len(x), rows))
        bad = np.concatenate([~np.isfinite(b).reshape(len(b), -1).all(1) for b in blocks])
        said = f"NaN or infinite in {bad.sum()} samples, first"
        refuse_first(bad, f"{name}: x", said, "finite values")
    classes = pool.num_classes
    y, classes = _read_labels(name, y, classes) if classes else (_read_targets(name, y), 0)
    given = {field: getattr(pool, field) for field in ("client", "test", "time")}
    read = {
        field: None if values is None else _read_whole(name, field, np.asarray(values), len(x))
        for field, values in given.items()
    }
    if (test := read["test"]) is not None:
        refuse_first(test > 1, f"{name}: test", test, "True or False")
        read["test"] = test.astype(bool)
    return pool._replace(x=x, y=y, num_classes=classes, **read)


def refuse_first(bad: np.ndarray, name: str, value: Any, expected: str) -> None:
    """Raises InputError for the first sample of which `bad` [N] is True; `value` is what it has, or
    what all of them have [N].
    """
    if bad.any():
        sample = int(bad.argmax())
        said = value[sample] if isinstance(value, np.ndarray) else value
        raise InputError(f"{name} is {said} in sample {sample}, expected {expected}")


def check_length(name: str, values: np.ndarray, samples: int) -> None:
    """Raises InputError for values that are not one of each sample."""
    if values.shape != (samples,):
        raise InputError(
            f"{name} has shape {values.shape}, expected ({samples},), one entry a sample"
        )


def to_array(name: str, value: Any) -> np.ndarray:
    """Returns anything that NumPy can read as an array. Raises InputError for masked entries, also
    in lists: NumPy would take what lies behind the mask.
    """
    if _is_masked(value):
        raise InputError(f"{name} has masked entries, expected a value in each")
    return np.asarray(value)


def _is_masked(value: Any) -> bool:
    if isinstance(value, list | tuple):
        plain = not value or isinstance(value[0], int | float | str)
        return not plain and any(map(_is_masked, value))
    return np.ma.is_masked(value)


def read_features(x: np.ndarray) -> np.ndarray:
    """Returns numbers [N, ...] as `Pool` has them: columns [N, F] that float32 rounds as float64,
    all others as float32, and uint8 as it is.
    """
    rounded = to_float32(x)
    exact = rounded is x or x.ndim != 2 or np.array_equal(rounded, x)
    return rounded if exact else x.astype(np.float64, copy=False)


def to_float32(x: np.ndarray) -> np.ndarray:
    """Returns numbers as float32, infinite where they are too large, and uint8 as it is."""
    with np.errstate(over="ignore"):
        return x if x.dtype == np.uint8 else x.astype(np.float32, copy=False)


def _read_labels(name: str, y: np.ndarray, classes: int) -> tuple[np.ndarray, int]:
    """Returns class numbers [N] int32, and how many classes there are, see `check_pool`."""
    y = _read_whole(name, "y", y)
    classes = int(y.max()) + 1 if classes == COUNTED else classes
    expected = f"0 .. {classes - 1} (num_classes={classes})"
    refuse_first(y >= classes, f"{name}: y", y, expected)
    if classes > MAX_CLASSES:
        refuse_first(y == y.max(), f"{name}: y", y, f"class numbers below {MAX_CLASSES}")
    return y, classes


def _read_targets(name: str, y: np.ndarray) -> np.ndarray:
    """Returns numbers to regress [N], or labels [N, T], as float32."""
    if y.dtype.kind not in "buif" or not y[0].size:
        raise InputError(
            f"{name}: y has dtype {y.dtype} and shape {y.shape}, expected numbers to regress [N],"
            " or labels, 0 or 1, [N, T]"
        )
    if y.ndim == 2:
        expected = "0 or 1 of each label, or numbers to regress [N], one a sample"
        wrong = ~np.isin(y, (0, 1))
        bad = np.asarray(wrong.any(1))
        label = int(wrong[bad.argmax()].argmax())  # of the first sample with a bad one
        refuse_first(bad, f"{name}: label {label} of y", y[:, label], expected)
    with np.errstate(over="ignore"):
        y = y.astype(np.float32)
    if y.ndim == 1:
        expected = "numbers to regress that are finite in float32"
        refuse_first(~np.isfinite(y), f"{name}: y", y, expected)
    return y


def _read_whole(name: str, field: str, values: np.ndarray, length: int | None = None) -> np.ndarray:
    """Returns whole, non-negative numbers [N] as int32; floats such as 5.0 are accepted."""
    if values.dtype.kind not in "buif":
        raise InputError(f"{name}: {field} has dtype {values.dtype}, expected integers")
    if length is not None:
        check_length(f"{name}: {field}", values, length)
    # NaN fails every comparison
    bad = ~((values >= 0) & (values < 2**31) & (values == np.floor(values)))
    whole = values[bad][:1] == np.floor(values[bad][:1])
    hint = f" up to {2**31 - 1}{REMEDIES.get(field, '')}" if whole.any() else ""
    refuse_first(bad, f"{name}: {field}", values, f"integers 0, 1, 2, ...{hint}")
    return values.astype(np.int32)


def read_test_mask(path: str | Path, split: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns which samples are for testing [N] bool, from 0 or train, and 1 or test."""
    check_length(f"{path}: split", split, len(y))
    words, number = number_names(str(path), "split", split)
    for place, word in enumerate(words):
        if word.lower() not in SPLITS:
            raise InputError(
                f"{path}: split is {shorten(word)} in sample {(number == place).argmax()}, expected"
                " train or test, or 0 or 1: name it so, or leave the rows out"
            )
    return np.array([SPLITS[word.lower()] for word in words], bool)[number]


# names


def sort_names(names: Iterable[str]) -> list[str]:
    """Returns distinct names in order, those that are all whole numbers as numbers: 10 after 2."""
    distinct = set(names)
    if all(re.fullmatch(r"-?[0-9]{1,999}", name) for name in distinct):
        return sorted(distinct, key=lambda name: (int(name), name))
    return sorted(distinct)


def number_names(
    path: str, role: str, values: np.ndarray | Sequence[str]
) -> tuple[list[str], np.ndarray]:
    """Returns the distinct names among text, bytes or numbers [N], each in its one form, in order,
    as `sort_names` does, and the number [N] of each.

    Raises InputError for an empty name, and for one such as NA where all others are numbers; among
    text it is a name as any other.
    """
    found, first = np.unique(np.asarray(values), return_inverse=True)
    forms = [clean_name(value) for value in found.tolist()]
    names = sort_names(forms)
    place = {name: number for number, name in enumerate(names)}
    number = np.array([place[form] for form in forms], int)[first]
    missing = next((name for name in names if name in MISSING), None)
    others = [name for name in names if name not in MISSING]
    if missing == "" or (missing and others and read_numbers(others) is not None):
        sample = int((number == place[missing]).argmax())
        said = f"{missing} in sample {sample} and numbers in others"
        raise InputError(
            f"{path}: {role} is {said if missing else f'empty in sample {sample}'}, expected one in"
            " every row: fill it in or leave the row out"
        )
    return names, number


def read_numbers(names: Sequence[str]) -> np.ndarray | None:
    """Returns the numbers that all names are, int64 where they are whole; None: some are none."""
    if not all(map(NUMBER.fullmatch, names)):
        return None
    values = np.array(names, float)
    whole = (values == np.floor(values)).all() and (np.abs(values) < 2**53).all()
    return values.astype(np.int64) if whole else values


def name_clients(names: Iterable[str]) -> tuple[str | int, ...]:
    """Returns the names of clients as results have them: as numbers, where all of them are."""
    names = tuple(names)
    plain = all(re.fullmatch(r"0|-?[1-9][0-9]{,17}", name) for name in names)
    return tuple(map(int, names)) if plain else names
