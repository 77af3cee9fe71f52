"""What becomes of a group that no client is in any more (see `algorithms/md_icfl`).

Line 12 of Algorithm 1 divides 0 by 0 there, and the text does not say what is meant. The old
model stays, unless a rule from here gives the group another one. m groups, K clients.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_cfl.models.statistics import copy_statistics
from fedjax_cfl.round.hooks import MigrateFn
from fedjax_cfl.round.start import copy_model
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.tree import take_rows, where_rows
from fedjax_cfl.types import FederatedData, Key, Params, Report, State, Task

NOISE_SHARE = 0.1  # of the root mean square of a leaf

# (task, key, models [m, ...], the largest group [] int32) -> models [m, ...] for empty groups
RefillFn = Callable[[Task, Key, Params, jax.Array], Params]


def copy_largest(task: Task, key: Key, models: Params, largest: jax.Array) -> Params:
    """Returns m copies [m, ...] of the largest group's model, each with noise of its own: normal,
    a tenth of the root mean square of each leaf. Running statistics stay as they are. A
    `RefillFn`.

    Args: as those of `RefillFn`; `task` is not used.
    """
    count = len(jax.tree.leaves(models)[0])
    copies = copy_model(take_rows(models, largest), count)
    leaves, kind = jax.tree.flatten(copies)
    noisy = [
        leaf
        + NOISE_SHARE * jnp.sqrt(jnp.mean(jnp.square(leaf))) * jax.random.normal(own, leaf.shape)
        for own, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
    ]
    return copy_statistics(jax.tree.unflatten(kind, noisy), copies)


def new_models(task: Task, key: Key, models: Params, largest: jax.Array) -> Params:
    """Returns m new random models [m, ...]. A `RefillFn`.

    Args: as those of `RefillFn`; only `task`, `key` and the number of models are used.
    """
    return jax.vmap(task.init)(jax.random.split(key, len(jax.tree.leaves(models)[0])))


def refill_empty_groups(task: Task, refill: RefillFn) -> MigrateFn:
    """Gives each empty group the model that `refill` makes, before every round but the first.

    A group is empty if no client that has training samples is in it, whether or not it took part
    in the last round. Nothing is sent: clients receive the model of their group as ever.
    """

    def migrate(key: Key, state: State, data: FederatedData) -> tuple[State, Report]:
        inside = state.assignment[:, None] == jnp.arange(state.active.size)  # [K, m]
        size = jnp.sum(inside & (data.train.size > 0)[:, None], axis=0)
        made = refill(task, key, state.groups, jnp.argmax(size))
        empty = (size == 0) & (state.round > 0)
        return state.replace(groups=where_rows(empty, made, state.groups)), make_report()

    return migrate
