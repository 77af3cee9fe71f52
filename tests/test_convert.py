"""Data sets of other frameworks, written here as TensorFlow Federated and FedJAX write them: what
examples/convert makes of them, and what is said of the readers that it replaces.
"""

import runpy
import sqlite3
import zlib
from pathlib import Path

import h5py
import msgpack
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from fedjax_cfl.data.datasets import npz

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "examples/convert/federated.py"))
convert, read_example, read_msgpack = (
    SCRIPT[name] for name in ("main", "read_example", "read_msgpack")
)
# as TensorFlow and FedJAX write them
EXAMPLE = bytes.fromhex(
    "0a480a170a056c6162656c120e1a0c0a0afdffffffffffffffff010a160a06706978656c73120c120a0a08"
    "0000003f0000803f0a150a08736e69707065747312090a070a054861726b21"
)
MSGPACK = bytes.fromhex(
    "83a178c7160193920102a7666c6f61743332c408000000000000803fa179c70f01939101a5696e743332c404"
    "03000000a173d70492910191c4024869"
)
PIXELS = np.linspace(0, 1, 2 * 28 * 28, dtype=np.float32).reshape(2, 28, 28)
LABELS = np.array([61, 3], np.int32)
IMAGES = np.arange(3 * 3072).reshape(3, 32, 32, 3).astype(np.uint8)
CIFAR = {"image": IMAGES, "label": np.array([9, 0, 1]), "coarse_label": np.array([2, 0, 1])}
HEXED = "0123456789abcdef:f0002_10", "0123456789abcdee:f0000_14"


def write_hdf5(path, clients):
    """Writes client -> feature -> array."""
    with h5py.File(path, "w") as file:
        for client, features in clients.items():
            for name, array in features.items():
                file.create_dataset(f"examples/{client}/{name}", data=array)
    return path


def emnist(*clients):
    return {name: {"pixels": PIXELS, "label": LABELS} for name in clients}


def converted(path, *options):
    """Returns the pool that `dataset=npz` reads of a converted file."""
    out = path.with_name("converted.npz")
    convert([str(path), str(out), *options])
    return npz(out)


def refusal(path, *options):
    """Returns the one line with which a file is refused."""
    with pytest.raises(SystemExit) as caught:
        converted(path, *options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_hdf5_of_tff(tmp_path, capsys):
    path = write_hdf5(tmp_path / "fed_emnist_train.h5", emnist("f0002_10", "f0000_14"))
    write_hdf5(tmp_path / "fed_emnist_test.h5", emnist("f0000_14", "f0009_01"))
    pool = converted(path)
    np.testing.assert_array_equal(pool.x, np.concatenate([PIXELS] * 4))
    assert pool.class_names == ("3", "z") and pool.y.tolist() == [1, 0] * 4
    assert pool.client_names == ("f0000_14", "f0002_10", "f0009_01")
    assert pool.client.tolist() == [0, 0, 1, 1, 0, 0, 2, 2]
    assert pool.test.tolist() == [False] * 4 + [True] * 4
    assert "8 samples of 3 clients" in capsys.readouterr().out
    assert converted(tmp_path / "fed_emnist_test.h5").test is None


def test_clients_of_equal_numbers_may_be_strangers(tmp_path):
    path = write_hdf5(tmp_path / "fed_cifar100_train.h5", {"0": CIFAR, "10": CIFAR, "2": CIFAR})
    write_hdf5(tmp_path / "fed_cifar100_test.h5", {"0": CIFAR, "1": CIFAR})
    assert "may be strangers" in refusal(path)
    own = converted(path, "--test-clients", "own")
    assert own.client_names == ("0", "10", "2", "test/0", "test/1")
    assert own.client.tolist() == np.repeat(range(5), 3).tolist()
    assert own.class_names == ("0", "1", "9") and own.x.shape == (15, 32, 32, 3)
    assert own.x.dtype == np.uint8
    same = converted(path, "--y", "coarse_label", "--test-clients", "same")
    assert same.client_names == (0, 1, 2, 10) and same.num_classes == 3
    assert same.client.tolist() == np.repeat([0, 3, 2, 0, 1], 3).tolist()


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value):
    value, out = value % 2**64, b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def example(**features):
    """Returns a tf.train.Example of whole numbers, or of text."""
    entries = []
    for name, values in features.items():
        if isinstance(values, bytes):
            inside = field(1, field(1, values))
        else:
            inside = field(3, field(1, b"".join(varint(int(n)) for n in np.ravel(values))))
        entries.append(field(1, field(1, name.encode()) + field(2, inside)))
    return field(1, b"".join(entries))


