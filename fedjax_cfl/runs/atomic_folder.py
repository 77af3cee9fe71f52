"""Folders that appear whole or not at all, with a SHA-256 of every file."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

ARRAYS, HEADER, MANIFEST = "arrays", "checkpoint.json", "manifest.json"


def write_file(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as handle:
        handle.write(text)


def write_manifest(path: Path) -> None:
    """Writes the manifest of a folder and flushes all of it to the disk."""
    inside = sorted(path.rglob("*"))
    write_file(
        path / MANIFEST,
        to_json(
            {
                file.relative_to(path).as_posix(): hash_file(file)
                for file in inside
                if file.is_file()
            }
        ),
    )
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
    return json.loads((path / MANIFEST).read_text(encoding="utf-8"))


def to_json(value: Any) -> str:
    # No newline at the end: then every truncated file is invalid. NaN and infinities come back
    # as they were.
    return json.dumps(value, indent=1, default=lambda array: array.tolist())


def hash_file(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def explain(error: Exception) -> str:
    if system := re.search(r"os_error_code='(\d+)'", str(error)):  # at the end of Orbax's long text
        return os.strerror(int(system[1]))
    text = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else str(error) or type(error).__name__
    )
    return " ".join(text.split())[:300]
