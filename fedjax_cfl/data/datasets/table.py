"""Tables of one row a sample, whose columns the user names: CSV and Parquet."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fedjax_cfl.data.datasets.image_files import IMAGE_SIZE, Mode, stack_images
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, Rule, check_arguments, or_none

SIGN = Rule(
    "one character, or tab",
    lambda value: value == "tab" or (isinstance(value, str) and len(value) == 1),
)


def _is_name(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and str(value) != ""


NAME = Rule("the name of a column", _is_name)
NAMES = Rule(
    "the name of a column, or a list of names",
    lambda value: (
        _is_name(value) or (isinstance(value, list | tuple) and all(map(_is_name, value)))
    ),
)


Names = Annotated[
    list[str] | str, Rule(NAMES.allowed, lambda value: value != [] and NAMES.holds(value))
]
OptionalName = Annotated[str | None, or_none(NAME)]
OptionalNames = Annotated[list[str] | str | None, or_none(NAMES)]


def csv(
    path: str | Path,
    y: Names,
    x: OptionalNames = None,
    client: OptionalName = None,
    split: OptionalName = None,
    time: OptionalName = None,
    concept: OptionalName = None,
    delimiter: Annotated[str, SIGN] = ",",
    decimal: Literal[".", ","] = ".",
    number_text: bool = False,
    num_classes: NaturalInt | None = None,
) -> Pool:
    """Returns the samples of a CSV with a line of names, one row a sample, or of all *.csv of a
    folder; plain or gzipped, in UTF-8.

    Args: `y` is the column of labels, numbers or text, or with `num_classes` 0 a list of columns of
    labels that are 0 or 1; `x` those of features, None: all columns of
    numbers without another part; `client` is whose sample a row is, numbers or text; `split` is 0
    or train, 1 or test; `time` when the sample came into being, whole numbers or dates; `concept`
    the true group of its client; `delimiter` is between cells; `decimal` is the decimal point of
    features and labels; `number_text` numbers features of text in sorted order; `num_classes` is
    as in `npz`. From Python `y` may be None: there are no labels, and they are 0.
    Features are float32 [N, F]. Labels, clients and concepts that are not all numbers are text,
    numbered in sorted order, and name the classes and clients; clients that are all digits sort as
    numbers. Dates in ISO 8601 become whole seconds since the first.
    Raises InputError for missing values, for text among numbers, with column and row, and for what
    `npz` would refuse.
    """
    check_arguments(csv, {**locals(), "y": "no labels" if y is None else y}, "dataset.source")
    from fedjax_cfl.data.datasets import table_files, table_pool  # with pyarrow, which few need

    sign = "\t" if delimiter == "tab" else delimiter
    if sign == decimal:
        raise InputError(
            f"dataset.source.delimiter={delimiter}: is decimal as well; choose another"
        )
    root = Path(os.path.expanduser(path))
    table = table_pool.Table(
        root,
        table_files.list_shards(root, (".csv", ".csv.gz")),
        partial(table_files.find_csv_kinds, delimiter=sign, decimal=decimal),
        partial(table_files.read_csv, delimiter=sign),
        decimal,
    )
    columns = table_pool.Columns(y, x, client, split, time, concept)
    return table_pool.read_pool(table, columns, number_text, num_classes)


def parquet(
    path: str | Path,
    y: Names,
    x: OptionalNames = None,
    client: OptionalName = None,
    split: OptionalName = None,
    time: OptionalName = None,
    concept: OptionalName = None,
    size: Annotated[list[int] | None, IMAGE_SIZE] = None,
    mode: Mode = "auto",
    number_text: bool = False,
    num_classes: NaturalInt | None = None,
) -> Pool:
    """Returns the samples of a Parquet file, one row a sample, or of all *.parquet of a folder in
    order of name.

    Args: `size` and `mode` are as in `image_folder`, for a column of images; all others are as in
    `csv`.
    Features are float32 [N, F], or of one column: lists of one length, also nested, [N, ...], of
    which uint8 is read as x / 255; or images [N, H, W, C], as bytes of PNG, JPEG and the like.
    Types that extensions of Arrow add are not used, only their storage.
    Raises InputError for what `csv` and `image_folder` would refuse.
    """
    check_arguments(parquet, {**locals(), "y": "no labels" if y is None else y}, "dataset.source")
    from fedjax_cfl.data.datasets import table_files, table_pool  # with pyarrow, which few need

    root = Path(os.path.expanduser(path))
    table = table_pool.Table(
        root,
        table_files.list_shards(root, (".parquet",)),
        table_files.find_parquet_kinds,
        table_files.read_parquet,
    )
    images = partial(stack_images, str(path), size=size, mode=mode)
    columns = table_pool.Columns(y, x, client, split, time, concept)
    return table_pool.read_pool(table, columns, number_text, num_classes, images)
