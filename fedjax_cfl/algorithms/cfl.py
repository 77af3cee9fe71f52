"""Sattler, Mueller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed
Multitask Optimization under Privacy Constraints", IEEE TNNLS 2021,
https://arxiv.org/abs/1910.01991. (What the FeSEM paper calls CFL is `fedcluster`.)

All clients start in one group. When training has become stationary for a group as a
whole, but not for some of its clients, the group is cut in two, between the clients whose
updates point in different directions. Each half then trains by itself.

Differs from the paper: there can be at most `m` groups; a client that was absent when its
group was cut joins a half when it next takes part, as newcomers do; newcomers are compared
by the server, which costs a model down and one up per cut.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import TrainFn, train_without_recording
from fedjax_cfl.clustering.distances import cosine
from fedjax_cfl.clustering.hierarchical import bisect_updates
from fedjax_cfl.method import AggregateFn, AssignFn, Method, RegroupFn, Round
from fedjax_cfl.round.aggregate import MEANS, MeanName
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import one_active_group
from fedjax_cfl.sharding import flatten_updates, put_models
from fedjax_cfl.system.reports import add_bills, add_fault_counts, make_bill, make_report
from fedjax_cfl.system.select import current_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import (
    group_mean,
    membership_weights,
    squared_norms,
    take_rows,
    where_rows,
    zero_rows,
)
from fedjax_cfl.types import Algorithm, FederatedData, Params, Report, State, Task
from fedjax_cfl.validation import Fraction, NaturalInt, NonNegativeFloat, PositiveInt, checked, pick

# (round, active [m], norm of the mean update [m], longest norm [m], clients [m], the longest mean
# update so far []) -> [m] bool, the groups to cut
DueFn = Callable[..., jax.Array]


LAST_SPLIT, LAST_UPDATE, KNOWN = "last_split", "last_update", "known"  # rows of clients


class SplitTree(struct.PyTreeNode):
    """The cuts so far: cut h = 1 .. m - 1 made group h of clients of group parent[h]. Later
    cuts have higher numbers.
    """

    parent: jax.Array  # [m] int32, -1 where there has been no cut
    models: Params  # [m, ...], the parent's model when it was cut
    parent_update: Params  # [m, ...], mean update of the clients that stayed with the parent
    split_update: Params  # [m, ...], mean update of those that left
    longest_mean: ArrayLike = 0.0  # [] float32, norm of any group's longest mean update so far


@checked("algorithm")
def cfl(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    eps1: NonNegativeFloat | jax.Array | None = 0.4,
    eps2: NonNegativeFloat | jax.Array | None = 1.6,
    gamma_max: Fraction | jax.Array = 0.0,
    min_size: PositiveInt = 2,
    warm_up: NaturalInt = 20,
    linkage: Literal["single", "complete", "average"] = "single",
    aggregate: MeanName | AggregateFn = "uniform",
    stale_updates: bool = False,
) -> Algorithm:
    """CFL with at most m groups.

    Args: a group is stationary where its mean update is shorter than `eps1`, None: a tenth of the
    longest so far, and some of its clients are not where the longest update is longer than `eps2`,
    None: six times `eps1` (None as in the FedDrift code); it is cut if sqrt((1 - alpha) / 2) is
    above `gamma_max`, alpha the largest cosine between the halves; only groups of more than
    `min_size` clients are cut, and none before round `warm_up`; `linkage` of the updates, by their
    cosines: single (the cut of least alpha) | complete (the released code, D35) | average;
    `aggregate` within a group is uniform | samples; `stale_updates` counts clients outside the
    cohort by their last update when a group is tested and cut; otherwise only the clients of the
    cohort count.
    """
    solve = sgd(task, local)

    def due(round, active, mean_norm, max_norm, size, longest_mean):
        short = longest_mean / 10 if eps1 is None else eps1
        long = 6 * short if eps2 is None else eps2
        stationary = (mean_norm < short) & (max_norm > long)
        return active & stationary & (size > min_size) & (round >= warm_up)

    method = Method(
        solve,
        start=one_active_group(task, m),
        memory=init_tree,
        client_rows=partial(init_rows, stale_updates),
        split_rows=(LAST_UPDATE,),
        assign=descend_splits(train_without_recording(solve, local, system)),
        regroup=bipartition(due, linkage, gamma_max, stale_updates, mesh=local.execution.mesh),
        aggregate=pick(aggregate, **MEANS),
    )
    return federated(task, local, system, method)


def init_tree(groups: Params, data: FederatedData) -> SplitTree:
    """Returns the cuts so far: none."""
    m, zeros = len(jax.tree.leaves(groups)[0]), jax.tree.map(jnp.zeros_like, groups)
    return SplitTree(jnp.full(m, -1, jnp.int32), zeros, zeros, zeros, jnp.zeros(()))


def init_rows(stale_updates: bool, groups: Params, data: FederatedData) -> dict[str, Any]:
    """Returns what the server keeps of each client: the last cut at which it has taken a side, and
    with `stale_updates` its last update and whether it has sent one.
    """
    clients = data.num_clients
    rows: dict[str, Any] = {LAST_SPLIT: jnp.zeros(clients, jnp.int32)}
    if stale_updates:
        rows[LAST_UPDATE] = zero_rows(clients, take_rows(groups, 0))
        rows[KNOWN] = jnp.zeros(clients, bool)
    return rows


def descend_splits(train: TrainFn) -> AssignFn:
    """Lets clients take their side at the cuts that were made without them (Algorithm 3 of
    the paper).

    They train from the model of the group that was cut, and join the half of the more
    similar mean update. Newcomers start in group 0. Each cut costs a model down and one up.
    """

    def assign(r: Round) -> tuple[jax.Array, Report]:
        state, data, cohort = r.state, r.data, r.cohort
        tree, clients = state.memory, jnp.minimum(cohort.ids, data.num_clients - 1)
        real, passed = r.real, state.rows[LAST_SPLIT][clients]
        nothing = make_report(make_bill(jnp.zeros_like(clients)))

        def cut(h, carry):
            here, trained, report = carry
            undecided = real & (here == tree.parent[h]) & (passed < h)

            def sides():
                cuts = tree.models, tree.parent_update, tree.split_update
                model, stayed, left = jax.tree.map(lambda leaf: leaf[h][None], cuts)
                trainees = cohort.keep(undecided, data.num_clients)
                upload, more = train(jax.random.fold_in(r.key, h), model, trainees, data)
                return cosine(upload.delta, left)[:, 0] > cosine(upload.delta, stayed)[:, 0], more

            leaves, more = lax.cond(
                jnp.any(undecided), sides, lambda: (jnp.zeros_like(undecided), nothing)
            )
            here = jnp.where(undecided & leaves, h, here).astype(jnp.int32)
            report = report.replace(
                bill=add_bills(report.bill, more.bill),
                fault_counts=add_fault_counts(report.fault_counts, more.fault_counts),
            )
            return here, trained + undecided, report

        begin = jnp.maximum(current_groups(state, cohort), 0), jnp.zeros_like(cohort.ids), nothing
        gid, trained, report = lax.fori_loop(1, jnp.sum(state.active), cut, begin)
        return gid, report.replace(early=make_bill(trained, trained))

    return assign


def bipartition(
    due: DueFn,
    linkage: str,
    gamma_max: ArrayLike,
    stale_updates: bool,
    compared: Callable[[Params], Params] = lambda delta: delta,
    mesh: Mesh | None = None,
) -> RegroupFn:
    """Cuts every group that is due and whose halves are far enough apart.

    Args: `due` says which groups are due; `linkage` is as in `SplitRule`; `gamma_max` from 0 to
    1 is what gamma = sqrt((1 - alpha) / 2) must exceed; `stale_updates` is as in `cfl`;
    `compared` takes the part of the updates whose cosines are compared; the devices of `mesh`
    share the updates, None: one device.
    """

    def regroup(r: Round) -> tuple[State, jax.Array]:
        state, cohort = r.state, r.cohort
        tree, m = state.memory, state.active.size
        passed = cohort.put(state.rows[LAST_SPLIT], jnp.sum(state.active) - 1)
        ids, group, sent, delta = cohort.ids, r.group, r.upload.weight > 0, r.upload.delta
        if stale_updates:
            rows = jnp.where(sent, ids, r.data.num_clients)
            latest = put_models(state.rows[LAST_UPDATE], rows, delta, mesh)
            known = state.rows[KNOWN].at[rows].set(True, mode="drop")
            state = state.put_rows({LAST_UPDATE: latest, KNOWN: known})
            group = state.assignment.at[ids].set(r.group, mode="drop")
            ids, sent, delta = jnp.arange(r.data.num_clients), known, latest
        norm = jnp.sqrt(squared_norms(delta).sum(0))
        mean, size = group_mean(sent.astype(jnp.float32), group, delta, m)
        mean_norm = jnp.sqrt(squared_norms(mean).sum(0))
        longest_mean = jnp.maximum(tree.longest_mean, jnp.max(mean_norm))
        longest = jnp.max(membership_weights(jnp.where(sent, norm, 0.0), group, m), axis=0)
        ready = due(state.round, state.active, mean_norm, longest, size, longest_mean)
        state = state.replace(memory=tree.replace(longest_mean=longest_mean))
        state = state.put_rows({LAST_SPLIT: passed})

        def cut():
            parts = compared(delta)
            if not stale_updates:  # those are split already
                parts = flatten_updates(parts, mesh)
            half, gamma = bisect_updates(
                ids, jnp.where(sent, group, -1), parts, ready, linkage, mesh
            )
            return split(state, ids, group, sent, delta, half, ready & (gamma > gamma_max))

        state, now = lax.cond(jnp.any(ready), cut, lambda: (state, group))
        if not stale_updates:
            return state, now
        assignment = jnp.where(state.assignment >= 0, now, state.assignment)
        return state.replace(assignment=assignment), cohort.take(now)

    return regroup


def split(
    state: State,
    ids: jax.Array,
    group: jax.Array,
    sent: jax.Array,
    delta: Params,
    half: jax.Array,
    chosen: jax.Array,
) -> tuple[State, jax.Array]:
    """Moves half 1 of every chosen group to the lowest free group, as long as there is one;
    returns (state, groups [R] int32 of the updates).

    A new group inherits model and optimizer state, and the tree stores the cut.

    Args: `ids` [R] int32 are the clients that sent the R updates; `group` [R] int32 is the
    group of each; `sent` [R] bool are the updates that count; `delta` [R, ...] are the updates;
    `half` [R] int32 is 0 or 1; `chosen` [m] bool are the groups to cut.
    """
    m, tree = state.active.size, state.memory
    target = jnp.sum(state.active) + jnp.cumsum(chosen) - 1
    target = jnp.where(chosen & (target < m), target, m).astype(jnp.int32)
    number = jnp.arange(m, dtype=jnp.int32)
    source = number.at[target].set(number, mode="drop")
    created = source != number
    goal = target[jnp.maximum(group, 0)]
    now = jnp.where(sent & (half == 1) & (goal < m), goal, group)
    mean, _ = group_mean(sent.astype(jnp.float32), now, delta, m)
    active = state.active | created

    groups, server, stayed = take_rows((state.groups, state.server, mean), source)
    tree = tree.replace(
        parent=jnp.where(created, source, tree.parent),
        models=where_rows(created, groups, tree.models),
        parent_update=where_rows(created, stayed, tree.parent_update),
        split_update=where_rows(created, mean, tree.split_update),
    )
    passed = state.rows[LAST_SPLIT]
    at = jnp.where(sent, ids, passed.size)
    state = state.put_rows({LAST_SPLIT: passed.at[at].set(jnp.sum(active) - 1, mode="drop")})
    return state.replace(groups=groups, server=server, active=active, memory=tree), now
