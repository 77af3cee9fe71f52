"""Files: what is read, and that every malformed one gives a single line naming the
file, the field and what is expected.
"""

import gzip
import json

import numpy as np
import pytest

from fedjax_cfl.data import datasets
from fedjax_cfl.data.datasets.leaf_json import CHARACTERS
from fedjax_cfl.data.datasets.readers import read_idx, read_npz
from fedjax_cfl.errors import InputError


def idx(array, kind=8):
    """Returns the bytes of an IDX file."""
    return (
        bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    )


def leaf(**users):
    """Returns a LEAF shard of users given as (x, y)."""
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": data,
    }


IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def test_idx_plain_and_gzip(tmp_path):
    for name, content in {"a": idx(IMAGES), "b.gz": gzip.compress(idx(IMAGES))}.items():
        (tmp_path / name).write_bytes(content)
        np.testing.assert_array_equal(read_idx(tmp_path / name), IMAGES)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "begins with 0x, expected an IDX file"),
        (b"<html>not found</html>", "is a web page, as a download that failed leaves"),
        (idx(IMAGES, kind=0x0D), "begins with 0x00000d03, expected an IDX file of uint8"),
        (idx(IMAGES)[:6], "shape"),
        (bytes([0, 0, 8, 0]), "begins with 0x00000800"),
        (idx(IMAGES)[:-1], "holds 39 bytes, expected 40 for shape (2, 3, 4)"),
        (idx(IMAGES) + b"x", "holds 41 bytes, expected 40"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "holds 16 bytes, expected"),
        (gzip.compress(idx(IMAGES), mtime=0)[:-9], "gzip"),
        (b"\x1f\x8b" + b"junk" * 9, "gzip"),
    ],
)
def test_bad_idx(tmp_path, content, says):
    (tmp_path / "f").write_bytes(content)
    fails(says, tmp_path / "f", read_idx, tmp_path / "f")


def test_npz(tmp_path):
    np.savez(tmp_path / "a.npz", x=IMAGES, y=np.array([1, 2]), other=np.array([3]))
    arrays = read_npz(tmp_path / "a.npz", ("x",), ("y", "client"))
    assert sorted(arrays) == ["x", "y"]
    np.testing.assert_array_equal(arrays["x"], IMAGES)


def test_leaf_file_folder_and_order(tmp_path):
    (tmp_path / "1.json").write_text(json.dumps(leaf(b=([[1.0, 2], [3, 4]], [0, 1]))))
    (tmp_path / "2.json.gz").write_bytes(
        gzip.compress(json.dumps(leaf(c=([], []), a=([[5, 6]], [2]))).encode())
    )
    (tmp_path / "notes.txt").write_text("not a shard")
    pool = datasets.leaf(tmp_path)
    assert pool.client_names == ("a", "b")  # c has no samples
    assert pool.x.dtype == np.float32 and pool.client.dtype == np.int32
    np.testing.assert_array_equal(pool.x, [[5, 6], [1, 2], [3, 4]])
    np.testing.assert_array_equal(pool.y, [2, 0, 1])
    np.testing.assert_array_equal(pool.client, [0, 1, 1])
    assert datasets.leaf(str(tmp_path / "1.json")).client_names == ("b",)


GOOD = leaf(a=([[1, 2]], [0]), b=([[3, 4]], [1]))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "expected JSON, "),
        ("[" * 100_000, "expected JSON, "),
        ("[]", "'user_data' is missing"),
        ({"users": [], "num_samples": []}, "'user_data' is missing"),
        (leaf(a=([[1, 2]], [0, 1])), "user 'a' has 1 of x and 2 of y, expected as many"),
        (leaf(a=(["ab", "abc"], ["a", "b"])), "user 'a' has text, expected windows of one length"),
        (leaf(a=(["ab"], ["ab"])), "user 'a' has text, expected windows of one length"),
        (leaf(a=(["ab", 1], ["a", "b"])), "user 'a' has text, expected windows of one length"),
        (leaf(a=(["ab"], ["a"]), b=([[1, 2]], [0])), "dtype float32, expected (2,) and int32"),
        (leaf(a=([[1, 2], [3]], [0, 1])), "x of user 'a' is ragged"),
        (leaf(a=([[1, 2]], [0]), b=([[1, 2, 3]], [0])), "samples of shape (3,) and dtype"),
        (leaf(a=([["one", "two"]], [0])), "x of user 'a' is not numeric"),
        (leaf(a=([[1, None]], [0])), "x of user 'a' is not numeric"),
        (leaf(a=([[1, 2]], ["z"])), "y of user 'a' is not numeric"),
        (leaf(a=([[1, 2]], [[0]])), "y of user 'a' has shape (1, 1)"),
        (leaf(a=([], [])), "no samples"),
    ],
)
def test_bad_leaf(tmp_path, content, says):
    (tmp_path / "f.json").write_text(content if isinstance(content, str) else json.dumps(content))
    fails(says, tmp_path / "f.json", datasets.leaf, tmp_path / "f.json")


def test_the_samples_of_a_file_that_contradicts_itself_count(tmp_path):
    """LEAF's test files of Shakespeare state 79 samples too many; others leave both lists out."""
    stated = GOOD | {"users": ["a", "b", "c"], "num_samples": [80, 1]}
    bare = {"user_data": GOOD["user_data"]}
    for content in (stated, bare, GOOD):
        (tmp_path / "f.json").write_text(json.dumps(content))
        pool = datasets.leaf(tmp_path / "f.json")
        assert pool.x.tolist() == [[1, 2], [3, 4]] and pool.y.tolist() == [0, 1]
        assert pool.client_names == ("a", "b")


def test_windows_of_text_are_numbers_of_characters(tmp_path, capsys):
    (tmp_path / "f.json").write_text(json.dumps(leaf(b=(["\n }z"], ["!"]), a=(["AbC."], ["b"]))))
    pool = datasets.leaf(tmp_path / "f.json")
    at = CHARACTERS.index
    assert pool.x.dtype == np.float32 and pool.x.tolist() == [
        [at("A"), at("b"), at("C"), at(".")],
        [0, 1, 79, 78],
    ]
    assert pool.y.tolist() == [at("b"), 2] and pool.num_classes == 80
    assert pool.client_names == ("a", "b") and pool.class_names[at("Q")] == "Q"
    assert not capsys.readouterr().err
    (tmp_path / "f.json").write_text(json.dumps(leaf(a=(["ab\u00e4d"], ["a"]))))
    pool = datasets.leaf(tmp_path / "f.json")
    assert pool.num_classes == 81 and pool.class_names[80] == "unknown" and pool.x[0, 2] == 80
    assert "25.00% of the characters are not among LEAF's 80" in capsys.readouterr().err


def test_bad_leaf_files(tmp_path):
    fails("no *.json", tmp_path, datasets.leaf, tmp_path)
    fails("cannot be read", tmp_path / "absent.json", datasets.leaf, tmp_path / "absent.json")
    for name in ("1.json", "2.json"):
        (tmp_path / name).write_text(json.dumps(GOOD))
    fails("user 'a' is also in", tmp_path / "2.json", datasets.leaf, tmp_path)
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-8])
    fails("gzip", tmp_path / "cut.json.gz", datasets.leaf, tmp_path / "cut.json.gz")


def fails(says, path, function, *args):
    """Asserts an InputError of one line that names the file and says what is wrong."""
    with pytest.raises(InputError) as caught:
        function(*args)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text and says in text and "expected" in text, text
