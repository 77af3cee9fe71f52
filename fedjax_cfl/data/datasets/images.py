"""Image data sets: each function returns a checked `Pool`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedjax_cfl.data.datasets import download, readers
from fedjax_cfl.data.datasets.leaf_json import leaf
from fedjax_cfl.data.datasets.pool import check_pool, read_test_mask
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import checked

STD_EPSILON = 0.001  # added to a pixel's standard deviation, which is 0 at the border
DIGITS = Path(__file__).with_name("digits.npz")  # images 0 .. 16, labels 0 .. 9
FEMNIST = "femnist/femnist_leaf_sf005_uint8.npz"
CIFAR = tuple(download.list_wanted("cifar10"))
CIFAR_PART = "cifar10/cifar10_clients00-21.npz"
CIFAR_100 = tuple(f"cifar100/cifar-100-binary/{part}.bin" for part in ("train", "test"))
# bytes of an image of CIFAR, its red, green and blue pixels; before it come its labels
CIFAR_PIXELS = 32 * 32 * 3
FASHION = (
    "fashion_mnist/fashion_mnist_clients00-24.npz",
    "fashion_mnist/fashion_mnist_clients25-49.npz",
)


def digits() -> Pool:
    """Returns 1,797 handwritten digits, 8x8 float32 in [0, 1], 10 classes: the test part of UCI's
    "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, CC BY 4.0), which
    scikit-learn has as well. They come with the package: nothing is downloaded.
    """
    with np.load(DIGITS, allow_pickle=False) as file:
        x, y = file["images"].astype(np.float32) / 16, file["labels"].astype(np.int64)
    return check_pool(Pool(x, y, 10), "digits")


def mnist(standardize: bool = True, offline: bool = False) -> Pool:
    """Returns all 70,000 images of MNIST, 28x28, 10 classes; `test` is the official
    split.

    With `standardize`, each pixel becomes (x - mean) / (std + 0.001) over all 70,000
    images, test included, as FedProx prepared its data (x in 0 .. 255); else x stays
    uint8. Files: the four IDX files under mnist/, downloaded if missing.
    """
    x, y, test = _idx(download.fetch("mnist", offline))
    return check_pool(
        Pool(_standardize(x, slice(None)) if standardize else x, y, 10, test=test), "mnist"
    )


@checked("dataset.source")
def fashion_mnist(
    standardize: bool = True,
    offline: bool = False,
    split: Literal["official", "random"] = "official",
) -> Pool:
    """Returns the 70,000 images of Fashion-MNIST, 28x28, 10 classes.

    From the official IDX files under fashion_mnist/, `test` is the official split, and
    `standardize` takes mean and standard deviation (+ 0.001) of each pixel from the
    training images. If only the two files fashion_mnist_clients*.npz are there, they
    are read instead: the official split is lost, `test` is None, and all images are
    standardised together. `split=random` draws a test split of the official one's size,
    a seventh of every class, always the same for the same files.
    """
    official = download.locate(*download.list_wanted("fashion_mnist"))
    pooled = None if official else download.locate(*FASHION)
    if pooled is None:
        x, y, test = _idx(download.fetch("fashion_mnist", offline))
        rows = ~test
    else:
        parts = [read_images(path, ("images", "labels")) for path in pooled]
        x, y = (np.concatenate([part[name] for part in parts]) for name in ("images", "labels"))
        test, rows = None, slice(None)
    if split == "random":
        rng = np.random.RandomState(0)
        test = np.zeros(len(y), bool)
        for label in range(10):
            same = rng.permutation(np.flatnonzero(y == label))
            test[same[: len(same) // 7]] = True
        rows = ~test
    return check_pool(
        Pool(_standardize(x, rows) if standardize else x, y, 10, test=test), "fashion_mnist"
    )


@checked("dataset.source")
def femnist(
    classes: Literal["all", "digits"] = "all", offline: bool = False, keep_split: bool = True
) -> Pool:
    """Returns FEMNIST by writer (LEAF), 28x28, with LEAF's own split: "all" 62 classes
    (0-9, A-Z, a-z) or only the 10 "digits".

    Without `keep_split`, `test` is None, so that a partition by writer makes the split.
    Writers left without samples are dropped. Files under femnist/: the npz file
    femnist_leaf_sf005_uint8.npz (x is uint8), or LEAF JSON in data/{train,test} or
    leaf_json/{train,test} (x is float32 in [0, 1]). There is no download: LEAF's
    scripts make them.
    """
    archive = download.locate(FEMNIST)
    folders = download.locate("femnist/data") or download.locate("femnist/leaf_json")
    if archive is not None:
        arrays = read_images(archive[0], ("images", "labels", "user", "split"))
        test = read_test_mask(archive[0], arrays["split"], arrays["labels"])
        pool = check_pool(
            Pool(arrays["images"], arrays["labels"], 62, arrays["user"], test), str(archive[0])
        )
    elif folders is not None:
        pool = leaf(folders[0], num_classes=62)
        if pool.x.shape[1:] not in ((784,), (28, 28), (28, 28, 1)):
            raise InputError(
                f"{folders[0]}: x has samples of shape {pool.x.shape[1:]}, expected images of 784"
                " pixels"
            )
        pool = pool._replace(x=pool.x.reshape(-1, 28, 28))
    else:
        raise download.missing_data_error("femnist", FEMNIST, why=" (offline)" if offline else "")
    writer = np.asarray(pool.client)
    if classes == "digits":
        keep = pool.y < 10
        writer, test = writer[keep], None if pool.test is None else pool.test[keep]
        pool = Pool(pool.x[keep], pool.y[keep], 10, test=test)
    owner = np.unique(writer, return_inverse=True)[1]
    pool = pool._replace(client=owner, test=pool.test if keep_split else None)
    return check_pool(pool, "femnist")


def cifar10(centered: bool = False) -> Pool:
    """Returns CIFAR-10, 32x32x3 uint8, 10 classes: all 60,000 images, or the part of
    them that is here; with `centered`, x is float32 in [-1, 1].

    Files: the official binary version, unpacked, under cifar10/cifar-10-batches-bin/,
    with the official split as `test`; else the 12,242 images of
    cifar10/cifar10_clients00-21.npz, whose official split is lost (`test` is None).
    They are downloaded by `fedjax-cfl download cifar10` alone.
    """
    batches, part = download.locate(*CIFAR), download.locate(CIFAR_PART)
    if batches is not None:
        x, y, test = join_parts([_records(path) for path in batches])
        pool = Pool(x, y[:, 0], 10, test=test)
    elif part is not None:
        arrays = read_images(part[0], ("images", "labels"), (32, 32, 3))
        pool = Pool(arrays["images"], arrays["labels"], 10)
    else:
        raise download.missing_data_error("cifar10", CIFAR[0], CIFAR_PART)
    return check_pool(_center(pool) if centered else pool, "cifar10")


@checked("dataset.source")
def cifar100(labels: Literal["fine", "coarse"] = "fine", centered: bool = False) -> Pool:
    """Returns CIFAR-100, 32x32x3 uint8 in the official split, of 100 "fine" classes or the 20
    "coarse" ones; with `centered`, x is float32 in [-1, 1].

    Files: the official binary version, unpacked, under cifar100/cifar-100-binary/: train.bin and
    test.bin, and {fine,coarse}_label_names.txt, from which classes have names, if it is there.
    They are downloaded by `fedjax-cfl download cifar100` alone.
    """
    paths = download.require("cifar100", *CIFAR_100)
    x, y, test = join_parts([_records(path, labels=2) for path in paths])
    column, classes = (1, 100) if labels == "fine" else (0, 20)
    names = None
    if found := download.locate(f"cifar100/cifar-100-binary/{labels}_label_names.txt"):
        text = readers.read_unpacked(found[0]).decode("utf-8", "backslashreplace")
        names = tuple(text.split())
        if not len(names) == len(set(names)) == classes:
            raise InputError(
                f"{found[0]}: holds {len(names)} names, expected {classes} different ones, one a"
                " line"
            )
    pool = Pool(x, y[:, column], classes, test=test, class_names=names)
    return check_pool(_center(pool) if centered else pool, "cifar100")


def rotated_mnist(offline: bool = False) -> Pool:
    """Returns all images of MNIST as MD-ICFL reads them, float32 in [-1, 1]; the
    partition turns them (`partition.rotated_groups`). Files as in `mnist`.
    """
    return check_pool(_center(mnist(standardize=False, offline=offline)), "rotated_mnist")


def _center(pool: Pool) -> Pool:
    x = pool.x.astype(np.float32)
    x /= 127.5
    x -= 1
    return pool._replace(x=x)


def read_images(
    path: Path, names: tuple[str, ...], shape: tuple[int, ...] = (28, 28)
) -> dict[str, np.ndarray]:
    """Reads an npz file whose `images` must be [N, *shape] uint8 and `labels` [N]."""
    arrays = readers.read_npz(path, names)
    check_images(path, arrays["images"], arrays["labels"], shape)
    return arrays


def check_images(path: Path, x: np.ndarray, y: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises InputError for images that are not [N, *shape] uint8, or labels not [N]."""
    if x.shape[1:] != shape or x.dtype != np.uint8 or y.shape != x.shape[:1]:
        raise InputError(
            f"{path}: images {x.shape} {x.dtype} and labels {y.shape}, expected [N,"
            f" {str(shape)[1:-1]}] uint8 and [N]"
        )


