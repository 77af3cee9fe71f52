"""What a step of a round reports: what was sent, who moved, what failed.

Traffic is whole models (the papers' unit u) and 4-byte words of everything else (FlexCFL Fig. 6).
A count is two uint32 words, (high, low): exact up to 2^64 without 64-bit JAX.

What is called several times in a round is jitted here, so that it is traced once for each shape.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.types import Cohort, FaultCounts, Params, Report, Traffic


def make_count(value: ArrayLike) -> jax.Array:
    """Returns whole numbers [...] from 0 to 2^31 - 1 as counts [..., 2] uint32."""
    low = jnp.asarray(value).astype(jnp.uint32)
    return jnp.stack([jnp.zeros_like(low), low], axis=-1)


def add_counts(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the sums of counts [..., 2]."""
    return jnp.stack(_add_words(_words_of(one), _words_of(other)), axis=-1)


def sum_counts(counts: jax.Array) -> jax.Array:
    """Returns the sum [2] of counts [..., 2] over all leading axes."""
    zero = jnp.zeros((), jnp.uint32)
    axes = tuple(range(counts.ndim - 1))
    return jnp.stack(lax.reduce(_words_of(counts), (zero, zero), _add_words, axes))


def count_to_int(count: ArrayLike) -> int:
    """Returns a count [2] as a Python integer."""
    high, low = (int(word) for word in np.asarray(count))
    return (high << 32) + low


def count_to_float(count: jax.Array) -> jax.Array:
    """Returns counts [..., 2] as float32 [...], with its rounding."""
    high, low = _words_of(count)
    return high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)


def _words_of(count: jax.Array) -> tuple[jax.Array, jax.Array]:
    return count[..., 0], count[..., 1]


def _add_words(one, other):
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]).astype(jnp.uint32), low


@jax.jit
def make_traffic(
    units_down: ArrayLike = 0,
    units_up: ArrayLike = 0,
    words_down: ArrayLike = 0,
    words_up: ArrayLike = 0,
) -> Traffic:
    """Returns one entry of the ledger. Each argument is a whole number, or one for each
    slot of a cohort [S].
    """
    return Traffic(*(make_count(count) for count in (units_down, units_up, words_down, words_up)))


@jax.jit
def add_traffic(*entries: Traffic) -> Traffic:
    """Returns the sum of ledger entries, over their slots too."""
    first, *rest = (jax.tree.map(sum_counts, entry) for entry in entries)
    for entry in rest:
        first = jax.tree.map(add_counts, first, entry)
    return first


def slot_bytes(entry: Traffic, model_bytes: int) -> jax.Array:
    """Returns the bytes [S] float32, down and up together, of an entry's slots; 0 if it has none.
    What is of the whole step is no slot's.
    """

    def of_slots(count: jax.Array) -> jax.Array:
        return jnp.zeros(()) if count.ndim == 1 else count_to_float(count)

    units, words = (
        of_slots(down) + of_slots(up)
        for down, up in ((entry.units_down, entry.units_up), (entry.words_down, entry.words_up))
    )
    return units * model_bytes + 4.0 * words


def count_bytes(entry: Traffic, model_bytes: int) -> tuple[int, int]:
    """Returns (bytes down, bytes up) as Python integers, which cannot overflow."""
    units_down, units_up, words_down, words_up = (
        count_to_int(count)
        for count in (entry.units_down, entry.units_up, entry.words_down, entry.words_up)
    )
    return units_down * model_bytes + 4 * words_down, units_up * model_bytes + 4 * words_up


def model_bytes_of(groups: Params) -> int:
    """Returns the bytes of one of the models [m, ...]."""
    return sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(groups))


def sum_fault_counts(each: FaultCounts, cohort: Cohort) -> FaultCounts:
    """Returns the counts of a cohort, given those of `each` client [S]."""
    bad = each.nonfinite > 0
    # the first in the order of selection, whatever the slots
    first = jnp.argmin(jnp.where(bad, cohort.rank, cohort.rank.size))
    culprit = jnp.where(jnp.any(bad), each.first_nonfinite[first], -1)
    return FaultCounts(each.dropped.sum(), each.nonfinite.sum(), each.byzantine.sum(), culprit)


