"""The workloads' models in PyTorch, which all PyTorch peers train; their classes take
no arguments, as CFLA wants it.
"""

import itertools
import math
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from workloads import BATCH, CLASSES, FEATURES, LR, SIDE, Workload, initial, population


class Counted(nn.Sequential):
    """Layers one after another that count the steps: the forward passes made for a gradient."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, ...] -> [B, C]."""
        Counted.steps += torch.is_grad_enabled()
        return super().forward(x)


class MLP(Counted):
    """W1's model."""

    def __init__(self):
        super().__init__(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))


class MCLR(Counted):
    """W2's model."""

    def __init__(self):
        super().__init__(nn.Linear(FEATURES, CLASSES))


class CNN(Counted):
    """W3's model."""

    def __init__(self):
        pairs = [
            (nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in ((1, 32), (32, 64))
        ]
        super().__init__(*itertools.chain(*pairs), nn.Flatten(), nn.Linear(7 * 7 * 64, CLASSES))


class SmallCNN(Counted):
    """The published jobs' model, `accelerator_models.SmallCNN` on 32x32x3: two unpadded 3x3
    convolutions, one pooling, a hidden layer, dropout.
    """

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
            *(nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5)),
            nn.Linear(128, CLASSES),
        )


def net(model: str) -> nn.Module:
    """Returns a workload's model with its given first parameters."""
    return fill({"mlp": MLP, "mclr": MCLR, "cnn": CNN}[model](), initial(model))


def fill(module: nn.Module, layers) -> nn.Module:
    """Gives a model the parameters [(kernel, bias)], channels last, and returns it."""
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), as_torch(layers), strict=True):
            if parameter.shape != value.shape:
                raise ValueError(f"another model: {tuple(parameter.shape)} and {value.shape}")
            parameter.copy_(torch.from_numpy(value))
    return module


def as_torch(layers) -> list[np.ndarray]:
    """Returns kernels and biases in PyTorch's layout: [out, in] and [out, in, side, side];
    what a dense layer gets from a convolution has the channels first.
    """
    out, channels = [], 0  # of the convolution before
    for kernel, bias in layers:
        if kernel.ndim == 4:
            channels, kernel = kernel.shape[3], kernel.transpose(3, 2, 0, 1)
        elif channels:
            side, outputs = math.isqrt(len(kernel) // channels), kernel.shape[1]
            kernel = kernel.reshape(side, side, channels, outputs).transpose(3, 2, 0, 1)
            channels, kernel = 0, kernel.reshape(outputs, -1)
        else:
            kernel = kernel.T
        out += [np.ascontiguousarray(kernel), bias]
    return out


def from_torch(parameters) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns [(kernel, bias)] as `workloads.initial` has them; the inverse of `as_torch`."""
    arrays = [np.array(torch.as_tensor(parameter).detach()) for parameter in parameters]
    out = []
    for kernel, bias in zip(arrays[::2], arrays[1::2], strict=True):
        if kernel.ndim == 4:
            kernel = kernel.transpose(2, 3, 1, 0)
        elif kernel.shape[1] == 7 * 7 * 64:
            kernel = kernel.reshape(CLASSES, 64, 7, 7).transpose(2, 3, 1, 0).reshape(-1, CLASSES)
        else:
            kernel = kernel.T
        out.append((kernel, bias))
    return out


def clients(work: Workload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the samples (x, y) of each client, images with the channel first."""
    x, y, start = population(work.model)
    x, y = (
        torch.from_numpy(np.moveaxis(x, -1, 1).copy() if x.ndim == 4 else x),
        torch.from_numpy(y).long(),
    )
    return [(x[a:b], y[a:b]) for a, b in itertools.pairwise(start.tolist())]


def use_faster_threads(model: str) -> None:
    """Gives PyTorch one thread or its default number, whichever takes a few steps of
    the model faster.
    """
    x = torch.randn(BATCH, *((1, SIDE, SIDE) if model == "cnn" else (FEATURES,)))
    take_faster_threads(net(model), x)


def take_faster_threads(module: nn.Module, x: torch.Tensor) -> None:
    """Gives PyTorch one thread or its default number, whichever takes a few steps on a
    batch faster; the model is another one then.
    """
    fastest = {torch.get_num_threads(): np.inf, 1: np.inf}
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for threads in 5 * list(fastest):
        torch.set_num_threads(threads)
        began = time.perf_counter()
        for _ in range(20):
            optimizer.zero_grad()
            cross_entropy(module(x), torch.zeros(len(x), dtype=torch.long)).backward()
            optimizer.step()
        fastest[threads] = min(fastest[threads], time.perf_counter() - began)
    torch.set_num_threads(min(fastest, key=fastest.get))
