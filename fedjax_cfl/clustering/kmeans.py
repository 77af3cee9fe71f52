"""K-means++ with restarts."""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from fedjax_cfl.clustering.distances import MetricFn, divide, dot
from fedjax_cfl.tree import membership_weights
from fedjax_cfl.types import Key

# points that are closer, relative to their norm, differ by rounding alone
SAME_POINT_TOLERANCE = 1e-5


class KMeans(struct.PyTreeNode):
    """The best of all restarts. A cluster may be empty if there are fewer distinct points
    than clusters (points within 1e-5 of their norm count as one).
    """

    labels: jax.Array  # [N] int32, 0 .. m - 1, the nearest center, for masked rows too
    centers: jax.Array  # [m, p] float32
    inertia: jax.Array  # [] float32, weighted sum of squared distances to the nearest center


def _squared_distance(x: jax.Array, centers: jax.Array) -> jax.Array:
    """Returns the squared distances [N, m]; 0 for points that differ by rounding alone."""
    # |x|^2 - 2 x.c + |c|^2 would cancel
    square = jnp.sum(jnp.square(x[:, None] - centers), axis=-1)
    return jnp.where(
        square > SAME_POINT_TOLERANCE**2 * jnp.sum(x * x, axis=-1, keepdims=True), square, 0
    )


def sample_rows(mass: jax.Array, draws: jax.Array) -> jax.Array:
    """Draws rows [k] with probabilities proportional to `mass` [N], by `draws` [k] uniform
    in 0 .. 1.
    """
    up_to = jnp.cumsum(mass)
    return jnp.sum(up_to[:, None] < up_to[-1] * (1 - draws), axis=0)


def draw_centers(
    draws: jax.Array,
    points: jax.Array,
    weight: jax.Array,
    used: ArrayLike,
    metric: MetricFn,
    greedy: ArrayLike = 1,
) -> jax.Array:
    """Draws `used` of m rows of `points` [N, p] as centers [m, p], each with a chance proportional
    to its weight times its distance from the nearest center before (K-means++; for a squared metric
    this is D^2 sampling). The other centers are copies of the first, which is nearer to every
    point, or as near.

    Args: of the first `greedy` of the `draws` [m, k] for a center, uniform in 0 .. 1, the one that
    lowers the inertia most is taken; `weight` [N] >= 0, where 0 masks a row; m is static.
    """

    def add(i, carry):
        centers, nearest = carry
        mass = weight * nearest
        # any point, where every point is a center already
        mass = jnp.where(jnp.sum(mass) > 0, mass, weight)
        candidates = points[sample_rows(mass, draws[i])]
        improved = jnp.minimum(nearest[:, None], metric(points, candidates))  # [N, k]
        inertia = jnp.sum(weight[:, None] * improved, axis=0)
        best = jnp.argmin(jnp.where(jnp.arange(inertia.size) < greedy, inertia, jnp.inf))
        return centers.at[i].set(candidates[best]), improved[:, best]

    first = points[sample_rows(weight, draws[0, :1])]
    centers = jnp.broadcast_to(first, (draws.shape[0], points.shape[1]))
    return jax.lax.fori_loop(1, used, add, (centers, metric(points, first)[:, 0]))[0]


