"""Xie, Long, Shen, Zhou, Wang, Jiang, Zhang, "Multi-Center Federated Learning",
2020/2021, https://arxiv.org/abs/2005.01026 (FeSEM).

K-means whose points are the clients' models: the server keeps every client's latest
model W_i; a client trains from the nearest center (E-step, eq. 9) and is held near it
(eq. 8), and a center is the mean of the models assigned to it (M-step, eq. 10).

Differs from the paper: a round is E-step, local training, M-step, where Algorithm 1 is
E-step, M-step, local training; a client trains E epochs with a plain proximal term,
where eq. 8 weighs the loss by n_i / n and N = 1 step is taken (D7; `form="eq8"` is
literal but for N).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.clustering.distances import gram
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.clustering.migrate import DETECTORS, init_reference, on_shift
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.round.aggregate import first_client, uniform_mean, weighted_mean
from fedjax_cfl.round.cohort import make_cohort, over_clients
from fedjax_cfl.round.engine import Start, federated, random_groups
from fedjax_cfl.round.local import full_work
from fedjax_cfl.round.objective import erm, proximal
from fedjax_cfl.round.sgd import sgd
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean, group_sum, membership_weights
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, Params, State, Upload

# of the points that are clustered at the start: exact for up to as many clients, beyond that
# their principal directions
MAX_EMBEDDING_DIMENSIONS = 256


class ClientModels(struct.PyTreeNode):
    """What the server keeps of every client."""

    models: Params  # [K, ...], W_i, the model it last sent
    # [K] bool, False: it never trained, takes no part in the means and stays in its group
    known: jax.Array
    shift_reference: Any = ()  # migrate.Watch, only where clients migrate


def fesem(
    task,
    local,
    select,
    *,
    m: int,
    mu=0.1,
    form: str = "prox",
    start: str = "local",
    restarts: int = 20,
    estep: str = "all",
    average: str = "stored",
    distance: str = "full",
    migrate: bool = False,
    detector: str = "tv",
) -> Algorithm:
    """FeSEM with m centers; `mu` is the paper's lambda.

    Args: `form` prox: mu (W - center) in every gradient | eq8: mu_i = 2 mu n / (K n_i)
    for a client with n_i of all n samples; `start` local: every client trains once from
    a common random model, then K-means of these models, the best of `restarts` |
    random_models: m of them, and all W_i the same other one, so that one center gets
    everybody (D5, D6); `estep` all: every client met, before each round | selected: the
    cohort; `average` stored: all W_i of a group | cohort: this round's, plain |
    samples: this round's, weighted | first_client (D4); `distance` full | last_layer:
    the kernel of the layer `head` (D26). `migrate` is FeSEM-MIG of the FlexCFL paper:
    clients met whose data shifted (`detector`) take the E-step at once. Data play no
    part in it: with estep=all nothing changes; with estep=selected such a client moves
    only if centers have, since it was last selected.
    Raises InputError for a value that is not listed here, or last_layer for a model
    without a dense layer `head`.
    """
    starts = {
        "local": cluster_local_models(task, local, m, restarts),
        "random_models": random_models(task, m),
    }
    averages = {
        "stored": stored_mean,
        "cohort": uniform_mean,
        "samples": weighted_mean,
        "first_client": first_client,
    }
    require("algorithm.form", form, ("prox", "eq8"))
    require("algorithm.start", start, starts)
    require("algorithm.estep", estep, ("all", "selected"))
    require("algorithm.average", average, averages)
    require("algorithm.distance", distance, ("full", "last_layer"))
    require("algorithm.detector", detector, DETECTORS)
    if distance == "last_layer" and "kernel" not in jax.eval_shape(
        task.init, jax.random.key(0)
    ).get("head", ()):
        raise InputError(
            "algorithm.distance=last_layer: the model has no dense layer named head; use"
            " distance=full"
        )
    local = local.resolve()
    nearest_of = partial(nearest_center, distance=distance)
    choose = nearest_stored_center(nearest_of)
    pull = proximal(mu if form == "prox" else lambda mu_i: mu_i, erm(task))
    move = on_shift(choose, local, detector) if migrate else None
    return federated(
        task,
        local,
        select=select,
        solve=sgd(task, local, pull),
        start=with_shift_reference(starts[start]) if migrate else starts[start],
        migrate=e_step_of_all(nearest_of, move) if estep == "all" else move,
        assign=lambda *given: (choose(*given), make_traffic()),
        prepare=client_mu(mu) if form == "eq8" else None,
        aggregate=averages[average],
        remember=keep_models,
    )


def nearest_center(models, centers, distance: str = "full"):
    """Returns the center [N] of least ||W_i - center_k||_2 for each of `models [N,
    ...]`, ties to the lowest (eq. 9).

    With e_k = center_k - mean center, ||W - center_k||^2 is -2 W.e_k + (center_k +
    mean).e_k and a term common to all k: one product with the models, and none of the
    cancellation of |W|^2 - 2 W.c + |c|^2 for models as similar as these.
    """
    if distance == "last_layer":
        models, centers = models["head"]["kernel"], centers["head"]["kernel"]

    def part(model, center):
        mean = jnp.mean(center, axis=0)
        apart = (center - mean).reshape(center.shape[0], -1)
        product = jnp.matmul(
            model.reshape(model.shape[0], -1), apart.T, precision=lax.Precision.HIGHEST
        )
        return jnp.sum((center + mean).reshape(apart.shape) * apart, axis=1) - 2 * product

    return jnp.argmin(sum(jax.tree.leaves(jax.tree.map(part, models, centers))), axis=1).astype(
        jnp.int32
    )


def nearest_stored_center(nearest_of):
    """Returns choose(key, state, data, cohort) -> [S]: the center `nearest_of(models,
    centers)` to each client's stored model.
    """

    def choose(key, state: State, data: FederatedData, cohort: Cohort):
        clients = jnp.minimum(cohort.ids, data.num_clients - 1)
        nearest = nearest_of(
            jax.tree.map(lambda leaf: leaf[clients], state.memory.models), state.groups
        )
        return jnp.where(
            state.memory.known[clients], nearest, jnp.maximum(state.assignment[clients], 0)
        )

    return choose


def e_step_of_all(nearest_of, move=None):
    """Returns migrate(key, state, data): after `move`, if any, every client met goes to
    the center `nearest_of` its stored model.
    """

    def migrate(key, state: State, data: FederatedData):
        before = state.assignment
        state, _, walked = move(key, state, data) if move else (state, None, make_traffic())
        nearest = nearest_of(state.memory.models, state.groups)
        assignment = jnp.where(state.memory.known & (before >= 0), nearest, before)
        return (
            state.replace(assignment=assignment),
            jnp.sum(assignment != before).astype(jnp.int32),
            walked,
        )

    return migrate


def client_mu(mu):
    """Returns prepare(...) -> mu_i [S] = 2 mu n / (K n_i): eq. 8 divided by the n_i / n
    in front of its loss.
    """

    def prepare(key, state: State, data: FederatedData, cohort: Cohort, gid):
        size = data.train.size[jnp.minimum(cohort.ids, data.num_clients - 1)]
        return 2.0 * mu * jnp.sum(data.train.size) / (data.num_clients * jnp.maximum(size, 1.0))

    return prepare


def stored_mean(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
    """Plain mean of all stored models of each group (eq. 10), the cohort's being those
    of this round.

    The old rows of the cohort are masked out and its new models added: one matrix
    product with the memory, which is left as it is.
    """
    m, memory, fresh = state.active.size, state.memory, upload.weight > 0
    old = memory.known.at[rows_of(cohort, upload, memory)].set(False, mode="drop")
    kept, new = (
        membership_weights(old.astype(jnp.float32), state.assignment, m),
        membership_weights(fresh.astype(jnp.float32), gid, m),
    )
    mass = kept.sum(0) + new.sum(0)

    def step(stored, delta, center):
        def per_group(values):
            return values.reshape(m, *(1,) * (center.ndim - 1))

        total = group_sum(kept, stored) - per_group(kept.sum(0)) * center + group_sum(new, delta)
        return total / per_group(jnp.maximum(mass, 1.0))

    return jax.tree.map(step, memory.models, upload.delta, state.groups), mass


def rows_of(cohort: Cohort, upload: Upload, memory: ClientModels):
    """Returns the rows [S] of the memory that the cohort's models go to; K, which is
    dropped, where there is none.
    """
    return jnp.where(upload.weight > 0, cohort.ids, memory.known.size)


def keep_models(state: State, groups, cohort: Cohort, gid, upload: Upload) -> ClientModels:
    """Stores the model of every client that trained."""
    rows = rows_of(cohort, upload, state.memory)

    def store(stored, began, delta, center):
        # The models are written in place only if the compiler sees that the means, which read
        # them, were taken before: hence a condition on the new centers, true unless the run has
        # diverged.
        taken = jnp.where(jnp.isfinite(jnp.sum(center)), rows, state.memory.known.size)
        return stored.at[taken].set(began[gid] + delta, mode="drop")

    models = jax.tree.map(store, state.memory.models, state.groups, upload.delta, groups)
    return state.memory.replace(
        models=models, known=state.memory.known.at[rows].set(True, mode="drop")
    )


def random_models(task, num_groups: int):
    """Starts from m random models; every client's stored model is the same one more
    (FeSEM as the FlexCFL code has it: D5, D6).
    """

    def start(key, data):
        keys = jax.random.split(key)
        common = task.init(keys[1])
        models = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (data.num_clients, *leaf.shape)), common
        )
        memory = ClientModels(models, jnp.ones(data.num_clients, bool))
        return random_groups(task, num_groups)(keys[0], data)._replace(memory=memory)

    return start


def cluster_local_models(task, local, num_groups: int, restarts: int):
    """Starts from K-means of the models all clients have after one local update of a
    common random model, the best of `restarts`.

    (Training settings of the paper's experiments; it does not say what W_i is before
    training.) It costs K models down and K up and meets everybody. A group without
    members starts from the common model.
    """
    local = local.resolve()
    train = over_clients(sgd(task, local), local)

    def start(key, data):
        keys = jax.random.split(key, 3)
        common = jax.tree.map(lambda leaf: leaf[None], task.init(keys[0]))
        cohort = make_cohort(jnp.arange(data.num_clients, dtype=jnp.int32), data, local)
        upload = train(cohort, data, (keys[1], common), full_work(jnp.zeros_like(cohort.ids)))
        everyone = jax.tree.map(
            lambda leaf: jnp.zeros((data.num_clients, *leaf.shape[1:]), leaf.dtype), upload.delta
        )
        delta = jax.tree.map(
            lambda whole, part: whole.at[cohort.ids].set(part, mode="drop"), everyone, upload.delta
        )
        known = data.train.size > 0
        found = kmeans(keys[2], embed_deltas(delta, known), num_groups, restarts, weight=known)
        centers, _ = group_mean(known.astype(jnp.float32), found.labels, delta, num_groups)
        return Start(
            groups=jax.tree.map(jnp.add, common, centers),
            assignment=found.labels,
            memory=ClientModels(jax.tree.map(jnp.add, common, delta), known),
            traffic=make_traffic(units_down=data.num_clients, units_up=data.num_clients),
        )

    return start


def embed_deltas(delta, known):
    """Returns points [K, min(K, DIMENSIONS)] with the distances of `delta [K, ...]`:
    K-means needs no more, however large the models.

    With G = Q diag(l) Q' the inner products of the centered updates, the rows of Q
    sqrt(l) have the same inner products. The top directions alone lose next to nothing
    of a K-means cost: at most a factor 1 + m / DIMENSIONS (Cohen et al. 2015,
    https://arxiv.org/abs/1410.6801).
    """
    weight = known / jnp.maximum(jnp.sum(known), 1)

    def centered(leaf):
        return jax.vmap(jnp.where, (0, 0, None))(
            known, leaf - jnp.tensordot(weight, leaf, axes=1), 0.0
        )

    values, vectors = jnp.linalg.eigh(gram(jax.tree.map(centered, delta)))
    return (jnp.sqrt(jnp.maximum(values, 0.0)) * vectors)[:, ::-1][:, :MAX_EMBEDDING_DIMENSIONS]


def with_shift_reference(begin):
    """Adds to a start what `on_shift` compares with."""

    def start(key, data):
        begun = begin(key, data)
        return begun._replace(memory=begun.memory.replace(shift_reference=init_reference(data)))

    return start
