"""Tables from CSV, JSON lines and Parquet: a file, an address, or a folder of files, by pandas.

What pandas would guess is decided here: only an empty cell is missing (a user may be called NA), a
column has one type in the whole of a file, names that are there twice are refused, and dates stay
text.
"""

import os
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn
from urllib.parse import unquote

from fedjax_cfl.data.datasets.pool import sort_names
from fedjax_cfl.data.datasets.readers import check_file, report_damage, shorten
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import clean_name

if TYPE_CHECKING:
    import pandas as pd  # takes a while, and few runs have a table

Kind = Literal["csv", "jsonl", "parquet"]
OTHERS = "; what Python reads otherwise can be given to cfl.from_frame or cfl.from_arrays"
PACKED = r"(\.(gz|bz2|zip|xz|zst))?$"  # what pandas unpacks
ENDINGS = {"csv": "csv", "jsonl": "jsonl|json|ndjson", "parquet": "parquet"}
EXPECTED = {
    "csv": "a CSV in UTF-8 with a line of names and cells between {delimiter!r}, see delimiter",
    "jsonl": "a JSON object in each line, with the same names",
    "parquet": "a complete Parquet file",
}


class Table(NamedTuple):
    """Rows of one or several files."""

    frame: "pd.DataFrame"
    name: str  # what messages call it
    files: tuple[tuple[str, int], ...] = ()  # of a folder: name and rows of each file, in order
    decimal: str = "."  # the decimal point of numbers in text
    row_names: tuple[str, ...] = ()  # columns that were an index of pandas

    def describe_row(self, row: int) -> str:
        """Returns what a message calls a row, by its place in the frame, from 0 on."""
        for name, rows in self.files:
            if row < rows:
                return f"row {row + 1} of {name} (the first is 1)"
            row -= rows
        return f"row {row + 1} (the first is 1)"

    def refuse(self, column: str, row: int, said: str, expected: str) -> NoReturn:
        """Raises InputError for the cell of a column in a row."""
        where = f"{self.name}: column {column} {said} in {self.describe_row(row)}"
        raise InputError(f"{where}, expected {expected}")


def read_table(
    kind: Kind,
    path: str | Path,
    delimiter: str = ",",
    decimal: str = ".",
    text: Collection[str] = (),
) -> Table:
    """Returns the rows of a file, or of all files of a folder, one after another; its folders
    KEY=VALUE are columns. Columns of `text` of a CSV stay as they are. Raises InputError for a file
    that cannot be read.
    """
    import pandas as pd

    def read_csv(file: str) -> "pd.DataFrame":
        # without index_col=False a row longer than the line of names would begin with an index
        cells: Any = {"sep": delimiter, "keep_default_na": False, "index_col": False}
        head = pd.read_csv(file, header=None, nrows=1, dtype=str, **cells)
        names = clean_columns(file, head.iloc[0].tolist())
        types = {name: str for name in names if name in text}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # about cells without a name, which would be lost
            return pd.read_csv(
                file, header=0, names=names, dtype=types, decimal=decimal, na_values=[""],
                low_memory=False, **cells,
            )  # fmt: skip

    def read_jsonl(file: str) -> "pd.DataFrame":
        return pd.read_json(file, lines=True, dtype=False, convert_axes=False, precise_float=True)

    read: Callable[[str], pd.DataFrame] = {
        "csv": read_csv, "jsonl": read_jsonl, "parquet": pd.read_parquet,
    }[kind]  # fmt: skip
    expected, home = EXPECTED[kind].format(delimiter=delimiter), os.path.expanduser(path)
    files, frames, row_names = list_files(path, ENDINGS[kind]), [], ()
    for file in files:
        away = "an address that answers, of " if "://" in file else ""
        if not away:
            check_kind(file, kind)
        with report_damage(file, f"{away}{expected}{OTHERS}"):
            table = clean_frame(read(file), file)
        parts = os.path.relpath(file, home).split(os.sep)[:-1]
        above = dict(part.split("=", 1) for part in parts if "=" in part)
        row_names += table.row_names
        frames.append(table.frame.assign(**{key: unquote(value) for key, value in above.items()}))
    return join_files(str(path), files, frames)._replace(decimal=decimal, row_names=row_names)


def check_kind(file: str, kind: Kind) -> None:
    """Raises InputError for a file of another kind, with what to do; what is packed is not looked
    into.
    """
    if kind == "parquet":
        check_file(file, b"PAR1")
    elif not re.search(r"\.(gz|bz2|zip|xz|zst|tar|tgz)$", file, re.IGNORECASE):
        check_file(file)
        with open(file, "rb") as start:
            if b"\0" in start.read(512):
                raise InputError(f"{file}: is no text, expected a table{OTHERS}")


def list_files(path: str | Path, endings: str) -> list[str]:
    """Returns the files of a folder, else of its folders, in order of name, those of digits as
    numbers; or the file, or address, itself. Raises InputError for a folder without any.
    """
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        return [path]
    ending = re.compile(rf"\.({endings}){PACKED}", re.IGNORECASE)
    for pattern in ("*", "**/*"):
        found = [each.relative_to(path).as_posix() for each in Path(path).glob(pattern)]
        shown = [each for each in found if not re.search(r"(^|/)[._]", each)]
        stems = {each: ending.sub("", each) for each in shown if ending.search(each)}
        if stems:
            break
    else:
        kinds = " or *.".join(endings.split("|"))
        raise InputError(f"{path}: folder holds no *.{kinds}, expected such files")
    order = {stem: place for place, stem in enumerate(sort_names(stems.values()))}
    if len(order) < len(stems):
        twice = next(stem for stem in order if list(stems.values()).count(stem) > 1)
        both = " and ".join(sorted(each for each in stems if stems[each] == twice))
        raise InputError(f"{path}: {both} have one name, expected one of them")
    return [os.path.join(path, each) for each in sorted(stems, key=lambda e: order[stems[e]])]


def clean_frame(frame: "pd.DataFrame", name: str) -> Table:
    """Returns a frame with its named index as columns, and with `clean_columns`."""
    levels = frame.index.nlevels if any(level is not None for level in frame.index.names) else 0
    if levels:
        frame = frame.reset_index(allow_duplicates=True)  # which are refused below
    names = clean_columns(name, list(frame.columns))
    return Table(frame.set_axis(names, axis=1), name, row_names=tuple(names[:levels]))


def clean_columns(name: str, columns: Sequence[Any]) -> list[str]:
    """Returns the names of columns in their one form. Raises InputError for one of two columns."""
    names = [clean_name(column) for column in columns]
    blank = [place for place, column in enumerate(names) if not column]
    for place in blank[1:]:
        names[place] = f"Unnamed: {place}"  # as pandas calls it
    if len(set(names)) < len(names):
        twice = next(column for column in names if names.count(column) > 1)
        raise InputError(
            f"{name}: column {shorten(twice)} is there {names.count(twice)} times, expected each"
            " name once"
        )
    return names


def join_files(name: str, files: Sequence[str], frames: Sequence["pd.DataFrame"]) -> Table:
    """Returns the rows of all files, one after another, and of a folder which are of which."""
    import pandas as pd

    home = os.path.expanduser(name)
    if list(files) == [home]:
        return Table(frames[0], name)
    rows = zip([os.path.relpath(file, home) for file in files], map(len, frames), strict=True)
    return Table(pd.concat(frames, ignore_index=True), name, tuple(rows))
