"""FeSEM, Fig. 3: the clients' local models in the plane of their two principal
components, coloured by the center they belong to.

Made from files: the last checkpoint of a finished run holds the stored models and the
assignment. K clients, P parameters, m groups.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from fedjax_cfl.analysis.plot import make_palette, new_figure, save_figure, style_axes
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import checkpoint
from papers.report import row_title

MAX_MODELS = 400  # clients drawn, as in the paper
# of a run's (state, data)
MODELS, CENTERS, ASSIGNED, KNOWN = (
    "[0].rows['models'].models",
    "[0].groups",
    "[0].assignment",
    "[0].rows['models'].known",
)


class ModelMap(NamedTuple):
    """Models in the plane."""

    points: np.ndarray  # [n, 2], the drawn clients' models
    centers: np.ndarray  # [m, 2]
    group: np.ndarray  # [n] int, of the drawn clients
    sizes: np.ndarray  # [m] int, clients of each group in the whole run
    explained: np.ndarray  # [2], fraction of the variance of the drawn models


def read_map(run_dir: Path, seed: int = 0) -> ModelMap:
    """Reads the last checkpoint of a run and projects at most MAX_MODELS of its clients'
    models. Raises InputError if it holds none.
    """
    folder = run_dir / "checkpoints"
    arrays = checkpoint.load_arrays(folder) if checkpoint.list_steps(folder) else {}
    layers = [name.removeprefix(MODELS) for name in arrays if name.startswith(MODELS)]
    if not layers or KNOWN not in arrays:
        raise InputError(
            f"{run_dir}: no checkpoint with stored local models, expected a run of fesem or"
            " fesem_ma"
        )
    group, clients = arrays[ASSIGNED], np.flatnonzero(arrays[KNOWN] & (arrays[ASSIGNED] >= 0))
    if len(clients) < 3:
        raise InputError(
            f"{run_dir}: {len(clients)} clients have a stored model, expected three or more for a"
            " plane"
        )
    drawn = np.sort(np.random.default_rng(seed).permutation(clients)[:MAX_MODELS])
    matrices = [
        (arrays[MODELS + layer][drawn].reshape(len(drawn), -1), arrays[CENTERS + layer])
        for layer in layers
    ]
    points, centers, explained = find_components(
        [(models, centers.reshape(len(centers), -1)) for models, centers in matrices]
    )
    sizes = np.bincount(group[clients], minlength=len(centers))
    return ModelMap(points, centers, group[drawn], sizes, explained)


def find_components(
    layers: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the two leading principal components of models [n, 2], of centers in the
    same plane [m, 2], and their parts of the variance.

    A layer is (models [n, p], centers [m, p]). With eigenpairs (l, q) of the centered
    models' Gram matrix, components are q sqrt(l), and a point with inner products b to
    the centered models has b.q / sqrt(l): nothing of size P x P is made.
    """
    gram = cross = 0.0
    for models, centers in layers:
        mean = models.mean(axis=0, dtype=np.float64).astype(models.dtype)
        apart = models - mean
        gram = gram + (apart @ apart.T).astype(np.float64)
        cross = cross + ((centers - mean) @ apart.T).astype(np.float64)
    values, vectors = np.linalg.eigh(gram)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1][:, :2]
    scale = np.sqrt(np.maximum(values[:2], np.finfo(np.float32).tiny))
    return (
        vectors * scale,
        cross @ vectors / scale,
        values[:2] / max(values.sum(), np.finfo(np.float32).tiny),
    )


def draw_panel(axes: Axes, shown: ModelMap, title: str) -> None:
    """Draws one run: a dot per client, a cross per center."""
    for g, shade in enumerate(make_palette(len(shown.sizes))):
        rows = shown.group == g
        if not shown.sizes[g]:
            continue  # no client is there, and an idle center may lie far off
        label = f"center {g + 1}: {shown.sizes[g]:,} clients"
        axes.scatter(
            *shown.points[rows].T,
            s=26,
            color=shade,
            alpha=0.75,
            linewidths=0.4,
            edgecolors="white",
            label=label,
        )
        axes.scatter(
            *shown.centers[g],
            s=150,
            color=shade,
            marker="X",
            linewidths=1.4,
            edgecolors="black",
            zorder=3,
        )
    drawn = f", {len(shown.points)} drawn" if len(shown.points) < shown.sizes.sum() else ""
    style_axes(
        axes,
        f"{title}{drawn}",
        *(f"component {i + 1} ({part:.1%} of variance)" for i, part in enumerate(shown.explained)),
    )
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.legend(
        frameon=False, fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2
    )


def draw_figures(
    build: object, todo: object, table: dict, found: dict[tuple[str, str], list[Path]], path: Path
) -> None:
    """Draws a panel for every finished cell, of its first seed.

    Args: `build` and `todo` are not needed: the runs have stored the models; `table` has the
    title; `found` are the folders of finished cells, by (row, column); `path` is that of
    figure.png.
    """
    across = min(2, len(found))
    down = math.ceil(len(found) / across)
    figure = new_figure(1 + 5.6 * across, 0.8 + 5.4 * down, table["title"])
    grid = figure.subplots(down, across, squeeze=False).flat
    for ((row, column), folders), axes in zip(found.items(), grid, strict=False):
        draw_panel(axes, read_map(folders[0]), f"{row_title(table, row)}, {column}")
    for axes in list(grid):
        axes.remove()
    save_figure(figure, path)
