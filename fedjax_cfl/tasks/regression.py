"""Regression: y [N] float32 are numbers, models return one, the loss is the squared error, Huber's,
or the user's own, and the score the root mean square error (RMSE).

Beside it the mean absolute error (MAE) and R2 are measured, the share of the variance of y that is
explained, 1 - mean square error / variance.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.scores import RMSE
from fedjax_cfl.tasks import sums
from fedjax_cfl.tasks.targets import Measure, Predictions, Targets
from fedjax_cfl.validation import PositiveFloat, checked

ErrorFn = Callable[[jax.Array], jax.Array]  # (outputs - y [B]) -> [B]


class ErrorMetrics(struct.PyTreeNode):
    """What every client measures on its own test samples; NaN for a client without samples."""

    samples: jax.Array  # [K] int32, test samples
    rmse: jax.Array  # [K] float32, in the unit of y, as mae
    mae: jax.Array  # [K] float32
    r2: jax.Array  # [K] float32, at most 1; NaN also where all y are equal
    loss: jax.Array  # [K] float32, mean
    target_mean: jax.Array  # [K] float32
    target_variance: jax.Array  # [K] float32, divided by n


def explain_share(square: Any, variance: Any) -> Any:
    """Returns R2 of a mean square error and the variance of y; NaN where that is 0."""
    xp = square.__array_namespace__()
    return xp.where(variance > 0, 1 - square / xp.where(variance > 0, variance, 1), xp.nan)


def measure(p: Predictions, num_clients: int, num_classes: int) -> tuple[ErrorMetrics, jax.Array]:
    """Returns what every client measures, and counts of no classes [2, 0]."""
    owner, samples = sums.drop_unowned(p.owner, num_clients)
    mean, error = partial(sums.mean_by_client, owner=owner, samples=samples), p.guess - p.y
    center, square = mean(p.y), mean(error**2)
    # about each client's own mean: sums of squares of large y would lose the variance
    variance = mean((p.y - center.at[owner].get(mode="fill", fill_value=0)) ** 2)
    r2 = explain_share(square, variance)
    errors = jnp.sqrt(square), mean(jnp.abs(error)), r2, mean(p.loss)
    return ErrorMetrics(samples, *errors, center, variance), jnp.zeros((2, num_classes), jnp.int32)


def list_measures(table: ErrorMetrics) -> dict[str, Measure]:
    """Returns RMSE, MAE and R2 of clients."""
    known = table.samples > 0
    return {
        "rmse": Measure(table.rmse, known, higher=False),
        "mae": Measure(table.mae, known, higher=False),
        "r2": Measure(table.r2, known & (table.target_variance > 0)),
    }


def by_group(table: ErrorMetrics, groups: Any, count: int) -> dict[str, Any]:
    """Returns RMSE, MAE, R2 and loss of each group."""
    xp = table.samples.__array_namespace__()

    def mean(values: Any) -> Any:
        return sums.means_by_group(values, table.samples, groups, count)

    # the variance of all is that within clients and that between them
    center = xp.where(groups >= 0, mean(table.target_mean)[groups], 0)
    variance = mean(table.target_variance + (table.target_mean - center) ** 2)
    square = mean(table.rmse**2)
    r2 = explain_share(square, variance)
    return {"rmse": xp.sqrt(square), "mae": mean(table.mae), "r2": r2, "loss": mean(table.loss)}


def add_up(guess: Any, y: Any, held: Any) -> tuple[Any, Any]:
    """Returns the sum of the squared errors of the samples held, and their number."""
    return guess.__array_namespace__().where(held, (guess - y) ** 2, 0.0).sum(), held.sum()


def rate(total: Any, number: Any) -> Any:
    """Returns the RMSE of the sum of squared errors of a number of samples; NaN of none."""
    return number.__array_namespace__().sqrt(sums.divide(total, number))


@checked("task")
def regression(
    loss: Literal["squared", "huber"] | ErrorFn = "squared", delta: PositiveFloat = 1.0
) -> Targets:
    """Returns the task of numbers, whose loss is a function of e, outputs minus y [B]: e^2, or
    Huber's (1964), e^2 / 2 up to |e| = `delta` and delta (|e| - delta / 2) beyond, which few large
    errors move less; or a function of your own.
    """

    def huber(e: jax.Array) -> jax.Array:
        inside = jnp.minimum(jnp.abs(e), delta)
        return inside * (jnp.abs(e) - inside / 2)

    if callable(loss):
        chosen, settings = loss, (("_target_", "unknown"),)
    else:
        chosen = jnp.square if loss == "squared" else huber
        target = "_target_", "fedjax_cfl.models.regression"
        settings = target, ("loss", loss), ("delta", delta)

    def loss_of_error(outputs: jax.Array, y: jax.Array) -> jax.Array:
        return chosen(outputs[:, 0] - y)

    return Targets(
        "regression",
        RMSE,
        loss=loss_of_error,
        loss_value=loss_of_error,
        guess=lambda outputs: outputs[:, 0],
        chances=lambda outputs: None,
        measure=measure,
        by_group=by_group,
        summarize=partial(sums.summarize, by_group, list_measures),
        sums=add_up,
        rate=rate,
        needs="one number of each sample",
        describe=lambda data: "numbers to regress",
        outputs=1,
        settings=settings,
    )


REGRESSION = regression()
