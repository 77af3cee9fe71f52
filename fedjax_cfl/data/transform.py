"""Quarter turns of samples when they are read, so that a pool is stored once however its clients
see it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.errors import InputError

TURNS = 4


def turn_images(x: jax.Array, turns: jax.Array) -> jax.Array:
    """Turns each of the images [B, H, H, ...] by its number of quarters [B],
    counter-clockwise.
    """
    turned = x
    for quarter in range(1, TURNS):
        whole = jnp.rot90(x, quarter, axes=(1, 2))
        turned = jax.vmap(jnp.where)(turns == quarter, whole, turned)
    return turned


def check_square(x: np.ndarray | jax.Array, field: str) -> None:
    """Raises InputError for samples that cannot be turned by a quarter."""
    if x.ndim not in (3, 4) or x.shape[1] != x.shape[2]:
        raise InputError(
            f"{field}: samples have shape {x.shape[1:]}, expected square images [H, H] or"
            " [H, H, channels]"
        )
