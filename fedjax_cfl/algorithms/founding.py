"""Group cold start: how the groups of FlexCFL and FedGroup are founded (FlexCFL,
https://arxiv.org/abs/2108.09749, Algorithm 3; FedGroup, https://arxiv.org/abs/2010.06870,
Algorithm 1), and founded anew.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.algorithms.temperature import Temperature
from fedjax_cfl.clustering import distances, features
from fedjax_cfl.clustering.assign import ChooseFn, nearest_direction, random_group
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.clustering.migrate import ShiftReference, init_reference, reassign
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.cohort import make_cohort
from fedjax_cfl.round.faults import add_fault_counts
from fedjax_cfl.round.hooks import MigrateFn, Start, add_reports, make_report
from fedjax_cfl.round.local import Local, full_work
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean, group_sum, membership_weights
from fedjax_cfl.types import FederatedData, Key, Params, State, Task, Upload


class ColdStartMemory(struct.PyTreeNode):
    """What newcomers are compared with: frozen after the group cold start, unless
    groups are founded anew.
    """

    initial: Params  # [1, ...], the common initial model
    directions: Params  # [m, ...], mean first update of each group's founders
    has_founders: jax.Array  # [m] bool, the group has founders
    shift_reference: ShiftReference  # label counts when each client was last assigned
    temperature: Any = ()  # [K] float32, 0 .. T_max, only where temperatures are on


class MeasureFn(Protocol):
    """Clusters the founders by their updates; returns their groups [F] int32. `rows` [F]
    are their slots in the upload, `valid` [F] bool those whose update counts.
    """

    def __call__(
        self, key: Key, upload: Upload, rows: jax.Array, valid: jax.Array, m: int
    ) -> jax.Array: ...


def cluster_by_edc(restarts: int = 10) -> MeasureFn:
    """Clusters decomposed cosine features by K-means++ (FedGroup, eq. 8)."""

    def measure(key, upload, rows, valid, m):
        gram = distances.gram(upload.delta)[rows][:, rows]
        points = features.edc(gram, m)
        return kmeans(key, points, m, restarts=restarts, weight=valid.astype(jnp.float32)).labels

    return measure


def cluster_by_randomized_edc(restarts: int = 10) -> MeasureFn:
    """As `cluster_by_edc`, for thousands of founders: no Gram matrix is made."""

    def measure(key, upload, rows, valid, m):
        points = features.edc_randomized(key, upload.delta, m)[rows]
        return kmeans(key, points, m, restarts=restarts, weight=valid.astype(jnp.float32)).labels

    return measure


def cluster_by_madc(key, upload: Upload, rows, valid, m: int) -> jax.Array:
    """Clusters mean absolute differences of cosines by complete linkage (FedGroup, eq. 7;
    a `MeasureFn`).
    """
    gram = distances.gram(upload.delta)[rows][:, rows]
    return agglomerate(features.madc(gram, valid), m, "complete", valid)


def found_alone(key, upload: Upload, rows, valid, m: int) -> jax.Array:
    """Each founder is a group of its own (ablation RCC, with one founder per group; a
    `MeasureFn`).
    """
    return jnp.arange(rows.size) % m


def train_steps(steps: int) -> Callable[[Local], Local]:
    """First updates take `steps` mini-batch steps (D1: 50)."""
    return lambda local: local._replace(steps=steps)


def train_epochs(epochs: int | None = None) -> Callable[[Local], Local]:
    """First updates take `epochs` epochs; None: as many as in a round (D1)."""
    return lambda local: local if epochs is None else local._replace(epochs=epochs)


def parse_pretrain(text: str) -> Callable[[Local], Local]:
    """Returns the local work of a first update, written iters:N | epochs:N | epochs:E (D1).
    Raises InputError for anything else.
    """
    kind, _, number = text.partition(":")
    if kind == "epochs" and number == "E":
        return train_epochs()
    if kind not in ("iters", "epochs") or not number.isdecimal() or int(number) < 1:
        raise InputError(f"algorithm.pretrain={text}: iters:N, epochs:N (N >= 1) or epochs:E")
    return (train_epochs if kind == "epochs" else train_steps)(int(number))


def join_nearest(pretrain) -> ChooseFn:
    """Newcomers join the group of the nearest direction."""
    return nearest_direction(pretrain)


def join_random(pretrain) -> ChooseFn:
    """Newcomers join a random group (ablation RAC)."""
    return random_group


def start_from_founders(directions: Params) -> Params:
    """Groups start from the mean of their founders' models."""
    return directions


def start_from_initial(directions: Params) -> Params:
    """Groups start from the initial model."""
    return jax.tree.map(jnp.zeros_like, directions)


class ColdStart(NamedTuple):
    """How groups are founded, and how newcomers join them."""

    alpha: int = 20  # founders per group
    # cluster_by_edc | cluster_by_randomized_edc | cluster_by_madc | found_alone
    measure: MeasureFn = cluster_by_edc()
    pretrain: Callable[[Local], Local] = train_steps(50)  # the local work of a first update
    group_start: Callable[[Params], Params] = start_from_founders  # or start_from_initial (D8)
    newcomers: Callable[[Any], ChooseFn] = join_nearest  # join_nearest | join_random
    recluster: Sequence[int] = ()  # rounds, from 0, that begin with founding the groups anew


