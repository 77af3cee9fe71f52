"""A whole job of `published_jobs.py` as its peers get it: images, model and settings of a folder
that our side has written, in PyTorch.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from peers.torch_model import SmallCNN, fill, take_faster_threads

SAME = 1e-2  # of the largest logit: TF32 in two libraries; another network is far off


class Job(NamedTuple):
    """What a process trains."""

    given: SimpleNamespace  # published_jobs.Job's fields, and lr, seed and precision
    module: nn.Module  # with the first model
    clients: list[tuple[torch.Tensor, torch.Tensor]]  # (x [n, 3, 32, 32], y [n]) of each
    test: tuple[torch.Tensor, torch.Tensor]
    cohorts: np.ndarray  # [rounds, cohort]
    test_batch: int


class Timed(NamedTuple):
    """What a process measured."""

    seconds: float  # of the job
    eval_s: float  # of them
    apart_s: float  # before the clock: a small round and test
    cpu_s: float  # of this process, in `seconds`
    accuracy: float  # of the last model on all test images


def use_device(rank: int, processes: int, precision: str) -> torch.device:
    """Returns a process's device: GPUs are dealt in turn, a CPU's cores are shared out. pfl,
    which connects its processes when it is imported, finds everything set up.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tensorfloat32"
    torch.backends.cudnn.allow_tf32 = precision == "tensorfloat32"
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(rank % gpus)
        os.environ["PFL_PYTORCH_DEVICE"] = f"cuda:{rank % gpus}"
        if gpus < processes:  # NCCL, which pfl asks for, takes one process a GPU
            begin = torch.distributed.init_process_group
            torch.distributed.init_process_group = lambda backend, **more: begin("gloo", **more)
        return torch.device("cuda", rank % gpus)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // processes))
    if processes == 1:
        take_faster_threads(SmallCNN(), torch.randn(10, 3, 32, 32))
    return torch.device("cpu")


def load(folder: Path, rank: int, processes: int) -> Job:
    """Reads a job on this process's device; raises ValueError if the network is not ours."""
    given = SimpleNamespace(**json.loads((folder / "job.json").read_text()))
    device = use_device(rank, processes, given.precision)
    torch.manual_seed(1000 * given.seed + rank)  # dropout; cohorts are all processes' alike

    def images(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        first = np.ascontiguousarray(np.moveaxis(x, -1, 1))
        return (
            torch.from_numpy(first).to(device).float().div_(255),
            torch.from_numpy(y).long().to(device),
        )

    with np.load(folder / "images.npz") as held:
        x, y = images(held["x"], held["y"])
        test, logits = images(held["test_x"], held["test_y"]), torch.from_numpy(held["logits"])
    with np.load(folder / "model.npz") as held:
        arrays = [held[name] for name in held.files]
    module = fill(SmallCNN(), list(zip(arrays[::2], arrays[1::2], strict=True))).to(device)
    with torch.no_grad():
        apart = (module.eval()(test[0][: len(logits)]).cpu() - logits).abs().max()
    if not apart <= SAME * logits.abs().max():
        raise ValueError(f"another network: its logits differ by up to {apart:.1e}")
    draws = [np.random.RandomState(100 + number) for number in range(given.rounds)]
    return Job(
        given,
        module,
        list(zip(x.split(given.samples), y.split(given.samples), strict=True)),
        test,
        np.stack([rng.choice(given.clients, given.cohort, replace=False) for rng in draws]),
        10_000 if device.type == "cuda" else 1000,
    )


def wait() -> None:
    """Waits for what a GPU still has to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_right(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    """Returns how many samples a model gets right and the sum of their losses."""
    module.eval()
    with torch.no_grad():
        logits = module(x)
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
    return int((logits.argmax(1) == y).sum()), float(loss)
