"""Distribution shifts against loops over pairs and samples, fed with the same random draws."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, nightly
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.flexcfl_2021 import before_impossible

from fedjax_cfl.data import drift
from fedjax_cfl.data.federated import federate, move_client_index, update_client_index
from fedjax_cfl.data.incremental import incremental
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool

KEY = jax.random.key(0)
K, C = 5, 3
SWAPS = {
    "all": drift.swap_all(0.5, "warm"),
    "skip": drift.swap_part(0.5, "warm"),
    "abort": drift.swap_part(0.5, "warm", before_impossible),
    "often": drift.swap_part(1.0, "all"),
}
ALL, PART, ABORT = (
    drift.swap_all(1.0),
    SWAPS["often"],
    drift.swap_part(1.0, allow=before_impossible),
)
DRAWS = jax.jit(drift.draw_swaps, static_argnums=(2, 3))


@functools.cache
def compiled(moves):
    """Returns a jitted `apply`, the same one for the same drift."""
    return jax.jit(moves.apply)


def once(moves, made, round=0, warm=True, memory=()):
    """Returns (data, clients touched) after one round; `warm` may be one value for all."""
    now, _, shifted = compiled(moves)(
        KEY, round, made, memory, jnp.broadcast_to(jnp.asarray(warm), made.num_clients)
    )
    return now, shifted


def federated(owner, label, test, clients=K, classes=C):
    """Returns data with these owners; capacity, which is static, is the same for all
    data of one size.
    """
    n = len(owner)
    pool = Pool(np.zeros((n, 1), np.float32), np.array(label, np.int32), classes)
    made = federate(
        pool,
        Partition(np.arange(n), np.array(owner, np.int32), np.array(test, bool)),
        clients=clients,
    )
    return made.replace(max_client_samples=n)


def random_data(seed, clients, classes, n, labels_each=2):
    """Deals n samples: each client holds `labels_each` labels next to each other, every
    fourth sample is a test sample.
    """
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.arange(n) % clients)
    label = (owner + rng.integers(0, labels_each, n)) % classes
    return federated(owner, label, np.arange(n) % 4 == 0, clients, classes)


def rows_of(owner, numbers):
    """Returns what a client holds of a view, client by client, by brute force."""
    return [
        [int(i) for i in np.sort(numbers) if owner[i] == k]
        for k in range(int(max(owner.max(), 0)) + 1)
    ]


def assert_views(now, before):
    """The views hold the same samples as ever, each where its owner says."""
    owner = np.asarray(now.owner)
    for view, old in ((now.train, before.train), (now.test, before.test)):
        order, start, size = (np.asarray(a) for a in (view.order, view.start, view.size))
        assert sorted(order) == sorted(np.asarray(old.order))
        rows = rows_of(owner, order)
        rows += [[]] * (now.num_clients - len(rows))
        assert [order[a : a + b].tolist() for a, b in zip(start, size, strict=True)] == rows
        assert {a.dtype for a in jax.tree.leaves(view)} == {jnp.dtype(jnp.int32)}


def twin(kind, p, draws, owner, label, test, warm, clients, classes):
    """One round of swaps in plain Python; returns (owner, clients touched)."""
    order, coin, gives, takes = (np.asarray(a) for a in draws)
    owner, touched = owner.copy(), set()
    queue = [k for k in order if warm[k]]
    for a in range(len(queue) // 2):
        one, two = queue[a], queue[-1 - a]
        if coin[a] >= p:
            continue
        mine, yours = np.flatnonzero(owner == one), np.flatnonzero(owner == two)
        if kind == "all":
            owner[mine], owner[yours] = two, one
        else:
            have = [
                set(label[rows[~test[rows]]]) & set(label[rows[test[rows]]])
                for rows in (mine, yours)
            ]
            give, take = have[0] - have[1], have[1] - have[0]
            if not give or not take:
                if kind == "abort":
                    break
                continue
            given, taken = (
                max(give, key=lambda c: gives[a, c]),
                max(take, key=lambda c: takes[a, c]),
            )
            owner[mine[label[mine] == given]] = two
            owner[yours[label[yours] == taken]] = one
        touched |= {one, two}
    return owner, np.isin(np.arange(clients), list(touched))


def follow(name, p, made, warm, rounds, key=KEY):
    """Applies a swap and its twin round by round and compares them; returns the final
    data and all sizes met.
    """
    kind = {"often": "skip"}.get(name, name)
    label, test = np.asarray(made.y), np.zeros(made.y.size, bool)
    test[np.asarray(made.test.order)] = True
    now, biggest = made, 0
    owner = np.asarray(made.owner)
    for round in range(rounds):
        draws = DRAWS(key, round, made.num_clients, made.num_classes)
        pool = np.ones_like(warm) if name == "often" else warm
        owner, touched = twin(
            kind, p, draws, owner, label, test, pool, made.num_clients, made.num_classes
        )
        now, memory, shifted = compiled(SWAPS[name])(key, round, now, (), jnp.asarray(warm))
        assert memory == ()
        np.testing.assert_array_equal(now.owner, owner)
        np.testing.assert_array_equal(shifted, touched)
        biggest = max(biggest, int(now.train.size.max()))
    assert_views(now, made)
    assert (now.y == made.y).all() and (now.x == made.x).all()
    return now, biggest


@pytest.mark.parametrize("name", [nightly("all"), "skip", nightly("abort")])
def test_fifty_rounds_equal_brute_force(name):
    made, warm = random_data(1, 24, 5, 600), np.random.default_rng(2).random(24) < 0.8
    now, _ = follow(name, 0.5, made, warm, 50)
    assert (now.owner != made.owner).any()
    # who is not in the pool keeps everything and gets nothing
    assert (now.owner == made.owner)[~warm[np.asarray(made.owner)]].all()
    assert not set(np.asarray(now.owner)[np.asarray(now.owner) != np.asarray(made.owner)]) & set(
        np.flatnonzero(~warm)
    )


SAMPLES = st.tuples(st.integers(0, K - 1), st.integers(0, C - 1))
# as many test samples in every example, so that one compiled program serves all
TEST = np.arange(30) % 3 == 0


@pytest.mark.nightly
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    samples=st.lists(SAMPLES, min_size=30, max_size=30),
    warm=st.lists(st.booleans(), min_size=K, max_size=K),
    name=st.sampled_from(list(SWAPS)),
    seed=st.integers(0, 2**31),
)
def test_any_pool_equals_brute_force(samples, warm, name, seed):
    made = federated(*zip(*samples, strict=True), TEST)
    p = 1.0 if name == "often" else 0.5
    _, biggest = follow(name, p, made, np.array(warm), 5, jax.random.key(seed))
    tight = made.replace(max_client_samples=int(made.train.size.max()))
    assert biggest <= drift.bound_client_samples(tight, SWAPS[name]).max_client_samples


def test_train_and_test_move_together():
    # Every (client, label) block has one training and one test sample, so each label is
    # somewhere as a whole at any time.
    blocks = [(k, (k + j) % 4) for k in range(8) for j in range(2)]
    owner, label = zip(*[block for block in blocks for _ in range(2)], strict=True)
    made = federated(owner, label, [False, True] * len(blocks), 8, 4)
    for moves in (ALL, PART):
        now = made
        for round in range(4):
            now, shifted = once(moves, now, round)
            assert (now.owner[0::2] == now.owner[1::2]).all()
            np.testing.assert_array_equal(np.bincount(now.owner, minlength=8), 4)
        assert shifted.any()


def test_swap_all_keeps_holdings_whole():
    made = random_data(3, 9, 4, 90).replace(concept=jnp.arange(9) % 4)
    now, shifted = once(ALL, made)
    assert int(shifted.sum()) == 8  # an odd pool leaves one out
    heirs = [set(np.asarray(now.owner)[np.asarray(made.owner) == k]) for k in range(9)]
    assert all(len(heir) == 1 for heir in heirs)
    heir = np.array([next(iter(h)) for h in heirs])
    assert (heir[heir] == np.arange(9)).all() and ((heir != np.arange(9)) == shifted).all()
    # the true group is that of the samples: whose samples have gone to k, has gone to k
    assert now.concept[heir].tolist() == made.concept.tolist() != now.concept.tolist()


@pytest.mark.parametrize("make", [nightly(drift.swap_all), drift.swap_part])
def test_p_zero_changes_nothing_and_neither_does_an_empty_pool(make):
    made = random_data(4, 6, 4, 60)
    for moves, warm in ((make(0), True), (make(1.0, "warm"), False)):
        now, shifted = once(moves, made, 3, warm)
        assert not np.any(shifted)
        jax.tree.map(np.testing.assert_array_equal, now, made)
    alone = federated([0, 0], [0, 1], [False, True], 1, 2)
    assert not once(make(1), alone)[1].any()


def test_swap_part_by_hand():
    # Client 0: label 0 (train, train, test) and a training sample of 2; client 1: label 1
    # (train, test) and 2 (train, test).
    made = federated(
        [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 2, 1, 1, 2, 2], [0, 0, 1, 0, 0, 1, 0, 1], 2, 3
    )
    outcomes = set()
    for round in range(12):
        now, shifted = once(PART, made, round)
        assert shifted.all()
        outcomes.add(tuple(now.owner.tolist()))
    # Client 0 loses label 0 altogether and gets 1 or 2; its lone training sample of 2 is no
    # label it has, so it stays.
    assert outcomes == {(1, 1, 1, 0, 0, 0, 1, 1), (1, 1, 1, 0, 1, 1, 0, 0)}


@pytest.mark.nightly
def test_swap_part_keeps_the_number_of_labels():
    made = random_data(5, 6, 4, 60)
    now = made
    for round in range(5):
        now = once(PART, now, round)[0]
    np.testing.assert_array_equal(drift._held_labels(now).sum(1), drift._held_labels(made).sum(1))
    assert (drift._held_labels(now) != drift._held_labels(made)).any()


def test_abort_ends_the_round():
    # Clients 0 .. 3 have labels 0 and 1 and cannot swap among themselves; 4 .. 7 have 2 and 3.
    owner = np.repeat(np.arange(8), 4)
    label = np.where(owner < 4, 0, 2) + np.tile([0, 0, 1, 1], 8)
    made = federated(owner, label, np.tile([False, True], 16), 8, 4)
    skipped, aborted = [], []
    for round in range(40):
        skip = once(PART, made, round)[1]
        abort = once(ABORT, made, round)[1]
        assert not (abort & ~skip).any()
        skipped.append(int(skip.sum()))
        aborted.append(int(abort.sum()))
    assert (
        sum(aborted) < sum(skipped)
        and 8 in aborted
        and any(a and a < b for a, b in zip(aborted, skipped, strict=True))
    )


@pytest.mark.parametrize("pool", [nightly("all"), "warm"])
def test_expected_number_of_swapped_clients(pool):
    clients, rounds, p = 101, 600, 0.05
    made = federated(np.arange(clients), np.zeros(clients), np.zeros(clients), clients, 1)
    warm = jnp.arange(clients) < 61
    apply = drift.swap_all(p, pool).apply
    touched = jax.jit(
        lambda: jax.lax.map(lambda round: apply(KEY, round, made, (), warm)[2], jnp.arange(rounds))
    )()
    pair_count = 50 if pool == "all" else 30
    expected, deviation = 2 * p * pair_count, 2 * math.sqrt(pair_count * p * (1 - p) / rounds)
    assert abs(touched.sum(1).mean() - expected) < 4 * deviation
    assert not touched[:, 61:].any() or pool == "all"
    # everybody of the pool is drawn as often, up to five deviations
    per_client = touched[:, : 2 * pair_count + 1].mean(0)
    assert abs(per_client - p).max() < 5 * math.sqrt(p * (1 - p) / rounds)


@pytest.mark.nightly
def test_labels_and_pairs_are_uniform():
    rounds = 2000
    seen = jax.vmap(lambda round: drift.draw_swaps(KEY, round, 4, 5))(jnp.arange(rounds))
    for scores in (seen.gives, seen.takes):
        share = np.bincount(jnp.argmax(scores, -1).reshape(-1), minlength=5) / (2 * rounds)
        assert abs(share - 0.2).max() < 0.03
    first, second, real = jax.vmap(
        lambda order: drift.pair_clients(order, jnp.array([True, True, False, True]))
    )(seen.order)
    assert (real == jnp.array([True, False])).all() and not jnp.isin(
        jnp.stack([first[:, 0], second[:, 0]]), 2
    ).any()
    counts = np.bincount(first[:, 0] * 4 + second[:, 0], minlength=16) / rounds
    assert abs(counts[[1, 3, 4, 7, 12, 13]] - 1 / 6).max() < 0.05 and counts.sum() == pytest.approx(
        1
    )
    assert not np.array_equal(seen.gives, seen.takes)


@pytest.mark.parametrize("kind", [nightly("swap_all"), "swap_part", "incremental"])
def test_one_program_equals_step_by_step_without_retracing(kind):
    moves = {
        "swap_all": drift.swap_all(0.3),
        "swap_part": drift.swap_part(0.3),
        "incremental": incremental(schedule=(0, 3, 5, 9)),
    }[kind]
    made, warm, traces = random_data(6, 16, 5, 300), jnp.ones(16, bool), []

    @jax.jit
    def step(key, round, data, memory, warm):
        traces.append(None)
        return moves.apply(key, round, data, memory, warm)

    @jax.jit
    def loop(key, data, memory):
        return jax.lax.fori_loop(
            0, 10, lambda round, carry: moves.apply(key, round, *carry, warm)[:2], (data, memory)
        )

    now, memory = jax.jit(moves.init)(KEY, made)
    whole = loop(KEY, now, memory)
    for round in range(10):
        now, memory, _ = step(KEY, jnp.int32(round), now, memory, warm)
    assert len(traces) == 1
    assert all(
        (a == b).all()
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves((now, memory)), strict=True)
    )
    assert_views(now, made)


def test_pool_all_ignores_who_is_warm():
    made = random_data(7, 6, 4, 60)
    for moves in (drift.swap_all(0.5), drift.swap_part(0.5)):
        now, other = (once(moves, made, 1, warm)[0] for warm in (True, False))
        assert (now.owner == other.owner).all() and (now.owner != made.owner).any()


@pytest.mark.nightly
def test_hidden_samples_stay_hidden():
    made = random_data(8, 6, 4, 60)
    owner = jnp.where(jnp.arange(60) % 3 == 0, -1, made.owner)
    made = made.replace(
        owner=owner,
        train=update_client_index(made.train, owner),
        test=update_client_index(made.test, owner),
    )
    for moves in (ALL, PART, incremental((1.0,), (0,))):
        now, memory = moves.init(KEY, made)
        now = once(moves, now, memory=memory)[0]
        assert ((now.owner < 0) == (made.owner < 0)).all()
        assert_views(now, made)


def test_capacity_counts_remainders_that_a_block_takes_along():
    # Client 1 has label 1 and five training samples of 0 without a test sample; getting label 0
    # from client 0 it holds 2 + 5 of it.
    owner, label = [0] * 3 + [1] * 8, [0] * 3 + [1] * 3 + [0] * 5
    made = federated(owner, label, [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0], 2, 2).replace(
        max_client_samples=7
    )
    now = once(PART, made)[0]
    assert now.train.size.tolist() == [2, 7]
    # and no more: nobody has two labels
    assert drift.bound_client_samples(made, PART).max_client_samples == 7
    assert drift.bound_client_samples(made, ALL).max_client_samples == 7


def test_capacity_is_the_two_largest_blocks_of_two_labels():
    owner = np.repeat([0, 0, 1, 1], [11, 3, 21, 4])
    label = np.repeat([0, 1, 2, 3], [11, 3, 21, 4])
    test = np.zeros(39, bool)
    test[[0, 11, 14, 35]] = True  # blocks of 10, 2, 20 and 3 training samples
    made = federated(owner, label, test, 2, 4).replace(max_client_samples=23)
    assert drift.bound_client_samples(made, drift.swap_part()).max_client_samples == 30
    met = max(int(once(PART, made, round)[0].train.size.max()) for round in range(20))
    assert met == 30
    assert all(
        drift.bound_client_samples(made, other).max_client_samples == 23
        for other in (drift.none(), drift.swap_all(), incremental())
    )


def test_none():
    made, moves = random_data(10, 4, 3, 40), drift.none()
    now, memory = moves.init(KEY, made)
    now, memory, shifted = moves.apply(KEY, 0, now, memory, jnp.ones(4, bool))
    assert now is made and memory == () and shifted.shape == (4,) and not shifted.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drift.swap_all(-0.1), "drift.p=-0.1: must be a number between 0 and 1"),
        (lambda: drift.swap_all(1.01), "drift.p=1.01: must be a number between 0 and 1"),
        (lambda: drift.swap_all(float("nan")), "drift.p=nan: must be a number between 0 and 1"),
        (lambda: drift.swap_part("x"), "drift.p=x: must be a number between 0 and 1"),
        (lambda: drift.swap_all(0.1, "cold"), "drift.pool=cold: must be one of all, warm"),
        (lambda: drift.swap_part(0.1, "warmer"), "did you mean 'warm'"),
        (
            lambda: drift.swap_part(0.1, "all", "abort"),
            "drift.allow=abort: must be all",
        ),
        (lambda: incremental((0.5, 1.0), (0,)), "expected 1, one for each"),
        (lambda: incremental((), ()), "a list of increasing numbers"),
        (lambda: incremental((0.5, 1.0), (5, 5)), "increasing whole numbers"),
        (lambda: incremental((0.5, 1.0), (-1, 5)), "a list of increasing whole numbers >= 0"),
        (lambda: incremental((0.5, 1.0), (0, 5.5)), "a list of increasing whole numbers >= 0"),
        (lambda: incremental((1.0, 0.5), (0, 5)), "increasing numbers"),
        (lambda: incremental((0.0, 0.5), (0, 5)), "increasing numbers from 0.001 to 1"),
        (lambda: incremental((0.5, 1.5), (0, 5)), "increasing numbers from 0.001 to 1"),
        (lambda: incremental(("a",), (0,)), "increasing numbers from 0.001 to 1"),
        (lambda: incremental((1e-9,), (0,)), "increasing numbers from 0.001 to 1"),
    ],
)
def test_bad_settings_are_one_line(make, message):
    with pytest.raises(InputError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("seed", range(5))
def test_an_exchange_of_clients_is_a_regrouping(seed, toy):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.random(toy.owner.size) < 0.2)
    owner = jnp.where(hidden, -1, toy.owner)
    heir = jnp.asarray(rng.permutation(toy.num_clients), jnp.int32)
    after = jnp.where(owner < 0, owner, heir[owner])
    for view in (toy.train, toy.test):
        now = at_once(update_client_index, view, owner)
        for found, expected in zip(
            jax.tree.leaves(at_once(move_client_index, now, owner, heir)),
            jax.tree.leaves(at_once(update_client_index, view, after)),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == expected.dtype
