"""SQLite data sets of TensorFlow Federated and FedJAX, written here by the standard library."""

import sqlite3
import sys
import zlib

import msgpack
import numpy as np
import pytest
from conftest import one_line

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.federated_sqlite import (
    federated_sqlite,
    open_sqlite,
    read_msgpack,
)
from fedjax_cfl.data.datasets.tf_example import read_example
from fedjax_cfl.errors import InputError

# as TensorFlow and FedJAX write them
EXAMPLE = bytes.fromhex(
    "0a480a170a056c6162656c120e1a0c0a0afdffffffffffffffff010a160a06706978656c73120c120a0a08"
    "0000003f0000803f0a150a08736e69707065747312090a070a054861726b21"
)
MSGPACK = bytes.fromhex(
    "83a178c7160193920102a7666c6f61743332c408000000000000803fa179c70f01939101a5696e743332c404"
    "03000000a173d70492910191c4024869"
)
PIXELS = np.linspace(0, 1, 784, dtype=np.float32)
IMAGE = np.arange(3072) % 256


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value):
    value %= 2**64
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def feature(values, packed=True):
    values = np.asarray(values)
    if values.dtype.kind == "S":
        return field(1, b"".join(field(1, text) for text in values.tolist()))
    if values.dtype.kind == "f":
        parts = [np.float32(value).tobytes() for value in values]
        kind, tag = 2, b"\x0d"
    else:
        parts, kind, tag = [varint(int(value)) for value in values], 3, b"\x08"
    inside = field(1, b"".join(parts)) if packed else b"".join(tag + part for part in parts)
    return field(kind, inside)


def example(packed=True, **features):
    """Returns a tf.train.Example."""
    entries = [
        field(1, field(1, name.encode()) + field(2, feature(values, packed)))
        for name, values in features.items()
    ]
    return field(1, b"".join(entries))


def test_golden_vectors():
    found = read_example(EXAMPLE)
    assert found["label"].tolist() == [-3] and found["snippets"] == [b"Hark!"]
    assert found["pixels"].tolist() == [0.5, 1] and found["pixels"].dtype == np.float32
    found = read_msgpack(MSGPACK)
    assert found["x"].tolist() == [[0, 1]] and found["x"].dtype == np.float32
    assert found["y"].tolist() == [3] and found["y"].dtype == np.int32 and found["s"] == [b"Hi"]


@pytest.mark.parametrize("packed", [True, False])
def test_examples_by_hand(packed):
    numbers = [0, 1, 127, 128, 300, -1, 2**63 - 1, -(2**63)]
    found = read_example(example(packed, a=np.array(numbers), b=np.array([1.5, -2])))
    assert found["a"].tolist() == numbers and found["b"].tolist() == [1.5, -2]


@pytest.mark.parametrize(
    "content",
    [EXAMPLE[:-1], EXAMPLE[:9], b"\x0a\xff", b"\x0b", b"\x80" * 11, EXAMPLE + EXAMPLE,
     field(1, field(1, field(1, b"a"))), field(1, field(1, field(1, b"a") + field(2, b""))),
     field(1, field(1, field(1, b"a") + field(2, field(3, field(1, b"\x80" * 11 + b"\1"))))),
     field(1, field(1, field(1, b"a") + field(2, field(3, field(1, b"\1\x80"))))),
     field(1, field(1, field(1, b"a") + field(2, field(3, field(1, b"\x80"))))),
     field(1, field(1, field(1, b"a") + field(2, field(2, field(1, b"\x80"))))),
     b"\x08\x01"],
)  # fmt: skip
def test_bad_examples(content):
    with pytest.raises(ValueError, match=r"\w"):
        read_example(content)


def write_tff(path, rows, table="examples", more=()):
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as database:
        database.execute(
            f"CREATE TABLE {table} (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
        )
        database.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows)
        for line in more:
            database.execute(line)
    database.close()
    return path


def emnist(split, *clients, label=61):
    return [(split, name, example(pixels=PIXELS, label=np.array([label]))) for name in clients]


def cifar(split, *clients):
    message = example(image=IMAGE, label=np.array([99]), coarse_label=np.array([19]))
    return [(split, name, message) for name in clients]


