"""Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski, "Flux: Efficient Descriptor-Driven
Clustered Federated Learning under Arbitrary Distribution Shifts", NeurIPS 2025,
https://arxiv.org/abs/2511.22305.

FedAvg runs for some rounds. Then each client describes its data by means and standard deviations
of what the common model makes of them, of all and of each class, and the server clusters clients
once by these descriptions, without knowing how many groups there are. Clients that come later are
placed by the part of the description that needs no labels.

Differs from the authors' code: clustering takes place in a given round, as there with partial
participation, not when validation accuracy stands still; latent features are mapped by a random
orthonormal map, where the code takes principal axes of uniform points, and are not shifted; the
knee of the distances is where they lie furthest below the diagonal, which always exists; at most m
groups are left, of which the nearest are merged; descriptions get no noise; each round's mean is
of that round's updates.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.client.cohort import client_range, map_clients, pass_over_samples
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.distances import divide, squared_euclidean
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.data.federated import check_classes
from fedjax_cfl.decompose import qr
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method, MigrateFn, RegroupFn, Round
from fedjax_cfl.models.task import watch_inputs
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import charge, keep_groups, one_active_group
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.system.reports import add_to_ledger, make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import group_mean, repeat_first, take_rows
from fedjax_cfl.types import (
    Algorithm,
    Bill,
    ClientIndex,
    FederatedData,
    Key,
    Params,
    Report,
    ServedModels,
    State,
    Task,
)
from fedjax_cfl.validation import NaturalInt, PositiveFloat, PositiveInt, checked

# (model [1, ...], data, who [K] bool) -> the descriptions [K, R, L] of the training samples of the
# clients `who`, 0 for others. R = 2 (C + 1) rows are the mean and the standard deviation of all
# samples, and then means and standard deviations of each class
DescribeFn = Callable[[Params, FederatedData, jax.Array], jax.Array]


class Moments(struct.PyTreeNode):
    """Of latent features, of all samples and then of those of each class. A description has the
    means of both, and the standard deviations.
    """

    count: jax.Array  # [C + 1] samples
    mean: jax.Array  # [C + 1, L]
    square: jax.Array  # [C + 1, L] sums of squared distances from the mean


# the row of each client: its group [K] int32 by its test inputs, if it has no training samples
PLACED = "placed"


class Descriptions(struct.PyTreeNode):
    """What newcomers are described with, and compared with; zeros before the clustering. R = 2 (C +
    1) rows are the mean and the standard deviation of all samples, and of each class.
    """

    extractor: Params  # [1, ...], the model whose latent features describe
    low: jax.Array  # [R, 1] float32, least number of a row among the clients that were clustered
    high: jax.Array  # [R, 1] float32, the greatest
    centers: jax.Array  # [m, R, L] float32, mean scaled description of each group


@checked("algorithm")
def flux(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    warm_up: NaturalInt = 5,
    cluster: Literal["density", "kmeans"] = "density",
    eps: PositiveFloat | None = None,
    factor: PositiveFloat = 1.0,
    latent: PositiveInt | None = None,
    newcomers: Literal["inputs", "labels"] = "inputs",
    restarts: PositiveInt = 10,
) -> Algorithm:
    """FLUX with at most m groups, found in the round after `warm_up` rounds of FedAvg.

    Args: `cluster` is density (groups are what is connected by steps of at most `eps`, None: the
    knee of the distances to the nearest neighbour, times `factor`) | kmeans (FLUX-prior: exactly m
    groups, the best of `restarts` runs); `latent` are the dimensions L that the model's features
    are mapped to, None: C, at most as many as there are; `newcomers` are placed by a description of
    their inputs | of labels, too. One without training samples is placed by its test inputs.
    With few samples a client the knee is too short for whole groups: clients that have none within
    reach are groups by themselves. Classes that clients lack, and others have, part clients, too.
    Every client describes itself in the clustering round, in 2 L (C + 1) words; a client that is
    not in its cohort gets the model for that, and the round does not wait for it. A newcomer gets
    the model, and sends 2 L words.
    """
    describe = describe_clients(task, local, latent)
    reach = (lambda apart, valid: factor * find_eps(apart, valid)) if eps is None else eps
    find = partial(find_groups, m=m, cluster=cluster, eps=reach, restarts=restarts)
    method = Method(
        sgd(task, local),
        start=one_active_group(task, m, joined=True),
        memory=partial(init_memory, task, latent),
        client_rows=lambda groups, data: {PLACED: jnp.full(data.num_clients, -1, jnp.int32)},
        migrate=place_newcomers(describe, newcomers, warm_up),
        assign=keep_groups,
        prepare=charge(partial(bill_descriptions, warm_up)),
        regroup=cluster_descriptions(
            describe, on_every_device(find, local.execution.mesh), warm_up
        ),
    )
    return federated(task, local, system, method)._replace(
        serve=serve_placed, check_data=partial(count_dense_inputs, task)
    )


def serve_placed(state: State) -> ServedModels:
    """Serves each client the model of its group, or of the group that it was placed in."""
    group, placed = state.assignment, state.rows[PLACED]
    return ServedModels(state.groups, jnp.where(group >= 0, group, placed))


def init_memory(
    task: Task, latent: int | None, groups: Params, data: FederatedData
) -> Descriptions:
    """Returns the memory before the clustering; `latent` is as in `flux`."""
    check_classes(data, "algorithm=flux", "use another algorithm, as ifca or flexcfl")
    m, rows = len(jax.tree.leaves(groups)[0]), 2 * (data.num_classes + 1)
    width = min(latent or data.num_classes, count_dense_inputs(task, data))
    none, centers = jnp.zeros((rows, 1)), jnp.zeros((m, rows, width))
    return Descriptions(take_rows(groups, slice(1)), none, none, centers)


def scale(described: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns descriptions [K, R, L] of which each row was from `low` to `high` [R, 1] as numbers
    from 0 to 1; 0 where these are equal.
    """
    return jnp.where(high > low, (described - low) / jnp.where(high > low, high - low, 1.0), 0.0)


