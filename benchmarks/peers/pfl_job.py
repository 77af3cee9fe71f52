"""pfl on a whole job: `FederatedAveraging` on `SimulatedBackend`, updates of equal weight, its
`CentralEvaluationCallback`; several processes share the cohort and the test images.

Processes find each other through pfl's own variables, PFL_WORKER_ADDRESSES and PFL_WORKER_RANK.
What its published program does besides stands in `published_jobs.py`. As in it, a client's batches
keep their order.
"""

import functools
import itertools
import time

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy

from peers.job import Job, Timed, count_right, wait


class CentralTest(CentralEvaluationCallback):
    """Tests as it does and after the last round, but not before the first; notes the seconds
    and what it found last.
    """

    def __init__(self, job: Job, last: int, most: int | None):
        batches = NNEvalHyperParams(local_batch_size=job.test_batch)
        images = Dataset(tuple(part[:most] for part in job.test))
        super().__init__(images, batches, job.given.eval_every)
        self.every, self.last, self.seconds, self.found = job.given.eval_every, last, 0.0, {}

    def on_train_begin(self, *, model):
        """Tests nothing."""
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Tests every few rounds and after the last."""
        if central_iteration % self.every and central_iteration < self.last:
            return False, Metrics()
        wait()
        began = time.perf_counter()
        stop, found = super().after_central_iteration(
            aggregate_metrics, model, central_iteration=self.every
        )
        self.seconds += time.perf_counter() - began
        self.found = found.to_simple_dict()
        return stop, found


def meet() -> float:
    """Returns the time when all processes have come here and their GPUs have nothing to do."""
    wait()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return time.perf_counter()


def make_parts(
    job: Job, processes: int
) -> tuple[SimulatedBackend, PyTorchModel, NNTrainHyperParams]:
    """Returns pfl's backend, model and settings of local training."""
    module, given = job.module, job.given

    def loss(x, y, **_):
        return cross_entropy(module.train()(x), y)

    def metrics(x, y, **_):
        right, total = count_right(module, x, y)
        return {"accuracy": Weighted(right, len(y)), "loss": Weighted(total, len(y))}

    module.loss, module.metrics = loss, metrics
    # first to warm up, a user for each process
    order = itertools.chain(range(processes), *job.cohorts.tolist())
    users = FederatedDataset(
        functools.cache(lambda i: Dataset(job.clients[i], user_id=str(i))), lambda: next(order)
    )
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    return (
        SimulatedBackend(users, users, postprocessors=[WeightByUser()]),
        PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=central),
        NNTrainHyperParams(
            local_num_epochs=given.epochs,
            local_learning_rate=given.lr,
            local_batch_size=given.batch,
        ),
    )


def train(job: Job, processes: int) -> Timed:
    """Warms up, with one user of each process and 1,000 test images; then runs the job, from
    the first model again.
    """
    (backend, model, settings), algorithm = make_parts(job, processes), FederatedAveraging()

    def go_on(rounds: int, cohort: int, most: int | None = None) -> CentralTest:
        """Goes on up to a round; pfl tests users in round 0 alone, before the clock starts."""
        params = NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
        )
        test = CentralTest(job, rounds - 1, most)
        options = {"callbacks": [test], "send_metrics_to_platform": False}
        algorithm.run(params, backend, model, settings, None, **options)
        return test

    first, before = model.get_parameters(), meet()
    go_on(1, processes, most=1000)
    model.set_parameters(first)
    began, cpu = meet(), time.process_time()
    test = go_on(1 + job.given.rounds, job.given.cohort)
    used, ended = time.process_time() - cpu, meet()
    accuracy = float(test.found["Central val | accuracy"])
    return Timed(ended - began, test.seconds, began - before, used, accuracy)
