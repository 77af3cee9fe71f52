"""Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
https://arxiv.org/abs/1812.06127.

FedAvg whose clients are pulled back to the received model by mu / 2 ||w - w_t||^2, and whose stragglers hand in what they have.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl import local as training
from fedjax_cfl.engine import federated
from fedjax_cfl.objective import erm, proximal
from fedjax_cfl.types import Algorithm


def fedprox(task, local, select, *, mu=1.0, drop_percent: float = 0.0) -> Algorithm:
    """FedProx: `drop_percent` (fraction) of the cohort train only 1 .. E - 1 epochs, uniformly drawn, and are kept."""
    local = local.resolved()
    objective = proximal(mu, erm(task))
    if not drop_percent:
        return federated(task, local, select=select, solve=training.sgd(task, local, objective))
    solve = training.sgd(task, local, objective, epochs=lambda extra: extra)
    return federated(task, local, select=select, solve=solve, prepare=stragglers(drop_percent, local.epochs))


def stragglers(drop_percent: float, epochs: int):
    """Returns prepare(...) -> [S] int32, the number of epochs each client manages this round."""

    def prepare(key, state, data, cohort, gid):
        keys = jax.vmap(lambda client: jax.random.fold_in(key, client))(cohort.ids)
        real = cohort.ids < data.num_clients
        lots = jnp.where(real, jax.vmap(jax.random.uniform)(keys), jnp.inf)
        slow = jnp.argsort(jnp.argsort(lots)) < jnp.round(drop_percent * real.sum())
        fewer = jax.vmap(lambda k: jax.random.randint(jax.random.fold_in(k, 1), (), 1, max(epochs, 2)))(keys)
        return jnp.where(slow, fewer, epochs)

    return prepare