def make_found_groups(trial, local: Local, founding: ColdStart, m: int):
    """Returns found(keys [2], ids, initial [1, ...], data) -> (cohort, gid [S],
    directions [m, ...], founders [m], FaultCounts) of newly founded groups.

    The clients `ids` pre-train from the initial model and are clustered; directions are
    mean updates. Slots without a founder have gid -1, so have founders whose update is not
    finite or who have no data.
    """

    def found(keys, ids, initial, data: FederatedData):
        cohort = make_cohort(ids, data, local)
        work = full_work(jnp.zeros_like(cohort.ids))
        upload, faults = trial(cohort, data, (keys[0], initial), work)
        # slots in the order of selection, whatever the devices
        rows = jnp.argsort(cohort.rank)[: ids.size]
        valid = upload.weight[rows] > 0
        labels = jnp.where(valid, founding.measure(keys[1], upload, rows, valid, m), -1)
        gid = jnp.full(cohort.ids.shape, -1, jnp.int32).at[rows].set(labels.astype(jnp.int32))
        means = group_mean((gid >= 0).astype(jnp.float32), gid, upload.delta, m)
        return cohort, gid, *means, faults

    return found


def group_cold_start(task: Task, found, founding: ColdStart, m: int):
    """Group cold start (FlexCFL, Algorithm 3; FedGroup, Algorithm 1): pre-train
    alpha m clients, cluster their updates, found the groups.

    Differs from the paper: Algorithm 3 line 16 averages updates where parameters are
    meant; groups start from mean parameters (D8).
    """

    def start(key, data: FederatedData) -> Start:
        keys = jax.random.split(key, 4)
        initial = jax.tree.map(lambda leaf: leaf[None], task.init(keys[0]))
        ids = draw_founders(keys[1], data.num_clients, founding.alpha * m)
        cohort, gid, directions, founders, faults = found(keys[2:], ids, initial, data)
        unknown = jnp.full(data.num_clients, -1, jnp.int32)
        sent = make_traffic(units_down=ids.size * (1 + m), units_up=ids.size)
        return Start(
            groups=jax.tree.map(jnp.add, initial, founding.group_start(directions)),
            assignment=unknown.at[cohort.ids].set(gid, mode="drop"),
            memory=ColdStartMemory(initial, directions, founders > 0, init_reference(data)),
            report=make_report(sent, fault_counts=faults),
        )

    return start


def draw_founders(key, num_clients: int, count: int):
    """Returns the clients that found the groups, drawn uniformly."""
    return jax.random.permutation(key, num_clients)[:count].astype(jnp.int32)


def recluster_at(
    found,
    trial,
    local: Local,
    founding: ColdStart,
    heat: Temperature | None,
    move: MigrateFn | None,
) -> MigrateFn:
    """After `move`, if any, the groups are founded anew in the listed rounds (D38).

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
        drawn = jnp.argsort(lots)[: founding.alpha * m].astype(jnp.int32)
        ids = jnp.where(met[drawn], drawn, clients)
        old = membership_weights(met.astype(jnp.float32), state.assignment, m)
        used = (old.sum(0) > 0).astype(jnp.float32)
        auxiliary = group_sum(used[:, None] / jnp.maximum(used.sum(), 1.0), state.groups)
        cohort, gid, directions, founders, faults = found(keys[1:3], ids, auxiliary, data)
        founded = jnp.full(clients, -1, jnp.int32).at[cohort.ids].set(gid, mode="drop")
        memory = state.memory.replace(
            initial=auxiliary, directions=directions, has_founders=founders > 0
        )
        if heat:
            memory = memory.replace(
                temperature=jnp.full_like(memory.temperature, heat.temperature_max)
            )
        begun = state.replace(assignment=founded, memory=memory)
        assignment, more = reassign(
            nearest_direction(trial), local, keys[3], begun, data, met & (founded < 0)
        )
        new = membership_weights(met.astype(jnp.float32), assignment, m)
        means = mean_former_models(old.T @ new, state.groups)
        drawn_count = jnp.sum(met[drawn])
        # the start, then m directions to everybody met
        sent = make_traffic(units_down=drawn_count + m * met.sum(), units_up=drawn_count)
        report = make_report(sent, fault_counts=add_fault_counts(faults, more))
        return begun.replace(assignment=assignment, groups=means), report

    def migrate(key, state: State, data: FederatedData):
        state, moved = move(key, state, data) if move else (state, make_report())
        due = jnp.any(jnp.array(tuple(founding.recluster)) == state.round)
        state, founded = jax.lax.cond(
            due, anew, lambda key, state, data: (state, make_report()), key, state, data
        )
        return state, add_reports(moved, founded)

    return migrate


def mean_former_models(joined, groups: Params) -> Params:
    """Returns new group models [m, ...], each the mean of its members' former ones; `joined`
    [old, new] counts the clients. An empty group keeps its model.
    """
    size = joined.sum(0)
    weights = jnp.where(size > 0, joined / jnp.maximum(size, 1.0), jnp.eye(len(joined)))
    return group_sum(weights, groups)
