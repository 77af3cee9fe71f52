"""One federated round, in order. A method is a call of `federated` with hooks of its own."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.round import faults, timing, traffic
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.client_models import put_models
from fedjax_cfl.round.cohort import make_cohort, over_clients
from fedjax_cfl.round.hooks import (
    AggregateFn,
    Hooks,
    Start,
    add_reports,
    make_report,
)
from fedjax_cfl.round.info import make_info
from fedjax_cfl.round.keys import (
    ASSIGN,
    BYZANTINE,
    FAULTS,
    MIGRATE,
    PREPARE,
    REGROUP,
    SELECT,
    START,
    TRAIN,
    derive_key,
    derive_keys,
)
from fedjax_cfl.round.local import Local, Work, full_work
from fedjax_cfl.round.server import apply_server_optimizer, rebase
from fedjax_cfl.round.sgd import client_cost
from fedjax_cfl.round.start import keep_served, know_clients, random_groups
from fedjax_cfl.types import (
    Algorithm,
    Asked,
    Cohort,
    FaultCounts,
    FederatedData,
    Info,
    Key,
    Params,
    Report,
    Selection,
    ServedModels,
    State,
    Task,
    Upload,
)


def serve_global(state: State) -> ServedModels:
    """Serves group 0 to all clients (single-model methods)."""
    return ServedModels(state.groups, jnp.zeros_like(state.assignment))


def serve_assigned(state: State) -> ServedModels:
    """Serves each client the model of its group; clients never met have none."""
    return ServedModels(state.groups, state.assignment)


class Parts(NamedTuple):
    """What a round is made of, with the defaults of the hooks filled in."""

    task: Task
    local: Local
    select: Selection
    hooks: Hooks
    train: Callable[..., tuple[Upload, FaultCounts]]  # trains the cohort, with faults
    aggregate: AggregateFn
    server: optax.GradientTransformation


def federated(task: Task, local: Local, select: Selection, hooks: Hooks) -> Algorithm:
    """Composes a method from the hooks of one round, see `Hooks`.

    Raises InputError for settings of `local` that are not allowed.
    """
    local = local.resolve()
    parts = Parts(
        task,
        local,
        select,
        hooks,
        over_clients(faults.with_faults(local.faults.validate(), hooks.solve), local),
        hooks.aggregate or weighted_mean,
        hooks.server or optax.sgd(1.0),
    )
    start = hooks.start or random_groups(task, 1)

    def init(key: Key, data: FederatedData) -> State:
        return init_state(parts, start(derive_key(key, START), data), data)

    def round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        keys = derive_keys(key, state.round)
        state, migration = migrate(parts, keys, state, data)
        cohort, asked = draw_cohort(parts, keys, state, data)
        work, planned = plan_work(parts, keys, state, data, cohort)
        model_bytes = traffic.model_bytes_of(state.groups)
        waited = timing.wait_before(local.clock, state, migration, asked, model_bytes)
        upload, answers = train_cohort(
            parts, key, keys, state, data, cohort, work, planned, asked, waited
        )
        sent, trained = state.groups, state
        state, upload, gid = regroup(parts, keys, state, data, cohort, work, upload)
        after, mass, finishing = update_groups(parts, state, cohort, work, gid, upload)
        besides = traffic.add_traffic(asked.traffic, finishing) if asked else finishing
        reports = add_reports(migration, *planned, answers.report, make_report(besides))
        info = make_info(state, after.groups, cohort, gid, upload, mass, local.mesh).replace(
            shifted=jnp.sum(data.shifted),
            migrated=reports.migrated,
            reclustered=reports.reclustered,
            fault_counts=faults.add_fault_counts(state.start_faults, reports.fault_counts),
            late=answers.late,
            seconds=answers.duration.max(),
        )
        ended = finish_round(parts, sent, after, cohort, work, upload, answers, reports)
        return timing.hand_on_clocks(local.clock, trained, ended), info

    return Algorithm(
        init,
        round,
        serve_assigned if hooks.assign else serve_global,
        clustered=hooks.assign is not None,
        data_clients=know_clients(hooks.start_clients, select.draw),
        nonfinite=local.faults.nonfinite,
    )


def init_state(parts: Parts, initial: Start, data: FederatedData) -> State:
    """Returns the state before round 0."""
    num_groups = jax.tree.leaves(initial.groups)[0].shape[0]
    report = initial.report or make_report()
    unknown = jnp.full(data.num_clients, -1, jnp.int32)
    state = State(
        round=jnp.zeros((), jnp.int32),
        groups=initial.groups,
        server=jax.vmap(parts.server.init)(initial.groups),
        active=jnp.ones(num_groups, bool) if initial.active is None else initial.active,
        assignment=unknown if initial.assignment is None else initial.assignment,
        traffic=traffic.add_traffic(report.traffic),
        memory=initial.memory,
        selection=parts.select.init(data),
        clock_ms=timing.start_clock(parts.local.clock, num_groups),
        received=(),
        start_faults=report.fault_counts,
    )
    return keep_served(parts.local, state)


def migrate(parts: Parts, keys: Key, state: State, data: FederatedData) -> tuple[State, Report]:
    """Step 1: moves clients, or founds new groups, before anybody is selected."""
    if parts.hooks.migrate is None:
        return state, make_report()
    after, report = parts.hooks.migrate(keys[MIGRATE], state, data)
    return timing.hand_on_clocks(parts.local.clock, state, after, report.reclustered), report


def draw_cohort(
    parts: Parts, keys: Key, state: State, data: FederatedData
) -> tuple[Cohort, Asked | None]:
    """Step 2: draws the clients, here and nowhere else, and gives them slots, longest first.
    Returns what was asked of any before, too.
    """
    clock, select = parts.local.clock, parts.select
    ids, asked = timing.choose_clients(clock, select, keys[SELECT], state, data)
    cost = client_cost(parts.task, parts.local, data.max_client_samples)
    return make_cohort(ids, data, parts.local, cost), asked


def plan_work(
    parts: Parts, keys: Key, state: State, data: FederatedData, cohort: Cohort
) -> tuple[Work, list[Report]]:
    """Step 3: names the group that each client trains, and its work."""
    gid, reports = jnp.zeros_like(cohort.ids), []
    if parts.hooks.assign:
        gid, report = parts.hooks.assign(keys[ASSIGN], state, data, cohort)
        reports.append(report)
    work = full_work(gid, parts.local.lr_scale(state.round))
    if parts.hooks.prepare:
        work, report = parts.hooks.prepare(keys[PREPARE], state, data, cohort, work)
        reports.append(report)
    fraction = faults.apply_stragglers(parts.local.faults, keys[FAULTS], cohort, work.step_fraction)
    return work._replace(step_fraction=fraction), reports


class Answers(NamedTuple):
    """What the cohort's training gives besides the updates."""

    report: Report  # models sent, and faults
    seconds: jax.Array | None  # [S] float32, how long each client took; None: no clock
    duration: jax.Array  # [n] float32, simulated seconds of the round on each clock
    late: jax.Array  # [] int32, clients that answered after its end


