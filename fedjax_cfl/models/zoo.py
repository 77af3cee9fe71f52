"""The models of the reproduced papers; `task.as_task` makes a Task of any Flax module.

A model is a Flax module that maps [B, ...] to logits [B, C], with a field `num_classes`, 0: as many
as the data have; its `__call__` takes `train` if it has dropout, and `owner` [B] (see `Task`) if it
normalises over a batch. Three attributes are optional: `decayed`
names the layers whose kernels carry the L2 penalty, and `first_layer` a `nn.Dense` that
is called once, on the flat sample, which nothing else sees: then local training has a
faster form (`client.dual_sgd`). `vocabulary` says that samples are whole
numbers below it. Parameter counts are those of 28x28x1 images and 10 classes, or of
25 x 300 word vectors and 2 classes, unless another shape is named. FlexCFL: Duan et
al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift",
IEEE TPDS 2022, https://doi.org/10.1109/TPDS.2021.3134263. FedGroup: Duan et al.,
"FedGroup: Efficient Federated Learning via Decomposed Similarity-Based Clustering",
2020, https://arxiv.org/abs/2010.06870. FeSEM: Xie et al., "Multi-Center Federated
Learning", 2020, https://arxiv.org/abs/2005.01026. LEAF: Caldas et al., "LEAF: A
Benchmark for Federated Settings", 2018, https://arxiv.org/abs/1812.01097.
"""

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_cfl.models.convolution import Conv, max_pool
from fedjax_cfl.models.layers import (
    KERAS,
    BatchStatNorm,
    Init,
    add_channel_axis,
    dense,
    flatten,
    pytorch,
)
from fedjax_cfl.models.recurrent import GRU, LSTM
from fedjax_cfl.validation import PositiveInt


class MCLR(nn.Module):
    """Multinomial logistic regression on the flattened sample (7,850 parameters)."""

    num_classes: int = 0
    decayed: ClassVar[tuple[str, ...]] = ("head",)
    first_layer: ClassVar[str] = "head"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [B, C]."""
        return dense(self.num_classes, "head")(flatten(x))


class MLP(nn.Module):
    """Fully connected relu network on the flattened sample (101,770 parameters with 128
    hidden units, 407,050 with 512).
    """

    num_classes: int = 0
    hidden: tuple[PositiveInt, ...] = (128,)

    @property
    def decayed(self) -> tuple[str, ...]:
        """All layers carry the L2 penalty."""
        return (*(f"hidden_{i}" for i in range(len(self.hidden))), "head")

    @property
    def first_layer(self) -> str:
        """The layer that sees the sample."""
        return self.decayed[0]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [B, C]."""
        x = flatten(x)
        for i, width in enumerate(self.hidden):
            x = nn.relu(dense(width, f"hidden_{i}")(x))
        return dense(self.num_classes, "head")(x)


class MnistCNN(nn.Module):
    """FlexCFL's MNIST CNN: two 3x3 convolutions, dropout before the output layer
    (50,186 parameters).
    """

    num_classes: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = add_channel_axis(x)
        for features in (32, 64):
            x = max_pool(nn.relu(Conv(features, 3)(x)))
        x = nn.Dropout(0.5, deterministic=not train)(flatten(x))
        return dense(self.num_classes, "head")(x)


class FemnistCNN(nn.Module):
    """FlexCFL's FEMNIST CNN: six convolutions, strided instead of pooled, without batch
    normalisation (325,578 parameters).
    """

    num_classes: int = 0
    decayed: ClassVar[tuple[str, ...]] = ("hidden", "head")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = add_channel_axis(x)
        for features in (32, 64):
            x = nn.relu(Conv(features, 3, padding="valid")(x))
            x = nn.relu(Conv(features, 3, padding="valid")(x))
            x = nn.relu(Conv(features, 5, strides=2)(x))
            x = nn.Dropout(0.4, deterministic=not train)(x)
        x = nn.relu(dense(128, "hidden")(flatten(x)))
        x = nn.Dropout(0.4, deterministic=not train)(x)
        return dense(self.num_classes, "head")(x)


class LeafCNN(nn.Module):
    """LEAF's FEMNIST CNN: two 5x5 convolutions and one hidden layer, whose width the
    papers change.

    FlexCFL's FashionMNIST CNN has 1,024 hidden units (3,274,634 parameters); with 62
    classes FeSEM's code has 248 (845,510) and LEAF itself 2,048 (6,603,710).
    """

    num_classes: int = 0
    hidden: PositiveInt = 2048

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = add_channel_axis(x)
        for features in (32, 64):
            x = max_pool(nn.relu(Conv(features, 5)(x)))
        x = nn.relu(dense(self.hidden, "hidden")(flatten(x)))
        return dense(self.num_classes, "head")(x)


