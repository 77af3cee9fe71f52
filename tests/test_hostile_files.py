"""Hostile files: each ends in one line that names the file and what is expected, in
little memory, and nothing is written.
"""

import gzip
import io
import json
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedjax_cfl.data.datasets import download, files, images, readers
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, REGISTRY
from fedjax_cfl.data.datasets.files import npz
from fedjax_cfl.data.datasets.images import FASHION, fashion_mnist, femnist, mnist
from fedjax_cfl.errors import InputError

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 1])
IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
MEMORY = 100 * 2**20  # bytes that a bad file may cost


def idx(array, shape=None, kind=8):
    """Returns the bytes of an IDX file, whose header may lie."""
    shape = array.shape if shape is None else shape
    return bytes([0, 0, kind, len(shape)]) + np.array(shape, ">u4").tobytes() + array.tobytes()


def npy(array, **header):
    """Returns the bytes of a .npy file, whose header may lie."""
    true = {
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": array.shape,
    }
    return raw_npy(repr(true | header).encode(), array.tobytes())


def raw_npy(header, data=b"", version=b"\x01\0"):
    return b"\x93NUMPY" + version + struct.pack("<H", len(header) + 1) + header + b"\n" + data


def packed(compression=zipfile.ZIP_STORED, **members):
    """Returns an npz archive of arrays or raw bytes; x and y are good if not given."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in ({"x": X, "y": Y} | members).items():
            archive.writestr(f"{name}.npy", content if isinstance(content, bytes) else npy(content))
    return out.getvalue()


def flagged(content):
    """Returns an archive whose members say that they are encrypted."""
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        parts = content.split(mark)
        content = mark.join(
            [parts[0], *(part[: place - 4] + b"\x01" + part[place - 3 :] for part in parts[1:])]
        )
    return content


def doubled(*names):
    """Returns an archive of members with any name, also a repeated one."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        for name in ("y.npy", *names):
            archive.writestr(name, npy(X if "x" in name else Y))
    return out.getvalue()


def leaf(**changes):
    """Returns LEAF JSON of users a and b, with keys changed; a value of None is a key left out."""
    good = {
        "users": ["a", "b"],
        "num_samples": [1, 1],
        "user_data": {"a": {"x": [[1, 2]], "y": [0]}, "b": {"x": [[3, 4]], "y": [1]}},
    }
    return json.dumps(
        {name: value for name, value in (good | changes).items() if value is not None}
    )


def of(x="[[1, 2]]", y="[0]", size="1", more=""):
    """Returns LEAF JSON of one user as text, for what json.dumps would not write."""
    return (
        f'{{"users": ["a"], "num_samples": [{size}], "user_data": {{"a": {{"x": {x}, "y":'
        f" {y}{more}}}}}}}"
    )


PICKLE = npy(np.zeros(1), descr="|O") + b"cos\nsystem\n(S'touch pwned'\ntR."
BOMB = gzip.compress(bytes(2**24))
NESTED = b"[" * 10_000 + b"]" * 10_000

IDX = {
    "truncated gzip": (gzip.compress(idx(IMAGES))[:-9], "gzip"),
    "gzip of garbage": (gzip.compress(b"garbage" * 9), "magic"),
    "gzip of nothing": (gzip.compress(b""), "magic"),
    "gzip with trailing garbage": (gzip.compress(idx(IMAGES)) + b"garbage", "gzip"),
    "gzip with a wrong checksum": (
        gzip.compress(idx(IMAGES))[:-8] + bytes(4) + struct.pack("<I", 40),
        "gzip",
    ),
    "gzip with another after it": (gzip.compress(idx(IMAGES)) * 2, "25 bytes or more"),
    "gzip header only": (b"\x1f\x8b", "gzip"),
    "two bytes": (b"\0\0", "magic"),
    "empty": (b"", "magic"),
    "wrong magic": (b"\1\0" + idx(IMAGES)[2:], "magic"),
    "float code": (idx(IMAGES, kind=0x0D), "type is 0x0d"),
    "no dimensions": (bytes([0, 0, 8, 0]), "shape of 0"),
    "255 dimensions": (idx(np.zeros(1, np.uint8), [1] * 255), "shape of 255"),
    "65 dimensions": (idx(np.zeros(1, np.uint8), [1] * 65), "shape of 65"),
    "header cut off": (idx(IMAGES)[:9], "shape of 3 dimensions in 5 bytes"),
    "2**31 images": (idx(IMAGES, [2**31, 28, 28]), "size of the data"),
    "2**31 images, packed": (gzip.compress(idx(IMAGES, [2**31, 28, 28])), "size of the data"),
    "more than any number": (idx(IMAGES, [2**32 - 1] * 8), "size of the data"),
    "dimension 0": (idx(IMAGES[:0]), "at least one"),
    "dimension 0 and a huge one": (idx(IMAGES[:0], [2**32 - 1, 0]), "at least one"),
    "data too short": (idx(IMAGES)[:-1], "23 bytes, expected 24"),
    "data too long": (idx(IMAGES) + bytes(99), "25 bytes or more, expected 24"),
    "bomb": (BOMB, "type"),
    "bomb behind a small header": (
        gzip.compress(idx(np.zeros(2**24, np.uint8), [10])),
        "11 bytes or more",
    ),
    "html": (b"<html>404</html>", "magic"),
}