def _records(path: Path, labels: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of CIFAR's binary version, records of `labels` labels and an image; returns
    x [n, 32, 32, 3] and y [n, labels], both uint8.
    """
    size = labels + CIFAR_PIXELS
    content = readers.read_unpacked(path)
    if not content or len(content) % size:
        raise InputError(
            f"{path}: size of the data is {len(content)} bytes, expected records of {size} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    x = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return x, records[:, :labels]


def _idx(paths: list[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads train images, train labels, test images, test labels; returns x [N, 28, 28]
    uint8, y [N], test [N] bool.
    """
    arrays = list(map(readers.read_idx, paths))
    parts = list(zip(arrays[::2], arrays[1::2], strict=True))
    for x, y in parts:
        check_images(paths[0].parent, x, y, (28, 28))
    return join_parts(parts)


def join_parts(
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns x [N, ...], y [N, ...] and test [N] bool of parts (x, y), of which the last is for
    testing.
    """
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return x, y, np.arange(len(y)) >= len(y) - len(parts[-1][1])


def _standardize(x: np.ndarray, rows: slice | np.ndarray) -> np.ndarray:
    """Returns (x - mean) / (std + 0.001) per pixel as float32, with the statistics of
    `rows`; x is uint8 [N, ...], not scaled.
    """
    used = x[rows]
    mean = used.mean(axis=0, dtype=np.float64)
    square = np.einsum("n...,n...->...", used, used, dtype=np.int64, casting="safe") / len(used)
    scale = np.sqrt(np.maximum(square - mean**2, 0)) + STD_EPSILON
    out = np.empty(x.shape, np.float32)
    for i in range(0, len(x), 4096):  # in float64 all of it would take half a gigabyte
        out[i : i + 4096] = (x[i : i + 4096] - mean) / scale
    return out
