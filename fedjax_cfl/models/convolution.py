"""Convolutions and pooling that stay fast when one model per client is trained. B batch, H
and W height and width.
"""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.models.layers import KERAS, Init, draw_uniform


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
    """Convolves [B, H, W, in] with [kh, kw, in, out].

    A kernel per client makes `lax.conv` a grouped convolution, slow on CPU and GPU alike, and
    XLA's CPU convolution is an order of magnitude slower inside a loop than outside; a batched
    matrix product has neither problem. A TPU's convolution is one already.

    Args: `x` [B, H, W, in]; `kernel` [kh, kw, in, out]; `strides` are those down and to the
    right; `padding` is same | valid; `method` is one of METHODS, equal up to rounding, or auto,
    by the backend.
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


def shift_and_add(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Convolves each channel of [B, H, W, C] with its own kernel, [3, 3, C] in all, padded: a sum
    of nine shifted products. Nothing becomes a grouped convolution.
    """
    pads = lax.padtype_to_pads(x.shape[1:3], (3, 3), (stride, stride), "SAME")
    return _add_shifted(jnp.pad(x, ((0, 0), *pads, (0, 0))), kernel, stride)


def _shifted(x: jax.Array, stride: int) -> list[jax.Array]:
    """Returns what each entry of a 3x3 kernel sees of padded images [B, H, W, C], row by row."""
    height, width = x.shape[1:3]
    return [
        x[:, i : height - 2 + i : stride, j : width - 2 + j : stride]
        for i in range(3)
        for j in range(3)
    ]


def _add_shifted(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    weights = kernel.reshape(9, -1)
    seen = zip(_shifted(x, stride), weights, strict=True)
    return sum((part * weight for part, weight in seen), jnp.zeros((), x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def shift_and_add_per_image(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """The same, one image after another, which stays in a core's cache for all nine products.

    The gradient adds up an image's rows first, and its columns last: XLA on a CPU is slow at
    sums over several leading axes, and would compute what is summed again for each of the nine.
    """
    return lax.map(lambda image: shift_and_add(image[None], kernel, stride)[0], x)


def _keep_inputs(x, kernel, stride):
    return shift_and_add_per_image(x, kernel, stride), (x, kernel)


def _shift_and_add_back(stride, inputs, slope):
    x, kernel = inputs
    pads = lax.padtype_to_pads(x.shape[1:3], (3, 3), (stride, stride), "SAME")
    # the slopes of the outputs, `stride` apart, so that a pixel sees those that have seen it
    spread = [
        (2 - low, size + low - (count - 1) * stride - 1, stride - 1)
        for (low, _), size, count in zip(pads, x.shape[1:3], slope.shape[1:3], strict=True)
    ]

    def one(total, inputs):
        image, dy = (part[None] for part in inputs)
        seen = _shifted(jnp.pad(image, ((0, 0), *pads, (0, 0))), stride)
        total += jnp.stack([(part * dy)[0].sum(0) for part in seen])
        back = lax.pad(dy, jnp.zeros((), dy.dtype), ((0, 0, 0), *spread, (0, 0, 0)))
        return total, _add_shifted(back, kernel[::-1, ::-1], 1)[0]

    begin = jnp.zeros((9, *slope.shape[2:]), slope.dtype)
    total, dx = lax.scan(one, begin, (x, slope))
    return dx, total.sum(1).reshape(kernel.shape)


shift_and_add_per_image.defvjp(_keep_inputs, _shift_and_add_back)


class DepthwiseConv(nn.Module):
    """3x3 convolution of each channel by itself, padded, without bias: [B, H, W, C] ->
    [B, H', W', C].
    """

    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the convolution."""
        # Glorot-uniform: nine numbers into a channel's output and nine out of its input
        glorot = partial(draw_uniform, math.sqrt(6 / 18))
        kernel = self.param("kernel", glorot, (3, 3, x.shape[-1]))
        on_cpu = jax.default_backend() == "cpu"
        return (shift_and_add_per_image if on_cpu else shift_and_add)(x, kernel, self.strides)


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
    the input again for that, and rounds another way, finds none: the gradient is lost or
    0 / 0. A choice always has one that was taken.
    """
    return jnp.where((a > b) | jnp.isnan(a), a, b)
