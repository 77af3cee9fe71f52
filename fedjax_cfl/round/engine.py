"""One federated round, in order. A method is a call of `federated` with functions of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import Local, Work, full_work
from fedjax_cfl.client.sgd import client_cost
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import (
    AGGREGATE,
    ASSIGN,
    FINISH,
    MIGRATE,
    PREPARE,
    REGROUP,
    START,
    TRAIN,
    derive_key,
    derive_keys,
)
from fedjax_cfl.method import AggregateFn, Method, Round, Start
from fedjax_cfl.round import client_rows
from fedjax_cfl.round.aggregate import apply_server_optimizer, deviation, rebase, weighted_mean
from fedjax_cfl.round.start import find_data_clients, keep_groups, random_groups
from fedjax_cfl.system import reports
from fedjax_cfl.system.clock import merge_clocks
from fedjax_cfl.system.faults import with_faults
from fedjax_cfl.system.system import RoundLog, System, SystemLike, as_system
from fedjax_cfl.tree import group_mean, squared_norms
from fedjax_cfl.types import (
    Algorithm,
    Bill,
    Cohort,
    FaultCounts,
    FederatedData,
    Info,
    Key,
    Params,
    ServedModels,
    State,
    Task,
    Upload,
)
from fedjax_cfl.validation import checked


def serve_global(state: State) -> ServedModels:
    """Serves group 0 to all clients (single-model methods)."""
    return ServedModels(state.groups, jnp.zeros_like(state.assignment))


def serve_assigned(state: State) -> ServedModels:
    """Serves each client the model of its group; clients without a group have none."""
    return ServedModels(state.groups, state.assignment)


class Parts(NamedTuple):
    """What a round is made of, with the defaults of the method filled in."""

    task: Task
    local: Local
    method: Method
    train: Callable[..., tuple[Upload, FaultCounts]]  # trains the cohort, with faults
    aggregate: AggregateFn
    server: optax.GradientTransformation
    system: System


class Now(NamedTuple):
    """What all steps of one round read."""

    parts: Parts
    keys: Key  # [PURPOSES], see `derive_keys`
    data: FederatedData

    def give(self, purpose: int, state: State, *more: Any) -> Round:
        """Returns what a step of the method reads, with the key of its purpose."""
        return Round(self.keys[purpose], state, self.data, *more)


@checked()
def federated(task: Task, local: Local, system: SystemLike, method: Method) -> Algorithm:
    """Composes a method from what it does in each step of a round, see `Method`.

    Args: `task` is the model and its loss; `local` says how clients train, and has layers; `system`
    says who takes part and what happens to clients, a selection alone: nothing fails.
    Raises InputError for faults that are not allowed, and for layers that do not fit.
    """
    system, layers = as_system(system), local.layers
    client_rows.check_layers(layers, method)
    if (solve := method.solve) is None:
        raise InputError("method: has no solve; give it one, as sgd(task, local)")
    for layer in layers:
        solve = layer.train(task, local, solve) if layer.train else solve
        client_rows.check_served(task, layer)
    parts = Parts(
        task,
        local,
        method,
        over_clients(with_faults(system.faults, solve), local.execution),
        method.aggregate or weighted_mean,
        method.server or optax.sgd(1.0),
        system,
    )
    start = method.start or random_groups(task, 1)
    clustered = bool(method.assign or method.assign_and_found)

    def init(key: Key, data: FederatedData) -> State:
        return init_state(parts, start(derive_key(key, START), data), data)

    def round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        now = Now(parts, derive_keys(key, state.round), data)
        state, log = migrate(now, state)
        cohort, log = draw_cohort(now, state, log)
        state, work, log = plan_work(now, state, cohort, log)
        state, work, log = load_client_state(now, state, cohort, work, log)
        upload, log = train_cohort(now, state, cohort, work, log)
        state, log = client_rows.keep_rows(local, state, cohort, work, upload, log)
        state, work, upload = regroup(now, state, cohort, work, upload)
        after, mass = update_groups(now, state, cohort, work, upload, log.sent_state)
        measured = measure_updates(state, after.groups, cohort, work.group, upload, mass)
        return close_round(parts, after, measured, cohort, upload, log)

    return Algorithm(
        init,
        round,
        serve_assigned if clustered else serve_global,
        clustered=clustered,
        split_rows=method.split_rows,
        data_clients=find_data_clients(method, layers, system.select.draw),
        nonfinite=system.faults.nonfinite,
        personal_models=client_rows.make_personal_models(task, local),
        first_rows=client_rows.make_first_rows(local),
        sent_part=client_rows.find_sent_part(local),
        takes_newcomers=takes_newcomers(method),
    )


def takes_newcomers(method: Method) -> bool:
    """Returns whether a client that first takes part after the start gets a group by its data."""
    if method.takes_newcomers is not None:
        return method.takes_newcomers
    return not (method.assign is keep_groups and not (method.migrate or method.regroup))


def init_state(parts: Parts, initial: Start, data: FederatedData) -> State:
    """Returns the state before round 0."""
    num_groups = jax.tree.leaves(initial.groups)[0].shape[0]
    report, remember = initial.report or reports.make_report(), parts.method.memory
    keep = parts.method.client_rows
    unknown = jnp.full(data.num_clients, -1, jnp.int32)
    state = State(
        round=jnp.zeros((), jnp.int32),
        groups=initial.groups,
        server=jax.vmap(parts.server.init)(initial.groups),
        active=jnp.ones(num_groups, bool) if initial.active is None else initial.active,
        assignment=unknown if initial.assignment is None else initial.assignment,
        traffic=reports.add_to_ledger(reports.no_traffic(), report.bill, report.early),
        memory=remember(initial.groups, data) if remember else initial.memory,
        selection=parts.system.select.init(data),
        clock_ms=parts.system.start_time(num_groups),
        start_faults=report.fault_counts,
        rows={**initial.rows, **(keep(initial.groups, data) if keep else {})},
    )
    # a start that reads no samples, or those of some clients alone, need not see all of them
    if parts.method.start_clients is None:
        state = unassign_empty_clients(None, state, data)
    if parts.local.layers:
        state = client_rows.init_rows(parts.local, state)
    return state


def unassign_empty_clients(before: State | None, state: State, data: FederatedData) -> State:
    """Returns the state without a group for the clients of which nothing is known to choose one
    by: they have no training samples, and had no group when they last had some.

    Whatever a method computes for such a client depends on how groups are numbered, not on the
    client. As long as there is one group, all clients are in it, also those that take no part.

    Args: `before` is the state before the groups of `state` were chosen, None: the run begins.
    """
    empty, alone = data.train.size == 0, state.active.sum() == 1
    unknown = empty & ~alone
    if before is not None:
        unknown &= (before.assignment < 0) | (before.active.sum() == 1)
    group = jnp.where(unknown, -1, state.assignment)
    only = jnp.argmax(state.active).astype(jnp.int32)
    return state.replace(assignment=jnp.where(empty & alone & (group < 0), only, group))


def store_groups(
    now: Now, before: State | None, state: State, cohort: Cohort, gid: jax.Array
) -> State:
    """Returns the state in which the clients of the cohort have the groups `gid` [S] int32.

    Args: `before` is as in `unassign_empty_clients`; the others are those of `plan_work`.
    """
    assigned = state.replace(assignment=cohort.put(state.assignment, gid))
    return unassign_empty_clients(before, assigned, now.data)


def check_payers(step: str, payers: str, number: int, *bills: Bill) -> None:
    """Raises InputError where the bills that a step of the round gives are not of the `payers` that
    it must give them of, so many as `number` says, or of nobody.
    """
    for bill in bills:
        shapes = {leaf.shape for leaf in jax.tree.leaves(bill)}
        if shapes not in ({(number,)}, {(0,)}):
            raise InputError(
                f"{step} must give bills of {payers}, here {number}, or of nobody (no_bill()), not"
                f" of shape {', '.join(map(str, sorted(shapes)))}"
            )


def migrate(now: Now, state: State) -> tuple[State, RoundLog]:
    """Moves clients, or founds new groups, before the selection."""
    parts, data = now.parts, now.data
    shifted = jnp.sum(data.shifted)
    if parts.method.migrate is None:
        return state, RoundLog(shifted, reports.make_report(), reports.no_bill())
    after, report = parts.method.migrate(now.give(MIGRATE, state))
    check_payers("migrate", "all clients [K]", data.num_clients, report.bill, report.early)
    after = unassign_empty_clients(state, after, data)
    after = merge_clocks(parts.system.clock, state, after, report.reclustered)
    return after, RoundLog(shifted, report, reports.no_bill())


def draw_cohort(now: Now, state: State, log: RoundLog) -> tuple[Cohort, RoundLog]:
    """Draws the cohort that trains, and gives its clients slots, longest first. `log` is what the
    round has done so far; each step returns it with what it adds.
    """
    parts, keys, data = now
    ids, poll = parts.system.choose(keys, state, data)
    check_payers("the selection's poll", "all clients [K]", data.num_clients, poll)
    cost = client_cost(parts.task, parts.local, data.max_client_samples)
    return make_cohort(ids, data, parts.local.execution, cost), log._replace(poll=poll)


def plan_work(
    now: Now, state: State, cohort: Cohort, log: RoundLog
) -> tuple[State, Work, RoundLog]:
    """Names the group that each client trains, and its work."""
    parts, keys = now.parts, now.keys
    gid, planned = jnp.zeros_like(cohort.ids), {}
    if parts.method.assign:
        gid, planned["assign"] = parts.method.assign(now.give(ASSIGN, state, cohort))
    if parts.method.assign_and_found:
        found = parts.method.assign_and_found(now.give(ASSIGN, state, cohort))
        state, gid, planned["assign_and_found"] = found
    work = full_work(gid, parts.local.lr_scale(state.round))
    if parts.method.prepare:
        work, planned["prepare"] = parts.method.prepare(now.give(PREPARE, state, cohort, work))
    for step, report in planned.items():
        check_payers(step, "the slots [S]", cohort.ids.size, report.bill, report.early)
    log = log._replace(planned=tuple(planned.values()))
    return state, parts.system.apply_stragglers(keys, cohort, work), log


def load_client_state(
    now: Now, state: State, cohort: Cohort, work: Work, log: RoundLog
) -> tuple[State, Work, RoundLog]:
    """Gives each client what it keeps, and what the server makes of all clients' rows.

    Args: as those of `plan_work`, which has returned `work`.
    """
    local = now.parts.local
    if not local.layers:
        return state, work, log
    assigned = store_groups(now, state, state, cohort, work.group)
    assigned, work, planned = client_rows.load_rows(local, assigned, cohort, work)
    state = state.replace(rows=assigned.rows)
    return state, work, log._replace(planned=(*log.planned, *planned))


def train_cohort(
    now: Now, state: State, cohort: Cohort, work: Work, log: RoundLog
) -> tuple[Upload, RoundLog]:
    """Trains every client from the model of its group; returns what reaches the server in time.

    Args: as those of `load_client_state`.
    """
    parts, keys, data = now
    system, log = parts.system, log._replace(sent_state=state, sent_group=work.group)
    seen, perturbation = system.perturb(keys, data)
    shared = (keys[TRAIN], state.groups), perturbation
    upload, counts = parts.train(cohort, seen, shared, work)
    sent, ships = client_rows.find_sent_part(parts.local), parts.method.ships_model
    model_bytes = reports.model_bytes_of(sent(state.groups) if sent else state.groups)
    return system.deliver(data, cohort, upload, counts, log, ships, model_bytes)


def regroup(
    now: Now, state: State, cohort: Cohort, work: Work, upload: Upload
) -> tuple[State, Work, Upload]:
    """Moves clients to other groups by what they sent.

    Args: as those of `load_client_state`; `upload` is what reached the server in time.
    """
    parts = now.parts
    if parts.method.regroup is None:
        return state, work, upload
    sent, plain = state.groups, client_rows.uncorrect_updates(parts.local, work, upload)
    state, gid = parts.method.regroup(now.give(REGROUP, state, cohort, work, plain))
    return state, work._replace(group=gid), rebase(upload, sent, state.groups, gid)


def update_groups(
    now: Now, state: State, cohort: Cohort, work: Work, upload: Upload, before: State | None
) -> tuple[State, jax.Array]:
    """Aggregates, takes the server's step, and calls `finish`. Returns also the mass [m] behind
    each group's step.

    Args: as those of `regroup`, which has returned `work` and `upload`; `before` is the state in
    which the cohort was trained.
    """
    parts, gid = now.parts, work.group
    assigned = client_rows.reset_rows_of_movers(
        parts.local, store_groups(now, before, state, cohort, gid)
    )
    r = now.give(AGGREGATE, assigned, cohort, work, upload)
    step, mass = parts.aggregate(r)
    step = client_rows.add_rows_to_step(parts.local, assigned, step)
    groups, server = apply_server_optimizer(parts.server, state, step, mass)
    after = assigned.replace(groups=groups, server=server)
    if parts.method.finish is not None:
        plain = client_rows.uncorrect_updates(parts.local, work, upload)
        after = parts.method.finish(now.give(FINISH, after, cohort, work, plain, assigned))
    return after, mass


def close_round(
    parts: Parts, state: State, measured: dict, cohort: Cohort, upload: Upload, log: RoundLog
) -> tuple[State, Info]:
    """Stores what is remembered of the cohort, and closes the round.

    Args: `state` has the new models; `measured` is what `measure_updates` returns; `log` is what
    the round has done.
    """
    selection = parts.system.select.update(state.selection, state, cohort, upload, log.seconds)
    state = state.replace(round=state.round + 1, selection=selection)
    state, reported = parts.system.close(state, log)
    return state, Info(**measured, **reported)


def split_models(upload: Upload, gid: jax.Array, groups: Params) -> tuple[Upload, jax.Array]:
    """Returns the upload with one model in each slot, and the group of each: itself, or, where
    each client has trained all m models (`upload.delta` is [S, m, ...]), that of S m slots.

    Args: `gid` [S] int32 is the group of each slot; `groups` [m, ...] are the models.
    """
    leaf, whole = (jax.tree.leaves(tree)[0] for tree in (groups, upload.delta))
    if leaf.ndim == whole.ndim:
        return upload, gid
    clients, count = whole.shape[:2]
    delta = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), upload.delta)
    split = upload.replace(
        delta=delta,
        weight=jnp.repeat(upload.weight, count),
        squared_norm=squared_norms(delta).sum(0),
    )
    return split, jnp.tile(jnp.arange(count, dtype=gid.dtype), clients)


def measure_updates(
    state: State,
    groups: Params,
    cohort: Cohort,
    gid: jax.Array,
    upload: Upload,
    mass: jax.Array,
) -> dict[str, jax.Array]:
    """Returns what of `Info` is known from a round's updates; `System.close` has the rest.

    The discrepancy is that of FlexCFL, eq. 3: ||trained - new model of its own group||, over
    all clients and per group.

    Args: `state`, `groups`, `gid` and `upload` are those of `deviation`; `mass` [m] is the weight
    behind each group's step, 0: its model stayed.
    """
    updates, group = split_models(upload, gid, groups)
    distance, cosine = deviation(state, groups, group, updates)
    trained = (upload.weight > 0).astype(jnp.float32)
    used = trained if updates is upload else (updates.weight > 0).astype(jnp.float32)
    (per_group,), count = group_mean(used, group, (distance,), state.active.size)
    known = cohort.take(state.assignment) >= 0
    real = cohort.ids < state.assignment.size
    in_cohort = jnp.any((gid[:, None] == jnp.arange(mass.size)) & real[:, None], axis=0)
    num_used = jnp.maximum(used.sum(), 1.0)
    samples = jnp.maximum(upload.weight.sum(), 1.0)

    def if_any(mean: jax.Array) -> jax.Array:
        """Returns a mean over clients; NaN where no client's update is used."""
        return jnp.where(trained.any(), mean, jnp.nan)

    return {
        "loss": if_any(jnp.sum(upload.weight * upload.loss) / samples),
        "last_loss": if_any(jnp.sum(upload.weight * upload.last_loss) / samples),
        "discrepancy": if_any(jnp.sum(per_group * count) / num_used),
        "group_discrepancy": jnp.where(count > 0, per_group, jnp.nan),
        "dissimilarity": if_any(jnp.sum(used * (1.0 - cosine) / 2) / num_used),
        "selected": real.sum().astype(jnp.int32),
        "clients": trained.sum().astype(jnp.int32),
        "steps": reports.sum_counts(reports.make_count(upload.steps)),
        "cold": jnp.sum(real & ~known).astype(jnp.int32),
        "idle_groups": jnp.sum(in_cohort & (mass == 0)).astype(jnp.int32),
    }
