"""The order in which a client's samples are visited: fresh random permutations, cheap
enough to be drawn inside a round.
"""

import jax.numpy as jnp
from jax import lax

from fedjax_cfl.round.cohort import bucket_sizes, client_range
from fedjax_cfl.types import FederatedData


def random_bits(words, passes, place):
    """Returns uniform uint32 per (pass, place), a counter-based hash of two random
    words (the 32-bit finaliser of MurmurHash3, twice).
    """
    x = place * jnp.uint32(0x9E3779B9) + passes * jnp.uint32(0x7FEB352D) + words[0]
    for word in (words[1], jnp.uint32(0)):
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x = (x ^ (x >> 16)) + word
    return x


def random_permutations(words, count, size: int, passes: int):
    """Returns [passes, size]: each row a fresh random permutation of 0 .. count - 1,
    then the unused places.

    The rows do not depend on `size`. 19 random bits decide, ties go by place; with the
    place in the low 13 bits both sort as one number, three times faster than a sort
    that carries the place along.
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


def shuffle_table(words, client, bucket, data: FederatedData, passes, tail: int):
    """Returns a flat table of sample numbers, pass e at e * sizes[bucket]: each pass a
    fresh random permutation of the client's samples.

    `passes(bucket size)` is the static number of passes a client of that bucket can
    need. Only the bucket in use is shuffled; the table has the largest bucket's length.
    """
    count, start = client_range(client, data)
    sizes = bucket_sizes(data.max_client_samples)
    length = max(passes(size) * size for size in sizes) + tail

    def branch(size):
        def shuffle(_):
            order = random_permutations(words, count, size, passes(size)).astype(jnp.int32)
            own = jnp.where(
                order < count, order, 0
            )  # never another client's sample: 0 times its NaN would be NaN
            numbers = data.train.order[jnp.minimum(start + own, data.train.order.size - 1)]
            return jnp.pad(numbers.reshape(-1), (0, length - numbers.size), mode="edge")

        return shuffle

    return lax.switch(bucket, [branch(size) for size in sizes], None)
