"""Groups at the end of a run: found against true ones, and how alike the clients of a
group are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from fedjax_cfl.analysis import flows
from fedjax_cfl.analysis.plot import new_figure

SHOWN_CLIENTS = 300  # of a matrix of similarities


class Likeness(NamedTuple):
    """How alike the clients of each pair are."""

    clients: np.ndarray  # [n] int, their rows of clients.parquet
    values: np.ndarray  # [n, n]
    title: str
    unit: str
    least: float  # that a value can be


def draw_final_groups(
    table: dict[str, np.ndarray], title: str, similarity: dict[str, np.ndarray] | None = None
) -> Figure | None:
    """Draws found against true groups, and how alike clients' training labels and updates
    are, as far as each is known; None where a method has no groups or nothing is known.

    `table` is clients.parquet, `similarity` similarity.parquet.
    """
    group, concept = table["group"], table["concept"]
    if not flows.has_groups(group[None]):
        return None
    known = bool(((concept >= 0) & (group >= 0)).any())
    alike = [] if table.get("labels") is None else [compare_labels(group, table["labels"])]
    if similarity is not None:
        rows, cosines = similarity["client"], similarity["similarity"]
        alike.append(Likeness(rows, cosines, "updates from one model", "cosine of updates", -1.0))
    if not known and not alike:
        return None
    panels = known + len(alike)
    axes = new_figure(6.2 * panels, 5.4, title).subplots(1, panels, squeeze=False)[0]
    if known:
        _draw_contingency(axes[0], group, concept)
    for own, likeness in zip(axes[int(known) :], alike, strict=True):
        _draw_likeness(own, group, concept, table.get("labels"), likeness)
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


def compare_labels(group: np.ndarray, labels: np.ndarray) -> Likeness:
    """Returns how alike the training labels [K, C] of clients with a group are; of many,
    some are drawn.
    """
    met = np.flatnonzero((group >= 0) & (labels.sum(1) > 0))
    if met.size > SHOWN_CLIENTS:
        met = np.sort(np.random.default_rng(0).choice(met, SHOWN_CLIENTS, replace=False))
    unit = "1 - total variation distance of label shares"
    return Likeness(met, measure_similarity(labels[met]), "training labels", unit, 0.0)


def _draw_likeness(
    axes: Axes,
    group: np.ndarray,
    concept: np.ndarray,
    labels: np.ndarray | None,
    likeness: Likeness,
) -> None:
    met = likeness.clients
    frequent = np.zeros(met.size) if labels is None else labels[met].argmax(1)
    order = np.lexsort((frequent, concept[met], group[met]))
    alike, own = likeness.values[order][:, order], group[met][order]
    image = axes.imshow(alike, cmap="viridis", vmax=1, interpolation="nearest")
    # cosines are seldom negative: the scale goes no lower than they do
    image.set_clim(vmin=max(likeness.least, float(np.floor(10 * alike.min(initial=0)) / 10)))
    edges = np.flatnonzero(np.diff(own)) + 0.5
    for edge in edges:
        axes.axhline(edge, color="white", linewidth=1)
        axes.axvline(edge, color="white", linewidth=1)
    bounds = np.concatenate([[-0.5], edges, [len(met) - 0.5]])
    names = [str(value) for value in np.unique(own).tolist()]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks((bounds[1:] + bounds[:-1]) / 2, names)
    same = own[:, None] == own
    inside, outside = alike[same & ~np.eye(len(met), dtype=bool)], alike[~same]
    means = [f"{part.mean():.2f}" if part.size else "-" for part in (inside, outside)]
    axes.set_title(
        f"Likeness of {likeness.title} ({len(met):,} of {group.size:,} clients)\n"
        f"mean within groups {means[0]}, between them {means[1]}",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel("clients, by group")
    axes.set_ylabel("clients, by group")
    axes.figure.colorbar(image, ax=axes, shrink=0.8).set_label(likeness.unit)
