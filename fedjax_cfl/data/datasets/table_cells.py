"""What cells of a table hold: numbers, lists, dates, text; what is refused names column and row."""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedjax_cfl.data.datasets.readers import shorten
from fedjax_cfl.data.datasets.table_files import (
    MISSING,
    is_list,
    is_text,
    parse_numbers,
    pc,
    unwrap,
)
from fedjax_cfl.errors import InputError

MOST_DIMENSIONS = 16  # of lists in lists


class Place(NamedTuple):
    """Where cells are that are read together, for messages."""

    shard: Path
    column: str
    row: int  # of the first
    decimal: str


class Words(NamedTuple):
    """A column of text: the distinct words in order, and the number of each row's [N] int32."""

    words: list[str]
    number: np.ndarray


def _refuse_missing(place: Place, missing: np.ndarray, rows: int = 1) -> None:
    """Raises InputError for the first of values that are missing [n]; `rows` values are a row's."""
    if missing.any():
        row = place.row + int(missing.argmax()) // rows
        raise InputError(
            f"{place.shard}: column {place.column} has no value in row {row} (the first is 1),"
            " expected one in every row: fill it in or leave the row out"
        )


def _find_nulls(cells: pa.Array) -> np.ndarray:
    return cells.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)


def _find_gaps(cells: pa.Array) -> np.ndarray:
    empty = pc.is_in(pc.utf8_trim_whitespace(cells), pa.array(MISSING, cells.type))
    return pc.or_(cells.is_null(), empty).to_numpy(zero_copy_only=False)


def _find_bad(cells: pa.Array, parse: Callable[[pa.Array], Any]) -> int:
    """Returns the place of the first cell that `parse` returns None for."""
    return bisect_left(range(len(cells)), True, key=lambda last: parse(cells[: last + 1]) is None)


def read_features(place: Place, cells: pa.Array) -> np.ndarray:
    """Returns features [n] float32, or [n, ...] of lists, which stay uint8 where they are."""
    if is_list(cells.type):
        return _read_lists(place, cells)
    with np.errstate(over="ignore"):  # an overflow becomes inf, which check_pool reports
        return read_numbers(place, cells).astype(np.float32)


NO_FEATURE = "leave the column out of x, or set number_text=true to number text in sorted order"


def read_numbers(place: Place, cells: pa.Array, remedy: str = NO_FEATURE) -> np.ndarray:
    """Returns numbers [n]; those in text as float64. The `remedy` is for text that is none."""
    if pa.types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if is_text(cells.type):
        numbers = parse_numbers(cells, place.decimal)
        if numbers is None or _find_nulls(numbers).any():  # NaN is how some write a gap
            _refuse_missing(place, _find_gaps(cells))
        if numbers is None:
            bad = _find_bad(cells, partial(parse_numbers, decimal=place.decimal))
            other = {",": ".", ".": ","}[place.decimal]
            hint = f"; decimal={other!r} is the other point" if other in cells[bad].as_py() else ""
            raise InputError(
                f"{place.shard}: column {place.column} is {shorten(cells[bad].as_py())} in row"
                f" {place.row + bad} (the first is 1), expected a number: {remedy}{hint}"
            )
        return numbers.to_numpy()
    _refuse_missing(place, _find_nulls(cells))
    if pa.types.is_decimal(cells.type):
        cells = cells.cast(pa.float64())
    array = cells.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "buif":
        raise InputError(
            f"{place.shard}: column {place.column} has type {cells.type!s:.80}, expected"
            " numbers or text"
        )
    return array


