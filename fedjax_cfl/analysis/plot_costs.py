"""Curves of several runs: lines of a mean over seeds with a band of one sd, and accuracy against
what it costs: rounds, communication, local steps, simulated time.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjax_cfl.analysis.compare_inputs import DATA
from fedjax_cfl.analysis.plot import add_legend, make_palette, new_figure, scale_scores, style_axes
from fedjax_cfl.runs.results import series
from fedjax_cfl.scores import Score, score_of

DASHES = ("-", "--", ":", "-.")
# evaluations: above how many a line is smoothed, and over how many
MIN_SMOOTHED_LENGTH, SMOOTHING_WINDOW = 100, 11


def line_styles(count: int) -> list[tuple[Any, str]]:
    """Returns a colour and a dash for each of `count` lines."""
    palette = make_palette(7)  # yellow, the eighth, is too pale for a line
    return [(palette[i % 7], DASHES[i // 7 % len(DASHES)]) for i in range(count)]


def average_runs(
    runs: list[list[dict[str, Any]]], names: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rounds, mean and sample sd over runs (0 for one), each [R], of the sum of `names`
    at the rounds that every run has evaluated.
    """
    by_round = [{row["round"]: row for row in rows} for rows in runs]
    rounds = sorted(set.intersection(*map(set, by_round)))
    found = [[series([rows[r] for r in rounds], name) for name in names] for rows in by_round]
    values = np.array(found, float).reshape(len(runs), len(names), len(rounds)).sum(1)
    sd = values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(rounds))
    return np.array(rounds, float), values.mean(0), sd


def smooth(values: np.ndarray, window: int = SMOOTHING_WINDOW) -> np.ndarray:
    """Returns the centered running mean [R] of the finite ones among `values` [R]; NaN
    where they are.
    """
    finite = np.isfinite(values)
    total, count = (
        np.convolve(v, np.ones(window), "same") for v in (np.where(finite, values, 0.0), finite)
    )
    return np.where(finite, total / np.maximum(count, 1), np.nan)


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


def last_cost(rows: list[dict[str, Any]], name: str) -> float | None:
    """Returns what a run has paid in all, in the unit of its field; None where it was not
    counted or, for simulated time, no clock ran.
    """
    values = [rows[-1].get(field) for field in COSTS[name].fields] if rows else [None]
    known = [value for value in values if value is not None]
    total = sum(known) if len(known) == len(values) else None
    return total if total or name != "sim_time" else None


def mean_curve(
    members: list[dict[str, Any]], cost: Cost
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns cost, mean score and its sample sd over runs, each [R], at the rounds that
    every run has evaluated; the sd of one run is 0.
    """
    rows = [run["rows"] for run in members]
    _, spent, _ = average_runs(rows, cost.fields)
    _, mean, sd = average_runs(rows, (score_of(rows[0]).name,))
    return spent / cost.scale, mean, sd


def group_by_data(groups: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns sets of runs by the data set, partition and model that they share, named by those of
    the three that differ, and apart by what they are scored by.
    """
    varying = [name for name in DATA if len({group.get(name) for group in groups}) > 1]
    mixed = len({score_of_set(group) for group in groups}) > 1
    found: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        names = [str(group[name]) for name in varying]
        names += [score_of_set(group).words] if mixed else []
        found.setdefault(", ".join(names), []).append(group)
    return found


def score_of_set(group: dict[str, Any]) -> Score:
    """Returns what the runs of a set are scored by."""
    return score_of(group["members"][0].get("rows") or [])


def line_label(group: dict[str, Any], panels: Collection[str]) -> str:
    """Returns what a set of runs is called in a legend: without the data, if each has a panel."""
    return group["method"] if len(panels) > 1 else group["label"]


def style_lines(groups: list[dict[str, Any]]) -> dict[str, tuple[Any, str]]:
    """Returns the style of every label: a method's line looks the same in all panels."""
    panels = group_by_data(groups)
    labels = list(dict.fromkeys(line_label(group, panels) for group in groups))
    return dict(zip(labels, line_styles(len(labels)), strict=True))


def draw_costs(groups: list[dict[str, Any]]) -> Figure:
    """Draws the score against every cost that some run counts, a line with a band of one sd
    over seeds for each set of runs; a row of panels for each data set, partition and model.
    """
    timed = any(run["sim_time"] for group in groups for run in group["members"])
    costs = {name: cost for name, cost in COSTS.items() if timed or name != "sim_time"}
    costs, named = {"rounds": ROUNDS} | costs, group_by_data(groups)
    square = timed and len(named) == 1
    figure = new_figure(12, 7.6 if square else 0.4 + 3.8 * len(named))
    shape = (2, 2) if square else (len(named), len(costs))
    panels = figure.subplots(*shape, sharey=True if square else "row", squeeze=False)
    styles, lines = style_lines(groups), {}
    rows = [panels.flat] if square else panels
    for (data, members), row in zip(named.items(), rows, strict=True):
        for (name, cost), axes in zip(costs.items(), row, strict=True):
            for group in members:
                if any(run.get(name, 0) is None for run in group["members"]):
                    continue  # it was not counted
                label = line_label(group, named)
                curve = mean_curve(group["members"], cost)
                line = draw_band(axes, *curve, styles[label], label)
                lines.setdefault(label, line)
            left = cost is ROUNDS
            score = score_of_set(members[0])
            said = f"test {score.words}" if left else ""
            style_axes(axes, data if left else "", cost.heading, said)
            axes.set_xlim(left=0)
            scale_scores(axes, score)
    add_legend(figure, list(lines.values()), list(lines))
    return figure
