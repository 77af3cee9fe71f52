"""FedDrift and FedDrift-Eager against loop twins on tables of losses, and on the toy."""

import importlib
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, build, nightly, spent
from test_assign import met

from fedjax_cfl import algorithms
from fedjax_cfl.errors import InputError
from fedjax_cfl.system import select

# the name of the function, too
feddrift = importlib.import_module("fedjax_cfl.algorithms.feddrift")


def twin_open(drifting, best, free, used, eager):
    """Opens models client by client."""
    group, source = best.copy(), np.arange(len(free))
    queue = sorted(np.flatnonzero(free), key=lambda g: (used[g], g))
    shared = None
    for i in np.flatnonzero(drifting):
        if eager and shared is not None:
            group[i] = shared
        elif queue:
            group[i] = shared = queue.pop(0)
            source[shared] = best[i]
    return group, source


def twin_merge(loss, group, weight, settled, limit):
    """Merges models by complete linkage, pair by pair."""
    m = len(settled)
    mass = [weight[group == g].sum() for g in range(m)]
    live = [g for g in range(m) if settled[g] and mass[g] > 0]

    def cross(i, j):
        mine = group == j
        return (loss[mine, i] * weight[mine]).sum() / mass[j]

    def apart(i, j):
        return max(cross(i, j) - cross(i, i), cross(j, i) - cross(j, j), 0)

    blocks = [[g] for g in live]
    while len(blocks) > 1:
        pairs = itertools.combinations(range(len(blocks)), 2)
        a, b = min(
            pairs,
            key=lambda pair: max(apart(i, j) for i in blocks[pair[0]] for j in blocks[pair[1]]),
        )
        if max(apart(i, j) for i in blocks[a] for j in blocks[b]) > limit:
            break
        blocks[a] += blocks.pop(b)
    into, weights = np.arange(m), np.eye(m)
    for block in blocks:
        first = min(block)
        into[block] = first
        weights[first] = 0
        for g in block:
            weights[first, g] = mass[g] / sum(mass[j] for j in block)
    return into, weights


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_opening_equals_its_twin(seed, eager):
    rng = np.random.default_rng(seed)
    best = rng.integers(3, size=12).astype(np.int32)
    drifting = rng.random(12) < (0.7 if seed else 0.0)
    free, used = np.arange(7) >= (7 if seed == 3 else 3), rng.integers(3, size=7)
    opening = feddrift.open_one if eager else feddrift.open_each
    found = opening(*map(jnp.asarray, (drifting, best, free, used)))
    group, source = twin_open(drifting, best, free, used, eager)
    np.testing.assert_array_equal(np.where(drifting, found.group, best), group)
    np.testing.assert_array_equal(found.source, source)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_merging_equals_its_twin(seed):
    rng = np.random.default_rng(seed)
    group, weight = rng.integers(6, size=40), rng.integers(1, 20, size=40).astype("f4")
    loss = (rng.random((40, 7)) + 0.5 * rng.random((1, 7))).astype("f4")
    settled = np.arange(7) != seed
    for limit in (0.0, 0.1, 0.25, 10.0):
        found = feddrift.merge_models(limit)(*map(jnp.asarray, (loss, group, weight, settled)))
        into, weights = twin_merge(loss, group, weight, settled, limit)
        np.testing.assert_array_equal(found[0], into)
        wanted = weights[np.unique(into)]
        np.testing.assert_allclose(found[1][np.unique(into)], wanted, atol=1e-5)


def test_a_model_whose_loss_is_not_finite_is_not_merged():
    """On others' samples, or everywhere; a client without samples has no say."""
    group, weight, settled = np.array([0, 1, 1]), np.float32([5, 5, 0]), np.ones(2, bool)
    merge = jax.jit(feddrift.merge_models(0.5))
    sound = np.float32([[0.1, 0.2], [0.2, 0.1], [np.inf, np.inf]])
    assert merge(sound, group, weight, settled)[0].tolist() == [0, 0]
    for bad in ([[0.1, np.inf], [0.2, 0.1]], [[0.1, np.inf], [0.2, np.inf]]):
        loss = np.float32([*bad, [np.inf, np.inf]])
        assert merge(loss, group, weight, settled)[0].tolist() == [0, 1]


