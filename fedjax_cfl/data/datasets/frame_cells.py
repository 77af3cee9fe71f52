"""What the cells of a table's columns hold: numbers, text, dates, lists, images.

Text of which half the cells are numbers is numbers, so that a typing error is refused with its row.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pandas as pd

from fedjax_cfl.data.datasets.image_files import Mode, stack_images
from fedjax_cfl.data.datasets.pool import MISSING, number_names
from fedjax_cfl.data.tables import Table
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import shorten

Kind = Literal["numbers", "text", "dates", "lists", "images", "others"]
NUMBERS = ("integer", "floating", "mixed-integer-float", "boolean", "decimal")  # as pandas infers
ZONE = r"(?:Z|[+-]\d\d:?\d\d)$"  # of a date
NO_FEATURE = "leave the column out of x, or set number_text=true to number text in sorted order"


def find_kind(column: pd.Series) -> Kind:
    """Returns what a column holds."""
    inferred = infer_type(column)
    if inferred in (*NUMBERS, "empty"):
        return "numbers"
    if inferred in ("date", "datetime", "datetime64"):
        return "dates"
    if inferred == "bytes":
        return "images"
    first = next(iter(column.dropna()), None)
    if inferred == "string" or isinstance(first, str | int | float):
        words = _strip(column)
        words = words[column.notna() & ~words.isin(MISSING)]
        numbers = pd.to_numeric(words, errors="coerce").notna()
        return "numbers" if len(words) and numbers.mean() >= 0.5 else "text"
    if isinstance(first, list | tuple | np.ndarray):
        return "lists"
    return "images" if isinstance(first, dict) and "bytes" in first else "others"


def infer_type(column: pd.Series) -> str:
    """Returns what pandas infers of a column, of categories that of their values."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        column = pd.Series(column.cat.categories)
    if pd.api.types.is_bool_dtype(column.dtype):
        return "boolean"
    if pd.api.types.is_numeric_dtype(column.dtype) and column.dtype.kind != "c":
        return "floating"  # also where pandas knows no better, as of Arrow's decimals
    return pd.api.types.infer_dtype(column, skipna=True)


def _strip(column: pd.Series) -> pd.Series:
    return column.astype(str).str.strip()


def refuse_missing(table: Table, name: str, missing: pd.Series) -> None:
    """Raises InputError, with the row, for a column in which values are missing [N]."""
    if missing.any():
        expected = "one in every row: fill it in, or leave the row or the column out"
        table.refuse(name, int(missing.to_numpy().argmax()), "has no value", expected)


def read_numbers(table: Table, name: str, remedy: str = NO_FEATURE) -> np.ndarray:
    """Returns numbers [N]; those in text as float64. The `remedy` is for a cell that is none."""
    column = table.frame[name]
    refuse_missing(table, name, column.isna())
    if isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(column.cat.categories.dtype)
    column = column.infer_objects()
    if pd.api.types.is_numeric_dtype(column.dtype):
        return column.to_numpy(getattr(column.dtype, "numpy_dtype", None))
    words = _strip(column)
    numbers = _parse(words, table.decimal)
    bad = numbers.isna().to_numpy()
    if bad.any():
        refuse_missing(table, name, words.isin(MISSING))
        row, other = int(bad.argmax()), "," if table.decimal == "." else "."
        hint = f"; decimal={other!r} is the other point" if other in words.iloc[row] else ""
        said = f"is {shorten(column.iloc[row])}"
        table.refuse(name, row, said, f"a number: {remedy}{hint}")
    return numbers.to_numpy(np.float64)


def _parse(words: pd.Series, decimal: str) -> pd.Series:
    """Returns words as numbers, NaN where they are none."""
    if decimal == ",":
        words = words.str.translate(str.maketrans(",.", ".,"))
    return pd.to_numeric(words, errors="coerce")


def read_feature(table: Table, name: str, number_text: bool) -> np.ndarray:
    """Returns a column of features [N], of text as numbers in sorted order."""
    if number_text and find_kind(table.frame[name]) == "text":
        words = read_words(table._replace(decimal="."), name)  # of text a comma is a comma
        return number_names(table.name, name, words)[1]
    return read_numbers(table, name)


