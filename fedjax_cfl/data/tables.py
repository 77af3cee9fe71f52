"""Tables from CSV, JSON lines and Parquet, a file or a folder of them, read by pandas.

What pandas would guess is decided here: only an empty cell is missing (a user may be called NA), a
column has one type in the whole of a file, names that are there twice are refused, and dates stay
text.
"""

import os
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_cfl.data.datasets.pool import sort_names
from fedjax_cfl.data.datasets.readers import check_file, report_damage, shorten
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import clean_name

if TYPE_CHECKING:
    import pandas as pd  # takes a while, and few runs have a table

OTHERS = "; what Python reads otherwise can be given to cfl.from_frame or cfl.from_arrays"
PACKED = r"(\.(gz|bz2|zip|xz|zst))?$"  # what pandas unpacks


class Table(NamedTuple):
    """Rows of one or several files."""

    frame: "pd.DataFrame"
    name: str  # what messages call it
    files: tuple[tuple[str, int], ...] = ()  # of a folder: name and rows of each file, in order

    def describe_row(self, row: int) -> str:
        """Returns what a message calls a row, by its place in the frame, from 0 on."""
        for name, rows in self.files:
            if row < rows:
                return f"row {row + 1} of {name} (the first is 1)"
            row -= rows
        return f"row {row + 1} (the first is 1)"


def read_csv(
    path: str | Path, delimiter: str = ",", decimal: str = ".", text: Collection[str] = ()
) -> Table:
    """Reads a CSV with a line of names, or all of a folder; columns of `text` stay as they are."""
    import pandas as pd

    def read(file: str) -> "pd.DataFrame":
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

    signs = f"a CSV in UTF-8 with a line of names and cells between {delimiter!r}, see delimiter"
    return _read_each(path, "csv", signs, read)


def read_jsonl(path: str | Path) -> Table:
    """Reads a file with a JSON object in each line, or all of a folder."""
    import pandas as pd

    def read(file: str) -> "pd.DataFrame":
        frame = pd.read_json(file, lines=True, dtype=False, convert_axes=False, precise_float=True)
        return frame.set_axis(clean_columns(file, list(frame.columns)), axis=1)

    objects = "a JSON object in each line, with the same names"
    return _read_each(path, "jsonl|json|ndjson", objects, read)


def _read_each(
    path: str | Path, endings: str, expected: str, read: Callable[[str], "pd.DataFrame"]
) -> Table:
    """Reads a text file, or all of a folder."""
    files, frames = list_files(path, endings), []
    for file in files:
        check_text(file)
        with report_damage(file, f"{expected}{OTHERS}"):
            frames.append(read(file))
    return join_files(str(path), files, frames)


def read_parquet(path: str | Path) -> Table:
    """Reads a Parquet file, or all of a folder; folders KEY=VALUE are a column."""
    from pyarrow import dataset, unify_schemas

    files = list_files(path, "parquet")
    alone = not files[1:]
    if alone and "://" not in files[0]:
        check_file(files[0], b"PAR1")
    with report_damage(
        files[0] if alone else str(path), f"complete Parquet files, alike in columns{OTHERS}"
    ):
        found = dataset.dataset(
            files[0] if alone else files,
            format="parquet",
            partitioning=dataset.partitioning(flavor="hive"),
            partition_base_dir=os.path.expanduser(path),
        )
        parts = list(found.get_fragments())
        schemas = [found.schema, *(part.physical_schema for part in parts)]
        # columns of all files, each of a type that holds those of every file
        schema = unify_schemas(schemas, promote_options="permissive")
        frame = found.replace_schema(schema.remove_metadata()).to_table().to_pandas()
        frame = frame.set_axis(clean_columns(files[0], list(frame.columns)), axis=1)
        counts = [part.count_rows() for part in parts]
    return Table(frame, str(path), _count_rows(str(path), files, counts))


def check_text(file: str) -> None:
    """Raises InputError for a file that is no text, with what to do; what is packed is not looked
    into.
    """
    if "://" in file or re.search(r"\.(gz|bz2|zip|xz|zst|tar|tgz)$", file, re.IGNORECASE):
        return
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
    """Returns the rows of all files, one after another."""
    import pandas as pd

    frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    return Table(frame, name, _count_rows(name, files, list(map(len, frames))))


def _count_rows(
    name: str, files: Sequence[str], counts: Sequence[int]
) -> tuple[tuple[str, int], ...]:
    """Returns the name, in its folder, and the rows of each file; none of a single file."""
    home = os.path.expanduser(name)
    if list(files) == [home]:
        return ()
    return tuple(zip([os.path.relpath(file, home) for file in files], counts, strict=True))
