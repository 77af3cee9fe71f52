"""Means over seeds with bootstrap intervals, and differences between methods seed by seed, with
exact tests.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from fedjax_cfl.analysis.plot_costs import group_by_data, score_of_set
from fedjax_cfl.analysis.relative import pair_key
from fedjax_cfl.scores import SCORES, find_owner

RESAMPLES, LEVEL = 10_000, 0.95
MAX_FLIPPED = 14  # values of which all signs are tried
MAX_PAIRED_SETS = 6  # on the same data; beyond it all are compared with the best one only
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
    tests: "PairedTests | None" = None  # of a difference


class PairedTests(NamedTuple):
    """What exact tests say of differences, two-sided: the chance of differences at least as far
    from 0 if each were as likely to have the other sign. Of n seeds none is below 2 / 2^n: 0.25 for
    three, 0.0625 for five, so that fewer than six can never be below 0.05.
    """

    ahead: int  # of the differences that are not 0, how many are better: above, of RMSE below
    behind: int
    mean: float  # Fisher's randomisation test: by the mean
    wilcoxon: float  # signed ranks: one seed that is far off counts no more than its rank
    sign: float  # signs alone: counts seeds, whatever their size


class Difference(NamedTuple):
    """A set of runs minus another, over the seeds that both have."""

    label: str
    minus: str
    seeds: int
    values: dict[str, Estimate]  # of each measure


def bootstrap_mean(values: Sequence[float | None]) -> Estimate:
    """Returns the mean of values, without nulls, and the percentile bootstrap interval of
    level LEVEL (Efron 1979), from resamples that a fixed seed draws.

    Few values make it too narrow: three can only give ten different means.
    """
    kept = np.array([value for value in values if value is not None], float)
    if kept.size < 2:
        return Estimate(
            float(kept.mean()) if kept.size else math.nan, math.nan, math.nan, kept.size
        )
    drawn = np.random.default_rng(0).integers(kept.size, size=(RESAMPLES, kept.size))
    low, high = np.quantile(kept[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(kept.mean()), float(low), float(high), kept.size)


def find_chance(differences: ArrayLike) -> float:
    """Returns the chance, two-sided, of a mean at least as far from 0 if every difference were as
    likely to have the other sign (Fisher's paired randomisation test); NaN without differences.

    Of signed ranks it is Wilcoxon's signed-rank test, of signs the sign test. It is exact up to
    `MAX_FLIPPED` values: of n it cannot be below 2 / 2^n, so that three seeds never say more than
    0.25. Beyond, it is from `RESAMPLES` draws of signs and the observed ones.
    """
    values = np.asarray(differences, float)
    if not values.size:
        return math.nan
    if values.size <= MAX_FLIPPED:
        signs = np.array(list(itertools.product((1, -1), repeat=values.size)))
    else:
        drawn = np.random.default_rng(0).choice([1, -1], (RESAMPLES, values.size))
        signs = np.concatenate([np.ones((1, values.size)), drawn])
    observed = abs(values.sum())
    return float(np.mean(np.abs(signs @ values) >= observed - 1e-9 * np.abs(values).sum()))


def compare_pairs(groups: list[dict[str, Any]], measures: Sequence[str]) -> list[Difference]:
    """Returns the differences between sets of runs (see `compare.reduce_set`) on the same
    data, model and partition, where they share seeds: of all pairs, or with the best set
    where there are many on the same data.
    """

    def rank(group: dict[str, Any]) -> float:
        score = score_of_set(group)
        final = group[f"final_{score.name}"][0]
        worst_last = -final if score.higher else final
        return np.inf if np.isnan(final) else worst_last

    ranked = sorted(groups, key=rank)
    found = []
    for same in group_by_data(ranked).values():
        pairs = list(itertools.combinations(same, 2))
        if len(same) > MAX_PAIRED_SETS:
            pairs = [(same[0], other) for other in same[1:]]
        found += [_subtract(one, other, measures) for one, other in pairs]
    return [difference for difference in found if difference.seeds]


def list_differences(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row per pair of sets and measure, with the interval and the exact tests."""
    rows = []
    for found in compare_pairs(groups, PAIRED):
        for measure, value in found.values.items():
            if value.tests is None:
                continue
            row = {"set": found.label, "minus": found.minus, "measure": measure}
            row |= {"seeds": value.values, "mean": value.mean}
            row |= {"low": value.low, "high": value.high}
            tests = value.tests._asdict()
            row |= {name: tests.pop(name) for name in ("ahead", "behind")}
            rows.append(row | {f"p_{name}": chance for name, chance in tests.items()})
    return rows


def compute_tests(differences: ArrayLike, higher: bool = True) -> PairedTests | None:
    """Returns what exact tests say of differences, None where there are none. Those of 0 say
    nothing about signs and ranks, and are left out there. `higher`: the higher the better.
    """
    values = np.asarray(differences, float)
    if not values.size:
        return None
    moved = values[values != 0]
    ranks = np.sign(moved) * rankdata(np.abs(moved)) if moved.size else np.zeros(1)
    signs = np.sign(moved) if moved.size else np.zeros(1)
    chances = map(find_chance, (values, ranks, signs))
    sides = int((values > 0).sum()), int((values < 0).sum())
    return PairedTests(*(sides if higher else sides[::-1]), *chances)


def pair_runs(
    one: dict[str, Any], other: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the runs of two sets that have the same seed and data."""
    left, right = ({pair_key(run): run for run in each["members"]} for each in (one, other))
    return [(left[key], right[key]) for key in left if key in right]


def list_gaps(pairs: list[tuple[dict[str, Any], dict[str, Any]]], measure: str) -> list[float]:
    """Returns by how much the first run of each pair has more of a measure that both have."""
    values = [(one.get(measure), other.get(measure)) for one, other in pairs]
    return [a - b for a, b in values if a is not None and b is not None]


def _subtract(one: dict[str, Any], other: dict[str, Any], measures: Sequence[str]) -> Difference:
    shared = [pair for pair in pair_runs(one, other) if pair[0].get("seed") is not None]

    def minus(name: str) -> Estimate:
        gaps = list_gaps(shared, name)
        owner = find_owner(name)
        tests = compute_tests(gaps, higher=owner is None or owner.higher)
        return bootstrap_mean(gaps)._replace(tests=tests)

    return Difference(one["label"], other["label"], len(shared), {m: minus(m) for m in measures})
