"""Reader of the files of Hugging Face data sets, Arrow streams or Parquet, under the rules of
`readers`: only the named columns are read, no size is believed, and of an extension type only its
storage is read.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedjax_cfl.data.datasets.readers import open_unpacked, report_damage
from fedjax_cfl.data.datasets.table_files import read_parquet, unwrap

# slots of the tables in the metadata of a message, see Message.fbs of Apache Arrow
HEADER_TYPE, HEADER, DATA, COMPRESSION = 1, 2, 1, 3
DICTIONARY_BATCH, RECORD_BATCH = 2, 3


def read_schema(path: Path) -> pa.Schema:
    """Returns the columns of a file and their types. Raises InputError if it cannot be read."""
    with _open(path) as (source, is_parquet):
        if is_parquet:
            return pq.ParquetFile(source).schema_arrow
        return pa.ipc.open_stream(source).schema


def read_batches(path: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields columns of a file, valid throughout. Raises InputError for a file that cannot be
    read, and for Parquet that takes more memory than a packed file may.
    """
    with _open(path) as (source, is_parquet):
        if not is_parquet:
            yield from _read_stream(source, wanted)
            return
    yield from read_parquet(path, wanted)


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


def _read_stream(source: Any, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields columns of an Arrow stream, whose values stay on the disk."""
    messages = pa.ipc.MessageReader.open_stream(source)
    with contextlib.suppress(StopIteration):
        while True:
            if _is_compressed(messages.read_next_message().metadata.to_pybytes()):
                raise ValueError("its values are compressed, as save_to_disk never writes them")
    source.seek(0)
    schema = pa.ipc.open_stream(source).schema
    source.seek(0)
    places = [schema.get_field_index(name) for name in wanted]
    options = pa.ipc.IpcReadOptions(included_fields=places)
    table = pa.ipc.open_stream(source, options=options).read_all().select(wanted)
    table.validate(full=True)
    for batch in table.to_batches():
        yield pa.RecordBatch.from_arrays([unwrap(column) for column in batch.columns], wanted)


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
