"""What clients keep, layer by layer (`Method.rows`): before round 0, in a round, and when clients
are tested.

The server has the rows of a `Correction`, too: what a cohort is sent, and what methods see that
compare updates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.client.sgd import option_of, sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.method import Method
from fedjax_cfl.round.aggregate import uniform_mean, weighted_mean
from fedjax_cfl.sharding import put_models, take_models
from fedjax_cfl.system.faults import find_nonfinite
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.select import groups_of
from fedjax_cfl.system.system import RoundLog
from fedjax_cfl.tree import group_mean, put_part, repeat_first, take_rows, where_rows
from fedjax_cfl.types import Cohort, FederatedData, Params, Report, Rows, State, Task, Upload, Work


def group_models(state: State) -> Params:
    """Returns the model [K, ...] of each client's group; of group 0 for a client without one."""
    return take_rows(state.groups, groups_of(state))


def check_layers(layers: tuple[Method, ...], method: Method) -> None:
    """Raises InputError where two layers say the same thing: which model a client is tested on, how
    its training is corrected, or, of a model whose parts are not all sent, both; and for a method
    that cannot be used with them.
    """
    tested = [layer for layer in layers if layer.serve or layer.adapt or layer.sent_part]
    corrected = [layer for layer in layers if layer.correction]
    parted = [layer for layer in layers if layer.sent_part or layer.correction]
    rules = (
        (tested, "both say which model a client is tested on"),
        (corrected, "both correct the training of clients"),
        (parted, "a correction is for models that are sent as a whole"),
    )
    for found, reason in rules:
        if len(found) > 1:
            one, other = (option_of(layer.name) for layer in found[:2])
            raise InputError(f"personal=[{one},{other}]: {reason}; use one of the two")
    names = [layer.name for layer in layers]
    again = next((name for name in names if names.count(name) > 1), None)
    if again is not None:
        raise InputError(f"personal: {option_of(again)} is given twice; use it once")
    moves = next((layer.name for layer in layers if find_server_step(layer)), None)
    plain = method.aggregate in (None, weighted_mean, uniform_mean)
    if moves and (method.server or not plain):
        raise InputError(
            f"personal: {moves} moves the plain mean of its clients' models, but the server"
            " of this method makes another step; use personal=none, or another algorithm"
        )


def refuse_layers(local: Local) -> None:
    """Raises InputError for layers over a method whose clients have models of their own."""
    if local.layers:
        names = ", ".join(layer.name for layer in local.layers)
        raise InputError(
            "personal: every client of this method has a model of its own already, without"
            f" {names}; use personal=none, or another algorithm"
        )


def check_served(task: Task, layer: Method) -> None:
    """Raises InputError for a layer that serves something else than a model."""
    first, serve = layer.rows, layer.serve
    if first is None or serve is None:
        return
    model = jax.eval_shape(task.init, jax.random.key(0))
    try:
        served: Any = jax.eval_shape(lambda model: serve(first(model), model), model)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"layer {layer.name!r}: serve(own, model) fails: {error}") from error
    if jax.tree.structure(served) != jax.tree.structure(model) or served != model:
        raise InputError(
            f"layer {layer.name!r}: serve(own, model) must return a model, with the parameters and"
            " shapes of its second argument"
        )


def find_server_step(layer: Method) -> Callable[..., Params] | None:
    """Returns what a layer adds to the step of a group, None: nothing."""
    return layer.correction.server_step if layer.correction else None


def find_sent_part(local: Local) -> Callable[[Params], Params] | None:
    """Returns which part of models is sent, None: all."""
    return next((layer.sent_part for layer in local.layers if layer.sent_part), None)


def init_rows(local: Local, state: State) -> State:
    """Returns the state before round 0 with what each client keeps at first. What is never sent
    is the same in all group models: that of the first one.
    """
    groups, sent_part = state.groups, find_sent_part(local)
    if sent_part is not None:
        groups = put_part(repeat_first(groups), sent_part(groups))
    state, rows = state.replace(groups=groups), dict(state.rows)
    for layer in local.layers:
        if layer.rows is None:
            continue
        values = take_rows(jax.vmap(layer.rows)(groups), groups_of(state))
        group = jnp.full_like(state.assignment, -1) if layer.correction else ()
        rows[layer.name] = Rows(values, jnp.zeros(state.assignment.size, bool), group)
    return state.replace(rows=rows)


