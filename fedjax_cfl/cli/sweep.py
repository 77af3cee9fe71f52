"""Several runs of one command, in numbered folders: a sweep, whose runs Hydra starts, the seeds of
`seeds=N`, which are run like it, and a grid, `vectorize=[...]`, which is trained as one program.
"""

import csv
import io
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_cfl.cli.names import Line, parse_override, text_of
from fedjax_cfl.cli.settings import collect_settings, grid_axes
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.results import INDEX_FILE, METRICS_FILE, write_text
from fedjax_cfl.runs.run_dir import check_run_dir, make_dir, refuse_links
from fedjax_cfl.runs.session import grid_points
from fedjax_cfl.validation import check


def check_folders(config: dict[str, Any]) -> None:
    """Raises InputError for a directory that a run, or those of a grid, cannot be written to."""
    folder, axes = Path(str(config["run_dir"])), grid_axes(config)
    for path in run_folders(folder, axes) if axes else [folder]:
        check_run_dir(str(path), config["resume"])
    if axes and (folder / METRICS_FILE).exists():
        raise InputError(f"run_dir={folder}: holds one run; choose another")


# sweeps


def begin_sweep(line: Line) -> tuple[Path, list[str]]:
    """Makes the directory of a sweep, whose runs are numbered folders in it, and index.csv; returns
    it, and the overrides with the name that Hydra has for it. The same sweep goes on in it, unless
    `resume` is never. Raises InputError for a directory that cannot be used.
    """
    places = [each for each in line.asked if each.key_or_group in ("run_dir", "hydra.sweep.dir")]
    place = [parse_override(time.strftime("run_dir=multirun/%Y%m%d-%H%M%S")), *places][-1]
    folder = Path(str(place.value()))
    varying = itertools.product(*(options for options in line.choices if len(options) > 1))
    # in the order in which Hydra numbers them: the last setting changes fastest
    points = [dict(option.split("=", 1) for option in point) for point in varying]
    index = folder / INDEX_FILE
    before = index.read_bytes().splitlines() if index.is_file() else []
    # with further values at its end it is the same sweep
    begun = before and before == format_index(points).encode().splitlines()[: len(before)]
    if begun and line.configs[0]["resume"] != "never":
        refuse_links(folder)
    else:
        check_run_dir(str(folder), "never")
    write_index(make_dir(folder), points)
    overrides = [text_of(each) for each in line.asked if each not in places]
    return folder, [*overrides, f"hydra.sweep.dir={place.get_value_string()}"]


def suggest_room(line: Line) -> None:
    """Says how the runs of a sweep over the number of groups share what is compiled, where its
    method can and `max_m` is not given.
    """
    for values in line.choices:
        several = len(values) > 1 and values[0].startswith("algorithm.m=")
        if several and line.configs[0]["algorithm"].get("max_m", 0) is None:
            most = max(int(value.partition("=")[2]) for value in values)
            print(
                f"each algorithm.m is compiled by itself; algorithm.max_m={most} lets the runs"
                " share what is compiled (see the tutorial on sweeps)"
            )


def vary_data(configs: Sequence[dict[str, Any]]) -> bool:
    """Returns whether runs of one data set deal its samples otherwise, as those of seeds do."""
    first, parts = configs[0], ("dataset", "partition", "concept", "shared_samples")
    alike = [each for each in configs if each["dataset"]["name"] == first["dataset"]["name"]]
    return any(each[part] != first[part] for each in alike for part in parts)


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


# grids


def find_obstacle(config: dict[str, Any], axes: Mapping[str, list]) -> str | None:
    """Returns why the runs of a grid cannot be one program, None: as far as their settings say they
    can be. They may differ in numbers of a method or layer that are no counts; whether it only
    computes with them shows when it is traced.
    """
    settings = collect_settings(config)
    for name, values in axes.items():
        inside = name == "local.lr" or name.partition(".")[0] in ("algorithm", "personal")
        kinds = settings.get(name) if inside else None
        numbers = [check(name, value, kinds) for value in values] if kinds else [None]
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
