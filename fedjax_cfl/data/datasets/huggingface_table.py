"""The rows of a Hugging Face data set: which column is what, and all of its files as one pool.

A feature is what the JSON beside the files, or in them, says of a column, as {"_type":
"ClassLabel", "names": [...]}; files of other tools have none, and their Arrow types count.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedjax_cfl.data.datasets.arrow_files import read_batches, read_schema
from fedjax_cfl.data.datasets.huggingface_folder import Part, parse_json, read_features
from fedjax_cfl.data.datasets.image_files import stack_images
from fedjax_cfl.data.datasets.readers import list_names, shorten
from fedjax_cfl.data.datasets.table_cells import Words
from fedjax_cfl.data.datasets.table_files import Kind, kind_of_type
from fedjax_cfl.data.datasets.table_pool import (
    Table,
    assemble_pool,
    iterate_images,
    read_columns,
)
from fedjax_cfl.errors import InputError, warn_of_file
from fedjax_cfl.types import Pool

# columns that name the user, in well-known data sets
USERS = (
    "writer_id", "user_id", "client_id", "user", "character_id", "celeb_id", "speaker_id", "subject"
)  # fmt: skip
ARRAYS = ("Array2D", "Array3D", "Array4D", "Array5D")
LISTS = ("List", "Sequence", "LargeList")
MAP = 'datasets.Dataset.map(lambda row: {{"image": row["image"]'
REMEDIES = MAP + ".resize(({width},{height}))}})", MAP.format() + '.convert("RGB")})'
PUBLISHED = "expected labels: this split is published without them"
# what a column of each role may hold, and how a message says it
ALLOWED = {
    "x": (("numbers", "lists", "images"), "numbers or images"),
    "y": (("numbers", "text"), "one label a sample, a number or text"),
    "targets": (("numbers", "lists"), "numbers, or lists of labels"),
    "client": (("numbers", "text"), "numbers or text"),
    "split": (("numbers", "text"), "numbers or text"),
    "time": (("numbers", "dates"), "numbers or dates"),
}


class Source(NamedTuple):
    """A file and what is known of its columns."""

    path: Path
    part: Part
    schema: pa.Schema
    features: dict[str, Any]


def read_pool(
    root: Path,
    parts: list[Part],
    named: Mapping[str, Any],
    for_testing: str | None,
    num_classes: int | None,
) -> Pool:
    """Returns the pool of all rows of the parts; `for_testing` is the split for testing. Columns
    that `named` has None for are chosen, as `huggingface` says. Raises InputError for what
    does not fit.
    """
    sources = list(_sources(parts))
    first = sources[0]
    x, y = named["x"] or choose_samples(first), named["y"] or choose_labels(first)
    samples = [x] if isinstance(x, str) else list(x)
    roles = {"y": y} | {
        role: named[role] for role in ("client", "time", "split") if named[role] is not None
    }
    for source in sources:
        _check_columns(source, first, [*samples, *roles.values()])
    kinds = _find_kinds(root, first, samples, roles, num_classes)
    users = [name for name in USERS if name in first.schema.names]
    if users and "client" not in roles and first.part.partition is None:
        warn_of_file(
            f"{root}: column {users[0]} may name the samples' owners and is not used:"
            f" dataset.source.client={users[0]}"
        )
    table = Table(root, [source.path for source in sources], lambda _: kinds, read_batches)
    return _make_pool(table._replace(trim=False), sources, samples, roles, for_testing, num_classes)


def _sources(parts: list[Part]) -> Iterator[Source]:
    for part in parts:
        for path in part.files:
            schema, features = read_schema(path), part.features
            inside = (schema.metadata or {}).get(b"huggingface")
            if features is None and inside is not None:
                features = read_features(path, parse_json(path, inside))
            yield Source(path, part, schema, features or {})


def choose_samples(first: Source) -> str:
    """Returns the column of the samples: the only one of images, else of arrays, else of lists of
    a fixed length. Raises InputError where that is none or several.
    """
    path, schema, features = first.path, first.schema, first.features
    kinds = {
        "images": [n for n in schema.names if _kind(features.get(n)) == "Image"],
        "arrays": [n for n in schema.names if _kind(features.get(n)) in ARRAYS],
        "lists of a fixed length": [
            name
            for name, type in zip(schema.names, schema.types, strict=True)
            if pa.types.is_fixed_size_list(type) or _fixed_length(features.get(name))
        ],
    }
    for kind, names in kinds.items():
        if len(names) > 1:
            raise InputError(
                f"{path}: columns {list_names(names)} all hold {kind}, expected"
                " dataset.source.x=NAME"
            )
        if names:
            return names[0]
    raise InputError(
        f"{path}: no column holds images or arrays, expected dataset.source.x=NAME, or [NAME, ...]"
        f" of columns of numbers; columns are {list_names(schema.names)}"
    )


def choose_labels(first: Source) -> str:
    """Returns the only column of class labels. Raises InputError where there is none or several."""
    path, there = first.path, first.schema.names
    names = [name for name in there if _kind(first.features.get(name)) == "ClassLabel"]
    if len(names) > 1:
        raise InputError(
            f"{path}: columns {list_names(names)} are {'both' if len(names) == 2 else 'all'} class"
            " labels, expected dataset.source.y=NAME"
        )
    if not names:
        raise InputError(
            f"{path}: no column is of class labels, expected dataset.source.y=NAME; columns are"
            f" {list_names(there)}"
        )
    return names[0]


def _kind(feature: Any) -> str | None:
    """Returns what a feature is, as in "Image", None where it does not say."""
    kind = feature.get("_type") if isinstance(feature, dict) else None
    return kind if isinstance(kind, str) else None


def _fixed_length(feature: Any) -> bool:
    """Returns whether a feature is of lists of one length of plain values."""
    return (
        _kind(feature) in LISTS
        and isinstance(feature.get("length"), int)
        and feature["length"] >= 0
        and _kind(feature.get("feature")) == "Value"
    )


def _class_names(source: Source, name: str) -> tuple[str, ...] | None:
    """Returns the names of a column's classes, None where it has none."""
    feature = source.features.get(name)
    if not isinstance(feature, dict) or _kind(feature) != "ClassLabel":
        return None
    names = feature.get("names")
    if names is None:
        return None
    good = isinstance(names, list) and names and all(isinstance(n, str) for n in names)
    if not good or len(set(names)) != len(names):
        raise InputError(
            f"{source.path}: column {name}: names of its classes are none, expected different texts"
        )
    return tuple(names)


