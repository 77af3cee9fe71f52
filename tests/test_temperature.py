"""Temperatures by hand, and groups founded anew; both are FlexCFL options that are off
by default.
"""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, ledger, matrix, nightly
from sklearn.metrics import adjusted_rand_score
from test_fesem import planted

from fedjax_cfl.algorithms.flexcfl import temperature
from fedjax_cfl.algorithms.flexcfl.flexcfl import flexcfl
from fedjax_cfl.algorithms.flexcfl.founding import (
    ColdStart,
    ColdStartMemory,
    cluster_by_edc,
    make_found_groups,
    recluster_at,
    train_steps,
)
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import train_aside
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import MIGRATE, derive_key
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.start import count_groups
from fedjax_cfl.system import select
from fedjax_cfl.types import Cohort, Traffic, Upload

KEY = jax.random.key(7)
COHORT = select.rr_then_random(6)
GROUPS = {"m": 2, "alpha": 3, "pretrain": "iters:11"}


def play(algorithm, data, rounds, state=None):
    """Returns (last state, infos)."""
    state, one_round, infos = (
        jax.jit(algorithm.init)(KEY, data) if state is None else state,
        jax.jit(algorithm.round),
        [],
    )
    for _ in range(rounds):
        state, info = one_round(KEY, state, data)
        infos.append(info)
    assert one_round._cache_size() <= 1
    return state, infos


# Strategies: temperatures 5, 5, 9.5, 0 and 0.5 of 10; biases 1 below, 2 above, 0.5 below, 0.5
# below and 9 above the mean 1.5


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (temperature.step, [6, 4, 10, 0, 0]),
        (temperature.linear, [5 + (1 - 1 / 1.50001) * 10, 5 + (1 - 2 / 1.50001) * 10, 10, 0, 0]),
        (
            temperature.lied,
            [5 + (1 - 1 / 1.50001) * 10, 5 - (10 ** (2 / 1.5 - 1) - 1) * 20 / 9, 10, 0, 0],
        ),
        (
            temperature.eied,
            [
                5 + (10 ** (0.5 - 1) - 1) * 20 / 9,
                5 - (10 ** (0.5 - 1) - 1) * 20 / 9,
                9.5 + (10 ** (1 - 1) - 1) * 20 / 9,
                0,
                0,
            ],
        ),
    ],
)
def test_updates_by_hand(strategy, expected):
    old, bias = jnp.array([5, 5, 9.5, 0, 0.5]), jnp.array([1, 2, 0.5, 0.5, 9])
    np.testing.assert_allclose(
        temperature.next_temperature(strategy, old, bias, jnp.full(5, 1.5), 10.0),
        expected,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "strategy", [temperature.step, temperature.linear, temperature.lied, temperature.eied]
)
def test_updates_stay_between_zero_and_the_highest(strategy):
    rng = np.random.default_rng(0)
    old, bias, mean = (
        jnp.array(rng.exponential(size=200) * scale, jnp.float32) for scale in (3, 5, 5)
    )
    new = temperature.next_temperature(
        strategy, jnp.minimum(old, 4.0), bias * (bias > 1), mean * (mean > 1), 4.0
    )
    assert jnp.isfinite(new).all() and new.min() >= 0 and new.max() <= 4
    assert {0.0, 4.0} <= set(new.tolist()) or strategy is temperature.step


def test_surge_ends_at_ten():
    assert (
        temperature.exponential_change(jnp.array(1.0), 4.0) == 0
        and temperature.exponential_change(jnp.array(2.0), 4.0) == 8
    )
    np.testing.assert_allclose(
        temperature.exponential_change(jnp.array([10.0, 99.0]), 2.0), 4 * (2**9 - 1), rtol=1e-6
    )


def world(temperatures):
    """Two groups at 0 and 10 (one parameter) that move by 2 and 0; six clients, the
    last slot is empty and the third client has no data.
    """
    state = SimpleNamespace(
        active=jnp.ones(2, bool),
        groups={"w": jnp.array([[0.0], [10.0]])},
        assignment=jnp.zeros(6, jnp.int32),
        memory=ColdStartMemory((), (), (), (), jnp.array(temperatures, jnp.float32)),
    )
    cohort, gid = Cohort(jnp.array([3, 0, 1, 5, 6]), jnp.arange(5)), jnp.array([0, 0, 0, 1, 0])
    nothing = jnp.zeros(5)
    delta = jnp.array([3.0, -5.0, 0.0, 4.0, 0.0])
    upload = Upload(
        {"w": delta[:, None]},
        jnp.array([8.0, 2.0, 0.0, 5.0, 0.0]),
        nothing,
        nothing,
        nothing.astype(jnp.int32),
        gid,
        delta**2,
    )
    return state, cohort, gid, upload


