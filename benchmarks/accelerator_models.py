"""The models of published benchmarks of simulators, as `accelerator.py` trains them."""

import flax.linen as nn
import jax

from fedjax_cfl.models.layers import Conv, add_channel_axis, dense, flatten, max_pool


class SmallCNN(nn.Module):
    """Two unpadded 3x3 convolutions (32 and 64), one pooling, dropout, a hidden layer of 128.

    pfl-research's `simple_cnn` on 32x32x3 (CIFAR-10), FLUTE's and FedML's FEMNIST CNN on 28x28
    with 62 classes (1,206,590 parameters).
    """

    num_classes: int
    dropout: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x, off = add_channel_axis(x), not (train and self.dropout)
        for features in (32, 64):
            x = nn.relu(Conv(features, 3, padding="valid")(x))
        x = nn.Dropout(0.25, deterministic=off)(max_pool(x))
        x = nn.relu(dense(128, "hidden")(flatten(x)))
        return dense(self.num_classes, "head")(nn.Dropout(0.5, deterministic=off)(x))
