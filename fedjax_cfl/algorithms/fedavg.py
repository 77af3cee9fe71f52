"""McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629.

Clients train the one global model on their own data; the server averages what they
learned.
"""

from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.engine import federated, no_clients
from fedjax_cfl.round.sgd import gradient_step, sgd
from fedjax_cfl.types import Algorithm


def fedavg(task, local, select, *, aggregate=weighted_mean) -> Algorithm:
    """FedAvg: E local epochs, means weighted by training samples."""
    local = local.resolve()
    return federated(
        task, local, select=select, solve=sgd(task, local), aggregate=aggregate, founders=no_clients
    )


def fedsgd(task, local, select) -> Algorithm:
    """FedSGD: one full-batch gradient a client, i.e. FedAvg with E = 1 and B = infinity."""
    local = local.resolve()
    return federated(
        task, local, select=select, solve=gradient_step(task, local), founders=no_clients
    )
