"""What `fedjax-cfl paper` writes about its cells: table.md, table.csv, plot.png and the
lines on the terminal.

A record is one number of a table: {row, column, published, mean, sd, seeds, runs,
rounds, of_rounds}, in the table's own unit.
"""

import csv
import math
import os
import platform
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from fedjax_cfl.papers.cells import row_columns, source_row
from fedjax_cfl.runs.plot import make_palette, style_axes
from fedjax_cfl.runs.results import atomic_write, compute_measures, read_metrics

FIELDS = ("row", "column", "published", "mean", "sd", "seeds", "rounds", "of_rounds")
PANELS_PER_LINE = 3  # panels side by side


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
    and the seconds without compiling.
    """
    rows = read_metrics(folder)
    last = rows[-1] if rows else {}
    sent = (last.get("bytes_down") or 0) + (last.get("bytes_up") or 0)
    return compute_measures(rows) | {"megabytes": sent / 1e6, "seconds": last.get("wall_s")}


def read_default_rounds(folder: Path) -> int | None:
    """Returns the rounds that the data set's setting asks for, whatever the command line said."""
    path = folder / ".hydra" / "config.yaml"
    return OmegaConf.load(path).dataset.rounds if path.is_file() else None


def collect(table: dict, found: dict[tuple[str, str], list[Path]]) -> list[dict]:
    """Returns a record for every row and column, from the folders of finished cells; sd
    is over seeds with n - 1.

    `runs` counts finished seeds, `seeds` those of them that have a value: a target may
    not be reached, an accuracy not count yet.
    """
    numbers = {folder: read_measures(folder) for folders in found.values() for folder in folders}
    records = []
    for row, entry in table["rows"].items():
        for column in row_columns(table, row):
            folders = found.get((source_row(table, row), "" if "measures" in table else column), [])
            measure = cell_measure(table, row, column)
            values = [numbers[folder][measure] for folder in folders]
            values = [
                value * measure_scale(table, measure) for value in values if value is not None
            ]
            records.append(
                {
                    "row": row,
                    "column": column,
                    "published": (entry.get("published") or {}).get(column),
                    "mean": statistics.fmean(values) if values else None,
                    "sd": statistics.stdev(values) if len(values) > 1 else None,
                    "seeds": len(values),
                    "runs": len(folders),
                    "rounds": " ".join(
                        str(n) for n in sorted({numbers[folder]["rounds"] for folder in folders})
                    ),
                    "of_rounds": " ".join(
                        str(n)
                        for n in sorted({read_default_rounds(folder) or 0 for folder in folders})
                    ),
                }
            )
    return records


def format_number(value: float, measure: str, digits: int = 3) -> str:
    """Formats a value in the table's unit, with the digits its measure deserves."""
    if "discrepancy" in measure or measure == "ari":
        return f"{value:.{digits}g}"
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
        return ("not reached" if measure.startswith("rounds_to") else "no value yet") + printed
    spread = "" if record["sd"] is None else f" ± {format_number(record['sd'], measure, 2)}"
    some = (
        ""
        if record["seeds"] == record["runs"]
        else f", {record['seeds']} of {record['runs']} seeds"
    )
    return f"{format_number(record['mean'], measure)}{spread}{some}{printed}"


def format_finished_cell(table: dict, row: str, folder: Path) -> str:
    """Formats the measures of one finished cell, those of the rows that share its run,
    too, for a line on the terminal.
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
        value = values[measure]
        text = (
            "none"
            if value is None
            else format_number(value * measure_scale(table, measure), measure)
        )
        texts.append(f"{label} {text}".strip())
    return ", ".join(texts)


def finished_rows(table: dict, found: dict[tuple[str, str], list[Path]]) -> list[str]:
    """Returns the rows of which a cell has finished; rows that share the runs of
    another are not among them.
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
    """Returns lines about rows that ran other than their setting's own number of
    rounds; rows that share runs are mentioned once.
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


def write(table: dict, records: list[dict], out: Path, command: str) -> None:
    """Writes table.csv and table.md: obtained, spread over seeds, published in
    brackets, and the command and machine behind them.
    """
    text = {(record["row"], record["column"]): format_cell(table, record) for record in records}
    columns = headings(table, records)
    lines = [
        f"# {table['title']}",
        "",
        "Obtained mean ± sd over seeds (published). `-`: not run.",
        "",
    ]
    lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        "| "
        + " | ".join([row_title(table, row), *(text.get((row, c), "") for c in columns)])
        + " |"
        for row in recorded_rows(table, records)
    ]
    if notes := rounds_note(table, records):
        lines += ["", "Fewer or more rounds than the setting's own:", "", *notes]
    seeds = ", ".join(map(str, sorted({record["runs"] for record in records if record["runs"]})))
    lines += [
        "",
        f"Last command: `{command}`",
        "",
        f"Machine: {os.cpu_count()} cores, {platform.machine()} {platform.system()}. ",
    ]
    lines[-1] += f"Seeds per cell: {seeds}."
    with atomic_write(out / "table.md") as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (
        atomic_write(out / "table.csv") as temporary,
        temporary.open("w", newline="", encoding="utf-8") as handle,
    ):
        writer = csv.DictWriter(handle, fieldnames=FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(records)


def row_title(table: dict, row: str) -> str:
    """Returns how a row is called in print: its name, with what stands in for the paper's data."""
    return table["rows"][row].get("title", row)


