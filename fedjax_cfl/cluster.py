"""Clustering of updates: features and distances from a Gram matrix, K-means and agglomerative merging.

Everything is pure, of static shape and float32-safe: zero, identical or too few distinct updates give finite features and valid labels.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Key

COINCIDENT = 1e-5  # points closer than this, relative to their norm, differ by rounding alone
FARTHEST = 1e30  # stands in for infinite and NaN distances: N times it still fits float32


def _ward(to_a, to_b, size_a, size_b, apart, size):
    """Returns Ward's distance, as SciPy defines it: of Euclidean distances, sqrt(2 x the growth of the sum of squares by the union)."""
    unit = jnp.maximum(jnp.maximum(to_a, to_b), apart)  # the square of FARTHEST is beyond float32
    a, b, between = _divide(to_a, unit), _divide(to_b, unit), _divide(apart, unit)
    square = (size + size_a) * a * a + (size + size_b) * b * b - size * between * between
    return unit * jnp.sqrt(jnp.maximum(square, 0) / (size + size_a + size_b))


# Lance-Williams: distance [N] of every cluster to the union of a and b, from its distances to a and b, their sizes, the distance of a to b,
# and its own size.
LINKAGES = {
    "complete": lambda to_a, to_b, *_: jnp.maximum(to_a, to_b),
    "average": lambda to_a, to_b, size_a, size_b, *_: (size_a * to_a + size_b * to_b) / (size_a + size_b),
    "single": lambda to_a, to_b, *_: jnp.minimum(to_a, to_b),
    "ward": _ward,
}


@struct.dataclass
class KMeans:
    """The best of all restarts; a cluster may be empty if there are fewer distinct points than clusters (up to 1e-5 of their norm)."""

    labels: jax.Array  # [N] int32, 0 .. m - 1, the nearest center, for masked rows too
    centers: jax.Array  # [m, p] float32
    inertia: jax.Array  # [] float32, weighted sum of squared distances to the nearest center


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _rows(tree: Any) -> list[jax.Array]:
    """Returns the leaves as matrices [S, P of the leaf]."""
    return [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a / b, 0 where b is 0."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def gram(delta: Any) -> jax.Array:
    """Returns the inner products [S, S] of the updates `delta [S, ...]`, leaf by leaf, so that no flat copy is made."""
    return sum(_dot(rows, rows.T) for rows in _rows(delta))


def cosine(a: Any, b: Any) -> jax.Array:
    """Returns the cosines [S, m] of `a [S, ...]` to `b [m, ...]`, 0 where either norm is 0."""
    a, b = _rows(a), _rows(b)
    norm_a, norm_b = (jnp.sqrt(sum(jnp.sum(jnp.square(rows.astype(jnp.float32)), 1) for rows in side)) for side in (a, b))
    product = sum(_dot(left, right.T) for left, right in zip(a, b, strict=True))
    return jnp.clip(_divide(_divide(product, norm_a[:, None]), norm_b), -1, 1)


def dissimilarity(a: Any, b: Any) -> jax.Array:
    """Returns (1 - cos) / 2 [S, m], in 0 .. 1, of `a [S, ...]` to `b [m, ...]` (FedGroup, eq. 9); 1/2 where either norm is 0."""
    return (1 - cosine(a, b)) / 2


def euclidean(delta: Any) -> jax.Array:
    """Returns the distances [S, S] of the updates `delta [S, ...]`; from inner products about their mean, where they cancel least."""
    product = gram(jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0), delta))
    square = jnp.diag(product)
    return jnp.sqrt(jnp.maximum(square[:, None] + square - 2 * product, 0))


def manhattan(delta: Any) -> jax.Array:
    """Returns the L1 distances [S, S] of the updates `delta [S, ...]`, a row at a time: all at once would be an S^2 P array."""
    return sum(jax.lax.map(lambda row, rows=rows: jnp.sum(jnp.abs(row - rows), axis=1), rows) for rows in _rows(delta))


METRICS = {"L1": manhattan, "L2": euclidean, "cosine": lambda delta: 1 - cosine(delta, delta)}


