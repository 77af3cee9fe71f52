"""Reader of tables of numbers: comma-separated text with a header, plain or gzipped."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_cfl.data.datasets.readers import open_unpacked, shorten
from fedjax_cfl.errors import InputError

MAX_TEXT_BYTES = 2**27  # of a table, unpacked


def read_columns(path: Path, header: Sequence[str] | None = None) -> np.ndarray:
    """Reads a table [rows, columns] float64. Raises InputError for another `header` than
    expected (None: any), and for anything but finite numbers in equally long rows.
    """
    with open_unpacked(path) as (file, _):
        text = file.read(MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise InputError(f"{path}: table is too large, expected at most {MAX_TEXT_BYTES} bytes")
    first, *lines = text.decode("utf-8", "replace").splitlines() or [""]
    names = first.split(",")
    if header is not None and names != list(header):
        raise InputError(f"{path}: header is {shorten(first)}, expected {','.join(header)}")
    if not lines:
        raise InputError(f"{path}: table has no rows, expected at least one")
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            row = [float(value) for value in line.split(",")]
        except ValueError:
            row = []
        if len(row) != len(names) or not np.isfinite(row).all():
            raise InputError(
                f"{path}: line {number} is {shorten(line)}, expected {len(names)} finite numbers"
            )
        rows.append(row)
    return np.array(rows)
