"""Layers of the models that Flax lacks or that must not be slow when one model per
client is trained.

Initialisation is that of Keras, which the reproduced experiments use: Glorot-uniform
kernels, zero biases, orthogonal recurrent kernels, LSTM forget bias 1. B batch, T time
steps, H and W height and width, h hidden units.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


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


orthogonal = nn.initializers.orthogonal()


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


def extract_patches(x: jax.Array, size: tuple[int, int], strides: tuple[int, int]) -> jax.Array:
    """Cuts out of [B, H, W, in] what a kernel of `size` sees at each place, [B, H', W',
    kh * kw * in].

    Columns first, then rows, which copies less. But XLA on a CPU puts a concatenation
    of a few parts into its consumer and computes it there entry by entry, which takes
    longer than all copies: a small kernel's patches are concatenated at once.
    """
    (kh, kw), (down, right) = size, strides
    height, width = (x.shape[1] - kh) // down + 1, (x.shape[2] - kw) // right + 1
    rows = [slice(i, i + (height - 1) * down + 1, down) for i in range(kh)]
    columns = [slice(j, j + (width - 1) * right + 1, right) for j in range(kw)]
    if kw < 5:
        return jnp.concatenate([x[:, row, column] for row in rows for column in columns], axis=-1)
    x = jnp.concatenate([x[:, :, column] for column in columns], axis=-1)
    return jnp.concatenate([x[:, row] for row in rows], axis=-1)


def im2col(x: jax.Array, kernel: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """Convolves [B, H, W, in] with [kh, kw, in, out], without padding, as one matrix product."""
    kh, kw = kernel.shape[:2]
    return extract_patches(x, (kh, kw), strides) @ kernel.reshape(-1, kernel.shape[-1])


def im2col_per_image(x: jax.Array, kernel: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """The same, one image after another: the patches of one stay in a core's cache, and
    are cut out again for the gradient.

    The barrier keeps the kernel's gradient a product of whole rows; without it XLA
    turns that around, which a CPU is slower at.
    """
    columns = lax.optimization_barrier(kernel.reshape(-1, kernel.shape[-1]).T)

    kh, kw = kernel.shape[:2]

    @jax.checkpoint
    def one(image: jax.Array) -> jax.Array:
        patches = extract_patches(image[None], (kh, kw), strides)
        return jnp.einsum("bhwp,op->bhwo", patches, columns)[0]

    return lax.map(one, x)


COLUMNS = 4  # neighbouring outputs that `im2col_blocked` computes at once


def im2col_blocked(x: jax.Array, kernel: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """The same, COLUMNS neighbours at once: each patch is wide enough for all of them, and the
    kernel stands in it once for each, between zeros.

    A product with few features leaves most of a core's vector unit idle. This one has COLUMNS
    times as many, for 1.6 times the arithmetic where a 5x5 kernel has stride 1.
    """
    (kh, kw, channels, features), (down, right) = kernel.shape, strides
    width, wider = (x.shape[2] - kw) // right + 1, (COLUMNS - 1) * right
    blocks = -(-width // COLUMNS)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, (blocks * COLUMNS - width) * right), (0, 0)))
    wide = jnp.zeros((kh, kw + wider, channels, COLUMNS, features))
    for j in range(COLUMNS):
        wide = wide.at[:, j * right : j * right + kw, :, j].set(kernel)
    patches = extract_patches(x, (kh, kw + wider), (down, COLUMNS * right))
    out = patches @ wide.reshape(-1, COLUMNS * features)
    return out.reshape(*out.shape[:2], -1, features)[:, :, :width]


def lax_convolve(x: jax.Array, kernel: jax.Array, strides: tuple[int, int]) -> jax.Array:
    """The same, by JAX's own convolution."""
    return lax.conv_general_dilated(
        x, kernel, strides, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


METHODS = {
    "im2col": im2col,
    "one_by_one": im2col_per_image,
    "blocked": im2col_blocked,
    "lax": lax_convolve,
}


def convolve(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, int], padding: str, method: str
) -> jax.Array:
    """Convolves [B, H, W, in] with [kh, kw, in, out]; `method`: one of METHODS, equal
    up to rounding, or auto.

    A kernel per client makes `lax.conv` a grouped convolution, slow on CPU and GPU
    alike, and XLA's CPU convolution is an order of magnitude slower inside a loop than
    outside; a batched matrix product has neither problem. A TPU's convolution is one
    already.
    """
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method {method!r}: one of auto, {', '.join(METHODS)} is allowed")
    if padding not in ("same", "valid"):
        raise ValueError(f"padding {padding!r}: same or valid is allowed")
    if padding == "valid" and any(
        size < k for size, k in zip(x.shape[1:3], kernel.shape, strict=False)
    ):
        raise ValueError(
            f"the image shrinks to {x.shape[1:3]} before a valid convolution {kernel.shape[:2]}:"
            " larger images are allowed"
        )
    pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding.upper())
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    if method == "auto":
        cpu = "blocked" if kernel.shape[1] >= 5 and kernel.shape[3] <= 16 else "one_by_one"
        method = {"cpu": cpu, "tpu": "lax"}.get(jax.default_backend(), "im2col")
    return METHODS[method](x, kernel, strides)


