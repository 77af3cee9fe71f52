"""Nichol, Achiam, Schulman, "On First-Order Meta-Learning Algorithms", 2018,
https://arxiv.org/abs/1803.02999 (Reptile), as the baselines FedDist and FedDWS of Xie,
Long, Shen, Zhou, Wang, Jiang, Zhang, "Multi-Center Federated Learning",
https://arxiv.org/abs/2005.01026.

FedAvg whose server goes only the fraction epsilon of the way to the mean of the trained
models: w <- w + epsilon (mean_i w_i - w).

Differs from the code of FeSEM: its FedDWS reads an undefined name; here it is the formula
next to it (D31).
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.method import AggregateFn, Method, Round
from fedjax_cfl.round.aggregate import uniform_mean, weighted_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Params, Task
from fedjax_cfl.validation import PositiveFloat, checked


@checked("algorithm")
def feddist(
    task: Task, local: Local, system: SystemLike, *, epsilon: PositiveFloat | jax.Array | None = 0.6
) -> Algorithm:
    """FedDist: unweighted means, step `epsilon` (None: 1 / |S|, S the clients that answered)."""
    return step_towards(task, local, system, uniform_mean, epsilon)


@checked("algorithm")
def feddws(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    epsilon: PositiveFloat | jax.Array | None = None,
) -> Algorithm:
    """FedDWS: means weighted by training samples, step `epsilon` (None: 1 / |S|, S the
    clients that answered).
    """
    return step_towards(task, local, system, weighted_mean, epsilon)


def step_towards(
    task: Task,
    local: Local,
    system: SystemLike,
    mean: AggregateFn,
    epsilon: float | jax.Array | None,
) -> Algorithm:
    """FedAvg whose server goes the fraction `epsilon` of the way to the `mean`.

    Args: `mean` is the average that the server goes towards, an `AggregateFn`; `epsilon` > 0 is
    the step, None: 1 / |S|, S the clients that answered.
    """

    def divided_mean(r: Round) -> tuple[Params, jax.Array]:
        step, mass = mean(r)

        def divide(leaf):
            return leaf / jnp.maximum(jnp.sum(r.upload.weight > 0), 1)

        return jax.tree.map(divide, step), mass

    server = None if epsilon is None else optax.sgd(epsilon)
    aggregate = divided_mean if epsilon is None else mean
    method = Method(sgd(task, local), aggregate=aggregate, server=server)
    return federated(task, local, system, method)
