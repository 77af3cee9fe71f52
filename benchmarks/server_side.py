"""What does clustering cost the server, beside published times and scikit-learn?

    python benchmarks/server_side.py             the sizes of the papers; needs about 9 GB of memory
    python benchmarks/server_side.py --quick     the same programs, a few megabytes

- Label histograms of 5,078 clients x 100 classes: K-means++ for K = 2 .. 10 and the K
of best silhouette, as "Fielding: Clustered Federated
  Learning with Data Drift" (https://arxiv.org/abs/2411.01580) re-clusters; it reports 15.6 s. Beside it: scikit-learn here.
- A drift event of Fielding at the same size, from the clients' labels on: L1 moves alone,
and with a clustering of all clients (4 seedings for each K), beside its 2.0 s and 15.6 s.
- The clustering of 302 clients' label shares (62 classes) with which Fielding starts: 0.05 s
there.
- EDC of the updates of 302 clients, ResNet-18 (11.2 M parameters); Fielding measures
37.92 s for FlexCFL's SVD on its server.
- EDC of 100 clients, MNIST-MLP and FashionMNIST-CNN, beside scikit-learn's
TruncatedSVD.

Measured 2026-11-21 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2,
seconds; the first call includes compilation:

    what                                               first call     then   beside it
    EDC, 100 clients x MNIST-MLP (0.10 M)                   0.31      0.02   scikit-learn's TruncatedSVD 0.30
    EDC, 100 clients x FashionMNIST-CNN (3.27 M)             1.3      0.67   scikit-learn's TruncatedSVD 9.3
    EDC, 302 clients x ResNet-18 (11.2 M)                   13.6      11.5   published 37.9

On 2026-11-26, three runs, 10 seedings of at most 20 steps for each K, with nothing beside it:

    K-means++ and silhouette, K = 2..10, 5,078 x 100         2.8      0.84   scikit-learn 2.8, the same K; published 15.6

On 2026-11-25, by `fedjax-cfl paper fielding_server`, with nothing beside it:

    drift event, moves, 5,078 x 100                          1.2     0.003   published 2.0
    drift event, clustering, 5,078 x 100                     3.3      0.38   published 15.6
    labels of the start, 302 x 62                            1.8     0.015   published 0.05; FlexCFL 37.92

The published seconds are from other machines. EDC's cost is the Gram matrix: 302^2 x
11.2 M multiply-adds run at 177 GFLOP/s here, close to what two cores can do.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from papers.fielding_server import (
    RESNET18,
    draw_layer,
    draw_shares,
    time_calls,
    time_event,
    time_label_clustering,
)
from program import make_parser

from fedjax_cfl.clustering import distances
from fedjax_cfl.clustering.features import edc
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.clustering.metric_kmeans import by_silhouette
from fedjax_cfl.clustering.recluster import always, never

RESTARTS, MOST = 10, 10


def line(name: str, first: float, steady: float, other: str) -> None:
    """Prints a row of the table."""
    print(f"{name:58s}  first call {first:7.2f} s   then {steady:8.3f} s   {other}", flush=True)


def cluster_by_sklearn(x: np.ndarray) -> tuple[int, float]:
    """Returns (best K, seconds) of scikit-learn. Its silhouette is Euclidean: with squared
    distances, which ours has, all of it takes 2.5 times as long.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    began = time.perf_counter()
    scores = []
    for m in range(2, MOST + 1):
        labels = KMeans(m, n_init=RESTARTS, max_iter=20, random_state=0).fit(x).labels_
        scores.append(silhouette_score(x, labels))
    return int(np.argmax(scores)) + 2, time.perf_counter() - began


def label_clustering(clients: int, classes: int) -> None:
    """Clusters label histograms for every K and keeps the best, as Fielding does, but by squared
    Euclidean distances, which scikit-learn's K-means knows.
    """
    x = draw_shares(clients, classes)
    cluster = by_silhouette(RESTARTS, iterations=20)
    run = jax.jit(partial(cluster, m=MOST, metric=distances.squared_euclidean))
    everybody = jax.random.key(0), jnp.asarray(x), jnp.ones(clients, bool)
    found, first, steady = time_calls(run, *everybody)
    best, theirs = cluster_by_sklearn(x)
    line(
        f"K-means++, silhouette, K = 2..{MOST}, {clients} x {classes}",
        first,
        steady,
        f"best K {int(found.active.sum())}; scikit-learn {theirs:.2f} s, K {best}",
    )


def drift_event(clients: int, classes: int) -> None:
    """Times a drift event with moves alone, and with a clustering of all clients."""
    for name, trigger, published in (("moves", never(), 2.0), ("clustering", always(), 15.6)):
        (after, report), first, steady = time_event(clients, classes, trigger, 0)
        groups = int(after.active.sum())
        line(
            f"drift event, {name}, {clients} x {classes}",
            first,
            steady,
            f"{int(report.migrated)} moved, {groups} groups; published {published}",
        )


def start_of_clients(clients: int, classes: int) -> None:
    """Times the clustering of label shares that Fielding starts with."""
    found, first, steady = time_label_clustering(clients, classes, 0)
    line(
        f"labels of the start, {clients} x {classes}",
        first,
        steady,
        f"{int(found.active.sum())} groups; published 0.05, FlexCFL 37.92",
    )


def decomposition(name: str, clients: int, sizes: list[int], m: int, oracle: bool) -> None:
    """Times EDC from the Gram matrix, summed layer by layer; `oracle` also
    scikit-learn's truncated SVD of the whole.
    """
    inner, first, steady, kept = jnp.zeros((clients, clients)), 0.0, 0.0, []
    gram = jax.jit(distances.gram)
    for key, size in zip(jax.random.split(jax.random.key(1), len(sizes)), sizes, strict=True):
        delta = jax.block_until_ready(draw_layer(key, clients, size))
        part, begin, again = time_calls(gram, delta)
        inner, first, steady = inner + part, first + begin, steady + again
        kept += [np.asarray(delta)] if oracle else []
    features, begin, again = time_calls(jax.jit(edc, static_argnums=1), inner, m)
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


def main() -> None:
    """Prints the table."""
    quick = make_parser(__doc__, "small sizes, under a minute").parse_args().quick
    print(f"jax {jax.__version__}, {jax.device_count()} x {jax.devices()[0].device_kind}")
    label_clustering(*((300, 20) if quick else (5078, 100)))
    drift_event(*((300, 20) if quick else (5078, 100)))
    start_of_clients(*((60, 20) if quick else (302, 62)))
    mlp, cnn = [784 * 128, 128, 1280, 10], [800, 32, 51200, 64, 3136 * 1024, 1024, 10240, 10]
    decomposition("MNIST-MLP", 100, mlp, 3, True)
    if not quick:
        decomposition("FashionMNIST-CNN", 100, cnn, 5, True)
    decomposition(
        "ResNet-18",
        30 if quick else 302,
        [size // 64 for size in RESNET18] if quick else RESNET18,
        4,
        False,
    )


if __name__ == "__main__":
    main()
