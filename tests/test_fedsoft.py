"""FedSoft: a slow twin of the whole path; FedProx as a special case; known mixtures; clients that
come later; the bill.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import nightly, one_line, spent
from test_reductions import COHORT, KEY, SAME, assert_same, play
from test_reference import (
    batches_of,
    gradient,
    mean,
    models_of,
    passes,
    probabilities,
    samples,
    trained,
)

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.fedprox import fedprox
from fedjax_cfl.algorithms.fedsoft import fedsoft
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.personal.ditto import ditto
from fedjax_cfl.simulation.personalize import assign_newcomers, check_rule
from fedjax_cfl.system import select

LATE = [1, 4]  # clients that have samples only from round 1 on


class Twin:
    """The method in loops over clients."""

    def __init__(self, models, local, lam, every, sigma):
        self.models, self.first, self.local = models, models[0], local
        self.lam, self.every, self.sigma = lam, every, sigma
        self.shares, self.own, self.late = {}, {}, set()

    def estimate(self, round, data):
        """Returns who was asked."""
        x, y = np.asarray(data.x, float), np.asarray(data.y)
        asked = []
        for client in np.flatnonzero(np.asarray(data.train.size) > 0).tolist():
            if round % self.every and client in self.shares:
                continue
            if round > 0 and client not in self.shares:
                self.late.add(client)
            held = samples(data, client)
            losses = [
                -np.log(probabilities(w, x[held])[range(len(held)), y[held]]) for w in self.models
            ]
            count = np.bincount(np.argmin(losses, axis=0), minlength=len(self.models))
            share = count / len(held)
            self.shares[client] = np.where(share > 0, share, self.sigma)
            asked.append(client)
        return asked

    def train(self, round, data, client):
        x, y, share = np.asarray(data.x, float), np.asarray(data.y), self.shares[client]
        model = self.first
        if client in self.late:
            model = mean(self.models, share)
        model = self.own.get(client, model)
        key = derive_key(KEY, TRAIN, round)
        for batch in batches_of(passes(key, data, client, 2), self.local.batch_size):
            step = gradient(model, x[batch], y[batch])
            for u, center in zip(share, self.models, strict=True):
                step = step + float(self.lam * u) * (model + -1.0 * center)
            model = model + -self.local.lr * step
        return model

    def round(self, round, data, cohort):
        asked = self.estimate(round, data)
        able = [client for client in cohort if client in self.shares]
        self.own |= {client: self.train(round, data, client) for client in able}
        solutions = [self.own[client] for client in able]
        sizes = np.array([int(data.train.size[client]) for client in able])
        shares = np.stack([self.shares[client] for client in able])
        self.models = [mean(solutions, shares[:, k] * sizes) for k in range(len(self.models))]
        return asked


@pytest.mark.parametrize(
    ("m", "every", "lam", "sigma"), [(2, 2, 0.5, 0.3), nightly(3, 1, 0.1, 0.01)]
)
def test_slow_twin(toy, linear, local, m, every, lam, sigma):
    """Shares, the m models, those of clients, groups, and every word; two clients come later."""
    algorithm = fedsoft(linear, local, COHORT, m=m, every=every, lam=lam, sigma=sigma)
    size = toy.train.size.at[jnp.array(LATE)].set(0)
    early = toy.replace(train=toy.train.replace(size=size))
    begun, _ = play(algorithm, early, 0)
    assert (begun.assignment == -1).all()
    twin = Twin(models_of(begun.groups), local, lam, every, sigma)
    state, one_round, free = begun, jax.jit(algorithm.round), 0
    for round in range(6):
        data, before = early if round == 0 else toy, state
        ids = COHORT.draw(derive_key(KEY, SELECT, round), round, data.train.size).tolist()
        asked = twin.round(round, data, ids)
        state, _ = one_round(KEY, state, data)
        sent, more = spent(before, state), len([i for i in ids if i not in asked])
        assert sent.units_down == m * (len(asked) + more)
        assert (sent.units_up, sent.words_down, sent.words_up) == (6, 0, m * len(asked))
        free += 6 - more
        for found, wanted in zip(models_of(state.groups), twin.models, strict=True):
            np.testing.assert_allclose(found.flat(), wanted.flat(), atol=3e-5)
        for client, share in twin.shares.items():
            np.testing.assert_allclose(state.rows["shares"].shares[client], share, rtol=1e-5)
            assert state.assignment[client] == np.argmax(share)
        # sigma is for shares of 0 alone
        assert m == 3 or min(map(np.min, twin.shares.values())) < sigma
    assert free > 0 and state.assignment[2] == -1
    assert {*LATE} == twin.late and twin.late & {*twin.own}
    used = models_of(algorithm.personal_models(state, toy))
    for client in twin.shares:
        wanted = twin.own.get(client, twin.models[int(state.assignment[client])])
        np.testing.assert_allclose(used[client].flat(), wanted.flat(), atol=3e-5)


@pytest.mark.nightly
def test_one_center_is_fedprox_as_long_as_clients_begin_with_it(toy, linear, local):
    """In the first round: later ones go on from clients' own models."""
    one = play(fedsoft(linear, local, COHORT, m=1, lam=0.3), toy, 1)
    other = play(fedprox(linear, local, COHORT, mu=0.3, drop_fraction=0.01), toy, 1)
    one = one[0], [info.replace(cold=0, group_discrepancy=0) for info in one[1]]
    other = other[0], [info.replace(cold=0, group_discrepancy=0) for info in other[1]]
    assert_same(one, other)


