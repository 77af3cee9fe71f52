"""How FeSEM starts: the models that the server keeps of every client, and the first centers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from fedjax_cfl.client.cohort import make_cohort
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import train_without_recording
from fedjax_cfl.clustering.distances import dot, gram
from fedjax_cfl.clustering.features import top_eigenpairs
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.decompose import eigh
from fedjax_cfl.method import Start, StartFn
from fedjax_cfl.round.start import MakeStart, copy_model, random_groups
from fedjax_cfl.sharding import flatten_updates, on_every_device, put_models
from fedjax_cfl.system.reports import add_bills, make_bill
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import group_mean
from fedjax_cfl.types import FederatedData, Key, Params, Task
from fedjax_cfl.validation import PositiveInt, checked

# of the points that are clustered at the start: exact for up to so many clients; for more, about
# their principal directions
MAX_EMBEDDING_DIMENSIONS = 256

MODELS = "models"


class ClientModels(struct.PyTreeNode):
    """What the server keeps of every client, the row `MODELS`."""

    models: Params  # [K, ...], W_i, the model it last sent
    # [K] bool; False: the client never trained, does not count in the means, stays in its group
    known: jax.Array
    # [K] float32, the samples that W_i was trained on, 0 if it is not known; (): all count alike
    weight: Any = ()
    # [K, C] int32, training samples per class when the client last trained; () unless they count
    counts: Any = ()


def is_weighted(stored: ClientModels) -> bool:
    """Returns whether models that are stored count by their clients' samples, as WeCFL's."""
    return not isinstance(stored.weight, tuple)


def stored_weights(stored: ClientModels) -> jax.Array:
    """Returns how much each stored model counts in means [K] float32, 0 if it is not known."""
    return stored.weight if is_weighted(stored) else stored.known.astype(jnp.float32)


def random_models(task: Task, local: Local, system: SystemLike, m: int) -> StartFn:
    """Starts from m random models; the stored models of all clients are one more random model
    (FeSEM in the FlexCFL code: D5, D6).
    """

    def start(key: Key, data: FederatedData) -> Start:
        keys = jax.random.split(key)
        models = copy_model(task.init(keys[1]), data.num_clients)
        stored = ClientModels(models, jnp.ones(data.num_clients, bool))
        return random_groups(task, m)(keys[0], data)._replace(rows={MODELS: stored})

    return start


@checked("algorithm")
def cluster_local_models(restarts: PositiveInt = 20, by_samples: bool = False) -> MakeStart:
    """Starts from K-means, the best of `restarts`, of the models that all clients have after
    they trained a common random model. With `by_samples` each counts as often as its client has
    training samples, here and later (WeCFL).

    The paper does not say what W_i is before training; the settings are those of its
    experiments. The start costs K models down and K up, and assigns all clients. A group
    without clients starts from the common model.
    """

    def make(task: Task, local: Local, system: SystemLike, m: int) -> StartFn:
        train = train_without_recording(sgd(task, local), local, system)

        def start(key: Key, data: FederatedData) -> Start:
            keys, clients = jax.random.split(key, 4), data.num_clients
            common = jax.tree.map(lambda leaf: leaf[None], task.init(keys[0]))
            cohort = make_cohort(jnp.arange(clients, dtype=jnp.int32), data, local.execution)
            upload, report = train(keys[1], common, cohort, data)

            def by_client(part, mesh=None):
                whole = jnp.zeros((clients, *part.shape[1:]), part.dtype)
                return put_models(whole, cohort.ids, part, mesh)

            known, samples = by_client(upload.weight > 0), by_client(upload.weight)
            stored = ClientModels((), known, weight=samples if by_samples else ())
            delta = jax.tree.map(partial(by_client, mesh=local.execution.mesh), upload.delta)
            compared = jax.tree.map(by_client, flatten_updates(upload.delta, local.execution.mesh))
            points = embed_deltas(keys[3], compared, known, local.execution.mesh)

            def cluster(key, points, counts):
                return kmeans(key, points, m, restarts, weight=counts).labels

            labels = on_every_device(cluster, local.execution.mesh)(
                keys[2], points, stored_weights(stored)
            )
            centers, _ = group_mean(stored_weights(stored), labels, delta, m)
            real = cohort.ids < clients
            sent = make_bill(units_down=real, units_up=real)
            return Start(
                groups=jax.tree.map(jnp.add, common, centers),
                assignment=labels,
                rows={MODELS: stored.replace(models=jax.tree.map(jnp.add, common, delta))},
                report=report.replace(bill=add_bills(report.bill, sent)),
            )

        return start

    return make


def embed_deltas(key: Key, delta: Params, known: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """Returns points [K, D], D = min(K, MAX_EMBEDDING_DIMENSIONS), with the distances of
    `delta` [K, ...]. K-means needs no more, however large the models are.

    With G = Q diag(l) Q' the inner products of the centered updates, the rows of Q sqrt(l)
    have the same inner products. Where only the top D directions are kept, the cost of
    K-means changes by a factor of 1 + m / D at most (Cohen et al. 2015,
    https://arxiv.org/abs/1410.6801). Random projections find them in a fraction of the time
    that all K would take. Clients not `known` [K] bool are 0.
    """
    weight = known / jnp.maximum(jnp.sum(known), 1)

    def centered(leaf):
        return jax.vmap(jnp.where, (0, 0, None))(
            known, leaf - jnp.tensordot(weight, leaf, axes=1), 0.0
        )

    def embed(key, products):
        if known.size <= MAX_EMBEDDING_DIMENSIONS:
            values, vectors = eigh(products)
        else:
            values, vectors = top_eigenpairs(
                key, lambda basis: dot(products, basis), known.size, MAX_EMBEDDING_DIMENSIONS
            )
        return (jnp.sqrt(jnp.maximum(values, 0.0)) * vectors)[:, ::-1]

    return on_every_device(embed, mesh)(key, gram(jax.tree.map(centered, delta)))
