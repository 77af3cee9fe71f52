"""Xie, Long, Shen, Zhou, Wang, Jiang, Zhang, "Multi-Center Federated Learning",
2020/2021, https://arxiv.org/abs/2005.01026 (FeSEM).

It is K-means whose points are the clients' models. The server keeps the latest model W_i
of every client. A client trains from the nearest center (E-step, eq. 9) and is pulled
back to it (eq. 8). A center is the mean of the models assigned to it (M-step, eq. 10).

Differs from the paper: a round is E-step, local training, M-step, where Algorithm 1 is
E-step, M-step, local training; a client trains E epochs with a plain proximal term, where
eq. 8 weighs the loss by n_i / n and N = 1 step is taken (D7; `pull_by_size` is eq. 8 but
for N).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from typing_extensions import TypeAliasType

from fedjax_cfl.algorithms.fesem.start import (
    MODELS,
    cluster_local_models,
    is_weighted,
    random_models,
    stored_weights,
)
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.objective import Objective, erm, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.migrate import (
    DETECTORS,
    DetectFn,
    DetectorName,
    on_shift,
    with_shift_reference,
)
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import AggregateFn, AssignFn, FinishFn, Method, MigrateFn, PrepareFn, Round
from fedjax_cfl.round.aggregate import uniform_mean, weighted_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import MakeStart
from fedjax_cfl.sharding import put_models
from fedjax_cfl.system.faults import fill_rows
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.select import current_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import drop_statistics, group_sum, inner_products, membership_weights
from fedjax_cfl.types import Algorithm, Params, Report, State, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, checked, pick

NearestFn = Callable[[Params, Params], jax.Array]  # (models [N, ...], centers [m, ...]) -> [N]
DistanceName = Literal["full", "last_layer"]  # of models
DistanceFn = TypeAliasType("DistanceFn", Callable[[Task], NearestFn])
# (nearest, move) -> what moves clients before a round: the E-step after `move`
EStep = TypeAliasType("EStep", Callable[[NearestFn, MigrateFn | None], MigrateFn | None])
# (task, mu) -> the objective, and what computes its `client_extra`
PullFn = TypeAliasType("PullFn", Callable[[Task, Any], tuple[Objective, PrepareFn | None]])


def stored_mean(r: Round) -> tuple[Params, jax.Array]:
    """Averages all stored models of each group, unweighted (eq. 10; an `AggregateFn`), or, where
    their weights are kept, by those (WeCFL).

    Of the cohort the models of this round count: its stored ones are masked out and the
    new ones added. That is one matrix product with the stored models, which are not copied.
    """
    upload, state = r.upload, r.state
    m, kept = state.active.size, state.rows[MODELS]
    fresh = upload.weight if is_weighted(kept) else (upload.weight > 0).astype(jnp.float32)
    old = r.cohort.put(stored_weights(kept), 0.0, upload.weight > 0)
    stays, new = membership_weights(old, state.assignment, m), membership_weights(fresh, r.group, m)
    mass = stays.sum(0) + new.sum(0)

    def step(stored, delta, center):
        def per_group(values):
            return values.reshape(m, *(1,) * (center.ndim - 1))

        total = group_sum(stays, stored) - per_group(stays.sum(0)) * center + group_sum(new, delta)
        return total / per_group(jnp.maximum(mass, 1.0))

    return jax.tree.map(step, kept.models, upload.delta, state.groups), mass


# what a center is the mean of, D4
CENTER_MEANS: dict[str, AggregateFn] = {
    "stored": stored_mean,
    "cohort": uniform_mean,
    "samples": weighted_mean,
}


def pull_plainly(task: Task, mu: float | jax.Array) -> tuple[Objective, PrepareFn | None]:
    """Adds mu (W - center) to every gradient (D7)."""
    return proximal(mu, erm(task)), None


def pull_by_size(task: Task, mu: float | jax.Array) -> tuple[Objective, PrepareFn | None]:
    """Adds mu_i (W - center) to every gradient, mu_i = 2 mu n / (K n_i) for a client with
    n_i of all n samples: eq. 8 divided by the n_i / n in front of its loss.
    """

    def prepare(r: Round) -> tuple[Work, Report]:
        data = r.data
        size = r.cohort.take(data.train.size)
        share = jnp.sum(data.train.size) / (data.num_clients * jnp.maximum(size, 1.0))
        return r.work._replace(client_extra=2.0 * mu * share), make_report()

    return proximal(lambda mu_i: mu_i, erm(task)), prepare


@checked("algorithm")
def fesem(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    mu: NonNegativeFloat | jax.Array = 0.1,
    form: Literal["prox", "eq8"] | PullFn = "prox",
    start: Literal["local", "random_models"] | MakeStart = "local",
    restarts: PositiveInt = 20,
    estep: Literal["all"] | EStep = "all",
    aggregate: Literal["stored", "cohort", "samples"] | AggregateFn = "stored",
    distance: DistanceName | DistanceFn = "full",
    detector: DetectorName | DetectFn | None = None,
) -> Algorithm:
    """FeSEM with m centers.

    Args: `mu` >= 0 is the paper's lambda; `form` is prox, see `pull_plainly` | eq8, see
    `pull_by_size`; `start` is local, see `cluster_local_models`, with `restarts` runs of K-means |
    random_models (D5, D6); `estep` before a round is that of all clients that have trained;
    `aggregate`: a center is the mean of all stored models of its clients (eq. 10) | of those of
    this round: cohort or samples (weighted); `distance` is that of models, full | last_layer (D26);
    `detector` makes it FeSEM-MIG of the FlexCFL paper: clients with a group whose data shifted take
    the E-step before the round, None: it does not. The E-step does not look at data. So after that
    of all clients nothing changes, and without it such a client moves only if the centers have
    moved since it was last selected.
    """
    nearest = pick(distance, **DISTANCES)(task)
    objective, prepare = pick(form, prox=pull_plainly, eq8=pull_by_size)(task, mu)
    starts = {"local": cluster_local_models(restarts), "random_models": random_models}
    first, move = pick(start, **starts)(task, local, system, m), None
    if detector:
        first = with_shift_reference(first)
        move = on_shift(nearest_stored_center(nearest), local, pick(detector, **DETECTORS))
    method = Method(
        sgd(task, local, objective),
        start=first,
        split_rows=(MODELS,),
        takes_newcomers=False,  # the server has no model of theirs
        migrate=pick(estep, all=e_step_of_all)(nearest, move),
        assign=nearest_stored_center(nearest),
        prepare=prepare,
        aggregate=pick(aggregate, **CENTER_MEANS),
        finish=keep_models(local.execution.mesh),
    )
    return federated(task, local, system, method)


def last_layer_distance(task: Task) -> NearestFn:
    """Measures the distance of the kernels of the layer `head` (D26).

    Raises InputError for a model without such a layer.
    """
    if "kernel" not in jax.eval_shape(task.init, jax.random.key(0)).get("head", ()):
        raise InputError(
            "algorithm.distance=last_layer: the model has no dense layer named head; use"
            " distance=full"
        )
    return lambda models, centers: nearest_center(
        models["head"]["kernel"], centers["head"]["kernel"]
    )


def nearest_center(models: Params, centers: Params) -> jax.Array:
    """Returns the center [N] int32 of least ||W_i - center_k||_2 for each of `models` [N,
    ...] (eq. 9).

    Ties go to the lowest. A center that is not finite is chosen only if all are so.
    With e_k = center_k - mean center, ||W - center_k||^2 is -2 W.e_k + (center_k +
    mean).e_k and a term common to all k. That is one product with the models, without the
    rounding errors of |W|^2 - 2 W.c + |c|^2 for models as similar as these.
    """

    def part(model, center):
        mean = jnp.mean(center, axis=0)
        apart = center - mean
        product = inner_products(model, apart, lax.Precision.HIGHEST)
        return jnp.sum((center + mean) * apart, axis=tuple(range(1, apart.ndim))) - 2 * product

    leaves = jax.tree.leaves(centers)
    finite = sum(jnp.sum(jnp.square(leaf.reshape(len(leaf), -1)), axis=1) for leaf in leaves)
    usable = jnp.isfinite(finite)
    centers = drop_statistics(fill_rows(~usable, 0.0, centers))
    gap = sum(jax.tree.leaves(jax.tree.map(part, drop_statistics(models), centers)))
    return jnp.argmin(jnp.where(usable, gap, jnp.inf), axis=1).astype(jnp.int32)


DISTANCES: dict[str, DistanceFn] = {
    "full": lambda task: nearest_center,  # of whole models
    "last_layer": last_layer_distance,
}


def nearest_stored_center(nearest_of: NearestFn) -> AssignFn:
    """Assigns each client the center nearest to its stored model, by `nearest_of`. The server
    knows that model: nothing is sent.
    """

    def assign(r: Round) -> tuple[jax.Array, Report]:
        state, cohort = r.state, r.cohort
        stored = state.rows[MODELS]
        nearest = nearest_of(cohort.take(stored.models), state.groups)
        kept = jnp.maximum(current_groups(state, cohort), 0)
        return jnp.where(cohort.take(stored.known), nearest, kept), make_report()

    return assign


def e_step_of_all(nearest_of: NearestFn, move: MigrateFn | None = None) -> MigrateFn:
    """Moves every client that has trained to the center nearest to its stored model, after
    `move`, if there is one.
    """

    def migrate(r: Round) -> tuple[State, Report]:
        state = r.state
        before = state.assignment
        state, report = move(r) if move else (state, make_report())
        stored = state.rows[MODELS]
        nearest = nearest_of(stored.models, state.groups)
        assignment = jnp.where(stored.known & (before >= 0), nearest, before)
        migrated = jnp.sum(assignment != before).astype(jnp.int32)
        return state.replace(assignment=assignment), report.replace(migrated=migrated)

    return migrate


def keep_models(mesh: Mesh | None = None) -> FinishFn:
    """Stores the model of every client that trained; the devices of `mesh` share them."""

    def finish(r: Round) -> State:
        state, before, cohort, upload = r.state, r.before, r.cohort, r.upload
        answered, old = upload.weight > 0, before.rows[MODELS]

        def store(stored, start, delta, center):
            # The compiler writes the models in place only if it sees that the means, which read
            # them, were taken before. Hence a condition on the new centers; it is true unless the
            # run has diverged.
            rows = jnp.where(answered & jnp.isfinite(jnp.sum(center)), cohort.ids, old.known.size)
            return put_models(stored, rows, start[r.group] + delta, mesh)

        models = jax.tree.map(store, old.models, before.groups, upload.delta, state.groups)
        known = cohort.put(old.known, True, answered)
        new = state.rows[MODELS].replace(models=models, known=known)
        if is_weighted(new):
            new = new.replace(weight=cohort.put(new.weight, upload.weight, answered))
        return state.put_rows({MODELS: new})

    return finish
