"""Stages: data of each client that follow one another, with true groups that are known in each.

A holding belongs to the stage that `data.time` names, and a client shows the holdings of its
present one. Some data have stages (`dataset=sea`); of all others `federate_stages` makes them.
T stages, K clients, N holdings.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from typing_extensions import TypeAliasType

from fedjax_cfl.data.concept import find_part
from fedjax_cfl.data.drift import Drift, edit_owners, increasing
from fedjax_cfl.data.federated import check_holdings, federate, take_holdings
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import FederatedData, Key, Partition, Pool
from fedjax_cfl.validation import PositiveInt, Seed, checked, whole

__all__ = ["by_stage", "federate_stages", "scheduled"]
Stages = TypeAliasType("Stages", Annotated[int, whole(2, 100)])
Rounds = TypeAliasType("Rounds", Annotated[Sequence[PositiveInt], increasing("whole numbers >= 1")])
FindStageFn = Callable[[jax.Array | int, int, int], jax.Array]  # (round, K, T) -> [K] int32


class StageMemory(struct.PyTreeNode):
    """The memory of a drift by stages."""

    owner: jax.Array  # [N] int32, the client of each holding while its stage is shown
    is_test: jax.Array  # [N] bool


@checked("drift")
def by_stage(period: PositiveInt = 20, prequential: bool = True) -> Drift:
    """Every `period` rounds all clients go on to their next stage; they stay in the last one.

    Stage t is shown in rounds t period .. (t + 1) period - 1, counted from 0, so that the row of
    round (t + 1) period is its last. `prequential`: clients are tested on the samples of the next
    stage, in the last one on its own; true groups are those of the samples that they train on.
    Raises InputError for data without stages.
    """

    def find_stage(round: jax.Array | int, clients: int, stages: int) -> jax.Array:
        return jnp.full(clients, jnp.minimum(round // period, stages - 1), jnp.int32)

    return show_stages("drift=by_stage", find_stage, prequential)


@checked("drift")
def scheduled(
    kind: Literal["sudden", "incremental", "recurring"] = "sudden",
    rounds: Rounds = (100,),
    stages: Stages = 2,
    exchange: bool = False,
    seed: Seed = 0,
) -> Drift:
    """Clients go on to other stages in given rounds, counted from 0, as in FedCCFA's experiments
    (https://arxiv.org/abs/2410.18478). Test samples change with the training samples.

    Args: `kind`: sudden, all clients go on in each of the `rounds`; incremental, the clients of
    part p of `find_part` in round p of them; recurring, as sudden, and after the last stage comes
    the first one again; `stages` are how many sets of samples a client has, which it sees by its
    concept in each, or, with `exchange`, has from another client. `seed` draws from whom.
    Raises InputError for rounds that do not fit the stages.
    """
    needs = {
        "sudden": (range(stages - 1, stages), stages, "one round for each stage but the first"),
        "incremental": (range(2, 11), 2, "2 to 10 rounds, one for each part, and drift.stages=2"),
        "recurring": (range(stages, sys.maxsize), stages, "at least as many rounds as stages"),
    }
    counts, wanted, words = needs[kind]
    if len(rounds) not in counts or stages != wanted:
        raise InputError(
            f"drift.rounds={list(rounds)}, drift.stages={stages}: drift.kind={kind} needs {words}"
        )
    begins = np.array(rounds)

    def find_stage(round: jax.Array | int, clients: int, count: int) -> jax.Array:
        if kind == "incremental":
            part = find_part(np.arange(clients), len(rounds))
            return jnp.where(round >= begins[part], 1, 0)
        passed = jnp.sum(round >= begins)
        stage = passed % stages if kind == "recurring" else passed
        return jnp.full(clients, stage, jnp.int32)

    drift = show_stages("drift=scheduled", find_stage, False, exchange, stages)
    make = functools.partial(federate_stages, stages=stages, exchange=exchange, seed=seed)
    return drift._replace(federate=make)


@checked("drift")
def federate_stages(
    pool: Pool,
    holdings: Partition,
    concept: Callable | None = None,
    *,
    stages: PositiveInt = 2,
    exchange: bool = False,
    seed: Seed = 0,
) -> FederatedData:
    """Returns the data of clients, as `federate`, in several stages: in each a client has the same
    samples, which it sees by another draw of the concept, or, with `exchange`, those of another
    client, whose true group it then has.

    Args: `pool`, `holdings` and `concept` are those of `federate`; `concept` is asked once, for
    client t K + k in place of client k in stage t; `seed` draws from whom clients have samples.
    Raises InputError where stages would not differ, and for a concept that gives all clients the
    same true group in all of them.
    """
    if concept is None and not exchange:
        raise InputError(
            "drift=scheduled: nothing would change; use concept=graded or another concept, or"
            " drift.exchange=true"
        )
    if holdings.concept is not None and holdings.concept.ndim > 1:
        raise InputError("drift=scheduled: the data have stages of their own; use drift=by_stage")
    holdings = check_holdings(holdings, len(pool.y))
    count, order = int(holdings.owner.max(initial=-1)) + 1, np.random.RandomState(seed)
    ring = order.permutation(count)
    heir = np.tile(np.arange(count, dtype=np.int32), (stages, 1))  # of each client, in each stage
    for stage in range(stages if exchange else 0):
        heir[stage, ring] = np.roll(ring, -stage)
    groups = np.full(heir.shape, -1, np.int32)
    if holdings.concept is not None:
        np.put_along_axis(groups, heir, holdings.concept, axis=1)
    time = np.repeat(np.arange(stages, dtype=np.int32), len(holdings.owner))
    held = take_holdings(holdings, np.tile(np.arange(len(holdings.owner)), stages))
    held = held._replace(owner=heir[time, held.owner], concept=groups)

    def see(x, y, owner, clients, num_classes):
        assert concept is not None
        x, y, groups = concept(x, y, time * clients + owner, stages * clients, num_classes)
        return x, y, np.reshape(groups, (stages, clients))

    data = federate(pool, held, concept and see, count)
    if data.concept.min() >= 0:
        raise InputError(
            "drift=scheduled: every client is in the same true group in all stages; use more groups"
            " or, where the concept has it, concept.shuffle=true"
        )
    return data.replace(time=jnp.asarray(time))


def show_stages(
    name: str,
    find_stage: FindStageFn,
    prequential: bool,
    fresh: bool = True,
    stages: int = 1,
) -> Drift:
    """Returns the drift in which each client shows the stage that `find_stage` names.

    Args: `name` of the drift, for errors; `find_stage` looks at the round alone; `prequential` is
    as in `by_stage`; `fresh`: each stage has samples of its own, otherwise a client's data do not
    change as long as its true group stays the same; `stages` are how many data must have.
    """

    def show(data: FederatedData, memory: StageMemory, stage: jax.Array, moves: jax.Array):
        concepts, time = check_stages(name, data, stages)
        tested = jnp.minimum(stage + prequential, len(concepts) - 1)

        def edit(owner: jax.Array) -> jax.Array:
            wanted = jnp.where(memory.is_test, tested[memory.owner], stage[memory.owner])
            visible = (time == wanted) | (time < 0)
            return jnp.where(visible, memory.owner, -1)

        concept = concepts[stage, jnp.arange(data.num_clients)]
        return edit_owners(data.replace(concept=concept), moves, edit)

    def init(key: Key, data: FederatedData) -> tuple[FederatedData, StageMemory]:
        concepts, _ = check_stages(name, data, stages)
        is_test = jnp.zeros(data.owner.size, bool).at[data.test.order].set(True, mode="drop")
        memory = StageMemory(data.owner, is_test)
        stage = find_stage(0, data.num_clients, len(concepts))
        return show(data, memory, stage, jnp.bool_(True)), memory

    def apply(key, round, data, memory, warm):
        concepts, _ = check_stages(name, data, stages)
        before, stage = (
            find_stage(number, data.num_clients, len(concepts))
            for number in (jnp.maximum(round - 1, 0), round)
        )
        moves, client = before != stage, jnp.arange(data.num_clients)
        was, now = concepts[before, client], concepts[stage, client]
        shifted = moves & (fresh | (was != now) | (now < 0))
        return show(data, memory, stage, jnp.any(moves)), memory, shifted

    def max_client_samples(data: FederatedData) -> int:
        concepts, time = check_stages(name, data, stages)
        held, when = (np.asarray(each)[data.train.order] for each in (data.owner, time))
        counts = np.zeros((data.num_clients, len(concepts) + 1), int)
        np.add.at(counts, (held, when), 1)  # -1, always there, is the last column
        return int((counts[:, :-1] + counts[:, -1:]).max())

    return Drift(init, apply, max_client_samples)


def check_stages(name: str, data: FederatedData, stages: int) -> tuple[jax.Array, jax.Array]:
    """Returns the true groups [T, K] in each stage, and the stage [N] of each holding, -1: it is in
    all of them. Raises InputError for data of fewer `stages`; `name` is that of the drift.
    """
    if data.concepts is None or data.time is None or len(data.concepts) < stages:
        raise InputError(
            f"{name}: the data have no stages, or too few; use dataset=sine, circle or sea with"
            " drift=by_stage, federate_stages in Python, or another drift"
        )
    return data.concepts, data.time
