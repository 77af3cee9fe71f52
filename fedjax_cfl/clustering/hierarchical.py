"""Agglomerative clustering from a distance matrix, and by the directions of updates."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from fedjax_cfl.clustering.distances import dissimilarity, divide
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.types import Key, Params
from fedjax_cfl.validation import check_value

FARTHEST = 1e30  # stands in for infinite and NaN distances: N times it still fits float32


def _ward(to_a, to_b, size_a, size_b, apart, size):
    """Returns Ward's distance as SciPy defines it: for Euclidean distances, sqrt(2 x the
    growth of the sum of squares by the union).
    """
    # scaled, because the square of FARTHEST is beyond float32
    unit = jnp.maximum(jnp.maximum(to_a, to_b), apart)
    a, b, between = divide(to_a, unit), divide(to_b, unit), divide(apart, unit)
    square = (size + size_a) * a * a + (size + size_b) * b * b - size * between * between
    return unit * jnp.sqrt(jnp.maximum(square, 0) / (size + size_a + size_b))


# Lance-Williams: the distance [N] of every cluster from the union of a and b, given its distances
# from a and b, their sizes, the distance of a from b, and its own size.
LINKAGES = {
    "complete": lambda to_a, to_b, *_: jnp.maximum(to_a, to_b),
    "average": lambda to_a, to_b, size_a, size_b, *_: (
        (size_a * to_a + size_b * to_b) / (size_a + size_b)
    ),
    "weighted": lambda to_a, to_b, *_: (to_a + to_b) / 2,  # WPGMA
    "single": lambda to_a, to_b, *_: jnp.minimum(to_a, to_b),
    "ward": _ward,
}


def agglomerate(
    distance: jax.Array,
    m: ArrayLike,
    linkage: str = "complete",
    valid: jax.Array | None = None,
    threshold: ArrayLike | None = None,
) -> jax.Array:
    """Merges the closest pair of clusters until m are left; returns labels [N] int32.

    Labels count up by first occurrence; a row that is not valid has -1. Ties go to the lowest
    index. Every row keeps a lower bound of its nearest
    distance, so that a step costs O(N): it raises one bound or merges a pair (Muellner
    2011, generic algorithm). Raises InputError for an unknown linkage.

    Args: `distance` [N, N] is symmetric, Euclidean for ward; `m` [] may be traced, less than 1
    counts as 1; `linkage` is complete | average | weighted | single | ward; `valid` [N] bool are
    the rows to cluster, None: all; pairs of clusters up to `threshold` [] apart are merged even if
    only m are left, None: none are.
    """
    check_value("linkage", linkage, Literal[tuple(LINKAGES)])
    begun = _begin(distance, valid)
    valid, index = begun[3] > 0, begun[4]

    def unfinished(carry):
        left = jnp.sum(carry[3] > 0)
        return (left > jnp.maximum(m, 1)) | (
            False if threshold is None else (left > 1) & (jnp.min(carry[2]) <= threshold)
        )

    merge = functools.partial(_merge_closest, LINKAGES[linkage])
    label = lax.while_loop(unfinished, merge, begun)[4]  # the lowest index of the cluster
    number = jnp.cumsum(valid & (label == index)) - 1
    return jnp.where(valid, number[label], -1).astype(jnp.int32)


def largest_gap(linkage: str, distance: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """Returns the distance [] in the middle of the largest gap between the distances at which
    `agglomerate` merges clusters one after another; that of the only merge, if there is one.

    Args: as those of `agglomerate`. Of equal gaps it is the one that leaves fewer clusters.
    """

    def merge_once(carry):
        now, height = carry
        after = _merge_closest(LINKAGES[linkage], now)
        left = jnp.sum(now[3] > 0)
        merged = jnp.sum(after[3] > 0) < left
        at = jnp.where(merged, left - 2, height.size)  # the last merge is the first row
        return after, height.at[at].set(jnp.min(now[2]), mode="drop")

    begun = _begin(distance, valid)
    nothing = jnp.full(len(distance), -jnp.inf)
    _, height = lax.while_loop(
        lambda carry: jnp.sum(carry[0][3] > 0) > 1, merge_once, (begun, nothing)
    )
    below = jnp.roll(height, -1).at[-1].set(-jnp.inf)
    gap = jnp.argmax(jnp.where(jnp.isfinite(below), height - below, -1.0))
    return jnp.where(jnp.isfinite(below[0]), (height[gap] + below[gap]) / 2, height[0])


def _begin(distance, valid):
    """Returns what `_merge_closest` goes on from: every row that is `valid` is a cluster."""
    index = jnp.arange(distance.shape[0], dtype=jnp.int32)
    valid = jnp.ones(index.shape, bool) if valid is None else valid
    distance = jnp.where(distance < FARTHEST, distance, FARTHEST).astype(jnp.float32)  # NaN too
    everywhere = jnp.where(valid[:, None] & valid & (index[:, None] != index), distance, jnp.inf)
    nearest, size = jnp.min(everywhere, axis=1), valid.astype(jnp.float32)
    return distance, (index[0], distance[0]), nearest, size, index


def _merge_closest(update, carry):
    """Takes one step: raises the lowest bound, or merges the pair that it belongs to."""
    distance, (a, union), bound, size, label = carry
    index = jnp.arange(bound.size, dtype=jnp.int32)
    # the write of the step before, made before anything is read: else XLA copies the matrix at
    # every step
    for axis in (0, 1):
        distance = lax.dynamic_update_index_in_dim(distance, union, a, axis)
    i = jnp.argmin(bound)
    row = jnp.where((size > 0) & (index != i), distance[i], jnp.inf)
    j, nearest = jnp.argmin(row), jnp.min(row)
    merge = nearest <= bound[i]
    a, b = jnp.minimum(i, j), jnp.maximum(i, j)
    union = jnp.where(
        merge, update(distance[a], distance[b], size[a], size[b], distance[a, b], size), distance[a]
    )
    others = jnp.where((size > 0) & (index != a) & (index != b), union, jnp.inf)
    bound = jnp.where(
        merge, bound.at[a].set(jnp.min(others)).at[b].set(jnp.inf), bound.at[i].set(nearest)
    )
    size = jnp.where(merge, size.at[a].add(size[b]).at[b].set(0), size)
    label = jnp.where(merge & (label == b), a, label)
    return distance, (a, union), bound, size, label


def bisect_updates(
    ids: jax.Array,
    group: jax.Array,
    delta: Params,
    ready: jax.Array,
    linkage: str,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Cuts each group that is `ready` in two. Returns the half [R] int32, 0 or 1, of each of R
    updates, and gamma [m] = sqrt((1 - alpha) / 2) of each group.

    alpha is the largest cosine between the halves. Half 0 has the client of lowest id.

    Args: `ids` [R] int32 are the clients that sent the updates; `group` [R] int32 is the group
    of each, -1 masks the row; `delta` [R, ...] are the updates; `ready` [m] bool are the groups
    to cut; `linkage` is as in `agglomerate`, of the cosine dissimilarities; each device
    of `mesh` computes all halves by itself, None: one device.
    """
    order = jnp.argsort(ids)  # so that neither halves nor ties depend on slots
    group = group[order]

    def cut_all(apart, group, ready):
        def cut(g):
            inside = group == g

            def two():
                label = agglomerate(apart, 2, linkage, inside)
                across = inside[:, None] & inside & (label[:, None] != label)
                return jnp.maximum(label, 0), jnp.sqrt(jnp.min(jnp.where(across, apart, 1.0)))

            return lax.cond(ready[g], two, lambda: (jnp.zeros_like(group), jnp.zeros(())))

        # one group at a time: the distances of all groups would be m matrices [R, R]
        return lax.map(cut, jnp.arange(ready.size))

    apart = dissimilarity(delta, delta)[order][:, order]
    label, gamma = on_every_device(cut_all, mesh)(apart, group, ready)
    own = jnp.max(jnp.where(group == jnp.arange(ready.size)[:, None], label, 0), axis=0)
    return jnp.zeros_like(group).at[order].set(own), gamma


def agglomerate_values(
    compare: Callable[[jax.Array], jax.Array],
    m: int,
    linkage: str,
    threshold: ArrayLike | Callable[[jax.Array, jax.Array], jax.Array] | None,
) -> Callable[[Key, jax.Array, jax.Array], jax.Array]:
    """Returns (key, values [K, ...], who [K] bool) -> group [K], for `clustered(found=...)`.

    Args: `compare` is (values) -> distances [K, K]; `m` is the most groups; groups up to
    `threshold` apart are merged even if only m are left, a number or (distances, who) -> []; None:
    exactly m; `linkage` is that of `agglomerate`.
    """

    def found(key: Key, values: jax.Array, who: jax.Array) -> jax.Array:
        apart = compare(values)
        limit = threshold(apart, who) if callable(threshold) else threshold
        return agglomerate(apart, m, linkage, who, limit)

    return found
