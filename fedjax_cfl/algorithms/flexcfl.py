"""Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren, "Flexible Clustered Federated Learning for
Client-Level Data Distribution Shift", IEEE TPDS 2021, https://arxiv.org/abs/2108.09749,
and Duan, Liu, Ji, Liu, Liang, Chen, Tan, "FedGroup: Efficient Federated Learning via
Decomposed Similarity-Based Clustering", ISPA 2021, https://arxiv.org/abs/2010.06870.

A sample of clients pre-trains from the common initial model; clustering their update
directions founds the groups. Every other client pre-trains once when first met and
joins the group of the nearest direction. From then on each group is FedAvg of its own,
and the group models may be mixed a little (`eta_g`).

The reference code can do two things more, both off: weigh clients by a temperature
(`temperature`), and found the groups anew in listed rounds (`recluster`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.algorithms import temperature as heat
from fedjax_cfl.clustering import distances
from fedjax_cfl.clustering.assign import cold_start, nearest_direction, random_group
from fedjax_cfl.clustering.features import edc, edc_randomized, madc
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.clustering.migrate import (
    DETECTORS,
    ShiftReference,
    init_reference,
    on_shift,
    reassign,
)
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.round.aggregate import inter_group
from fedjax_cfl.round.cohort import make_cohort, over_clients
from fedjax_cfl.round.engine import Start, federated
from fedjax_cfl.round.local import full_work
from fedjax_cfl.round.objective import erm, proximal
from fedjax_cfl.round.sgd import sgd
from fedjax_cfl.round.traffic import add_traffic, make_traffic
from fedjax_cfl.round.tree import group_mean, group_sum, membership_weights
from fedjax_cfl.types import Algorithm, FederatedData, Params, State


class ColdStartMemory(struct.PyTreeNode):
    """What newcomers are compared with: frozen after the group cold start, unless
    groups are founded anew.
    """

    initial: Params  # [1, ...], the common initial model
    directions: Params  # [m, ...], mean first update of each group's founders
    has_founders: jax.Array  # [m] bool, the group has founders
    shift_reference: ShiftReference  # label counts when each client was last assigned
    temperature: Any = ()  # [K] float32, 0 .. T_max, only where temperatures are on


def flexcfl(
    task,
    local,
    select,
    *,
    m: int,
    alpha: int = 20,
    measure: str = "edc",
    eta_g=0.0,
    mix: str = "normalized",
    pretrain: str = "iters:50",
    group_start: str = "pretrained",
    restarts: int = 10,
    mu=0.0,
    newcomers: str = "nearest",
    dynamic: bool = True,
    detector: str = "tv",
    temperature: str = "none",
    temperature_max: float = 10.0,
    temperature_bias: str = "discrepancy",
    temperature_floor: bool = False,
    recluster: Sequence[int] = (),
) -> Algorithm:
    """FlexCFL; `dynamic=False` is FedGroup, which never moves a client, and with mu > 0
    FedGrouProx.

    Args: `alpha` founders per group; `measure` edc | edc_randomized | madc | none (each
    founder is a group of its own: ablation RCC); `eta_g` strength and `mix` form
    (normalized | paper) of the inter-group aggregation; `pretrain` iters:N
    (mini-batches) | epochs:N | epochs:E; `group_start` pretrained (mean of the
    founders' models) | initial; `restarts` of K-means++; `newcomers` nearest | random
    (ablation RAC); `detector` tv | label_w1 | counts_as_samples of the shifts that make
    a client start cold again (eq. 9); `temperature` none | step | linear | lied | eied,
    by the `temperature_bias` discrepancy | dissimilarity, see `temperature`;
    `recluster` rounds, from 0, that begin with founding the groups anew.
    Raises InputError for a value that is not listed here.
    """
    require("algorithm.measure", measure, ("edc", "edc_randomized", "madc", "none"))
    require("algorithm.mix", mix, ("normalized", "paper"))
    require("algorithm.group_start", group_start, ("pretrained", "initial"))
    require("algorithm.newcomers", newcomers, ("nearest", "random"))
    require("algorithm.detector", detector, DETECTORS)
    require("algorithm.temperature", temperature, ("none", *heat.STRATEGIES))
    require("algorithm.temperature_bias", temperature_bias, heat.BIASES)
    if not all(type(number) is int and number >= 0 for number in recluster):
        raise InputError(
            f"algorithm.recluster={recluster}: must be a list of rounds, whole numbers >= 0, as"
            " [50,100]"
        )
    if not temperature_max > 1:
        raise InputError(
            f"algorithm.temperature_max={temperature_max}: must be a finite number > 1"
        )
    local = local.resolve()
    trial = over_clients(make_pretrain_solver(task, local, pretrain), local)
    mixing = None if isinstance(eta_g, int | float) and eta_g == 0 else inter_group(eta_g, mix)
    found = make_found_groups(trial, local, m, measure, restarts)
    count = m if measure == "none" else alpha * m
    start = group_cold_start(task, found, count, m, group_start)
    move = on_shift(nearest_direction(trial), local, detector) if dynamic else None
    parts = {}
    if temperature != "none":
        start = heat.init_temperatures(start, temperature_max)
        move = heat.reset_shifted(move, temperature_max) if move else None
        parts["aggregate"] = heat.temperature_mean(temperature_max, temperature_floor)
        parts["remember"] = heat.update_temperatures(temperature, temperature_max, temperature_bias)
    return federated(
        task,
        local,
        select=select,
        solve=sgd(task, local, proximal(mu, erm(task))),
        start=start,
        migrate=(
            recluster_at(found, trial, local, count, recluster, temperature_max, move)
            if recluster
            else move
        ),
        assign=cold_start(nearest_direction(trial) if newcomers == "nearest" else random_group),
        mix=mixing,
        founders=(
            None
            if dynamic or recluster or parts
            else lambda key, clients: draw_founders(jax.random.split(key, 4)[1], clients, count)
        ),
        **parts,
    )


def make_pretrain_solver(task, local, length: str):
    """Returns the solver of a client's first update, by `length`: iters:N | epochs:N |
    epochs:E (D1).
    """
    kind, _, number = str(length).partition(":")
    if kind == "epochs" and number == "E":
        return sgd(task, local)
    if kind not in ("iters", "epochs") or not number.isdecimal() or int(number) < 1:
        raise InputError(f"algorithm.pretrain={length}: iters:N, epochs:N (N >= 1) or epochs:E")
    if kind == "epochs":
        return sgd(task, local._replace(epochs=int(number)))
    return sgd(task, local, iterations=int(number))


def cluster_founders(key, upload, founders, m: int, measure: str, restarts: int):
    """Returns the group [len(founders)] of each founder's update; `founders` are their
    slots. Founders without data get -1.
    """
    valid = upload.weight[founders] > 0
    if measure == "none":
        return jnp.where(valid, jnp.arange(founders.size), -1)
    if measure == "edc_randomized":
        features = edc_randomized(key, upload.delta, m)[founders]
    else:
        gram = distances.gram(upload.delta)[founders][:, founders]
        if measure == "madc":
            return agglomerate(madc(gram, valid), m, "complete", valid)
        features = edc(gram, m)
    found = kmeans(key, features, m, restarts=restarts, weight=valid.astype(jnp.float32))
    return jnp.where(valid, found.labels, -1)


def make_found_groups(trial, local, m: int, measure: str, restarts: int):
    """Returns found(keys [2], ids, initial [1, ...], data) -> (cohort, gid [S],
    directions [m, ...], founders [m]) of newly founded groups.

    The clients `ids` pre-train from the initial model and are clustered; directions are
    mean updates. Slots without a founder have gid -1.
    """

    def found(keys, ids, initial, data: FederatedData):
        cohort = make_cohort(ids, data, local)
        upload = trial(cohort, data, (keys[0], initial), full_work(jnp.zeros_like(cohort.ids)))
        founders = jnp.argsort(cohort.rank)[
            : ids.size
        ]  # slots in the order of selection, whatever the devices
        labels = cluster_founders(keys[1], upload, founders, m, measure, restarts)
        gid = jnp.full(cohort.ids.shape, -1, jnp.int32).at[founders].set(labels.astype(jnp.int32))
        return cohort, gid, *group_mean((gid >= 0).astype(jnp.float32), gid, upload.delta, m)

    return found


def group_cold_start(task, found, count: int, m: int, group_start: str):
    """Group cold start (FlexCFL, Algorithm 3; FedGroup, Algorithm 1): pre-train `count`
    clients, cluster their updates, found the groups.

    Differs from the paper: Algorithm 3 line 16 averages updates where parameters are
    meant; groups start from mean parameters (D8).
    """

    def start(key, data):
        keys = jax.random.split(key, 4)
        initial = jax.tree.map(lambda leaf: leaf[None], task.init(keys[0]))
        ids = draw_founders(keys[1], data.num_clients, count)
        cohort, gid, directions, founders = found(keys[2:], ids, initial, data)
        began = (
            directions if group_start == "pretrained" else jax.tree.map(jnp.zeros_like, directions)
        )
        return Start(
            groups=jax.tree.map(jnp.add, initial, began),
            assignment=jnp.full(data.num_clients, -1, jnp.int32)
            .at[cohort.ids]
            .set(gid, mode="drop"),
            memory=ColdStartMemory(initial, directions, founders > 0, init_reference(data)),
            traffic=make_traffic(units_down=ids.size * (1 + m), units_up=ids.size),
        )

    return start


def draw_founders(key, num_clients: int, count: int):
    """Returns the clients that found the groups, drawn uniformly."""
    return jax.random.permutation(key, num_clients)[:count].astype(jnp.int32)


def recluster_at(found, trial, local, count: int, rounds: Sequence[int], highest: float, move=None):
    """Returns migrate(key, state, data): after `move`, if any, the groups are founded
    anew in the listed rounds (D38).

    Up to `count` random clients met pre-train from the auxiliary model, the mean of the
    group models in use, and are clustered; all others met start cold against the new
    directions, and so will newcomers. A group's model becomes the mean of its members'
    former models: the training so far is kept. Numbers of groups mean nothing from then
    on, so that nobody counts as moved.
    """

    def anew(key, state: State, data: FederatedData):
        keys, clients, m = jax.random.split(key, 4), data.num_clients, state.active.size
        met = state.assignment >= 0
        lots = jnp.where(met, jax.random.uniform(keys[0], (clients,)), 2.0)
        drawn = jnp.argsort(lots)[:count].astype(jnp.int32)
        ids = jnp.where(met[drawn], drawn, clients)
        old = membership_weights(met.astype(jnp.float32), state.assignment, m)
        used = (old.sum(0) > 0).astype(jnp.float32)
        auxiliary = group_sum(used[:, None] / jnp.maximum(used.sum(), 1.0), state.groups)
        cohort, gid, directions, founders = found(keys[1:3], ids, auxiliary, data)
        founded = jnp.full(clients, -1, jnp.int32).at[cohort.ids].set(gid, mode="drop")
        memory = state.memory.replace(
            initial=auxiliary, directions=directions, has_founders=founders > 0
        )
        memory = memory.replace(
            temperature=jax.tree.map(lambda t: jnp.full_like(t, highest), memory.temperature)
        )
        begun = state.replace(assignment=founded, memory=memory)
        assignment = reassign(
            nearest_direction(trial), local, keys[3], begun, data, met & (founded < 0)
        )
        joined = old.T @ membership_weights(
            met.astype(jnp.float32), assignment, m
        )  # [old, new] clients
        size = joined.sum(0)
        means = group_sum(
            jnp.where(size > 0, joined / jnp.maximum(size, 1.0), jnp.eye(m)), state.groups
        )
        drawn_count = jnp.sum(met[drawn])
        sent = make_traffic(
            units_down=drawn_count + m * met.sum(), units_up=drawn_count
        )  # the start, then m directions to everybody met
        return begun.replace(assignment=assignment, groups=means), sent

    def migrate(key, state: State, data: FederatedData):
        state, moved, walked = (
            move(key, state, data) if move else (state, jnp.zeros((), jnp.int32), make_traffic())
        )
        due = jnp.any(jnp.array(tuple(rounds)) == state.round)
        state, sent = jax.lax.cond(
            due, anew, lambda key, state, data: (state, make_traffic()), key, state, data
        )
        return state, moved, add_traffic(walked, sent)

    return migrate


def fedgroup(task, local, select, *, m: int, **options) -> Algorithm:
    """FedGroup: FlexCFL with static groups and no inter-group aggregation; `mu` > 0 is
    FedGrouProx.
    """
    return flexcfl(task, local, select, m=m, dynamic=False, **options)


def rcc(task, local, select, *, m: int, **options) -> Algorithm:
    """Ablation RCC: m random clients found a group each."""
    return flexcfl(task, local, select, m=m, measure="none", **options)


def rac(task, local, select, *, m: int, **options) -> Algorithm:
    """Ablation RAC: newcomers join a random group."""
    return flexcfl(task, local, select, m=m, newcomers="random", **options)