def cluster_means(
    points: jax.Array, labels: jax.Array, weight: jax.Array, m: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted mean [m, p] of each cluster's points [K, p], and the sum [m] of their
    weights. Both are 0 for an empty cluster; `weight` [K] >= 0, or bool, masks a point by 0.
    """
    weight = weight.astype(jnp.float32)
    member = membership_weights(weight, labels, m)
    size = member.sum(0)
    kept = jnp.where(weight[:, None] > 0, points, 0.0)
    return divide(dot(member.T, kept), size[:, None]), size


def move_centers(
    points: jax.Array, weight: jax.Array, distance: jax.Array, centers: jax.Array, used: jax.Array
) -> jax.Array:
    """Returns the means [m, p] of the clusters; the j-th empty one in use gets the j-th
    farthest point. Where no point is left to move to, the center stays, and its cluster is empty.

    Args: `points` [K, p]; `weight` [K] is that of `cluster_means`; `distance` [m, K] are those
    from the present centers, infinite from centers that are not in use, or no nearer than those of
    one in use; `centers` [m, p] are the present ones; `used` [m] bool are those in use.
    """
    m = used.size
    means, size = cluster_means(points, jnp.argmin(distance, axis=0), weight, m)
    nearest = jnp.where(weight > 0, jnp.min(distance, axis=0), 0)
    far, place = jax.lax.top_k(nearest, min(m, points.shape[0]))
    empty = used & (size == 0)
    rank = jnp.cumsum(empty) - 1
    moves = empty & (far > 0).at[rank].get(mode="fill", fill_value=False)
    reseeded = jnp.where(moves[:, None], points[place.at[rank].get(mode="clip")], centers)
    return jnp.where(size[:, None] > 0, means, reseeded)


def _lloyd(
    x: jax.Array, weight: jax.Array, centers: jax.Array, used: ArrayLike, iterations: int
) -> jax.Array:
    """Returns the centers [m, p] after Lloyd's iterations, which stop when centers hardly move."""
    total, in_use = jnp.sum(weight), jnp.arange(len(centers)) < used
    mean = divide(dot(weight, x), total)
    tolerance = 1e-4 * jnp.mean(divide(dot(weight, jnp.square(x - mean)), total))

    def unfinished(carry):
        step, _, shift = carry
        return (step < iterations) & (shift > tolerance)

    def iterate(carry):
        step, centers, _ = carry
        new = move_centers(x, weight, _squared_distance(x, centers).T, centers, in_use)
        new = jnp.where(in_use[:, None], new, new[0])
        moved = jnp.where(in_use[:, None], new - centers, 0)
        return step + 1, new, jnp.sum(jnp.square(moved))

    return jax.lax.while_loop(unfinished, iterate, (0, centers, jnp.float32(jnp.inf)))[1]


def kmeans(
    key: Key,
    x: jax.Array,
    m: int,
    restarts: int = 10,
    iterations: int = 20,
    weight: jax.Array | None = None,
    greedy: int | None = None,
    used: ArrayLike | None = None,
) -> KMeans:
    """Clusters the rows of `x` [N, p] into m by K-means++ (Arthur and Vassilvitskii 2007) and
    Lloyd; the restart of lowest inertia wins.

    Args: `m` is static; `restarts` is how many are made, of at most `iterations` each; `weight`
    [N] >= 0: a row of weight 0 is masked, it may have any values, NaN too, and only gets a
    label, None: all weigh 1; `greedy` is the number of draws per center, None: 2 + floor(log
    m), 1: the original method; `used` [] int32 is how many of the m clusters there are, None:
    all. The result is that of `kmeans` with m = used, and the other clusters are empty, their
    centers copies of the first.
    """
    x = x.astype(jnp.float32)
    weight = jnp.ones(x.shape[0]) if weight is None else weight.astype(jnp.float32)
    kept = jnp.where(weight[:, None] > 0, x, 0)
    most = 2 + int(math.log(m)) if greedy is None else greedy

    draws = jax.random.uniform(key, (restarts * m * most,))  # flat: compiles faster
    if used is None:
        used, own = m, most
        draws = draws.reshape(restarts, m, most)
    else:  # the places that the draws have where m is `used`
        rule = jnp.array([2 + int(math.log(n)) for n in range(1, m + 1)])
        own = rule[used - 1] if greedy is None else greedy
        attempts, center, draw = jnp.ogrid[:restarts, :m, :most]
        draws = draws[(attempts * used + center) * own + draw]

    def attempt(draws):
        first = draw_centers(draws, kept, weight, used, _squared_distance, own)
        centers = _lloyd(kept, weight, first, used, iterations)
        return centers, jnp.sum(weight * jnp.min(_squared_distance(kept, centers), axis=1))

    centers, inertia = jax.vmap(attempt)(draws)
    best = jnp.argmin(inertia)
    labels = jnp.argmin(_squared_distance(x, centers[best]), axis=1).astype(jnp.int32)
    return KMeans(labels=labels, centers=centers[best], inertia=inertia[best])
