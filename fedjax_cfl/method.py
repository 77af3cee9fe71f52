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
    """What each step of a round reads, `r`: every field as it is when the step begins.

    Args:
        key: of this step in this round; use it once.
        state: `types.State`: groups [m, ...], active [m], assignment [K], memory, rows, round.
        data: `types.FederatedData`: who holds which samples.
        cohort: from `assign` on, `types.Cohort`: ids [S], the number of clients in an empty slot.
        work: from `prepare` on, `types.Work`: what each client does, with its group [S].
        upload: from `regroup` on, `types.Upload`: what reached the server in time.
        before: in `finish`, the state that `aggregate` read.
    """

    key: Key
    state: State
    data: FederatedData
    cohort: Cohort = NOT_YET
    work: Work = NOT_YET
    upload: Upload = NOT_YET
    before: State = NOT_YET

    @property
    def group(self) -> jax.Array:
        """The group of each slot, [S] int32 from 0 to m - 1."""
        return self.work.group

    @property
    def real(self) -> jax.Array:
        """Which slots have a client, [S] bool."""
        return self.cohort.ids < self.data.num_clients


class Start(NamedTuple):
    """What a method starts with."""

    groups: Params  # [m, ...]
    assignment: jax.Array | None = None  # [K], None: no client has a group yet
    memory: Any = ()
    # by name, what the method keeps of each client [K, ...]
    rows: dict[str, Any] = {}  # noqa: RUF012
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
    a layer has none. The functions are called in this order, those of clients in `solve`.

    Args:
        solve: how ONE client trains the model of its group, see `client.cohort.ClientFn`.
        start: (key, data) -> `Start`, the first group models; None: one random model.
        memory: (first group models [m, ...], data) -> what the method remembers; None: what `start`
            says.
        client_rows: (first group models [m, ...], data) -> by name, what the method keeps of each
            client [K, ...], in `State.rows`, beside those of `start`; None: none.
        split_rows: names of the client rows that hold a model of each client, which devices split.
        migrate: before the selection, see `MigrateFn`; None: groups stay.
        assign: names the cohort's groups, see `AssignFn`; None: all share group 0. A method that
            has it is clustered: it serves and evaluates only clients that have a group.
        assign_and_found: in place of `assign`, see `AssignAndFoundFn`.
        prepare: changes the work of the cohort, see `PrepareFn`; None: every client does all of it.
        ships_model: False: what a client receives is what `prepare` reports.
        regroup: once updates are known, see `RegroupFn`; None: clients stay.
        aggregate: see `AggregateFn`; None: means weighted by training samples.
        server: an optax transformation of each group's pseudo-gradient -step; None: add the step.
        finish: after the server's step, see `FinishFn`; None: nothing more.
        start_clients: given only where the rounds read no samples but the cohort's; None: any
            client's may be read.
        takes_newcomers: whether a client that first takes part after the start gets its group by a
            look at its data; None: unless nothing but `keep_groups` names it.
        name: of the rows, and in messages.
        rows: (model that it is served at the start) -> ONE client's first row; None: clients keep
            nothing.
        train: changes how ONE client trains, see `TrainFn`; None: as without this layer.
        serve: (row, model of its group) -> the model that a client is tested on, and uses; None:
            its group's.
        adapt: (local) -> how a client trains the model of its group each time it uses it, in place
            of `serve`, on its own samples; None: it does not.
        sent_part: (model or models, or their shapes) -> the part that is sent; None: all. The other
            part of all group models is that of the first one, and stays so.
        selection_model: (row, model of a group) -> the model whose loss a client uses to choose its
            group; None: the group's.
        correction: where rows are the server's, too, see `Correction`; None: nobody else's.
    """

    solve: Any = None
    start: StartFn | None = None
    memory: Callable[[Params, FederatedData], Any] | None = None
    client_rows: Callable[[Params, FederatedData], dict[str, Any]] | None = None
    split_rows: tuple[str, ...] = ()
    migrate: MigrateFn | None = None
    assign: AssignFn | None = None
    assign_and_found: AssignAndFoundFn | None = None
    prepare: PrepareFn | None = None
    ships_model: bool = True
    regroup: RegroupFn | None = None
    aggregate: AggregateFn | None = None
    server: optax.GradientTransformation | None = None
    finish: FinishFn | None = None
    start_clients: StartClientsFn | None = None
    takes_newcomers: bool | None = None
    name: str = ""
    rows: Callable[[Params], Any] | None = None
    train: TrainFn | None = None
    serve: Callable[[Any, Params], Params] | None = None
    adapt: Callable[[Any], Any] | None = None
    sent_part: Callable[[Params], Params] | None = None
    selection_model: Callable[[Any, Params], Params] | None = None
    correction: Correction | None = None
