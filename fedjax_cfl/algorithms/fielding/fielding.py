"""Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu, "Fielding: Clustered Federated Learning
with Data Drift", https://arxiv.org/abs/2411.01580.

Clients are clustered by what they report about their data. When data drift, each drifted
client first moves to the nearest center by itself; only when a center has moved far are
all clients clustered again, and each new model is the mean of its clients' old ones.

Differs from the paper: clients without data are in no mean, and keep the report they last
gave; one that has never had any is in no group. The paper does not say which optimizer state a
mean of old models gets: here moments are mixed as models are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from fedjax_cfl.algorithms.fielding.represent import (
    MakeRepresentation,
    Representation,
    label_shares,
    with_false_reports,
)
from fedjax_cfl.algorithms.qfedavg import attach_losses
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.distances import MetricFn
from fedjax_cfl.clustering.kmeans import cluster_means
from fedjax_cfl.clustering.metric_kmeans import ClusterFn, by_silhouette
from fedjax_cfl.clustering.recluster import (
    DriftEvent,
    Trigger,
    apply_moves,
    center_shift,
    mix_former_models,
    mixing_weights,
    rowwise,
)
from fedjax_cfl.method import AggregateFn, FinishFn, Method, MigrateFn, Round, Start, StartFn
from fedjax_cfl.round.aggregate import q_fair, uniform_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import copy_model, keep_groups
from fedjax_cfl.system.reports import add_bills, make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, Key, Report, State, Task
from fedjax_cfl.validation import (
    Fraction,
    NonNegativeFloat,
    PositiveInt,
    check_arguments,
    is_number,
)


class Reporters(NamedTuple):
    """Which clients may report drift: all or none at the `start`, then as `update` says."""

    start: bool
    # (may_report [K] bool, cohort) -> may_report [K] bool
    update: Callable[[jax.Array, Cohort], jax.Array]


# all drifted clients report at once: the point of the method
all_report = Reporters(True, lambda may_report, cohort: may_report)
# only the clients of the last cohort report (ablation of appendix B)
cohort_reports = Reporters(
    False, lambda may_report, cohort: cohort.put(jnp.zeros_like(may_report), True)
)


class DriftRule(NamedTuple):
    """How clients are represented, and what happens when they drift."""

    represent: MakeRepresentation = label_shares  # label_shares | embedding() | gradient()
    metric: MetricFn | None = None  # None: that of the representation
    cluster: ClusterFn = by_silhouette()  # by_silhouette(...) | k_center
    trigger: Trigger = center_shift()  # of a new clustering of all clients
    report_above: NonNegativeFloat = 0.0  # a client reports when it has moved further than this
    hear: Reporters | None = all_report  # all_report | cohort_reports | None: groups are static
    false_reports: Fraction = 0.0  # share of the clients that permute what they report


REPORTS = "reports"


class ClientReports(struct.PyTreeNode):
    """What the server knows of every client, the row `REPORTS`."""

    reported: jax.Array  # [K, p], what each client last reported
    pending: jax.Array  # [K] bool, data have changed and the client has not reported it yet
    may_report: jax.Array  # [K] bool, clients that may report now


class DriftMemory(struct.PyTreeNode):
    """What the server remembers."""

    shared: Any  # the frozen network of the representation, () if none
    centers: jax.Array  # [m, p]
    trigger: Any  # what the trigger remembers


FIELDING = DriftRule()  # as published


def fielding(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt = 10,
    rule: DriftRule = FIELDING,
    mu: NonNegativeFloat | jax.Array = 0.0,
    aggregate: AggregateFn = uniform_mean,
    server: optax.GradientTransformation | None = None,
    q: NonNegativeFloat = 0.0,
) -> Algorithm:
    """Fielding with at most m groups.

    Args: `rule` see `DriftRule`; `mu` is the weight of FedProx's pull to the received model;
    `aggregate` is uniform_mean | weighted_mean; `server` an optimizer of each group, such
    as FedYogi's; `q` > 0 weighs clients by their loss as q-FedAvg does, in place of
    `aggregate`.
    """
    check_arguments(fielding, locals(), "algorithm")
    representation = rule.represent(task, local)
    if rule.metric is not None:
        representation = representation._replace(metric=rule.metric)
    if rule.false_reports:
        representation = with_false_reports(representation, rule.false_reports)
    method = Method(
        sgd(task, local, proximal(mu, erm(task))),
        start=cluster_at_start(task, representation, rule, m),
        migrate=follow_drift(representation, rule) if rule.hear else None,
        assign=keep_groups,
        aggregate=aggregate,
        server=server,
        finish=note_reporters(rule.hear) if rule.hear else None,
        takes_newcomers=False,
    )
    if not (is_number(q) and q == 0):
        method = method._replace(prepare=attach_losses(task, local), aggregate=q_fair(q, local))
    return federated(task, local, system, method)


def cluster_at_start(
    task: Task, representation: Representation, rule: DriftRule, m: int
) -> StartFn:
    """Clusters all clients; every group starts from the same random model (Algorithm 1)."""

    def start(key: Key, data: FederatedData) -> Start:
        keys = jax.random.split(key, 3)
        alive = data.train.size > 0
        shared = representation.init(keys[1], data)
        points = representation.compute(shared, data, alive)
        labels, active = rule.cluster(keys[2], points, alive, m, representation.metric)
        centers, _ = cluster_means(points, labels, alive, m)
        sent = add_bills(
            representation.setup(shared, data.num_clients),
            representation.report(alive, points.shape[1]),
        )
        none = jnp.zeros(data.num_clients, bool)
        may_report = none | (rule.hear is not None and rule.hear.start)
        return Start(
            groups=copy_model(task.init(keys[0]), m),
            assignment=labels,
            memory=DriftMemory(shared, centers, rule.trigger.init(centers)),
            rows={REPORTS: ClientReports(points, none, may_report)},
            report=make_report(sent),
            active=active,
        )

    return start


def follow_drift(representation: Representation, rule: DriftRule) -> MigrateFn:
    """Handles the drift that clients report (Algorithm 2), in rounds in which any client
    reports.
    """

    def event(
        key: Key, state: State, data: FederatedData, asked: jax.Array
    ) -> tuple[State, Report]:
        memory, kept, metric = state.memory, state.rows[REPORTS], representation.metric
        points = representation.compute(memory.shared, data, asked)
        drifted = asked & (rowwise(metric, points, kept.reported) > rule.report_above)
        reported = jnp.where(drifted[:, None], points, kept.reported)
        alive, old = data.train.size > 0, state.assignment
        moves = apply_moves(reported, alive, drifted, old, memory.centers, state.active, metric)
        heard_of = jnp.any(drifted)  # else it is no event
        fired = rule.trigger.fires(memory.trigger, moves) & heard_of
        moved = state.replace(
            assignment=moves.labels, memory=memory.replace(centers=moves.after)
        ).put_rows({REPORTS: kept.replace(reported=reported)})
        state = lax.cond(
            fired, lambda state: recluster_all(rule, key, state, moves), lambda state: state, moved
        )
        trigger = rule.trigger.update(memory.trigger, fired, state.memory.centers)
        trigger = jax.tree.map(partial(jnp.where, heard_of), trigger, memory.trigger)
        state = state.replace(memory=state.memory.replace(trigger=trigger))
        samples = representation.inferences * asked * data.train.size
        sent = representation.report(drifted, points.shape[1])
        sent = add_bills(sent, make_bill(samples=samples))
        migrated = jnp.sum(drifted & (moves.labels != old))
        return state, make_report(sent, migrated, reclustered=fired)

    def migrate(r: Round) -> tuple[State, Report]:
        state, data = r.state, r.data
        if not data.has_drift:
            return state, make_report()
        kept = state.rows[REPORTS]
        changed = kept.pending | data.shifted
        asked = changed & kept.may_report & (data.train.size > 0)
        state = state.put_rows({REPORTS: kept.replace(pending=changed & ~asked)})
        nothing = make_report(make_bill(jnp.zeros(data.num_clients)))
        return lax.cond(
            jnp.any(asked),
            lambda state: event(r.key, state, data, asked),
            lambda state: (state, nothing),
            state,
        )

    return migrate


def recluster_all(rule: DriftRule, key: Key, state: State, moves: DriftEvent) -> State:
    """Clusters all clients again by what they have reported; a group becomes the mean of its
    clients' former models.
    """
    m = state.active.size
    labels, active = rule.cluster(key, moves.points, moves.valid, m, moves.metric)
    weights = mixing_weights(moves.labels, labels, moves.valid, m)
    centers, size = cluster_means(moves.points, labels, moves.valid, m)
    centers = jnp.where(size[:, None] > 0, centers, moves.after)
    return state.replace(
        groups=mix_former_models(weights, state.groups),
        server=mix_former_models(weights, state.server),
        active=active,
        assignment=labels,
        memory=state.memory.replace(centers=centers),
    )


def note_reporters(hear: Reporters) -> FinishFn:
    """Stores which clients may report drift before the next round."""

    def finish(r: Round) -> State:
        kept = r.state.rows[REPORTS]
        return r.state.put_rows(
            {REPORTS: kept.replace(may_report=hear.update(kept.may_report, r.cohort))}
        )

    return finish
