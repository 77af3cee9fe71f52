"""Sources: the built-in data, the user's own files, the checks of a pool, and the real
files where FEDJAX_CFL_DATA names them.
"""

import json
import os

import numpy as np
import pytest
from conftest import one_line

from fedjax_cfl.data import partition
from fedjax_cfl.data.datasets import download
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, locate
from fedjax_cfl.data.datasets.files import npy, npz
from fedjax_cfl.data.datasets.images import cifar100, digits, fashion_mnist, femnist, mnist
from fedjax_cfl.data.datasets.leaf_json import leaf
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.data.datasets.synthetic import synthetic
from fedjax_cfl.data.federated import federate
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool

real = pytest.mark.skipif(
    not os.environ.get(DATA_ENV_VAR), reason=f"real data: {DATA_ENV_VAR} is not set"
)
X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 1])


def changed(array, place, value):
    """Returns a copy with one entry replaced."""
    array = array.astype(np.result_type(array, type(value)))
    array[place] = value
    return array


def test_digits():
    pool = digits()
    assert pool.x.shape == (1797, 8, 8) and pool.x.dtype == np.float32 and pool.y.dtype == np.int32
    assert pool.x.min() == 0 and pool.x.max() == 1 and pool.num_classes == 10


def test_synthetic_matches_total_and_repeats():
    pool, again = synthetic(seed=3), synthetic(seed=3)
    assert abs(len(pool.y) - 75_349) <= 753 and pool.x.shape[1] == 60
    np.testing.assert_array_equal(pool.x, again.x)
    sizes = np.bincount(pool.client)
    assert len(sizes) == 100 and sizes.min() >= 50


def test_synthetic_distribution():
    pool = synthetic(0.5, 0.5, clients=30, match_total=None, seed=1)
    variances = np.array([pool.x[pool.client == k].var(axis=0) for k in range(30)]).mean(axis=0)
    np.testing.assert_allclose(variances, np.arange(1, 61) ** -1.2, rtol=0.15)
    iid = synthetic(clients=30, match_total=None, seed=1, iid=True)
    assert np.abs(iid.x.mean(axis=0)).max() < 0.05
    one_line("match_total=100", synthetic, clients=10, match_total=100)
    one_line("clients=0", synthetic, clients=0)


def test_npz(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        x=X,
        y=Y.astype(float),
        client=np.array([0, 0, 1, 1]),
        split=np.array([0, 1, 0, 1]),
    )
    pool = npz(tmp_path / "a.npz")
    assert (
        pool.num_classes == 3 and pool.y.dtype == np.int32 and pool.client.tolist() == [0, 0, 1, 1]
    )
    assert pool.test.tolist() == [False, True, False, True]
    one_line("num_classes=2", npz, tmp_path / "a.npz", num_classes=2)
    np.savez(tmp_path / "b.npz", x=X, y=Y, split=np.array([0, 1, 2, 1]))
    one_line("split", npz, tmp_path / "b.npz")


def test_clients_and_labels_may_be_text_and_come_out_as_given(tmp_path):
    arrays = {
        "x": X,
        "y": np.array(["cat", "dog", "cat", "ape"]),
        "client": np.array(["zoe", "ann", "zoe", "bob"]),
        "concept": np.array([1, 0, 1]),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    (tmp_path / "a").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "a" / f"{name}.npy", array)
    for pool in (npz(tmp_path / "a.npz"), npy(tmp_path / "a")):
        assert pool.y.tolist() == [1, 2, 1, 0] and pool.num_classes == 3
        assert pool.client.tolist() == [2, 0, 2, 1] and pool.client_names == ("ann", "bob", "zoe")
        data = federate(pool, partition.by_user(pool, test_fraction=0))
        assert data.client_names.names == pool.client_names and data.concept.tolist() == [1, 0, 1]
        dealt = federate(pool, partition.iid(pool, clients=3, test_fraction=0))
        assert dealt.client_names is None and dealt.concept.tolist() == [-1] * 3


