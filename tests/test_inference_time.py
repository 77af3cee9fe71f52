"""The simulated time of what clients infer and train besides a round's training, by hand.

A step and a byte take no time here, so that a round's seconds are those of the slowest client's
inference; a sample that is trained on counts three times.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, nightly
from test_cfl import ONCE, concepts
from test_clock import SimpleState

import fedjax_cfl as cfl
from fedjax_cfl import algorithms
from fedjax_cfl.algorithms.fedfomo import hold_out_samples, take_held_out
from fedjax_cfl.system import clock as clocks
from fedjax_cfl.system import select
from fedjax_cfl.system.clock import device_profiles
from fedjax_cfl.system.reports import make_bill, make_report, no_bill

KEY = jax.random.key(3)
SAMPLE = np.random.default_rng(8).uniform(0.1, 2, 18)  # seconds of a client
SAMPLE[[1, 7]] = 0.03, 0.05  # who drift are the fastest
EVERYBODY = select.full_participation()
__all__ = ["concepts"]


@pytest.fixture(scope="module")
def moved(toy):
    """The toy after an event in which all samples of clients 1 and 7 have got label 3."""
    chosen = np.isin(np.asarray(toy.owner), [1, 7])
    y = np.where(chosen, 3, np.asarray(toy.y)).astype(np.int32)
    return toy.replace(y=jnp.asarray(y), shifted=jnp.asarray(np.isin(np.arange(14), [1, 7])))


@pytest.fixture
def timed(linear, local):
    """Runs a method: timed(factory, data of each round, selection, begun, **settings) ->
    (seconds of each round, states).
    """

    def run(factory, datas, selection, begun=None, **settings):
        clients = datas[0].num_clients
        rate = np.full(clients, 1e30)
        clock = device_profiles(np.zeros(clients), rate, None, SAMPLE[:clients])
        system = cfl.System(selection, clock=clock)
        algorithm = build(factory, linear, local, system, **settings)
        one_round = jax.jit(algorithm.round)
        states, seconds = [begun or jax.jit(algorithm.init)(KEY, datas[0])], []
        for data in datas:
            state, info = one_round(KEY, states[-1], data)
            states.append(state)
            seconds.append(round(float(info.seconds), 6))
        return np.array(seconds), states

    return run


def slowest(samples, clients=None):
    """Returns the seconds of the slowest of `clients`, who infer `samples` [K] each."""
    each = SAMPLE[: len(samples)] * samples
    return pytest.approx((each if clients is None else each[clients]).max(), rel=1e-5)


@pytest.mark.nightly
def test_ifca_infers_every_model_in_every_round(toy, timed):
    size = np.asarray(toy.train.size)
    seconds, _ = timed(algorithms.ifca, [toy] * 2, EVERYBODY, m=3)
    assert seconds[0] == seconds[1] == slowest(3 * size)
    five = np.array([0, 3, 4, 8, 9])
    seconds, _ = timed(algorithms.ifca, [toy], select.from_table(five[None]), m=3)
    assert seconds[0] == slowest(3 * size, five)


def test_fedavg_infers_nothing(toy, moved, timed):
    assert timed(algorithms.fedavg, [toy, moved], EVERYBODY)[0].tolist() == [0, 0]


@pytest.mark.nightly
def test_flexcfl_pretrains_newcomers_and_shifted_clients(toy, moved, timed):
    """11 steps of 5 samples, three times; nobody else waits."""
    size = np.asarray(toy.train.size)
    work = 3 * 11 * 5 * (size > 0)
    settings = {"m": 2, "alpha": 2, "pretrain": "iters:11"}
    seconds, states = timed(algorithms.flexcfl, [toy, toy, moved], EVERYBODY, **settings)
    cold = np.flatnonzero(np.asarray(states[0].assignment) < 0)
    assert 0 < len(cold) < 14 and seconds[0] == slowest(work, cold)
    assert seconds[1] == 0 and seconds[2] == slowest(work, [1, 7])


@pytest.mark.nightly
def test_ifca_mig_lets_shifted_clients_choose_before_the_round(toy, moved, timed):
    size = np.asarray(toy.train.size)
    seconds, _ = timed(algorithms.ifca, [toy, moved], EVERYBODY, m=3, detector="tv")
    before, after = seconds
    assert after - before == slowest(3 * size, [1, 7])


@pytest.mark.nightly
def test_feddrift_infers_every_model_in_use_at_an_event(toy, moved, timed):
    size, calm = np.asarray(toy.train.size), toy.replace(shifted=jnp.zeros(14, bool))
    rounds = [calm] * 4 + [moved, calm, moved]
    seconds, states = timed(algorithms.feddrift, rounds, EVERYBODY, m=4)
    used = [int(states[number].active.sum()) for number in (4, 6)]
    assert seconds[:4].tolist() == [0] * 4 and seconds[5] == 0 and used[1] > used[0] == 1
    assert seconds[4] == slowest(used[0] * size) and seconds[6] == slowest(used[1] * size)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("represent", "each"), [nightly("labels", 0), ("embedding", 1), nightly("gradient", 3)]
)
def test_fielding_infers_what_is_reported(represent, each, toy, moved, timed):
    settings = {"m": 2, "represent": represent, "cluster": "k_center", "trigger": "never"}
    seconds, _ = timed(algorithms.fielding, [toy, moved], EVERYBODY, **settings)
    assert seconds[0] == 0 and seconds[1] == slowest(each * np.asarray(toy.train.size), [1, 7])


@pytest.mark.nightly
def test_feddane_takes_a_gradient_of_all_samples(toy, timed):
    ids = np.array([1, 6, 9])
    seconds, _ = timed(algorithms.feddane, [toy], select.from_table(ids[None]), same_set=True)
    assert seconds[0] == slowest(3 * np.asarray(toy.train.size), ids)


@pytest.mark.nightly
def test_q_fedavg_infers_all_training_samples(toy, timed):
    ids = np.array([1, 6, 9])
    seconds, _ = timed(algorithms.qfedavg, [toy], select.from_table(ids[None]), q=1.0)
    assert seconds[0] == slowest(np.asarray(toy.train.size), ids)


@pytest.mark.nightly
def test_fedfomo_tests_models_on_held_out_samples(toy, timed):
    """8 is first sent the models of 1, 6 and 9, which it compares with the common start; then
    nobody's, and compares its own before and after training; then 1 is sent that of 8.
    """
    pick = select.from_table(np.array([[1, 6, 9], [8, 15, 15], [8, 15, 15], [1, 15, 15]]))
    seconds, _ = timed(algorithms.fedfomo, [toy] * 4, pick, models=4)
    held_out = np.asarray(take_held_out(hold_out_samples(toy, 0.2)).train.size)
    assert held_out[8] > 0 < held_out[1] and seconds[0] == 0
    assert seconds[1] == slowest((1 + 3) * held_out, [8])
    assert seconds[2] == slowest(2 * held_out, [8])
    assert seconds[3] == slowest((2 + 1) * held_out, [1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "settings", "models", "words"),
    [
        ("fedavg", {}, [2, 2], [0, 0]),
        ("ifca", {"m": 3}, [4, 4], [1, 1]),
        ("feddane", {}, [5, 5], [0, 0]),
        # down the start, then the models of the other two; up one, and a word for each of these
        ("fedfomo", {"models": 4}, [2, 3], [0, 2]),
    ],
)
def test_what_is_sent_for_a_round_takes_time(method, settings, models, words, toy, linear, local):
    """Client 2 is the slowest: three models a second."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(linear.init(KEY)))
    clock = device_profiles(np.zeros(14), size * np.arange(1.0, 15.0))
    timed = cfl.System(select.from_table(np.array([[2, 5, 11]])), clock=clock)
    algorithm = build(getattr(algorithms, method), linear, local, timed, **settings)
    state = jax.jit(algorithm.init)(KEY, toy)
    for units, extra in zip(models, words, strict=True):
        state, info = jax.jit(algorithm.round)(KEY, state, toy)
        assert float(info.seconds) == pytest.approx((units + 4 * extra / size) / 3, rel=1e-5)


