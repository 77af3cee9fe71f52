"""FedGWC: a slow twin of the whole path with NumPy's eigenvectors, scikit-learn's K-means and
Davies-Bouldin index; FedAvg as a special case; planted groups; the bill.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import nightly, one_line, spent
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, davies_bouldin_score
from test_reductions import COHORT, KEY, assert_same, play
from test_reference import batches_of, cross_entropy, gradient, mean, models_of, passes, samples

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.fedgwc import (
    Interactions,
    davies_bouldin,
    fedgwc,
    find_parts,
    reward,
    weigh_pairs,
)
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.system import select

LATE, FROM, ROUNDS = 4, 9, 12  # a client that has samples only from a round on


class Twin:
    """The method in loops over clients."""

    def __init__(self, models, data, local, tolerance, gamma, parts, steps):
        self.models, self.local, self.steps = models, local, steps
        self.tolerance, self.gamma, self.parts = tolerance, gamma, parts
        self.weights = np.full((data.num_clients,) * 2, 1 / data.num_clients**2)
        able = np.flatnonzero(np.asarray(data.train.size) > 0).tolist()
        self.groups, self.change, self.patience = dict.fromkeys(able, 0), {0: 1.0}, {0: 0}
        self.cold, self.refused = 0, 0
        self.number = {0: 0}  # which number of the package each group has: the first is cut first

    def train(self, round, data, client):
        x, y, model = (
            np.asarray(data.x, float),
            np.asarray(data.y),
            self.models[self.groups[client]],
        )
        key, losses = derive_key(KEY, TRAIN, round), []
        batches = batches_of(passes(key, data, client, self.steps), self.local.batch_size)
        for batch in batches[: self.steps]:
            losses.append(cross_entropy(model, x[batch], y[batch]))
            model = model + -self.local.lr * gradient(model, x[batch], y[batch])
        return model, losses

    def join(self, data, cohort):
        x, y = np.asarray(data.x, float), np.asarray(data.y)
        for client in cohort:
            if client not in self.groups:
                held = samples(data, client)
                losses = {g: cross_entropy(self.models[g], x[held], y[held]) for g in self.change}
                self.groups[client] = min(losses, key=losses.get)
                self.cold += 1

    def weigh(self, group, members, losses, sizes):
        """Returns whether the group may be cut."""
        held = sum(g == group for g in self.groups.values())
        rate, table = len(members) / held, np.array(losses)
        center = np.average(table, axis=0, weights=sizes)
        variance = np.average((table - center) ** 2, axis=0, weights=sizes)
        gained = np.exp(-((table - center) ** 2) / (2 * (variance + 1e-10))).mean(axis=1)
        moved = 0.0
        for i, share in zip(members, gained / gained.sum(), strict=True):
            for j in members:
                step = rate * (share - self.weights[i, j])
                self.weights[i, j] += step
                moved += step**2 / len(members) ** 2
        self.change[group] = (1 - rate) * self.change[group] + rate * moved
        small = self.change[group] < self.tolerance
        self.patience[group] = self.patience[group] + 1 if small else 0
        due = self.patience[group] >= max(round(held / len(members)), 1)
        return due and len(members) < held

    def cut(self, group, met):
        ids = sorted(i for i, g in self.groups.items() if g == group)
        free = [g for g in range(len(self.models)) if g not in self.change]
        best = parts_of(
            self.weights[np.ix_(ids, ids)],
            self.gamma,
            min(len(ids) // met, 1 + len(free), self.parts),
        )
        self.change[group], self.patience[group] = 1.0, 0
        if best is None:
            self.refused += 1
            return
        slots = [group, *free]
        for client, label in zip(ids, best, strict=True):
            slot = self.groups[client] = slots[label]
            self.models[slot] = self.models[group]
            self.change[slot], self.patience[slot] = 1.0, 0

    def round(self, round, data, cohort):
        able = [client for client in cohort if data.train.size[client] > 0]
        self.join(data, able)
        found = {client: self.train(round, data, client) for client in able}
        ready = []
        for group in sorted(self.change, key=self.number.get):
            members = [client for client in able if self.groups[client] == group]
            if members:
                sizes = [int(data.train.size[client]) for client in members]
                losses = [found[client][1] for client in members]
                if self.weigh(group, members, losses, sizes):
                    ready.append((group, len(members)))
        if ready:
            self.cut(*ready[0])
        for group in self.change:
            members = [client for client in able if self.groups[client] == group]
            if members:
                sizes = [int(data.train.size[client]) for client in members]
                self.models[group] = mean([found[client][0] for client in members], sizes)


def parts_of(weights, gamma, most):
    """Returns labels of the best number of parts, None if none is worth it."""
    scaled, count = ((weights - weights.min()) / np.ptp(weights)).T, len(weights)
    kernel, best = np.zeros((count, count)), (1.0, None)
    for i in range(count):
        for j in range(count):
            others = [k for k in range(count) if k not in (i, j)]
            if i != j:
                kernel[i, j] = np.exp(-gamma * np.sum((scaled[i] - scaled[j])[others] ** 2))
    degree = kernel.sum(axis=1)
    vectors = np.linalg.eigh(kernel / np.sqrt(np.outer(degree, degree)))[1]
    for number in range(2, most + 1):
        rows = vectors[:, -number:]
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        labels = KMeans(number, n_init=20, random_state=0).fit(rows).labels_
        index = davies_bouldin_score(rows, labels)
        if index < best[0]:
            best = index, labels
    return best[1]


def same_parts(found, twin):
    """Returns which number of the package each of the twin's groups has."""
    pairs = {(twin[client], int(found[client])) for client in twin}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}), pairs
    return dict(pairs)


