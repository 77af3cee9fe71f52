"""Data sets of TensorFlow Federated, written here as TFF and FedJAX write them."""

import sys

import h5py
import numpy as np
import pytest
from conftest import one_line

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.tff import tff_hdf5

PIXELS = np.linspace(0, 1, 2 * 28 * 28, dtype=np.float32).reshape(2, 28, 28)
LABELS = np.array([61, 3], np.int32)


def write(path, clients, **options):
    """Writes an HDF5 file of client -> feature -> array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for client, features in clients.items():
            for name, array in features.items():
                file.create_dataset(f"examples/{client}/{name}", data=array, **options)
    return path


def emnist(*clients, **changes):
    return {name: {"pixels": PIXELS, "label": LABELS} | changes for name in clients}


def cifar(*clients):
    image = np.arange(3 * 32 * 32 * 3).reshape(3, 32, 32, 3).astype(np.uint8)
    labels = {"label": np.array([99, 0, 1]), "coarse_label": np.array([19, 0, 1])}
    return {name: {"image": image, **labels} for name in clients}


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True},
                                     {"compression": "lzf"}])  # fmt: skip
def test_emnist(options, tmp_path):
    write(tmp_path / "fed_emnist_train.h5", emnist("f0002_10", "f0000_14"), **options)
    write(tmp_path / "fed_emnist_test.h5", emnist("f0000_14", "f0009_01"), **options)
    for path in (tmp_path, tmp_path / "fed_emnist_train.h5"):
        pool = tff_hdf5(path)
        np.testing.assert_array_equal(pool.x, np.concatenate([PIXELS] * 4))
        assert pool.y.tolist() == LABELS.tolist() * 4 and pool.num_classes == 62
        assert pool.class_names is not None and pool.class_names[61] == "z"
        assert pool.client_names == ("f0000_14", "f0002_10", "f0009_01")
        assert pool.client.tolist() == [0, 0, 1, 1, 0, 0, 2, 2]
        assert pool.test.tolist() == [False] * 4 + [True] * 4
    alone = tff_hdf5(tmp_path / "fed_emnist_test.h5")
    assert alone.test is None and alone.client.tolist() == [0, 0, 1, 1]
    digits = write(tmp_path / "fed_emnist_digitsonly_test.h5", emnist("a", label=LABELS % 9))
    assert tff_hdf5(digits).num_classes == 10


def test_clients_of_equal_numbers_may_be_strangers(tmp_path):
    write(tmp_path / "fed_cifar100_train.h5", cifar("0", "10", "2"))
    write(tmp_path / "fed_cifar100_test.h5", cifar("0", "1"))
    one_line("may be strangers", tff_hdf5, tmp_path)
    own = tff_hdf5(tmp_path, test_clients="own")
    assert own.client_names == ("0", "2", "10", "test/0", "test/1")
    assert own.client.tolist() == np.repeat(range(5), 3).tolist()
    assert own.num_classes == 100 and own.x.dtype == np.uint8 and own.x.shape == (15, 32, 32, 3)
    same = tff_hdf5(tmp_path, y="coarse_label", test_clients="same")
    assert same.client_names == (0, 1, 2, 10) and same.num_classes == 20
    assert same.client.tolist() == np.repeat([0, 2, 3, 0, 1], 3).tolist()
    (tmp_path / "fed_cifar100_test.h5").unlink()
    one_line("test_clients=own, expected null", tff_hdf5, tmp_path, test_clients="own")


def test_text_is_refused(tmp_path):
    snippets = np.array([b"Hark!", b"Who's there?"], dtype=h5py.string_dtype())
    path = write(tmp_path / "shakespeare_train.h5", {"A_PLAY": {"snippets": snippets}})
    one_line("snippets is text, which is not read", tff_hdf5, path)
    one_line("snippets is text, which is not read", tff_hdf5, path, x="snippets")
    path = write(tmp_path / "b.h5", {"1": {"title": snippets, "score": LABELS, "tags": snippets}})
    one_line("tags, title are text, which is not read", tff_hdf5, path, x="score", y="tags")


BAD = {
    "two samples, one label": (emnist("a", label=LABELS[:1]), "pixels (2, 28, 28) and label (1,)"),
    "two labels a sample": (emnist("a", label=np.zeros((2, 2), int)), "one label a sample"),
    "no label": (
        {"a": {"pixels": PIXELS, "labels": LABELS}},
        "label is missing, expected",
    ),
    "no pixels": ({"a": {"label": LABELS}}, "pixels and image are missing"),
    "no clients": ({}, "'examples' is missing or a link"),
    "another size": (
        emnist("a") | {"b": {"pixels": PIXELS[:, 1:], "label": LABELS}},
        "'b'",
    ),
    "another type": (emnist("a") | {"b": {"pixels": PIXELS > 0, "label": LABELS}}, "dtype bool"),
    "a client without label": (
        emnist("a") | {"b": {"pixels": PIXELS}},
        "'examples/b/label' is",
    ),
    "a label too large": (emnist("a", label=LABELS + 1), "y is 62"),
    "NaN": (emnist("a", pixels=PIXELS * np.nan), "x is NaN"),
    "complex": (emnist("a", pixels=PIXELS * 1j), "has type complex"),
    "a group": (emnist("a", **{"pixels": PIXELS, "label/b": LABELS, "label": None}), "array 'exam"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_fit(name, tmp_path):
    content, says = BAD[name]
    clients = {c: {n: a for n, a in f.items() if a is not None} for c, f in content.items()}
    path = write(tmp_path / "fed_emnist_train.h5", clients)
    error = one_line(says, tff_hdf5, path)
    assert path.name in error and "expected" in error


def test_files_of_train_and_test_that_do_not_fit(tmp_path):
    write(tmp_path / "fed_emnist_train.h5", emnist("a"))
    write(tmp_path / "fed_emnist_test.h5", emnist("a", pixels=np.uint8(PIXELS)))
    one_line("pixels for testing has shape (28, 28) and dtype uint8, expected", tff_hdf5, tmp_path)
    write(tmp_path / "other_train.h5", emnist("a"))
    one_line("holds 2 files *_train.h5 (fed_emnist_train.h5, other_train.h5)", tff_hdf5, tmp_path)
    (tmp_path / "empty").mkdir()
    one_line("holds 0 files *_train.h5, expected one", tff_hdf5, tmp_path / "empty")
    one_line("cannot be read", tff_hdf5, tmp_path / "absent.h5")
    (tmp_path / "text.h5").write_text("hello")
    one_line("text.h5: file cannot be read", tff_hdf5, tmp_path / "text.h5")
    whole = (tmp_path / "other_train.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[: len(whole) // 2])
    one_line("cut.h5: file cannot be read", tff_hdf5, tmp_path / "cut.h5")


def link_out(file, tmp_path):
    file["examples/b"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/examples/a")


def link_inside(file, tmp_path):
    file["examples/b"] = h5py.SoftLink("/examples/a")


def store_outside(file, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(8))
    del file["examples/a/label"]
    place = [(str(tmp_path / "secret"), 0, 8)]
    file.create_dataset("examples/a/label", (2,), np.int32, external=place)


def make_virtual(file, tmp_path):
    layout = h5py.VirtualLayout((2,), np.int32)
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "examples/a/label", shape=(2,))
    del file["examples/a/label"]
    file["examples/a"].create_virtual_dataset("label", layout)


def claim_much(file, tmp_path):
    del file["examples/a/pixels"]
    file.create_dataset("examples/a/pixels", (2, 4000, 4000), np.float32, chunks=(1, 99, 99))


def claim_too_much(file, tmp_path):
    del file["examples/a/pixels"]
    file.create_dataset("examples/a/pixels", (2**40, 28, 28), np.uint8, chunks=(1, 28, 28))


def pack_by_plugin(file, tmp_path):
    del file["examples/a/label"]
    file.create_dataset("examples/a/label", data=LABELS, scaleoffset=0)


def repeat_an_array(file, tmp_path):
    for i in range(50):
        file[f"examples/c{i}"] = file["examples/a"]


HOSTILE = {
    link_out: "'examples/b/pixels' is missing or a link",
    link_inside: "'examples/b/pixels' is missing or a link",
    store_outside: "array 'examples/a/label' is none, or made of other files' data",
    make_virtual: "array 'examples/a/label' is none, or made of other files' data",
    claim_much: "array 'examples/a/pixels' asks for 128000000 bytes, 0 are there",
    claim_too_much: "array 'examples/a/pixels' has type uint8 and 8620",
    pack_by_plugin: "is packed by filter 6, not by gzip or lzf",
    repeat_an_array: "all arrays take more than",
}


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__)
def test_hostile_files(change, tmp_path, monkeypatch):
    path = write(tmp_path / "fed_emnist_train.h5", emnist("a"))
    write(tmp_path / "other.h5", emnist("a"))
    with h5py.File(path, "a") as file:
        change(file, tmp_path)
    if change is repeat_an_array:
        monkeypatch.setattr(readers, "MAX_UNPACKED_BYTES", 2**16)
    one_line(HOSTILE[change], tff_hdf5, path)


@pytest.mark.nightly
def test_a_run(fedjax_cfl, tmp_path, monkeypatch):
    write(tmp_path / "mine" / "fed_emnist_train.h5", emnist("a", "b", "c", label=LABELS % 2))
    write(tmp_path / "mine" / "fed_emnist_test.h5", emnist("a", "b", "c", label=LABELS % 2))
    line = "dataset=tff_hdf5 dataset.source.path=mine algorithm=fedavg rounds=2"
    line += " run_dir=run clients_per_round=3"
    status, out, error = fedjax_cfl(line)
    assert status == 0 and error == "" and out.startswith("fedavg on tff_hdf5: 3 clients, 62 cl")
    monkeypatch.setitem(sys.modules, "h5py", None)
    status, out, error = fedjax_cfl(line)
    assert status == 2 and "pip install 'fedjax-cfl[hdf5]'" in error and error.count("\n") == 1
