"""Slow twins in NumPy, written to be read: rounds, clients, epochs and batches as plain
loops over a linear softmax model.

From the package come only the random draws: initial models, who is selected, the order
of each client's samples.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from fedjax_cfl import algorithms
from fedjax_cfl.round import select
from fedjax_cfl.round.engine import ASSIGN, SELECT, START, TRAIN, derive_key
from fedjax_cfl.round.shuffle import random_permutations

KEY = jax.random.key(2)
ROUNDS, COHORT, L2 = 3, 6, 0.001


class Model(NamedTuple):
    """Logits are x @ kernel + bias."""

    kernel: np.ndarray  # [5, 4] float64
    bias: np.ndarray  # [4]

    def __add__(self, other):
        return Model(self.kernel + other.kernel, self.bias + other.bias)

    def __mul__(self, factor):
        return Model(self.kernel * factor, self.bias * factor)

    __rmul__ = __mul__

    def flat(self):
        return np.concatenate([self.kernel.ravel(), self.bias])


def models_of(groups):
    """Returns the package's parameters [m, ...] as a list of m models."""
    kernel, bias = (np.asarray(groups["head"][name], np.float64) for name in ("kernel", "bias"))
    return [Model(*pair) for pair in zip(kernel, bias, strict=True)]


def mean(models, weights=None):
    return Model(
        *(np.average(parts, axis=0, weights=weights) for parts in zip(*models, strict=True))
    )


def probabilities(model, x):
    z = x @ model.kernel + model.bias
    z = np.exp(z - z.max(axis=1, keepdims=True))
    return z / z.sum(axis=1, keepdims=True)


def cross_entropy(model, x, y):
    return -np.log(probabilities(model, x)[np.arange(len(y)), y]).mean()


def gradient(model, x, y):
    """The gradient of mean cross-entropy + 0.001 sum(kernel^2)."""
    error = probabilities(model, x)
    error[np.arange(len(y)), y] -= 1
    return Model(x.T @ error / len(y) + 2 * L2 * model.kernel, error.mean(axis=0))


def samples(data, client):
    """Returns the numbers of a client's training samples."""
    return np.asarray(data.train.order)[int(data.train.start[client]) :][
        : int(data.train.size[client])
    ]


def passes(key, data, client, count):
    """Returns `count` reshuffled passes over a client's samples: the package's draws."""
    held = samples(data, client)
    words = jax.random.bits(jax.random.fold_in(key, client), (2,))
    return [
        held[row]
        for row in np.asarray(random_permutations(words, len(held), 64, count))[:, : len(held)]
    ]


def trained(model, data, batches, lr):
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    for batch in batches:
        model = model + -lr * gradient(model, x[batch], y[batch])
    return model


def batches_of(epochs, size):
    return [epoch[first : first + size] for epoch in epochs for first in range(0, len(epoch), size)]


def cohort_of(pick, round, data):
    ids = pick(derive_key(KEY, SELECT, round), round, data.num_clients)
    return [client for client in ids.tolist() if data.train.size[client] > 0]


def fedavg(model, data, pick, local):
    """McMahan et al. 2017, Algorithm 1."""
    for round in range(ROUNDS):
        solutions, weights = [], []
        for client in cohort_of(pick, round, data):
            epochs = passes(derive_key(KEY, TRAIN, round), data, client, local.epochs)
            solutions.append(trained(model, data, batches_of(epochs, local.batch_size), local.lr))
            weights.append(len(epochs[0]))
        model = mean(solutions, weights)
    return model


def ifca(groups, data, pick, local):
    """Ghosh et al. 2020, Algorithm 1 with model averaging; returns the models and the
    last choice of every client.
    """
    x, y, choice = np.asarray(data.x, np.float64), np.asarray(data.y), {}
    for round in range(ROUNDS):
        solutions = [[] for _ in groups]
        for client in cohort_of(pick, round, data):
            held = samples(data, client)
            choice[client] = int(
                np.argmin([cross_entropy(model, x[held], y[held]) for model in groups])
            )
            epochs = passes(derive_key(KEY, TRAIN, round), data, client, local.epochs)
            solutions[choice[client]].append(
                trained(
                    groups[choice[client]], data, batches_of(epochs, local.batch_size), local.lr
                )
            )
        groups = [
            mean(members) if members else old
            for old, members in zip(groups, solutions, strict=True)
        ]
    return groups, choice


def founded(model, data, keys, m, alpha, iterations, local):
    """The group cold start (FlexCFL, Algorithm 3) by a singular value decomposition:
    (founders' ids, updates [N, P], labels [N]).
    """
    ids = [
        int(k)
        for k in jax.random.permutation(keys[1], data.num_clients)[: alpha * m]
        if data.train.size[k] > 0
    ]
    updates = []
    for client in ids:
        order = batches_of(passes(keys[2], data, client, iterations), local.batch_size)[:iterations]
        updates.append(trained(model, data, order, local.lr).flat() - model.flat())
    updates = np.array(updates)
    directions = np.linalg.svd(updates.T, full_matrices=False)[0][
        :, :m
    ]  # [P, m], the left singular vectors
    features = updates @ directions / np.linalg.norm(updates, axis=1, keepdims=True)
    return ids, updates, KMeans(m, n_init=20, random_state=0).fit(features).labels_


