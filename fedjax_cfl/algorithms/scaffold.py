"""Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, https://arxiv.org/abs/1910.06378.

FedAvg whose clients correct their steps by control variates, see `personal.scaffold`: the same
over other methods is `personal=scaffold`.
"""

import optax

from fedjax_cfl.client.local import Local, add_layer
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.method import AggregateFn, Method
from fedjax_cfl.personal.scaffold import scaffold as control_variates
from fedjax_cfl.round.aggregate import MEANS, MeanName
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import no_clients
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Task
from fedjax_cfl.validation import PositiveFloat, checked, pick


@checked("algorithm")
def scaffold(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    server_lr: PositiveFloat = 1.0,
    aggregate: MeanName | AggregateFn = "uniform",
) -> Algorithm:
    """SCAFFOLD (Algorithm 1, option II): one model, unweighted means.

    `server_lr` > 0 is the server's step size. Other layers (`personal=ditto`) stand over it.
    """
    mean = pick(aggregate, **MEANS)
    method = Method(
        sgd(task, local), aggregate=mean, server=optax.sgd(server_lr), start_clients=no_clients
    )
    return federated(task, add_layer(local, control_variates()), system, method)
