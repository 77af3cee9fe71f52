"""Means over seeds with bootstrap intervals, and differences between methods seed by seed, with
an exact test that is corrected for the number of comparisons.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from fedjax_cfl.scores import SCORES, find_owner

RESAMPLES, LEVEL = 10_000, 0.95
ALPHA, MIN_SEEDS = 0.05, 6  # below six seeds the exact test cannot say less than 0.05
MAX_FLIPPED = 13  # values of which all signs are tried
MAX_PAIRED_SETS = 6  # on the same data; beyond it all are compared with the best one only
DIGITS = 14  # of scores; what floats add to their differences is beyond
TOLERANCE = 1e-12  # of sums, in units of the largest difference
# measures that pairs of sets are compared by
PAIRED = (*(f"{name}_{score.name}" for name in ("final", "worst10") for score in SCORES), "ari")


def bootstrap_mean(values: ArrayLike) -> tuple[float, float, float, int]:
    """Returns the mean of values [n], without nulls, low and high end of the percentile bootstrap
    interval of level LEVEL (Efron 1979), from resamples that a fixed seed draws, and how many
    values there are. The mean is NaN without values, the interval without two.

    Few values make it too narrow: three can only give ten different means.
    """
    kept = np.asarray(values, float)
    kept = kept[~np.isnan(kept)]
    mean = float(kept.mean()) if kept.size else math.nan
    if kept.size < 2:
        return mean, math.nan, math.nan, kept.size
    drawn = np.random.default_rng(0).integers(kept.size, size=(RESAMPLES, kept.size))
    low, high = np.quantile(kept[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return mean, float(low), float(high), kept.size


def subtract(one: ArrayLike, other: ArrayLike) -> np.ndarray:
    """Returns the differences of scores [n], rounded to `DIGITS` of the largest score: 0.3 - 0.2
    and 0.2 - 0.1 are the same, and 0.1 + 0.2 is no more than 0.3.
    """
    one, other = np.asarray(one, float), np.asarray(other, float)
    largest = np.nanmax(np.abs([one, other]), initial=0.0)
    unit = 10.0 ** (math.ceil(math.log10(largest)) - DIGITS) if largest else 1.0
    return np.round((one - other) / unit) * unit


def find_chance(differences: ArrayLike) -> float:
    """Returns the chance, two-sided, of a mean of differences [n] at least as far from 0 if each
    were as likely to have the other sign (Fisher's paired randomisation test); NaN without any.

    Of signed ranks it is Wilcoxon's signed-rank test. It is exact up to `MAX_FLIPPED` values: of n
    it cannot be below 2 / 2^n, so that three seeds never say more than 0.25. Beyond, it is from
    `RESAMPLES` draws of signs.
    """
    values = np.asarray(differences, float)
    if values.size < 2 or not values.any():
        return 1.0 if values.size else math.nan
    if exact := values.size <= MAX_FLIPPED:
        signs = np.array(list(itertools.product([1, -1], repeat=values.size)))
    else:
        signs = np.random.default_rng(0).choice([1, -1], size=(RESAMPLES, values.size))
    least = abs(values.sum()) - TOLERANCE * np.abs(values).max()
    as_far = int((np.abs(signs @ values) >= least).sum())
    # of draws the differences as they are count as one more (Phipson and Smyth 2010)
    return as_far / len(signs) if exact else (as_far + 1) / (len(signs) + 1)


def correct_holm(chances: ArrayLike) -> np.ndarray:
    """Returns chances [k] corrected for their number by Holm (1979); those that are NaN stay it and
    do not count.
    """
    chances = np.asarray(chances, float)
    order = np.argsort(chances)[: np.isfinite(chances).sum()]  # NaN is last
    steps = np.maximum.accumulate(np.arange(len(order), 0, -1) * chances[order])
    corrected = np.full(len(chances), np.nan)
    corrected[order] = np.minimum(steps, 1.0)
    return corrected


def count_seeds(comparisons: int) -> int:
    """Returns how many seeds it takes for so many comparisons to be below ALPHA after Holm's
    correction, if every seed agrees.
    """
    return max(MIN_SEEDS, math.floor(math.log2(2 * max(1, comparisons) / ALPHA)) + 1)


def list_pairs(runs: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Returns the pairs of sets of runs (see `sets`) on the same data, partition and model: all of
    them, the better first, or each with the best where there are many on the same data.
    """
    pairs = []
    for _, same in runs.groupby("data", sort=False):
        score, sets = same["score"].iloc[0], same.groupby("label", sort=False)
        means = sets[f"final_{score.name}"].mean()
        means = means.sort_values(ascending=not score.higher, kind="stable")  # NaN is last
        ranked = [sets.get_group(label) for label in means.index]
        few = len(ranked) <= MAX_PAIRED_SETS
        pairs += itertools.combinations(ranked, 2) if few else [(ranked[0], o) for o in ranked[1:]]
    return pairs


def list_gaps(one: pd.DataFrame, other: pd.DataFrame, measure: str) -> np.ndarray:
    """Returns by how much each run of a set has more of a measure than the run of another that has
    its seed and data [n], where both have it; of runs of a set with one seed the last found counts.
    """
    ours, theirs = (
        members[["pair", measure]].dropna().drop_duplicates("pair", keep="last")
        for members in (one, other)
    )
    both = ours.merge(theirs, on="pair")
    return subtract(both[f"{measure}_x"], both[f"{measure}_y"])


def list_differences(runs: pd.DataFrame, measures: Sequence[str] = PAIRED) -> pd.DataFrame:
    """Returns a row per pair of sets of runs (see `list_pairs`) and measure that they share seeds
    of: the mean difference with its sd and interval, in how many seeds the first set is better and
    worse, and the exact test's `p`, in `p_holm` corrected for all pairs of its measure.
    """
    rows = []
    for one, other in list_pairs(runs):
        for measure in measures:
            gaps, owner = list_gaps(one, other, measure), find_owner(measure)
            if not gaps.size:
                continue
            better = gaps if owner is None or owner.higher else -gaps
            mean, low, high, seeds = bootstrap_mean(gaps)
            sd = gaps.std(ddof=1) if seeds > 1 else math.nan
            sets = one["label"].iloc[0], other["label"].iloc[0]
            counts = int((better > 0).sum()), int((better < 0).sum())
            found = seeds, mean, sd, low, high, *counts, find_chance(gaps)
            rows.append((*sets, measure, *found))
    names = "set minus measure seeds mean sd low high ahead behind p".split()
    table = pd.DataFrame(rows, columns=names)
    return table.assign(p_holm=table.groupby("measure")["p"].transform(correct_holm))
