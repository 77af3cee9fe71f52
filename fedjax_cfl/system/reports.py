"""What a step of a round reports: what was sent, who moved, what failed."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.system.counts import add_counts
from fedjax_cfl.system.faults import add_fault_counts, no_faults
from fedjax_cfl.system.traffic import add_traffic, make_traffic
from fedjax_cfl.types import FaultCounts, Report, Traffic


def make_report(
    traffic: Traffic | None = None,
    migrated: ArrayLike = 0,
    fault_counts: FaultCounts | None = None,
    reclustered: ArrayLike = 0,
    samples: ArrayLike = 0,
) -> Report:
    """Returns a report. By default nothing was sent or inferred, no client changed group and
    nothing failed.

    Args: `traffic` is what was sent, of the whole step or of each client [K] or slot [S], None:
    nothing; `migrated` [] counts the clients that changed group; `fault_counts` is what went
    wrong, None: nothing; `reclustered` [] counts the clusterings of all clients; `samples`, [],
    [K] or [S], are those that clients inferred, where one that is trained on counts as
    `clock.TRAIN_TO_INFERENCE`.
    """
    return Report(
        make_traffic() if traffic is None else traffic,
        jnp.asarray(migrated, jnp.int32),
        jnp.asarray(reclustered, jnp.int32),
        no_faults() if fault_counts is None else fault_counts,
        jnp.asarray(samples, jnp.float32),
    )


def add_to_report(report: Report, sent: Traffic) -> Report:
    """Returns a report to which the traffic `sent` is added, each of the whole step or of each
    slot [S]. Of the two, what is of the whole step is put into the first slot of the other.
    """

    def add(one, other):
        if one.ndim > other.ndim:
            one, other = other, one
        whole = one if one.ndim == other.ndim else jnp.zeros_like(other).at[0].set(one)
        return add_counts(whole, other)

    return report.replace(traffic=jax.tree.map(add, report.traffic, sent))


def add_reports(*reports: Report) -> Report:
    """Returns the sum of reports, over their clients and slots too. Its `first_nonfinite` is
    that of the first report that has a bad update.
    """
    return Report(
        add_traffic(*(report.traffic for report in reports)),
        jnp.asarray(sum(report.migrated for report in reports), jnp.int32),
        jnp.asarray(sum(report.reclustered for report in reports), jnp.int32),
        add_fault_counts(*(report.fault_counts for report in reports)),
        jnp.asarray(sum(report.samples.sum() for report in reports), jnp.float32),
    )
