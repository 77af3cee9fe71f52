"""Moving clients whose data have changed, before a round's selection: a `MigrateFn`, see
`hooks`.

`state.memory.shift_reference` remembers what every client's data looked like when it
was last assigned.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.clustering.assign import ChooseFn
from fedjax_cfl.clustering.shift_detection import DetectFn
from fedjax_cfl.data.federated import label_counts
from fedjax_cfl.round.cohort import make_cohort
from fedjax_cfl.round.faults import add_fault_counts, no_faults
from fedjax_cfl.round.hooks import MigrateFn, StartFn, make_report
from fedjax_cfl.round.local import Local
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.types import FaultCounts, FederatedData, Key, State

# clients assigned anew at once: bounds the updates in memory, whatever the number of shifted
# clients
CLIENT_BLOCK = 32


class ShiftReference(struct.PyTreeNode):
    """What detection compares with."""

    # [K, C] int32, training samples per label when the client was last assigned
    reference: jax.Array
    initial_size: jax.Array  # [K] int32, training samples when the run began


def init_reference(data: FederatedData) -> ShiftReference:
    """Returns the reference at the start of a run."""
    return ShiftReference(
        label_counts(data.train, data.owner, data.y, data.num_classes), data.train.size
    )


def with_shift_reference(start: StartFn) -> StartFn:
    """Adds to a start's memory, which has a field `shift_reference`, what `on_shift`
    compares with.
    """

    def watched(key, data: FederatedData):
        begun = start(key, data)
        return begun._replace(memory=begun.memory.replace(shift_reference=init_reference(data)))

    return watched


class ChargeFn(Protocol):
    """Says which clients [K] bool pay for a migration, given those whose shift was
    `detected` [K] among the clients that were `met` [K].
    """

    def __call__(self, detected: jax.Array, met: jax.Array, data: FederatedData) -> jax.Array: ...


def charge_detected(detected, met, data: FederatedData) -> jax.Array:
    """Every client whose shift was detected pays."""
    return detected


def charge_swapped(detected, met, data: FederatedData) -> jax.Array:
    """Every client met whose data the shift touched pays: what Fig. 6 of FlexCFL adds up
    to.
    """
    return met & data.shifted


def reassign(
    choose: ChooseFn, local: Local, key: Key, state: State, data: FederatedData, mask: jax.Array
) -> tuple[jax.Array, FaultCounts]:
    """Groups the clients of `mask` [K] anew, in blocks; returns the assignment [K] and what
    went wrong.
    """
    size = min(CLIENT_BLOCK, data.num_clients)
    queue = jnp.argsort(~mask, stable=True).astype(jnp.int32)
    count = jnp.sum(mask)

    def block(b, carry):
        assignment, faults = carry
        place = b * size + jnp.arange(size)
        ids = jnp.where(
            place < count, queue[jnp.minimum(place, data.num_clients - 1)], data.num_clients
        )
        cohort = make_cohort(ids, data, local)
        gid, more = choose(key, state, data, cohort)
        assignment = assignment.at[cohort.ids].set(gid.astype(jnp.int32), mode="drop")
        return assignment, add_fault_counts(faults, more)

    return lax.fori_loop(0, -(-count // size), block, (state.assignment, no_faults()))


def on_shift(
    choose: ChooseFn,
    local: Local,
    detect: DetectFn,
    units_each: int = 0,
    charge: ChargeFn = charge_detected,
) -> MigrateFn:
    """Clients already met whose label counts are detected to have shifted are assigned
    anew at once (FlexCFL, section 3.4 and eq. 9). Each that `charge` names costs
    `units_each` models down.
    """
    local = local.resolve()

    def migrate(key, state: State, data: FederatedData):
        if not data.has_drift:
            return state, make_report()
        seen = state.memory.shift_reference
        counts = label_counts(data.train, data.owner, data.y, data.num_classes)
        met = state.assignment >= 0
        detected = met & detect(counts, seen.reference, seen.initial_size)
        assignment, faults = reassign(choose, local, key, state, data, detected)
        moved = jnp.sum(detected & (assignment != state.assignment))
        reference = jnp.where(detected[:, None], counts, seen.reference)
        memory = state.memory.replace(shift_reference=seen.replace(reference=reference))
        sent = make_traffic(units_down=units_each * jnp.sum(charge(detected, met, data)))
        state = state.replace(assignment=assignment, memory=memory)
        return state, make_report(sent, moved, faults)

    return migrate
