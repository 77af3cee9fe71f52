"""Folders that appear whole or not at all, with a SHA-256 of every file."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ARRAYS, HEADER, MANIFEST = "arrays", "checkpoint.json", "manifest.json"


def write_file(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as handle:
        handle.write(text)


def write_manifest(path: Path) -> None:
    """Writes the manifest of a folder and flushes all of it to the disk."""
    inside = sorted(path.rglob("*"))
    files = [file for file in inside if file.is_file()]
    digests = {file.relative_to(path).as_posix(): hash_file(file) for file in files}
    write_file(path / MANIFEST, to_json(digests))
    for item in (*inside, path / MANIFEST, path):
        flush(item)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # not every file system can flush a folder
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def read_manifest(path: Path) -> dict[str, str]:
    """Returns the SHA-256 of the files of a folder, by their name in it. Raises ValueError for
    names that lead out of it.
    """
    manifest = json.loads(read_regular(path / MANIFEST))
    if not isinstance(manifest, dict):
        raise ValueError(f"{MANIFEST} is no JSON object")
    for name in manifest:
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or "\0" in name:
            raise ValueError(f"{MANIFEST} names {name!r}, which is not in the folder")
    return manifest


def check_folder(path: Path) -> None:
    """Raises ValueError unless every file of a folder is as its manifest says, and its arrays
    have no others: a pipe among them would never answer.
    """
    manifest = read_manifest(path)
    for item in sorted((path / ARRAYS).rglob("*")):
        name = item.relative_to(path).as_posix()
        if name not in manifest and (item.is_symlink() or not item.is_dir()):
            raise ValueError(f"{name} is not in {MANIFEST}")
    for name, digest in manifest.items():
        if hash_file(path / name) != digest:
            raise ValueError(f"{name} has changed since it was written")


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file for reading. Raises ValueError for a pipe or a device, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is opened at once
    with open(descriptor, "rb") as handle:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        yield handle


def read_regular(path: Path) -> bytes:
    """Returns the bytes of a file. Raises ValueError as `open_regular` does."""
    with open_regular(path) as handle:
        return handle.read()


def to_json(value: Any) -> str:
    # No newline at the end: then every truncated file is invalid. NaN and infinities come back
    # as they were.
    return json.dumps(value, indent=1, default=lambda array: array.tolist())


def hash_file(path: Path) -> str:
    with open_regular(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def explain(error: Exception) -> str:
    if system := re.search(r"os_error_code='(\d+)'", str(error)):  # at the end of Orbax's long text
        return os.strerror(int(system[1]))
    said = error.strerror if isinstance(error, OSError) else None
    text = said or str(error) or type(error).__name__
    return " ".join(text.split())[:300]