def test_memory_by_hand():
    """Group 0 moves by 2: gaps 1 and 7, mean 4, so client 3 warms and client 0 cools.
    Client 5 alone equals its own mean and warms.
    """
    state, cohort, gid, upload = world([5, 5, 5, 5, 5, 5])
    moved = SimpleNamespace(**vars(state))
    moved.groups = {"w": state.groups["w"] + jnp.array([[2.0], [0.0]])}
    moved.replace = lambda memory: memory

    def updated(*how):
        heat = temperature.Temperature(how[0], 10.0, how[1])
        finish = temperature.update_temperatures(heat)
        return finish(moved, state, cohort, gid, upload).temperature

    after = updated(temperature.step, temperature.discrepancy)
    assert after.tolist() == [4, 5, 5, 6, 5, 6]
    after = updated(temperature.linear, temperature.dissimilarity)  # 0 and 1, mean 1/2
    assert after[3] == 10 and after[0] == 0


def test_weights_by_hand():
    """n T / T_max: 8 * 5 / 10 = 4 and 2 * 10 / 10 = 2; the floor of n T / (T_max +
    1e-5): 3 and 1.
    """
    state, cohort, gid, upload = world([10, 10, 10, 5, 10, 0])
    step, mass = temperature.temperature_mean(10.0)(upload, gid, cohort, (), state)
    np.testing.assert_allclose(step["w"][:, 0], [(4 * 3 - 2 * 5) / 6, 0], rtol=1e-6)
    np.testing.assert_allclose(mass, [6, 0])
    step, mass = temperature.temperature_mean(10.0, floor=True)(upload, gid, cohort, (), state)
    np.testing.assert_allclose(step["w"][:, 0], [(3 * 3 - 1 * 5) / (4 + 1e-5), 0], rtol=1e-6)
    np.testing.assert_allclose(mass, [4, 0])


def test_full_temperature_is_the_weighted_mean():
    state, cohort, gid, upload = world([10] * 6)
    chex.assert_trees_all_equal(
        temperature.temperature_mean(10.0)(upload, gid, cohort, (), state),
        weighted_mean(upload, gid, cohort, (), state),
    )


@pytest.mark.nightly
def test_off_is_off(toy, linear, local):
    """Without temperatures nothing of them is carried; with them the first round is the
    same, for all are at their highest.
    """
    plain = build(flexcfl, linear, local, COHORT, **GROUPS)
    begun, _ = play(plain, toy, 0)
    assert begun.memory.temperature == ()
    without, with_it = (
        play(build(flexcfl, linear, local, COHORT, temperature=name, **GROUPS), toy, 4)
        for name in ("none", "linear")
    )
    chex.assert_trees_all_close(without[1][0], with_it[1][0], rtol=1e-6)
    assert any(
        float(jnp.abs(gap).max()) > 1e-3
        for gap in jax.tree.leaves(jax.tree.map(jnp.subtract, without[0].groups, with_it[0].groups))
    )
    assert with_it[0].memory.temperature.shape == (14,) and with_it[0].memory.temperature.min() < 10


@pytest.mark.nightly
def test_a_cold_start_resets_the_temperature(linear, local):
    """Clients 0 and 1 are met and cool; client 1's labels all change, so that it starts
    cold again.
    """
    data = planted(2)
    still = select.from_table(jnp.arange(6, 12)[None])
    algorithm = build(flexcfl, linear, local, still, temperature="step", **GROUPS)
    begun, _ = play(algorithm, data, 0)
    cooled = begun.replace(
        assignment=begun.assignment.at[:2].set(0),
        memory=begun.memory.replace(temperature=begun.memory.temperature.at[:2].set(3.0)),
    )
    after, _ = play(algorithm, data.replace(y=jnp.where(data.owner == 1, 0, data.y)), 1, cooled)
    assert after.memory.temperature[:2].tolist() == [3, 10]


# Groups founded anew


