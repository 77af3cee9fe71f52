"""Columns of a Hugging Face data set: which is what, and their values as arrays.

A feature is what the JSON beside the files, or in them, says of a column, as {"_type":
"ClassLabel", "names": [...]}; files of other tools have none, and their Arrow types count.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedjax_cfl.data.datasets.arrow_files import (
    is_binary,
    is_list,
    is_number,
    is_text,
    storage_type,
    unwrap,
)
from fedjax_cfl.data.datasets.files import count_seconds
from fedjax_cfl.data.datasets.image_files import stack_images
from fedjax_cfl.data.datasets.pool import name_clients, number_names
from fedjax_cfl.data.datasets.readers import list_names, shorten
from fedjax_cfl.errors import InputError

ARRAYS = ("Array2D", "Array3D", "Array4D", "Array5D")
LISTS = ("List", "Sequence", "LargeList")
MOST_AXES = 16  # of one sample; each is a pass over the values
SIDES = {"train": 0, "training": 0, "test": 1, "testing": 1}
MAP = 'datasets.Dataset.map(lambda row: {{"image": row["image"]'
REMEDIES = MAP + ".resize(({width},{height}))}})", MAP.format() + '.convert("RGB")})'
PUBLISHED = "expected labels: this split is published without them"


class Column(NamedTuple):
    """One column of all files."""

    name: str  # begins every message
    values: pa.ChunkedArray
    feature: Any  # None: not known

    @property
    def type(self) -> pa.DataType:
        """How the values are stored."""
        return storage_type(self.values.type)


def choose_samples(path: str, schema: pa.Schema, features: Mapping[str, Any]) -> str:
    """Returns the column of the samples: the only one of images, else of arrays, else of lists of
    a fixed length. Raises InputError where that is none or several.
    """
    kinds = {
        "images": [n for n in schema.names if _kind(features.get(n)) == "Image"],
        "arrays": [n for n in schema.names if _kind(features.get(n)) in ARRAYS],
        "lists of a fixed length": [
            name
            for name, type in zip(schema.names, schema.types, strict=True)
            if pa.types.is_fixed_size_list(type) or _fixed_length(features.get(name))
        ],
    }
    for kind, names in kinds.items():
        if len(names) > 1:
            raise InputError(
                f"{path}: columns {list_names(names)} all hold {kind}, expected"
                " dataset.source.x=NAME"
            )
        if names:
            return names[0]
    raise InputError(
        f"{path}: no column holds images or arrays, expected dataset.source.x=NAME, or [NAME, ...]"
        f" of columns of numbers; columns are {list_names(schema.names)}"
    )


def choose_labels(path: str, schema: pa.Schema, features: Mapping[str, Any]) -> str:
    """Returns the only column of class labels. Raises InputError where there is none or several."""
    names = [name for name in schema.names if _kind(features.get(name)) == "ClassLabel"]
    if len(names) > 1:
        raise InputError(
            f"{path}: columns {list_names(names)} are {'both' if len(names) == 2 else 'all'} class"
            " labels, expected dataset.source.y=NAME"
        )
    if not names:
        raise InputError(
            f"{path}: no column is of class labels, expected dataset.source.y=NAME; columns are"
            f" {list_names(schema.names)}"
        )
    return names[0]


def find_class_names(name: str, feature: Any) -> tuple[str, ...] | None:
    """Returns the names of a column's classes, None where it has none; `name` begins messages."""
    if _kind(feature) != "ClassLabel" or feature.get("names") is None:
        return None
    names = feature["names"]
    good = isinstance(names, list) and names and all(isinstance(n, str) for n in names)
    if not good or len(set(names)) != len(names):
        raise InputError(f"{name}: names of its classes are none, expected different texts")
    return tuple(names)


def read_samples(columns: Iterable[Column]) -> np.ndarray:
    """Returns samples [N, ...] of a column of images, of arrays or lists, or of numbers; those of
    several columns of numbers or lists side by side.
    """
    parts = [(column.name, _read_samples(column)) for column in columns]
    if len(parts) == 1:
        return parts[0][1]
    for name, x in parts:
        if x.ndim != 2:
            raise InputError(f"{name} has samples of shape {x.shape[1:]}, expected numbers")
    return np.concatenate([x for _, x in parts], axis=1)