def _check_columns(source: Source, first: Source, names: Sequence[str]) -> None:
    """Raises InputError for a file whose columns are not those of the first one, or lack some."""
    path, schema = source.path, source.schema
    if source.part.partition != first.part.partition and set(schema.names) != set(
        first.schema.names
    ):
        raise InputError(
            f"{path}: partition_{source.part.partition} has other columns than partition_"
            f"{first.part.partition}, expected a horizontal partition (vertical ones split columns)"
        )
    for name in names:
        count = schema.names.count(name)
        if not count:
            raise InputError(
                f"{path}: column {shorten(name)} is missing, expected one of"
                f" {list_names(schema.names)}"
            )
        if count > 1:
            raise InputError(
                f"{path}: column {shorten(name)} is there {count} times, expected once"
            )
        if (schema.field(name).type, *_essence(source, name)) != (
            first.schema.field(name).type,
            *_essence(first, name),
        ):
            raise InputError(
                f"{path}: column {name} has another type or other class names than in"
                f" {first.path}, expected equal features"
            )


def _essence(source: Source, name: str) -> tuple[Any, Any]:
    """Returns what of a column's feature must be the same in all files."""
    return _kind(source.features.get(name)), _class_names(source, name)


def _find_kinds(
    root: Path, first: Source, samples: list[str], roles: dict[str, str], num_classes: int | None
) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for role, name in [*(("x", name) for name in samples), *roles.items()]:
        type_ = first.schema.field(name).type
        kinds[name] = kind_of_type(type_)
        allowed, words = ALLOWED["targets" if role == "y" and num_classes == 0 else role]
        if kinds[name] not in allowed:
            raise InputError(f"{root}: column {name} has type {type_!s:.80}, expected {words}")
        if role == "x" and kinds[name] == "images" and len(samples) > 1:
            raise InputError(
                f"{root}: column {name} holds images, expected it as the only one of x"
            )
    return kinds


