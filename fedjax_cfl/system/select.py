"""Which clients take part in a round: each function returns a `Selection`.

Most selections remember nothing. `stateless` makes them of a function (key, round,
num_clients) -> ids [k] int32, in order of selection, without repeats.
"""

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.data.shuffle import draw_permutation
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Key, Selection
from fedjax_cfl.validation import PositiveInt, check_arguments

__all__ = ["from_table", "full_participation", "py_sample", "rr_then_random", "uniform"]
Draw = Callable[..., jax.Array]  # (key, round, num_clients) -> ids [k] int32


def memoryless(select: Callable[..., jax.Array]) -> Selection:
    """Selects by `select`, see `Selection`, which gets () as memory."""
    return Selection(lambda data: (), select, lambda memory, state, cohort, upload, seconds: memory)


def stateless(draw: Draw) -> Selection:
    """Selects by `draw`, which remembers nothing.

    Its cohorts are known before the run, so that samples on the host can be fetched ahead.
    """
    drawn = memoryless(lambda key, memory, state, data: draw(key, state.round, data.num_clients))
    return drawn._replace(draw=draw)


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
        return draw_permutation(key, num_clients, clients_per_round)

    return draw


def uniform(clients_per_round: PositiveInt) -> Selection:
    """Selects uniformly without replacement every round (FedAvg), see `draw_uniform`."""
    return stateless(draw_uniform(clients_per_round))


def rr_then_random(clients_per_round: PositiveInt) -> Selection:
    """Takes clients in the order of their ids until all have been selected, then draws
    uniformly (the clustered trainers of the FlexCFL code). Where ids go group by group, so do the
    first rounds.
    """
    then = draw_uniform(clients_per_round)

    def draw(key: Key, round: int | jax.Array, num_clients: int) -> jax.Array:
        turn = (round * clients_per_round + jnp.arange(clients_per_round)) % num_clients
        drawn = then(key, round, num_clients)
        return jnp.where(round * clients_per_round < num_clients, turn.astype(jnp.int32), drawn)

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

    Args: `clients_per_round` is k; `rounds` is the number of rows that are drawn, after which
    they repeat; `num_clients` is K, at least k; `seed` is added to the number of the round.
    """
    everyone = list(range(num_clients))

    def row(round):
        if round_robin and round * clients_per_round < num_clients:
            return [(round * clients_per_round + j) % num_clients for j in range(clients_per_round)]
        return random.Random(round + seed).sample(everyone, clients_per_round)

    return from_table(np.array([row(round) for round in range(rounds)]))