def make_first_rows(local: Local) -> Callable[[State], dict[str, Any]] | None:
    """Returns `Algorithm.first_rows`: (state) -> by layer, what a client of each group keeps at
    first. Left out are layers whose rows a round reads of clients outside its cohort.
    """
    kept = {layer.name: layer.rows for layer in local.layers if layer.rows and not layer.correction}
    if not kept:
        return None
    return lambda state: {name: jax.vmap(first)(state.groups) for name, first in kept.items()}


def make_personal_models(task: Task, local: Local) -> Callable[..., Params] | None:
    """Returns `Algorithm.personal_models`: (state, data, clients [n] or None: all) -> the model
    [n, ...] that each of these clients uses and is tested on: that of its group, until the client
    has trained; or that of its group, adapted. None where all use that of their group.
    """
    layer = next((layer for layer in local.layers if layer.serve or layer.adapt), None)
    if layer is None:
        return None
    if layer.adapt is not None:
        return adapt_models(task, layer.adapt(local.replace(personal=None)))

    def personal_models(
        state: State, data: FederatedData, clients: jax.Array | None = None
    ) -> Params:
        assert layer.serve is not None
        rows, group = state.rows[layer.name], groups_of(state)
        values, trained = rows.values, rows.trained
        if clients is not None:
            values = take_rows(values, find_places(rows, clients))
            group, trained = group[clients], trained[clients]
        models = take_rows(state.groups, group)
        return where_rows(trained, jax.vmap(layer.serve)(values, models), models)

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


def load_rows(
    local: Local, state: State, cohort: Cohort, work: Work
) -> tuple[State, Work, list[Report]]:
    """Returns the state, the cohort's work with the row of each client, and reports of what is sent
    for it: of an uploaded correction a model each, the mean row down and, with the update, the new
    row up.

    `state` has the groups that the cohort trains in its assignment.
    """
    state, reports = reset_rows_of_movers(local, state), []
    rows = take_cohort_rows(state, cohort, local.execution.mesh)
    for layer in local.layers:
        if layer.correction is None:
            continue
        means, _ = average_rows(state, layer.name)
        given = rows[layer.name], take_rows(means, work.group)
        rows[layer.name] = jax.vmap(layer.correction.to_client)(*given)
        if layer.correction.is_uploaded:
            real = cohort.ids < state.assignment.size
            reports.append(make_report(make_bill(units_down=real, units_up=real)))
    return state, work._replace(rows=rows), reports


def keep_rows(
    local: Local, state: State, cohort: Cohort, work: Work, upload: Upload, log: RoundLog
) -> tuple[State, RoundLog]:
    """Returns the state with the cohort's new rows: those of all that trained, even if their answer
    was lost or late; of a correction those of the clients whose update is used. Rows that are not
    finite are dropped: clients whose update is used are counted in the log.
    """
    kept, lost = dict(state.rows), jnp.zeros(cohort.ids.shape, bool)
    for layer in local.layers:
        if layer.rows is None:
            continue
        rows, new = kept[layer.name], upload.rows[layer.name]
        used = upload.weight > 0 if layer.correction else upload.steps > 0
        bad = find_nonfinite(new, used.shape)
        finite, lost = used & ~bad, lost | (bad & (upload.weight > 0))
        if layer.correction:
            at = jnp.where(used, cohort.ids, state.assignment.size)
            rows = rows.replace(group=rows.group.at[at].set(work.group, mode="drop"))
        kept[layer.name] = store_rows(rows, cohort, new, finite, local.execution.mesh)
    assert log.training is not None
    faults = log.training.fault_counts
    faults = faults.replace(nonfinite=faults.nonfinite + jnp.sum(lost, dtype=jnp.int32))
    log = log._replace(training=log.training.replace(fault_counts=faults))
    return state.replace(rows=kept), log


