"""What the clients of any method keep for themselves, see `types.Personal`: before round 0, and
when clients are tested.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.hooks import Hooks
from fedjax_cfl.system.system import System, group_models
from fedjax_cfl.types import OwnRows, Params, Personal, State, Task


def train_personal(
    personal: Personal, task: Task, local: Local, system: System, hooks: Hooks
) -> ClientFn:
    """Returns how a client trains its group's model and what is its own.

    Args: `personal` is what clients keep; the others are those of `engine.federated`. Raises
    InputError for a method, a system or a task that it cannot be used with.
    """
    if hooks.own_models:
        raise InputError(
            "personal: every client of this method has a model of its own already, without"
            f" {personal.name}; use personal=none, or another algorithm"
        )
    if system.keep_received:
        raise InputError(
            f"test_on=received: clients of {personal.name} are tested on models of their own; use"
            " test_on=group"
        )
    return personal.train(task, local, hooks.solve)


def init_own(personal: Personal, state: State) -> State:
    """Returns the state before round 0 with what each client keeps at first. What is never sent
    is the same in all group models: that of the first one.
    """
    groups = state.groups
    if personal.sent_part is not None:
        first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), groups)
        groups = {**first, **personal.sent_part(groups)}
    state = state.replace(groups=groups)
    rows = jax.vmap(personal.init)(group_models(state))
    group = jnp.full_like(state.assignment, -1) if personal.server is not None else ()
    return state.replace(own=OwnRows(rows, jnp.zeros(state.assignment.size, bool), group))


def make_personal_models(personal: Personal | None) -> Callable[[State], Params] | None:
    """Returns f(state) -> the model [K, ...] that each client uses and is tested on: that of its
    group, until the client has trained. None where all use that of their group.
    """
    combine = personal and personal.combine
    if not combine:
        return None

    def choose(row: Any, model: Params, trained: jax.Array) -> Params:
        return jax.tree.map(
            lambda mine, theirs: jnp.where(trained, mine, theirs), combine(row, model), model
        )

    def personal_models(state: State) -> Params:
        return jax.vmap(choose)(state.own.rows, group_models(state), state.own.trained)

    return personal_models
