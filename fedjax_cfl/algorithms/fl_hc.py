"""Briggs, Fan, Andras, "Federated learning with hierarchical clustering of local
updates to improve training on non-IID data", IJCNN 2020,
https://arxiv.org/abs/2004.11791.

FedAvg for some rounds; then all clients train once from its model and their updates are
clustered, once and for all; then FedAvg within each group, from that model.

Differs from the paper: the cohort is drawn from all clients and not a fraction of each
group; cutting by distance leaves at most m groups.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.clustering.assign import is_cold, keep_groups
from fedjax_cfl.clustering.distances import cosine_distance, euclidean
from fedjax_cfl.clustering.hierarchical import LINKAGES, agglomerate
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.faults import no_faults
from fedjax_cfl.round.hooks import AggregateFn, AssignFn, Hooks, RegroupFn, Start, make_report
from fedjax_cfl.round.local import Local, full_work
from fedjax_cfl.round.pretrain import train_aside
from fedjax_cfl.round.select import full_participation
from fedjax_cfl.round.sgd import sgd
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean, membership_weights
from fedjax_cfl.types import (
    Algorithm,
    Cohort,
    FederatedData,
    Params,
    Selection,
    ServedModels,
    State,
    Task,
    Upload,
)

MetricFn = Callable[[Params], jax.Array]  # (updates [S, ...]) -> distances [S, S]


class GroupDirections(struct.PyTreeNode):
    """What clients that missed the clustering are compared with; zeros before."""

    initial: Params  # [1, ...], the model that everybody trained from
    directions: Params  # [m, ...], mean update of each group's founders


def fl_hc(
    task: Task,
    local: Local,
    select: Selection,
    *,
    m: int,
    warm_up: int = 20,
    metric: MetricFn = cosine_distance,
    linkage: str = "complete",
    threshold=None,
    newcomers: str = "largest",
    aggregate: AggregateFn = weighted_mean,
) -> Algorithm:
    """FL+HC: `warm_up` rounds of FedAvg, a round in which all clients are clustered,
    then FedAvg within up to m groups.

    Args: `metric` manhattan | euclidean | cosine_distance between updates; `linkage` ward
    (with euclidean) | complete | average | single; `threshold` the distance up to which
    groups merge even when only m are left (None: exactly m); `newcomers` where clients go
    that sent no update in the clustering round: largest group | nearest mean update, once
    they take part; `aggregate` within a group: weighted_mean | uniform_mean.
    Raises InputError for a value that is not listed here.
    """
    require("algorithm.linkage", linkage, LINKAGES)
    require("algorithm.newcomers", newcomers, ("largest", "nearest"))
    if linkage == "ward" and metric is not euclidean:
        raise InputError("algorithm.metric: linkage=ward is defined for metric=L2")
    local = local.resolve()
    solve, start = sgd(task, local), single_active_group(task, m)
    join = keep_groups
    if newcomers == "nearest":
        join = join_nearest_direction(train_aside(solve, local), metric, warm_up)
    found = cluster_updates(m, metric, linkage, threshold, newcomers)
    grouped = federated(
        task, local, select, Hooks(solve, start=start, assign=join, aggregate=aggregate)
    )
    clustering = federated(
        task,
        local,
        full_participation(),
        Hooks(solve, start=start, regroup=found, aggregate=zero_step),
    )

    def round(key, state, data):
        return lax.cond(state.round == warm_up, clustering.round, grouped.round, key, state, data)

    def serve(state: State):
        """Serves all clients group 0 until they are clustered."""
        return ServedModels(state.groups, jnp.where(state.round > warm_up, state.assignment, 0))

    return grouped._replace(round=round, serve=serve, clustered=False)


def single_active_group(task, m: int):
    """Starts from one random model in group 0; the others wait."""

    def start(key, data):
        initial = jax.tree.map(lambda leaf: leaf[None], task.init(key))
        groups = jax.tree.map(lambda leaf: jnp.repeat(leaf, m, axis=0), initial)
        memory = GroupDirections(
            *(jax.tree.map(jnp.zeros_like, tree) for tree in (initial, groups))
        )
        return Start(groups, memory=memory, active=jnp.arange(m) == 0)

    return start


def cluster_updates(m: int, metric: MetricFn, linkage: str, threshold, newcomers: str) -> RegroupFn:
    """Clusters the updates into groups, numbered by their lowest
    client, that all start from group 0's model.
    """

    def regroup(key, state: State, data: FederatedData, cohort: Cohort, gid, upload: Upload):
        order = jnp.argsort(cohort.ids)  # neither numbers nor ties depend on slots
        distance = metric(upload.delta)[order][:, order]
        label = agglomerate(distance, m, linkage, (upload.weight > 0)[order], threshold)
        gid = jnp.zeros_like(label).at[order].set(label)
        directions, size = group_mean((gid >= 0).astype(jnp.float32), gid, upload.delta, m)
        if newcomers == "largest":
            gid = jnp.where(gid < 0, jnp.argmax(size), gid).astype(jnp.int32)
        groups, server = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), (state.groups, state.server)
        )
        memory = GroupDirections(jax.tree.map(lambda leaf: leaf[:1], groups), directions)
        active = (size > 0) | (jnp.arange(m) == jnp.argmax(size))
        return state.replace(groups=groups, server=server, active=active, memory=memory), gid

    return regroup


def zero_step(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
    """Leaves every group where it is: the clustering round only finds out who is alike."""
    return jax.tree.map(jnp.zeros_like, state.groups), membership_weights(
        upload.weight, gid, state.active.size
    ).sum(0)


def join_nearest_direction(train, metric: MetricFn, warm_up: int) -> AssignFn:
    """Lets clients that missed the clustering train from its model, once, and join the
    group of the nearest mean update.

    `train` is a `train_aside`. Costs a newcomer 1 model down and 1 up more.
    """

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        gid, _ = keep_groups(key, state, data, cohort)
        waiting = is_cold(state, cohort) & (state.round > warm_up)

        def nearest():
            newcomers = cohort.replace(ids=jnp.where(waiting, cohort.ids, data.num_clients))
            work = full_work(jnp.zeros_like(gid))
            upload, faults = train(newcomers, data, (key, state.memory.initial), work)
            both = jax.tree.map(
                lambda *parts: jnp.concatenate(parts), upload.delta, state.memory.directions
            )
            distance = metric(both)[: gid.size, gid.size :]
            usable = state.active & jnp.isfinite(distance)
            closest = jnp.argmin(jnp.where(usable, distance, jnp.inf), axis=1)
            return closest.astype(jnp.int32), faults

        joined, faults = lax.cond(jnp.any(waiting), nearest, lambda: (gid, no_faults()))
        sent = make_traffic(units_down=waiting, units_up=waiting)
        return jnp.where(waiting, joined, gid), make_report(sent, fault_counts=faults)

    return assign