class Conv(nn.Module):
    """Two-dimensional convolution: [B, H, W, in] -> [B, H', W', features]; the same
    parameters whatever the method.
    """

    features: int
    kernel: int | tuple[int, int]
    strides: int | tuple[int, int] = 1
    padding: str = "same"
    method: str = "auto"
    use_bias: bool = True
    initial: Init = KERAS

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the convolution and adds the bias."""
        size, strides = _pair(self.kernel), _pair(self.strides)
        kernel = self.param("kernel", self.initial.kernel, (*size, x.shape[-1], self.features))
        out = convolve(x, kernel, strides, self.padding, self.method)
        if not self.use_bias:
            return out
        return out + self.param("bias", self.initial.bias, (self.features,))


class DepthwiseConv(nn.Module):
    """3x3 convolution of each channel by itself, padded, without bias: [B, H, W, C] ->
    [B, H', W', C].

    A sum of nine shifted products: a kernel per client stays cheap, and nothing becomes
    a grouped convolution.
    """

    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the convolution."""
        step, (height, width, channels) = self.strides, x.shape[1:]
        kernel = self.param("kernel", _depthwise_glorot, (3, 3, channels))
        pads = lax.padtype_to_pads((height, width), (3, 3), (step, step), "SAME")
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
        down, right = (-(-side // step) for side in (height, width))
        return sum(
            (
                x[:, i : i + (down - 1) * step + 1 : step, j : j + (right - 1) * step + 1 : step]
                * kernel[i, j]
                for i in range(3)
                for j in range(3)
            ),
            jnp.zeros((), x.dtype),
        )


def _depthwise_glorot(key: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    # Nine numbers into a channel's output and nine out of its input.
    reach = math.sqrt(6 / 18)
    return jax.random.uniform(key, (math.prod(shape),), jnp.float32, -reach, reach).reshape(shape)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def max_pool(x: jax.Array, padding: str = "valid") -> jax.Array:
    """2x2 max-pooling of [B, H, W, C] with stride 2; an odd row or column is dropped
    (valid) or pooled alone (same).

    Two choices between neighbours, because `reduce_window` and its gradient are slow on
    CPU. Of tied maxima the last has the gradient.
    """
    odd = x.shape[1] % 2, x.shape[2] % 2
    if padding == "same":
        x = jnp.pad(x, ((0, 0), (0, odd[0]), (0, odd[1]), (0, 0)), constant_values=-jnp.inf)
    else:
        x = x[:, : x.shape[1] - odd[0], : x.shape[2] - odd[1]]
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    x = _larger(x[:, :, 0], x[:, :, 1])
    return _larger(x[..., 0, :], x[..., 1, :])


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the larger of two, entry by entry, NaN if one is.

    The gradient of a maximum goes where an input equals it. A compiler that computes
    the input anew for that, and rounds another way, finds none: the gradient is lost or
    0 / 0. A choice always has one that was taken.
    """
    return jnp.where((a > b) | jnp.isnan(a), a, b)


def _over_time(
    step: Callable, carry: jax.Array | tuple, inputs: jax.Array, reverse: bool, sequences: bool
) -> jax.Array:
    # inputs [B, T, gates]: projected for all steps by one large matrix product; only the
    # recurrent product is left to the loop.
    _, outputs = lax.scan(step, carry, inputs.swapaxes(0, 1), reverse=reverse)  # [T, B, h]
    return outputs.swapaxes(0, 1) if sequences else outputs[0 if reverse else -1]


class GRU(nn.Module):
    """Gated recurrent unit, reset after the recurrent product as in Keras: [B, T, in]
    -> [B, T, h] if `sequences`, else the last [B, h].

    3 (in h + h^2 + 2 h) parameters, gates in the order update, reset, candidate.
    `reverse` reads from the end; a sequence of outputs stays in the order of time.
    """

    features: int
    reverse: bool = False
    sequences: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Runs over the time axis; ValueError if there is none."""
        if x.ndim != 3:
            raise ValueError("sequences [T, features] are allowed")
        kernel = self.param("kernel", glorot, (x.shape[-1], 3 * self.features))
        recurrent = self.param("recurrent_kernel", orthogonal, (self.features, 3 * self.features))
        # of the input and of the recurrent product
        bias = self.param("bias", nn.initializers.zeros, (2, 3 * self.features))

        def step(h: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            update_x, reset_x, candidate_x = jnp.split(inputs, 3, axis=-1)
            update_h, reset_h, candidate_h = jnp.split(h @ recurrent + bias[1], 3, axis=-1)
            update = nn.sigmoid(update_x + update_h)
            candidate = jnp.tanh(candidate_x + nn.sigmoid(reset_x + reset_h) * candidate_h)
            h = update * h + (1 - update) * candidate
            return h, h

        start = jnp.zeros((x.shape[0], self.features), x.dtype)
        return _over_time(step, start, x @ kernel + bias[0], self.reverse, self.sequences)


class LSTM(nn.Module):
    """Long short-term memory as in Keras: [B, T, in] -> [B, T, h] if `sequences`,
    else the last [B, h].

    4 (in h + h^2 + h) parameters, gates in the order input, forget, candidate, output.
    `reverse` as in GRU.
    """

    features: int
    reverse: bool = False
    sequences: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Runs over the time axis; ValueError if there is none."""
        if x.ndim != 3:
            raise ValueError("sequences [T, features] are allowed")
        kernel = self.param("kernel", glorot, (x.shape[-1], 4 * self.features))
        recurrent = self.param("recurrent_kernel", orthogonal, (self.features, 4 * self.features))
        bias = self.param("bias", _forget_one, (4 * self.features,))

        def step(
            carry: tuple[jax.Array, jax.Array], inputs: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, cell = carry
            into, forget, candidate, out = jnp.split(inputs + h @ recurrent, 4, axis=-1)
            cell = nn.sigmoid(forget) * cell + nn.sigmoid(into) * jnp.tanh(candidate)
            h = nn.sigmoid(out) * jnp.tanh(cell)
            return (h, cell), h

        zeros = jnp.zeros((x.shape[0], self.features), x.dtype)
        return _over_time(step, (zeros, zeros), x @ kernel + bias, self.reverse, self.sequences)


def _forget_one(key: jax.Array, shape: tuple[int], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    # A forget gate that starts open lets the gradient reach early steps; the key is unused,
    # Flax passes one.
    return jnp.zeros(shape, dtype).at[shape[0] // 4 : shape[0] // 2].set(1)
