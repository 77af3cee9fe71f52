"""Islam, Javaherian, Xu, Yuan, Chen, Tzeng, "FedClust: Tackling Data Heterogeneity in Federated
Learning through Weight-Driven Client Clustering", 2024, https://arxiv.org/abs/2403.04144, and
https://arxiv.org/abs/2407.07124.

Before round 0 all clients train the first model, and send its last layer alone. The server
clusters clients once, by the distances of these layers. Then each group trains by FedAvg, from the
first model. Clients that come later do the same, and join the group of least mean distance.

There is no code by its authors, and of the paper only this outline could be checked. Differs from
the paper, or is not known of it: linkage is average; where no threshold is given it is in the
largest gap between the distances of successive merges; at most m groups are left; the cohort is
drawn from all clients; a client whose first training is not finite counts as one that has not
moved.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import over_clients
from fedjax_cfl.client.local import Local, count_steps, full_work
from fedjax_cfl.client.sgd import ClientInputs, change_training, sgd
from fedjax_cfl.clustering.clustered import clustered
from fedjax_cfl.clustering.distances import euclidean
from fedjax_cfl.clustering.hierarchical import agglomerate_values, largest_gap
from fedjax_cfl.clustering.measure import Measure, Question
from fedjax_cfl.errors import InputError
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import flatten_tree
from fedjax_cfl.types import Algorithm, Task, Upload
from fedjax_cfl.validation import Epochs, NonNegativeFloat, PositiveInt, checked


@checked("algorithm")
def fedclust(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    threshold: NonNegativeFloat | jax.Array | None = None,
    epochs: Epochs | None = None,
    linkage: Literal["average", "complete", "single", "ward"] = "average",
    layers: Literal["last", "all"] = "last",
) -> Algorithm:
    """FedClust with at most m groups.

    Args: `threshold` is the Euclidean distance up to which groups are merged even if only m are
    left (None: in the largest gap); `epochs` are those of the first training, None: as in a round;
    `linkage` is that of the clustering; `layers` are what clients are compared by: the last one,
    named head | all.
    Each client gets a model and sends the words of the last layer, once; the server keeps them.
    Raises InputError for a model without a layer named head.
    """
    if layers == "last" and "head" not in jax.eval_shape(task.init, jax.random.key(0)):
        raise InputError("algorithm.layers=last: the model has no layer named head; use all")
    limit = partial(largest_gap, linkage) if threshold is None else threshold
    begin = local.replace(personal=None)
    if epochs is not None:
        begin = begin.replace(epochs=epochs, steps=None)
    return clustered(
        task,
        local,
        system,
        m=m,
        measure=lambda task, local: measure_moves(task, begin, layers),
        found=agglomerate_values(euclidean, m, linkage, limit),
    )


def measure_moves(task: Task, local: Local, layers: str) -> Measure:
    """Measures how far clients move the `layers` of the first model, of which distances are those
    of the layers that they send. `local` is how they train it.
    """

    def take_move(c: ClientInputs, model: None, upload: Upload) -> jax.Array:
        return flatten_tree(upload.delta if layers == "all" else upload.delta["head"])

    each = over_clients(change_training(sgd(task, local), take_move), local.execution)

    def ask(q: Question) -> jax.Array:
        return each(q.cohort, q.data, (q.key, q.models), full_work(jnp.zeros_like(q.cohort.ids)))

    def trained(size: jax.Array) -> jax.Array:
        return TRAIN_TO_INFERENCE * local.batch_size * count_steps(local, size)

    return Measure(ask, lambda groups: 1, trained, of_groups=False)
