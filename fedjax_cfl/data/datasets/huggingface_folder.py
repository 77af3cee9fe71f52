"""Which files of a folder are a Hugging Face data set: what `save_to_disk` writes, Parquet of
the hub, and folders partition_0, partition_1, ... as flwr-datasets' users have them.

Formats: github.com/huggingface/datasets 5.2.0, github.com/adap/flower (datasets/).
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_cfl.data.datasets.readers import (
    line_of,
    list_folder,
    list_names,
    open_unpacked,
    read_at_most,
    shorten,
)
from fedjax_cfl.errors import InputError, warn_of_file

MOST_JSON_BYTES = 2**24
SAVE = "datasets.load_dataset(...).save_to_disk(FOLDER)"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?\.parquet")
PARTITION = re.compile(r"partition_(\d{1,9})(\.parquet)?")


class Part(NamedTuple):
    """The files of one split, of one partition if there are several."""

    split: str | None  # None: the data set has no splits
    partition: int | None  # None: the data set is not dealt to clients
    files: list[Path]
    features: dict[str, Any] | None  # None: not beside the files, perhaps in them


def find_parts(root: Path) -> list[Part]:
    """Returns the parts of a data set, partitions in order of their numbers. Raises InputError
    for a folder that is no data set, and for what is missing in it.
    """
    entries = _entries(root)
    if {"dataset_dict.json", "state.json"} & set(entries):
        return _saved(root, None)
    numbers = {name: int(found[1]) for name in entries if (found := PARTITION.fullmatch(name))}
    if not numbers:
        if any(name.endswith(".arrow") for name in entries) and "dataset_info.json" in entries:
            raise InputError(
                f"{root}: holds a cache of datasets (no state.json), where images are paths,"
                f" expected a saved data set: {SAVE}"
            )
        return _parquet(root)
    wanted = range(len(numbers))
    if sorted(numbers.values()) != list(wanted):
        lost = sorted(set(wanted) - set(numbers.values()))
        raise InputError(
            f"{root}: partition_{lost[0]} is missing or another one is there twice, expected"
            f" partition_0 .. partition_{max(max(numbers.values()), len(numbers) - 1)}, each once"
        )
    others = [n for n in entries if n not in numbers and os.path.isdir(root / n)]
    if others:
        warn_of_file(
            f"{root}: {list_names(others)} is of no client (partition_<i>) and is left out"
        )
    parts = []
    for name in sorted(numbers, key=lambda name: numbers[name]):
        path, number = root / name, numbers[name]
        if name.endswith(".parquet"):
            parts.append(Part(None, number, [path], None))
        else:
            saved = {"dataset_dict.json", "state.json"} & set(_entries(path))
            parts += (_saved if saved else _parquet)(path, number)
    return parts


def check_base_name(path: Path, name: Any) -> str:
    """Returns a name that stands in a file; raises InputError unless it is a plain name, of
    something in the same folder.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")
    if not plain:
        shown = shorten(name) if isinstance(name, str) else f"a {type(name).__name__}"
        raise InputError(f"{path}: names the file {shown}, expected a name without a folder")
    folder = os.path.realpath(path.parent)
    if os.path.dirname(os.path.realpath(path.parent / name)) != folder:
        raise InputError(
            f"{path}: names the file {shorten(name)}, which is a link that leaves the folder,"
            " expected the file itself"
        )
    return name


def read_features(path: Path, info: dict[str, Any]) -> dict[str, Any]:
    """Returns the features that JSON holds, as `datasets` writes them."""
    info = info.get("info", info)  # in the metadata of a file
    features = info.get("features") if isinstance(info, dict) else None
    if not isinstance(features, dict) or not all(
        isinstance(f, dict | list) for f in features.values()
    ):
        raise InputError(f"{path}: features are missing or none, expected those of each column")
    return features


