"""Group cold start: how FlexCFL and FedGroup found their groups, and found them again
(FlexCFL, https://arxiv.org/abs/2108.09749, Algorithm 3; FedGroup,
https://arxiv.org/abs/2010.06870, Algorithm 1).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.algorithms.flexcfl.temperature import Temperature
from fedjax_cfl.client.cohort import make_cohort
from fedjax_cfl.client.local import Local
from fedjax_cfl.clustering import distances, features
from fedjax_cfl.clustering.assign import TrainFn, nearest_direction, random_group
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.clustering.migrate import ShiftReference, init_reference, reassign
from fedjax_cfl.clustering.recluster import transition_shares
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import draw_permutation
from fedjax_cfl.round.hooks import AssignFn, MigrateFn, Start, StartFn
from fedjax_cfl.round.start import GroupCount
from fedjax_cfl.system.reports import add_fault_counts, add_reports, make_report, make_traffic
from fedjax_cfl.tree import group_mean, group_sum, membership_weights
from fedjax_cfl.types import (
    Cohort,
    FaultCounts,
    FederatedData,
    Key,
    Params,
    Report,
    State,
    Task,
    Upload,
)
from fedjax_cfl.validation import PositiveInt, check_arguments


class ColdStartMemory(struct.PyTreeNode):
    """What newcomers are compared with. It stays as the group cold start made it, unless
    groups are founded again.
    """

    initial: Params  # [1, ...], the common initial model
    directions: Params  # [m, ...], mean first update of each group's founders
    has_founders: jax.Array  # [m] bool, the group has founders
    shift_reference: ShiftReference  # label counts when each client was last assigned
    temperature: Any = ()  # [K] float32, 0 .. T_max; () without temperatures


class MeasureFn(Protocol):
    """Clusters F founders by their updates; returns their groups [F] int32.

    Args: `rows` [F] int32 are their slots in the upload; `valid` [F] bool says whose update
    counts; `groups` says how many groups there are.
    """

    def __call__(
        self, key: Key, upload: Upload, rows: jax.Array, valid: jax.Array, groups: GroupCount
    ) -> jax.Array: ...


def cluster_by_edc(restarts: PositiveInt = 10) -> MeasureFn:
    """Clusters decomposed cosine features by K-means++ (FedGroup, eq. 8)."""
    check_arguments(cluster_by_edc, locals(), "algorithm")

    def measure(
        key: Key, upload: Upload, rows: jax.Array, valid: jax.Array, groups: GroupCount
    ) -> jax.Array:
        gram, m = distances.gram(upload.delta)[rows][:, rows], groups.size
        used, weight = groups.used if groups.is_padded else None, valid.astype(jnp.float32)
        points = features.edc(gram, m, used)
        return kmeans(key, points, m, restarts, weight=weight, used=used).labels

    return measure


def cluster_by_randomized_edc(restarts: PositiveInt = 10) -> MeasureFn:
    """Clusters as `cluster_by_edc`, without a Gram matrix, for thousands of founders.

    Its measure raises InputError for padded groups: what is drawn depends on their number.
    """
    check_arguments(cluster_by_randomized_edc, locals(), "algorithm")

    def measure(
        key: Key, upload: Upload, rows: jax.Array, valid: jax.Array, groups: GroupCount
    ) -> jax.Array:
        if groups.is_padded:
            raise InputError("algorithm.max_m: cannot be used with measure=edc_randomized")
        points, m = features.edc_randomized(key, upload.delta, groups.size)[rows], groups.size
        return kmeans(key, points, m, restarts, weight=valid.astype(jnp.float32)).labels

    return measure


def cluster_by_madc(
    key: Key, upload: Upload, rows: jax.Array, valid: jax.Array, groups: GroupCount
) -> jax.Array:
    """Clusters mean absolute differences of cosines by complete linkage (FedGroup, eq. 7;
    a `MeasureFn`).
    """
    gram = distances.gram(upload.delta)[rows][:, rows]
    return agglomerate(features.madc(gram, valid), groups.used, "complete", valid)


def one_founder_each(
    key: Key, upload: Upload, rows: jax.Array, valid: jax.Array, groups: GroupCount
) -> jax.Array:
    """Makes each founder a group (ablation RCC, with one founder per group; a `MeasureFn`)."""
    return jnp.arange(rows.size) % groups.used


def train_steps(steps: int) -> Callable[[Local], Local]:
    """Lets first updates take `steps` mini-batch steps (D1: 50)."""
    return lambda local: local.replace(steps=steps)


def train_full_batches(steps: int) -> Callable[[Local], Local]:
    """Lets first updates take `steps` mini-batch steps of which none is short: the stream of
    batches of the FlexCFL code (D1).
    """
    return lambda local: local.replace(steps=steps, fill_batches=True)


def train_epochs(epochs: int | None = None) -> Callable[[Local], Local]:
    """Lets first updates take `epochs` epochs; None: as many as in a round (D1)."""
    return lambda local: local if epochs is None else local.replace(epochs=epochs)


def parse_pretrain(text: str) -> Callable[[Local], Local]:
    """Returns the local work of a first update: iters:N | filled:N | epochs:N | epochs:E (D1).
    Raises InputError for anything else.
    """
    kind, _, number = text.partition(":")
    if kind == "epochs" and number == "E":
        return train_epochs()
    kinds = {"iters": train_steps, "filled": train_full_batches, "epochs": train_epochs}
    if kind not in kinds or not number.isdecimal() or int(number) < 1:
        raise InputError(
            f"algorithm.pretrain={text}: iters:N, filled:N, epochs:N (N >= 1) or epochs:E"
        )
    return kinds[kind](int(number))


def join_random(pretrain: TrainFn) -> AssignFn:
    """Lets newcomers join a random group (ablation RAC)."""
    return random_group


def start_from_founders(directions: Params) -> Params:
    """Starts groups from the mean of their founders' models; returns model - initial model."""
    return directions


