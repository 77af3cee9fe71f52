"""Rows of CSV, JSON lines and Parquet files, a batch at a time, by pyarrow and under the rules of
`readers`.

A column is one of the `Kind`s. Rows are counted from 1, the first after the header. Of a type
that an Arrow extension adds to a file only the plain storage is read.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.readers import (
    line_of,
    open_unpacked,
    report_damage,
    shorten,
)
from fedjax_cfl.errors import InputError

pc: Any = pyarrow.compute  # whose functions are made when it is loaded
Kind = Literal["numbers", "text", "dates", "lists", "images", "others"]
BLOCK_BYTES = 2**22  # of a CSV, read at once; no row may be longer
BATCH_VALUES = 2**22  # of a Parquet file, read at once
LIST_ROWS = 256  # of lists or images, read at once
PARQUET = "a complete Parquet file"  # what is expected of one
# what a cell of numbers has where a number is missing
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "-nan", "NULL", "null", "None", "NaT", "?")


def check_columns(path: Path, names: list[str]) -> None:
    """Raises InputError for a table in which a name stands for two columns."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            f"{path}: column {shorten(twice)} is there {names.count(twice)} times, expected each"
            " name once"
        )


def read_csv(
    path: Path, wanted: list[str] | None, delimiter: str = ","
) -> Iterator[pa.RecordBatch]:
    """Yields the cells of a CSV, plain or gzipped, as text; `wanted` None is all columns."""
    with open_unpacked(path) as (file, most):
        packed = not isinstance(file, io.BufferedReader)
        source: Any = str(path)
        if packed:
            source = _read_whole(path, file, most)
    try:
        names = _open_csv(source, delimiter, {}, None).schema.names
        check_columns(path, names)
        types = dict.fromkeys(names, pa.string())
        yield from _open_csv(source, delimiter, types, wanted)
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many kinds
        said = line_of(error)
        hint = ": save it as UTF-8" if "UTF8" in said else ""
        if "Expected 1 col" in said:  # the line of names is one name
            hint = """: name another, as 'dataset.source.delimiter=";"'"""
        raise InputError(
            f"{path}: file cannot be read ({said}), expected a CSV with a line of names and"
            f" cells between {delimiter!r}{hint}"
        ) from None


def _read_whole(path: Path, file: Any, most: int) -> bytes:
    content = bytes(readers.read_at_most(file, most + 1))
    if len(content) > most:
        raise InputError(f"{path}: is more than {most} bytes, expected it unpacked")
    return content


