"""What a step of a round reports: what was sent, who moved, what failed."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.system.counts import add_counts, make_count
from fedjax_cfl.system.faults import add_fault_counts, no_faults
from fedjax_cfl.system.traffic import add_traffic, make_traffic
from fedjax_cfl.types import FaultCounts, Report, Traffic


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
