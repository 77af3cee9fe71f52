"""Which group each client of the cohort trains: functions (key, state, data, cohort) ->
(gid [S] int32, Traffic).

The engine stores `gid` as the clients' assignment; clients outside the cohort keep
theirs.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.clustering.distances import cosine
from fedjax_cfl.round.cohort import SAMPLE_BLOCK, client_range, over_clients
from fedjax_cfl.round.local import Local, full_work
from fedjax_cfl.round.objective import cross_entropy
from fedjax_cfl.round.ragged_loop import ragged_fori_loop
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.types import Cohort, FederatedData, State, Task


def training_loss(task: Task, with_l2: bool = False):
    """Returns visit(client, bucket, data, models [m, ...], ()) -> [m]: each model's
    mean loss over the client's whole training set.

    Plain cross-entropy without dropout; `with_l2` adds the model's L2 penalty, as the
    FlexCFL code does (D10).
    """

    def sample_loss(model, x, y, owner):
        if with_l2:
            return task.loss(model, x, y, None, owner)
        return cross_entropy(task.predict(model, x, owner), y)

    def visit(client, bucket, data: FederatedData, models, client_inputs):
        count, start = client_range(client, data)

        def block(b, total):
            place = b * SAMPLE_BLOCK + jnp.arange(SAMPLE_BLOCK)
            rows = data.train.order[start + jnp.minimum(place, count - 1)]
            owner = jnp.where(place < count, client, -1)
            each = jax.vmap(sample_loss, in_axes=(0, None, None, None))(
                models, data.x[rows], data.y[rows], owner
            )
            return total + jnp.sum(jnp.where(place < count, each, 0.0), axis=1)

        num_models = jax.tree.leaves(models)[0].shape[0]
        return ragged_fori_loop(
            -(-count // SAMPLE_BLOCK), block, jnp.zeros(num_models)
        ) / jnp.maximum(count, 1)

    return visit


def best_model(task: Task, local: Local, with_l2: bool = False):
    """Returns choose(key, state, data, cohort) -> [S]: the group model of lowest loss
    on the client's training set, ties to the lowest.
    """
    losses = over_clients(training_loss(task, with_l2), local.resolve())

    def choose(key, state: State, data: FederatedData, cohort: Cohort):
        loss = losses(cohort, data, state.groups)  # [S, m]
        return jnp.argmin(jnp.where(state.active, loss, jnp.inf), axis=1).astype(jnp.int32)

    return choose


def every_round(choose):
    """Lets `choose(key, state, data, cohort)` -> [S] group the whole cohort anew in
    every round (IFCA, Algorithm 1 line 6).

    The cohort downloads all m models (one of them is the round's own download) and
    names its choice in one word.
    """

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        clients = jnp.sum(cohort.ids < data.num_clients)
        return choose(key, state, data, cohort), make_traffic(
            units_down=clients * (state.active.size - 1), words_up=clients
        )

    return assign


def is_cold(state: State, cohort: Cohort):
    """Returns [S] bool: real clients that have never been assigned."""
    real = cohort.ids < state.assignment.size
    return real & (state.assignment[jnp.minimum(cohort.ids, state.assignment.size - 1)] < 0)


def cold_start(choose):
    """Keeps the group of every client already met; `choose(key, state, data,
    newcomers)` -> [S] groups the others once and for all.

    A newcomer downloads m vectors, once in its life (FlexCFL, Algorithm 3 line 18
    onwards); it joins by itself.
    """

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        cold = is_cold(state, cohort)
        newcomers = cohort.replace(ids=jnp.where(cold, cohort.ids, data.num_clients))
        met = state.assignment[jnp.minimum(cohort.ids, data.num_clients - 1)]
        gid = jnp.where(cold, choose(key, state, data, newcomers), jnp.maximum(met, 0)).astype(
            jnp.int32
        )
        return gid, make_traffic(units_down=cold.sum() * state.active.size)

    return assign


def nearest_direction(pretrain):
    """Newcomers pre-train from the initial model and join the group whose first
    direction has the smallest cosine dissimilarity.

    (FlexCFL eq. 8.) `state.memory` holds `start` [1, ...] and `directions` [m, ...];
    groups without a direction are never chosen.
    """

    def choose(key, state: State, data: FederatedData, newcomers: Cohort):
        upload = pretrain(
            newcomers, data, (key, state.memory.initial), full_work(jnp.zeros_like(newcomers.ids))
        )
        similarity = cosine(upload.delta, state.memory.directions)
        return jnp.argmax(jnp.where(state.memory.has_founders, similarity, -jnp.inf), axis=1)

    return choose


def random_group(key, state: State, data: FederatedData, newcomers: Cohort):
    """Newcomers join a uniformly random group, drawn per client (ablation RAC)."""
    keys = jax.vmap(lambda client: jax.random.fold_in(key, client))(newcomers.ids)
    return jax.vmap(lambda k: jax.random.randint(k, (), 0, state.active.size))(keys)
