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

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from fedjax_cfl.algorithms.flexcfl.founding import ColdStart, draw_founders, group_cold_start
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import (
    cold_start,
    nearest_direction,
    random_group,
    train_without_recording,
)
from fedjax_cfl.clustering.migrate import DetectFn, on_shift, tv
from fedjax_cfl.method import FinishFn, Method
from fedjax_cfl.round.aggregate import inter_group
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import count_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Key, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, check_arguments, is_number


def flexcfl(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt | jax.Array,
    founding: ColdStart = ColdStart(),
    eta_g: NonNegativeFloat | jax.Array = 0.0,
    mix: Callable[[ArrayLike], FinishFn] = inter_group,
    mu: NonNegativeFloat | jax.Array = 0.0,
    detector: DetectFn | None = tv,
) -> Algorithm:
    """FlexCFL with m groups.

    Args: `founding` is the group cold start; `eta_g` is the strength of the inter-group
    aggregation and `mix` its form (inter_group | add_inter_group); `mu` is the weight of
    the proximal term; `detector` finds the shifts after which a client chooses its group
    again (eq. 9), None: clients stay in their groups, which is FedGroup, and with mu > 0
    FedGrouProx.
    Raises InputError if `founding.max_m` is below m, and for `founding.max_m` with
    `cluster_by_randomized_edc`.
    """
    check_arguments(flexcfl, locals(), "algorithm")
    check_arguments(ColdStart, founding._asdict(), "algorithm")
    groups = count_groups(m, founding.max_m)
    pretrain = train_without_recording(sgd(task, founding.pretrain(local)), local, system)
    join = founding.newcomers(pretrain)
    move = on_shift(nearest_direction(pretrain), local, detector) if detector else None

    def start_clients(key: Key, num_clients: int) -> jax.Array:
        ids = draw_founders(jax.random.split(key, 4)[1], num_clients, groups, founding.alpha)
        return ids[: founding.alpha * groups.used]  # its number is known where this is called

    method = Method(
        sgd(task, local, proximal(mu, erm(task))),
        start=group_cold_start(task, pretrain, local, founding, groups),
        migrate=move,
        # who joins a random group compares itself with none
        assign=cold_start(join) if join is not random_group else cold_start(join, lambda _: 0),
        finish=None if is_number(eta_g) and eta_g == 0 else mix(eta_g),
        start_clients=start_clients if detector is None else None,
    )
    return federated(task, local, system, method)._replace(serve=groups.serve)


def fedgroup(task: Task, local: Local, system: SystemLike, **options: Any) -> Algorithm:
    """FedGroup: FlexCFL whose clients stay in their groups; `mu` > 0 is FedGrouProx.

    `options` are those of `flexcfl`, without `detector`.
    """
    return flexcfl(task, local, system, detector=None, **options)