def start_from_initial(directions: Params) -> Params:
    """Starts groups from the initial model; returns model - initial model, which is 0."""
    return jax.tree.map(jnp.zeros_like, directions)


class ColdStart(NamedTuple):
    """How groups are founded, and how newcomers join them."""

    alpha: PositiveInt = 20  # founders per group
    # cluster_by_edc | cluster_by_randomized_edc | cluster_by_madc | one_founder_each
    measure: MeasureFn = cluster_by_edc()
    pretrain: Callable[[Local], Local] = train_steps(50)  # the local work of a first update
    group_start: Callable[[Params], Params] = start_from_founders  # or start_from_initial (D8)
    newcomers: Callable[[TrainFn], AssignFn] = nearest_direction  # or join_random
    recluster: Sequence[int] = ()  # rounds, from 0, before which the groups are founded again
    # room for so many groups: runs of any m up to it share what is compiled; None: m
    max_m: PositiveInt | None = None


class FoundFn(Protocol):
    """Founds groups of the clients `ids` [F]; `keys` [2], `initial` [1, ...] is the model
    that they pre-train from.

    Returns their cohort, the groups gid [S], the mean updates (directions) [m, ...], the
    number of founders [m] of each group, and what went wrong. A slot has gid -1 if it is
    empty, or if its client has no data or an update that is not finite.
    """

    def __call__(
        self, keys: Key, ids: jax.Array, initial: Params, data: FederatedData
    ) -> tuple[Cohort, jax.Array, Params, jax.Array, FaultCounts]: ...


def make_found_groups(
    pretrain: TrainFn, local: Local, founding: ColdStart, groups: GroupCount
) -> FoundFn:
    """Returns a function that founds groups: clients pre-train and are clustered."""

    def found(
        keys: Key, ids: jax.Array, initial: Params, data: FederatedData
    ) -> tuple[Cohort, jax.Array, Params, jax.Array, FaultCounts]:
        cohort = make_cohort(ids, data, local.execution)
        upload, report = pretrain(keys[0], initial, cohort, data)
        # slots in the order of selection, whatever the devices
        rows = jnp.argsort(cohort.rank)[: ids.size]
        valid = upload.weight[rows] > 0
        labels = jnp.where(valid, founding.measure(keys[1], upload, rows, valid, groups), -1)
        gid = jnp.full(cohort.ids.shape, -1, jnp.int32).at[rows].set(labels.astype(jnp.int32))
        counts = (gid >= 0).astype(jnp.float32)
        directions, founders = group_mean(counts, gid, upload.delta, groups.size)
        return cohort, gid, directions, founders, report.fault_counts

    return found


