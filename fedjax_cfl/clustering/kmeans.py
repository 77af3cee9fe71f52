"""K-means++ with restarts, and the silhouette of a clustering."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.clustering.distances import _divide, _dot
from fedjax_cfl.types import Key

SAME_POINT_TOLERANCE = (
    1e-5  # points closer than this, relative to their norm, differ by rounding alone
)


class KMeans(struct.PyTreeNode):
    """The best of all restarts; a cluster may be empty if there are fewer distinct
    points than clusters (up to 1e-5 of their norm).
    """

    labels: jax.Array  # [N] int32, 0 .. m - 1, the nearest center, for masked rows too
    centers: jax.Array  # [m, p] float32
    inertia: jax.Array  # [] float32, weighted sum of squared distances to the nearest center


def _squared_distance(x: jax.Array, centers: jax.Array) -> jax.Array:
    """Returns [N, m], 0 within rounding, so that equal points that differ in the last
    digits count as one.
    """
    square = jnp.sum(
        jnp.square(x[:, None] - centers), axis=-1
    )  # |x|^2 - 2 x.c + |c|^2 would cancel
    return jnp.where(
        square > SAME_POINT_TOLERANCE**2 * jnp.sum(x * x, axis=-1, keepdims=True), square, 0
    )


def _sample_rows(mass: jax.Array, draws: jax.Array) -> jax.Array:
    """Returns rows [k], with probabilities in proportion to `mass [N]`, for `draws [k]`
    uniform in 0 .. 1.
    """
    up_to = jnp.cumsum(mass)
    return jnp.sum(up_to[:, None] < up_to[-1] * (1 - draws), axis=0)


def _init_centers(draws: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns m rows of `x [N, p]` as centers by D^2 sampling, of `draws [m, k]` per
    center the one that lowers the inertia most.
    """

    def add(i, carry):
        centers, nearest = carry
        mass = weight * nearest
        mass = jnp.where(
            jnp.sum(mass) > 0, mass, weight
        )  # every point already is a center: draw any
        candidates = x[_sample_rows(mass, draws[i])]
        improved = jnp.minimum(nearest[:, None], _squared_distance(x, candidates))  # [N, k]
        best = jnp.argmin(jnp.sum(weight[:, None] * improved, axis=0))
        return centers.at[i].set(candidates[best]), improved[:, best]

    center = x[_sample_rows(weight, draws[0, :1])[0]]
    centers = jnp.broadcast_to(center, (draws.shape[0], x.shape[1]))
    return jax.lax.fori_loop(
        1, draws.shape[0], add, (centers, _squared_distance(x, center[None])[:, 0])
    )[0]


def _move(x: jax.Array, weight: jax.Array, centers: jax.Array) -> jax.Array:
    """Returns the weighted means of the clusters [m, p]; the j-th empty cluster goes to
    the j-th farthest point.
    """
    m = centers.shape[0]
    distance = _squared_distance(x, centers)
    member = jax.nn.one_hot(jnp.argmin(distance, axis=1), m) * weight[:, None]
    mass = jnp.sum(member, axis=0)
    far, point = jax.lax.top_k(
        jnp.where(weight > 0, jnp.min(distance, axis=1), 0), min(m, x.shape[0])
    )
    rank = jnp.cumsum(mass == 0) - 1
    moves = (
        (far > 0).at[rank].get(mode="fill", fill_value=False)
    )  # else no point is left to move to: stays where it is, empty
    empty = jnp.where(moves[:, None], x[point.at[rank].get(mode="clip")], centers)
    return jnp.where(mass[:, None] > 0, _divide(_dot(member.T, x), mass[:, None]), empty)


def _lloyd(x: jax.Array, weight: jax.Array, centers: jax.Array, iterations: int) -> jax.Array:
    """Returns the centers [m, p] after Lloyd's iterations, stopped when they hardly move."""
    total = jnp.sum(weight)
    mean = _divide(_dot(weight, x), total)
    tolerance = 1e-4 * jnp.mean(_divide(_dot(weight, jnp.square(x - mean)), total))

    def unfinished(carry):
        step, _, shift = carry
        return (step < iterations) & (shift > tolerance)

    def iterate(carry):
        step, centers, _ = carry
        moved = _move(x, weight, centers)
        return step + 1, moved, jnp.sum(jnp.square(moved - centers))

    return jax.lax.while_loop(unfinished, iterate, (0, centers, jnp.float32(jnp.inf)))[1]


def kmeans(
    key: Key,
    x: jax.Array,
    m: int,
    restarts: int = 10,
    iterations: int = 20,
    weight: jax.Array | None = None,
    greedy: int | None = None,
) -> KMeans:
    """Clusters the rows of `x [N, p]` into m by K-means++ (Arthur and Vassilvitskii
    2007) and Lloyd; the restart of lowest inertia wins.

    Rows of `weight [N]` 0 are masked: whatever they hold (NaN too), they only get a
    label. `greedy` is the number of draws per seed, 2 + floor(log m) unless given, 1
    for the original seeding.
    """
    x = x.astype(jnp.float32)
    weight = jnp.ones(x.shape[0]) if weight is None else weight.astype(jnp.float32)
    kept = jnp.where(weight[:, None] > 0, x, 0)
    greedy = 2 + int(math.log(m)) if greedy is None else greedy

    draws = jax.random.uniform(key, (restarts * m * greedy,))  # flat: compiles faster

    def attempt(draws):
        centers = _lloyd(kept, weight, _init_centers(draws, kept, weight), iterations)
        return centers, jnp.sum(weight * jnp.min(_squared_distance(kept, centers), axis=1))

    centers, inertia = jax.vmap(attempt)(draws.reshape(restarts, m, greedy))
    best = jnp.argmin(inertia)
    labels = jnp.argmin(_squared_distance(x, centers[best]), axis=1).astype(jnp.int32)
    return KMeans(labels=labels, centers=centers[best], inertia=inertia[best])


def silhouette(
    x: jax.Array, labels: jax.Array, m: int, valid: jax.Array | None = None, block: int = 256
) -> jax.Array:
    """Returns the mean silhouette [] of the clusters `labels [N]` of the rows of `x [N,
    p]` (Rousseeuw 1987), Euclidean, in -1 .. 1.

    (b - a) / max(a, b): a is a point's mean distance to the others of its cluster, b
    the smallest to another cluster; 0 for a single point. Rows outside `valid [N]` bool
    count nowhere. Distances are made `block` rows at a time.
    """
    valid = jnp.ones(x.shape[0], bool) if valid is None else valid
    x = jnp.where(valid[:, None], x, 0)
    member = jax.nn.one_hot(labels, m) * valid[:, None]
    size = jnp.sum(member, axis=0)

    def score(row):
        point, label, counts = row
        total = jnp.sqrt(jnp.sum(jnp.square(x - point), axis=-1)) @ member
        inside = _divide(total[label], size[label] - 1)
        outside = jnp.min(
            jnp.where((jnp.arange(m) != label) & (size > 0), _divide(total, size), jnp.inf)
        )
        alone = (size[label] <= 1) | jnp.isinf(outside)
        return jnp.where(
            counts & ~alone,
            (outside - inside) / jnp.maximum(jnp.maximum(inside, outside), 1e-30),
            0,
        )

    each = jax.lax.map(score, (x, labels, valid), batch_size=block)
    return jnp.sum(each) / jnp.maximum(jnp.sum(valid), 1)
