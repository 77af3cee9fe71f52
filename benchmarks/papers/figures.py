"""The figures of papers, drawn from the files of cells: curves over rounds, accuracy against
communication, and plot.png of a table: obtained numbers beside published ones.

Lines are means over seeds, bands one sample standard deviation. A figure has a column
of panels for every row of its table. Of many evaluations the running mean is drawn, and
they themselves faintly: the accuracy of a round jumps with its cohort.
"""

import math
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter

from fedjax_cfl.analysis.plot import (
    add_legend,
    escape_plot_lines,
    format_percent_axis,
    line_styles,
    make_palette,
    new_figure,
    save_figure,
    style_axes,
)
from fedjax_cfl.analysis.plot_costs import average_runs, draw_band
from fedjax_cfl.formatting import escape_plot
from fedjax_cfl.runs.results import read_metrics
from papers.cells import row_columns, source_rows
from papers.measures import compute_measures
from papers.report import (
    cell_measure,
    headings,
    is_shown,
    measure_scale,
    recorded_rows,
    row_title,
)

AXIS_LABELS = {
    "accuracy": "test accuracy",
    "train_loss": "training loss of the cohort",
    "discrepancy": "discrepancy",
    "mean_client_distance": "mean client distance (L1)",
}

PANELS_PER_LINE = 3  # panels side by side


def column_styles(table: dict) -> dict[str, tuple]:
    """Returns the colour and line style of every column, the same in all panels."""
    columns = table["columns"]
    return dict(zip(columns, line_styles(len(columns)), strict=True))


def read_cells(
    table: dict, found: dict[tuple[str, str], list[Path]]
) -> dict[str, dict[str, list[list[dict]]]]:
    """Returns the metrics of every finished cell, by row, column and seed; rows without cells of
    their own, or of which nothing ran, are left out.
    """
    runs = {key: [read_metrics(folder) for folder in folders] for key, folders in found.items()}
    return {
        row: {c: runs[row, c] for c in row_columns(table, row) if (row, c) in runs}
        for row in table["rows"]
        if any(row == ran for ran, _ in runs)
    }


