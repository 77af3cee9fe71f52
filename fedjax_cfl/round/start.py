"""Starts that methods share, see `hooks.StartFn`, and whose samples they read."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.round.hooks import Start, StartClientsFn, StartFn
from fedjax_cfl.round.keys import SELECT, START, derive_key
from fedjax_cfl.round.local import Local
from fedjax_cfl.types import FederatedData, Key, Params, State, Task


def random_groups(task: Task, num_groups: int) -> StartFn:
    """Starts from `num_groups` independent random models."""

    def start(key: Key, data: FederatedData) -> Start:
        return Start(jax.vmap(task.init)(jax.random.split(key, num_groups)))

    return start


def common_model(task: Task, num_groups: int) -> StartFn:
    """Starts all groups from one random model: the first of `random_groups`, so that under one
    seed all such methods begin with the same.
    """

    def start(key: Key, data: FederatedData) -> Start:
        return Start(copy_model(task.init(jax.random.split(key, 1)[0]), num_groups))

    return start


def one_active_group(task: Task, num_groups: int) -> StartFn:
    """Starts from one random model in group 0; the other groups, copies of it, are not active
    yet.
    """

    def start(key: Key, data: FederatedData) -> Start:
        active = jnp.arange(num_groups) == 0
        return common_model(task, num_groups)(key, data)._replace(active=active)

    return start


def copy_model(model: Params, count: int) -> Params:
    """Returns `count` copies of one model, stacked [count, ...]."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), model)


def no_clients(key: Key, num_clients: int) -> jax.Array:
    """Returns no ids: the start reads nobody's samples (a `StartClientsFn`)."""
    return jnp.zeros(0, jnp.int32)


def keep_served(local: Local, state: State) -> State:
    """Sets `received`, if it is kept, to the model of each client's group; of group 0 if it has
    none.
    """
    if not local.keep_received:
        return state
    rows = jnp.maximum(state.assignment, 0)
    return state.replace(received=jax.tree.map(lambda leaf: leaf[rows], state.groups))


def know_clients(
    start_clients: StartClientsFn | None, draw: Callable[..., jax.Array] | None
) -> Callable[..., jax.Array] | None:
    """Returns `Algorithm.data_clients`, (key, round, K) -> ids, whose samples a round (None:
    the start) reads; None where that is not known before the run.
    """
    if start_clients is None or draw is None:
        return None

    def data_clients(key: Key, round: ArrayLike | None, num_clients: int) -> jax.Array:
        if round is None:
            return start_clients(derive_key(key, START), num_clients)
        return draw(derive_key(key, SELECT, round), round, num_clients)

    return data_clients
