"""Groups of a run: who moved where over its rounds, as an alluvial plot; and at its end found
against true groups, and how alike the clients of a group are.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from fedjax_cfl.analysis import flows, plot
from fedjax_cfl.runs.assignments import Assignments
from fedjax_cfl.runs.results import series
from fedjax_cfl.scores import score_of

SHOWN_CLIENTS = 300  # of a matrix of similarities
SNAPSHOTS = 16  # columns of an alluvial plot that can be told apart
UNKNOWN, LOST = "0.88", "0.5"
GAP, BAR = 0.025, 0.1  # between groups, of the height of all clients; a column's share of its room
# by field of a row: marker, its face and words: no colour, which would be a class
EVENTS = {
    "shifted_clients": ("v", "black", "clients' data changed"),
    "migrated_clients": ("D", "white", "clients moved by the server"),
}


def draw_alluvial(
    found: Assignments, rows: list[dict[str, Any]], labels: np.ndarray | None, title: str
) -> Figure | None:
    """Draws who moved where, with accuracy, ARI and the share of clients that moved below;
    None where a method has no groups.

    `rows` are those of metrics.jsonl, `labels` [S, C] the training labels of the clients.
    """
    if not flows.has_groups(found.groups):
        return None
    followed, rounds = flows.match_groups(found.groups), found.rounds
    classes, moved = flows.choose_classes(found, followed, labels), flows.count_moves(followed)
    score, spacing = score_of(rows), float(np.diff(rounds).min(initial=max(1, np.ptp(rounds))))
    scores = {name: series(rows, name) for name in ("ari", *[score.name] * score.percent)}
    scores = {name: values for name, values in scores.items() if np.isfinite(values).any()}
    heights = [5, *[1.3] * bool(scores), *[0.9] * bool(moved.any())]
    figure = plot.new_figure(12, sum(heights), title)
    shape = {"sharex": True, "height_ratios": heights, "squeeze": False}
    above, *below = figure.subplots(len(heights), **shape)[:, 0]
    chosen = flows.choose_snapshots(len(rounds), SNAPSHOTS)
    palette = plot.make_palette(1 + max(followed.max(), *classes.values, 0))
    colours = [palette[value] for value in classes.values]
    colours += [LOST] * (len(classes.names) - len(colours))
    colours.append(UNKNOWN)  # of class -1
    kinds, width = classes.numbers[chosen], BAR * spacing / 2
    bottom = _draw_flows(above, rounds[chosen], followed[chosen], kinds, colours, width)
    faces = (Patch(color=colour) for colour in colours)
    handles: dict[str, Any] = dict(zip(classes.names, faces, strict=False))
    unmet, unknown = (found.groups < 0).any(), (classes.numbers < 0).any()
    if unmet or unknown:
        words = f"no model yet{', or unknown' * bool(unknown)}" if unmet else "true group unknown"
        handles[words] = Patch(color=UNKNOWN)
    handles |= _mark_events(above, rows, bottom)
    shown = f"{len(chosen)} of {len(rounds)} evaluations"
    shown += "" if moved.any() else "; no client moved from one group to another"
    heading = f"Clients by group ({found.clients.size:,} clients, {shown})"
    plot.style_axes(above, heading, "", "clients")
    above.grid(visible=False)
    if scores:
        _draw_scores(below[0], rows, scores)
    if moved.any():
        below[-1].bar(rounds, 100 * moved, 0.8 * spacing, color="0.4")
        below[-1].set_ylim(0, max(5.0, 105 * float(moved.max())))
        plot.style_axes(below[-1], "", "", "moved, %")
    room = max(spacing / 2, 0.01 * float(np.ptp(rounds)))
    above.set_xlim(rounds[0] - room, rounds[-1] + room)
    # behind `style_axes`, which has ticks of its own: rounds of the columns
    above.set_yticks([])
    [above, *below][-1].set_xlabel("round", fontsize=11)
    above.set_xticks(rounds[chosen[:: 1 + (len(str(rounds[-1])) > 3)]])
    plot.add_legend(figure, [*handles.values()], [*handles], 5)
    return figure


def _draw_flows(
    axes: Axes,
    rounds: np.ndarray,
    groups: np.ndarray,
    kinds: np.ndarray,
    colours: list[Any],
    width: float,
) -> float:
    """Draws groups [T, S] as bars, each with the classes `kinds` [T, S] of its clients, from the
    top by number, clients without a group at the bottom; and the flows between them. Returns the
    bottom of all. `width` is half that of a bar.
    """
    column = np.repeat(np.arange(len(groups)), groups.shape[1])
    clients = pd.DataFrame({"column": column, "group": groups.ravel(), "kind": kinds.ravel()})
    clients["unmet"] = clients["group"] < 0  # they lie below the others
    bars = clients.groupby(["column", "unmet", "group", "kind"], as_index=False).size()
    bars["share"] = bars["size"] / groups.shape[1]
    nodes = bars.groupby(["column", "group"], sort=False)["share"].sum().reset_index()
    nodes["top"] = 1 - _add_before(nodes, ["column"]) - GAP * nodes.groupby("column").cumcount()
    tops = nodes.set_index(["column", "group"])["top"]
    bars["top"] = bars.join(tops, on=["column", "group"])["top"]
    bars["top"] -= _add_before(bars, ["column", "group"])
    for number in range(len(groups) - 1):
        found = flows.count_flows(groups[number], groups[number + 1], kinds[number + 1])
        found["share"] = found["clients"] / groups.shape[1]
        left = _stack(found, "source", "target", tops[number])
        right = _stack(found, "target", "source", tops[number + 1])
        ends = rounds[number] + width, rounds[number + 1] - width
        bands = [_band(*ends, *each) for each in zip(left, right, found["share"], strict=True)]
        stays = found["source"] == found["target"]
        # few movers must not vanish behind many who stay
        for some, alpha in ((stays, 0.35), (~stays, 0.7)):
            outlines = [bands[n] for n in np.flatnonzero(some)]
            faces = [colours[kind] for kind in found["kind"][some]]
            axes.add_collection(PolyCollection(outlines, fc=faces, alpha=alpha, linewidths=0))
    each = bars[["group", "kind"]].to_numpy().tolist()
    shades = [UNKNOWN if group < 0 else colours[kind] for group, kind in each]
    axes.bar(rounds[bars["column"]], -bars["share"], 2 * width, bars["top"], color=shades, lw=0)
    outline = {"fill": False, "ec": "0.2", "lw": 0.6}
    axes.bar(rounds[nodes["column"]], -nodes["share"], 2 * width, nodes["top"], **outline)
    last = nodes[nodes["column"] == len(groups) - 1]
    named = last[(last["group"] >= 0) & (last["share"] > 0.02)]
    for group, height in zip(named["group"], named["top"] - named["share"] / 2, strict=True):
        axes.text(rounds[-1] + width, height, f" group {group}", va="center")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    bottom = float((nodes["top"] - nodes["share"]).min())
    axes.set_ylim(bottom - 0.01, 1.08)
    return bottom


def _stack(found: pd.DataFrame, side: str, other: str, tops: pd.Series) -> pd.Series:
    """Returns the top of each flow on its node at one `side`, where flows lie by the `other` one,
    those of clients without a group at the bottom; `tops` are those of the nodes.
    """
    unknown = found[other] < 0
    placed = found.assign(unknown=unknown).sort_values([side, "unknown", other, "kind"])
    return (placed[side].map(tops) - _add_before(placed, [side])).sort_index()


def _add_before(table: pd.DataFrame, by: list[str]) -> pd.Series:
    """Returns the sum of the shares that stand before each row of the same `by`."""
    return table.groupby(by)["share"].cumsum() - table["share"]


def _band(left: float, right: float, a: float, b: float, height: float) -> np.ndarray:
    """Returns the outline of a band of constant height from top `a` to top `b`."""
    t = np.linspace(0, 1, 2 if a == b else 24)
    x, y = left + (right - left) * t, a + (b - a) * (3 * t**2 - 2 * t**3)
    return np.column_stack([np.concatenate([x, x[::-1]]), np.concatenate([y, y[::-1] - height])])


def _mark_events(axes: Axes, rows: list[dict[str, Any]], bottom: float) -> dict[str, Line2D]:
    """Marks evaluations before which clients' data changed, or the server moved clients to other
    groups; returns the legend's handles of what there is.
    """
    handles, rounds = {}, np.array([row["round"] for row in rows])
    for level, (field, (marker, face, words)) in enumerate(EVENTS.items()):
        marked = rounds[np.nan_to_num(series(rows, field)) > 0]
        height = np.full(len(marked), 1.03 + 0.035 * level)
        look: Any = {"marker": marker, "mfc": face, "mec": "black", "ls": "none"}
        axes.plot(marked, height, markersize=5, **look)
        if len(marked) <= SNAPSHOTS:
            axes.vlines(marked, bottom, height, color="black", linewidth=0.6, linestyle=":")
        if marked.size:
            handles[words] = Line2D([], [], **look)
    return handles


def _draw_scores(axes: Axes, rows: list[dict[str, Any]], scores: dict[str, np.ndarray]) -> None:
    """Draws what is a share of 1, accuracy and ARI."""
    rounds, mark, lines = [row["round"] for row in rows], "o" if len(rows) <= 20 else "", []
    for name, values in scores.items():
        look: dict[str, Any] = {"color": "black", "label": score_of(rows).words}
        if name == "ari":
            look = {"color": "#0072B2", "label": "ARI", "ls": "--"}
        lines += axes.plot(rounds, values, marker=mark, ms=3, **look)
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.02)
    plot.style_axes(axes, "", "", "score")
    plot.label_ends(axes, lines)


# at the end


def draw_final_groups(table: dict[str, np.ndarray], title: str) -> Figure | None:
    """Draws found against true groups, and how alike clients' training labels are, as far as each
    is known; None where a method has no groups or nothing is known. `table` is clients.parquet.
    """
    group, concept, labels = table["group"], table["concept"], table.get("labels")
    known = bool(((concept >= 0) & (group >= 0)).any())
    panels = known + (labels is not None)
    if not (panels and flows.has_groups(group[None])):
        return None
    axes = plot.new_figure(6.2 * panels, 5.4, title).subplots(1, panels, squeeze=False)[0]
    if known:
        _draw_contingency(axes[0], group, concept)
    if labels is not None:
        _draw_likeness(axes[-1], group, concept, labels)
    return axes[0].figure


def _draw_contingency(axes: Axes, group: np.ndarray, concept: np.ndarray) -> None:
    met = group >= 0
    table = pd.crosstab(group[met], concept[met])
    rows, columns = linear_sum_assignment(-table)
    first = pd.Series(columns, rows).reindex(range(len(table)), fill_value=len(table.columns))
    table = table.iloc[first.sort_values(kind="stable").index]
    counts = table.to_numpy()
    shares = counts / counts.sum(1, keepdims=True)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    amid = {"ha": "center", "va": "center", "fontsize": 9}
    for row, column in np.argwhere(counts) if counts.size <= 400 else ():
        colour = "white" if shares[row, column] > 0.6 else "black"
        axes.text(column, row, f"{counts[row, column]:,}", color=colour, **amid)
    names = ["unknown" if name == "-1" else name for name in map(str, table.columns)]
    for axis, ticks in ((axes.xaxis, names), (axes.yaxis, list(map(str, table.index)))):
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
    return 1 - cdist(shares, shares, "cityblock") / 2


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