def test_tff(tmp_path):
    hexed = ["0123456789abcdef:f0002_10", "0123456789abcdee:f0000_14"]
    rows = emnist("all_train", *hexed, hexed[0]) + emnist("all_test", *hexed)
    rows += emnist("digits_only_train", *hexed, label=9) + emnist(
        "digits_only_test", *hexed, label=9
    )
    path = write_tff(tmp_path / "emnist_all.sqlite", rows)
    one_line("splits are all_test, all_train, digits_only_test, d", federated_sqlite, path)
    pool = federated_sqlite(path, splits=["all_train", "all_test"])
    assert pool.x.shape == (5, 28, 28) and pool.num_classes == 62 and pool.y.tolist() == [61] * 5
    np.testing.assert_array_equal(pool.x[4].ravel(), PIXELS)
    assert pool.client_names == ("f0000_14", "f0002_10") and pool.class_names[61] == "z"
    assert (
        pool.client.tolist() == [0, 1, 1, 0, 1] and pool.test.tolist() == [False] * 3 + [True] * 2
    )
    assert federated_sqlite(path, splits=["digits_only_train"]).num_classes == 10
    path = write_tff(tmp_path / "cifar100.sqlite", cifar("train", "0", "1") + cifar("test", "0"))
    one_line("may be strangers", federated_sqlite, path)
    pool = federated_sqlite(path, test_clients="own")
    assert pool.client_names == ("0", "1", "test/0") and pool.num_classes == 100
    np.testing.assert_array_equal(pool.x[2], IMAGE.reshape(32, 32, 3))
    assert pool.x.dtype == np.uint8
    assert federated_sqlite(path, y="coarse_label", test_clients="same").num_classes == 20


def pack(code, value):
    return msgpack.ExtType(code, msgpack.packb(value))


def array(values):
    values = np.asarray(values)
    return pack(1, [list(values.shape), values.dtype.name, values.tobytes()])


def write_fedjax(path, clients):
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL,"
            " num_examples INTEGER NOT NULL)"
        )
        for client, features in clients.items():
            data = (
                features if isinstance(features, bytes) else zlib.compress(msgpack.packb(features))
            )
            database.execute("INSERT INTO federated_data VALUES (?, ?, 1)", (client, data))
    database.close()
    return path


def fedjax(**changes):
    pixels = np.stack([PIXELS, 1 - PIXELS]).reshape(2, 28, 28)
    return {"pixels": array(pixels), "label": array(np.array([61, 0], np.int32))} | changes


def test_fedjax(tmp_path):
    path = write_fedjax(
        tmp_path / "federated_emnist_train.sqlite", {b"b": fedjax(), b"a": fedjax()}
    )
    alone = federated_sqlite(path)
    assert alone.test is None and alone.x.shape == (4, 28, 28) and alone.num_classes == 62
    write_fedjax(tmp_path / "federated_emnist_test.sqlite", {b"c": fedjax()})
    pool = federated_sqlite(path)
    assert pool.client_names == ("a", "b", "c") and pool.y.tolist() == [61, 0] * 3
    assert pool.test.tolist() == [False] * 4 + [True] * 2
    np.testing.assert_array_equal(pool.x[1].ravel(), 1 - PIXELS)
    one_line("one file is one split", federated_sqlite, path, splits=["train"])


FEDJAX = {
    "text": (fedjax(pixels=pack(4, [[2], [b"a", b"b"]])), "pixels is text, which is not read"),
    "no label": ({"pixels": array(PIXELS)}, "label is missing, expected dataset.source.y="),
    "complex": (fedjax(pixels=pack(2, [1.0, 2.0])), "a value of kind 2"),
    "bfloat16": (fedjax(pixels=pack(1, [[1], "bfloat16", b"ab"])), "none that is read: 'bfloat16'"),
    "objects": (
        fedjax(pixels=pack(1, [[1], "object", b"abcdabcd"])),
        "none that is read: 'object'",
    ),
    "a huge shape": (fedjax(pixels=pack(1, [[2**40], "uint8", b"ab"])), "has 2 bytes"),
    "a negative shape": (fedjax(pixels=pack(1, [[-2, -1], "uint8", b"ab"])), "has shape [-2, -1]"),
    "a shape of text": (fedjax(pixels=pack(1, ["2", "uint8", b"ab"])), "has shape '2'"),
    "a pair": (fedjax(pixels=pack(1, [[1], "uint8"])), "is not as FedJAX writes it"),
    "a number": (fedjax(pixels=3), "data are no map of arrays"),
    "a list": ([1], "data are no map of arrays"),
    "too few labels": (fedjax(label=array(np.zeros(1, np.int32))), "labels (1,)"),
    "no zlib": (b"hello", "file cannot be read"),
    "cut": (zlib.compress(msgpack.packb(fedjax()))[:-9], "data are cut off"),
    "a bomb": (zlib.compress(bytes(2**21)), "longer than 1048576 bytes"),
    "more than one": (zlib.compress(MSGPACK + MSGPACK), "file cannot be read"),
}


@pytest.mark.parametrize("name", FEDJAX)
def test_bad_data_of_fedjax(name, tmp_path, monkeypatch):
    features, says = FEDJAX[name]
    monkeypatch.setattr(readers, "MAX_UNPACKED_BYTES", 2**26)
    path = write_fedjax(tmp_path / "federated_emnist_train.sqlite", {b"a": features})
    assert str(path) in one_line(says, federated_sqlite, path)


