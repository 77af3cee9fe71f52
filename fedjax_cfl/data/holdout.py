"""Training samples of every client that are kept for validation."""

import jax.numpy as jnp
from jax import lax

from fedjax_cfl.types import ClientIndex, FederatedData


def hold_out_samples(data: FederatedData, share: float) -> FederatedData:
    """Returns the data without a `share` of every client's training samples, evenly spread
    over them; they stay in `train.order`, behind the client's others.
    """
    train = data.train
    at = jnp.arange(train.order.size)
    # whose range it is: hidden samples have no owner, and stay behind those that are shown
    client = jnp.searchsorted(train.start, at, side="right").astype(jnp.int32) - 1
    place = at - train.start[client]
    shown = (client >= 0) & (place < train.size[client])
    # 1e-3: shares are rounded
    before, after = (jnp.floor(number * share + 1e-3) for number in (place, place + 1))
    part = jnp.where(shown, (after > before).astype(jnp.int32), 2)
    _, _, order = lax.sort((client, part, train.order), num_keys=2, is_stable=True)
    size = jnp.zeros_like(train.size).at[client].add((part == 0).astype(jnp.int32))
    return data.replace(train=ClientIndex(order, train.start, size))


def take_held_out(data: FederatedData) -> FederatedData:
    """Returns the data of `hold_out_samples` with the held-out samples as training samples."""
    train, owner = data.train, data.owner[data.train.order]
    owner = jnp.where(owner < 0, data.num_clients, owner)
    whole = jnp.zeros_like(train.size).at[owner].add(1, mode="drop")
    return data.replace(
        train=train.replace(start=train.start + train.size, size=whole - train.size)
    )
