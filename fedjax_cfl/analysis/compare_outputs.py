"""What a comparison shows: the table on the terminal, its numbers, and its picture."""

import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fedjax_cfl.analysis.compare_inputs import IDENTITY
from fedjax_cfl.analysis.plot import add_legend, new_figure, scale_scores, style_axes
from fedjax_cfl.analysis.plot_costs import (
    ROUNDS,
    Cost,
    draw_band,
    group_by_data,
    line_label,
    mean_curve,
    score_of_set,
    style_lines,
)
from fedjax_cfl.scores import find_owner, score_of

# name in the CSV -> heading, factor and decimals of the printed table, None: four digits
MEASURES: dict[str, tuple[str, float, int | None]] = {
    "best_accuracy": ("best %", 100, 2),
    "evaluations": ("of so many tests", 1, 0),
    "shared_best_accuracy": ("best % of shared tests", 100, 2),
    "shared_evaluations": ("shared tests", 1, 0),
    "final_accuracy": ("final %", 100, 2),
    "last10_evals_accuracy": ("last 10 tests %", 100, 2),
    "chosen_round": ("round chosen on validation", 1, 1),
    "macro_accuracy": ("macro %", 100, 2),
    "worst10_accuracy": ("worst 10 %", 100, 2),
    "best_rmse": ("best RMSE", 1, None),
    "shared_best_rmse": ("best RMSE of shared tests", 1, None),
    "final_rmse": ("final RMSE", 1, None),
    "last10_evals_rmse": ("last 10 tests RMSE", 1, None),
    "macro_rmse": ("macro RMSE", 1, None),
    "worst10_rmse": ("worst 10 % RMSE", 1, None),
    "mae": ("MAE", 1, None),
    "r2": ("R2", 1, 3),
    "best_micro_f1": ("best micro-F1 %", 100, 2),
    "shared_best_micro_f1": ("best micro-F1 % of shared tests", 100, 2),
    "final_micro_f1": ("final micro-F1 %", 100, 2),
    "last10_evals_micro_f1": ("last 10 tests micro-F1 %", 100, 2),
    "macro_micro_f1": ("mean of clients' micro-F1 %", 100, 2),
    "worst10_micro_f1": ("worst 10 % micro-F1 %", 100, 2),
    "label_f1": ("macro-F1 %", 100, 2),
    "exact_match": ("exact match %", 100, 2),
    "ari": ("ARI", 1, 3),
    "rounds_to_target": ("rounds to target", 1, 1),
    "accuracy_gain": ("gain %", 100, 2),
    "rmse_reduction": ("RMSE lower by", 1, None),
    "f1_gain": ("micro-F1 gain %", 100, 2),
    "speedup": ("speed-up", 1, 2),
    "units": ("models down + up", 1, 0),
    "sim_time_s": ("simulated s", 1, 1),
    "wall_s": ("wall s", 1, 1),
}


def keep_known(names: Iterable[str], groups: list[dict[str, Any]]) -> list[str]:
    """Returns the measures without those of a score that no run of the sets has, as RMSE."""
    runs = [run for group in groups for run in group["members"]]
    known = [score_of(run.get("rows") or []) for run in runs]
    return [name for name in names if find_owner(name) in (None, *known)]


def format_number(value: float, factor: float, digits: int | None, sign: str = "") -> str:
    """Returns a number in a measure's units, see `MEASURES`; a `sign` of "+" is always shown."""
    return f"{factor * value:{sign},.{digits}f}" if digits is not None else f"{value:{sign}.4g}"


def format_mean(
    estimate: tuple[float, float, int], factor: float, digits: int | None, plus: str = " ± "
) -> str:
    """Returns a mean of (mean, sd, number of values) with its sd, to the same decimals: where
    `digits` is None, those of four digits of the mean. One value has no sd.
    """
    mean, sd, values = estimate
    if values > 1 and digits is None and 1e-4 <= abs(mean) < 1e4:
        digits = 3 - math.floor(math.log10(abs(mean)))
    shown = (mean, sd) if values > 1 else (mean,)
    return plus.join(format_number(value, factor, digits) for value in shown)


