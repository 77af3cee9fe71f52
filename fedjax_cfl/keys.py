"""The keys of a run, one for each purpose, round and client; and random permutations as pure
functions of the position: which clients take part, and in which order a client trains on its
samples. Nothing is sorted, and nothing need be stored: a GPU's compiler spends a second or more on
each sort of thousands of numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Key

# Purposes: every draw of a run is made with fold_in(key, purpose), then the round, then the
# client's id; never with a position in the cohort.
SELECT, START, ASSIGN, PREPARE, TRAIN, DRIFT, MIGRATE, FAULTS, BYZANTINE, REGROUP = range(10)
AGGREGATE, FINISH = 10, 11
PURPOSES = 12

ROUNDS = 16  # of swap-or-not: 8 fail tests of uniformity, 16 pass them
BLOCK = 64  # positions of a pass that a table is filled with at once


def derive_key(key: Key, purpose: ArrayLike, round: ArrayLike | None = None) -> Key:
    """Returns the key for one purpose of a run. With `round` it is the key for that purpose in
    that round.
    """
    key = jax.random.fold_in(key, purpose)
    return key if round is None else jax.random.fold_in(key, round)


def derive_keys(key: Key, round: ArrayLike) -> Key:
    """Returns the keys [PURPOSES] of all purposes in one round. That of BYZANTINE is the same
    in every round, because the attackers are.

    They are derived together, because each derivation by itself would be compiled separately.
    """
    keys = jax.vmap(derive_key, (None, 0))(key, jnp.arange(PURPOSES))
    each = jax.vmap(jax.random.fold_in, (0, None))(keys, round)
    return each.at[BYZANTINE].set(keys[BYZANTINE])


def mix(x: jax.Array) -> jax.Array:
    """Returns a hash of uint32 numbers: the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@jax.jit  # sixteen calls of it are traced and lowered once
def swap_or_not(
    number: ArrayLike, x: jax.Array, words: jax.Array, begin: jax.Array, n: jax.Array
) -> jax.Array:
    """Returns the positions `x` after one round of swap-or-not, with `begin` as the pass's seed
    and `n` positions.
    """
    seed = mix(begin + jnp.asarray(number).astype(jnp.uint32) * jnp.uint32(0x7FEB352D))
    turn = seed % n
    partner = jnp.where(turn >= x, turn - x, turn + n - x)
    bits = mix(jnp.maximum(x, partner) * jnp.uint32(0x9E3779B9) ^ (seed + words[1]))
    return jnp.where(bits & 1 == 1, partner, x)


def permute(
    words: jax.Array, count: ArrayLike, epoch: ArrayLike, place: jax.Array, rolled: bool = False
) -> jax.Array:
    """Returns which of `count` samples stands at position `place` of pass `epoch`: each pass is a
    new random permutation of 0 .. count - 1 (swap-or-not: Hoang, Morris and Rogaway, CRYPTO
    2012).

    Args: `words` [2] uint32, two random words, the seed; `count` and `epoch` numbers, or arrays
    that broadcast with `place`; a position beyond `count` gives a sample within it; `rolled`: as
    a loop, which compiles faster and does not fuse into what reads it.
    """
    count, epoch = jnp.asarray(count), jnp.asarray(epoch)
    if not rolled:  # what a pass has in common would be kernels of their own on a GPU
        count, epoch, place = jnp.broadcast_arrays(count, epoch, place)
    n = jnp.maximum(count, 1).astype(jnp.uint32)
    begin = words[0] + epoch.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)

    x = jnp.minimum(jnp.asarray(place).astype(jnp.uint32), n - 1)
    x = jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, begin.shape))

    def swap(number: ArrayLike, x: jax.Array) -> jax.Array:
        return swap_or_not(number, x, words, begin, n)

    if rolled:
        return lax.fori_loop(0, ROUNDS, swap, x).astype(jnp.int32)
    for number in range(ROUNDS):
        x = swap(number, x)
    return x.astype(jnp.int32)


def draw_permutation(key: Key, count: int, places: int | None = None) -> jax.Array:
    """Returns the first `places` [places] int32 of a random permutation of 0 .. count - 1; by
    default all of it.
    """
    place = jnp.arange(count if places is None else min(places, count))
    return permute(jax.random.bits(key, (2,)), count, 0, place)


def put_first(mask: jax.Array) -> jax.Array:
    """Returns the numbers 0 .. n - 1 [n] int32, those of `mask` [n] bool first; either part is in
    ascending order.
    """
    number, before = jnp.arange(mask.size, dtype=jnp.int32), jnp.cumsum(mask, dtype=jnp.int32)
    place = jnp.where(mask, before - 1, before[-1] + number - before)
    return jnp.zeros_like(number).at[place].set(number, unique_indices=True)


def write_table(words: jax.Array, count: jax.Array, passes: int, capacity: int) -> jax.Array:
    """Returns the permutations of all passes [passes, at least `capacity`], those of `permute`."""
    epoch = jnp.arange(passes)[:, None]

    def block(b, table):
        place = b * BLOCK + jnp.arange(BLOCK)[None]
        rows = permute(words, count, epoch, place, rolled=True)
        return lax.dynamic_update_slice(table, rows, (0, b * BLOCK))

    empty = jnp.zeros((passes, capacity + BLOCK), jnp.int32)
    return lax.fori_loop(0, -(-count // BLOCK), block, empty)


def find_seed(key: Key) -> int:
    """Returns the seed of a key. Raises InputError for a key that `jax.random.key` does not make of
    a seed.
    """
    try:
        words = np.asarray(jax.random.key_data(key))
        seed = int(words[-1])
        if words.shape == (2,) and not words[0] and seed < 2**31:
            return seed
    except TypeError:
        pass
    raise InputError(
        "key: the run records the seed that it was drawn by; use jax.random.key(SEED), with a SEED"
        " from 0 to 2147483647"
    )