@pytest.mark.nightly
def test_fl_hc_trains_newcomers_once_more(concepts, timed):
    """Clients 4 and 5 are made to have missed the clustering."""
    settings = {"m": 3, "warm_up": 1, "newcomers": "nearest"}
    pick = select.from_table(np.array([[3, 4, 5]]))
    seconds, states = timed(algorithms.fl_hc, [concepts] * 3, pick, **settings)
    assert seconds.tolist() == [0, 0, 0]
    missed = states[-1].replace(assignment=states[-1].assignment.at[jnp.array([4, 5])].set(-1))
    seconds, _ = timed(algorithms.fl_hc, [concepts], pick, begun=missed, **settings)
    work = 3 * 2 * 5 * -(-np.asarray(concepts.train.size) // 5)
    assert seconds[0] == slowest(work, [4, 5])


@pytest.mark.nightly
def test_cfl_trains_at_every_cut_that_a_client_missed(concepts, timed):
    """Clients of the branch that was cut twice are sent back to group 0, before both cuts."""
    settings = ONCE | {"m": 3}
    seconds, states = timed(algorithms.cfl, [concepts] * 8, EVERYBODY, **settings)
    found = states[-1]
    assert found.active.all() and not seconds.any()
    twice = np.flatnonzero(np.isin(found.assignment, [found.memory.parent[2], 2]))
    late = found.replace(assignment=found.assignment.at[twice].set(0)).put_rows(
        {"last_split": found.rows["last_split"].at[twice].set(0)}
    )
    pick = select.from_table(twice[None])
    seconds, states = timed(algorithms.cfl, [concepts], pick, begun=late, **settings)
    assert states[-1].assignment.tolist() == found.assignment.tolist()
    once = 3 * 2 * 5 * -(-np.asarray(concepts.train.size) // 5)
    assert seconds[0] == slowest(2 * once, twice)


def test_what_is_inferred_before_a_round_counts_without_traffic():
    clock = device_profiles(np.ones(4), np.ones(4), None, SAMPLE[:4])
    state = SimpleState(jnp.zeros(4, jnp.int32), jnp.ones(1, bool), jnp.zeros(2, jnp.uint32))
    report = make_report(make_bill(samples=jnp.array([0, 5, 3, 0])))
    waited = clocks.wait_before(clock, state, report, no_bill(), 4)
    assert waited.tolist() == [slowest(np.array([0, 5, 3, 0]))]
