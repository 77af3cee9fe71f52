"""WeCFL: a slow twin in float64, from the K-means of the start on; FedAvg and FeSEM as special
cases; planted groups; the bill.
"""

import dataclasses
from types import SimpleNamespace

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ledger, matrix, one_line, spent
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from test_fesem import COHORT, KEY, planted, play, trained

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.fesem.fesem import fesem, keep_models
from fedjax_cfl.algorithms.fesem.start import ClientModels, cluster_local_models
from fedjax_cfl.algorithms.fesem.wecfl import wecfl
from fedjax_cfl.keys import SELECT, START, TRAIN, derive_key
from fedjax_cfl.method import Round
from fedjax_cfl.simulation.personalize import check_rule
from fedjax_cfl.system import select
from fedjax_cfl.types import Cohort, State, Work


def squares(models, centers):
    return np.sum((models[:, None] - centers) ** 2, axis=2)


def means(models, labels, weight, centers):
    """Returns the weighted means of groups; a group without clients keeps its center."""
    return np.stack(
        [
            np.average(models[labels == k], axis=0, weights=weight[labels == k])
            if weight[labels == k].sum()
            else center
            for k, center in enumerate(centers)
        ]
    )


def twin_start(data, task, local, m):
    """Returns (common model, models after one local training, samples, labels, centers)."""
    keys = jax.random.split(derive_key(KEY, START), 4)
    common = matrix(jax.tree.map(lambda leaf: leaf[None], task.init(keys[0])))[0].astype(float)
    size = np.asarray(data.train.size)
    models = np.stack(
        [
            trained(keys[1], common, 0.0, client, data, local) if size[client] else common
            for client in range(data.num_clients)
        ]
    )
    met = size > 0
    best = KMeans(m, n_init=50, random_state=0).fit(models[met], sample_weight=size[met])
    labels = np.argmin(squares(models, best.cluster_centers_), axis=1)
    return common, models, size, labels, means(models, labels, size * met, np.stack([common] * m))


@pytest.fixture(scope="module")
def started(toy, linear, local):
    """Returns the method with three groups, and its first state."""
    algorithm = wecfl(linear, local, COHORT, m=3, restarts=20)
    return algorithm, jax.jit(algorithm.init)(KEY, toy)


def test_the_start_is_k_means_weighted_by_samples(toy, linear, local, started):
    """Up to the numbers of groups, it is the best of 50 runs of scikit-learn's."""
    _, state = started
    _, models, size, labels, centers = twin_start(toy, linear, local, 3)
    np.testing.assert_allclose(matrix(state.rows["models"].models), models, atol=2e-5)
    met = size > 0
    found = np.asarray(state.assignment)
    assert adjusted_rand_score(found[met], labels[met]) == 1.0
    assert (found[~met] == -1).all()
    order = np.argsort(matrix(state.groups)[:, 0]), np.argsort(centers[:, 0])
    np.testing.assert_allclose(matrix(state.groups)[order[0]], centers[order[1]], atol=2e-5)
    equal = KMeans(3, n_init=50, random_state=0).fit(models[met]).labels_
    assert adjusted_rand_score(equal, labels[met]) < 0.9
    sent = ledger(state.traffic)
    clients = toy.num_clients
    assert (sent.units_down, sent.units_up, sent.words_up) == (clients, clients, 0)


def test_rounds_are_those_of_a_slow_twin(toy, local, started):
    """In round 2 a client has other samples than when it sent the model that counts."""
    fewer = toy.replace(train=toy.train.replace(size=toy.train.size.at[1].set(9)))
    algorithm, begun = started
    state, one_round = begun, jax.jit(algorithm.round)
    centers, models = (
        matrix(state.groups).astype(float),
        matrix(state.rows["models"].models).astype(float),
    )
    weight, labels = (
        np.asarray(state.rows["models"].weight).astype(float),
        np.asarray(state.assignment),
    )
    assert weight.tolist() == toy.train.size.tolist()
    for round, data in enumerate((toy, toy, fewer, fewer)):
        state, _ = one_round(KEY, state, data)
        size = np.asarray(data.train.size)
        nearest = np.argmin(squares(models, centers), axis=1)
        labels = np.where(weight > 0, nearest, labels)
        ids = COHORT.draw(derive_key(KEY, SELECT, round), round, data.train.size).tolist()
        for client in ids:
            if size[client]:
                start, key = centers[labels[client]], derive_key(KEY, TRAIN, round)
                models[client] = trained(key, start, 0.0, client, data, local)
                weight[client] = size[client]
        centers = means(models, labels, weight, centers)
        assert np.asarray(state.assignment)[size > 0].tolist() == labels[size > 0].tolist()
        np.testing.assert_allclose(matrix(state.groups), centers, atol=2e-5)
        assert state.rows["models"].weight.tolist() == weight.tolist()
    sent = spent(begun, state)
    assert (sent.units_down, sent.units_up, sent.words_down, sent.words_up) == (24, 24, 0, 0)


