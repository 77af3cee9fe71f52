"""The pool of a table: which column is what, and the traps of real files.

What a user names in `x` is taken as it is; where he does not, columns that are hardly features are
left out, which is said, or refused.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedjax_cfl.data.datasets import frame_cells as cells
from fedjax_cfl.data.datasets.files import build_pool, count_seconds, number_clients
from fedjax_cfl.data.datasets.pool import (
    name_clients,
    number_names,
    number_owners,
    refuse_gaps,
)
from fedjax_cfl.data.datasets.readers import list_names, shorten
from fedjax_cfl.data.tables import OTHERS, Table, clean_columns
from fedjax_cfl.errors import InputError, suggest_nearest, warn_of_file
from fedjax_cfl.formatting import clean_name
from fedjax_cfl.types import Pool

ROLES = ("y", "client", "split", "time", "concept")
SPLITS = {"train": 0, "training": 0, "test": 1, "testing": 1, "0": 0, "1": 1}
SIDE = re.compile(r"(?<![a-z])(train|test)(ing)?(?![a-z])", re.IGNORECASE)  # of a file's name
# row numbers as pandas and Arrow write them, and what people call them
WRITTEN = re.compile(r"|unnamed: \d+(\.\d+)*|__index_level_\d+__", re.IGNORECASE)
COUNTER = re.compile(r"(row|sample)?[ _]?(id|idx|index|no|nr|number)|level_\d+|row", re.IGNORECASE)
ROWS = 20  # in fewer rows anything may count them or tell the label, by chance
SAMPLE = 2000  # rows that are looked at first


class Columns(NamedTuple):
    """Which column of a table is what; columns without a part are not read."""

    # None: the table has no labels, and they are 0; several: each is a label that is 0 or 1
    y: list[str] | str | None
    x: list[str] | str | None = None  # None: all columns that hold features
    client: str | None = None
    split: str | None = None
    time: str | None = None
    concept: str | None = None


def describe(source: dict[str, Any]) -> tuple[Columns, cells.Reading]:
    """Returns which column is what, and how cells are read, by arguments as of `table.csv`."""
    names = [name for name in cells.Reading._fields if name in source]
    columns = Columns(*(source[role] for role in Columns._fields))
    return columns, cells.Reading(**{name: source[name] for name in names})


def to_table(table: Any, name: str) -> Table:
    """Returns a DataFrame of pandas or a table of Arrow, with its named index as columns."""
    if hasattr(table, "to_pandas"):
        schema = getattr(table, "schema", None)
        if hasattr(schema, "remove_metadata"):  # else pandas' index would leave the columns
            table = table.replace_schema_metadata(None)
        table = table.to_pandas()
    if not isinstance(table, pd.DataFrame):
        said = type(table).__name__
        raise InputError(f"{name}: is a {said}, expected a pandas.DataFrame or a pyarrow.Table")
    if any(level is not None for level in table.index.names):
        table = table.reset_index()
    return Table(table.set_axis(clean_columns(name, list(table.columns)), axis=1), name)


def make_pool(table: Table, columns: Columns, reading: cells.Reading) -> Pool:
    """Returns the checked pool of a table. Raises InputError, with column and row, for what does
    not fit.
    """
    path, frame = table.name, table.frame
    if not len(frame):
        raise InputError(f"{path}: table has no rows, expected one a sample")
    several = list(map(clean_name, columns.y)) if isinstance(columns.y, list | tuple) else []
    if several and reading.num_classes != 0:
        raise InputError(
            f"{path}: y={several} are several columns, expected one; of labels that are 0 or 1 use"
            " task=multilabel, in Python num_classes=0"
        )
    named = columns._asdict() | ({"y": None} if several else {})
    roles = {role: clean_name(named[role]) for role in ROLES if named[role] is not None}
    roles |= {f"y[{place}]": name for place, name in enumerate(several)}
    features = choose_features(table, columns.x, roles, reading)
    parts = {role: cells.read_part(table, role, name, reading) for role, name in roles.items()}
    if several:
        parts["y"] = np.stack([parts.pop(f"y[{place}]") for place in range(len(several))], axis=1)
    if "split" not in roles and (test := find_sides(table)) is not None:
        parts["split"] = test
    kind = cells.find_kind(frame[features[0]])
    if kind == "images":
        x = cells.read_images(table, features[0], reading)
    elif kind == "lists":
        x = cells.read_lists(table, features[0])
    else:
        # what float32 loses of them is for `check_pool`
        x = np.stack(
            [cells.read_feature(table, name, reading) for name in features], 1, dtype=float
        )
    pool = assemble_pool(path, x, parts, reading)
    return pool if kind in ("images", "lists") else pool._replace(columns=tuple(features))


# which column is what


def choose_features(
    table: Table, x: Sequence[str] | str | None, roles: dict[str, str], reading: cells.Reading
) -> list[str]:
    """Returns the columns of features. Raises InputError for columns that are not there, that
    have two parts, or that hold no features.
    """
    path, there = table.name, list(table.frame.columns)
    given = None if x is None else list(map(clean_name, _list(x)))
    named = [*roles.items(), *(("x", name) for name in given or ())]
    refuse_absent(table, named)
    for _, name in named:
        if [other for _, other in named].count(name) > 1:
            twice = ", ".join(other for other, same in named if same == name)
            raise InputError(f"{path}: column {name} is {twice}, expected one part each")
    rest = [name for name in there if name not in roles.values()] if given is None else given
    kinds: dict[str, cells.Kind] = {name: cells.find_kind(table.frame[name]) for name in rest}
    allowed = ("numbers", "text") if reading.number_text else ("numbers",)
    features = given
    if features is None:
        features = find_features(table, kinds, allowed)
        if "y" in roles and reading.num_classes != 0:
            refuse_label_again(table, features, roles["y"], kinds)
    if not features:
        raise InputError(f"{path}: no column of features is left, expected some: name x")
    for name in features:
        if kinds[name] in ("lists", "images") and len(features) > 1:
            raise InputError(
                f"{path}: column {name} holds {kinds[name]}, expected it as the only one of x"
            )
        if kinds[name] == "dates":
            raise InputError(f"{path}: column {name} holds dates, expected numbers: name it time")
        if kinds[name] == "others":
            raise InputError(
                f"{path}: column {name} holds others, expected numbers, lists or bytes of images"
            )
    return features


def refuse_absent(table: Table, named: Iterable[tuple[str, str]]) -> None:
    """Raises InputError for a column that is not there; `named` are (role, column)."""
    there = list(table.frame.columns)
    for role, name in named:
        if name not in there:
            raise InputError(
                f"{table.name}: {role}={name} is not there{describe_columns(name, there)}"
            )


def match_columns(table: Table, columns: Columns, trained: Sequence[str], labels: bool) -> Columns:
    """Returns which column of a table of new samples is what, for a run that was `trained` on
    features of these names; with False `labels` there are none, and times and concepts are not
    read.

    Raises InputError where a column is missing, or where there is one more that the run, whose x
    was not named, would have been trained on.
    """
    there = list(table.frame.columns)
    used = columns._replace(y=columns.y if labels else None, time=None, concept=None)
    roles = [(role, clean_name(name)) for role in ROLES for name in _list(getattr(used, role))]
    refuse_absent(table, roles)
    for name in trained:
        if name not in there:
            rest = [each for each in there if each not in trained]
            raise InputError(
                f"{table.name}: column {name} is missing, which the run was trained on"
                f"{describe_columns(name, rest or there)}"
            )
    known = {clean_name(name) for each in columns for name in _list(each)} | {*trained}
    for name in there if columns.x is None else ():
        if name in known or WRITTEN.fullmatch(name) or COUNTER.fullmatch(name):
            continue
        if cells.find_kind(table.frame[name]) == "numbers":
            raise InputError(
                f"{table.name}: column {name} is not one that the run was trained on"
                f"{suggest_nearest(name, trained)}, expected {list_names(list(trained))} alone"
            )
    return used._replace(x=list(trained))


def _list(names: Sequence[str] | str | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str | int) else list(names)


def describe_columns(name: str, there: list[str]) -> str:
    """Returns the rest of a message about a column that is not there."""
    hint = f": is it the delimiter?{OTHERS}" if len(there) == 1 else suggest_nearest(name, there)
    if not hint and any(re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", other) for other in there):
        hint = ": has the file no line of names?"
    return f", expected one of {list_names(there)}{hint}"


def find_features(table: Table, kinds: dict[str, cells.Kind], allowed: Sequence[str]) -> list[str]:
    """Returns the columns of features of a table whose x is not named: of the `allowed` kinds and
    no row numbers, or the one of lists or images. Says which columns are left out.
    """
    empty = [name for name in kinds if not name and table.frame[name].isna().all()]
    counters = [name for name in kinds if name not in empty and _counts_rows(table, name)]
    rest = [name for name in kinds if name not in empty + counters]
    features = [name for name in rest if kinds[name] in allowed]
    whole = [name for name in rest if kinds[name] in ("lists", "images")]
    if whole and (features or len(whole) > 1):
        raise InputError(
            f"{table.name}: columns {list_names([*whole, *features])} could be the features,"
            " expected x=NAME or a list of names"
        )
    left = [name for name in rest if name not in features + whole]
    said = []
    if left:
        said = [f"columns {', '.join(map(shorten, left[:9]))} hold no numbers and are not used"]
    if counters:
        said += [f"columns {', '.join(map(shorten, counters[:9]))} are row numbers and not used"]
    if said:
        hint = ", or set number_text=true" if left else ""
        warn_of_file(f"{table.name}: {'; '.join(said)}; name the features in x{hint}")
    return features or whole


def _counts_rows(table: Table, name: str) -> bool:
    """Returns whether a column numbers the rows of each file. Raises InputError where it may as
    well be meant: it has the name of a feature and counts 0, 1, 2, ... or 1, 2, 3, ...
    """
    if WRITTEN.fullmatch(name):
        return True
    column = table.frame[name]
    if not pd.api.types.is_numeric_dtype(column.dtype) or pd.api.types.is_bool_dtype(column.dtype):
        return False
    values = column.to_numpy(float, na_value=np.nan)
    files = np.split(values, np.cumsum([rows for _, rows in table.files], dtype=int)[:-1])
    if COUNTER.fullmatch(name):
        return all(
            (own == np.floor(own)).all() and np.unique(own).size == own.size for own in files
        )
    counts = all((np.diff(own) == 1).all() and own[:1] in (0, 1) for own in files)
    if len(values) < ROWS or not counts:
        return False
    raise InputError(
        f"{table.name}: column {name} counts the rows, {values[0]:g}, {values[1]:g}, ..., expected"
        " a feature: leave it out of x=[...], or name it there if it is one"
    )


def refuse_label_again(
    table: Table, features: Sequence[str], y: str, kinds: dict[str, cells.Kind]
) -> None:
    """Raises InputError for a column that tells the class alone: each of its values, which are no
    more than a few, comes with one class.
    """
    scalars = [name for name in features if kinds[name] in ("numbers", "text")]
    if len(table.frame) < ROWS or cells.find_kind(table.frame[y]) not in ("numbers", "text"):
        return
    sample = table.frame.sample(min(SAMPLE, len(table.frame)), random_state=0)
    for name in scalars:
        for rows in (sample, table.frame):
            pairs = rows[[name, y]].drop_duplicates()
            values, classes = pairs[name].nunique(), pairs[y].nunique()
            if not 1 < classes <= values == len(pairs) <= max(len(rows) // 5, 2):
                break
        else:
            raise InputError(
                f"{table.name}: column {name} tells y alone (each of its {values} values comes with"
                " one label), expected features: leave it out of x=[...], or name it there if it"
                " is one"
            )


def find_sides(table: Table) -> np.ndarray | None:
    """Returns which rows are for testing [N], 1, as names of files say that are NAME_train and
    NAME_test side by side; None: they do not. Raises InputError where other files are beside them.
    """
    names = [name for name, _ in table.files]
    sides = [{found.lower() for found, _ in SIDE.findall(name)} for name in names]
    stems = [re.sub(r"\d+", "", SIDE.sub("*", name)).lower() for name in names]
    pairs = list(zip(stems, sides, strict=True))
    if not any((stem, {"train"}) in pairs and (stem, {"test"}) in pairs for stem in stems):
        return None
    if other := [name for name, side in zip(names, sides, strict=True) if len(side) != 1]:
        raise InputError(
            f"{table.name}: files are for training and for testing, by their names, and"
            f" {list_names(other)} neither, expected split=COLUMN, or another folder for it"
        )
    test = [side == {"test"} for side in sides]
    said = list_names([name for name, mine in zip(names, test, strict=True) if mine])
    warn_of_file(f"{table.name}: rows of {said} are for testing, as the files' names say")
    return np.repeat(test, [rows for _, rows in table.files]).astype(np.int32)


# the pool


def assemble_pool(path: str, x: np.ndarray, parts: dict[str, Any], reading: cells.Reading) -> Pool:
    """Returns the checked pool of features and the other parts of a table."""
    none = np.zeros(len(x), np.int64)  # of a table without labels
    y, class_names = _to_numbers(path, "y", parts.get("y", none), reading.decimal)
    if class_names and reading.num_classes is None:
        refuse_stray_signs(path, class_names)
    arrays: dict[str, Any] = {"x": x, "y": y}
    client_names = None
    client = arrays["client"] = parts.get("client")
    if isinstance(client, tuple):
        words, number = client
        refuse_gaps(path, "client", words, number)
        names, order = number_names(words)
        client_names, arrays["client"] = name_clients(names), order[number]
    if "split" in parts:
        arrays["split"] = _read_split(path, parts["split"])
    if (time := parts.get("time")) is not None:
        arrays["time"] = count_seconds(path, time) if time.dtype.kind == "M" else time
    if "concept" in parts:
        concept, _ = _to_numbers(path, "concept", parts["concept"])
        arrays["concept"] = _concept_of_clients(path, arrays["client"], client_names, concept)
    there = {name: array for name, array in arrays.items() if array is not None}
    pool = build_pool(path, there, reading.num_classes)
    if class_names is not None:
        pool = pool._replace(class_names=class_names)
    if client_names is None or client_names == tuple(range(len(client_names))):
        return pool
    return pool._replace(client_names=client_names)


def _to_numbers(
    path: str, role: str, part: Any, decimal: str = "."
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns a part as numbers [N], and the words that they stand for, None for numbers."""
    if not isinstance(part, tuple):
        return part, None
    words, number = part
    plain = words if decimal == "." else [cells.with_point(word, decimal) for word in words]
    refuse_gaps(path, role, plain, number)
    values = pd.to_numeric(pd.Series(plain, dtype=str), errors="coerce").to_numpy(np.float64)
    if np.isnan(values).any():
        return number, tuple(words)
    whole = (values == np.floor(values)).all() and (np.abs(values) < 2**53).all()
    return (values.astype(np.int64) if whole else values)[number], None


def refuse_stray_signs(path: str, names: Sequence[str]) -> None:
    """Raises InputError for two classes that differ in case, blanks, or a sign at the end alone."""
    known: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"\s+", " ", name).strip(" .,;:'\"")
        plain = plain.casefold() if len(plain) > 1 else plain  # letters are classes of both cases
        other = known.setdefault(plain or name, name)
        if other != name:
            raise InputError(
                f"{path}: classes {shorten(other)} and {shorten(name)} look like one, expected"
                f" one spelling; if they are two, set num_classes={len(names)}"
            )


def _read_split(path: str, part: Any) -> np.ndarray:
    if not isinstance(part, tuple):
        return part
    words, number = part
    for place, word in enumerate(words):
        if word.lower() not in SPLITS:
            row = int((number == place).argmax())
            raise InputError(
                f"{path}: split is {shorten(word)} in sample {row}, expected train or test,"
                " or 0 or 1: name it so, or leave the rows out"
            )
    return np.array([SPLITS[word.lower()] for word in words])[number]


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
