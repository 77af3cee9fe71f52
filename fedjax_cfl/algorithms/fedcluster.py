"""FedCluster: the form of clustered federated learning (see `cfl`) that Xie et al.,
"Multi-Center Federated Learning", 2020, https://arxiv.org/abs/2005.01026 (FeSEM),
compare with. It puts FedAvg into a hierarchical clustering.

After some rounds of FedAvg there is a round with all clients. In it every large group is
cut in two, between the clients whose updates of the output layer point in different
directions. Both halves go on in the same way; no norm is tested.

Differs from the authors' code, which treats one group after another: all groups train in
the same rounds; a cohort is drawn from all clients and not from each group; a group that
was not cut trains on and is tested again in the next such round; there can be at most `m`
groups.
"""

from functools import partial

import jax
from jax import lax

from fedjax_cfl.algorithms.cfl import bipartition, descend_splits, init_rows, init_tree
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import train_without_recording
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import one_active_group
from fedjax_cfl.system.system import SystemLike, use_all_clients
from fedjax_cfl.types import Algorithm, FederatedData, Info, Key, State, Task
from fedjax_cfl.validation import Fraction, PositiveInt, checked


@checked("algorithm")
def fedcluster(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    rounds: PositiveInt = 30,
    gamma: Fraction | jax.Array = 0.13,
    min_size: PositiveInt = 20,
) -> Algorithm:
    """CFL as in the FeSEM paper: `rounds` rounds of FedAvg, then one round with all clients,
    again and again.

    The round with all clients cuts each large group by average linkage of the cosines of its
    updates of the layer `head`, if sqrt((1 - largest cosine across) / 2) is above `gamma`. It
    costs K models down and K up.

    Args: `m` is the most groups; `gamma` from 0 to 1, 0 cuts whenever updates differ;
    `min_size`: only groups of more clients are cut. Raises InputError for a model without a
    dense layer `head`.
    """
    if "kernel" not in jax.eval_shape(task.init, jax.random.key(0)).get("head", ()):
        raise InputError(
            "algorithm.name=fedcluster: the model has no dense layer named head, whose updates are"
            " compared"
        )
    solve, mesh = sgd(task, local), local.execution.mesh

    def head_kernel(delta):
        return delta["head"]["kernel"]

    def due(round, active, mean_norm, max_norm, size, longest_mean):
        return active & (size > min_size) & (round % (rounds + 1) == rounds)

    method = Method(
        solve,
        start=one_active_group(task, m),
        memory=init_tree,
        client_rows=partial(init_rows, False),
        assign=descend_splits(train_without_recording(solve, local, system)),
        regroup=bipartition(due, "average", gamma, False, head_kernel, mesh),
    )
    cohort_only = federated(task, local, system, method)
    of_all = use_all_clients(system)
    with_all = federated(task, local, of_all, method)

    def round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        now = state.round % (rounds + 1) == rounds
        return lax.cond(now, with_all.round, cohort_only.round, key, state, data)

    return cohort_only._replace(round=round)
