"""One federated round, in order. Every method that fits is a call of `federated` with
other hooks.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.round import clock, faults, traffic
from fedjax_cfl.round.cohort import make_cohort, over_clients
from fedjax_cfl.round.counts import add_counts, make_count, sum_counts
from fedjax_cfl.round.hooks import Hooks, Start, add_reports, make_report
from fedjax_cfl.round.local import Local, Work, full_work
from fedjax_cfl.round.sgd import client_cost
from fedjax_cfl.round.tree import group_mean, squared_norms
from fedjax_cfl.types import (
    Algorithm,
    Cohort,
    FederatedData,
    Info,
    Params,
    Report,
    Selection,
    ServedModels,
    State,
    Task,
    Upload,
)

# Purposes: every draw of a run comes from fold_in(key, purpose), then the round, then the
# client's id; never a position in the cohort.
SELECT, START, ASSIGN, PREPARE, TRAIN, DRIFT, MIGRATE, FAULTS, BYZANTINE, REGROUP = range(
    PURPOSES := 10
)


def derive_key(key, purpose: int, round=None):
    """Returns the key of one purpose, in one round if given."""
    key = jax.random.fold_in(key, purpose)
    return key if round is None else jax.random.fold_in(key, round)


def derive_keys(key, round):
    """Returns the keys [PURPOSES] of all purposes in one round; at once, for each would be
    compiled by itself.
    """
    return jax.vmap(derive_key, (None, 0, None))(key, jnp.arange(PURPOSES), round)


def random_groups(task: Task, num_groups: int):
    """Starts from `num_groups` independent random models."""

    def start(key, data) -> Start:
        return Start(jax.vmap(task.init)(jax.random.split(key, num_groups)))

    return start


def no_clients(key, num_clients: int) -> jax.Array:
    """The clients whose samples a start reads that reads none."""
    return jnp.zeros(0, jnp.int32)


def serve_global(state: State) -> ServedModels:
    """Serves group 0 to all clients (single-model methods)."""
    return ServedModels(state.groups, jnp.zeros_like(state.assignment))


def serve_assigned(state: State) -> ServedModels:
    """Serves each client the model of the group it was last assigned to; clients never
    met have none.
    """
    return ServedModels(state.groups, state.assignment)


class Parts(NamedTuple):
    """What a round is made of, once the hooks' defaults are filled in."""

    task: Task
    local: Local
    select: Selection
    hooks: Hooks
    train: jax.tree_util.Partial  # the cohort's training, with faults
    server: optax.GradientTransformation


def federated(task: Task, local: Local, select: Selection, hooks: Hooks) -> Algorithm:
    """Composes a method from the hooks of one round, see `Hooks`."""
    local = local.resolve()
    parts = Parts(
        task,
        local,
        select,
        hooks,
        over_clients(faults.with_faults(local.faults.validate(), hooks.solve), local),
        hooks.server or optax.sgd(1.0),
    )
    start = hooks.start or random_groups(task, 1)

    def init(key, data: FederatedData) -> State:
        return init_state(parts, start(derive_key(key, START), data), data)

    def round(key, state: State, data: FederatedData) -> tuple[State, Info]:
        keys = derive_keys(key, state.round)
        state, moves = migrate(parts, keys, state, data)
        cohort = draw_cohort(parts, keys, state, data)
        work, asked = plan_work(parts, keys, state, data, cohort)
        upload, answers = train_cohort(parts, key, keys, state, data, cohort, work, asked)
        sent = state.groups
        state, upload, gid = regroup(parts, keys, state, data, cohort, work, upload)
        after, mass, mixed = update_groups(parts, state, cohort, work, gid, upload)
        reports = add_reports(moves, asked, answers.report, make_report(mixed))
        info = make_info(state, after.groups, cohort, gid, upload, mass, answers, reports)
        after = finish_round(parts, sent, after, cohort, work, upload, answers, reports)
        return after, info.replace(shifted=jnp.sum(data.shifted))

    def data_clients(key, round, num_clients: int):
        if round is None:
            return hooks.start_clients(derive_key(key, START), num_clients)
        return select.draw(derive_key(key, SELECT, round), round, num_clients)

    return Algorithm(
        init,
        round,
        serve_assigned if hooks.assign else serve_global,
        clustered=hooks.assign is not None,
        data_clients=data_clients if hooks.start_clients and select.draw else None,
        nonfinite=local.faults.nonfinite,
    )


def init_state(parts: Parts, begun: Start, data: FederatedData) -> State:
    """Returns the state before round 0."""
    num_groups = jax.tree.leaves(begun.groups)[0].shape[0]
    report = begun.report or make_report()
    unknown = jnp.full(data.num_clients, -1, jnp.int32)
    state = State(
        round=jnp.zeros((), jnp.int32),
        groups=begun.groups,
        server=jax.vmap(parts.server.init)(begun.groups),
        active=jnp.ones(num_groups, bool) if begun.active is None else begun.active,
        assignment=unknown if begun.assignment is None else begun.assignment,
        traffic=traffic.add_traffic(report.traffic),
        memory=begun.memory,
        selection=parts.select.init(data),
        clock_ms=make_count(0),
        received=(),
        start_faults=report.fault_counts,
    )
    return keep_served(state) if parts.local.keep_received else state


