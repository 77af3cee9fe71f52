"""LEAF's JSON (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
https://arxiv.org/abs/1812.01097): users and their lists x and y.

Files in the wild contradict themselves: LEAF's own test files of Shakespeare state 79 samples too
many of each user, those of Reddit the samples of all splits. The samples of `user_data` count.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets.pool import COUNTED, check_pool
from fedjax_cfl.data.datasets.readers import PathLike, read_unpacked, report_damage, shorten
from fedjax_cfl.data.tables import list_files
from fedjax_cfl.errors import InputError, warn_of_file
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, checked

# the characters of LEAF's Shakespeare in its order; those that are not among them are one more
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
PLACE = {char: place for place, char in enumerate(CHARACTERS)}
UNKNOWN = len(CHARACTERS)


@checked("dataset.source")
def leaf(path: str | Path, num_classes: NaturalInt | None = None) -> Pool:
    """Returns any LEAF JSON data set of arrays: a file, a folder of shards, or a folder
    with train/ and test/ (then `test` is set).

    With `num_classes` 0 y are numbers to regress, but those of text.
    Of windows of text (Shakespeare) x [N, T] are the numbers of their characters, and the label is
    the one that follows, of `CHARACTERS`; others, if there are any, are one more class.
    Raises InputError for files that cannot be read and for what does not fit.
    """
    root = Path(os.path.expanduser(path))  # Path.expanduser and is_dir raise errors of their own
    folders = [root / "train", root / "test"] if os.path.isdir(root / "train") else [root]
    parts = [read_users([folder], read_user) for folder in folders]
    held = [(user, *part[user]) for part in parts for user in sorted(part) if len(part[user][1])]
    sizes = [sum(len(y) for _, y, _ in part.values()) for part in parts]
    if 0 in sizes:
        raise InputError(
            f"{folders[sizes.index(0)]}: user_data holds no samples, expected at least one"
        )
    first = held[0][1]
    for user, x, _, file in held:
        if x.dtype != first.dtype or x.shape[1:] != first.shape[1:]:
            raise InputError(
                f"{file}: x of user {shorten(user)} has samples of shape {x.shape[1:]} and dtype"
                f" {x.dtype}, expected {first.shape[1:]} and {first.dtype} as in other users"
            )
    x = np.concatenate([x for _, x, _, _ in held])
    y = np.concatenate([y for _, _, y, _ in held])
    names = sorted({user for user, *_ in held})
    number = {user: place for place, user in enumerate(names)}
    client = np.repeat([number[user] for user, *_ in held], [len(y) for _, _, y, _ in held])
    test = np.repeat([False, True], sizes) if len(sizes) == 2 else None
    classes, class_names = COUNTED if num_classes is None else num_classes, None
    if x.dtype == np.int32:
        class_names = name_characters(str(path), x, y)
        classes = num_classes or len(class_names)
    pool = Pool(x, y, classes, client, test, class_names=class_names, client_names=tuple(names))
    return check_pool(pool, str(path))


def name_characters(path: str, x: np.ndarray, y: np.ndarray) -> tuple[str, ...]:
    """Returns what the classes of text are called, and says if there are unknown characters."""
    unknown = [(part == UNKNOWN).mean() for part in (x, y)]
    if not any(unknown):
        return tuple(CHARACTERS)
    warn_of_file(
        f"{path}: {unknown[0]:.2%} of the characters are not among LEAF's {len(CHARACTERS)}; all of"
        " them are one more, 'unknown'"
    )
    return (*CHARACTERS, "unknown")


def read_users(
    folders: Iterable[PathLike], parse: Callable[[Path, str, list, list], tuple]
) -> dict[str, tuple[Any, Any, Path]]:
    """Returns user -> (x, y, file) of files or folders of LEAF JSON, where `parse(file, user,
    x, y)` gives (x, y) of the lists that are there.
    """
    data: dict[str, tuple[Any, Any, Path]] = {}
    for path in [Path(shard) for folder in folders for shard in list_files(folder, "json")]:
        shard = read_json(path, "as LEAF's")
        if not isinstance(shard, dict) or not isinstance(shard.get("user_data"), dict):
            raise InputError(
                f"{path}: key 'user_data' is missing or no dict, expected users, num_samples and"
                " user_data"
            )
        for user, held in shard["user_data"].items():
            if user in data:
                raise InputError(
                    f"{path}: user {shorten(user)} is also in {data[user][2]}, expected every user"
                    " in one shard only"
                )
            data[user] = (*parse(path, user, *user_lists(path, user, held)), path)
    return data


def read_json(path: str | Path, expected: str) -> Any:
    """Returns what a JSON file holds; objects with a repeated key are refused."""
    content = read_unpacked(path)
    with report_damage(path, f"JSON, {expected}"):
        return json.loads(content, object_pairs_hook=_reject_duplicate_keys)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; of two values for one key, neither can be trusted."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {shorten(twice)} is there twice")
    return found


def user_lists(path: Path, user: str, held: object) -> tuple[list, list]:
    """Returns the lists x and y of one user, as `read_users` finds them, of anything."""
    x, y = (held.get(name) if isinstance(held, dict) else None for name in ("x", "y"))
    said = f"{path}: user {shorten(user)}"
    if not isinstance(x, list) or not isinstance(y, list):
        raise InputError(f"{said} is listed without data, expected lists x and y")
    if len(x) != len(y):
        raise InputError(f"{said} has {len(x)} of x and {len(y)} of y, expected as many")
    return x, y


def label_users(
    fits: Callable[[Any], bool], sample: str, labels: dict[str, int], label: str
) -> Callable[[Path, str, list, list], tuple[list, list[int]]]:
    """Returns a `parse` of `read_users` for samples that `fits` accepts, which are a `sample`, and
    for `labels`, by what they are in a file; the words of both are for messages.
    """

    def parse(path: Path, user: str, x: list, y: list) -> tuple[list, list[int]]:
        for i, pair in enumerate(zip(x, y, strict=True)):
            good = fits(pair[0]), str(pair[1]) in labels
            if not all(good):
                name, bad, expected = ("y", pair[1], label) if good[0] else ("x", pair[0], sample)
                raise InputError(
                    f"{path}: user {shorten(user)}: entry {i} of {name} is {shorten(bad)}, expected"
                    f" {expected}"
                )
        return x, [labels[str(each)] for each in y]

    return parse


def join_users(
    parts: list[dict[str, Any]], least: int, users: int | None, seed: int
) -> tuple[list[str], list[Any], np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns the users, in order of names, of several parts (train and test, or one) of
    `read_users`, and their samples one after another: x as a list, y and client [N] int32, and
    test [N] bool, None of one part.

    Args: of those with more than `least` samples `users` are drawn with `seed`, None: all.
    """
    names = sorted(set().union(*parts))
    sizes = np.array([count_samples(parts, name) for name in names], int)
    chosen = np.flatnonzero(sizes > least)
    if users is not None and users < len(chosen):
        chosen = np.sort(np.random.RandomState(seed).choice(chosen, users, replace=False))
    names = [names[place] for place in chosen]
    held = [part.get(name, ([], []))[:2] for name in names for part in parts]
    x, y = ([value for pair in held for value in pair[i]] for i in (0, 1))
    cell = np.repeat(np.arange(len(held), dtype=np.int32), [len(labels) for _, labels in held])
    client, test = np.divmod(cell, len(parts))
    return names, x, np.array(y, np.int32), client, test == 1 if len(parts) == 2 else None


