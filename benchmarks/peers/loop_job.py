"""Plain PyTorch on a whole job: a loop over the cohort's clients, their epochs and batches."""

import time

import torch

from peers.job import Job, Timed, count_right, wait
from peers.torch_loop import epochs


def run_round(job: Job, ids: list[int]) -> None:
    """Trains a cohort and puts the mean of its models, of equal weight, into the module."""
    parameters = list(job.module.train().parameters())
    shared = [p.detach().clone() for p in parameters]
    total = [torch.zeros_like(p) for p in shared]
    for i in ids:
        with torch.no_grad():
            torch._foreach_copy_(parameters, shared)
        epochs(job.module, *job.clients[i], job.given, job.given.lr)
        with torch.no_grad():
            torch._foreach_add_(total, parameters, alpha=1 / len(ids))
    with torch.no_grad():
        torch._foreach_copy_(parameters, total)


def test(job: Job, most: int | None = None) -> float:
    """Returns the accuracy on all test images, or on the first ones."""
    x, y = (part[:most] for part in job.test)
    parts = zip(x.split(job.test_batch), y.split(job.test_batch), strict=True)
    return sum(count_right(job.module, *part)[0] for part in parts) / len(y)


def train(job: Job, processes: int) -> Timed:
    """Warms up, with one client and 1,000 test images; then runs the job, from the first model."""
    given, before, eval_s, accuracy = job.given, time.perf_counter(), 0.0, 0.0
    first = [p.detach().clone() for p in job.module.parameters()]
    run_round(job, [0])
    test(job, most=1000)
    with torch.no_grad():
        torch._foreach_copy_(list(job.module.parameters()), first)
    wait()
    began, cpu = time.perf_counter(), time.process_time()
    for number, ids in enumerate(job.cohorts.tolist(), 1):
        run_round(job, ids)
        if number % given.eval_every == 0 or number == given.rounds:
            wait()
            stopped = time.perf_counter()
            accuracy = test(job)
            eval_s += time.perf_counter() - stopped
    wait()
    seconds = time.perf_counter() - began
    return Timed(seconds, eval_s, began - before, time.process_time() - cpu, accuracy)
