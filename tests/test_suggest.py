"""How many groups clients seem to fall into, before anything is trained: planted and none."""

import numpy as np
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.analysis.suggest import join_rows, suggest_groups

CLIENTS, EACH, CLASSES, FEATURES = 24, 60, 4, 6


def deal(kind, seed=0):
    """Returns data of 24 clients, client k in group k % 3 of what a `kind` says; "none": all draw
    from one distribution.
    """
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(CLIENTS), EACH)
    group = client % 3
    y = rng.integers(CLASSES, size=client.size)
    if kind == "labels":
        y = np.where(rng.random(client.size) < 0.7, group, y)
    x = np.eye(CLASSES, FEATURES)[y] * 3 + rng.normal(size=(client.size, FEATURES))
    if kind == "features":
        x[:, 5] += 2.0 * group
    if kind == "features of each label":
        y = (y + group) % CLASSES
    return hold(x.astype(np.float32), y.astype(np.int32), client)


def hold(x, y, client, num_classes=None):
    """Returns the data of clients, of whose samples a tenth is for testing."""
    pool = cfl.from_arrays(x, y, client=client, num_classes=num_classes)
    return cfl.federate(pool, cfl.partition.by_user)


@pytest.mark.parametrize("kind", ["labels", "features", "features of each label"])
def test_planted_groups_are_suggested(kind):
    first = suggest_groups(deal(kind))[0]
    assert first.groups == 3 and first.silhouette > first.chance
    if kind != "labels":  # whose features follow
        assert first.by == kind


def test_clients_that_are_alike_get_no_suggestion():
    assert [suggest_groups(deal("none", seed)) for seed in range(5)] == [[]] * 5


def test_a_silhouette_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    cluster = pytest.importorskip("sklearn.cluster")
    rows = np.random.default_rng(0).normal(size=(40, 3)) + 2.5 * (np.arange(40) % 4)[:, None]
    count, silhouette = join_rows(rows)
    labels = cluster.AgglomerativeClustering(count, linkage="ward").fit_predict(rows)
    assert count > 1 and silhouette == pytest.approx(metrics.silhouette_score(rows, labels))


def test_few_clients_and_regression_are_looked_at_too():
    x = np.random.default_rng(0).normal(size=(90, 2)).astype(np.float32)
    client = np.arange(90) % 3
    few = hold(x, (x[:, 0] > 0).astype(np.int32), client)
    assert suggest_groups(few) == []
    client = np.arange(90 * 8) % 8
    x = np.random.default_rng(1).normal(size=(90 * 8, 2)).astype(np.float32)
    sign = np.where(client < 4, 1.0, -1.0).astype(np.float32)
    slopes = hold(x, x[:, 0] * sign, client, num_classes=0)
    assert [(each.by, each.groups) for each in suggest_groups(slopes)][:1] == [
        ("features of each label", 2)
    ]