def add_rows_to_step(local: Local, state: State, step: Params) -> Params:
    """Returns the step [m, ...] of the groups with what the rows of their members add to it."""
    for layer in local.layers:
        if move := find_server_step(layer):
            moved = jax.vmap(move)(*average_rows(state, layer.name))
            step = jax.tree.map(jnp.add, step, moved)
    return step


def average_rows(state: State, name: str) -> tuple[Any, jax.Array]:
    """Returns a layer's mean row [m, ...] of each group's members, and how many [m] they are."""
    members = find_members(state)
    counts = (members >= 0).astype(jnp.float32)
    return group_mean(counts, members, state.rows[name].values, state.active.size)


def find_members(state: State) -> jax.Array:
    """Returns the group [K] int32 of each client, -1: none. A group that is the only one has all
    clients.
    """
    only = state.active.sum() == 1
    return jnp.where(only, jnp.argmax(state.active), state.assignment).astype(jnp.int32)


def reset_rows_of_movers(local: Local, state: State) -> State:
    """Returns the state in which the row of a correction is a first one again for every client
    that has another group now.

    A group with the very model of the one before, such as a half of a group that was cut, is no
    other: what the row says is about that model.
    """
    kept = dict(state.rows)
    for layer in local.layers:
        if layer.correction is None:
            continue
        rows, first, members = kept[layer.name], layer.rows, find_members(state)
        assert first is not None

        def reset(rows: Rows, first: Any = first, members: jax.Array = members) -> Rows:
            known = (rows.group >= 0) & (members >= 0)
            left = ~(known & first_equal_model(state.groups)[rows.group, members])
            fresh = jax.vmap(first)(group_models(state))
            return Rows(where_rows(left, fresh, rows.values), rows.trained & ~left, members)

        changed = jnp.any(rows.group != members)
        kept[layer.name] = lax.cond(changed, reset, lambda rows: rows, rows)
    return state.replace(rows=kept)


def first_equal_model(groups: Params) -> jax.Array:
    """Returns which of the models [m, ...] are equal, [m, m] bool; each is to itself."""
    count = len(jax.tree.leaves(groups)[0])

    def equal_to(number: jax.Array) -> jax.Array:
        same = [
            jnp.all((leaf == leaf[number]).reshape(count, -1), axis=1)
            for leaf in jax.tree.leaves(groups)
        ]
        return jnp.stack(same).all(0) | (jnp.arange(count) == number)

    return lax.map(equal_to, jnp.arange(count))


def uncorrect_updates(local: Local, work: Work, upload: Upload) -> Upload:
    """Returns the upload as a method is to compare it, see `Correction.uncorrect`."""
    for layer in local.layers:
        if layer.correction is not None:
            upload = layer.correction.uncorrect(local, work, work.rows[layer.name], upload)
    return upload


def take_cohort_rows(state: State, cohort: Cohort, mesh: Mesh | None) -> dict[str, Any]:
    """Returns by layer what each client of the cohort keeps, [S, ...]. What the method keeps of
    clients is left out.
    """
    clients = jnp.minimum(cohort.ids, state.assignment.size - 1)
    return {
        name: take_models(rows.values, find_places(rows, clients), mesh)
        for name, rows in state.rows.items()
        if isinstance(rows, Rows)
    }


def find_places(rows: Rows, clients: jax.Array) -> jax.Array:
    """Returns where the rows of `clients` [n] int32 are."""
    return clients if isinstance(rows.place, tuple) else rows.place[clients]


def store_rows(rows: Rows, cohort: Cohort, new: Any, kept: jax.Array, mesh: Mesh | None) -> Rows:
    """Returns a layer's rows with the `new` ones [S, ...] of the cohort's slots `kept` [S] bool."""
    clients = rows.trained.size
    at = jnp.where(kept, cohort.ids, clients)
    trained = rows.trained.at[at].set(True, mode="drop")
    if not isinstance(rows.place, tuple):
        nowhere = len(jax.tree.leaves(rows.values)[0])
        at = jnp.where(kept, rows.place[jnp.minimum(at, clients - 1)], nowhere)
    return rows.replace(values=put_models(rows.values, at, new, mesh), trained=trained)
