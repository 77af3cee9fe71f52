"""What the FlexCFL code (https://github.com/morningD/FlexCFL) does and no paper says: functions
that settings name, `_target_: papers.flexcfl_2021.NAME`, as those of `preset=ref` do. D.. are the
ids of docs/reference/disagreements.md.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.algorithms.fesem.fesem import NearestFn
from fedjax_cfl.client.steps import Step
from fedjax_cfl.method import Method, MigrateFn, Round
from fedjax_cfl.personal.layer import layer
from fedjax_cfl.system.select import from_table
from fedjax_cfl.tree import group_sum, membership_weights
from fedjax_cfl.types import Params, Selection


def py_sample(
    clients_per_round: int,
    rounds: int,
    num_clients: int,
    seed: int = 2077,
    round_robin: bool = True,
) -> Selection:
    """Repeats the draw of the code: Python's `random.sample`, seeded with round + seed in every
    round (D16).

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


def first_client(r: Round) -> tuple[Params, jax.Array]:
    """Takes only the update of each group's first selected client, times L / (L + 1e-5) for L
    clients: the "simple average" of the code (D4; an `AggregateFn`).
    """
    used = (r.upload.weight > 0).astype(jnp.float32)
    present = membership_weights(used, r.group, r.state.active.size)
    count = present.sum(0)
    rank = jnp.where(present > 0, r.cohort.rank[:, None], jnp.iinfo(jnp.int32).max)
    first = (rank == rank.min(0)) & (present > 0)
    return group_sum(first * (count / (count + 1e-5)), r.upload.delta), count


def selected_alone(nearest: NearestFn, move: MigrateFn | None) -> MigrateFn | None:
    """Lets nobody take FeSEM's E-step before a round: only clients of the cohort look for their
    center (D27; an `EStep`). Clients whose data shifted move by `move`.
    """
    return move


def before_impossible(asked: jax.Array, possible: jax.Array) -> jax.Array:
    """Allows the pairs [P] bool before the first one that is to swap and cannot (D13)."""
    return jnp.cumsum(asked & ~possible) == 0


def released_last(sizes: list[jax.Array]) -> jax.Array:
    """Returns the sizes [K] that were released last: a fraction of them is released next, so that
    data shrink (D2).
    """
    return sizes[-1]


def received() -> Method:
    """Tests each client on the model that it received when it last trained, and on its group's
    present one before (D9, since November 2022); a layer, as Ditto is.
    """

    def step(c: Step, model: Params, row: Params) -> tuple[Params, Params]:
        return c.sgd, c.received

    return layer("Received", own=lambda model: model, step=step, serve=lambda row, model: row)