def build_table(table: dict, records: list[dict], console: Console) -> list[Table]:
    """Builds the table for the terminal, the shorter of rows and columns across, cut
    into several where the terminal is too narrow.
    """
    rows, columns = recorded_rows(table, records), headings(table, records)
    text = {(record["row"], record["column"]): format_cell(table, record) for record in records}
    grid = [
        ["", *columns],
        *(
            [row_title(table, row), *(text.get((row, column), "") for column in columns)]
            for row in rows
        ),
    ]
    names, *rest = (
        zip(*grid, strict=True) if len(rows) > len(columns) else grid
    )  # one list of cells a column, headings first

    def part(some: list[Sequence[str]]) -> Table:
        shown = Table(title=f"{table['title']}; obtained (published)", title_justify="left")
        shown.add_column(min_width=min(24, max(map(len, names))))
        for heading, *cells in some:
            shown.add_column(
                heading, justify="right", min_width=max(map(len, (*heading.split(), *cells)))
            )
        for line in list(zip(names, *some, strict=True))[1:]:
            shown.add_row(*line)
        return shown

    unbounded = console.options.update(width=10_000)  # a measure is never wider than its console
    for size in range(len(rest), 0, -1):
        parts = [part(rest[i : i + size]) for i in range(0, len(rest), size)]
        if all(console.measure(one, options=unbounded).minimum <= console.width for one in parts):
            break
    return parts


def plot(table: dict, records: list[dict], path: Path) -> None:
    """Draws plot.png: a panel per row of the paper with a line per column, or a panel
    per measure with a line per row.

    Filled dots are obtained, with sd over seeds where there are several; hollow ones
    are published.
    """
    outer, inner = ("column", "row") if "measures" in table else ("row", "column")
    rows, columns = recorded_rows(table, records), headings(table, records)
    panels, lines = (columns, rows) if outer == "column" else (rows, columns)
    # short lists of panels stay in one line, long ones are folded; the measures of the same
    # runs stand side by side
    owners = [source_row(table, row) for row in rows]
    together = max(map(owners.count, owners)) if outer == "row" else 1
    across = min(together if together > 1 else PANELS_PER_LINE, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(
        figsize=(1.5 + 4.4 * across, 1.5 + down * (1.0 + 0.3 * len(lines))), layout="constrained"
    )
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    figure.suptitle(table["title"], fontsize=13)
    shade = make_palette(
        7
    )  # yellow, the eighth, is too pale for a dot; a line's name stands beside it
    palette = {line: shade[i % 7] for i, line in enumerate(lines)}
    grid = figure.subplots(down, across, squeeze=False).flat
    for panel, axes in zip(panels, grid, strict=False):
        shown = {record[inner]: record for record in records if record[outer] == panel}
        draw_dots(axes, [shown.get(line) for line in lines], [palette[line] for line in lines])
        axes.set_yticks(
            range(len(lines)),
            [row_title(table, line) if inner == "row" else line for line in lines],
            fontsize=9,
        )
        measure = cell_measure(
            table, *((rows[0], panel) if outer == "column" else (panel, columns[0]))
        )
        unit = "percent" if measure_scale(table, measure) == 100 else ""
        rounds = {(r["rounds"], r["of_rounds"]) for r in shown.values() if r["runs"]}
        if any(done != own for done, own in rounds):
            unit = (
                f"{unit}; " * bool(unit)
                + " or ".join(f"{done} of {own}" for done, own in sorted(rounds))
                + " rounds"
            )
        style_axes(
            axes,
            textwrap.fill(panel if outer == "column" else row_title(table, panel), 34),
            unit,
            "",
        )
        axes.grid(axis="x", color="0.9", linewidth=0.8)
    for axes in list(grid):  # the rest of the last line
        axes.remove()
    marks = [
        Line2D(
            [], [], marker="o", linestyle="-", color="0.3", label="obtained, mean ± sd over seeds"
        ),
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            color="0.3",
            markerfacecolor="white",
            markersize=8,
            label="published",
        ),
    ]
    printed = any(record["published"] is not None for record in records)
    figure.legend(
        handles=marks[: 1 + printed],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=10,
    )
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def draw_dots(axes, records: list[dict | None], shades: list) -> None:
    """Draws one panel of `plot`: line i of the panel is records[i], from the top down."""
    for place, (record, shade) in enumerate(zip(records, shades, strict=True)):
        if record is None:
            continue
        if None not in (record["published"], record["mean"]):
            axes.plot(
                [record["published"], record["mean"]],
                [place, place],
                color=shade,
                linewidth=0.8,
                linestyle=":",
                zorder=1,
            )
        if record["published"] is not None:
            axes.plot(
                record["published"],
                place,
                "o",
                color=shade,
                markerfacecolor="white",
                markersize=9,
                markeredgewidth=1.6,
                zorder=2,
            )
        if record["mean"] is not None:
            axes.errorbar(
                record["mean"],
                place,
                xerr=record["sd"],
                fmt="o",
                color=shade,
                markersize=5,
                capsize=3,
                linewidth=1.5,
                zorder=3,
            )
    axes.set_ylim(len(records) - 0.5, -0.5)
    axes.margins(x=0.12)