def nearest_center(memory: Descriptions, described: jax.Array, active: jax.Array) -> jax.Array:
    """Returns the group [K] int32 of nearest center, by the first rows of descriptions that
    `described` [K, <= R, L] has; `active` [m] bool are the groups in use.
    """
    rows = described.shape[1]
    points = scale(described, memory.low[:rows], memory.high[:rows]).reshape(len(described), -1)
    apart = squared_euclidean(points, memory.centers[:, :rows].reshape(active.size, -1))
    return jnp.argmin(jnp.where(active, apart, jnp.inf), axis=1).astype(jnp.int32)


def find_eps(apart: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the distance [] at the knee of the sorted distances of points to their nearest
    neighbours: both axes scaled to 0 .. 1, where the curve is furthest below the diagonal. It is
    the greatest of them for up to three points, or if all are equal.

    Args: `apart` [K, K] are the distances of all points; `valid` [K] bool are those that count.
    """
    pairs = valid[:, None] & valid & ~jnp.eye(valid.size, dtype=bool)
    nearest = jnp.sort(jnp.min(jnp.where(pairs, apart, jnp.inf), axis=1))
    count, place = valid.sum(), jnp.arange(valid.size)
    least, most = nearest[0], nearest[jnp.maximum(count - 1, 0)]
    below = place / jnp.maximum(count - 1, 1) - divide(nearest - least, most - least)
    knee = jnp.argmax(jnp.where(place < count, below, -jnp.inf))
    return jnp.where((count <= 3) | (most <= least), most, nearest[knee])


def find_groups(
    key: Key,
    points: jax.Array,
    valid: jax.Array,
    m: int,
    cluster: str,
    eps: float | Callable[[jax.Array, jax.Array], jax.Array],
    restarts: int,
) -> jax.Array:
    """Returns the groups [K] int32 of clients by scaled descriptions, -1 for others.

    Args: `points` [K, p] are the descriptions, of which `valid` [K] bool count; `eps` is the length
    of a step, or gives it, see `find_eps`; the others are those of `flux`.
    """
    if cluster == "kmeans":
        found = kmeans(key, points, m, restarts, weight=valid.astype(jnp.float32)).labels
        return jnp.where(valid, found, -1)
    apart = jnp.sqrt(squared_euclidean(points, points))
    # DBSCAN where every point with a neighbour is a core: what a tree of single linkage joins
    return agglomerate(apart, m, "single", valid, eps(apart, valid) if callable(eps) else eps)


def bill_descriptions(warm_up: int, r: Round) -> Bill:
    """Returns what the clients of the clustering round infer for their descriptions."""
    samples = (r.state.round == warm_up) * client_range(r.cohort.ids, r.data)[0]
    return make_bill(samples=samples)


def cluster_descriptions(
    describe: DescribeFn, find: Callable[..., jax.Array], warm_up: int
) -> RegroupFn:
    """Clusters the clients that answered in round `warm_up`, and lets all others with samples join
    the nearest center. All groups go on from the common model.

    Args: `describe` is that of `describe_clients`; `find` is `find_groups`, its settings given.
    """

    def regroup(r: Round) -> tuple[State, jax.Array]:
        state, cohort = r.state, r.cohort

        def found():
            able, m = r.data.train.size > 0, state.active.size
            extractor = take_rows(state.groups, slice(1))
            described = describe(extractor, r.data, able)
            part = cohort.put(jnp.zeros_like(able), r.upload.weight > 0)
            inside = part[:, None, None]
            low = jnp.min(jnp.where(inside, described, jnp.inf), axis=(0, 2))[:, None]
            high = jnp.max(jnp.where(inside, described, -jnp.inf), axis=(0, 2))[:, None]
            points = scale(described, low, high)
            label = find(r.key, points.reshape(len(part), -1), part)
            centers, size = group_mean(part.astype(jnp.float32), label, points, m)
            active = (size > 0) | (jnp.arange(m) == jnp.argmax(size))
            memory = Descriptions(extractor, low, high, centers)
            group = jnp.where(part, label, nearest_center(memory, described, active))
            group = jnp.where(able, group, -1).astype(jnp.int32)
            groups, server = repeat_first((state.groups, state.server))
            absent = able & ~cohort.put(jnp.zeros_like(able), True)
            samples = absent * r.data.train.size
            sent = make_bill(absent, words_up=able * described[0].size, samples=samples)
            after = state.replace(
                groups=groups,
                server=server,
                active=active,
                assignment=cohort.put(group, cohort.take(state.assignment)),
                memory=memory,
                traffic=add_to_ledger(state.traffic, sent),
            )
            return after, jnp.maximum(cohort.take(group), 0)

        return lax.cond(state.round == warm_up, found, lambda: (state, r.group))

    return regroup


def place_newcomers(describe: DescribeFn, newcomers: str, warm_up: int) -> MigrateFn:
    """Places clients without a group after the clustering, as soon as they have samples, each at
    the nearest center.

    Args: as those of `flux` and `cluster_descriptions`.
    """

    def migrate(r: Round) -> tuple[State, Report]:
        state, data = r.state, r.data
        memory, old, trains = state.memory, state.rows[PLACED], data.train.size > 0
        seen = trains
        if newcomers == "inputs":
            seen |= (data.test.size > 0) & (old < 0)
        waiting = (state.round > warm_up) & (state.assignment < 0) & seen

        def place():
            described = describe(memory.extractor, data.replace(train=list_inputs(data)), waiting)
            if newcomers == "inputs":
                described = described[:, :2]
            return nearest_center(memory, described, state.active)

        group = lax.cond(jnp.any(waiting), place, lambda: jnp.zeros_like(state.assignment))
        assignment = jnp.where(waiting & trains, group, state.assignment)
        placed = jnp.where(waiting & ~trains, group, old)
        rows, width = memory.centers.shape[1:]
        words = width * (2 if newcomers == "inputs" else rows)
        samples = waiting * list_inputs(data).size
        sent = make_bill(waiting, words_up=waiting * words, samples=samples)
        return state.replace(assignment=assignment).put_rows({PLACED: placed}), make_report(sent)

    return migrate


def describe_clients(task: Task, local: Local, latent: int | None) -> DescribeFn:
    """Returns what describes clients by `latent` dimensions, None: as many as classes; there are
    never more than features. In the rows of a class of which a client has fewer than two samples
    stands -1.
    """

    def of_client(client, data: FederatedData, shared, work) -> Loop:
        (model, projection), classes = shared, data.num_classes

        def add(moments: Moments, x, y, owner, number) -> Moments:
            real = owner >= 0
            z = dense_inputs(task, take_rows(model, 0), x, owner)
            z = jnp.matmul(z, projection, precision=lax.Precision.HIGHEST)
            member = jnp.concatenate([real[None], real & (y == jnp.arange(classes)[:, None])])
            return add_samples(moments, z, member.astype(jnp.float32))

        zeros = jnp.zeros((classes + 1, projection.shape[1]))
        nothing = Moments(jnp.zeros(classes + 1), zeros, zeros)

        def end(moments: Moments, count: jax.Array) -> jax.Array:
            return finish_description(moments)

        return pass_over_samples(client, data, nothing, add, end)

    def describe(model: Params, data: FederatedData, who: jax.Array) -> jax.Array:
        width = count_dense_inputs(task, data)
        dimensions = min(latent or data.num_classes, width)
        # the same for all clients and runs, and known to all
        projection = qr(jax.random.normal(jax.random.key(1), (width, dimensions)))[0]
        flat = map_clients(of_client, local.execution, (model, projection), data, who)
        return flat.reshape(len(who), -1, dimensions)

    return describe


def add_samples(moments: Moments, z: jax.Array, member: jax.Array) -> Moments:
    """Returns the moments with those of further samples z [B, L]; `member` [C + 1, B] is 1 where a
    sample counts. Means are subtracted before anything is squared, so that nothing cancels.
    """
    count = member.sum(1)
    mean = divide(jnp.matmul(member, z, precision=lax.Precision.HIGHEST), count[:, None])
    square = jnp.sum(member[..., None] * jnp.square(z - mean[:, None]), axis=1)
    both, gap = moments.count + count, mean - moments.mean
    share = divide(count, both)[:, None]
    square += moments.square + jnp.square(gap) * share * moments.count[:, None]
    return Moments(both, moments.mean + gap * share, square)


def finish_description(moments: Moments) -> jax.Array:
    """Returns the description [R L] from the moments of all samples of a client."""
    spread = jnp.sqrt(divide(moments.square, moments.count[:, None]))
    enough = (moments.count >= 2) | (jnp.arange(moments.count.size) == 0)
    mean, spread = (jnp.where(enough[:, None], part, -1.0) for part in (moments.mean, spread))
    return jnp.concatenate([mean[:1], spread[:1], mean[1:], spread[1:]]).reshape(-1)


def list_inputs(data: FederatedData) -> ClientIndex:
    """Returns which samples each client is described by: its training samples, or else its test
    samples, of which only the inputs are used.
    """
    train, test = data.train, data.test
    has = train.size > 0
    return ClientIndex(
        jnp.concatenate([train.order, test.order]),
        jnp.where(has, train.start, train.order.size + test.start),
        jnp.where(has, train.size, test.size),
    )


def dense_inputs(
    task: Task, params: Params, x: jax.Array, owner: jax.Array | None = None
) -> jax.Array:
    """Returns the flat inputs [B, D] of the first dense layer that `task.predict` calls on samples
    x [B, ...]: the samples themselves, where it is the first layer. Raises InputError if there is
    none.
    """
    with watch_inputs(lambda module: isinstance(module, nn.Dense)) as seen:
        task.predict(params, x, owner)
    if not seen:
        raise InputError(
            "model: has no dense layer (flax.linen.Dense), before which samples are described; use"
            " another model, or another algorithm"
        )
    return seen[0]


def count_dense_inputs(task: Task, data: FederatedData) -> int:
    """Returns D, the width of `dense_inputs`. Raises InputError as that does."""
    sample = jax.ShapeDtypeStruct((1, *data.x.shape[1:]), data.x.dtype)
    params = jax.eval_shape(task.init, jax.random.key(0))
    found = jax.eval_shape(lambda params, x: dense_inputs(task, params, x), params, sample)
    return math.prod(found.shape)
