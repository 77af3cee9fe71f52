"""Clients whose data have changed: which they are, and how they move to other groups before a
round's selection (a `MigrateFn`, see `method`).

Detectors are functions (counts, reference, initial_size) -> detected [K] bool. counts and
reference [K, C] are each client's training samples per label, now and when it was last assigned
(the row `SHIFT_REFERENCE`); initial_size [K] its training samples at the start. FlexCFL
(https://arxiv.org/abs/2108.09749), section 3.4: detected where the Wasserstein distance
of now and then exceeds tau = 0.2 n / C (eq. 9).

`counts_as_samples` is eq. 9 as printed: tau is in samples, and only the distance of
counts passed as samples, as the paper's code does, has that unit (D11). Shares of C
labels are at most C - 1 apart, so that no client of 5 C^2 samples would be detected.

Differs from the paper: `tv` is the default and means what the text says, 20 % of the
data changed.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike
from typing_extensions import TypeAliasType

from fedjax_cfl.client.cohort import make_cohort
from fedjax_cfl.client.local import Local
from fedjax_cfl.data.federated import check_classes, to_shares, train_label_counts
from fedjax_cfl.keys import put_first
from fedjax_cfl.method import AssignFn, MigrateFn, Round, Start, StartFn
from fedjax_cfl.system.reports import add_bills, add_fault_counts, make_bill, make_report
from fedjax_cfl.types import FederatedData, Key, Report, State

# a distance is above its threshold only if it is so by more than this: 2 of 10 samples are not
# more than 20 %
ROUNDING = 1e-6

# clients reassigned at once: bounds the updates in memory, however many clients have shifted
CLIENT_BLOCK = 32


# (counts, reference, initial_size) -> which clients [K] bool have shifted, see the module
DetectFn = TypeAliasType("DetectFn", Callable[[jax.Array, jax.Array, jax.Array], jax.Array])
DetectorName = Literal["tv", "counts_as_samples", "any_change"]


def tv(
    counts: jax.Array, reference: jax.Array, initial_size: jax.Array, threshold: ArrayLike = 0.2
) -> jax.Array:
    """Detects a total variation distance of the label shares above `threshold` (a fraction):
    the share of the data that changed its label.

    A renaming of labels counts as a shift, another number of samples does not.
    """
    return total_variation(counts, reference) > threshold + ROUNDING


def any_change(counts: jax.Array, reference: jax.Array, initial_size: jax.Array) -> jax.Array:
    """Detects every change of the label shares: who reports drift in Fielding
    (https://arxiv.org/abs/2411.01580), so that rules of moving can be compared alone.
    """
    return tv(counts, reference, initial_size, 0.0)


def counts_as_samples(
    counts: jax.Array, reference: jax.Array, initial_size: jax.Array, threshold: ArrayLike = 0.2
) -> jax.Array:
    """Detects sum_k |c_(k) - r_(k)| > threshold * n for sorted counts c and r: eq. 9 as the
    FlexCFL code computes it.

    A renaming of labels does not count as a shift, another number of samples does.
    """
    # both sides of eq. 9 times C, so that they are whole numbers
    gaps = jnp.abs(jnp.sort(counts, axis=1) - jnp.sort(reference, axis=1)).astype(jnp.float32)
    return jnp.sum(gaps, axis=1) > threshold * initial_size


DETECTORS: dict[str, DetectFn] = {
    "tv": tv,
    "counts_as_samples": counts_as_samples,
    "any_change": any_change,
}


def total_variation(counts: jax.Array, reference: jax.Array) -> jax.Array:
    """Returns 1/2 sum_k |c_k / sum c - r_k / sum r| [K], from 0 to 1; 0 for a client without
    samples, infinity for one that got its first ones.
    """
    distance = 0.5 * jnp.sum(jnp.abs(to_shares(counts) - to_shares(reference)), axis=1)
    distance = jnp.where(reference.sum(axis=1) > 0, distance, jnp.inf)
    return jnp.where(counts.sum(axis=1) > 0, distance, 0.0)


SHIFT_REFERENCE = "shift_reference"


class ShiftReference(struct.PyTreeNode):
    """What `DetectFn` compares the present label counts with, the row `SHIFT_REFERENCE`."""

    # [K, C] int32, training samples per label when the client was last assigned
    reference: jax.Array
    initial_size: jax.Array  # [K] int32, training samples at the start of the run


def init_reference(data: FederatedData) -> ShiftReference:
    """Returns the reference at the start of a run; without classes one that `on_shift` refuses."""
    if not data.num_classes:
        return ShiftReference(jnp.zeros((data.num_clients, 0), jnp.int32), data.train.size)
    return ShiftReference(train_label_counts(data), data.train.size)


def with_shift_reference(start: StartFn) -> StartFn:
    """Adds the row `SHIFT_REFERENCE` of clients to a start, which `on_shift` needs."""

    def start_with_reference(key: Key, data: FederatedData) -> Start:
        initial = start(key, data)
        return initial._replace(rows={**initial.rows, SHIFT_REFERENCE: init_reference(data)})

    return start_with_reference


# (detected [K] bool, whose shift was; met [K] bool, that had a group before; data) -> which clients
# [K] bool pay for a migration
ChargeFn = TypeAliasType("ChargeFn", Callable[[jax.Array, jax.Array, FederatedData], jax.Array])


def charge_detected(detected: jax.Array, met: jax.Array, data: FederatedData) -> jax.Array:
    """Charges every client whose shift was detected (a `ChargeFn`)."""
    return detected


def charge_swapped(detected: jax.Array, met: jax.Array, data: FederatedData) -> jax.Array:
    """Charges every client with a group whose data changed, as Fig. 6 of FlexCFL does (a
    `ChargeFn`).
    """
    return met & data.shifted


def reassign(choose: AssignFn, local: Local, r: Round, mask: jax.Array) -> tuple[jax.Array, Report]:
    """Chooses new groups for some clients, in blocks.

    Returns the assignment [K] of all clients, and a report of what went wrong and what each
    client [K] pays by the bills of `choose`.

    Args: `choose` names the groups of a block of clients at a time, and draws with `r.key`;
    `mask` [K] bool are the clients to reassign.
    """
    state, data = r.state, r.data
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
        gid, more = choose(r._replace(cohort=cohort))
        assignment = cohort.put(assignment, gid.astype(jnp.int32))
        paid = add_bills(make_bill(jnp.zeros_like(cohort.ids)), more.bill, more.early)
        return assignment, report.replace(
            bill=jax.tree.map(
                lambda each, more: each.at[cohort.ids].add(more, mode="drop"), report.bill, paid
            ),
            fault_counts=add_fault_counts(report.fault_counts, more.fault_counts),
        )

    begin = state.assignment, make_report(make_bill(jnp.zeros(data.num_clients)))
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

    def migrate(r: Round) -> tuple[State, Report]:
        state, data = r.state, r.data
        if not data.has_drift:
            return state, make_report()
        remedy = "use drift=none, or a method that does not migrate, as ifca"
        check_classes(data, "a drift under a method that detects shifts", remedy)
        before = state.rows[SHIFT_REFERENCE]
        counts = train_label_counts(data)
        met = state.assignment >= 0
        detected = met & detect(counts, before.reference, before.initial_size)
        assignment, report = reassign(choose, local, r, detected)
        migrated = jnp.sum(detected & (assignment != state.assignment))
        reference = jnp.where(detected[:, None], counts, before.reference)
        after = {SHIFT_REFERENCE: before.replace(reference=reference)}
        sent = make_bill(units_down=units_each * charge(detected, met, data))
        state = state.replace(assignment=assignment).put_rows(after)
        return state, report.replace(bill=add_bills(report.bill, sent), migrated=migrated)

    return migrate
