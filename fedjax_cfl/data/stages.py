"""Stages: data of each client that follow one another, with true groups that are known in each.

A holding belongs to the stage that `data.time` names, and a client shows the holdings of its
present one. Where stages come from the data (`dataset=sea`), all clients go on together; of other
data `federate` makes them. T stages, K clients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedjax_cfl.data.drift import Drift, edit_owners
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import FederatedData, Key
from fedjax_cfl.validation import PositiveInt, check_arguments

__all__ = ["by_stage"]
FindStageFn = Callable[[jax.Array | int, int, int], jax.Array]  # (round, K, T) -> [K] int32


class StageMemory(struct.PyTreeNode):
    """The memory of a drift by stages."""

    owner: jax.Array  # [N] int32, the client of each holding while its stage is shown
    is_test: jax.Array  # [N] bool


def by_stage(period: PositiveInt = 20, prequential: bool = True) -> Drift:
    """Every `period` rounds all clients go on to their next stage; they stay in the last one.

    Stage t is shown in rounds t period .. (t + 1) period - 1, counted from 0, so that the row of
    round (t + 1) period is its last. `prequential`: clients are tested on the samples of the next
    stage, in the last one on its own; true groups are those of the samples that they train on.
    Raises InputError for data without stages.
    """
    check_arguments(by_stage, locals(), "drift")

    def find_stage(round: jax.Array | int, clients: int, stages: int) -> jax.Array:
        return jnp.full(clients, jnp.minimum(round // period, stages - 1), jnp.int32)

    return show_stages("drift=by_stage", find_stage, prequential)


def show_stages(name: str, find_stage: FindStageFn, prequential: bool) -> Drift:
    """Returns the drift in which each client shows the stage that `find_stage` names.

    Args: `name` of the drift, for errors; `find_stage` looks at the round alone; `prequential` is
    as in `by_stage`.
    """

    def show(data: FederatedData, memory: StageMemory, stage: jax.Array, moves: jax.Array):
        assert data.concepts is not None and data.time is not None, "see `check_stages`"
        tested = jnp.minimum(stage + prequential, len(data.concepts) - 1)
        time = data.time

        def edit(owner: jax.Array) -> jax.Array:
            wanted = jnp.where(memory.is_test, tested[memory.owner], stage[memory.owner])
            visible = (time == wanted) | (time < 0)
            return jnp.where(visible, memory.owner, -1)

        concept = data.concepts[stage, jnp.arange(data.num_clients)]
        return edit_owners(data.replace(concept=concept), moves, edit)

    def init(key: Key, data: FederatedData) -> tuple[FederatedData, StageMemory]:
        check_stages(name, data)
        is_test = jnp.zeros(data.owner.size, bool).at[data.test.order].set(True, mode="drop")
        memory = StageMemory(data.owner, is_test)
        stage = find_stage(0, data.num_clients, len(data.concepts))
        return show(data, memory, stage, jnp.bool_(True)), memory

    def apply(
        key: Key, round: jax.Array, data: FederatedData, memory: Any, warm: jax.Array
    ) -> tuple[FederatedData, Any, jax.Array]:
        before, stage = (
            find_stage(number, data.num_clients, len(data.concepts))
            for number in (jnp.maximum(round - 1, 0), round)
        )
        return show(data, memory, stage, jnp.any(before != stage)), memory, before != stage

    def max_client_samples(data: FederatedData) -> int:
        check_stages(name, data)
        train = np.asarray(data.train.order)
        owner, time = np.asarray(data.owner)[train], np.asarray(data.time)[train]
        counts = np.zeros((data.num_clients, len(data.concepts) + 1), int)
        np.add.at(counts, (owner, time), 1)  # -1, always there, is the last column
        return int((counts[:, :-1] + counts[:, -1:]).max())

    return Drift(init, apply, max_client_samples)


def check_stages(name: str, data: FederatedData) -> None:
    """Raises InputError for data without stages of known groups."""
    if data.concepts is None or data.time is None:
        raise InputError(
            f"{name}: the data have no stages; use dataset=sine, circle or sea, or another drift"
        )
