"""McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629.

Clients train one global model on their own data; the server averages their updates.
"""

import jax.numpy as jnp

from fedjax_cfl.client.cohort import client_range
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import gradient_step, sgd
from fedjax_cfl.method import AggregateFn, Method, PrepareFn, Round
from fedjax_cfl.round.aggregate import MEANS, MeanName
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import charge, no_clients
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.reports import make_bill
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Bill, Task
from fedjax_cfl.validation import checked, pick


@checked("algorithm")
def fedavg(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    aggregate: MeanName | AggregateFn = "samples",
) -> Algorithm:
    """FedAvg: E local epochs, means weighted by training samples.

    `aggregate` is samples | uniform.
    """
    mean = pick(aggregate, **MEANS)
    method = Method(sgd(task, local), aggregate=mean, start_clients=no_clients)
    return federated(task, local, system, method)


def fedsgd(task: Task, local: Local, system: SystemLike) -> Algorithm:
    """FedSGD: one full-batch gradient per client; FedAvg with E = 1 and B = infinity."""
    method = Method(
        gradient_step(task, local), prepare=charge_full_gradient(local), start_clients=no_clients
    )
    return federated(task, local, system, method)


def charge_full_gradient(local: Local) -> PrepareFn:
    """Bills what a client's gradient of all its samples takes beyond one mini-batch, as which the
    clock takes its one step.
    """

    def bill(r: Round) -> Bill:
        more = jnp.maximum(client_range(r.cohort.ids, r.data)[0] - local.batch_size, 0)
        return make_bill(samples=TRAIN_TO_INFERENCE * more)

    return charge(bill)
