"""curves.png: how a run went, drawn from metrics.jsonl; and the look of all plots."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedjax_cfl.formatting import escape_plot
from fedjax_cfl.runs import results
from fedjax_cfl.runs.display import title
from fedjax_cfl.scores import Score, score_of

MOST_GROUPS = 64  # whose accuracies are drawn: more lines are a blur
MOST_NAMED = 8  # lines with their names at their ends
DASHES = ("-", "--", "-.", ":")  # lines must differ where a printer has no colours
DPI = 110  # of pictures in files
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
    """Writes a figure as PNG, SVG or PDF, whatever the path ends in, with texts that stay texts."""
    kind = path.suffix[1:]
    # no date and no drawn names: the same runs give the same file
    when = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    look: Any = {"svg.fonttype": "none", "svg.hashsalt": "fedjax-cfl", "pdf.fonttype": 42}
    with results.atomic_write(path) as temporary, matplotlib.rc_context(look):
        if kind == "png":  # `savefig` draws it twice
            figure.set_dpi(DPI)
            FigureCanvasAgg(figure).print_png(temporary)
        else:
            figure.savefig(temporary, dpi=DPI, format=kind, metadata=when)


def save_pictures(figure: Figure, stem: Path) -> list[Path]:
    """Writes a figure as PNG, SVG and PDF; returns the files."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "pdf")]
    for path in paths:
        save_figure(figure, path)
        figure.set_layout_engine("none")  # it has been laid out
    return paths


def add_legend(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int = 4
) -> None:
    """Adds a legend below everything, of at most `columns` columns and not wider than
    the figure, which grows by its lines: long labels are folded, very long ones cut.
    """
    room = int(6 * figure.get_figwidth())  # letters, of which W takes two
    folded = [textwrap.wrap(text, room, max_lines=3) or [""] for text in labels]
    longest = max(len(line) for lines in folded for line in lines)
    count = max(1, min(columns, len(labels), 2 * room // (longest + 8)))
    names = ["\n".join(map(escape_plot, lines)) for lines in folded]
    look = {"loc": "outside lower center", "frameon": False, "fontsize": 10}
    figure.legend(handles, names, ncols=count, **look)
    lines = max(map(len, folded)) * math.ceil(len(labels) / count)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * lines)


def make_palette(count: int) -> list[Any]:
    """Returns `count` colours that colour-blind readers can tell apart (Okabe and Ito,
    2008), or an even ramp beyond eight.
    """
    named = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#F0E442"]
    ramp = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, count))
    return named[:count] if count <= len(named) else list(ramp)


def line_styles(count: int) -> list[tuple[Any, str]]:
    """Returns a colour and a dash for each of `count` lines."""
    palette = make_palette(7)  # yellow, the eighth, is too pale for a line
    return [(palette[i % 7], DASHES[i % len(DASHES)]) for i in range(count)]


def label_ends(axes: Axes, lines: Sequence[Line2D]) -> None:
    """Writes the name of each line behind its end, in its colour and clear of the others, that of
    one that ends early beside its end; limits and scales of the axes must be final.
    """
    ends = []
    for line in lines:
        x, y = (np.asarray(values, float) for values in line.get_data())
        if len(last := np.flatnonzero(np.isfinite(y))):
            end = float(x[last[-1]]), float(y[last[-1]])
            height = (axes.transScale + axes.transLimits).transform(end)[1]
            ends.append((float(height), end, line))
    right = 0.85 * max([end[0] for _, end, _ in ends], default=0.0)
    ends.sort(key=lambda each: (each[1][0] < right, -each[0]))
    wanted = np.array([height for height, end, _ in ends if end[0] >= right])
    heights = wanted.copy()
    step = 19 / axes.get_window_extent().height  # pixels of a line
    for number in range(1, len(heights)):
        heights[number] = min(heights[number], heights[number - 1] - step)
    heights += (wanted - heights).mean() if ends else 0.0  # as many up as down
    heights -= max(0.0, heights.max(initial=0.0) - 1.05)
    heights += max(0.0, -heights.min(initial=0.0))
    for number, (_, end, line) in enumerate(ends):
        text, colour = escape_plot_lines(str(line.get_label())), line.get_color()
        at = {"xytext": (6, 0), "textcoords": "offset points"}
        if number < len(heights):
            thin = {"arrowstyle": "-", "lw": 0.5, "color": colour, "relpos": (0, 0.5), "shrinkA": 0}
            at = {"xytext": (1.03, heights[number]), "textcoords": "axes fraction"}
            at["arrowprops"] = thin
        look = {"color": colour, "va": "center", "fontsize": 9.5}
        axes.annotate(text, end, annotation_clip=False, **at, **look)


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
    if y == "mean loss per sample" or y == "root mean square error":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if y in ("groups", "clients"):  # counts have no halves
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))


