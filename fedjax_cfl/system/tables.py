"""Reads tables of the user's own, from .csv or .parquet files."""

import csv
from pathlib import Path

import numpy as np

from fedjax_cfl.errors import InputError


def read_table(path: Path, field: str) -> dict[str, list]:
    """Returns the columns of a .csv or .parquet file by name: of a .csv file as texts, of a
    .parquet file as the values that it stores. Raises InputError, which names `field`, for a
    file that cannot be read.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise InputError(f"{field}: must be a .csv or .parquet file")
    if not path.is_file():
        raise InputError(f"{field}: no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet  # takes a while, and few runs have a table

        try:
            return parquet.read_table(path).to_pydict()
        except (OSError, ValueError) as error:
            raise InputError(f"{field}: {str(error).splitlines()[0]}") from None
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{field}: is no CSV table: {error}") from None
    names = rows[0].keys() if rows else ()
    return {name: [row[name] for row in rows] for name in names}


def read_numbers(columns: dict[str, list], name: str, field: str) -> np.ndarray:
    """Returns the column `name` as an array [rows] float64. Raises InputError, which names
    `field`, if the column is missing or empty, or has anything but finite numbers.
    """
    try:
        values = np.asarray(columns[name], np.float64)
    except KeyError:
        raise InputError(f"{field}: has no column {name}") from None
    except (TypeError, ValueError):
        raise InputError(f"{field}: column {name} must hold numbers") from None
    bad = np.flatnonzero(~np.isfinite(values))
    if not values.size or bad.size:
        place = f" in row {bad[0] + 1}" if bad.size else ""
        raise InputError(f"{field}: column {name} must hold finite numbers{place}")
    return values
