"""curves.png: how a run went, drawn from metrics.jsonl; and the look of all plots."""

import math
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from fedjax_cfl.formatting import escape_plot
from fedjax_cfl.runs.display import title
from fedjax_cfl.runs.results import atomic_write, read_metrics, read_summary, series, summarize_rows
from fedjax_cfl.scores import Score, score_of

MOST_GROUPS = 64  # whose accuracies are drawn: of more, lines cannot be told apart
LEGEND_LINE = 0.21  # inches a line of a legend takes


def new_figure(width: float, height: float, title: str = "", fontsize: int = 13) -> Figure:
    """Returns an empty figure, `width` x `height` inches; a long title is folded."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    if title:
        folded = textwrap.fill(title, max(20, int(width * 110 / fontsize)))
        figure.suptitle(escape_plot_lines(folded), fontsize=fontsize)
    return figure


def escape_plot_lines(text: str) -> str:
    """Returns a text with everything but its line breaks escaped for a plot."""
    return "\n".join(map(escape_plot, text.split("\n")))


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def save_pictures(figure: Figure, stem: Path) -> list[Path]:
    """Writes a figure as PNG, SVG and PDF, with texts that stay texts; returns the files."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "pdf")]
    with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
        for path in paths:
            # no date: the same runs give the same file
            when = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
            with atomic_write(path) as temporary:
                figure.savefig(temporary, dpi=110, format=path.suffix[1:], metadata=when)
            figure.set_layout_engine("none")  # it has been laid out
    return paths


def format_written(names: Sequence[str], before: Collection[str]) -> str:
    """Returns the names of files in words, with those that were there `before` and are replaced."""
    replaced = [name for name in names if name in before]
    said = f" (replaced: {', '.join(replaced)})" if replaced else ""
    return ", ".join(names) + said


def add_legend(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int = 4
) -> None:
    """Adds a legend below everything, of at most `columns` columns and not wider than
    the figure, which grows by its lines: long labels are folded, very long ones cut.
    """
    shapes = [(count, 200) for count in range(min(columns, len(labels)), 0, -1)]
    shapes += [(1, 120), (1, 80), (1, 50), (1, 25)]
    room = 0.97 * figure.get_figwidth() * figure.dpi  # pixels
    while True:
        count, width = shapes.pop(0)
        folded = [textwrap.wrap(text, width, max_lines=3) or [""] for text in labels]
        legend = figure.legend(
            handles,
            ["\n".join(map(escape_plot, lines)) for lines in folded],
            loc="outside lower center",
            ncols=count,
            frameon=False,
            fontsize=10,
        )
        if not shapes or legend.get_window_extent().width <= room:
            break
        legend.remove()
    lines = max(map(len, folded)) * math.ceil(len(labels) / count)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * lines)


def make_palette(count: int) -> list[Any]:
    """Returns `count` colours that colour-blind readers can tell apart (Okabe and Ito,
    2008), or an even ramp beyond eight.
    """
    named = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#F0E442"]
    return (
        named[:count]
        if count <= len(named)
        else list(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, count)))
    )


