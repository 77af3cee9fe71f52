"""What y are where they are no classes, and the losses of models that predict it."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.types import Targets
from fedjax_cfl.validation import PositiveFloat, check_arguments

ErrorFn = Callable[[jax.Array], jax.Array]  # (outputs - targets [B]) -> [B]


def regression(
    loss: Literal["squared", "huber"] | ErrorFn = "squared", delta: PositiveFloat = 1.0
) -> Targets:
    """Returns targets that are numbers, and their loss as a function of e, outputs minus targets
    [B]: e^2, or Huber's (1964), e^2 / 2 up to |e| = `delta` and delta (|e| - delta / 2) beyond,
    which few large errors move less; or a function of your own.
    """
    if callable(loss):
        return Targets(lambda outputs, y: loss(outputs[:, 0] - y))
    check_arguments(regression, locals(), "task")

    def squared(outputs: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.square(outputs[:, 0] - y)

    def huber(outputs: jax.Array, y: jax.Array) -> jax.Array:
        e = outputs[:, 0] - y
        inside = jnp.minimum(jnp.abs(e), delta)
        return inside * (jnp.abs(e) - inside / 2)

    settings = name_settings("regression", loss=loss, delta=delta)
    return Targets(squared if loss == "squared" else huber, settings)


def multilabel() -> Targets:
    """Returns targets that are T labels a sample, which it has (1) or not (0), and their loss: the
    mean over labels of the cross-entropy of the sigmoid of each output.
    """

    def loss(outputs: jax.Array, y: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(outputs, y).mean(axis=1)

    return Targets(loss, name_settings("multilabel"), labels=True)


def name_settings(name: str, **values: Any) -> tuple[tuple[str, Any], ...]:
    """Returns how the settings of a run name targets that this module makes."""
    return (("_target_", f"fedjax_cfl.models.{name}"), *values.items())
