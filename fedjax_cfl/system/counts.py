"""Counts that do not wrap. A count is two uint32 words, (high, low): exact up to 2^64
without 64-bit JAX.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike


def make_count(value: ArrayLike) -> jax.Array:
    """Returns whole numbers [...] from 0 to 2^31 - 1 as counts [..., 2] uint32."""
    low = jnp.asarray(value).astype(jnp.uint32)
    return jnp.stack([jnp.zeros_like(low), low], axis=-1)


def add_counts(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the sums of counts [..., 2]."""
    return jnp.stack(_add_words(_words_of(one), _words_of(other)), axis=-1)


def sum_counts(counts: jax.Array) -> jax.Array:
    """Returns the sum [2] of counts [..., 2] over all leading axes."""
    zero = jnp.zeros((), jnp.uint32)
    axes = tuple(range(counts.ndim - 1))
    return jnp.stack(lax.reduce(_words_of(counts), (zero, zero), _add_words, axes))


def count_to_int(count: ArrayLike) -> int:
    """Returns a count [2] as a Python integer."""
    high, low = (int(word) for word in np.asarray(count))
    return (high << 32) + low


def count_to_float(count: jax.Array) -> jax.Array:
    """Returns counts [..., 2] as float32 [...], with its rounding."""
    high, low = _words_of(count)
    return high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)


def _words_of(count: jax.Array) -> tuple[jax.Array, jax.Array]:
    return count[..., 0], count[..., 1]


def _add_words(one, other):
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]).astype(jnp.uint32), low
