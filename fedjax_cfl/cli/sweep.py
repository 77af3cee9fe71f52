"""Several runs of one command, in numbered folders: a sweep, whose runs Hydra starts, the seeds of
`seeds=N`, which are run like it, and a grid, `vectorize=[...]`, which is trained as one program.
"""

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedjax_cfl.cli.names import GRID_SETTINGS
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.grid import grid_points
from fedjax_cfl.runs.results import INDEX_FILE, write_text
from fedjax_cfl.validation import check_value

# sweeps


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


# grids


def grid_axes(config: dict) -> dict[str, list]:
    """Returns the values of every setting of which a configuration has several, the seed first; {}
    if it is a single run.

    `vectorize` lists NAME=V1,V2,... Raises InputError for what cannot be vectorised.
    """
    found: dict[str, list] = {}
    for entry in config["vectorize"]:
        name, _, values = str(entry).partition("=")
        check_value("vectorize", name, Literal[tuple(GRID_SETTINGS)])
        if not values or name in found:
            raise InputError(f"vectorize={name}: give {name} several values, once, as {name}=1,2")
        found[name] = [read_number(name, value) for value in values.split(",")]
    if config["seeds"] > 1:
        if "seed" in found:
            raise InputError(
                f"seeds={config['seeds']}: seed has several values already; use one of the two"
            )
        found["seed"] = [config["seed"] + number for number in range(config["seeds"])]
    if found and config["coordinator"] is not None:
        raise InputError(
            f"coordinator={config['coordinator']}: several seeds run in one process; leave out"
            " vectorize and seeds"
        )
    patience, wrong = config["evaluate"]["patience"], ""
    if config["resident"] == "host":
        wrong = "resident=host: a grid of runs trains on data that are on the devices"
    elif patience:
        wrong = f"evaluate.patience={patience}: a grid of runs ends as one"
    if config["vectorize"] and wrong:
        raise InputError(f"{wrong}; leave out vectorize")
    return {name: found[name] for name in sorted(found, key=lambda name: name != "seed")}


def read_number(name: str, value: str) -> int | float:
    """Returns a value of a vectorised setting. Raises InputError for one that is no number."""
    kind, words = (int, "a whole number") if name == "seed" else (float, "a number")
    try:
        return kind(value)
    except ValueError:
        raise InputError(f"{name}={value}: must be {words}") from None


def run_folders(run_dir: str | Path, grid: dict[str, list]) -> list[Path]:
    """Returns the members' directories, numbered as the runs of a sweep are."""
    return [Path(run_dir) / str(number) for number in range(len(grid_points(grid)))]
