"""Two rounds of methods that one loop describes: who trains which model, how, and what a server or
a group makes of it. NumPy in float64, after the papers' pseudocode; from the package come random
draws, and, where other tests say how groups are found, the groups.
"""

import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from conftest import build
from test_reference import (
    KEY,
    L2,
    Model,
    batches_of,
    cohort_of,
    cross_entropy,
    gradient,
    mean,
    models_of,
    passes,
    play,
    samples,
)

from fedjax_cfl import algorithms
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.system import select

PICK, EVERYBODY, LR = select.uniform(6), select.full_participation(), 0.2


def held_by(data, client):
    rows = samples(data, client)
    return np.asarray(data.x, np.float64)[rows], np.asarray(data.y)[rows]


def solution(model, data, client, number, local, mu=0.0, key=KEY):
    """Returns the model that a client trains in a round, with FedProx's pull `mu`."""
    epochs = passes(derive_key(key, TRAIN, number), data, client, local.epochs)
    x, y, w = np.asarray(data.x, np.float64), np.asarray(data.y), model
    for batch in batches_of(epochs, local.batch_size):
        w = w + -local.lr * (gradient(w, x[batch], y[batch]) + mu * (w + -1.0 * model))
    return w


def one_step(model, data, client, lr=LR):
    return model + -lr * gradient(model, *held_by(data, client))


# one model for all


def heavy_ball(memory, step):
    memory = step if memory is None else 0.5 * memory + step
    return 0.7 * memory, memory


def adaptive(second, b1, lr=0.1, tau=1e-3):
    """Algorithm 2 of Reddi et al.: no bias correction, v starts at tau^2."""

    def go(memory, step):
        moves, new = [], []
        for (m, v), g in zip(memory or [(0.0, tau**2)] * 2, step, strict=True):
            m, v = b1 * m + (1 - b1) * g, second(v, g**2)
            moves.append(lr * m / (np.sqrt(v) + tau))
            new.append((m, v))
        return Model(*moves), new

    return go


