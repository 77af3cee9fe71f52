"""Data sets of Hugging Face, read by its package `datasets`: see `huggingface`."""

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import TypeAliasType

from fedjax_cfl.data.datasets.image_files import ImageSize, Mode
from fedjax_cfl.data.datasets.readers import list_names, report_damage
from fedjax_cfl.errors import InputError, warn_of_file
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, OptionalText, OptionalTexts, Rule, Text, checked

Names = TypeAliasType("Names", Annotated[list[Text], Rule("a list of names", bool)])
# columns that name the user, in well-known data sets
USERS = (
    "writer_id", "user_id", "client_id", "user", "character_id", "celeb_id", "speaker_id", "subject"
)  # fmt: skip
PARTITION = re.compile(r"partition_(\d+)(\.parquet)?")
OWNER, TESTS = "partition of a row", "split of a row"  # columns that are added


@checked("dataset.source")
def huggingface(
    path: str | Path,
    x: Text | Names | None = None,
    y: OptionalText = None,
    client: OptionalText = None,
    time: OptionalText = None,
    split: OptionalText = None,
    splits: OptionalTexts = None,
    num_classes: NaturalInt | None = None,
    config: OptionalText = None,
    size: ImageSize | None = None,
    mode: Mode = "auto",
) -> Pool:
    """Returns a data set of the hub, or of a folder: what `Dataset.save_to_disk` or
    `DatasetDict.save_to_disk` writes, files as the hub has them, or folders partition_0,
    partition_1, ... of either. Needs the extra `huggingface`.

    Images become uint8 [N, H, W] or [N, H, W, 3], those of 16 bits float32 [N, H, W]; arrays and
    lists of equal lengths are taken as they are, and as in `npz` uint8 is read as x / 255. Class
    labels keep their numbers and names; other columns are read as `from_frame` reads them.

    Args: `path` is the folder, or the name on the hub, and `config` its configuration there; `x`
    is the column of samples, or a list of columns of numbers, None: the only one of images, else
    of arrays, else of lists of a fixed length; `y` is that of labels, None: the only one of class
    labels; `client` that of owners, None: the partitions, else the samples have none; `time` that
    of whole numbers, or of time stamps or dates, which become seconds since the first; `split`
    that of train and test; `splits` are the splits to read, of several the last one for testing,
    None: all, if they are train and test; `num_classes` is as in `npz`, for labels without names,
    0: `y` is a column of numbers to regress, or of lists of labels, 0 or 1; `size` and `mode` are
    as in `image_folder`.
    Raises InputError where the package is missing, and for a folder, a column or a value that does
    not fit.
    """
    try:
        hf: Any = importlib.import_module("datasets")  # an extra
    except ImportError:
        raise InputError(
            f"{path}: the package datasets is not installed, expected it for Hugging Face's data:"
            " pip install 'fedjax-cfl[huggingface]'"
        ) from None
    from fedjax_cfl.data.datasets.frame import Source, make_pool, to_table

    parts = load_parts(hf, path, config)
    chosen = choose_splits(path, parts, splits)
    if len(chosen) > 1 and split is not None:
        raise InputError(f"{path}: has splits of its own, and split={split}, expected null")
    with report_damage(path, "splits with the same columns", "data set"):
        rows = hf.concatenate_datasets([parts[name] for name in chosen])
    if len(chosen) > 1:
        split, last = TESTS, len(parts[chosen[-1]])
        rows = rows.add_column(TESTS, [0] * (len(rows) - last) + [1] * last)
    named = {"x": x, "y": y, "client": client, "time": time, "split": split}
    source = Source(**choose_columns(hf, path, rows, named), size=size, mode=mode)
    with report_damage(path, "columns that are there", "data set"):
        table = to_table(take_columns(hf, rows, source), str(path))
    label = rows.features[source.y]
    names = label.names if isinstance(label, hf.ClassLabel) and num_classes != 0 else None
    if names and (table.frame[source.y].to_numpy() < 0).any():
        raise InputError(
            f"{path}: column {source.y} is below 0 in some rows, expected labels: this split is"
            " published without them"
        )
    pool = make_pool(table, source._replace(num_classes=len(names) if names else num_classes))
    if isinstance(rows.features.get(str(source.x)), hf.Image) and pool.x.shape[-1] == 1:
        pool = pool._replace(x=pool.x[..., 0])
    return pool._replace(class_names=tuple(names)) if names else pool


