"""What a table of methods by settings says as a whole: cells.csv with all that was measured,
differences.csv, ranks.csv, ranks.md and figure.png.

A setting is a row of the table that has runs of its own, its score the measure of that row. A cell
is a line of cells.csv, of runs in this folder or read from the cells.csv of others.
"""

import csv
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from fedjax_cfl.analysis import ranks
from fedjax_cfl.analysis.plot import (
    escape_plot_lines,
    format_percent_axis,
    new_figure,
    save_figure,
    style_axes,
)
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import escape_plot
from fedjax_cfl.runs.results import write_columns
from papers.cells import read_chosen, row_columns
from papers.report import cell_measure, is_score, read_measures, row_title

# of cells.csv: its columns, and where a run has them
MEASURED = {
    "worst10": "worst10_accuracy",
    "finetuned": "finetuned_accuracy",
    "new_clients": "new_clients_accuracy",
    "ari": "ari",
    "megabytes": "megabytes",
    "local_steps": "local_steps",
    "train_s": "train_s",
    "sim_time_s": "sim_time_s",
}
COLUMNS = ("setting", "method", "seeds", "rounds", "measure", "score", "sd", *MEASURED)
COLUMNS += ("chosen", "trials", "best_minus_median", "scores")
LINE = 0.24  # inches a method takes in a picture
# points from a method's dot to its name, from the best place to the last
NAME_PLACES = ((4, -8), (-4, 3), (4, 3), (-4, -8), (4, -16), (-4, 11), (4, 11), (-4, -16))
Cells = dict[tuple[str, str], dict[str, Any]]  # by setting and method


def write(
    table: dict, found: dict[tuple[str, str], list[Path]], path: Path, others: Cells | None = None
) -> None:
    """Writes cells.csv, differences.csv, ranks.csv, ranks.md and the figure `path`, all in its
    folder, from the runs of each (row, column), seeds in order, and of other cells as `read_cells`
    returns them.
    """
    known = (others or {}) | {place: describe_cell(table, *place, found[place]) for place in found}
    places = ((row, column) for row in table["rows"] for column in row_columns(table, row))
    cells = [known[place] for place in places if place in known]
    texts = [cell | {"scores": " ".join(map(repr, cell["scores"]))} for cell in cells]
    listed = [{name: cell.get(name) for name in COLUMNS} for cell in texts]
    write_columns(path.with_name("cells.csv"), listed)
    if differences := ranks.list_differences(cells, table.get("against", ())):
        write_columns(path.with_name("differences.csv"), differences)
    # `ranked: false`: a setting that not all methods can have
    ranking = [cell for cell in cells if table["rows"][cell["setting"]].get("ranked", True)]
    title, base, own = table["title"], table.get("baseline"), table.get("own", ())
    if made := ranks.write_ranks(ranking, path.parent, title, base, own):
        draw(table, *made, cells, path)


def read_cells(table: dict, paths: Sequence[Path]) -> Cells:
    """Returns the cells of cells.csv files, the first where several have one. Raises InputError
    for what is no cell of this table.
    """
    cells: Cells = {}
    for path in paths:
        where = f"--cells {path}"
        for cell in ranks.read_cells(path, where):
            row, column = cell["setting"], cell["method"]
            if missing := [name for name in COLUMNS if name not in cell]:
                raise InputError(f"{where}: has no column {missing[0]}, expected a cells.csv")
            if row not in table["rows"] or column not in row_columns(table, row):
                raise InputError(
                    f"{where}: {row}, {column}: no cell of the table, nor of --methods"
                )
            cells.setdefault((row, column), _check_cell(table, cell, f"{where}: {row}, {column}"))
    return cells


