"""Inner products and distances of updates, leaf by leaf: no flat copy is made."""

import functools

import jax
import jax.numpy as jnp

from fedjax_cfl.types import Params


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _rows(tree: Params) -> list[jax.Array]:
    """Returns the leaves as matrices [S, P of the leaf]."""
    return [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]


def _sum(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a / b, 0 where b is 0."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def gram(delta: Params) -> jax.Array:
    """Returns the inner products [S, S] of the updates `delta` [S, ...]."""
    return _sum([_dot(rows, rows.T) for rows in _rows(delta)])


def cosine(a: Params, b: Params) -> jax.Array:
    """Returns the cosines [S, m] of `a` [S, ...] with `b` [m, ...]; 0 where a norm is 0."""
    a, b = _rows(a), _rows(b)
    norm_a, norm_b = (
        jnp.sqrt(_sum([jnp.sum(jnp.square(rows.astype(jnp.float32)), 1) for rows in side]))
        for side in (a, b)
    )
    product = _sum([_dot(left, right.T) for left, right in zip(a, b, strict=True)])
    return jnp.clip(_divide(_divide(product, norm_a[:, None]), norm_b), -1, 1)


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
    return _sum(
        [
            jax.lax.map(lambda row, rows=rows: jnp.sum(jnp.abs(row - rows), axis=1), rows)
            for rows in _rows(delta)
        ]
    )


def cosine_distance(delta: Params) -> jax.Array:
    """Returns 1 - cos [S, S], from 0 to 2, of the updates `delta` [S, ...]."""
    return 1 - cosine(delta, delta)
