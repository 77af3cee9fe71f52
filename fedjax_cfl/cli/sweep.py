"""The folder of a sweep: what varies between its runs, which are numbered folders in it."""

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_cfl.runs.results import write_text

INDEX_FILE = "index.csv"


class Sweep(NamedTuple):
    """Where the runs of a sweep go, and what each of them differs in."""

    folder: Path
    points: list[dict[str, str]]  # of run 0, 1, ...: the settings that vary


def list_points(choices: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Returns the settings in which each run of a sweep differs, in the order in which
    Hydra numbers them: the last setting changes fastest.

    `choices` holds the values of every setting, each as KEY=VALUE.
    """
    varying = [options for options in choices if len(options) > 1]
    points = [[option.partition("=") for option in point] for point in itertools.product(*varying)]
    return [{name: value for name, _, value in point} for point in points]


def write_index(folder: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Writes index.csv: the folder of every run and the settings in which it differs."""
    write_text(folder / INDEX_FILE, format_index(points))


def format_index(points: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of index.csv."""
    text = io.StringIO()
    rows = csv.DictWriter(text, ["run", *points[0]], lineterminator="\n")
    rows.writeheader()
    rows.writerows({"run": number} | dict(point) for number, point in enumerate(points))
    return text.getvalue()


def holds_sweep(folder: Path, points: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a folder has been begun as the sweep of these points."""
    index = folder / INDEX_FILE
    return index.is_file() and index.read_bytes() == format_index(points).encode()
