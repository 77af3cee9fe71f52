"""One federated round, in order. Every algorithm that fits is a call of `federated`
with other parts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.round import faults, traffic
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.cohort import make_cohort, over_clients
from fedjax_cfl.round.local import Local, Work
from fedjax_cfl.round.sgd import client_cost
from fedjax_cfl.round.tree import group_mean, squared_norms
from fedjax_cfl.types import (
    Algorithm,
    Cohort,
    FederatedData,
    Info,
    ServedModels,
    State,
    Task,
    Traffic,
)

# Purposes: every draw of a run comes from fold_in(key, purpose), then the round, then the
# client's id; never a position in the cohort.
SELECT, START, ASSIGN, PREPARE, TRAIN, DRIFT, MIGRATE, FAULTS, BYZANTINE, REGROUP = range(
    PURPOSES := 10
)


class Start(NamedTuple):
    """What a method begins with."""

    groups: Any  # [m, ...]
    assignment: jax.Array | None = None  # [K], None: nobody has met the server
    memory: Any = ()
    traffic: Traffic | None = None  # communication before round 0
    active: Any = None  # [m] bool, None: all groups are in use


def derive_key(key, purpose: int, round=None):
    """Returns the key of one purpose, in one round if given."""
    key = jax.random.fold_in(key, purpose)
    return key if round is None else jax.random.fold_in(key, round)


def assign_single_group(key, state: State, data: FederatedData, cohort: Cohort):
    """Everybody shares group 0."""
    return jnp.zeros_like(cohort.ids), traffic.make_traffic()


def random_groups(task: Task, num_groups: int):
    """Starts from `num_groups` independent random models."""

    def start(key, data):
        return Start(jax.vmap(task.init)(jax.random.split(key, num_groups)))

    return start


def serve_global(state: State) -> ServedModels:
    """Serves group 0 to all clients (single-model methods)."""
    return ServedModels(state.groups, jnp.zeros_like(state.assignment))


def serve_assigned(state: State) -> ServedModels:
    """Serves each client the model of the group it was last assigned to; clients never
    met have none.
    """
    return ServedModels(state.groups, state.assignment)


def federated(
    task: Task,
    local: Local,
    *,
    select,
    solve,
    start=None,
    migrate=None,
    assign=assign_single_group,
    prepare=None,
    effort=None,
    regroup=None,
    aggregate=weighted_mean,
    server=None,
    mix=None,
    remember=None,
    founders=None,
) -> Algorithm:
    """Composes an algorithm from parts; each part's contract stands in its own module.

    Args: `start(key, data)` -> Start, whose groups fix m; `migrate(key, state, data)`
    -> (state, clients moved, Traffic) before anything else in a round; `prepare(key,
    state, data, cohort, gid)` -> client_extra [S, ...]; `effort(key, data, cohort)` ->
    share [S] of the local steps completed; `regroup(key, state, data, cohort, gid,
    upload)` -> (state, gid) once the updates are known: it may change anything but the
    cohort's assignment, which becomes its gid; `server` an optax transformation of each
    group's pseudo-gradient -step (default: add the step); `mix(groups, owning)` after
    the server step; `remember(state, groups, cohort, gid, upload)` -> the new memory,
    given the state that `aggregate` gets and the new group models; `founders(key, K)`
    -> the clients whose samples `start` reads (`no_clients`: it reads none), given by
    methods whose rounds read no samples but the cohort's. A method with `assign` is
    clustered: it serves and evaluates only clients it has met.
    """
    local = local.resolve()
    start = start or random_groups(task, 1)
    server = server or optax.sgd(1.0)
    fault_model = local.faults.validate()
    solve = over_clients(faults.with_faults(fault_model, solve), local)
    clustered = assign is not assign_single_group

    def init(key, data):
        begun = start(derive_key(key, START), data)
        num_groups = jax.tree.leaves(begun.groups)[0].shape[0]
        return State(
            round=jnp.zeros((), jnp.int32),
            groups=begun.groups,
            server=jax.vmap(server.init)(begun.groups),
            active=jnp.ones(num_groups, bool) if begun.active is None else begun.active,
            assignment=(
                jnp.full(data.num_clients, -1, jnp.int32)
                if begun.assignment is None
                else begun.assignment
            ),
            traffic=traffic.make_traffic() if begun.traffic is None else begun.traffic,
            memory=begun.memory,
        )

    def round(key, state, data):
        moved, walked = jnp.zeros((), jnp.int32), traffic.make_traffic()
        streams = jax.vmap(derive_key, (None, 0, None))(
            key, jnp.arange(PURPOSES), state.round
        )  # at once: each would be compiled by itself
        if migrate:
            state, moved, walked = migrate(streams[MIGRATE], state, data)
        ids = select(streams[SELECT], state.round, data.num_clients)
        cohort = make_cohort(ids, data, local, client_cost(task, local, data.max_client_samples))
        gid, asked = assign(streams[ASSIGN], state, data, cohort)
        client_extra = prepare(streams[PREPARE], state, data, cohort, gid) if prepare else ()
        share = effort(streams[PREPARE], data, cohort) if effort else jnp.ones(gid.shape)
        share = faults.apply_stragglers(fault_model, streams[FAULTS], cohort, share)
        attackers = faults.draw_byzantine(fault_model, derive_key(key, BYZANTINE), data.num_clients)
        seen = faults.flip_labels(fault_model, attackers, data)
        received = streams[TRAIN], state.groups
        upload, lost = solve(
            cohort, seen, (received, (streams[FAULTS], attackers)), Work(gid, share, client_extra)
        )
        lost = faults.sum_fault_counts(lost, cohort)
        if regroup:
            state, gid = regroup(streams[REGROUP], state, data, cohort, gid, upload)
        met = state.replace(assignment=state.assignment.at[cohort.ids].set(gid, mode="drop"))
        step, mass = aggregate(upload, gid, cohort, client_extra, met)
        groups, server_state = apply_server_optimizer(server, state, step, mass)
        sent = traffic.make_traffic(units_down=ids.size, units_up=ids.size - lost.dropped)
        if mix:
            groups, exchanged = mix(
                groups, jnp.any(met.assignment[:, None] == jnp.arange(state.active.size), axis=0)
            )
            sent = traffic.add_traffic(sent, exchanged)
        info = make_info(state, groups, cohort, gid, upload, mass).replace(
            shifted=jnp.sum(data.shifted), migrated=moved, fault_counts=lost
        )
        memory = remember(met, groups, cohort, gid, upload) if remember else state.memory
        total = traffic.add_traffic(state.traffic, walked, asked, sent)
        return (
            met.replace(
                round=state.round + 1,
                groups=groups,
                server=server_state,
                traffic=total,
                memory=memory,
            ),
            info,
        )

    def reads(key, round, num_clients):
        if round is None:
            return founders(derive_key(key, START), num_clients)
        return select(derive_key(key, SELECT, round), round, num_clients)

    serve = serve_assigned if clustered else serve_global
    return Algorithm(
        init, round, serve, clustered, reads if founders else None, nonfinite=fault_model.nonfinite
    )


def no_clients(key, num_clients: int):
    """The founders of a method whose start reads no samples."""
    return jnp.zeros(0, jnp.int32)


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


def make_info(state: State, groups, cohort: Cohort, gid, upload, mass) -> Info:
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
        steps=upload.steps.sum(),
        cold=jnp.sum(real & ~known).astype(jnp.int32),
        shifted=jnp.zeros((), jnp.int32),
        migrated=jnp.zeros((), jnp.int32),
        fault_counts=None,
        idle_groups=jnp.sum(asked & (mass == 0)).astype(jnp.int32),
    )
