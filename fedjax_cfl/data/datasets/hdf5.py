"""Reader of HDF5 files, for which h5py is needed (`pip install fedjax-cfl[hdf5]`), under
the rules of `readers`.
"""

import contextlib
import importlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.readers import (
    PathLike,
    list_names,
    open_unpacked,
    report_damage,
    shorten,
)
from fedjax_cfl.errors import InputError

# gzip, shuffle, szip and lzf: any other filter may be a plug-in, which is code
FILTERS = (1, 2, 4, 32000)


def read_hdf5(path: PathLike, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns the named arrays, such as "train/data", of an HDF5 file.

    Raises InputError if h5py is missing, if the file is none, if an array is missing,
    is a link or made of other files' data, holds anything but numbers, or is larger
    than a packed file's arrays may be.
    """
    names = tuple(names)
    with _open(path, f"an HDF5 file with arrays {', '.join(names)}") as (h5py, file):
        return {name: _array(h5py, file, name.split("/")) for name in names}


def read_members(
    path: PathLike, group: str, names: Iterable[str]
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the named arrays of every group in the group `group` of a file, in order of the
    names of the inner groups.

    Raises InputError as `read_hdf5` does, and if all arrays together are larger than the file
    and than what a packed file's arrays may be.
    """
    names = tuple(names)
    with _open(path, f"an HDF5 file with a group {group}") as (h5py, file):
        most = max(Path(path).stat().st_size, readers.MAX_UNPACKED_BYTES)
        found = {}
        for member in _find(h5py, file, [group]):
            found[member] = {name: _array(h5py, file, [group, member, name]) for name in names}
            most -= sum(array.nbytes for array in found[member].values())
            if most < 0:  # one array can have many names
                raise ValueError(f"all arrays take more than {readers.MAX_UNPACKED_BYTES} bytes")
        return found


def list_members(path: PathLike, group: str) -> dict[str, str]:
    """Returns name -> type of the arrays in the first group in the group `group` of a file.
    Raises InputError if there is none.
    """
    with _open(path, f"an HDF5 file with a group {group}") as (h5py, file):
        first = next(iter(_find(h5py, file, [group])), None)
        if first is None:
            raise ValueError(f"group {group!r} is empty")
        return {
            name: str(getattr(_find(h5py, file, [group, first, name]), "dtype", "group"))
            for name in _find(h5py, file, [group, first])
        }


@contextlib.contextmanager
def _open(path: PathLike, expected: str) -> Iterator[tuple[Any, Any]]:
    """Yields h5py and an open file; any error of reading it is an `InputError`."""
    try:
        h5py: Any = importlib.import_module("h5py")  # no dependency: few data sets need it
    except ImportError:
        raise InputError(
            f"{path}: h5py is not installed, expected it for HDF5 files: pip install"
            " 'fedjax-cfl[hdf5]'"
        ) from None
    with open_unpacked(Path(path)):  # a regular file
        pass
    with report_damage(path, expected), h5py.File(path, "r") as file:
        yield h5py, file


def _find(h5py: Any, file: Any, parts: list[str]) -> Any:
    """Returns what is in an open file under a name of these parts, without following links,
    which may lead to other files.
    """
    node = file
    for part in parts:
        inside = node if isinstance(node, h5py.Group) else None
        if inside is None or not isinstance(inside.get(part, getlink=True), h5py.HardLink):
            held = f"; found {list_names(list(inside)[:9])}" if inside is not None else ""
            raise ValueError(f"{shorten('/'.join(parts))} is missing or a link{held}")
        node = inside[part]
    return node


def _array(h5py: Any, file: Any, parts: list[str]) -> np.ndarray:
    node, name = _find(h5py, file, parts), shorten("/".join(parts))
    if not isinstance(node, h5py.Dataset) or node.is_virtual or node.external:
        raise ValueError(f"array {name} is none, or made of other files' data")
    size = math.prod(node.shape or ()) * node.dtype.itemsize
    if node.dtype.kind not in "buif" or not size or size > readers.MAX_UNPACKED_BYTES:
        raise ValueError(f"array {name} has type {node.dtype} and {size} bytes")
    made = node.id.get_create_plist()
    filters = [made.get_filter(i)[0] for i in range(made.get_nfilters())]
    if not set(filters) <= set(FILTERS):
        raise ValueError(f"array {name} is packed by filter {max(filters)}, not by gzip or lzf")
    held = node.id.get_storage_size()
    if size > held * (readers.MAX_GZIP_RATIO if filters else 1):  # the rest would be made up
        raise ValueError(f"array {name} asks for {size} bytes, {held} are there")
    return node[()]
