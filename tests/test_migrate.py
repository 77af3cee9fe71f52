"""Shift detectors against SciPy and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from fedjax_cfl.clustering import migrate

C = 10
DETECTORS = (migrate.tv, migrate.counts_as_samples)


def row(**counts):
    """Returns one client's counts [1, C]: row(c3=50) holds 50 samples of label 3."""
    out = np.zeros((1, C), np.int32)
    for name, count in counts.items():
        out[0, int(name[1:])] = count
    return jnp.asarray(out)


HALVES = row(c0=50, c1=50)
SIZE = jnp.array([100])


def count_distance(now, then):
    """Returns the Wasserstein distance of two rows of counts, taken as samples: the
    fewest initial samples, over C, at which `counts_as_samples` does not see a shift.
    """
    sizes = jnp.arange(6001)  # two rows of ten labels have up to 300 samples each
    rows = (jnp.tile(row, (sizes.size, 1)) for row in (now, then))
    shifted = np.asarray(migrate.counts_as_samples(*rows, sizes, threshold=1.0))
    count = int(shifted.sum())
    assert shifted[:count].all() and count < sizes.size
    return count / C


def test_hand_numbers():
    elsewhere, uneven = row(c8=50, c9=50), row(c0=60, c1=40)
    assert count_distance(HALVES, elsewhere) == 0 and count_distance(HALVES, uneven) == 2.0
    # 2.0 is tau
    assert not migrate.counts_as_samples(elsewhere, HALVES, SIZE) and not migrate.counts_as_samples(
        uneven, HALVES, SIZE
    )
    assert migrate.counts_as_samples(row(c0=61, c1=39), HALVES, SIZE)
    assert migrate.total_variation(HALVES, elsewhere) == 1 and migrate.tv(elsewhere, HALVES, SIZE)


def test_thresholds_are_strict():
    n = np.arange(5, 3001, 5)  # a fifth of n is a whole number: equality must not be rounded up
    kept = np.stack([n, 0 * n], axis=1)
    for more, expected in ((0, False), (1, True)):
        moved = n // 5 + more
        assert (migrate.tv(jnp.stack([n - moved, moved], axis=1), kept, n) == expected).all()
        assert (
            migrate.counts_as_samples(jnp.stack([n - moved, 0 * n], axis=1), kept, n) == expected
        ).all()
    assert migrate.tv(row(c0=89, c1=11), row(c0=100), None, threshold=0.1)


def test_any_change_of_shares_is_a_change():
    """One sample of a hundred, or other labels; not twice as many samples of the same ones."""
    for now in (row(c0=51, c1=49), row(c1=50, c2=50)):
        assert migrate.any_change(now, HALVES, SIZE)
    for now in (HALVES, 2 * HALVES):
        assert not migrate.any_change(now, HALVES, SIZE)


def test_size_and_names_of_labels():
    double = 2 * HALVES
    assert not migrate.tv(double, HALVES, SIZE)
    assert migrate.counts_as_samples(double, HALVES, SIZE)  # nothing but the size changed
    swapped = row(c0=50, c9=50)  # 50 samples of label 1 became label 9
    assert migrate.tv(swapped, HALVES, SIZE)
    assert not migrate.counts_as_samples(swapped, HALVES, SIZE)


def test_a_quarter_released_flags_everybody_by_counts_and_nobody_by_shares():
    full = jnp.asarray(np.random.default_rng(0).integers(0, 20, (30, C)) * 4)
    size = full.sum(1)
    assert migrate.counts_as_samples(full // 4, full, size).all()
    assert not migrate.tv(full // 4, full, size).any()


def test_clients_without_samples():
    nothing = row()
    for detector in DETECTORS:
        assert not detector(nothing, nothing, jnp.array([0]))
    assert not migrate.tv(nothing, HALVES, SIZE) and migrate.tv(HALVES, nothing, SIZE)
    assert migrate.tv(HALVES, nothing, SIZE, threshold=100.0), "first samples are always a shift"
    assert migrate.counts_as_samples(nothing, HALVES, SIZE)  # by size alone


COUNTS = st.lists(
    st.lists(st.integers(0, 300), min_size=C, max_size=C).filter(any), min_size=2, max_size=2
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(both=COUNTS)
def test_distances_equal_scipy(both):
    now, then = np.array(both)
    args = jnp.asarray(both)[:1], jnp.asarray(both)[1:]
    np.testing.assert_allclose(
        count_distance(*args),
        wasserstein_distance(now, then),
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        migrate.total_variation(*args)[0],
        abs(now / now.sum() - then / then.sum()).sum() / 2,
        atol=1e-6,
    )


@pytest.mark.parametrize("detector", DETECTORS)
def test_rows_are_independent_and_the_function_compiles(detector):
    rng = np.random.default_rng(1)
    now, then = jnp.asarray(rng.integers(0, 30, (40, C))), jnp.asarray(rng.integers(0, 30, (40, C)))
    found = jax.jit(detector)(now, then, then.sum(1))
    assert (
        found.dtype == bool
        and found.shape == (40,)
        and found.any()
        and not detector(now, now, now.sum(1)).any()
    )
    found = np.asarray(found)
    for k in range(0, 40, 9):
        assert detector(now[k : k + 1], then[k : k + 1], then[k : k + 1].sum(1)) == found[k]