NPZ = {
    "objects": (packed(x=npy(X, descr="|O")), "'x' cannot be read"),
    "pickle": (packed(x=PICKLE), "'x' cannot be read"),
    "pickle alone": (b"cos\nsystem\n(S'touch pwned'\ntR.", "not an npz"),
    "structured": (packed(x=npy(X, descr=[("a", "<f2"), ("b", "<f2")])), "its type is"),
    "subarray": (packed(x=npy(X, descr="(3,)<f4", shape=(4,))), "its type is"),
    "void": (packed(x=npy(X, descr="|V4")), "its type is"),
    "huge shape": (packed(x=npy(X, shape=(10**12,))), "its header asks for 4000000000000 bytes"),
    "shape beyond 64 bits": (packed(x=npy(X, shape=(10**30,))), "its header asks for"),
    "shape that wraps to the right size": (
        packed(x=npy(X, shape=(2**62 + 3, 4))),
        "its header asks for",
    ),
    "huge shape of nothing": (
        packed(x=npy(X, descr="<U0", shape=(10**12,))),
        "its header asks for 0 bytes",
    ),
    "negative shape": (packed(x=npy(X, shape=(-1, 3))), "its shape is (-1, 3)"),
    "two negative": (packed(x=npy(X, shape=(-4, -3))), "its shape is (-4, -3)"),
    "shape of 100 dimensions": (packed(x=npy(X[:1, :1], shape=(1,) * 100)), "'x' cannot be read"),
    "shape of text": (packed(x=npy(X, shape="ab")), "'x' cannot be read"),
    "header of brackets": (packed(x=raw_npy(b"(" * 5000)), "'x' cannot be read"),
    "header of minus signs": (packed(x=raw_npy(b"-" * 9000 + b"1")), "'x' cannot be read"),
    "header cut": (packed(x=npy(X)[:30]), "'x' cannot be read"),
    "header with a zero byte": (packed(x=raw_npy(b"{'descr': '\0'}")), "'x' cannot be read"),
    "header of 60,000 bytes": (packed(x=raw_npy(b" " * 60_000)), "'x' cannot be read"),
    "header with keys of all kinds": (packed(x=raw_npy(b"{1: 2, 'a': 3}")), "'x' cannot be read"),
    "unknown version": (packed(x=raw_npy(b"{}", version=b"\x09\x09")), "'x' cannot be read"),
    "no array": (packed(x=b"hello"), "'x' cannot be read"),
    "empty member": (packed(x=b""), "'x' cannot be read"),
    "data too long": (packed(x=npy(X) + b"more"), "its header asks for 48 bytes"),
    "escaping names": (doubled("../../x.npy", "/tmp/x.npy"), "'x' is missing"),
    "name of two lines": (doubled("x\nz.npy"), "'x' is missing"),
    "duplicate names": (doubled("x.npy", "x.npy"), "2 times"),
    "same name twice, once bare": (doubled("x.npy", "x"), "2 times"),
    "bomb": (
        packed(zipfile.ZIP_DEFLATED, x=npy(np.zeros(2**22), shape=(10,))),
        "its header asks for 80 bytes",
    ),
    "bomb of a billion": (
        packed(zipfile.ZIP_DEFLATED, x=npy(np.zeros(9), shape=(2**40,))),
        "must be stored uncompressed",
    ),
    "bzip2": (packed(zipfile.ZIP_BZIP2), "compression is method 12"),
    "lzma": (packed(zipfile.ZIP_LZMA), "compression is method 14"),
    "encrypted": (flagged(packed()), "'x' cannot be read"),
    "no end record": (packed()[:-22], "cannot be read"),
    "cut in half": (packed()[:300], "cannot be read"),
    "wrong checksum": (packed().replace(X.tobytes(), X[::-1].tobytes()), "'x' cannot be read"),
    "wrong offset": (packed()[:-6] + b"\xff\xff\xff\x7f\0\0", "cannot be read"),
    "gzipped": (gzip.compress(packed()), "not an npz"),
    "bare array": (npy(X), "single array"),
    "empty": (b"", "cannot be read"),
    "complex": (packed(x=X.astype(complex)), "x has dtype complex128"),
    "dates": (packed(x=X.astype("M8[s]")), "x has dtype datetime64"),
    "dates as labels": (packed(y=Y.astype("M8[s]")), "y has dtype datetime64"),
    "dates as split": (packed(split=Y.astype("M8[s]")), "split has"),
    "text as split": (packed(split=Y.astype(str)), "split has"),
    "times as labels": (packed(y=Y.astype("m8[s]")), "y has dtype timedelta64"),
    "labels above any int": (
        packed(y=np.array([0, 1, 2, 2**64 - 1], np.uint64)),
        "y is 18446744073709551615 in sample 3",
    ),
    "labels above int32": (packed(y=np.array([0, 1, 2, 2**31])), "y is 2147483648"),
    "half a label": (packed(y=Y + 0.5), "looks like a target to regress"),
    "x of no dimension": (packed(x=X[0, 0]), "x has shape ()"),
    "x without features": (packed(x=X[:, :0]), "shape (0,)"),
    "x without features, huge": (
        packed(x=npy(X[:, :0], shape=(4, 0, 10**9))),
        "at least one feature",
    ),
    "x without samples": (packed(x=X[:0], y=Y[:0]), "0 samples"),
    "y of two dimensions": (packed(y=Y[:, None]), "y has shape (4, 1)"),
    "y of no dimension": (packed(y=Y[0]), "y has shape ()"),
    "NaN": (packed(x=np.where(X == 5, np.nan, X)), "NaN or infinite in 1"),
    "infinite": (packed(x=X - np.inf), "NaN or infinite in 4"),
    "beyond float32": (packed(x=X.astype(float) * 1e300), "NaN or infinite"),
    "half a client": (packed(client=Y / 2), "client is 0.5"),
    "too few clients": (packed(client=Y[:3]), "client has shape (3,)"),
    "clients of two dimensions": (packed(client=Y[:, None]), "client has shape (4, 1)"),
    "client NaN": (packed(client=Y * np.nan), "client is nan"),
    "split of 2": (packed(split=Y), "split has 2 somewhere, expected 0"),
    "split too short": (packed(split=Y[:2] * 0), "split has"),
    "split NaN": (packed(split=Y * np.nan), "split has"),
    "split of two dimensions": (packed(split=Y[:, None] * 0), "split has"),
}

