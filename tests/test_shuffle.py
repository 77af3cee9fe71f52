"""The order of a client's samples: permutations, as its slow twin draws them, and as uniform as a
fair draw.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import nightly, shuffled
from scipy.stats import chi2

from fedjax_cfl.keys import draw_permutation, permute, put_first, write_table


def words(seed):
    return jax.random.bits(jax.random.key(seed), (2,))


@jax.jit
def draw_pass(words, epoch, place, count):
    return permute(words, count, epoch, place)


def draw_many(seed, draws, count, passes=1):
    """Returns [draws, passes, count]: passes of so many clients."""
    keys = jax.random.split(jax.random.key(seed), draws)
    each = jax.jit(
        jax.vmap(
            lambda key: permute(
                jax.random.bits(key, (2,)), count, jnp.arange(passes)[:, None], jnp.arange(count)
            )
        )
    )
    return np.asarray(each(keys))


def assert_uniform(seen, cells):
    """Pearson's chi-square over `cells`; a fair draw fails one time in a thousand."""
    counts = np.bincount(np.ravel(seen), minlength=cells)
    assert counts.size == cells
    expected = counts.sum() / cells
    assert np.sum((counts - expected) ** 2 / expected) < chi2.ppf(0.999, cells - 1)


@pytest.mark.parametrize(
    "count", [1, nightly(2), nightly(3), nightly(15), nightly(16), 17, nightly(64), 171]
)
def test_is_the_permutation_of_the_twin(count):
    for epoch in (0, 1, 39):
        found = draw_pass(words(count), epoch, jnp.arange(count), count)
        np.testing.assert_array_equal(found, shuffled(words(count), count, epoch))
        assert sorted(found.tolist()) == list(range(count))


@pytest.mark.parametrize("count", [nightly(2**13 + 1000), 2**20])
def test_long_passes_are_permutations(count):
    one, other = (draw_pass(words(7), epoch, jnp.arange(count), count) for epoch in (0, 1))
    for found in (one, other):
        np.testing.assert_array_equal(np.sort(found), np.arange(count))
    assert (one != other).mean() > 0.99 and abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_passes_and_clients_differ():
    rows = draw_many(1, 3, 33, passes=20).reshape(-1, 33)
    assert len(np.unique(rows, axis=0)) == 60
    # as many agreements as chance has: 1 in 33
    agree = [(rows[a] == rows[b]).mean() for a in range(60) for b in range(a)]
    assert abs(np.mean(agree) - 1 / 33) < 0.003


@pytest.mark.parametrize("count", [nightly(0), 1, nightly(5), nightly(64), nightly(130)])
def test_a_table_holds_the_same_passes(count):
    table = write_table(words(3), jnp.int32(count), 4, 140)
    expected = permute(words(3), count, jnp.arange(4)[:, None], jnp.arange(count))
    np.testing.assert_array_equal(table[:, :count], expected)
    assert (0 <= table).all() and (table < max(count, 1)).all()


@pytest.mark.parametrize("count", [0, 1, 9])
def test_positions_beyond_the_pass_give_samples_within_it(count):
    found = permute(words(1), count, 2, jnp.array([count, count + 1, 10**9]))
    assert (0 <= found).all() and (found < max(count, 1)).all()


@pytest.mark.parametrize("count", [nightly(2), nightly(3), 4, nightly(5)])
def test_all_orders_are_equally_likely(count):
    rows = draw_many(count, 400, count, passes=60).reshape(-1, count)
    _, order = np.unique(rows @ count ** np.arange(count), return_inverse=True)
    assert_uniform(order, int(np.prod(np.arange(1, count + 1))))


def test_every_sample_is_as_likely_at_every_position():
    rows = draw_many(0, 20_000, 171)[:, 0]
    for place in (0, 1, 85, 170):
        assert_uniform(rows[:, place], 171)
    # neighbours stay neighbours no more often than by chance, 2 / 171
    steps = np.abs(np.diff(rows, axis=1)) == 1
    assert abs(steps.mean() - 2 / 171) < 1e-4


def test_successive_passes_are_independent():
    """The first sample of a pass says nothing of the first, or of the last, of the next."""
    rows = draw_many(1, 100, 5, passes=200)
    assert_uniform(rows[:, :-1, 0] * 5 + rows[:, 1:, 0], 25)
    assert_uniform(rows[:, :-1, 0] * 5 + rows[:, 1:, 4], 25)


@pytest.mark.parametrize("count", [nightly(1), nightly(2), 5, nightly(1000)])
def test_a_drawn_permutation_is_the_first_pass(count):
    key = jax.random.key(count)
    whole = draw_permutation(key, count)
    np.testing.assert_array_equal(whole, shuffled(jax.random.bits(key, (2,)), count, 0))
    for places in (0, 1, count - 1, count, count + 3):
        np.testing.assert_array_equal(draw_permutation(key, count, places), whole[:places])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_those_of_a_mask_come_first(share, count):
    mask = np.random.default_rng(count).random(count) < share
    found = put_first(jnp.asarray(mask))
    np.testing.assert_array_equal(found, np.argsort(~mask, kind="stable"))
    assert found.dtype == jnp.int32
