"""Damaged and hostile files: each ends in one line that names the file and says what is expected,
nothing in it is run, and what is downloaded unpacks to no more than it should.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile

import h5py
import numpy as np
import pytest
from conftest import one_line, refusal

from fedjax_cfl.data.datasets import download, images, leaf, npy, npz, readers
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, list_wanted
from fedjax_cfl.data.datasets.images import FASHION, fashion_mnist, femnist, mnist

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 1])
IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
MEMORY = 100 * 2**20  # bytes that a bad download may cost


class Trap:
    """Makes a file where it is unpickled."""

    def __reduce__(self):
        return open, ("pwned", "w")


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Works in an empty folder, without network or data of this computer."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    # the bombs are small for the tests to be quick
    monkeypatch.setattr(readers, "MAX_UNPACKED_BYTES", 2**25)
    yield
    assert not list((tmp_path / "cwd").iterdir())  # nothing was run


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# what is downloaded: IDX


def idx(array, shape=None, kind=8):
    """Returns the bytes of an IDX file, whose header may lie."""
    shape = array.shape if shape is None else shape
    return bytes([0, 0, kind, len(shape)]) + np.array(shape, ">u4").tobytes() + array.tobytes()


IDX = {
    "truncated gzip": (gzip.compress(idx(IMAGES))[:-9], "gzip"),
    "a wrong checksum": (gzip.compress(idx(IMAGES))[:-8] + bytes(8), "CRC check failed"),
    "empty": (b"", "begins with 0x, expected an IDX file"),
    "html": (b"<html>404</html>", "is a web page"),
    "floats": (idx(IMAGES, kind=0x0D), "begins with 0x00000d03"),
    "header cut off": (idx(IMAGES)[:9], "for shape (2,) of 3 dimensions"),
    "2**31 images": (gzip.compress(idx(IMAGES, [2**31, 28, 28])), "holds 40 bytes"),
    "no images": (idx(IMAGES[:0]), "none of which is 0"),
    "data too short": (idx(IMAGES)[:-1], "holds 39 bytes, expected 40"),
    "a bomb": (gzip.compress(bytes(2**26)), "holds more than 33554432 bytes"),
    "data behind a small header": (
        gzip.compress(idx(np.zeros(2**24, np.uint8), [10])), "expected 18 for shape (10,)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IDX)
def test_idx(name, tmp_path):
    content, says = IDX[name]
    path = written(tmp_path / "data" / "mnist" / "train-images-idx3-ubyte.gz", content)
    for other in list_wanted("mnist")[1:]:
        written(tmp_path / "data" / other, idx(Y.astype(np.uint8)))
    tracemalloc.start()
    try:
        error = one_line(says, mnist, True, True)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert str(path) in error and "expected" in error


# one's own files


def packed(**members):
    """Returns an npz archive of arrays or raw bytes; x and y are good if not given."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in ({"x": X, "y": Y} | members).items():
            if not isinstance(content, bytes):
                array = io.BytesIO()
                np.save(array, content)
                content = array.getvalue()
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


def header(**claims):
    """Returns the bytes of X as a .npy file, whose header may lie."""
    said = repr({"descr": "<f4", "fortran_order": False, "shape": X.shape} | claims).encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(said) + 1) + said + b"\n" + X.tobytes()


