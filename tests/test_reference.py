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
from conftest import build, ledger, nightly, shuffled, with_execution
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from fedjax_cfl import algorithms
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.keys import ASSIGN, SELECT, START, TRAIN, derive_key
from fedjax_cfl.method import Method, Start
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import random_groups
from fedjax_cfl.system import select
from fedjax_cfl.system.clock import device_profiles, find_duration
from fedjax_cfl.system.power_of_choice import draw_candidates, rpow_d
from fedjax_cfl.system.reports import count_to_int, make_report
from fedjax_cfl.system.system import System

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
    order, start, size = map(np.asarray, (data.train.order, data.train.start, data.train.size))
    return order[start[client] :][: size[client]]


@jax.jit
def draw_words(key, client):
    return jax.random.bits(jax.random.fold_in(key, client), (2,))


def passes(key, data, client, count):
    """Returns `count` reshuffled passes over a client's samples."""
    held = samples(data, client)
    words = draw_words(key, client)
    return [held[shuffled(words, len(held), number)] for number in range(count)]


def trained(model, data, batches, lr):
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    for batch in batches:
        model = model + -lr * gradient(model, x[batch], y[batch])
    return model


def batches_of(epochs, size):
    return [epoch[first : first + size] for epoch in epochs for first in range(0, len(epoch), size)]


def cohort_of(pick, round, data):
    ids = pick.draw(derive_key(KEY, SELECT, round), round, data.train.size)
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
        for k in shuffled(jax.random.bits(keys[1], (2,)), data.num_clients, 0)[: alpha * m]
        if data.train.size[k] > 0
    ]
    updates = []
    for client in ids:
        order = batches_of(passes(keys[2], data, client, iterations), local.batch_size)[:iterations]
        updates.append(trained(model, data, order, local.lr).flat() - model.flat())
    updates = np.array(updates)
    # [P, m], the left singular vectors
    directions = np.linalg.svd(updates.T, full_matrices=False)[0][:, :m]
    features = updates @ directions / np.linalg.norm(updates, axis=1, keepdims=True)
    return ids, updates, KMeans(m, n_init=20, random_state=0).fit(features).labels_


def played(algorithm, data):
    """Returns (first state, last state) of the package's run."""
    one_round = jax.jit(algorithm.round)
    first = state = jax.jit(algorithm.init)(KEY, data)
    for _ in range(ROUNDS):
        state, _ = one_round(KEY, state, data)
    return first, state


def play(algorithm, data, rounds=ROUNDS):
    """Returns the states before the first and after every round of a run, as arrays of NumPy: what
    a twin does with them is not compiled.
    """
    one_round, states = jax.jit(algorithm.round), [jax.jit(algorithm.init)(KEY, data)]
    for _ in range(rounds):
        states.append(one_round(KEY, states[-1], data)[0])
    return jax.device_get(states)


def assert_models_close(found, expected):
    for one, other in zip(models_of(found), expected, strict=True):
        np.testing.assert_allclose(one.flat(), other.flat(), rtol=1e-5, atol=1e-5)