def read_labels(column: Column) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns labels [N] and the names of classes: those of the feature, those of text in sorted
    order, or None. Raises InputError for samples without a label, or with several.
    """
    name, names = column.name, find_class_names(column.name, column.feature)
    if is_list(column.type) or pa.types.is_struct(column.type):
        raise InputError(f"{name} has type {column.type}, expected one label a sample")
    if column.values.null_count:
        raise InputError(f"{name} is null in row {_first_null(column.values)}, {PUBLISHED}")
    if is_text(column.type):
        numbers, texts = number_text(column)
        ordered = sorted(texts)
        place = {text: i for i, text in enumerate(ordered)}
        return np.array([place[text] for text in texts])[numbers], tuple(ordered)
    y = read_numbers(column)
    if (bad := y < 0).any():
        raise InputError(f"{name} is {y[bad][0]} in row {bad.argmax()}, {PUBLISHED}")
    if names is not None and (bad := y >= len(names)).any():
        raise InputError(
            f"{name} is {y[bad][0]} in row {bad.argmax()}, expected one of its {len(names)} classes"
        )
    return y, names


def read_targets(column: Column) -> tuple[np.ndarray, None]:
    """Returns numbers to regress [N], or of a column of lists labels [N, T], and no names."""
    return _read_samples(column) if is_list(column.type) else read_numbers(column), None


def read_clients(column: Column) -> tuple[np.ndarray, tuple[str | int, ...] | None]:
    """Returns the owner [N] of each row, and the owners' names in order: None for numbers, which
    name themselves.
    """
    rows, texts = _read_texts(column)
    if texts is None:
        return rows, None
    ordered, numbers = number_names(texts)
    return numbers[rows], name_clients(ordered)


def read_split(column: Column) -> np.ndarray:
    """Returns 0 (train) or 1 (test) [N]; numbers are returned as they are."""
    numbers, texts = _read_texts(column)
    if texts is None:
        return numbers
    if wrong := sorted(set(texts) - SIDES.keys()):
        raise InputError(f"{column.name} is {shorten(wrong[0])} somewhere, expected train or test")
    return np.array([SIDES[text] for text in texts])[numbers]


def read_times(column: Column) -> np.ndarray:
    """Returns times [N] int64: of dates and time stamps seconds since the first one, of numbers
    the numbers themselves.
    """
    type = column.type
    if not pa.types.is_timestamp(type) and not pa.types.is_date(type):
        return read_numbers(column)
    _refuse_nulls(column.name, column.values)
    stamps = column.values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    dates = read_numbers(column._replace(values=stamps)).view("datetime64[us]")
    return count_seconds(column.name, dates)


def read_numbers(column: Column) -> np.ndarray:
    """Returns the numbers [N] of a column; raises InputError for other types and for null."""
    if not is_number(column.type):
        raise InputError(f"{column.name} has type {column.type}, expected numbers")
    return _join(column.name, [_nested(column.name, chunk) for chunk in column.values.chunks])


def number_text(column: Column) -> tuple[np.ndarray, list[str]]:
    """Returns a number [N] for each text, and the texts in the order of their first row. An array
    of all texts would give each the longest one's room.
    """
    _refuse_nulls(column.name, column.values)
    seen: dict[str, int] = {}
    parts = []
    for chunk in map(unwrap, column.values.chunks):
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        places = coded.indices.to_numpy(zero_copy_only=False)
        texts, used = coded.dictionary, np.unique(places)
        table = np.zeros(len(texts), np.int64)
        for place in used.tolist():
            text = texts[place].as_py()
            if text is None:
                raise InputError(f"{column.name} is null somewhere, expected text in every row")
            table[place] = seen.setdefault(text, len(seen))
        parts.append(table[places])
    return _join(column.name, parts), list(seen)


def _read_texts(column: Column) -> tuple[np.ndarray, list[str] | None]:
    """Returns a number [N] for each row, and what they stand for where it is text or a class."""
    if is_text(column.type):
        return number_text(column)
    numbers, names = read_numbers(column), find_class_names(column.name, column.feature)
    if names is None:
        return numbers, None
    found, numbers = np.unique(numbers, return_inverse=True)
    if found[0] < 0 or found[-1] >= len(names):
        raise InputError(
            f"{column.name} is {found[0]} .. {found[-1]}, expected 0 .. {len(names) - 1}, its"
            " classes"
        )
    return numbers, [names[int(i)] for i in found]


def _read_samples(column: Column) -> np.ndarray:
    """Returns samples [N, ...] of one column."""
    name, type, kind = column.name, column.type, _kind(column.feature)
    if is_binary(type):
        return _stack(name, column.values)
    if pa.types.is_struct(type) and kind in ("Image", None):
        place = type.get_field_index("bytes")  # -1: missing, or there twice
        if place >= 0 and is_binary(type.field(place).type):
            return _read_images(name, column.values)
    x = _join(name, [_nested(name, chunk) for chunk in column.values.chunks if len(chunk)])
    shape = column.feature.get("shape") if kind in ARRAYS else None
    if isinstance(shape, list) and (
        len(shape) != x.ndim - 1
        or any(n not in (None, own) for n, own in zip(shape, x.shape[1:], strict=True))
    ):
        raise InputError(f"{name} has samples of shape {x.shape[1:]}, expected {shape}")
    return x[:, None] if x.ndim == 1 else x


def _join(name: str, parts: list[np.ndarray]) -> np.ndarray:
    """Returns arrays of equal samples one after another."""
    parts = [part for part in parts if len(part)]
    if not parts:
        raise InputError(f"{name} has no rows, expected at least one")
    for part in parts:
        if part.shape[1:] != parts[0].shape[1:]:
            raise InputError(
                f"{name} has samples of shape {part.shape[1:]} and {parts[0].shape[1:]}, expected"
                " one shape"
            )
    return np.concatenate(parts)


def _kind(feature: Any) -> str | None:
    """Returns what a feature is, as in "Image", None where it does not say."""
    kind = feature.get("_type") if isinstance(feature, dict) else None
    return kind if isinstance(kind, str) else None


def _fixed_length(feature: Any) -> bool:
    """Returns whether a feature is of lists of one length of plain values."""
    return (
        _kind(feature) in LISTS
        and isinstance(feature.get("length"), int)
        and feature["length"] >= 0
        and _kind(feature.get("feature")) == "Value"
    )


def _first_null(values: pa.ChunkedArray | pa.Array) -> int:
    """Returns the first row that is null."""
    return next(row for row, value in enumerate(values) if not value.is_valid)


def _refuse_nulls(name: str, values: pa.ChunkedArray | pa.Array) -> None:
    """Raises InputError for a value that is null."""
    if values.null_count:
        raise InputError(
            f"{name} is null in row {_first_null(values)}, expected a value in every row"
        )


def _stack(name: str, column: pa.ChunkedArray) -> np.ndarray:
    """Returns the images [N, H, W] or [N, H, W, 3] of a column of their files' contents."""

    def contents() -> Iterator[tuple[str, bytes]]:
        row = 0
        for chunk in map(unwrap, column.chunks):
            for value in chunk:
                content = value.as_py()
                if content is None:
                    raise InputError(f"{name} in row {row} is null, expected an image in every row")
                yield f"{name} in row {row}", content
                row += 1

    x = stack_images(name, contents(), len(column), remedies=REMEDIES)
    return x[..., 0] if x.shape[-1] == 1 else x


