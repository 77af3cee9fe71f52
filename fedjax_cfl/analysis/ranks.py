"""Ranks of methods over settings: means with bootstrap intervals, and what tests say of them.

A setting is a data set with its drift; the scores of its seeds are averaged before they are
ranked. Of the best the rank is 1; methods that score the same share the mean of their ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedjax_cfl.analysis.statistics import RESAMPLES, compute_tests

INTERVAL = 0.9  # level of the intervals of mean ranks
LEVEL = 0.05  # of the critical difference
Scores = Sequence[np.ndarray]  # of each setting [seeds, methods], the higher the better


class Ranks(NamedTuple):
    """What is said of each method, [k]."""

    mean: np.ndarray  # over settings
    low: np.ndarray  # of the bootstrap interval
    high: np.ndarray
    first: np.ndarray  # share of the resamples in which no method has a smaller mean rank


def rank_settings(means: np.ndarray) -> np.ndarray:
    """Returns the ranks [N, k] of k methods in N settings, by their mean scores [N, k]."""
    return stats.rankdata(-means, axis=1)


def rank_methods(scores: Scores) -> Ranks:
    """Returns mean ranks with intervals of level `INTERVAL` from a hierarchical bootstrap
    (Davison and Hinkley 1997, section 3.8): settings are drawn, then seeds within each.

    Of one setting and one seed there is nothing to be drawn: the interval is its ranks. Of few
    settings it is too narrow.
    """
    rng = np.random.default_rng(0)
    count = len(scores)
    chosen = rng.integers(count, size=(RESAMPLES, count))
    drawn = np.zeros((RESAMPLES, scores[0].shape[1]))
    for place in range(count):
        for setting, own in enumerate(scores):
            here = chosen[:, place] == setting
            drawn[here] += _rank_resampled(rng, own, here.sum()) / count
    low, high = np.quantile(drawn, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0)
    first = (drawn <= drawn.min(1, keepdims=True)).mean(0)
    mean = rank_settings(np.stack([each.mean(0) for each in scores])).mean(0)
    return Ranks(mean, low, high, first)


def _rank_resampled(rng: np.random.Generator, scores: np.ndarray, times: int) -> np.ndarray:
    """Returns the ranks [times, k] of methods by means over resampled seeds [seeds, k]; a seed is
    that of all methods.
    """
    picked = rng.integers(len(scores), size=(times, len(scores)))
    return rank_settings(scores[picked].mean(1))


def friedman(means: np.ndarray) -> float | None:
    """Returns Friedman's chance of ranks [N, k] that differ as much if all methods were alike;
    None for fewer than three methods or two settings.
    """
    if means.shape[0] < 2 or means.shape[1] < 3:
        return None
    return float(stats.friedmanchisquare(*means.T).pvalue)


def critical_difference(methods: int, settings: int) -> float:
    """Returns by how much mean ranks of two of `methods` must differ over `settings` to be told
    apart at `LEVEL` (Nemenyi; Demsar 2006, section 3.2.2).
    """
    q = stats.studentized_range.ppf(1 - LEVEL, methods, np.inf) / np.sqrt(2)
    return float(q * np.sqrt(methods * (methods + 1) / (6 * settings)))


def compare_with(means: np.ndarray, baseline: int) -> np.ndarray:
    """Returns the chance [k] of Wilcoxon's signed-rank test, exact, of each method's differences
    from the method `baseline` over settings, corrected by Holm (1979); NaN for itself.

    `means` [N, k]. Of N settings no chance is below 2 / 2^N before the correction.
    """
    tests = [compute_tests(means[:, j] - means[:, baseline]) for j in range(means.shape[1])]
    chances = np.array([np.nan if each is None else each.wilcoxon for each in tests])
    chances[baseline] = np.nan
    return correct_holm(chances)


def correct_holm(chances: np.ndarray) -> np.ndarray:
    """Returns chances [k] corrected for their number by Holm (1979); those that are NaN stay it and
    do not count.
    """
    corrected = np.full(len(chances), np.nan)
    order = [j for j in np.argsort(chances) if not np.isnan(chances[j])]
    largest = 0.0
    for place, j in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * chances[j]))
        corrected[j] = largest
    return corrected
