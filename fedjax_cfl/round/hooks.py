"""The parts of a round: one `Protocol` for each, with its shapes. `engine.federated`
composes them.

Axis letters as in `types.py`. `gid` [S] int32 is the group of each slot of a cohort.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.faults import add_fault_counts, no_faults
from fedjax_cfl.round.local import Work
from fedjax_cfl.round.traffic import add_traffic, make_traffic
from fedjax_cfl.types import (
    Cohort,
    FaultCounts,
    FederatedData,
    Key,
    Params,
    Report,
    State,
    Traffic,
    Upload,
)


class Start(NamedTuple):
    """What a method begins with."""

    groups: Params  # [m, ...]
    assignment: jax.Array | None = None  # [K], None: nobody has met the server
    memory: Any = ()
    report: Report | None = None  # what was sent and what went wrong before round 0
    active: jax.Array | None = None  # [m] bool, None: all groups are in use


class StartFn(Protocol):
    """Makes the first group models; they fix m."""

    def __call__(self, key: Key, data: FederatedData) -> Start: ...


class MigrateFn(Protocol):
    """Changes groups before a round's selection: clients move, groups are founded anew."""

    def __call__(self, key: Key, state: State, data: FederatedData) -> tuple[State, Report]: ...


class AssignFn(Protocol):
    """Names the group [S] that each client of the cohort trains. The report's traffic may
    be that of each slot.
    """

    def __call__(
        self, key: Key, state: State, data: FederatedData, cohort: Cohort
    ) -> tuple[jax.Array, Report]: ...


class PrepareFn(Protocol):
    """Adds to the work of the cohort: fewer steps, or what a client needs besides the
    model.
    """

    def __call__(
        self, key: Key, state: State, data: FederatedData, cohort: Cohort, work: Work
    ) -> Work: ...


class ClientFn(Protocol):
    """Trains ONE client from models [m, ...]; `over_clients` makes a cohort of it."""

    def __call__(
        self,
        client: jax.Array,  # [] int32
        bucket: jax.Array,  # [] int32, the size class that holds all clients of its chunk
        data: FederatedData,
        shared: tuple[Key, Params],  # the round's key, the models [m, ...]
        work: Work,  # of this client, without the axis S
    ) -> Upload: ...


class RegroupFn(Protocol):
    """Moves clients to other groups once their updates are known. It may change anything
    of the state but the cohort's assignment, which becomes the returned gid [S].
    """

    def __call__(
        self,
        key: Key,
        state: State,
        data: FederatedData,
        cohort: Cohort,
        gid: jax.Array,
        upload: Upload,
    ) -> tuple[State, jax.Array]: ...


class AggregateFn(Protocol):
    """Reduces the updates to one step [m, ...] per group and the mass [m] behind it. A
    group of mass 0 keeps its model.
    """

    def __call__(
        self, upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
    ) -> tuple[Params, jax.Array]: ...


class FinishFn(Protocol):
    """Ends a round: mixes the new group models, or remembers what the cohort sent.
    `before` is the state that `aggregate` was given; `state` has the new models.
    """

    def __call__(
        self, state: State, before: State, cohort: Cohort, gid: jax.Array, upload: Upload
    ) -> tuple[State, Traffic]: ...


class Hooks(NamedTuple):
    """The parts of a method. Only `solve` has no default."""

    solve: ClientFn  # trains one client
    start: StartFn | None = None  # first group models; None: one random model
    migrate: MigrateFn | None = None  # before selection; None: nobody moves
    # the cohort's groups; None: all share group 0. A method that has it is clustered: it serves
    # and evaluates only clients that it has met.
    assign: AssignFn | None = None
    prepare: PrepareFn | None = None  # None: every client does all of its work
    regroup: RegroupFn | None = None  # once updates are known; None: clients stay
    aggregate: AggregateFn = weighted_mean  # updates -> one step per group
    # an optax transformation of each group's pseudo-gradient -step; None: add the step
    server: optax.GradientTransformation | None = None
    finish: FinishFn | None = None  # after the server step; None: nothing more
    # (key, K) -> the clients whose samples `start` reads, for methods whose rounds read no
    # samples but the cohort's (`no_clients`: none); None: anybody's may be read
    start_clients: Callable[[Key, int], jax.Array] | None = None


def make_report(
    traffic: Traffic | None = None,
    migrated: ArrayLike = 0,
    fault_counts: FaultCounts | None = None,
) -> Report:
    """Returns a report; by default nothing was sent, nobody moved and nothing failed."""
    return Report(
        make_traffic() if traffic is None else traffic,
        jnp.asarray(migrated, jnp.int32),
        no_faults() if fault_counts is None else fault_counts,
    )


def add_reports(*reports: Report) -> Report:
    """Returns the sum of reports; the first client with a bad update is that of the first
    report with one.
    """
    return Report(
        add_traffic(*(report.traffic for report in reports)),
        jnp.asarray(sum(report.migrated for report in reports), jnp.int32),
        add_fault_counts(*(report.fault_counts for report in reports)),
    )


def chain_finish(*parts: FinishFn) -> FinishFn:
    """Returns the finish that runs others one after another."""

    def finish(state, before, cohort, gid, upload):
        sent = []
        for part in parts:
            state, traffic = part(state, before, cohort, gid, upload)
            sent.append(traffic)
        return state, add_traffic(*sent)

    return finish