def _features(values: jax.Array, vectors: jax.Array, square_norm: jax.Array, m: int) -> jax.Array:
    """Returns the cosines [S, m] of every row to the top m singular directions, from ascending eigenpairs of the Gram matrix."""
    width = min(m, values.shape[0])
    values, vectors = values[::-1][:width], vectors[:, ::-1][:, :width]
    # Eigenvalues below the rounding error of the Gram matrix are noise, and its eigenvectors arbitrary.
    rounding = vectors.shape[0] * jnp.finfo(jnp.float32).eps * jnp.max(values)
    scores = jnp.where(values > rounding, jnp.sqrt(jnp.maximum(values, 0)), 0) * vectors
    features = jnp.clip(_divide(scores, jnp.sqrt(jnp.maximum(square_norm, 0))[:, None]), -1, 1)
    pivot = jnp.take_along_axis(features, jnp.argmax(jnp.abs(features), axis=0)[None], axis=0)  # its sign is made positive
    return jnp.pad(features * jnp.where(pivot < 0, -1, 1), ((0, 0), (0, m - width)))


def edc(gram: jax.Array, m: int) -> jax.Array:
    """Returns decomposed cosine features [S, m] of updates with inner products `gram [S, S]` (FedGroup, Duan et al., eq. 8).

    The paper takes cosines of the updates to their top m singular directions. With eigenpairs (l_k, q_k) of the Gram matrix these are
    E_ik = sqrt(l_k) q_ik / sqrt(G_ii), and no direction is ever formed. The largest entry of a column is positive; zero updates give
    zero rows, and columns beyond the rank are zero.
    """
    return _features(*jnp.linalg.eigh(gram), jnp.diag(gram), m)


def edc_randomized(key: Key, delta: Any, m: int, oversample: int = 10, power: int = 2) -> jax.Array:
    """Returns `edc(gram(delta), m)` approximately, without the Gram matrix: for thousands of updates `delta [S, ...]`.

    Randomized range finder with power iterations (Halko, Martinsson, Tropp 2011, Algorithm 4.4), then Rayleigh-Ritz on that range.
    Raises InputError if power < 1: without a power iteration the directions are wrong unless the spectrum decays fast.
    """
    if power < 1:
        raise InputError(f"power={power}: must be at least 1")
    rows = _rows(delta)
    width = min(m + oversample, rows[0].shape[0])
    keys = jax.random.split(key, len(rows))
    sketch = sum(_dot(part, jax.random.normal(k, (part.shape[1], width))) for k, part in zip(keys, rows, strict=True))
    for _ in range(power):
        basis = jnp.linalg.qr(sketch)[0]
        sketch = sum(_dot(part, _dot(part.T, basis)) for part in rows)
    basis = jnp.linalg.qr(sketch)[0]
    values, vectors = jnp.linalg.eigh(gram([_dot(basis.T, part) for part in rows]))
    square_norm = sum(jnp.sum(jnp.square(part.astype(jnp.float32)), axis=1) for part in rows)
    return _features(values, _dot(basis, vectors), square_norm, m)


