"""Briggs, Fan, Andras, "Federated learning with hierarchical clustering of local
updates to improve training on non-IID data", IJCNN 2020,
https://arxiv.org/abs/2004.11791.

FedAvg runs for some rounds. Then all clients train once from its model, and their updates
are clustered, only once. Then FedAvg runs within each group, from that model.

Differs from the paper: the cohort is drawn from all clients, where the paper draws a
fraction of each group; clustering up to a distance leaves at most m groups.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike
from typing_extensions import TypeAliasType

from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import TrainFn, ask_newcomers, train_without_recording
from fedjax_cfl.clustering.distances import cosine_distance, euclidean, manhattan
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import AggregateFn, AssignFn, Method, RegroupFn, Round
from fedjax_cfl.round.aggregate import MEANS, MeanName, zero_step
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import one_active_group
from fedjax_cfl.sharding import flatten_updates, on_every_device
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike, use_all_clients
from fedjax_cfl.tree import group_mean, repeat_first, take_rows
from fedjax_cfl.types import (
    Algorithm,
    FederatedData,
    Info,
    Key,
    Params,
    Report,
    ServedModels,
    State,
    Task,
)
from fedjax_cfl.validation import NaturalInt, PositiveFloat, PositiveInt, checked, pick

# (updates [S, ...]) -> distances [S, S]
MetricFn = TypeAliasType("MetricFn", Callable[[Params], jax.Array])


class GroupDirections(struct.PyTreeNode):
    """What places clients that missed the clustering; zeros before the clustering."""

    initial: Params  # [1, ...], the model that all clients trained from
    directions: Params  # [m, ...], mean update of each group's founders
    largest: jax.Array  # [] int32, the group of most founders


@checked("algorithm")
def fl_hc(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    warm_up: NaturalInt = 20,
    metric: Literal["L1", "L2", "cosine"] | MetricFn = "cosine",
    linkage: Literal["ward", "complete", "average", "single"] = "complete",
    threshold: PositiveFloat | jax.Array | None = None,
    newcomers: Literal["largest", "nearest"] = "largest",
    aggregate: MeanName | AggregateFn = "samples",
) -> Algorithm:
    """FL+HC: `warm_up` rounds of FedAvg, a round in which all clients are clustered, then
    FedAvg within at most m groups.

    Args: `metric` between updates is L1 | L2 | cosine; `linkage` is
    ward (with L2) | complete | average | single; `threshold` is the distance up to
    which groups are merged even if only m are left (None: exactly m); `newcomers` says
    where clients with samples go that sent none in that round, and those that come later:
    largest (group) | nearest (mean update, when they next take part); `aggregate` within a
    group is samples | uniform.
    Raises InputError for a value that is not listed here.
    """
    distance = pick(metric, L1=manhattan, L2=euclidean, cosine=cosine_distance)
    if linkage == "ward" and distance is not euclidean:
        raise InputError("algorithm.metric: linkage=ward is defined for metric=L2")
    mean = pick(aggregate, **MEANS)
    solve, start = sgd(task, local), one_active_group(task, m)
    join: AssignFn = join_largest_group
    if newcomers == "nearest":
        join = join_nearest_direction(train_without_recording(solve, local, system), distance)
    found = cluster_updates(m, distance, linkage, threshold, newcomers, local.execution.mesh)
    assign = ask_newcomers(join, after=warm_up)
    method = Method(solve, start=start, memory=init_memory, assign=assign, aggregate=mean)
    grouped = federated(task, local, system, method)
    method = Method(solve, start=start, regroup=found, aggregate=zero_step)
    clustering = federated(task, local, use_all_clients(system), method)

    def round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        return lax.cond(state.round == warm_up, clustering.round, grouped.round, key, state, data)

    def serve(state: State):
        """Serves all clients group 0 until they are clustered."""
        return ServedModels(state.groups, jnp.where(state.round > warm_up, state.assignment, 0))

    return grouped._replace(round=round, serve=serve, clustered=False)


def init_memory(groups: Params, data: FederatedData) -> GroupDirections:
    """Returns the memory before the clustering."""
    zeros = jax.tree.map(jnp.zeros_like, groups)
    return GroupDirections(take_rows(zeros, slice(1)), zeros, jnp.zeros((), jnp.int32))


def cluster_updates(
    m: PositiveInt,
    metric: MetricFn,
    linkage: str,
    threshold: ArrayLike | None,
    newcomers: str,
    mesh: Mesh | None = None,
) -> RegroupFn:
    """Clusters the updates into groups, which all start from the model of group 0.

    Groups are numbered by the lowest id of their clients.

    Args: `m` is the most groups; `metric`, `linkage`, `threshold` and `newcomers` are those of
    `fl_hc`; the devices of `mesh` share the distances, None: one device.
    """

    def regroup(r: Round) -> tuple[State, jax.Array]:
        state, gid, upload = r.state, r.group, r.upload
        order = jnp.argsort(r.cohort.ids)  # so that neither numbers nor ties depend on slots
        distance = metric(flatten_updates(upload.delta, mesh))[order][:, order]

        def cluster(distance, valid):
            return agglomerate(distance, m, linkage, valid, threshold)

        label = on_every_device(cluster, mesh)(distance, (upload.weight > 0)[order])
        gid = jnp.zeros_like(label).at[order].set(label)
        directions, size = group_mean((gid >= 0).astype(jnp.float32), gid, upload.delta, m)
        largest = jnp.argmax(size).astype(jnp.int32)
        if newcomers == "largest":
            gid = jnp.where(gid < 0, largest, gid)
        groups, server = repeat_first((state.groups, state.server))
        memory = GroupDirections(take_rows(groups, slice(1)), directions, largest)
        active = (size > 0) | (jnp.arange(m) == largest)
        return state.replace(groups=groups, server=server, active=active, memory=memory), gid

    return regroup


def join_largest_group(r: Round) -> tuple[jax.Array, Report]:
    """Assigns clients the group of most founders."""
    return jnp.full(r.cohort.ids.shape, r.state.memory.largest), make_report()


def join_nearest_direction(train: TrainFn, metric: MetricFn) -> AssignFn:
    """Assigns clients the group of the nearest mean update.

    They train once from the model that was clustered, which costs a model down and one up. In
    rounds without such clients nothing is computed.
    """

    def choose(r: Round) -> tuple[jax.Array, Report]:
        memory, real = r.state.memory, r.real
        slots, zeros = real.size, jnp.zeros(real.shape, jnp.int32)

        def find_nearest() -> tuple[jax.Array, Report]:
            upload, report = train(r.key, memory.initial, r.cohort, r.data)
            both = jax.tree.map(lambda *two: jnp.concatenate(two), upload.delta, memory.directions)
            distance = metric(both)[:slots, slots:]
            usable = r.state.active & jnp.isfinite(distance)
            closest = jnp.argmin(jnp.where(usable, distance, jnp.inf), axis=1)
            return closest.astype(jnp.int32), report

        idle = zeros, make_report(make_bill(zeros))
        closest, report = lax.cond(jnp.any(real), find_nearest, lambda: idle)
        sent = make_bill(units_down=real, units_up=real)
        return closest, report.replace(early=sent)

    return choose