@pytest.mark.parametrize(
    ("client", "names", "numbers"),
    [
        (np.array([7, 7, 2, 10**12]), (2, 7, 10**12), [1, 1, 0, 2]),
        (np.array([5.0, 5.0, 5.0, 9.0]), (5, 9), [0, 0, 0, 1]),
        (np.array([b"b", b"a", b"b", b"b"]), ("a", "b"), [1, 0, 1, 1]),
        (np.array([0, 1, 0, 1]), None, [0, 1, 0, 1]),
    ],
)
def test_client_ids_with_gaps(tmp_path, client, names, numbers):
    np.savez(tmp_path / "a.npz", x=X, y=Y, client=client)
    pool = npz(tmp_path / "a.npz")
    assert pool.client_names == names and pool.client.tolist() == numbers


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"y": np.eye(3)[Y], "split": Y * 0}, "one-hot .* store y.argmax"),
        ({"y": Y[:, None]}, r"y has shape \(4, 1\), expected \[N\]"),
        ({"y": Y + 1}, "y is 1 .. 3 and never 0.* store y - 1, or set num_classes=4"),
        ({"y": Y.astype(object)}, "of objects, which are pickles .*y.astype"),
        ({"client": np.array([0.5, 1, 2, 3])}, "client is 0.5 in sample 0"),
        ({"client": Y[:2]}, r"client has shape \(2,\)"),
        ({"client": Y * 1j}, "client has dtype complex"),
        ({"concept": Y}, "concept is there without client"),
        ({"client": Y, "concept": Y}, r"concept has shape \(4,\) .* expected \(3,\)"),
    ],
)
def test_what_is_refused_names_the_remedy(tmp_path, changes, says):
    arrays = {"x": X, "y": Y} | changes
    np.savez(tmp_path / "a.npz", **arrays)
    (tmp_path / "a").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "a" / f"{name}.npy", array)
    for read, path in ((npz, tmp_path / "a.npz"), (npy, tmp_path / "a")):
        with pytest.raises(InputError, match=says) as caught:
            read(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_labels_from_one_on_are_taken_with_a_number_of_classes(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y + 1)
    assert npz(tmp_path / "a.npz", num_classes=4).y.tolist() == (Y + 1).tolist()


def test_few_samples_name_the_remedy():
    remedy = r"at most 4 clients .*lower dataset\.clients.*name their column"
    with pytest.raises(InputError, match=remedy):
        partition.auto(Pool(X, Y, 3), clients=100, alpha=0.5, min_samples=1)


def test_leaf_joins_train_and_test(tmp_path):
    for part, users in {"train": {"b": 2, "a": 1, "empty": 0}, "test": {"b": 1, "c": 1}}.items():
        (tmp_path / part).mkdir()
        data = {user: {"x": [[1, 2]] * n, "y": [n] * n} for user, n in users.items()}
        shard = {"users": list(users), "num_samples": list(users.values()), "user_data": data}
        (tmp_path / part / "0.json").write_text(json.dumps(shard))
    pool = leaf(tmp_path)
    assert (
        pool.client.tolist() == [0, 1, 1, 1, 2] and pool.test.tolist() == [False] * 3 + [True] * 2
    )
    assert leaf(tmp_path / "train").test is None
    one_line("absent", leaf, tmp_path / "absent")


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (
            Pool(changed(X, (2, 1), np.nan), Y, 3),
            "x is NaN or infinite in 1 samples, first in sample 2",
        ),
        (
            Pool(changed(X, (slice(1, 3), 0), np.inf), Y, 3),
            "x is NaN or infinite in 2 samples, first in sample 1",
        ),
        (Pool(changed(X, (0, 0), 1e300), Y, 3), "x is NaN or infinite"),
        (Pool(X, changed(Y, 1, 0.5), 3), "y is 0.5 in sample 1"),
        (Pool(X, changed(Y, 3, np.nan), 3), "y is nan in sample 3"),
        (Pool(X, changed(Y, 3, -1), 3), "y is -1 in sample 3"),
        (Pool(X, Y, 2), "y is 2 in sample 2, expected 0 .. 1"),
        (Pool(X, Y[:3], 3), "y has shape (3,)"),
        (Pool(X, Y[:, None], 3), "y has shape (4, 1)"),
        (Pool(X[:0], Y[:0], 3), "x has 0 samples"),
        (Pool(X[:, :0], Y, 3), "x has samples of shape (0,)"),
        (Pool(X[:, 0], Y, 3), "x has samples of shape ()"),
        (Pool(X.astype(str), Y, 3), "x has dtype <U"),
        (Pool(X.astype(object), Y, 3), "x has dtype object"),
        (Pool(X.astype(complex), Y, 3), "x has dtype complex"),
        (Pool(X, Y.astype(str), 3), "y has dtype <U"),
        (Pool(X, Y, 3, client=Y[:2]), "client has shape (2,)"),
        (Pool(X, Y, 3, client=Y - 1), "client is -1 in sample 0"),
        (Pool(X, Y, 3, test=Y[:2] > 0), "test has shape (2,)"),
    ],
)
def test_bad_pools(pool, says):
    one_line(f"toy: {says}", check_pool, pool, "toy")


def test_missing_files(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.delenv(DATA_ENV_VAR, raising=False)
    one_line("mnist/t10k-labels-idx1-ubyte.gz", mnist, offline=True)
    one_line("fashion_mnist/train-images-idx3-ubyte.gz", fashion_mnist, offline=True)
    one_line("femnist_leaf_sf005_uint8.npz", femnist)
    one_line("classes=letters", femnist, "letters")


def test_official_split_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    rng = np.random.default_rng(0)
    images = {
        "train": rng.integers(0, 256, (60, 28, 28), np.uint8),
        "t10k": rng.integers(0, 9, (10, 28, 28), np.uint8),
    }
    (tmp_path / "fashion_mnist").mkdir()
    for part, array in images.items():
        for file, a in {
            "images-idx3": array,
            "labels-idx1": np.arange(len(array), dtype=np.uint8) % 10,
        }.items():
            head = bytes([0, 0, 8, a.ndim]) + np.array(a.shape, ">u4").tobytes()
            (tmp_path / "fashion_mnist" / f"{part}-{file}-ubyte").write_bytes(head + a.tobytes())
    pool = fashion_mnist(offline=True)
    assert pool.test.tolist() == [False] * 60 + [True] * 10
    mean, std = images["train"].mean(axis=0), images["train"].std(axis=0)
    np.testing.assert_allclose(
        pool.x[60:], (images["t10k"] - mean) / (std + 0.001), rtol=1e-4, atol=1e-5
    )
    drawn = fashion_mnist(split="random", offline=True)
    assert sorted(drawn.y[drawn.test]) == list(range(10))  # a seventh of seven each
    (tmp_path / "fashion_mnist" / "t10k-labels-idx1-ubyte").write_bytes(
        bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 1])
    )
    one_line("images (10, 28, 28) uint8 and labels (2,)", fashion_mnist, offline=True)


