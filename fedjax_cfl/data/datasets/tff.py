"""Data sets of TensorFlow Federated: a group `examples`, in it one group a client, in it one
array a feature.

Format: github.com/google-parfait/tensorflow-federated, simulation/datasets, until 2021.
"""

import os
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.files import build_pool
from fedjax_cfl.data.datasets.hdf5 import list_members, read_members
from fedjax_cfl.data.datasets.pool import name_clients, number_names, sort_names
from fedjax_cfl.data.datasets.readers import list_folder, list_names, shorten
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import OptionalText, PositiveInt, check_arguments

TestClients = Literal["same", "own"]
SAMPLES = ("pixels", "image")  # their features, in well-known data sets
TRAIN, TEST = "_train.h5", "_test.h5"
CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


class Known(NamedTuple):
    """What no file says of a well-known data set's labels."""

    num_classes: int
    class_names: tuple[str, ...] | None


# by the beginning of the name of its files, and by feature; the first that fits
KNOWN = {
    ("emnist_digitsonly", "label"): Known(10, CHARACTERS[:10]),
    ("emnist", "label"): Known(62, CHARACTERS),
    ("cifar100", "label"): Known(100, None),
    ("cifar100", "coarse_label"): Known(20, None),
}


class Examples(NamedTuple):
    """The samples of one file, those of a client one after another."""

    x: np.ndarray  # [n, ...]
    y: np.ndarray  # [n]
    clients: list[str]  # [k], in order
    sizes: list[int]  # [k], their samples


def tff_hdf5(
    path: str | Path,
    x: OptionalText = None,
    y: OptionalText = None,
    test_clients: TestClients | None = None,
    num_classes: PositiveInt | None = None,
) -> Pool:
    """Returns a data set of TensorFlow Federated in HDF5, as fed_emnist_train.h5 and
    fed_emnist_test.h5. Needs the extra `hdf5`.

    Samples are taken as they are: in EMNIST 1.0 is paper and 0.0 ink. EMNIST and CIFAR-100 have
    as many classes as they are published with.

    Args: `path` is a folder with one NAME_train.h5, or this file: then NAME_test.h5 beside it is
    for testing; any other file is read alone; `x` is the feature of samples, None: pixels or
    image; `y` that of labels, None: label; `test_clients` says whether a name in both files is
    the "same" client, or test clients are their "own", then test/NAME; None: the same, unless
    names are mere numbers; `num_classes` is as in `npz`.
    Raises InputError for files that cannot be read and for what does not fit.
    """
    check_arguments(tff_hdf5, locals(), "dataset.source")
    file, test_file = _find_files(Path(os.path.expanduser(path)))
    features = list_members(file, "examples")
    texts = [name for name, kind in features.items() if kind[0] in "oS|"]
    x, y = choose_features(file, list(features), texts, x, y)
    parts = []
    for part in filter(None, (file, test_file)):
        members = read_members(part, "examples", (x, y))
        rows = ((name, held[x], held[y]) for name, held in members.items())
        parts.append(collect(part, rows, (x, y)))
    return make_pool(file, parts, (x, y), test_clients, num_classes)


def make_pool(
    file: Path,
    parts: list[Examples],
    features: tuple[str, str],
    test_clients: TestClients | None,
    num_classes: int | None,
    name: str | None = None,
) -> Pool:
    """Returns the pool of the samples for training and, if there are more, those for testing.

    Args: `file` begins messages; `features` are the names of samples and labels; `test_clients`
    and `num_classes` are as in `tff_hdf5`; `name` is the data set's, None: the file's.
    """
    (x, y), first, last = features, parts[0].x, parts[-1].x
    if last.shape[1:] != first.shape[1:] or last.dtype != first.dtype:
        raise InputError(
            f"{file}: {x} for testing has shape {last.shape[1:]} and dtype {last.dtype}, expected"
            f" {first.shape[1:]} and {first.dtype} as for training"
        )
    names, numbers = _number_clients(file, parts, test_clients)
    arrays = {
        "x": np.concatenate([part.x for part in parts]),
        "y": np.concatenate([part.y for part in parts]),
        "client": np.repeat(numbers, [size for part in parts for size in part.sizes]),
    }
    if len(parts) > 1:
        arrays["split"] = np.repeat([0, 1], [len(part.y) for part in parts])
    begins = (name or file.name).removeprefix("federated_").removeprefix("fed_")
    known = next((KNOWN[key] for key in KNOWN if begins.startswith(key[0]) and key[1] == y), None)
    pool = build_pool(str(file), arrays, num_classes or (known and known.num_classes))
    if known is not None and pool.num_classes == known.num_classes:
        pool = pool._replace(class_names=known.class_names)
    clients = name_clients(names)
    return pool if clients == tuple(range(len(names))) else pool._replace(client_names=clients)