LEAF = {
    "users a number": (leaf(users=3), "'users' is no list"),
    "num_samples a number": (leaf(num_samples=3), "'num_samples' is no list"),
    "no user_data": (leaf(user_data=None), "'user_data' is missing"),
    "user_data a list": (leaf(user_data=[]), "'user_data' is missing or no dict"),
    "nobody": (leaf(users=[], num_samples=[], user_data={}), "no samples"),
    "top a list": ("[1, 2]", "'user_data' is missing"),
    "top a number": ("17", "'user_data' is missing"),
    "top null": ("null", "'user_data' is missing"),
    "ragged": (of("[[1, 2], [3]]", "[0, 1]", "2"), "x of user 'a' is ragged"),
    "ragged inside": (of("[[[1], [2]], [[3], 4]]", "[0, 1]", "2"), "x of user 'a' is ragged"),
    "a user twice": (leaf(users=["a", "a"]), "repeated"),
    "a user without data": (
        leaf(users=["a", "b", "c"], num_samples=[1, 1, 1]),
        "'c' is listed without data",
    ),
    "data of nobody": (leaf(users=["a"], num_samples=[1]), "'b', expected only"),
    "a user that is a number": (leaf(users=["a", 1]), "non-text"),
    "a user that is a list": (leaf(users=["a", []]), "non-text"),
    "data that is a list": (leaf(user_data={"a": [], "b": []}), "'a' is listed without data"),
    "data without y": (leaf(user_data={"a": {"x": []}, "b": {}}), "'a' is listed without data"),
    "name of lines and 10,000 signs": (leaf(users=["a\n" * 5000, "b"]), "only names listed"),
    "num_samples short": (leaf(num_samples=[1]), "has 1 entries"),
    "num_samples text": (leaf(num_samples=["1", 1]), "num_samples of user 'a' is '1'"),
    "num_samples NaN": (of(size="NaN"), "num_samples of user 'a' is nan"),
    "num_samples nested": (of(size="[" * 500 + "]" * 500), "num_samples of user 'a' is a list of"),
    "text": (of('[["one", 2]]'), "not numeric (str)"),
    "digits as text": (of('[["1", "2"]]'), "not numeric (str)"),
    "one long text among numbers": (
        of("[[" + "0, " * 10_000 + '"' + "z" * 10**5 + '"]]'),
        "not numeric (str)",
    ),
    "null": (of("[[1, null]]"), "not numeric (NoneType)"),
    "true": (of(y="[true]"), "not numeric (bool)"),
    "an object": (of("[[{}, 1]]"), "not numeric (dict)"),
    "x a number": (of("3"), "'a' is listed without data, expected lists x and y"),
    "y a number": (of(y="3"), "'a' is listed without data, expected lists x and y"),
    "y of two dimensions": (of(y="[[0]]"), "y of user 'a' has shape (1, 1)"),
    "10,000 brackets": (NESTED, "not JSON"),
    "10,000 brackets inside": (of("[" * 10_000 + "]" * 10_000), "not JSON"),
    "500 brackets inside": (of("[" * 500 + "1" + "]" * 500), "is ragged"),
    "a huge integer": (of(f"[[1{'0' * 400}, 2]]"), "too many digits"),
    "a huge integer and a float": (of(f"[[1{'0' * 400}, 2.5]]"), "too many digits"),
    "an integer of 100,000 digits": (of("[[" + "9" * 100_000 + "]]"), "not JSON"),
    "NaN": (of("[[NaN, 2]]"), "x is NaN"),
    "Infinity": (of("[[-Infinity, 2]]"), "x is NaN or infinite"),
    "1e999": (of("[[1e999, 2]]"), "x is NaN or infinite"),
    "label NaN": (of(y="[NaN]"), "y is nan"),
    "label 2**40": (of(y=f"[{2**40}]"), "y is 1099511627776"),
    "no features": (of("[[]]"), "at least one feature"),
    "invalid UTF-8": (b'{"users": ["\xff\xfe\xfa"]}', "not JSON"),
    "half an UTF-16 file": (leaf().encode("utf-16")[:-1], "not JSON"),
    "duplicate keys": (of(more=', "y": [1]'), "'y' is there twice"),
    "duplicate users": ('{"users": [], "users": []}', "'users' is there twice"),
    "two documents": (leaf() + leaf(), "not JSON"),
    "a comma too many": (leaf()[:-1] + ",}", "not JSON"),
    "wrong gzip": (b"\x1f\x8bgarbage", "gzip"),
    "gzip cut": (gzip.compress(leaf().encode())[:-4], "gzip"),
    "bomb": (BOMB, "takes"),
    "bomb of lists": (gzip.compress(b"[" + b"[]," * 2**20, 1), "takes"),
    "empty": ("", "not JSON"),
}


