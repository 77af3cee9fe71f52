"""plot.png of a table: obtained numbers beside published ones."""

import math
import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjax_cfl.analysis.plot import (
    escape_plot_lines,
    make_palette,
    new_figure,
    save_figure,
    style_axes,
)
from fedjax_cfl.formatting import escape_plot
from fedjax_cfl.papers.cells import source_row
from fedjax_cfl.papers.records import cell_measure, measure_scale
from fedjax_cfl.papers.report import headings, recorded_rows, row_title

PANELS_PER_LINE = 3  # panels side by side


def plot(table: dict, records: list[dict], path: Path) -> None:
    """Draws plot.png: a panel per row of the paper with a line per column, or a panel
    per measure with a line per row.

    Filled dots are obtained, with sd over seeds where there are several; hollow ones
    are published.
    """
    outer, inner = ("column", "row") if "measures" in table else ("row", "column")
    rows, columns = recorded_rows(table, records), headings(table, records)
    panels, lines = (columns, rows) if outer == "column" else (rows, columns)
    across = choose_across(table, rows, len(panels), outer == "row")
    down = math.ceil(len(panels) / across)
    cells = [{r[inner]: r for r in records if r[outer] == panel} for panel in panels]
    places = [
        [i for i, line in enumerate(lines) if is_known(shown.get(line))] or list(range(len(lines)))
        for shown in cells
    ]
    longest = [max(map(len, places[i : i + across])) for i in range(0, len(panels), across)]
    height = 1.5 + sum(1.0 + 0.3 * length for length in longest)
    figure = new_figure(1.5 + 4.4 * across, height, table["title"])
    shade = make_palette(7)  # yellow, the eighth, is too pale; a line's name stands beside it
    shades = [shade[i % 7] for i in range(len(lines))]
    names = [row_title(table, line) if inner == "row" else line for line in lines]
    grid = figure.subplots(down, across, squeeze=False, height_ratios=[n + 1 for n in longest]).flat
    for panel, shown, dots, axes in zip(panels, cells, places, grid, strict=False):
        draw_dots(axes, [shown.get(lines[i]) for i in dots], [shades[i] for i in dots])
        axes.set_yticks(range(len(dots)), [escape_plot(names[i]) for i in dots], fontsize=9)
        cell = (rows[0], panel) if outer == "column" else (panel, columns[0])
        unit = describe_unit(table, cell_measure(table, *cell), list(shown.values()))
        name = panel if outer == "column" else row_title(table, panel)
        style_axes(axes, escape_plot_lines(textwrap.fill(name, 34)), unit, "")
        axes.grid(axis="x", color="0.9", linewidth=0.8)
    for axes in list(grid):  # the rest of the last line
        axes.remove()
    add_marks(figure, any(record["published"] is not None for record in records))
    save_figure(figure, path)


def is_known(record: dict | None) -> bool:
    """Returns whether a cell was run, even without a number as its result, or published."""
    return record is not None and (record["runs"] > 0 or record["published"] is not None)


def choose_across(table: dict, rows: list[str], panels: int, by_row: bool) -> int:
    """Returns how many panels stand side by side: short lists stay in one line, long
    ones are folded; the measures of the same runs stand side by side, or in whole lines.
    """
    owners = [source_row(table, row) for row in rows]
    together = max(map(owners.count, owners)) if by_row else 1
    if together > 4:
        together = next((line for line in (4, 3, 5) if together % line == 0), together)
    return min(together if together > 1 else PANELS_PER_LINE, panels)


def describe_unit(table: dict, measure: str, shown: list[dict]) -> str:
    """Returns what an x axis says: its unit, and rounds that are not the setting's own."""
    parts = ["percent"] * (measure_scale(table, measure) == 100)
    rounds = {(r["rounds"], r["of_rounds"]) for r in shown if r["runs"]}
    if any(done != own for done, own in rounds):
        parts.append(" or ".join(f"{done} of {own}" for done, own in sorted(rounds)) + " rounds")
    return "; ".join(parts)


def add_marks(figure: Figure, published: bool) -> None:
    """Adds the legend: what a filled dot is, and a hollow one where there are any."""
    filled = Line2D([], [], marker="o", color="0.3", label="obtained, mean ± sd over seeds")
    hollow = Line2D([], [], marker="o", color="0.3", linestyle="", label="published")
    hollow.set(markerfacecolor="white", markersize=8)
    figure.legend(
        handles=[filled, hollow][: 1 + published],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=10,
    )


def draw_dots(axes: Axes, records: list[dict | None], shades: list) -> None:
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
