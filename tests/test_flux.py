"""FLUX: a slow twin of the whole path with scikit-learn's DBSCAN; FedAvg and training alone as
special cases; planted groups; newcomers without labels; the bill.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, nightly, one_line, spent
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist
from sklearn.cluster import DBSCAN
from sklearn.metrics import adjusted_rand_score
from test_bounds import passes
from test_pacfl import number_by_first
from test_reductions import COHORT, KEY, SAME, play
from test_reference import batches_of, mean, models_of, samples, trained

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.flux import (
    Moments,
    add_samples,
    count_dense_inputs,
    dense_inputs,
    find_eps,
    find_groups,
    finish_description,
    flux,
)
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.keys import SELECT, derive_key
from fedjax_cfl.simulation.personalize import assign_newcomers, check_rule
from fedjax_cfl.system import select

EVERYBODY = select.full_participation()
LATE = 3  # a client that gets its samples after the clustering


def held(index, client):
    """Returns the numbers of the samples of a client."""
    first, size = int(index.start[client]), int(index.size[client])
    return np.asarray(index.order)[first : first + size]


def moments(part):
    return [part.mean(axis=0), part.std(axis=0)]


def describe(data, rows, projection):
    """Returns the rows of a description of samples, as they are before they are scaled."""
    z, y = np.asarray(data.x, float)[rows] @ projection, np.asarray(data.y)[rows]
    nothing = np.full(z.shape[1], -1.0)
    parts = [z[y == c] for c in range(data.num_classes)]
    each = [moments(part) if len(part) > 1 else [nothing, nothing] for part in parts]
    return np.stack([*moments(z), *(one[0] for one in each), *(one[1] for one in each)])


def knee(apart):
    near = np.sort(np.where(np.eye(len(apart), dtype=bool), np.inf, apart).min(axis=1))
    if len(near) <= 3 or near[-1] == near[0]:
        return near[-1]
    return near[np.argmax(np.linspace(0, 1, len(near)) - (near - near[0]) / (near[-1] - near[0]))]


def twin_groups(points, m, eps=None):
    """Returns DBSCAN's clusters, in which noise is alone; merged by single linkage down to m."""
    apart = cdist(points, points)
    labels = DBSCAN(
        eps=knee(apart) + 1e-9 if eps is None else eps, min_samples=2, metric="precomputed"
    ).fit_predict(apart)
    labels = np.where(labels < 0, labels.max() + 1 + np.arange(len(labels)), labels)
    if len(set(labels.tolist())) > m:
        labels = fcluster(linkage(points, "single"), m, "maxclust")
    return number_by_first(labels)


@pytest.fixture(scope="module")
def shifted(toy):
    """The toy clients, whose samples lie elsewhere from client to client, in three places."""
    place = np.random.default_rng(5).normal(size=(3, 5))[np.asarray(toy.owner) % 3]
    return toy.replace(x=toy.x + jnp.asarray(2 * place, jnp.float32))


