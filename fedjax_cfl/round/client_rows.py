"""What the clients of any method keep for themselves, see `types.Personal`: before round 0, in a
round, and when clients are tested.

The server may have their rows, too, see `types.ServerRows`: who keeps which, what a cohort is
sent, and what methods see that compare updates. Nothing of that happens where rows are the
clients' alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import Local, Work, full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.round.aggregate import uniform_mean, weighted_mean
from fedjax_cfl.round.method import Hooks
from fedjax_cfl.sharding import put_models, take_models
from fedjax_cfl.system.faults import find_nonfinite
from fedjax_cfl.system.reports import make_report, make_traffic
from fedjax_cfl.system.select import groups_of
from fedjax_cfl.system.system import System, group_models
from fedjax_cfl.tree import group_mean, put_part, repeat_first, take_rows, where_rows
from fedjax_cfl.types import (
    Cohort,
    FederatedData,
    OwnRows,
    Params,
    Personal,
    Report,
    ServerRows,
    State,
    Task,
    Upload,
)


def check_personal(personal: Personal, system: System, hooks: Hooks) -> None:
    """Raises InputError for a method or a system that cannot be used with what clients keep."""
    if hooks.own_models:
        raise InputError(
            "personal: every client of this method has a model of its own already, without"
            f" {personal.name}; use personal=none, or another algorithm"
        )
    if system.keep_received:
        raise InputError(
            f"test_on=received: clients of {personal.name} are tested on models of their own; use"
            " test_on=group"
        )
    moves = personal.server is not None and personal.server.move is not None
    if moves and (hooks.server or hooks.aggregate not in (None, weighted_mean, uniform_mean)):
        raise InputError(
            f"personal: {personal.name} moves the plain mean of its clients' models, but the server"
            " of this method makes another step; use personal=none, or another algorithm"
        )


def init_own(personal: Personal, state: State) -> State:
    """Returns the state before round 0 with what each client keeps at first. What is never sent
    is the same in all group models: that of the first one.
    """
    groups = state.groups
    if personal.sent_part is not None:
        groups = put_part(repeat_first(groups), personal.sent_part(groups))
    state = state.replace(groups=groups)
    rows = take_rows(jax.vmap(personal.init)(groups), groups_of(state))
    group = jnp.full_like(state.assignment, -1) if personal.server is not None else ()
    return state.replace(own=OwnRows(rows, jnp.zeros(state.assignment.size, bool), group))


def make_first_rows(local: Local) -> Callable[[State], Any] | None:
    """Returns `Algorithm.first_rows`: (state) -> what a client of each group keeps at first."""
    personal = local.personal
    if personal is None or personal.server is not None:
        return None
    return lambda state: jax.vmap(personal.init)(state.groups)


def make_personal_models(task: Task, local: Local) -> Callable[..., Params] | None:
    """Returns `Algorithm.personal_models`: (state, data, clients [n] or None: all) -> the model
    [n, ...] that each of these clients uses and is tested on: that of its group, until the client
    has trained; or that of its group, adapted. None where all use that of their group.
    """
    personal = local.personal
    if personal is not None and personal.adapt is not None:
        return adapt_models(task, personal.adapt(local.replace(personal=None)))
    combine = personal and personal.combine
    if not combine:
        return None

    def personal_models(
        state: State, data: FederatedData, clients: jax.Array | None = None
    ) -> Params:
        rows, group, trained = state.own.rows, groups_of(state), state.own.trained
        if clients is not None:
            rows = take_rows(rows, find_places(state.own, clients))
            group, trained = group[clients], trained[clients]
        models = take_rows(state.groups, group)
        return where_rows(trained, jax.vmap(combine)(rows, models), models)

    return personal_models


def adapt_models(task: Task, local: Local) -> Callable[[State, FederatedData], Params]:
    """Returns f(state, data) -> the models [K, ...] of clients that each train the model of their
    group as `local` says, on batches drawn by the round and the client alone.
    """
    train, mesh = over_clients(sgd(task, local), local.execution), local.execution.mesh

    @jax.jit
    def adapted_models(
        state: State, data: FederatedData, clients: jax.Array | None = None
    ) -> Params:
        assert clients is None, "it trains on the samples of all, which are on the devices"
        ids = jnp.arange(data.num_clients, dtype=jnp.int32)
        cohort = make_cohort(ids, data, local.execution)
        key = derive_key(jax.random.key(0), TRAIN, state.round)
        work = full_work(cohort.take(groups_of(state)), local.lr_scale(state.round))
        upload, models = train(cohort, data, (key, state.groups), work), group_models(state)
        steps = put_models(jax.tree.map(jnp.zeros_like, models), cohort.ids, upload.delta, mesh)
        return jax.tree.map(jnp.add, models, steps)

    return adapted_models


def find_server(local: Local) -> ServerRows | None:
    """Returns what the server does with the rows of clients, None: it has none."""
    return local.personal.server if local.personal is not None else None


def give_rows(
    local: Local, state: State, cohort: Cohort, work: Work
) -> tuple[OwnRows, Work, list[Report]]:
    """Returns all clients' rows, the cohort's work with what each client is given of its own, and
    reports of what is sent for it: the mean row down, the new row up with the update, a model each,
    where rows are sent.

    `state` has the groups that the cohort trains in its assignment.
    """
    server, mesh = find_server(local), local.execution.mesh
    if server is None:
        return state.own, work._replace(own=take_own(state, cohort, mesh)), []
    state = renew_rows(local, state)
    means, _ = average_rows(state)
    rows = take_own(state, cohort, mesh)
    given = jax.vmap(server.give)(rows, take_rows(means, work.group))
    real = cohort.ids < state.assignment.size
    sent = [make_report(make_traffic(units_down=real, units_up=real))] if server.sent else []
    return state.own, work._replace(own=given), sent


def keep_rows(local: Local, state: State, cohort: Cohort, work: Work, upload: Upload) -> State:
    """Returns the state with the cohort's new rows: where the server has them, too, those of the
    clients whose update is used, else of all that trained, even if their answer was lost or late.
    """
    if local.personal is None:
        return state
    server = find_server(local)
    kept = upload.steps > 0 if server is None else upload.weight > 0
    state = put_own(state, cohort, upload, kept, local.execution.mesh)
    if server is None:
        return state
    group = state.own.group.at[jnp.where(kept, cohort.ids, state.assignment.size)]
    return state.replace(own=state.own.replace(group=group.set(work.group, mode="drop")))


def add_rows_to_step(local: Local, state: State, step: Params) -> Params:
    """Returns the step [m, ...] of the groups with what the rows of their members add to it."""
    server = find_server(local)
    if server is None or server.move is None:
        return step
    return jax.tree.map(jnp.add, step, jax.vmap(server.move)(*average_rows(state)))


def average_rows(state: State) -> tuple[Any, jax.Array]:
    """Returns the mean row [m, ...] of each group's members, and how many [m] they are."""
    members = find_members(state)
    counts = (members >= 0).astype(jnp.float32)
    return group_mean(counts, members, state.own.rows, state.active.size)


