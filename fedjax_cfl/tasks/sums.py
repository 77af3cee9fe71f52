"""Sums and means of what tasks measure: over the test samples of a client, over the clients of a
group, over all. No loop over clients: a few scatter-adds serve them all.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.tasks.targets import Measure

MAX_SUMMED = 2**22  # samples whose values are added up in one float32


def average(value: Any, weight: Any, axis: int | None = None) -> Any:
    """Returns the weighted mean of values; those of weight 0 count nowhere, NaN included, and
    without any weight the mean is NaN.
    """
    xp, weight = value.__array_namespace__(), weight.astype("float32")
    return divide((xp.where(weight > 0, value, 0) * weight).sum(axis), weight.sum(axis))


def divide(total: Any, number: Any) -> Any:
    """Returns a sum divided by a number; NaN where that is 0."""
    xp = number.__array_namespace__()
    return xp.where(number > 0, total / xp.where(number > 0, number, 1), xp.nan)


def count_f1(hits: Any, named: Any) -> Any:
    """Returns F1 = 2 tp / (2 tp + fp + fn), 0 where a class neither occurs nor is predicted."""
    return 2 * hits / named.clip(1)


def count_macro_f1(hits: Any, named: Any) -> Any:
    """Returns the mean F1 over the classes (last axis) that occur or are predicted."""
    return average(count_f1(hits, named), named > 0, axis=-1)


def drop_unowned(owner: jax.Array, num_clients: int) -> tuple[jax.Array, jax.Array]:
    """Returns the owner [N] of each sample, K for -1, and how many samples [K] int32 each has."""
    # beyond the last is dropped, -1 would wrap around
    owner = jnp.where(owner < 0, num_clients, owner)
    return owner, jnp.zeros(num_clients, jnp.int32).at[owner].add(1, mode="drop")


def mean_by_client(values: jax.Array, owner: jax.Array, samples: jax.Array) -> jax.Array:
    """Returns the mean [K] float32 of the values [N] of each client, NaN without samples; `owner`
    and `samples` are as `drop_unowned` returns them.
    """
    # float32 adds up MAX_SUMMED values, not many more: a large set in several parts
    parts = -(-owner.size // MAX_SUMMED)
    total = jnp.zeros((parts, samples.size), jnp.float32)
    part = jnp.arange(owner.size) // MAX_SUMMED
    total = total.at[part, owner].add(values.astype(jnp.float32), mode="drop").sum(0)
    return divide(total, samples)


def means_by_group(values: Any, weights: Any, groups: Any, count: int) -> Any:
    """Returns the weighted mean [count] of the `values` [K] of the clients of each group 0, 1, ...;
    NaN for a group without weight. Clients of other groups do not count.
    """
    xp, inside = values.__array_namespace__(), (groups >= 0) & (weights > 0)
    number, length = xp.where(inside, groups, count), count + 1
    sums, mass = (
        bincount(number, length, part)[:count]
        for part in (xp.where(inside, values, 0) * weights, xp.where(inside, weights, 0))
    )
    return divide(sums, mass)


def sums_by_group(counts: Any, groups: Any, count: int) -> Any:
    """Returns the sums [count, T] of the `counts` [K, T] of the clients of each group 0, 1, ...;
    clients of other groups do not count.
    """
    xp, (_, width) = counts.__array_namespace__(), counts.shape
    number = xp.where(groups >= 0, groups, count)[:, None] * width + xp.arange(width)
    sums = bincount(number.reshape(-1), (count + 1) * width, counts.reshape(-1))
    return sums[: count * width].reshape(count, width)


def bincount(labels: Any, length: int, weights: Any = None) -> Any:
    """Returns how often each of 0 .. length - 1 is among `labels`, or the sum of the `weights`
    there; nothing else may be.
    """
    xp = labels.__array_namespace__()
    return xp.bincount(labels, weights, **{"minlength" if xp is np else "length": length})


def over_clients(measures: dict[str, Measure]) -> dict[str, Any]:
    """Returns for each measure its plain mean over the clients that have one, macro_, and that over
    the worst tenth of them by that measure, at least one, worst10_.
    """
    row = {}
    for name, (values, known, higher) in measures.items():
        xp, sign = values.__array_namespace__(), -1 if higher else 1
        order = xp.argsort(xp.where(known, -xp.nan_to_num(sign * values, nan=xp.inf), xp.inf))
        worst = xp.arange(known.size) < (known.sum() // 10).clip(1)
        row[f"macro_{name}"] = average(values, known)
        row[f"worst10_{name}"] = average(values[order], worst & known[order])
    return row


def summarize(by_group: Any, measures: Any, table: Any, counts: Any) -> dict[str, Any]:
    """Returns the measures and loss [] over all test samples, as `by_group` of a task adds them up,
    and those over clients of its function `measures`, see `Targets.summarize`.
    """
    one_group = table.samples.__array_namespace__().where(table.samples > 0, 0, -1)
    row = {name: values[0] for name, values in by_group(table, one_group, 1).items()}
    return row | over_clients(measures(table))