def refused(says, path, function, *arguments):
    """Asserts one line that names the file, little memory, and that the folder of the
    file is as it was.
    """
    before = sorted(path.parent.rglob("*"))
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            function(*arguments)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert (
        "\n" not in text
        and len(text) < 1000
        and says in text
        and path.name in text
        and "expected" in text
    ), text
    assert peak < MEMORY and sorted(path.parent.rglob("*")) == before and not Path("pwned").exists()


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Works in an empty folder, without network or data of this computer."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path / "cwd"))
    # the bombs are small for the tests to be quick
    monkeypatch.setattr(readers, "MAX_UNPACKED_BYTES", 2**25)


@pytest.mark.parametrize("name", IDX)
def test_idx(name, tmp_path):
    content, says = IDX[name]
    path = written(tmp_path / "cwd" / "mnist" / "train-images-idx3-ubyte.gz", content)
    refused(says, path, readers.read_idx, path)
    for other in list(REGISTRY["mnist"].files)[1:]:
        written(path.with_name(other), idx(Y.astype(np.uint8)))
    refused(says, path, mnist, True, True)


@pytest.mark.parametrize("name", NPZ)
def test_npz(name, tmp_path):
    content, says = NPZ[name]
    path = written(tmp_path / "a.npz", content)
    refused(says, path, npz, path)


