"""Readers of the three file formats: IDX (MNIST), npz, and LEAF JSON.

A malformed file raises an `InputError` of one line: the file, the field, what is expected. Nothing in a file is ever executed.
"""

import gzip
import json
import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedjax_cfl.errors import InputError

PathLike = str | Path


def _bytes(path: Path) -> bytes:
    """Returns the content of a file, unpacked if it is gzipped (by its first two bytes, so that a renamed file is read too)."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: gzip stream is truncated or damaged ({error}), expected a complete .gz file") from error
    except OSError as error:
        raise InputError(f"{path}: file cannot be read ({error.strerror or error}), expected a readable file") from error


def read_idx(path: PathLike) -> np.ndarray:
    """Returns the uint8 array of an IDX file, plain or gzipped.

    The format: bytes 0, 0, type (8 = uint8), number of dimensions, then each dimension as a big-endian uint32, then the data.
    """
    path = Path(path)
    content = _bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise InputError(f"{path}: magic is 0x{content[:4].hex()}, expected an IDX file (0x0000, type, dimensions)")
    if content[2] != 8:
        raise InputError(f"{path}: type is 0x{content[2]:02x}, expected 0x08 (uint8)")
    header = 4 + 4 * content[3]
    if content[3] == 0 or len(content) < header:
        raise InputError(f"{path}: shape of {content[3]} dimensions in {len(content)} bytes, expected at least one, and a complete header")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", content[3], offset=4))
    if len(content) - header != math.prod(shape):
        raise InputError(f"{path}: size of the data is {len(content) - header} bytes, expected {math.prod(shape)} for shape {shape}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_npz(path: PathLike, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """Returns the named arrays of an npz file; optional ones that are absent are left out, others are not read."""
    path = Path(path)
    required, optional = tuple(required), tuple(optional)
    try:
        archive = np.load(path, allow_pickle=False)
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: file cannot be read ({_line(error)}), expected a complete npz archive") from error
    except ValueError as error:  # NumPy takes any other file for a pickle
        raise InputError(f"{path}: file is not an npz archive, expected one with {', '.join(required)}") from error
    if isinstance(archive, np.ndarray):
        raise InputError(f"{path}: file is a single array, expected an npz archive with {', '.join(required)}")
    with archive:
        for name in required:
            if name not in archive.files:
                raise InputError(f"{path}: array {name!r} is missing, expected {', '.join(required)}; found {', '.join(archive.files)}")
        return {name: _member(path, archive, name) for name in required + optional if name in archive.files}


def _member(path: Path, archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    """Returns one array of an open archive."""
    try:
        array = archive[name]
    except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile, MemoryError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{path}: array {name!r} cannot be read ({_line(error)}), expected a plain array of numbers or strings") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: member {name!r} is not a .npy array, expected a plain array of numbers or strings")
    return array


def read_leaf(paths: PathLike | Iterable[PathLike]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Reads LEAF JSON: one file (plain or .gz), a folder of shards, or several of them.

    Returns x [N, ...] float32, y [N] (int64 or float64, as written), client [N] int32 (index into the names), and the names, sorted.
    Users come in the order of their names, the samples of a user in the order of the file. Source: github.com/TalwalkarLab/leaf.
    """
    folders = [paths] if isinstance(paths, PathLike) else list(paths)
    data = {}  # user -> x [n, ...], y [n], file
    for path in [shard for folder in folders for shard in _shards(Path(folder))]:
        for user, x, y in _shard(path):
            if user in data:
                raise InputError(f"{path}: user {user!r} is also in {data[user][2]}, expected every user in one shard only")
            data[user] = (x, y, path)
    users = sorted(data)
    held = [(user, *data[user]) for user in users if len(data[user][1])]
    if not held:
        raise InputError(f"{', '.join(map(str, folders))}: user_data holds no samples, expected at least one")
    shape = held[0][1].shape[1:]
    for user, x, _, path in held:
        if x.shape[1:] != shape:
            raise InputError(f"{path}: x of user {user!r} has samples of shape {x.shape[1:]}, expected {shape} as in other users")
    client = np.repeat(np.arange(len(users), dtype=np.int32), [len(data[user][1]) for user in users])
    return np.concatenate([x for _, x, _, _ in held]), np.concatenate([y for _, _, y, _ in held]), client, users


def _shards(path: Path) -> list[Path]:
    """Returns the JSON files of a folder in order of name, or the file itself."""
    if not path.is_dir():
        return [path]
    shards = sorted(shard for shard in path.iterdir() if shard.name.endswith((".json", ".json.gz")))
    if not shards:
        raise InputError(f"{path}: folder holds no *.json or *.json.gz, expected LEAF shards")
    return shards


def _shard(path: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Returns (user, x [n, ...], y [n]) for every user of one LEAF file, checked."""
    try:
        shard = json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise InputError(f"{path}: file is not JSON ({_line(error)}), expected LEAF JSON") from error
    for name, kind in {"users": list, "num_samples": list, "user_data": dict}.items():
        if not isinstance(shard, dict) or not isinstance(shard.get(name), kind):
            raise InputError(f"{path}: key {name!r} is missing or no {kind.__name__}, expected users, num_samples and user_data")
    users, sizes, data = shard["users"], shard["num_samples"], shard["user_data"]
    if not all(isinstance(user, str) for user in users) or len(set(users)) != len(users):
        raise InputError(f"{path}: users holds a repeated or non-text name, expected distinct strings")
    if len(sizes) != len(users):
        raise InputError(f"{path}: num_samples has {len(sizes)} entries, expected {len(users)}, one a user")
    if unlisted := sorted(data.keys() - set(users)):
        raise InputError(f"{path}: user_data holds {unlisted[0]!r}, expected only names listed in users")
    return [(user, *_user(path, user, size, data.get(user))) for user, size in zip(users, sizes, strict=True)]


def _user(path: Path, user: str, size: object, held: object) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [n, ...] float32 and y [n] of one user."""
    if not isinstance(held, dict) or "x" not in held or "y" not in held:
        raise InputError(f"{path}: user {user!r} is listed without data, expected user_data[{user!r}] with x and y")
    x, y = (_numbers(path, user, name, held[name]) for name in ("x", "y"))
    if y.ndim != 1:
        raise InputError(f"{path}: y of user {user!r} has shape {y.shape}, expected one label a sample")
    if not len(x) == len(y) == size:
        raise InputError(f"{path}: num_samples of user {user!r} is {size}, expected {len(x)} (x) and {len(y)} (y) to equal it")
    with np.errstate(over="ignore"):  # an overflow becomes inf, which check_pool reports
        return x.astype(np.float32), y


def _numbers(path: Path, user: str, name: str, value: object) -> np.ndarray:
    """Returns a nested list as an array of numbers."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}: {name} of user {user!r} is ragged, expected rows of equal length") from error
    if not isinstance(value, list) or array.dtype.kind not in "iuf":
        raise InputError(f"{path}: {name} of user {user!r} is not numeric ({array.dtype}), expected a list of numbers")
    return array


def _line(error: BaseException) -> str:
    """Returns an exception's text on one line, without the file name."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