def find_members(state: State) -> jax.Array:
    """Returns the group [K] int32 of each client, -1: none. A group that is the only one has all
    clients.
    """
    only = state.active.sum() == 1
    return jnp.where(only, jnp.argmax(state.active), state.assignment).astype(jnp.int32)


def renew_rows(local: Local, state: State) -> State:
    """Returns the state in which the row of every client begins anew that has another group now.

    A group with the very model of the one before, such as a half of a group that was cut, is no
    other: what the row says is about that model.
    """
    if find_server(local) is None:
        return state
    assert local.personal is not None  # that has it
    init, members = local.personal.init, find_members(state)

    def begin_anew(own: OwnRows) -> OwnRows:
        known = (own.group >= 0) & (members >= 0)
        left = ~(known & find_twins(state.groups)[own.group, members])
        fresh = jax.vmap(init)(group_models(state))
        return OwnRows(where_rows(left, fresh, own.rows), own.trained & ~left, members)

    changed = jnp.any(state.own.group != members)
    return state.replace(own=lax.cond(changed, begin_anew, lambda own: own, state.own))


def find_twins(groups: Params) -> jax.Array:
    """Returns which of the models [m, ...] are equal, [m, m] bool; each is to itself."""
    count = len(jax.tree.leaves(groups)[0])

    def equal_to(number: jax.Array) -> jax.Array:
        same = [
            jnp.all((leaf == leaf[number]).reshape(count, -1), axis=1)
            for leaf in jax.tree.leaves(groups)
        ]
        return jnp.stack(same).all(0) | (jnp.arange(count) == number)

    return lax.map(equal_to, jnp.arange(count))


def restore_updates(local: Local, work: Work, upload: Upload) -> Upload:
    """Returns the upload as a method is to compare it, see `ServerRows.restore`."""
    server = find_server(local)
    return upload if server is None else server.restore(local, work, upload)


def take_own(state: State, cohort: Cohort, mesh: Mesh | None) -> Any:
    """Returns what each client of the cohort keeps for itself [S, ...], see `Personal`; () where
    nothing is kept.
    """
    if not jax.tree.leaves(state.own):
        return ()
    clients = jnp.minimum(cohort.ids, state.assignment.size - 1)
    return take_models(state.own.rows, find_places(state.own, clients), mesh)


def find_places(own: OwnRows, clients: jax.Array) -> jax.Array:
    """Returns where the rows of `clients` [n] int32 are."""
    return clients if isinstance(own.place, tuple) else own.place[clients]


def put_own(
    state: State, cohort: Cohort, upload: Upload, kept: jax.Array, mesh: Mesh | None
) -> State:
    """Returns the state with what clients of the cohort now keep, those in the slots `kept` [S]
    bool; rows that are not finite are dropped.
    """
    kept = kept & ~find_nonfinite(upload.own, kept.shape)
    clients = state.assignment.size
    at = jnp.where(kept, cohort.ids, clients)
    trained = state.own.trained.at[at].set(True, mode="drop")
    if not isinstance(state.own.place, tuple):
        nowhere = len(jax.tree.leaves(state.own.rows)[0])
        at = jnp.where(kept, state.own.place[jnp.minimum(at, clients - 1)], nowhere)
    rows = put_models(state.own.rows, at, upload.own, mesh)
    return state.replace(own=state.own.replace(rows=rows, trained=trained))
