"""Means over seeds with bootstrap intervals, and differences between methods seed by seed, with
exact tests.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

from fedjax_cfl.analysis.sets import score_of_set, split_data, split_sets
from fedjax_cfl.scores import SCORES, find_owner

RESAMPLES, LEVEL = 10_000, 0.95
MAX_FLIPPED = 13  # values of which all signs are tried
MAX_PAIRED_SETS = 6  # on the same data; beyond it all are compared with the best one only
DIGITS = 14  # of scores; what floats add to their differences is beyond
# measures that pairs of sets are compared by
PAIRED = (
    *(f"{part}_{score.name}" for score in SCORES for part in ("final", "shared_best", "worst10")),
    "ari",
)


class Estimate(NamedTuple):
    """A mean over seeds and its bootstrap interval; NaN without values, or without two."""

    mean: float
    low: float
    high: float
    values: int  # how many there are


class PairedTests(NamedTuple):
    """What exact tests say of differences, two-sided: the chance of differences at least as far
    from 0 if each were as likely to have the other sign. Of n seeds none is below 2 / 2^n: 0.25 for
    three, 0.0625 for five, so that fewer than six can never be below 0.05.
    """

    ahead: int  # of the differences that are not 0, how many are better: above, of RMSE below
    behind: int
    p_mean: float  # Fisher's randomisation test: by the mean
    p_wilcoxon: float  # signed ranks: one seed that is far off counts no more than its rank
    p_sign: float  # signs alone: counts seeds, whatever their size


def bootstrap_mean(values: ArrayLike) -> Estimate:
    """Returns the mean of values [n], without nulls, and the percentile bootstrap interval of
    level LEVEL (Efron 1979), from resamples that a fixed seed draws.

    Few values make it too narrow: three can only give ten different means.
    """
    kept = np.asarray(values, float)
    kept = kept[~np.isnan(kept)]
    mean = float(kept.mean()) if kept.size else math.nan
    if kept.size < 2:
        return Estimate(mean, math.nan, math.nan, kept.size)
    options = {"n_resamples": RESAMPLES, "confidence_level": LEVEL, "method": "percentile"}
    found = stats.bootstrap((kept,), np.mean, **options, rng=0).confidence_interval
    return Estimate(mean, float(found.low), float(found.high), kept.size)


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
    count = 2**values.size if values.size <= MAX_FLIPPED else RESAMPLES
    # in units of the largest, so that what rounding leaves of a sum of 0 is below SciPy's tolerance
    values = np.round(values / np.abs(values).max(), DIGITS)
    found = stats.permutation_test(
        (values,), _round_sum, permutation_type="samples", n_resamples=count, rng=0
    )
    return float(found.pvalue)


def _round_sum(values: np.ndarray, axis: int) -> np.ndarray:
    return np.round(values.sum(axis), DIGITS - 2)


def compute_tests(differences: ArrayLike, higher: bool = True) -> PairedTests:
    """Returns what exact tests say of differences [n]. Those of 0 say nothing about signs and
    ranks, and are left out there. `higher`: the higher the better.
    """
    values = np.asarray(differences, float)
    moved = values[values != 0]
    ranks = np.sign(moved) * stats.rankdata(np.abs(moved))
    above, below = int((values > 0).sum()), int((values < 0).sum())
    empty = 1.0 if values.size else math.nan
    return PairedTests(
        *((above, below) if higher else (below, above)),
        find_chance(values),
        find_chance(ranks) if moved.size else empty,
        float(stats.binomtest(above, moved.size).pvalue) if moved.size else empty,
    )


def list_pairs(runs: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Returns the pairs of sets of runs (see `sets`) on the same data, partition and model: all of
    them, the better first, or each with the best where there are many on the same data.
    """

    def rank(members: pd.DataFrame) -> float:
        score = score_of_set(members)
        final = members[f"final_{score.name}"].mean()
        return math.inf if math.isnan(final) else (-final if score.higher else final)

    pairs = []
    for same in split_data(runs).values():
        ranked = sorted((members for _, members in split_sets(same)), key=rank)
        few = len(ranked) <= MAX_PAIRED_SETS
        pairs += itertools.combinations(ranked, 2) if few else [(ranked[0], o) for o in ranked[1:]]
    return pairs


def list_gaps(one: pd.DataFrame, other: pd.DataFrame, measure: str) -> np.ndarray:
    """Returns by how much each run of a set has more of a measure than the run of another set that
    has the same seed and data [n], where both have it.
    """
    sides = [
        members.dropna(subset=["pair", measure])
        .drop_duplicates("pair", keep="last")
        .set_index("pair")
        for members in (one, other)
    ]
    both = pd.concat([members[measure] for members in sides], axis=1, join="inner")
    return subtract(*both.to_numpy().T)


def list_differences(runs: pd.DataFrame, measures: Sequence[str] = PAIRED) -> pd.DataFrame:
    """Returns a row per pair of sets of runs (see `list_pairs`) and measure that they share seeds
    of: the mean difference, its interval and the exact tests.
    """
    found = []
    for one, other in list_pairs(runs):
        for measure in measures:
            gaps, owner = list_gaps(one, other, measure), find_owner(measure)
            if not gaps.size:
                continue
            mean = bootstrap_mean(gaps)
            row = {"set": one["label"].iloc[0], "minus": other["label"].iloc[0], "measure": measure}
            row |= {"seeds": mean.values, "mean": mean.mean, "low": mean.low, "high": mean.high}
            tests = compute_tests(gaps, higher=owner is None or owner.higher)
            found.append(row | tests._asdict())
    names = ["set", "minus", "measure", "seeds", "mean", "low", "high", *PairedTests._fields]
    return pd.DataFrame(found, columns=names)
