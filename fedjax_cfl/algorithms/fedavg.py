"""McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629.

Clients train one global model on their own data; the server averages their updates.
"""

from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import gradient_step, sgd
from fedjax_cfl.method import AggregateFn, Method
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import no_clients
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Task


def fedavg(
    task: Task, local: Local, system: SystemLike, *, aggregate: AggregateFn = weighted_mean
) -> Algorithm:
    """FedAvg: E local epochs, means weighted by training samples."""
    method = Method(sgd(task, local), aggregate=aggregate, start_clients=no_clients)
    return federated(task, local, system, method)


def fedsgd(task: Task, local: Local, system: SystemLike) -> Algorithm:
    """FedSGD: one full-batch gradient per client; FedAvg with E = 1 and B = infinity."""
    method = Method(gradient_step(task, local), start_clients=no_clients)
    return federated(task, local, system, method)
