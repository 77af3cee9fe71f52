"""Inner products and distances of updates; leaf by leaf, so that no flat copy is made."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _rows(tree: Any) -> list[jax.Array]:
    """Returns the leaves as matrices [S, P of the leaf]."""
    return [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]


def _sum(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a / b, 0 where b is 0."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def gram(delta: Any) -> jax.Array:
    """Returns the inner products [S, S] of the updates `delta [S, ...]`, leaf by leaf,
    so that no flat copy is made.
    """
    return _sum([_dot(rows, rows.T) for rows in _rows(delta)])


def cosine(a: Any, b: Any) -> jax.Array:
    """Returns the cosines [S, m] of `a [S, ...]` to `b [m, ...]`, 0 where either norm is 0."""
    a, b = _rows(a), _rows(b)
    norm_a, norm_b = (
        jnp.sqrt(_sum([jnp.sum(jnp.square(rows.astype(jnp.float32)), 1) for rows in side]))
        for side in (a, b)
    )
    product = _sum([_dot(left, right.T) for left, right in zip(a, b, strict=True)])
    return jnp.clip(_divide(_divide(product, norm_a[:, None]), norm_b), -1, 1)


def dissimilarity(a: Any, b: Any) -> jax.Array:
    """Returns (1 - cos) / 2 [S, m], in 0 .. 1, of `a [S, ...]` to `b [m, ...]`
    (FedGroup, eq. 9); 1/2 where either norm is 0.
    """
    return (1 - cosine(a, b)) / 2


def euclidean(delta: Any) -> jax.Array:
    """Returns the distances [S, S] of the updates `delta [S, ...]`; from inner products
    about their mean, where they cancel least.
    """
    product = gram(jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0), delta))
    square = jnp.diag(product)
    return jnp.sqrt(jnp.maximum(square[:, None] + square - 2 * product, 0))


def manhattan(delta: Any) -> jax.Array:
    """Returns the L1 distances [S, S] of the updates `delta [S, ...]`, a row at a time:
    all at once would be an S^2 P array.
    """
    return _sum(
        [
            jax.lax.map(lambda row, rows=rows: jnp.sum(jnp.abs(row - rows), axis=1), rows)
            for rows in _rows(delta)
        ]
    )


def cosine_distance(delta: Any) -> jax.Array:
    """Returns 1 - cos [S, S] of the updates `delta [S, ...]`."""
    return 1 - cosine(delta, delta)
