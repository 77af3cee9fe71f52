"""Which clients' data changed so much that the clients should change group: functions (counts,
reference, initial_size) -> detected [K] bool.

counts and reference [K, C] are each client's training samples per label, now and when
it was last assigned; initial_size [K] its training samples at the start. FlexCFL
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
from jax.typing import ArrayLike

from fedjax_cfl.data.federated import to_shares

# a distance is above its threshold only if it is so by more than this: 2 of 10 samples are not
# more than 20 %
ROUNDING = 1e-6


class DetectFn(Protocol):
    """Returns which clients [K] bool have shifted, see the module for the arguments."""

    def __call__(
        self, counts: jax.Array, reference: jax.Array, initial_size: jax.Array
    ) -> jax.Array: ...


def tv(
    counts: jax.Array, reference: jax.Array, initial_size: jax.Array, threshold: ArrayLike = 0.2
) -> jax.Array:
    """Detects a total variation distance of the label shares above `threshold` (a fraction):
    the share of the data that changed its label.

    A renaming of labels counts as a shift, another number of samples does not.
    """
    return total_variation(counts, reference) > threshold + ROUNDING


def any_change(counts: jax.Array, reference: jax.Array, initial_size: jax.Array) -> jax.Array:
    """Detects every change of the label shares: who reports drift in Fielding
    (https://arxiv.org/abs/2411.01580), so that rules of moving can be compared alone.
    """
    return tv(counts, reference, initial_size, 0.0)


def label_w1(
    counts: jax.Array, reference: jax.Array, initial_size: jax.Array, threshold: ArrayLike = 0.6
) -> jax.Array:
    """Detects a Wasserstein distance of the label shares above `threshold`, in labels
    (default: 20 % of the data moved by 3 labels).

    This is what the words of the paper say. For it, label 3 is nearer to 4 than to 7.
    """
    return label_wasserstein(counts, reference) > threshold + ROUNDING


def counts_as_samples(
    counts: jax.Array, reference: jax.Array, initial_size: jax.Array, threshold: ArrayLike = 0.2
) -> jax.Array:
    """Detects sum_k |c_(k) - r_(k)| > threshold * n for sorted counts c and r: eq. 9 as the
    FlexCFL code computes it.

    A renaming of labels does not count as a shift, another number of samples does.
    """
    # both sides of eq. 9 times C, so that they are whole numbers
    return jnp.sum(_sorted_gaps(counts, reference), axis=1) > threshold * initial_size


def total_variation(counts: jax.Array, reference: jax.Array) -> jax.Array:
    """Returns 1/2 sum_k |c_k / sum c - r_k / sum r| [K], from 0 to 1."""
    now, then = to_shares(counts), to_shares(reference)
    return _of_clients_with_data(0.5 * jnp.sum(jnp.abs(now - then), axis=1), counts, reference)


def label_wasserstein(counts: jax.Array, reference: jax.Array) -> jax.Array:
    """Returns sum_{k<C} |CDF_c(k) - CDF_r(k)| [K], from 0 to C - 1: the Wasserstein-1
    distance where labels a and b are |a - b| apart.
    """
    gaps = jnp.cumsum(to_shares(counts) - to_shares(reference), axis=1)[:, :-1]
    return _of_clients_with_data(jnp.sum(jnp.abs(gaps), axis=1), counts, reference)


def _of_clients_with_data(distance, counts, reference):
    """Sets the distance to 0 for a client without samples, and to infinity for a client
    that got its first ones.
    """
    distance = jnp.where(reference.sum(axis=1) > 0, distance, jnp.inf)
    return jnp.where(counts.sum(axis=1) > 0, distance, 0.0)


def _sorted_gaps(counts, reference):
    return jnp.abs(jnp.sort(counts, axis=1) - jnp.sort(reference, axis=1)).astype(jnp.float32)
