"""The user's own files: an .npz, a folder of .npy (memory-mapped), LEAF's JSON."""

import os
from pathlib import Path

import numpy as np

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.pool import _compact, _test_mask, check_pool
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import PositiveInt


def npz(path: str, num_classes: PositiveInt | None = None) -> Pool:
    """Returns the user's own arrays `x` [N, ...] and `y` [N], with optional `client`
    [N] and `split` [N] (0 train, 1 test).

    uint8 features are read as x / 255; all others become float32 as they are. Labels,
    clients and split may be of any type of number, also bool, as long as they are
    whole.
    """
    arrays = readers.read_npz(os.path.expanduser(path), ("x", "y"), ("client", "split"))
    test = _test_mask(path, arrays["split"], arrays["y"]) if "split" in arrays else None
    return check_pool(
        Pool(arrays["x"], arrays["y"], num_classes, arrays.get("client"), test), str(path)
    )


def leaf(path: str, num_classes: PositiveInt | None = None) -> Pool:
    """Returns any LEAF JSON data set of arrays: a file, a folder of shards, or a folder
    with train/ and test/ (then `test` is set).
    """
    root = Path(os.path.expanduser(path))  # Path.expanduser and is_dir raise errors of their own
    parts = [
        readers.read_leaf(part)
        for part in ((root / "train", root / "test") if os.path.isdir(root / "train") else (root,))
    ]
    users = sorted({user for *_, names in parts for user in names})
    number = {user: k for k, user in enumerate(users)}
    for x, *_ in parts:
        if x.shape[1:] != parts[0][0].shape[1:]:
            raise InputError(
                f"{path}: x in test has samples of shape {x.shape[1:]}, expected"
                f" {parts[0][0].shape[1:]} as in train"
            )
    x, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    client = np.concatenate(
        [np.array([number[user] for user in names])[index] for _, _, index, names in parts]
    )
    test = np.repeat([False, True], [len(part[1]) for part in parts]) if len(parts) == 2 else None
    return check_pool(Pool(x, y, num_classes, _compact(client), test), str(path))


CHECK_BYTES = 2**27  # bytes checked at once


def npy(path: str, num_classes: PositiveInt | None = None) -> Pool:
    """Returns `x.npy` [N, ...] (uint8, read as x / 255, or float32), which stays on the
    disk, and `y.npy`, `client.npy`, `split.npy` [N].

    The last two may be missing; split is 0 for train and 1 for test. Raises InputError
    for what `sources.npz` would refuse, and for an x of another type, which could not
    stay on the disk.
    """
    folder = Path(os.path.expanduser(path))
    x, y, client, split = (
        _map_array(folder / f"{name}.npy", needed=name in "xy")
        for name in ("x", "y", "client", "split")
    )
    if x.dtype not in (np.uint8, np.float32) or not x.dtype.isnative:
        raise InputError(
            f"{folder / 'x.npy'}: x has dtype {x.dtype}, expected uint8 or float32 in this"
            " machine's byte order"
        )
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or not x.size:
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
    stand_in = np.zeros((len(y), 1), np.uint8)  # x has been checked; the rest as in any pool
    pool = check_pool(Pool(stand_in, y, num_classes, client, split), str(folder))
    if split is not None and not np.isin(split, (0, 1)).all():
        raise InputError(f"{folder / 'split.npy'}: expected 0 (train) and 1 (test)")
    return pool._replace(x=x)


def _map_array(path: Path, needed: bool) -> np.ndarray | None:
    """Returns a file's array, memory-mapped; None if it is not there and need not be."""
    try:
        if not path.exists() and not needed:
            return None
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split())
        raise InputError(
            f"{path}: file cannot be read ({reason}), expected an array as numpy.save writes it"
        ) from None
