"""Tables of one row a sample, whose columns the user names: of a file, or a frame of pandas; and
Elec2, which is one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from typing_extensions import TypeAliasType

from fedjax_cfl.data import tables
from fedjax_cfl.data.datasets.download import require
from fedjax_cfl.data.datasets.image_files import ImageSize, Mode
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import clean_name
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, PositiveInt, Rule, checked

if TYPE_CHECKING:
    import pandas
    import pyarrow

ELEC2 = "elec2/elec.csv.gz"
ELEC2_FEATURES = ["period", "nswprice", "nswdemand", "vicprice", "vicdemand", "transfer"]
Sign = TypeAliasType(
    "Sign",
    Annotated[str, Rule("one character, or tab", lambda value: value == "tab" or len(value) == 1)],
)
Name = TypeAliasType(
    "Name", Annotated[str | int, Rule("the name of a column", lambda value: value != "")]
)
Names = TypeAliasType("Names", Name | Annotated[list[Name], Rule("a list of names", bool)])


@checked("dataset.source")
def from_frame(
    table: "pandas.DataFrame | pyarrow.Table",
    y: Names | None,
    x: Names | None = None,
    client: Name | None = None,
    split: Name | None = None,
    time: Name | None = None,
    concept: Name | None = None,
    number_text: bool = False,
    num_classes: NaturalInt | None = None,
    size: ImageSize | None = None,
    mode: Mode = "auto",
    name: str = "table",
) -> Pool:
    """Returns the samples of a table, one row a sample, whose columns are named.

    Args: `y` is the column of labels, numbers or text, or with `num_classes` 0 a column of numbers
    to regress or a list of columns of labels that are 0 or 1; None: there are no labels, and they
    are 0. `x` are those of features, None: all columns of numbers without another part; `client`
    is whose sample a row is, numbers or text; `split` is 0 or train, 1 or test; `time` when the
    sample came into being, whole numbers or dates; `concept` the true group of its client;
    `number_text` numbers features of text in sorted order; `num_classes` is as in `npz`; `size`
    and `mode` are as in `image_folder`, for a column of images; `name` is what messages call it.

    Features are float32 [N, F], or of one column: lists of one length, also nested, [N, ...], of
    which uint8 is read as x / 255; or images [N, H, W, C], as bytes of PNG, JPEG and the like.
    Labels, clients and concepts that are not all numbers are text, numbered in sorted order, and
    name the classes and clients; clients that are all digits sort as numbers. Of all names blanks
    around them are left out, accents are composed, and 1.0 is 1. Dates in ISO 8601 become whole
    seconds since the first.

    Where `x` is None, row numbers, as pandas writes them, its named index, and columns that are
    empty or hold no numbers are left out, which is said, and a column that counts the rows or that
    tells y alone is refused. Raises InputError for missing values, for text among numbers, with
    column and row, for classes that differ in a sign at their end alone, unless `num_classes`
    counts them, and for what `npz` would refuse.
    """
    given = locals()
    from fedjax_cfl.data.datasets import frame  # with pandas, which few need

    return frame.make_pool(frame.to_table(table, name), frame.describe(given))


@checked("dataset.source")
def csv(
    path: str | Path,
    y: Names | None,
    x: Names | None = None,
    client: Name | None = None,
    split: Name | None = None,
    time: Name | None = None,
    concept: Name | None = None,
    delimiter: Sign = ",",
    decimal: Literal[".", ","] = ".",
    number_text: bool = False,
    num_classes: NaturalInt | None = None,
) -> Pool:
    """Returns the samples of a CSV with a line of names, or of all *.csv of a folder in order of
    name, as `from_frame` does; plain or packed (gz, bz2, zip, xz), a file or an address.

    Args: `delimiter` is between cells; `decimal` is the decimal point of features and labels; all
    others are as in `from_frame`. Only an empty cell is a missing one. Files whose names end in
    train and test side by side are the split, where no column is.
    Raises InputError for a file that cannot be read, and for what `from_frame` would refuse.
    """
    return read_source("csv", locals())


@checked("dataset.source")
def jsonl(
    path: str | Path,
    y: Names | None,
    x: Names | None = None,
    client: Name | None = None,
    split: Name | None = None,
    time: Name | None = None,
    concept: Name | None = None,
    number_text: bool = False,
    num_classes: NaturalInt | None = None,
) -> Pool:
    """Returns the samples of a file with a JSON object in each line, or of all *.jsonl of a
    folder, as `csv` does. Raises InputError for what `csv` would refuse.
    """
    return read_source("jsonl", locals())


@checked("dataset.source")
def parquet(
    path: str | Path,
    y: Names | None,
    x: Names | None = None,
    client: Name | None = None,
    split: Name | None = None,
    time: Name | None = None,
    concept: Name | None = None,
    size: ImageSize | None = None,
    mode: Mode = "auto",
    number_text: bool = False,
    num_classes: NaturalInt | None = None,
) -> Pool:
    """Returns the samples of a Parquet file, or of all *.parquet of a folder in order of name, as
    `from_frame` does; folders KEY=VALUE are a column of that name.

    Raises InputError for a file that cannot be read, and for what `from_frame` would refuse.
    """
    return read_source("parquet", locals())


@checked("dataset.source")
def elec2(clients: PositiveInt = 48) -> Pool:
    """Returns Elec2: x [N, 6] float32 and y [N], the half-hours in order of time: the New South
    Wales electricity market, 45,312 of them (Harries, "SPLICE-2 Comparative Evaluation: Electricity
    Pricing", 1999), a real stream with drift.

    The features are the time of day, two prices, two demands and the transfer, all from 0 to 1.
    y is 1 where the price in New South Wales is above its mean of the last 24 hours. `time` is
    the number of the half-hour.

    Half-hour n belongs to client n mod `clients`: 48 are the half-hours of the day, 336 those
    of the week. The file elec2/elec.csv.gz under a data root is not downloaded. Raises
    InputError if it is missing or bad, or has fewer half-hours than clients.
    """
    (path,) = require("elec2", ELEC2)
    pool = csv(path, y="class", x=[*ELEC2_FEATURES], num_classes=2)
    number = np.arange(len(pool.y))
    if clients > len(number):
        raise InputError(
            f"dataset.source.clients={clients}: at most {len(number)}, the number of half-hours"
        )
    pool = pool._replace(client=number % clients, time=number, columns=None)
    return check_pool(pool._replace(x=pool.x.astype(np.float32)), str(path))


def read_source(kind: tables.Kind, source: dict[str, Any]) -> Pool:
    """Returns the pool of files of a kind that `source` describes, as the arguments of `csv`."""
    from fedjax_cfl.data.datasets import frame

    return frame.make_pool(_read_files(kind, source), frame.describe(source))


def read_new_samples(
    kind: Any, source: dict[str, Any], trained: Sequence[str], labels: bool
) -> tuple[Pool, np.ndarray, int]:
    """Returns the pool of new samples for a run, of files that `source` describes as those of the
    run, the row of each sample that lacks no value, and how many rows there are; `kind` is as in
    `read_source`, the others as in `frame.match_columns`.
    """
    from fedjax_cfl.data.datasets import frame

    table = _read_files(kind, source)
    used = frame.match_columns(table, frame.describe(source), trained, labels)
    read = [*trained, *(name for _, name in frame.list_roles(used))]
    whole = table.frame[read].notna().all(axis=1).to_numpy()
    rows, total = whole.nonzero()[0], len(whole)
    if 0 < rows.size < total:
        table = table._replace(frame=table.frame.iloc[rows].reset_index(drop=True), files=())
    return frame.make_pool(table, used), rows, total


def _read_files(kind: tables.Kind, source: dict[str, Any]) -> tables.Table:
    """Returns the rows of files that `source` describes; names are read as text."""
    if kind != "csv":
        return tables.read_table(kind, source["path"])
    sign = "\t" if source["delimiter"] == "tab" else source["delimiter"]
    if sign == source["decimal"]:
        raise InputError(
            f"dataset.source.delimiter={source['delimiter']}: is decimal as well; choose another"
        )
    roles = [source[role] for role in ("client", "split", "time", "concept")]
    roles += [source["y"]] if source["num_classes"] != 0 else []  # else numbers to regress
    text = [clean_name(role) for role in roles if role is not None]
    return tables.read_table(kind, source["path"], sign, source["decimal"], text)