def no_faults() -> FaultCounts:
    """Returns the counts of a cohort in which nothing went wrong."""
    zero = jnp.zeros((), jnp.int32)
    return FaultCounts(zero, zero, zero, jnp.full(2, -1, jnp.int32))


def sum_rounds(counts: FaultCounts) -> FaultCounts:
    """Returns the sum of counts over their leading axis, which may be that of rounds.

    `first_nonfinite` is taken from the first entry that has a bad update; -1 if none has.
    """
    total = jax.tree.map(lambda leaf: leaf.sum(0), counts)
    first = jnp.argmax(counts.first_nonfinite[:, 0] >= 0)
    return total.replace(first_nonfinite=counts.first_nonfinite[first])


def add_fault_counts(*counts: FaultCounts) -> FaultCounts:
    """Returns the sum of counts. Its `first_nonfinite` is that of the first of them that has a
    bad update.
    """
    return sum_rounds(jax.tree.map(lambda *each: jnp.stack(each), *counts))


def make_report(
    traffic: Traffic | None = None,
    migrated: ArrayLike = 0,
    fault_counts: FaultCounts | None = None,
    reclustered: ArrayLike = 0,
    samples: ArrayLike = 0,
    early: Traffic | None = None,
) -> Report:
    """Returns a report. By default nothing was sent or inferred, no client changed group and
    nothing failed.

    Args: `traffic` is what was sent, of the whole step or of each client [K] or slot [S], None:
    nothing (what a slot sends up arrives with its update, or not at all); `migrated` [] counts
    the clients that changed group; `fault_counts` is what went wrong, None: nothing;
    `reclustered` [] counts the clusterings of all clients; `samples`, [], [K] or [S], are those
    that clients inferred, where one that is trained on counts as `clock.TRAIN_TO_INFERENCE`;
    `early` is like `traffic`, but arrives whatever happens to the update: clients send it before
    they train.
    """
    return Report(
        make_traffic() if traffic is None else traffic,
        make_traffic() if early is None else early,
        jnp.asarray(migrated, jnp.int32),
        jnp.asarray(reclustered, jnp.int32),
        no_faults() if fault_counts is None else fault_counts,
        jnp.asarray(samples, jnp.float32),
    )


def add_to_report(report: Report, sent: Traffic) -> Report:
    """Returns a report to which the traffic `sent` is added, each of the whole step or of each
    slot [S]. Of the two, what is of the whole step becomes `early`: no slot's update decides
    whether it arrives.
    """

    def of_slots(one, other):
        return add_counts(one, other) if one.ndim == other.ndim else max(one, other, key=jnp.ndim)

    def of_step(one, other):
        return make_count(0) if one.ndim == other.ndim else min(one, other, key=jnp.ndim)

    def into_first_slot(early, whole):
        slots = jnp.zeros_like(early)
        return add_counts(early, whole if early.ndim == whole.ndim else slots.at[0].set(whole))

    whole = jax.tree.map(of_step, report.traffic, sent)
    return report.replace(
        traffic=jax.tree.map(of_slots, report.traffic, sent),
        early=jax.tree.map(into_first_slot, report.early, whole),
    )


def count_arrived(report: Report, arrived: jax.Array) -> Report:
    """Returns a cohort's report in which nothing goes up with updates that do not arrive:
    `arrived` [S] bool says whose does. What is of the whole step is no slot's, and stays.
    """

    def keep(count):
        return count if count.ndim == 1 else jnp.where(arrived[:, None], count, 0)

    sent = report.traffic
    return report.replace(
        traffic=sent.replace(units_up=keep(sent.units_up), words_up=keep(sent.words_up))
    )


@jax.jit
def add_reports(*reports: Report) -> Report:
    """Returns the sum of reports, over their clients and slots too; `early` becomes part of the
    traffic. Its `first_nonfinite` is that of the first report that has a bad update.
    """
    return Report(
        add_traffic(*(entry for report in reports for entry in (report.traffic, report.early))),
        make_traffic(),
        jnp.asarray(sum(report.migrated for report in reports), jnp.int32),
        jnp.asarray(sum(report.reclustered for report in reports), jnp.int32),
        add_fault_counts(*(report.fault_counts for report in reports)),
        jnp.asarray(sum(report.samples.sum() for report in reports), jnp.float32),
    )
