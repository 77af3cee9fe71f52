"""Reader of LEAF JSON, under the rules of `readers`: one line for a malformed file, no
size believed.

Files in the wild contradict themselves: LEAF's own test files of Shakespeare state 79 samples too
many of each user, those of Reddit the samples of all splits. Samples that are there count.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.readers import PathLike, line_of, list_folder, open_unpacked, shorten
from fedjax_cfl.errors import InputError, warn_of_file

# bytes of memory that a sign in JSON stands for: number, list, object, entry
JSON_MEMORY_BYTES = {b",": 40, b"[": 64, b"{": 64, b":": 200}
LEAF_DIMENSIONS = 32  # NumPy has 64, but cannot list the entries of so many
# the characters of LEAF's Shakespeare in its order; those that are not among them are one more
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
PLACE = {char: place for place, char in enumerate(CHARACTERS)}
UNKNOWN = len(CHARACTERS)


def read_users(
    folders: Iterable[PathLike], parse: Callable[[Path, str, object], tuple]
) -> dict[str, tuple[Any, Any, Path]]:
    """Returns user -> (x, y, file) of files or folders of LEAF JSON, where `parse(file,
    user, user_data)` gives (x, y). Says where num_samples is not what is there.
    """
    data: dict[str, tuple[Any, Any, Path]] = {}
    for path in [shard for folder in folders for shard in _shards(Path(folder))]:
        for user, x, y in _shard(path, parse):
            if user in data:
                raise InputError(
                    f"{path}: user {shorten(user)} is also in {data[user][2]}, expected every user"
                    " in one shard only"
                )
            data[user] = (x, y, path)
    return data


def _shards(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # unlike Path.is_dir it raises nothing
        return [path]
    names = list_folder(path, "a readable folder of LEAF shards")
    shards = [path / name for name in names if name.endswith((".json", ".json.gz"))]
    if not shards:
        raise InputError(f"{path}: folder holds no *.json or *.json.gz, expected LEAF shards")
    return shards


def _shard(path: Path, parse: Callable[..., tuple]) -> list[tuple[str, Any, Any]]:
    """Returns (user, x, y) for every user of one LEAF file, checked."""
    shard = read_json(path, "LEAF JSON")
    if not isinstance(shard, dict) or not isinstance(data := shard.get("user_data"), dict):
        raise InputError(
            f"{path}: key 'user_data' is missing or no dict, expected users, num_samples and"
            " user_data"
        )
    users = shard.get("users", list(data))  # not all who use the form write both
    sizes = shard.get("num_samples", [None] * len(users) if isinstance(users, list) else [])
    for name, value in (("users", users), ("num_samples", sizes)):
        if not isinstance(value, list):
            raise InputError(f"{path}: key {name!r} is no list, expected one entry for each user")
    if not all(isinstance(user, str) for user in users) or len(set(users)) != len(users):
        raise InputError(
            f"{path}: users holds a repeated or non-text name, expected distinct strings"
        )
    if len(sizes) != len(users):
        raise InputError(
            f"{path}: num_samples has {len(sizes)} entries, expected {len(users)}, one a user"
        )
    if unlisted := sorted(data.keys() - set(users)):
        raise InputError(
            f"{path}: user_data holds {shorten(unlisted[0])}, expected only names listed in users"
        )
    held = [(user, *parse(path, user, data.get(user))) for user in users]
    _compare_sizes(path, {user: len(y) for user, _, y in held}, sizes)
    return held


def _compare_sizes(path: Path, held: dict[str, int], sizes: list[Any]) -> None:
    """Says whose num_samples is not what is held. Raises InputError for one that is no number."""
    wrong = []
    for (user, count), size in zip(held.items(), sizes, strict=True):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise InputError(
                f"{path}: num_samples of user {shorten(user)} is {describe_value(size)}, expected a"
                " whole number"
            )
        if size not in (None, count):
            wrong.append(f"{shorten(user)} with {shorten(size)} for {count}")
    if wrong:
        warn_of_file(
            f"{path}: num_samples is not what is there for {len(wrong)} of {len(held)} users, first"
            f" {wrong[0]}; what is there is read"
        )


def read_json(path: Path, expected: str) -> Any:
    """Returns what a JSON file holds; objects with a repeated key are refused, as are
    files that would fill the memory with objects.
    """
    with open_unpacked(path) as (file, _):
        text = readers.read_at_most(file, readers.MAX_UNPACKED_BYTES // 4 + 1)
        need = max(
            4 * len(text), sum(cost * text.count(mark) for mark, cost in JSON_MEMORY_BYTES.items())
        )
        if need > readers.MAX_UNPACKED_BYTES:
            raise InputError(
                f"{path}: file takes {need} bytes of memory or more, expected at most"
                f" {readers.MAX_UNPACKED_BYTES}; split it into shards"
            )
        try:
            return json.loads(text, object_pairs_hook=_reject_duplicate_keys)
        except (ValueError, RecursionError) as error:
            # UnicodeDecodeError and JSONDecodeError are ValueErrors
            raise InputError(
                f"{path}: file is not JSON ({line_of(error)}), expected {expected}"
            ) from error


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; of two values for one key, neither can be trusted."""
    found = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {shorten(name)} is there twice")
        found[name] = value
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


def describe_value(value: object) -> str:
    """Returns a value as a message can show it; what is nested, and could be so without
    end, by its kind and length.
    """
    return (
        f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, list | dict)
        else shorten(value)
    )


def read_user(path: Path, user: str, held: object) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [n, ...] float32 and y [n] of one user, of text the numbers of its characters."""
    x, y = user_lists(path, user, held)
    if x and isinstance(x[0], str):
        return number_characters(path, user, x, y)
    x, y = (_numbers(path, user, name, value) for name, value in (("x", x), ("y", y)))
    if y.ndim != 1:
        raise InputError(
            f"{path}: y of user {shorten(user)} has shape {y.shape}, expected one label a sample"
        )
    with np.errstate(over="ignore"):  # an overflow becomes inf, which check_pool reports
        return x.astype(np.float32), y


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


def _numbers(path: Path, user: str, name: str, value: list) -> np.ndarray:
    """Returns a nested list as an array of int64, or of float64 if there is a float."""
    said = f"{path}: {name} of user {shorten(user)}"
    # by itself NumPy would give all the longest text's room
    items = np.array(value, dtype=object)
    kinds = set(map(type, items.flat)) if items.ndim <= LEAF_DIMENSIONS else {list}
    if list in kinds:
        raise InputError(
            f"{said} is ragged, expected rows of equal length in at most {LEAF_DIMENSIONS}"
            " dimensions"
        )
    if not kinds <= {int, float}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds - {int, float}))
        raise InputError(f"{said} is not numeric ({found}), expected a list of numbers")
    try:
        return items.astype(np.int64 if kinds == {int} else np.float64)
    except OverflowError as error:
        raise InputError(
            f"{said} holds a number of too many digits, expected at most 64 bits"
        ) from error