def read_lists(table: Table, name: str) -> np.ndarray:
    """Returns lists of one shape [N, ...], uint8 where they are."""
    column = table.frame[name]
    refuse_missing(table, name, column.isna())
    values: list[np.ndarray] = []
    for row, cell in enumerate(column):
        try:
            value = np.array(_plain(cell))
        except ValueError:  # lists of unequal lengths in it
            value = np.empty(0, object)
        if value.dtype.kind not in "buif" or not value.size:
            wrong = "lists of unequal lengths, of text, or with gaps, or an empty one"
        elif values and value.shape != values[0].shape:
            wrong = f"{value.shape} values, and {values[0].shape} before it"
        elif values and (value.dtype == np.uint8) != (values[0].dtype == np.uint8):
            wrong = f"{value.dtype} values, and {values[0].dtype} before it"
        else:
            values.append(value)
            continue
        table.refuse(name, row, f"has {wrong},", "numbers, as many in each row")
    with np.errstate(over="ignore"):
        whole = np.stack(values)
        return whole if whole.dtype == np.uint8 else whole.astype(np.float32)


def _plain(value: Any) -> Any:
    """Returns a list, also nested, without arrays of arrays."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    return [_plain(each) for each in value] if isinstance(value, list | np.ndarray) else value


def read_images(table: Table, name: str, size: list[int] | None, mode: Mode) -> np.ndarray:
    """Returns the images [N, H, W, C] of a column of their bytes."""

    def contents() -> Iterator[tuple[str, bytes]]:
        for row, cell in enumerate(table.frame[name]):
            inside = isinstance(cell, dict)
            content = cell["bytes"] if inside else cell
            if not isinstance(content, bytes) or not content:
                what = "no bytes, at most a path" if inside else "no value"
                remedy = "datasets.load_dataset(...).save_to_disk(FOLDER) embeds them"
                table.refuse(name, row, f"has {what}", f"the bytes of an image; {remedy}")
            yield f"{table.name}: column {name} in {table.describe_row(row)}", content

    return stack_images(table.name, contents(), len(table.frame), size, mode)


def read_words(table: Table, name: str) -> np.ndarray:
    """Returns a column of text or bytes [N]; a decimal comma of numbers is a point."""
    column = table.frame[name]
    refuse_missing(table, name, column.isna() | (_strip(column) == ""))
    if table.decimal == ",":
        number = r"^(\s*[-+]?\d+),(\d+\s*)$"
        column = column.astype(str).str.replace(number, r"\1.\2", regex=True)
    return np.array([value if isinstance(value, bytes) else str(value) for value in column], object)


def read_names(table: Table, name: str) -> np.ndarray:
    """Returns what a column of labels, clients, splits or groups holds [N]: numbers, or text, such
    as True and False, which a CSV cannot tell from text.
    """
    inferred = infer_type(table.frame[name])
    if inferred in ("string", "bytes", "boolean", "empty"):
        return read_words(table, name)
    if inferred in NUMBERS:
        return read_numbers(table, name)
    kinds = "numbers and text" if inferred.startswith("mixed") else inferred
    raise InputError(
        f"{table.name}: column {name} holds {kinds}, expected numbers or text, one of them in all"
        " rows and files"
    )


def read_targets(table: Table, name: str) -> np.ndarray:
    """Returns numbers to regress [N], or lists of labels [N, T]."""
    if find_kind(table.frame[name]) == "lists":
        return read_lists(table, name)
    return read_numbers(table, name, "fill it in or leave the row out")


def read_times(table: Table, name: str) -> np.ndarray:
    """Returns times [N] as numbers, or dates."""
    column = table.frame[name]
    if infer_type(column) in ("string", "empty"):
        words = _strip(column)
        refuse_missing(table, name, column.isna() | words.isin(MISSING))
        if (numbers := _parse(words, table.decimal)).notna().all():
            return numbers.to_numpy()
        zoned = words.str.contains(ZONE)  # of all dates, or of none
        column = pd.to_datetime(words, format="ISO8601", errors="coerce", utc=True)
        bad = (column.isna() | (zoned != zoned.iloc[0])).to_numpy()
        if bad.any():
            row = int(bad.argmax())
            dates = "whole numbers, or dates as 2018-02-28 or 2018-02-28 19:06:18"
            table.refuse(name, row, f"is {shorten(words.iloc[row])}", dates)
    elif find_kind(column) != "dates":
        return read_numbers(table, name)
    refuse_missing(table, name, column.isna())
    dates = pd.to_datetime(column, utc=True).dt.tz_localize(None)
    return dates.to_numpy("datetime64[us]")
