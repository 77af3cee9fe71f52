"""SQLite data sets of TensorFlow Federated and FedJAX: see `federated_sqlite`. They are read under
the rules of `readers`: nothing is written, and a view, which may run functions, is no table.

Formats: github.com/google-parfait/tensorflow-federated, simulation/datasets, and
github.com/google/fedjax, core/sqlite_federated_data.py and core/serialization.py.
"""

import contextlib
import math
import os
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.pool import choose_splits
from fedjax_cfl.data.datasets.readers import list_names, open_unpacked, report_damage, shorten
from fedjax_cfl.data.datasets.tf_example import read_example
from fedjax_cfl.data.datasets.tff import (
    Examples,
    TestClients,
    choose_features,
    collect,
    make_pool,
)
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import OptionalText, OptionalTexts, PositiveInt, check_arguments

Features = dict[str, Any]
TABLES = {
    "examples": ["split_name", "client_id", "serialized_example_proto"],  # TFF
    "federated_data": ["client_id", "data"],  # FedJAX
}
PAIRS = (
    ["train", "test"],
    ["split_by_clients_train", "split_by_clients_test"],
)
# an Example has no shapes: those of images, by feature and number of values
SHAPES = {
    ("pixels", 784): (28, 28),
    ("image", 3072): (32, 32, 3),
    ("image", 21168): (84, 84, 3),
}
KINDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
KINDS += ("bool", "float16", "float32", "float64")
ARRAY, SCALAR, TEXTS = 1, 3, 4  # of the values that FedJAX writes
LONGEST = 2**28  # bytes of one value
OBJECT_BYTES = 64  # of memory that an octet of msgpack may stand for
PREFIX = re.compile(r"[0-9a-f]{16}:(.+)")  # of the clients of TFF's EMNIST
Row = tuple[str, np.ndarray, np.ndarray]  # a client, some of its samples, and their labels


def federated_sqlite(
    path: str | Path,
    x: OptionalText = None,
    y: OptionalText = None,
    splits: OptionalTexts = None,
    test_clients: TestClients | None = None,
    num_classes: PositiveInt | None = None,
) -> Pool:
    """Returns an SQLite data set of TensorFlow Federated, as emnist_all.sqlite, or of FedJAX, as
    federated_emnist_train.sqlite and federated_emnist_test.sqlite.

    Args: `path` is the file; NAME_test.sqlite beside NAME_train.sqlite is for testing; `x`, `y`
    and `test_clients` are as in `tff_hdf5`; `splits` are those of TFF's file to read, of several
    the last one for testing, None: train and test; `num_classes` is as in `npz`.
    Raises InputError for files that cannot be read and for what does not fit.
    """
    check_arguments(federated_sqlite, locals(), "dataset.source")
    file = Path(os.path.expanduser(path))
    parts, chosen = [], None
    with open_sqlite(file) as database:
        if find_table(file, database, TABLES) == "examples":
            rows = database.execute("SELECT DISTINCT split_name FROM examples ORDER BY split_name")
            there = [name for (name,) in rows]
            if not there or not all(isinstance(name, str) for name in there):
                raise InputError(
                    f"{file}: examples are none or of splits without names, expected some"
                )
            chosen = choose_splits(file, there, splits, PAIRS)
            parts = [collect(file, _read_tff(file, database, split, x, y)) for split in chosen]
    if chosen is None:
        if splits is not None:
            raise InputError(f"{file}: dataset.source.splits, expected null: one file is one split")
        partner = file.with_name(file.name.replace("_train.sqlite", "_test.sqlite"))
        files = [file, partner] if partner != file and os.path.lexists(partner) else [file]
        parts = [_read_fedjax(part, x, y) for part in files]
    name = "emnist_digitsonly" if chosen and chosen[0].startswith("digits_only") else None
    features = x or "x", y or "label"
    return make_pool(file, _cut_names(parts), features, test_clients, num_classes, name)


@contextlib.contextmanager
def open_sqlite(path: Path) -> Iterator[sqlite3.Connection]:
    """Yields a database that cannot be written; any error of reading it is an `InputError`."""
    with open_unpacked(path) as (file, _):
        start = bytes(file.peek(16)[:16])
    if start != b"SQLite format 3\0":
        hint = ": unpack it, xz --format=lzma -dk FILE" if path.suffix == ".lzma" else ""
        raise InputError(f"{path}: file is no SQLite database, expected one{hint}")
    name = f"{Path(os.path.abspath(path)).as_uri()}?mode=ro&immutable=1"
    with (
        report_damage(path, "a complete SQLite database"),
        contextlib.closing(sqlite3.connect(name, uri=True)) as database,
    ):
        database.execute("PRAGMA trusted_schema=OFF")
        database.execute("PRAGMA query_only=ON")
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        yield database


