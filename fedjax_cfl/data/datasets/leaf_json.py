"""Reader of LEAF JSON, under the rules of `readers`: one line for a malformed file, no
size believed.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.readers import PathLike, line_of, list_folder, open_unpacked, shorten
from fedjax_cfl.errors import InputError

# bytes of memory that a sign in JSON stands for: number, list, object, entry
JSON_MEMORY_BYTES = {b",": 40, b"[": 64, b"{": 64, b":": 200}
LEAF_DIMENSIONS = 32  # NumPy has 64, but cannot list the entries of so many


def read_leaf(
    paths: PathLike | Iterable[PathLike],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Reads LEAF JSON: one file (plain or .gz), a folder of shards, or several of them.

    Returns x [N, ...] float32, y [N] (int64 or float64, as written), client [N] int32
    (index into the names), and the names, sorted. Users come in the order of their
    names, the samples of a user in the order of the file. Source:
    github.com/TalwalkarLab/leaf.
    """
    folders = [paths] if isinstance(paths, PathLike) else list(paths)
    data = read_users(folders, _user)
    users = sorted(data)
    held = [(user, *data[user]) for user in users if len(data[user][1])]
    if not held:
        raise InputError(
            f"{', '.join(map(str, folders))}: user_data holds no samples, expected at least one"
        )
    shape = held[0][1].shape[1:]
    for user, x, _, path in held:
        if x.shape[1:] != shape:
            raise InputError(
                f"{path}: x of user {shorten(user)} has samples of shape {x.shape[1:]}, expected"
                f" {shape} as in other users"
            )
    client = np.repeat(
        np.arange(len(users), dtype=np.int32), [len(data[user][1]) for user in users]
    )
    return (
        np.concatenate([x for _, x, _, _ in held]),
        np.concatenate([y for _, _, y, _ in held]),
        client,
        users,
    )


def read_users(
    folders: Iterable[PathLike], parse: Callable[[Path, str, object, object], tuple]
) -> dict[str, tuple[Any, Any, Path]]:
    """Returns user -> (x, y, file) of files or folders of LEAF JSON, where `parse(file,
    user, num_samples, user_data)` gives (x, y).
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
    """Returns the JSON files of a folder in order of name, or the file itself."""
    if not os.path.isdir(path):  # unlike Path.is_dir it raises nothing
        return [path]
    names = list_folder(path, "a readable folder of LEAF shards")
    shards = [path / name for name in names if name.endswith((".json", ".json.gz"))]
    if not shards:
        raise InputError(f"{path}: folder holds no *.json or *.json.gz, expected LEAF shards")
    return shards


def _shard(path: Path, parse: Callable[..., tuple]) -> list[tuple[str, Any, Any]]:
    """Returns (user, x, y) for every user of one LEAF file, checked."""
    shard = _json(path)
    for name, kind in {"users": list, "num_samples": list, "user_data": dict}.items():
        if not isinstance(shard, dict) or not isinstance(shard.get(name), kind):
            raise InputError(
                f"{path}: key {name!r} is missing or no {kind.__name__}, expected users,"
                " num_samples and user_data"
            )
    users, sizes, data = shard["users"], shard["num_samples"], shard["user_data"]
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
    return [
        (user, *parse(path, user, size, data.get(user)))
        for user, size in zip(users, sizes, strict=True)
    ]


def _json(path: Path) -> Any:
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
                f"{path}: file is not JSON ({line_of(error)}), expected LEAF JSON"
            ) from error


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; of two values for one key, neither can be trusted."""
    found = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {shorten(name)} is there twice")
        found[name] = value
    return found


def user_lists(path: Path, user: str, size: object, held: object) -> tuple[list, list]:
    """Returns the lists x and y of one user, as `read_users` finds them, of anything."""
    x, y = (held.get(name) if isinstance(held, dict) else None for name in ("x", "y"))
    said = f"{path}: user {shorten(user)}"
    if not isinstance(x, list) or not isinstance(y, list):
        raise InputError(f"{said} is listed without data, expected lists x and y")
    if isinstance(size, bool) or not isinstance(size, int) or not len(x) == len(y) == size:
        raise InputError(
            f"{said}: num_samples is {describe_value(size)}, expected {len(x)} (x) and {len(y)} (y)"
            " to equal it"
        )
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


def _user(path: Path, user: str, size: object, held: object) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [n, ...] float32 and y [n] of one user."""
    if not isinstance(held, dict) or "x" not in held or "y" not in held:
        raise InputError(
            f"{path}: user {shorten(user)} is listed without data, expected"
            f" user_data[{shorten(user)}] with x and y"
        )
    x, y = (_numbers(path, user, name, held[name]) for name in ("x", "y"))
    if y.ndim != 1:
        raise InputError(
            f"{path}: y of user {shorten(user)} has shape {y.shape}, expected one label a sample"
        )
    if not isinstance(size, int) or not len(x) == len(y) == size:
        given = shorten(size) if isinstance(size, int | float | str | None) else type(size).__name__
        raise InputError(
            f"{path}: num_samples of user {shorten(user)} is {given}, expected {len(x)} (x) and"
            f" {len(y)} (y) to equal it"
        )
    with np.errstate(over="ignore"):  # an overflow becomes inf, which check_pool reports
        return x.astype(np.float32), y


def _numbers(path: Path, user: str, name: str, value: object) -> np.ndarray:
    """Returns a nested list as an array of int64, or of float64 if there is a float."""
    said = f"{path}: {name} of user {shorten(user)}"
    # by itself NumPy would give all the longest text's room
    items = np.array(value if isinstance(value, list) else [value], dtype=object)
    kinds = set(map(type, items.flat)) if items.ndim <= LEAF_DIMENSIONS else {list}
    if isinstance(value, list) and list in kinds:
        raise InputError(
            f"{said} is ragged, expected rows of equal length in at most {LEAF_DIMENSIONS}"
            " dimensions"
        )
    if not isinstance(value, list) or not kinds <= {int, float}:
        found = (
            ", ".join(sorted(kind.__name__ for kind in kinds - {int, float})) or "a single number"
        )
        raise InputError(f"{said} is not numeric ({found}), expected a list of numbers")
    try:
        return items.astype(np.int64 if kinds == {int} else np.float64)
    except OverflowError as error:
        raise InputError(
            f"{said} holds a number of too many digits, expected at most 64 bits"
        ) from error
