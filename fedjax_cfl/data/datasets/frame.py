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
from fedjax_cfl.data.datasets.files import build_pool, number_clients
from fedjax_cfl.data.datasets.image_files import Mode
from fedjax_cfl.data.datasets.pool import NUMBER, number_names
from fedjax_cfl.data.datasets.readers import list_names, shorten
from fedjax_cfl.data.tables import OTHERS, Table, clean_frame
from fedjax_cfl.errors import InputError, suggest_nearest, warn_of_file
from fedjax_cfl.formatting import clean_name
from fedjax_cfl.types import Pool

ROLES = ("y", "client", "split", "time", "concept")
SIDE = re.compile(r"(?<![a-z])(train|test)(ing)?(?![a-z])", re.IGNORECASE)  # of a file's name
# row numbers as pandas and Arrow write them, and what people call them
WRITTEN = re.compile(r"|unnamed: \d+(\.\d+)*|__index_level_\d+__", re.IGNORECASE)
COUNTER = re.compile(r"(row|sample)?[ _]?(id|idx|index|no|nr|number)|level_\d+|row", re.IGNORECASE)
EMPTY, WORDS = "are empty and", "hold no numbers and are"  # why columns are not used
ROWS = 20  # in fewer rows anything may count them or tell the label, by chance
SAMPLE = 2000  # rows that are looked at first


class Source(NamedTuple):
    """Which column of a table is what, and how cells are read, as the arguments of
    `table.from_frame` and `table.csv`; columns without a part are not read.
    """

    # None: the table has no labels, and they are 0; several: each is a label that is 0 or 1
    y: Sequence[str] | str | None
    x: Sequence[str] | str | None = None  # None: all columns that hold features
    client: str | None = None
    split: str | None = None
    time: str | None = None
    concept: str | None = None
    number_text: bool = False
    num_classes: int | None = None
    size: list[int] | None = None
    mode: Mode = "auto"


def describe(arguments: dict[str, Any]) -> Source:
    """Returns what the arguments of `table.csv` and its kin say of columns and cells."""
    return Source(**{name: arguments[name] for name in Source._fields if name in arguments})


def to_table(table: Any, name: str) -> Table:
    """Returns a DataFrame of pandas or a table of Arrow, see `clean_frame`."""
    if hasattr(table, "to_pandas"):
        table = table.to_pandas()
    if not isinstance(table, pd.DataFrame):
        said = type(table).__name__
        raise InputError(f"{name}: is a {said}, expected a pandas.DataFrame or a pyarrow.Table")
    return clean_frame(table, name)


def make_pool(table: Table, source: Source) -> Pool:
    """Returns the checked pool of a table. Raises InputError, with column and row, for what does
    not fit.
    """
    path, frame = table.name, table.frame
    if not len(frame):
        raise InputError(f"{path}: table has no rows, expected one a sample")
    several = isinstance(source.y, list | tuple)
    if several and source.num_classes != 0:
        raise InputError(
            f"{path}: y={source.y} are several columns, expected one; of labels that are 0 or"
            " 1 use task=multilabel, in Python num_classes=0"
        )
    features = choose_features(table, source)
    of_y = cells.read_targets if source.num_classes == 0 else cells.read_names
    readers = {"time": cells.read_times, "y": of_y}
    read = [
        (role, readers.get(role, cells.read_names)(table, name))
        for role, name in list_roles(source)
    ]
    arrays = dict(read)
    if several:
        arrays["y"] = np.stack([values for role, values in read if role == "y"], axis=1)
    arrays.setdefault("y", np.zeros(len(frame), np.int64))
    if "split" not in arrays and (test := find_sides(table)) is not None:
        arrays["split"] = test
    if "concept" in arrays and "client" in arrays:
        arrays["concept"] = _concept_of_clients(path, arrays["client"], arrays["concept"])
    kind = cells.find_kind(frame[features[0]])
    if kind == "images":
        arrays["x"] = cells.read_images(table, features[0], source.size, source.mode)
    elif kind == "lists":
        arrays["x"] = cells.read_lists(table, features[0])
    else:
        columns = [cells.read_feature(table, name, source.number_text) for name in features]
        arrays["x"] = np.stack(columns, 1, dtype=float)  # what float32 loses is for `check_pool`
    pool = build_pool(path, arrays, source.num_classes)
    return pool if kind in ("images", "lists") else pool._replace(columns=tuple(features))


def _concept_of_clients(path: str, client: np.ndarray, concept: np.ndarray) -> np.ndarray:
    """Returns the concept of each client [K], in the order of their ids, from that of their
    samples [N]. Raises InputError for a client with two.
    """
    _, group = number_names(path, "concept", concept)
    _, number = number_clients(path, client, len(group))
    first = group[np.unique(number, return_index=True)[1]]
    other = first[number] != group
    if other.any():
        sample = int(other.argmax())
        raise InputError(
            f"{path}: concept changes within client {clean_name(client[sample])}, first in sample"
            f" {sample}, expected one of each client"
        )
    return first


# which column is what