def find_table(path: Path, database: sqlite3.Connection, columns: dict[str, list[str]]) -> str:
    """Returns the first of the tables `columns`, name -> columns, that a database has. Raises
    InputError if it has none, or one that is a view, virtual or computed.
    """
    rows = database.execute("SELECT name, type, rootpage FROM sqlite_master ORDER BY name")
    found = {name: kind == "table" and page > 0 for name, kind, page in rows}
    name = next((name for name in columns if name in found), None)
    if name is None:
        raise InputError(
            f"{path}: holds the tables {list_names(list(found)) or 'none'}, expected"
            f" {' or '.join(columns)}"
        )
    # hidden 0: a column whose values are stored
    stored = database.execute(
        "SELECT name FROM pragma_table_xinfo(?) WHERE hidden = 0", (name,)
    ).fetchall()
    if not found[name] or not {(column,) for column in columns[name]} <= set(stored):
        raise InputError(
            f"{path}: {name} is no table with the columns {', '.join(columns[name])}, expected one"
        )
    return name


def _choose(file: Path, features: Features, x: str | None, y: str | None) -> tuple[str, str]:
    texts = [name for name in features if isinstance(features[name], list)]
    return choose_features(file, list(features), texts, x, y)


def _read_tff(
    file: Path, database: sqlite3.Connection, split: str, x: str | None, y: str | None
) -> Iterator[Row]:
    """Yields the samples of one split, in the order in which they were written."""
    rows = database.execute(
        "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ?"
        " ORDER BY rowid",
        (split,),
    )
    for client, message in rows:
        if not isinstance(client, str) or not isinstance(message, bytes):
            raise ValueError("a client is no text, or an example no message")
        features: Features = read_example(message)
        name, label = _choose(file, features, x, y)
        values = features[name]
        if name == "image" and values.dtype == np.int64:
            if values.min(initial=0) < 0 or values.max(initial=0) > 255:
                raise ValueError(f"image of client {shorten(client)} is not within 0 .. 255")
            values = values.astype(np.uint8)
        shape = SHAPES.get((name, values.size), (values.size,))
        yield client, values.reshape(1, *shape), features[label]


def _read_fedjax(file: Path, x: str | None, y: str | None) -> Examples:
    with open_sqlite(file) as database:
        find_table(file, database, {"federated_data": TABLES["federated_data"]})
        rows = database.execute("SELECT client_id, data FROM federated_data ORDER BY rowid")
        return collect(file, _unpack_rows(file, rows, x, y))


def _unpack_rows(file: Path, rows: Iterable[Any], x: str | None, y: str | None) -> Iterator[Row]:
    for client, data in rows:
        if not isinstance(client, bytes | str) or not isinstance(data, bytes):
            raise ValueError("a client or its data are no bytes")
        unpacking = zlib.decompressobj()
        most = readers.MAX_UNPACKED_BYTES // OBJECT_BYTES
        content = unpacking.decompress(data, most)
        if not unpacking.eof:
            raise ValueError(f"data are cut off, or longer than {most} bytes")
        features = read_msgpack(content)
        name, label = _choose(file, features, x, y)
        text = client if isinstance(client, str) else client.decode("utf-8", "backslashreplace")
        yield text, features[name], features[label]


def read_msgpack(content: bytes) -> Features:
    """Returns the features that FedJAX wrote: arrays, and lists of text. Raises ValueError for
    what it never writes.
    """
    import msgpack  # comes with Flax

    most = dict.fromkeys(
        [f"max_{kind}_len" for kind in ("str", "bin", "array", "map", "ext")], len(content)
    )

    def read_value(code: int, data: bytes) -> Any:
        found = msgpack.unpackb(data, raw=False, strict_map_key=True, **most)
        if not isinstance(found, list) or len(found) != (2 if code == TEXTS else 3):
            raise ValueError(f"a value of kind {code} is not as FedJAX writes it")
        if code == TEXTS and isinstance(found[1], list):
            return found[1]
        shape, kind, values = found if code in (ARRAY, SCALAR) else ([-1], None, None)
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"a value of kind {code} has shape {shorten(shape)}")
        if kind not in KINDS or not isinstance(values, bytes):
            raise ValueError(f"a value of kind {code} is none that is read: {shorten(kind)}")
        dtype = np.dtype(kind).newbyteorder("<")
        if math.prod(shape) * dtype.itemsize != len(values):
            raise ValueError(f"an array of shape {shape} has {len(values)} bytes")
        return np.frombuffer(values, dtype).reshape(shape)

    features = msgpack.unpackb(content, raw=False, strict_map_key=True, ext_hook=read_value, **most)
    if not isinstance(features, dict) or not all(
        isinstance(name, str) and isinstance(value, list | np.ndarray)
        for name, value in features.items()
    ):
        raise ValueError("data are no map of arrays")
    return features


def _cut_names(parts: list[Examples]) -> list[Examples]:
    """Returns the parts with clients' names without a prefix, if all have one and stay distinct."""
    found = {name: PREFIX.fullmatch(name) for part in parts for name in part.clients}
    short = {name: match[1] for name, match in found.items() if match}
    if len(short) != len(found) or len(set(short.values())) != len(short):
        return parts
    return [part._replace(clients=[short[name] for name in part.clients]) for part in parts]
