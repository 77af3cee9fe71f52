"""Which clients take part in a round: each function returns a `Selection`.

Most selections remember nothing. `stateless` makes them of a function (key, round,
num_clients) -> ids [k] int32, in order of selection, without repeats.
"""

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Key, Selection
from fedjax_cfl.validation import PositiveInt, check_arguments

Draw = Callable[..., jax.Array]  # (key, round, num_clients) -> ids [k] int32
MAX_SORTED = 2**16  # for up to so many clients, a whole permutation is drawn


def stateless(draw: Draw) -> Selection:
    """Selects by `draw`, which remembers nothing.

    Its cohorts are known before the run, so that samples on the host can be fetched ahead.
    """
    return Selection(
        init=lambda data: (),
        select=lambda key, memory, state, data: draw(key, state.round, data.num_clients),
        update=lambda memory, state, cohort, upload, seconds: memory,
        draw=draw,
    )


def full_participation() -> Selection:
    """Takes all clients every round, in the order of their ids (Sattler et al.)."""
    return stateless(lambda key, round, num_clients: jnp.arange(num_clients, dtype=jnp.int32))


def draw_uniform(clients_per_round: PositiveInt) -> Draw:
    """Draws clients uniformly without replacement (FedAvg).

    Raises InputError for fewer than one client, and when it draws, for more than there are.
    """
    check_arguments(draw_uniform, locals())

    def draw(key: Key, round: int | jax.Array, num_clients: int) -> jax.Array:
        if clients_per_round > num_clients:
            raise InputError(
                f"clients_per_round={clients_per_round}: must be at most {num_clients}, the number"
                " of clients"
            )
        if num_clients > MAX_SORTED:
            return sample_distinct(key, clients_per_round, num_clients)
        return jax.random.permutation(key, num_clients)[:clients_per_round].astype(jnp.int32)

    return draw


def uniform(clients_per_round: PositiveInt) -> Selection:
    """Selects uniformly without replacement every round (FedAvg), see `draw_uniform`."""
    return stateless(draw_uniform(clients_per_round))


def sample_distinct(key: Key, count: int, num_clients: int) -> jax.Array:
    """Returns the first `count` entries [count] int32 of a random permutation of 0 .. K -
    1, without making the rest of it.

    The permutation is a Feistel network of six rounds on the smallest even number of bits
    that holds K. A result of K or more goes through it again (cycle walking; Black and
    Rogaway 2002).
    """
    half = (max(num_clients - 1, 1).bit_length() + 1) // 2
    mask = jnp.uint32(2**half - 1)
    words = jax.random.bits(key, (6,))

    def network(x):
        left, right = x >> half, x & mask
        for word in words:
            mixed = (right + word) * jnp.uint32(0x9E3779B9)
            mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
            mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
            left, right = right, left ^ ((mixed ^ (mixed >> 16)) & mask)
        return (left << half) | right

    def inside(x):
        return jax.lax.while_loop(lambda x: x >= num_clients, network, network(x))

    return jax.vmap(inside)(jnp.arange(count, dtype=jnp.uint32)).astype(jnp.int32)


def rr_then_random(clients_per_round: PositiveInt) -> Selection:
    """Takes clients in the order of their ids until all have been selected, then draws
    uniformly (the clustered trainers of the FlexCFL code). Where ids go group by group, so do the
    first rounds.
    """
    then = draw_uniform(clients_per_round)

    def draw(key: Key, round: int | jax.Array, num_clients: int) -> jax.Array:
        turn = (round * clients_per_round + jnp.arange(clients_per_round)) % num_clients
        return jnp.where(
            round * clients_per_round < num_clients,
            turn.astype(jnp.int32),
            then(key, round, num_clients),
        )

    return stateless(draw)


def from_table(table: np.ndarray) -> Selection:
    """Follows a table [T, k] of client ids; a run longer than the table starts over."""
    rows = jnp.asarray(table, jnp.int32)
    return stateless(lambda key, round, num_clients: rows[round % rows.shape[0]])


def py_sample(
    clients_per_round: int,
    rounds: int,
    num_clients: int,
    seed: int = 2077,
    round_robin: bool = True,
) -> Selection:
    """Repeats the draw of the FlexCFL code: Python's `random.sample`, seeded with round +
    seed in every round.

    With `round_robin` all clients are first selected once, in the order of their ids.
    """
    everyone = list(range(num_clients))

    def row(round):
        if round_robin and round * clients_per_round < num_clients:
            return [(round * clients_per_round + j) % num_clients for j in range(clients_per_round)]
        return random.Random(round + seed).sample(everyone, clients_per_round)

    return from_table(np.array([row(round) for round in range(rounds)]))