def test_a_change_of_data_by_hand():
    """Client 0 has opened model 1 at the last change: it keeps that, though model 0 is better.
    Client 2 goes back to model 0, and client 3, whose loss has grown, opens the model that has
    had no clients for longest.
    """
    loss = jnp.array([[0.1, 0.9, 9, 9], [0.2, 0.9, 9, 9], [0.1, 0.5, 9, 9], [0.8, 0.9, 9, 9]])
    losses = feddrift.DriftLosses(jnp.full(4, 0.2), jnp.array([True, False, False, False]))
    changes = feddrift.Changes(used=jnp.array([5, 5, 4, 3]), number=jnp.int32(5))
    models = {"w": jnp.array([[1.0], [2.0], [3.0], [4.0]])}
    active, rows = [True, True, True, False], {"losses": losses}
    state = met(models, [1, 0, 2, 0], active, changes, rows)
    data = SimpleNamespace(train=SimpleNamespace(size=jnp.full(4, 3)), num_clients=4)
    given = 0.5, feddrift.open_each, None, state, data
    after, report = at_once(feddrift.change_models, lambda data, groups: loss, *given)
    assert after.assignment.tolist() == [1, 0, 0, 3] and report.migrated == 2
    np.testing.assert_array_equal(after.groups["w"][:, 0], [1, 2, 3, 1])
    assert after.rows["losses"].trains_alone.tolist() == [False, False, False, True]
    # at this change, the sixth, models 0, 1 and 3 have clients; 2 has none since the fourth
    assert after.memory.used.tolist() == [6, 6, 4, 6] and after.memory.number == 6


def states_of(algorithm, steps):
    key, round_fn = jax.random.key(0), jax.jit(algorithm.round)
    states = [jax.jit(algorithm.init)(key, steps[0])]
    for data in steps:
        states.append(round_fn(key, states[-1], data)[0])
    assert round_fn._cache_size() == 1
    return states


@pytest.fixture(scope="module")
def steps(toy):
    """30 still rounds, 3 after some clients' labels have been renamed, and 3 after another
    client's have.
    """
    quiet = jnp.zeros(14, bool)

    def rename(data, clients):
        mine = np.isin(np.asarray(data.owner), clients)
        y = np.where(mine, 3 - np.asarray(data.y), np.asarray(data.y)).astype(np.int32)
        there = jnp.asarray(np.isin(np.arange(14), clients))
        return data.replace(y=jnp.asarray(y), shifted=there)

    still = toy.replace(shifted=quiet)
    first = rename(still, [1, 3, 7])
    second = rename(first, [9])
    return [still] * 30 + [first] + [first.replace(shifted=quiet)] * 2 + [second]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["feddrift", nightly("feddrift_eager")])
def test_clients_whose_labels_were_renamed_open_models(name, toy, steps, linear, local):
    algorithm = build(
        getattr(algorithms, name), linear, local, select.full_participation(), m=8, delta=0.5
    )
    states = states_of(algorithm, steps)
    assert not states[30].assignment.any() and states[30].active.sum() == 1
    event = states[31]
    opened = {k: int(event.assignment[k]) for k in (1, 3, 7)}
    assert set(np.flatnonzero(event.assignment > 0)) == {1, 3, 7}
    assert len(set(opened.values())) == (3 if name == "feddrift" else 1)
    assert event.rows["losses"].trains_alone.sum() == 3
    alive = int((toy.train.size > 0).sum())
    assert spent(states[30], event).units_down == 14 + alive
    assert spent(states[30], event).words_up == alive
    # client 2 has no samples and never counts
    last = states[-1]
    assert last.rows["losses"].trains_alone[1] == 0 and last.assignment[2] == -1
    assert last.assignment[9] != 0
    losses = feddrift.losses_of_all(linear, local)(steps[-1], states[33].groups)
    assert np.isinf(losses[2]).all() and np.isfinite(np.delete(losses, 2, 0)).all()


@pytest.mark.nightly
def test_thresholds_that_are_never_reached_leave_fedavg(toy, steps, linear, local):
    everyone = select.full_participation()
    plain = states_of(algorithms.fedavg(linear, local, everyone), steps[28:])[-1]
    key = jax.random.key(0)
    algorithm = algorithms.feddrift(linear, local, everyone, m=3, delta=1e6)
    state = jax.jit(algorithm.init)(key, toy)
    step = jax.jit(algorithm.round)
    for data in steps[28:]:
        state, _ = step(key, state, data)
    for a, b in zip(jax.tree.leaves(state.groups), jax.tree.leaves(plain.groups), strict=True):
        np.testing.assert_allclose(a[0], b[0], rtol=1e-4, atol=1e-5)


def test_bad_thresholds_are_refused(linear, local):
    with pytest.raises(InputError, match=r"algorithm\.delta=-1"):
        algorithms.feddrift(linear, local, select.uniform(3), delta=-1.0)
    with pytest.raises(InputError, match=r"algorithm\.m=0"):
        algorithms.feddrift_eager(linear, local, select.uniform(3), m=0)
    with pytest.raises(InputError, match=r"algorithm\.delta_merge=0.1: FedDrift-Eager merges no"):
        algorithms.feddrift_eager(linear, local, select.uniform(3), delta_merge=0.1)
