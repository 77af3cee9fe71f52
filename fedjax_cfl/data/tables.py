"""Reads tables of numbers from .csv, .csv.gz and .parquet files, by pyarrow."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets.readers import open_unpacked, read_at_most, shorten
from fedjax_cfl.errors import InputError

MAX_TEXT_BYTES = 2**27  # of a table of text, unpacked
ENDINGS = (".csv", ".csv.gz", ".parquet")


def read_table(path: Path, field: str) -> Any:
    """Returns a table of pyarrow. Raises InputError, which names `field`, for a file that cannot be
    read.
    """
    import pyarrow as pa  # takes a while, and few runs have a table
    import pyarrow.csv
    import pyarrow.parquet

    if not path.name.endswith(ENDINGS):
        raise InputError(f"{field}: must be a .csv or .parquet file")
    if not path.is_file():
        raise InputError(f"{field}: no such file")
    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path)
        with open_unpacked(path) as (file, most):
            text = bytes(read_at_most(file, min(most, MAX_TEXT_BYTES) + 1))
        if len(text) > MAX_TEXT_BYTES:
            raise InputError(f"{field}: is too large, expected at most {MAX_TEXT_BYTES} bytes")
        return pyarrow.csv.read_csv(io.BytesIO(text))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{field}: cannot be read as a table: {shorten(reason)}") from None


def read_numbers(table: Any, name: str, field: str) -> np.ndarray:
    """Returns the column `name` of a table as an array [rows] float64. Raises InputError, which
    names `field`, if the column is missing or empty, or has anything but finite numbers.
    """
    import pyarrow as pa

    if table.column_names.count(name) != 1:
        raise InputError(f"{field}: has no column {name}")
    column, kinds = table[name], pa.types
    readable = kinds.is_integer, kinds.is_floating, kinds.is_null
    if len(column) and not any(is_kind(column.type) for is_kind in readable):
        raise InputError(f"{field}: column {name} must hold numbers")
    values = np.asarray(column.to_pylist(), np.float64)  # null is NaN
    bad = np.flatnonzero(~np.isfinite(values))
    if not values.size or bad.size:
        place = f" in row {bad[0] + 1}" if bad.size else ""
        raise InputError(f"{field}: column {name} must hold finite numbers{place}")
    return values


def read_columns(path: Path, header: Sequence[str] | None = None) -> np.ndarray:
    """Reads a table [rows, columns] float64. Raises InputError for another `header` than
    expected (None: any), and for anything but finite numbers.
    """
    table = read_table(path, str(path))
    if header is not None and table.column_names != list(header):
        said = shorten(",".join(table.column_names))
        raise InputError(f"{path}: header is {said}, expected {','.join(header)}")
    names = table.column_names
    return np.stack([read_numbers(table, name, str(path)) for name in names], axis=1)
