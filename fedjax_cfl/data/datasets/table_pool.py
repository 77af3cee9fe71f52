"""The pool of a table: which columns are read, and what they make together."""

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
from fedjax_cfl.errors import InputError, suggest_nearest, warn_of_file
from fedjax_cfl.types import Pool

ROLES = ("y", "client", "split", "time", "concept")
SPLITS = {"train": 0, "training": 0, "test": 1, "testing": 1, "0": 0, "1": 1}
INDEX = ("", "__index_level_0__", "Unnamed: 0")  # row numbers, as pandas writes them
MOST_LISTED = 9  # names in a message


class Columns(NamedTuple):
    """Which column of a table is what, see `csv`; columns without a part are not read."""

    # None: the table has no labels, and they are 0; several: each is a label that is 0 or 1
    y: list[str] | str | None
    x: list[str] | str | None = None
    client: str | None = None
    split: str | None = None
    time: str | None = None
    concept: str | None = None


class Table(NamedTuple):
    """Files of rows, and how they are read."""

    path: Path  # as the user gave it
    shards: list[Path]
    find_kinds: Callable[[Path], dict[str, Kind]]
    read: Callable[[Path, list[str]], Iterator[pa.RecordBatch]]
    decimal: str = "."
    trim: bool = True  # of text: spaces around it are left out


def read_pool(
    table: Table,
    columns: Columns,
    number_text: bool,
    num_classes: int | None,
    stack: Callable[..., np.ndarray] | None = None,
) -> Pool:
    """Returns the checked pool of a table.

    Args: `columns`, `number_text` and `num_classes` are as in `csv`; `stack` makes an array of
    images, where they are read.
    """
    path, kinds = str(table.path), table.find_kinds(table.shards[0])
    several = [str(name) for name in columns.y] if isinstance(columns.y, list | tuple) else []
    if several and num_classes != 0:
        raise InputError(
            f"{path}: y={several} are several columns, expected one; of labels that are 0 or 1 use"
            " task=multilabel, in Python num_classes=0"
        )
    named = columns._asdict() | ({"y": None} if several else {})
    roles = {role: str(named[role]) for role in ROLES if named[role] is not None}
    roles |= {f"y[{place}]": name for place, name in enumerate(several)}
    features = _choose_features(path, kinds, columns, roles, number_text)
    with_images = kinds[features[0]] == "images"
    texts = {name for name in features if number_text and kinds[name] == "text"}
    targets = {name for role, name in roles.items() if role[0] == "y"} if num_classes == 0 else ()
    found = read_columns(table, roles, [] if with_images else features, texts, targets)
    parts = {role: found[name] for role, name in roles.items()}
    if several:
        parts["y"] = _stack_features([parts.pop(f"y[{place}]") for place in range(len(several))])
    if with_images and stack:
        one = next(iter(roles.values()), features[0])  # a column with as many rows
        batches = (batch for shard in table.shards for batch in table.read(shard, [one]))
        x = stack(iterate_images(table, features[0]), sum(map(len, batches)))
    else:
        x = _stack_features([found[name] for name in features])
    return assemble_pool(path, x, parts, num_classes)


def _choose_features(
    path: str, kinds: dict[str, Kind], columns: Columns, roles: dict[str, str], number_text: bool
) -> list[str]:
    """Returns the columns of features. Raises InputError for columns that are not there, that
    have two parts, or that hold no features.
    """
    given = columns.x if isinstance(columns.x, list | tuple | None) else [columns.x]
    named = [*roles.items(), *(("x", str(name)) for name in given or ())]
    for role, name in named:
        if name not in kinds:
            few = ", ".join(shorten(other) for other in list(kinds)[:MOST_LISTED])
            hint = ": is it the delimiter?" if len(kinds) == 1 else suggest_nearest(name, kinds)
            raise InputError(f"{path}: {role}={name} is not there, expected one of {few}{hint}")
        if [other for _, other in named].count(name) > 1:
            twice = ", ".join(other for other, same in named if same == name)
            raise InputError(f"{path}: column {name} is {twice}, expected one part each")
    allowed = ("numbers", "text") if number_text else ("numbers",)
    if given is None:
        rest = [name for name in kinds if name not in roles.values() and name not in INDEX]
        features = [name for name in rest if kinds[name] in allowed]
        whole = [name for name in rest if kinds[name] in ("lists", "images")]
        if whole and (features or len(whole) > 1):
            raise InputError(
                f"{path}: columns {', '.join([*whole, *features][:MOST_LISTED])} could be the"
                " features, expected x=NAME or a list of names"
            )
        if left := [name for name in rest if name not in features + whole]:
            warn_of_file(
                f"{path}: columns {', '.join(map(shorten, left[:MOST_LISTED]))} hold no numbers and"
                " are not used; name the features in x, or set number_text=true"
            )
        given = features or whole
    features = [str(name) for name in given]
    if not features:
        raise InputError(f"{path}: no column of features is left, expected some: name x")
    _check_features(path, {name: kinds[name] for name in features}, allowed)
    return features


def _check_features(path: str, kinds: dict[str, Kind], allowed: tuple[str, ...]) -> None:
    for name, kind in kinds.items():
        if kind in ("lists", "images") and len(kinds) > 1:
            raise InputError(
                f"{path}: column {name} holds {kind}, expected it as the only one of x"
            )
        if kind == "dates":
            raise InputError(f"{path}: column {name} holds dates, expected numbers: name it time")
        if kind not in (*allowed, "text", "lists", "images"):
            raise InputError(
                f"{path}: column {name} holds {kind}, expected numbers, lists or bytes of images"
            )


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


def _stack_features(columns: list[np.ndarray | Words]) -> np.ndarray:
    if len(columns) == 1 and isinstance(columns[0], np.ndarray) and columns[0].ndim > 1:
        return columns[0]
    numbers = [column.number if isinstance(column, Words) else column for column in columns]
    return np.stack(numbers, axis=1, dtype=np.float32)


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
