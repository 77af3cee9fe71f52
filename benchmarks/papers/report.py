"""The numbers of a reproduction, and what `fedjax-cfl paper` writes about them: table.md, table.csv
and the lines on the terminal.

A record is one number of a table: {row, column, published, mean, sd, seeds, runs,
rounds, of_rounds, evaluations, shared_best, shared_evaluations}, in the table's own
unit. A best is a maximum, over fewer tests for a clustered method: a record says over
how many, and has the best over those tests that count for all columns of its row.
"""

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from fedjax_cfl.analysis.sets import RELATIVE, compare_to_baseline
from fedjax_cfl.formatting import escape_markdown, escape_markup
from fedjax_cfl.runs.results import (
    read_metrics,
    read_summary,
    write_columns,
    write_text,
)
from papers.cells import row_columns, source_rows
from papers.measures import best_over, compute_measures, scored_rounds, shared_rounds

FIELDS = ("row", "column", "published", "mean", "sd", "seeds", "rounds", "of_rounds")
FIELDS += ("evaluations", "shared_best", "shared_evaluations")
MOST_ACROSS = 20  # cells of a line of table.md; a table with more columns is turned


def cell_measure(table: dict, row: str, column: str) -> str:
    """Returns the name of the measure that a cell shows: its column's, its row's or the table's."""
    if "measures" in table:
        return table["measures"][column]
    return table["rows"][row].get("measure", table.get("measure", "best_accuracy"))


def is_score(measure: str) -> bool:
    """Returns whether a measure is an accuracy or an F1."""
    return "accuracy" in measure or "_f1" in measure


def measure_scale(table: dict, measure: str) -> float:
    """Returns the factor from a measure to the table's unit: scores may be in percent."""
    return table.get("scale", 1) if is_score(measure) else 1


def read_measures(folder: Path) -> dict:
    """Returns a cell's measures: those of its summary and of every report, the megabytes sent both
    ways, and the seconds without compiling; and its `rows`.
    """
    rows = read_metrics(folder)
    last = rows[-1] if rows else {}
    sent = (last.get("bytes_down") or 0) + (last.get("bytes_up") or 0)
    own = {"megabytes": sent / 1e6, "seconds": last.get("wall_s"), "rows": rows}
    return (read_summary(folder) or {}) | compute_measures(rows) | own


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
        owners = source_rows(table, row)
        own = [folder for (ran, _), some in found.items() if ran in owners for folder in some]
        window = shared_rounds(numbers[folder]["rows"] for folder in own)
        for column in row_columns(table, row):
            name = "" if "measures" in table else column
            cells, *others = keep_shared_seeds([found.get((owner, name), []) for owner in owners])
            measure = cell_measure(table, row, column)
            if measure in RELATIVE:
                base = table["rows"][owners[0]].get("baseline", table.get("baseline"))
                measured = measure_beside(numbers, cells, found.get((owners[0], base), []))
            else:
                of_rows = zip(cells, *others, strict=True)
                measured = [
                    average_rows([numbers[folder] for folder in some], measure) for some in of_rows
                ]
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


def add_cells(
    table: dict, records: list[dict], others: dict[tuple[str, str], dict[str, Any]]
) -> list[dict]:
    """Returns the records, those of cells without runs from `others`, lines of cells.csv as
    `benchmark.read_cells` returns them.
    """
    return [
        record
        if record["runs"] or (cell := others.get((record["row"], record["column"]))) is None
        else record | record_cell(table, cell)
        for record in records
    ]


def record_cell(table: dict, cell: dict[str, Any]) -> dict[str, Any]:
    """Returns what a record says of a line of cells.csv."""
    scale = measure_scale(table, cell["measure"])
    scores = cell["scores"] or [cell["score"]] * cell["seeds"]
    values = [scale * score for score in scores if score == score]
    sd = None if cell["sd"] is None else scale * cell["sd"]
    return {
        "mean": statistics.fmean(values) if values else None,
        "sd": statistics.stdev(values) if cell["scores"] and len(values) > 1 else sd,
        "seeds": len(values),
        "runs": cell["seeds"],
        "rounds": str(cell["rounds"]),
        "of_rounds": str(cell["rounds"]),
    }


