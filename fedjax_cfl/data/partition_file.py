"""A partition that somebody else has made: lists of sample numbers for each client, or arrays."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets.files import number_clients
from fedjax_cfl.data.datasets.leaf_json import read_json
from fedjax_cfl.data.datasets.pool import name_clients, number_names, read_test_mask
from fedjax_cfl.data.datasets.readers import read_npz, shorten
from fedjax_cfl.data.dealing import check_partition, group_places, split_train_test
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool
from fedjax_cfl.validation import BelowOne, Seed, checked

EXPECTED = "an object of lists of sample numbers by client, a list of such lists, or train and test"
Held = tuple[np.ndarray, np.ndarray, np.ndarray | None, tuple[str | int, ...] | None]


@checked("partition")
def from_file(pool: Pool, *, path: str, seed: Seed = 0, test_fraction: BelowOne = 0.1) -> Partition:
    """Deals samples as a file says, by their numbers in the pool, from 0: those for training come
    first where a data set has a test part of its own. Clients may share samples.

    Args: `path` is JSON with lists of numbers, {"ann": [0, 5], "bob": [1]} or [[0, 5], [1]], or
    {"train": ..., "test": ...} of such; or an .npz with `client` [n], numbers or text, `sample`
    [n], without it sample i is entry i, and `split` [n] (0 train, 1 test). Without a split each
    client's samples are shuffled with `seed`, and `test_fraction` of them are for testing.
    Raises InputError for a file that cannot be read, samples that are not in the pool, and a client
    that tests on what it trains on or holds a sample twice.
    """
    rng = check_partition(from_file, locals())
    file = Path(os.path.expanduser(path))
    read = read_arrays if file.suffix.lower() == ".npz" else read_lists
    samples = len(pool.y)
    sample, owner, test, names = read(file, samples)
    who = names or range(int(owner.max(initial=-1)) + 1)
    outside = (sample < 0) | (sample >= samples)
    if outside.any() or not sample.size:
        found = f"sample {sample[outside][0]}" if outside.any() else "no samples"
        raise InputError(f"{file}: has {found}, expected numbers from 0 to {samples - 1}")
    held, count = np.unique(owner * np.int64(samples) + sample, return_counts=True)
    if (count > 1).any():
        k, twice = divmod(int(held[count > 1][0]), samples)
        raise InputError(
            f"{file}: client {shorten(who[k])} has sample {twice} twice, expected each once, for"
            " training or for testing"
        )
    made = split_train_test(group_places(owner, len(who)), rng, test_fraction, test)
    return made._replace(sample=sample[made.sample], client_names=names)


def read_lists(file: Path, samples: int) -> Held:
    """Returns (sample [n], owner [n], test [n] or None, names [K] or None) of a JSON file."""
    found = read_json(file, EXPECTED)
    split = isinstance(found, dict) and set(found) == {"train", "test"}
    if split and type(found["train"]) is not type(found["test"]):
        raise InputError(f"{file}: train and test are a list and an object, expected the same")
    rows = [  # (client, is for testing, sample numbers)
        (client, side, numbers)
        for side, lists in enumerate([found["train"], found["test"]] if split else [found])
        for client, numbers in _list_clients(file, lists)
    ]
    for client, _, numbers in rows:
        kinds = set(map(type, numbers)) if isinstance(numbers, list) else {None}
        if not kinds <= {int} or any(abs(n) >= 2**63 for n in numbers):
            raise InputError(
                f"{file}: client {shorten(client)} holds {shorten(numbers)}, expected a list of"
                " sample numbers"
            )
    names, number = number_names(str(file), "client", [str(client) for client, *_ in rows])
    sizes = [len(numbers) for *_, numbers in rows]
    sample = np.array([n for *_, numbers in rows for n in numbers], np.int64)
    owner = np.repeat(number, sizes).astype(np.int32)
    test = np.repeat([side == 1 for _, side, _ in rows], sizes) if split else None
    numbered = all(isinstance(client, int) for client, *_ in rows)
    return sample, owner, test, None if numbered else name_clients(names)


def _list_clients(file: Path, lists: Any) -> list[tuple[str | int, Any]]:
    """Returns (client, what it holds) of an object of lists by client, or of a list of lists."""
    if not isinstance(lists, dict | list):
        raise InputError(f"{file}: holds a {type(lists).__name__}, expected {EXPECTED}")
    pairs: list[Any] = list(lists.items() if isinstance(lists, dict) else enumerate(lists))
    names, number = number_names(str(file), "client", [str(client) for client, _ in pairs])
    if len(names) < len(pairs):
        twice = names[int(np.bincount(number).argmax())]
        raise InputError(f"{file}: client {shorten(twice)} is there twice, expected each once")
    return pairs


def read_arrays(file: Path, samples: int) -> Held:
    """Returns the same as `read_lists` of an .npz file."""
    arrays = read_npz(file, ("client",), ("sample", "split"))
    client, sample = arrays["client"], arrays.get("sample", np.arange(samples))
    if sample.ndim != 1 or sample.dtype.kind not in "iu":
        raise InputError(
            f"{file}: sample has shape {sample.shape} and dtype {sample.dtype}, expected integers"
            " [n]"
        )
    ids, owner = number_clients(str(file), client, len(sample))
    test = read_test_mask(file, arrays["split"], sample) if "split" in arrays else None
    return sample.astype(np.int64), owner, test, tuple(ids.tolist())
