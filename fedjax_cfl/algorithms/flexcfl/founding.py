"""Group cold start: how FlexCFL and FedGroup found their groups (FlexCFL,
https://arxiv.org/abs/2108.09749, Algorithm 3; FedGroup, https://arxiv.org/abs/2010.06870,
Algorithm 1).
"""

import re
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike
from typing_extensions import TypeAliasType

from fedjax_cfl.client.cohort import make_cohort
from fedjax_cfl.client.local import Local
from fedjax_cfl.clustering import distances, features
from fedjax_cfl.clustering.assign import TrainFn
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.clustering.migrate import SHIFT_REFERENCE, init_reference
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import draw_permutation
from fedjax_cfl.method import Start, StartFn
from fedjax_cfl.round.start import GroupCount
from fedjax_cfl.system.reports import add_bills, make_bill
from fedjax_cfl.tree import group_mean
from fedjax_cfl.types import FederatedData, Key, Params, Task
from fedjax_cfl.validation import Rule


class ColdStartMemory(struct.PyTreeNode):
    """What newcomers are compared with, as the group cold start made it."""

    initial: Params  # [1, ...], the common initial model
    directions: Params  # [m, ...], mean first update of each group's founders
    has_founders: jax.Array  # [m] bool, the group has founders


class Founders(NamedTuple):
    """The F clients that found the groups, and what clusters them."""

    key: Key
    delta: Params  # [S, ...], the updates of a cohort
    rows: jax.Array  # [F] int32, those of the founders
    valid: jax.Array  # [F] bool, which of them count
    groups: GroupCount
    restarts: int  # of K-means++

    @property
    def gram(self) -> jax.Array:
        """The inner products [F, F] of their updates."""
        return distances.gram(self.delta)[self.rows][:, self.rows]

    def cluster(self, points: jax.Array, used: ArrayLike | None = None) -> jax.Array:
        """Returns the groups [F] of founders by their features [F, p], see `kmeans`."""
        weight = self.valid.astype(jnp.float32)
        m, restarts = self.groups.size, self.restarts
        return kmeans(self.key, points, m, restarts, weight=weight, used=used).labels


# (founders) -> their groups [F] int32
MeasureFn = TypeAliasType("MeasureFn", Callable[[Founders], jax.Array])


def cluster_by_edc(founders: Founders) -> jax.Array:
    """Clusters decomposed cosine features by K-means++ (FedGroup, eq. 8)."""
    groups = founders.groups
    used = groups.used if groups.is_padded else None
    return founders.cluster(features.edc(founders.gram, groups.size, used), used)


def cluster_by_randomized_edc(founders: Founders) -> jax.Array:
    """Clusters as `cluster_by_edc`, without a Gram matrix, for thousands of founders. Raises
    InputError for padded groups: what is drawn depends on their number.
    """
    key, delta, rows, _, groups, _ = founders
    if groups.is_padded:
        raise InputError("algorithm.max_m: cannot be used with measure=edc_randomized")
    return founders.cluster(features.edc_randomized(key, delta, groups.size)[rows])


def cluster_by_madc(founders: Founders) -> jax.Array:
    """Clusters mean absolute differences of cosines by complete linkage (FedGroup, eq. 7)."""
    apart = features.madc(founders.gram, founders.valid)
    return agglomerate(apart, founders.groups.used, "complete", founders.valid)


def one_founder_each(founders: Founders) -> jax.Array:
    """Makes each founder a group (ablation RCC, with one founder per group)."""
    return jnp.arange(founders.rows.size) % founders.groups.used


MEASURES: dict[str, MeasureFn] = {
    "edc": cluster_by_edc,
    "edc_randomized": cluster_by_randomized_edc,
    "madc": cluster_by_madc,
    "none": one_founder_each,
}


Pretrain = TypeAliasType(
    "Pretrain",
    Annotated[
        str,
        Rule(
            "iters:N, filled:N, epochs:N (N >= 1) or epochs:E",
            re.compile("(iters|filled|epochs):0*[1-9][0-9]{0,8}|epochs:E").fullmatch,
        ),
    ],
)


def parse_pretrain(text: str) -> Callable[[Local], Local]:
    """Returns the local work of a first update (D1), from text: iters:N mini-batch steps | filled:N
    steps of which none is short, the stream of batches of the FlexCFL code | epochs:N | epochs:E,
    as many as in a round.
    """
    kind, _, number = text.partition(":")
    if text == "epochs:E":
        return lambda local: local
    if kind == "epochs":
        return lambda local: local.replace(epochs=int(number))
    return lambda local: local.replace(steps=int(number), fill_batches=kind == "filled")


class ColdStart(NamedTuple):
    """How groups are founded."""

    alpha: int  # founders per group
    measure: MeasureFn
    restarts: int
    from_founders: bool  # groups start from the mean of their founders' models, else the initial


def group_cold_start(
    task: Task, pretrain: TrainFn, local: Local, founding: ColdStart, groups: GroupCount
) -> StartFn:
    """Starts with the group cold start: alpha m clients pre-train, and the clusters of their
    updates are the groups (FlexCFL, Algorithm 3; FedGroup, Algorithm 1). A client without data, or
    with an update that is not finite, gets no group.

    Differs from the paper: line 16 of Algorithm 3 averages updates, but means parameters;
    here groups start from mean parameters (D8).

    Args: `pretrain` makes first updates; the others are those of `flexcfl`.
    """

    def start(key: Key, data: FederatedData) -> Start:
        keys, clients = jax.random.split(key, 4), data.num_clients
        initial = jax.tree.map(lambda leaf: leaf[None], task.init(keys[0]))
        ids = draw_founders(keys[1], clients, groups, founding.alpha)
        cohort = make_cohort(ids, data, local.execution)
        upload, report = pretrain(keys[2], initial, cohort, data)
        # slots in the order of selection, whatever the devices
        rows = jnp.argsort(cohort.rank)[: ids.size]
        valid = upload.weight[rows] > 0
        founders = Founders(keys[3], upload.delta, rows, valid, groups, founding.restarts)
        labels = jnp.where(valid, founding.measure(founders), -1)
        gid = jnp.full(cohort.ids.shape, -1, jnp.int32).at[rows].set(labels.astype(jnp.int32))
        counts = (gid >= 0).astype(jnp.float32)
        directions, number = group_mean(counts, gid, upload.delta, groups.size)
        zeros = jax.tree.map(jnp.zeros_like, directions)
        moved = directions if founding.from_founders else zeros
        drawn = cohort.ids < clients
        sent = make_bill(units_down=drawn * (1 + groups.used), units_up=drawn)
        return Start(
            groups=jax.tree.map(jnp.add, initial, moved),
            active=groups.active,
            assignment=cohort.put(jnp.full(clients, -1, jnp.int32), gid),
            memory=ColdStartMemory(initial, directions, number > 0),
            rows={SHIFT_REFERENCE: init_reference(data)},
            report=report.replace(bill=add_bills(report.bill, sent)),
        )

    return start


def draw_founders(key: Key, num_clients: int, groups: GroupCount, alpha: int) -> jax.Array:
    """Draws the clients [F] int32 that found the groups, uniformly: `alpha` for each group in
    use, if there are so many, and then K.
    """
    ids = draw_permutation(key, num_clients, alpha * groups.size)
    return jnp.where(jnp.arange(ids.size) < alpha * groups.used, ids, num_clients)
