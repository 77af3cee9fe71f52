"""Briggs, Fan, Andras, "Federated learning with hierarchical clustering of local
updates to improve training on non-IID data", IJCNN 2020,
https://arxiv.org/abs/2004.11791.

FedAvg for some rounds; then all clients train once from its model and their updates are
clustered, once and for all; then FedAvg within each group, from that model.

Differs from the paper: the cohort is drawn from all clients and not a fraction of each
group; cutting by distance leaves at most m groups.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.clustering.assign import is_cold
from fedjax_cfl.clustering.distances import METRICS
from fedjax_cfl.clustering.hierarchical import LINKAGES, agglomerate
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.round.aggregate import uniform_mean, weighted_mean
from fedjax_cfl.round.cohort import over_clients
from fedjax_cfl.round.engine import Start, assign_single_group, federated
from fedjax_cfl.round.local import full_work
from fedjax_cfl.round.select import full_participation
from fedjax_cfl.round.sgd import sgd
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean, membership_weights
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, Params, ServedModels, State, Upload

WEIGHTINGS = {"uniform": uniform_mean, "samples": weighted_mean}


class GroupDirections(struct.PyTreeNode):
    """What clients that missed the clustering are compared with; zeros before."""

    initial: Params  # [1, ...], the model that everybody trained from
    directions: Params  # [m, ...], mean update of each group's founders


def fl_hc(
    task,
    local,
    select,
    *,
    m: int,
    warm_up: int = 20,
    metric: str = "cosine",
    linkage: str = "complete",
    threshold=None,
    newcomers: str = "largest",
    weighting: str = "samples",
) -> Algorithm:
    """FL+HC: `warm_up` rounds of FedAvg, a round in which all clients are clustered,
    then FedAvg within up to m groups.

    Args: `metric` L1 | L2 | cosine (1 - cos) between updates; `linkage` ward (with L2)
    | complete | average | single; `threshold` the distance up to which groups merge
    even when only m are left (None: exactly m); `newcomers` where clients go that sent
    no update in the clustering round: largest group | nearest mean update, once they
    take part; `weighting` within a group: samples | uniform.
    Raises InputError for a value that is not listed here.
    """
    require("algorithm.metric", metric, METRICS)
    require("algorithm.linkage", linkage, LINKAGES)
    require("algorithm.newcomers", newcomers, ("largest", "nearest"))
    require("algorithm.weighting", weighting, WEIGHTINGS)
    if linkage == "ward" and metric != "L2":
        raise InputError(f"algorithm.metric={metric}: linkage=ward is defined for metric=L2")
    local = local.resolve()
    solve, start = sgd(task, local), single_active_group(task, m)
    assign = (
        join_nearest_direction(over_clients(solve, local), metric, warm_up)
        if newcomers == "nearest"
        else assign_previous_group
    )
    found = cluster_updates(m, metric, linkage, threshold, newcomers)
    grouped = federated(
        task,
        local,
        select=select,
        solve=solve,
        start=start,
        assign=assign,
        aggregate=WEIGHTINGS[weighting],
    )
    clustering = federated(
        task,
        local,
        select=full_participation(),
        solve=solve,
        start=start,
        assign=assign_single_group,
        regroup=found,
        aggregate=zero_step,
    )

    def round(key, state, data):
        return lax.cond(state.round == warm_up, clustering.round, grouped.round, key, state, data)

    def serve(state: State):
        """Serves all clients group 0 until they are clustered."""
        return ServedModels(state.groups, jnp.where(state.round > warm_up, state.assignment, 0))

    return Algorithm(grouped.init, round, serve, nonfinite=grouped.nonfinite)


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


def cluster_updates(m: int, metric: str, linkage: str, threshold, newcomers: str):
    """Returns regroup(...): clusters the updates into groups, numbered by their lowest
    client, that all start from group 0's model.
    """

    def regroup(key, state: State, data: FederatedData, cohort: Cohort, gid, upload: Upload):
        order = jnp.argsort(cohort.ids)  # neither numbers nor ties depend on slots
        distance = METRICS[metric](upload.delta)[order][:, order]
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


def assign_previous_group(key, state: State, data: FederatedData, cohort: Cohort):
    """Leaves clients in their group, 0 before there are any."""
    return (
        jnp.maximum(state.assignment[jnp.minimum(cohort.ids, data.num_clients - 1)], 0),
        make_traffic(),
    )


def join_nearest_direction(train, metric: str, warm_up: int):
    """Lets clients that missed the clustering train from its model, once, and join the
    group of the nearest mean update.

    `train` is the solver of a cohort. Costs a newcomer 1 model down and 1 up more.
    """

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        gid, _ = assign_previous_group(key, state, data, cohort)
        waiting = is_cold(state, cohort) & (state.round > warm_up)

        def nearest():
            newcomers = cohort.replace(ids=jnp.where(waiting, cohort.ids, data.num_clients))
            upload = train(
                newcomers, data, (key, state.memory.initial), full_work(jnp.zeros_like(gid))
            )
            both = jax.tree.map(
                lambda *parts: jnp.concatenate(parts), upload.delta, state.memory.directions
            )
            distance = METRICS[metric](both)[: gid.size, gid.size :]
            return jnp.argmin(jnp.where(state.active, distance, jnp.inf), axis=1).astype(jnp.int32)

        count = jnp.sum(waiting)
        joined = lax.cond(jnp.any(waiting), nearest, lambda: gid)
        return jnp.where(waiting, joined, gid), make_traffic(units_down=count, units_up=count)

    return assign