SERVERS = {
    "fedavgm": ({"momentum": 0.5, "server_lr": 0.7}, heavy_ball),
    "fedadagrad": ({"b1": 0.3}, adaptive(lambda v, g2: v + g2, 0.3)),
    "fedadam": ({}, adaptive(lambda v, g2: 0.99 * v + 0.01 * g2, 0.9)),
    "fedyogi": ({}, adaptive(lambda v, g2: v - 0.01 * g2 * np.sign(v - g2), 0.9)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_servers_that_remember(toy, linear, local, name):
    settings, server = SERVERS[name]
    states = play(getattr(algorithms, name)(linear, local, PICK, **settings), toy, 2)
    model, memory = models_of(states[0].groups)[0], None
    for number, state in enumerate(states[1:]):
        ids = cohort_of(PICK, number, toy)
        found = [solution(model, toy, k, number, local) for k in ids]
        step = mean(found, [len(samples(toy, k)) for k in ids]) + -1.0 * model
        move, memory = server(memory, step)
        model = model + move
        np.testing.assert_allclose(models_of(state.groups)[0].flat(), model.flat(), atol=1e-4)


def fair_step(model, data, ids, number, local, q=2.0):
    """q-FedAvg: u = (w - w_k) / lr, h = q F^(q-1) |u|^2 + F^q / lr, w - sum F^q u / sum h."""
    total, bend = 0.0 * model, 0.0
    for k in ids:
        u = (1 / LR) * (model + -1.0 * solution(model, data, k, number, local))
        loss = cross_entropy(model, *held_by(data, k)) + L2 * np.sum(model.kernel**2)
        total = total + float(loss**q) * u
        bend += q * loss ** (q - 1) * u.flat() @ u.flat() + loss**q / LR
    return model + float(-1 / bend) * total


def toward(weigh, epsilon):
    """Reptile: the fraction `epsilon` of the way to the mean, None: one over the clients."""

    def go(model, data, ids, number, local):
        found = [solution(model, data, k, number, local) for k in ids]
        weights = [len(samples(data, k)) for k in ids] if weigh else None
        return model + (epsilon or 1 / len(ids)) * (mean(found, weights) + -1.0 * model)

    return go


def weighted(train):
    def go(model, data, ids, number, local):
        found = [train(model, data, k, number, local) for k in ids]
        return mean(found, [len(samples(data, k)) for k in ids])

    return go


MEANS = {
    "fedsgd": ({}, weighted(lambda model, data, k, number, local: one_step(model, data, k))),
    "fedprox": ({"mu": 0.6}, weighted(lambda *given: solution(*given, mu=0.6))),
    "qfedavg": ({"q": 2.0}, fair_step),
    "feddist": ({"epsilon": 0.6}, toward(False, 0.6)),
    "feddws": ({}, toward(True, None)),
}


@pytest.mark.parametrize("name", MEANS)
def test_one_model_for_all(toy, linear, local, name):
    settings, go = MEANS[name]
    states = play(getattr(algorithms, name)(linear, local, PICK, **settings), toy, 2)
    model = models_of(states[0].groups)[0]
    for number, state in enumerate(states[1:]):
        model = go(model, toy, cohort_of(PICK, number, toy), number, local)
        np.testing.assert_allclose(models_of(state.groups)[0].flat(), model.flat(), atol=3e-5)


# groups


class Rule(NamedTuple):
    """What groups make of their clients' models."""

    weighs: bool = True  # by samples
    mu: float = 0.0
    trim: float = 0.0  # at both ends of each coordinate
    eta_g: float = 0.0  # of the other groups, over the lengths of their models
    gradients: bool = False  # one step of each client, divided by the clients of all groups
    by_loss: bool = False  # clients train the model of their least loss


def uneven(data):
    """Returns the data of which every other client holds five samples, so that weights show."""
    return data.replace(train=data.train.replace(size=data.train.size.at[::2].set(5)))


def combine(found, weights, rule):
    if not rule.trim:
        return mean(found, weights if rule.weighs else None)
    rows = np.sort([model.flat() for model in found], axis=0)
    cut = min(int(rule.trim * len(rows) + 1e-9), (len(rows) - 1) // 2)
    flat = rows[cut : len(rows) - cut].mean(0)
    return Model(flat[:20].reshape(5, 4), flat[20:])


def mix(groups, used, eta_g):
    """FlexCFL, eq. 20, divided by all weights; groups without clients take no part."""
    pull = [eta_g / np.linalg.norm(model.flat()) for model in groups]
    mixed = list(groups)
    for g in used:
        others = [k for k in used if k != g]
        weights = [1.0, *(pull[k] for k in others)]
        mixed[g] = mean([groups[g], *(groups[k] for k in others)], weights)
    return mixed


def follow(before, after, data, local, ids, rule, key=KEY, trained_in=None):
    """Asserts that a round of the clients `ids`, who train in their groups of `after`, or in those
    before, `trained_in`, makes its models; returns how many groups were trained.
    """
    groups, place, number = models_of(before.groups), np.asarray(after.assignment), before.round
    found, weights = [[] for _ in groups], [[] for _ in groups]
    for k in ids:
        g = int(place[k])
        start = groups[g if trained_in is None else int(trained_in[k])]
        if rule.by_loss:
            assert g == np.argmin([cross_entropy(w, *held_by(data, k)) for w in groups])
        found[g].append(
            one_step(start, data, k)
            if rule.gradients
            else solution(start, data, k, number, local, rule.mu, key)
        )
        weights[g].append(len(samples(data, k)))
    for g, model in enumerate(groups):
        if found[g]:
            groups[g] = combine(found[g], weights[g], rule)
        if rule.gradients:
            groups[g] = model + len(found[g]) / len(ids) * (groups[g] + -1.0 * model)
    if rule.eta_g:
        groups = mix(groups, sorted({*place[place >= 0].tolist()}), rule.eta_g)
    for model, wanted in zip(models_of(after.groups), groups, strict=True):
        np.testing.assert_allclose(model.flat(), wanted.flat(), atol=3e-5)
    return sum(map(bool, found))


GRADIENTS = {"solve": "gradient_step", "aggregate": "all_participants"}
RAC = {"m": 2, "alpha": 3, "pretrain": "iters:4", "newcomers": "random", "measure": "madc"}
METHODS = {
    "hypocluster": (algorithms.ifca, {"m": 2, "aggregate": "samples"}, Rule(by_loss=True)),
    "ifca_gradient": (
        algorithms.ifca,
        {"m": 2} | GRADIENTS,
        Rule(weighs=False, gradients=True, by_loss=True),
    ),
    "ifca_mig": (
        algorithms.ifca_mig,
        {"m": 3, "mu": 0.4},
        Rule(weighs=False, mu=0.4, by_loss=True),
    ),
    "fedgrouprox": (algorithms.fedgroup, RAC | {"mu": 0.6}, Rule(mu=0.6)),
    "feddrift": (algorithms.feddrift, {"m": 2, "mu": 0.3}, Rule(mu=0.3)),
    "auxo": (algorithms.auxo, {"m": 2, "mu": 0.3}, Rule(weighs=False, mu=0.3)),
    "tkm": (algorithms.tkm, {"m": 2, "beta": 0.3}, Rule(trim=0.3)),
}
ONE = ("auxo", "feddrift")  # as long as nothing is cut and nothing drifts


@pytest.mark.parametrize("name", METHODS)
def test_groups_of_clients(toy, linear, local, name):
    method, settings, rule = METHODS[name]
    everybody = name == "auxo"
    pick = select.by_group(14) if everybody else PICK
    states, counts = play(build(method, linear, local, pick, **settings), toy, 2), []
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        ids = np.flatnonzero(toy.train.size).tolist() if everybody else cohort_of(pick, number, toy)
        counts.append(follow(before, after, toy, local, ids, rule))
    assert max(counts) > 1 or name in ONE


def test_ifca_goes_on_from_the_best_of_three_starts(toy, linear, local):
    """That whose clients have the least mean loss while they train for one epoch."""
    one, starts, losses = local.replace(epochs=1), [], []
    settings = {"m": 2, "restarts": 3, "restart_rounds": 1}
    state = jax.jit(algorithms.ifca_restarts(linear, one, PICK, **settings).init)(KEY, toy)
    begin = jax.jit(algorithms.ifca(linear, one, PICK, m=2).init)
    for number in range(3):
        key = jax.random.fold_in(KEY, number)
        groups, total, count = models_of(begin(key, toy).groups), 0.0, 0
        ids = PICK.draw(derive_key(key, SELECT, 0), 0, toy.train.size).tolist()
        for k in [k for k in ids if toy.train.size[k]]:
            each = [cross_entropy(w, *held_by(toy, k)) for w in groups]
            w = received = groups[int(np.argmin(each))]
            order = passes(derive_key(key, TRAIN, 0), toy, k, 1)
            for batch in batches_of(order, one.batch_size):
                x, y = np.asarray(toy.x, np.float64)[batch], np.asarray(toy.y)[batch]
                total += len(batch) * (cross_entropy(w, x, y) + L2 * np.sum(received.kernel**2))
                w = w + -one.lr * gradient(w, x, y)
            count += len(order[0])
        starts.append(groups)
        losses.append(total / count)
    best = int(np.argmin(losses))
    assert best != 0
    for found, wanted in zip(models_of(state.groups), starts[best], strict=True):
        np.testing.assert_allclose(found.flat(), wanted.flat(), rtol=1e-6)
