"""Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren, "Flexible Clustered Federated Learning for
Client-Level Data Distribution Shift", IEEE TPDS 2021, https://arxiv.org/abs/2108.09749,
and Duan, Liu, Ji, Liu, Liang, Chen, Tan, "FedGroup: Efficient Federated Learning via
Decomposed Similarity-Based Clustering", ISPA 2021, https://arxiv.org/abs/2010.06870.

A sample of clients pre-trains from the common initial model; clustering their update
directions founds the groups. Every other client pre-trains once when first met and
joins the group of the nearest direction. From then on each group is FedAvg of its own,
and the group models may be mixed a little (`eta_g`).

The reference code can do two things more, both off: weigh clients by a temperature, and
found the groups anew in listed rounds (`ColdStart.recluster`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.algorithms.temperature import Temperature, with_temperature
from fedjax_cfl.clustering import distances, features
from fedjax_cfl.clustering.assign import ChooseFn, cold_start, nearest_direction, random_group
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.clustering.migrate import ShiftReference, init_reference, on_shift, reassign
from fedjax_cfl.clustering.shift_detection import DetectFn, tv
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.aggregate import inter_group
from fedjax_cfl.round.cohort import make_cohort
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.faults import add_fault_counts
from fedjax_cfl.round.hooks import FinishFn, Hooks, MigrateFn, Start, add_reports, make_report
from fedjax_cfl.round.local import Local, full_work
from fedjax_cfl.round.objective import erm, proximal
from fedjax_cfl.round.pretrain import train_aside
from fedjax_cfl.round.sgd import sgd
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean, group_sum, membership_weights
from fedjax_cfl.types import Algorithm, FederatedData, Key, Params, Selection, State, Task, Upload


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


def edc(restarts: int = 10) -> MeasureFn:
    """Clusters decomposed cosine features by K-means++ (FedGroup, eq. 8)."""

    def measure(key, upload, rows, valid, m):
        gram = distances.gram(upload.delta)[rows][:, rows]
        points = features.edc(gram, m)
        return kmeans(key, points, m, restarts=restarts, weight=valid.astype(jnp.float32)).labels

    return measure


def edc_randomized(restarts: int = 10) -> MeasureFn:
    """As `edc`, for thousands of founders: no Gram matrix is made."""

    def measure(key, upload, rows, valid, m):
        points = features.edc_randomized(key, upload.delta, m)[rows]
        return kmeans(key, points, m, restarts=restarts, weight=valid.astype(jnp.float32)).labels

    return measure


def madc(key, upload: Upload, rows, valid, m: int) -> jax.Array:
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
    measure: MeasureFn = edc()  # edc | edc_randomized | madc | found_alone
    pretrain: Callable[[Local], Local] = train_steps(50)  # the local work of a first update
    group_start: Callable[[Params], Params] = start_from_founders  # or start_from_initial (D8)
    newcomers: Callable[[Any], ChooseFn] = join_nearest  # join_nearest | join_random
    recluster: Sequence[int] = ()  # rounds, from 0, that begin with founding the groups anew


def flexcfl(
    task: Task,
    local: Local,
    select: Selection,
    *,
    m: int,
    founding: ColdStart = ColdStart(),
    eta_g=0.0,
    mix: Callable[[Any], FinishFn] = inter_group,
    mu=0.0,
    detector: DetectFn | None = tv,
    heat: Temperature | None = None,
) -> Algorithm:
    """FlexCFL.

    Args: `founding` the group cold start; `eta_g` the strength and `mix` the form of the
    inter-group aggregation (inter_group | add_inter_group); `mu` > 0 pulls clients to the
    model they received; `detector` of the shifts that make a client start cold again
    (eq. 9), None: groups are static, which is FedGroup, and with mu > 0 FedGrouProx;
    `heat` weighs clients by a temperature.
    Raises InputError for a round to recluster in that there cannot be.
    """
    if not all(type(number) is int and number >= 0 for number in founding.recluster):
        raise InputError(
            f"algorithm.recluster={founding.recluster}: must be a list of rounds, whole numbers >="
            " 0, as [50,100]"
        )
    local = local.resolve()
    trial = train_aside(sgd(task, founding.pretrain(local)), local)
    found = make_found_groups(trial, local, founding, m)
    move = on_shift(nearest_direction(trial), local, detector) if detector else None
    static = detector is None and not founding.recluster and heat is None

    def start_clients(key, num_clients: int):
        return draw_founders(jax.random.split(key, 4)[1], num_clients, founding.alpha * m)

    hooks = Hooks(
        sgd(task, local, proximal(mu, erm(task))),
        start=group_cold_start(task, found, founding, m),
        migrate=move,
        assign=cold_start(founding.newcomers(trial)),
        finish=None if isinstance(eta_g, int | float) and eta_g == 0 else mix(eta_g),
        start_clients=start_clients if static else None,
    )
    hooks = with_temperature(hooks, heat) if heat else hooks
    if founding.recluster:
        hooks = hooks._replace(
            migrate=recluster_at(found, trial, local, founding, heat, move=hooks.migrate)
        )
    return federated(task, local, select, hooks)


def fedgroup(
    task: Task,
    local: Local,
    select: Selection,
    *,
    m: int,
    founding: ColdStart = ColdStart(),
    eta_g=0.0,
    mix: Callable[[Any], FinishFn] = inter_group,
    mu=0.0,
    heat: Temperature | None = None,
) -> Algorithm:
    """FedGroup: FlexCFL with static groups; `mu` > 0 is FedGrouProx."""
    return flexcfl(
        task,
        local,
        select,
        m=m,
        founding=founding,
        eta_g=eta_g,
        mix=mix,
        mu=mu,
        detector=None,
        heat=heat,
    )


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
