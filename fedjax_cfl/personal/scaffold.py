"""Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, https://arxiv.org/abs/1910.06378.

Every client has a control variate c_i, about its gradient, and every group the mean c of those of
its members. A step of a client is corrected by c - c_i, so that its steps go where the group's
would. Without groups this is the paper's method.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local, Training
from fedjax_cfl.client.objective import Objective, find_objective
from fedjax_cfl.client.sgd import add_change
from fedjax_cfl.client.steps import StepChange
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Correction, Method
from fedjax_cfl.tree import copy_statistics, squared_norms
from fedjax_cfl.types import Params, Task, Upload, Work


def scaffold() -> Method:
    """SCAFFOLD (Algorithm 1, option II): c_i <- c_i - c + (x - y) / (steps lr), the mean gradient
    of a client's steps.

    A client's steps may have weight decay and a proximal term, which are then part of the
    gradient, and momentum: `reach` is what then stands for steps times lr. The server averages as
    the method below does (`algorithm=scaffold`: unweighted, as the paper). Running statistics have
    no variate.
    """

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        corrected = add_change(solve, StepChange("SCAFFOLD", corrects=True, keep=find_variate))
        objective = find_objective(corrected)
        if isinstance(objective, Objective) and objective.direction is not None:
            raise InputError(
                "personal=scaffold: clients of this method correct their gradients already; use"
                " personal=none, or another algorithm"
            )
        return corrected

    def to_client(row: Params, mean: Params) -> Params:
        return jax.tree.map(jnp.subtract, mean, row)

    return Method(
        name="SCAFFOLD",
        rows=lambda model: jax.tree.map(jnp.zeros_like, model),
        train=train,
        correction=Correction(to_client, remove_correction),
    )


def find_variate(training: Training, correction: Params, delta: Params) -> Params:
    """Returns a client's new c_i, from the `correction` c - c_i of its gradients and its update."""
    steps = training.plan.steps
    reach = find_reach(training.lr, training.local.momentum, steps)
    far = jnp.where(steps > 0, reach, 1.0)
    variate = jax.tree.map(lambda d, c: -c - d / far, delta, correction)
    return copy_statistics(variate, correction)


def find_reach(lr: float | jax.Array, rho: float, steps: jax.Array) -> jax.Array:
    """Returns how far `steps` int32 along one and the same gradient go, in gradients: steps times
    lr, and with momentum rho lr (steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho).
    """
    lag = rho * (1.0 - rho ** steps.astype(jnp.float32)) / (1.0 - rho) if rho else 0.0
    return lr * (steps - lag) / (1.0 - rho)


def remove_correction(local: Local, work: Work, added: Params, upload: Upload) -> Upload:
    """Returns the upload with updates [S, ...] as if no step had been corrected by what was `added`
    [S, ...] to gradients: those of one group are all corrected toward its mean, which hides what
    distinguishes clients.
    """
    reach = find_reach(local.lr, local.momentum, upload.model_steps)
    far = jnp.where(upload.weight > 0, reach * work.lr_scale, 0.0)
    delta = jax.tree.map(lambda d, c: d + jax.vmap(jnp.multiply)(far, c), upload.delta, added)
    return upload.replace(delta=delta, squared_norm=squared_norms(delta).sum(0))
