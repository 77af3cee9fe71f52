"""Clusterings of points under any metric: K-means with the K of best silhouette, and
k-center (Fielding, https://arxiv.org/abs/2411.01580, Algorithms 3 and 4).

The number of clusters lives under a static maximum m with a mask, so that nothing is
ever traced again.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from typing_extensions import TypeAliasType

from fedjax_cfl.clustering.distances import MetricFn, dot
from fedjax_cfl.clustering.kmeans import draw_centers, move_centers
from fedjax_cfl.tree import one_hot
from fedjax_cfl.types import Key

BLOCK = 256  # rows and columns of a distance matrix in memory at a time


class Clusters(NamedTuple):
    """A clustering of clients: labels [K] int32, and active [m] bool, the clusters in use."""

    labels: jax.Array
    active: jax.Array


# (key, points [K, p], valid [K] bool, m static, metric) -> at most m clusters of the clients that
# the points represent; only those that are `valid` are clustered, others get the nearest center's
# label
ClusterFn = TypeAliasType(
    "ClusterFn", Callable[[Key, jax.Array, jax.Array, int, MetricFn], Clusters]
)


def metric_kmeans(
    key: Key,
    points: jax.Array,
    valid: jax.Array,
    count: jax.Array,
    m: int,
    metric: MetricFn,
    iterations: int,
) -> tuple[jax.Array, jax.Array]:
    """Clusters points by K-means++ seeding and Lloyd's iterations under a metric. Centers are
    means.

    Under a metric that is not squared Euclidean costs need not fall, so that the best iteration
    counts. Returns (labels [K] int32, cost []), the sum of the distances of the valid points to
    their centers.

    Args: `points` [K, p]; `valid` [K] bool are the points that are clustered, the others only
    get a label; `count` [] <= `m` is the number of clusters, which may be traced; `m` is
    static; `iterations` is the most that are made.
    """
    used = jnp.arange(m) < count
    # metrics read coordinate after coordinate: turned once, not in every iteration
    columns = lax.optimization_barrier(points.T)
    draws = jax.random.uniform(key, (m, 1))
    centers = draw_centers(draws, points, valid.astype(jnp.float32), count, metric)

    def unfinished(carry):
        step, _, _, _, changed = carry
        return (step < iterations) & changed

    def iterate(carry):
        step, centers, labels, (best, best_cost), _ = carry
        distance = jnp.where(used[:, None], metric(centers, columns.T), jnp.inf)
        new = jnp.argmin(distance, axis=0).astype(jnp.int32)
        cost = jnp.sum(jnp.where(valid, jnp.min(distance, axis=0), 0))
        kept = jnp.where(cost < best_cost, new, best), jnp.minimum(cost, best_cost)
        moved = move_centers(points, valid, distance, centers, used)
        return step + 1, moved, new, kept, jnp.any(new != labels)

    unassigned = jnp.full(len(points), -1, jnp.int32)
    start = 0, centers, unassigned, (unassigned, jnp.float32(jnp.inf)), jnp.array(True)
    return lax.while_loop(unfinished, iterate, start)[3]


def distance_sums(points: jax.Array, member: jax.Array, metric: MetricFn) -> jax.Array:
    """Returns [K, g]: the sum of each point's distances from the points that `member` [K, g]
    counts.

    Blocks of the distance matrix are made one after another, each for both of its sides.
    """
    count, size = len(points), min(BLOCK, len(points))
    blocks = -(-count // size)
    padding = (0, blocks * size - count), (0, 0)
    points = jnp.pad(points, padding).reshape(blocks, size, -1)
    weights = jnp.pad(member, padding).reshape(blocks, size, -1)

    def add(total: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        i, j = pair
        distance = metric(points[i], points[j])
        total = total.at[i].add(dot(distance, weights[j]))
        return total.at[j].add(jnp.where(i < j, dot(distance.T, weights[i]), 0.0)), None

    total = lax.scan(add, jnp.zeros_like(weights), jnp.triu_indices(blocks))[0]
    return total.reshape(blocks * size, -1)[:count]


def largest_distance(
    points: jax.Array, labels: jax.Array, valid: jax.Array, metric: MetricFn
) -> jax.Array:
    """Returns the largest distance [] of two valid points with the same label."""

    def largest(row: jax.Array) -> jax.Array:
        same = (labels[row][:, None] == labels) & valid[row][:, None] & valid
        return jnp.max(jnp.where(same, metric(points[row], points), 0))

    count, size = len(points), min(BLOCK, len(points))
    rows = jnp.arange(-(-count // size) * size).reshape(-1, size)
    return jnp.max(lax.map(largest, jnp.minimum(rows, count - 1)))


def silhouettes(
    points: jax.Array, labels: jax.Array, m: int, valid: jax.Array, metric: MetricFn
) -> jax.Array:
    """Returns the mean silhouettes [R] of R clusterings (Rousseeuw 1987); the distances are
    computed once for all of them.

    A point that is alone in its cluster, or whose cluster is the only one, has 0.

    Args: `points` [K, p]; `labels` [R, K] int32, 0 .. m - 1; `valid` [K] bool are the points
    that count.
    """
    member = (labels[:, :, None] == jnp.arange(m)) & valid[None, :, None]  # [R, K, m]
    size = member.sum(1).astype(jnp.float32)  # [R, m]
    runs, count, _ = member.shape
    flat = jnp.moveaxis(member, 0, 1).reshape(count, runs * m).astype(jnp.float32)
    total = distance_sums(points, flat, metric).reshape(count, runs, m)
    own = jnp.take_along_axis(total, labels.T[:, :, None], axis=2)[:, :, 0]  # [K, R]
    own_size = jnp.take_along_axis(size, labels, axis=1).T
    inside = own / jnp.maximum(own_size - 1, 1)
    other = (labels.T[:, :, None] != jnp.arange(m)) & (size > 0)
    outside = jnp.min(jnp.where(other, total / jnp.maximum(size, 1), jnp.inf), axis=2)
    counts = valid[:, None] & (own_size > 1) & jnp.isfinite(outside)
    score = (jnp.where(counts, outside, 0) - inside) / jnp.maximum(
        jnp.maximum(inside, jnp.where(counts, outside, 0)), 1e-30
    )
    return jnp.sum(jnp.where(counts, score, 0), axis=0) / jnp.maximum(valid.sum(), 1)


def mean_client_distance(
    points: jax.Array, labels: jax.Array, m: int, valid: jax.Array, metric: MetricFn
) -> jax.Array:
    """Returns the mean [] over valid clients of a client's mean distance from the others of
    its cluster, 0 for one that is alone (Lai et al. 2021; Fielding, Fig. 1).

    Args: `points` [K, p] represent the clients; `labels` [K] int32 are their clusters, 0 .. m -
    1; `valid` [K] bool are the clients that count.
    """
    member = one_hot(labels, m, valid)
    own = jnp.take_along_axis(distance_sums(points, member, metric), labels[:, None], axis=1)
    each = own[:, 0] / jnp.maximum(member.sum(0)[labels] - 1, 1)
    return jnp.sum(jnp.where(valid, each, 0)) / jnp.maximum(valid.sum(), 1)


def clusters_in_use(labels: jax.Array, valid: jax.Array, m: int) -> jax.Array:
    """Returns which clusters [m] bool have a valid member; the first where none has."""
    used = jnp.any((labels[:, None] == jnp.arange(m)) & valid[:, None], axis=0)
    return used.at[0].set(used[0] | ~jnp.any(used))


def by_silhouette(
    restarts: int = 4, participants: int | None = None, iterations: int = 50
) -> ClusterFn:
    """Clusters by K-means for every K from 2 to m and takes the K of largest mean silhouette,
    the smaller one of equals (Fielding, Algorithm 3).

    No K is taken that is above half the `participants` of a round, if given, or above the
    valid clients minus one; if no K is left, all are one cluster.
    """

    def cluster(
        key: Key, points: jax.Array, valid: jax.Array, m: int, metric: MetricFn
    ) -> Clusters:
        one = jnp.zeros(len(points), jnp.int32)
        if m < 2:
            return Clusters(one, jnp.arange(m) < 1)

        def attempt(count: jax.Array) -> jax.Array:
            keys = jax.random.split(jax.random.fold_in(key, count), restarts)

            def run(key: Key) -> tuple[jax.Array, jax.Array]:
                return metric_kmeans(key, points, valid, count, m, metric, iterations)

            # one after another: a run ends as soon as its own labels stay
            labels, cost = lax.map(run, keys)
            return labels[jnp.argmin(cost)]

        counts = jnp.arange(2, m + 1)
        labels = lax.map(attempt, counts)
        most = jnp.minimum(m if participants is None else participants // 2, valid.sum() - 1)
        score = silhouettes(points, labels, m, valid, metric)
        best = jnp.argmax(jnp.where(counts <= most, score, -jnp.inf))
        labels = jnp.where(most >= 2, labels[best], one)
        return Clusters(labels, clusters_in_use(labels, valid, m))

    return cluster


def k_center(key: Key, points: jax.Array, valid: jax.Array, m: int, metric: MetricFn) -> Clusters:
    """Clusters into exactly m by the greedy choice of the farthest point (Fielding, Algorithm 4,
    a `ClusterFn`). It is a 2-approximation of the smallest radius (Gonzalez 1985).

    The first center is the first valid point. Fewer distinct points give fewer clusters.
    """

    def add(i, carry):
        labels, nearest = carry
        place = jnp.where(i == 0, jnp.argmax(valid), jnp.argmax(jnp.where(valid, nearest, -1)))
        distance = metric(points[place][None], points)[0]
        closer = distance < nearest
        return jnp.where(closer, i, labels).astype(jnp.int32), jnp.minimum(nearest, distance)

    start = jnp.zeros(len(points), jnp.int32), jnp.full(len(points), jnp.inf)
    labels, _ = lax.fori_loop(0, m, add, start)
    return Clusters(labels, clusters_in_use(labels, valid, m))
