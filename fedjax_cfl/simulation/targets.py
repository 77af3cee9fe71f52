"""What models measure whose y are no classes, from one prediction per test sample.

Of numbers: root mean square error (RMSE), mean absolute error (MAE) and R2, the share of the
targets' variance that is explained, 1 - mean square error / variance. Of labels: F1 of all labels
together (micro-F1), the mean F1 of the labels (macro-F1), and the share of samples all of whose
labels are right. As in `metrics`, a few scatter-adds serve all clients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.simulation.metrics import (
    average,
    count_f1,
    count_macro_f1,
    means_by_group,
    sum_by_client,
    sums_by_group,
)


class Measure(NamedTuple):
    """One measure of every client."""

    values: Any  # [K]
    known: Any  # [K] bool, whether the client has one
    higher: bool = True  # the higher the better


class ErrorMetrics(struct.PyTreeNode):
    """What every client measures on its own test samples; NaN for a client without samples."""

    samples: jax.Array  # [K] int32, test samples
    rmse: jax.Array  # [K] float32, in the unit of the targets, as mae
    mae: jax.Array  # [K] float32
    r2: jax.Array  # [K] float32, at most 1; NaN also where all targets are equal
    loss: jax.Array  # [K] float32, mean
    target_mean: jax.Array  # [K] float32
    target_variance: jax.Array  # [K] float32, divided by n

    def list_measures(self) -> dict[str, Measure]:
        """Returns the measures by name."""
        known = self.samples > 0
        return {
            "rmse": Measure(self.rmse, known, higher=False),
            "mae": Measure(self.mae, known, higher=False),
            "r2": Measure(self.r2, known & (self.target_variance > 0)),
        }

    def by_group(self, groups: Any, count: int) -> dict[str, Any]:
        """Returns rmse, mae, r2 and loss [count] over all test samples of the clients of each group
        0, 1, ...; NaN for a group without samples. Clients of other groups do not count.
        """
        xp = self.samples.__array_namespace__()

        def mean(values: Any) -> Any:
            return means_by_group(values, self.samples, groups, count)

        # the variance of all is that within clients and that between them
        center = xp.where(groups >= 0, mean(self.target_mean)[groups], 0)
        variance = mean(self.target_variance + (self.target_mean - center) ** 2)
        square = mean(self.rmse**2)
        return {
            "rmse": xp.sqrt(square),
            "mae": mean(self.mae),
            "r2": explain_share(square, variance),
            "loss": mean(self.loss),
        }


class LabelMetrics(struct.PyTreeNode):
    """What every client measures on its own test samples; NaN for a client without samples, and F1
    also for one whose samples have no label and are predicted none.
    """

    samples: jax.Array  # [K] int32, test samples
    micro_f1: jax.Array  # [K] float32, F1 of all labels together
    label_f1: jax.Array  # [K] float32, mean F1 of the labels that occur or are predicted
    exact_match: jax.Array  # [K] float32, share of samples all of whose labels are right
    loss: jax.Array  # [K] float32, mean
    hits: jax.Array  # [K, T] int32, true positives of each label
    named: jax.Array  # [K, T] int32, how often it is there, and how often it is predicted, in all

    def list_measures(self) -> dict[str, Measure]:
        """Returns the measures by name."""
        named = self.named.sum(1) > 0
        return {
            "micro_f1": Measure(self.micro_f1, named),
            "label_f1": Measure(self.label_f1, named),
            "exact_match": Measure(self.exact_match, self.samples > 0),
        }

    def by_group(self, groups: Any, count: int) -> dict[str, Any]:
        """Returns micro_f1, label_f1, exact_match and loss [count] over all test samples of the
        clients of each group, as `ErrorMetrics` does.
        """
        hits, named = (sums_by_group(part, groups, count) for part in (self.hits, self.named))
        match, loss = (
            means_by_group(values, self.samples, groups, count)
            for values in (self.exact_match, self.loss)
        )
        return count_label_f1(hits, named) | {"exact_match": match, "loss": loss}


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


def client_labels(
    guess: jax.Array, loss: jax.Array, y: jax.Array, owner: jax.Array, num_clients: int
) -> LabelMetrics:
    """Returns what every client measures from N test samples.

    Args: `guess` and `y` [N, T] are the labels, 0 or 1, that are predicted and those that are
    true; the others are as those of `client_errors`.
    """
    owner, right = jnp.where(owner < 0, num_clients, owner), guess.astype(bool) == (y > 0)
    none = jnp.zeros((num_clients, y.shape[1]), jnp.int32)
    found, there = guess.astype(jnp.int32), y.astype(jnp.int32)
    hits = none.at[owner].add(found * there, mode="drop")
    named = none.at[owner].add(found + there, mode="drop")
    samples = jnp.zeros(num_clients, jnp.int32).at[owner].add(1, mode="drop")

    def mean(values: jax.Array) -> jax.Array:
        sums = sum_by_client(values, owner, num_clients)
        return jnp.where(samples > 0, sums / jnp.maximum(samples, 1), jnp.nan)

    f1 = count_label_f1(hits, named)
    return LabelMetrics(
        samples=samples,
        micro_f1=f1["micro_f1"],
        label_f1=f1["label_f1"],
        exact_match=mean(right.all(1)),
        loss=mean(loss),
        hits=hits,
        named=named,
    )


def count_label_f1(hits: Any, named: Any) -> dict[str, Any]:
    """Returns micro_f1 and label_f1 [..] of counts [.., T] as in `LabelMetrics`."""
    xp, all_named = hits.__array_namespace__(), named.sum(-1)
    micro = xp.where(all_named > 0, count_f1(hits.sum(-1), all_named), xp.nan)
    return {"micro_f1": micro, "label_f1": count_macro_f1(hits, named)}


def summarize_targets(clients: ErrorMetrics | LabelMetrics) -> dict[str, Any]:
    """Returns one number [] per measure over the clients that have test samples; NaN if there are
    none.

    The measures and loss are over all test samples; those that begin with macro_ plain means
    over clients, with worst10_ over the worst tenth of the clients by that measure, at least one,
    both of the clients that have one.
    """
    xp = clients.samples.__array_namespace__()
    everybody = xp.where(clients.samples > 0, 0, -1)
    row = {name: values[0] for name, values in clients.by_group(everybody, 1).items()}
    for name, (values, known, higher) in clients.list_measures().items():
        sign = -1 if higher else 1
        order = xp.argsort(xp.where(known, -xp.nan_to_num(sign * values, nan=xp.inf), xp.inf))
        worst = xp.arange(known.size) < (known.sum() // 10).clip(1)
        row[f"macro_{name}"] = average(values, known)
        row[f"worst10_{name}"] = average(values[order], worst & known[order])
    return row