def test_many_small_bombs_are_a_large_one(tmp_path, monkeypatch):
    zeros = {"pixels": array(np.zeros((32, 784), np.float32)), "label": array(np.zeros(32, int))}
    path = write_fedjax(tmp_path / "a.sqlite", {b"%d" % i: zeros for i in range(100)})
    monkeypatch.setattr(readers, "MAX_UNPACKED_BYTES", 2**23)
    one_line("all samples take more than 8388608 bytes", federated_sqlite, path)


TFF = {
    "text": (
        [("train", "a", example(snippets=np.array([b"Hark!"])))],
        "snippets is text, which is",
    ),
    "no pixels": ([("train", "a", example(label=[3]))], "pixels and image are missing"),
    "two labels": ([("train", "a", example(pixels=PIXELS, label=[3, 4]))], "labels (2,)"),
    "two sizes": (
        [*emnist("train", "a"), ("train", "b", example(pixels=PIXELS[:9], label=[3]))],
        "samples of shape (9,)",
    ),
    "a dark image": ([("train", "a", example(image=IMAGE - 1, label=[3]))], "not within 0 .. 255"),
    "a bright image": (
        [("train", "a", example(image=IMAGE + 1, label=[3]))],
        "not within 0 .. 255",
    ),
    "no message": ([("train", "a", "text")], "a client is no text, or an example no message"),
    "no client": ([("train", None, EXAMPLE)], "a client is no text, or an example no message"),
    "no split": ([(None, "a", EXAMPLE)], "splits without names"),
    "no rows": ([], "examples are none"),
    "a cut message": ([("train", "a", EXAMPLE[:-1])], "file cannot be read"),
}


@pytest.mark.parametrize("name", TFF)
def test_bad_rows_of_tff(name, tmp_path):
    rows, says = TFF[name]
    path = write_tff(tmp_path / "a.sqlite", rows)
    error = one_line(says, federated_sqlite, path)
    assert str(path) in error and "expected" in error


VIEW = "CREATE VIEW examples AS SELECT * FROM other"
COMPUTED = (
    "CREATE TABLE examples (split_name TEXT, client_id TEXT,"
    " serialized_example_proto BLOB AS (zeroblob(1000000000)))"
)


@pytest.mark.parametrize("line", [VIEW, COMPUTED, "CREATE TABLE examples (split_name TEXT)"])
def test_what_poses_as_a_table(line, tmp_path):
    path = write_tff(tmp_path / "a.sqlite", emnist("train", "a"), "other", [line])
    one_line("examples is no table with the columns", federated_sqlite, path)


def test_files_that_are_none(tmp_path):
    path = write_tff(tmp_path / "a.sqlite", emnist("train", *map(str, range(50))), "other")
    one_line("holds the tables other, expected examples or federated_data", federated_sqlite, path)
    (tmp_path / "b.sqlite.lzma").write_bytes(b"\x5d\0\0\x80")
    one_line("xz --format=lzma -dk FILE", federated_sqlite, tmp_path / "b.sqlite.lzma")
    one_line("cannot be read", federated_sqlite, tmp_path / "absent?mode=rwc")
    assert not (tmp_path / "absent").exists()
    path = write_tff(tmp_path / "c.sqlite", emnist("train", *map(str, range(50))))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    one_line("c.sqlite: file cannot be read", federated_sqlite, path)
    path.write_bytes(content)
    before = path.stat()
    assert federated_sqlite(path).x.shape == (50, 28, 28)
    assert path.stat() == before and sorted(p.name[0] for p in tmp_path.iterdir()) == [
        "a",
        "b",
        "c",
    ]


def test_a_database_is_only_read(tmp_path):
    path = write_tff(tmp_path / "a?mode=rwc#b.sqlite", emnist("train", "a"))
    assert len(federated_sqlite(path).y) == 1  # a name is no part of the address
    with pytest.raises(InputError, match="readonly"), open_sqlite(path) as database:
        database.execute("PRAGMA query_only=OFF")
        database.execute("CREATE TABLE more (a)")


@pytest.mark.nightly
def test_a_run(fedjax_cfl, tmp_path):
    rows = emnist("train", "a", "b", label=0) + emnist("test", "a", "b", label=0)
    write_tff(tmp_path / "mine.sqlite", rows)
    line = "dataset=federated_sqlite algorithm=fedavg rounds=2 clients_per_round=2 run_dir=run"
    line += " dataset.source.num_classes=2 dataset.source.path=mine.sqlite"
    status, out, error = fedjax_cfl(line)
    assert status == 0 and error == "" and out.startswith("fedavg on federated_sqlite: 2 clients")
    assert "tensorflow" not in sys.modules