def _read_lists(place: Place, cells: pa.Array) -> np.ndarray:
    rows, shape = len(cells), []
    while is_list(cells.type) and len(cells) and len(shape) < MOST_DIMENSIONS:
        each = max(math.prod(shape), 1)
        _refuse_missing(place, _find_nulls(cells), each)
        lengths = pc.list_value_length(cells).to_numpy(zero_copy_only=False)
        other = lengths != lengths[0]
        if other.any():
            row = place.row + int(other.argmax()) // each
            raise InputError(
                f"{place.shard}: column {place.column} has lists of {lengths[0]} and, in row {row}"
                f" (the first is 1), of {lengths[other][0]} values, expected one length"
            )
        shape.append(int(lengths[0]))
        cells = unwrap(cells.flatten())
    _refuse_missing(place, _find_nulls(cells), max(math.prod(shape), 1))
    values = cells.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "buif":
        raise InputError(
            f"{place.shard}: column {place.column} has lists of type {cells.type!s:.80},"
            f" expected numbers in at most {MOST_DIMENSIONS} dimensions"
        )
    with np.errstate(over="ignore"):
        values = values if values.dtype == np.uint8 else values.astype(np.float32)
    return values.reshape(rows, *shape)


def read_times(place: Place, cells: pa.Array) -> np.ndarray:
    """Returns times [n] as numbers, or dates in microseconds."""
    if pa.types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if is_text(cells.type):
        _refuse_missing(place, _find_gaps(cells))
        if (numbers := parse_numbers(cells, place.decimal)) is not None:
            return numbers.to_numpy()
        dates = _parse_dates(cells)
        if dates is None:
            bad = _find_bad(cells, _parse_dates)
            raise InputError(
                f"{place.shard}: column {place.column} is {shorten(cells[bad].as_py())} in row"
                f" {place.row + bad} (the first is 1), expected whole numbers, or dates as"
                " 2018-02-28 or 2018-02-28 19:06:18"
            )
        cells = dates
    if pa.types.is_timestamp(cells.type) or pa.types.is_date(cells.type):
        _refuse_missing(place, _find_nulls(cells))
        zone = getattr(cells.type, "tz", None)
        cells = cells.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
        return cells.to_numpy().view("datetime64[us]")
    return read_numbers(place, cells)


def _parse_dates(cells: pa.Array) -> pa.Array | None:
    """Returns text [n] as dates, None if a cell is none; all have a time zone, or none has."""
    for zone in (None, "UTC"):
        try:
            return pc.utf8_trim_whitespace(cells).cast(pa.timestamp("us", zone))
        except pa.ArrowInvalid:
            continue
    return None


def number_words(
    place: Place, cells: pa.Array, known: dict[str, int], trim: bool = True
) -> np.ndarray:
    """Returns the number of each cell's word [n] int32; `known` gets the new words. With `trim`
    spaces around a word are left out, and nothing but spaces is a missing word.
    """
    if not pa.types.is_dictionary(cells.type):
        cells = cells.dictionary_encode()
    index = cells.indices.cast(pa.int64()).fill_null(-1).to_numpy()
    words = [*cells.dictionary.to_pylist(), None]  # null is the last one
    number = np.full(len(words), -1, np.int32)
    for i in np.unique(index).tolist():
        word = words[i]
        if trim and word is not None:
            word = word.strip() or None
        if word is not None:
            number[i] = known.setdefault(word, len(known))
    _refuse_missing(place, number[index] < 0)
    return number[index]


def join_parts(
    path: Path, name: str, parts: list[np.ndarray], known: dict[str, int]
) -> np.ndarray | Words:
    """Returns a column of all batches. Raises InputError where they do not fit together."""
    if not parts:
        raise InputError(f"{path}: table has no rows, expected one a sample")
    shapes, dates = {part.shape[1:] for part in parts}, {part.dtype.kind == "M" for part in parts}
    pixels = {part.dtype == np.uint8 and part.ndim > 1 for part in parts}
    if len(shapes) > 1 or len(dates) > 1 or len(pixels) > 1:
        found = sorted({f"{part.dtype} {part.shape[1:]}" for part in parts})
        raise InputError(
            f"{path}: column {name} is {' and '.join(found)}, expected values of one kind and shape"
        )
    joined = np.concatenate(parts)
    if not known:
        return joined
    order = sorted(known)
    rank = np.empty(len(known), np.int32)
    rank[[known[word] for word in order]] = np.arange(len(order), dtype=np.int32)
    return Words(order, rank[joined])
