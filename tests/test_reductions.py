"""The algebra between methods: with the right numbers one method is another."""

import chex
import hydra
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import build, ledger, nightly, others_nightly, with_execution
from omegaconf import OmegaConf

from fedjax_cfl import algorithms
from fedjax_cfl.algorithms.fedavg import fedavg, fedsgd
from fedjax_cfl.algorithms.fedprox import fedprox
from fedjax_cfl.algorithms.flexcfl.flexcfl import flexcfl
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.algorithms.qfedavg import qfedavg
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.system import select
from fedjax_cfl.system.reports import count_to_int

KEY = jax.random.key(3)
COHORT, ROUND_ROBIN = select.uniform(6), select.rr_then_random(6)
TWO_GROUPS = {"m": 2, "alpha": 3}
SAME = {"rtol": 1e-5, "atol": 1e-6}


def play(algorithm, data, rounds=3, state=None):
    """Returns (state, infos) after some rounds, from the algorithm's own start unless a
    state is given.
    """
    state = jax.jit(algorithm.init)(KEY, data) if state is None else state
    one_round, infos = jax.jit(algorithm.round), []
    for _ in range(rounds):
        state, info = one_round(KEY, state, data)
        infos.append(info)
    return state, infos


def assert_same(one, other, **tolerance):
    """Compares the models, the groups' numbers and the reports of two runs."""
    tolerance = tolerance or SAME
    chex.assert_trees_all_close(one[0].groups, other[0].groups, **tolerance)
    chex.assert_trees_all_close(one[1], other[1], **tolerance)


def assert_differ(one, other):
    """A reduction means something only if the two methods are not the same anyway."""
    leaves = zip(jax.tree.leaves(one[0].groups), jax.tree.leaves(other[0].groups), strict=True)
    assert any(float(jnp.max(jnp.abs(a - b))) > 1e-3 for a, b in leaves)


def length(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


@pytest.fixture(scope="module")
def plain(linear, local):
    """FedAvg; what is compiled of one and the same method is compiled once."""
    return fedavg(linear, local, COHORT)


@pytest.fixture(scope="module")
def averaged(toy, plain):
    """Three rounds of FedAvg."""
    return play(plain, toy)


@pytest.fixture(scope="module")
def plainly_averaged(toy, linear, local):
    """Three rounds of FedAvg with plain means."""
    return play(fedavg(linear, local, COHORT, aggregate=uniform_mean), toy)


@pytest.mark.nightly
@pytest.mark.parametrize("mu", [0.0, jnp.zeros(())], ids=["number", "array"])
def test_fedprox_without_pull_is_fedavg(toy, linear, local, averaged, mu):
    assert_same(play(fedprox(linear, local, COHORT, mu=mu), toy), averaged)


@pytest.mark.nightly
def test_fedprox_without_stragglers_trains_everybody_fully(toy, linear, local, averaged):
    rounds_to_nobody = fedprox(linear, local, COHORT, mu=0.0, drop_fraction=0.01)
    assert_same(play(rounds_to_nobody, toy), averaged)


@pytest.mark.nightly
def test_stragglers_do_less(toy, linear, local, averaged):
    half = play(fedprox(linear, local, COHORT, mu=0.0, drop_fraction=0.5), toy)
    assert all(
        count_to_int(slow.steps) < count_to_int(full.steps)
        for slow, full in zip(half[1], averaged[1], strict=True)
    )
    assert_differ(half, averaged)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method",
    others_nightly([fedavg, fedsgd, qfedavg], [fedavg]),
    ids=["fedavg", "fedsgd", "qfedavg"],
)
def test_a_schedule_is_another_step_size_in_every_round(toy, linear, local, method):
    """Rounds 0 .. 2 at 1, 0.5 and 0.25 of the step size, one after another."""
    schedule = optax.exponential_decay(1.0, 1, 0.5)
    scheduled = play(method(linear, local.replace(schedule=schedule), COHORT), toy)

    @jax.jit
    def step(lr, state):
        return method(linear, local.replace(lr=lr), COHORT).round(KEY, state, toy)

    usual = method(linear, local, COHORT)
    state, infos = play(usual, toy, 0)
    for factor in (1.0, 0.5, 0.25):
        state, info = step(factor * local.lr, state)
        infos.append(info)
    assert_same(scheduled, (state, infos))
    assert_differ(scheduled, play(usual, toy))


