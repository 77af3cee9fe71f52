"""Plain PyTorch: a loop over the clients, their epochs and their batches."""

import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from workloads import LR, Workload, cohorts

from peers import Trained
from peers.torch_model import Counted, clients, from_torch, net, use_faster_threads


def epochs(
    module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, work: Any, lr: float = LR
) -> None:
    """Trains a client's model in place, for `work.epochs` in batches of `work.batch`; each
    epoch a fresh permutation.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for _ in range(work.epochs):
        for rows in torch.randperm(len(y), device=y.device).split(work.batch):
            optimizer.zero_grad()
            cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()


def train(work: Workload, rounds: int) -> Trained:
    """Runs FedAvg."""
    use_faster_threads(work.model)
    held, module = clients(work), net(work.model)
    seconds, steps, model = [], [], None
    for ids in cohorts(work, rounds):
        before, began = Counted.steps, time.perf_counter()
        shared = [p.detach().clone() for p in module.parameters()]
        total = [torch.zeros_like(p) for p in shared]
        samples = sum(len(held[i][1]) for i in ids)
        for i in ids:
            with torch.no_grad():
                torch._foreach_copy_(list(module.parameters()), shared)
            epochs(module, *held[i], work)
            with torch.no_grad():
                torch._foreach_add_(
                    total, list(module.parameters()), alpha=len(held[i][1]) / samples
                )
        with torch.no_grad():
            torch._foreach_copy_(list(module.parameters()), total)
        seconds.append(time.perf_counter() - began)
        steps.append(Counted.steps - before)
        model = model or from_torch(module.parameters())
    return Trained(seconds, steps, model)