def style_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Gives every panel the same look: a title at the left, labelled axes, a light grid
    and an open frame.
    """
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 2.5, 5, 10]))
    if y in ("groups", "clients"):  # counts have no halves
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))


def limit_scores(axes: Axes, score: Score) -> None:
    """Shows all that a score can be: shares from 0 to 1, in percent, errors from 0 on."""
    axes.set_ylim(0, 1.02 if score.percent else None)
    if score.percent:
        format_percent_axis(axes)


def format_percent_axis(axes: Axes) -> None:
    """Labels the shares of the y axis in percent, at steps of 1, 2 or 5 times a power
    of ten: 2.5 would need a digit that others do not.
    """
    axes.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")


def _lines(axes: Axes, rows: list[dict[str, Any]], named: dict[str, str]) -> None:
    rounds, empty = [row["round"] for row in rows], True
    marker = "o" if len(rows) <= 20 else ""
    for (name, label), colour in zip(named.items(), make_palette(len(named)), strict=True):
        values = series(rows, name)
        if np.isfinite(values).any():
            line = {"color": colour, "linewidth": 1.8, "marker": marker, "markersize": 4}
            axes.plot(rounds, values, label=label, **line)
            empty = False
    if empty:
        amid = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "nothing recorded", color="0.5", fontsize=11, **amid)
        axes.set_yticks([])


def _plot_score(axes: Axes, rows: list[dict[str, Any]]) -> None:
    score = score_of(rows)
    names = {
        score.name: "all clients",
        f"macro_{score.name}": "mean over clients",
        f"worst10_{score.name}": "worst 10 % of clients",
    }
    _lines(axes, rows, names)
    best = summarize_rows(rows)
    if best["best_round"] is not None:
        value = best[f"best_{score.name}"]
        word = "chosen on validation samples" if "chosen_round" in best else "best"
        label = f"{word}: {score.format(value, 1)} at round {best['best_round']}"
        star = {"color": "black", "markersize": 12, "linestyle": "none", "zorder": 4}
        axes.plot(best["best_round"], value, "*", label=label, **star)
    limit_scores(axes, score)
    style_axes(axes, f"Test {score.words}", "round", score.axis)


def _group_lines(
    axes: Axes, rows: list[dict[str, Any]], values: np.ndarray, linewidth: float
) -> None:
    """Adds a line for each group's values [R, m] to one of all clients, which becomes black."""
    rounds = [row["round"] for row in rows]
    for line in axes.lines:
        line.set(color="black", zorder=3)
    if values.ndim < 2:
        return
    for own, colour in zip(values.T, make_palette(values.shape[1]), strict=True):
        axes.plot(rounds, own, color=colour, linewidth=linewidth, marker="." * (len(rows) <= 20))
    label = "each group, coloured as in clients per group"
    axes.plot([], [], color="0.5", linewidth=linewidth, label=label)


def _plot_groups(axes: Axes, rows: list[dict[str, Any]]) -> None:
    score = score_of(rows)
    _lines(axes, rows, {score.name: "all clients"})
    _group_lines(axes, rows, series(rows, f"group_{score.name}"), 1.2)
    limit_scores(axes, score)
    style_axes(axes, f"Test {score.words} of each group", "round", score.axis)


