"""The parts of a round: one `Protocol` for each, with its shapes. `engine.federated`
composes them.

Axis letters as in `types.py`. `gid` [S] int32 is the group of each slot of a cohort.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import optax

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Work
from fedjax_cfl.types import Cohort, FederatedData, Key, Params, Report, State, Upload

NOT_YET: Any = None  # of what a step of a round is not given


class Round(NamedTuple):
    """What a step of a round reads, `r` in all steps. Each field is as it is when the step begins;
    what a step does not have yet is None.
    """

    key: Key  # of this step in this round; use it once
    state: State
    data: FederatedData
    cohort: Cohort = NOT_YET  # from `assign` on
    work: Work = NOT_YET  # from `prepare` on; it has the cohort's groups
    upload: Upload = NOT_YET  # from `regroup` on: what reached the server in time
    before: State = NOT_YET  # in `finish`: the state that `aggregate` got

    @property
    def group(self) -> jax.Array:
        """The group of each slot, [S] int32 from 0 to m - 1."""
        return self.work.group


class Start(NamedTuple):
    """What a method starts with."""

    groups: Params  # [m, ...]
    assignment: jax.Array | None = None  # [K], None: no client has a group yet
    memory: Any = ()
    report: Report | None = None  # what was sent and what went wrong before round 0
    active: jax.Array | None = None  # [m] bool, None: all groups are in use


class StartFn(Protocol):
    """Makes the first group models; they fix m."""

    def __call__(self, key: Key, data: FederatedData) -> Start: ...


class MigrateFn(Protocol):
    """Changes groups before a round's selection: clients move, or new groups are founded.
    Under a clock, traffic and samples take time only if the report gives them for each client [K],
    not as a total.
    """

    def __call__(self, r: Round) -> tuple[State, Report]: ...


class AssignFn(Protocol):
    """Names the group [S] that each client of the cohort trains. Under a clock, traffic and
    samples take time only if the report gives them for each slot [S], not as a total.
    """

    def __call__(self, r: Round) -> tuple[jax.Array, Report]: ...


class MeetFn(Protocol):
    """Names groups as `AssignFn` does, and may change anything else in the state before the cohort
    trains: groups are founded or united by what its clients send first.

    The engine stores the groups of the cohort; the state has those of others, and of the cohort
    only those that it had already.
    """

    def __call__(self, r: Round) -> tuple[State, jax.Array, Report]: ...


class PrepareFn(Protocol):
    """Changes the work of the cohort: fewer steps, or something that a client needs in addition
    to the model. Reports what was sent and inferred for it, in each slot [S]: what a client sends
    up beside its update (`Upload.extra`) as well, which is not counted if the update does not
    arrive.
    """

    def __call__(self, r: Round) -> tuple[Work, Report]: ...


class RegroupFn(Protocol):
    """Moves clients to other groups once their updates are known.

    It returns the new groups [S] of the cohort, which the engine stores as its assignment. It
    may change anything else in the state.

    `r.group` [S] is the group that each slot trained.
    """

    def __call__(self, r: Round) -> tuple[State, jax.Array]: ...


class AggregateFn(Protocol):
    """Reduces the updates to one step [m, ...] per group and the mass [m] behind it: the weight
    of its updates. A group of mass 0 keeps its model.

    `r.state` is the state before the server's step, in which the cohort has its groups `r.group`
    already; `r.work.client_extra` [S, ...] is what `prepare` computed, () without it.
    """

    def __call__(self, r: Round) -> tuple[Params, jax.Array]: ...


class FinishFn(Protocol):
    """Ends a round: mixes the new group models, or remembers what the cohort sent. What it sends it
    adds to the state's traffic.

    `r.state` has the new models, `r.before` is the state that `aggregate` got.
    """

    def __call__(self, r: Round) -> State: ...


class StartClientsFn(Protocol):
    """Names the clients [n] int32 whose samples `start` reads, of K in all."""

    def __call__(self, key: Key, num_clients: int) -> jax.Array: ...


class Hooks(NamedTuple):
    """The parts of a method. Only `solve` has no default."""

    solve: ClientFn  # trains one client
    start: StartFn | None = None  # first group models; None: one random model
    # (first group models [m, ...], data) -> what the method remembers; None: what `start` says
    memory: Callable[[Params, FederatedData], Any] | None = None
    migrate: MigrateFn | None = None  # before selection; None: groups stay
    # the cohort's groups; None: all share group 0. A method that has it is clustered: it serves
    # and evaluates only clients that have a group, see `engine.withhold_groups`.
    assign: AssignFn | None = None
    meet: MeetFn | None = None  # in place of `assign`, where the state changes with it
    own_models: bool = False  # True: group k is client k's own, which it has from the start
    prepare: PrepareFn | None = None  # None: every client does all of its work
    ships_model: bool = True  # False: what a client receives is what `prepare` reports
    regroup: RegroupFn | None = None  # once updates are known; None: clients stay
    aggregate: AggregateFn | None = None  # None: means weighted by training samples
    # an optax transformation of each group's pseudo-gradient -step; None: add the step
    server: optax.GradientTransformation | None = None
    finish: FinishFn | None = None  # after the server step; None: nothing more
    # given only where the rounds read no samples but the cohort's; None: any client's may be read
    start_clients: StartClientsFn | None = None
