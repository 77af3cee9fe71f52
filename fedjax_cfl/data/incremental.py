"""Incremental release: more and more of a client's samples become visible (FlexCFL,
https://arxiv.org/abs/2108.09749, section 5.3).
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from typing_extensions import TypeAliasType

from fedjax_cfl.data.drift import RELEASE, Drift, edit_owners, increasing
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import FederatedData, Key
from fedjax_cfl.validation import NaturalInt, checked, number, pick

MAX_DENOMINATOR = 1000  # largest denominator of a released fraction
LEAST = 1 / MAX_DENOMINATOR
Share = Annotated[float, number(f"a number from {LEAST} to 1", ge=LEAST, le=1)]
Schedule = TypeAliasType(
    "Schedule", Annotated[Sequence[NaturalInt], increasing("whole numbers >= 0")]
)
Shares = TypeAliasType(
    "Shares", Annotated[Sequence[Share], increasing(f"numbers from {LEAST} to 1")]
)
# (sizes [K] of all training samples, and of each release so far) -> of what the next fraction is
WholeFn = TypeAliasType("WholeFn", Callable[[list[jax.Array]], jax.Array])


class IncrementalMemory(struct.PyTreeNode):
    """The memory of `incremental`."""

    owner: jax.Array  # [N] int32, the client of each sample once it is visible
    # [N] int32, place of a training sample in its client's random order, -1 for the others,
    # which are always visible
    rank: jax.Array
    quota: jax.Array  # [T, K] int32, training samples visible from each scheduled round on


@checked("drift")
def incremental(
    fractions: Shares = (0.25, 0.5, 0.75, 1.0),
    schedule: Schedule = (0, 50, 100, 150),
    whole: Literal["all"] | WholeFn = "all",
) -> Drift:
    """From round schedule[j] on, the first ceil(fractions[j] n) samples of each
    client's n, in a fixed random order, are visible.

    Only training samples are ever hidden, and none before the first round of the
    schedule. `whole` says of what else than all n a fraction is released (D2).
    Fractions are read as ratios of whole numbers: 0.07 of 100 is 7, whatever binary
    rounding makes of it.
    """
    if len(fractions) != len(schedule):
        raise InputError(
            f"drift.fractions={list(fractions)}: expected {len(schedule)}, one for each round of"
            f" drift.schedule={list(schedule)}"
        )
    ratios = [Fraction(fraction).limit_denominator(MAX_DENOMINATOR) for fraction in fractions]
    whole_of = pick(whole, all=lambda sizes: sizes[0])

    def init(key: Key, data: FederatedData) -> tuple[FederatedData, IncrementalMemory]:
        bits = jax.random.bits(jax.random.fold_in(key, RELEASE), data.owner.shape)
        numbers = data.train.order
        held = data.owner[numbers]
        held = jnp.where(held < 0, data.num_clients, held)
        held, _, numbers = lax.sort((held, bits[numbers], numbers), num_keys=3)
        first = data.train.start[jnp.minimum(held, data.num_clients - 1)]
        place = jnp.arange(numbers.size, dtype=jnp.int32) - first
        sizes = [data.train.size]
        for ratio in ratios:
            sizes.append(-(-ratio.numerator * whole_of(sizes) // ratio.denominator))
        rank = jnp.full_like(data.owner, -1).at[numbers].set(place)
        return data, IncrementalMemory(data.owner, rank, jnp.stack(sizes[1:]))

    def apply(key, round, data, memory, warm):
        begins = jnp.array(tuple(schedule))
        due = jnp.any(begins == round)
        quota = memory.quota[jnp.sum(begins <= round) - 1]
        shifted = due & (quota != data.train.size)

        def edit(owner: jax.Array) -> jax.Array:
            visible = (memory.owner >= 0) & (memory.rank < quota[memory.owner])
            return jnp.where(visible, memory.owner, -1)

        return edit_owners(data, jnp.any(shifted), edit), memory, shifted

    return Drift(init, apply)
