"""Streams against brute force: which samples a client has in which round."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import VARYING, at_once, nightly, one_line

import fedjax_cfl as cfl
from fedjax_cfl.data import drift, perturb, stream, traces
from fedjax_cfl.data.federated import federate, gather, label_counts
from fedjax_cfl.data.stream import Window, find_oldest
from fedjax_cfl.errors import InputError
from fedjax_cfl.simulation.rounds import make_init
from fedjax_cfl.types import Partition, Pool

KEY = jax.random.key(3)
K, C, N = 7, 5, 420


def make_data(seed=0, shared=12, square=False, groups=None):
    """Returns data of K clients: N samples of their own and the same `shared` ones for all;
    with a random time of each sample, and one that nobody holds.
    """
    rng = np.random.default_rng(seed)
    x = rng.random((N, 3, 3) if square else (N, 2)).astype(np.float32)
    pool = Pool(x, rng.integers(C, size=N), C, time=rng.integers(5, 1000, N))
    held = Partition(np.arange(N), rng.integers(K - 1, size=N), rng.random(N) < 0.3, groups)
    given = np.flatnonzero(~held.test)[:shared]
    held = perturb._give_to_all(held, given) if shared else held
    data = federate(pool, held, clients=K)  # the last one has nothing
    return data.replace(owner=data.owner.at[5].set(-1))


def rows_of(view, k):
    """Returns the holdings of client k in a view."""
    order, start, size = (np.asarray(a) for a in (view.order, view.start, view.size))
    return order[start[k] : start[k] + size[k]].tolist()


COUNTS = jax.jit(label_counts)


def follow(made, data, rounds):
    """Yields (data, shifted) at the start and after each round, from one compiled program."""
    data, memory = jax.jit(made.init)(KEY, data)
    traced = []  # counted here: what JAX has compiled may have left its cache again

    def apply(*given):
        traced.append(given)
        return made.apply(*given)

    step = jax.jit(apply)
    yield data, None, memory
    for round in range(rounds):
        data, memory, shifted = step(KEY, round, data, memory, jnp.ones(K, bool))
        yield data, shifted, memory
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("period", "rounds", "first", "more"), [(30, 200, 4, 6), (20, 100, 5, 5), (50, 400, 2, 8)]
)
def test_the_traces_of_the_paper_consume_ten_intervals(period, rounds, first, more):
    window = Window(10, period, 100)
    oldest = [int(find_oldest(window, round)) for round in range(rounds + 1)]
    assert window.length == first and oldest[0] == 0
    assert oldest[-1] == more and oldest[-1] + first == 10
    arrivals = [round for round in range(1, rounds + 1) if oldest[round] > oldest[round - 1]]
    assert arrivals == [period * number for number in range(1, more + 1)]
    assert int(find_oldest(window, 100 * rounds)) == more  # and no more than there are


@pytest.mark.parametrize(
    ("period", "retained", "shared", "prequential"),
    [(1, 3, 12, False), nightly(2, 4, 0, False), nightly(3, 20, 12, False), (2, 5, 12, True)],
)
def test_windows_equal_brute_force(period, retained, shared, prequential):
    """Prequential: clients are tested on the interval that comes next, in the end on the last."""
    data, intervals = make_data(shared=shared), 9
    length = -(-retained // period)
    time, home = np.asarray(data.time), np.asarray(data.owner)
    real = time[(time >= 0) & (home >= 0)]
    when = (time - real.min()) * intervals // (real.max() - real.min() + 1)
    when = np.where(time < 0, -1, when)
    before: list = []
    rounds = period * (intervals + 1)
    for round, (now, shifted, _) in enumerate(
        follow(stream.by_time(intervals, period, retained, prequential), data, rounds)
    ):
        newest = min(length - 1 + round // period, intervals - 1)
        visible = (when < 0) | ((when <= newest) & (when > newest - length))
        if prequential:
            tests = np.asarray(data.test.order)
            visible[tests] = when[tests] == min(newest + 1, intervals - 1)
        owner = np.where(visible, home, -1)
        np.testing.assert_array_equal(now.owner, owner)
        held = []
        for view, old in ((now.train, data.train), (now.test, data.test)):
            numbers = np.sort(np.asarray(old.order))
            assert np.sort(np.asarray(view.order)).tolist() == numbers.tolist()
            mine = [[int(n) for n in numbers if owner[n] == k] for k in range(K)]
            found = [sorted(mine[k], key=lambda n: (when[n], n)) for k in range(K)]
            assert [rows_of(view, k) for k in range(K)] == found
            counts = [np.bincount(np.asarray(data.y)[mine[k]], minlength=C) for k in range(K)]
            np.testing.assert_array_equal(COUNTS(view, now), counts)
            held.append(found)
        if before:
            moved = [any(a[k] != b[k] for a, b in zip(held, before, strict=True)) for k in range(K)]
            np.testing.assert_array_equal(shifted, moved)
        before = held
    assert newest == intervals - 1


def test_one_program_equals_step_by_step():
    made, data = stream.bucket(6, 2, 5), make_data(1)
    begun, memory = jax.jit(made.init)(KEY, data)
    warm = jnp.ones(K, bool)
    whole = jax.jit(
        lambda: jax.lax.fori_loop(
            0, 9, lambda round, carry: made.apply(KEY, round, *carry, warm)[:2], (begun, memory)
        )
    )()[0]
    *_, (last, _, _) = follow(made, data, 9)
    assert all(
        (a == b).all() for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(last), strict=True)
    )


def test_buckets_hold_all_samples_of_their_labels():
    for intervals in (3, 8):
        data, interval = at_once(traces.deal_labels, KEY, make_data(), intervals)
        own = (np.asarray(data.time) >= 0) & (np.asarray(data.owner) >= 0)
        owner, y, interval = (np.asarray(a)[own] for a in (data.owner, data.y, interval))
        for k in range(K - 1):
            buckets = [set(interval[(owner == k) & (y == c)]) for c in range(C)]
            assert all(len(bucket) == 1 for bucket in buckets if bucket)
            labels = np.bincount([b for bucket in buckets for b in bucket], minlength=intervals)
            assert labels.max() - labels.min() <= 1 and labels.size == intervals


def test_redrawn_samples_follow_the_shares_and_stay_on_their_side():
    groups = (np.arange(K) % 2).astype(np.int32)  # true ones
    data, rows = make_data(2, groups=groups), np.arange(N)

    shares = 2.0, 0.3, np.zeros(4, bool), 0.0
    now, interval = jax.jit(lambda: traces.redraw_samples(KEY, data, 4, shares))()
    y, owner, source = (np.asarray(a) for a in (data.y, data.owner, now.sample))
    assert interval.min() == 0 and interval.max() == 3
    np.testing.assert_array_equal(now.y, y[: data.x.shape[0]][source])  # the label of its row
    fixed = (np.asarray(data.time) < 0) | (owner < 0)
    old = np.asarray(data.sample)
    np.testing.assert_array_equal(source[fixed], old[fixed])
    test = np.zeros(y.size, bool)
    test[np.asarray(data.test.order)] = True
    group_of_row, side_of_row = groups[owner[:N]], test[:N]
    np.testing.assert_array_equal(group_of_row[source[~fixed]], groups[owner[~fixed]])
    np.testing.assert_array_equal(side_of_row[source[~fixed]], test[~fixed])
    assert 5 not in source[~fixed] and set(source) <= set(rows)


@pytest.mark.nightly
def test_redrawn_labels_have_the_shares_of_their_interval():
    x = np.zeros((4000, 1), np.float32)
    pool = Pool(x, np.arange(4000) // 4 % (C - 1), C)  # nobody has the last label
    data = federate(pool, Partition(np.arange(4000), np.arange(4000) // 2 % 2, x[:, 0] > 0))
    keys = jax.random.fold_in(KEY, traces.MIX)
    is_burst = np.array([False, False, True])

    settings = 5.0, 0.0, is_burst, 1.0
    shares = np.asarray(traces.draw_label_shares(keys, 2, C, *settings))
    np.testing.assert_allclose(shares.sum(2), 1, atol=1e-5)
    np.testing.assert_array_equal(shares[0], shares[1])  # epsilon 0: only the burst changes them
    assert abs(shares[2] - shares[1]).sum(1).min() > 0.1
    data = data.replace(
        test=data.train.replace(order=data.train.order[:0], size=data.train.size * 0)
    )
    now, interval = traces.redraw_samples(KEY, data, 3, settings)
    for b in range(3):
        for k in range(2):
            labels = np.asarray(now.y)[(np.asarray(data.owner) == k) & (np.asarray(interval) == b)]
            found = np.bincount(labels, minlength=C) / labels.size
            expected = np.append(shares[b, k, :-1], 0) / shares[b, k, :-1].sum()
            assert abs(found - expected).max() < 5 * 0.5 / np.sqrt(labels.size)


def test_arrivals_of_an_interval_are_turned_alike():
    data = make_data(3, square=True)
    now, interval = jax.jit(lambda: traces.turn_arrivals(KEY, data, 6, 0.5))()
    turns, interval = np.asarray(now.turns), np.asarray(interval)
    owner, shared = np.asarray(data.owner), np.asarray(data.time) < 0
    assert (turns[shared] == 0).all() and (np.asarray(now.concept) == -1).all()
    steps = []
    for k in range(K - 1):
        mine = (owner == k) & ~shared
        each = [set(turns[mine & (interval == b)]) for b in range(6)]
        assert all(len(one) <= 1 for one in each)
        path = [next(iter(one)) for one in each if one]
        steps += [(b - a) % 4 for a, b in pairwise(path)]
    assert 0 in steps and 1 in steps
    at = jnp.flatnonzero((now.turns == 1) & (data.owner == 0))[:1]
    np.testing.assert_array_equal(gather(now, at)[0][0], np.rot90(gather(data, at)[0][0]))


def test_label_swap_equals_brute_force():
    data, period = make_data(4), 3
    made = drift.label_swap(0.5, period)
    y, owner = np.asarray(data.y).copy(), np.asarray(data.owner)
    before = y.copy()
    draw = jax.jit(lambda number, data: drift.draw_label_pairs(KEY, number, data, 0.5))
    chosen = 0
    for round, (now, shifted, _) in enumerate(follow(made, data, 7)):
        if round and round % period == 0:
            have = data.replace(y=jnp.asarray(y))
            who, pairs = draw(jnp.int32(round - 1), have)
            np.testing.assert_array_equal(shifted, who)
            for k in np.flatnonzero(who):
                a, b = np.asarray(pairs)[k]
                mine = owner == k
                was = y.copy()
                y[mine & (was == a)], y[mine & (was == b)] = b, a
            chosen += int(who.sum())
        elif round:
            assert not shifted.any()
        np.testing.assert_array_equal(now.y, y)
    assert 0 < chosen <= 2 * 4 and (y != before).any()
    apply = jax.jit(lambda data: made.apply(KEY, 2, data, (), None))
    once, _, who = apply(data)
    twice = apply(once)[0]  # a client that has the same labels draws them
    assert who.any() and (np.asarray(once.y) != np.asarray(data.y)).any()
    np.testing.assert_array_equal(twice.y, data.y)


def test_a_client_of_one_label_swaps_nothing():
    pool = Pool(np.zeros((6, 1), np.float32), np.array([0, 0, 1, 1, 1, 0]), 2)
    test = np.array([0, 0, 0, 0, 0, 1], bool)
    data = federate(pool, Partition(np.arange(6), np.array([0, 0, 1, 1, 1, 1]), test))
    assert not at_once(drift.label_swap(1.0, 1).apply, KEY, 0, data, (), None)[2].any()


@pytest.mark.parametrize("make", [stream.bucket, nightly(stream.gradual), stream.rotate])
def test_a_window_of_everything_never_moves(make):
    data = make_data(5, square=True)
    made = make(intervals=4, period=2, retained=8)
    begun, memory = made.init(KEY, data)
    now, after, shifted = made.apply(KEY, 1, begun, memory, None)
    assert now is begun and memory == after == () and not shifted.any()
    assert begun.train is data.train and (begun is data) == (make is stream.bucket)


def test_a_burst_has_its_first_and_its_last_round():
    """An interval a round begins with arrives in rounds 10, 20 and 30."""
    window = {"intervals": 4, "period": 10, "retained": 10}
    for begin, end in ((20, 29), (11, 20), (20, 20)):
        stream.burst(begin=begin, end=end, **window)
    for begin, end in ((11, 19), (31, 99), (1, 9)):
        one_line("no data arrive", stream.burst, begin=begin, end=end, **window)


@pytest.mark.nightly
def test_static_data_equal_no_drift(toy, linear, local):
    algorithm = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(5))
    rows = [
        cfl.run(algorithm, linear, toy, KEY, rounds=4, drift=drift, mesh=local.execution.mesh).rows
        for drift in (cfl.drift.none(), stream.bucket(retained=100_000))
    ]
    one, other = (
        [{k: v for k, v in row.items() if k not in VARYING} for row in each] for each in rows
    )
    np.testing.assert_equal(one, other)  # NaN equals NaN


@pytest.mark.nightly
def test_a_method_starts_on_the_first_window(toy, linear, local):
    made = stream.bucket(intervals=4, period=1, retained=1)
    seen = []

    def init(key, data):
        seen.append((data.train.size, (data.owner >= 0).sum()))
        return ()

    algorithm = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(5))._replace(init=init)
    make_init(algorithm, made, on_host=False)(KEY, toy)
    (size, visible), everything = seen[0], toy.train.size
    assert (size <= everything).all() and 0 < size.sum() < everything.sum() // 2
    assert visible < toy.y.size // 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: stream.bucket(intervals=0),
            "drift.intervals=0: must be a whole number >= 1",
        ),
        (
            lambda: stream.bucket(period=1.5),
            "drift.period=1.5: must be a whole number",
        ),
        (
            lambda: stream.by_time(retained=-1),
            "drift.retained=-1: must be a whole number",
        ),
        (lambda: stream.gradual(alpha=0), "drift.alpha=0: must be a finite number > 0"),
        (lambda: stream.gradual(epsilon=1.2), "drift.epsilon=1.2: must be a number between"),
        (lambda: stream.burst(fraction=-1), "drift.fraction=-1: must be a number between"),
        (lambda: stream.burst(begin=700, end=650), "drift.begin=700: no data arrive from round"),
        (lambda: stream.burst(begin=2500, end=2600), "until round 2000"),
        (
            lambda: stream.bucket(2, 50, 100, prequential=True),
            "drift.prequential=true: all drift.intervals=2 are in the window",
        ),
        (lambda: stream.rotate(p=2), "drift.p=2: must be a number between"),
        (lambda: drift.label_swap(period=0), "drift.period=0: must be a whole number"),
        (
            lambda: cfl.drift.bound_client_samples(make_data(), stream.rotate()),
            "drift=stream_rotate: samples have shape .* expected square images",
        ),
        (
            lambda: cfl.drift.bound_client_samples(
                make_data().replace(time=None), stream.by_time()
            ),
            "the data set has no times",
        ),
        (
            lambda: cfl.drift.bound_client_samples(make_data(), stream.by_time(10**8)),
            "drift.intervals=100000000: at most",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises(InputError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)
