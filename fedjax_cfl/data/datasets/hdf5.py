"""Reader of HDF5 files, for which h5py is needed (`pip install fedjax-cfl[hdf5]`), under
the rules of `readers`.
"""

import importlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.readers import PathLike, line_of, open_unpacked
from fedjax_cfl.errors import InputError


def read_hdf5(path: PathLike, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns the named arrays, such as "train/data", of an HDF5 file.

    Raises InputError if h5py is missing, if the file is none, if an array is missing,
    is a link or made of other files' data, holds anything but numbers, or is larger
    than a packed file's arrays may be.
    """
    try:
        h5py: Any = importlib.import_module("h5py")  # no dependency: one data set needs it
    except ImportError:
        raise InputError(
            f"{path}: h5py is not installed, expected it for HDF5 files: pip install"
            " 'fedjax-cfl[hdf5]'"
        ) from None
    path = Path(path)
    with open_unpacked(path):  # a regular file
        pass
    try:
        with h5py.File(path, "r") as file:
            return {name: _array(h5py, file, name) for name in names}
    except Exception as error:  # a damaged file raises many kinds
        raise InputError(
            f"{path}: file cannot be read ({line_of(error)}), expected an HDF5 file with arrays"
            f" {', '.join(names)}"
        ) from error


def _array(h5py: Any, file: Any, name: str) -> np.ndarray:
    """Returns one array of an open file."""
    node = file
    for part in name.split("/"):
        # other links may lead to other files
        if not isinstance(node, h5py.Group) or not isinstance(
            node.get(part, getlink=True), h5py.HardLink
        ):
            raise ValueError(f"array {name!r} is missing or a link")
        node = node[part]
    if not isinstance(node, h5py.Dataset) or node.is_virtual or node.external:
        raise ValueError(f"array {name!r} is none, or made of other files' data")
    size = math.prod(node.shape or ()) * node.dtype.itemsize
    if node.dtype.kind not in "buif" or not size or size > readers.MAX_UNPACKED_BYTES:
        raise ValueError(f"array {name!r} has type {node.dtype} and {size} bytes")
    return node[()]