@pytest.mark.parametrize(("m", "newcomers"), [(9, "inputs"), nightly(2, "labels")])
def test_slow_twin(shifted, linear, local, m, newcomers):
    """Groups, models and every word: a client comes later, another has test samples only."""
    algorithm = flux(linear, local, COHORT, m=m, warm_up=1, newcomers=newcomers)
    size = shifted.train.size.at[LATE].set(0)
    tests = shifted.test.replace(size=shifted.test.size.at[LATE].set(0))
    early = shifted.replace(train=shifted.train.replace(size=size), test=tests)
    begun, _ = play(algorithm, early, 0)
    models, state, one_round = models_of(begun.groups), begun, jax.jit(algorithm.round)
    projection = np.linalg.qr(np.asarray(jax.random.normal(jax.random.key(1), (5, 4)), float))[0]
    groups, found = np.zeros(14, int), None
    rows = 2 if newcomers == "inputs" else 10
    down = words = 0

    def place(inputs):
        described = (describe(shifted, inputs, projection) - low) / (high - low)
        return int(np.argmin([np.linalg.norm((described - c)[:rows]) for c in centers]))

    for round in range(5):
        data = early if round < 4 else shifted
        state, _ = one_round(KEY, state, data)
        if round == 2 and newcomers == "inputs":
            groups[2] = place(held(data.test, 2))
            down, words = down + 1, words + 8
        if round == 4:
            groups[LATE] = place(samples(data, LATE))
            down, words = down + 1, words + 4 * rows
        ids = COHORT.draw(derive_key(KEY, SELECT, round), round, data.train.size).tolist()
        able = [client for client in range(14) if data.train.size[client] > 0]
        takes = [client for client in ids if client in able]
        solutions = {}
        for client in takes:
            epochs = passes(round, data, client, local.epochs)
            batches = batches_of(epochs, local.batch_size)
            solutions[client] = trained(models[groups[client]], data, batches, local.lr)
        if round == 1:
            all_ = {i: describe(data, samples(data, i), projection) for i in able}
            inside = sorted(takes)
            each = np.stack([all_[i] for i in inside])
            low, high = each.min(axis=(0, 2))[:, None], each.max(axis=(0, 2))[:, None]
            high = np.where(high > low, high, np.inf)
            points = (each - low) / (high - low)
            found = twin_groups(points.reshape(len(inside), -1), m)
            centers = [points[found == k].mean(axis=0) for k in range(found.max() + 1)]
            groups[:] = -1
            for client in able:
                apart = [np.linalg.norm((all_[client] - low) / (high - low) - c) for c in centers]
                groups[client] = int(np.argmin(apart))
            groups[inside] = found
            models = [models[0]] * m
            absent = [client for client in able if client not in ids]
            down, words = down + len(absent), words + 40 * len(able)
        for group in range(m):
            mine = [i for i in takes if groups[i] == group]
            if mine:
                weights = [int(data.train.size[i]) for i in mine]
                models[group] = mean([solutions[i] for i in mine], weights)
        served = np.asarray(algorithm.serve(state).model_index)
        assert served.tolist() == groups.tolist(), round
        for one, expected in zip(models_of(state.groups), models, strict=True):
            np.testing.assert_allclose(one.flat(), expected.flat(), atol=1e-4)
    assert int(state.active.sum()) == found.max() + 1 > 1
    assert state.assignment[2] == -1 and groups[2] == (-1 if newcomers == "labels" else groups[2])
    sent = spent(begun, state)
    assert (sent.units_down, sent.units_up) == (30 + down, 30)
    assert (sent.words_down, sent.words_up) == (0, words)


@pytest.mark.nightly
def test_one_group_is_fedavg(toy, linear, local):
    """With steps as long as one likes."""
    state, _ = play(flux(linear, local, COHORT, m=3, warm_up=1, eps=1e6), toy)
    expected, _ = play(fedavg(linear, local, COHORT), toy)
    first = jax.tree.map(lambda leaf: leaf[:1], state.groups)
    chex.assert_trees_all_close(first, expected.groups, **SAME)
    assert state.active.tolist() == [True, False, False] and (state.assignment == 0).all()


@pytest.mark.nightly
def test_components_are_those_of_dbscan():
    """For any length of steps; with tiny ones all are alone, and the nearest are merged."""
    points = np.random.default_rng(1).normal(size=(15, 3)).astype(np.float32)
    valid = np.arange(15) != 4
    for eps in (0.3, 0.8, 1.1, 5.0):
        given = jnp.asarray(points), valid, 14, "density", eps, 1
        found = np.asarray(find_groups(KEY, *given))
        assert found[4] == -1
        assert found[valid].tolist() == twin_groups(points[valid], 14, eps).tolist(), eps
    few = np.asarray(find_groups(KEY, jnp.asarray(points), valid, 3, "density", 0.01, 1))
    assert few[valid].tolist() == twin_groups(points[valid], 3, 0.01).tolist()
    prior = np.asarray(find_groups(KEY, jnp.asarray(points), valid, 1, "kmeans", 1.0, 5))
    assert prior.tolist() == np.where(valid, 0, -1).tolist()


def test_the_knee_by_hand():
    """Of 1, 1.2, 2, 3.5, 9, each twice, it is 3.5; of three, or of equal ones, the greatest."""
    line = np.cumsum([0.0, 1.0, 20.0, 1.2, 30.0, 2.0, 50.0, 3.5, 80.0, 9.0])
    apart = np.abs(line[:, None] - line)
    found = at_once(find_eps, jnp.asarray(apart), np.ones(10, bool))
    np.testing.assert_allclose(found, 3.5, rtol=1e-5)
    assert found == pytest.approx(knee(apart))
    some = at_once(find_eps, jnp.zeros((40, 40)).at[:10, :10].set(apart), np.arange(40) < 10)
    np.testing.assert_allclose(some, 3.5, rtol=1e-5)
    three = find_eps(jnp.asarray(apart), np.arange(10) < 3)
    np.testing.assert_allclose(three, 20.0)
    four = find_eps(jnp.asarray(apart), np.arange(10) < 4)  # 1, 1, 1.2, 1.2
    np.testing.assert_allclose(four, 1.0, rtol=1e-5)
    even = np.arange(5.0)
    same = at_once(find_eps, jnp.abs(even[:, None] - even), np.ones(5, bool))
    np.testing.assert_allclose(same, 1.0)


