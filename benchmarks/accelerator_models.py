"""What published benchmarks of simulators train: sizes, shapes and models, ours and PyTorch's."""

from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from peers.ours import TwoConvolutions
from workloads import sizes

import fedjax_cfl as cfl
from fedjax_cfl.models.convolution import Conv, max_pool
from fedjax_cfl.models.layers import add_channel_axis, dense, flatten

HERE = Path(__file__).resolve().parent


class Cell(NamedTuple):
    """One set-up of a table."""

    name: str
    what: str
    model: str  # a key of MODELS
    clients: int  # K
    samples: str  # a key of SAMPLES: of each client
    cohort: int
    rounds: int  # of the published run
    batch: int = 10
    epochs: int = 1
    lr: float = 0.03
    method: str = "fedavg"
    published: str = ""  # what others report
    goal: str = ""  # on an H100

    def held(self) -> np.ndarray:
        """Returns the training samples [K] of each client."""
        return SAMPLES[self.samples](self.clients)

    def shrink(self) -> "Cell":
        """Returns the same with few clients: does it run?"""
        cohort = min(self.cohort, 2 if self.model == "resnet18" else 10)
        return self._replace(cohort=cohort, clients=min(self.clients, 4 * cohort))


def femnist_sizes(count: int) -> np.ndarray:
    """Returns sizes drawn from those of 207 writers of FEMNIST (2 to 320, median 150)."""
    own = np.loadtxt(HERE / "results" / "tpu_compile" / "femnist_sizes.txt", dtype=int)
    return np.random.RandomState(5).choice(own, count)


SAMPLES = {
    "50 each": lambda count: np.full(count, 50),
    "100 each": lambda count: np.full(count, 100),
    "power law": lambda count: np.resize(sizes("mlp"), count),
    "86 to 106": lambda count: np.random.RandomState(3).randint(86, 107, count),
    "FEMNIST": femnist_sizes,
}


class SmallCNN(nn.Module):
    """Two unpadded 3x3 convolutions (32 and 64), one pooling, dropout, a hidden layer of 128.

    pfl-research's `simple_cnn` on 32x32x3 (CIFAR-10), FLUTE's and FedML's FEMNIST CNN on 28x28
    with 62 classes (1,206,590 parameters).
    """

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = add_channel_axis(x)
        for features in (32, 64):
            x = nn.relu(Conv(features, 3, padding="valid")(x))
        x = nn.Dropout(0.25, deterministic=not train)(max_pool(x))
        x = nn.relu(dense(128, "hidden")(flatten(x)))
        return dense(self.num_classes, "head")(nn.Dropout(0.5, deterministic=not train)(x))


class Model(NamedTuple):
    """A model with the samples it takes."""

    module: nn.Module
    shape: tuple[int, ...]
    classes: int


MODELS = {
    "mlp": Model(cfl.models.MLP(10), (28, 28), 10),
    "mclr": Model(cfl.models.MCLR(10), (28, 28), 10),
    "cnn5": Model(TwoConvolutions(10), (28, 28, 1), 10),
    "cifar_cnn": Model(SmallCNN(10), (32, 32, 3), 10),
    "femnist_cnn": Model(SmallCNN(62), (28, 28, 1), 62),
    "resnet18": Model(cfl.models.ResNet18(100), (32, 32, 3), 100),
}


def as_torch(name: str) -> Any:
    """Returns the model in PyTorch, which takes channels first; it starts as ours does, from
    Glorot-uniform kernels and no bias.
    """
    from torch import nn

    module = torch_layers(name)
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return module


def torch_layers(name: str) -> Any:
    """Returns the layers of a model in PyTorch."""
    from torch import nn as torch

    shape, classes = MODELS[name].shape, MODELS[name].classes
    if name in ("mlp", "mclr"):
        hidden = [torch.Linear(784, 128), torch.ReLU()] if name == "mlp" else []
        return torch.Sequential(
            torch.Flatten(), *hidden, torch.Linear(128 if hidden else 784, classes)
        )
    if name == "cnn5":
        layers = []
        for inputs, features in ((1, 32), (32, 64)):
            layers += [torch.Conv2d(inputs, features, 5, padding=2), torch.ReLU()]
            layers.append(torch.MaxPool2d(2))
        return torch.Sequential(*layers, torch.Flatten(), torch.Linear(7 * 7 * 64, classes))
    if name == "resnet18":
        return torch_resnet(classes)
    side = (shape[0] - 4) // 2
    return torch.Sequential(
        *(torch.Conv2d(shape[2], 32, 3), torch.ReLU(), torch.Conv2d(32, 64, 3), torch.ReLU()),
        *(torch.MaxPool2d(2), torch.Dropout(0.25), torch.Flatten()),
        *(torch.Linear(side * side * 64, 128), torch.ReLU(), torch.Dropout(0.5)),
        torch.Linear(128, classes),
    )


def torch_resnet(classes: int) -> Any:
    """Returns ResNet-18 with group normalisation and a 3x3 stem in PyTorch."""
    import torch
    from torch import nn

    def unit(inputs, outputs, stride, kernel=3):
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(conv, nn.GroupNorm(32, outputs))

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.first, self.second = unit(inputs, outputs, stride), unit(outputs, outputs, 1)
            same = inputs == outputs
            self.short = nn.Identity() if same else unit(inputs, outputs, stride, 1)

        def forward(self, x):
            return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))

    blocks = []
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        blocks += [
            Block(inputs, outputs, 1 if inputs == outputs else 2),
            Block(outputs, outputs, 1),
        ]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(unit(3, 64, 1), nn.ReLU(), *blocks, *pool)