@pytest.mark.parametrize(
    ("gamma", "tolerance", "parts"), [(4.0, 0.15, 2), nightly(1.0, 0.15, 4), nightly(0.1, 0.2, 2)]
)
def test_slow_twin(toy, linear, local, gamma, tolerance, parts):
    """Weights of pairs, when they stand still, groups, models and every word; a client comes."""
    pick = select.uniform(5)
    given = {"tolerance": tolerance, "gamma": gamma, "parts": parts, "steps": 6}
    algorithm = fedgwc(linear, local, pick, m=4, **given)
    size = toy.train.size.at[LATE].set(0)
    early = toy.replace(train=toy.train.replace(size=size))
    state, _ = play(algorithm, early, 0)
    twin = Twin(models_of(state.groups), early, local, **given)
    one_round = jax.jit(algorithm.round)
    for round in range(ROUNDS):
        data, before, cold = early if round < FROM else toy, state, twin.cold
        ids = pick.draw(derive_key(KEY, SELECT, round), round, data.train.size).tolist()
        twin.round(round, data, ids)
        state = jax.device_get(one_round(KEY, state, data)[0])
        np.testing.assert_allclose(state.rows["weights"], twin.weights, atol=2e-5)
        number = twin.number = same_parts(state.assignment, twin.groups)
        assert int(state.active.sum()) == len(twin.change)
        models = models_of(state.groups)
        for group, change in twin.change.items():
            np.testing.assert_allclose(state.memory.change[number[group]], change, rtol=1e-3)
            assert state.memory.patience[number[group]] == twin.patience[group]
            wanted = twin.models[group].flat()
            np.testing.assert_allclose(models[number[group]].flat(), wanted, atol=3e-5)
        sent, new = spent(before, state), twin.cold - cold
        # a newcomer chooses among all models, and trains one of them
        assert sent.units_down == 5 + new * (int(before.active.sum()) - 1)
        assert (sent.units_up, sent.words_down, sent.words_up) == (5, 0, 30 + new)
    assert state.assignment[2] == -1 and twin.cold == 1
    assert len(twin.change) > 1


def test_rewards_by_hand():
    """Two groups, of two clients and one; the fourth does not count; a step is missing."""
    losses = jnp.array([[1.0, 2.0], [3.0, -1.0], [9.0, 9.0], [5.0, 5.0]])
    size = jnp.array([3.0, 1.0, 2.0, 0.0])
    member = jnp.array([[1.0, 0], [1, 0], [0, 1], [0, 0]])
    # mean 1.5 and variance 0.75 of the first step; the second has one loss
    one = (np.exp(-0.25 / 1.5) + 1) / 2
    other = np.exp(-2.25 / 1.5)
    found = reward(losses, size, member)
    np.testing.assert_allclose(found, [one / (one + other), other / (one + other), 1, 0], rtol=1e-4)


