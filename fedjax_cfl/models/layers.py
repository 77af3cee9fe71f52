"""How layers start, layers of all kinds of models, and normalisations, each called as (x [B, ...,
C], owner [B]).

Initialisation is that of Keras, which the reproduced experiments use, unless a model says
otherwise: Glorot-uniform kernels, zero biases. B batch, C channels or features; between them
stand the places of an image or a sequence, or, behind a dense layer, none. `owner` says whose each
sample is, as in `Task`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.tree import STATISTICS


def draw_uniform(
    reach: float, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """Returns uniform numbers in +-reach in this shape, drawn flat: over a short last axis XLA
    unrolls the generator.
    """
    return jax.random.uniform(key, (math.prod(shape),), dtype, -reach, reach).reshape(shape)


def glorot(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Returns a Glorot-uniform kernel [..., in, out]."""
    reach = math.sqrt(6 / (math.prod(shape[:-2]) * (shape[-2] + shape[-1])))
    return draw_uniform(reach, key, shape, dtype)


class Init(NamedTuple):
    """How the parameters of a layer are drawn, each by (key, shape, dtype)."""

    kernel: Callable[..., jax.Array]
    bias: Callable[..., jax.Array]


KERAS = Init(glorot, nn.initializers.zeros)


def pytorch(fan_in: int) -> Init:
    """Returns what PyTorch's layers do by default: kernels and biases are uniform in +-1 /
    sqrt(fan_in), the inputs of one output.
    """
    draw = partial(draw_uniform, 1 / math.sqrt(fan_in))
    return Init(draw, draw)


def dense(features: int, name: str, init: Init = KERAS) -> nn.Dense:
    """Returns a fully connected layer, to be called on [..., in]."""
    return nn.Dense(features, kernel_init=init.kernel, bias_init=init.bias, name=name)


def flatten(x: jax.Array) -> jax.Array:
    """[B, ...] -> [B, everything else]."""
    return x.reshape(x.shape[0], -1)


def add_channel_axis(x: jax.Array) -> jax.Array:
    """[B, H, W] or [B, H, W, channels] -> [B, H, W, channels].

    Raises ValueError for any other rank, and for images that are small in their first
    axis alone, which must be its channels.
    """
    if x.ndim not in (3, 4):
        raise ValueError("images [H, W] or [H, W, channels] are allowed")
    if x.ndim == 4 and x.shape[1] <= 4 < min(x.shape[2:]):
        raise ValueError(
            "images [H, W, channels] are allowed; the channels seem to come first here: store"
            " numpy.moveaxis(x, 1, -1)"
        )
    return x[..., None] if x.ndim == 3 else x


def mark_real(owner: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns which samples of x [B, ...] are not padding, [B, 1, ...] bool in as many axes as x
    has. `owner` [B] is as in `Task`, None: there is no padding.
    """
    real = jnp.ones(len(x), bool) if owner is None else owner >= 0
    return real.reshape(-1, *(1,) * (x.ndim - 1))


class BatchStatNorm(nn.Module):
    """Batch normalisation of [B, ..., C] by the statistics of the batch at hand, in
    training and in test; it keeps no running ones (LEAF's code).

    Statistics are taken per client, over its real samples in the batch: `owner` [B]
    int32 says whose each sample is, -1 for padding, None: all are one client's. In
    training a batch is one mini-batch, in a client's training loss a block of
    `cohort.SAMPLE_BLOCK` samples, in test the client's samples that stand in one block
    of `evaluate.EVAL_BLOCK`: a prediction depends on that client's other samples there.
    """

    epsilon: float = 1e-3  # TensorFlow's default

    @nn.compact
    def __call__(self, x: jax.Array, owner: jax.Array | None = None) -> jax.Array:
        """Normalises each channel, then scales and shifts it."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        owner = jnp.zeros(x.shape[0], jnp.int32) if owner is None else owner
        same = ((owner[:, None] == owner) & (owner >= 0))[..., None]  # [B, B, 1]
        places = tuple(range(1, x.ndim - 1))

        def client_mean(values: jax.Array) -> jax.Array:
            # a choice and a sum, no matrix product: 0 times another client's NaN would be NaN
            total = jnp.where(same, values.mean(places), 0).sum(axis=1)
            return jnp.expand_dims(total / jnp.maximum(same.sum(axis=1), 1), places)

        x = jnp.where(mark_real(owner, x), x, 0)
        x = x - client_mean(x)
        return x * lax.rsqrt(client_mean(jnp.square(x)) + self.epsilon) * scale + bias


class BatchNorm(nn.Module):
    """Batch normalisation of [B, ..., C] with running statistics (Ioffe and Szegedy, ICML
    2015, https://arxiv.org/abs/1502.03167).

    In training a batch is normalised by its own mean and variance, over its real samples
    (`owner` -1: padding), and the running ones move towards these by 1 - momentum. In test,
    and wherever a model only predicts, the running ones are used, so that samples do not
    affect each other. The statistics are averaged with the model, see `tree`.
    Differs from PyTorch: the running variance is not multiplied by n / (n - 1).
    """

    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, owner: jax.Array | None = None) -> jax.Array:
        """Normalises each channel, then scales and shifts it."""
        shape = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, shape)
        bias = self.param("bias", nn.initializers.zeros, shape)
        running = (
            self.variable(STATISTICS, "mean", jnp.zeros, shape),
            self.variable(STATISTICS, "var", jnp.ones, shape),
        )
        mean, variance = (each.value for each in running)
        # `as_task` makes the statistics mutable in training only
        if self.is_mutable_collection(STATISTICS) and not self.is_initializing():
            real, axes = mark_real(owner, x), tuple(range(x.ndim - 1))
            x = jnp.where(real, x, 0)
            count = jnp.maximum(real.sum(), 1) * math.prod(x.shape[1:-1])
            mean = x.sum(axes) / count
            variance = jnp.where(real, jnp.square(x - mean), 0).sum(axes) / count
            for each, new in zip(running, (mean, variance), strict=True):
                each.value = self.momentum * each.value + (1 - self.momentum) * new
        # a server may have mixed models by more than averages
        variance = jnp.maximum(variance, 0)
        return (x - mean) * lax.rsqrt(variance + self.epsilon) * scale + bias


class GroupNorm(nn.Module):
    """Group normalisation of [B, ..., C], each sample by itself (Wu and He, "Group
    Normalization", ECCV 2018, https://arxiv.org/abs/1803.08494).

    `groups` divides C; of fewer channels each is a group. `owner` is not read: it is
    there so that a model can take this or `BatchStatNorm`.
    """

    groups: int = 2
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, owner: jax.Array | None = None) -> jax.Array:
        """Normalises each group of channels of each sample, then scales and shifts each channel."""
        channels = x.shape[-1]
        groups = min(self.groups, channels)
        if self.groups < 1 or channels % groups:
            raise ValueError(
                f"groups={self.groups}: a divisor of the {channels} channels is allowed"
            )
        # [groups, channels of a group], no vectors: channels must not be permuted across groups
        shape = (groups, channels // groups)
        scale = self.param("scale", nn.initializers.ones, shape)
        bias = self.param("bias", nn.initializers.zeros, shape)
        parts = x.reshape(*x.shape[:-1], *shape)
        axes = (*range(1, x.ndim - 1), x.ndim)
        parts = parts - parts.mean(axes, keepdims=True)
        variance = jnp.square(parts).mean(axes, keepdims=True)
        return (parts * lax.rsqrt(variance + self.epsilon) * scale + bias).reshape(x.shape)
