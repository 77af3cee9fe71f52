"""What a client minimises: an Objective, called as (params, start, extra, x [B, ...], y [B], key) -> [B].

`start` is the model the client received, `extra` what `prepare` computed for it. The same function serves gradient and metric. Any
function of these arguments will do; an Objective also says how it is made, which the sample-space form of SGD (`dual`) needs to know.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_cfl.types import Task


def penalty(mu, params, start):
    """Returns mu / 2 * ||params - start||^2."""
    return 0.5 * mu * sum(jnp.sum((p - s) ** 2) for p, s in zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True))


class Objective(NamedTuple):
    """A loss, and a pull back to the received model."""

    loss: Callable[..., jax.Array]  # (params, x [B, ...], y [B], key) -> [B]
    mu: Callable | None = None  # (extra) -> weight of the proximal term; None: there is none

    def __call__(self, params, start, extra, x, y, key):
        """Returns the objective [B] of each sample; every one carries the whole proximal term."""
        each = self.loss(params, x, y, key)
        return each if self.mu is None else each + penalty(self.mu(extra), params, start)


def erm(task: Task) -> Objective:
    """Empirical risk: the task's own loss."""
    return Objective(task.loss)


def proximal(mu, objective: Objective) -> Objective:
    """Adds mu / 2 * ||params - start||^2 to every sample, i.e. mu * (params - start) to every gradient (FedProx, eq. 2).

    `mu` is a number, or a function of the client's `extra`. A plain 0 adds nothing, not even work.
    """
    if isinstance(mu, int | float) and mu == 0:
        return objective
    return objective._replace(mu=mu if callable(mu) else lambda extra: mu)


def tilted(direction, objective):
    """Adds <direction(extra), params - start> to every sample, i.e. the direction, a pytree like params, to every gradient (FedDANE).

    A plain function: such a gradient is no combination of the client's samples, so there is no sample-space form.
    """

    def each(params, start, extra, x, y, key):
        terms = jax.tree.map(lambda d, p, s: jnp.sum(d * (p - s)), direction(extra), params, start)
        return objective(params, start, extra, x, y, key) + sum(jax.tree.leaves(terms))

    return each