def cifar_records(coarse, fine):
    """Returns the bytes of images of CIFAR-100 whose red is 1, green 2 and blue 3."""
    pixels = bytes(np.repeat(np.uint8([1, 2, 3]), 32 * 32))
    return b"".join(bytes([a, b]) + pixels for a, b in zip(coarse, fine, strict=True))


def test_cifar100(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "search_dirs", lambda: [tmp_path])
    with pytest.raises(InputError, match="cifar-100-binary"):
        cifar100()
    folder = tmp_path / "cifar100" / "cifar-100-binary"
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(cifar_records([19, 0], [99, 1]))
    (folder / "test.bin").write_bytes(cifar_records([4], [7]))
    pool = cifar100()
    assert pool.x.shape == (3, 32, 32, 3) and (pool.x[2] == [1, 2, 3]).all()
    assert pool.y.tolist() == [99, 1, 7] and pool.num_classes == 100 and pool.class_names is None
    assert pool.test.tolist() == [False, False, True]
    (folder / "coarse_label_names.txt").write_text(
        "\n".join(f"c{i:02}" for i in range(20)) + "\n\n"
    )
    coarse = cifar100(labels="coarse", centered=True)
    assert coarse.y.tolist() == [19, 0, 4] and coarse.num_classes == 20 and coarse.x.min() < -0.9
    assert coarse.class_names is not None and coarse.class_names[19] == "c19"
    (folder / "fine_label_names.txt").write_text("a\nb\n")
    with pytest.raises(InputError, match="holds 2 names, expected 100"):
        cifar100()
    (folder / "test.bin").write_bytes(cifar_records([4], [7])[:-1])
    with pytest.raises(InputError, match="3073 bytes, expected records of 3074"):
        cifar100()
    (folder / "test.bin").write_bytes(cifar_records([20], [100]))
    with pytest.raises(InputError, match="y is 20 in sample 2"):
        cifar100(labels="coarse")


@real
def test_real_mnist():
    pool = mnist(standardize=False, offline=True)
    assert (
        pool.x.shape == (70_000, 28, 28) and pool.x.dtype == np.uint8 and pool.test.sum() == 10_000
    )
    assert np.bincount(pool.y).tolist() == [
        6903,
        7877,
        6990,
        7141,
        6824,
        6313,
        6876,
        7293,
        6825,
        6958,
    ]
    x = mnist(offline=True).x
    assert x.dtype == np.float32
    np.testing.assert_allclose(x[:, 14, 14].std(), 1, rtol=1e-3)
    np.testing.assert_allclose(x.mean(axis=0, dtype=np.float64), 0, atol=1e-5)


@real
def test_real_fashion_mnist():
    pool = fashion_mnist(standardize=False, offline=True)
    assert np.bincount(pool.y).tolist() == [7000] * 10
    assert abs(float(pool.x.mean()) / 255 - 0.286) < 0.0005
    if pool.test is not None:  # the official files are there
        assert np.bincount(pool.y[pool.test]).tolist() == [1000] * 10
    drawn = fashion_mnist(standardize=False, offline=True, split="random").test
    assert np.bincount(pool.y[drawn]).tolist() == [1000] * 10
    one_line(
        "dataset.source.split=train: must be one of official, random",
        fashion_mnist,
        True,
        True,
        "train",
    )


@real
def test_real_femnist():
    pool, only = femnist(offline=True), femnist("digits", offline=True)
    assert (
        pool.x.shape[1:] == (28, 28)
        and pool.num_classes == 62
        and pool.client.max() == 206
        and pool.test.sum() == 3245
    )
    assert (
        len(only.y) == 21_999
        and only.num_classes == 10
        and len(np.unique(only.client)) == only.client.max() + 1
    )


@real
def test_real_leaf_json_agrees_with_npz():
    folder = locate("femnist/leaf_json")
    if folder is None:
        pytest.skip("no femnist/leaf_json under the data root")
    shards, whole = leaf(folder[0], num_classes=62), femnist(offline=True)
    known = {image.tobytes() for image in whole.x}
    assert shards.client.max() == 9
    assert all(np.uint8(np.round(image * 255)).tobytes() in known for image in shards.x[::40])