def read_jsonl(path: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields columns of a file with a JSON object in each line."""
    yield from _parse_jsonl(path).select(wanted).to_batches()


def find_jsonl_kinds(path: Path) -> dict[str, Kind]:
    """Returns the kind of every column of a file with a JSON object in each line, by name."""
    return {field.name: kind_of_type(field.type) for field in _parse_jsonl(path).schema}


def _parse_jsonl(path: Path) -> pa.Table:
    with open_unpacked(path) as (file, most):
        source = pa.BufferReader(_read_whole(path, file, most))
    with report_damage(path, "a JSON object in each line, with the same names"):
        options = pyarrow.json.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
        return pyarrow.json.read_json(source, options)


def _open_csv(
    source: str | bytes, delimiter: str, types: dict[str, pa.DataType], wanted: list[str] | None
) -> pyarrow.csv.CSVStreamingReader:
    return pyarrow.csv.open_csv(
        pa.OSFile(source) if isinstance(source, str) else pa.BufferReader(source),
        # rows are counted only by one thread
        pyarrow.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
        pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        pyarrow.csv.ConvertOptions(column_types=types, include_columns=wanted),
    )


def find_csv_kinds(path: Path, delimiter: str = ",", decimal: str = ".") -> dict[str, Kind]:
    """Returns the kind of every column by name, from the first rows."""
    for batch in read_csv(path, None, delimiter):
        if batch.num_rows:
            columns = zip(batch.schema.names, batch.columns, strict=True)
            return {name: _kind_of_cells(column, decimal) for name, column in columns}
    raise InputError(f"{path}: table has no rows, expected one a sample")


def _kind_of_cells(cells: pa.Array, decimal: str) -> Kind:
    there = cells.filter(pc.invert(pc.is_in(pc.utf8_trim_whitespace(cells), pa.array(MISSING))))
    return "numbers" if len(there) and parse_numbers(there, decimal) is not None else "text"


def parse_numbers(cells: pa.Array, decimal: str = ".") -> pa.Array | None:
    """Returns text [n] as float64, None if a cell is no number."""
    if decimal != ".":
        if pc.any(pc.match_substring(cells, ".")).as_py():
            return None
        cells = pc.replace_substring(cells, decimal, ".")
    try:
        return cells.cast(pa.float64())
    except pa.ArrowInvalid:
        trimmed = pc.utf8_trim_whitespace(cells)  # takes longer, and few cells need it
    try:
        return trimmed.cast(pa.float64())
    except pa.ArrowInvalid:
        return None


def find_parquet_kinds(path: Path) -> dict[str, Kind]:
    """Returns the kind of every column of a Parquet file by name."""
    with _open_parquet(path, []) as file:
        schema = file.schema_arrow
        check_columns(path, schema.names)
        return {field.name: kind_of_type(field.type) for field in schema}


def kind_of_type(type_: pa.DataType) -> Kind:
    """Returns the kind of a column of a type of Arrow."""
    type_, kinds = storage_type(type_), pa.types
    if is_number(type_) or kinds.is_decimal(type_):
        return "numbers"
    if is_text(type_):
        return "text"
    if kinds.is_timestamp(type_) or kinds.is_date(type_):
        return "dates"
    if is_list(type_):
        return "lists"
    if kinds.is_struct(type_):  # an image as Hugging Face stores it
        bytes_at = type_.get_field_index("bytes")
        return "images" if bytes_at >= 0 and is_binary(type_.field(bytes_at).type) else "others"
    return "images" if is_binary(type_) else "others"


def read_parquet(path: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields columns of a Parquet file, checked. Raises InputError for one that takes more memory
    than a packed file's arrays may.
    """
    kinds = find_parquet_kinds(path)
    with _open_parquet(path, [name for name in wanted if kinds[name] == "text"]) as file:
        _check_memory(path, file.metadata, wanted)
        small = all(kinds[name] not in ("lists", "images") for name in wanted)
        rows = min(max(BATCH_VALUES // max(len(wanted), 1), LIST_ROWS), 2**16)
        with report_damage(path, PARQUET):
            for batch in file.iter_batches(rows if small else LIST_ROWS, columns=wanted):
                batch.validate(full=True)  # lengths and places in a stranger's file may lie
                columns = [unwrap(batch.column(name)) for name in wanted]
                yield pa.RecordBatch.from_arrays(columns, wanted)


def _open_parquet(path: Path, text: list[str]) -> pyarrow.parquet.ParquetFile:
    with open_unpacked(path):  # a regular file, and no pickle
        pass
    with report_damage(path, PARQUET):
        return pyarrow.parquet.ParquetFile(
            pa.OSFile(str(path)), read_dictionary=text, page_checksum_verification=True
        )


def _check_memory(path: Path, metadata: pyarrow.parquet.FileMetaData, wanted: list[str]) -> None:
    need = 0
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            place = f"{column.path_in_schema}."  # a list is NAME.list.element
            if any(place.startswith(f"{name}.") for name in wanted):
                need += max(column.total_uncompressed_size, 4 * column.num_values)
    if need > readers.MAX_UNPACKED_BYTES:
        raise InputError(
            f"{path}: columns take {need} bytes of memory, expected at most"
            f" {readers.MAX_UNPACKED_BYTES}; name fewer in x, or store x.npy for"
            " dataset=npy, which stays on the disk"
        )


def storage_type(type: pa.DataType) -> pa.DataType:
    """Returns how values are stored: without extensions, those of a dictionary as its words."""
    type = type.storage_type if isinstance(type, pa.BaseExtensionType) else type
    return type.value_type if pa.types.is_dictionary(type) else type


def unwrap(array: pa.Array) -> pa.Array:
    """Returns the storage of an array of an extension type, other arrays as they are."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def is_text(type: pa.DataType) -> bool:
    """Returns whether values are text, also as a dictionary of few distinct words."""
    kinds, type = pa.types, storage_type(type)
    return kinds.is_string(type) or kinds.is_large_string(type) or kinds.is_string_view(type)


def is_binary(type: pa.DataType) -> bool:
    """Returns whether values are bytes."""
    kinds = pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary
    return any(is_kind(type) for is_kind in kinds)


def is_list(type: pa.DataType) -> bool:
    """Returns whether values are lists."""
    kinds = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return any(is_kind(type) for is_kind in kinds)


def is_number(type: pa.DataType) -> bool:
    """Returns whether values are integers, floats or booleans."""
    kinds = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
    return any(is_kind(type) for is_kind in kinds)
