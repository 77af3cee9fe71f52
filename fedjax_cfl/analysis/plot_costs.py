"""Curves of several runs: lines of a mean over seeds with a band of one sd, and accuracy against
what it costs: rounds, communication, local steps, simulated time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from fedjax_cfl.analysis import plot

MARKERS = "osD^"  # of each of `DASHES`
SHORT = 26  # letters of a name that stands at the end of its line
# evaluations: above how many a line is smoothed, and over how many
MIN_SMOOTHED_LENGTH, SMOOTHING_WINDOW = 100, 11


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
    marker, every = MARKERS[plot.DASHES.index(dash)], max(1, len(x) // 8)
    look = {"color": color, "ls": dash, "lw": 1.6, "marker": marker, "markersize": 4}
    (line,) = axes.plot(x, mean, markevery=every, label=label, **look)
    axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.18, linewidth=0)
    return line


# costs


class Cost(NamedTuple):
    """What is paid for a score."""

    fields: tuple[str, ...]  # of a row of metrics.jsonl, added up
    scale: float
    heading: str


ROUNDS = Cost(("round",), 1, "round")
STEPS = Cost(("local_steps",), 1, "local steps")
TIME = Cost(("sim_time_s",), 1, "simulated s")


def last_costs(runs: pd.DataFrame, cost: Cost) -> pd.Series:
    """Returns what each run has paid in all, in the unit of its fields; NaN where it was not
    counted or, for simulated time, no clock ran.
    """
    last = pd.DataFrame([rows[-1] if rows else {} for rows in runs["rows"]], runs.index)
    totals = last.reindex(columns=[*cost.fields]).astype(float).sum(axis=1, skipna=False)
    return totals.mask(totals == 0) if cost is TIME else totals


def choose_communication(runs: pd.DataFrame) -> Cost:
    """Returns communication in bytes where every run counts them, else in units (models)."""
    fields = "bytes_down", "bytes_up"
    most = last_costs(runs[runs["rows"].map(bool)], Cost(fields, 1, ""))
    if most.isna().any():
        return Cost(("units_down", "units_up"), 1.0, "communication, down + up (models)")
    units = {1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "B"}
    scale = next((least for least in units if most.max() >= least), 1.0)
    return Cost(fields, scale, f"communication, down + up ({units[scale]})")


def has_own_shape(runs: pd.DataFrame, cost: Cost) -> bool:
    """Returns whether a round costs some method a tenth more than another on the same data: else
    curves against this cost are those against rounds.
    """
    paid = last_costs(runs, cost) / last_costs(runs, ROUNDS)
    means = runs.assign(paid=paid).groupby(["data", "label"])["paid"].mean().groupby("data")
    return bool((means.max() > 1.1 * means.min()).any())


def draw_costs(runs: pd.DataFrame) -> Figure:
    """Draws the score against rounds and against every cost of which a round takes some method
    more than another, a line with a band of one sd over seeds for each set of runs; a row of panels
    for each data set, partition and model. A method's line looks the same in all.
    """
    data, others = runs.groupby("data", sort=False), [choose_communication(runs), STEPS, TIME]
    costs = [ROUNDS, *(cost for cost in others if has_own_shape(runs, cost))]
    shape = (2, 2) if len(costs) == 4 and len(data) == 1 else (len(data), len(costs))
    figure = plot.new_figure(13, 0.6 + 3.9 * shape[0])
    panels = figure.subplots(*shape, sharey="row", squeeze=False)
    column = "method" if len(data) > 1 else "label"  # each has a panel: without the data
    labels = list(runs[column].unique())
    styles, lines = dict(zip(labels, plot.line_styles(len(labels)), strict=True)), {}
    short = len(labels) <= plot.MOST_NAMED and max(map(len, labels)) <= SHORT
    for (name, same), row in zip(data, panels.reshape(len(data), -1), strict=True):
        for cost, axes in zip(costs, row, strict=True):
            drawn = _draw_panel(axes, same, cost, column, styles)
            lines |= drawn
            score = same["score"].iloc[0]
            words = f"{score.words[0].upper()}{score.words[1:]}"
            heading = f"{words} against {cost.heading.partition(',')[0]}"
            heading += f", {name}" if name and cost is ROUNDS else ""
            unit = f"test {score.words}, mean ± sd over seeds"
            plot.style_axes(axes, heading, cost.heading, unit if cost is ROUNDS else "")
            axes.set_xlim(left=0)
            if score.percent:
                plot.format_percent_axis(axes)
            if cost is not ROUNDS:
                axes.xaxis.set_major_locator(MaxNLocator(5))
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
            elif short and len(drawn) > 1:
                plot.label_ends(axes, list(drawn.values()))
    if not short:
        plot.add_legend(figure, list(lines.values()), list(lines))
    return figure


def _draw_panel(
    axes: Axes, runs: pd.DataFrame, cost: Cost, column: str, styles: dict[str, tuple]
) -> dict[str, Line2D]:
    """Draws the sets of runs that count a cost; returns their lines by name, that in `column`."""
    name, lines = runs["score"].iloc[0].name, {}
    for _, members in runs.groupby("label", sort=False):
        if last_costs(members, cost).isna().any():
            continue  # it was not counted
        label, rows = members[column].iloc[0], list(members["rows"])
        _, spent, _ = average_runs(rows, cost.fields)
        _, mean, sd = average_runs(rows, (name,))
        lines[label] = draw_band(axes, spent / cost.scale, mean, sd, styles[label], label)
    return lines
