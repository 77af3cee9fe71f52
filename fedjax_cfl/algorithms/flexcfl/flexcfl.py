"""Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren, "Flexible Clustered Federated Learning for
Client-Level Data Distribution Shift", IEEE TPDS 2021, https://arxiv.org/abs/2108.09749,
and Duan, Liu, Ji, Liu, Liang, Chen, Tan, "FedGroup: Efficient Federated Learning via
Decomposed Similarity-Based Clustering", ISPA 2021, https://arxiv.org/abs/2010.06870.

A sample of clients pre-trains from the common initial model; clustering their update
directions founds the groups. Every other client pre-trains once, when it is first
selected, and joins the group of the most similar direction. From then on each group trains by
FedAvg, and the group models may be mixed (`eta_g`).

The reference code has two more options, which neither paper has: weights by client temperatures,
and founding the groups again in listed rounds.
"""

from typing import Any, Literal

import jax

from fedjax_cfl.algorithms.flexcfl.founding import (
    MEASURES,
    ColdStart,
    MeasureFn,
    Pretrain,
    draw_founders,
    group_cold_start,
    parse_pretrain,
)
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import (
    cold_start,
    nearest_direction,
    random_group,
    train_without_recording,
)
from fedjax_cfl.clustering.migrate import DETECTORS, DetectFn, DetectorName, on_shift
from fedjax_cfl.method import Method
from fedjax_cfl.round.aggregate import inter_group
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import count_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Key, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, checked, is_number, pick


@checked("algorithm")
def flexcfl(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt | jax.Array,
    max_m: PositiveInt | None = None,
    alpha: PositiveInt = 20,
    measure: Literal["edc", "edc_randomized", "madc", "none"] | MeasureFn = "edc",
    restarts: PositiveInt = 10,
    pretrain: Pretrain = "iters:50",
    group_start: Literal["pretrained", "initial"] = "pretrained",
    newcomers: Literal["nearest", "random"] = "nearest",
    eta_g: NonNegativeFloat | jax.Array = 0.0,
    mix: Literal["normalized", "paper"] = "normalized",
    mu: NonNegativeFloat | jax.Array = 0.0,
    detector: DetectorName | DetectFn | None = "tv",
) -> Algorithm:
    """FlexCFL with m groups.

    Args: `max_m` is room for so many groups: runs of any m up to it share what is compiled, None:
    m; `alpha` is the number of founders per group; `measure` clusters them: edc | edc_randomized,
    for thousands of founders | madc | none, each founder is a group (ablation RCC); `restarts` are
    the seedings of K-means++; `pretrain` is the length of a client's first update, see
    `parse_pretrain`; `group_start` is the founders' mean model | the initial model (D8);
    `newcomers` join the group of the nearest direction | a random one (ablation RAC); `eta_g` is
    the strength of the inter-group aggregation and `mix` its form, a convex combination | a sum as
    in the paper's eq. 20 (D14); `mu` is the weight of the proximal term; `detector` finds the
    shifts after which a client chooses its group again (eq. 9), None: clients stay in their groups,
    which is FedGroup, and with mu > 0 FedGrouProx.
    Raises InputError if `max_m` is below m, and for more room than m with edc_randomized.
    """
    groups, detect = count_groups(m, max_m), pick(detector, **DETECTORS)
    first = train_without_recording(sgd(task, parse_pretrain(pretrain)(local)), local, system)
    nearest = cold_start(nearest_direction(first))
    found = pick(measure, **MEASURES)
    founding = ColdStart(alpha, found, restarts, group_start == "pretrained")

    def start_clients(key: Key, num_clients: int) -> jax.Array:
        ids = draw_founders(jax.random.split(key, 4)[1], num_clients, groups, alpha)
        return ids[: alpha * groups.used]  # its number is known where this is called

    mixed = inter_group(eta_g, normalize=mix == "normalized")
    method = Method(
        sgd(task, local, proximal(mu, erm(task))),
        start=group_cold_start(task, first, local, founding, groups),
        migrate=on_shift(nearest_direction(first), local, detect) if detect else None,
        # who joins a random group compares itself with none
        assign=nearest if newcomers == "nearest" else cold_start(random_group, lambda _: 0),
        finish=None if is_number(eta_g) and eta_g == 0 else mixed,
        start_clients=start_clients if detector is None else None,
    )
    return federated(task, local, system, method)._replace(serve=groups.serve)


def fedgroup(task: Task, local: Local, system: SystemLike, **options: Any) -> Algorithm:
    """FedGroup: FlexCFL whose clients stay in their groups; `mu` > 0 is FedGrouProx.

    `options` are those of `flexcfl`, without `detector`.
    """
    return flexcfl(task, local, system, detector=None, **options)
