"""Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, https://arxiv.org/abs/1910.06378.

FedAvg whose clients correct their steps by control variates, see `personal.scaffold`: the same
over other methods is `personal=scaffold`.
"""

import optax

from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.personal.scaffold import scaffold as control_variates
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.method import AggregateFn, Hooks
from fedjax_cfl.round.start import no_clients
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Personal, Task
from fedjax_cfl.validation import PositiveFloat, check_arguments


def scaffold(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    server_lr: PositiveFloat = 1.0,
    aggregate: AggregateFn = uniform_mean,
) -> Algorithm:
    """SCAFFOLD (Algorithm 1, option II): one model, unweighted means.

    `server_lr` > 0 is the server's step size. Raises InputError for a personal method: clients
    keep their control variates.
    """
    check_arguments(scaffold, locals(), "algorithm")
    hooks = Hooks(
        sgd(task, local), aggregate=aggregate, server=optax.sgd(server_lr), start_clients=no_clients
    )
    return federated(task, keep_alone(local, control_variates()), system, hooks)


def keep_alone(local: Local, personal: Personal) -> Local:
    """Returns how clients train that keep what `personal` says. Raises InputError where they keep
    something already.
    """
    if local.personal is not None:
        name = personal.name.lower()
        raise InputError(
            f"personal: clients of algorithm={name} keep {name}'s rows and nothing else, without"
            f" {local.personal.name}; use personal=none, or algorithm=fedavg"
        )
    return local.replace(personal=personal)