def test_patience_is_that_of_rounds_in_a_row():
    """Weights of the first group stand still, that of the second moves; the third has not met."""
    pairs = jnp.full((3, 3), 0.5).at[2, 2].set(0.2)
    memory = Interactions(jnp.array([0.0, 0.0, 0.3]), jnp.array([2, 2, 2]))
    state = SimpleNamespace(memory=memory, rows={"weights": pairs})
    cohort = SimpleNamespace(ids=jnp.arange(3), take=lambda rows: rows)
    upload = SimpleNamespace(extra=jnp.ones((3, 2)), weight=jnp.ones(3))
    member = jnp.array([[1.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    weights, found = weigh_pairs(state, cohort, upload, member, jnp.array([2.0, 1, 1]), 0.1)
    np.testing.assert_allclose(weights, pairs.at[2, 2].set(1.0), atol=1e-6)
    np.testing.assert_allclose(found.change, [0, 0.64, 0.3], atol=1e-6)
    assert found.patience.tolist() == [3, 0, 2]


def test_equal_losses_give_equal_rewards():
    losses = 2.3 + 1e-7 * np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    found = reward(jnp.asarray(losses), jnp.arange(1.0, 6), jnp.ones((5, 1)))
    np.testing.assert_allclose(found, np.full(5, 0.2), rtol=1e-3)


@pytest.mark.nightly
def test_the_index_is_that_of_scikit_learn():
    points = np.random.default_rng(0).normal(size=(12, 3))
    labels, inside = np.arange(12) % 3, np.arange(12) < 10
    found = davies_bouldin(*map(jnp.asarray, (points, labels, inside)), 3)
    expected = davies_bouldin_score(points[:10], labels[:10])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert davies_bouldin(*map(jnp.asarray, (points, labels, inside)), 4) == np.inf


@pytest.mark.nightly
def test_parts_of_planted_weights():
    """Three blocks among twelve of fifteen clients; with room for two parts there are two, and
    with room for one none.
    """
    rng, inside = np.random.default_rng(0), np.arange(15) % 5 < 4
    block = np.arange(15) // 5
    weights = jnp.asarray(1.0 * (block[:, None] == block) + 0.05 * rng.random((15, 15)))
    labels, found = find_parts(KEY, weights, jnp.asarray(inside), 9, most=4, gamma=1.0)
    assert found and adjusted_rand_score(block[inside], np.asarray(labels)[inside]) == 1.0
    labels, _ = find_parts(KEY, weights, jnp.asarray(inside), 2, most=4, gamma=1.0)
    assert set(np.asarray(labels)[inside].tolist()) == {0, 1}
    assert not find_parts(KEY, weights, jnp.asarray(inside), 1, most=4, gamma=1.0)[1]


@pytest.mark.nightly
def test_without_tolerance_it_is_fedavg_of_so_many_steps(toy, linear, local):
    one = play(fedgwc(linear, local, COHORT, m=1, steps=5, tolerance=0.0), toy)
    other = play(fedavg(linear, local.replace(steps=5), COHORT), toy)
    one, other = (
        (state, [info.replace(cold=0) for info in infos]) for state, infos in (one, other)
    )
    assert_same(one, other)


@pytest.mark.nightly
def test_a_group_is_cut_in_training(local):
    """On digits with renamed labels; which clients are parted is not asked, see the module."""
    pool = cfl.datasets.digits()
    data = cfl.federate(
        pool, cfl.partition.iid(pool, clients=20, seed=0), cfl.concept.permute_labels
    )
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)
    method = fedgwc(task, local, select.by_group(10), m=4, tolerance=1e-3, gamma=4.0)
    state, _ = play(method, data, 60)
    assert state.active.sum() > 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 0}, "algorithm.m=0"),
        ({"m": 2, "steps": 0}, "algorithm.steps=0"),
        ({"m": 2, "tolerance": -1.0}, "algorithm.tolerance=-1.0"),
        ({"m": 2, "gamma": 0.0}, "algorithm.gamma=0.0"),
        ({"m": 2, "parts": 0}, "algorithm.parts=0"),
    ],
)
def test_refusals(linear, local, settings, says):
    one_line(says, fedgwc, linear, local, COHORT, **settings)
