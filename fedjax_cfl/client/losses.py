"""Losses of models on a client's samples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import SAMPLE_BLOCK, client_range
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local
from fedjax_cfl.data.federated import gather
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import FederatedData, Personal, Task


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cross-entropy [B] of logits [B, C] and labels y [B]."""
    return (
        jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]
    )


def refuse_own_judge(local: Local, name: str) -> None:
    """Raises InputError where clients would judge models with parts of their own: `name` tests the
    models of groups as they are.
    """
    if local.personal is not None and local.personal.judge is not None:
        raise InputError(
            f"personal.judge=own: {name} tests the models of groups as they are; use template"
        )


def training_loss(
    task: Task, with_l2: bool = False, personal: Personal | None = None
) -> Callable[..., Loop]:
    """Returns a function of one client: the mean loss [m] of each model over the client's
    whole training set.

    It is (client, data, models [m, ...], row) -> a Loop with the result [m], for `over_clients`.
    The loss is cross-entropy without dropout; `with_l2` adds the model's L2 penalty, as the FlexCFL
    code does (D10). `personal` may say that a client judges models with its own part, `row`.
    """

    def sample_loss(model, x, y, owner):
        if with_l2:
            return task.loss(model, x, y, None, owner)
        return cross_entropy(task.predict(model, x, owner), y)

    def client_loss(client, data: FederatedData, models, client_inputs):
        count, start = client_range(client, data)
        if personal is not None and personal.judge is not None:
            models = jax.vmap(personal.judge, (None, 0))(client_inputs, models)

        def block(b, total):
            place = b * SAMPLE_BLOCK + jnp.arange(SAMPLE_BLOCK)
            rows = data.train.order[start + jnp.minimum(place, count - 1)]
            x, y = gather(data, rows)
            owner = jnp.where(place < count, client, -1)
            each = jax.vmap(sample_loss, in_axes=(0, None, None, None))(models, x, y, owner)
            return total + jnp.sum(jnp.where(place < count, each, 0.0), axis=1)

        num_models = jax.tree.leaves(models)[0].shape[0]
        return Loop(
            -(-count // SAMPLE_BLOCK),
            jnp.zeros(num_models),
            block,
            lambda total: total / jnp.maximum(count, 1),
        )

    return client_loss
