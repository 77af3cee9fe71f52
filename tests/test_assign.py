"""Assignment of clients to groups against brute force and planted groups."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_aggregate import sent

from fedjax_cfl.clustering.assign import (
    best_model,
    cold_start,
    every_round,
    nearest_direction,
    random_group,
)
from fedjax_cfl.round import traffic
from fedjax_cfl.types import Cohort, State

KEY = jax.random.key(11)


def met(models, assignment, active=None, memory=()):
    """Returns a state with these groups."""
    count = jax.tree.leaves(models)[0].shape[0]
    active = jnp.ones(count, bool) if active is None else jnp.array(active)
    return State(
        jnp.int32(0),
        models,
        (),
        active,
        jnp.array(assignment, jnp.int32),
        traffic.make_traffic(),
        memory,
    )


@pytest.mark.parametrize("with_l2", [False, True])
def test_best_model_is_that_of_brute_force(toy, linear, local, models, with_l2):
    """The second model is scaled up, so that its L2 penalty costs it clients; then the
    most popular one is switched off.
    """
    models = jax.tree.map(lambda leaf: leaf.at[1].multiply(8.0), models)
    table = np.zeros((14, 3))
    every = np.asarray(jax.jit(jax.vmap(linear.predict, (0, None)))(models, toy.x), np.float64)
    data = jax.device_get(toy)
    for client in np.flatnonzero(data.train.size):
        rows = data.train.order[data.train.start[client] :][: data.train.size[client]]
        for g in range(3):
            logits = every[g, rows]
            each = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), data.y[rows]]
            table[client, g] = each.mean() + with_l2 * 0.001 * np.sum(
                np.square(models["head"]["kernel"][g])
            )
    choose = jax.jit(best_model(linear, local, with_l2))
    cohort = Cohort(ids=jnp.arange(14), rank=jnp.arange(14))
    chosen = choose(KEY, met(models, [-1] * 14), toy, cohort)
    np.testing.assert_array_equal(chosen, table.argmin(1))
    assert chosen[2] == 0, "ties, here the client without data, go to the lowest number"
    popular = int(np.bincount(chosen).argmax())
    active = np.arange(3) != popular
    np.testing.assert_array_equal(
        choose(KEY, met(models, [-1] * 14, active), toy, cohort),
        np.where(active, table, np.inf).argmin(1),
    )


def test_every_round_charges_the_real_clients(toy, models):
    cohort = Cohort(ids=jnp.array([3, 14, 5, 14, 0]), rank=jnp.arange(5))
    gid, cost = every_round(lambda *_: jnp.array([2, 0, 1, 0, 2]))(
        KEY, met(models, [-1] * 14), toy, cohort
    )
    assert gid.tolist() == [2, 0, 1, 0, 2]
    assert (cost.units_down, cost.units_up, cost.words_up) == (3 * (3 - 1), 0, 3)


def test_cold_start_touches_only_newcomers(toy, models):
    asked = []

    def choose(key, state, data, newcomers):
        asked.append(newcomers.ids.tolist())
        return jnp.full(newcomers.ids.shape, 2)

    state = met(models, [0, 1, -1, 1, -1, *[0] * 9])
    cohort = Cohort(ids=jnp.array([1, 4, 14, 0, 2, 3]), rank=jnp.arange(6))
    gid, cost = cold_start(choose)(KEY, state, toy, cohort)
    assert asked == [[14, 4, 14, 14, 2, 14]], "the others are shown as empty slots"
    assert gid[jnp.array([0, 1, 3, 4, 5])].tolist() == [1, 2, 0, 2, 1]
    assert (cost.units_down, cost.units_up) == (2 * 3, 0)


def test_nearest_direction_finds_the_planted_group(toy):
    """Directions along the axes, whatever their lengths; the fourth, though the nearest
    to the last client, has no founders.
    """
    directions = {"w": jnp.diag(jnp.array([1.0, 100.0, 0.01, 1.0]))}
    memory = SimpleNamespace(
        start=None, directions=directions, planted=jnp.array([True, True, True, False])
    )
    delta = jnp.array([[9, 1, 1, 0], [-9, 0.5, 0.4, 0], [0.1, 1, 3, 0], [0, 0.2, 0.1, 5.0]])

    def pretrain(newcomers, data, shared, mine):
        return sent([0.0] * 4, [1] * 4).replace(delta={"w": delta})

    cohort = Cohort(ids=jnp.arange(4), rank=jnp.arange(4))
    chosen = nearest_direction(pretrain)(
        KEY, met(directions, [-1] * 14, memory=memory), toy, cohort
    )
    assert chosen.tolist() == [0, 1, 2, 1]


def test_random_group_depends_on_the_client_and_uses_every_group(toy, models):
    state = met(models, [-1] * 14)
    ids = jnp.arange(300)
    drawn = random_group(KEY, state, toy, Cohort(ids=ids, rank=ids))
    assert (np.bincount(drawn, minlength=3) > 60).all() and set(drawn.tolist()) == {0, 1, 2}
    chex.assert_trees_all_equal(
        random_group(KEY, state, toy, Cohort(ids=ids[::-1], rank=ids))[::-1], drawn
    )
