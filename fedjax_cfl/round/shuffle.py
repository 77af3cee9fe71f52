"""The order in which a client trains on its samples: new random permutations, cheap enough
to be drawn inside a round.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.round.cohort import bucket_sizes, client_range
from fedjax_cfl.types import FederatedData


def random_bits(words: jax.Array, passes: jax.Array, place: jax.Array) -> jax.Array:
    """Returns a uniform uint32 for each (pass, place), of two random words [2] uint32.

    It is a counter-based hash: the 32-bit finaliser of MurmurHash3, twice.
    """
    x = place * jnp.uint32(0x9E3779B9) + passes * jnp.uint32(0x7FEB352D) + words[0]
    for word in (words[1], jnp.uint32(0)):
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x = (x ^ (x >> 16)) + word
    return x


def random_permutations(words: jax.Array, count: ArrayLike, size: int, passes: int) -> jax.Array:
    """Returns [passes, size]: each row is a new random permutation of 0 .. count - 1, and
    then the unused places.

    The permutations do not depend on `size`. 19 random bits decide, ties go by place.
    With the place in the low 13 bits, both sort as one number: three times as fast as a
    sort of pairs.
    """
    place = jnp.arange(size, dtype=jnp.uint32)
    low = jnp.uint32(2**13 - 1)
    bits = random_bits(words, jnp.arange(passes, dtype=jnp.uint32)[:, None], place) | low
    bits = jnp.where(place < count, bits ^ low, ~low)
    if size <= 2**13:
        return lax.sort(bits | place, is_stable=False) & low
    return lax.sort(
        (jnp.where(place < count, bits, ~jnp.uint32(0)), jnp.broadcast_to(place, bits.shape)),
        num_keys=1,
        is_stable=True,
    )[1]


def shuffle_table(
    words: jax.Array,
    client: jax.Array,
    bucket: jax.Array,
    data: FederatedData,
    passes: Callable[[int], int],
    tail: int,
) -> jax.Array:
    """Returns a flat table of holdings: each pass is a new random permutation of the
    client's samples, pass e starting at e * sizes[bucket].

    `passes(bucket size)` is the most passes that a client of that bucket can need. Only
    the bucket in use is shuffled. The table is as long as the largest bucket needs, and
    `tail` entries longer.
    """
    count, start = client_range(client, data)
    sizes = bucket_sizes(data.max_client_samples)
    length = max(passes(size) * size for size in sizes) + tail

    def branch(size):
        def shuffle(_):
            order = random_permutations(words, count, size, passes(size)).astype(jnp.int32)
            # never another client's sample: 0 times its NaN would be NaN
            own = jnp.where(order < count, order, 0)
            numbers = data.train.order[jnp.minimum(start + own, data.train.order.size - 1)]
            return jnp.pad(numbers.reshape(-1), (0, length - numbers.size), mode="edge")

        return shuffle

    return lax.switch(bucket, [branch(size) for size in sizes], None)