def _plot_agreement(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draws how well groups agree with true ones; where these are unknown, how many are in use."""
    if np.isfinite(series(rows, "ari")).any():
        _lines(axes, rows, {"ari": "agreement with true groups"})
        axes.axhline(0, color="0.8", linewidth=0.8)
        axes.set_ylim(min(-0.05, np.nanmin(series(rows, "ari"))), 1.05)
        style_axes(axes, "Found against true groups", "round", "adjusted Rand index")
    else:
        _lines(axes, rows, {"groups": "groups with clients"})
        axes.set_ylim(bottom=0)
        style_axes(axes, "Groups in use", "round", "groups")


def _plot_loss(axes: Axes, rows: list[dict[str, Any]]) -> None:
    _lines(axes, rows, {"test_loss": "test", "train_loss": "train"})
    values = np.concatenate([series(rows, "test_loss"), series(rows, "train_loss")])
    values = values[np.isfinite(values)]
    # a run that diverges would otherwise flatten everything before it
    if values.size and values.min() > 0 and values.max() > 300 * values.min():
        axes.set_yscale("log")
    style_axes(axes, "Loss", "round", "mean loss per sample")


def _plot_discrepancy(axes: Axes, rows: list[dict[str, Any]]) -> None:
    groups = series(rows, "group_discrepancy")
    # 0: every group had one participant, and the model is its own
    known = [row | {"discrepancy": row.get("discrepancy") or None} for row in rows]
    _lines(axes, known, {"discrepancy": "all participants"})
    several = groups.ndim == 2 and groups.shape[1] > 1
    values = np.where(groups > 0, groups, np.nan) if several else np.empty(0)
    _group_lines(axes, rows, values, 0.9)
    style_axes(axes, "Discrepancy", "round", "L2 distance of trained from group model")


def _plot_sizes(axes: Axes, rows: list[dict[str, Any]]) -> None:
    sizes, rounds = series(rows, "group_sizes"), np.array([row["round"] for row in rows], float)
    count = sizes.shape[1] if sizes.ndim == 2 else 0
    if len(rows) == 1:  # an area needs a width
        sizes, rounds = np.repeat(sizes, 2, axis=0), np.array([rounds[0] - 1, rounds[0]])
    areas = []
    if count:
        area = {"alpha": 0.85, "edgecolor": "white", "linewidth": 0.4}
        areas = axes.stackplot(rounds, sizes.T, colors=make_palette(count), **area)
        axes.set_ylim(0, max(np.nansum(sizes, axis=1).max(), 1))
    if 1 <= count <= 8:
        labels = [f"group {group}" for group in range(count)]
        beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        axes.legend(areas[::-1], labels[::-1], frameon=False, fontsize=10, **beside)
    title = "Clients per group" + (f" ({count} groups)" if count > 8 else "")
    style_axes(axes, title, "round", "clients")


def _plot_concepts(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draws the score of the clients of each true group, whatever group they are in."""
    score = score_of(rows)
    values = series(rows, f"concept_{score.name}")
    count = values.shape[1]
    rounds, marker = [row["round"] for row in rows], "." * (len(rows) <= 20)
    for number, (own, colour) in enumerate(zip(values.T, make_palette(count), strict=True)):
        label = f"true group {number}" if count <= 8 else ""
        axes.plot(rounds, own, color=colour, linewidth=1.2, marker=marker, label=label)
    limit_scores(axes, score)
    style_axes(axes, f"Test {score.words} of each true group", "round", score.axis)


def draw_curves(rows: list[dict[str, Any]], name: str) -> Figure:
    """Draws how a run went, from the rows of metrics.jsonl: the score of each group and of each
    true group, too, where there are a few and the true ones are known.
    """
    scored = score_of(rows).name
    several, known = (_has_several(rows, f"{part}_{scored}") for part in ("group", "concept"))
    draws = [_plot_score, _plot_loss]
    draws += [_plot_groups] if several else []
    draws += [_plot_concepts] if known else []
    draws += [_plot_agreement] if several else []
    draws += [_plot_discrepancy, _plot_sizes]
    height = -(-len(draws) // 2)
    figure = new_figure(13, 4.25 * height, name, fontsize=14)
    grid = figure.add_gridspec(height, 2)
    for number, draw in enumerate(draws):
        last = number == len(draws) - 1
        # of an odd number the last one is as wide as two
        axes = figure.add_subplot(grid[number // 2, number % 2 :] if last else grid[number])
        draw(axes, rows)
        axes.set_xlim(0, 1.02 * (rows[-1]["round"] if rows else 1))
        if axes.get_legend_handles_labels()[0]:
            # white behind it: where every place has a line, it must be readable still
            axes.legend(framealpha=0.7, edgecolor="none", fontsize=10)
    return figure


def _has_several(rows: list[dict[str, Any]], name: str) -> bool:
    """Returns whether rows have a value for each of several groups, not too many to be drawn."""
    values = series(rows, name)
    several = values.ndim == 2 and 1 < values.shape[1] <= MOST_GROUPS
    return several and bool(np.isfinite(values).any())


def plot_curves(run_dir: str | Path, summary: dict[str, Any] | None = None) -> None:
    """Draws curves.png from metrics.jsonl (and its title from summary.json, once there is one)."""
    rows, summary = read_metrics(run_dir), summary or read_summary(run_dir) or {}
    name = title(summary) or Path(run_dir).resolve().name
    save_figure(draw_curves(rows, name), Path(run_dir) / "curves.png")
