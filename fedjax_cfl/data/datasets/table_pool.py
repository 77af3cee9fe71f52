"""The pool of a table of Hugging Face or of images' metadata: its columns, made one pool."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fedjax_cfl.data.datasets.files import build_pool, count_seconds, number_clients
from fedjax_cfl.data.datasets.pool import name_clients, number_names, number_owners
from fedjax_cfl.data.datasets.readers import shorten
from fedjax_cfl.data.datasets.table_cells import (
    Place,
    Words,
    join_parts,
    number_words,
    read_features,
    read_numbers,
    read_times,
)
from fedjax_cfl.data.datasets.table_files import MISSING, Kind, is_text, parse_numbers
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool

SPLITS = {"train": 0, "training": 0, "test": 1, "testing": 1, "0": 0, "1": 1}


class Table(NamedTuple):
    """Files of rows, and how they are read."""

    path: Path  # as the user gave it
    shards: list[Path]
    find_kinds: Callable[[Path], dict[str, Kind]]
    read: Callable[[Path, list[str]], Iterator[pa.RecordBatch]]
    decimal: str = "."
    trim: bool = True  # of text: spaces around it are left out


def read_columns(
    table: Table,
    roles: dict[str, str],
    features: list[str],
    texts: set[str],
    targets: Collection[str] = (),
) -> dict[str, np.ndarray | Words]:
    """Returns columns by name: numbers [N, ...], dates [N] or words; `texts` are features of
    text, `targets` columns of numbers to regress.
    """
    wanted = list(dict.fromkeys([*roles.values(), *features]))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    known: dict[str, dict[str, int]] = {name: {} for name in wanted}
    for shard in table.shards:
        if shard != table.shards[0] and (lost := set(wanted) - set(table.find_kinds(shard))):
            raise InputError(
                f"{shard}: column {min(lost)} is missing, expected it as in {table.shards[0].name}"
            )
        row = 1
        for batch in filter(len, table.read(shard, wanted)):
            for name, cells in zip(wanted, batch.columns, strict=True):
                place = Place(shard, name, row, table.decimal)
                if name == roles.get("time"):
                    part = read_times(place, cells)
                elif name in features and name not in texts:
                    part = read_features(place, cells)
                elif name in targets:
                    part = read_numbers(place, cells, "fill it in or leave the row out")
                elif is_text(cells.type):
                    part = number_words(place, cells, known[name], table.trim)
                elif known[name]:
                    raise InputError(
                        f"{shard}: column {name} is {cells.type}, expected text as in other files"
                    )
                else:
                    part = read_numbers(place, cells)
                parts[name].append(part)
            row += batch.num_rows
    return {name: join_parts(table.path, name, parts.pop(name), known[name]) for name in wanted}


def iterate_images(table: Table, name: str) -> Iterator[tuple[str, bytes]]:
    """Yields (what a message calls it, content) of the images in a column."""
    for shard in table.shards:
        row = 1
        for batch in table.read(shard, [name]):
            cells = batch.column(0)
            inside = pa.types.is_struct(cells.type)
            if inside:
                # unlike `field`, of a row that is null it has null
                cells = cells.flatten()[cells.type.get_field_index("bytes")]
            for cell in cells:
                content, place = cell.as_py(), f"{shard}: column {name} in row {row}"
                if not content:
                    what = "no bytes, at most a path" if inside else "no value"
                    raise InputError(
                        f"{place} (the first is 1) has {what}, expected the bytes of an image;"
                        " datasets.load_dataset(...).save_to_disk(FOLDER) embeds them"
                    )
                yield place, content
                row += 1


def assemble_pool(
    path: str, x: np.ndarray, parts: dict[str, np.ndarray | Words], num_classes: int | None
) -> Pool:
    """Returns the checked pool of features and the other parts of a table."""
    none = np.zeros(len(x), np.int64)  # of a table without labels
    y, class_names = _as_numbers(path, "y", parts.get("y", none))
    arrays, client_names = {"x": x, "y": y}, None
    client = parts.get("client")
    if isinstance(client, Words):
        names, numbers = number_names(client.words)
        client_names = name_clients(names)
        arrays["client"] = numbers[client.number]
    elif client is not None:
        arrays["client"] = client
    if "split" in parts:
        arrays["split"] = _read_split(path, parts["split"])
    if isinstance(time := parts.get("time"), np.ndarray):
        arrays["time"] = count_seconds(path, time) if time.dtype.kind == "M" else time
    if "concept" in parts:
        concept, _ = _as_numbers(path, "concept", parts["concept"])
        arrays["concept"] = _concept_of_clients(path, arrays.get("client"), client_names, concept)
    pool = build_pool(path, arrays, num_classes)
    if class_names is not None:
        pool = pool._replace(class_names=class_names)
    return pool if client_names is None else pool._replace(client_names=client_names)


def _as_numbers(
    path: str, role: str, column: np.ndarray | Words
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns a column as numbers [N], and the words that they stand for, None for numbers."""
    if not isinstance(column, Words):
        return column, None
    there = [word for word in column.words if word not in MISSING]
    numbers = parse_numbers(pa.array(there, pa.string()))
    if not there or numbers is None:
        return column.number, tuple(column.words)
    if len(there) < len(column.words):
        missing = next(word for word in column.words if word in MISSING)
        row = int((column.number == column.words.index(missing)).argmax())
        raise InputError(
            f"{path}: {role} is {missing} in sample {row} and numbers in others, expected"
            " one in every row: fill it in or leave the row out"
        )
    values = numbers.to_numpy()
    if (values == np.floor(values)).all() and (np.abs(values) < 2**53).all():
        values = values.astype(np.int64)
    return values[column.number], None


def _read_split(path: str, column: np.ndarray | Words) -> np.ndarray:
    if not isinstance(column, Words):
        return column
    for number, word in enumerate(column.words):
        if word.lower() not in SPLITS:
            row = int((column.number == number).argmax())
            raise InputError(
                f"{path}: split is {shorten(word)} in sample {row}, expected train or test,"
                " or 0 or 1: name it so, or leave the rows out"
            )
    return np.array([SPLITS[word.lower()] for word in column.words])[column.number]


def _concept_of_clients(
    path: str, client: np.ndarray | None, names: tuple[str | int, ...] | None, concept: np.ndarray
) -> np.ndarray:
    """Returns the concept of each client [K], in the order of their ids, from that of their
    samples [N]. Raises InputError for a client with two.
    """
    if client is None:
        raise InputError(f"{path}: concept needs client, expected both or neither")
    concept = number_owners(concept)
    ids, number = number_clients(path, client, len(concept))
    first = concept[np.unique(number, return_index=True)[1]]
    other = first[number] != concept
    if other.any():
        k = int(number[other.argmax()])
        raise InputError(
            f"{path}: concept changes within client {shorten((names or ids.tolist())[k])},"
            f" first in sample {other.argmax()}, expected one of each client"
        )
    return first
