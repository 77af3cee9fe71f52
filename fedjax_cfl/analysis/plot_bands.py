"""Lines of a mean over runs, with a band of one sd, in one style."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fedjax_cfl.analysis.plot import make_palette
from fedjax_cfl.runs.results import series

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