@pytest.mark.parametrize("name", LEAF)
def test_leaf(name, tmp_path):
    content, says = LEAF[name]
    path = written(tmp_path / "a.json", content)
    refused(says, path, files.leaf, path)


GOOD = {
    "y is float": packed(y=Y / 1.0),
    "y is bool": packed(y=Y > 1),
    "y is uint64": packed(y=np.uint64(Y)),
    "packed": packed(8),
}


@pytest.mark.parametrize("name", [*GOOD, "Fortran order"])
def test_unusual_but_good(name, tmp_path):
    columns = packed(x=npy(np.ascontiguousarray(X.T), fortran_order=True, shape=(4, 3)))
    pool = npz(written(tmp_path / "a.npz", GOOD.get(name, columns)))
    np.testing.assert_array_equal(pool.x, X)
    assert pool.y.dtype == np.int32 and len(pool.y) == 4


@pytest.mark.parametrize("read", [readers.read_idx, npz, files.leaf])
def test_no_regular_file(read, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nothing").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("loop", "nothing", "pipe", "absent", "folder", "z" * 300, "loop/inside"):
        refused(
            "folder" if name == "folder" else "cannot be read",
            tmp_path / name,
            read,
            tmp_path / name,
        )
    for name in ("/dev/zero", "~nobody_of_this_name/a", "a\0b"):
        refused("cannot be read", tmp_path / repr(name)[1:-1].rpartition("/")[2], read, name)


@pytest.mark.parametrize("name", ["x", "y", "client", "split", "concept"])
def test_a_folder_of_arrays_holds_regular_files_only(name, tmp_path):
    good = {"x": X, "y": Y, "client": Y, "split": Y * 0, "concept": Y[:3]}
    folder = tmp_path / "a"
    for member, array in good.items():
        written(folder / f"{member}.npy", npy(array))
    path = folder / f"{name}.npy"
    assert len(files.npy(folder).y) == 4
    path.unlink()
    os.mkfifo(path)
    refused("not a regular file", path, files.npy, folder)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    refused("No such file", path, files.npy, folder)
    path.unlink()
    refused("array", written(path, packed()), files.npy, folder)


def test_a_huge_sparse_file(tmp_path):
    path = written(tmp_path / "a.json", b"[")
    os.truncate(path, 2**40)
    refused("takes", path, files.leaf, path)
    path = written(tmp_path / "a", idx(IMAGES, [2**32 - 1, 100]))
    os.truncate(path, 2**40)
    refused("size of the data", path, readers.read_idx, path)


IMAGE = np.zeros((4, 28, 28), np.uint8)
FEMNIST = {
    "split of 2": ({"split": Y}, "split has"),
    "float images": ({"images": IMAGE * 1.0}, "expected [N, 28, 28] uint8"),
    "small images": ({"images": IMAGE[:, :5]}, "expected [N, 28, 28] uint8"),
    "labels of text": ({"labels": Y.astype(str)}, "y has dtype"),
    "too few labels": ({"labels": Y[:3]}, "labels (3,)"),
    "labels of two dimensions": ({"labels": Y[:, None]}, "labels (4, 1)"),
    "label 62": ({"labels": Y + 60}, "y is 62"),
    "user of half": ({"user": Y / 2}, "client is 0.5"),
    "too few users": ({"user": Y[:2]}, "client has shape (2,)"),
    "no users": ({"user": b""}, "'user' cannot be read"),
}


@pytest.mark.parametrize("name", FEMNIST)
def test_femnist(name, tmp_path):
    changes, says = FEMNIST[name]
    good = {"images": IMAGE, "labels": Y, "user": Y, "split": Y * 0}
    path = written(tmp_path / "cwd" / images.FEMNIST, packed(**(good | changes)))
    for classes in ("all", "digits"):
        refused(says, path, femnist, classes)


def test_femnist_of_small_images(tmp_path):
    path = written(tmp_path / "cwd" / "femnist" / "data" / "a.json", leaf())
    refused("expected images of 784 pixels", path.parent, femnist)


def test_fashion_mnist_of_other_images(tmp_path):
    for name in FASHION:
        path = written(tmp_path / "cwd" / name, packed(images=IMAGE.astype(str), labels=Y))
    refused(
        "expected [N, 28, 28] uint8",
        path.with_name(Path(FASHION[0]).name),
        fashion_mnist,
        True,
        True,
    )
