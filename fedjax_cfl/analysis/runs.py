"""Finished runs, read from their directories: a row per test, group or client of `load_runs`, one
run of `read_run`. Their files are checked, for they may have been edited or be of something else.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from fedjax_cfl.analysis.tables import MEASURES
from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.formatting import escape_text, flatten_settings
from fedjax_cfl.runs import results
from fedjax_cfl.runs.labels import is_execution, name_parts, parse_overrides
from fedjax_cfl.runs.regular_files import refuse_damage
from fedjax_cfl.validation import check_value

IDENTITY = ("algorithm", "dataset", "partition", "model", "preset")
DATA = ("dataset", "partition", "model")  # what runs must share to be compared
SETTINGS_FILE = Path(".hydra", "config.yaml")
MADE_OF = "made_of."  # begins the names of the values that parts of a run from Python are made of
ARRAY = re.compile(r"\w+\[[\d, ]*\] [0-9a-f]{16}")  # among them: of a seed's data, not a setting


def load_runs(
    folders: str | Path | Iterable[str | Path], per: Literal["test", "group", "client"] = "test"
) -> pd.DataFrame:
    """Returns the finished runs at or below `folders` as one pandas.DataFrame.

    `per="test"`: a row per run and test, with the fields of metrics.jsonl (see the glossary);
    "group": a row per run, test and group, `group`, with the values of that group; "client": a row
    per run and client at the end, with the columns of clients.parquet. Columns before them are
    `run`, the directory, and all settings by their names in conf/, as `local.lr`; `algorithm`,
    `dataset`, `partition`, `model` and `preset` are the names of the chosen options.
    Raises InputError where there is no such run, and for files that no run wrote.
    """
    check_value("per", per, Literal["test", "group", "client"])
    folders = list_paths(folders)
    parts = []
    for run_dir in find_runs(folders):
        run = read_run(run_dir)
        named = {name: run.get(name) for name in (*IDENTITY, "seed")}
        known = {"run": str(run_dir), **list_settings(run_dir), **run["overrides"], **named}
        if per == "client":
            found = results.read_clients(run_dir, run.get("run_id")) or {}
            table = pd.DataFrame({name: list(values) for name, values in found.items()})
        else:
            table = pd.DataFrame(run["rows"] if per == "test" else list_groups(run["rows"]))
        before = {  # lists, too, are one value
            name: [escape_text(value) if isinstance(value, str) else value] * len(table)
            for name, value in known.items()
            if name not in table
        }
        parts.append(pd.concat([pd.DataFrame(before), table], axis=1))
    return pd.concat(parts, ignore_index=True)


def list_groups(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each group of each row: `group`, and its values of lists over groups."""
    names = [name for name in results.LIST_FIELDS if name.startswith("group_")]
    for row in rows:
        lists = {name: row[name] for name in names if row.get(name) is not None}
        rest = {name: value for name, value in row.items() if name not in results.LIST_FIELDS}
        for group in range(max(map(len, lists.values()), default=0)):
            yield rest | {"group": group} | {name: own[group] for name, own in lists.items()}


def list_settings(run_dir: Path) -> dict[str, Any]:
    """Returns the settings of a run by their dotted names, {} where it has no file of them."""
    there = (run_dir / SETTINGS_FILE).is_file()
    return dict(flatten_settings(results.read_settings(run_dir))) if there else {}


def list_paths(paths: str | Path | Iterable[str | Path]) -> list[str | Path]:
    """Returns one path or several as a list. Raises InputError for what is none."""
    if isinstance(paths, str | bytes | Path) or not isinstance(paths, Iterable):
        paths = [paths]
    return [check_value("paths", each, str | Path) for each in paths]


