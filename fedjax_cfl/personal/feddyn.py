"""Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, https://arxiv.org/abs/2111.04263 (FedDyn).

A client's loss gets a pull to its group's model and a linear term, minus its gradient where its
last training ended. So a model at which all losses together have no slope is one at which no
client moves. The server adds to the mean model what all of its clients' terms ask for. Without
groups this is the paper's method.

Differs from the paper: the server adds nothing in groups of fewer than `LEAST_MEMBERS` clients,
which would go too far. Differs from the authors' code: alpha is the same for all clients, as in the
paper, and gradients are not clipped.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local, Training
from fedjax_cfl.client.objective import Objective, check_pull, find_objective
from fedjax_cfl.client.sgd import add_change
from fedjax_cfl.client.steps import StepChange
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Correction, Method
from fedjax_cfl.personal.scaffold import remove_correction
from fedjax_cfl.tree import copy_statistics
from fedjax_cfl.types import Params, Task
from fedjax_cfl.validation import PositiveFloat, checked

LEAST_MEMBERS = 3


@checked("personal")
def feddyn(*, alpha: PositiveFloat = 0.01) -> Method:
    """FedDyn (Algorithm 1): a client's loss has + <h, y> + alpha / 2 ||y - w||^2, with its row h,
    minus the gradient of its loss where it ended: h <- h + alpha (y - w).

    `alpha` > 0 is the weight of the pull; the smaller it is, the farther the server goes: without
    pull this is not FedAvg. A client's steps may have momentum, weight decay and a proximal term.
    The server averages as the method below does (`algorithm=feddyn`: unweighted, as the paper).
    Running statistics have no term. Raises InputError for a value that is not allowed, and for a
    step size of 1 / alpha or more, with which steps turn back.
    """

    def pull(objective: Objective, received: Params, row: Params) -> Objective:
        return objective.replace(mu=alpha if objective.mu is None else alpha + objective.mu)

    def keep(training: Training, row: Params, delta: Params) -> Params:
        return copy_statistics(jax.tree.map(lambda h, d: h + alpha * d, row, delta), row)

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        check_pull("alpha", alpha, local.lr)
        change = StepChange("FedDyn", objective=pull, keep=keep, corrects=True)
        changed = add_change(solve, change)
        objective = find_objective(changed)
        fixed = isinstance(objective, Objective) and not (objective.mu_of or objective.center)
        if not fixed or objective.direction:
            raise InputError(
                "personal=feddyn: clients of this method have a pull or a linear term of their own"
                " already; use personal=none, or another algorithm"
            )
        return changed

    def server_step(mean: Params, members: jax.Array) -> Params:
        return jax.tree.map(lambda row: jnp.where(members < LEAST_MEMBERS, 0.0, row / alpha), mean)

    return Method(
        name="FedDyn",
        rows=lambda model: jax.tree.map(jnp.zeros_like, model),
        train=train,
        correction=Correction(
            lambda row, mean: row, remove_correction, is_uploaded=False, server_step=server_step
        ),
    )
