"""FedGroup, Fig. 5: how well decomposed features (EDC) stand in for mean absolute
differences of cosines (MADC).

No run: all clients pre-train once from the initial model, as FlexCFL's newcomers do,
and the two distances of every pair are compared.
"""

import csv
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from fedjax_cfl.algorithms.flexcfl.founding import parse_pretrain
from fedjax_cfl.analysis.plot import new_figure, save_figure, style_axes
from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.distances import gram as gram_of
from fedjax_cfl.clustering.features import edc as edc_of
from fedjax_cfl.clustering.features import madc as madc_of
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import escape_text
from fedjax_cfl.runs.results import atomic_write
from fedjax_cfl.types import FederatedData, Key, Task
from papers.cells import Cell

DOTS = 20_000  # pairs drawn per panel, evenly through all; the correlations are over all
FIELDS = ("row", "seed", "clients", "founders", "pairs", "pearson", "pearson_all")


def first_update_gram(
    key: Key, task: Task, data: FederatedData, local: Local, pretrain: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inner products [N, N] of the first updates of the N clients that have
    training samples, and who they are [N].

    Args: `key` draws the initial model and the batches; `local` is how clients train;
    `pretrain` is the length of a first update, as `parse_pretrain` reads it.
    """
    trial = over_clients(sgd(task, parse_pretrain(pretrain)(local)), local.execution)
    start, batches = jax.random.split(key)

    def products(data):
        cohort = make_cohort(jnp.arange(data.num_clients, dtype=jnp.int32), data, local.execution)
        initial = jax.tree.map(lambda leaf: leaf[None], task.init(start))
        upload = trial(cohort, data, (batches, initial), full_work(jnp.zeros_like(cohort.ids)))
        return gram_of(upload.delta), cohort.ids

    gram, ids = jax.device_get(jax.jit(products)(data))  # not a round: `run` has no part in it
    size = np.asarray(data.train.size)
    slots = [
        slot for slot in np.argsort(ids) if ids[slot] < data.num_clients and size[ids[slot]] > 0
    ]
    return gram[np.ix_(slots, slots)], ids[slots]


def edc_features(gram: np.ndarray, founders: np.ndarray, m: int) -> np.ndarray:
    """Returns the cosines [N, m] of all N updates to the top m singular directions of
    the founders' updates (FedGroup, eq. 8).

    With eigenpairs (l_k, q_k) of the founders' Gram matrix, a direction is sum_j q_jk
    delta_j / sqrt(l_k).
    """
    values, vectors = np.linalg.eigh(gram[np.ix_(founders, founders)].astype(np.float64))
    values, vectors = values[::-1][:m], vectors[:, ::-1][:, :m]
    norm = np.sqrt(np.maximum(np.diag(gram), np.finfo(np.float32).tiny))
    return (
        gram[:, founders]
        @ (vectors / np.sqrt(np.maximum(values, np.finfo(np.float32).tiny)))
        / norm[:, None]
    )


def pairwise_distances(points: np.ndarray) -> np.ndarray:
    """Returns the Euclidean distances [N, N] of the rows of `points` [N, m]."""
    return np.sqrt(np.square(points[:, None] - points).sum(axis=-1))


def compare_measures(config: dict, task: Task, data: FederatedData, local: Local) -> dict:
    """Returns MADC and EDC of all pairs of clients, each [pairs], and what
    correlation.csv says of them.
    """
    settings, seed = config["algorithm"], config["seed"]
    gram, ids = first_update_gram(jax.random.key(seed), task, data, local, settings["pretrain"])
    count = min(settings["alpha"] * settings["m"], ids.size)
    founders = np.random.default_rng(seed).choice(ids.size, count, replace=False)
    pairs = np.triu_indices(ids.size, 1)
    madc = np.asarray(madc_of(jnp.asarray(gram)))[pairs]
    edc = pairwise_distances(edc_features(gram, founders, settings["m"]))[pairs]
    everybody = pairwise_distances(np.asarray(edc_of(jnp.asarray(gram), settings["m"])))[pairs]
    return {
        "madc": madc,
        "edc": edc,
        "clients": ids.size,
        "founders": count,
        "pairs": madc.size,
        "pearson": float(np.corrcoef(madc, edc)[0, 1]),
        "pearson_all": float(np.corrcoef(madc, everybody)[0, 1]),
    }


def scatter(table: dict, drawn: dict[str, dict], path: Path) -> None:
    """Draws figure.png: EDC against MADC, a panel per row, with the line of least squares."""
    across = min(2, len(drawn))
    down = math.ceil(len(drawn) / across)
    figure = new_figure(1 + 5.2 * across, 1 + 4.2 * down, table["title"])
    grid = figure.subplots(down, across, squeeze=False).flat
    for (row, found), axes in zip(drawn.items(), grid, strict=False):
        x, y = found["madc"], found["edc"]
        shown = slice(None, None, max(1, len(x) // DOTS))
        axes.scatter(
            x[shown], y[shown], s=4, color="#0072B2", alpha=0.15, linewidths=0, rasterized=True
        )
        slope, offset = np.polyfit(x, y, 1)
        ends = np.array([x.min(), x.max()])
        axes.plot(ends, slope * ends + offset, color="#D55E00", linewidth=1.8)
        text = (
            f"Pearson {found['pearson']:.3f}\n{found['clients']:,} clients, {found['founders']}"
            " founders"
        )
        axes.text(
            0.97,
            0.05,
            text,
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize=10,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none"},
        )
        style_axes(axes, table["rows"][row].get("title", row), "MADC", "EDC, Euclidean distance")
    for axes in list(grid):
        axes.remove()
    save_figure(figure, path)


def reproduce(
    table: dict,
    cells: list[Cell],
    out: Path,
    build: Callable[[list[str]], tuple],
    console: Console,
    missing: tuple[str, ...],
) -> int:
    """Writes figure.png (the first seed) and correlation.csv; rows whose data are missing are
    skipped and named. Returns 0.

    Args: `table` is that of `load_table`; `cells` are those to measure; `out` is the folder to
    write in; `build(overrides)` -> (config, task, data, local); `missing` are the words of an
    InputError about data that are not on this computer.
    """
    records, drawn, skipped = [], {}, set()
    for cell in cells:
        if cell.row in skipped:
            continue
        try:
            parts = build(cell.overrides)
        except InputError as error:
            if not any(text in str(error) for text in missing):
                raise
            console.print(
                escape_text(f"{cell.row}: skipped, data missing: {error}"),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            skipped.add(cell.row)
            continue
        found = compare_measures(*parts)
        drawn.setdefault(cell.row, found)
        records.append({"row": cell.row, "seed": cell.seed} | found)
        console.print(
            f"{cell}: Pearson {found['pearson']:.3f} over {found['pairs']:,} pairs",
            markup=False,
            highlight=False,
        )
    if records:
        out.mkdir(parents=True, exist_ok=True)
        with (
            atomic_write(out / "correlation.csv") as temporary,
            temporary.open("w", newline="", encoding="utf-8") as handle,
        ):
            writer = csv.DictWriter(handle, fieldnames=FIELDS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(records)
        scatter(table, drawn, out / "figure.png")
        console.print(f"written to {out}", soft_wrap=True)
    return 0
