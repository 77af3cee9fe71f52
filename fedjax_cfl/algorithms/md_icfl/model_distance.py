"""The federated model distance of MD-ICFL (section 3.2; see `algorithms/md_icfl`).

Two models are far apart, as seen by a client, where they answer differently on samples
that look like those of a group and are labelled like those of the client. S clients, m
groups, C classes, M pseudo-samples of a class (see `synthesis`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.client.cohort import CohortFn, over_clients
from fedjax_cfl.client.local import Local
from fedjax_cfl.types import FederatedData, Params, Task


def class_distances(task: Task, local: Local) -> CohortFn:
    """Returns a function of a cohort: the class-wise distances [S, m, C], from 0 to 2, of the
    clients' models to the group models (eq. 5).

    It is (cohort, data, (models [m, ...], samples [m, C, M, ...]), (start_group [S], delta
    [S, ...])). Differs from the paper: M distances are averaged and not added up.
    """

    def client_distance(client: jax.Array, data: FederatedData, shared: Any, own: Any) -> jax.Array:
        (models, samples, answers), (start, delta) = shared, own
        model = jax.tree.map(lambda group, change: group[start] + change, models, delta)

        def to_group(inputs):
            x, expected = inputs
            return jnp.mean(jnp.sum(jnp.abs(answer(task, model, x) - expected), -1), -1)

        return lax.map(to_group, (samples, answers))

    measure = over_clients(client_distance, local.execution)

    def run(cohort, data, shared, client_inputs=()):
        models, samples = shared
        answers = lax.map(lambda one: answer(task, *one), (models, samples))
        return measure(cohort, data, (models, samples, answers), client_inputs)

    return run


def answer(task: Task, model: Params, samples: jax.Array) -> jax.Array:
    """Returns the probabilities [C, M, C] that a model gives samples [C, M, ...], each alone."""
    flat = samples.reshape(-1, *samples.shape[2:])
    return jax.nn.softmax(predict_alone(task, model, flat)).reshape(*samples.shape[:2], -1)


def predict_alone(task: Task, model: Params, samples: jax.Array) -> jax.Array:
    """Returns the logits [B, C] of samples [B, ...] that share no batch statistics."""
    return task.predict(model, samples, jnp.arange(len(samples)))


def nearest_group(label_share: jax.Array, distance: jax.Array, present: jax.Array) -> jax.Array:
    """Returns the group [S] int32 of least federated model distance (eqs. 3 and 4); the
    lowest of several. A client whose distances are not finite stays in its `present` [S].

    `label_share` [S, C] are the shares of the classes among each client's samples;
    `distance` [S, m, C].
    """
    total = jnp.einsum("sc,smc->sm", label_share, distance)
    finite = jnp.isfinite(total)
    nearest = jnp.argmin(jnp.where(finite, total, jnp.inf), axis=1)
    return jnp.where(finite.any(1), nearest, present).astype(jnp.int32)
