"""Transformations of samples when they are read, so that a pool is stored once however
its clients see it: quarter turns and label maps.

A code is one int32 per held sample: quarter turns + 4 * number of the label map.
"""

import jax
import numpy as np

from fedjax_cfl.errors import InputError

TURNS = 4


def transform(
    x: jax.Array, y: jax.Array, code: jax.Array, label_maps: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Turns images [B, H, H, ...] counter-clockwise and renames labels y [B] as their
    codes [B] say.

    Label map l makes class c the class `label_maps[l, c]` [L, C] int32. Takes JAX's or
    NumPy's arrays.
    """
    xp = x.__array_namespace__()
    turns = (code % TURNS).reshape(-1, *[1] * (x.ndim - 1))
    turned = x
    for quarter in range(1, TURNS):
        turned = xp.where(turns == quarter, xp.rot90(x, quarter, axes=(1, 2)), turned)
    return turned, label_maps[code // TURNS, y]


def transform_in_place(x: np.ndarray, y: np.ndarray, code: np.ndarray, maps: np.ndarray) -> None:
    """Does the same to arrays on the host, which it overwrites."""
    for quarter in range(1, TURNS):
        rows = np.flatnonzero(code % TURNS == quarter)
        x[rows] = np.rot90(x[rows], quarter, axes=(1, 2))
    y[:] = maps[code // TURNS, y]


def check_square(x: np.ndarray, field: str) -> None:
    """Raises InputError for samples that cannot be turned by a quarter."""
    if x.ndim not in (3, 4) or x.shape[1] != x.shape[2]:
        raise InputError(
            f"{field}: samples have shape {x.shape[1:]}, expected square images [H, H] or"
            " [H, H, channels]"
        )
