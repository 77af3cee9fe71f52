"""Metrics of the served models, from one prediction per test sample. No loop over
clients: a few scatter-adds serve them all.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

MAX_SUMMED = 2**22  # samples whose losses are added up in one float32


class ClientMetrics(struct.PyTreeNode):
    """What every client measures on its own test samples; NaN for a client without samples."""

    samples: jax.Array  # [K] int32, test samples
    accuracy: jax.Array  # [K] float32, fraction
    loss: jax.Array  # [K] float32, mean
    f1: jax.Array  # [K] float32, mean F1 over the classes among the client's labels or predictions

    def by_group(self, groups: Any, count: int) -> dict[str, Any]:
        """Returns accuracy and mean loss [count] over all test samples of the clients of each
        group; accuracy is NaN where the loss is not finite, both where a group has no sample.
        """
        xp = self.samples.__array_namespace__()
        right, loss = (
            means_by_group(values, self.samples, groups, count)
            for values in (self.accuracy, self.loss)
        )
        return {"accuracy": xp.where(xp.isfinite(loss), right, xp.nan), "loss": loss}


def average(value: Any, weight: Any, axis: int | None = None) -> Any:
    """Returns the weighted mean of values; those of weight 0 count nowhere, NaN included, and
    without any weight the mean is NaN.
    """
    xp, weight = value.__array_namespace__(), weight.astype("float32")
    total = weight.sum(axis)
    return xp.where(
        total > 0,
        (xp.where(weight > 0, value, 0) * weight).sum(axis) / xp.where(total > 0, total, 1),
        xp.nan,
    )


def count_f1(hits: Any, named: Any) -> Any:
    """Returns F1 = 2 tp / (2 tp + fp + fn), 0 where a class neither occurs nor is predicted."""
    return 2 * hits / named.clip(1)


def count_macro_f1(hits: Any, named: Any) -> Any:
    """Returns the mean F1 over the classes (last axis) that occur or are predicted."""
    return average(count_f1(hits, named), named > 0, axis=-1)


def client_metrics(
    correct: jax.Array,
    loss: jax.Array,
    y: jax.Array,
    prediction: jax.Array,
    owner: jax.Array,
    num_clients: int,
    num_classes: int,
) -> tuple[ClientMetrics, jax.Array]:
    """Returns the metrics of every client from N test samples, and two counts [2, C] over all
    clients.

    The counts are a class's true positives tp, and how often it is a label or a prediction, 2
    tp + fp + fn.

    Args: `correct` [N] bool; `loss` [N] is the cross-entropy; `y` and `prediction` [N] int32
    are the label and the predicted class; `owner` [N] int32 is the client, and a sample of -1
    counts nowhere; `num_clients` is K and `num_classes` is C.
    """
    # out of range is dropped, negative would wrap around
    owner = jnp.where(owner < 0, num_clients, owner)
    none = jnp.zeros((num_clients, num_classes), jnp.int32)
    hits = none.at[owner, y].add((y == prediction).astype(jnp.int32), mode="drop")
    named = none.at[owner, y].add(1, mode="drop").at[owner, prediction].add(1, mode="drop")
    samples = jnp.zeros(num_clients, jnp.int32).at[owner].add(1, mode="drop")

    right = jnp.zeros(num_clients, jnp.int32).at[owner].add(correct.astype(jnp.int32), mode="drop")
    total = sum_by_client(loss, owner, num_clients)

    def mean(sums):
        return jnp.where(samples > 0, sums / jnp.maximum(samples, 1), jnp.nan)

    table = ClientMetrics(
        samples=samples, accuracy=mean(right), loss=mean(total), f1=count_macro_f1(hits, named)
    )
    return table, jnp.stack([hits.sum(0), named.sum(0)])


def sum_by_client(values: jax.Array, owner: jax.Array, num_clients: int) -> jax.Array:
    """Returns the sum [K] float32 of the values [N] of each client; `owner` [N] is in 0 .. K, and
    samples of K count nowhere.
    """
    # float32 adds up MAX_SUMMED values, not many more: a large set in several parts
    parts = -(-owner.size // MAX_SUMMED)
    total = jnp.zeros((parts, num_clients), jnp.float32)
    part = jnp.arange(owner.size) // MAX_SUMMED
    return total.at[part, owner].add(values.astype(jnp.float32), mode="drop").sum(0)


def summarize_clients(metrics: ClientMetrics, counts: Any) -> dict:
    """Returns one number [] per metric over the clients that have test samples, given
    `client_metrics`' counts [2, C]; NaN if there are none.

    accuracy, loss and weighted_macro_f1 weight clients by samples. macro_accuracy and
    macro_f1 are plain means over clients. Both F1 are of each client's macro-F1 over its
    classes (FeSEM's tables call them Micro-F1 and Macro-F1). worst10_accuracy is that
    of the worst tenth of the clients, at least one. pooled_micro_f1 and pooled_macro_f1
    are micro-F1 and macro-F1 of the samples of all clients together. Arrays may be JAX's or
    NumPy's, like `ari` and `bincount`: a run's few numbers are not worth a program.
    """
    samples = metrics.samples
    xp, evaluated = samples.__array_namespace__(), samples > 0
    worst = xp.arange(samples.size) < (evaluated.sum() // 10).clip(1)
    ascending = xp.sort(xp.where(evaluated, metrics.accuracy, xp.inf))
    return {
        "accuracy": average(metrics.accuracy, samples),
        "macro_accuracy": average(metrics.accuracy, evaluated),
        "worst10_accuracy": average(ascending, worst & (ascending < xp.inf)),
        "loss": average(metrics.loss, samples),
        "weighted_macro_f1": average(metrics.f1, samples),
        "macro_f1": average(metrics.f1, evaluated),
        "pooled_micro_f1": xp.where(evaluated.any(), count_f1(*counts.sum(1)), xp.nan),
        "pooled_macro_f1": count_macro_f1(*counts),
    }


def means_by_group(values: Any, weights: Any, groups: Any, count: int) -> Any:
    """Returns the weighted mean [count] of the `values` [K] of the clients of each group 0, 1, ...;
    NaN for a group without weight. Clients of other groups do not count.
    """
    xp, inside = values.__array_namespace__(), (groups >= 0) & (weights > 0)
    number, length = xp.where(inside, groups, count), count + 1
    sums, mass = (
        xp.bincount(number, part, **({"minlength" if xp is np else "length": length}))[:count]
        for part in (xp.where(inside, values, 0) * weights, xp.where(inside, weights, 0))
    )
    return xp.where(mass > 0, sums / xp.where(mass > 0, mass, 1), xp.nan)


def sums_by_group(counts: Any, groups: Any, count: int) -> Any:
    """Returns the sums [count, T] of the `counts` [K, T] of the clients of each group 0, 1, ...;
    clients of other groups do not count.
    """
    xp, (_, width) = counts.__array_namespace__(), counts.shape
    number = xp.where(groups >= 0, groups, count)[:, None] * width + xp.arange(width)
    length = {"minlength" if xp is np else "length": (count + 1) * width}
    sums = xp.bincount(number.reshape(-1), counts.reshape(-1), **length)
    return sums[: count * width].reshape(count, width)


def bincount(labels: Any, length: int) -> Any:
    """Returns how often each of 0 .. length - 1 is among `labels`; nothing else may be."""
    xp = labels.__array_namespace__()
    return xp.bincount(labels, minlength=length) if xp is np else xp.bincount(labels, length=length)


def _count_pairs(start, valid):
    """Returns the pairs within runs as two exact integers (high, low) of the value
    high * 2^21 + low, low < 2^21.

    `start` [K] bool marks where a run begins, `valid` [K] the places that count, each
    run's first. A run of n gives 0 + 1 + .. + (n - 1): the sum of the ranks in it,
    added up by digits of 7 bits, so that int32 holds it up to K = 2^24.
    """
    xp = start.__array_namespace__()
    place = xp.arange(start.size)
    cummax = np.maximum.accumulate if xp is np else jax.lax.cummax
    rank = xp.where(valid, place - cummax(xp.where(start, place, 0)), 0)
    digits = [((rank >> shift) & 127).sum() for shift in (0, 7, 14, 21)]
    for low in range(3):
        digits[low + 1] = digits[low + 1] + (digits[low] >> 7)
    return digits[3], sum((digits[low] & 127) << 7 * low for low in range(3))


def ari(a: Any, b: Any, valid: Any) -> Any:
    """Returns the adjusted Rand index [] of labels `a [K]` and `b [K]` over the clients
    `valid [K] bool`; K <= 2^24.

    It is 1 if both partitions are trivial and equal, and NaN without valid clients. Negative
    labels are not valid. Pairs are counted exactly, without a table of all pairs of labels.
    The index is 2 (tp tn - fp fn) / ((tp + fn) (fn + tn) + (tp + fp) (fp + tn)) (Hubert and
    Arabie 1985). Its denominator has no cancellation and is no smaller than either product
    of the numerator, so that the index is right to float32 rounding.
    """
    xp, valid = a.__array_namespace__(), valid & (a >= 0) & (b >= 0)
    a, b = (xp.where(valid, labels, np.iinfo(np.int32).max) for labels in (a, b))  # sorted last
    counted = xp.arange(a.size) < valid.sum()
    by_a, by_b = xp.lexsort((b, a)), xp.sort(b)

    def changes(labels):
        return xp.concatenate([xp.ones(1, bool), labels[1:] != labels[:-1]])

    new_a, new_both = changes(a[by_a]), changes(a[by_a]) | changes(b[by_a])
    runs = new_both, new_a, changes(by_b), xp.arange(a.size) == 0
    in_both, in_a, in_b, total = (xp.stack(_count_pairs(start, counted)) for start in runs)
    counts = in_both, in_a - in_both, in_b - in_both, total - in_a - in_b + in_both, total
    *counts, total = (high * 2.0**21 + low for high, low in counts)
    tp, fp, fn, tn = (n / total.clip(1) for n in counts)
    scale = (tp + fn) * (fn + tn) + (tp + fp) * (fp + tn)
    index = xp.where(scale > 0, 2 * (tp * tn - fp * fn) / xp.where(scale > 0, scale, 1), 1.0)
    return xp.where(valid.any(), index, xp.nan)
