"""The simulated system of a run: which clients take part, what fails, how long a round takes,
and what it sends. Methods are not given it: those that read the selection, or what is done with
updates that are not finite (`clustering.assign.train_without_recording`), were made with it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_cfl.client.local import Work
from fedjax_cfl.keys import BYZANTINE, FAULTS, SELECT
from fedjax_cfl.system import clock as clocks
from fedjax_cfl.system import faults, reports
from fedjax_cfl.system.clock import Clock
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.system.select import full_participation
from fedjax_cfl.types import (
    Bill,
    Cohort,
    FaultCounts,
    FederatedData,
    Key,
    Report,
    Selection,
    State,
    Upload,
)
from fedjax_cfl.validation import check_settings


class RoundLog(NamedTuple):
    """What one round did apart from changing the state, in the order in which it is known."""

    shifted: jax.Array  # [] int32, clients whose data changed at the start of the round
    migration: Report  # before selection, of all clients [K]
    poll: Bill  # of all clients [K], for the selection
    planned: tuple[Report, ...] = ()  # of each slot [S], before it trained
    # the state whose models were sent, and the group [S] whose model each client got
    sent_state: State | None = None
    sent_group: jax.Array | None = None
    training: Report | None = None  # models sent, samples inferred in it, and faults
    # [S] float32, how long each client took; None: time is not simulated
    seconds: jax.Array | None = None
    duration: jax.Array | None = None  # [n] float32, simulated seconds of the round on each clock
    late: jax.Array | None = None  # [] int32, clients that answered after its end


class System(NamedTuple):
    """What happens to clients; by default nothing fails, and no time passes."""

    select: Selection  # who takes part
    faults: Faults = Faults()
    clock: Clock | None = None  # simulated time; None: none passes

    def start_time(self, num_groups: int) -> jax.Array:
        """Returns the time before round 0, see `State.clock_ms`."""
        each = self.clock is not None and self.clock.per_group
        return reports.make_count(jnp.zeros(num_groups, jnp.int32) if each else 0)

    def choose(self, keys: Key, state: State, data: FederatedData) -> tuple[jax.Array, Bill]:
        """Returns the clients [k] that the selection takes, and what all clients [K] did before
        that.
        """
        key, select = keys[SELECT], self.select
        ids = select.select(key, state.selection, state, data)
        return ids, select.poll(key, state, data) if select.poll else reports.no_bill()

    def apply_stragglers(self, keys: Key, cohort: Cohort, work: Work) -> Work:
        """Returns the work that each client completes: stragglers take fewer steps."""
        fraction = faults.apply_stragglers(self.faults, keys[FAULTS], cohort, work.step_fraction)
        return work._replace(step_fraction=fraction)

    def perturb(self, keys: Key, data: FederatedData) -> tuple[FederatedData, tuple]:
        """Returns the data that clients train on, and what `faults.with_faults` needs to change
        what they send.
        """
        attackers = faults.draw_byzantine(self.faults, keys[BYZANTINE], data.num_clients)
        return faults.flip_labels(self.faults, attackers, data), (keys[FAULTS], attackers)

    def deliver(
        self,
        data: FederatedData,
        cohort: Cohort,
        upload: Upload,
        counts: FaultCounts,
        log: RoundLog,
        ships_model: bool,
        model_bytes: int,
    ) -> tuple[Upload, RoundLog]:
        """Returns the updates that reach the server in time, and what the training took. What a
        client was planned to send up with its update is counted only if it answers.

        The update of a late client is not used; it is counted as sent, and the client as late. A
        client's time includes the traffic and the inference of what was planned, but not a model
        that it received before it was selected.

        Args: `counts` is what went wrong with each slot [S]; `ships_model` is False where what a
        client receives is in the plan's reports already; `model_bytes` is the size of what is
        sent of one model.
        """
        clock, clients, state = self.clock, data.num_clients, log.sent_state
        assert state is not None and log.sent_group is not None  # the cohort has been trained
        real = cohort.ids < clients
        answered, downloads = real & (counts.dropped == 0), real & ships_model
        if log.poll.samples.size:  # who was sent its model by the poll is not sent it again
            downloads &= cohort.take(log.poll.units_down) == 0
        inferred = 0 if upload.inferred is None else upload.inferred
        bill = reports.make_bill(downloads, answered, samples=inferred)
        upload = faults.clear_extra(upload, counts.nonfinite > 0)
        waited = clocks.wait_before(clock, state, log.migration, log.poll, model_bytes)
        duration, late, seconds = waited, jnp.zeros((), jnp.int32), None
        if clock is not None:
            parts = [reports.make_report(bill), *log.planned]
            seconds = clocks.client_seconds(clock, cohort, upload, parts, model_bytes, clients)
            duration, behind = clocks.end_round(
                clock, cohort, log.sent_group, answered, seconds, waited, clients
            )
            late, upload = jnp.sum(behind).astype(jnp.int32), faults.drop_updates(behind, upload)
        report = reports.make_report(bill, fault_counts=reports.sum_fault_counts(counts, cohort))
        planned = tuple(
            each.replace(bill=reports.count_arrived(each.bill, answered)) for each in log.planned
        )
        log = log._replace(planned=planned, training=report)
        return upload, log._replace(seconds=seconds, duration=duration, late=late)

    def close(self, state: State, log: RoundLog) -> tuple[State, dict[str, Any]]:
        """Returns the state after the round's traffic and time, and what of `Info` was reported."""
        assert log.sent_state is not None and log.duration is not None and log.late is not None
        assert log.training is not None
        parts = [log.migration, *log.planned, log.training]
        failed = (report.fault_counts for report in parts)
        reported = {
            "shifted": log.shifted,
            "migrated": sum(report.migrated for report in parts),
            "reclustered": sum(report.reclustered for report in parts),
            "fault_counts": reports.add_fault_counts(state.start_faults, *failed),
            "late": log.late,
            "seconds": log.duration.max(),
        }
        state = state.replace(
            traffic=reports.add_to_ledger(state.traffic, *reports.list_bills(parts), log.poll),
            clock_ms=clocks.advance_clock(state.clock_ms, log.duration),
            start_faults=reports.no_faults(),
        )
        return clocks.merge_clocks(self.clock, log.sent_state, state), reported


SystemLike = System | Selection  # a selection alone: nothing fails, and no time passes


def use_all_clients(given: SystemLike) -> System:
    """Returns the system in which all clients take part in every round."""
    return as_system(given)._replace(select=full_participation())


def as_system(given: SystemLike) -> System:
    """Returns a system as it is, and a selection as the system in which nothing fails.

    Raises InputError for faults that are not allowed.
    """
    system = System(given) if isinstance(given, Selection) else given
    check_settings(Faults, system.faults._asdict(), "faults")
    return system
