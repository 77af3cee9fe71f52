"""How layers start, and layers of all kinds of models.

Initialisation is that of Keras, which the reproduced experiments use, unless a model says
otherwise: Glorot-uniform kernels, zero biases. B batch, H and W height and width.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


def glorot(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Returns a Glorot-uniform kernel [..., in, out]; drawn flat: over a short last
    axis XLA unrolls the generator.
    """
    reach = math.sqrt(6 / (math.prod(shape[:-2]) * (shape[-2] + shape[-1])))
    return jax.random.uniform(key, (math.prod(shape),), dtype, -reach, reach).reshape(shape)


class Init(NamedTuple):
    """How the parameters of a layer are drawn, each by (key, shape, dtype)."""

    kernel: Callable[..., jax.Array]
    bias: Callable[..., jax.Array]


KERAS = Init(glorot, nn.initializers.zeros)


def pytorch(fan_in: int) -> Init:
    """Returns what PyTorch's layers do by default: kernels and biases are uniform in +-1 /
    sqrt(fan_in), the inputs of one output.
    """
    reach = 1 / math.sqrt(fan_in)

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, (math.prod(shape),), dtype, -reach, reach).reshape(shape)

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