def train_cohort(
    parts: Parts,
    key: Key,
    keys: Key,
    state: State,
    data: FederatedData,
    cohort: Cohort,
    work: Work,
    planned: list[Report],
    asked: Asked | None,
    waited: jax.Array,
) -> tuple[Upload, Answers]:
    """Step 4: trains every client from the model of its group, after `waited` [n] seconds.

    A late client, and one that is offline before it can answer, count as one that never
    answered. A client's time includes the traffic and the inference of what was `planned`, but
    not a model that it was sent when it was `asked`.
    """
    local, clock = parts.local, parts.local.clock
    attackers = faults.draw_byzantine(local.faults, derive_key(key, BYZANTINE), data.num_clients)
    train_data = faults.flip_labels(local.faults, attackers, data)
    shared = (keys[TRAIN], state.groups), (keys[FAULTS], attackers)
    upload, counts = parts.train(cohort, train_data, shared, work)
    clients = data.num_clients
    served = cohort.ids < clients
    answered = served & (counts.dropped == 0)
    if asked is not None:
        served &= asked.traffic.units_down[jnp.minimum(cohort.ids, clients - 1), 1] == 0
    if not parts.hooks.ships_model:
        served = jnp.zeros_like(served)
    duration, late, seconds = waited, jnp.zeros((), jnp.int32), None
    if clock is not None:
        sent = make_report(traffic.make_traffic(units_down=served, units_up=answered))
        seconds = timing.client_seconds(
            clock, cohort, upload, [sent, *planned], traffic.model_bytes_of(state.groups), clients
        )
        end = timing.end_round(clock, state, data, cohort, work.group, answered, seconds, waited)
        duration, late = end.duration, jnp.sum(end.late).astype(jnp.int32)
        counts = counts.replace(dropped=jnp.maximum(counts.dropped, end.gone))
        answered &= ~end.gone
        upload = faults.drop_updates(end.late | end.gone, upload)
    report = make_report(
        traffic.make_traffic(units_down=served, units_up=answered),
        fault_counts=faults.sum_fault_counts(counts, cohort),
    )
    return upload, Answers(report, seconds, duration, late)


def regroup(
    parts: Parts,
    keys: Key,
    state: State,
    data: FederatedData,
    cohort: Cohort,
    work: Work,
    upload: Upload,
) -> tuple[State, Upload, jax.Array]:
    """Step 5: moves clients to other groups by what they sent; returns their groups [S]."""
    if parts.hooks.regroup is None:
        return state, upload, work.group
    sent = state.groups
    state, gid = parts.hooks.regroup(keys[REGROUP], state, data, cohort, work.group, upload)
    return state, rebase(upload, sent, state.groups, gid), gid


def update_groups(
    parts: Parts, state: State, cohort: Cohort, work: Work, gid: jax.Array, upload: Upload
) -> tuple[State, jax.Array, traffic.Traffic]:
    """Steps 6 and 7: aggregates, takes the server's step, and calls `finish`.

    Returns (state, mass [m] behind each group's step, traffic of `finish`).
    """
    met = state.replace(assignment=state.assignment.at[cohort.ids].set(gid, mode="drop"))
    step, mass = parts.aggregate(upload, gid, cohort, work.client_extra, met)
    groups, server = apply_server_optimizer(parts.server, state, step, mass)
    after = met.replace(groups=groups, server=server)
    if parts.hooks.finish is None:
        return after, mass, traffic.make_traffic()
    after, sent = parts.hooks.finish(after, met, cohort, gid, upload)
    return after, mass, sent


def finish_round(
    parts: Parts,
    sent: Params,
    state: State,
    cohort: Cohort,
    work: Work,
    upload: Upload,
    answers: Answers,
    reports: Report,
) -> State:
    """Step 8: adds up traffic and time, and stores what is remembered of the cohort.

    `sent` [m, ...] are the models that the cohort received.
    """
    received = state.received
    if parts.local.keep_received:
        models = jax.tree.map(lambda leaf: leaf[work.group], sent)
        received = put_models(received, cohort.ids, models, parts.local.mesh)
    return state.replace(
        round=state.round + 1,
        traffic=traffic.add_traffic(state.traffic, reports.traffic),
        clock_ms=timing.advance_clock(state.clock_ms, answers.duration),
        selection=parts.select.update(state.selection, state, cohort, upload, answers.seconds),
        received=received,
        start_faults=faults.no_faults(),
    )