OBJECT = np.array([Trap(), None], dtype=object)
NPZ = {
    "objects": (packed(x=OBJECT), "array 'x' cannot be read (Object arrays cannot be loaded"),
    "objects as labels": (packed(y=OBJECT), "store x.astype(numpy.float32), y.astype(str)"),
    "a pickle in it": (
        packed(x=header(descr="|O")[:-48] + pickle.dumps(Trap())), "'x' cannot be read",
    ),
    "structured": (packed(x=np.zeros(4, "f4,f4")), "x has dtype"),
    "a huge shape": (packed(x=header(shape=(10**15,))), "'x' cannot be read"),
    "a negative shape": (packed(x=header(shape=(-1, 3))), "'x' cannot be read"),
    "a header of brackets": (packed(x=header(shape=[[]])), "'x' cannot be read"),
    "no array": (packed(x=b"hello"), "'x' cannot be read (it is no array)"),
    "no end": (packed()[:-22], "a complete npz archive"),
    "cut in half": (packed()[:300], "a complete npz archive"),
    "a wrong checksum": (packed().replace(X.tobytes(), X[::-1].tobytes()), "'x' cannot be read"),
    "gzipped": (gzip.compress(packed()), "is packed by gzip"),
    "empty": (b"", "a complete npz archive"),
    "text": (b"x,y\n1,2\n", "a complete npz archive"),
    "complex": (packed(x=X.astype(complex)), "x has dtype complex128"),
    "dates": (packed(x=X.astype("M8[s]")), "x has dtype datetime64"),
    "labels above any int": (
        packed(y=np.array([0, 1, 2, 2**64 - 1], np.uint64)), "y is 18446744073709551615 in",
    ),
    "half a client": (packed(client=Y / 2), "client is 0.5"),
    "split of 2": (packed(split=Y), "split is '2' in sample 2, expected train"),
}  # fmt: skip
LEAF = {
    "10,000 brackets": (b"[" * 10_000 + b"]" * 10_000, "expected JSON, "),
    "invalid UTF-8": (b'{"users": ["\xff\xfe\xfa"]}', "expected JSON, "),
    "a key twice": ('{"users": [], "users": []}', "'users' is there twice"),
    "cut": ('{"users": ["a"', "expected JSON, "),
    "gzip cut": (gzip.compress(b'{"users": []}')[:-4], "gzip"),
    "a bomb": (gzip.compress(bytes(2**26)), "holds more than 33554432 bytes"),
}


@pytest.mark.parametrize("name", NPZ)
def test_npz(name, tmp_path):
    content, says = NPZ[name]
    path = written(tmp_path / "a.npz", content)
    error = one_line(says, npz, path)
    assert str(path) in error and "expected" in error and len(error) < 500


@pytest.mark.parametrize("name", LEAF)
def test_leaf(name, tmp_path):
    content, says = LEAF[name]
    path = written(tmp_path / "a.json", content)
    assert str(path) in one_line(says, leaf, path)


def test_npy(tmp_path):
    folder = tmp_path / "a"
    for name, array in {"x": X, "y": Y, "client": Y}.items():
        written(folder / f"{name}.npy", b"")
        np.save(folder / f"{name}.npy", array)
    assert len(npy(folder).y) == 4
    for content in (b"", header()[:90], header(shape=(10**15,)), b"hello", header(descr="|O")):
        written(folder / "client.npy", content)
        assert "client.npy: file cannot be read" in one_line("numpy.float32", npy, folder)
    (folder / "client.npy").unlink()
    (folder / "client.npy").symlink_to(tmp_path / "nowhere")
    one_line("No such file", npy, folder)


