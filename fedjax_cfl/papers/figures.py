"""The figures of papers, drawn from the files of cells: curves over rounds, and
accuracy against communication.

Lines are means over seeds, bands one sample standard deviation. A figure has a column
of panels for every row of its table. Of many evaluations the running mean is drawn, and
they themselves faintly: the accuracy of a round jumps with its cohort.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter

from fedjax_cfl.analysis.plot import (
    add_legend,
    format_percent_axis,
    new_figure,
    save_figure,
    style_axes,
)
from fedjax_cfl.analysis.plot_costs import average_runs, draw_band, line_styles
from fedjax_cfl.papers.cells import row_columns
from fedjax_cfl.papers.report import completed_rows, row_title
from fedjax_cfl.runs.results import compute_measures, read_metrics

AXIS_LABELS = {
    "accuracy": "test accuracy",
    "train_loss": "training loss of the cohort",
    "discrepancy": "discrepancy",
    "mean_client_distance": "mean client distance (L1)",
}


def column_styles(table: dict) -> dict[str, tuple]:
    """Returns the colour and line style of every column, the same in all panels."""
    columns = table["columns"]
    return dict(zip(columns, line_styles(len(columns)), strict=True))


def read_cells(
    table: dict, found: dict[tuple[str, str], list[Path]]
) -> dict[str, dict[str, list[list[dict]]]]:
    """Returns the metrics of every finished cell, by row, column and seed; rows of
    which nothing ran are left out.
    """
    runs = {key: [read_metrics(folder) for folder in folders] for key, folders in found.items()}
    return {
        row: {c: runs[row, c] for c in row_columns(table, row) if (row, c) in runs}
        for row in completed_rows(table, found)
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
            style_axes(
                axes,
                row_title(table, row) if i == 0 else "",
                "round",
                str(AXIS_LABELS.get(name, name)) if j == 0 else "",
            )
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
        draw_bars(
            right,
            {column: models_sent(seeds) / base for column, seeds in methods.items()},
            table["rows"][row].get("published_cost", {}),
            styles,
        )
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
            axes.plot(
                printed, place, "o", color="black", markerfacecolor="white", markersize=8, zorder=3
            )
            text += f"  (published {printed:.2f}x)"
        axes.annotate(
            text,
            (max(value, printed or 0), place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
        )
    axes.set_yticks(range(len(costs)), list(costs), fontsize=9.5)
    axes.set_ylim(len(costs) - 0.4, -0.6)
    axes.set_xlim(0, 1.8 * largest)
    if largest < 1000:
        axes.xaxis.set_major_formatter(FormatStrFormatter("%gx"))
