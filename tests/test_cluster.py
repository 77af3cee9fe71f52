"""Clustering against NumPy, SciPy and scikit-learn, and on degenerate inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, nightly, others_nightly
from scipy.cluster.hierarchy import fcluster
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.spatial.distance import squareform
from sklearn.cluster import KMeans as ScikitKMeans
from sklearn.metrics import adjusted_rand_score

from fedjax_cfl.clustering import distances
from fedjax_cfl.clustering.distances import dissimilarity, gram
from fedjax_cfl.clustering.features import edc, edc_randomized, madc
from fedjax_cfl.clustering.hierarchical import LINKAGES, agglomerate
from fedjax_cfl.clustering.kmeans import draw_centers, kmeans, move_centers
from fedjax_cfl.errors import InputError

KEY = jax.random.key(0)
GRAM = jax.jit(gram)
EDC = jax.jit(edc, static_argnums=1)
MADC = jax.jit(madc)
KMEANS = jax.jit(kmeans, static_argnums=(2, 3, 4, 6))
AGGLOMERATE = jax.jit(agglomerate, static_argnums=(1, 2))
ALL = jnp.ones(60)


def fit(x, m=3, weight=ALL, greedy=None):
    """Nearly every test uses 60 points and 3 clusters, so that one compiled program serves them."""
    return KMEANS(KEY, x, m, 10, 20, weight, greedy)


def tree(rows):
    """Splits rows [S, P] into an update pytree with two leaves of different rank."""
    rows = np.asarray(rows, np.float32)
    third = rows.shape[1] // 3
    return {
        "kernel": jnp.asarray(rows[:, : 2 * third].reshape(len(rows), 2, third)),
        "bias": jnp.asarray(rows[:, 2 * third :]),
    }


def planted(seed, clients=60, size=785, groups=3, noise=0.1):
    """Returns updates of random length along one of `groups` random directions, and who
    follows which.
    """
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(groups, size))
    owner = np.arange(clients) % groups
    rows = directions[owner] + noise * rng.normal(size=(clients, size))
    return (rows * rng.uniform(0.5, 2, (clients, 1))).astype(np.float32), owner


def blobs(seed, points, groups, features=3, spread=0.05):
    rng = np.random.default_rng(seed)
    owner = np.arange(points) % groups
    centers = 4 * np.eye(groups, features) + np.arange(groups)[:, None]
    return (centers[owner] + spread * rng.normal(size=(points, features))).astype(np.float32), owner


def exact_features(rows, m):
    """Cosines to the top m right singular vectors, as the paper words it, in float64."""
    rows = np.asarray(rows, np.float64)
    directions = np.linalg.svd(rows, full_matrices=False)[2][:m]
    return rows @ directions.T / np.linalg.norm(rows, axis=1, keepdims=True)


def assert_equal_up_to_sign(got, expected, atol):
    got = np.asarray(got) * np.sign(np.sum(np.asarray(got) * expected, axis=0))
    np.testing.assert_allclose(got, expected, atol=atol)


def test_gram_and_cosine_equal_numpy():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(5, 12)), rng.normal(size=(3, 12))
    a[2] = 0
    np.testing.assert_allclose(GRAM(tree(a)), a @ a.T, rtol=1e-5, atol=1e-5)
    norms = np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    expected = np.divide(a @ b.T, norms, out=np.zeros_like(norms), where=norms > 0)
    found = at_once(distances.cosine, tree(a), tree(b))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(dissimilarity(tree(a), tree(b)), (1 - expected) / 2, atol=1e-6)


def test_cosine_survives_tiny_and_huge_updates():
    rows = np.array([[1, 0, 0], [1e-15, 1e-15, 0], [1e15, 0, 0], [0, 0, 0]])
    got = at_once(distances.cosine, tree(rows), tree(rows))
    half = np.sqrt(0.5)
    np.testing.assert_allclose(
        got, [[1, half, 1, 0], [half, 1, half, 0], [1, half, 1, 0], [0, 0, 0, 0]], atol=1e-6
    )


@pytest.mark.parametrize("m", [nightly(1), 3])
def test_edc_equals_truncated_svd(m):
    rows, _ = planted(2, noise=0.3)
    features = EDC(GRAM(tree(rows)), m)
    assert features.shape == (60, m)
    assert_equal_up_to_sign(features, exact_features(rows, m), atol=1e-4)


def test_edc_signs_do_not_depend_on_the_order_of_clients():
    rows, _ = planted(3)
    order = np.random.default_rng(0).permutation(len(rows))
    features = EDC(rows @ rows.T, 3)
    np.testing.assert_allclose(EDC(rows[order] @ rows[order].T, 3), features[order], atol=1e-4)
    assert (features[np.argmax(np.abs(features), axis=0), np.arange(3)] > 0).all()


def test_randomized_edc_equals_exact_where_the_spectrum_has_a_gap():
    rows, _ = planted(4, noise=0.2)
    got = jax.jit(edc_randomized, static_argnums=2)(KEY, tree(rows), 3)
    np.testing.assert_allclose(got, EDC(GRAM(tree(rows)), 3), atol=1e-4)


def test_madc_equals_the_triple_loop():
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(9, 6))
    rows[4] = 0
    valid = np.array([1, 1, 1, 1, 1, 1, 1, 0, 1], bool)

    def reference(rows, valid):
        norm = np.linalg.norm(rows, axis=1)
        norm[norm == 0] = 1
        s = rows @ rows.T / np.outer(norm, norm)
        out = np.zeros_like(s)
        for i in np.flatnonzero(valid):
            for j in np.flatnonzero(valid):
                out[i, j] = sum(
                    abs(s[i, z] - s[j, z]) for z in np.flatnonzero(valid) if z not in (i, j)
                ) / (valid.sum() - 2)
        return out

    inner = jnp.asarray(rows @ rows.T, jnp.float32)
    np.testing.assert_allclose(
        MADC(inner, jnp.ones(9, bool)), reference(rows, np.ones(9, bool)), atol=1e-5
    )
    np.testing.assert_allclose(MADC(inner, jnp.asarray(valid)), reference(rows, valid), atol=1e-5)


def test_planted_directions_are_found_by_edc_and_madc():
    rows, owner = planted(6, noise=0.5)
    inner = GRAM(tree(rows))
    assert adjusted_rand_score(owner, fit(EDC(inner, 3)).labels) == 1
    distance = MADC(inner)
    assert adjusted_rand_score(owner, AGGLOMERATE(distance, 3, "complete")) == 1
    same = owner[:, None] == owner
    assert np.max(np.asarray(distance)[same]) < np.min(np.asarray(distance)[~same])


def test_kmeans_equals_scikit_learn_on_separated_data():
    x, owner = blobs(7, points=60, groups=3)
    found = fit(x)
    expected = ScikitKMeans(3, n_init=10, random_state=0).fit(x)
    assert adjusted_rand_score(owner, found.labels) == 1
    np.testing.assert_allclose(found.inertia, expected.inertia_, rtol=1e-4)
    np.testing.assert_allclose(
        np.sort(found.centers, axis=0), np.sort(expected.cluster_centers_, axis=0), atol=1e-4
    )


@pytest.mark.parametrize("greedy", [None, 1])
def test_kmeans_inertia_is_close_to_scikit_learn_on_noise(greedy):
    x = np.random.default_rng(8).normal(size=(60, 3)).astype(np.float32)
    expected = ScikitKMeans(3, n_init=10, random_state=0).fit(x).inertia_
    found = fit(x, greedy=greedy)
    assert found.inertia < 1.03 * expected
    to_center = np.square(x[:, None] - np.asarray(found.centers)).sum(-1)
    np.testing.assert_array_equal(found.labels, to_center.argmin(1))
    np.testing.assert_allclose(found.inertia, to_center.min(1).sum(), rtol=1e-5)


def test_kmeans_weights_count_like_copies():
    x, _ = blobs(9, points=60, groups=3, spread=0.5)
    weight = np.arange(60) % 4 + 1
    copies = ScikitKMeans(3, n_init=10, random_state=0).fit(np.repeat(x, weight, axis=0))
    np.testing.assert_allclose(
        fit(x, weight=jnp.asarray(weight, jnp.float32)).inertia, copies.inertia_, rtol=1e-4
    )


def test_kmeans_ignores_masked_rows_whatever_they_hold():
    x, _ = blobs(10, points=60, groups=3)
    plain = fit(x)
    masked = fit(np.vstack([x, [np.nan] * 3, x[:1] + 0.1]), weight=jnp.ones(62).at[60:].set(0))
    np.testing.assert_array_equal(masked.labels[:60], plain.labels)
    np.testing.assert_allclose(masked.centers, plain.centers, rtol=1e-5)
    np.testing.assert_allclose(masked.inertia, plain.inertia, rtol=1e-5)
    assert masked.labels[61] == plain.labels[0]


def test_kmeans_moves_an_empty_cluster_to_the_farthest_point():
    x = jnp.asarray([[0.0], [0.1], [5.0], [9.0], [100.0]])
    weight = jnp.asarray([1.0, 1, 1, 1, 0])
    centers = jnp.asarray([[0.0], [50.0], [60.0]])
    distance = jnp.square(x[:, 0] - centers)
    moved = at_once(move_centers, x, weight, distance, centers, jnp.ones(3, bool))
    np.testing.assert_allclose(moved, [[3.525], [9.0], [5.0]], rtol=1e-6)


@pytest.mark.parametrize("m", [nightly(2), 5])
@pytest.mark.parametrize("linkage", ["complete", "average", "single"])
def test_agglomerate_equals_scipy_and_skips_masked_rows(linkage, m):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        distance = squareform(rng.permutation(24 * 23 // 2) / 100 + 1)  # without ties
        valid = rng.random(24) < (0.7 if seed % 2 else 1)
        labels = np.asarray(AGGLOMERATE(jnp.asarray(distance), m, linkage, jnp.asarray(valid)))
        expected = fcluster(
            scipy_linkage(squareform(distance[valid][:, valid]), linkage), m, "maxclust"
        )
        assert adjusted_rand_score(expected, labels[valid]) == 1
        assert (labels[~valid] == -1).all()
        first = [np.flatnonzero(labels == g)[0] for g in range(m)]
        assert labels.max() == m - 1 and first == sorted(first)


def test_agglomerate_breaks_ties_by_lowest_index():
    # Points 0 .. 5 on a line, complete linkage: {0, 1}, then {2, 3}, then {4, 5}, then the
    # first two pairs.
    distance = jnp.abs(jnp.subtract.outer(jnp.arange(6.0), jnp.arange(6.0)))
    for m, expected in [(4, [0, 0, 1, 1, 2, 3]), (2, [0, 0, 0, 0, 1, 1])]:
        np.testing.assert_array_equal(AGGLOMERATE(distance, m, "complete"), expected)


def test_agglomerate_rejects_an_unknown_linkage():
    with pytest.raises(InputError, match="linkage=centroid: must be one of"):
        AGGLOMERATE(jnp.zeros((3, 3)), 2, "centroid")


def test_agglomerate_takes_infinite_distances_last():
    distance = np.full((4, 4), np.inf)
    distance[0, 2] = distance[2, 0] = 1
    distance[1, 3] = distance[3, 1] = np.nan
    np.testing.assert_array_equal(AGGLOMERATE(jnp.asarray(distance), 3), [0, 1, 0, 2])
    np.testing.assert_array_equal(AGGLOMERATE(jnp.asarray(distance), 1), [0, 0, 0, 0])


def everything(key, delta, weight):
    """Every clustering route with m = 4, as one program."""
    inner = gram(delta)
    features = edc(inner, 4)
    found = kmeans(key, features, 4, restarts=3, iterations=5, weight=weight)
    distance = madc(inner, weight > 0)
    merged = [agglomerate(distance, 4, linkage, weight > 0) for linkage in LINKAGES]
    return (
        features,
        edc_randomized(key, delta, 4),
        distances.cosine(delta, delta),
        found,
        distance,
        merged,
    )


DEGENERATE = {
    "zero": np.zeros((6, 9)),
    "identical": np.tile(np.linspace(-1, 1, 9), (6, 1)),
    "parallel": np.outer([1e-6, 1, -1, 1e6, 3, 0], np.linspace(-1, 1, 9)),
    "two distinct": np.linspace(-1, 1, 18).reshape(2, 9)[[0, 1, 0, 1, 1, 0]],
    "tiny": 1e-25 * np.random.default_rng(0).normal(size=(6, 9)),
    "random": np.random.default_rng(1).normal(size=(6, 9)),
}
JITTED = jax.jit(everything)


@pytest.mark.parametrize("valid", [6, 5, 4, 1, 0])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_updates_stay_finite_and_labels_valid(name, valid):
    rows = DEGENERATE[name]
    weight = jnp.arange(6) < valid
    features, randomized, cosine, found, distance, merged = out = JITTED(KEY, tree(rows), weight)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out))
    assert found.labels.dtype == jnp.int32 and ((found.labels >= 0) & (found.labels < 4)).all()
    assert (
        all(np.abs(part).max() <= 1 for part in (features, randomized, cosine))
        and (distance >= 0).all()
    )
    for labels in merged:
        labels = np.asarray(labels)
        assert (labels[valid:] == -1).all()
        assert sorted(set(labels[:valid])) == list(range(min(valid, 4)))
    if name in ("zero", "tiny"):
        assert not features.any() and not randomized.any() and not cosine.any()
    if name == "random" and valid == 4:
        assert len(np.unique(found.labels[:4])) == 4
    if name == "identical":
        assert len(np.unique(found.labels)) == 1
    if name == "two distinct" and valid > 1:
        np.testing.assert_array_equal(found.labels == found.labels[0], [1, 0, 1, 0, 0, 1])


def test_fewer_rows_than_clusters():
    x = np.random.default_rng(12).normal(size=(4, 2)).astype(np.float32)
    found = fit(x, 6, jnp.ones(4))
    assert len(np.unique(found.labels)) == 4 and found.inertia == 0
    np.testing.assert_array_equal(AGGLOMERATE(jnp.ones((4, 4)), 6, "complete"), np.arange(4))
    assert EDC(x @ x.T, 6).shape == (4, 6) and not EDC(x @ x.T, 6)[:, 2:].any()


@pytest.mark.parametrize(
    "name", others_nightly(["gram", "edc", "madc", "agglomerate", "kmeans"], ["gram"])
)
def test_jit_equals_no_jit(name):
    rows, _ = planted(13)
    inner = GRAM(tree(rows))
    features, distance = EDC(inner, 3), MADC(inner)
    plain, jitted = {
        "gram": lambda: (gram(tree(rows)), inner),
        "edc": lambda: (edc(inner, 3), features),
        "madc": lambda: (madc(inner), distance),
        "agglomerate": lambda: (
            agglomerate(distance, 3, "complete"),
            AGGLOMERATE(distance, 3, "complete"),
        ),
        "kmeans": lambda: (kmeans(KEY, features, 3, weight=ALL), fit(features)),
    }[name]()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, jitted)


def test_permuting_the_rows_permutes_the_partition():
    rows, _ = planted(14, noise=0.2)

    def partitions(rows):
        inner = GRAM(tree(rows))
        distance = MADC(inner)
        return [
            fit(EDC(inner, 3)).labels,
            *(AGGLOMERATE(distance, 3, linkage) for linkage in LINKAGES),
        ]

    for seed in range(2):
        order = np.random.default_rng(seed).permutation(60)
        for before, after in zip(partitions(rows), partitions(rows[order]), strict=True):
            assert adjusted_rand_score(np.asarray(before)[order], after) == 1


@pytest.mark.parametrize("factor", [nightly(1e15), 1e18])
def test_features_of_huge_finite_updates_are_finite(factor):
    """Squared norms up to float32's largest pass the guard; nothing overflows after it."""
    key = jax.random.key(0)
    rows = jax.random.normal(key, (12, 50))

    @jax.jit
    def features(huge):
        product = gram(huge)
        return (
            edc(product, 3),
            edc_randomized(key, huge, 3),
            madc(product),
            distances.euclidean(huge),
        )

    for huge in (rows * factor, rows.at[0].multiply(factor)):
        for made in features({"w": huge}):
            assert jnp.isfinite(made).all()


@pytest.mark.nightly
def test_centers_are_drawn_by_squared_distance():
    """99 points in one place and one elsewhere: of two centers, each has one of the places."""
    x = jnp.zeros((100, 1)).at[37].set(1.0)
    for draws in jax.random.uniform(jax.random.key(0), (20, 2, 1)):
        centers = draw_centers(draws, x, jnp.ones(100), 2, distances.squared_euclidean)
        assert sorted(centers[:, 0].tolist()) == [0.0, 1.0]