def keep_served(state: State) -> State:
    """Lets every client have received the model of its group; group 0's if it has none."""
    rows = jnp.maximum(state.assignment, 0)
    return state.replace(received=jax.tree.map(lambda leaf: leaf[rows], state.groups))


def migrate(parts: Parts, keys, state: State, data: FederatedData) -> tuple[State, Report]:
    """Step 1: what happens to the groups before anybody is selected."""
    if parts.hooks.migrate is None:
        return state, make_report()
    return parts.hooks.migrate(keys[MIGRATE], state, data)


def draw_cohort(parts: Parts, keys, state: State, data: FederatedData) -> Cohort:
    """Step 2: draws the clients and gives them slots, longest first. The ids are drawn
    here and nowhere else.
    """
    ids = parts.select.select(keys[SELECT], state.selection, state, data)
    cost = client_cost(parts.task, parts.local, data.max_client_samples)
    return make_cohort(ids, data, parts.local, cost)


def plan_work(
    parts: Parts, keys, state: State, data: FederatedData, cohort: Cohort
) -> tuple[Work, Report]:
    """Step 3: the group that each client trains, how far, and what it needs besides."""
    if parts.hooks.assign:
        gid, asked = parts.hooks.assign(keys[ASSIGN], state, data, cohort)
    else:
        gid, asked = jnp.zeros_like(cohort.ids), make_report()
    work = full_work(gid, parts.local.lr_scale(state.round))
    if parts.hooks.prepare:
        work = parts.hooks.prepare(keys[PREPARE], state, data, cohort, work)
    fraction = faults.apply_stragglers(parts.local.faults, keys[FAULTS], cohort, work.step_fraction)
    return work._replace(step_fraction=fraction), asked


class Answers(NamedTuple):
    """What came back from the cohort, besides the updates."""

    report: Report  # models sent, and faults
    seconds: jax.Array | None  # [S] float32, how long each client took; None: no clock
    duration: jax.Array  # [] float32, simulated seconds of the round
    late: jax.Array  # [] int32, clients that answered after its end


def train_cohort(
    parts: Parts, key, keys, state: State, data: FederatedData, cohort: Cohort, work: Work, asked
) -> tuple[Upload, Answers]:
    """Step 4: every client trains from its group's model; ragged, chunked, sharded.

    Late clients count like those that never answered.
    """
    local = parts.local
    attackers = faults.draw_byzantine(local.faults, derive_key(key, BYZANTINE), data.num_clients)
    seen = faults.flip_labels(local.faults, attackers, data)
    shared = (keys[TRAIN], state.groups), (keys[FAULTS], attackers)
    upload, lost = parts.train(cohort, seen, shared, work)
    real = cohort.ids < data.num_clients
    answered = real & (lost.dropped == 0)
    sent = traffic.make_traffic(units_down=real, units_up=answered)
    report = make_report(sent, fault_counts=faults.sum_fault_counts(lost, cohort))
    if local.clock is None:
        return upload, Answers(report, None, jnp.zeros(()), jnp.zeros((), jnp.int32))
    model_bytes = sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(state.groups))
    moved = traffic.slot_bytes(sent, model_bytes) + traffic.slot_bytes(asked.traffic, model_bytes)
    seconds = jnp.where(real, local.clock.seconds(cohort, upload, moved), 0.0)
    duration, late = clock.end_round(seconds, answered, local.clock.wait_for)
    upload = faults.drop_updates(late, upload)
    return upload, Answers(report, seconds, duration, jnp.sum(late).astype(jnp.int32))


def regroup(
    parts: Parts, keys, state: State, data: FederatedData, cohort: Cohort, work: Work, upload
) -> tuple[State, Upload, jax.Array]:
    """Step 5: clients may move to other groups by what they sent; returns their groups."""
    if parts.hooks.regroup is None:
        return state, upload, work.group
    sent = state.groups
    state, gid = parts.hooks.regroup(keys[REGROUP], state, data, cohort, work.group, upload)
    return state, rebase(upload, sent, state.groups, gid), gid


def rebase(upload: Upload, sent: Params, groups: Params, gid) -> Upload:
    """Returns the upload with every delta relative to the model of the client's present
    group `gid` [S]: start + delta - group.

    A client that has moved trained from `sent` [m, ...] of another group. Its delta means
    nothing to the new one, its model does.
    """

    elsewhere = (gid != upload.start_group) & (upload.weight > 0)

    def shift() -> Upload:
        def moved(delta, sent, groups):
            return delta + sent[upload.start_group] - groups[gid]

        delta = jax.tree.map(
            partial(jax.vmap(jnp.where), elsewhere),
            jax.tree.map(moved, upload.delta, sent, groups),
            upload.delta,
        )
        return upload.replace(delta=delta, squared_norm=squared_norms(delta).sum(0))

    return jax.lax.cond(jnp.any(elsewhere), shift, lambda: upload)