@pytest.mark.parametrize("read", [readers.read_idx, npz, leaf])
def test_no_regular_file(read, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("loop", "pipe", "absent", "z" * 300, "/dev/zero", "~nobody_of_this_name/a"):
        one_line("cannot be read", read, tmp_path / name)
    assert "cannot be read" in refusal(read, "a\0b")


def test_hdf5(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["a/b"] = np.arange(3)
        file.create_dataset("huge", (2**45,), "f4", chunks=(1024,), compression="gzip")
    np.testing.assert_array_equal(readers.read_hdf5(path, ["a/b"])["a/b"], np.arange(3))
    for name in ("absent", "a/b/c", "huge"):
        assert name in one_line("a.h5: file cannot be read", readers.read_hdf5, path, [name])
    written(path, path.read_bytes()[:900])
    one_line("a.h5: file cannot be read", readers.read_hdf5, path, ["a/b"])


# files of other kinds


def torch_file():
    """Returns what torch.save writes: an archive with a pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data/data.pkl", pickle.dumps(Trap()))
    return out.getvalue()


def tar_file():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("x.npy"))
    return out.getvalue()


def hdf5_file():
    out = io.BytesIO()
    h5py.File(out, "w").close()
    return out.getvalue()


OTHERS = {
    "data_batch_1": (pickle.dumps(Trap(), 2), "is a pickle and is not opened"),
    "mine.pkl": (pickle.dumps(Trap(), 0), 'numpy.savez("mine.npz", x=x, y=y, client=client)'),
    "mine": (pickle.dumps(Trap(), 5), "is a pickle and is not opened"),
    "data.pt": (torch_file(), "is a pickle and is not opened"),
    "a.bz2": (bz2.compress(b"{}"), "is packed by bzip2, expected it unpacked: bunzip2 -k a.bz2"),
    "a.xz": (lzma.compress(b"{}"), "is packed by xz, expected it unpacked: xz -dk a.xz"),
    "a.tar.gz": (tar_file(), "is an archive, expected what is in it: tar xf a.tar.gz"),
    "a.h5": (hdf5_file(), 'is an HDF5 file, expected an .npz of its arrays: numpy.savez("a.npz"'),
    "a.npy": (header(), 'is a single array, expected an .npz: numpy.savez("a.npz"'),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("read", [npz, leaf])
def test_files_of_other_kinds_are_told_what_to_do(name, read, tmp_path):
    content, says = OTHERS[name]
    path = written(tmp_path / name, content)
    assert str(path) in one_line(says, read, path)


def test_a_zip_is_unpacked_by_its_user(tmp_path):
    one_line("a zip archive, or a file such as .xlsx", leaf, written(tmp_path / "a.zip", packed()))


def test_arrays_of_other_names_are_listed(tmp_path):
    """As MedMNIST and PFLlib have them, and CIFAR-10-C as a folder."""
    np.savez(tmp_path / "a.npz", train_images=IMAGES, train_labels=Y[:2])
    one_line(
        "array 'x' is missing, expected x, y; found train_images, train_labels: store them so, by"
        " numpy.savez", npz, tmp_path / "a.npz",
    )  # fmt: skip
    np.savez(tmp_path / "b.npz", data=OBJECT)
    one_line("array 'x' is missing, expected x, y; found data: ", npz, tmp_path / "b.npz")
    (tmp_path / "c").mkdir()
    np.save(tmp_path / "c" / "fog.npy", IMAGES)
    np.save(tmp_path / "c" / "labels.npy", Y[:2])
    one_line(
        "c: has no x.npy or no y.npy, expected both; found fog.npy, labels.npy: rename them",
        npy, tmp_path / "c",
    )  # fmt: skip


# files of data sets


IMAGE = np.zeros((4, 28, 28), np.uint8)
FEMNIST = {
    "float images": ({"images": IMAGE * 1.0}, "expected [N, 28, 28] uint8"),
    "small images": ({"images": IMAGE[:, :5]}, "expected [N, 28, 28] uint8"),
    "labels of text": ({"labels": Y.astype(str)}, "y has dtype"),
    "too few labels": ({"labels": Y[:3]}, "labels (3,)"),
    "label 62": ({"labels": Y + 60}, "y is 62"),
    "user of half": ({"user": Y / 2}, "client is 0.5"),
    "no users": ({"user": b""}, "'user' cannot be read"),
}


@pytest.mark.parametrize("name", FEMNIST)
def test_femnist(name, tmp_path):
    changes, says = FEMNIST[name]
    good = {"images": IMAGE, "labels": Y, "user": Y, "split": Y * 0}
    path = written(tmp_path / "data" / images.FEMNIST, packed(**(good | changes)))
    for classes in ("all", "digits"):
        assert str(path) in one_line(says, femnist, classes)


def test_femnist_of_small_images(tmp_path):
    user = {"x": [[1, 2]], "y": [0]}
    content = json.dumps({"users": ["a"], "num_samples": [1], "user_data": {"a": user}})
    written(tmp_path / "data" / "femnist" / "data" / "a.json", content)
    one_line("expected images of 784 pixels", femnist)


def test_fashion_mnist_of_other_images(tmp_path):
    for name in FASHION:
        written(tmp_path / "data" / name, packed(images=IMAGE.astype(str), labels=Y))
    one_line("expected [N, 28, 28] uint8", fashion_mnist, True, True)
