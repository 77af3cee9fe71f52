"""Several runs of one command, in numbered folders: a sweep, whose runs Hydra starts, the seeds of
`seeds=N`, which are run like it, and a grid, `vectorize=[...]`, which is trained as one program.
"""

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_cfl.cli.names import parse_override
from fedjax_cfl.cli.settings import collect_settings
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.grid import grid_points
from fedjax_cfl.runs.results import INDEX_FILE, write_text

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

    `vectorize` lists NAME=V1,V2,... Raises InputError for settings that are named wrongly.
    """
    found: dict[str, list] = {}
    for entry in config["vectorize"]:
        name, _, values = str(entry).partition("=")
        if not values or name in found:
            raise InputError(f"vectorize={name}: give {name} several values, once, as {name}=1,2")
        override = parse_override(str(entry))
        several = override.is_sweep_override()
        found[name] = list(override.sweep_iterator()) if several else [override.value()]
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
    return {name: found[name] for name in sorted(found, key=lambda name: name != "seed")}


def find_obstacle(config: dict[str, Any], axes: Mapping[str, list]) -> str | None:
    """Returns why the runs of a grid cannot be one program, None: as far as their settings say they
    can be. They may differ in numbers of a method or layer that are no counts; whether it only
    computes with them shows when it is traced.
    """
    settings = collect_settings(config)
    for name, values in axes.items():
        inside = name == "local.lr" or name.partition(".")[0] in ("algorithm", "personal")
        setting = settings.get(name) if inside else None
        numbers = [setting.check(name, value) for value in values] if setting else [None]
        if name != "seed" and not all(isinstance(number, float) for number in numbers):
            return f"they differ in {name}"
    if config["resident"] == "host":
        return "resident=host keeps their data off the devices"
    if config["evaluate"]["patience"]:
        return "each ends by a patience of its own"
    return None


def run_folders(run_dir: str | Path, grid: dict[str, list]) -> list[Path]:
    """Returns the members' directories, numbered as the runs of a sweep are."""
    return [Path(run_dir) / str(number) for number in range(len(grid_points(grid)))]