def write_tff(path, rows):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE examples (split_name, client_id, serialized_example_proto)")
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    database.close()
    return path


def write_fedjax(path, clients):
    """Writes client -> feature -> value packed by msgpack."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE federated_data (client_id, data, num_examples)")
        for client, features in clients.items():
            data = zlib.compress(msgpack.packb(features))
            database.execute("INSERT INTO federated_data VALUES (?, ?, 1)", (client, data))
    database.close()
    return path


def pack(array):
    array = np.asarray(array)
    packed = msgpack.packb([list(array.shape), array.dtype.name, array.tobytes()])
    return msgpack.ExtType(1, packed)


def test_golden_vectors():
    found = read_example(EXAMPLE)
    assert found["label"].tolist() == [-3] and found["snippets"] == [b"Hark!"]
    assert found["pixels"].tolist() == [[0.5, 1]] and found["pixels"].dtype == np.float32
    found = read_msgpack(MSGPACK)
    assert found["x"].tolist() == [[0, 1]] and found["x"].dtype == np.float32
    assert found["y"].tolist() == [3] and found["y"].dtype == np.int32 and found["s"] == [b"Hi"]
    with pytest.raises(DecodeError):
        read_example(EXAMPLE[:-1])


def test_sqlite_of_tff(tmp_path):
    sample = example(image=IMAGES[1], label=[7], coarse_label=[2])
    other = example(image=IMAGES[2], label=[0], coarse_label=[1])
    rows = [("all_train", HEXED[0], sample), ("all_train", HEXED[1], other)]
    rows += [("all_test", HEXED[0], sample), ("digits_only_train", HEXED[0], other)]
    path = write_tff(tmp_path / "all.sqlite", rows)
    assert "['all_test', 'all_train', 'digits_only_train'], expected --splits" in refusal(path)
    pool = converted(path, "--splits", "all_train", "all_test")
    assert pool.x.dtype == np.uint8
    np.testing.assert_array_equal(pool.x, IMAGES[[1, 2, 1]])
    assert pool.y.tolist() == [1, 0, 1] and pool.class_names == ("0", "7")
    assert pool.client_names == ("f0000_14", "f0002_10") and pool.client.tolist() == [1, 0, 1]
    assert pool.test.tolist() == [False, False, True]
    alone = converted(path, "--splits", "digits_only_train")
    assert alone.test is None and len(alone.y) == 1


def test_sqlite_of_fedjax(tmp_path):
    features = {"pixels": pack(PIXELS), "label": pack(LABELS)}
    path = write_fedjax(
        tmp_path / "federated_emnist_train.sqlite", {b"b": features, b"a": features}
    )
    assert converted(path).test is None
    write_fedjax(tmp_path / "federated_emnist_test.sqlite", {b"c": features})
    pool = converted(path)
    assert pool.client_names == ("a", "b", "c") and pool.client.tolist() == [1, 1, 0, 0, 2, 2]
    assert pool.class_names == ("3", "z") and pool.test.tolist() == [False] * 4 + [True] * 2
    np.testing.assert_array_equal(pool.x, np.concatenate([PIXELS] * 3))


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path):
    path = write_tff(tmp_path / "a.sqlite", [("train", "a", example(snippets=b"Hark!"))])
    assert "image is missing or text; --x is one of ['snippets']" in refusal(path)
    assert "snippets is missing or text" in refusal(path, "--x", "snippets")
    assert "holds no clients" in refusal(write_fedjax(tmp_path / "b.sqlite", {}))
    (tmp_path / "c.sqlite.lzma").write_bytes(b"\x5d\0\0\x80")
    assert "xz --format=lzma -dk FILE" in refusal(tmp_path / "c.sqlite.lzma")
