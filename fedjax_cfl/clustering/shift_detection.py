"""Which clients' data changed so much that they belong elsewhere: functions (counts,
reference, initial_size) -> detected [K] bool.

counts and reference [K, C] are each client's training samples per label, now and when
it was last assigned; initial_size [K] its training samples when the run began. FlexCFL
(https://arxiv.org/abs/2108.09749), section 3.4: detected where the Wasserstein distance
of now and then exceeds tau = 0.2 n / C (eq. 9).

`counts_as_samples` is eq. 9 as printed: tau is in samples, and only the distance of
counts passed as samples, as the paper's code does, has that unit (D11). Shares of C
labels are at most C - 1 apart, so that no client of 5 C^2 samples would be detected.

Differs from the paper: `tv` is the default and means what the text says, 20 % of the
data changed.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

# a distance that equals its threshold up to this is not above it: 2 of 10 samples are not more
# than 20 %
ROUNDING = 1e-6


class DetectFn(Protocol):
    """Detects shifted clients, [K] bool."""

    def __call__(
        self, counts: jax.Array, reference: jax.Array, initial_size: jax.Array
    ) -> jax.Array: ...


def tv(counts, reference, initial_size, threshold=0.2):
    """Detects a total variation distance of the label shares above `threshold`: the
    share of the data that changed its label.

    Sees which label is which, and does not see the number of samples.
    """
    return total_variation(counts, reference) > threshold + ROUNDING


def label_w1(counts, reference, initial_size, threshold=0.6):
    """Detects a Wasserstein distance of the label shares above `threshold` labels
    (default: 20 % of the data moved by 3 labels).

    What one expects of the paper's words; it takes label 3 to be nearer to 4 than to 7.
    """
    return label_wasserstein(counts, reference) > threshold + ROUNDING


def counts_as_samples(counts, reference, initial_size, threshold=0.2):
    """Detects sum_k |c_(k) - r_(k)| > threshold * n, sorted counts c and r: eq. 9 as
    the FlexCFL code computes it.

    Blind to any renaming of labels, and sensitive to the number of samples.
    """
    return (
        jnp.sum(_sorted_gaps(counts, reference), axis=1) > threshold * initial_size
    )  # whole numbers: both sides times C


def total_variation(counts, reference):
    """Returns 1/2 sum_k |c_k / sum c - r_k / sum r| [K], from 0 to 1."""
    now, then = _shares(counts), _shares(reference)
    return _of_clients_with_data(0.5 * jnp.sum(jnp.abs(now - then), axis=1), counts, reference)


def label_wasserstein(counts, reference):
    """Returns sum_{k<C} |CDF_c(k) - CDF_r(k)| [K], the Wasserstein-1 distance with |a -
    b| between labels a and b, from 0 to C - 1.
    """
    gaps = jnp.cumsum(_shares(counts) - _shares(reference), axis=1)[:, :-1]
    return _of_clients_with_data(jnp.sum(jnp.abs(gaps), axis=1), counts, reference)


def _shares(counts):
    return counts / jnp.maximum(counts.sum(axis=1, keepdims=True), 1)


def _of_clients_with_data(distance, counts, reference):
    """Sets 0 for a client without samples, which shows nothing, and infinity for one
    that has its first ones.
    """
    distance = jnp.where(reference.sum(axis=1) > 0, distance, jnp.inf)
    return jnp.where(counts.sum(axis=1) > 0, distance, 0.0)


def _sorted_gaps(counts, reference):
    return jnp.abs(jnp.sort(counts, axis=1) - jnp.sort(reference, axis=1)).astype(jnp.float32)
