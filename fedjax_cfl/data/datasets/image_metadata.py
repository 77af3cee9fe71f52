"""Folders of images with a table beside them, as Hugging Face's imagefolder has it: metadata.csv,
.jsonl or .parquet with `file_name`, relative to the table, and what it says of each image.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa

from fedjax_cfl.data.datasets import readers, table_files
from fedjax_cfl.data.datasets.readers import shorten
from fedjax_cfl.data.datasets.table_cells import Words
from fedjax_cfl.data.datasets.table_pool import Table, assemble_pool, read_columns
from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.types import Pool

FILE_NAME, LABEL, SPLIT = "file_name", "label", "split"
USERS = "user", "client", "user_id", "client_id"  # of these the first that is there


def read_metadata(
    root: Path,
    shards: list[Path],
    y: str | None,
    client: str | None,
    stack: Callable[..., np.ndarray],
) -> Pool:
    """Returns the pool of the images that tables name.

    Args: `root` is the folder, `shards` are the tables, of one or of two splits; `y` is the column
    of labels, None: label; `client` that of owners, None: one of `USERS`, if there is one;
    `stack` makes an array of the images.
    Raises InputError for a column or an image that is not there, and for files outside of the
    folder.
    """
    if shards[0].suffix == ".jsonl":
        find_kinds, read = table_files.find_jsonl_kinds, table_files.read_jsonl
    elif shards[0].suffix == ".csv":
        find_kinds, read = table_files.find_csv_kinds, table_files.read_csv
    else:
        find_kinds, read = table_files.find_parquet_kinds, table_files.read_parquet
    kinds = find_kinds(shards[0])
    client = client or next((name for name in USERS if name in kinds), None)
    roles = {"file": FILE_NAME, "y": y or LABEL} | ({"client": client} if client else {})
    if len(shards) == 1 and SPLIT in kinds and SPLIT not in roles.values():
        roles["split"] = SPLIT
    if len(set(roles.values())) < len(roles):
        raise InputError(f"{shards[0]}: y={y or LABEL} is client or {FILE_NAME}, too")
    for name in roles.values():
        if name not in kinds:
            near = suggest_nearest(name, kinds)
            raise InputError(f"{shards[0]}: column {name} is missing{near}, expected it")
        if kinds[name] not in ("text", "numbers"):
            raise InputError(f"{shards[0]}: column {name} holds {kinds[name]}, expected text")
    places = partial(_read_places, root, read)
    found = read_columns(Table(root, shards, find_kinds, places), roles, [], set())
    parts = {role: found[name] for role, name in roles.items()}
    files = parts.pop("file")
    assert isinstance(files, Words)  # `_read_places` makes them text
    names = np.array(files.words)[files.number].tolist()
    if len(shards) > 1:
        parts["split"] = np.array([name.split("/")[0] == shards[1].parent.name for name in names])
    files = readers.read_files(_find_images(root, names))
    return assemble_pool(str(root), stack(files, len(names)), parts, None)


def _read_places(
    root: Path,
    read: Callable[[Path, list[str]], Iterator[pa.RecordBatch]],
    shard: Path,
    wanted: list[str],
) -> Iterator[pa.RecordBatch]:
    """Yields the columns of a table, files by their place below the root."""
    home = shard.parent.relative_to(root).as_posix()
    for batch in read(shard, wanted):
        names = batch.column(FILE_NAME).cast(pa.string()).to_pylist()
        if home != ".":
            names = [name and f"{home}/{name}" for name in names]
        names = pa.array(names, pa.string())
        columns = [names if name == FILE_NAME else batch.column(name) for name in wanted]
        yield pa.RecordBatch.from_arrays(columns, wanted)


def _find_images(root: Path, names: list[str]) -> Iterator[Path]:
    home = os.path.realpath(root)
    for row, name in enumerate(names):
        parts, path = PurePosixPath(name).parts, root / name
        leaves = ".." in parts or "\\" in name or ":" in name or os.path.isabs(name)
        if leaves or os.path.commonpath([home, os.path.realpath(path)]) != home:
            raise InputError(
                f"{root}: {FILE_NAME} is {shorten(name)} in sample {row}, expected a file in the"
                " folder of its table"
            )
        yield path
