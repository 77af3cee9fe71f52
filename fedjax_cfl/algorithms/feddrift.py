"""Jothimurugesan, Hsieh, Wang, Joshi, Gibbons, "Federated Learning under Distributed Concept
Drift", AISTATS 2023, https://arxiv.org/abs/2206.00799 (FedDrift and FedDrift-Eager).

When data change, every client tries all models on its new data. One whose best loss has
grown by more than delta opens a new model; models that do equally well on each other's
data are merged.

Differs from the paper: a client's present data belong to one model, the one it joined
last, and it trains that one alone; the paper keeps past steps apart and trains all models
of a client. Thresholds are of losses, as in the text; the released code compares
accuracies. A pool of models that is full gives up the model without clients that was used
least recently; where there is none, the client stays with its best model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import check_selection_model, erm, proximal, training_loss
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.recluster import mix_former_models, transition_shares
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method, MigrateFn, Round
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import keep_groups, one_active_group
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import membership_weights, take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Params, Report, State, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, checked

NEVER = jnp.finfo(jnp.float32).max  # the loss of a client that has not tried a model yet

LossesFn = Callable[[FederatedData, Params], jax.Array]  # (data, groups [m, ...]) -> [K, m]


LOSSES = "losses"


class DriftLosses(struct.PyTreeNode):
    """What is kept of each client from one change of data to the next, the row `LOSSES`."""

    # [K] float32, each client's loss of its model when it last tried or trained it; NEVER
    # before
    best: jax.Array
    trains_alone: jax.Array  # [K] bool, opened a model at the last change and only trains that


class Changes(struct.PyTreeNode):
    """What is remembered from one change of data to the next."""

    used: jax.Array  # [m] int32, the last change at which a model had clients
    number: jax.Array  # [] int32, changes so far


class NewModels(NamedTuple):
    """New models: clients [K] int32 -> group, and source [m] int32, the group whose model a
    group now has (itself where nothing was opened).
    """

    group: jax.Array
    source: jax.Array


# (drifting [K] bool, best group [K], free groups [m] bool, when they were used [m]) -> NewModels
SpawnFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], NewModels]


def open_each(drifting: jax.Array, best: jax.Array, free: jax.Array, used: jax.Array) -> NewModels:
    """Opens a model for every drifting client, a copy of its best one, as long as there are
    free groups (FedDrift; an `SpawnFn`). Clients with lower ids come first.
    """
    m = free.size
    queue = jnp.lexsort((jnp.arange(m), used, ~free))  # free groups, longest unused first
    place = jnp.cumsum(drifting) - 1
    opens = drifting & (place < free.sum())
    group = jnp.where(opens, queue[jnp.minimum(place, m - 1)], best).astype(jnp.int32)
    target = jnp.where(opens, group, m)
    source = jnp.arange(m, dtype=jnp.int32).at[target].set(best.astype(jnp.int32), mode="drop")
    return NewModels(group, source)


def open_one(drifting: jax.Array, best: jax.Array, free: jax.Array, used: jax.Array) -> NewModels:
    """Opens one model for all drifting clients together, a copy of the best model of the
    first of them (FedDrift-Eager; an `SpawnFn`).
    """
    first = drifting & (jnp.cumsum(drifting) == 1)
    group, source = open_each(first, best, free, used)
    shared = jnp.max(jnp.where(first, group, -1))
    opened = jnp.any(free)
    return NewModels(jnp.where(drifting & opened, shared, best).astype(jnp.int32), source)


@checked("algorithm")
def feddrift(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt = 10,
    delta: NonNegativeFloat = 0.1,
    delta_merge: NonNegativeFloat | None = None,
    mu: NonNegativeFloat | jax.Array = 0.0,
    eager: bool = False,
) -> Algorithm:
    """FedDrift with at most m models.

    Args: `m` is the most models; a client drifts when its best loss has grown by more than
    `delta` >= 0; models are merged whose losses on each other's clients grow by at most
    `delta_merge` (None: delta); `mu` is the weight of FedProx's pull to the received model, which
    FedDrift does not have (Fielding's comparison has it for all methods); `eager`: all clients that
    drift at once share one new model, and none are merged (FedDrift-Eager).
    Raises InputError for `delta_merge` where none are merged.
    """
    if eager and delta_merge is not None:
        raise InputError(
            f"algorithm.delta_merge={delta_merge}: FedDrift-Eager merges no models; use null, or"
            " algorithm=feddrift"
        )
    open_models = open_one if eager else open_each
    merge = None if eager else merge_models(delta if delta_merge is None else delta_merge)
    losses = losses_of_all(task, local)
    change = partial(change_models, losses, delta, open_models, merge)
    method = Method(
        sgd(task, local, proximal(mu, erm(task))),
        start=one_active_group(task, m, joined=True),
        takes_newcomers=False,
        memory=lambda groups, data: Changes(jnp.zeros(m, jnp.int32), jnp.zeros((), jnp.int32)),
        client_rows=init_losses,
        migrate=detect_drift(change),
        assign=keep_groups,
        aggregate=weighted_mean,
        finish=remember_losses,
    )
    return federated(task, local, system, method)


def feddrift_eager(task: Task, local: Local, system: SystemLike, **options: Any) -> Algorithm:
    """FedDrift-Eager; `options` are those of `feddrift`, without `delta_merge`."""
    return feddrift(task, local, system, eager=True, **options)


def init_losses(groups: Params, data: FederatedData) -> dict[str, DriftLosses]:
    """Returns the losses of clients that have not tried a model yet."""
    best = jnp.full(data.num_clients, NEVER, jnp.float32)
    return {LOSSES: DriftLosses(best, jnp.zeros(data.num_clients, bool))}


def remember_losses(r: Round) -> State:
    """Stores the losses of the models that clients of the cohort received: what later losses
    are compared with (a `FinishFn`).
    """
    state, upload = r.state, r.upload
    known = (upload.weight > 0) & jnp.isfinite(upload.loss)
    losses = state.rows[LOSSES]
    best = r.cohort.put(losses.best, upload.loss, known)
    return state.put_rows({LOSSES: losses.replace(best=best)})


def losses_of_all(task: Task, local: Local) -> LossesFn:
    """Returns a function that gives every client's mean training loss [K, m] of every model;
    infinite for a client without samples.
    """
    check_selection_model(local, "FedDrift")
    losses = over_clients(training_loss(task), local.execution)

    def of_all(data: FederatedData, groups: Params) -> jax.Array:
        clients = data.num_clients
        cohort = make_cohort(jnp.arange(clients, dtype=jnp.int32), data, local.execution)
        each = losses(cohort, data, groups)
        table = cohort.put(jnp.zeros((clients, each.shape[1])), each)
        usable = (data.train.size > 0)[:, None] & jnp.isfinite(table)
        return jnp.where(usable, table, jnp.inf)

    return of_all


def report_losses(models: jax.Array, data: FederatedData, moved: ArrayLike = 0) -> Report:
    """Returns the report of clients that each download and test `models` [K] models."""
    return make_report(make_bill(models, words_up=models, samples=models * data.train.size), moved)


# (loss [K, m], group [K], weight [K], settled [m] bool) -> (into [m], the group that each one
# is merged into; weights [m, m] of the old models in the new ones)
MergeFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def merge_models(limit: float) -> MergeFn:
    """Merges models by complete linkage while the smallest distance is at most `limit`.

    The distance of models i and j is max(L(i, j) - L(i, i), L(j, i) - L(j, j), 0), where
    L(i, j) is the loss of model i on the samples of j's clients. A merged model is the mean
    weighted by samples, and takes the lower number.
    """

    def merge(
        loss: jax.Array, group: jax.Array, weight: jax.Array, settled: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        m = settled.size
        member = membership_weights(weight, group, m)
        mass = member.sum(0)
        bad = 1e20  # so large a loss keeps models apart, and sums of it are finite
        kept = jnp.where(jnp.isfinite(loss), jnp.minimum(loss, bad), bad)
        kept = jnp.where(weight[:, None] > 0, kept, 0.0)
        cross = (kept.T @ member) / jnp.maximum(mass, 1.0)  # [model i, clients of j]
        worse = cross - jnp.diag(cross)[:, None]  # L(i, j) - L(i, i)
        apart = jnp.maximum(jnp.maximum(worse, worse.T), 0.0)
        live = settled & (mass > 0) & (jnp.diag(cross) < bad / 2)
        label = agglomerate(apart, m, "complete", live, threshold=limit)
        same = (label[:, None] == label) & live
        into = jnp.where(live, jnp.argmax(same, axis=1), jnp.arange(m)).astype(jnp.int32)
        return into, transition_shares(membership_weights(mass, into, m)).T

    return merge


def detect_drift(change: Callable[[State, FederatedData], tuple[State, Report]]) -> MigrateFn:
    """Handles a change of data: clients choose, open and merge models by `change` before the round.

    Every client downloads all models in use and sends one loss of each.
    """

    def migrate(r: Round) -> tuple[State, Report]:
        data = r.data
        if not data.has_drift:
            return r.state, make_report()
        nothing = report_losses(jnp.zeros(data.num_clients, jnp.int32), data)
        return lax.cond(
            jnp.any(data.shifted),
            lambda state: change(state, data),
            lambda state: (state, nothing),
            r.state,
        )

    return migrate


def change_models(
    losses: LossesFn,
    delta: float,
    open_models: SpawnFn,
    merge: MergeFn | None,
    state: State,
    data: FederatedData,
) -> tuple[State, Report]:
    """Lets clients choose by `losses`, open and merge models, once the data have changed; `delta`
    is as in `feddrift`.
    """
    kept, before, old, m = state.rows[LOSSES], state.memory, state.assignment, state.active.size
    tried = jnp.where(state.active, losses(data, state.groups), jnp.inf)
    known = jnp.any(jnp.isfinite(tried), axis=1)
    free_to_choose = known & ~kept.trains_alone
    best = jnp.where(free_to_choose, jnp.argmin(tried, axis=1), old).astype(jnp.int32)
    loss = jnp.take_along_axis(tried, best[:, None], axis=1)[:, 0]
    drifting = free_to_choose & (loss > kept.best + delta)
    number = before.number + 1
    # the best models of drifting clients stay, as they are copied
    in_use = jnp.any(best[:, None] == jnp.arange(m), axis=0)
    group, source = open_models(drifting, best, ~in_use, before.used)
    group = jnp.where(drifting, group, best)
    groups, server = take_rows((state.groups, state.server), source)
    opened = source != jnp.arange(m)
    active, trains_alone = state.active | opened, drifting & opened[group]
    table = jnp.take_along_axis(tried, jnp.broadcast_to(source, tried.shape), axis=1)
    if merge is not None:
        # a model that has just been opened is a copy still, equal to its source
        into, weights = merge(table, group, data.train.size.astype(jnp.float32), active & ~opened)
        group = jnp.where(group >= 0, into[group], group)
        active &= into == jnp.arange(m)
        groups, server = (mix_former_models(weights, tree) for tree in (groups, server))
    own = jnp.take_along_axis(table, group[:, None], axis=1)[:, 0]
    used = jnp.any(group[:, None] == jnp.arange(m), axis=0)
    memory = Changes(jnp.where(used, number, before.used), number)
    after = state.replace(
        groups=groups, server=server, active=active, assignment=group, memory=memory
    )
    new = DriftLosses(jnp.where(jnp.isfinite(own), own, kept.best), trains_alone)
    report = report_losses(known * state.active.sum(), data, jnp.sum(group != old))
    return after.put_rows({LOSSES: new}), report