def measure_beside(
    numbers: dict[Path, dict], cells: list[Path], baseline: list[Path]
) -> list[dict]:
    """Returns the measures of the `cells`, folders of runs, whose seed the baseline has run,
    too: their `numbers`, and those that are relative to it.
    """
    base = {folder.name: numbers[folder]["rows"] for folder in baseline}
    return [
        numbers[folder] | compare_to_baseline(numbers[folder]["rows"], base[folder.name])
        for folder in cells
        if folder.name in base
    ]


def keep_shared_seeds(cells: list[list[Path]]) -> list[list[Path]]:
    """Returns of the runs of several rows those of seeds that all rows have."""
    if len(cells) == 1:
        return cells
    shared = set.intersection(*({folder.name for folder in some} for some in cells))
    return [[folder for folder in some if folder.name in shared] for some in cells]


def average_rows(runs: Sequence[dict], measure: str) -> dict:
    """Returns the first run's measures, with the mean of all in `measure`; of one run its own."""
    first, *others = runs
    values = [run[measure] for run in (first, *others)]
    return first | {measure: None if None in values else statistics.fmean(values)}


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


def format_number(value: float, measure: str, digits: int = 3) -> str:
    """Formats a value in the table's unit, with the digits its measure deserves."""
    if any(word in measure for word in ("discrepancy", "distance", "speedup")) or measure == "ari":
        return f"{value:.{digits}g}"
    if measure == "server_time":
        return f"{value:.3g}"
    text = f"{value:,.1f}"
    return text if is_score(measure) else text.removesuffix(".0")


def format_cell(table: dict, record: dict) -> str:
    """Formats `obtained ± sd (published)`; a cell that was not run shows `-` and the
    published number.
    """
    measure = cell_measure(table, record["row"], record["column"])
    printed = "" if record["published"] is None else f" ({record['published']})"
    if not record["runs"]:
        return f"-{printed}"
    if record["mean"] is None:
        wanted = measure.startswith("rounds_to") or measure == "speedup"
        return ("not reached" if wanted else "no value yet") + printed
    spread = "" if record["sd"] is None else f" ± {format_number(record['sd'], measure, 2)}"
    seeds, runs = record["seeds"], record["runs"]
    some = "" if seeds == runs else f", {seeds} of {runs} seeds"
    return f"{format_number(record['mean'], measure)}{spread}{some}{printed}"


def format_finished_cell(table: dict, row: str, folders: Sequence[Path]) -> str:
    """Formats the measures of a finished cell, means over its runs, for a line on the terminal,
    with those of other rows that show the same runs.
    """
    runs = [read_measures(folder) for folder in folders]
    shown = table.get("measures")
    if not shown:
        others = [other for other in table["rows"] if source_rows(table, other) == [row]]
        sharing = [cell_measure(table, other, "") for other in others]
        shown = {name: name for name in sharing} if len(sharing) > 1 else {"": sharing[0]}
    texts = []
    for label, measure in shown.items():
        if measure in RELATIVE:  # to a run that may not have finished
            continue
        values = _values(table, measure, (run[measure] for run in runs))
        text = format_number(statistics.fmean(values), measure) if values else "none"
        texts.append(f"{label} {text}".strip())
    return ", ".join(texts)


def recorded_rows(table: dict, records: list[dict]) -> list[str]:
    """Returns the rows of which anything was run."""
    finished = {record["row"] for record in records if record["runs"]}
    return [row for row in table["rows"] if row in finished]


def is_shown(record: dict) -> bool:
    """Returns whether a cell was run, even without a number as its result, or published."""
    return record["runs"] > 0 or record["published"] is not None


def headings(table: dict, records: list[dict]) -> list[str]:
    """Returns the columns in which the rows that ran have anything to show, in the table's
    order.
    """
    rows = recorded_rows(table, records)
    shown = {r["column"] for r in records if r["row"] in rows and is_shown(r)}
    return [name for name in table.get("measures") or table["columns"] if name in shown]


def rounds_note(table: dict, records: list[dict]) -> list[str]:
    """Returns lines about rows whose number of rounds is not that of their settings; rows that
    share runs are mentioned once.
    """
    lines = {}
    for record in records:
        row, done, own = record["row"], record["rounds"], record["of_rounds"]
        if record["runs"] and done != own and source_rows(table, row) == [row]:
            lines.setdefault((row, done, own), []).append(record["column"])
    return [
        f"- {row} ({', '.join(names)}): {done} of {own} rounds."
        for (row, done, own), names in lines.items()
    ]


