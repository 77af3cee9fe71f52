"""Reader of Arrow streams and Parquet files, under the rules of `readers`: only the named columns
are read, no size is believed, and no extension type is registered or made: its storage is read.
"""

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.readers import list_names, open_unpacked, report_damage, shorten
from fedjax_cfl.errors import InputError

BATCH_ROWS = 256  # rows of Parquet at once, before it is seen what they take
# slots of the tables in the metadata of a message, see Message.fbs of Apache Arrow
HEADER_TYPE, HEADER, DATA, COMPRESSION = 1, 2, 1, 3
DICTIONARY_BATCH, RECORD_BATCH = 2, 3


def read_schema(path: Path) -> pa.Schema:
    """Returns the columns of a file and their types. Raises InputError if it cannot be read."""
    with _open(path) as (source, is_parquet):
        if is_parquet:
            return pq.ParquetFile(source).schema_arrow
        return pa.ipc.open_stream(source).schema


def read_columns(path: Path, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
    """Returns the named columns, valid throughout. Raises InputError for a file that cannot be
    read, a column that is missing or there twice, and for what takes more memory than a packed
    file may.
    """
    schema = read_schema(path)
    places = []
    for name in names:
        found = schema.get_all_field_indices(name)
        if not found:
            raise InputError(
                f"{path}: column {shorten(name)} is missing, expected one of"
                f" {list_names(schema.names)}"
            )
        if len(found) > 1:
            raise InputError(
                f"{path}: column {shorten(name)} is there {len(found)} times, expected once"
            )
        places += found
    with _open(path) as (source, is_parquet):
        table = (_read_parquet if is_parquet else _read_stream)(source, names, places)
        table.validate(full=True)
        return {name: table.column(name) for name in names}


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[pa.MemoryMappedFile, bool]]:
    """Yields a file, memory-mapped, and whether it is Parquet, by its first bytes; any error of
    reading it is an `InputError`.
    """
    with open_unpacked(path) as (file, _):  # a regular file
        is_parquet = bytes(file.peek(4)[:4]) == b"PAR1"
    kind = "a Parquet file" if is_parquet else "a Parquet file or an Arrow stream"
    with report_damage(path, kind), pa.memory_map(os.fspath(path)) as source:
        yield source, is_parquet


def _read_parquet(source: Any, names: Sequence[str], places: Sequence[int]) -> pa.Table:
    """Returns columns of a Parquet file; rows are read a few at a time, for they may all be one
    long value that is stored once.
    """
    file = pq.ParquetFile(source)
    held = file.metadata
    claimed = sum(
        held.row_group(group).column(column).total_uncompressed_size
        for group in range(held.num_row_groups)
        for column in range(held.num_columns)
        if held.schema.column(column).path.split(".")[0] in names
    )
    taken, batches = 0, []
    if claimed <= readers.MAX_UNPACKED_BYTES:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=list(names)):
            batches.append(batch)
            taken += batch.nbytes
            if taken > readers.MAX_UNPACKED_BYTES:
                break
    if max(claimed, taken) > readers.MAX_UNPACKED_BYTES:
        raise ValueError(
            f"its columns {list_names(names)} take {max(claimed, taken)} bytes or more, at most"
            f" {readers.MAX_UNPACKED_BYTES} are read; split it into several files"
        )
    fields = [file.schema_arrow.field(place) for place in places]
    return pa.Table.from_batches(
        [batch.select(list(names)) for batch in batches], pa.schema(fields)
    )


def _read_stream(source: Any, names: Sequence[str], places: Sequence[int]) -> pa.Table:
    """Returns columns of an Arrow stream, whose values stay on the disk."""
    messages = pa.ipc.MessageReader.open_stream(source)
    with contextlib.suppress(StopIteration):
        while True:
            if _is_compressed(messages.read_next_message().metadata.to_pybytes()):
                raise ValueError("its values are compressed, as save_to_disk never writes them")
    source.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=list(places))
    return pa.ipc.open_stream(source, options=options).read_all().select(list(names))


def _is_compressed(message: bytes) -> bool:
    """Returns whether the values of a message are compressed: then their sizes are what the
    file claims, which pyarrow believes.
    """
    root = struct.unpack_from("<I", message)[0]
    kind, place = _slot(message, root, HEADER_TYPE), _slot(message, root, HEADER)
    if kind is None or place is None or message[kind] not in (DICTIONARY_BATCH, RECORD_BATCH):
        return False
    batch = _follow(message, place)
    if message[kind] == DICTIONARY_BATCH:
        data = _slot(message, batch, DATA)
        if data is None:
            return False
        batch = _follow(message, data)
    return _slot(message, batch, COMPRESSION) is not None


def _slot(message: bytes, table: int, number: int) -> int | None:
    """Returns where a flatbuffer has a table's field, None: it has not."""
    fields = table - struct.unpack_from("<i", message, table)[0]
    if struct.unpack_from("<H", message, fields)[0] < 6 + 2 * number:
        return None
    offset = struct.unpack_from("<H", message, fields + 4 + 2 * number)[0]
    return table + offset if offset else None


def _follow(message: bytes, place: int) -> int:
    """Returns where the table is that a field of a flatbuffer refers to."""
    return place + struct.unpack_from("<I", message, place)[0]


# types


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
