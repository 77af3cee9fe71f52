"""Writes a federated data set of TensorFlow Federated or FedJAX as one .npz, for `dataset=npz`.

    python examples/convert/federated.py fed_emnist_train.h5 emnist.npz
    python examples/convert/federated.py emnist_all.sqlite emnist.npz --splits all_train all_test
    python examples/convert/federated.py cifar100.sqlite cifar100.npz --test-clients own
    fedjax-cfl dataset=npz dataset.source.path=emnist.npz partition=by_user

Read are TensorFlow Federated's HDF5 (needs h5py) and SQLite of `tf.train.Example` (protobuf), and
FedJAX's SQLite (msgpack). NAME_test beside NAME_train is for testing. The .npz has `x`, `y`,
`client` and, where there is a test split, `split`. Of EMNIST `y` is the character; 1.0 is paper.

Formats: github.com/google-parfait/tensorflow-federated, simulation/datasets; github.com/google/
fedjax, core/serialization.py; tensorflow/core/example/example.proto.
"""

import argparse
import functools
import re
import sqlite3
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Row = tuple[str, str, dict[str, Any]]  # split, client, and name -> values [n, ...] of a feature
CHARACTERS = np.array(list(string.digits + string.ascii_uppercase + string.ascii_lowercase))
# an Example has no shapes: those of images, by feature and number of values
SHAPES = {("pixels", 784): (28, 28), ("image", 3072): (32, 32, 3), ("image", 21168): (84, 84, 3)}
EXAMPLE = """
name: "example.proto"
message_type {
  name: "Texts" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type {
  name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type {
  name: "Integers" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature"
  field { name: "texts" number: 1 type_name: "Texts" }
  field { name: "floats" number: 2 type_name: "Floats" }
  field { name: "integers" number: 3 type_name: "Integers" } }
message_type { name: "Entry"
  field { name: "name" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type_name: "Feature" } }
message_type {
  name: "Features" field { name: "entries" number: 1 type_name: "Entry" label: LABEL_REPEATED } }
message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }
"""


def read_hdf5(path: Path, split: str) -> Iterator[Row]:
    """Yields the clients of an HDF5 file: a group `examples`, in it a group for each client."""
    import h5py

    with h5py.File(path) as file:
        for client, features in file["examples"].items():
            yield split, client, {name: features[name][()] for name in features}


