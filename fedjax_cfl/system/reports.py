"""What a step of a round reports: who pays what, who moved, what failed.

Traffic is whole models (the papers' unit u) and 4-byte words of everything else (FlexCFL Fig. 6).
Only the totals of a run are counts of two uint32 words, (high, low): exact up to 2^64 without
64-bit JAX.

What is called several times in a round is jitted here, so that it is traced once for each shape.
"""

from collections.abc import Iterable
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.types import Bill, Cohort, FaultCounts, Params, Report, Traffic


def make_count(value: ArrayLike) -> jax.Array:
    """Returns whole numbers [...] from 0 to 2^31 - 1 as counts [..., 2] uint32."""
    low = jnp.asarray(value).astype(jnp.uint32)
    return jnp.stack([jnp.zeros_like(low), low], axis=-1)


def add_counts(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the sums of counts [..., 2]."""
    return jnp.stack(_add_words(_words_of(one), _words_of(other)), axis=-1)


def sum_counts(counts: jax.Array, kept: int = 0) -> jax.Array:
    """Returns the sums [..., 2] of counts [..., 2] over all leading axes but the last `kept`."""
    zero = jnp.zeros((), jnp.uint32)
    axes = tuple(range(counts.ndim - 1 - kept))
    return jnp.stack(lax.reduce(_words_of(counts), (zero, zero), _add_words, axes), axis=-1)


def count_to_int(count: ArrayLike) -> int:
    """Returns a count [2] as a Python integer."""
    high, low = (int(word) for word in np.asarray(count))
    return (high << 32) + low


def _words_of(count: jax.Array) -> tuple[jax.Array, jax.Array]:
    return count[..., 0], count[..., 1]


def _add_words(one, other):
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]).astype(jnp.uint32), low


@jax.jit
def make_bill(
    units_down: ArrayLike = 0,
    units_up: ArrayLike = 0,
    words_down: ArrayLike = 0,
    words_up: ArrayLike = 0,
    samples: ArrayLike = 0,
) -> Bill:
    """Returns a bill. Each argument is of all n payers [n], or one number for each of them; numbers
    alone are the bill of one.
    """
    given = units_down, units_up, words_down, words_up, samples
    shape = jnp.broadcast_shapes((1,), *map(jnp.shape, given))
    assert len(shape) == 1, f"a bill has one axis, that of its payers, not {shape}"
    kinds = *(jnp.int32,) * 4, jnp.float32
    each = zip(given, kinds, strict=True)
    return Bill(*(jnp.broadcast_to(one, shape).astype(kind) for one, kind in each))


def no_bill() -> Bill:
    """Returns the bill of nobody, n = 0."""
    return make_bill(jnp.zeros(0))


def add_bills(*bills: Bill) -> Bill:
    """Returns the sum of bills of the same payers, or of nobody."""
    paid = [bill for bill in bills if bill.samples.size]
    sizes = {bill.samples.size for bill in paid}
    assert len(sizes) < 2, f"bills of {sizes} payers: only those of the same payers add up"
    return jax.tree.map(lambda *each: sum(each), *paid) if paid else no_bill()


def list_bills(reports: Iterable[Report]) -> list[Bill]:
    """Returns the bills of reports that anybody pays."""
    bills = [bill for report in reports for bill in (report.bill, report.early)]
    return [bill for bill in bills if bill.samples.size]


def count_arrived(bill: Bill, arrived: jax.Array) -> Bill:
    """Returns a cohort's bill in which nothing goes up with updates that do not arrive: `arrived`
    [S] bool says whose does.
    """
    if not bill.samples.size:
        return bill
    return bill.replace(units_up=bill.units_up * arrived, words_up=bill.words_up * arrived)


def sum_bytes(bill: Bill, model_bytes: int) -> jax.Array:
    """Returns the bytes [n] float32 of each payer, down and up together."""
    pairs = (bill.units_down, bill.units_up), (bill.words_down, bill.words_up)
    units, words = (down.astype(jnp.float32) + up.astype(jnp.float32) for down, up in pairs)
    return units * model_bytes + 4.0 * words


def no_traffic() -> Traffic:
    """Returns the traffic of a run in which nothing was sent yet."""
    return Traffic(*jnp.zeros((4, 2), jnp.uint32))


@jax.jit
def add_to_ledger(traffic: Traffic, *bills: Bill) -> Traffic:
    """Returns the traffic, summed over leading axes if it has any, and that of bills together."""

    # all four are summed together: of each by itself the program would be a tenth larger
    names = [field.name for field in fields(Traffic)]
    before = jnp.stack([getattr(traffic, name) for name in names], axis=-2)
    paid = [jnp.stack([getattr(bill, name) for name in names], axis=-1) for bill in bills]
    counts = before.reshape(-1, len(names), 2), *map(make_count, paid)
    return Traffic(*sum_counts(jnp.concatenate(counts), kept=1))


def count_bytes(traffic: Traffic, model_bytes: int) -> tuple[int, int]:
    """Returns (bytes down, bytes up) as Python integers, which cannot overflow."""
    units_down, units_up, words_down, words_up = (
        count_to_int(count)
        for count in (traffic.units_down, traffic.units_up, traffic.words_down, traffic.words_up)
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
    bill: Bill | None = None,
    migrated: ArrayLike = 0,
    fault_counts: FaultCounts | None = None,
    reclustered: ArrayLike = 0,
    early: Bill | None = None,
) -> Report:
    """Returns a report. By default nobody pays, no client changed group and nothing failed.

    Args: `bill` is what was sent and inferred (what a slot sends up arrives with its update, or not
    at all); `migrated` [] counts the clients that changed group; `fault_counts` is what went wrong;
    `reclustered` [] counts the clusterings of all clients; `early` is like `bill`, but arrives
    whatever happens to the update: clients send it before they train.
    """
    return Report(
        no_bill() if bill is None else bill,
        no_bill() if early is None else early,
        jnp.asarray(migrated, jnp.int32),
        jnp.asarray(reclustered, jnp.int32),
        no_faults() if fault_counts is None else fault_counts,
    )