def played(algorithm, data):
    """Returns (first state, last state) of the package's run."""
    one_round = jax.jit(algorithm.round)
    first = state = jax.jit(algorithm.init)(KEY, data)
    for _ in range(ROUNDS):
        state, _ = one_round(KEY, state, data)
    return first, state


def assert_models_close(found, expected):
    for one, other in zip(models_of(found), expected, strict=True):
        np.testing.assert_allclose(one.flat(), other.flat(), rtol=1e-5, atol=1e-5)


def test_gradient_is_that_of_the_task(toy, linear):
    params, x, y = linear.init(KEY), toy.x[:9], toy.y[:9]
    found = jax.grad(lambda params: linear.loss(params, x, y).mean())(params)
    model = Model(*(np.asarray(params["head"][name], np.float64) for name in Model._fields))
    expected = gradient(model, np.asarray(x, np.float64), np.asarray(y))
    for name in Model._fields:
        np.testing.assert_allclose(
            found["head"][name], getattr(expected, name), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("width", [1, 4])
def test_fedavg(toy, linear, local, width):
    pick = select.uniform(COHORT)
    first, last = played(algorithms.fedavg(linear, local._replace(width=width), pick), toy)
    assert_models_close(last.groups, [fedavg(models_of(first.groups)[0], toy, pick, local)])
    assert np.abs(models_of(last.groups)[0].flat() - models_of(first.groups)[0].flat()).max() > 0.1


def test_ifca(toy, linear, local):
    pick = select.rr_then_random(COHORT)
    first, last = played(algorithms.ifca(linear, local, pick, m=2), toy)
    groups, choice = ifca(models_of(first.groups), toy, pick, local)
    assert_models_close(last.groups, groups)
    assert len(choice) == 13 and set(choice.values()) == {0, 1}
    assert {client: int(last.assignment[client]) for client in choice} == choice


@pytest.mark.parametrize("iterations", [2, 11])
def test_flexcfl_start(toy, linear, local, iterations):
    """Groups, directions and models of the founders; 11 steps of batch 5 are more than
    one pass for most.
    """
    m, alpha = 2, 5
    algorithm = algorithms.flexcfl(
        linear,
        local,
        select.rr_then_random(COHORT),
        m=m,
        alpha=alpha,
        pretrain=f"iters:{iterations}",
    )
    state = jax.jit(algorithm.init)(KEY, toy)
    keys = jax.random.split(derive_key(KEY, START), 4)
    model = models_of(jax.tree.map(lambda leaf: leaf[None], linear.init(keys[0])))[0]
    ids, updates, labels = founded(model, toy, keys, m, alpha, iterations, local)
    found = np.asarray(state.assignment)[ids]
    assert adjusted_rand_score(found, labels) == 1 and set(labels) == {0, 1}
    assert (np.delete(np.asarray(state.assignment), ids) == -1).all()
    for g in range(m):
        direction = updates[found == g].mean(axis=0)
        directions = models_of(state.memory.directions)[g]
        np.testing.assert_allclose(directions.flat(), direction, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            models_of(state.groups)[g].flat(), model.flat() + direction, rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(models_of(state.memory.initial)[0].flat(), model.flat(), rtol=1e-6)


def test_newcomers_join_the_nearest_direction(toy, linear, local):
    """FlexCFL eq. 8: a client met in round 0 pre-trains from the initial model and
    takes the largest cosine.
    """
    algorithm = algorithms.flexcfl(
        linear, local, select.from_table(np.arange(14)[None]), m=2, alpha=3, pretrain="iters:11"
    )
    state = jax.jit(algorithm.init)(KEY, toy)
    after, info = jax.jit(algorithm.round)(KEY, state, toy)
    newcomers = [
        client
        for client in range(14)
        if state.assignment[client] < 0 and toy.train.size[client] > 0
    ]
    directions = np.array([model.flat() for model in models_of(state.memory.directions)])
    start = models_of(state.memory.initial)[0]
    pretrain_key = derive_key(KEY, ASSIGN, 0)
    for client in newcomers:
        order = batches_of(passes(pretrain_key, toy, client, 11), local.batch_size)[:11]
        update = trained(start, toy, order, local.lr).flat() - start.flat()
        assert after.assignment[client] == np.argmax(
            directions @ update / np.linalg.norm(directions, axis=1)
        )
    assert len(newcomers) >= 7 and info.cold >= len(newcomers)
    assert jnp.all((state.assignment < 0) | (after.assignment == state.assignment))