def _find_files(path: Path) -> tuple[Path, Path | None]:
    if os.path.isdir(path):
        names = [name for name in list_folder(path) if name.endswith(TRAIN) and name[0] != "."]
        if len(names) != 1:
            raise InputError(
                f"{path}: holds {len(names)} files *{TRAIN}"
                + (f" ({list_names(names)})" if names else "")
                + ", expected one, or its name: dataset.source.path=FILE"
            )
        path = path / names[0]
    partner = path.with_name(path.name.removesuffix(TRAIN) + TEST)
    return path, partner if path.name.endswith(TRAIN) and os.path.lexists(partner) else None


def choose_features(
    file: Path, features: list[str], texts: list[str], x: str | None, y: str | None
) -> tuple[str, str]:
    """Returns the names of the samples and of the labels. Raises InputError for a feature that is
    not there, or is text.

    Args: `file` begins messages; `features` are all names, `texts` those of text; `x` and `y` are
    as in `tff_hdf5`.
    """
    x, y = x or next((name for name in SAMPLES if name in features), ""), y or "label"
    for field, name in (("x", x), ("y", y)):
        if texts and (name in texts or name not in features):
            raise InputError(
                f"{file}: {list_names(texts)} {'are' if texts[1:] else 'is'} text, which is not"
                " read, expected numbers: pixels or image, and label, or windows of characters"
                " stored as numbers in an .npz"
            )
        if name not in features:
            said = f"{shorten(name)[1:-1]} is missing" if name else "pixels and image are missing"
            raise InputError(
                f"{file}: {said}, expected dataset.source.{field}= one of {list_names(features)}"
            )
    return x, y


def collect(
    file: Path,
    rows: Iterable[tuple[str, np.ndarray, np.ndarray]],
    features: tuple[str, str] = ("samples", "labels"),
) -> Examples:
    """Returns the samples of one split, those of a client one after another. Raises InputError for
    what does not fit together.

    `rows` are clients with some of their samples [n, ...] and their labels [n], in any order;
    `features` are the names of both.
    """
    held: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    most, first = max(file.stat().st_size * 8, readers.MAX_UNPACKED_BYTES), None
    for client, x, y in rows:
        first = x if first is None else first
        said = f"{file}: client {shorten(client)}"
        if y.ndim != 1 or x.shape[:1] != y.shape:
            raise InputError(
                f"{said} has {features[0]} {x.shape} and {features[1]} {y.shape}, expected"
                " [n, ...] and [n], one label a sample"
            )
        if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
            raise InputError(
                f"{said} has samples of shape {x.shape[1:]} and dtype {x.dtype}, expected"
                f" {first.shape[1:]} and {first.dtype} as in the first one"
            )
        most -= x.nbytes
        if most < 0:
            raise InputError(
                f"{file}: all samples take more than {readers.MAX_UNPACKED_BYTES} bytes, expected"
                " less"
            )
        held.setdefault(client, []).append((x, y))
    if not held:
        raise InputError(f"{file}: holds no samples, expected some")
    clients = sort_names(held)
    pairs = [pair for client in clients for pair in held[client]]
    sizes = [sum(len(y) for _, y in held[client]) for client in clients]
    return Examples(
        np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs]), clients, sizes
    )


def _number_clients(
    file: Path, parts: list[Examples], test_clients: TestClients | None
) -> tuple[list[str], np.ndarray]:
    train, test = parts[0].clients, [name for part in parts[1:] for name in part.clients]
    shared = set(train) & set(test)
    if test_clients is None and any(name.isdigit() for name in shared):
        raise InputError(
            f"{file}: clients of train and test have equal names but may be strangers, as in"
            " fed_cifar100, expected dataset.source.test_clients=own or same"
        )
    if test_clients is not None and not test:
        raise InputError(
            f"{file}: test_clients={test_clients}, expected null, for there is no file *{TEST}"
        )
    if test_clients == "own":
        names = [*train, *(f"test/{name}" for name in test)]
        return names, np.arange(len(names))
    return number_names([*train, *test])