def best_note(table: dict, records: list[dict]) -> list[str]:
    """Returns a line about every row whose bests are over different numbers of tests:
    how many, and the bests over the tests that count for all its columns.
    """
    lines = []
    for row in recorded_rows(table, records):
        own = [r for r in records if r["row"] == row and r["runs"] and r.get("evaluations")]
        if len({record["evaluations"] for record in own}) < 2:
            continue
        counts: dict[str, list[str]] = {}
        for record in own:
            counts.setdefault(record["evaluations"], []).append(record["column"])
        over = "; ".join(f"{number} ({', '.join(names)})" for number, names in counts.items())
        shared = [
            f"{r['column']} {format_number(r['shared_best'], 'best_accuracy')}"
            for r in own
            if r["shared_best"] is not None
        ]
        same = f"over the same {own[0]['shared_evaluations']}: {', '.join(shared)}"
        lines.append(f"- {row}: best of {over} tests; {same if shared else 'none count for all'}.")
    return lines


def write(table: dict, records: list[dict], out: Path, command: str) -> None:
    """Writes table.csv and table.md: obtained, spread over seeds, published in
    brackets, and the command and machine behind them.
    """
    lines = [f"# {table['title']}", ""]
    lines += ["Obtained mean ± sd over seeds (published). `-`: not run.", ""]
    grid = make_grid(table, records)
    first, *others = list(zip(*grid, strict=True)) if len(grid[0]) > MOST_ACROSS else grid
    for line in (first, ["---"] * len(first), *others):
        lines.append("| " + " | ".join(map(escape_markdown, line)) + " |")
    if notes := best_note(table, records):
        lines += ["", "A best over more tests is higher by chance alone:", "", *notes]
    if notes := rounds_note(table, records):
        lines += ["", "Fewer or more rounds than the setting's own:", "", *notes]
    seeds = ", ".join(map(str, sorted({record["runs"] for record in records if record["runs"]})))
    machine = f"Machine: {os.cpu_count()} cores, {platform.machine()} {platform.system()}. "
    lines += ["", f"Last command: `{command}`", "", f"{machine}Seeds per cell: {seeds}."]
    write_text(out / "table.md", "\n".join(lines) + "\n")
    rows = [{name: record.get(name) for name in FIELDS} for record in records]
    write_columns(out / "table.csv", rows)


def row_title(table: dict, row: str) -> str:
    """Returns how a row is called in print: its name, with what stands in for the paper's data."""
    return table["rows"][row].get("title", row)


def make_grid(table: dict, records: list[dict]) -> list[Sequence[str]]:
    """Returns what is printed, a line per row that ran, the headings first."""
    columns = headings(table, records)
    text = {(record["row"], record["column"]): format_cell(table, record) for record in records}
    rows = [
        [row_title(table, row), *(text.get((row, column), "") for column in columns)]
        for row in recorded_rows(table, records)
    ]
    return [["", *columns], *rows]


def build_table(table: dict, records: list[dict], console: Console) -> list[Table]:
    """Builds the table for the terminal, the shorter of rows and columns across, cut
    into several where the terminal is too narrow.
    """
    grid = make_grid(table, records)
    # one list of cells a column, headings first
    names, *rest = list(zip(*grid, strict=True)) if len(grid) > len(grid[0]) else grid
    title = f"{table['title']}; obtained (published)"
    unbounded = console.options.update(width=10_000)  # a measure is never wider than its console
    size = len(rest)
    while True:
        parts = [_build_part(title, names, rest[i : i + size]) for i in range(0, len(rest), size)]
        widths = [console.measure(part, options=unbounded).minimum for part in parts]
        if size == 1 or max(widths) <= console.width:
            return parts
        size -= 1


def _build_part(title: str, names: Sequence[str], some: Sequence[Sequence[str]]) -> Table:
    """Builds one table of the columns `some`, with `names` before them."""
    shown = Table(title=escape_markup(title), title_justify="left")
    shown.add_column(min_width=min(24, max(map(len, names))))
    for heading, *cells in some:
        width = max(map(len, (*heading.split(), *cells)))
        shown.add_column(escape_markup(heading), justify="right", min_width=width)
    for line in list(zip(names, *some, strict=True))[1:]:
        shown.add_row(*map(escape_markup, line))
    return shown
