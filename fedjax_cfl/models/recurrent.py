"""Recurrent layers as in Keras: orthogonal recurrent kernels, LSTM forget bias 1. B batch, T
time steps, h hidden units.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.decompose import one_at_a_time
from fedjax_cfl.models.layers import glorot

orthogonal = one_at_a_time(nn.initializers.orthogonal())


def _over_time(
    step: Callable, carry: jax.Array | tuple, inputs: jax.Array, reverse: bool, sequences: bool
) -> jax.Array:
    # inputs [B, T, gates]: projected for all steps by one large matrix product; only the
    # recurrent product is left to the loop.
    if inputs.ndim != 3:
        raise ValueError("sequences [T, features] are allowed")
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