def test_a_model_whose_answer_is_lost_stays_as_it_was_sent_last():
    """Client 0 trains again, and client 2 for the first time; what client 0 sends is lost."""
    kept = ClientModels(
        {"w": jnp.ones((3, 2))}, jnp.array([True, False, False]), jnp.array([5.0, 0, 0])
    )
    empty = State(*[None] * len(dataclasses.fields(State)))
    state = empty.replace(groups={"w": jnp.array([[0.0, 0], [10, 10]])}, rows={"models": kept})
    work = Work(jnp.array([1, 1]), jnp.ones(2), jnp.ones(2))
    sent = SimpleNamespace(weight=jnp.array([0.0, 7]), delta={"w": jnp.array([[1.0, 1], [2, 3]])})
    cohort = Cohort(jnp.array([0, 2]), jnp.arange(2))
    after = keep_models()(Round(KEY, state, None, cohort, work, sent, state)).rows["models"]
    assert after.models["w"].tolist() == [[1, 1], [1, 1], [12, 13]]
    assert after.known.tolist() == [True, False, True] and after.weight.tolist() == [5, 0, 7]


@pytest.mark.nightly
def test_one_group_of_all_clients_is_fedavg(toy, linear, local):
    everybody = select.full_participation()
    states = play(wecfl(linear, local, everybody, m=1), toy, 2)
    plain = fedavg(linear, local, everybody)
    begun = jax.jit(plain.init)(KEY, toy).replace(groups=states[0].groups)
    expected = play(plain, toy, 2, begun)
    chex.assert_trees_all_close(states[-1].groups, expected[-1].groups, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_clients_of_one_size_make_it_fesem(linear, local):
    """FeSEM without a pull, its K-means run as often; other sizes make a difference."""

    def both(data):
        return (
            play(algorithm, data, 3)[-1]
            for algorithm in (
                wecfl(linear, local, COHORT, m=3),
                fesem(linear, local, COHORT, m=3, mu=0.0, start=cluster_local_models(5)),
            )
        )

    data = planted()
    one, other = both(data)
    chex.assert_trees_all_close(one.groups, other.groups, rtol=1e-5, atol=1e-6)
    assert one.assignment.tolist() == other.assignment.tolist()
    first = data.train.size.at[:9].set(3)
    one, other = both(data.replace(train=data.train.replace(size=first)))
    assert np.abs(matrix(one.groups) - matrix(other.groups)).max() > 1e-3


@pytest.mark.nightly
def test_planted_groups_are_found(linear, local):
    state = play(wecfl(linear, local, COHORT, m=3), planted(), 3)[-1]
    assert adjusted_rand_score(state.assignment, np.arange(18) % 3) == 1.0


@pytest.mark.nightly
def test_lost_clients_leave_model_and_weight(toy, linear, local):
    silent = cfl.System(COHORT, cfl.Faults(dropout=1.0))
    begun, after = play(wecfl(linear, local, silent, m=2), toy, 1)
    chex.assert_trees_all_equal(begun.memory, after.memory)


@pytest.mark.nightly
def test_new_clients_are_refused(linear, local):
    def make(pick):
        return wecfl(linear, local, pick, m=2)

    one_line("no rule for new clients", check_rule, make, planted(), KEY, 3)
    one_line("algorithm.m=0", wecfl, linear, local, COHORT, m=0)


def test_the_distance_is_the_one_that_is_named(toy, local):
    class Headless(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="last")(x)

    task = cfl.as_task(Headless(), toy.x.shape[1:], 4)
    given = {"m": 2, "distance": "last_layer"}
    one_line("the model has no dense layer named head", wecfl, task, local,
             cfl.select.uniform(3), **given)  # fmt: skip
