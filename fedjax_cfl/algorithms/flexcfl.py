"""Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren, "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift",
IEEE TPDS 2021, https://arxiv.org/abs/2108.09749, and Duan, Liu, Ji, Liu, Liang, Chen, Tan, "FedGroup: Efficient Federated Learning via
Decomposed Similarity-Based Clustering", ISPA 2021, https://arxiv.org/abs/2010.06870.

A sample of clients pre-trains from the common initial model; clustering their update directions founds the groups. Every other client
pre-trains once when first met and joins the group of the nearest direction. From then on each group is FedAvg of its own, and the
group models may be mixed a little (`eta_g`).
"""

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl import cluster
from fedjax_cfl import local as training
from fedjax_cfl.aggregate import group_mean, inter_group
from fedjax_cfl.assign import cold_start, nearest_direction, random_group
from fedjax_cfl.engine import Start, federated
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.migrate import DETECTORS, Watch, on_shift, watch
from fedjax_cfl.objective import erm, proximal
from fedjax_cfl.traffic import traffic
from fedjax_cfl.types import Algorithm, Params


@struct.dataclass
class Directions:
    """What newcomers are compared with: frozen after the group cold start."""

    start: Params  # [1, ...], the common initial model
    directions: Params  # [m, ...], mean first update of each group's founders
    planted: jax.Array  # [m] bool, the group has founders
    watch: Watch  # label counts when each client was last assigned


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
) -> Algorithm:
    """FlexCFL; `dynamic=False` is FedGroup, which never moves a client, and with mu > 0 FedGrouProx.

    Args: `alpha` founders per group; `measure` edc | edc_randomized | madc | none (each founder is a group of its own: ablation RCC);
    `eta_g` strength and `mix` form (normalized | paper) of the inter-group aggregation; `pretrain` iters:N (mini-batches) | epochs:N |
    epochs:E; `group_start` pretrained (mean of the founders' models) | initial; `restarts` of K-means++; `newcomers` nearest | random
    (ablation RAC); `detector` tv | label_w1 | counts_as_samples of the shifts that make a client start cold again (eq. 9).
    Raises InputError for a value that is not listed here.
    """
    require("algorithm.measure", measure, ("edc", "edc_randomized", "madc", "none"))
    require("algorithm.mix", mix, ("normalized", "paper"))
    require("algorithm.group_start", group_start, ("pretrained", "initial"))
    require("algorithm.newcomers", newcomers, ("nearest", "random"))
    require("algorithm.detector", detector, DETECTORS)
    local = local.resolved()
    trial = training.over_clients(pretraining(task, local, pretrain), local)
    mixing = None if isinstance(eta_g, int | float) and eta_g == 0 else inter_group(eta_g, mix)
    return federated(
        task,
        local,
        select=select,
        solve=training.sgd(task, local, proximal(mu, erm(task)) if not isinstance(mu, int | float) or mu else None),
        start=group_cold_start(task, local, trial, m, 1 if measure == "none" else alpha, measure, group_start, restarts),
        migrate=on_shift(nearest_direction(trial), local, detector) if dynamic else None,
        assign=cold_start(nearest_direction(trial) if newcomers == "nearest" else random_group),
        mix=mixing,
    )


def pretraining(task, local, length: str):
    """Returns the solver of a client's first update, by `length`: iters:N | epochs:N | epochs:E (D1)."""
    kind, _, number = str(length).partition(":")
    if kind == "epochs" and number == "E":
        return training.sgd(task, local)
    if kind not in ("iters", "epochs") or not number.isdecimal() or int(number) < 1:
        raise InputError(f"algorithm.pretrain={length}: iters:N, epochs:N (N >= 1) or epochs:E")
    if kind == "epochs":
        return training.sgd(task, local._replace(epochs=int(number)))
    return training.sgd(task, local, iterations=int(number))


def founding_groups(key, upload, founders, m: int, measure: str, restarts: int):
    """Returns the group [len(founders)] of each founder's update; `founders` are their slots. Founders without data get -1."""
    valid = upload.weight[founders] > 0
    if measure == "none":
        return jnp.where(valid, jnp.arange(founders.size), -1)
    if measure == "edc_randomized":
        features = cluster.edc_randomized(key, upload.delta, m)[founders]
    else:
        gram = cluster.gram(upload.delta)[founders][:, founders]
        if measure == "madc":
            return cluster.agglomerate(cluster.madc(gram, valid), m, "complete", valid)
        features = cluster.edc(gram, m)
    found = cluster.kmeans(key, features, m, restarts=restarts, weight=valid.astype(jnp.float32))
    return jnp.where(valid, found.labels, -1)


def group_cold_start(task, local, trial, m: int, alpha: int, measure: str, group_start: str, restarts: int):
    """Group cold start (FlexCFL, Algorithm 3; FedGroup, Algorithm 1): pre-train alpha * m clients, cluster their updates, found the groups.

    Differs from the paper: Algorithm 3 line 16 averages updates where parameters are meant; groups start from mean parameters (D8).
    """

    def start(key, data):
        keys = jax.random.split(key, 4)
        initial = jax.tree.map(lambda leaf: leaf[None], task.init(keys[0]))
        count = min(alpha * m, data.num_clients)
        ids = jax.random.permutation(keys[1], data.num_clients)[:count].astype(jnp.int32)
        cohort = training.dealt(ids, data, local)
        upload = trial(cohort, data, (keys[2], initial), training.full(jnp.zeros_like(cohort.ids)))
        founders = jnp.argsort(cohort.rank)[:count]  # slots in the order of selection, whatever the devices
        found = founding_groups(keys[3], upload, founders, m, measure, restarts)
        gid = jnp.full(cohort.ids.shape, -1, jnp.int32).at[founders].set(found.astype(jnp.int32))
        directions, mass = group_mean((gid >= 0).astype(jnp.float32), gid, upload.delta, m)
        began = directions if group_start == "pretrained" else jax.tree.map(jnp.zeros_like, directions)
        return Start(
            groups=jax.tree.map(jnp.add, initial, began),
            assignment=jnp.full(data.num_clients, -1, jnp.int32).at[cohort.ids].set(gid, mode="drop"),
            memory=Directions(initial, directions, mass > 0, watch(data)),
            spent=traffic(units_down=count * (1 + m), units_up=count),
        )

    return start


def fedgroup(task, local, select, *, m: int, **options) -> Algorithm:
    """FedGroup: FlexCFL with static groups and no inter-group aggregation; `mu` > 0 is FedGrouProx."""
    return flexcfl(task, local, select, m=m, dynamic=False, **options)


def rcc(task, local, select, *, m: int, **options) -> Algorithm:
    """Ablation RCC: m random clients found a group each."""
    return flexcfl(task, local, select, m=m, measure="none", **options)


def rac(task, local, select, *, m: int, **options) -> Algorithm:
    """Ablation RAC: newcomers join a random group."""
    return flexcfl(task, local, select, m=m, newcomers="random", **options)
