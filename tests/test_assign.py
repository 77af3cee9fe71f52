"""Assignment of clients to groups against brute force and planted groups."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import charged, nightly
from test_aggregate import sent

from fedjax_cfl.clustering.assign import (
    cold_start,
    nearest_direction,
    random_group,
)
from fedjax_cfl.clustering.clustered import ask_cohort, least_loss
from fedjax_cfl.clustering.measure import losses
from fedjax_cfl.method import Round
from fedjax_cfl.system.reports import make_bill, make_count, make_report, no_faults, no_traffic
from fedjax_cfl.types import Cohort, State

KEY = jax.random.key(11)


def met(models, assignment, active=None, memory=(), rows=None):
    """Returns a state with these groups."""
    count = jax.tree.leaves(models)[0].shape[0]
    active = jnp.ones(count, bool) if active is None else jnp.array(active)
    return State(
        round=jnp.int32(0),
        groups=models,
        server=(),
        active=active,
        assignment=jnp.array(assignment, jnp.int32),
        traffic=no_traffic(),
        memory=memory,
        selection=(),
        clock_ms=make_count(0),
        start_faults=no_faults(),
        rows=rows or {},
    )


def least_loss_of(task, local, with_l2=False):
    """Returns what lets each client choose the model of least loss."""
    return ask_cohort(local, losses(task, local, with_l2), least_loss, None)


@pytest.mark.parametrize("with_l2", [nightly(False), True])
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
    choose = jax.jit(least_loss_of(linear, local, with_l2))
    cohort = Cohort(ids=jnp.arange(14), rank=jnp.arange(14))
    chosen, _ = choose(Round(KEY, met(models, [-1] * 14), toy, cohort))
    np.testing.assert_array_equal(chosen, table.argmin(1))
    assert chosen[2] == 0, "ties, here the client without data, go to the lowest number"
    popular = int(np.bincount(chosen).argmax())
    active = np.arange(3) != popular
    np.testing.assert_array_equal(
        choose(Round(KEY, met(models, [-1] * 14, active), toy, cohort))[0],
        np.where(active, table, np.inf).argmin(1),
    )


def test_cold_start_touches_only_newcomers(toy, models):
    asked = []

    def choose(r):
        newcomers = r.cohort
        asked.append(newcomers.ids.tolist())
        bad = no_faults().replace(nonfinite=jnp.int32(7))
        return jnp.full(newcomers.ids.shape, 2), make_report(fault_counts=bad)

    state = met(models, [0, 1, -1, 1, -1, *[0] * 9])
    cohort = Cohort(ids=jnp.array([1, 4, 14, 0, 2, 3]), rank=jnp.arange(6))
    gid, report = cold_start(choose)(Round(KEY, state, toy, cohort))
    # client 2 has no samples to choose by
    assert asked == [[14, 4, 14, 14, 14, 14]], "the others are shown as empty slots"
    assert gid[jnp.array([0, 1, 3, 5])].tolist() == [1, 2, 0, 1]
    cost = charged(report.bill)
    assert (cost.units_down, cost.units_up) == (1 * 3, 0)
    assert report.fault_counts.nonfinite == 7


def test_nearest_direction_finds_the_planted_group(toy):
    """Directions along the axes, whatever their lengths; the fourth, though the nearest
    to the last client, has no founders.
    """
    directions = {"w": jnp.diag(jnp.array([1.0, 100.0, 0.01, 1.0]))}
    memory = SimpleNamespace(
        initial=None, directions=directions, has_founders=jnp.array([True, True, True, False])
    )
    delta = jnp.array([[9, 1, 1, 0], [-9, 0.5, 0.4, 0], [0.1, 1, 3, 0], [0, 0.2, 0.1, 5.0]])

    def pretrain(newcomers, data, shared, work):
        return sent([0.0] * 4, [1] * 4).replace(delta={"w": delta}), make_report()

    cohort = Cohort(ids=jnp.arange(4), rank=jnp.arange(4))
    chosen, _ = nearest_direction(pretrain)(
        Round(KEY, met(directions, [-1] * 14, memory=memory), toy, cohort)
    )
    assert chosen.tolist() == [0, 1, 2, 1]


def test_random_group_depends_on_the_client_and_uses_every_group(toy, models):
    state = met(models, [-1] * 14)
    ids = jnp.arange(300)
    drawn, _ = random_group(Round(KEY, state, toy, Cohort(ids=ids, rank=ids)))
    assert (np.bincount(drawn, minlength=3) > 60).all() and set(drawn.tolist()) == {0, 1, 2}
    chex.assert_trees_all_equal(
        random_group(Round(KEY, state, toy, Cohort(ids=ids[::-1], rank=ids)))[0][::-1], drawn
    )


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf, 1e30])
@pytest.mark.parametrize("place", [nightly(0), 2])
def test_a_model_that_is_not_finite_is_never_chosen(toy, linear, local, models, bad, place):
    """Nor one whose losses are not."""
    broken = jax.tree.map(lambda leaf: leaf.at[place].set(bad * jnp.sign(leaf[0])), models)
    cohort = Cohort(ids=jnp.arange(14), rank=jnp.arange(14))
    chosen, _ = least_loss_of(linear, local)(Round(KEY, met(broken, [-1] * 14), toy, cohort))
    usable = jnp.arange(3) != place
    left, _ = least_loss_of(linear, local)(Round(KEY, met(models, [-1] * 14, usable), toy, cohort))
    has_data = np.asarray(toy.train.size) > 0
    np.testing.assert_array_equal(chosen[has_data], left[has_data])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 1e30])
def test_a_direction_that_is_not_finite_is_never_chosen(toy, bad):
    directions = {"w": jnp.diag(jnp.ones(4)).at[1].set(bad)}
    memory = SimpleNamespace(
        initial=None, directions=directions, has_founders=jnp.array([False, True, True, True])
    )
    delta = jnp.array([[1, 1, 1, 0.5], [0, 0, 0, 0], [0, 9, 0, 1], [-1, 0, -1, -0.5]])

    def pretrain(newcomers, data, shared, work):
        return sent([0.0] * 4, [1] * 4).replace(delta={"w": delta}), make_report()

    cohort = Cohort(ids=jnp.arange(4), rank=jnp.arange(4))
    state = met(directions, [-1] * 14, memory=memory)
    chosen, _ = nearest_direction(pretrain)(Round(KEY, state, toy, cohort))
    assert chosen.tolist() == [2, 2, 3, 3]


def test_what_a_choice_sends_is_counted_too(toy, models):
    """Words of each slot, and a model of one, besides what the wrapper counts."""
    cohort = Cohort(jnp.array([0, 3, 14], jnp.int32), jnp.arange(3, dtype=jnp.int32))
    state = met(models, [-1] * 14)

    def choose(r):
        each = make_bill(units_up=jnp.array([0, 1, 0]), words_up=jnp.array([5, 6, 0]))
        return jnp.zeros(3, jnp.int32), make_report(each)

    def choose_silently(r):
        return jnp.zeros(3, jnp.int32), make_report()

    loud, silent = (
        charged(cold_start(one)(Round(KEY, state, toy, cohort))[1].bill)
        for one in (choose, choose_silently)
    )
    assert loud.words_up - silent.words_up == 11 and loud.units_up - silent.units_up == 1
    assert loud.units_down == silent.units_down > 0