def madc(gram: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """Returns the mean of absolute differences of cosines [S, S] of updates with inner products `gram [S, S]` (FedGroup, eq. 7).

    M_ij = 1 / (N - 2) sum_{z != i, j} |S_iz - S_jz| over the N rows that are `valid [S] bool`; 0 in rows and columns that are not.
    """
    index = jnp.arange(gram.shape[0])
    valid = jnp.ones(index.shape, bool) if valid is None else valid
    norm = jnp.sqrt(jnp.maximum(jnp.diag(gram), 0))
    cosines = _divide(_divide(gram, norm[:, None]), norm)

    def row(i):
        others = valid & (index != i) & (index[:, None] != index)  # [j, z]
        return jnp.sum(jnp.where(others, jnp.abs(cosines[i] - cosines), 0), axis=1)

    total = jax.lax.map(row, index)  # by rows: all at once would be an N^3 array
    return jnp.where(valid[:, None] & valid, total / jnp.maximum(jnp.sum(valid) - 2, 1), 0)


def _squared_distance(x: jax.Array, centers: jax.Array) -> jax.Array:
    """Returns [N, m], 0 within rounding, so that equal points that differ in the last digits count as one."""
    square = jnp.sum(jnp.square(x[:, None] - centers), axis=-1)  # |x|^2 - 2 x.c + |c|^2 would cancel
    return jnp.where(square > COINCIDENT**2 * jnp.sum(x * x, axis=-1, keepdims=True), square, 0)


def _drawn(mass: jax.Array, draws: jax.Array) -> jax.Array:
    """Returns rows [k], with probabilities in proportion to `mass [N]`, for `draws [k]` uniform in 0 .. 1."""
    up_to = jnp.cumsum(mass)
    return jnp.sum(up_to[:, None] < up_to[-1] * (1 - draws), axis=0)


def _seed(draws: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns m rows of `x [N, p]` as centers by D^2 sampling, of `draws [m, k]` per center the one that lowers the inertia most."""

    def add(i, carry):
        centers, nearest = carry
        mass = weight * nearest
        mass = jnp.where(jnp.sum(mass) > 0, mass, weight)  # every point already is a center: draw any
        candidates = x[_drawn(mass, draws[i])]
        improved = jnp.minimum(nearest[:, None], _squared_distance(x, candidates))  # [N, k]
        best = jnp.argmin(jnp.sum(weight[:, None] * improved, axis=0))
        return centers.at[i].set(candidates[best]), improved[:, best]

    center = x[_drawn(weight, draws[0, :1])[0]]
    centers = jnp.broadcast_to(center, (draws.shape[0], x.shape[1]))
    return jax.lax.fori_loop(1, draws.shape[0], add, (centers, _squared_distance(x, center[None])[:, 0]))[0]


def _move(x: jax.Array, weight: jax.Array, centers: jax.Array) -> jax.Array:
    """Returns the weighted means of the clusters [m, p]; the j-th empty cluster goes to the j-th farthest point."""
    m = centers.shape[0]
    distance = _squared_distance(x, centers)
    member = jax.nn.one_hot(jnp.argmin(distance, axis=1), m) * weight[:, None]
    mass = jnp.sum(member, axis=0)
    far, point = jax.lax.top_k(jnp.where(weight > 0, jnp.min(distance, axis=1), 0), min(m, x.shape[0]))
    rank = jnp.cumsum(mass == 0) - 1
    moves = (far > 0).at[rank].get(mode="fill", fill_value=False)  # else no point is left to move to: stays where it is, empty
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
    """Clusters the rows of `x [N, p]` into m by K-means++ (Arthur and Vassilvitskii 2007) and Lloyd; the restart of lowest inertia wins.

    Rows of `weight [N]` 0 are masked: whatever they hold (NaN too), they only get a label. `greedy` is the number of draws per seed,
    2 + floor(log m) unless given, 1 for the original seeding.
    """
    x = x.astype(jnp.float32)
    weight = jnp.ones(x.shape[0]) if weight is None else weight.astype(jnp.float32)
    kept = jnp.where(weight[:, None] > 0, x, 0)
    greedy = 2 + int(math.log(m)) if greedy is None else greedy

    draws = jax.random.uniform(key, (restarts * m * greedy,))  # flat: compiles faster

    def attempt(draws):
        centers = _lloyd(kept, weight, _seed(draws, kept, weight), iterations)
        return centers, jnp.sum(weight * jnp.min(_squared_distance(kept, centers), axis=1))

    centers, inertia = jax.vmap(attempt)(draws.reshape(restarts, m, greedy))
    best = jnp.argmin(inertia)
    labels = jnp.argmin(_squared_distance(x, centers[best]), axis=1).astype(jnp.int32)
    return KMeans(labels=labels, centers=centers[best], inertia=inertia[best])


def silhouette(x: jax.Array, labels: jax.Array, m: int, valid: jax.Array | None = None, block: int = 256) -> jax.Array:
    """Returns the mean silhouette [] of the clusters `labels [N]` of the rows of `x [N, p]` (Rousseeuw 1987), Euclidean, in -1 .. 1.

    (b - a) / max(a, b): a is a point's mean distance to the others of its cluster, b the smallest to another cluster; 0 for a single
    point. Rows outside `valid [N]` bool count nowhere. Distances are made `block` rows at a time.
    """
    valid = jnp.ones(x.shape[0], bool) if valid is None else valid
    x = jnp.where(valid[:, None], x, 0)
    member = jax.nn.one_hot(labels, m) * valid[:, None]
    size = jnp.sum(member, axis=0)

    def score(row):
        point, label, counts = row
        total = jnp.sqrt(jnp.sum(jnp.square(x - point), axis=-1)) @ member
        inside = _divide(total[label], size[label] - 1)
        outside = jnp.min(jnp.where((jnp.arange(m) != label) & (size > 0), _divide(total, size), jnp.inf))
        alone = (size[label] <= 1) | jnp.isinf(outside)
        return jnp.where(counts & ~alone, (outside - inside) / jnp.maximum(jnp.maximum(inside, outside), 1e-30), 0)

    each = jax.lax.map(score, (x, labels, valid), batch_size=block)
    return jnp.sum(each) / jnp.maximum(jnp.sum(valid), 1)


def agglomerate(distance: jax.Array, m: int, linkage: str = "complete", valid: jax.Array | None = None, threshold=None) -> jax.Array:
    """Merges the closest pair of clusters until m are left; returns labels [N] int32, numbered by first occurrence, -1 for masked rows.

    `distance [N, N]` is symmetric, `valid [N] bool`; ties go to the lowest index; pairs up to `threshold` apart merge beyond m.
    Every row keeps a lower bound of its nearest distance, which all linkages respect, so that a step costs O(N): it either tightens one
    bound or merges (Muellner 2011, generic algorithm).
    Raises InputError for an unknown linkage.
    """
    if linkage not in LINKAGES:
        raise InputError(f"linkage={linkage!r}: must be one of {', '.join(LINKAGES)}")
    index = jnp.arange(distance.shape[0], dtype=jnp.int32)
    valid = jnp.ones(index.shape, bool) if valid is None else valid
    distance = jnp.where(distance < FARTHEST, distance, FARTHEST).astype(jnp.float32)  # NaN too

    def step(carry):
        distance, (a, union), bound, size, label = carry
        for axis in (0, 1):  # the last step's write, made before anything is read: else XLA copies the matrix at every step
            distance = jax.lax.dynamic_update_index_in_dim(distance, union, a, axis)
        i = jnp.argmin(bound)
        row = jnp.where((size > 0) & (index != i), distance[i], jnp.inf)
        j, nearest = jnp.argmin(row), jnp.min(row)
        merge = nearest <= bound[i]
        a, b = jnp.minimum(i, j), jnp.maximum(i, j)
        union = jnp.where(merge, LINKAGES[linkage](distance[a], distance[b], size[a], size[b], distance[a, b], size), distance[a])
        others = jnp.where((size > 0) & (index != a) & (index != b), union, jnp.inf)
        bound = jnp.where(merge, bound.at[a].set(jnp.min(others)).at[b].set(jnp.inf), bound.at[i].set(nearest))
        size = jnp.where(merge, size.at[a].add(size[b]).at[b].set(0), size)
        label = jnp.where(merge & (label == b), a, label)
        return distance, (a, union), bound, size, label

    def unfinished(carry):
        left = jnp.sum(carry[3] > 0)
        return (left > max(m, 1)) | (False if threshold is None else (left > 1) & (jnp.min(carry[2]) <= threshold))

    everywhere = jnp.where(valid[:, None] & valid & (index[:, None] != index), distance, jnp.inf)
    start = distance, (index[0], distance[0]), jnp.min(everywhere, axis=1), valid.astype(jnp.float32), index
    label = jax.lax.while_loop(unfinished, step, start)[4]  # the lowest index of the cluster
    number = jnp.cumsum(valid & (label == index)) - 1
    return jnp.where(valid, number[label], -1).astype(jnp.int32)
