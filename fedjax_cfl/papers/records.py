"""The numbers of a reproduction: one record for every row and column of a table.

A record is one number of a table: {row, column, published, mean, sd, seeds, runs,
rounds, of_rounds, evaluations, shared_best, shared_evaluations}, in the table's own
unit. A best is a maximum, over fewer tests for a clustered method: a record says over
how many, and has the best over those tests that count for all columns of its row.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path

import yaml

from fedjax_cfl.analysis.relative import RELATIVE, measure_beside
from fedjax_cfl.papers.cells import row_columns, source_row
from fedjax_cfl.runs.results import compute_measures, read_metrics
from fedjax_cfl.runs.scoring import best_over, scored_rounds, shared_rounds


def cell_measure(table: dict, row: str, column: str) -> str:
    """Returns the name of the measure that a cell shows: its column's, its row's or the table's."""
    return (
        table["measures"][column]
        if "measures" in table
        else table["rows"][row].get("measure", table.get("measure", "best_accuracy"))
    )


def is_score(measure: str) -> bool:
    """Returns whether a measure is an accuracy or an F1."""
    return "accuracy" in measure or "_f1" in measure


def measure_scale(table: dict, measure: str) -> float:
    """Returns the factor from a measure to the table's unit: scores may be in percent."""
    return table.get("scale", 1) if is_score(measure) else 1


def read_measures(folder: Path) -> dict:
    """Returns a cell's measures: those of every report, the megabytes sent both ways,
    and the seconds without compiling; and its `rows`.
    """
    rows = read_metrics(folder)
    last = rows[-1] if rows else {}
    sent = (last.get("bytes_down") or 0) + (last.get("bytes_up") or 0)
    own = {"megabytes": sent / 1e6, "seconds": last.get("wall_s"), "rows": rows}
    return compute_measures(rows) | own


def read_default_rounds(folder: Path) -> int | None:
    """Returns the number of rounds in the data set's own settings, None if there is none."""
    path = folder / ".hydra" / "config.yaml"
    if not path.is_file():
        return None
    rounds = yaml.safe_load(path.read_text(encoding="utf-8"))["dataset"]["rounds"]
    return rounds if isinstance(rounds, int) else None


def collect_records(table: dict, found: dict[tuple[str, str], list[Path]]) -> list[dict]:
    """Returns a record for every row and column, from the folders of finished cells; sd
    is over seeds with n - 1.

    `runs` counts finished seeds, `seeds` those of them that have a value: a target may
    not be reached, an accuracy not count yet.
    """
    folders = [folder for some in found.values() for folder in some]
    numbers = {folder: read_measures(folder) for folder in folders}
    defaults = {folder: read_default_rounds(folder) or 0 for folder in folders}
    records = []
    for row, entry in table["rows"].items():
        owner = source_row(table, row)
        own = [folder for (ran, _), some in found.items() if ran == owner for folder in some]
        window = shared_rounds(numbers[folder]["rows"] for folder in own)
        for column in row_columns(table, row):
            cells = found.get((owner, "" if "measures" in table else column), [])
            measure = cell_measure(table, row, column)
            if measure in RELATIVE:
                base = table["rows"][owner].get("baseline", table.get("baseline"))
                measured = measure_beside(numbers, cells, found.get((owner, base), []))
            else:
                measured = [numbers[folder] for folder in cells]
            values = _values(table, measure, (one[measure] for one in measured))
            record = {
                "row": row,
                "column": column,
                "published": (entry.get("published") or {}).get(column),
                "mean": statistics.fmean(values) if values else None,
                "sd": statistics.stdev(values) if len(values) > 1 else None,
                "seeds": len(values),
                "runs": len(measured),
                "rounds": _list_distinct(one["rounds"] for one in measured),
                "of_rounds": _list_distinct(defaults[folder] for folder in cells),
            }
            is_best = measure == "best_accuracy"
            records.append(record | (_shared_best(table, measured, window) if is_best else {}))
    return records


def _values(table: dict, measure: str, values: Iterable[float | None]) -> list[float]:
    """Returns the values that are there, in the table's unit."""
    scale = measure_scale(table, measure)
    return [value * scale for value in values if value is not None]


def _list_distinct(numbers: Iterable[int]) -> str:
    return " ".join(map(str, sorted(set(numbers))))


def _shared_best(table: dict, measured: list[dict], window: set[int]) -> dict:
    """Returns over how many tests a cell's best is, and its mean best over `window`."""
    best = (best_over(one["rows"], window) for one in measured)
    values = _values(table, "best_accuracy", best)
    return {
        "evaluations": _list_distinct(len(scored_rounds(one["rows"])) for one in measured),
        "shared_best": statistics.fmean(values) if values else None,
        "shared_evaluations": len(window) if measured else None,
    }