def test_gradient_is_that_of_the_task(toy, linear):
    params, x, y = jax.jit(linear.init)(KEY), np.asarray(toy.x)[:9], np.asarray(toy.y)[:9]
    found = jax.jit(jax.grad(lambda params: linear.loss(params, x, y).mean()))(params)
    model = Model(*(np.asarray(params["head"][name], np.float64) for name in Model._fields))
    expected = gradient(model, np.asarray(x, np.float64), np.asarray(y))
    for name in Model._fields:
        np.testing.assert_allclose(
            found["head"][name], getattr(expected, name), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("width", [nightly(1), 4])
def test_fedavg(toy, linear, local, width):
    pick = select.uniform(COHORT)
    first, last = played(
        algorithms.fedavg(linear, with_execution(local, width=width), pick),
        toy,
    )
    assert_models_close(last.groups, [fedavg(models_of(first.groups)[0], toy, pick, local)])
    assert np.abs(models_of(last.groups)[0].flat() - models_of(first.groups)[0].flat()).max() > 0.1


def test_ifca(toy, linear, local):
    pick = select.rr_then_random(COHORT)
    first, last = played(algorithms.ifca(linear, local, pick, m=2), toy)
    groups, choice = ifca(models_of(first.groups), toy, pick, local)
    assert_models_close(last.groups, groups)
    assert len(choice) == 13 and set(choice.values()) == {0, 1}
    assert {client: int(last.assignment[client]) for client in choice} == choice


@pytest.mark.parametrize("iterations", [2, nightly(11)])
def test_flexcfl_start(toy, linear, local, iterations):
    """Groups, directions and models of the founders; 11 steps of batch 5 are more than
    one pass for most.
    """
    m, alpha = 2, 5
    algorithm = build(
        algorithms.flexcfl,
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


def test_each_founder_is_a_group(toy, linear, local):
    """RCC: the first three clients of a draw, and what each has trained; one has no samples."""
    rcc = {"m": 3, "alpha": 1, "measure": "none", "pretrain": "iters:3"}
    algorithm = build(algorithms.flexcfl, linear, local, select.uniform(COHORT), **rcc)
    state = jax.jit(algorithm.init)(KEY, toy)
    keys, groups = jax.random.split(derive_key(KEY, START), 4), models_of(state.groups)
    ids = shuffled(jax.random.bits(keys[1], (2,)), toy.num_clients, 0)[:3].tolist()
    assert ids[0] == 2 and [int(state.assignment[client]) for client in ids] == [-1, 1, 2]
    for client, found in zip(ids, groups, strict=True):
        plan = batches_of(passes(keys[2], toy, client, 3), local.batch_size)[:3]
        model = models_of(state.memory.initial)[0]
        expected = trained(model, toy, plan, local.lr)
        np.testing.assert_allclose(found.flat(), expected.flat(), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_newcomers_join_the_nearest_direction(toy, linear, local):
    """FlexCFL eq. 8: a client met in round 0 pre-trains from the initial model and
    takes the largest cosine.
    """
    everybody, options = (
        select.from_table(np.arange(14)[None]),
        {"alpha": 3, "pretrain": "iters:11"},
    )
    algorithm = build(algorithms.flexcfl, linear, local, everybody, m=2, **options)
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


def test_clients_that_move_after_training_bring_their_models(toy, linear, local):
    """Every third client changes group once its update is known, and group 2 gets a model
    of its own then: what is averaged are models, against loops over clients.
    """
    everybody, fresh = select.full_participation(), jax.vmap(linear.init)(jax.random.split(KEY, 3))

    def regroup(r):
        groups = jax.tree.map(lambda old, new: old.at[2].set(new[2]), r.state.groups, fresh)
        moved = jnp.where(r.cohort.ids % 3 == 0, r.group + 1, r.group)
        return r.state.replace(groups=groups), moved

    def assign(r):
        return r.cohort.ids % 2, make_report()

    solve = sgd(linear, local)
    method = Method(solve, random_groups(linear, 3), assign=assign, regroup=regroup)
    algorithm = federated(linear, local, everybody, method)
    one_round = jax.jit(algorithm.round)
    state = jax.jit(algorithm.init)(KEY, toy)
    for round in range(ROUNDS):
        before = models_of(state.groups)
        state, info = one_round(KEY, state, toy)
        members, weights = [[], [], []], [[], [], []]
        for client in cohort_of(everybody, round, toy):
            start = client % 2
            now = start + (client % 3 == 0)
            epochs = passes(derive_key(KEY, TRAIN, round), toy, client, local.epochs)
            order = batches_of(epochs, local.batch_size)
            members[now].append(trained(before[start], toy, order, local.lr))
            weights[now].append(len(epochs[0]))
            assert state.assignment[client] == now
        assert all(members)
        expected = [mean(*pair) for pair in zip(members, weights, strict=True)]
        assert_models_close(state.groups, expected)
        gaps = [
            np.mean([np.linalg.norm(model.flat() - new.flat()) for model in mine])
            for mine, new in zip(members, expected, strict=True)
        ]
        np.testing.assert_allclose(info.group_discrepancy, gaps, rtol=1e-4)


class Visit(NamedTuple):
    """What one client did in a round."""

    model: Model
    weight: int  # training samples
    loss: float  # mean over its first epoch
    steps: int


def visits(model, data, pick_ids, round, local):
    """Returns what each client of a cohort does from `model`, by id."""
    found = {}
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    for client in pick_ids:
        epochs = passes(derive_key(KEY, TRAIN, round), data, client, local.epochs)
        order, w, losses = batches_of(epochs, local.batch_size), model, []
        for batch in order if len(epochs[0]) else []:
            each = -np.log(probabilities(w, x[batch])[np.arange(len(batch)), y[batch]])
            losses += list(each + L2 * np.sum(model.kernel**2))  # as received
            w = w + -local.lr * gradient(w, x[batch], y[batch])
        first = np.mean(losses[: len(epochs[0])]) if losses else 0.0
        found[client] = Visit(w, len(epochs[0]), first, len(order) if losses else 0)
    return found


@pytest.mark.nightly
def test_power_of_choice(toy, linear, local):
    """The highest known losses of eight candidates, those never selected first, in random
    order; a client without data is no candidate.
    """
    algorithm = algorithms.fedavg(linear, local, rpow_d(3, 8))
    assert algorithm.data_clients is None
    state, one_round = jax.jit(algorithm.init)(KEY, toy), jax.jit(algorithm.round)
    known, model, chosen = np.full(14, np.inf), models_of(state.groups)[0], []
    for round in range(7):
        key = derive_key(KEY, SELECT, round)
        candidates = np.asarray(draw_candidates(key, state, toy, 8))
        new = 1e30 * (1 + np.asarray(jax.random.uniform(jax.random.fold_in(key, 1), (14,))))
        score = np.where(np.isinf(known), new, known)
        cohort = candidates[np.argsort(-score[candidates])[:3]].tolist()
        assert len(set(candidates)) == 8 and toy.train.size[candidates].min() > 0
        done = visits(model, toy, cohort, round, local)
        trained_by = {client: visit for client, visit in done.items() if visit.weight}
        model = mean(
            [v.model for v in trained_by.values()], [v.weight for v in trained_by.values()]
        )
        known[list(trained_by)] = [visit.loss for visit in trained_by.values()]
        state, info = one_round(KEY, state, toy)
        np.testing.assert_allclose(state.selection, known, rtol=1e-5)
        assert_models_close(state.groups, [model])
        assert info.selected == 3
        chosen.append(frozenset(cohort))
    assert len(set(chosen)) > 4 and np.isfinite(known).sum() >= 10


def test_a_clock_ends_rounds_with_the_answer_waited_for(toy, linear, local):
    """Devices of unlike speed; the fourth answer of six ends a round, and later ones do
    not count: FedAvg by loops, with seconds added up.
    """
    rng = np.random.default_rng(4)
    step_seconds, bandwidth = rng.uniform(0.01, 0.5, 14), rng.uniform(50, 400, 14)
    clock = device_profiles(step_seconds.astype(np.float32), bandwidth.astype(np.float32), 4)
    pick = select.uniform(COHORT)
    algorithm = algorithms.fedavg(linear, local, System(pick, clock=clock))
    state, one_round = jax.jit(algorithm.init)(KEY, toy), jax.jit(algorithm.round)
    model, milliseconds, late = models_of(state.groups)[0], 0, 0
    for round in range(ROUNDS + 2):
        ids = np.asarray(pick.draw(derive_key(KEY, SELECT, round), round, toy.train.size)).tolist()
        done = visits(model, toy, ids, round, local)
        seconds = {
            k: v.steps * step_seconds[k] + 2 * 24 * 4 / bandwidth[k] for k, v in done.items()
        }
        end = sorted(seconds.values())[3]
        milliseconds += round_half_even(1000 * end)
        counted = [v for k, v in done.items() if seconds[k] <= end and v.weight]
        model = mean([v.model for v in counted], [v.weight for v in counted])
        state, info = one_round(KEY, state, toy)
        assert_models_close(state.groups, [model])
        np.testing.assert_allclose(info.seconds, end, rtol=1e-5)
        assert info.late == 2 and info.clients == len(counted) and info.selected == COHORT
        late += sum(k != 2 for k in ids if seconds[k] > end)
    assert late > 4
    assert count_to_int(state.clock_ms) == milliseconds
    assert ledger(state.traffic).units_up == 6 * (ROUNDS + 2), "late answers are sent all the same"


@pytest.mark.nightly
@pytest.mark.parametrize("per_group", [False, True])
def test_clocks_of_groups_equal_a_twin(per_group, toy, linear, local):
    """Two groups: a round waits for four answers, a group with a clock of its own for its share."""
    rng = np.random.default_rng(6)
    step_seconds, bandwidth = rng.uniform(0.01, 0.5, 14), rng.uniform(50, 400, 14)
    clock = device_profiles(step_seconds, bandwidth, 4)._replace(per_group=per_group)
    pick = select.uniform(9)

    def assign(r):
        return r.cohort.ids % 2, make_report()

    def start(key, data):
        models = jax.vmap(linear.init)(jax.random.split(key, 2))
        return Start(models, jnp.arange(14) % 2)

    timed = System(pick, clock=clock)
    algorithm = federated(linear, local, timed, Method(sgd(linear, local), start, assign=assign))
    state, one_round = jax.jit(algorithm.init)(KEY, toy), jax.jit(algorithm.round)
    models, times, late = models_of(state.groups), np.zeros(2), 0
    for round in range(10):
        key = derive_key(KEY, SELECT, round)
        drawn = np.asarray(pick.draw(key, round, toy.train.size)).tolist()
        done = {}
        for g in (0, 1):
            members = [k for k in drawn if k % 2 == g]
            done |= visits(models[g], toy, members, round, local)
        seconds = {
            k: v.steps * step_seconds[k] + 2 * 24 * 4 / bandwidth[k] for k, v in done.items()
        }
        durations, counted = [], []
        for g in (0, 1) if per_group else (None,):
            of_clock = [k for k in drawn if g in (None, k % 2)]
            answers = sorted(seconds[k] for k in of_clock)
            wait = max(4 * len(of_clock) // len(drawn), 1) if per_group else 4
            durations.append(answers[min(wait, len(answers)) - 1] if answers else 0)
            counted += [k for k in of_clock if seconds[k] <= durations[-1]]
        for g in (0, 1):
            trained_by = [done[k] for k in counted if k % 2 == g and done[k].weight]
            if trained_by:
                models[g] = mean([v.model for v in trained_by], [v.weight for v in trained_by])
        state, info = one_round(KEY, state, toy)
        times += durations if per_group else durations * 2
        assert info.late == len(drawn) - len(counted)
        assert_models_close(state.groups, models)
        np.testing.assert_allclose(info.seconds, max(durations), rtol=1e-5)
        found = [count_to_int(each) for each in state.clock_ms.reshape(-1, 2)]
        np.testing.assert_allclose(found, 1000 * times[: len(found)], atol=round + 1)
        late += int(info.late)
    assert late > 20


def round_half_even(number):
    return int(np.round(np.float32(number)))


def test_a_round_ends_with_the_last_answer_if_fewer_come():
    """By hand: two of four answer; nobody does; nobody is waited for in vain."""
    seconds = jnp.array([3.0, 1.0, 2.0, 9.0])
    for answers, wait_for, duration, late in (
        ([1, 1, 1, 0], 2, 2.0, [1, 0, 0, 0]),
        ([1, 0, 0, 1], 3, 9.0, [0, 0, 0, 0]),
        ([1, 1, 1, 1], None, 9.0, [0, 0, 0, 0]),
        ([0, 0, 0, 0], 2, 0.0, [0, 0, 0, 0]),
    ):
        found = find_duration(seconds, jnp.array(answers, bool), wait_for)
        assert found[0] == duration and found[1].tolist() == [bool(n) for n in late]


def test_local_steps_cycle_through_epochs(toy, linear, local):
    """Seven mini-batch steps of every client with momentum, which has the weight decay in it,
    however many samples it has; losses are means over what the first and the last epoch reach,
    with the penalty of the model before and, where the last is not the first, after.
    """
    pick, decay, rho = select.full_participation(), 0.3, 0.5
    own = local.replace(steps=7, weight_decay=decay, momentum=rho)
    algorithm = algorithms.fedavg(linear, own, pick)
    state = jax.jit(algorithm.init)(KEY, toy)
    model, one_round = models_of(state.groups)[0], jax.jit(algorithm.round)
    x, y = np.asarray(toy.x, np.float64), np.asarray(toy.y)
    for round in range(ROUNDS):
        solutions, weights, losses = [], [], []
        for client in cohort_of(pick, round, toy):
            epochs, w = passes(derive_key(KEY, TRAIN, round), toy, client, 7), model
            per_epoch, each = -(-len(epochs[0]) // local.batch_size), [[] for _ in range(7)]
            velocity = 0.0 * w
            for step, batch in enumerate(batches_of(epochs, local.batch_size)[:7]):
                loss = -np.log(probabilities(w, x[batch])[np.arange(len(batch)), y[batch]])
                each[step // per_epoch] += loss.tolist()
                velocity = rho * velocity + gradient(w, x[batch], y[batch]) + decay * w
                w = w + -local.lr * velocity
            solutions.append(w)
            weights.append(len(epochs[0]))
            last = 6 // per_epoch
            ends = (each[0], model), (each[last], w if last else model)
            losses.append([np.mean(part) + L2 * np.sum(end.kernel**2) for part, end in ends])
        model = mean(solutions, weights)
        state, info = one_round(KEY, state, toy)
        assert_models_close(state.groups, [model])
        assert count_to_int(info.steps) == 7 * len(weights)
        found = [info.loss, info.last_loss]
        np.testing.assert_allclose(found, np.average(losses, axis=0, weights=weights), rtol=1e-4)
