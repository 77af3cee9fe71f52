"""Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021,
https://arxiv.org/abs/2103.16257 (MOON).

While a client trains, what its model makes of a sample is pulled to what its group's received model
makes of it, and away from what its own model made of it when the client last trained.

Differs from the paper: models are compared by what their last layer receives, without a projection
that the paper puts before it (a model may have one); only the last of a client's models is
remembered; until a client has trained, it has no such term (the code: its own random model).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local, Training
from fedjax_cfl.client.objective import Objective, find_objective
from fedjax_cfl.client.sgd import add_change
from fedjax_cfl.client.steps import StepChange
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method
from fedjax_cfl.models.task import watch_inputs
from fedjax_cfl.personal.layer import list_layers
from fedjax_cfl.tree import STATISTICS
from fedjax_cfl.types import Params, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveFloat, checked

LEAST_SQUARE = 1e-12  # of features, below which they have no direction


class Previous(struct.PyTreeNode):
    """What ONE client keeps."""

    model: Params  # as it last trained it
    known: jax.Array  # [] bool, False: it never has


@checked("personal")
def moon(
    *, mu: NonNegativeFloat = 1.0, temperature: PositiveFloat = 0.5, layer: str = "head"
) -> Method:
    """MOON (Algorithm 1): the loss of a sample gets mu log(1 + exp((s' - s) / temperature)), with
    the cosines s and s' of its features in the trained model with those in the received one and in
    the client's previous one.

    `mu` >= 0 is the weight of that term, 0: the method below; `temperature` > 0 is the paper's tau;
    the features are what the module `layer`, by its name in the model's parameters, receives.
    Reported losses contain the term. Raises InputError for a value that is not allowed, and, when
    the method is built, for a model without such a layer, or without any other.
    """

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        check_layer(task, layer)

        def contrast(objective: Objective, received: Params, row: Previous) -> Objective:
            return add_contrast(task, layer, objective, (received, row), (mu, temperature))

        change = StepChange("MOON", objective=contrast, keep=keep_model)
        # the previous and the received model predict each mini-batch
        changed = add_change(solve, change.replace(predictions=lambda row: 2 * row.known))
        if not isinstance(find_objective(changed), Objective):
            raise InputError(
                "personal=moon: adds to the loss of samples, but clients of this method minimise"
                " something else; use personal=none, or another algorithm"
            )
        return changed

    def init(model: Params) -> Previous:
        return Previous(model, jnp.zeros((), bool))

    return Method(name="MOON", rows=init, train=train)


def keep_model(training: Training, row: Previous, delta: Params) -> Previous:
    """Returns the model that a client has trained."""
    model = jax.tree.map(jnp.add, training.start, delta)
    return Previous(model, jnp.ones((), bool))


def check_layer(task: Task, layer: str) -> None:
    """Raises InputError for a model without `layer`, or without a layer before it."""
    if {*list_layers(task, [layer], "personal.layer")} <= {layer, STATISTICS}:
        raise InputError(
            f"personal=moon: {layer} is the model's only layer and receives samples as they are;"
            " use a model with a layer before it, as mlp"
        )


def add_contrast(
    task: Task,
    layer: str,
    objective: Objective,
    models: tuple[Params, Previous],
    weights: tuple[Any, Any],
) -> Objective:
    """Returns the objective of one client with the contrast of `moon`.

    Args: `models` are the one that it received and its previous one; `weights` are `mu` and
    `temperature`; these and `layer` are as in `moon`.
    """
    (received, previous), (mu, temperature), plain = models, weights, objective.loss

    def is_layer(module: nn.Module) -> bool:
        return module.path == (layer,)

    def loss(params, x, y, key, owner):
        def watch(model: Params) -> jax.Array:
            with watch_inputs(is_layer) as seen:
                task.predict(model, x, owner)
            return seen[-1]

        with watch_inputs(is_layer) as seen:
            each = plain(params, x, y, key, owner)
        if not seen:
            raise InputError(
                f"personal.layer={layer}: no module of the model that is called has this"
            )
        gap = cosine(seen[-1], watch(previous.model)) - cosine(seen[-1], watch(received))
        return each + mu * jnp.where(previous.known, jax.nn.softplus(gap / temperature), 0.0)

    return objective.replace(loss=loss)


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the cosines [B] of rows of `a` and `b` [B, r]; about 0 where one is nearly 0."""

    def shrink(rows):
        square = jnp.sum(rows**2, axis=1)
        return lax.rsqrt(jnp.where(square > LEAST_SQUARE, square, 1.0))

    return jnp.sum(a * b, axis=1) * shrink(a) * shrink(b)
