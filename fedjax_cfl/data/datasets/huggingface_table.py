"""The rows of a Hugging Face data set: all of its files as one pool."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedjax_cfl.data.datasets import huggingface_columns as columns
from fedjax_cfl.data.datasets.arrow_files import read_columns, read_schema
from fedjax_cfl.data.datasets.files import build_pool
from fedjax_cfl.data.datasets.huggingface_folder import Part, parse_json, read_features
from fedjax_cfl.errors import InputError, warn_of_file
from fedjax_cfl.types import Pool

# columns that name the user, in well-known data sets
USERS = (
    "writer_id", "user_id", "client_id", "user", "character_id", "celeb_id", "speaker_id", "subject"
)  # fmt: skip


class Roles(NamedTuple):
    """Which column is what; None: there is none."""

    x: list[str]
    y: str
    client: str | None
    time: str | None
    split: str | None

    @property
    def names(self) -> list[str]:
        """All columns in use, each once."""
        return list(dict.fromkeys(filter(None, [*self.x, *self[1:]])))


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
    where = str(first.path), first.schema, first.features
    x, y = named["x"] or columns.choose_samples(*where), named["y"] or columns.choose_labels(*where)
    roles = Roles(**dict(named) | {"x": [x] if isinstance(x, str) else x, "y": y})
    for source in sources:
        _check_alike(source, first, roles)
    users = [name for name in USERS if name in first.schema.names]
    if users and roles.client is None and first.part.partition is None:
        warn_of_file(
            f"{root}: column {users[0]} may name the samples' owners and is not used:"
            f" dataset.source.client={users[0]}"
        )
    return _make_pool(root, sources, roles, for_testing, num_classes)


def _sources(parts: list[Part]) -> Iterator[Source]:
    """Yields every file with its columns."""
    for part in parts:
        for path in part.files:
            schema, features = read_schema(path), part.features
            inside = (schema.metadata or {}).get(b"huggingface")
            if features is None and inside is not None:
                features = read_features(path, parse_json(path, inside))
            yield Source(path, part, schema, features or {})


def _check_alike(source: Source, first: Source, roles: Roles) -> None:
    """Raises InputError for a file whose columns are not those of the first one."""
    if source.part.partition != first.part.partition and set(source.schema.names) != set(
        first.schema.names
    ):
        raise InputError(
            f"{source.path}: partition_{source.part.partition} has other columns than partition_"
            f"{first.part.partition}, expected a horizontal partition (vertical ones split columns)"
        )
    for name in roles.names:
        if len(source.schema.get_all_field_indices(name)) != 1:
            continue  # `read_columns` says so
        same = len(first.schema.get_all_field_indices(name)) != 1 or (
            source.schema.field(name).type == first.schema.field(name).type
            and _essence(source, name) == _essence(first, name)
        )
        if not same:
            raise InputError(
                f"{source.path}: column {name} has another type or other class names than in"
                f" {first.path}, expected equal features"
            )


def _essence(source: Source, name: str) -> tuple[Any, Any]:
    """Returns what of a column's feature must be the same in all files."""
    feature = source.features.get(name)
    kind = feature.get("_type") if isinstance(feature, dict) else None
    return kind, columns.find_class_names(f"{source.path}: column {name}", feature)


def _make_pool(
    root: Path,
    sources: Sequence[Source],
    roles: Roles,
    for_testing: str | None,
    num_classes: int | None,
) -> Pool:
    """Returns the pool of all files' rows."""
    table, sizes = _read_table(root, sources, roles)
    read = columns.read_targets if num_classes == 0 else columns.read_labels
    y, names = read(table[roles.y])
    arrays: dict[str, np.ndarray] = {"y": y}
    clients = None
    if for_testing is not None:
        arrays["split"] = np.repeat([s.part.split == for_testing for s in sources], sizes)
    if roles.split is not None:
        arrays["split"] = columns.read_split(table[roles.split])
    if roles.time is not None:
        arrays["time"] = columns.read_times(table[roles.time])
    if roles.client is not None:
        arrays["client"], clients = columns.read_clients(table[roles.client])
    elif sources[0].part.partition is not None:
        arrays["client"] = np.repeat(np.array([s.part.partition for s in sources]), sizes)
    if names and num_classes is not None and num_classes < len(names):
        raise InputError(
            f"{root}: num_classes={num_classes}, expected null or at least {len(names)}, as many"
            f" classes as column {roles.y} names"
        )
    arrays["x"] = columns.read_samples(table[name] for name in roles.x)
    pool = build_pool(str(root), arrays, num_classes or (len(names) if names else num_classes))
    if clients is not None and clients != tuple(range(len(clients))):
        pool = pool._replace(client_names=clients)
    return pool._replace(class_names=names) if names else pool


def _read_table(
    root: Path, sources: Sequence[Source], roles: Roles
) -> tuple[dict[str, columns.Column], list[int]]:
    """Returns the columns of all files, one after another, and how many rows each file has."""
    tables = [read_columns(source.path, roles.names) for source in sources]
    found = {}
    for name in roles.names:
        chunks = [chunk for table in tables for chunk in table[name].chunks]
        values = pa.chunked_array(chunks, tables[0][name].type)
        feature = sources[0].features.get(name)
        found[name] = columns.Column(f"{root}: column {name}", values, feature)
    return found, [len(table[roles.y]) for table in tables]
