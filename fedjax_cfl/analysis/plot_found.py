"""Groups at the end of a run: found against true ones, and how alike the clients of a
group are.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from fedjax_cfl.analysis import flows
from fedjax_cfl.analysis.plot import new_figure

SHOWN_CLIENTS = 300  # of a matrix of similarities


def draw_final_groups(table: dict[str, np.ndarray], title: str) -> Figure | None:
    """Draws found against true groups, and how alike clients' training labels are, as far as each
    is known; None where a method has no groups or nothing is known. `table` is clients.parquet.
    """
    group, concept, labels = table["group"], table["concept"], table.get("labels")
    if not flows.has_groups(group[None]):
        return None
    known = bool(((concept >= 0) & (group >= 0)).any())
    panels = known + (labels is not None)
    if not panels:
        return None
    axes = new_figure(6.2 * panels, 5.4, title).subplots(1, panels, squeeze=False)[0]
    if known:
        _draw_contingency(axes[0], group, concept)
    if labels is not None:
        _draw_likeness(axes[-1], group, concept, labels)
    return axes[0].figure


def _draw_contingency(axes: Axes, group: np.ndarray, concept: np.ndarray) -> None:
    met = group >= 0
    found, true = np.unique(group[met]), np.unique(concept[met])
    counts = flows.count_pairs(group, concept, found, true)
    order = linear_sum_assignment(-counts)
    first = {int(row): int(column) for row, column in zip(*order, strict=True)}
    by_truth = sorted(range(found.size), key=lambda row: first.get(row, true.size))
    counts, found = counts[by_truth], found[by_truth]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    if counts.size <= 400:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if shares[row, column] > 0.6 else "black"
                axes.text(
                    column, row, f"{count:,}", ha="center", va="center", color=colour, fontsize=9
                )
    names = ["unknown" if value < 0 else str(value) for value in true.tolist()]
    _label_ticks(axes, names, [str(value) for value in found.tolist()])
    axes.set_title("Found and true groups (clients)", loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("true group")
    axes.set_ylabel("found group")
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("share of the found group")


def _label_ticks(axes: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        step = -(-len(names) // 25)
        axis.set_ticks(range(0, len(names), step), list(names)[::step])
    axes.spines[:].set_visible(False)


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
    axes.set_title(
        f"Likeness of training labels ({len(met):,} of {group.size:,} clients)\n"
        f"mean within groups {means[0]}, between them {means[1]}",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel("clients, by group")
    axes.set_ylabel("clients, by group")
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("1 - total variation distance of label shares")