@pytest.fixture
def misplaced(linear, local):
    """FlexCFL on two planted groups after three rounds, then a third of the clients in
    the wrong group, and one never met.
    """
    data = planted(2)
    state, _ = play(build(flexcfl, linear, local, COHORT, **GROUPS), data, 3)
    assert adjusted_rand_score(np.arange(18) % 2, state.assignment) == 1
    wrong = (
        jnp.where(jnp.arange(18) % 3 == 0, 1 - state.assignment, state.assignment).at[17].set(-1)
    )
    return data, state.replace(assignment=wrong)


def founded_anew(task, local, alpha):
    """Returns the `migrate` that founds two groups anew in round 3, from 2 alpha clients."""
    founding = ColdStart(alpha, cluster_by_edc(), train_steps(11), recluster=[3])
    trial = train_aside(sgd(task, founding.pretrain(local)), local, COHORT)
    found = make_found_groups(trial, local, founding, count_groups(2, None))
    return recluster_at(found, trial, local, founding, None, None)


def test_groups_are_founded_anew(linear, local, misplaced):
    data, before = misplaced
    move = founded_anew(linear, local, 3)
    after, report = jax.jit(move)(derive_key(KEY, MIGRATE, 3), before, data)
    old, new = np.asarray(before.assignment)[:17], np.asarray(after.assignment)[:17]
    assert (
        adjusted_rand_score(np.arange(17) % 2, new) == 1
        and after.assignment[17] == -1
        and report.migrated == 0
    )
    for g in range(2):
        np.testing.assert_allclose(
            matrix(after.groups)[g],
            matrix(before.groups)[old[new == g]].mean(axis=0),
            rtol=1e-5,
            atol=1e-6,
        )
    np.testing.assert_allclose(
        matrix(after.memory.initial)[0], matrix(before.groups).mean(axis=0), rtol=1e-5, atol=1e-6
    )
    assert ledger(report.early) == Traffic(6 + 2 * 17, 6, 0, 0), (
        "6 pre-train, 17 get two directions"
    )
    undue, report = jax.jit(move)(
        derive_key(KEY, MIGRATE, 2), before.replace(round=jnp.int32(2)), data
    )
    chex.assert_trees_all_equal(undue, before.replace(round=jnp.int32(2)))
    assert ledger(report.traffic) == Traffic(0, 0, 0, 0)


@pytest.mark.nightly
def test_fewer_clients_met_than_founders(linear, local, misplaced):
    """Five clients met: they all are founders, nobody else gets a group before it is selected."""
    data, before = misplaced
    before = before.replace(assignment=jnp.where(jnp.arange(18) < 5, before.assignment, -1))
    after, report = jax.jit(founded_anew(linear, local, 4))(KEY, before, data)
    assert (
        adjusted_rand_score(np.arange(5) % 2, after.assignment[:5]) == 1
        and (after.assignment[5:] == -1).all()
    )
    assert ledger(report.early) == Traffic(5 + 2 * 5, 5, 0, 0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "lied"},
        nightly({"detector": None, "newcomers": "random", "measure": "none"}),
    ],
)
def test_founding_anew_in_a_run(linear, local, options):
    """The listed rounds, and only they, found groups; nothing is compiled again."""
    data = planted(2)
    settings = GROUPS | options

    def method(**more):
        return build(flexcfl, linear, local, COHORT, **settings, **more)

    begun, _ = play(method(), data, 0)
    plain, _ = play(method(), data, 2, begun)
    once, _ = play(method(recluster=[2]), data, 2, begun)
    chex.assert_trees_all_close(plain, once, rtol=1e-5, atol=1e-6)
    last, infos = play(method(recluster=[0, 2]), data, 4, begun)
    assert ledger(last.traffic).units_down > ledger(once.traffic).units_down
    assert all(np.isfinite(info.loss) for info in infos)
    chex.assert_trees_all_equal_shapes_and_dtypes(last, begun)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"},
        {"temperature_bias": "loss"},
        {"temperature_max": 1.0, "temperature": "step"},
        {"temperature_max": float("nan"), "temperature": "step"},
        {"recluster": [5, -1]},
        {"recluster": [0.5]},
        {"recluster": [True]},
    ],
)
def test_bad_options_are_refused(linear, local, options):
    with pytest.raises(InputError, match=f"algorithm.{next(iter(options))}="):
        build(flexcfl, linear, local, COHORT, m=2, **options)
