"""Readers of IDX (MNIST) and npz; LEAF JSON is read by `leaf_json`.

A malformed file raises an `InputError` of one line: the file, the field, what is
expected. Nothing in a file is ever executed or written, and no size is believed: memory
is taken only for what the file on disk can hold, unpacked at most
`MAX_UNPACKED_BYTES`.
"""

import contextlib
import gzip
import io
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from fedjax_cfl.data.datasets.pickles import PFLLIB, is_pickle, refuse_pickle
from fedjax_cfl.errors import InputError

PathLike = str | Path
Unpacked = io.BufferedReader | gzip.GzipFile
# of an array out of a packed file, of any IDX array, and of the Python objects of a JSON file
MAX_UNPACKED_BYTES = 2**31
MAX_GZIP_RATIO = 1032  # deflate packs at most so much into one byte
READ_BYTES = 2**20  # bytes read at once
NO_OBJECTS = "arrays of objects are never read: store x.astype(numpy.float32), y.astype(str)"


@contextlib.contextmanager
def open_unpacked(path: Path) -> Iterator[tuple[Unpacked, int]]:
    """Yields a file, unpacked if gzipped (by its first two bytes, so that a renamed
    file is read too), and the most bytes it can hold.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would never answer, a device never end
            raise OSError("not a regular file")
        with path.open("rb") as file:
            size, start = os.fstat(file.fileno()).st_size, file.peek(2)[:2]
            if is_pickle(path.name, start):
                raise refuse_pickle(path)
            if start == b"\x1f\x8b":
                yield gzip.GzipFile(fileobj=file), min(MAX_GZIP_RATIO * size, MAX_UNPACKED_BYTES)
            else:
                yield file, min(size, MAX_UNPACKED_BYTES)
    except InputError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: gzip stream is truncated or damaged ({line_of(error)}), expected a complete"
            " .gz file"
        ) from error
    except (OSError, ValueError, MemoryError) as error:
        # a ValueError is for a name that is none, such as one with a zero byte
        named = path if isinstance(error, OSError) else repr(str(path))
        raise InputError(
            f"{named}: file cannot be read ({line_of(error)}), expected a readable file"
        ) from error


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


def list_folder(path: Path, expected: str = "a readable folder") -> list[str]:
    """Returns the names in a folder, sorted. Raises InputError where it cannot be read."""
    with report_damage(path, expected, "folder"):
        return sorted(os.listdir(path))


def read_at_most(file: Unpacked, most: int) -> bytearray:
    """Returns at most `most` bytes; memory grows with what is there, not with `most`."""
    content = bytearray()
    while len(content) < most and (piece := file.read(min(READ_BYTES, most - len(content)))):
        content += piece
    return content


def read_files(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of files, one after another."""
    for path in paths:
        with open_unpacked(path) as (file, most):
            yield str(path), bytes(read_at_most(file, most))