def _read_images(name: str, column: pa.ChunkedArray) -> np.ndarray:
    """Returns images of a column of structs of their bytes and their path, which is not read."""
    chunks = []
    for chunk in map(unwrap, column.chunks):
        place = chunk.type.get_field_index("bytes")
        chunks.append(chunk.flatten()[place])  # unlike `field`, of a row that is null it has null
    inside = pa.chunked_array(chunks)
    if len(inside) and inside.null_count == len(inside):
        raise InputError(
            f"{name} has paths but no bytes in {len(inside)} rows, expected embedded images:"
            " datasets.load_dataset(...).save_to_disk(FOLDER)"
        )
    return _stack(name, inside)


def _nested(name: str, array: pa.Array) -> np.ndarray:
    """Returns an array [n, ...] of numbers, or of lists of numbers of equal lengths."""
    shape = [len(array)]
    array = unwrap(array)
    while is_list(array.type):
        _refuse_nulls(name, array)
        if len(shape) > MOST_AXES:
            raise InputError(f"{name} has type {array.type}, expected at most {MOST_AXES} axes")
        if pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
        else:
            offsets = np.diff(array.offsets.to_numpy())
            size = int(offsets[0]) if len(offsets) else 0
            if (offsets != size).any():
                raise InputError(
                    f"{name} has lists of {size} and {offsets[offsets != size][0]} values, expected"
                    " one length"
                )
        if not size:
            raise InputError(f"{name} has lists without values, expected at least one")
        shape.append(size)
        array = unwrap(array.flatten())
    if not is_number(array.type):
        raise InputError(f"{name} has values of type {array.type}, expected numbers or images")
    _refuse_nulls(name, array)
    return array.to_numpy(zero_copy_only=False).reshape(shape)
