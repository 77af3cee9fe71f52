"""Guo, Tang, Lin, "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by
Robust Clustering", ICML 2024, https://arxiv.org/abs/2301.12379.

It is FedEM with likelihoods p_k(y | x) divided by R_k(y), the share of label y in what clients have
ascribed to model k. So clients that answer the same inputs differently are put apart, and those
that differ only in their labels or inputs share a model. R is constant before round 0, so that the
first round is FedEM's.

Differs from the paper: R counts what the clients that have taken part sent last (in the authors'
code also a constant for those that have not); models start at random, and no momentum is kept
between rounds; no group is removed. The code's new clients do not receive R, which is
`newcomers_use_shares=False`. A label that a model never saw is a bonus of about log(n /
least_count) for it: the floor is a real hyper-parameter.
"""

from fedjax_cfl.algorithms.fedem import federated_mixture, serve_mixture
from fedjax_cfl.client.local import Local
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.engine import serve_assigned
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Task
from fedjax_cfl.validation import PositiveFloat, PositiveInt, checked


@checked("algorithm")
def fedrc(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    least_count: PositiveFloat = 1e-8,
    newcomers_use_shares: bool = True,
    hard: bool = False,
) -> Algorithm:
    """FedRC with m models, which every client of a round receives, trains and sends, with R down
    and its sums of parts by label up, m C words each. With m = 1 it is FedAvg.

    Args: `least_count` is the floor of the sum of a label, in samples, before R is normalised;
    `newcomers_use_shares`: new clients of a finished run divide by R as well; `hard`: a client
    predicts by the one model of its largest weight, not by the mixture.
    Raises InputError for what a mixture cannot be used with, see `fedem.refuse_single_models`, and
    for `hard` with new clients that do not use R.
    """
    if hard and not newcomers_use_shares:
        raise InputError(
            "algorithm.newcomers_use_shares=false: with hard=true new clients join by a round of"
            " the method, which uses R; use true, or hard=false"
        )
    algorithm = federated_mixture(task, local, system, m, "FedRC", least_count=least_count)
    if hard:
        return algorithm._replace(serve=serve_assigned)
    if newcomers_use_shares:
        return algorithm
    return algorithm._replace(serve=lambda state: serve_mixture(state)._replace(label_shares=None))