def format_percent_axis(axes: Axes) -> None:
    """Labels the shares of the y axis in percent, at steps of 1, 2 or 5 times a power
    of ten: 2.5 would need a digit that others do not.
    """
    axes.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")


def _plot_lines(axes: Axes, rows: list[dict[str, Any]], named: dict[str, str]) -> None:
    """Draws fields of rows, by their names; of fields that are equal everywhere one."""
    rounds, drawn = [row["round"] for row in rows], list[tuple[np.ndarray, Line2D]]()
    for (name, label), (colour, dash) in zip(named.items(), line_styles(len(named)), strict=True):
        values = results.series(rows, name)
        if not np.isfinite(values).any():
            continue
        same = [line for before, line in drawn if np.allclose(before, values, equal_nan=True)]
        if same:
            same[0].set_label(f"{same[0].get_label()} = {label}")
            continue
        look = {"color": colour, "ls": dash, "lw": 1.8, "marker": _choose_marker(rows), "ms": 4}
        drawn.append((values, axes.plot(rounds, values, label=label, **look)[0]))
    if not drawn:
        amid = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "nothing recorded", color="0.5", fontsize=11, **amid)
        axes.set_yticks([])


def _choose_marker(rows: list[dict[str, Any]]) -> str:
    return "o" if len(rows) <= 20 else ""


def _plot_each(
    axes: Axes, rows: list[dict[str, Any]], field: str, colours: list[Any], name: str
) -> None:
    """Adds a line for each group's value of a field, where there are several, to one of all
    clients, which becomes black.
    """
    rounds, values = [row["round"] for row in rows], results.series(rows, field)
    for line in axes.lines:
        line.set(color="black", zorder=3)
    for number, own in enumerate(values.T if values.ndim > 1 and values.shape[1] > 1 else []):
        look = {"color": colours[number], "lw": 1.1, "ls": DASHES[number % len(DASHES)], "ms": 2}
        if np.isfinite(own).any():
            axes.plot(rounds, own, label=f"{name} {number}", marker=_choose_marker(rows), **look)


def _plot_score(axes: Axes, rows: list[dict[str, Any]], colours: list[Any]) -> None:
    score = score_of(rows)
    names = {
        score.name: "all clients",
        f"macro_{score.name}": "mean over clients",
        f"worst10_{score.name}": "worst 10 %",
    }
    _plot_lines(axes, rows, names)
    best, words = results.summarize_rows(rows), ""
    if best["best_round"] is not None:
        value = best[f"best_{score.name}"]
        words = "chosen on validation samples" if "chosen_round" in best else "best over tests"
        words = f"; star: {words}, {score.format(value, 1)} in round {best['best_round']}"
        axes.plot(best["best_round"], value, "*", color="black", markersize=12, zorder=4)
    _style_scores(axes, score, words)


def _plot_groups(axes: Axes, rows: list[dict[str, Any]], colours: list[Any]) -> None:
    score = score_of(rows)
    _plot_lines(axes, rows, {score.name: "all clients"})
    _plot_each(axes, rows, f"group_{score.name}", colours, "group")
    _style_scores(axes, score, " of each group")


def _plot_concepts(axes: Axes, rows: list[dict[str, Any]], colours: list[Any]) -> None:
    """Draws the score of the clients of each true group, whatever group they are in."""
    score = score_of(rows)
    _plot_each(axes, rows, f"concept_{score.name}", make_palette(len(colours)), "true group")
    _style_scores(axes, score, " of each true group")


def _style_scores(axes: Axes, score: Score, words: str) -> None:
    """Shows all that a score can be: shares from 0 to 1, in percent, errors from 0 on."""
    axes.set_ylim(0, 1.02 if score.percent else None)
    if score.percent:
        format_percent_axis(axes)
    style_axes(axes, f"Test {score.words}{words}", "round", score.axis)


def _plot_agreement(axes: Axes, rows: list[dict[str, Any]], colours: list[Any]) -> None:
    _plot_lines(axes, rows, {"ari": "agreement"})
    axes.axhline(0, color="0.8", linewidth=0.8)
    axes.set_ylim(min(-0.05, np.nanmin(results.series(rows, "ari"))), 1.05)
    style_axes(axes, "Found against true groups", "round", "adjusted Rand index")


def _plot_loss(axes: Axes, rows: list[dict[str, Any]], colours: list[Any]) -> None:
    _plot_lines(axes, rows, {"test_loss": "test", "train_loss": "train"})
    values = np.concatenate([results.series(rows, "test_loss"), results.series(rows, "train_loss")])
    values = values[np.isfinite(values)]
    # a run that diverges would otherwise flatten everything before it
    if values.size and values.min() > 0 and values.max() > 300 * values.min():
        axes.set_yscale("log")
    style_axes(axes, "Loss", "round", "mean loss per sample")