def load_parts(hf: Any, path: str | Path, config: str | None) -> dict[str | None, Any]:
    """Returns the data sets of a folder or of the hub by split, None: it has no splits. Those of
    partition_0, partition_1, ... are joined, and the column `OWNER` says which a row is from.
    """
    root = os.path.expanduser(path)
    if os.path.isabs(root) and not os.path.exists(root):  # no name of the hub, which is not asked
        raise InputError(f"{path}: no such folder, expected one, or a name of the hub")
    inside = sorted(os.listdir(root)) if os.path.isdir(root) else []
    owned = {int(found[1]): name for name in inside if (found := PARTITION.fullmatch(name))}
    if lost := set(range(len(owned))) - set(owned):
        raise InputError(
            f"{path}: partition_{min(lost)} is missing, expected partition_0 .."
            f" partition_{max(owned)}"
        )
    others = [name for name in inside if name not in owned.values() and name[0] != "."]
    if owned and others:
        warn_of_file(f"{path}: {list_names(others)} is of no client and is left out")
    places = [os.path.join(root, owned[number]) for number in sorted(owned)] or [root]
    known = "a data set of the hub (a private or gated one after `hf auth login`), or a folder"
    with report_damage(path, f"{known} that save_to_disk wrote", "data set"):
        parts = [load_part(hf, place, config) for place in places]
    if not owned:
        return parts[0]
    for number, part in enumerate(parts):
        if set(part) != set(parts[0]):
            raise InputError(
                f"{path}: partition_{number} has splits {list(part)} and partition_0"
                f" {list(parts[0])}, expected the same in each"
            )

    def join(split: str | None) -> Any:
        rows = [part[split] for part in parts]
        named = [each.add_column(OWNER, [k] * len(each)) for k, each in enumerate(rows)]
        return hf.concatenate_datasets(named)

    with report_damage(path, "partitions with the same columns", "data set"):
        return {split: join(split) for split in parts[0]}


def choose_splits(
    path: str | Path, parts: Mapping[str | None, Any], splits: Sequence[str] | None
) -> list[str | None]:
    """Returns the splits to read: those that are named, None: the only one, or train and test."""
    chosen: list[str | None] = list(splits or [])
    if splits is None and (len(parts) == 1 or set(parts) == {"train", "test"}):
        chosen = list(parts) if len(parts) == 1 else ["train", "test"]
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(parts):
        there = list_names([name for name in parts if name is not None]) or "none"
        setting = "" if splits is None else f", and dataset.source.splits={list(splits)}"
        raise InputError(
            f"{path}: splits are {there}{setting}, expected"
            " dataset.source.splits=[...] of one or more of them, each once; of several the last"
            " one is for testing"
        )
    return chosen


def load_part(hf: Any, path: str, config: str | None) -> dict[str | None, Any]:
    """Returns the data sets of a folder, file or name by split, None: it has no splits."""
    saved = ("dataset_dict.json", "state.json")
    if path.endswith(".parquet"):
        found = hf.load_dataset("parquet", data_files=path, split="train")
    elif any(os.path.exists(os.path.join(path, name)) for name in saved):
        found = hf.load_from_disk(path)
    else:
        found = hf.load_dataset(path, config)
    return dict(found) if isinstance(found, dict) else {None: found}


def choose_columns(hf: Any, path: str | Path, rows: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Returns which column is what: those that are `named`, else as `huggingface` says. Raises
    InputError where none or several fit.
    """
    features, chosen = rows.features, dict(named)
    arrays = hf.Array2D, hf.Array3D, hf.Array4D, hf.Array5D
    kinds = {
        "x": {"images": hf.Image, "arrays": arrays, "lists of a fixed length": hf.List},
        "y": {"class labels": hf.ClassLabel},
    }
    for role, options in kinds.items():
        if chosen[role] is not None:
            continue
        said, fits = f"no column holds {' or '.join(options)}", []
        for kind, types in options.items():
            fits = [name for name, feature in features.items() if isinstance(feature, types)]
            fits = [name for name in fits if getattr(features[name], "length", 0) >= 0]
            if fits:
                said = f"columns {list_names(fits)} are {kind}"
                break
        if len(fits) != 1:
            raise InputError(
                f"{path}: {said}, expected dataset.source.{role}=NAME; columns are"
                f" {list_names(list(features))}"
            )
        chosen[role] = fits[0]
    users = [name for name in USERS if name in features]
    if chosen["client"] is None and OWNER in features:
        chosen["client"] = OWNER
    elif chosen["client"] is None and users:
        warn_of_file(
            f"{path}: column {users[0]} may name the samples' owners and is not used:"
            f" dataset.source.client={users[0]}"
        )
    return chosen


def take_columns(hf: Any, rows: Any, source: Any) -> Any:
    """Returns columns as a frame: images as bytes of files, arrays as lists, and clients and splits
    that are class labels as their words.
    """
    x = [source.x] if isinstance(source.x, str) else source.x
    wanted = dict.fromkeys([*x, source.y, source.client, source.time, source.split])
    chosen = rows.select_columns([name for name in wanted if name is not None])
    frame = hf.table.embed_table_storage(chosen.with_format("arrow")[:]).to_pandas()
    for name in {source.client, source.split} - {source.y, None}:
        if isinstance(feature := rows.features[name], hf.ClassLabel):
            frame[name] = frame[name].map(feature.int2str)
    return frame
