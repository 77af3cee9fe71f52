"""Sattler, Mueller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed
Multitask Optimization under Privacy Constraints", IEEE TNNLS 2021,
https://arxiv.org/abs/1910.01991. (`fedcluster` is what the FeSEM paper compares with by
that name.)

Everybody begins in one group. Where federated learning has become stationary for a
group as a whole, but not for some of its members, the group is cut in two between the
clients whose updates point apart, and each half goes on by itself.

Differs from the paper: there is room for `m` groups and no more; a member that was
absent when its group was cut joins a half when it next takes part, as newcomers do;
newcomers are compared by the server, which costs a model down and one up per cut.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.clustering.assign import met_groups
from fedjax_cfl.clustering.distances import cosine, dissimilarity
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.errors import require
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.faults import add_fault_counts, no_faults
from fedjax_cfl.round.hooks import AggregateFn, AssignFn, Hooks, RegroupFn, Start, make_report
from fedjax_cfl.round.local import Local, full_work
from fedjax_cfl.round.pretrain import train_aside
from fedjax_cfl.round.sgd import sgd
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean, membership_weights, squared_norms
from fedjax_cfl.types import (
    Algorithm,
    Cohort,
    FederatedData,
    Params,
    Selection,
    State,
    Task,
    Upload,
)

LINKAGES = ("single", "complete", "average")


class SplitTree(struct.PyTreeNode):
    """The cuts so far: cut h = 1 .. m - 1 made group h from members of group parent[h],
    and later cuts have higher numbers.
    """

    parent: jax.Array  # [m] int32, -1 where there has been no cut
    models: Params  # [m, ...], the parent's model when it was cut
    parent_update: Params  # [m, ...], mean update of the members that stayed with the parent
    split_update: Params  # [m, ...], mean update of those that left
    last_split: jax.Array  # [K] int32, the last cut that the client has taken its side in
    last_update: Any = ()  # [K, ...], every client's last update, only with stale updates
    known: Any = ()  # [K] bool, it has sent one


class SplitRule(NamedTuple):
    """When a group is cut in two, and where."""

    eps1: Any = 0.4  # the mean update is shorter: the group is stationary
    eps2: Any = 1.6  # the longest update is longer: some members are not
    gamma_max: Any = 0.0  # sqrt((1 - alpha) / 2) is larger, alpha the largest cosine across
    min_size: int = 2  # only larger groups are cut
    warm_up: int = 20  # no cut before this round
    # of the updates by their cosines: single, which is the cut of least alpha | complete (the
    # released code, D35) | average
    linkage: str = "single"


def cfl(
    task: Task,
    local: Local,
    select: Selection,
    *,
    m: int,
    rule: SplitRule = SplitRule(),
    aggregate: AggregateFn = uniform_mean,
    stale_updates: bool = False,
) -> Algorithm:
    """CFL with room for m groups.

    Args: `rule` says when a group is cut; `aggregate` the clients within a group:
    uniform_mean | weighted_mean; `stale_updates` lets members that are not in the cohort be
    judged and cut by their last update, else a group is judged by the members present.
    Raises InputError for an unknown linkage.
    """
    require("algorithm.linkage", rule.linkage, LINKAGES)
    local = local.resolve()
    solve = sgd(task, local)

    def due(round, active, mean_norm, max_norm, size):
        stationary = (mean_norm < rule.eps1) & (max_norm > rule.eps2)
        return active & stationary & (size > rule.min_size) & (round >= rule.warm_up)

    hooks = Hooks(
        solve,
        start=single_active_group(task, m, stale_updates),
        assign=descend_splits(train_aside(solve, local)),
        regroup=bipartition(due, rule.linkage, rule.gamma_max, stale_updates),
        aggregate=aggregate,
    )
    return federated(task, local, select, hooks)


def single_active_group(task, m: int, stale_updates: bool):
    """Starts from one random model in group 0; the others wait."""

    def start(key, data: FederatedData):
        groups = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (m, *leaf.shape)), task.init(key))
        nothing = jax.tree.map(jnp.zeros_like, groups)
        clients = data.num_clients
        tree = SplitTree(
            jnp.full(m, -1, jnp.int32), nothing, nothing, nothing, jnp.zeros(clients, jnp.int32)
        )
        if stale_updates:
            latest = jax.tree.map(
                lambda leaf: jnp.zeros((clients, *leaf.shape[1:]), leaf.dtype), groups
            )
            tree = tree.replace(last_update=latest, known=jnp.zeros(clients, bool))
        return Start(groups, memory=tree, active=jnp.arange(m) == 0)

    return start


def descend_splits(train) -> AssignFn:
    """Lets clients pass the cuts made without them: they train from the model that was
    cut and join the half of the more similar update.

    `train` is a `train_aside`. (Algorithm 3 of the paper; newcomers begin in
    group 0.) Each cut costs 1 model down and 1 up.
    """

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        tree, clients = state.memory, jnp.minimum(cohort.ids, data.num_clients - 1)
        real, passed = cohort.ids < data.num_clients, tree.last_split[clients]

        def cut(h, carry):
            here, walked, faults = carry
            asked = real & (here == tree.parent[h]) & (passed < h)

            def sides():
                model, stayed, moved = (
                    jax.tree.map(lambda leaf: leaf[h][None], each)
                    for each in (tree.models, tree.parent_update, tree.split_update)
                )
                walkers = cohort.replace(ids=jnp.where(asked, cohort.ids, data.num_clients))
                shared, work = (jax.random.fold_in(key, h), model), full_work(jnp.zeros_like(here))
                upload, bad = train(walkers, data, shared, work)
                return cosine(upload.delta, moved)[:, 0] > cosine(upload.delta, stayed)[:, 0], bad

            leaves, bad = lax.cond(
                jnp.any(asked), sides, lambda: (jnp.zeros_like(asked), no_faults())
            )
            here = jnp.where(asked & leaves, h, here).astype(jnp.int32)
            return here, walked + asked, add_fault_counts(faults, bad)

        begin = jnp.maximum(met_groups(state, cohort), 0), jnp.zeros_like(cohort.ids), no_faults()
        gid, walked, faults = lax.fori_loop(1, jnp.sum(state.active), cut, begin)
        return gid, make_report(make_traffic(walked, walked), fault_counts=faults)

    return assign


def bipartition(
    due, linkage: str, gamma_max, stale_updates: bool, seen=lambda delta: delta
) -> RegroupFn:
    """Cuts every group that is `due(round, active, mean norm,
    longest norm, size)` [m] and can be cut.

    `seen` takes from the updates what their cosines are of.
    """

    def regroup(key, state: State, data: FederatedData, cohort: Cohort, gid, upload: Upload):
        tree, m = state.memory, state.active.size
        passed = tree.last_split.at[cohort.ids].set(jnp.sum(state.active) - 1, mode="drop")
        ids, group, sent, delta = cohort.ids, gid, upload.weight > 0, upload.delta
        if stale_updates:
            rows = jnp.where(sent, ids, data.num_clients)
            latest = jax.tree.map(
                lambda whole, part: whole.at[rows].set(part, mode="drop"), tree.last_update, delta
            )
            tree = tree.replace(
                last_update=latest, known=tree.known.at[rows].set(True, mode="drop")
            )
            ids, group = (
                jnp.arange(data.num_clients),
                state.assignment.at[ids].set(gid, mode="drop"),
            )
            sent, delta = tree.known, latest
        square = squared_norms(delta).sum(0)
        mean, size = group_mean(sent.astype(jnp.float32), group, delta, m)
        mean_square = squared_norms(mean).sum(0)
        longest = jnp.max(membership_weights(jnp.where(sent, square, 0.0), group, m), axis=0)
        ready = due(state.round, state.active, jnp.sqrt(mean_square), jnp.sqrt(longest), size)
        state = state.replace(memory=tree.replace(last_split=passed))

        def cut():
            half, gamma = bisect_updates(
                ids, jnp.where(sent, group, -1), seen(delta), ready, linkage
            )
            return split(state, ids, group, sent, delta, half, ready & (gamma > gamma_max))

        state, now = lax.cond(jnp.any(ready), cut, lambda: (state, group))
        if not stale_updates:
            return state, now
        gid = now[jnp.minimum(cohort.ids, data.num_clients - 1)]
        return (
            state.replace(assignment=jnp.where(state.assignment >= 0, now, state.assignment)),
            gid,
        )

    return regroup


def bisect_updates(ids, group, delta, ready, linkage: str):
    """Returns the half [R] int32, 0 or 1, that each of R updates falls in, and gamma
    [m] = sqrt((1 - alpha) / 2) of each `ready` group.

    alpha is the largest cosine across. Half 0 holds the client of lowest id; rows of
    group -1 are masked.
    """
    order = jnp.argsort(ids)  # neither halves nor ties depend on slots
    group = group[order]
    apart = dissimilarity(delta, delta)[order][:, order]

    def cut(g):
        inside = group == g

        def two():
            label = agglomerate(apart, 2, linkage, inside)
            across = inside[:, None] & inside & (label[:, None] != label)
            return jnp.maximum(label, 0), jnp.sqrt(jnp.min(jnp.where(across, apart, 1.0)))

        return lax.cond(ready[g], two, lambda: (jnp.zeros_like(group), jnp.zeros(())))

    label, gamma = lax.map(cut, jnp.arange(ready.size))  # by groups: the distances of one at a time
    return (
        jnp.zeros_like(group)
        .at[order]
        .set(jnp.max(jnp.where(group == jnp.arange(ready.size)[:, None], label, 0), axis=0)),
        gamma,
    )


def split(state: State, ids, group, sent, delta, half, chosen):
    """Gives half 1 of every `chosen` [m] group the lowest free group, while there
    is one; returns (state, groups [R] of the updates).

    The new group inherits model and optimizer state; the tree remembers the cut.
    """
    m, tree = state.active.size, state.memory
    target = jnp.sum(state.active) + jnp.cumsum(chosen) - 1
    target = jnp.where(chosen & (target < m), target, m).astype(jnp.int32)
    source = (
        jnp.arange(m, dtype=jnp.int32).at[target].set(jnp.arange(m, dtype=jnp.int32), mode="drop")
    )
    created = source != jnp.arange(m)
    goal = target[jnp.maximum(group, 0)]
    now = jnp.where(sent & (half == 1) & (goal < m), goal, group)
    mean, _ = group_mean(sent.astype(jnp.float32), now, delta, m)
    active = state.active | created

    def inherited(leaf):
        return leaf[source]

    def recorded(new, old):
        return jax.tree.map(partial(jax.vmap(jnp.where), created), new, old)

    tree = tree.replace(
        parent=jnp.where(created, source, tree.parent),
        models=recorded(jax.tree.map(inherited, state.groups), tree.models),
        parent_update=recorded(jax.tree.map(inherited, mean), tree.parent_update),
        split_update=recorded(mean, tree.split_update),
        last_split=tree.last_split.at[jnp.where(sent, ids, tree.last_split.size)].set(
            jnp.sum(active) - 1, mode="drop"
        ),
    )
    groups, server = jax.tree.map(inherited, (state.groups, state.server))
    return state.replace(groups=groups, server=server, active=active, memory=tree), now
