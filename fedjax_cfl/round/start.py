"""Starts that methods share, see `hooks.StartFn`."""

import jax
import jax.numpy as jnp

from fedjax_cfl.round.hooks import Start, StartFn
from fedjax_cfl.types import FederatedData, Key, Params, Task


def random_groups(task: Task, num_groups: int) -> StartFn:
    """Starts from `num_groups` independent random models."""

    def start(key: Key, data: FederatedData) -> Start:
        return Start(jax.vmap(task.init)(jax.random.split(key, num_groups)))

    return start


def common_model(task: Task, num_groups: int) -> StartFn:
    """Starts all groups from one random model."""

    def start(key: Key, data: FederatedData) -> Start:
        return Start(copy_model(task.init(jax.random.split(key, 1)[0]), num_groups))

    return start


def one_active_group(task: Task, num_groups: int) -> StartFn:
    """Starts from one random model in group 0; the other groups, copies of it, are not active
    yet.
    """

    def start(key: Key, data: FederatedData) -> Start:
        groups = copy_model(task.init(key), num_groups)
        return Start(groups, active=jnp.arange(num_groups) == 0)

    return start


def copy_model(model: Params, count: int) -> Params:
    """Returns `count` copies of one model, stacked [count, ...]."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), model)


def no_clients(key: Key, num_clients: int) -> jax.Array:
    """Returns no ids: the start reads nobody's samples (a `StartClientsFn`)."""
    return jnp.zeros(0, jnp.int32)
