"""Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, https://arxiv.org/abs/1910.06378.

Every client has a control variate c_i, about its gradient, and every group the mean c of those of
its members. A step of a client is corrected by c - c_i, so that its steps go where the group's
would. Without groups this is the paper's method.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.executor import Program, then
from fedjax_cfl.client.local import Local, Training, Work
from fedjax_cfl.client.objective import Objective, find_objective
from fedjax_cfl.client.sgd import change_steps, direct_loop
from fedjax_cfl.errors import InputError
from fedjax_cfl.tree import copy_statistics, squared_norms
from fedjax_cfl.types import FederatedData, Params, Personal, ServerRows, Task, Upload


def scaffold() -> Personal:
    """SCAFFOLD (Algorithm 1, option II): c_i <- c_i - c + (x - y) / (steps lr), the mean gradient
    of a client's steps.

    A client's steps may have weight decay and a proximal term, which are then part of the
    gradient, and momentum: `reach` is what then stands for steps times lr. The server averages as
    the method below does (`algorithm=scaffold`: unweighted, as the paper). Running statistics have
    no variate.
    """

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        corrected = change_steps(solve, corrected_loop, "scaffold")
        objective = find_objective(corrected)
        if isinstance(objective, Objective) and objective.direction is not None:
            raise InputError(
                "personal=scaffold: clients of this method correct their gradients already; use"
                " personal=none, or another algorithm"
            )
        return corrected

    return Personal(
        "SCAFFOLD",
        lambda model: jax.tree.map(jnp.zeros_like, model),
        train,
        combine=None,
        server=ServerRows(
            give=lambda row, mean: jax.tree.map(jnp.subtract, mean, row), restore=restore_updates
        ),
    )


def corrected_loop(training: Training, data: FederatedData) -> Program:
    """Returns the SGD of one client with `training.own`, c - c_i, added to every gradient; it keeps
    its new c_i.
    """
    correction, plan = training.own, training.plan

    def end(found: tuple) -> tuple[Params, jax.Array, Params]:
        delta, losses, _ = found
        reach = find_reach(training.lr, training.local.momentum, plan.steps)
        far = jnp.where(plan.steps > 0, reach, 1.0)
        variate = jax.tree.map(lambda d, c: -c - d / far, delta, correction)
        return delta, losses, copy_statistics(variate, correction)

    return then(direct_loop(training, data, correction), end)


def find_reach(lr: float | jax.Array, rho: float, steps: jax.Array) -> jax.Array:
    """Returns how far `steps` int32 along one and the same gradient go, in gradients: steps times
    lr, and with momentum rho lr (steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho).
    """
    lag = rho * (1.0 - rho ** steps.astype(jnp.float32)) / (1.0 - rho) if rho else 0.0
    return lr * (steps - lag) / (1.0 - rho)


def restore_updates(local: Local, work: Work, upload: Upload) -> Upload:
    """Returns the upload with updates [S, ...] as if no step had been corrected along them: those
    of one group are all corrected toward its mean, which hides what distinguishes clients.
    """
    reach = find_reach(local.lr, local.momentum, upload.steps)
    far = jnp.where(upload.weight > 0, reach * work.lr_scale, 0.0)
    delta = jax.tree.map(lambda d, c: d + jax.vmap(jnp.multiply)(far, c), upload.delta, work.own)
    return upload.replace(delta=delta, squared_norm=squared_norms(delta).sum(0))
