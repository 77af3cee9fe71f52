"""The vision transformer ViT-B/16."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_cfl.models.convolution import Conv
from fedjax_cfl.models.layers import add_channel_axis, dense


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR
    2021, https://arxiv.org/abs/2010.11929): ViT-B/16 has 85,798,656 parameters and 769
    a class on 224x224x3, 343 MB a copy.

    Images are cut into squares of `patch` pixels; each is a token of `width` numbers.
    Pre-norm blocks, a class token, learned places. Kernels start Glorot-uniform.
    """

    num_classes: int
    patch: int = 16
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: a divisor of width={self.width} is allowed")
        x = Conv(self.width, self.patch, self.patch, padding="valid")(add_channel_axis(x))
        x = x.reshape(x.shape[0], -1, self.width)  # [B, T, width]
        token = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.width)), x], axis=1)
        x = x + self.param("places", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(self.depth):
            x = x + _Attention(self.heads)(nn.LayerNorm(1e-6)(x))
            x = x + _MLP(self.hidden)(nn.LayerNorm(1e-6)(x))
        return dense(self.num_classes, "head")(nn.LayerNorm(1e-6)(x)[:, 0])


class _Attention(nn.Module):
    """Attention of all tokens to all: [B, T, width] -> [B, T, width]."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, tokens, width = x.shape
        parts = dense(3 * width, "qkv")(x).reshape(batch, tokens, 3, self.heads, -1)
        query, key, value = (parts[:, :, i] for i in range(3))  # [B, T, heads, d]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        out = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores, axis=-1), value)
        return dense(width, "out")(out.reshape(x.shape))


class _MLP(nn.Module):
    """Two layers for each token by itself: [B, T, width] -> [B, T, width]."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        out = nn.gelu(dense(self.hidden, "hidden")(x), approximate=False)
        return dense(x.shape[-1], "out")(out)
