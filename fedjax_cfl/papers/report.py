"""What `fedjax-cfl paper` writes about its cells: table.md, table.csv and the lines on the
terminal, of records (see `records`).
"""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedjax_cfl.analysis.relative import RELATIVE
from fedjax_cfl.formatting import escape_markdown, escape_markup
from fedjax_cfl.papers.cells import row_columns, source_row
from fedjax_cfl.papers.records import cell_measure, is_score, measure_scale, read_measures
from fedjax_cfl.runs.results import write_csv, write_text

FIELDS = ("row", "column", "published", "mean", "sd", "seeds", "rounds", "of_rounds")
FIELDS += ("evaluations", "shared_best", "shared_evaluations")


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
    some = (
        ""
        if record["seeds"] == record["runs"]
        else f", {record['seeds']} of {record['runs']} seeds"
    )
    return f"{format_number(record['mean'], measure)}{spread}{some}{printed}"


def format_finished_cell(table: dict, row: str, folder: Path) -> str:
    """Formats the measures of a finished cell for a line on the terminal, with those of other
    rows that show the same run.
    """
    values = read_measures(folder)
    shown = table.get("measures")
    if not shown:
        sharing = [
            cell_measure(table, other, "")
            for other in table["rows"]
            if source_row(table, other) == row
        ]
        shown = {name: name for name in sharing} if len(sharing) > 1 else {"": sharing[0]}
    texts = []
    for label, measure in shown.items():
        if measure in RELATIVE:  # to a run that may not have finished
            continue
        value = values[measure]
        text = (
            "none"
            if value is None
            else format_number(value * measure_scale(table, measure), measure)
        )
        texts.append(f"{label} {text}".strip())
    return ", ".join(texts)


def completed_rows(table: dict, found: dict[tuple[str, str], list[Path]]) -> list[str]:
    """Returns the rows with at least one finished cell. A row that shows the runs of another
    row has no cells of its own and is left out.
    """
    return [row for row in table["rows"] if any(row == ran for ran, _ in found)]


def recorded_rows(table: dict, records: list[dict]) -> list[str]:
    """Returns the rows of which anything was run."""
    finished = {record["row"] for record in records if record["runs"]}
    return [row for row in table["rows"] if row in finished]


def headings(table: dict, records: list[dict]) -> list[str]:
    """Returns the columns that the rows which ran have, in the table's order."""
    rows = recorded_rows(table, records)
    return [
        name
        for name in table.get("measures") or table["columns"]
        if any(name in row_columns(table, row) for row in rows)
    ]


def rounds_note(table: dict, records: list[dict]) -> list[str]:
    """Returns lines about rows whose number of rounds is not that of their settings; rows that
    share runs are mentioned once.
    """
    lines = {}
    for record in records:
        if (
            record["runs"]
            and record["rounds"] != record["of_rounds"]
            and source_row(table, record["row"]) == record["row"]
        ):
            lines.setdefault((record["row"], record["rounds"], record["of_rounds"]), []).append(
                record["column"]
            )
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
    text = {(record["row"], record["column"]): format_cell(table, record) for record in records}
    columns = headings(table, records)
    lines = [f"# {table['title']}", ""]
    lines += ["Obtained mean ± sd over seeds (published). `-`: not run.", ""]
    lines += ["| | " + " | ".join(map(escape_markdown, columns)) + " |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for row in recorded_rows(table, records):
        shown = [row_title(table, row), *(text.get((row, column), "") for column in columns)]
        lines.append("| " + " | ".join(map(escape_markdown, shown)) + " |")
    if notes := best_note(table, records):
        lines += ["", "A best over more tests is higher by chance alone:", "", *notes]
    if notes := rounds_note(table, records):
        lines += ["", "Fewer or more rounds than the setting's own:", "", *notes]
    seeds = ", ".join(map(str, sorted({record["runs"] for record in records if record["runs"]})))
    machine = f"Machine: {os.cpu_count()} cores, {platform.machine()} {platform.system()}. "
    lines += ["", f"Last command: `{command}`", "", f"{machine}Seeds per cell: {seeds}."]
    write_text(out / "table.md", "\n".join(lines) + "\n")
    rows = [[record.get(name) for name in FIELDS] for record in records]
    write_csv(out / "table.csv", FIELDS, rows)


def row_title(table: dict, row: str) -> str:
    """Returns how a row is called in print: its name, with what stands in for the paper's data."""
    return table["rows"][row].get("title", row)


def build_table(table: dict, records: list[dict], console: Console) -> list[Table]:
    """Builds the table for the terminal, the shorter of rows and columns across, cut
    into several where the terminal is too narrow.
    """
    rows, columns = recorded_rows(table, records), headings(table, records)
    text = {(record["row"], record["column"]): format_cell(table, record) for record in records}
    grid: list[Sequence[str]] = [["", *columns]]
    for row in rows:
        grid.append([row_title(table, row), *(text.get((row, c), "") for c in columns)])
    # one list of cells a column, headings first
    names, *rest = list(zip(*grid, strict=True)) if len(rows) > len(columns) else grid
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
