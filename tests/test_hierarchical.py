"""Agglomerative clustering against SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.spatial.distance import cdist, squareform
from sklearn.metrics import adjusted_rand_score

from fedjax_cfl.clustering.distances import cosine_distance, euclidean, manhattan
from fedjax_cfl.clustering.hierarchical import agglomerate


def rows_and_tree(seed, points=23):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(points, 7)) + 30
    return rows, {"a": jnp.asarray(rows[:, :4].reshape(-1, 2, 2)), "b": jnp.asarray(rows[:, 4:])}


@pytest.mark.parametrize(
    ("metric", "scipy_name"),
    [(manhattan, "cityblock"), (euclidean, "euclidean"), (cosine_distance, "cosine")],
)
def test_metrics_equal_scipy(metric, scipy_name):
    rows, tree = rows_and_tree(0)
    np.testing.assert_allclose(
        metric(tree),
        cdist(rows, rows, scipy_name),
        rtol=1e-4,
        atol=2e-3 if metric is euclidean else 1e-5,
    )


@pytest.mark.parametrize("linkage", ["ward", "complete", "average", "weighted", "single"])
def test_linkages_and_thresholds_equal_scipy(linkage):
    merge = jax.jit(
        lambda distance, valid, threshold: (
            agglomerate(distance, 4, linkage, valid),
            agglomerate(distance, 23, linkage, valid, threshold),
        )
    )
    for seed in range(4):
        rows, _ = rows_and_tree(seed)
        distance, valid = (
            cdist(rows, rows),
            np.random.default_rng(seed).random(23) < (0.7 if seed % 2 else 1),
        )
        tree = scipy_linkage(squareform(distance[valid][:, valid], checks=False), linkage)
        threshold = (tree[-6, 2] + tree[-5, 2]) / 2
        few, near = (np.asarray(labels) for labels in merge(distance, valid, threshold))
        assert adjusted_rand_score(fcluster(tree, 4, "maxclust"), few[valid]) == 1
        assert adjusted_rand_score(fcluster(tree, threshold, "distance"), near[valid]) == 1
        assert near.max() == 5 and (few[~valid] == -1).all()
