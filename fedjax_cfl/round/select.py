"""Which clients take part in a round: functions (key, round, num_clients) -> ids [k]
int32, in order of selection, without repeats.
"""

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.validation import PositiveInt, check_arguments

Select = Callable[..., jax.Array]
MAX_SORTED = 2**16  # clients up to which a whole permutation is drawn


def full_participation() -> Select:
    """Takes all clients every round, in the order of their ids (Sattler et al.)."""

    def select(key, round, num_clients):
        return jnp.arange(num_clients, dtype=jnp.int32)

    return select


def uniform(clients_per_round: PositiveInt) -> Select:
    """Draws uniformly without replacement every round (FedAvg). Raises InputError for
    no client, later for more than there are.
    """
    check_arguments(uniform, locals())

    def select(key, round, num_clients):
        if clients_per_round > num_clients:
            raise InputError(
                f"clients_per_round={clients_per_round}: must be at most {num_clients}, the number"
                " of clients"
            )
        if num_clients > MAX_SORTED:
            return sample_distinct(key, clients_per_round, num_clients)
        return jax.random.permutation(key, num_clients)[:clients_per_round].astype(jnp.int32)

    return select


def sample_distinct(key, count: int, num_clients: int):
    """Returns the first `count` places [count] int32 of a random permutation of 0 .. K
    - 1, without making the rest of it.

    A Feistel network of six rounds on the smallest even number of bits that holds K;
    what falls outside goes through it again, which keeps it a permutation (cycle
    walking; Black and Rogaway 2002).
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


def rr_then_random(clients_per_round: PositiveInt) -> Select:
    """Visits every client once in order, wrapping round, then draws uniformly (the
    clustered trainers of FlexCFL).
    """
    draw = uniform(clients_per_round)

    def select(key, round, num_clients):
        turn = (round * clients_per_round + jnp.arange(clients_per_round)) % num_clients
        return jnp.where(
            round * clients_per_round < num_clients,
            turn.astype(jnp.int32),
            draw(key, round, num_clients),
        )

    return select


def from_table(table: np.ndarray) -> Select:
    """Follows a table [T, k] of client ids; a run longer than the table starts over."""
    table = jnp.asarray(table, jnp.int32)

    def select(key, round, num_clients):
        return table[round % table.shape[0]]

    return select


def py_sample(
    clients_per_round: int,
    rounds: int,
    num_clients: int,
    seed: int = 2077,
    round_robin: bool = True,
) -> Select:
    """Repeats the FlexCFL code's draw: Python's `random.sample` re-seeded with round +
    seed, after round robin if asked for.
    """
    everyone = list(range(num_clients))

    def row(round):
        if round_robin and round * clients_per_round < num_clients:
            return [(round * clients_per_round + j) % num_clients for j in range(clients_per_round)]
        return random.Random(round + seed).sample(everyone, clients_per_round)

    return from_table(np.array([row(round) for round in range(rounds)]))


def np_choice(clients_per_round: int, rounds: int, num_clients: int) -> Select:
    """Repeats the FedProx and GrouProx codes' draw: NumPy's legacy generator seeded
    with the round, `choice` without replacement.
    """
    draws = [
        np.random.RandomState(round).choice(num_clients, clients_per_round, replace=False)
        for round in range(rounds)
    ]
    return from_table(np.array(draws))
