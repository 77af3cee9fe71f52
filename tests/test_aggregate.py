"""Means, steps and mixtures of updates against numbers worked out by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, ledger, matrix

from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.method import Round
from fedjax_cfl.round.aggregate import (
    cohort_mean,
    inter_group,
    q_fair,
    uniform_mean,
    weighted_mean,
)
from fedjax_cfl.system.reports import no_traffic
from fedjax_cfl.types import Cohort, Upload

KEY = jax.random.key(11)
EXACT = {"rtol": 1e-6}


def sent(delta, weight, loss=0.0):
    """An upload of one-number models."""
    weight, delta = np.float32(weight), np.float32(delta)
    nothing = np.zeros_like(weight)
    return Upload(
        {"w": delta[:, None]},
        weight,
        np.float32(nothing + loss),
        nothing,
        steps=nothing.astype(np.int32),
        start_group=nothing.astype(np.int32),
        squared_norm=delta**2,
    )


def combined(part, delta, weight, gid, groups=1, rank=None, client_extra=()):
    """Returns (step [m], mass [m]) as NumPy arrays."""
    rank = jnp.arange(len(gid)) if rank is None else jnp.array(rank)
    state = SimpleNamespace(active=jnp.ones(groups, bool), round=jnp.int32(0))
    cohort = Cohort(ids=jnp.arange(len(gid)), rank=rank)
    work = full_work(jnp.array(gid))._replace(client_extra=client_extra)
    upload = jax.tree.map(jnp.asarray, sent(delta, weight))
    step, mass = at_once(part, Round(KEY, state, None, cohort, work, upload))
    return np.asarray(step["w"])[:, 0], np.asarray(mass)


def test_means_by_hand():
    """Group 0: deltas 1 and 4 of 1 and 3 samples; group 1: delta 5 of 2 samples, and a
    client without data; group 2: nobody.
    """
    world = ([1.0, 5.0, 4.0, 99.0], [1, 2, 3, 0], [0, 1, 0, 1], 3)
    for part, expected, mass in (
        (weighted_mean, [13 / 4, 5, 0], [4, 2, 0]),
        (uniform_mean, [5 / 2, 5, 0], [2, 1, 0]),
        (cohort_mean, [5 / 3, 5 / 3, 0], [2, 1, 0]),
    ):
        found = combined(part, *world)
        np.testing.assert_allclose(found[0], expected, **EXACT)
        np.testing.assert_allclose(found[1], mass, **EXACT)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
def test_q_fair_by_hand(q):
    """sum F^q u / sum h, u = L delta, h = q F^(q-1) |u|^2 + L F^q, L = 1 / lr."""
    loss, delta, lipschitz = np.array([0.5, 2.0]), np.array([0.3, -0.1]), 4.0
    up = loss**q * lipschitz * delta
    down = q * loss ** (q - 1) * (lipschitz * delta) ** 2 + lipschitz * loss**q
    part = q_fair(q, Local(1 / lipschitz, 1, 5))
    losses = jnp.array([0.5, 2.0, 0.0])
    step, _ = combined(part, [*delta, 7.0], [3, 8, 0], [0, 0, 0], client_extra=losses)
    np.testing.assert_allclose(step, [up.sum() / down.sum()], rtol=1e-5)


def test_q_fair_leaves_out_a_loss_whose_share_is_beyond_float32():
    """1e30 squared is infinite; and of two such clients alone nothing is learnt."""
    part = q_fair(2.0, Local(0.25, 1, 5))
    given = [0.3, -0.1], [3, 8], [0, 0], 1
    alone, _ = combined(part, [0.3], [3], [0], client_extra=jnp.array([0.5]))
    found, mass = combined(part, *given, client_extra=jnp.array([0.5, 1e30]))
    np.testing.assert_allclose(found, alone, **EXACT)
    assert np.isfinite(mass).all() and alone != 0
    found, mass = combined(part, *given, client_extra=jnp.array([1e30, jnp.inf]))
    assert found == 0 and mass == 0


def groups_of(*rows):
    return {"a": jnp.array(rows, jnp.float32)[:, :1], "b": jnp.array(rows, jnp.float32)[:, 1:]}


def mixed(finish, groups, owning):
    """Returns (group models [m, P], what was sent) after a `finish`, where each group of
    `owning` has a client.
    """
    owners = np.flatnonzero(owning)
    state = SimpleNamespace(
        groups=groups,
        assignment=jnp.array(owners),
        active=jnp.ones(len(owning), bool),
        traffic=no_traffic(),
    )
    state.replace = lambda **changes: SimpleNamespace(**changes)
    after = finish(Round(KEY, state, None))
    return matrix(after.groups), ledger(after.traffic)


def test_inter_group_of_equal_norms():
    """W1' = (W1 + (eta / s) W2) / (1 + eta / s), and the same for W2 from the OLD W1;
    norms s = 5.
    """
    old = np.array([[3.0, 4.0, 0.0], [0.0, 5.0, 0.0]])
    for eta in (0.1, 5.0):
        new, sent = mixed(inter_group(eta), groups_of(*old), [True, True])
        np.testing.assert_allclose(new, (old + eta / 5 * old[::-1]) / (1 + eta / 5), **EXACT)
        assert sent.units_down == 2 and sent.units_up == 0


@pytest.mark.parametrize("normalize", [True, False])
def test_inter_group_by_a_loop(normalize):
    """Four groups, the third owns nobody: it neither gives nor takes."""
    old, eta, owning = np.random.default_rng(0).normal(size=(4, 3)), 0.7, [True, True, False, True]
    expected = old.copy()
    for g in (0, 1, 3):
        pull = {other: eta / np.linalg.norm(old[other]) for other in (0, 1, 3) if other != g}
        expected[g] = old[g] + sum(pull[other] * old[other] for other in pull)
        if normalize:
            expected[g] /= 1 + sum(pull.values())
    new, _ = mixed(inter_group(eta, normalize), groups_of(*old), owning)
    np.testing.assert_allclose(new, expected, rtol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_inter_group_of_strength_zero_and_of_zero_models(normalize):
    old = [[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]
    for eta in (0.0, 2.0):
        new, sent = mixed(inter_group(eta, normalize), groups_of(*old), [True, True])
        np.testing.assert_allclose(new[0], old[0], **EXACT)
        if normalize:
            assert sent.units_down == (2 if eta else 0), "nothing is exchanged at strength zero"
