"""pfl: its `FederatedAveraging` on its `SimulatedBackend`, weighted by data points.

pfl cuts a client's batches once and keeps their order: no shuffling, which is a little
less work than the others do.
"""

import functools
import itertools
import time

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy
from workloads import COHORT, LR, Workload, cohorts

from peers import Trained
from peers.torch_model import Counted, clients, from_torch, net, use_faster_threads


class Clock(TrainingProcessCallback):
    """Notes when each round ends, the steps until then, and the first round's model."""

    def __init__(self):
        self.times, self.steps, self.model = [], [], None

    def on_train_begin(self, *, model):
        """Starts the clock."""
        self.times, self.steps = [time.perf_counter()], [Counted.steps]
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Ends a round; a copy of the first model is no part of the second round's time."""
        self.times.append(time.perf_counter())
        self.steps.append(Counted.steps)
        self.model = self.model or from_torch(model.pytorch_model.parameters())
        return False, Metrics()


def train(work: Workload, rounds: int) -> Trained:
    """Runs FedAvg; nothing is evaluated after the first round."""
    use_faster_threads(work.model)
    held, module, clock = clients(work), net(work.model), Clock()
    module.loss = lambda x, y, **_: cross_entropy(module(x), y)
    module.metrics = lambda x, y, **_: {}
    order = itertools.chain.from_iterable(cohorts(work, rounds + 1).tolist())
    users = FederatedDataset(
        functools.cache(lambda i: Dataset(held[i], user_id=str(i))), lambda: next(order)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=optimizer),
        NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=LR, local_batch_size=work.batch
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return Trained(
        *([b - a for a, b in itertools.pairwise(noted)] for noted in (clock.times, clock.steps)),
        clock.model,
    )
