"""Groups of a run: who moved where over its rounds, as an alluvial plot; and at its end found
against true groups, and how alike the clients of a group are.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.optimize import linear_sum_assignment

from fedjax_cfl.analysis import flows, plot
from fedjax_cfl.runs.assignments import Assignments
from fedjax_cfl.runs.results import series
from fedjax_cfl.scores import score_of

SHOWN_CLIENTS = 300  # of a matrix of similarities
SNAPSHOTS = 16  # columns of an alluvial plot that can be told apart
UNKNOWN, LOST = "0.88", "0.5"
GAP, BAR = 0.025, 0.1  # between groups, of the height of all clients; a column's share of its room


class Node(NamedTuple):
    """A group at a snapshot: where it lies, as shares of all clients."""

    bottom: float
    height: float


def draw_alluvial(
    found: Assignments, rows: list[dict[str, Any]], labels: np.ndarray | None, title: str
) -> Figure | None:
    """Draws who moved where, with accuracy, ARI and the share of clients that moved below;
    None where a method has no groups.

    `rows` are those of metrics.jsonl, `labels` [S, C] the training labels of the clients.
    """
    if not flows.has_groups(found.groups):
        return None
    followed = flows.match_groups(found.groups)
    classes, shares = flows.choose_classes(found, followed, labels), flows.count_moves(followed)
    below = {
        _draw_scores: 1.3 * any(np.isfinite(series(rows, n)).any() for n in _name_scores(rows)),
        _draw_moves: 0.9 * bool(shares.any()),
    }
    below = {draw: height for draw, height in below.items() if height}
    figure = plot.new_figure(12, 5.0 + sum(below.values()), title)
    above, *panels = figure.subplots(
        1 + len(below), 1, sharex=True, height_ratios=[5, *below.values()], squeeze=False
    )[:, 0]
    chosen = flows.choose_snapshots(len(found.rounds), SNAPSHOTS)
    palette = plot.make_palette(1 + max(followed.max(), *classes.values, 0))
    colours = [palette[value] for value in classes.values]
    colours += [LOST] * (len(classes.names) - len(colours))
    colours.append(UNKNOWN)  # of class -1
    drawn = _draw_flows(above, found.rounds[chosen], followed[chosen], classes, chosen, colours)
    shown = f"{len(chosen)} of {len(found.rounds)} evaluations"
    shown += "" if shares.any() else "; no client moved from one group to another"
    _mark_events(above, rows, drawn)
    plot.style_axes(
        above, f"Clients by group ({found.clients.size:,} clients, {shown})", "", "clients"
    )
    above.grid(visible=False)
    for draw, axes in zip(below, panels, strict=True):
        draw(axes, rows) if draw is _draw_scores else draw(axes, found.rounds, shares)
    first, last = found.rounds[0], found.rounds[-1]
    room = max(_find_spacing(found.rounds) / 2, 0.01 * float(last - first))
    above.set_xlim(first - room, last + room)
    # behind `style_axes`, which has ticks of its own: rounds of the columns
    above.set_yticks([])
    [above, *panels][-1].set_xlabel("round", fontsize=11)
    above.set_xticks(found.rounds[chosen[:: 1 + (len(str(last)) > 3)]])
    handles = _legend(classes, colours, rows, bool((found.groups < 0).any()))
    plot.add_legend(figure, [*handles.values()], [*handles], 5)
    return figure


def _find_spacing(rounds: np.ndarray) -> float:
    return float(np.diff(rounds).min(initial=max(1, rounds[-1] - rounds[0])))


def _place_nodes(groups: np.ndarray) -> dict[int, Node]:
    """Returns where the groups of a snapshot lie: by number from the top, clients without a
    group at the bottom.
    """
    counts = dict(zip(*np.unique(groups, return_counts=True), strict=True))
    nodes, top = {}, 1.0
    for group in sorted(counts, key=lambda group: (group < 0, group)):
        height = counts[group] / groups.size
        nodes[int(group)] = Node(top - height, height)
        top -= height + GAP
    return nodes


def _draw_flows(
    axes: Axes,
    rounds: np.ndarray,
    groups: np.ndarray,
    classes: flows.Classes,
    chosen: np.ndarray,
    colours: list[Any],
) -> float:
    """Draws groups [T, S] and the flows between them; returns the bottom of all."""
    kinds, size = classes.numbers[chosen], groups.shape[1]
    nodes = [_place_nodes(row) for row in groups]
    width = BAR * _find_spacing(rounds) / 2
    for column in range(len(rounds) - 1):
        found = flows.count_flows(groups[column], groups[column + 1], kinds[column + 1])
        found["share"] = found["clients"] / size
        left = _stack(found, "source", "target", nodes[column])
        right = _stack(found, "target", "source", nodes[column + 1])
        bands = [
            _band(rounds[column] + width, rounds[column + 1] - width, *band)
            for band in zip(left, right, found["share"], strict=True)
        ]
        stays = found["source"] == found["target"]
        # few movers must not vanish behind many who stay
        for some, alpha in ((stays, 0.35), (~stays, 0.7)):
            outlines = [bands[n] for n in np.flatnonzero(some)]
            faces = [colours[kind] for kind in found["kind"][some]]
            axes.add_collection(PolyCollection(outlines, fc=faces, alpha=alpha, linewidths=0))
    for column, at in enumerate(rounds):
        _draw_column(axes, at, width, groups[column], kinds[column], nodes[column], colours)
    for group, node in nodes[-1].items():
        if group >= 0 and node.height > 0.02:
            text = f" group {group}"
            axes.text(rounds[-1] + width, node.bottom + node.height / 2, text, va="center")
    bottom = min(node.bottom for column in nodes for node in column.values())
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(bottom - 0.01, 1.08)
    return bottom


def _stack(found: pd.DataFrame, side: str, other: str, nodes: dict[int, Node]) -> pd.Series:
    """Returns the top of each flow on its node at one `side`, where flows lie by the `other` one,
    those of clients without a group at the bottom.
    """
    unknown = found[other] < 0
    placed = found.assign(unknown=unknown).sort_values([side, "unknown", other, "kind"])
    above = placed.groupby(side)["share"].cumsum() - placed["share"]
    tops = {group: node.bottom + node.height for group, node in nodes.items()}
    return (placed[side].map(tops) - above).sort_index()


def _band(left: float, right: float, a: float, b: float, height: float) -> np.ndarray:
    """Returns the outline of a band of constant height from top `a` to top `b`."""
    t = np.linspace(0, 1, 2 if a == b else 24)
    x, y = left + (right - left) * t, a + (b - a) * (3 * t**2 - 2 * t**3)
    return np.column_stack([np.concatenate([x, x[::-1]]), np.concatenate([y, y[::-1] - height])])


def _draw_column(
    axes: Axes,
    at: float,
    width: float,
    groups: np.ndarray,
    kinds: np.ndarray,
    nodes: dict[int, Node],
    colours: list[Any],
) -> None:
    """Draws the groups of a snapshot as bars, each with the classes of its clients."""
    for group, node in nodes.items():
        values, counts = np.unique(kinds[groups == group], return_counts=True)
        top = node.bottom + node.height
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            height = count / groups.size
            colour = UNKNOWN if group < 0 else colours[value]
            axes.bar(at, -height, 2 * width, top, color=colour, linewidth=0)
            top -= height
        axes.bar(at, node.height, 2 * width, node.bottom, fill=False, ec="0.2", lw=0.6)


def list_events(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns the rounds of evaluations before which clients' data changed, and before
    which the server moved clients to other groups.
    """
    rounds = np.array([row["round"] for row in rows])
    names = {"drift": "shifted_clients", "regrouping": "migrated_clients"}
    return {name: rounds[np.nan_to_num(series(rows, key)) > 0] for name, key in names.items()}


