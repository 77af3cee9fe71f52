"""Curves of several runs: lines of a mean over seeds with a band of one sd, and accuracy against
what it costs: rounds, communication, local steps, simulated time.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjax_cfl.analysis.plot import (
    add_legend,
    format_percent_axis,
    make_palette,
    new_figure,
    style_axes,
)
from fedjax_cfl.analysis.sets import score_of_set, split_data, split_sets

DASHES = ("-", "--", ":", "-.")
# evaluations: above how many a line is smoothed, and over how many
MIN_SMOOTHED_LENGTH, SMOOTHING_WINDOW = 100, 11


def line_styles(count: int) -> list[tuple[Any, str]]:
    """Returns a colour and a dash for each of `count` lines."""
    palette = make_palette(7)  # yellow, the eighth, is too pale for a line
    return [(palette[i % 7], DASHES[i // 7 % len(DASHES)]) for i in range(count)]


def average_runs(
    runs: list[list[dict[str, Any]]], names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rounds, mean and sample sd over runs (0 for one), each [R], of the sum of `names`
    at the rounds that every run has evaluated.
    """
    tables = [pd.DataFrame(rows).set_index("round", drop=False) for rows in runs]
    known = [table.reindex(columns=[*names]).astype(float) for table in tables]
    each = [values.sum(axis=1, skipna=False) for values in known]
    found = pd.concat(each, axis=1, join="inner").sort_index().T
    sd = found.std(skipna=False) if len(runs) > 1 else 0 * found.mean()
    return found.columns.to_numpy(float), found.mean(skipna=False).to_numpy(), sd.to_numpy()


def smooth(values: np.ndarray, window: int = SMOOTHING_WINDOW) -> np.ndarray:
    """Returns the centered running mean [R] of the finite ones among `values` [R]; NaN
    where they are.
    """
    given = pd.Series(values)
    return given.rolling(window, min_periods=1, center=True).mean().where(given.notna()).to_numpy()


def draw_band(
    axes: Axes, x: np.ndarray, mean: np.ndarray, sd: np.ndarray, style: tuple, label: str
) -> Line2D:
    """Draws a line with its band, and returns the line. A line of more than
    `MIN_SMOOTHED_LENGTH` values is smoothed, and drawn as it is in the background.

    Args: `x`, `mean` and `sd` are each [R], and the band is mean +- sd; `style` is (colour,
    dash), see `line_styles`; `label` is for the legend.
    """
    color, dash = style
    if len(x) > MIN_SMOOTHED_LENGTH:
        axes.plot(x, mean, color=color, linewidth=0.5, alpha=0.3)
        mean, sd = smooth(mean), smooth(sd)
    marker = "o" if len(x) <= 20 else ""
    (line,) = axes.plot(
        x, mean, color=color, ls=dash, lw=1.6, marker=marker, markersize=3, label=label
    )
    axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.18, linewidth=0)
    return line


# costs


class Cost(NamedTuple):
    """What is paid for a score."""

    fields: tuple[str, ...]  # of a row of metrics.jsonl, added up
    scale: float
    heading: str
    digits: int


COSTS = {
    "megabytes": Cost(("bytes_down", "bytes_up"), 1e6, "MB down + up", 2),
    "steps": Cost(("local_steps",), 1, "local steps", 0),
    "sim_time": Cost(("sim_time_s",), 1, "simulated s", 1),
}
ROUNDS = Cost(("round",), 1, "round", 0)


def last_cost(rows: list[dict[str, Any]], cost: Cost) -> float:
    """Returns what a run has paid in all, in the unit of its fields; NaN where it was not
    counted or, for simulated time, no clock ran.
    """
    values = [rows[-1].get(field) for field in cost.fields] if rows else []
    known = [value for value in values if value is not None]
    total = float(sum(known)) if len(known) == len(cost.fields) else math.nan
    return total if total or cost is not COSTS["sim_time"] else math.nan


