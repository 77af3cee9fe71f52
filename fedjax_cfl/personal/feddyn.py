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
from jax.tree_util import Partial

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.executor import Program, then
from fedjax_cfl.client.local import Local, Training
from fedjax_cfl.client.objective import Objective, check_pull, find_objective
from fedjax_cfl.client.sgd import change_steps, direct_loop
from fedjax_cfl.errors import InputError
from fedjax_cfl.personal.scaffold import restore_updates
from fedjax_cfl.tree import copy_statistics
from fedjax_cfl.types import FederatedData, Params, Personal, ServerRows, Task
from fedjax_cfl.validation import PositiveFloat, check_arguments

LEAST_MEMBERS = 3


def feddyn(*, alpha: PositiveFloat = 0.01) -> Personal:
    """FedDyn (Algorithm 1).

    `alpha` > 0 is the weight of the pull; the smaller it is, the farther the server goes: without
    pull this is not FedAvg. A client's steps may have momentum, weight decay and a proximal term.
    The server averages as the method below does (`algorithm=feddyn`: unweighted, as the paper).
    Running statistics have no term. Raises InputError for a value that is not allowed, and for a
    step size of 1 / alpha or more, with which steps turn back.
    """
    check_arguments(feddyn, locals(), "personal")

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        check_pull("alpha", alpha, local.lr)
        changed = change_steps(solve, Partial(dynamic_loop, alpha), "feddyn")
        objective = find_objective(changed)
        fixed = isinstance(objective, Objective) and not (objective.mu_of or objective.center)
        if not fixed or objective.direction:
            raise InputError(
                "personal=feddyn: clients of this method have a pull or a linear term of their own"
                " already; use personal=none, or another algorithm"
            )
        return changed

    def move(mean: Params, members: jax.Array) -> Params:
        return jax.tree.map(lambda row: jnp.where(members < LEAST_MEMBERS, 0.0, row / alpha), mean)

    return Personal(
        "FedDyn",
        lambda model: jax.tree.map(jnp.zeros_like, model),
        train,
        combine=None,
        server=ServerRows(lambda row, mean: row, restore_updates, sent=False, move=move),
    )


def dynamic_loop(alpha: float, training: Training, data: FederatedData) -> Program:
    """Returns the SGD of one client on its loss + <h, y> + alpha / 2 ||y - w||^2, with its row h as
    `training.own`; it keeps h + alpha (y - w), minus the gradient of its loss where it ends.
    """
    row, objective = training.own, training.objective
    mu = alpha if objective.mu is None else alpha + objective.mu
    pulled = training._replace(objective=objective.replace(mu=mu))

    def end(found: tuple) -> tuple[Params, jax.Array, Params]:
        delta, losses, _ = found
        moved = jax.tree.map(lambda h, d: h + alpha * d, row, delta)
        return delta, losses, copy_statistics(moved, row)

    return then(direct_loop(pulled, data, row), end)
