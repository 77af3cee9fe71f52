"""Errors of models that regress numbers, from one prediction per test sample: root mean square
error (RMSE), mean absolute error (MAE) and R2, the share of the targets' variance that is
explained, 1 - mean square error / variance. As in `metrics`, a few scatter-adds serve all clients.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.scores import ERRORS
from fedjax_cfl.simulation.metrics import average, means_by_group, sum_by_client


class ErrorMetrics(struct.PyTreeNode):
    """What every client measures on its own test samples; NaN for a client without samples."""

    samples: jax.Array  # [K] int32, test samples
    rmse: jax.Array  # [K] float32, in the unit of the targets, as mae
    mae: jax.Array  # [K] float32
    r2: jax.Array  # [K] float32, at most 1; NaN also where all targets are equal
    loss: jax.Array  # [K] float32, mean
    target_mean: jax.Array  # [K] float32
    target_variance: jax.Array  # [K] float32, divided by n


def client_errors(
    guess: jax.Array, loss: jax.Array, y: jax.Array, owner: jax.Array, num_clients: int
) -> ErrorMetrics:
    """Returns the errors of every client from N test samples.

    Args: `guess` [N] is predicted; `loss` [N] that of the task; `y` [N] are the targets; `owner`
    [N] int32 is the client, and a sample of -1 counts nowhere; `num_clients` is K.
    """
    owner = jnp.where(owner < 0, num_clients, owner)  # out of range is dropped
    samples = jnp.zeros(num_clients, jnp.int32).at[owner].add(1, mode="drop")

    def mean(values: jax.Array) -> jax.Array:
        sums = sum_by_client(values, owner, num_clients)
        return jnp.where(samples > 0, sums / jnp.maximum(samples, 1), jnp.nan)

    center, square = mean(y), mean((guess - y) ** 2)
    # about each client's own mean: sums of squares of large targets would lose the variance
    variance = mean((y - center.at[owner].get(mode="fill", fill_value=0)) ** 2)
    r2 = explain_share(square, variance)
    errors = jnp.sqrt(square), mean(jnp.abs(guess - y)), r2, mean(loss)
    return ErrorMetrics(samples, *errors, center, variance)


def explain_share(square: Any, variance: Any) -> Any:
    """Returns R2 of a mean square error and the variance of the targets; NaN where that is 0."""
    xp = square.__array_namespace__()
    return xp.where(variance > 0, 1 - square / xp.where(variance > 0, variance, 1), xp.nan)


def errors_by_group(clients: ErrorMetrics, groups: Any, count: int) -> dict[str, Any]:
    """Returns rmse, mae, r2 and loss [count] over all test samples of the clients of each group
    0, 1, ...; NaN for a group without samples. Clients of other groups do not count.
    """
    xp = clients.samples.__array_namespace__()

    def mean(values: Any) -> Any:
        return means_by_group(values, clients.samples, groups, count)

    # the variance of all is that within clients and that between them
    center = xp.where(groups >= 0, mean(clients.target_mean)[groups], 0)
    variance = mean(clients.target_variance + (clients.target_mean - center) ** 2)
    square = mean(clients.rmse**2)
    return {
        "rmse": xp.sqrt(square),
        "mae": mean(clients.mae),
        "r2": explain_share(square, variance),
        "loss": mean(clients.loss),
    }


def summarize_errors(clients: ErrorMetrics) -> dict[str, Any]:
    """Returns one number [] per measure over the clients that have test samples; NaN if there are
    none.

    rmse, mae, r2 and loss are over all test samples; those that begin with macro_ plain means
    over clients, with worst10_ over the worst tenth of the clients by that measure, at least one.
    Means of R2 leave out clients without one.
    """
    xp = clients.samples.__array_namespace__()
    everybody = xp.where(clients.samples > 0, 0, -1)
    row = {name: values[0] for name, values in errors_by_group(clients, everybody, 1).items()}
    for name in ERRORS:
        values, known, sign = getattr(clients, name), clients.samples > 0, 1
        if name == "r2":  # of which the worst are the lowest
            values, known, sign = -values, known & (clients.target_variance > 0), -1
        order = xp.argsort(xp.where(known, -xp.nan_to_num(values, nan=xp.inf), xp.inf))
        worst = xp.arange(known.size) < (known.sum() // 10).clip(1)
        macro, tenth = average(values, known), average(values[order], worst & known[order])
        row |= {f"macro_{name}": sign * macro, f"worst10_{name}": sign * tenth}
    return row