MARKS = {  # marker, face and words: no colour, which would be a class
    "drift": ("v", "black", "clients' data changed"),
    "regrouping": ("D", "white", "clients moved by the server"),
}


def _mark_events(axes: Axes, rows: list[dict[str, Any]], bottom: float) -> None:
    for level, (name, rounds) in enumerate(list_events(rows).items()):
        marker, face, _ = MARKS[name]
        height = np.full(len(rounds), 1.03 + 0.035 * level)
        axes.plot(rounds, height, marker, mfc=face, mec="black", markersize=5, linestyle="none")
        if len(rounds) <= SNAPSHOTS:
            axes.vlines(rounds, bottom, height, color="black", linewidth=0.6, linestyle=":")


def _name_scores(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    return ("ari", score_of(rows).name) if score_of(rows).percent else ("ari",)


def _draw_scores(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draws what is a share of 1: accuracy and ARI, as far as they are known."""
    rounds, lines = [row["round"] for row in rows], []
    for name in _name_scores(rows):
        values, mark = series(rows, name), "o" if len(rows) <= 20 else ""
        look: dict[str, Any] = {"color": "black", "label": score_of(rows).words}
        if name == "ari":
            look = {"color": "#0072B2", "label": "ARI", "ls": "--"}
        if np.isfinite(values).any():
            lines += axes.plot(rounds, values, marker=mark, ms=3, **look)
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.02)
    plot.style_axes(axes, "", "", "score")
    plot.label_ends(axes, lines)


def _draw_moves(axes: Axes, rounds: np.ndarray, shares: np.ndarray) -> None:
    axes.bar(rounds, 100 * shares, 0.8 * _find_spacing(rounds), color="0.4")
    axes.set_ylim(0, max(5.0, 105 * float(shares.max(initial=0))))
    plot.style_axes(axes, "", "", "moved, %")


def _legend(
    classes: flows.Classes, colours: list[Any], rows: list[dict[str, Any]], unmet: bool
) -> dict[str, Any]:
    handles: dict[str, Any] = {
        n: Patch(color=c) for n, c in zip(classes.names, colours, strict=False)
    }
    unknown = bool((classes.numbers < 0).any())
    if unmet or unknown:
        words = f"no model yet{', or unknown' * unknown}" if unmet else "true group unknown"
        handles[words] = Patch(color=UNKNOWN)
    for name, rounds in list_events(rows).items():
        if rounds.size:
            marker, face, text = MARKS[name]
            handles[text] = Line2D([], [], marker=marker, mfc=face, mec="black", linestyle="none")
    return handles


# at the end


def draw_final_groups(table: dict[str, np.ndarray], title: str) -> Figure | None:
    """Draws found against true groups, and how alike clients' training labels are, as far as each
    is known; None where a method has no groups or nothing is known. `table` is clients.parquet.
    """
    group, concept, labels = table["group"], table["concept"], table.get("labels")
    if not flows.has_groups(group[None]):
        return None
    known = bool(((concept >= 0) & (group >= 0)).any())
    if not (panels := known + (labels is not None)):
        return None
    axes = plot.new_figure(6.2 * panels, 5.4, title).subplots(1, panels, squeeze=False)[0]
    if known:
        _draw_contingency(axes[0], group, concept)
    if labels is not None:
        _draw_likeness(axes[-1], group, concept, labels)
    return axes[0].figure


def _draw_contingency(axes: Axes, group: np.ndarray, concept: np.ndarray) -> None:
    met = group >= 0
    found, true = np.unique(group[met]), np.unique(concept[met])
    counts = flows.count_pairs(group, concept, found, true)
    rows, columns = linear_sum_assignment(-counts)
    first = pd.Series(columns, rows).reindex(range(found.size), fill_value=true.size)
    by_truth = first.sort_values(kind="stable").index
    counts, found = counts[by_truth], found[by_truth]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    amid = {"ha": "center", "va": "center", "fontsize": 9}
    for row, column in np.argwhere(counts) if counts.size <= 400 else ():
        colour = "white" if shares[row, column] > 0.6 else "black"
        axes.text(column, row, f"{counts[row, column]:,}", color=colour, **amid)
    names = ["unknown" if value < 0 else str(value) for value in true.tolist()]
    for axis, ticks in ((axes.xaxis, names), (axes.yaxis, list(map(str, found.tolist())))):
        step = -(-len(ticks) // 25)
        axis.set_ticks(range(0, len(ticks), step), ticks[::step])
    axes.spines[:].set_visible(False)
    axes.set_title("Found and true groups (clients)", loc="left", fontsize=12, fontweight="bold")
    axes.set(xlabel="true group", ylabel="found group")
    axes.figure.colorbar(image, ax=axes, shrink=0.8, label="share of the found group")


def measure_similarity(labels: np.ndarray) -> np.ndarray:
    """Returns 1 - the total variation distance of clients' label shares, from counts [S, C]:
    1 for equal shares, 0 where no label is common, [S, S].
    """
    shares = labels / labels.sum(1, keepdims=True).clip(1)
    return np.stack([1 - np.abs(shares - own).sum(1) / 2 for own in shares])


def _draw_likeness(axes: Axes, group: np.ndarray, concept: np.ndarray, labels: np.ndarray) -> None:
    """Draws how alike the training labels [K, C] of clients with a group are; of many, some are
    drawn.
    """
    met = np.flatnonzero((group >= 0) & (labels.sum(1) > 0))
    if met.size > SHOWN_CLIENTS:
        met = np.sort(np.random.default_rng(0).choice(met, SHOWN_CLIENTS, replace=False))
    met = met[np.lexsort((labels[met].argmax(1), concept[met], group[met]))]
    alike, own = measure_similarity(labels[met]), group[met]
    image = axes.imshow(alike, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    edges = np.flatnonzero(np.diff(own)) + 0.5
    for edge in edges:
        axes.axhline(edge, color="white", linewidth=1)
        axes.axvline(edge, color="white", linewidth=1)
    bounds = np.concatenate([[-0.5], edges, [len(met) - 0.5]])
    names = [str(value) for value in np.unique(own).tolist()]
    middles, shown = (bounds[1:] + bounds[:-1]) / 2, [0]
    for place, middle in enumerate(middles):  # of small groups beside each other one is named
        if middle - middles[shown[-1]] > len(met) / 25:
            shown.append(place)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(middles[shown], [names[place] for place in shown])
    same = own[:, None] == own
    inside, outside = alike[same & ~np.eye(len(met), dtype=bool)], alike[~same]
    means = [f"{part.mean():.2f}" if part.size else "-" for part in (inside, outside)]
    heading = f"Likeness of training labels ({len(met):,} of {group.size:,} clients)"
    heading += f"\nmean within groups {means[0]}, between them {means[1]}"
    axes.set_title(heading, loc="left", fontsize=11)
    axes.set(xlabel="clients, by group", ylabel="clients, by group")
    words = "1 - total variation distance of label shares"
    axes.figure.colorbar(image, ax=axes, shrink=0.8, label=words)