def add_costs(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs with what each has paid in all, a column for each of `COSTS`."""
    paid = {name: [last_cost(rows, cost) for rows in runs["rows"]] for name, cost in COSTS.items()}
    return runs.assign(**paid)


def choose_communication(runs: pd.DataFrame) -> Cost:
    """Returns communication in bytes where every run knows them, else in units (models)."""
    fields = "bytes_down", "bytes_up"
    most = [last_cost(rows, Cost(fields, 1, "", 0)) for rows in runs["rows"] if rows]
    scale, unit = 1.0, "models"
    if np.isnan(most).any():
        fields = "units_down", "units_up"
    else:
        units = {1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "B"}
        scale = next((least for least in units if max(most, default=0) >= least), 1.0)
        unit = units[scale]
    return Cost(fields, scale, f"communication, down + up ({unit})", 0)


def draw_costs(runs: pd.DataFrame) -> Figure:
    """Draws the score against every cost that some run counts, a line with a band of one sd
    over seeds for each set of runs; a row of panels for each data set, partition and model.
    """
    timed = runs["sim_time"].notna().any()
    costs = [ROUNDS, *(cost for name, cost in COSTS.items() if timed or name != "sim_time")]
    data = split_data(runs)
    square = bool(timed) and len(data) == 1
    figure = new_figure(12, 7.6 if square else 0.4 + 3.8 * len(data))
    shape = (2, 2) if square else (len(data), len(costs))
    panels = figure.subplots(*shape, sharey=True if square else "row", squeeze=False)
    return _fill_panels(figure, panels.reshape(len(data), -1), runs, costs, "{data}", "")


def draw_comparison(runs: pd.DataFrame) -> Figure:
    """Draws the score against rounds and against communication, a line with a band of one sd per
    set; a row of panels for each data set, partition and model.
    """
    costs, data = [ROUNDS, choose_communication(runs)], split_data(runs)
    figure = new_figure(13, 1.0 + 4.0 * len(data))
    panels = figure.subplots(len(data), 2, sharey="row", squeeze=False)
    title = "{score} against {cost}" + ", {data}" * (len(data) > 1)
    return _fill_panels(figure, panels, runs, costs, title, ", mean ± sd over seeds")


def _fill_panels(
    figure: Figure,
    panels: np.ndarray,
    runs: pd.DataFrame,
    costs: list[Cost],
    title: str,
    said: str,
) -> Figure:
    """Draws into panels [data sets, costs] and adds the legend; a method's line looks the same in
    all. The `title` of a panel may name its {score}, {cost} and {data}; `said` follows the name of
    the score at the left.
    """
    data = split_data(runs)
    part = "method" if len(data) > 1 else "label"  # each has a panel: without the data
    labels = list(runs[part].unique())
    styles, lines = dict(zip(labels, line_styles(len(labels)), strict=True)), {}
    for (name, same), row in zip(data.items(), panels, strict=True):
        score = score_of_set(same)
        words = score.words[0].upper() + score.words[1:]
        for cost, axes in zip(costs, row, strict=True):
            for _, members in split_sets(same):
                if any(math.isnan(last_cost(rows, cost)) for rows in members["rows"]):
                    continue  # it was not counted
                label, rows = members[part].iloc[0], list(members["rows"])
                _, spent, _ = average_runs(rows, cost.fields)
                _, mean, sd = average_runs(rows, (score.name,))
                x = spent / cost.scale
                lines[label] = draw_band(axes, x, mean, sd, styles[label], label)
            left, what = axes is row[0], cost.heading.partition(",")[0]
            heading = title.format(score=words, cost=what, data=name)
            shown = heading if left or "{cost}" in title else ""
            style_axes(axes, shown, cost.heading, f"test {score.words}{said}" if left else "")
            axes.set_xlim(left=0)
            if score.percent:
                format_percent_axis(axes)
    add_legend(figure, list(lines.values()), list(lines))
    return figure