def _check_cell(table: dict, cell: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns a line of cells.csv as `describe_cell` does. Raises InputError for a measure that
    the table does not show, and for numbers that a run cannot have.
    """
    shown = cell_measure(table, cell["setting"], cell["method"])
    if cell["measure"] != shown:
        raise InputError(f"{where}: measure {cell['measure']}: the table shows {shown}")
    try:
        least = {"ari": -1.0}
        numbers = {
            name: ranks.read_number(name, cell[name], least.get(name, 0.0)) if cell[name] else None
            for name in (*MEASURED, "best_minus_median")
        }
        counts = {
            name: int(ranks.read_number(name, cell[name], 1)) for name in ("rounds", "trials")
        }
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    for score in (cell["score"], *cell["scores"]):
        if is_score(shown) and not (math.isnan(score) or 0 <= score <= 1):
            raise InputError(f"{where}: score {score:g}: must be a share from 0 to 1")
    return cell | numbers | counts


def describe_cell(table: dict, row: str, column: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Returns a line of cells.csv; `scores` are those of its seeds."""
    measure = cell_measure(table, row, column)
    runs = [read_measures(folder) for folder in folders]
    scores = [float("nan") if run[measure] is None else run[measure] for run in runs]
    cell: dict[str, Any] = {"setting": row, "method": column, "seeds": len(runs)}
    cell |= {"rounds": max(run["rounds"] for run in runs), "measure": measure}
    cell["score"] = statistics.fmean(scores)
    # not statistics.stdev, which fails on NaN
    cell["sd"] = float(np.std(scores, ddof=1)) if len(scores) > 1 else None
    for name, field in MEASURED.items():
        values = [run[field] for run in runs if run.get(field) is not None]
        cell[name] = statistics.fmean(values) if values else None
    return cell | describe_choice(folders[0]) | {"scores": scores}


def describe_choice(run_dir: Path) -> dict[str, Any]:
    """Returns what was chosen for a run, of how many trials, and by how much the best of them was
    above the median; {} where nothing was.
    """
    for folder in run_dir.parents:
        if (chosen := read_chosen(folder)) is None:
            continue
        with (folder / "trials.csv").open(newline="") as text:
            lines = list(csv.DictReader(text))
        score = next(name for name in lines[0] if name.startswith("validation_"))
        tried = [float(line[score]) for line in lines]
        settings = " ".join(f"{name}={value}" for name, value in chosen["chosen"].items())
        spread = max(tried) - statistics.median(tried)
        return {"chosen": settings, "trials": len(tried), "best_minus_median": spread}
    return {}


def draw(
    table: dict,
    scores: ranks.Scores,
    ranked: pd.DataFrame,
    cells: Sequence[dict[str, Any]],
    path: Path,
) -> None:
    """Draws mean ranks, scores by method and setting, and scores against megabytes."""
    order = np.argsort(ranked["mean_rank"].to_numpy())
    count, settings = len(scores.methods), scores.settings
    fronts = -(-len(settings) // 2)
    width = 5.5 + 0.75 * len(settings) + 4.2 * min(2, len(settings))
    height = max(1.8 + LINE * count, 3.4 * fronts)
    figure = new_figure(width, height, table["title"])
    halves = [5.5 + 0.75 * len(settings), width - 5.5]
    (left, right), *_ = figure.subfigures(1, 2, width_ratios=halves, squeeze=False)
    shown, grid = left.subplots(1, 2, width_ratios=[3.2, 0.75 * len(settings) + 0.5])
    draw_ranks(shown, scores, ranked, order)
    draw_grid(grid, table, scores, order)
    panels = list(right.subplots(fronts, min(2, len(settings)), squeeze=False).flat)
    for axes in panels[len(settings) :]:
        axes.set_visible(False)
    best = [
        draw_front(axes, row_title(table, setting), [c for c in cells if c["setting"] == setting])
        for axes, setting in zip(panels, settings, strict=False)
    ]
    figure.draw_without_rendering()
    for axes, points in zip(panels, best, strict=False):
        name_points(axes, points)
    save_figure(figure, path)


def draw_ranks(axes: Axes, scores: ranks.Scores, ranked: pd.DataFrame, order: np.ndarray) -> None:
    """Draws mean ranks with their intervals, the best at the top, and the critical difference."""
    places, mean = np.arange(len(order)), ranked["mean_rank"].to_numpy()
    spans = np.abs(ranked[["low", "high"]].to_numpy().T - mean)[:, order]
    axes.errorbar(mean[order], places, xerr=spans, fmt="o", markersize=4, color="#0072B2")
    if said := len(scores.settings) > 1:
        apart = ranks.critical_difference(len(order), len(scores.settings))
        axes.axvspan(mean.min(), min(mean.min() + apart, len(order)), color="0.92", zorder=0)
    style_axes(axes, "mean rank", "grey: not told from the best" if said else "", "")
    axes.set_yticks(places, [escape_plot(scores.methods[j]) for j in order], fontsize=9)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(left=0.5)


def draw_grid(axes: Axes, table: dict, scores: ranks.Scores, order: np.ndarray) -> None:
    """Draws scores in percent, coloured by how far they are below the best of their setting."""
    means = scores.means[:, order]
    axes.imshow((means.max(1, keepdims=True) - means).T, aspect="auto", cmap="Blues", vmax=0.6)
    for (setting, method), mean in np.ndenumerate(means):
        dark = means[setting].max() - mean > 0.35
        color = "white" if dark else "black"
        axes.text(
            setting, method, f"{100 * mean:.1f}", ha="center", va="center", color=color, fontsize=8
        )
    names = [escape_plot(row_title(table, name)) for name in scores.settings]
    style_axes(axes, "score (%)", "", "")
    axes.grid(False)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=9)
    axes.set_yticks([])


def draw_front(
    axes: Axes, title: str, cells: Sequence[dict[str, Any]]
) -> list[tuple[str, float, float]]:
    """Draws scores against megabytes sent; returns the methods that no other beats in both, each
    (name, megabytes, score).
    """
    sent = np.array([cell["megabytes"] for cell in cells], float)
    scores = np.array([cell["score"] for cell in cells], float)
    axes.plot(sent, scores, "o", markersize=3, color="0.7")
    front, best = [], -np.inf
    for j in sorted(range(len(cells)), key=lambda j: (sent[j], -scores[j])):
        if scores[j] > best:
            front, best = [*front, j], scores[j]
    axes.plot(sent[front], scores[front], "o", markersize=4, color="#D55E00")
    heading = escape_plot_lines(textwrap.fill(title, 30))
    style_axes(axes, heading, "megabytes, both ways", "score")
    format_percent_axis(axes)
    if sent.max() > 20:  # from none to many
        axes.set_xscale("symlog", linthresh=1)
    axes.margins(0.12)
    return [(cells[j]["method"], float(sent[j]), float(scores[j])) for j in front]


def name_points(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Writes names beside points (name, x, y) of a figure that has been laid out, each at the first
    place inside where it meets no name before it and no other point.
    """
    dots = [Bbox([dot, dot]).padded(4) for dot in axes.transData.transform([p[1:] for p in points])]
    taken: list[Bbox] = []
    for j, (name, x, y) in enumerate(points):
        for place in NAME_PLACES:
            text = axes.annotate(
                escape_plot(name),
                (x, y),
                place,
                textcoords="offset points",
                ha="left" if place[0] > 0 else "right",
                fontsize=7,
                in_layout=False,
            )
            box = text.get_window_extent().padded(3)  # pixels
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            met = any(map(box.overlaps, [*taken, *dots[:j], *dots[j + 1 :]]))
            if place == NAME_PLACES[-1] or (inside and not met):
                taken.append(box)
                break
            text.remove()
