"""What the clients of any method keep for themselves, see `types.Personal`: before round 0, and
when clients are tested.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import ClientFn, make_cohort, over_clients
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.round.aggregate import uniform_mean, weighted_mean
from fedjax_cfl.round.client_models import find_places, put_models
from fedjax_cfl.round.hooks import Hooks
from fedjax_cfl.system.select_by_group import groups_of
from fedjax_cfl.system.system import System, group_models
from fedjax_cfl.tree import put_part, take_rows
from fedjax_cfl.types import FederatedData, OwnRows, Params, Personal, State, Task


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
    moves = personal.server is not None and personal.server.move is not None
    if moves and (hooks.server or hooks.aggregate not in (None, weighted_mean, uniform_mean)):
        raise InputError(
            f"personal: {personal.name} moves the plain mean of its clients' models, but the server"
            " of this method makes another step; use personal=none, or another algorithm"
        )
    return personal.train(task, local, hooks.solve)


def init_own(personal: Personal, state: State) -> State:
    """Returns the state before round 0 with what each client keeps at first. What is never sent
    is the same in all group models: that of the first one.
    """
    groups = state.groups
    if personal.sent_part is not None:
        first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), groups)
        groups = put_part(first, personal.sent_part(groups))
    state = state.replace(groups=groups)
    rows = take_rows(jax.vmap(personal.init)(groups), groups_of(state))
    group = jnp.full_like(state.assignment, -1) if personal.server is not None else ()
    return state.replace(own=OwnRows(rows, jnp.zeros(state.assignment.size, bool), group))


def make_first_rows(local: Local) -> Callable[[State], Any] | None:
    """Returns `Algorithm.first_rows`: (state) -> what a client of each group keeps at first."""
    personal = local.personal
    if personal is None or personal.server is not None:
        return None

    def first_rows(state: State) -> Any:
        return jax.vmap(personal.init)(state.groups)

    return first_rows


def make_personal_models(task: Task, local: Local) -> Callable[..., Params] | None:
    """Returns `Algorithm.personal_models`: (state, data, clients [n] or None: all) -> the model
    [n, ...] that each of these clients uses and is tested on: that of its group, until the client
    has trained; or that of its group, adapted. None where all use that of their group.
    """
    personal = local.personal
    if personal is not None and personal.adapt is not None:
        return adapt_models(task, personal.adapt(local.replace(personal=None)))
    combine = personal and personal.combine
    if not combine:
        return None

    def choose(row: Any, model: Params, trained: jax.Array) -> Params:
        return jax.tree.map(
            lambda mine, theirs: jnp.where(trained, mine, theirs), combine(row, model), model
        )

    def personal_models(
        state: State, data: FederatedData, clients: jax.Array | None = None
    ) -> Params:
        if clients is None:
            return jax.vmap(choose)(state.own.rows, group_models(state), state.own.trained)
        rows = take_rows(state.own.rows, find_places(state.own, clients))
        models = take_rows(state.groups, groups_of(state)[clients])
        return jax.vmap(choose)(rows, models, state.own.trained[clients])

    return personal_models


def adapt_models(task: Task, local: Local) -> Callable[[State, FederatedData], Params]:
    """Returns f(state, data) -> the models [K, ...] of clients that each train the model of their
    group as `local` says, on batches drawn by the round and the client alone.
    """
    train, mesh = over_clients(sgd(task, local), local.execution), local.execution.mesh

    @jax.jit
    def adapted_models(
        state: State, data: FederatedData, clients: jax.Array | None = None
    ) -> Params:
        assert clients is None, "it trains on the samples of all, which are on the devices"
        ids = jnp.arange(data.num_clients, dtype=jnp.int32)
        cohort = make_cohort(ids, data, local.execution)
        key = derive_key(jax.random.key(0), TRAIN, state.round)
        work = full_work(cohort.take(groups_of(state)), local.lr_scale(state.round))
        upload, models = train(cohort, data, (key, state.groups), work), group_models(state)
        steps = put_models(jax.tree.map(jnp.zeros_like, models), cohort.ids, upload.delta, mesh)
        return jax.tree.map(jnp.add, models, steps)

    return adapted_models
