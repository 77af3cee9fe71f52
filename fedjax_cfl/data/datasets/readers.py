"""Readers of plain and gzipped bytes, IDX (MNIST), npz and HDF5; LEAF JSON is read by `leaf_json`,
tables by pandas.

A file that cannot be read raises an `InputError` of one line: the file, what is wrong and what to
do. Nothing in a file is ever unpickled, and what is gzipped is unpacked to at most
`MAX_UNPACKED_BYTES`.
"""

import contextlib
import gzip
import io
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import shorten

PathLike = str | Path
MAX_UNPACKED_BYTES = 2**31  # of any file that is read at once
PLAIN = (
    "arrays of numbers or text; of objects, which are pickles and never read, store"
    " x.astype(numpy.float32), y.astype(str)"
)
PICKLES = (".pkl", ".pickle", ".pck", ".p", ".joblib", ".pt", ".pth")
SAVE = 'numpy.savez("{stem}.npz", x=x, y=y, client=client)'
PICKLE = f"is a pickle and is not opened, expected an .npz: {SAVE}, where it was made"
# how files of other kinds begin, and what is said of them
KINDS = {
    **dict.fromkeys((b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"), PICKLE),
    b"PK\3\4": (
        "is a zip archive, or a file such as .xlsx, expected what is in it: unpack it, or save it"
        " as CSV"
    ),
    **dict.fromkeys((b"7z\xbc\xaf", b"Rar!"), "is an archive, expected what is in it: unpack it"),
    b"\xd0\xcf\x11\xe0": "is a file of Excel or its kin, expected a table: save it as CSV",
    b"\x1f\x8b": "is packed by gzip, expected it unpacked: gunzip -k {name}",
    b"BZh": "is packed by bzip2, expected it unpacked: bunzip2 -k {name}",
    b"\xfd7zXZ": "is packed by xz, expected it unpacked: xz -dk {name}",
    b"\x89HDF": f"is an HDF5 file, expected an .npz of its arrays: {SAVE}",
    b"PAR1": "is a Parquet file, which dataset=parquet reads",
    **dict.fromkeys(
        (b"\xff\xfe", b"\xfe\xff"),
        "is text in UTF-16, expected UTF-8: iconv -f UTF-16 -t UTF-8 {name}",
    ),
    **dict.fromkeys(
        (b"<!doctype", b"<html"),
        "is a web page, as a download that failed leaves, expected the file itself",
    ),
    b"version https://git-lfs": "points to a file of Git LFS, expected it itself: git lfs pull",
    b"@relation": (
        'is an ARFF file, expected a table: scipy.io.arff.loadarff("{name}")[0] for cfl.from_arrays'
    ),
    b"\x93NUMPY": f"is a single array, expected an .npz: {SAVE}; or a folder, for dataset=npy",
}


def check_file(path: PathLike, magic: bytes | None = None) -> None:
    """Raises InputError for what is no regular file, and says what to do with a file of another
    kind; `magic` is how files of the caller's kind begin.
    """
    name = os.path.basename(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would never answer, a device never end
            raise OSError("not a regular file")
        with open(path, "rb") as file:
            start = file.read(64)
    except (OSError, ValueError) as error:
        # a ValueError is for a name that is none, such as one with a zero byte
        named = path if isinstance(error, OSError) else repr(str(path))
        raise InputError(
            f"{named}: file cannot be read ({line_of(error)}), expected a readable file"
        ) from error
    begins = (kind for kind in KINDS if start.startswith(kind) or start.lower().startswith(kind))
    said = "".join(KINDS[kind] for kind in begins if kind != magic)
    if name.lower().endswith(PICKLES):
        said = PICKLE
    elif name.lower().endswith((".tar", ".tar.gz", ".tgz")):
        said = "is an archive, expected what is in it: tar xf {name}"
    if said:
        raise InputError(f"{path}: {said.format(name=name, stem=name.partition('.')[0])}")


@contextlib.contextmanager
def open_unpacked(path: PathLike) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    """Yields a file, unpacked if gzipped (by its first two bytes, so that a renamed file is read
    too).
    """
    check_file(path, b"\x1f\x8b")
    with report_damage(path, "a complete file, gzipped or not"), open(path, "rb") as file:
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        yield gzip.GzipFile(fileobj=file) if packed else file


def read_unpacked(path: PathLike) -> bytearray:
    """Returns the content of a file, unpacked if gzipped, of at most `MAX_UNPACKED_BYTES`."""
    content = bytearray()
    with open_unpacked(path) as file:
        while piece := file.read(2**20):  # memory grows with what is there
            content += piece
            if len(content) > MAX_UNPACKED_BYTES:
                raise InputError(
                    f"{path}: file holds more than {MAX_UNPACKED_BYTES} bytes, expected at most so"
                    " many; split it"
                )
    return content


@contextlib.contextmanager
def report_damage(path: PathLike, expected: str, what: str = "file") -> Iterator[None]:
    """Turns whatever a library raises for a damaged file into an InputError that names it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{path}: {what} cannot be read ({line_of(error)}), expected {expected}"
        ) from error


def read_files(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of files, one after another."""
    for path in paths:
        check_file(path)
        yield str(path), path.read_bytes()


def read_idx(path: PathLike) -> np.ndarray:
    """Returns the uint8 array of an IDX file, plain or gzipped.

    The format: bytes 0, 0, type (8 = uint8), number of dimensions, then each dimension
    as a big-endian uint32, then the data.
    """
    content = read_unpacked(path)
    if content[:3] != b"\0\0\x08" or not any(content[3:4]):
        raise InputError(
            f"{path}: begins with 0x{content[:4].hex()}, expected an IDX file of uint8 (0x000008,"
            " then the number of dimensions)"
        )
    begin = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content, ">u4", min(begin, len(content)) // 4)[1:].tolist())
    size = math.prod(shape)
    if len(shape) < content[3] or not size or len(content) != begin + size:
        raise InputError(
            f"{path}: holds {len(content)} bytes, expected {begin + size} for shape {shape} of"
            f" {content[3]} dimensions, none of which is 0"
        )
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def read_npz(
    path: PathLike, required: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """Returns the named arrays of an npz file; optional ones that are absent are left
    out, others are not read. Raises InputError for a file that cannot be read, for a
    required array that is not there, and for arrays of objects.
    """
    required = tuple(required)
    check_file(path, b"PK\3\4")
    expected = f"a complete npz archive as numpy.savez writes it, with {', '.join(required)}"
    arrays = {}
    with report_damage(path, expected), np.load(path, allow_pickle=False) as archive:
        found = archive.files
        for name in [name for name in (*required, *optional) if name in found]:
            with report_damage(path, PLAIN, f"array {name!r}"):
                arrays[name] = archive[name]
                if isinstance(arrays[name], bytes):
                    raise ValueError("it is no array")
    for name in required:
        if name not in arrays:
            raise InputError(
                f"{path}: array {name!r} is missing, expected {', '.join(required)}; found"
                f" {list_names(found) or 'none'}: store them so, by numpy.savez"
            )
    return arrays


def read_hdf5(path: PathLike, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns the named arrays, such as "train/data", of an HDF5 file. Raises InputError if h5py
    is missing, and for a file that cannot be read or lacks an array.
    """
    names = tuple(names)
    try:
        import h5py  # no dependency: one data set needs it
    except ImportError:
        raise InputError(
            f"{path}: h5py is not installed, expected it for HDF5 files: pip install"
            " 'fedjax-cfl[hdf5]'"
        ) from None
    check_file(path, b"\x89HDF")
    with report_damage(path, f"an HDF5 file with arrays {', '.join(names)}"):
        with h5py.File(path, "r") as file:
            return {name: np.asarray(file[name]) for name in names}


def list_names(names: Sequence[str]) -> str:
    """Returns names for a message, not all if they are many."""
    return ", ".join(shorten(name)[1:-1] for name in names[:9]) + (" ..." if names[9:] else "")


def line_of(error: BaseException) -> str:
    """Returns an exception's text on one line, without the file name."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
