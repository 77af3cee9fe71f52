"""Rows of clients that the server has, too, see `types.ServerRows`: who keeps which, what a cohort
is sent, and what methods see that compare updates. Nothing happens where rows are the clients'
alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.round.client_models import put_own, take_own
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.system import group_models
from fedjax_cfl.system.traffic import make_traffic
from fedjax_cfl.tree import group_mean, take_rows, where_rows
from fedjax_cfl.types import Cohort, OwnRows, Params, Report, ServerRows, State, Upload


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
    state = follow_groups(local, state)
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


def move_groups(local: Local, state: State, step: Params) -> Params:
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


def follow_groups(local: Local, state: State) -> State:
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