def update_groups(
    parts: Parts, state: State, cohort: Cohort, work: Work, gid, upload: Upload
) -> tuple[State, jax.Array, traffic.Traffic]:
    """Steps 6 and 7: aggregates, takes the server's step, and finishes the method's own
    business; returns (state, mass [m] behind each group's step, what finishing sent).
    """
    met = state.replace(assignment=state.assignment.at[cohort.ids].set(gid, mode="drop"))
    step, mass = parts.hooks.aggregate(upload, gid, cohort, work.client_extra, met)
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
    """Step 8: the ledger, the clock, and what is remembered of the cohort."""
    received = state.received
    if parts.local.keep_received:
        received = jax.tree.map(
            lambda old, groups: old.at[cohort.ids].set(groups[work.group], mode="drop"),
            received,
            sent,
        )
    milliseconds = make_count(jnp.round(answers.duration * 1000.0).astype(jnp.uint32))
    return state.replace(
        round=state.round + 1,
        traffic=traffic.add_traffic(state.traffic, reports.traffic),
        clock_ms=add_counts(state.clock_ms, milliseconds),
        selection=parts.select.update(state.selection, state, cohort, upload, answers.seconds),
        received=received,
        start_faults=faults.no_faults(),
    )


def apply_server_optimizer(server: optax.GradientTransformation, state: State, step, mass):
    """Applies the server optimizer to every group that received something; the others
    keep model and optimizer state.
    """
    moved = (mass > 0) & state.active
    updates, new_server = jax.vmap(server.update)(
        jax.tree.map(jnp.negative, step), state.server, state.groups
    )
    updated = jax.vmap(optax.apply_updates)(state.groups, updates)

    keep = partial(jax.vmap(jnp.where), moved)
    return jax.tree.map(keep, updated, state.groups), jax.tree.map(keep, new_server, state.server)


def deviation(state: State, groups, gid, upload):
    """Returns each trained model's distance [S] from its own group's new model, and the
    cosine [S] of its delta to the group's step.

    By one matrix product of all updates with all steps; squares are right to about 1e-7
    of the update's own square, and a distance within 1/300 of its length is 0.
    """
    shift = jax.tree.map(jnp.subtract, groups, state.groups)
    pairs = zip(jax.tree.leaves(upload.delta), jax.tree.leaves(shift), strict=True)
    product = sum(x.reshape(len(x), -1) @ y.reshape(len(y), -1).T for x, y in pairs)  # [S, m]
    own = jnp.take_along_axis(product, gid[:, None], axis=1)[:, 0]
    walked = squared_norms(shift).sum(0)[gid]
    gap = upload.squared_norm - 2 * own + walked
    norms = jnp.sqrt(upload.squared_norm * walked)
    return jnp.sqrt(jnp.where(gap > 1e-5 * upload.squared_norm, gap, 0.0)), jnp.where(
        norms > 0, own / jnp.where(norms > 0, norms, 1.0), 0.0
    )


def make_info(state: State, groups, cohort: Cohort, gid, upload, mass, answers, reports) -> Info:
    """Returns the round's Info. Discrepancy: FlexCFL eq. 3, ||trained - own group's new
    model||, whole and per group.
    """
    distance, cosine = deviation(state, groups, gid, upload)
    trained = (upload.weight > 0).astype(jnp.float32)
    (per_group,), count = group_mean(trained, gid, (distance,), state.active.size)
    known = state.assignment[jnp.minimum(cohort.ids, state.assignment.size - 1)] >= 0
    real = cohort.ids < state.assignment.size
    asked = jnp.any((gid[:, None] == jnp.arange(mass.size)) & real[:, None], axis=0)
    clients = jnp.maximum(trained.sum(), 1.0)
    samples = jnp.maximum(upload.weight.sum(), 1.0)
    return Info(
        loss=jnp.sum(upload.weight * upload.loss) / samples,
        last_loss=jnp.sum(upload.weight * upload.last_loss) / samples,
        discrepancy=jnp.sum(per_group * count) / clients,
        group_discrepancy=jnp.where(count > 0, per_group, jnp.nan),
        dissimilarity=jnp.sum(trained * (1.0 - cosine) / 2) / clients,
        selected=real.sum().astype(jnp.int32),
        clients=trained.sum().astype(jnp.int32),
        steps=sum_counts(make_count(upload.steps)),
        cold=jnp.sum(real & ~known).astype(jnp.int32),
        shifted=jnp.zeros((), jnp.int32),
        migrated=reports.migrated,
        fault_counts=faults.add_fault_counts(state.start_faults, reports.fault_counts),
        idle_groups=jnp.sum(asked & (mass == 0)).astype(jnp.int32),
        late=answers.late,
        seconds=answers.duration,
    )