@pytest.mark.nightly
def test_one_center_without_pull_leaves_clients_alone(toy, linear, local):
    everybody = select.full_participation()
    algorithm = fedsoft(linear, local, everybody, m=1, lam=0.0)
    begun, _ = play(algorithm, toy, 0)
    state, _ = play(algorithm, toy, 2, begun)
    used = models_of(algorithm.personal_models(state, toy))
    for client in (0, 7, 13):
        model = models_of(begun.groups)[0]
        for round in range(2):
            epochs = passes(derive_key(KEY, TRAIN, round), toy, client, local.epochs)
            model = trained(model, toy, batches_of(epochs, local.batch_size), local.lr)
        np.testing.assert_allclose(used[client].flat(), model.flat(), **SAME)


@pytest.fixture(scope="module")
def mixed():
    """Digits, of which each client turns a share of its own by half a turn, and that share."""
    pool = cfl.datasets.digits()
    data = cfl.federate(pool, cfl.partition.iid(pool, clients=10, seed=0))
    share = np.linspace(0.1, 0.9, 10)
    owner, x = np.asarray(data.owner), np.asarray(data.x).copy()
    turned = np.random.default_rng(0).random(len(owner)) < share[np.maximum(owner, 0)]
    x[turned] = x[turned, ::-1, ::-1]
    true = np.array([turned[samples(data, client)].mean() for client in range(10)])
    return data.replace(x=jnp.asarray(x)), true


@pytest.mark.nightly
def test_shares_are_those_of_the_sources(mixed, local):
    """Of two models that each know one of them."""
    data, true = mixed
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)
    everybody = select.full_participation()
    pool = cfl.datasets.digits()
    plain = cfl.federate(pool, cfl.partition.iid(pool, clients=10, seed=0))
    models = [
        play(fedavg(task, local, everybody), one, 5)[0].groups
        for one in (plain, plain.replace(x=plain.x[:, ::-1, ::-1]))
    ]
    algorithm = fedsoft(task, local, everybody, m=2)
    begun, _ = play(algorithm, data, 0)
    known = jax.tree.map(lambda *parts: jnp.concatenate(parts), *models)
    state, _ = play(algorithm, data, 1, begun.replace(groups=known))
    np.testing.assert_allclose(state.rows["shares"].shares[:, 1], true, atol=0.1)


@pytest.mark.nightly
def test_clients_held_out_estimate_their_shares(mixed, local):
    data, _ = mixed
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)

    def make(pick):
        return fedsoft(task, local, pick, m=2, lam=1.0)

    run = take_clients(data, np.arange(8))
    check_rule(make, run, KEY, 2)
    state, _ = play(make(select.full_participation()), run, 5)
    new = assign_newcomers(make, task, local.execution.mesh, state, data, KEY, 2)
    assert (new.groups >= 0).all() and new.metrics.samples.sum() > 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 0}, "algorithm.m=0"),
        ({"m": 2, "lam": -1.0}, "algorithm.lam=-1.0"),
        ({"m": 2, "every": 0}, "algorithm.every=0"),
        ({"m": 2, "sigma": -0.1}, "algorithm.sigma=-0.1"),
    ],
)
def test_refusals(linear, local, settings, says):
    one_line(says, fedsoft, linear, local, COHORT, **settings)


def test_clients_keep_nothing_else(linear, local):
    own = local.replace(personal=ditto())
    one_line("without Ditto", fedsoft, linear, own, COHORT, m=2)
