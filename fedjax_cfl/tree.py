"""Models and updates as pytrees: rows, sums and means by group, and running statistics of batch
normalisation.

Running statistics are part of a model: sent, averaged and counted in bytes like everything else.
But they are no weights: nothing descends along their gradient, no penalty pulls them, and no
norm, cosine or distance of updates counts them. A client updates them by each batch it trains on.
So that objectives, gradients and solvers need no second result, a training loss has a term of
value 0 whose gradient with respect to the statistics is (old - new): `move_statistics` subtracts
it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from fedjax_cfl.types import Params

STATISTICS = "batch_stats"  # their place in a model's parameters, and Flax's collection


def take_rows(tree: Any, rows: Any) -> Any:
    """Returns the `rows` of every leaf of a tree: an index, indices or a slice of its axis 0."""
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def zero_rows(count: int, row: Any) -> Any:
    """Returns zeros [count, ...] in rows like each array of `row`, or its shape and type."""
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), row)


def put_part(model: Params, part: Params) -> Params:
    """Returns a model with the leaves of `part`, a part of it, in their places."""
    return unflatten_dict({**flatten_dict(model), **flatten_dict(part)})


def repeat_first(tree: Any) -> Any:
    """Returns the first row of every leaf [m, ...] in all rows."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), tree)


def where_rows(mask: jax.Array, new: Any, old: Any) -> Any:
    """Returns the `new` tree [S, ...] in the rows of `mask` [S] bool, the `old` one elsewhere."""
    return jax.tree.map(partial(jax.vmap(jnp.where), mask), new, old)


def one_hot(labels: jax.Array, count: int, valid: jax.Array | None = None) -> jax.Array:
    """Returns [K, m] float32: 1 in the column of each label [K], in rows that are `valid` [K]
    bool, 0 elsewhere.
    """
    member = labels[:, None] == jnp.arange(count)
    return (member if valid is None else member & valid[:, None]).astype(jnp.float32)


def membership_weights(weight: jax.Array, gid: jax.Array, num_groups: int) -> jax.Array:
    """Returns [S, m]: the weight [S] of each client in its group's column, 0 elsewhere."""
    return jnp.where(gid[:, None] == jnp.arange(num_groups), weight[:, None], 0.0)


def group_sum(coefficient: jax.Array, tree: Params) -> Params:
    """Returns sum_i coefficient[i, g] * tree[i], [m, ...], of `tree` [S, ...].

    It is one matrix product per leaf, so that each device adds up its own clients.
    """
    return jax.tree.map(lambda leaf: jnp.tensordot(coefficient, leaf, axes=((0,), (0,))), tree)


def group_mean(
    weight: jax.Array, gid: jax.Array, tree: Params, num_groups: int
) -> tuple[Params, jax.Array]:
    """Returns the weighted mean [m, ...] of `tree` [S, ...] within each group, and the
    weight [m] behind it. Both are 0 for an empty group.
    """
    coefficient = membership_weights(weight, gid, num_groups)
    mass = coefficient.sum(0)
    return group_sum(coefficient / jnp.where(mass > 0, mass, 1.0), tree), mass


def squared_norms(tree: Params) -> jax.Array:
    """Returns the squared norms [L, S] of the L leaves [S, ...] of a model or an update;
    running statistics are left out.
    """
    return squared_leaf_norms(drop_statistics(tree))


def squared_leaf_norms(tree: Params) -> jax.Array:
    """Returns the squared norms [L, S] of all L leaves [S, ...] of a tree.

    A product is several times faster than a reduction.
    """
    return jnp.stack([inner_products(leaf, leaf, paired=True) for leaf in jax.tree.leaves(tree)])


def inner_products(
    a: jax.Array, b: jax.Array, precision: lax.Precision | None = None, *, paired: bool = False
) -> jax.Array:
    """Returns the inner products [A, B] float32 of each of `a` [A, ...] with each of `b` [B,
    ...]; `paired`: those [A] of a_i with b_i.

    Arrays keep their axes: as rows of a matrix, those that devices split by two axes (see
    `sharding`) would have to be put together first.
    """
    axes, rows = tuple(range(1, a.ndim)), (0,) if paired else ()
    dimensions = ((axes, axes), (rows, rows))
    return lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)


def drop_statistics(tree: Params) -> Params:
    """Returns a model, or an update, without its running statistics."""
    if STATISTICS not in _keys(tree):
        return tree
    return {name: leaf for name, leaf in tree.items() if name != STATISTICS}


def as_variables(params: Params) -> dict:
    """Returns what Flax applies a module to. No gradient gets into the statistics."""
    if STATISTICS not in _keys(params):
        return {"params": params}
    return {"params": drop_statistics(params), STATISTICS: lax.stop_gradient(params[STATISTICS])}


def pull_statistics(params: Params, new: Params) -> jax.Array:
    """Returns 0 [], whose gradient with respect to the statistics of `params` is (old - new)."""
    gaps = jax.tree.map(lambda old, to: old - lax.stop_gradient(to), params[STATISTICS], new)
    total = sum((jnp.sum(jnp.square(gap)) for gap in jax.tree.leaves(gaps)), jnp.zeros(()))
    return (total - lax.stop_gradient(total)) / 2


def copy_statistics(params: Params, other: Params) -> Params:
    """Returns `params` with the running statistics of `other`."""
    if STATISTICS not in _keys(params):
        return params
    return {**params, STATISTICS: other[STATISTICS]}


def move_statistics(params: Params, old: Params, gradient: Params) -> Params:
    """Returns `params`, after a step, with the statistics that the step's gradient asks for."""
    if STATISTICS not in _keys(params):
        return params
    moved = jax.tree.map(jnp.subtract, old[STATISTICS], gradient[STATISTICS])
    return {**params, STATISTICS: moved}


def has_statistics(params: Params) -> bool:
    """Returns whether a model has running statistics."""
    return STATISTICS in _keys(params)


def _keys(tree: Params) -> tuple:
    return tuple(tree) if isinstance(tree, dict) else ()


def flatten_tree(tree: Params) -> jax.Array:
    """Returns all numbers of a tree as one vector [P]."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])
