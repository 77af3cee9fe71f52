"""What an author of a method, or of a layer over methods, writes: `Method`, and what its functions
read, `Round`. `clustered`, `layer` and `chain` write most of them for you.

Axis letters as in `types.py`. `round/engine.py` calls the functions in the order of this page.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import optax

from fedjax_cfl.types import Cohort, FederatedData, Key, Params, Report, State, Upload, Work

NOT_YET: Any = None  # a field of `Round` that a step does not have yet


class Round(NamedTuple):
    """What each step of a round reads, `r`: every field as it is when the step begins."""

    key: Key  # of this step in this round; use it once
    state: State
    data: FederatedData
    cohort: Cohort = NOT_YET  # from `assign` on
    work: Work = NOT_YET  # from `prepare` on; it has the cohort's groups
    upload: Upload = NOT_YET  # from `regroup` on: what reached the server in time
    before: State = NOT_YET  # in `finish`: the state that `aggregate` read

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
    """Changes groups before a round's selection: moves clients, or founds groups.

    Its bills are of all clients [K], or of nobody.
    """

    def __call__(self, r: Round) -> tuple[State, Report]: ...


class AssignFn(Protocol):
    """Names the group [S] that each client of the cohort trains.

    Its bills are of the slots [S], or of nobody.
    """

    def __call__(self, r: Round) -> tuple[jax.Array, Report]: ...


class AssignAndFoundFn(Protocol):
    """Names groups as `AssignFn` does, and changes anything else in the state before the cohort
    trains: founds or unites groups by what its clients send first.

    The engine stores the groups of the cohort; the state has those of others, and of the cohort
    only those that it had already.
    """

    def __call__(self, r: Round) -> tuple[State, jax.Array, Report]: ...


class PrepareFn(Protocol):
    """Changes the work of the cohort: fewer steps, or something that a client needs beside the
    model.

    Bills the slots [S] what was sent and inferred for it, also what a client sends up with
    its update (`Upload.extra`): that is not counted if the update does not arrive.
    """

    def __call__(self, r: Round) -> tuple[Work, Report]: ...


class RegroupFn(Protocol):
    """Moves clients to other groups once their updates are known; `r.group` is what they trained.

    Returns the new groups [S] of the cohort, which the engine stores. It may change anything else
    in the state.
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
    """Ends a round: mixes the new group models, or stores what the cohort sent. Adds what it sends
    to the state's traffic, by `reports.add_to_ledger`.

    `r.state` has the new models, `r.before` is the state that `aggregate` read.
    """

    def __call__(self, r: Round) -> State: ...


class StartClientsFn(Protocol):
    """Names the clients [n] int32 whose samples `start` reads, of K in all."""

    def __call__(self, key: Key, num_clients: int) -> jax.Array: ...


class TrainFn(Protocol):
    """Changes how ONE client trains. `solve` is how it trains without this layer.

    Both are a `ClientFn` (see `client.cohort`). The new one reads the client's row as
    `work.rows[name]`, and puts the new row into `Upload.rows[name]`.
    """

    def __call__(self, task: Any, local: Any, solve: Any) -> Any: ...


class Correction(NamedTuple):
    """A layer whose rows the server has, too, and adds to the gradients of its clients. A row is a
    client's statement about its group: it changes only with an update that is used, and begins
    again when the client gets another group.
    """

    # (row, mean row of the group's members) -> what is added to each gradient of ONE client
    to_client: Callable[[Any, Any], Any]
    # (local, work, what was added [S, ...], upload) -> the upload without what that did to its
    # updates, for methods that compare them
    uncorrect: Callable[..., Upload]
    # True: the new row is sent up with the update, and the mean row down; False: the server makes a
    # client's new row from its update
    is_uploaded: bool = True
    # (mean row of the members, their number []) -> what is added to ONE group's step; None: nothing
    server_step: Callable[[Any, jax.Array], Params] | None = None


class Method(NamedTuple):
    """A method, or a layer over one: what it changes of a round. A method has at least `solve`;
    a layer has none.
    """

    # how ONE client trains the model of its group, see `client.cohort.ClientFn`; None: a layer
    solve: Any = None
    # the server: what it starts with, and who trains what
    start: StartFn | None = None  # first group models; None: one random model
    # (first group models [m, ...], data) -> what the method remembers; None: what `start` says
    memory: Callable[[Params, FederatedData], Any] | None = None
    migrate: MigrateFn | None = None  # before selection; None: groups stay
    # the cohort's groups; None: all share group 0. A method that has it is clustered: it serves
    # and evaluates only clients that have a group, see `engine.unassign_empty_clients`
    assign: AssignFn | None = None
    assign_and_found: AssignAndFoundFn | None = None  # in place of `assign`
    own_models: bool = False  # True: group k is client k's own, which it has from the start
    prepare: PrepareFn | None = None  # None: every client does all of its work
    ships_model: bool = True  # False: what a client receives is what `prepare` reports
    # the server: what it does with the updates
    regroup: RegroupFn | None = None  # once updates are known; None: clients stay
    aggregate: AggregateFn | None = None  # None: means weighted by training samples
    # an optax transformation of each group's pseudo-gradient -step; None: add the step
    server: optax.GradientTransformation | None = None
    finish: FinishFn | None = None  # after the server step; None: nothing more
    # given only where the rounds read no samples but the cohort's; None: any client's may be read
    start_clients: StartClientsFn | None = None
    # whether a client that first takes part after the start gets its group by a look at its data;
    # None: unless all have a group from the start, and nothing but `keep_groups` names it
    takes_newcomers: bool | None = None
    # clients: what each keeps, and how it trains and uses it
    name: str = ""  # of the rows, and in messages
    # (model that it is served at the start) -> ONE client's first row; None: clients keep nothing
    rows: Callable[[Params], Any] | None = None
    train: TrainFn | None = None  # None: as without this layer
    # (row, model of its group) -> the model that a client is tested on, and uses; None: its group's
    serve: Callable[[Any, Params], Params] | None = None
    # (local) -> how a client trains the model of its group each time it uses it, in place of
    # `serve`, on its own samples; None: it does not
    adapt: Callable[[Any], Any] | None = None
    # (model or models, or their shapes) -> the part that is sent; None: all. The other part of all
    # group models is that of the first one, and stays so
    sent_part: Callable[[Params], Params] | None = None
    # (row, model of a group) -> the model whose loss a client uses to choose its group; None: the
    # group's
    selection_model: Callable[[Any, Params], Params] | None = None
    correction: Correction | None = None  # where rows are the server's, too; None: nobody else's
