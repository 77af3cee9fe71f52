"""fluke: its `FedAVG`, weighted by samples, with its own `FastDataLoader`, clients,
channel and `run`; nothing is evaluated.
"""

import time

import torch
from workloads import CLASSES, COHORT, LR, Workload, cohorts

from peers import Trained
from peers.torch_model import Counted, clients, from_torch, net, use_faster_threads

try:
    import torchvision  # noqa: F401, fluke imports it
# its operators are built for a PyTorch with CUDA; nobody here calls one, but the import wants
# two of them declared
except RuntimeError:
    declared = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.server import Server


class Listed(Server):
    """fluke's server with given cohorts; it notes seconds and steps of a round and the
    first round's model.
    """

    def get_eligible_clients(self, eligible_perc: float):
        """Returns the clients of the next round, which begins here."""
        self.began, self.before = time.perf_counter(), Counted.steps
        return [self.clients[i] for i in next(self.table)]

    def aggregate(self, eligible, client_models) -> None:
        """Aggregates, which ends a round."""
        super().aggregate(eligible, client_models)
        self.seconds.append(time.perf_counter() - self.began)
        self.steps.append(Counted.steps - self.before)
        self.first = self.first or from_torch(self.model.parameters())


class Federation(FedAVG):
    """fluke's FedAvg with that server."""

    def get_server_class(self):
        """Returns the class of the server."""
        return Listed


class Loaders:
    """Stands for fluke's `DataSplitter` where the clients' data are given."""

    def __init__(self, held):
        self.held = held

    def assign(self, n_clients: int, batch_size: int):
        """Returns the loaders of training data; nobody holds test data."""
        loaders = [
            FastDataLoader(
                x, y, num_labels=CLASSES, batch_size=batch_size, shuffle=True, skip_singleton=False
            )
            for x, y in self.held
        ]
        return (loaders, [None] * n_clients), None


def train(work: Workload, rounds: int) -> Trained:
    """Runs FedAvg."""
    use_faster_threads(work.model)
    client = {
        "batch_size": work.batch,
        "local_epochs": work.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"lr": LR},
        "scheduler": {"step_size": 1, "gamma": 1.0},
    }
    given = DDict(model=net(work.model), client=DDict(client), server=DDict(weighted=True))
    federation = Federation(work.clients, Loaders(clients(work)), given)
    server = federation.server
    server.table, server.seconds, server.steps, server.first = (
        iter(cohorts(work, rounds)),
        [],
        [],
        None,
    )
    federation.run(rounds, COHORT / work.clients)
    return Trained(server.seconds, server.steps, server.first)
