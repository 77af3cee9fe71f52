"""Moving clients whose data have changed, before a round's selection (a `MigrateFn`, see
`hooks`).

`state.memory.shift_reference` holds the label counts of every client's data at the time
when it was last assigned.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import make_cohort
from fedjax_cfl.client.local import Local
from fedjax_cfl.clustering.shift_detection import DetectFn
from fedjax_cfl.data.federated import train_label_counts
from fedjax_cfl.data.shuffle import put_first
from fedjax_cfl.round.hooks import AssignFn, MigrateFn, Start, StartFn
from fedjax_cfl.system.faults import add_fault_counts
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.traffic import make_traffic
from fedjax_cfl.types import FederatedData, Key, Report, State

# clients reassigned at once: bounds the updates in memory, however many clients have shifted
CLIENT_BLOCK = 32


class ShiftReference(struct.PyTreeNode):
    """What `DetectFn` compares the present label counts with."""

    # [K, C] int32, training samples per label when the client was last assigned
    reference: jax.Array
    initial_size: jax.Array  # [K] int32, training samples at the start of the run


def init_reference(data: FederatedData) -> ShiftReference:
    """Returns the reference at the start of a run."""
    return ShiftReference(train_label_counts(data), data.train.size)


def with_shift_reference(start: StartFn) -> StartFn:
    """Sets the field `shift_reference` of a start's memory, which `on_shift` needs."""

    def start_with_reference(key: Key, data: FederatedData) -> Start:
        initial = start(key, data)
        return initial._replace(memory=initial.memory.replace(shift_reference=init_reference(data)))

    return start_with_reference


class ChargeFn(Protocol):
    """Says which clients [K] bool pay for a migration: `detected` [K] bool are the clients
    whose shift was detected, `met` [K] bool those that had a group before.
    """

    def __call__(self, detected: jax.Array, met: jax.Array, data: FederatedData) -> jax.Array: ...


def charge_detected(detected: jax.Array, met: jax.Array, data: FederatedData) -> jax.Array:
    """Charges every client whose shift was detected (a `ChargeFn`)."""
    return detected


def charge_swapped(detected: jax.Array, met: jax.Array, data: FederatedData) -> jax.Array:
    """Charges every client with a group whose data changed, as Fig. 6 of FlexCFL does (a
    `ChargeFn`).
    """
    return met & data.shifted


def reassign(
    choose: AssignFn, local: Local, key: Key, state: State, data: FederatedData, mask: jax.Array
) -> tuple[jax.Array, Report]:
    """Chooses new groups for some clients, in blocks.

    Returns the assignment [K] of all clients, and a report of what went wrong and how many
    samples each client [K] inferred.

    Args: `choose` names the groups of a block of clients at a time, and draws with `key`;
    `mask` [K] bool are the clients to reassign.
    """
    size = min(CLIENT_BLOCK, data.num_clients)
    queue = put_first(mask)
    count = jnp.sum(mask)

    def block(b, carry):
        assignment, report = carry
        place = b * size + jnp.arange(size)
        ids = jnp.where(
            place < count, queue[jnp.minimum(place, data.num_clients - 1)], data.num_clients
        )
        cohort = make_cohort(ids, data, local.execution)
        gid, more = choose(key, state, data, cohort)
        assignment = cohort.put(assignment, gid.astype(jnp.int32))
        return assignment, report.replace(
            fault_counts=add_fault_counts(report.fault_counts, more.fault_counts),
            samples=report.samples.at[cohort.ids].add(more.samples, mode="drop"),
        )

    begin = state.assignment, make_report(samples=jnp.zeros(data.num_clients))
    return lax.fori_loop(0, -(-count // size), block, begin)


def on_shift(
    choose: AssignFn,
    local: Local,
    detect: DetectFn,
    units_each: ArrayLike = 0,
    charge: ChargeFn = charge_detected,
) -> MigrateFn:
    """Reassigns clients that have a group, before the round, when a shift of their label counts
    is detected (FlexCFL, section 3.4 and eq. 9).

    Args: `choose` names the new group of each; `detect` says whose data have shifted; each
    client that `charge` names costs `units_each` models down.
    """

    def migrate(key: Key, state: State, data: FederatedData) -> tuple[State, Report]:
        if not data.has_drift:
            return state, make_report()
        before = state.memory.shift_reference
        counts = train_label_counts(data)
        met = state.assignment >= 0
        detected = met & detect(counts, before.reference, before.initial_size)
        assignment, report = reassign(choose, local, key, state, data, detected)
        migrated = jnp.sum(detected & (assignment != state.assignment))
        reference = jnp.where(detected[:, None], counts, before.reference)
        memory = state.memory.replace(shift_reference=before.replace(reference=reference))
        sent = make_traffic(units_down=units_each * charge(detected, met, data))
        state = state.replace(assignment=assignment, memory=memory)
        return state, report.replace(traffic=sent, migrated=migrated)

    return migrate
