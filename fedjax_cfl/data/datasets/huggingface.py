"""Data sets of Hugging Face on the disk, without its package: see `huggingface`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fedjax_cfl.data.datasets.huggingface_folder import Part, find_parts
from fedjax_cfl.data.datasets.pool import choose_splits
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import (
    TEXT,
    NaturalInt,
    OptionalText,
    OptionalTexts,
    Rule,
    check_arguments,
    each,
)

ONE_OR_MORE = Rule(
    "null, the name of a column, or a list of names",
    lambda value: value is None or TEXT.holds(value) or (each(TEXT).holds(value) and bool(value)),
)


def huggingface(
    path: str | Path,
    x: Annotated[str | list[str] | None, ONE_OR_MORE] = None,
    y: OptionalText = None,
    client: OptionalText = None,
    time: OptionalText = None,
    split: OptionalText = None,
    splits: OptionalTexts = None,
    num_classes: NaturalInt | None = None,
) -> Pool:
    """Returns a data set in a folder: as `Dataset.save_to_disk` or `DatasetDict.save_to_disk`
    writes it, Parquet files of the hub, or folders partition_0, partition_1, ... of either.

    Images become uint8 [N, H, W] or [N, H, W, 3], those of 16 bits float32 [N, H, W]; arrays and
    lists of equal lengths are taken as they are, and as in `npz` uint8 is read as x / 255. Class
    labels keep their numbers and names; text is numbered in sorted order. The package `datasets`
    is not needed; nothing is executed, and no path in a column is followed.

    Args: `path` is the folder; `x` is the column of samples, or a list of columns of numbers,
    None: the only one of images, else of arrays, else of lists of a fixed length; `y` is that of
    labels, None: the only one of class labels; `client` that of owners, None: the partitions,
    else the samples have none; `time` that of whole numbers, or of time stamps or dates, which
    become seconds since the first; `split` that of train and test; `splits` are the splits to
    read, of several the last one for testing, None: all, if they are train and test;
    `num_classes` is as in `npz`, for labels without names; 0: `y` is a column of numbers to
    regress, or of lists of labels, 0 or 1.
    Raises InputError for a folder, a file, a column or a value that does not fit.
    Source: github.com/huggingface/datasets 5.2.0.
    """
    check_arguments(huggingface, locals(), "dataset.source")
    root = Path(os.path.expanduser(path))
    parts, for_testing = choose_parts(root, find_parts(root), splits)
    if for_testing and split is not None:
        raise InputError(
            f"{root}: has splits of its own, and dataset.source.split={split}, expected null"
        )
    # which takes a while to import, and few runs need
    from fedjax_cfl.data.datasets.huggingface_table import read_pool

    named = {"x": x, "y": y, "client": client, "time": time, "split": split}
    return read_pool(root, parts, named, for_testing, num_classes)


def choose_parts(
    root: Path, parts: list[Part], splits: Sequence[str] | None
) -> tuple[list[Part], str | None]:
    """Returns the parts to read, those for training first, and the split for testing, if any.
    Raises InputError for splits that are not there and for partitions with different ones.
    """
    found: dict[int | None, list[str | None]] = {}
    for part in parts:
        found.setdefault(part.partition, []).append(part.split)
    first, there = next(iter(found.items()))
    for number, names in found.items():
        if set(names) != set(there):
            raise InputError(
                f"{root}: partition_{number} has splits {names} and partition_{first} {there},"
                " expected the same in each"
            )
    known = [name for name in there if name is not None]
    if splits is None and not known:
        return parts, None
    splits = choose_splits(root, known, splits)
    chosen = [part for name in splits for part in parts if part.split == name]
    return chosen, splits[-1] if len(splits) > 1 else None