def _entries(folder: Path) -> list[str]:
    """Returns the names in a folder, sorted, without hidden ones."""
    names = list_folder(folder, f"a data set saved by {SAVE}, or a folder of Parquet files")
    return [name for name in names if not name.startswith((".", "__MACOSX"))]


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """Returns the object that a JSON text holds."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: file is not JSON ({line_of(error)}), expected JSON") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds a {type(found).__name__}, expected an object of JSON")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    with open_unpacked(path) as (file, _):
        text = read_at_most(file, MOST_JSON_BYTES + 1)
    if len(text) > MOST_JSON_BYTES:
        raise InputError(f"{path}: file is longer than {MOST_JSON_BYTES} bytes, expected less")
    return parse_json(path, bytes(text))


def _saved(folder: Path, partition: int | None) -> list[Part]:
    path = folder / "dataset_dict.json"
    if not os.path.lexists(path):
        return [_saved_split(folder, None, partition)]
    splits = _read_json(path).get("splits")
    if not isinstance(splits, list) or not splits or len(set(map(repr, splits))) != len(splits):
        raise InputError(f"{path}: splits are missing or none, expected a list of folders")
    names = [check_base_name(path, split) for split in splits]
    return [_saved_split(folder / name, name, partition) for name in names]


def _saved_split(folder: Path, split: str | None, partition: int | None) -> Part:
    path = folder / "state.json"
    state = _read_json(path)
    if state.get("_indices_data_files"):
        raise InputError(
            f"{path}: names an index file, expected a data set saved by a current version:"
            " load_from_disk(...).flatten_indices().save_to_disk(...)"
        )
    files = state.get("_data_files")
    if (
        not isinstance(files, list)
        or not files
        or not all(isinstance(file, dict) for file in files)
    ):
        raise InputError(f"{path}: _data_files are missing or none, expected a list of files")
    names = [check_base_name(path, file.get("filename")) for file in files]
    if len(set(names)) != len(names):
        raise InputError(f"{path}: _data_files names a file twice, expected each once")
    info = folder / "dataset_info.json"
    features = read_features(info, _read_json(info)) if os.path.lexists(info) else None
    return Part(split, partition, [folder / name for name in names], features)


def _parquet(root: Path, partition: int | None = None, deeper: bool = True) -> list[Part]:
    """Returns the parts of a folder of Parquet files: in it, in data/, in the folder of its only
    configuration, or in folders named as the splits. With `deeper`, configurations have folders.
    """
    folder = next((f for f in (root, root / "data") if os.path.isdir(f) and _shards(f)), None)
    if folder is None:
        subfolders = [root / name for name in _entries(root) if os.path.isdir(root / name)]
        holders = [folder for folder in subfolders if _shards(folder)]
        if holders and all(name[:-8].isdecimal() for f in holders for name in _shards(f)):
            return _group([(f.name, f / name) for f in holders for name in _shards(f)], partition)
        if len(holders) > 1:
            raise InputError(
                f"{root}: holds the configurations {list_names([f.name for f in holders])},"
                " expected the folder of one of them"
            )
        if not holders and len(subfolders) == 1 and deeper:
            return _parquet(subfolders[0], partition, deeper=False)
        if not holders:
            raise InputError(
                f"{root}: holds no data set, expected one saved by {SAVE}, a folder of Parquet"
                " files, or partition_0, partition_1, ..."
            )
        (folder,) = holders
    names = _shards(folder)
    held: dict[tuple[str, int], list[int]] = {}
    for found in filter(None, map(SHARD.fullmatch, names)):
        held.setdefault((found[1], int(found[3])), []).append(int(found[2]))
    for (split, total), numbers in held.items():
        if sorted(numbers) != list(range(total)):
            raise InputError(
                f"{folder}: holds {len(numbers)} files {split}-*-of-{total:05}.parquet, expected"
                f" all {total} of them, each once"
            )
    return _group([(name[:-8].split("-")[0], folder / name) for name in names], partition)


def _shards(folder: Path) -> list[str]:
    return [name for name in _entries(folder) if name.endswith(".parquet")]


def _group(found: Sequence[tuple[str, Path]], partition: int | None) -> list[Part]:
    files: dict[str, list[Path]] = {}
    for split, path in found:
        files.setdefault(split, []).append(path)
    return [Part(split, partition, paths, None) for split, paths in files.items()]
