"""Moving clients whose data have changed: functions (key, state, data) -> (state,
clients moved [], Traffic), before a round's selection.

`state.memory.shift_reference` remembers what every client's data looked like when it
was last assigned.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.clustering.shift_detection import counts_as_samples, label_w1, tv
from fedjax_cfl.data.federated import label_counts
from fedjax_cfl.round.cohort import make_cohort
from fedjax_cfl.round.local import Local
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.types import FederatedData, State

DETECTORS = {"tv": tv, "label_w1": label_w1, "counts_as_samples": counts_as_samples}
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


def reassign(choose, local: Local, key, state: State, data: FederatedData, mask):
    """Returns the assignment [K] after `choose(key, state, data, cohort)` -> [S] has
    grouped the clients of `mask` [K] anew, in blocks.
    """
    size = min(CLIENT_BLOCK, data.num_clients)
    queue = jnp.argsort(~mask, stable=True).astype(jnp.int32)
    count = jnp.sum(mask)

    def block(b, assignment):
        place = b * size + jnp.arange(size)
        ids = jnp.where(
            place < count, queue[jnp.minimum(place, data.num_clients - 1)], data.num_clients
        )
        cohort = make_cohort(ids, data, local)
        return assignment.at[cohort.ids].set(
            choose(key, state, data, cohort).astype(jnp.int32), mode="drop"
        )

    return lax.fori_loop(0, -(-count // size), block, state.assignment)


def on_shift(choose, local: Local, detector: str, units_each: int = 0, charge: str = "detected"):
    """Clients already met whose label counts are detected to have shifted are assigned
    anew at once (FlexCFL, section 3.4 and eq. 9).

    Each costs `units_each` models down; `charge` says for whom: detected (by the
    detector) | swapped (every client met whose data the shift touched, which is what
    Fig. 6 of FlexCFL adds up to).
    """
    detect, local = DETECTORS[detector], local.resolve()

    def migrate(key, state: State, data: FederatedData):
        if not data.has_drift:
            return state, jnp.zeros((), jnp.int32), make_traffic()
        seen = state.memory.shift_reference
        counts = label_counts(data.train, data.owner, data.y, data.num_classes)
        met = state.assignment >= 0
        flagged = met & detect(counts, seen.reference, seen.initial_size)
        assignment = reassign(choose, local, key, state, data, flagged)
        moved = jnp.sum(flagged & (assignment != state.assignment)).astype(jnp.int32)
        reference = jnp.where(flagged[:, None], counts, seen.reference)
        memory = state.memory.replace(shift_reference=seen.replace(reference=reference))
        charged = jnp.sum(flagged if charge == "detected" else met & data.shifted)
        return (
            state.replace(assignment=assignment, memory=memory),
            moved,
            make_traffic(units_down=units_each * charged),
        )

    return migrate
