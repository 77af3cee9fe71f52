"""Fielding's server: what a drift event and a start cost it, beside the paper's seconds
(https://arxiv.org/abs/2411.01580, appendices C and E.1).

No run: label shares and updates are made up, of clients around a few centers, and the
programs of a run are called on them. Published seconds are those of another machine.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from fedjax_cfl.algorithms.fielding.fielding import DriftRule, fielding, follow_drift
from fedjax_cfl.algorithms.fielding.represent import label_shares
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.local import Local
from fedjax_cfl.clustering.distances import gram, l1
from fedjax_cfl.clustering.features import edc
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.clustering.metric_kmeans import by_silhouette
from fedjax_cfl.clustering.recluster import Trigger, always, never
from fedjax_cfl.data.federated import federate
from fedjax_cfl.models.task import as_task
from fedjax_cfl.models.zoo import MCLR
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.system.select import uniform
from fedjax_cfl.types import FederatedData, Partition, Pool
from papers import report
from papers.cells import Cell

MOST_GROUPS = 10
REPEATS = 3  # timed calls after the first, which compiles
# of ResNet-18's layers without the last
RESNET18 = [9408, *[9 * 64 * 64] * 4]
for width in (128, 256, 512):
    RESNET18 += [9 * width * width // 2, *[9 * width * width] * 3, width * width // 2]


def time_calls(function: Callable, *arguments: Any) -> tuple[Any, float, float]:
    """Returns (result, seconds of the first call, median of `REPEATS` later ones); the first
    includes compilation.
    """
    times, result = [], None
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return result, times[0], statistics.median(times[1:])


def draw_shares(clients: int, classes: int, seed: int = 0) -> np.ndarray:
    """Returns label shares [clients, classes] around five centers."""
    rng = np.random.default_rng(seed)
    centers = rng.dirichlet(np.full(classes, 0.1), 5)
    return np.array([rng.dirichlet(30 * centers[i % 5] + 0.01) for i in range(clients)], np.float32)


def make_clients(
    clients: int, classes: int, drift: bool, seed: int = 0, samples: int = 60
) -> FederatedData:
    """Returns clients of random labels around five centers.

    Args: `clients` is K and `classes` is C; `drift`: a tenth of the clients have the labels of
    a neighbour; `samples` is how many labels each client has.
    """
    rng = np.random.default_rng(seed)
    shares = draw_shares(clients, classes, seed).astype(np.float64)
    if drift:
        shares[::10] = shares[(np.arange(0, clients, 10) + 1) % clients]
    y = np.concatenate([rng.choice(classes, samples, p=row / row.sum()) for row in shares])
    pool = Pool(np.zeros((len(y), 1), np.float32), y.astype(np.int32), classes)
    owner = np.repeat(np.arange(clients, dtype=np.int32), samples)
    data = federate(pool, Partition(np.arange(len(y)), owner, np.zeros(len(y), bool)))
    return data.replace(shifted=drift & (jnp.arange(clients) % 10 == 0))


def time_event(clients: int, classes: int, trigger: Trigger, seed: int) -> tuple:
    """Times a drift event, from the labels on, with what `time_calls` returns; the result is
    (state, report).
    """
    before, data = (make_clients(clients, classes, drift, seed) for drift in (False, True))
    key, local = jax.random.key(seed), Local(0.1, 1, 10, execution=make_execution(make_mesh(1)))
    task = as_task(MCLR(classes), (1,), classes)
    rule = DriftRule(by_silhouette(), trigger, 0.0, "all")
    method = fielding(task, local, uniform(1), m=MOST_GROUPS, trigger=trigger)
    state = jax.jit(method.init)(key, before)
    event = jax.jit(follow_drift(label_shares(task, local), rule))
    return time_calls(event, key, state, data)


def time_label_clustering(clients: int, classes: int, seed: int) -> tuple:
    """Times the clustering of label shares with which a run starts."""
    points, valid = jnp.asarray(draw_shares(clients, classes, seed)), jnp.ones(clients, bool)
    cluster = jax.jit(partial(by_silhouette(), m=MOST_GROUPS, metric=l1))
    return time_calls(cluster, jax.random.key(seed), points, valid)


@partial(jax.jit, static_argnums=(1, 2))
def draw_layer(key: jax.Array, clients: int, size: int) -> jax.Array:
    """Returns a layer's updates [clients, size] of three groups of clients."""
    centers = jax.random.normal(key, (3, size))
    noise = jax.random.normal(jax.random.fold_in(key, 1), (clients, size))
    return centers[jnp.arange(clients) % 3] + noise


def time_update_clustering(clients: int, sizes: list[int], m: int, seed: int) -> tuple:
    """Times FlexCFL's start on the updates of `clients`: inner products, layer by layer, the
    decomposition and K-means.
    """
    inner, first, steady = jnp.zeros((clients, clients)), 0.0, 0.0
    multiply = jax.jit(gram)
    for key, size in zip(jax.random.split(jax.random.key(seed), len(sizes)), sizes, strict=True):
        delta = jax.block_until_ready(draw_layer(key, clients, size))
        part, begin, again = time_calls(multiply, delta)
        inner, first, steady = inner + part, first + begin, steady + again

    def found(inner: jax.Array) -> jax.Array:
        return kmeans(jax.random.key(seed), edc(inner, m), m).labels

    labels, begin, again = time_calls(jax.jit(found), inner)
    return labels, first + begin, steady + again


# the rows of the table, at the paper's sizes: (seed) -> (result, first, steady)
MEASUREMENTS: dict[str, Callable[[int], tuple]] = {
    "moves": partial(time_event, 5078, 100, never()),
    "clustering": partial(time_event, 5078, 100, always()),
    "labels": partial(time_label_clustering, 302, 62),
    "updates": partial(time_update_clustering, 302, RESNET18, 4),
}


def reproduce(table: dict, todo: list[Cell], out: Path, command: str, console: Console) -> int:
    """Writes table.md and table.csv of the rows and seeds that are to be measured; returns 0.

    Args: `table` is that of `load_table`; `todo` are the cells to measure; `out` is the folder
    to write in; `command` is the command line, as table.md shows it.
    """
    seconds: dict[str, list[tuple[float, float]]] = {}
    for cell in todo:
        _, first, steady = MEASUREMENTS[cell.row](cell.seed)
        seconds.setdefault(cell.row, []).append((steady, first))
        text = f"{cell}: {steady:.3f} s, the first call {first:.1f} s"
        console.print(text, markup=False, highlight=False)
    records = []
    for row, times in seconds.items():
        for column, values in zip(table["measures"], zip(*times, strict=True), strict=True):
            record = dict.fromkeys((*report.FIELDS, "sd")) | {"rounds": "", "of_rounds": ""}
            record |= {"row": row, "column": column, "mean": statistics.fmean(values)}
            record |= {"sd": statistics.stdev(values) if len(values) > 1 else None}
            record |= {"published": table["rows"][row]["published"].get(column)}
            records.append(record | {"seeds": len(values), "runs": len(values)})
    out.mkdir(parents=True, exist_ok=True)
    report.write(table, records, out, command)
    console.print(*report.build_table(table, records, console))
    console.print(f"written to {out}", soft_wrap=True)
    return 0