def count_samples(parts: list[dict[str, Any]], name: str) -> int:
    """Returns how many samples a user has in several parts of `read_users`."""
    return sum(len(part[name][1]) for part in parts if name in part)


def read_user(path: Path, user: str, x: list, y: list) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [n, ...] float32 and y [n] of one user, of text the numbers of its characters."""
    if x and isinstance(x[0], str):
        return number_characters(path, user, x, y)
    arrays = []
    for name, values in (("x", x), ("y", y)):
        said = f"{path}: {name} of user {shorten(user)}"
        try:
            array = np.array(values)
        except (ValueError, OverflowError):  # an empty sample or one of another length
            raise InputError(f"{said} is ragged, expected rows of equal length") from None
        if array.dtype.kind not in "buif":
            raise InputError(f"{said} is not numeric, expected a list of numbers")
        arrays.append(array)
    if arrays[1].ndim != 1:
        raise InputError(
            f"{path}: y of user {shorten(user)} has shape {arrays[1].shape}, expected one label a"
            " sample"
        )
    with np.errstate(over="ignore"):  # an overflow becomes inf, which check_pool reports
        return arrays[0].astype(np.float32), arrays[1]


def number_characters(
    path: Path, user: str, texts: list, following: list
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the characters of texts, [n, T] int32, and of those that follow
    them, [n] int64: places in `CHARACTERS`, `UNKNOWN` for any other.

    Raises InputError for texts of several lengths and for what is not one character.
    """
    lengths = {len(text) if isinstance(text, str) else 0 for text in texts}
    alone = all(isinstance(char, str) and len(char) == 1 for char in following)
    if len(lengths) > 1 or 0 in lengths or not alone:
        raise InputError(
            f"{path}: user {shorten(user)} has text, expected windows of one length and the"
            " character that follows each"
        )
    numbers = [[PLACE.get(char, UNKNOWN) for char in text] for text in (*texts, following)]
    return np.array(numbers[:-1], np.int32), np.array(numbers[-1], np.int64)
