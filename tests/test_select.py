"""Selection, stragglers and the dealing of a cohort to devices, by hand and by a loop
that says what is meant.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SIZES, build

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedprox import partial_epochs
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.client.cohort import (
    balance_over_devices,
    client_range,
    make_cohort,
    over_clients,
)
from fedjax_cfl.client.local import full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, derive_key, draw_permutation
from fedjax_cfl.method import Round
from fedjax_cfl.system import select
from fedjax_cfl.system.clock import device_profiles
from fedjax_cfl.system.power_of_choice import rpow_d
from fedjax_cfl.types import Cohort

KEY = jax.random.key(11)
TEN = np.ones(10)  # clients with a training sample each


def test_round_robin_wraps_and_then_draws():
    pick = select.rr_then_random(4)
    draw = jax.jit(lambda round: pick.draw(KEY, round, TEN))
    turns = [draw(round).tolist() for round in range(3)]
    assert turns == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    later = draw(3)
    assert later.tolist() == select.uniform(4).draw(KEY, 3, TEN).tolist()
    assert later.tolist() != [2, 3, 4, 5]


def test_round_robin_stops_where_the_clients_end():
    """K = 5 divides n = 10: two rounds cover everybody, the third is already a draw."""
    pick = select.rr_then_random(5)
    assert pick.draw(KEY, 1, TEN).tolist() == [5, 6, 7, 8, 9]
    assert pick.draw(KEY, 2, TEN).tolist() == select.uniform(5).draw(KEY, 2, TEN).tolist()


def test_uniform_repeats_nobody_and_leaves_nobody_out():
    drawn = np.array([select.uniform(4).draw(jax.random.key(seed), 0, TEN) for seed in range(100)])
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    # expected 0.4 each, standard deviation 0.05
    shares = np.bincount(drawn.ravel(), minlength=10) / 100
    assert shares.shape == (10,) and abs(shares - 0.4).max() < 0.2


@pytest.mark.parametrize("make", [select.uniform, select.rr_then_random])
def test_clients_without_training_samples_take_no_place(make):
    """The draw is one of five clients, by their place among those that can train."""
    size = np.array([0, 3, 0, 0, 1, 9, 0, 2, 4, 0])
    able = np.flatnonzero(size)
    for round in range(4):
        ids = make(3).draw(derive_key(KEY, SELECT, round), round, size)
        among = make(3).draw(derive_key(KEY, SELECT, round), round, np.ones(5))
        assert ids.tolist() == able[among].tolist()


@pytest.mark.parametrize("make", [select.uniform, select.rr_then_random])
@pytest.mark.parametrize("able", [0, 3])
def test_places_stay_empty_where_too_few_can_train(make, able):
    size = np.where(np.arange(10) < able, 7, 0)
    for round in range(3):
        ids = make(5).draw(derive_key(KEY, SELECT, round), round, size)
        assert sorted(ids.tolist()) == [*range(able), *[10] * (5 - able)]
    with pytest.raises(InputError, match="clients_per_round=11: must be at most 10"):
        make(11).draw(KEY, 0, size)


def test_a_draw_of_clients_that_all_train_is_a_permutation():
    """Numbers of runs depend on it: the draw is the beginning of one of all clients."""
    drawn = [select.uniform(k).draw(KEY, 0, TEN).tolist() for k in (4, 10)]
    assert drawn == [draw_permutation(KEY, 10, k).tolist() for k in (4, 10)]


def test_a_start_refuses_a_selection_that_is_not_known_before_the_run(toy, linear, local):
    start = {"m": 2, "start": "kmeanspp_loss"}
    with pytest.raises(InputError, match=r"^algorithm\.start: this start needs the clients of the"):
        jax.eval_shape(build(ifca, linear, local, rpow_d(2, 3), **start).init, KEY, toy)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ([1.0, 1.0], [1.0]),
            "2 step_seconds and 1 bytes_per_second: one of each for every client",
        ),
        (([1.0, -1.0], [1.0, 1.0]), "step_seconds of client 1 are -1.0: must be finite and >= 0"),
        (([1.0, np.nan], [1.0, 1.0]), "step_seconds of client 1 are nan: must be finite and >= 0"),
        (([1.0, 1.0], [0.0, 1.0]), "bytes_per_second of client 0 are 0.0: must be finite and > 0"),
        (([1.0, 1.0], [1.0, 1.0], 0), "wait_for=0: must be a whole number >= 1 or null"),
    ],
)
def test_clocks_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(InputError, match=f"^clock: {said}$"):
        device_profiles(*map(np.array, arguments[:2]), *arguments[2:])


# Stragglers


@pytest.mark.parametrize(("share", "slow"), [(0.0, 0), (0.2, 2), (0.35, 3), (0.5, 4), (1.0, 8)])
def test_stragglers_are_a_share_of_the_cohort(toy, share, slow):
    """8 clients in 11 slots; each straggler trains 1 .. 4 of 5 epochs."""
    ids = jnp.array([3, 14, 5, 0, 1, 14, 7, 9, 2, 14, 4])

    @jax.jit
    def effort(key):
        prepare, cohort = partial_epochs(share, 5), Cohort(ids=ids, rank=ids)
        return prepare(Round(key, None, toy, cohort, full_work(0 * ids)))[0].step_fraction

    seen = set()
    for seed in range(12):
        epochs = np.asarray(effort(jax.random.key(seed)))[np.asarray(ids) < 14] * 5
        np.testing.assert_allclose(epochs, np.round(epochs), atol=1e-5)
        assert (epochs < 4.5).sum() == slow and epochs.max() <= 5 and epochs.min() >= 1
        seen |= set(np.round(epochs).astype(int).tolist())
    assert seen == ({5} if slow == 0 else {1, 2, 3, 4} if slow == 8 else {1, 2, 3, 4, 5})


def test_stragglers_of_one_epoch_have_nothing_to_drop(toy):
    ids = jnp.arange(6)
    r = Round(KEY, None, toy, Cohort(ids=ids, rank=ids), full_work(0 * ids))
    work, _ = partial_epochs(1.0, 1)(r)
    assert work.step_fraction.tolist() == [1.0] * 6


def test_stragglers_take_their_share_of_steps(toy, linear, local):
    """2 of 3 epochs are two thirds of the steps, for every size of client."""
    three = local.replace(epochs=3)
    train = jax.jit(over_clients(sgd(linear, three), three.execution))
    ids = jnp.arange(14)
    work = full_work(0 * ids)._replace(step_fraction=jnp.full(14, 2 / 3))
    model = jax.tree.map(lambda leaf: leaf[None], linear.init(KEY))
    upload = train(Cohort(ids=ids, rank=ids), toy, (KEY, model), work)
    np.testing.assert_array_equal(upload.steps, 2 * np.ceil(np.array(toy.train.size) / 5))


# Dealing to devices


@pytest.mark.parametrize(("width", "slots"), [(1, 10), (2, 6), (4, 6)])
def test_empty_slots_are_not_visited(toy, width, slots):
    """Five clients on two devices."""
    local = cfl.Local(0.1, 1, 5, execution=cfl.make_execution(cfl.make_mesh(2), width))
    cohort = make_cohort(jnp.array([1, 6, 2, 4, 14], jnp.int32), toy, local.execution)
    assert cohort.ids.size == slots
    seen = jax.jit(over_clients(lambda client, data, shared, mine: client + 1, local.execution))(
        cohort, toy, ()
    )
    real = cohort.ids < 14
    np.testing.assert_array_equal(seen[real], cohort.ids[real] + 1)
    assert not seen[~real].any()


def test_an_empty_slot_has_no_samples(toy):
    count, first = client_range(jnp.array([1, 13, 14]), toy)
    assert count.tolist() == [40, 20, 0] and first[:2].tolist() == [7, sum(SIZES) - 20]


def test_a_client_costs_16_samples_in_addition_to_its_own(toy):
    """Of 40, 5, 3, 2 and 1 samples: 21 + 19 + 18 are more than 56, so that the last of the short
    ones joins the long one. Its samples alone would balance those of the other four.
    """
    execution = cfl.make_execution(cfl.make_mesh(2), 1)
    cohort = make_cohort(jnp.array([6, 10, 3, 12, 1], jnp.int32), toy, execution)
    queues = [set(queue.tolist()) - {14} for queue in np.split(np.asarray(cohort.ids), 2)]
    assert queues == [{1, 6}, {12, 3, 10}]


DEAL = jax.jit(balance_over_devices, static_argnums=(2, 3, 4))


@pytest.mark.parametrize(("devices", "width"), [(1, 1), (1, 4), (2, 1), (4, 3), (8, 2)])
def test_deal_places_everybody_once(devices, width):
    rng = np.random.default_rng(devices)
    ids = jnp.asarray(rng.permutation(100)[:23], jnp.int32)
    cohort = DEAL(ids, jnp.asarray(rng.lognormal(3, 1.5, 23), jnp.float32), 100, devices, width > 1)
    assert cohort.ids.size % devices == 0
    real = np.asarray(cohort.ids) < 100
    assert (np.asarray(cohort.ids)[~real] == 100).all() and real.sum() == 23
    np.testing.assert_array_equal(np.sort(np.asarray(cohort.ids)[real]), np.sort(ids))
    np.testing.assert_array_equal(
        np.asarray(cohort.ids)[real], np.asarray(ids)[np.asarray(cohort.rank)[real]]
    )


def test_one_long_client_does_not_overfill_the_other_queue():
    """It has a queue of 28 places, of 56, almost to itself; the other one is full then."""
    cohort = DEAL(jnp.arange(40), jnp.ones(40).at[3].set(1e6), 40, 2, False)
    assert sorted(cohort.ids[cohort.ids < 40].tolist()) == list(range(40))
    assert (cohort.ids.reshape(2, -1) < 40).sum(1).tolist() == [12, 28]


@pytest.mark.parametrize("seed", range(5))
def test_deal_keeps_queues_within_one_client(seed):
    """Longest processing time first: no queue is longer than an even share and the
    longest client.
    """
    load = np.random.default_rng(seed).lognormal(3, 1, 40).astype(np.float32)
    cohort = DEAL(jnp.arange(40), jnp.asarray(load), 40, 4, False)
    queues = np.append(load, 0)[np.asarray(cohort.ids)].reshape(4, -1).sum(1)
    assert queues.max() <= max(load.sum() / 4 + load.max(), load.max())
    assert queues.max() - queues.min() <= load.max()
    assert queues.max() <= 4 / 3 * max(load.sum() / 4, load.max()) + 1e-3


@pytest.mark.parametrize(
    ("devices", "dealt"), [(1, [6, 8, 7, 5]), (2, [6, 5, 8, 7]), (3, [6, 10, 8, 10, 7, 5])]
)
def test_deal_of_wide_devices_goes_back_and_forth(devices, dealt):
    cohort = DEAL(jnp.array([5, 6, 7, 8]), jnp.array([1.0, 9.0, 2.0, 8.0]), 10, devices, True)
    assert cohort.ids.tolist() == dealt
    assert cohort.rank.tolist() == [{6: 1, 8: 3, 7: 2, 5: 0, 10: 4}[client] for client in dealt]
