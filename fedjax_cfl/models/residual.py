"""Residual and mobile networks: ResNet-18, MobileNetV2, for small images and large.

Every normalisation is made by `norm`, group normalisation by default: it keeps no
statistics, sees one sample at a time and is the same function in training and in test.
Parameter counts are those of the published networks, whose normalisation has a scale
and a bias per channel as well. Convolutions carry no bias. Differs from torchvision:
images are padded as TensorFlow's "same" does, kernels start Glorot-uniform.
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax

from fedjax_cfl.models.convolution import Conv, DepthwiseConv
from fedjax_cfl.models.layers import GroupNorm, add_channel_axis, dense

Norm = Callable[[], nn.Module]  # makes a layer called as (x [B, H, W, C], owner [B])


# expansion, channels, blocks, stride of the first block (MobileNetV2, Table 2)
MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ResNet18(nn.Module):
    """ResNet-18 of basic blocks (He et al., "Deep Residual Learning for Image
    Recognition", CVPR 2016, https://arxiv.org/abs/1512.03385).

    `stem` 3: a 3x3 convolution, for 32x32 images (11,173,962 parameters with 10
    classes). `stem` 7: 7x7 with stride 2 and pooling, for large ones (11,208,318 with
    62).
    """

    num_classes: int = 0
    stem: int = 3
    features: tuple[int, ...] = (64, 128, 256, 512)
    norm: Norm = partial(GroupNorm, 32)

    @nn.compact
    def __call__(self, x: jax.Array, owner: jax.Array | None = None) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        if self.stem not in (3, 7):
            raise ValueError(f"stem={self.stem}: 3 or 7 is allowed")
        x = _Unit(self.features[0], self.stem, 2 if self.stem == 7 else 1, True, self.norm)(
            add_channel_axis(x), owner
        )
        if self.stem == 7:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, width in enumerate(self.features):
            for block in range(2):
                stride = 2 if stage and not block else 1
                out = _Unit(width, 3, stride, True, self.norm)(x, owner)
                out = _Unit(width, 3, 1, False, self.norm)(out, owner)
                if out.shape != x.shape:
                    x = _Unit(width, 1, stride, False, self.norm)(x, owner)
                x = nn.relu(x + out)
        return dense(self.num_classes, "head")(x.mean((1, 2)))


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al., CVPR 2018, https://arxiv.org/abs/1801.04381):
    2,236,682 parameters with 10 classes.

    With `small_images` the layout that is usual for 32x32: strides 1 in the first
    stages, an expansion in the first block, and a convolution in a shortcut where the
    width changes (2,296,922 parameters). `width` multiplies all channels. A stage is
    (expansion, channels, blocks, stride).
    """

    num_classes: int = 0
    small_images: bool = True
    width: float = 1.0
    stages: tuple[tuple[int, int, int, int], ...] = MOBILE_STAGES
    norm: Norm = GroupNorm

    @nn.compact
    def __call__(self, x: jax.Array, owner: jax.Array | None = None) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""

        def scaled(features: int) -> int:
            return max(2, 2 * round(self.width * features / 2))

        x = _Unit(scaled(32), 3, 1 if self.small_images else 2, True, self.norm)(
            add_channel_axis(x), owner
        )
        for stage, (expansion, features, blocks, stride) in enumerate(self.stages):
            for block in range(blocks):
                step = 1 if block or (self.small_images and stage == 1) else stride
                out = x
                if expansion > 1 or self.small_images:
                    out = _Unit(expansion * x.shape[-1], 1, 1, True, self.norm)(out, owner)
                out = _Unit(0, 3, step, True, self.norm)(out, owner)
                out = _Unit(scaled(features), 1, 1, False, self.norm)(out, owner)
                if step == 1 and out.shape == x.shape:
                    out = out + x
                elif step == 1 and self.small_images:
                    out = out + _Unit(scaled(features), 1, 1, False, self.norm)(x, owner)
                x = out
        x = _Unit(scaled(1280), 1, 1, True, self.norm)(x, owner)
        return dense(self.num_classes, "head")(x.mean((1, 2)))


class _Unit(nn.Module):
    """A convolution without bias, its normalisation, and relu (MobileNetV2: relu is not
    capped at 6); `features` 0: depthwise.
    """

    features: int
    kernel: int
    strides: int
    relu: bool
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array, owner: jax.Array | None) -> jax.Array:
        """[B, H, W, in] -> [B, H', W', features]."""
        x = (
            Conv(self.features, self.kernel, self.strides, use_bias=False)(x)
            if self.features
            else DepthwiseConv(self.strides)(x)
        )
        x = self.norm()(x, owner)
        return nn.relu(x) if self.relu else x
