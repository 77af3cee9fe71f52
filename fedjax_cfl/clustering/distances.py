"""Inner products and distances of updates, leaf by leaf: no flat copy is made; and
distances of points, as client representations are.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from typing_extensions import TypeAliasType

from fedjax_cfl.tree import drop_statistics, inner_products
from fedjax_cfl.types import Params


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a @ b in full float32, whatever JAX's default precision is."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _products(a: jax.Array, b: jax.Array) -> jax.Array:
    return inner_products(a, b, jax.lax.Precision.HIGHEST)


def _sum_all(leaf: jax.Array) -> jax.Array:
    """Returns the sums [S] of an array [S, ...]."""
    return jnp.sum(leaf, axis=tuple(range(1, leaf.ndim)))


def as_rows(tree: Params) -> list[jax.Array]:
    """Returns the leaves as matrices [S, P of the leaf], without running statistics."""
    return [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(drop_statistics(tree))]


def add_up(parts: list[jax.Array]) -> jax.Array:
    """Returns the sum of arrays of one shape."""
    return functools.reduce(jnp.add, parts)


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a / b, 0 where b is 0."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def gram(delta: Params) -> jax.Array:
    """Returns the inner products [S, S] of the updates `delta` [S, ...]."""
    return add_up([_products(leaf, leaf) for leaf in jax.tree.leaves(drop_statistics(delta))])


def cosine(a: Params, b: Params) -> jax.Array:
    """Returns the cosines [S, m] of `a` [S, ...] with `b` [m, ...]; 0 where a norm is 0."""
    a, b = (jax.tree.leaves(drop_statistics(side)) for side in (a, b))
    norm_a, norm_b = (
        jnp.sqrt(add_up([_sum_all(jnp.square(leaf.astype(jnp.float32))) for leaf in side]))
        for side in (a, b)
    )
    product = add_up([_products(left, right) for left, right in zip(a, b, strict=True)])
    return jnp.clip(divide(divide(product, norm_a[:, None]), norm_b), -1, 1)


def dissimilarity(a: Params, b: Params) -> jax.Array:
    """Returns (1 - cos) / 2 [S, m], from 0 to 1, of `a` [S, ...] and `b` [m, ...]
    (FedGroup, eq. 9); 1/2 where a norm is 0.
    """
    return (1 - cosine(a, b)) / 2


def euclidean(delta: Params) -> jax.Array:
    """Returns the Euclidean distances [S, S] of the updates `delta` [S, ...].

    They are made of the inner products of the updates minus their mean, where rounding
    errors are smallest.
    """
    product = gram(jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0), delta))
    square = jnp.diag(product)
    return jnp.sqrt(jnp.maximum(square[:, None] + square - 2 * product, 0))


def manhattan(delta: Params) -> jax.Array:
    """Returns the L1 distances [S, S] of the updates `delta` [S, ...].

    One row at a time: all at once would need an array of S^2 P numbers.
    """
    return add_up(
        [
            jax.lax.map(lambda one, leaf=leaf: _sum_all(jnp.abs(one - leaf)), leaf)
            for leaf in jax.tree.leaves(drop_statistics(delta))
        ]
    )


def cosine_distance(delta: Params) -> jax.Array:
    """Returns 1 - cos [S, S], from 0 to 2, of the updates `delta` [S, ...]."""
    return 1 - cosine(delta, delta)


# (a [A, p], b [B, p]) -> the distances [A, B] of points from others
MetricFn = TypeAliasType("MetricFn", Callable[[jax.Array, jax.Array], jax.Array])


def _sum_gaps(
    gap: Callable[[jax.Array, jax.Array], jax.Array], a: jax.Array, b: jax.Array
) -> jax.Array:
    """Returns sum_c gap(a_c, b_c) [A, B] over the coordinates c.

    One coordinate after another: no array [A, B, p] is made, and the inner loop runs over
    points. Nothing cancels: equal points are exactly 0 apart.
    """

    def add(total: jax.Array, columns: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        left, right = columns
        return total + gap(left[:, None], right), None

    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    zeros = jnp.zeros((len(a), len(b)))
    return jax.lax.scan(add, zeros, (a.T, b.T), unroll=min(20, a.shape[1]))[0]


def l1(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns sum_c |a_c - b_c|, from 0 to 2 between distributions (a `MetricFn`)."""
    return _sum_gaps(lambda p, q: jnp.abs(p - q), a, b)


def squared_euclidean(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns sum_c (a_c - b_c)^2 (a `MetricFn`)."""
    return _sum_gaps(lambda p, q: jnp.square(p - q), a, b)


def jensen_shannon(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the Jensen-Shannon distances, the square root of the divergence in nats, of
    distributions; from 0 to sqrt(log 2) (a `MetricFn`).
    """
    return jnp.sqrt(_sum_gaps(_divergence, a, b))


def _divergence(p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns (p log(p / m) + q log(q / m)) / 2 with m = (p + q) / 2, and 0 log 0 = 0.

    With u = (p - q) / (p + q) it is m ((1 + u) log(1 + u) + (1 - u) log(1 - u)) / 2; for
    small u the logarithms would cancel, and a power series takes their place.
    """
    u = divide(jnp.abs(p - q), p + q)
    square = jnp.square(u)
    series = square * (1 + square * (1 / 6 + square * (1 / 15 + square * (1 / 28 + square / 45))))
    rest = jnp.where(u < 1, 1 - u, 1.0)  # 0 log 0 = 0
    exact = (1 + u) * jnp.log1p(u) + jnp.where(u < 1, rest * jnp.log(rest), 0.0)
    return (p + q) / 4 * jnp.where(u < 0.25, series, exact)


METRICS: dict[str, MetricFn] = {
    "l1": l1,
    "jensen_shannon": jensen_shannon,
    "squared_euclidean": squared_euclidean,
}