def test_moments_of_parts_are_those_of_the_whole():
    """In blocks of 20, some of which lack a class; far from 0, where squares would cancel."""
    rng = np.random.default_rng(2)
    z, y = 1000 + rng.normal(size=(100, 3)), np.sort(rng.integers(3, size=100))
    member = np.stack([np.ones(100), *(y == c for c in range(3))]).astype(np.float32)
    zeros = jnp.zeros((4, 3))
    found = Moments(jnp.zeros(4), zeros, zeros)
    for first in range(0, 100, 20):
        part = slice(first, first + 20)
        found = add_samples(found, jnp.asarray(z[part], jnp.float32), member[:, part])
    whole, *classes = (moments(each) for each in (z, *(z[y == c] for c in range(3))))
    rows = [*whole, *(one[0] for one in classes), *(one[1] for one in classes)]
    np.testing.assert_allclose(finish_description(found).reshape(8, 3), rows, rtol=1e-3)


def test_latent_features_are_what_the_first_dense_layer_gets():
    class Small(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(3, (2, 2), name="conv")(x[..., None])).reshape(len(x), -1)
            return nn.Dense(4, name="head")(nn.Dense(5, name="hidden")(x))

    class None_(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(4, (8, 8), padding="VALID")(x[..., None])[:, 0, 0]

    data = cfl.federate(pool := cfl.datasets.digits(), cfl.partition.iid(pool, clients=4, seed=0))
    task = cfl.as_task(Small(), (8, 8), 4)
    params, x = task.init(KEY), data.x[:3]
    z = dense_inputs(task, params, x)
    assert z.shape == (3, 192) and count_dense_inputs(task, data) == 192 and (z >= 0).all()
    hidden, head = params["hidden"], params["head"]
    out = (z @ hidden["kernel"] + hidden["bias"]) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(out, task.predict(params, x), rtol=1e-5, atol=1e-6)
    algorithm = flux(cfl.as_task(None_(), (8, 8), 4), cfl.Local(0.1, 1, 5), EVERYBODY, m=2)
    one_line("model: has no dense layer", algorithm.check_data, data)


@pytest.fixture(scope="module")
def turned():
    """Digits, each client's turned by a quarter as often as its group says."""
    pool = cfl.datasets.digits()
    return cfl.federate(pool, cfl.partition.iid(pool, clients=20, seed=0), cfl.concept.rotate)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{"m": 10, "factor": 1.2}, {"m": 4, "cluster": "kmeans"}])
def test_four_rotations_of_digits_are_found(turned, local, settings):
    """Clients that are held out come without labels."""
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)

    def make(pick):
        return flux(task, local, pick, warm_up=0, latent=32, **settings)

    run = take_clients(turned, np.arange(14))
    state, _ = play(make(EVERYBODY), run, 1)
    assert adjusted_rand_score(run.concept, state.assignment) == 1.0
    assert state.active.sum() == 4
    if settings["m"] == 4:
        return
    check_rule(make, run, KEY, 3)
    unlabelled = turned.replace(train=turned.train.replace(size=turned.train.size.at[14:].set(0)))
    new = assign_newcomers(make, task, local.execution.mesh, state, unlabelled, KEY, 3)
    groups = np.concatenate([state.assignment, new.groups])
    assert adjusted_rand_score(turned.concept, groups) == 1.0
    assert (new.metrics.samples > 0).all()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 0}, "algorithm.m=0"),
        ({"m": 2, "eps": 0.0}, "algorithm.eps=0.0"),
        ({"m": 2, "factor": 0.0}, "algorithm.factor=0.0"),
        ({"m": 2, "warm_up": -1}, "algorithm.warm_up=-1"),
        ({"m": 2, "cluster": "dbscan"}, "algorithm.cluster=dbscan"),
        ({"m": 2, "newcomers": "nearest"}, "algorithm.newcomers=nearest"),
        ({"m": 2, "latent": 0}, "algorithm.latent=0"),
    ],
)
def test_refusals(linear, local, settings, says):
    one_line(says, flux, linear, local, EVERYBODY, **settings)
