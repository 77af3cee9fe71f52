"""Clusters of label shares under any metric, against SciPy and scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, others_nightly
from scipy.spatial.distance import cdist
from sklearn.metrics import silhouette_score

from fedjax_cfl.clustering import distances, metric_kmeans

METRICS = {
    "cityblock": distances.l1,
    "sqeuclidean": distances.squared_euclidean,
    "jensenshannon": distances.jensen_shannon,
}


def shares(rng, count, classes, concentration=0.3):
    return rng.dirichlet(np.full(classes, concentration), count).astype(np.float32)


@pytest.fixture(scope="module")
def planted():
    """Label shares of 60 clients around 4 centers, and the center of each."""
    rng = np.random.default_rng(1)
    centers, group = 0.7 * np.eye(10)[:4] + 0.03, np.arange(60) % 4
    return np.stack([rng.dirichlet(80 * centers[g] + 1e-3) for g in group]).astype("f4"), group


@pytest.mark.parametrize("name", METRICS)
def test_metrics_equal_scipy(name):
    rng = np.random.default_rng(0)
    a, b = shares(rng, 13, 7), shares(rng, 9, 7)
    a[0], a[1, :3], b[1, 3:] = b[0], 0, 0
    a, b = a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True)
    b[2] = a[2] + np.float32(1e-6) * (np.arange(7) - 3)
    np.testing.assert_allclose(METRICS[name](a, b), cdist(a, b, name), rtol=2e-4, atol=1e-6)
    assert not METRICS[name](a, a).diagonal().any()


@pytest.mark.nightly
@pytest.mark.parametrize("name", others_nightly(METRICS, ["sqeuclidean"]))
def test_silhouettes_equal_scikit_learn(name):
    rng = np.random.default_rng(2)
    x, labels = shares(rng, 150, 6), np.stack([rng.integers(k, size=150) for k in (2, 3, 5)])
    labels[2, :145] = np.minimum(labels[2, :145], 3)
    labels[2, 145:] = [4, 0, 1, 2, 3]  # one point alone
    valid = np.arange(150) % 7 > 0
    found = metric_kmeans.silhouettes(
        jnp.asarray(x), jnp.asarray(labels), 6, jnp.asarray(valid), METRICS[name]
    )
    apart = cdist(x, x, name)[valid][:, valid]
    np.fill_diagonal(apart, 0)
    wanted = [silhouette_score(apart, each[valid], metric="precomputed") for each in labels]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    one = metric_kmeans.silhouettes(
        jnp.asarray(x), jnp.zeros((1, 150), jnp.int32), 6, jnp.asarray(valid), METRICS[name]
    )
    assert one[0] == 0


@pytest.mark.parametrize("name", others_nightly(METRICS, ["jensenshannon"]))
def test_silhouette_finds_the_planted_number_of_clusters(name, planted):
    points, group = planted
    valid = jnp.arange(60) < 55
    cluster = metric_kmeans.by_silhouette()
    labels, active = at_once(
        cluster, jax.random.key(0), jnp.asarray(points), valid, 7, METRICS[name]
    )
    assert active.sum() == 4 and active[:4].all()
    pairs = {(g, int(label)) for g, label in zip(group[:55], labels[:55], strict=True)}
    assert len(pairs) == 4 == len({label for _, label in pairs})


@pytest.mark.nightly
def test_number_of_clusters_is_bounded_by_participants_and_clients(planted):
    points, key = jnp.asarray(planted[0]), jax.random.key(0)
    for participants, alive, most in ((6, 60, 3), (40, 4, 3), (3, 60, 1), (40, 2, 1), (40, 0, 1)):
        cluster = metric_kmeans.by_silhouette(participants=participants)
        labels, active = cluster(key, points, jnp.arange(60) < alive, 7, distances.l1)
        assert active.sum() <= most and labels.max() < most
    labels, active = metric_kmeans.by_silhouette()(key, points, jnp.ones(60, bool), 1, distances.l1)
    assert active.tolist() == [True] and not labels.any()


@pytest.mark.nightly
def test_kmeans_cost_is_that_of_its_labels_and_no_worse_than_one_cluster(planted):
    points, valid = jnp.asarray(planted[0]), jnp.arange(60) % 5 > 0
    costs = []
    for count in range(1, 8):
        labels, cost = metric_kmeans.metric_kmeans(
            jax.random.key(3), points, valid, count, 7, distances.squared_euclidean, 50
        )
        assert set(np.unique(labels)) == set(range(count))
        costs.append(float(cost))
    assert costs[0] == pytest.approx(
        float(((points - points[valid].mean(0)) ** 2)[valid].sum()), rel=1e-4
    )
    assert costs[3] < 0.5 * costs[0]


def test_kmeans_of_fewer_distinct_points_than_clusters():
    points = jnp.asarray([[0.0, 1.0]] * 4 + [[1.0, 0.0]] * 4)
    given = jax.random.key(0), points, jnp.ones(8, bool), 5, 5, distances.l1, 20
    labels, cost = at_once(metric_kmeans.metric_kmeans, *given)
    assert cost == 0 and len(set(labels[:4].tolist())) == 1 and labels[0] != labels[7]


def test_k_center_is_greedy_farthest_first(planted):
    points, valid = planted[0], np.arange(60) >= 3
    labels, active = metric_kmeans.k_center(
        jax.random.key(0), jnp.asarray(points), jnp.asarray(valid), 5, distances.l1
    )
    apart, chosen = cdist(points, points, "cityblock"), [3]
    while len(chosen) < 5:
        chosen.append(int(np.argmax(np.where(valid, apart[:, chosen].min(1), -1))))
    np.testing.assert_array_equal(labels, apart[:, chosen].argmin(1))
    assert active.all()
