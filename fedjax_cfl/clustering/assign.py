"""Which group each client of the cohort trains. A `ChooseFn` names groups; `every_round`
and `cold_start` make an `AssignFn` (see `hooks`) of it.

The engine stores the groups as the clients' assignment; clients outside the cohort keep
theirs.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from fedjax_cfl.clustering.distances import cosine
from fedjax_cfl.round.cohort import SAMPLE_BLOCK, client_range, over_clients
from fedjax_cfl.round.faults import no_faults
from fedjax_cfl.round.hooks import AssignFn, make_report
from fedjax_cfl.round.local import Local, full_work
from fedjax_cfl.round.objective import cross_entropy
from fedjax_cfl.round.ragged_loop import ragged_fori_loop
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import squared_norms
from fedjax_cfl.types import Cohort, FaultCounts, FederatedData, Key, State, Task


class ChooseFn(Protocol):
    """Chooses the group [S] int32 of each client of a cohort; the counts say which of them
    sent an update that is not finite, if they had to train for it.
    """

    def __call__(
        self, key: Key, state: State, data: FederatedData, cohort: Cohort
    ) -> tuple[jax.Array, FaultCounts]: ...


def training_loss(task: Task, with_l2: bool = False):
    """Returns visit(client, bucket, data, models [m, ...], ()) -> [m]: each model's
    mean loss over the client's whole training set.

    Plain cross-entropy without dropout; `with_l2` adds the model's L2 penalty, as the
    FlexCFL code does (D10).
    """

    def sample_loss(model, x, y):
        return task.loss(model, x, y, None) if with_l2 else cross_entropy(task.predict(model, x), y)

    def visit(client, bucket, data: FederatedData, models, client_inputs):
        count, start = client_range(client, data)

        def block(b, total):
            place = b * SAMPLE_BLOCK + jnp.arange(SAMPLE_BLOCK)
            rows = data.train.order[jnp.minimum(start + place, data.train.order.size - 1)]
            each = jax.vmap(sample_loss, in_axes=(0, None, None))(models, *data.gather(rows))
            return total + jnp.sum(jnp.where(place < count, each, 0.0), axis=1)

        num_models = jax.tree.leaves(models)[0].shape[0]
        return ragged_fori_loop(
            -(-count // SAMPLE_BLOCK), block, jnp.zeros(num_models)
        ) / jnp.maximum(count, 1)

    return visit


def best_model(task: Task, local: Local, with_l2: bool = False) -> ChooseFn:
    """Chooses the group model of lowest loss on the client's training set, ties to the
    lowest; never one whose loss is not finite, while there is another.
    """
    losses = over_clients(training_loss(task, with_l2), local.resolve())

    def choose(key, state: State, data: FederatedData, cohort: Cohort):
        loss = losses(cohort, data, state.groups)  # [S, m]
        usable = state.active & jnp.isfinite(loss)
        return jnp.argmin(jnp.where(usable, loss, jnp.inf), axis=1).astype(jnp.int32), no_faults()

    return choose


def every_round(choose: ChooseFn) -> AssignFn:
    """Groups the whole cohort anew in every round (IFCA, Algorithm 1 line 6).

    The cohort downloads all m models (one of them is the round's own download) and
    names its choice in one word.
    """

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        gid, faults = choose(key, state, data, cohort)
        real = (cohort.ids < data.num_clients).astype(jnp.int32)
        sent = make_traffic(units_down=real * (state.active.size - 1), words_up=real)
        return gid, make_report(sent, fault_counts=faults)

    return assign


def met_groups(state: State, cohort: Cohort) -> jax.Array:
    """Returns the groups [S] that the clients were last assigned to, -1 for clients never
    met and in empty slots.
    """
    clients = state.assignment.size
    met = state.assignment[jnp.minimum(cohort.ids, clients - 1)]
    return jnp.where(cohort.ids < clients, met, -1)


def is_cold(state: State, cohort: Cohort) -> jax.Array:
    """Returns [S] bool: real clients that have never been assigned."""
    return (cohort.ids < state.assignment.size) & (met_groups(state, cohort) < 0)


def keep_groups(key, state: State, data: FederatedData, cohort: Cohort):
    """Leaves every client in its group; clients never met train group 0 (an `AssignFn`)."""
    return jnp.maximum(met_groups(state, cohort), 0), make_report()


def cold_start(choose: ChooseFn) -> AssignFn:
    """Keeps the group of every client already met; groups the others once and for all.

    A newcomer downloads m vectors, once in its life (FlexCFL, Algorithm 3 line 18
    onwards); it joins by itself.
    """

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        cold = is_cold(state, cohort)
        newcomers = cohort.replace(ids=jnp.where(cold, cohort.ids, data.num_clients))
        chosen, faults = choose(key, state, data, newcomers)
        met = jnp.maximum(met_groups(state, cohort), 0)
        gid = jnp.where(cold, chosen, met).astype(jnp.int32)
        sent = make_traffic(units_down=cold.astype(jnp.int32) * state.active.size)
        return gid, make_report(sent, fault_counts=faults)

    return assign


def nearest_direction(pretrain) -> ChooseFn:
    """Newcomers pre-train from the initial model and join the group whose first
    direction has the smallest cosine dissimilarity (FlexCFL eq. 8).

    `pretrain` is a `train_aside`. `state.memory` holds `initial` [1, ...], `directions`
    [m, ...] and `has_founders` [m]; a group without founders is never chosen, nor one
    whose direction is not finite.
    """

    def choose(key, state: State, data: FederatedData, cohort: Cohort):
        memory, work = state.memory, full_work(jnp.zeros_like(cohort.ids))
        upload, faults = pretrain(cohort, data, (key, memory.initial), work)
        similarity = cosine(upload.delta, memory.directions)
        finite = jnp.isfinite(squared_norms(memory.directions).sum(0))
        usable = memory.has_founders & finite & jnp.isfinite(similarity)
        return jnp.argmax(jnp.where(usable, similarity, -jnp.inf), axis=1), faults

    return choose


def random_group(key, state: State, data: FederatedData, cohort: Cohort):
    """Newcomers join a uniformly random group, drawn per client (ablation RAC; a
    `ChooseFn`).
    """
    keys = jax.vmap(lambda client: jax.random.fold_in(key, client))(cohort.ids)
    gid = jax.vmap(lambda k: jax.random.randint(k, (), 0, state.active.size))(keys)
    return gid, no_faults()
