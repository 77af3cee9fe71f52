"""Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated
Learning", NeurIPS 2020, https://arxiv.org/abs/2006.04088. The same method is HypCluster
in Mansour, Mohri, Ro, Suresh 2020, https://arxiv.org/abs/2002.10619 ("HypoCluster(K)"
in the FeSEM paper), with means weighted by samples.

In every round each client of the cohort tests all m models on its training data and trains the best
one. The server averages the updates of each model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fedjax_cfl.algorithms.fedavg import charge_full_gradient
from fedjax_cfl.algorithms.ifca.start import MakeStart, independent_models
from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import Objective, erm, proximal
from fedjax_cfl.client.sgd import gradient_step, sgd
from fedjax_cfl.clustering.clustered import clustered
from fedjax_cfl.clustering.measure import losses
from fedjax_cfl.clustering.migrate import ChargeFn, DetectFn, charge_detected, tv
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import AggregateFn
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.start import count_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, check_arguments


def ifca(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt | jax.Array,
    max_m: PositiveInt | None = None,
    start: MakeStart = independent_models,
    solve: Callable[[Task, Local, Objective], ClientFn] = sgd,
    aggregate: AggregateFn = uniform_mean,
    with_l2: bool = False,
    mu: NonNegativeFloat | jax.Array = 0.0,
    detector: DetectFn | None = None,
    charge: ChargeFn = charge_detected,
) -> Algorithm:
    """IFCA: each client trains the group model of lowest loss on its training data
    (Algorithm 1).

    Option II of the paper is the default; option I, gradient averaging, is
    `solve=gradient_step` with `aggregate=cohort_mean`.
    Args: `start` is independent_models | reject_unbalanced(share) | spread_models; `with_l2`
    adds the L2 penalty to the losses that are compared (D10); `max_m`: room for so many models, so
    that runs of any m up to it share what is compiled. The losses of max_m models are computed
    then, and m are counted as sent; `mu` is the weight of FedProx's pull to the received model,
    which IFCA does not have; `detector` finds the shifts after which clients with a group download
    all models and choose again before the round, and `charge` names who pays for them.
    Raises InputError for `max_m` below m, for an array m without it, and for more room than m with
    another start than independent_models.
    """
    check_arguments(ifca, locals(), "algorithm")
    size, random = count_groups(m, max_m), start is independent_models
    if size.is_padded and not random:
        raise InputError("algorithm.max_m: needs start=random; leave out algorithm.max_m")
    return clustered(
        task,
        local,
        system,
        m=m,
        max_m=max_m,
        measure=partial(losses, with_l2=with_l2),
        start=None if random else start(task, local, system, size.size),
        solve=solve(task, local, proximal(mu, erm(task))),
        prepare=charge_full_gradient(local) if solve is gradient_step else None,
        aggregate=aggregate,
        detector=detector,
        charge=charge,
    )


def ifca_mig(
    task: Task, local: Local, system: SystemLike, *, detector: DetectFn = tv, **options: Any
) -> Algorithm:
    """IFCA-MIG of the FlexCFL paper: IFCA whose clients choose again where their data shift.

    `detector` and `options` are those of `ifca`.
    """
    return ifca(task, local, system, detector=detector, **options)
