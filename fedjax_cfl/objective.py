"""What a client minimises: functions (params, start, extra, x [B, ...], y [B], key) -> [B].

`start` is the model the client received, `extra` what `prepare` computed for it. The same function serves gradient and metric.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.types import Task


def erm(task: Task):
    """Empirical risk: the task's own loss."""

    def objective(params, start, extra, x, y, key):
        return task.loss(params, x, y, key)

    return objective


def proximal(mu, objective):
    """Adds mu / 2 * ||params - start||^2 to every sample, i.e. mu * (params - start) to every gradient (FedProx, eq. 2)."""

    def with_prox(params, start, extra, x, y, key):
        gaps = jax.tree.map(lambda p, s: jnp.sum((p - s) ** 2), params, start)
        return objective(params, start, extra, x, y, key) + 0.5 * mu * sum(jax.tree.leaves(gaps))

    return with_prox