def _plot_discrepancy(axes: Axes, rows: list[dict[str, Any]], colours: list[Any]) -> None:
    # 0: every group had one participant, and the model is its own
    known = [row | {"discrepancy": row.get("discrepancy") or None} for row in rows]
    for row in known:
        each = row.get("group_discrepancy") or ()
        row["group_discrepancy"] = [one or None for one in each] or None
    _plot_lines(axes, known, {"discrepancy": "all participants"})
    _plot_each(axes, known, "group_discrepancy", colours, "group")
    style_axes(axes, "Discrepancy", "round", "L2 distance of trained from group model")


def _plot_sizes(axes: Axes, rows: list[dict[str, Any]], colours: list[Any]) -> None:
    sizes, rounds = results.series(rows, "group_sizes"), results.series(rows, "round")
    if len(rows) == 1:  # an area needs a width
        sizes, rounds = np.repeat(sizes, 2, axis=0), np.array([rounds[0] - 1, rounds[0]])
    count, top = sizes.shape[1], max(np.nansum(sizes, axis=1).max(), 1)
    area = {"alpha": 0.85, "edgecolor": "white", "linewidth": 0.4}
    axes.stackplot(rounds, sizes.T, colors=colours[:count], **area)
    axes.set_ylim(0, top)
    ends = np.cumsum(np.nan_to_num(sizes[-1]))
    for number, (end, size) in enumerate(zip(ends, sizes[-1], strict=True)):
        if size > top / 30:
            axes.text(rounds[-1], end - size / 2, f"  group {number}", va="center", fontsize=9.5)
    title = "Clients per group" + (f" ({count} groups)" if count > MOST_NAMED else "")
    style_axes(axes, title, "round", "clients")


def draw_curves(
    rows: list[dict[str, Any]], name: str, table: dict[str, np.ndarray] | None = None
) -> Figure:
    """Draws how a run went, from the rows of metrics.jsonl: what was recorded, and of groups what
    differs between them. `table` is clients.parquet, for the colours of groups, see
    `colour_groups`.
    """
    scored = score_of(rows).name
    fields = "ari", "discrepancy", "group_sizes", f"group_{scored}", f"concept_{scored}"
    found = {field: results.series(rows, field) for field in ("test_loss", "train_loss", *fields)}
    known = {field for field, values in found.items() if np.isfinite(values).any()}
    counts = {field: values.shape[1] for field, values in found.items() if values.ndim > 1}
    several, concepts = (1 < counts.get(f, 0) <= MOST_GROUPS and f in known for f in fields[3:])
    kept = {
        _plot_score: True,
        _plot_loss: bool(known & {"test_loss", "train_loss"}),
        _plot_groups: several,
        _plot_concepts: concepts,
        _plot_agreement: several and "ari" in known,
        _plot_discrepancy: "discrepancy" in known,
        _plot_sizes: counts.get("group_sizes", 0) > 1,
    }
    draws = [draw for draw, wanted in kept.items() if wanted]
    height = -(-len(draws) // 2)
    colours = colour_groups(max([1, *counts.values()]), table)
    figure = new_figure(13, 4.25 * height, name, fontsize=14)
    grid = figure.add_gridspec(height, 2)
    for number, draw in enumerate(draws):
        last = number == len(draws) - 1
        # of an odd number the last one is as wide as two
        axes = figure.add_subplot(grid[number // 2, number % 2 :] if last else grid[number])
        draw(axes, rows, colours)
        axes.set_xlim(0, rows[-1]["round"] if rows else 1)
        named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        if 1 < len(named) <= MOST_NAMED + 1:
            label_ends(axes, named)
    return figure


def colour_groups(count: int, table: dict[str, np.ndarray] | None) -> list[Any]:
    """Returns the colours of `count` groups or more, by their numbers: of a found group that of the
    true group that most of its clients are in at the end, each once; where true groups are unknown
    its own.
    """
    given = dict[int, int]()
    if table is not None:
        known = np.stack([table["group"], table["concept"]], axis=1)
        known = known[(known >= 0).all(1)]
        count = max(count, int(known.max(initial=0)) + 1)
        pairs, shared = np.unique(known, axis=0, return_counts=True)
        for group, concept in pairs[np.argsort(-shared, kind="stable")].tolist():
            if group not in given and concept not in given.values():
                given[group] = concept
    # others keep their own where no other has it
    free = [number for number in range(count) if number not in given.values()]
    for group in [group for group in range(count) if group not in given]:
        given[group] = group if group in free else free[0]
        free.remove(given[group])
    palette = make_palette(count)
    return [palette[given[group]] for group in range(count)]


def plot_curves(run_dir: str | Path, summary: dict[str, Any] | None = None) -> None:
    """Draws curves.png from metrics.jsonl (and its title from summary.json, once there is one)."""
    rows, summary = results.read_metrics(run_dir), summary or results.read_summary(run_dir) or {}
    name = title(summary) or Path(run_dir).resolve().name
    table = results.read_clients(run_dir)
    save_figure(draw_curves(rows, name, table), Path(run_dir) / "curves.png")
