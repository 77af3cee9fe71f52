"""Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated
Learning", NeurIPS 2020, https://arxiv.org/abs/2006.04088. The same method is HypCluster
in Mansour, Mohri, Ro, Suresh 2020, https://arxiv.org/abs/2002.10619 ("HypoCluster(K)"
in the FeSEM paper), with means weighted by samples.

In every round each client of the cohort tests all m models on its training data and trains the best
one. The server averages the updates of each model.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from typing_extensions import TypeAliasType

from fedjax_cfl.algorithms.fedavg import charge_full_gradient
from fedjax_cfl.algorithms.ifca.start import (
    StartName,
    independent_models,
    reject_unbalanced,
    spread_models,
)
from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import Objective, erm, proximal
from fedjax_cfl.client.sgd import gradient_step, sgd
from fedjax_cfl.clustering.clustered import clustered
from fedjax_cfl.clustering.measure import MakeMeasure, losses
from fedjax_cfl.clustering.migrate import (
    DETECTORS,
    ChargeFn,
    DetectFn,
    DetectorName,
    charge_detected,
    charge_swapped,
)
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import AggregateFn
from fedjax_cfl.round.aggregate import MEANS, cohort_mean
from fedjax_cfl.round.start import MakeStart, count_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Task
from fedjax_cfl.validation import Fraction, NonNegativeFloat, PositiveInt, checked, pick

SolveFn = TypeAliasType("SolveFn", Callable[[Task, Local, Objective], ClientFn])
IfcaMean = Literal["uniform", "samples", "all_participants"]


@checked("algorithm")
def ifca(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt | jax.Array,
    max_m: PositiveInt | None = None,
    start: StartName | MakeStart = "random",
    share: Fraction = 0.1,
    solve: Literal["sgd", "gradient_step"] | SolveFn = "sgd",
    aggregate: IfcaMean | AggregateFn = "uniform",
    measure: Literal["losses"] | MakeMeasure = "losses",
    mu: NonNegativeFloat | jax.Array = 0.0,
    detector: DetectorName | DetectFn | None = None,
    charge: Literal["detected", "swapped"] | ChargeFn = "detected",
) -> Algorithm:
    """IFCA: each client trains the group model of lowest loss on its training data
    (Algorithm 1).

    Option II of the paper is the default; option I, gradient averaging, is
    `solve="gradient_step"` with `aggregate="all_participants"`.
    Args: `start` is random, independent models | reject_unbalanced, by `share` | kmeanspp_loss, see
    `start.py`; `aggregate` is that of a group's updates, `IfcaMean`; `measure` is what clients
    compare, see `clustering.measure`; `max_m`: room for so many models, so that runs of any m
    up to it share what is compiled. The losses of max_m models are computed then, and m are counted
    as sent; `mu` is the weight of FedProx's pull to the received model, which IFCA does not have;
    `detector` finds the shifts after which clients with a group download all models and choose
    again before the round, and `charge` names who pays for them.
    Raises InputError for `max_m` below m, for an array m without it, and for more room than m with
    another start than independent_models.
    """
    size, rejected = count_groups(m, max_m), reject_unbalanced(share)
    rest = {"reject_unbalanced": rejected, "kmeanspp_loss": spread_models}
    begin = pick(start, random=independent_models, **rest)
    random = begin is independent_models
    train = pick(solve, sgd=sgd, gradient_step=gradient_step)
    if size.is_padded and not random:
        raise InputError("algorithm.max_m: needs start=random; leave out algorithm.max_m")
    return clustered(
        task,
        local,
        system,
        m=m,
        max_m=max_m,
        measure=pick(measure, losses=losses),
        start=None if random else begin(task, local, system, size.size),
        solve=train(task, local, proximal(mu, erm(task))),
        prepare=charge_full_gradient(local) if train is gradient_step else None,
        aggregate=pick(aggregate, **MEANS, all_participants=cohort_mean),
        detector=pick(detector, **DETECTORS),
        charge=pick(charge, detected=charge_detected, swapped=charge_swapped),
    )


def ifca_mig(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    detector: DetectorName | DetectFn = "tv",
    **options: Any,
) -> Algorithm:
    """IFCA-MIG of the FlexCFL paper: IFCA whose clients choose again where their data shift.

    `detector` and `options` are those of `ifca`.
    """
    return ifca(task, local, system, detector=detector, **options)