class CelebaCNN(nn.Module):
    """FeSEM's CelebA CNN: four normalised 3x3 convolutions (31,202 parameters on
    84x84x3 with 2 classes).

    `norm` makes the normalisation: `BatchStatNorm`, by a client's own batch even in
    test, as in the code of FeSEM and LEAF, or `GroupNorm`, which sees one sample at a
    time (`model=celeba_cnn`).
    """

    num_classes: int = 0
    norm: Callable[[], nn.Module] = BatchStatNorm

    @nn.compact
    def __call__(self, x: jax.Array, owner: jax.Array | None = None) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]; owner [B] as in `Task`."""
        x = add_channel_axis(x)
        for _ in range(4):
            x = nn.relu(max_pool(self.norm()(Conv(32, 3)(x), owner), "same"))
        return dense(self.num_classes, "head")(flatten(x))


class LeNet(nn.Module):
    """LeNet-5 with relu and max-pooling (44,426 parameters; 61,706 on 32x32x1, 62,006
    on 32x32x3).

    `pytorch_init` draws kernels and biases as PyTorch's layers do by default, else as
    Keras' do. Such a small start answers all classes alike: the first rounds of training
    go by before the loss falls, and where several models start apart, they do not stay
    apart for that reason alone (see `algorithms/md_icfl`).
    """

    num_classes: int = 0
    pytorch_init: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""

        def init(fan_in: int) -> Init:
            return pytorch(fan_in) if self.pytorch_init else KERAS

        x = add_channel_axis(x)
        for features in (6, 16):
            conv = Conv(features, 5, padding="valid", initial=init(25 * x.shape[-1]))
            x = max_pool(nn.relu(conv(x)))
        x = flatten(x)
        for i, features in enumerate((120, 84)):
            x = nn.relu(dense(features, f"hidden_{i}", init(x.shape[-1]))(x))
        return dense(self.num_classes, "head", init(x.shape[-1]))(x)


class BiGRU(nn.Module):
    """FlexCFL's Sent140 GRU: two bi-directional layers, 64 then 32 units each way
    (175,938 parameters).
    """

    num_classes: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, T, in] -> [B, C]."""
        return _bidirectional(GRU, x, self.num_classes, train)


class BiLSTM(nn.Module):
    """FlexCFL's Sent140 LSTM: two bi-directional layers, 64 then 32 units each way
    (232,386 parameters).
    """

    num_classes: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, T, in] -> [B, C]."""
        return _bidirectional(LSTM, x, self.num_classes, train)


def _bidirectional(
    layer: type[nn.Module], x: jax.Array, num_classes: int, train: bool
) -> jax.Array:
    for features, sequences in ((64, True), (32, False)):
        x = jnp.concatenate(
            [layer(features, reverse, sequences)(x) for reverse in (False, True)], axis=-1
        )
    x = nn.Dropout(0.5, deterministic=not train)(nn.relu(dense(64, "hidden")(x)))
    return dense(num_classes, "head")(x)


class StackedLSTM(nn.Module):
    """FedGroup's Sent140 LSTM: two layers of 100 units and a linear layer of 30
    (243,861 parameters, 2 classes only).

    The papers' sigmoid cross-entropy of one output z is the softmax cross-entropy of
    the logits [0, z] returned here.
    """

    num_classes: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, in] -> [B, 2]."""
        x = LSTM(100)(LSTM(100, sequences=True)(x))
        return _two_logits(dense(1, "head")(dense(30, "hidden")(x)))


class CharLSTM(nn.Module):
    """LEAF's Shakespeare LSTM: characters by number, embedded in 8 numbers each, two layers of 256
    units, and the next character (817,872 parameters of 80 characters).
    """

    num_classes: int = 0
    embedding: PositiveInt = 8
    hidden: PositiveInt = 256
    layers: PositiveInt = 2

    @property
    def vocabulary(self) -> int:
        """How many characters there are: samples are whole numbers below it."""
        return self.num_classes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T] of whole numbers -> [B, C]."""
        if x.ndim != 2:
            raise ValueError("sequences [T] of whole numbers are allowed")
        table = self.param("embedding", nn.initializers.normal(), (self.vocabulary, self.embedding))
        # a product instead of indexing, whose gradient is a scatter, slow inside a loop
        x = jax.nn.one_hot(x.astype(jnp.int32), self.vocabulary) @ table
        for layer in range(self.layers):
            x = LSTM(self.hidden, sequences=layer + 1 < self.layers)(x)
        return dense(self.num_classes, "head")(x)


class StackedGRU(nn.Module):
    """GrouProx' Sent140 GRU: layers of 64 and 32 units and a linear layer of 64 (81,857
    parameters, 2 classes only).

    Differs from that code: its TensorFlow 1 cell resets before the recurrent product,
    with one bias per gate.
    """

    num_classes: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, in] -> [B, 2]."""
        x = GRU(32)(GRU(64, sequences=True)(x))
        return _two_logits(dense(1, "head")(dense(64, "hidden")(x)))


def _two_logits(z: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros_like(z), z], axis=-1)
