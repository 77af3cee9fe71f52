"""Running statistics of batch normalisation, kept among a model's parameters.

They are part of the model: sent, averaged and counted in bytes like everything else. But
they are no weights: nothing descends along their gradient, no penalty pulls them, and no
norm, cosine or distance of updates counts them.

A client updates them by each batch it trains on. So that objectives, gradients and solvers
need no second result, a training loss has a term of value 0 whose gradient with respect to
the statistics is (old - new): `move_statistics` subtracts it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.types import Params

STATISTICS = "batch_stats"  # their place in a model's parameters, and Flax's collection


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