def sort_naturally(paths: Iterable[Path]) -> list[Path]:
    """Returns paths in order, 2 before 10, as a sweep numbers its runs."""
    return sorted(paths, key=lambda path: [(p.zfill(9), p) for p in re.split(r"(\d+)", str(path))])


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Returns the finished runs at or below `paths`, in the order of these and of their names, each
    once; prints which are left out because they are unfinished.
    """
    finished, begun = dict[Path, None](), dict[Path, str]()
    for path in map(Path, paths):
        if not path.is_dir():
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            siblings = [item.name for item in beside if item.is_dir()]
            raise InputError(
                f"no folder {str(path)!r}{suggest_nearest(path.name, siblings)}: expected a run"
                " directory or a folder of runs"
            )
        inside = sort_naturally(file.parent.resolve() for file in path.rglob(results.SUMMARY_FILE))
        finished |= dict.fromkeys(inside)
        folders = [file.parent for file in path.rglob(results.METRICS_FILE)]
        # a run that was killed while it was compiled has nothing but its settings
        folders += [file.parent.parent for file in path.rglob(str(SETTINGS_FILE))]
        begun |= {folder.resolve(): str(folder) for folder in folders}
    skipped: dict[str, list[str]] = {f"no {results.SUMMARY_FILE}": [], "no evaluated round yet": []}
    for run_dir in sort_naturally(begun.keys() - finished.keys()):
        file = run_dir / results.METRICS_FILE
        evaluated = file.is_file() and file.stat().st_size > 0
        [*skipped.values()][not evaluated].append(begun[run_dir])
    for what, names in skipped.items():
        if names:
            count = f"{len(names)} run{'s' * (len(names) > 1)} with {what}"
            print(escape_text(f"skipped, unfinished: {count}: {', '.join(names)}"), flush=True)
    if not finished:
        where = ", ".join(repr(str(path)) for path in paths)
        raise InputError(f"no finished run ({results.SUMMARY_FILE}) in {where}")
    return [*finished]


def read_run(run_dir: Path) -> dict[str, Any]:
    """Returns a run's rows, numbers, names and what the command line or its caller changed.

    What is compared, see `MEASURES`, is from the rows; names and the rest are from the summary.
    Raises InputError for files that no run wrote.
    """
    summary, rows = results.read_json(run_dir / results.SUMMARY_FILE), results.read_metrics(run_dir)
    names = {name: summary[name] for name in IDENTITY if summary.get(name) is not None}
    overrides, seed = summary.get("overrides") or [], summary.get("seed")
    shown = all(
        isinstance(name, int)
        or (isinstance(name, str) and name.isprintable() and len(name) <= 1000)
        for name in names.values()
    )
    asked = isinstance(overrides, list) and all(isinstance(each, str) for each in overrides)
    if not (shown and asked and isinstance(seed, int | str | None)):
        raise InputError(
            f"{run_dir / results.SUMMARY_FILE}: overrides or names are no plain text, expected what"
            " a run writes"
        )
    changed = {
        name: value
        for name, value in parse_overrides(overrides).items()
        if name not in (*IDENTITY, "seed") and not is_execution(name)
    }
    last, found = rows[-1] if rows else {}, results.summarize_rows(rows)
    units, sent = (
        [last[name] for name in (f"{what}_down", f"{what}_up") if last.get(name) is not None]
        for what in ("units", "bytes")
    )
    return {
        **{name: value for name, value in summary.items() if name not in MEASURES},
        **name_parts(names, overrides),
        **found,
        "rows": rows,
        "run_dir": run_dir,
        "asked": overrides,
        "evaluations": found["best_of"],
        "overrides": changed | _list_parts(run_dir),
        "units": sum(units) if units else None,
        "megabytes": sum(sent) / 1e6 if sent else None,
        "sim_time_s": last.get("sim_time_s") or None,  # 0: no clock
        "wall_s": last.get("wall_s"),
    }


def _list_parts(run_dir: Path) -> dict[str, str]:
    """Returns what tells a run from Python from others of the same names: the values that its
    parts were made of, as made_of.algorithm.round.m; {} of a run from the command line.
    """
    file = run_dir / SETTINGS_FILE
    with refuse_damage(file):
        made = file.is_file() and b"\nmade_of:" in file.read_bytes()
    parts = results.read_settings(run_dir)["made_of"] if made else {}
    return {
        str(name): str(value)
        for name, value in parts.items()
        if not (isinstance(value, str) and ARRAY.search(value))
    }