@functools.cache
def make_example_type() -> Any:
    """Returns the class of `tf.train.Example`, whose map is a list of entries in a file."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def read_example(message: bytes) -> dict[str, Any]:
    """Returns the features of one sample: numbers [1, ...], or texts as a list."""
    found = {}
    for entry in make_example_type().FromString(message).features.entries:
        kind, values = entry.value.ListFields()[0]
        if kind.name == "texts":
            found[entry.name] = list(values.value)
            continue
        array = np.array(values.value, np.float32 if kind.name == "floats" else np.int64)
        if entry.name == "image" and array.min() >= 0 and array.max() <= 255:
            array = array.astype(np.uint8)
        shape = SHAPES.get((entry.name, array.size), array.shape if array.size > 1 else ())
        found[entry.name] = array.reshape(1, *shape)
    return found


def read_msgpack(content: bytes) -> dict[str, Any]:
    """Returns the features of a client as FedJAX packs them: numbers [n, ...], or texts."""
    import msgpack

    def read_value(code: int, data: bytes) -> Any:
        found = msgpack.unpackb(data)
        return found[1] if code == 4 else np.frombuffer(found[2], found[1]).reshape(found[0])

    return msgpack.unpackb(content, ext_hook=read_value)


def read_sqlite(path: Path, split: str, splits: list[str] | None) -> Iterator[Row]:
    """Yields the samples of TensorFlow Federated's file, or the clients of FedJAX's. Of several
    `splits` the last one is for testing; FedJAX's file is one `split`.
    """
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    if "federated_data" in tables:
        for client, data in database.execute("SELECT client_id, data FROM federated_data"):
            name = client.decode() if isinstance(client, bytes) else client
            yield split, name, read_msgpack(zlib.decompress(data))
        return
    there = {name for (name,) in database.execute("SELECT DISTINCT split_name FROM examples")}
    chosen = splits or (list(there) if len(there) == 1 else ["train", "test"])
    if not set(chosen) <= there:
        raise SystemExit(f"{path}: splits are {sorted(there)}, expected --splits of them")
    query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ?"
    for name in chosen:
        part = "test" if len(chosen) > 1 and name == chosen[-1] else "train"
        for client, message in database.execute(f"{query} ORDER BY rowid", (name,)):
            yield part, client, read_example(message)


def read_rows(path: Path, splits: list[str] | None) -> Iterator[Row]:
    """Yields the rows of a file and, if it is NAME_train, of NAME_test beside it."""
    partner = path.with_name(path.name.replace("_train.", "_test."))
    for file in [path, partner] if partner != path and partner.exists() else [path]:
        split = "train" if file == path else "test"
        with file.open("rb") as opened:
            start = opened.read(16)
        if start == b"SQLite format 3\0":
            yield from read_sqlite(file, split, splits)
        elif start.startswith(b"\x89HDF"):
            yield from read_hdf5(file, split)
        else:
            raise SystemExit(
                f"{file}: is neither HDF5 nor SQLite; unpack .lzma by xz --format=lzma -dk FILE"
            )


def name_clients(rows: list[Row], test_clients: str | None) -> list[str]:
    """Returns whose each row is. Names lose the 16 digits of TensorFlow Federated's EMNIST, and
    where test clients are their "own" they are named test/NAME.
    """
    names = {client: re.sub("^[0-9a-f]{16}:", "", client) for _, client, _ in rows}
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    train, test = ({names[c] for part, c, _ in rows if part == side} for side in ("train", "test"))
    if test_clients is None and any(name.isdigit() for name in train & test):
        raise SystemExit(
            "clients of train and test have equal names but may be strangers, as in CIFAR-100:"
            " --test-clients own, or same"
        )
    own = test_clients == "own"
    return [f"test/{names[c]}" if own and part == "test" else names[c] for part, c, _ in rows]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("path", type=Path, help="NAME_train.h5, NAME.sqlite, ...")
    parser.add_argument("out", type=Path, help="the .npz to write")
    parser.add_argument("--x", help="the feature of samples; else pixels or image")
    parser.add_argument("--y", default="label", help="the feature of labels")
    parser.add_argument("--splits", nargs="+", help="of SQLite; of several the last is for testing")
    parser.add_argument("--test-clients", choices=["same", "own"], help="are they those of train?")
    given = parser.parse_args(arguments)
    rows = list(read_rows(given.path, given.splits))
    if not rows:
        raise SystemExit(f"{given.path}: holds no clients")
    features = rows[0][2]
    x = given.x or ("pixels" if "pixels" in features else "image")
    for name, option in ((x, "--x"), (given.y, "--y")):
        if getattr(features.get(name), "dtype", np.dtype(object)).kind not in "buif":
            raise SystemExit(
                f"{given.path}: {name} is missing or text; {option} is one of {sorted(features)}"
            )
    sizes = [len(found[given.y]) for *_, found in rows]
    y = np.concatenate([found[given.y] for *_, found in rows])
    client = np.array(name_clients(rows, given.test_clients))
    arrays = {
        "x": np.concatenate([found[x] for *_, found in rows]),
        "y": CHARACTERS[y] if "emnist" in given.path.name else y,
        "client": np.repeat(client.astype(int) if all(map(str.isdigit, client)) else client, sizes),
    }
    if any(part == "test" for part, *_ in rows):
        arrays["split"] = np.repeat([int(part == "test") for part, *_ in rows], sizes)
    np.savez(given.out, **arrays)
    print(f"{given.out}: {len(y)} samples of {len(set(client))} clients, for dataset=npz")


if __name__ == "__main__":
    main()
