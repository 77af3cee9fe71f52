"""Models of the papers, and the `Task` that an algorithm sees of one."""

from fedjax_cfl.models.layers import BatchNorm, BatchStatNorm, GroupNorm
from fedjax_cfl.models.residual import MobileNetV2, ResNet18
from fedjax_cfl.models.task import as_task, count_params, model_bytes
from fedjax_cfl.models.zoo import (
    MCLR,
    MLP,
    BiGRU,
    BiLSTM,
    CelebaCNN,
    CharLSTM,
    FemnistCNN,
    LeafCNN,
    LeNet,
    MnistCNN,
    StackedGRU,
    StackedLSTM,
)
from fedjax_cfl.tasks.multilabel import multilabel
from fedjax_cfl.tasks.regression import regression

__all__ = [
    "MCLR",
    "MLP",
    "BatchNorm",
    "BatchStatNorm",
    "BiGRU",
    "BiLSTM",
    "CelebaCNN",
    "CharLSTM",
    "FemnistCNN",
    "GroupNorm",
    "LeNet",
    "LeafCNN",
    "MnistCNN",
    "MobileNetV2",
    "ResNet18",
    "StackedGRU",
    "StackedLSTM",
    "as_task",
    "count_params",
    "model_bytes",
    "multilabel",
    "regression",
]


def __dir__() -> list[str]:
    return __all__
