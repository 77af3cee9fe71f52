"""Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020, https://arxiv.org/abs/1812.06127.

FedAvg whose clients are pulled back to the received model by mu / 2 ||w - w_t||^2, and
which keeps the unfinished updates of stragglers.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.method import Method, PrepareFn, Round
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import no_clients
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Report, Task
from fedjax_cfl.validation import Fraction, NonNegativeFloat, checked


@checked("algorithm")
def fedprox(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    mu: NonNegativeFloat | jax.Array = 1.0,
    drop_fraction: Fraction = 0.0,
) -> Algorithm:
    """FedProx with the unfinished updates of stragglers.

    Args: `mu` >= 0 is the weight of the proximal term; `drop_fraction`, from 0 to 1, is the
    part of the cohort that trains only 1 .. E - 1 epochs, uniformly drawn; their updates count.
    """
    solve = sgd(task, local, proximal(mu, erm(task)))
    slow = partial_epochs(drop_fraction, local.epochs) if drop_fraction else None
    method = Method(solve, prepare=slow, start_clients=no_clients)
    return federated(task, local, system, method)


def partial_epochs(drop_fraction: float, epochs: int) -> PrepareFn:
    """Draws the share of its E epochs that each client completes in a round."""

    def prepare(r: Round) -> tuple[Work, Report]:
        keys = jax.vmap(lambda client: jax.random.fold_in(r.key, client))(r.cohort.ids)
        draws = jnp.where(r.real, jax.vmap(jax.random.uniform)(keys), jnp.inf)
        slow = jnp.argsort(jnp.argsort(draws)) < jnp.round(drop_fraction * r.real.sum())
        again = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        fewer = jax.vmap(lambda key: jax.random.randint(key, (), 1, max(epochs, 2)))(again)
        return r.work._replace(step_fraction=jnp.where(slow, fewer / epochs, 1.0)), make_report()

    return prepare
