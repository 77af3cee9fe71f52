"""What does clustering cost the server, beside published times and scikit-learn?

    python benchmarks/server_side.py             the sizes of the papers; needs about 9 GB of memory
    python benchmarks/server_side.py --quick     the same programs, a few megabytes

- Label histograms of 5,078 clients x 100 classes: K-means++ for K = 2 .. 10 and the K
of best silhouette, as "Fielding: Clustered Federated
  Learning with Data Drift" (https://arxiv.org/abs/2411.01580) re-clusters; it reports 15.6 s. Beside it: scikit-learn here.
- A drift event of Fielding at the same size, from the clients' labels on: L1 moves alone,
and with a clustering of all clients (4 seedings for each K), beside its 2.0 s and 15.6 s.
- EDC of the updates of 302 clients, ResNet-18 (11.2 M parameters); Fielding measures
37.92 s for FlexCFL's SVD on its server.
- EDC of 100 clients, MNIST-MLP and FashionMNIST-CNN, beside scikit-learn's
TruncatedSVD.

Measured 2026-11-21 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2,
seconds; the first call includes compilation:

    what                                               first call     then   beside it
    K-means++ and silhouette, K = 2..10, 5,078 x 100        11.8       2.7   scikit-learn 2.7, the same K; published 15.6
    EDC, 100 clients x MNIST-MLP (0.10 M)                   0.31      0.02   scikit-learn's TruncatedSVD 0.30
    EDC, 100 clients x FashionMNIST-CNN (3.27 M)             1.3      0.67   scikit-learn's TruncatedSVD 9.3
    EDC, 302 clients x ResNet-18 (11.2 M)                   13.6      11.5   published 37.9

The published seconds are from other machines. EDC's cost is the Gram matrix: 302^2 x
11.2 M multiply-adds run at 177 GFLOP/s here, close to what two cores can do.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.algorithms.fielding import DriftRule, fielding, follow_drift
from fedjax_cfl.clustering import distances
from fedjax_cfl.clustering.features import edc
from fedjax_cfl.clustering.kmeans import kmeans, silhouette
from fedjax_cfl.clustering.recluster import always, never
from fedjax_cfl.data import federate
from fedjax_cfl.models import as_task
from fedjax_cfl.models.zoo import MCLR
from fedjax_cfl.round.local import Local
from fedjax_cfl.round.select import uniform
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.types import FederatedData, Partition, Pool

RESTARTS = 10


def seconds(function, *arguments, repeats: int = 3):
    """Returns (result, seconds of the first call, median of the later ones); the first
    includes compilation.
    """
    times = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return result, times[0], float(np.median(times[1:]))


def line(name: str, first: float, steady: float, other: str) -> None:
    """Prints a row of the table."""
    print(f"{name:58s}  first call {first:7.2f} s   then {steady:8.3f} s   {other}", flush=True)


def histograms(clients: int, classes: int) -> np.ndarray:
    """Returns label distributions [clients, classes] around five centres."""
    rng = np.random.default_rng(0)
    centers = rng.dirichlet(np.full(classes, 0.1), 5)
    return np.array([rng.dirichlet(30 * centers[i % 5] + 0.01) for i in range(clients)], np.float32)


def choose(key, x, most: int = 10):
    """Returns (scores [most - 1], labels [most - 1, N]) of K = 2 .. most."""
    found = [kmeans(key, x, m, RESTARTS).labels for m in range(2, most + 1)]
    return jnp.stack(
        [silhouette(x, labels, m) for m, labels in enumerate(found, start=2)]
    ), jnp.stack(found)


def by_sklearn(x, most: int = 10) -> tuple[int, float]:
    """Returns (best K, seconds) of scikit-learn."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    began = time.perf_counter()
    found = [
        KMeans(m, n_init=RESTARTS, max_iter=20, random_state=0).fit(x).labels_
        for m in range(2, most + 1)
    ]
    scores = [silhouette_score(x, labels) for labels in found]
    return int(np.argmax(scores)) + 2, time.perf_counter() - began


def label_clustering(clients: int, classes: int) -> None:
    """Clusters label histograms for every K and keeps the best."""
    x = histograms(clients, classes)
    (scores, _), first, steady = seconds(jax.jit(choose), jax.random.key(0), jnp.asarray(x))
    best, theirs = by_sklearn(x)
    ours = int(jnp.argmax(scores)) + 2
    line(
        f"K-means++, silhouette, K = 2..10, {clients} x {classes}",
        first,
        steady,
        f"best K {ours}; scikit-learn {theirs:.2f} s, K {best}",
    )