def read_idx(path: PathLike) -> np.ndarray:
    """Returns the uint8 array of an IDX file, plain or gzipped.

    The format: bytes 0, 0, type (8 = uint8), number of dimensions, then each dimension
    as a big-endian uint32, then the data.
    """
    path = Path(path)
    with open_unpacked(path) as (file, most):
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0":
            raise InputError(
                f"{path}: magic is 0x{head.hex()}, expected an IDX file (0x0000, type, dimensions)"
            )
        if head[2] != 8:
            raise InputError(f"{path}: type is 0x{head[2]:02x}, expected 0x08 (uint8)")
        sizes = file.read(4 * head[3])
        if not 1 <= head[3] <= 8 or len(sizes) < 4 * head[3]:
            raise InputError(
                f"{path}: shape of {head[3]} dimensions in {len(sizes)} bytes, expected 1 to 8, and"
                " a complete header"
            )
        shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
        size = math.prod(shape)
        if size == 0:
            raise InputError(f"{path}: shape is {shape}, expected at least one in each dimension")
        if size > most:
            raise InputError(
                f"{path}: size of the data is {most} bytes or less, expected {size} for shape"
                f" {shape}"
            )
        # one more, which must not be there; at the end of a .gz its checksum is compared
        data = read_at_most(file, size + 1)
    if len(data) != size:
        more = " or more" if len(data) > size else ""
        raise InputError(
            f"{path}: size of the data is {len(data)} bytes{more}, expected {size} for shape"
            f" {shape}"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_npz(
    path: PathLike, required: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """Returns the named arrays of an npz file; optional ones that are absent are left
    out, others are not read.
    """
    path = Path(path)
    required, optional = tuple(required), tuple(optional)
    with open_unpacked(path) as (file, _):
        start, size = file.peek(6)[:6], path.stat().st_size
        if start == b"\x93NUMPY":
            raise InputError(
                f"{path}: file is a single array, expected an npz archive with"
                f" {', '.join(required)}"
            )
        if isinstance(file, gzip.GzipFile) or (start and start[:2] != b"PK"):
            raise InputError(
                f"{path}: file is not an npz archive, expected one with {', '.join(required)}"
            )
        with report_damage(path, "a complete npz archive"):
            archive = zipfile.ZipFile(file)
        with archive:
            names = [info.filename.removesuffix(".npy") for info in archive.infolist()]
            if any(name.endswith("/data.pkl") for name in names):  # as torch.save packs it
                raise refuse_pickle(path, torch=True)
            if names == ["data"] and _holds_objects(archive):
                raise InputError(f"{path}: data.npy is {PFLLIB}")
            for name in required:
                if name not in names:
                    found = ", ".join(shorten(name) for name in names[:9]) or "none"
                    raise InputError(
                        f"{path}: array {name!r} is missing, expected {', '.join(required)}; found"
                        f" {found}"
                    )
            return {
                name: _member(path, archive, name, size)
                for name in required + optional
                if name in names
            }


def _member(path: Path, archive: zipfile.ZipFile, name: str, size: int) -> np.ndarray:
    infos = [info for info in archive.infolist() if info.filename in (name, f"{name}.npy")]
    if len(infos) > 1:
        raise InputError(f"{path}: array {name!r} is there {len(infos)} times, expected each once")
    (info,) = infos
    # a damaged member, or a header made to confuse NumPy's parser, raises many kinds
    with report_damage(path, "a plain array of numbers or strings", f"array {name!r}"):
        # the others take memory as the file tells them to
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"its compression is method {info.compress_type}, not stored or deflated"
            )
        with archive.open(info) as member:
            dtype, nbytes, start = _header(member)
        if dtype.kind == "O":
            raise ValueError(f"its type is object; {NO_OBJECTS}")
        packed = info.compress_type == zipfile.ZIP_DEFLATED
        if packed and nbytes > MAX_UNPACKED_BYTES:
            raise ValueError(
                f"its header asks for {nbytes} bytes, more than {MAX_UNPACKED_BYTES} must be stored"
                " uncompressed, by numpy.savez"
            )
        most = min(MAX_GZIP_RATIO * size, MAX_UNPACKED_BYTES) if packed else size
        if start + nbytes != info.file_size or nbytes > most:
            held = min(max(info.file_size - start, 0), most)
            raise ValueError(f"its header asks for {nbytes} bytes, {held} or less are there")
        if dtype.names is not None or dtype.kind not in "buifcSUMm" or dtype.itemsize == 0:
            raise ValueError(f"its type is {shorten(str(dtype))}")
        with archive.open(info) as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
            if member.read(1):  # none is left; at the end the checksum is compared
                raise ValueError("it has more data than its shape")
        return array


def _holds_objects(archive: zipfile.ZipFile) -> bool:
    """Returns whether the only member of an open archive is an array of objects."""
    try:
        with archive.open(archive.infolist()[0]) as member:
            return _header(member)[0].kind == "O"
    except Exception:  # a damaged member raises many kinds; it is refused when it is read
        return False


def _header(member: IO[bytes]) -> tuple[np.dtype, int, int]:
    """Returns the type of a .npy array, its size in bytes as the header claims, and
    where the data start.
    """
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(member)
    if version not in readers:
        raise ValueError(f"its format is {version[0]}.{version[1]}, not 1.0 or 2.0")
    shape, _, dtype = readers[version](member)
    if any(isinstance(n, bool) or n < 0 for n in shape):
        raise ValueError(f"its shape is {shorten(shape)}")
    return dtype, math.prod(shape) * dtype.itemsize, member.tell()


def shorten(value: object) -> str:
    """Returns a value as a message can show it: on one line, and not whole if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def list_names(names: Sequence[str]) -> str:
    """Returns names for a message, not all if they are many."""
    return ", ".join(shorten(name)[1:-1] for name in names[:9]) + (" ..." if names[9:] else "")


def line_of(error: BaseException) -> str:
    """Returns an exception's text on one line, without the file name."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
