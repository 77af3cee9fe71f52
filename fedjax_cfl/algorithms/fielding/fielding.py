"""Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu, "Fielding: Clustered Federated Learning
with Data Drift", https://arxiv.org/abs/2411.01580.

Clients are clustered by what they report about their data. When data drift, each drifted
client first moves to the nearest center by itself; only when a center has moved far are
all clients clustered again, and each new model is the mean of its clients' old ones.

Differs from the paper: clients without data are in no mean, and keep the report they last
gave; one that has never had any is in no group. The paper does not say which optimizer state a
mean of old models gets: here moments are mixed as models are.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from fedjax_cfl.algorithms.fedopt import yogi
from fedjax_cfl.algorithms.fielding.represent import (
    MakeRepresentation,
    Representation,
    RepresentationName,
    embedding,
    gradient,
    label_shares,
    with_false_reports,
)
from fedjax_cfl.algorithms.qfedavg import attach_losses
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.distances import METRICS, MetricFn
from fedjax_cfl.clustering.kmeans import cluster_means
from fedjax_cfl.clustering.metric_kmeans import ClusterFn, by_silhouette, k_center
from fedjax_cfl.clustering.recluster import (
    DriftEvent,
    Trigger,
    TriggerName,
    apply_moves,
    mix_former_models,
    mixing_weights,
    pick_trigger,
    rowwise,
)
from fedjax_cfl.method import AggregateFn, Method, MigrateFn, Round, Start, StartFn
from fedjax_cfl.round.aggregate import MEANS, MeanName, q_fair
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import copy_model, keep_groups
from fedjax_cfl.system.reports import add_bills, make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, FederatedData, Key, Report, State, Task
from fedjax_cfl.validation import (
    Fraction,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    checked,
    is_number,
    pick,
)


class DriftRule(NamedTuple):
    """What happens when clients drift."""

    cluster: ClusterFn
    trigger: Trigger  # of a new clustering of all clients
    report_above: float  # a client reports when it has moved further than this
    reporters: str  # who may report drift: all | cohort | none, then groups are static


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


@checked("algorithm")
def fielding(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt = 10,
    represent: RepresentationName | MakeRepresentation = "labels",
    units: PositiveInt = 64,
    length: PositiveInt = 256,
    images_per_class: PositiveInt = 200,
    epochs: NaturalInt = 300,
    metric: Literal["l1", "jensen_shannon", "squared_euclidean"] | MetricFn | None = None,
    cluster: Literal["silhouette", "k_center"] | ClusterFn = "silhouette",
    restarts: PositiveInt = 4,
    participants: PositiveInt | None = None,
    trigger: TriggerName | Trigger = "center_shift",
    tau: NonNegativeFloat | jax.Array = 1 / 3,
    delta: PositiveFloat = 0.1,
    report_above: NonNegativeFloat = 0.0,
    false_reports: Fraction = 0.0,
    reporters: Literal["all", "cohort", "none"] = "all",
    mu: NonNegativeFloat | jax.Array = 0.0,
    aggregate: MeanName | AggregateFn = "uniform",
    server: Literal["none", "yogi"] | optax.GradientTransformation = "none",
    server_lr: PositiveFloat | jax.Array = 0.1,
    q: NonNegativeFloat = 0.0,
) -> Algorithm:
    """Fielding with at most m groups.

    Args: `represent` is what clients report, see `represent`: labels | embedding, with `units`,
    `images_per_class` and `epochs` | gradient, with `length`, `images_per_class` and `epochs`;
    `metric` of two reports, None: that of the representation; `cluster` of all clients: silhouette
    (K from 2 to m, at most half of `participants`), with `restarts` | k_center (exactly m);
    `trigger` of a new clustering, see `clustering.recluster`: center_shift and since_clustering
    with `tau` | pairwise and pairwise_fixed with `delta` | always | never; a client reports when it
    has moved further than `report_above`; `false_reports` is the share of the clients that permute
    what they report; `reporters` may report drift: all | cohort (the last one) | none; `mu` is
    the weight of FedProx's pull to the received model; `aggregate` is uniform | samples; `server`
    an optimizer of each group, none | yogi, with step size `server_lr`; `q` > 0 weighs clients by
    their loss as q-FedAvg does, in place of `aggregate`.
    """
    network = images_per_class, epochs  # how it is trained
    seen, slope = embedding(units, *network), gradient(length, *network)
    make = pick(represent, labels=label_shares, embedding=seen, gradient=slope)
    representation = make(task, local)
    if metric is not None:
        representation = representation._replace(metric=pick(metric, **METRICS))
    if false_reports:
        representation = with_false_reports(representation, false_reports)
    clusters = pick(cluster, silhouette=by_silhouette(restarts, participants), k_center=k_center)
    rule = DriftRule(clusters, pick_trigger(trigger, tau, delta), report_above, reporters)
    method = Method(
        sgd(task, local, proximal(mu, erm(task))),
        start=cluster_at_start(task, representation, rule, m),
        migrate=None if reporters == "none" else follow_drift(representation, rule),
        assign=keep_groups,
        aggregate=pick(aggregate, **MEANS),
        server=pick(server, none=None, yogi=yogi(server_lr)),
        finish=note_cohort if reporters == "cohort" else None,
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
        may_report = none | (rule.reporters == "all")
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


def note_cohort(r: Round) -> State:
    """Lets the clients of the cohort, and no others, report drift before the next round (a
    `FinishFn`; ablation of appendix B).
    """
    kept = r.state.rows[REPORTS]
    may_report = r.cohort.put(jnp.zeros_like(kept.may_report), True)
    return r.state.put_rows({REPORTS: kept.replace(may_report=may_report)})
