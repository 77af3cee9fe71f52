"""Data sets: each function returns a checked `Pool` of labelled samples, before they are dealt to clients."""

import os
from pathlib import Path

import numpy as np

from fedjax_cfl import download, readers, text
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.types import Pool

FEATURES, CLASSES = 60, 10  # of the synthetic data
MOST_CLASSES = 1_000_000  # a label beyond this is no label, and tables of classes should not end in a lack of memory
SPREAD = 0.001  # added to a pixel's standard deviation, which is 0 at the border
FEMNIST = "femnist/femnist_leaf_sf005_uint8.npz"
CIFAR = tuple(f"cifar10/cifar-10-batches-bin/{part}.bin" for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"))
CIFAR_PART = "cifar10/cifar10_clients00-21.npz"
RECORD = 1 + 32 * 32 * 3  # bytes of an image of CIFAR-10: its label, then its red, green and blue pixels
FASHION = ("fashion_mnist/fashion_mnist_clients00-24.npz", "fashion_mnist/fashion_mnist_clients25-49.npz")


def digits() -> Pool:
    """Returns scikit-learn's handwritten digits: 1,797 images 8x8 float32 in [0, 1], 10 classes. Nothing is downloaded."""
    from sklearn.datasets import load_digits  # a slow import that the other sources do not need

    bunch = load_digits()
    return check_pool(Pool(np.float32(bunch.images / 16), bunch.target, 10), "digits")


def mnist(standardize: bool = True, offline: bool = False) -> Pool:
    """Returns all 70,000 images of MNIST, 28x28, 10 classes; `test` is the official split.

    With `standardize`, each pixel becomes (x - mean) / (std + 0.001) over all 70,000 images, test included, as FedProx prepared
    its data (x in 0 .. 255); else x stays uint8. Files: the four IDX files under mnist/, downloaded if missing.
    """
    x, y, test = _idx("mnist", download.fetch("mnist", offline))
    return check_pool(Pool(_standardized(x, slice(None)) if standardize else x, y, 10, test=test), "mnist")


def fashion_mnist(standardize: bool = True, offline: bool = False, split: str = "official") -> Pool:
    """Returns the 70,000 images of Fashion-MNIST, 28x28, 10 classes.

    From the official IDX files under fashion_mnist/, `test` is the official split, and `standardize` takes mean and standard
    deviation (+ 0.001) of each pixel from the training images. If only the two files fashion_mnist_clients*.npz are there, they
    are read instead: the official split is lost, `test` is None, and all images are standardised together. `split=random` draws a
    test split of the official one's size, a seventh of every class, always the same for the same files.
    """
    require("dataset.source.split", split, ("official", "random"))
    relative = [f"fashion_mnist/{file}" for file in download.REGISTRY["fashion_mnist"].files]
    pooled = download.locate(*FASHION) if download.locate(*relative) is None else None
    if pooled is None:
        x, y, test = _idx("fashion_mnist", download.fetch("fashion_mnist", offline))
        rows = ~test
    else:
        parts = [_images(path, ("images", "labels")) for path in pooled]
        x, y = (np.concatenate([part[name] for part in parts]) for name in ("images", "labels"))
        test, rows = None, slice(None)
    if split == "random":
        rng = np.random.RandomState(0)
        test = np.zeros(len(y), bool)
        test[np.concatenate([rng.permutation(same)[: len(same) // 7] for same in (np.flatnonzero(y == c) for c in range(10))])] = True
        rows = ~test
    return check_pool(Pool(_standardized(x, rows) if standardize else x, y, 10, test=test), "fashion_mnist")


def femnist(classes: str = "all", offline: bool = False, keep_split: bool = True) -> Pool:
    """Returns FEMNIST by writer (LEAF), 28x28, with LEAF's own split: "all" 62 classes (0-9, A-Z, a-z) or only the 10 "digits".

    Without `keep_split`, `test` is None, so that a partition by writer splits anew. Writers left without samples are dropped. Files
    under femnist/: the npz file femnist_leaf_sf005_uint8.npz (x is uint8), or LEAF JSON in data/{train,test} or leaf_json/{train,test}
    (x is float32 in [0, 1]). There is no download: LEAF's scripts make them.
    """
    if classes not in ("all", "digits"):
        raise InputError(f"dataset.source.classes={classes}: expected all or digits")
    archive = download.locate(FEMNIST)
    folders = download.locate("femnist/data") or download.locate("femnist/leaf_json")
    if archive is not None:
        arrays = _images(archive[0], ("images", "labels", "user", "split"))
        test = _tested(archive[0], arrays["split"], arrays["labels"])
        pool = check_pool(Pool(arrays["images"], arrays["labels"], 62, arrays["user"], test), str(archive[0]))
    elif folders is not None:
        pool = leaf(folders[0], num_classes=62)
        if pool.x.shape[1:] not in ((784,), (28, 28), (28, 28, 1)):
            raise InputError(f"{folders[0]}: x has samples of shape {pool.x.shape[1:]}, expected images of 784 pixels")
        pool = pool._replace(x=pool.x.reshape(-1, 28, 28))
    else:
        raise download.missing("femnist (offline)" if offline else "femnist (made by LEAF's scripts, no download)", FEMNIST)
    if classes == "digits":
        keep = np.flatnonzero(pool.y < 10)
        pool = Pool(pool.x[keep], pool.y[keep], 10, pool.client[keep], None if pool.test is None else pool.test[keep])
    return check_pool(pool._replace(client=_compact(pool.client), test=pool.test if keep_split else None), "femnist")


def cifar10() -> Pool:
    """Returns CIFAR-10, 32x32x3 uint8, 10 classes: all 60,000 images, or the part of them that is here.

    Files: the official binary version, unpacked, under cifar10/cifar-10-batches-bin/, with the official split as `test`; else the
    12,242 images of cifar10/cifar10_clients00-21.npz, whose official split is lost (`test` is None). There is no download.
    """
    batches, part = download.locate(*CIFAR), download.locate(CIFAR_PART)
    if batches is not None:
        records = [_records(path) for path in batches]
        y, test = np.concatenate([labels for _, labels in records]), np.repeat([False] * 5 + [True], [len(labels) for _, labels in records])
        pool = Pool(np.concatenate([images for images, _ in records]), y, 10, test=test)
    elif part is not None:
        arrays = _images(part[0], ("images", "labels"), (32, 32, 3))
        pool = Pool(arrays["images"], arrays["labels"], 10)
    else:
        raise download.missing("cifar10 (the binary version, or a part; no download)", CIFAR[0], CIFAR_PART)
    return check_pool(pool, "cifar10")


def sent140(
    users: int | None = None,
    min_tweets: int = 30,
    seed: int = 0,
    embedding: str | None = None,
    lower: bool = False,
    pad: str = "front",
) -> Pool:
    """Returns the tweets of Sentiment140 (LEAF) as word vectors, x [N, 25, 300] float32, y 1 where positive; `client` is the author.

    Of the authors with more than `min_tweets` tweets, `users` are drawn with `seed` (None: all are taken, as when there are no more).
    Vectors come from the GloVe text file `embedding`, zeros for an unknown word; without one they are hashed from the word, which
    tells words apart but knows no likeness, so that accuracies are not comparable with the papers'. `lower` puts the text in lower
    case first, `pad` puts the zeros at the "front" (FlexCFL) or at the "end" (FedProx). Files: LEAF JSON under sent140/, see
    `text.read_tweets`; `test` is set where they are split. There is no download. Raises InputError for missing or bad files.
    """
    tweets, y, client, test = text.read_tweets(users, min_tweets, seed)
    return check_pool(Pool(text.sequences(tweets, embedding, lower, pad), y, 2, client, test), "sent140")


def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 100,
    match_total: int | None = 75_349,
    seed: int = 0,
    iid: bool = False,
) -> Pool:
    """Returns Synthetic(alpha, beta) of FedProx: 60 features, 10 classes; `client` is the device that generated a sample.

    Device k: u ~ N(0, alpha), B ~ N(0, beta) (standard deviations), W [60, 10] and b [10] ~ N(u, 1), v [60] ~ N(B, 1),
    x ~ N(v, diag(j^-1.2)), y = argmax(x W + b), int(lognormal(4, 2)) + 50 samples. With `iid`, one W and b ~ N(0, 1) for all and
    v = 0. Unless `match_total` is None, the sizes are redrawn until they sum to it within 1 % (75,349: FedGroup, Table 2).
    """
    rng = np.random.RandomState(seed)
    sizes = _synthetic_sizes(rng, clients, match_total)
    scale = np.arange(1, FEATURES + 1) ** -0.6
    shared = rng.normal(0, 1, (FEATURES, CLASSES)), rng.normal(0, 1, CLASSES)
    u, center = rng.normal(0, alpha, clients), rng.normal(0, beta, clients)
    x, y = [], []
    for k, size in enumerate(sizes):
        weights, bias = shared if iid else (rng.normal(u[k], 1, (FEATURES, CLASSES)), rng.normal(u[k], 1, CLASSES))
        v = 0 if iid else rng.normal(center[k], 1, FEATURES)
        x.append(v + scale * rng.normal(0, 1, (size, FEATURES)))
        y.append(np.argmax(x[-1] @ weights + bias, axis=1))
    client = np.repeat(np.arange(clients), sizes)
    return check_pool(Pool(np.float32(np.concatenate(x)), np.concatenate(y), CLASSES, client), "synthetic")


def _synthetic_sizes(rng: np.random.RandomState, clients: int, total: int | None) -> np.ndarray:
    """Returns the samples of each device [K]."""
    if clients < 1:
        raise InputError(f"dataset.source.clients={clients}: expected at least 1")
    if total is not None and 50 * clients > total:
        raise InputError(f"dataset.source.clients={clients}: at most {total // 50} are possible with match_total={total}, 50 samples each")
    for _ in range(100_000):
        sizes = rng.lognormal(4, 2, clients).astype(int) + 50
        if total is None or abs(sizes.sum() - total) <= 0.01 * total:
            return sizes
    raise InputError(f"dataset.source.match_total={total}: not met in 100000 draws of {clients} sizes, expected about {400 * clients}")


def npz(path: str, num_classes: int | None = None) -> Pool:
    """Returns the user's own arrays `x` [N, ...] and `y` [N], with optional `client` [N] and `split` [N] (0 train, 1 test).

    uint8 features are read as x / 255; all others become float32 as they are. Labels, clients and split may be of any type of
    number, also bool, as long as they are whole.
    """
    arrays = readers.read_npz(os.path.expanduser(path), ("x", "y"), ("client", "split"))
    test = _tested(path, arrays["split"], arrays["y"]) if "split" in arrays else None
    return check_pool(Pool(arrays["x"], arrays["y"], num_classes, arrays.get("client"), test), str(path))


def leaf(path: str, num_classes: int | None = None) -> Pool:
    """Returns any LEAF JSON data set of arrays: a file, a folder of shards, or a folder with train/ and test/ (then `test` is set)."""
    root = Path(os.path.expanduser(path))  # Path.expanduser and is_dir raise errors of their own
    parts = [readers.read_leaf(part) for part in ((root / "train", root / "test") if os.path.isdir(root / "train") else (root,))]
    users = sorted({user for *_, names in parts for user in names})
    number = {user: k for k, user in enumerate(users)}
    for x, *_ in parts:
        if x.shape[1:] != parts[0][0].shape[1:]:
            raise InputError(f"{path}: x in test has samples of shape {x.shape[1:]}, expected {parts[0][0].shape[1:]} as in train")
    x, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    client = np.concatenate([np.array([number[user] for user in names])[index] for _, _, index, names in parts])
    test = np.repeat([False, True], [len(part[1]) for part in parts]) if len(parts) == 2 else None
    return check_pool(Pool(x, y, num_classes, _compact(client), test), str(path))


def check_pool(pool: Pool, name: str) -> Pool:
    """Returns the pool with x uint8 or float32, y and client int32, test bool, or raises an `InputError` that names the fault.

    `num_classes` None means the largest label + 1. Clients are 0 .. K - 1; one without samples keeps its number.
    """
    x, y = np.asarray(pool.x), np.asarray(pool.y)
    if x.dtype.kind not in "buif":
        raise InputError(f"{name}: x has dtype {x.dtype}, expected numbers (uint8 or float32)")
    if y.ndim != 1 or x.ndim < 1 or len(x) != len(y):
        raise InputError(f"{name}: y has shape {y.shape}, x has shape {x.shape}, expected [N] and [N, ...] with the same N")
    if len(x) == 0:
        raise InputError(f"{name}: x has 0 samples, expected at least one")
    if x.ndim == 1 or x[0].size == 0:
        raise InputError(f"{name}: x has samples of shape {x.shape[1:]}, expected at least one feature")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32, copy=False)
        bad = ~np.isfinite(x).reshape(len(x), -1).all(axis=1)
        if bad.any():
            raise InputError(f"{name}: x is NaN or infinite in {bad.sum()} samples, first in sample {bad.argmax()}, expected finite values")
    y = _whole(name, "y", y)
    classes = int(y.max()) + 1 if pool.num_classes is None else pool.num_classes
    if (bad := y >= classes).any():
        raise InputError(f"{name}: y is {y[bad][0]} in sample {bad.argmax()}, expected 0 .. {classes - 1} (num_classes={classes})")
    if classes > MOST_CLASSES:
        raise InputError(f"{name}: y is {y.max()} in sample {y.argmax()}, expected class numbers below {MOST_CLASSES}")
    client = None if pool.client is None else _whole(name, "client", np.asarray(pool.client), len(x))
    test = None if pool.test is None else _whole(name, "test", np.asarray(pool.test), len(x)).astype(bool)
    return Pool(x, y, classes, client, test)


def _whole(name: str, field: str, values: np.ndarray, length: int | None = None) -> np.ndarray:
    """Returns whole, non-negative numbers [N] as int32; floats such as 5.0 are accepted."""
    if values.dtype.kind not in "buif":
        raise InputError(f"{name}: {field} has dtype {values.dtype}, expected integers")
    if length is not None and values.shape != (length,):
        raise InputError(f"{name}: {field} has shape {values.shape}, expected ({length},), one entry a sample")
    bad = ~((values >= 0) & (values < 2**31) & (values == np.floor(values)))  # NaN fails every comparison
    if bad.any():
        raise InputError(f"{name}: {field} is {values[bad][0]} in sample {bad.argmax()}, expected integers 0, 1, 2, ...")
    return values.astype(np.int32)


def _compact(client: np.ndarray) -> np.ndarray:
    """Returns client numbers [N] without gaps, in the same order."""
    return np.unique(client, return_inverse=True)[1].astype(np.int32)


def _images(path: Path, names: tuple[str, ...], shape: tuple[int, ...] = (28, 28)) -> dict[str, np.ndarray]:
    """Reads an npz file whose `images` must be [N, *shape] uint8 and `labels` [N]."""
    arrays = readers.read_npz(path, names)
    x, y = arrays["images"], arrays["labels"]
    if x.shape[1:] != shape or x.dtype != np.uint8 or y.shape != x.shape[:1]:
        raise InputError(f"{path}: images {x.shape} {x.dtype} and labels {y.shape}, expected [N, {str(shape)[1:-1]}] uint8 and [N]")
    return arrays


def _records(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of CIFAR-10's binary version, at most 10,000 records; returns x [n, 32, 32, 3] and y [n], both uint8."""
    with readers.unpacked(path) as (file, _):
        content = file.read(10_000 * RECORD + 1)
    if not content or len(content) % RECORD:
        raise InputError(f"{path}: size of the data is {len(content)} bytes, expected 1 to 10000 records of {RECORD} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]


def _tested(path: str | Path, split: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns which samples are for testing [N] bool, from 0 (train) and 1 (test)."""
    if split.dtype.kind not in "buif" or split.shape != y.shape or not np.isin(split, (0, 1)).all():
        found = f"{split.shape} {split.dtype} or other values"
        raise InputError(f"{path}: split has {found}, expected 0 (train) or 1 (test) for each of y's samples")
    return split == 1


def _idx(name: str, paths: list[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads train images, train labels, test images, test labels; returns x [N, 28, 28] uint8, y [N], test [N] bool."""
    images, labels = ([readers.read_idx(path) for path in paths[first::2]] for first in (0, 1))
    for path, array in zip(paths, (images[0], labels[0], images[1], labels[1]), strict=True):
        if array.shape[1:] != ((28, 28) if "images" in path.name else ()):
            raise InputError(f"{path}: shape is {array.shape}, expected {'(N, 28, 28)' if 'images' in path.name else '(N,)'}")
    for image, label in zip(images, labels, strict=True):
        if len(image) != len(label):
            raise InputError(f"{name}: {len(image)} images but {len(label)} labels, expected the files of one data set")
    return np.concatenate(images), np.concatenate(labels), np.repeat([False, True], [len(part) for part in labels])


def _standardized(x: np.ndarray, rows: slice | np.ndarray) -> np.ndarray:
    """Returns (x - mean) / (std + 0.001) per pixel as float32, with the statistics of `rows`; x is uint8 [N, ...], not scaled."""
    chunks = range(0, len(x), 4096)  # a float64 copy of the whole array would take half a gigabyte
    used = x[rows]
    mean = used.mean(axis=0, dtype=np.float64)
    square = sum((np.square(used[i : i + 4096], dtype=np.int64).sum(axis=0) for i in chunks), np.zeros(x.shape[1:], np.int64)) / len(used)
    scale = np.sqrt(np.maximum(square - mean**2, 0)) + SPREAD
    out = np.empty(x.shape, np.float32)
    for i in chunks:
        out[i : i + 4096] = (x[i : i + 4096] - mean) / scale
    return out
