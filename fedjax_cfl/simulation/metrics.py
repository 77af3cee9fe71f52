"""How well the groups that were found are the true ones: the adjusted Rand index."""

from typing import Any

import jax
import numpy as np


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