def drifting_clients(clients: int, classes: int, drift: bool, samples: int = 60) -> FederatedData:
    """Returns clients of `samples` labels around five centres; with `drift` a tenth of them
    have the labels of a neighbour.
    """
    rng = np.random.default_rng(0)
    shares = histograms(clients, classes).astype(np.float64)
    if drift:
        shares[::10] = shares[(np.arange(0, clients, 10) + 1) % clients]
    y = np.concatenate([rng.choice(classes, samples, p=row / row.sum()) for row in shares])
    pool = Pool(np.zeros((len(y), 1), np.float32), y.astype(np.int32), classes)
    owner = np.repeat(np.arange(clients, dtype=np.int32), samples)
    data = federate(pool, Partition(np.arange(len(y)), owner, np.zeros(len(y), bool)))
    return data.replace(shifted=drift & (jnp.arange(clients) % 10 == 0))


def drift_event(clients: int, classes: int, most: int = 10) -> None:
    """Times a drift event with moves alone, and with a clustering of all clients."""
    before, data = (drifting_clients(clients, classes, drift) for drift in (False, True))
    key = jax.random.key(0)
    local = Local(0.1, 1, 10, width=1, mesh=make_mesh(1))
    task = as_task(MCLR(classes), (1,), classes)
    for name, trigger, published in (("moves", never(), 2.0), ("clustering", always(), 15.6)):
        rule = DriftRule(trigger=trigger)
        representation = rule.represent(task, local)
        state = jax.jit(fielding(task, local, uniform(1), m=most, rule=rule).init)(key, before)
        (after, report), first, steady = seconds(
            jax.jit(follow_drift(representation, rule)), key, state, data
        )
        groups = int(after.active.sum())
        line(
            f"drift event, {name}, {clients} x {classes}",
            first,
            steady,
            f"{int(report.migrated)} moved, {groups} groups; published {published}",
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def layer(key, clients: int, size: int) -> jax.Array:
    """Returns a layer's updates [clients, size] of three groups of clients."""
    centers = jax.random.normal(key, (3, size))
    return centers[jnp.arange(clients) % 3] + jax.random.normal(
        jax.random.fold_in(key, 1), (clients, size)
    )


def decomposition(name: str, clients: int, sizes: list[int], m: int, oracle: bool) -> None:
    """Times EDC from the Gram matrix, summed layer by layer; `oracle` also
    scikit-learn's truncated SVD of the whole.
    """
    inner, first, steady, kept = jnp.zeros((clients, clients)), 0.0, 0.0, []
    gram = jax.jit(distances.gram)
    for key, size in zip(jax.random.split(jax.random.key(1), len(sizes)), sizes, strict=True):
        delta = jax.block_until_ready(layer(key, clients, size))
        part, begin, again = seconds(gram, delta, repeats=1)
        inner, first, steady = inner + part, first + begin, steady + again
        kept += [np.asarray(delta)] if oracle else []
    features, begin, again = seconds(jax.jit(edc, static_argnums=1), inner, m)
    labels = kmeans(jax.random.key(0), features, 3).labels
    pure = (
        len(set(zip(np.asarray(labels).tolist(), (np.arange(clients) % 3).tolist(), strict=True)))
        == 3
    )
    other = "groups found" if pure else "GROUPS NOT FOUND"
    if oracle:
        from sklearn.decomposition import TruncatedSVD

        flat = np.concatenate(kept, axis=1).T
        began = time.perf_counter()
        TruncatedSVD(m, random_state=0).fit(flat)
        other += f"; scikit-learn's TruncatedSVD {time.perf_counter() - began:.2f} s"
    line(
        f"EDC, {clients} clients x {name} ({sum(sizes) / 1e6:.2f} M parameters)",
        first + begin,
        steady + again,
        other,
    )


def resnet18() -> list[int]:
    """Returns the sizes of ResNet-18's layers, 1,000 classes kept out: 11.2 M parameters."""
    widths = [(64, 64), (64, 128), (128, 256), (256, 512)]
    blocks = [
        size
        for a, b in widths
        for size in (9 * a * b, 9 * b * b, 9 * b * b, 9 * b * b, a * b if a != b else 0)
    ]
    return [size for size in (9408, *blocks) if size]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    quick = parser.parse_args().quick
    print(f"jax {jax.__version__}, {jax.device_count()} x {jax.devices()[0].device_kind}")
    label_clustering(*((300, 20) if quick else (5078, 100)))
    drift_event(*((300, 20) if quick else (5078, 100)))
    mlp, cnn = [784 * 128, 128, 1280, 10], [800, 32, 51200, 64, 3136 * 1024, 1024, 10240, 10]
    decomposition("MNIST-MLP", 100, mlp, 3, True)
    if not quick:
        decomposition("FashionMNIST-CNN", 100, cnn, 5, True)
    decomposition(
        "ResNet-18",
        30 if quick else 302,
        [size // 64 for size in resnet18()] if quick else resnet18(),
        4,
        False,
    )


if __name__ == "__main__":
    main()