def save_with_legend(figure: Figure, path: Path, drawn: list[Axes], columns: list[str]) -> None:
    """Writes the figure with one legend below it, for the lines of all panels."""
    handles = {
        label: handle
        for axes in drawn
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [name for name in columns if name in handles]
    if names:
        most = max(1, int(figure.get_figwidth() // 1.9))
        add_legend(figure, [handles[name] for name in names], names, most)
    save_figure(figure, path)


def draw_panels(table: dict, found: dict[tuple[str, str], list[Path]], path: Path) -> None:
    """Draws `table["panels"]`, numbers of metrics.jsonl, against rounds: a line of
    panels for each, a column of panels for every row.
    """
    runs, styles, panels = read_cells(table, found), column_styles(table), table["panels"]
    figure = new_figure(max(7.0, 1.0 + 4.2 * len(runs)), 1.6 + 2.8 * len(panels), table["title"])
    grid = figure.subplots(len(panels), len(runs), squeeze=False)
    for j, (row, methods) in enumerate(runs.items()):
        for i, name in enumerate(panels):
            axes = grid[i, j]
            for column, seeds in methods.items():
                draw_band(axes, *average_runs(seeds, (name,)), styles[column], column)
            title = row_title(table, row) if i == 0 else ""
            style_axes(axes, title, "round", str(AXIS_LABELS.get(name, name)) if j == 0 else "")
            axes.set_xlim(left=0)
            if "accuracy" in name:
                format_percent_axis(axes)
    save_with_legend(figure, path, list(grid.flat), list(table["columns"]))


def models_sent(runs: list[list[dict]]) -> float:
    """Returns the models sent down and up in all, mean over seeds."""
    return float(np.mean([compute_measures(rows)["units"] for rows in runs]))


def draw_communication(table: dict, found: dict[tuple[str, str], list[Path]], path: Path) -> None:
    """Draws accuracy against the models sent so far, and what was sent in all, both
    relative to all that the baseline sent.

    A row without the baseline is drawn in models. Hollow dots are published costs.
    """
    runs, styles = read_cells(table, found), column_styles(table)
    figure = new_figure(12.5, 1.6 + 3.6 * len(runs), table["title"])
    grid = figure.subplots(len(runs), 2, squeeze=False, width_ratios=(3, 2))
    for (left, right), (row, methods) in zip(grid, runs.items(), strict=True):
        base = models_sent(methods[table["baseline"]]) if table["baseline"] in methods else 1.0
        unit = f"x {table['baseline']}'s in all" if table["baseline"] in methods else "models"
        for column, seeds in methods.items():
            _, sent, _ = average_runs(seeds, ("units_down", "units_up"))
            _, mean, spread = average_runs(seeds, ("accuracy",))
            draw_band(left, sent / base, mean, spread, styles[column], column)
        style_axes(left, row_title(table, row), f"models sent so far, {unit}", "test accuracy")
        left.set_xlim(left=0)
        format_percent_axis(left)
        costs = {column: models_sent(seeds) / base for column, seeds in methods.items()}
        draw_bars(right, costs, table["rows"][row].get("published_cost", {}), styles)
        style_axes(right, "", f"models sent in all, {unit}", "")
        right.grid(visible=False)
    save_with_legend(figure, path, list(grid[:, 0]), list(table["columns"]))


def draw_bars(
    axes: Axes, costs: dict[str, float], published: dict[str, float], styles: dict[str, tuple]
) -> None:
    """Draws a bar per method with its number, and a hollow dot where one is published."""
    largest = max([*costs.values(), *published.values()])
    for place, (column, value) in enumerate(costs.items()):
        axes.barh(place, value, color=styles[column][0], alpha=0.85, height=0.6)
        text = f"{value:.2f}x" if largest < 1000 else f"{value:,.0f}"
        printed = published.get(column)
        if printed is not None:
            axes.plot(printed, place, "o", color="black", mfc="white", markersize=8, zorder=3)
            text += f"  (published {printed:.2f}x)"
        beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (max(value, printed or 0), place), fontsize=9.5, **beside)
    axes.set_yticks(range(len(costs)), list(costs), fontsize=9.5)
    axes.set_ylim(len(costs) - 0.4, -0.6)
    axes.set_xlim(0, 1.8 * largest)
    if largest < 1000:
        axes.xaxis.set_major_formatter(FormatStrFormatter("%gx"))


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
    # those that were run, even without a number as their result, or published
    known = [[line for line in lines if line in own and is_shown(own[line])] for own in cells]
    places = [[i for i, line in enumerate(lines) if not own or line in own] for own in known]
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


def choose_across(table: dict, rows: list[str], panels: int, by_row: bool) -> int:
    """Returns how many panels stand side by side: short lists stay in one line, long
    ones are folded; the measures of the same runs stand side by side, or in whole lines.
    """
    owners = [source_rows(table, row) for row in rows]
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
    handles = [filled, hollow] if published else [filled]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=10)


def draw_dots(axes: Axes, records: list[dict | None], shades: list) -> None:
    """Draws one panel of `plot`: line i of the panel is records[i], from the top down."""
    for place, (record, shade) in enumerate(zip(records, shades, strict=True)):
        if record is None:
            continue
        published, mean = record["published"], record["mean"]
        if None not in (published, mean):
            axes.plot([published, mean], [place, place], ":", color=shade, lw=0.8, zorder=1)
        if published is not None:
            hollow = {"markersize": 9, "markerfacecolor": "white", "markeredgewidth": 1.6}
            axes.plot(published, place, "o", color=shade, zorder=2, **hollow)
        if mean is not None:
            filled = {"markersize": 5, "capsize": 3, "linewidth": 1.5}
            axes.errorbar(mean, place, None, record["sd"], "o", color=shade, zorder=3, **filled)
    axes.set_ylim(len(records) - 0.5, -0.5)
    axes.margins(x=0.12)