def choose_features(table: Table, source: Source) -> list[str]:
    """Returns the columns of features. Raises InputError for columns that are not there, that have
    two parts, or that hold no features.
    """
    path, there = table.name, list(table.frame.columns)
    given = None if source.x is None else list(map(clean_name, _list(source.x)))
    named = [*list_roles(source), *(("x", name) for name in given or ())]
    refuse_absent(table, named)
    for _, name in named:
        if len(twice := [other for other, same in named if same == name]) > 1:
            raise InputError(f"{path}: column {name} is {', '.join(twice)}, expected one part each")
    used = [name for _, name in list_roles(source)]
    rest = [name for name in there if name not in used] if given is None else given
    kinds: dict[str, cells.Kind] = {name: cells.find_kind(table.frame[name]) for name in rest}
    features = given
    if features is None:
        features = find_features(table, kinds, source.number_text)
        if source.y is not None and source.num_classes != 0:
            refuse_label_again(table, features, clean_name(source.y))
    if not features:
        raise InputError(f"{path}: no column of features is left, expected some: name x")
    for name in features:
        if kinds[name] in ("lists", "images") and len(features) > 1:
            raise InputError(
                f"{path}: column {name} holds {kinds[name]}, expected it as the only one of x"
            )
        if kinds[name] in ("dates", "others"):
            hint = "numbers: name it time" if kinds[name] == "dates" else "numbers, lists or images"
            raise InputError(f"{path}: column {name} holds {kinds[name]}, expected {hint}")
    return features


def refuse_absent(table: Table, named: Iterable[tuple[str, str]]) -> None:
    """Raises InputError for a column that is not there; `named` are (role, column)."""
    there = list(table.frame.columns)
    for role, name in named:
        if name not in there:
            said = describe_columns(name, there)
            raise InputError(f"{table.name}: {role}={name} is not there{said}")


def match_columns(table: Table, source: Source, trained: Sequence[str], labels: bool) -> Source:
    """Returns which column of a table of new samples is what, for a run that was `trained` on
    features of these names; with False `labels` there are none, and times, concepts and other
    columns are not read. Raises InputError where a column is missing.
    """
    there = list(table.frame.columns)
    used = source._replace(y=source.y if labels else None, time=None, concept=None)
    refuse_absent(table, list_roles(used))
    for name in trained:
        if name not in there:
            rest = [each for each in there if each not in trained]
            raise InputError(
                f"{table.name}: column {name} is missing, which the run was trained on"
                f"{describe_columns(name, rest or there)}"
            )
    return used._replace(x=list(trained))


def list_roles(source: Source) -> list[tuple[str, str]]:
    """Returns (role, column) of all columns that are named, but for the features."""
    return [(role, clean_name(name)) for role in ROLES for name in _list(getattr(source, role))]


def _list(names: Sequence[str] | str | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str | int) else list(names)


def describe_columns(name: str, there: list[str]) -> str:
    """Returns the rest of a message about a column that is not there."""
    hint = f": is it the delimiter?{OTHERS}" if len(there) == 1 else suggest_nearest(name, there)
    if not hint and any(map(NUMBER.fullmatch, there)):
        hint = ": has the file no line of names?"
    return f", expected one of {list_names(there)}{hint}"


def find_features(table: Table, kinds: dict[str, cells.Kind], number_text: bool) -> list[str]:
    """Returns the columns of features of a table whose x is not named: of numbers (or text, with
    `number_text`) that are no row numbers or index, or the one of lists or images. Says which
    columns are left out.
    """
    allowed = ("numbers", "text") if number_text else ("numbers",)
    groups: dict[str, list[str]] = {"": []}  # by why they are left out
    for name, kind in kinds.items():
        if table.frame[name].isna().all():
            why = EMPTY
        elif name in table.row_names:
            why = "are the index and"
        elif _counts_rows(table, name):
            why = "are row numbers and"
        else:
            why = "" if kind in (*allowed, "lists", "images") else WORDS
        if name or why != EMPTY:  # a delimiter more at the end of each line is not worth a word
            groups.setdefault(why, []).append(name)
    taken = groups.pop("")
    features = [name for name in taken if kinds[name] in allowed]
    whole = [name for name in taken if name not in features]
    if whole and (features or len(whole) > 1):
        raise InputError(
            f"{table.name}: columns {list_names([*whole, *features])} could be the features,"
            " expected x=NAME or a list of names"
        )
    words = {why: ", ".join(map(shorten, names[:9])) for why, names in groups.items()}
    said = [f"columns {names} {why} not used" for why, names in words.items()]
    if said:
        hint = "; name the features in x" if {*groups} - {EMPTY} else ""
        hint += ", or set number_text=true" if WORDS in groups else ""
        warn_of_file(f"{table.name}: {'; '.join(said)}{hint}")
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
        return all((own == np.floor(own)).all() and pd.Index(own).is_unique for own in files)
    counts = all((np.diff(own) == 1).all() and own[:1] in (0, 1) for own in files)
    if len(values) < ROWS or not counts:
        return False
    raise InputError(
        f"{table.name}: column {name} counts the rows, {values[0]:g}, {values[1]:g}, ..., expected"
        " a feature: leave it out of x=[...], or name it there if it is one"
    )


def refuse_label_again(table: Table, features: Sequence[str], y: str) -> None:
    """Raises InputError for a column that tells the class alone: each of its values, which are no
    more than a few, comes with one class.
    """
    scalar = ("numbers", "text")
    if len(table.frame) < ROWS or cells.find_kind(table.frame[y]) not in scalar:
        return
    sample = table.frame.sample(min(SAMPLE, len(table.frame)), random_state=0)

    def tells(rows: pd.DataFrame, name: str) -> bool:
        pairs = rows[[name, y]].drop_duplicates()
        values, classes = pairs[name].nunique(), pairs[y].nunique()
        return 1 < classes <= values == len(pairs) <= max(len(rows) // 5, 2)

    for name in features:
        scalars = cells.find_kind(table.frame[name]) in scalar
        if scalars and tells(sample, name) and tells(table.frame, name):
            raise InputError(
                f"{table.name}: column {name} tells y alone (each of its"
                f" {table.frame[name].nunique()} values comes with one label), expected features:"
                " leave it out of x=[...], or name it there if it is one"
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