def _make_pool(
    table: Table,
    sources: Sequence[Source],
    samples: list[str],
    roles: dict[str, str],
    for_testing: str | None,
    num_classes: int | None,
) -> Pool:
    root, first, kinds = table.path, sources[0], table.find_kinds(table.shards[0])
    numbers = {f"x[{name}]": name for name in samples if kinds[name] == "numbers"}
    lists = [name for name in [*samples, roles["y"]] if kinds[name] == "lists"]
    found = read_columns(table, roles | numbers, lists, set())
    parts = {role: found[name] for role, name in roles.items()}
    names = None
    if num_classes != 0:
        parts["y"], names = _read_labels(root, first, roles["y"], parts["y"])
    if names and num_classes is not None and num_classes < len(names):
        raise InputError(
            f"{root}: num_classes={num_classes}, expected null or at least {len(names)}, as many"
            f" classes as column {roles['y']} names"
        )
    for role in ("client", "split"):
        if role in roles:
            parts[role] = _name_classes(first, roles[role], parts[role])
    if for_testing is not None or first.part.partition is not None:
        rows = [sum(map(len, table.read(path, [roles["y"]]))) for path in table.shards]
        if for_testing is not None:
            parts["split"] = np.repeat([s.part.split == for_testing for s in sources], rows)
        if first.part.partition is not None and "client" not in roles:
            parts["client"] = np.repeat(np.array([s.part.partition for s in sources]), rows)
    if kinds[samples[0]] == "images":
        stack = partial(stack_images, f"{root}: column {samples[0]}", remedies=REMEDIES)
        x = stack(iterate_images(table, samples[0]), len(parts["y"]))
        x = x[..., 0] if x.shape[-1] == 1 else x
    else:
        x = _join_samples(first, samples, found)
    pool = assemble_pool(str(root), x, parts, num_classes or (len(names) if names else num_classes))
    if pool.client_names == tuple(range(len(pool.client_names or ()))):
        pool = pool._replace(client_names=None)
    return pool._replace(class_names=names) if names else pool


def _join_samples(
    first: Source, samples: list[str], found: dict[str, np.ndarray | Words]
) -> np.ndarray:
    columns = []
    for name in samples:
        x, feature = np.asarray(found[name]), first.features.get(name)
        shape = dict(feature or {}).get("shape") if _kind(feature) in ARRAYS else None
        wanted = shape if isinstance(shape, list) else x.shape[1:]
        if len(wanted) != x.ndim - 1 or any(
            n not in (None, own) for n, own in zip(wanted, x.shape[1:], strict=True)
        ):
            raise InputError(
                f"{first.path}: column {name} has samples of shape {x.shape[1:]}, expected {shape}"
            )
        if x.ndim > 2 and len(samples) > 1:
            raise InputError(
                f"{first.path}: column {name} has samples of shape {x.shape[1:]}, expected numbers"
            )
        columns.append(x[:, None] if x.ndim == 1 else x)
    return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)


def _read_labels(
    root: Path, first: Source, column: str, y: np.ndarray | Words
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns labels [N] and the names of classes: those of the feature, those of text in sorted
    order, or None. Raises InputError for samples without a label.
    """
    if isinstance(y, Words):
        return y.number, tuple(y.words)
    names = _class_names(first, column)
    too_many = np.inf if names is None else len(names)
    if (bad := (y < 0) | (y >= too_many)).any():
        wrong, row = y[bad][0], 1 + bad.argmax()
        expected = PUBLISHED if wrong < 0 else f"expected one of its {too_many} classes"
        raise InputError(
            f"{root}: column {column} is {wrong} in row {row} of all (the first is 1), {expected}"
        )
    return y, names


def _name_classes(first: Source, column: str, values: np.ndarray | Words) -> np.ndarray | Words:
    """Returns a column of class labels as the words that they stand for, others as they are."""
    names = _class_names(first, column)
    if names is None or isinstance(values, Words):
        return values
    found, numbers = np.unique(values, return_inverse=True)
    if found[0] < 0 or found[-1] >= len(names):
        raise InputError(
            f"{first.path}: column {column} is {found[0]} .. {found[-1]}, expected 0 .."
            f" {len(names) - 1}, its classes"
        )
    return Words([names[int(i)] for i in found], numbers)