@pytest.mark.nightly
def test_a_schedule_is_that_of_the_sample_space_too(toy, mlp, local):
    half = local.replace(schedule=optax.constant_schedule(0.5))
    direct, dual = (
        play(
            fedavg(
                mlp,
                with_execution(half, first_layer=way),
                COHORT,
            ),
            toy,
        )
        for way in ("direct", "dual")
    )
    assert_same(dual, direct, rtol=1e-4, atol=1e-5)
    assert_same(direct, play(fedavg(mlp, local.replace(lr=local.lr / 2), COHORT), toy))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ifca", {"aggregate": "samples"}),
        nightly("ifca", {"aggregate": "samples", "detector": "tv"}),
        nightly("ifca_restarts", {"aggregate": "samples", "restarts": 1, "restart_rounds": 1}),
        nightly("feddrift", {}),
        nightly("feddrift_eager", {}),
    ],
)
def test_with_one_group_and_a_pull_it_is_fedprox(toy, linear, local, averaged, name, settings):
    """Fielding's comparison trains all methods with FedProx's term."""
    pulled = play(fedprox(linear, local, COHORT, mu=0.5), toy)
    method = build(getattr(algorithms, name), linear, local, COHORT, m=1, mu=0.5, **settings)
    begun = fedprox(linear, local, COHORT).init(KEY, toy)
    state = play(method, toy, state=method.init(KEY, toy).replace(groups=begun.groups))[0]
    chex.assert_trees_all_close(state.groups, pulled[0].groups, **SAME)
    assert_differ(pulled, averaged)


@pytest.mark.nightly
def test_ifca_of_one_group_is_fedavg(toy, linear, local, averaged, plainly_averaged):
    assert_same(play(build(ifca, linear, local, COHORT, m=1, aggregate="samples"), toy), averaged)
    assert_same(play(ifca(linear, local, COHORT, m=1), toy), plainly_averaged)
    assert_differ(averaged, plainly_averaged)


@pytest.mark.nightly
def test_qfedavg_without_fairness_is_the_plain_mean(toy, linear, local, plainly_averaged):
    assert_same(play(qfedavg(linear, local, COHORT, q=0.0), toy), plainly_averaged)


@pytest.mark.nightly
@pytest.mark.parametrize("batch_size", [40, 64], ids=["just everything", "more than there is"])
def test_fedavg_of_one_full_batch_is_fedsgd(toy, linear, local, batch_size):
    whole_set = local.replace(epochs=1, batch_size=batch_size)
    assert_same(
        play(fedavg(linear, whole_set, COHORT), toy), play(fedsgd(linear, local, COHORT), toy)
    )


@pytest.fixture(scope="module")
def two_groups(linear, local):
    """FedGroup."""
    return build(flexcfl, linear, local, ROUND_ROBIN, detector=None, **TWO_GROUPS)


@pytest.fixture(scope="module")
def grouped(toy, two_groups):
    """Three rounds of FedGroup."""
    return play(two_groups, toy)


@pytest.mark.nightly
def test_fedgroup_is_flexcfl_without_shift(toy, linear, local, grouped):
    moving = play(build(flexcfl, linear, local, ROUND_ROBIN, **TWO_GROUPS), toy)
    assert_same(grouped, moving)
    chex.assert_trees_all_equal(
        (grouped[0].assignment, grouped[0].traffic), (moving[0].assignment, moving[0].traffic)
    )
    assert {0, 1} <= set(moving[0].assignment.tolist())
    # what `run` compiles without a drift
    still = play(
        build(flexcfl, linear, local, ROUND_ROBIN, **TWO_GROUPS), toy.replace(has_drift=False)
    )
    chex.assert_trees_all_close(still, moving, **SAME)


@pytest.mark.nightly
def test_flexcfl_of_one_group_is_fedavg_after_the_group_start(toy, linear, local, plain):
    alone = build(flexcfl, linear, local, COHORT, m=1, alpha=3, detector=None)
    begun, _ = play(alone, toy, 0)
    assert_same(play(alone, toy, 3, begun), play(plain, toy, 3, begun.replace(memory=())))


@pytest.mark.nightly
def test_mixing_of_strength_zero_changes_nothing_and_costs_nothing(
    toy, linear, local, two_groups, grouped
):
    begun, _ = play(two_groups, toy, 0)

    def mixed(eta):
        return play(
            build(flexcfl, linear, local, ROUND_ROBIN, eta_g=eta, detector=None, **TWO_GROUPS),
            toy,
            3,
            begun,
        )

    unmoved = mixed(jnp.float32(0))  # an array, which is mixed like any other strength
    assert_same(grouped, unmoved)
    sent = ledger(grouped[0].traffic).units_down
    assert ledger(unmoved[0].traffic).units_down == sent
    moved = mixed(0.5)
    assert_differ(grouped, moved)
    assert ledger(moved[0].traffic).units_down - sent == 3 * 2


def test_hypocluster_is_ifca_weighted_by_samples():
    def composed(*overrides):
        return OmegaConf.to_container(
            hydra.compose("config", ["dataset=digits", *overrides]), resolve=True
        )["algorithm"]

    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        one, other = (
            composed("algorithm=hypocluster"),
            composed("algorithm=ifca", "algorithm.aggregate=samples"),
        )
        assert one.pop("name") != other.pop("name")
        assert one == other != composed("algorithm=ifca")
