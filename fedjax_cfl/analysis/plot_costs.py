"""Accuracy against what it costs: rounds, communication, local steps, simulated time."""

from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fedjax_cfl.analysis.plot import add_legend, format_percent_axis, new_figure, style_axes
from fedjax_cfl.analysis.plot_bands import average_runs, draw_band, line_styles


class Cost(NamedTuple):
    """What is paid for an accuracy."""

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
    """Returns cost, mean accuracy and its sample sd over runs, each [R], at the rounds that
    every run has evaluated; the sd of one run is 0.
    """
    rows = [run["rows"] for run in members]
    _, spent, _ = average_runs(rows, cost.fields)
    _, mean, sd = average_runs(rows, ("accuracy",))
    return spent / cost.scale, mean, sd


def draw_costs(groups: list[dict[str, Any]]) -> Figure:
    """Draws accuracy against every cost that some run counts, a line with a band of one sd
    over seeds for each set of runs.
    """
    timed = any(run["sim_time"] for group in groups for run in group["members"])
    costs = {"rounds": ROUNDS} | COSTS
    if not timed:
        del costs["sim_time"]
    figure = new_figure(12, 7.6 if timed else 4.2)
    shape = (2, 2) if timed else (1, 3)
    panels, lines = figure.subplots(*shape, sharey=True).flat, {}
    for (name, cost), axes in zip(costs.items(), panels, strict=True):
        for position, (group, style) in enumerate(
            zip(groups, line_styles(len(groups)), strict=True)
        ):
            if any(run.get(name, 0) is None for run in group["members"]):
                continue  # it was not counted
            x, mean, sd = mean_curve(group["members"], cost)
            lines.setdefault(position, draw_band(axes, x, mean, sd, style, group["label"]))
        style_axes(axes, "", cost.heading, "test accuracy" if cost is ROUNDS else "")
        axes.set_xlim(left=0)
        format_percent_axis(axes)
    add_legend(figure, list(lines.values()), [groups[position]["label"] for position in lines])
    return figure