def group_cold_start(
    task: Task, found: FoundFn, founding: ColdStart, groups: GroupCount
) -> StartFn:
    """Starts with the group cold start: alpha m clients pre-train, and the clusters of their
    updates are the groups (FlexCFL, Algorithm 3; FedGroup, Algorithm 1).

    Differs from the paper: line 16 of Algorithm 3 averages updates, but means parameters;
    here groups start from mean parameters (D8).
    """

    def start(key: Key, data: FederatedData) -> Start:
        keys = jax.random.split(key, 4)
        initial = jax.tree.map(lambda leaf: leaf[None], task.init(keys[0]))
        ids = draw_founders(keys[1], data.num_clients, groups, founding.alpha)
        cohort, gid, directions, founders, faults = found(keys[2:], ids, initial, data)
        unknown = jnp.full(data.num_clients, -1, jnp.int32)
        drawn = jnp.sum(ids < data.num_clients)
        sent = make_traffic(units_down=drawn * (1 + groups.used), units_up=drawn)
        return Start(
            groups=jax.tree.map(jnp.add, initial, founding.group_start(directions)),
            active=groups.active,
            assignment=cohort.put(unknown, gid),
            memory=ColdStartMemory(initial, directions, founders > 0, init_reference(data)),
            report=make_report(sent, fault_counts=faults),
        )

    return start


def draw_founders(key: Key, num_clients: int, groups: GroupCount, alpha: int) -> jax.Array:
    """Draws the clients [F] int32 that found the groups, uniformly: `alpha` for each group in
    use, if there are so many, and then K.
    """
    ids = draw_permutation(key, num_clients, alpha * groups.size)
    return jnp.where(jnp.arange(ids.size) < alpha * groups.used, ids, num_clients)


def recluster_at(
    found: FoundFn,
    pretrain: TrainFn,
    local: Local,
    founding: ColdStart,
    heat: Temperature | None,
    move: MigrateFn | None,
) -> MigrateFn:
    """Founds the groups again in the listed rounds (D38), after `move`, if there is one.

    Up to alpha m random clients with a group pre-train from the mean of the group models and
    are clustered. The others choose a group by the new directions. A group's model becomes the
    mean of its clients' former models. Groups get new numbers, so no client counts as migrated.
    Args: `found` and `pretrain` are those of the start; `founding.recluster` lists the rounds;
    `heat`: temperatures start again at their highest, None: there are none.
    """

    def found_again(key: Key, state: State, data: FederatedData) -> tuple[State, Report]:
        keys, clients, m = jax.random.split(key, 4), data.num_clients, state.active.size
        in_use = state.active.sum()
        met = state.assignment >= 0
        draws = jnp.where(met, jax.random.uniform(keys[0], (clients,)), 2.0)
        drawn = jnp.argsort(draws)[: founding.alpha * m].astype(jnp.int32)
        founds = met[drawn] & (jnp.arange(drawn.size) < founding.alpha * in_use)
        ids = jnp.where(founds, drawn, clients)
        old = membership_weights(met.astype(jnp.float32), state.assignment, m)
        used = (old.sum(0) > 0).astype(jnp.float32)
        mean_model = group_sum(used[:, None] / jnp.maximum(used.sum(), 1.0), state.groups)
        cohort, gid, directions, founders, faults = found(keys[1:3], ids, mean_model, data)
        founded = cohort.put(jnp.full(clients, -1, jnp.int32), gid)
        memory = state.memory.replace(
            initial=mean_model, directions=directions, has_founders=founders > 0
        )
        if heat:
            highest = jnp.full_like(memory.temperature, heat.temperature_max)
            memory = memory.replace(temperature=highest)
        refounded, others = state.replace(assignment=founded, memory=memory), met & (founded < 0)
        choose = nearest_direction(pretrain)
        assignment, chosen = reassign(choose, local, keys[3], refounded, data, others)
        new = membership_weights(met.astype(jnp.float32), assignment, m)
        means = group_sum(transition_shares(old.T @ new), state.groups)
        drawn_count = jnp.sum(founds)
        # down: the initial model to founders, then m directions to every client with a group
        sent = make_traffic(units_down=drawn_count + in_use * met.sum(), units_up=drawn_count)
        bad = add_fault_counts(faults, chosen.fault_counts)
        report = make_report(sent, fault_counts=bad, reclustered=1)
        return refounded.replace(assignment=assignment, groups=means), report

    def migrate(key: Key, state: State, data: FederatedData) -> tuple[State, Report]:
        state, moves = move(key, state, data) if move else (state, make_report())
        due = jnp.any(jnp.array(tuple(founding.recluster)) == state.round)
        state, founded = jax.lax.cond(
            due, found_again, lambda key, state, data: (state, make_report()), key, state, data
        )
        return state, add_founding(moves, founded)

    return migrate


def add_founding(moves: Report, founded: Report) -> Report:
    """Returns the sum of what clients that move and a founding of groups report. The clock sees
    what each client [K] did to move; founding groups again takes no simulated time.
    """
    return add_reports(moves, founded).replace(
        traffic=moves.traffic, early=founded.traffic, samples=moves.samples
    )