def format_cells(group: dict[str, Any], measures: list[str]) -> list[str]:
    """Returns a set of runs as one line of the table."""
    cells = [group["label"], str(group["runs"])]
    for name in measures:
        (mean, sd, count), (_, factor, digits) = group[name], MEASURES[name]
        # a number of tests has an sd only if it varies
        shown = mean, sd, count if sd or "evaluations" not in name else 1
        text = format_mean(shown, factor, digits) if count else "-"
        # a mean over fewer runs than the row's would flatter the method
        cells.append(text + (f" ({count}/{group['runs']})" if 0 < count < group["runs"] else ""))
    return cells


def print_table(title: str, header: list[str], *lines: list[str]) -> None:
    """Prints a table on the terminal, of texts in rich's markup."""
    table = Table(title=title, title_justify="left")
    label = max(len(line[0]) for line in lines)
    table.add_column(header[0], min_width=min(36, label), overflow="fold")
    for heading in header[1:]:
        table.add_column(heading, justify="right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    # redirected output has no width of its own
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def list_measures(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row per set of runs: what it is of, and of every measure that some set has the
    mean, sd and number of values.
    """
    names = ("label", *IDENTITY, "overrides", "runs", "seeds")
    rows, measures = [], keep_known(MEASURES, groups)
    for group in groups:
        numbers = {
            f"{name}_{part}": value
            for name in measures
            for part, value in zip(("mean", "sd", "n"), group[name], strict=True)
        }
        rows.append({name: group[name] for name in names} | numbers)
    return rows


def format_markdown(header: list[str], *lines: list[str]) -> str:
    """Returns a table in Markdown, of texts that are escaped already."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *lines])


def choose_cost(groups: list[dict[str, Any]]) -> str:
    """Returns what communication is counted in: bytes where every run knows them, else
    units (models).
    """
    last_rows = [run["rows"][-1] for group in groups for run in group["members"] if run["rows"]]
    known = all(
        row.get(name) is not None for row in last_rows for name in ("bytes_up", "bytes_down")
    )
    return "bytes" if known else "units"


def scale_cost(cost: str, largest: float) -> tuple[float, str]:
    """Returns the divisor and the axis label for communication up to `largest`."""
    if cost == "units":
        return 1, "communication, down + up (models)"
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= scale:
            return scale, f"communication, down + up ({unit})"
    return 1, "communication, down + up (B)"


def draw_comparison(groups: list[dict[str, Any]]) -> Figure:
    """Draws the score against rounds and against communication, a line with a band of one sd per
    set; a row of panels for each data set, partition and model.
    """
    cost = choose_cost(groups)
    sums = Cost((f"{cost}_down", f"{cost}_up"), 1, cost, 0)
    named = group_by_data(groups)
    figure = new_figure(13, 1.0 + 4.0 * len(named))
    rows = figure.subplots(len(named), 2, sharey="row", squeeze=False)
    styles, lines = style_lines(groups), {}
    for (name, members), (left, right) in zip(named.items(), rows, strict=True):
        sent = [mean_curve(group["members"], sums)[0] for group in members]
        largest = max((float(np.nanmax(values, initial=0.0)) for values in sent), default=0.0)
        scale, heading = scale_cost(cost, largest)
        for group, spent in zip(members, sent, strict=True):
            label = line_label(group, named)
            curve = mean_curve(group["members"], ROUNDS)
            lines[label] = draw_band(left, *curve, styles[label], label)
            draw_band(right, spent / scale, *curve[1:], styles[label], label)
        where = f", {name}" if len(named) > 1 else ""
        score = score_of_set(members[0])
        said = f"test {score.words}, mean ± sd over seeds"
        title = f"{score.words[0].upper()}{score.words[1:]} against"
        style_axes(left, f"{title} round{where}", "round", said)
        style_axes(right, f"{title} communication", heading, "")
        for axes in (left, right):
            axes.set_xlim(left=0)
            scale_scores(axes, score)
    add_legend(figure, list(lines.values()), list(lines))
    return figure
