"""What a client minimises: an Objective, called as (params, start, client_extra, x [B,
...], y [B], key, owner [B]) -> [B].

`owner` is as in `Task`, `start` is the model the client received, `client_extra` what
`prepare` computed for it. The same function serves gradient and metric. Any function of
these arguments will do; an Objective also says how it is made, which the sample-space
form of SGD (`dual`) needs to know.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.types import Task


def penalty(mu, params, start):
    """Returns mu / 2 * ||params - start||^2."""
    return (
        0.5
        * mu
        * sum(
            jnp.sum((p - s) ** 2)
            for p, s in zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True)
        )
    )


class Objective(struct.PyTreeNode):
    """A loss, and a pull back to the received model."""

    loss: Callable[..., jax.Array] = struct.field(
        pytree_node=False
    )  # (params, x [B, ...], y [B], key, owner [B]) -> [B]
    mu: Any = None  # [] weight of the proximal term; None: there is none
    mu_of: Callable | None = struct.field(
        pytree_node=False, default=None
    )  # (client_extra) -> mu, where clients differ

    def weight(self, client_extra):
        """Returns the weight of the proximal term for a client, None if there is no such term."""
        return self.mu_of(client_extra) if self.mu_of else self.mu

    def __call__(self, params, start, client_extra, x, y, key, owner):
        """Returns the objective [B] of each sample; every one carries the whole proximal term."""
        each, mu = self.loss(params, x, y, key, owner), self.weight(client_extra)
        return each if mu is None else each + penalty(mu, params, start)


def erm(task: Task) -> Objective:
    """Empirical risk: the task's own loss."""
    return Objective(task.loss)


def proximal(mu, objective: Objective) -> Objective:
    """Adds mu / 2 * ||params - start||^2 to every sample, i.e. mu * (params - start) to
    every gradient (FedProx, eq. 2).

    `mu` is a number, or a function of the client's `client_extra`. A plain 0 adds
    nothing, not even work.
    """
    if callable(mu):
        return objective.replace(mu_of=mu)
    return objective if isinstance(mu, int | float) and mu == 0 else objective.replace(mu=mu)


def add_linear_term(direction, objective):
    """Adds <direction(client_extra), params - start> to every sample, i.e. the
    direction, a pytree like params, to every gradient (FedDANE).

    No Objective: such a gradient is no combination of the client's samples, so there is
    no sample-space form.
    """
    return jax.tree_util.Partial(functools.partial(_linear_term_loss, direction), objective)


def _linear_term_loss(direction, objective, params, start, client_extra, x, y, key, owner):
    terms = jax.tree.map(
        lambda d, p, s: jnp.sum(d * (p - s)), direction(client_extra), params, start
    )
    return objective(params, start, client_extra, x, y, key, owner) + sum(jax.tree.leaves(terms))


def cross_entropy(logits, y):
    """Returns the cross-entropy [B] of logits [B, C]."""
    return (
        jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]
    )
