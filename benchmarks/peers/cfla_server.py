"""CFLA, a framework for clustered federated learning: its FedAvg server and client, the
ones its clustered methods are derived from.

CFLA's FedAvg client has Adam with weight decay written in and evaluates after every
epoch. Here Adam is replaced by SGD and the evaluation left out, so that it does no more
than the others.
"""

import time

import torch
from cfla.framework.client.clientbase import Client
from cfla.framework.server.server_fedavg import ServerFedAvg
from torch.utils.data import DataLoader, TensorDataset
from workloads import LR, Workload, cohorts

from peers import Trained
from peers.torch_model import Counted, clients, from_torch, net, use_faster_threads


class Quiet(Client):
    """CFLA's client without evaluation, which trains on all its samples."""

    def __init__(self, client_id, dataset, args):
        super().__init__(client_id, dataset, args)
        self.train_loader = DataLoader(dataset, batch_size=args["batch_size"], shuffle=True)

    def test(self):
        """Returns an accuracy that nobody reads."""
        return 0.0, []


def train(work: Workload, rounds: int) -> Trained:
    """Runs FedAvg, one call of the server a round."""
    use_faster_threads(work.model)
    torch.optim.Adam = lambda parameters, lr, weight_decay: torch.optim.SGD(parameters, lr=lr)
    given = {
        "device": "cpu",
        "criterion": None,
        "optimizer": None,
        "local_epochs": work.epochs,
        "batch_size": work.batch,
        "learning_rate": LR,
        "train_fraction": 0.5,  # it allows no empty test set, see Quiet
        "fraction": 1.0,  # of the cohort
        "nb_epochs": rounds,
    }
    held = [Quiet(i, TensorDataset(x, y), given) for i, (x, y) in enumerate(clients(work))]
    server, module = ServerFedAvg(net(work.model), None, given), net(work.model)
    seconds, steps, model = [], [], None
    for ids in cohorts(work, rounds):
        before, began = Counted.steps, time.perf_counter()
        module, _ = server.federated_learning(module, [held[i] for i in ids])
        seconds.append(time.perf_counter() - began)
        steps.append(Counted.steps - before)
        model = model or from_torch(module.parameters())
    return Trained(seconds, steps, model)
