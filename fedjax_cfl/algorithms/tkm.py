"""Ghosh, Hong, Yin, Ramchandran, "Robust Federated Learning in a Heterogeneous
Environment", 2019, https://arxiv.org/abs/1906.06629 (Robust or TKM in the tables of
FeSEM); the trimmed mean: Yin, Chen, Ramchandran, Bartlett, ICML 2018,
https://arxiv.org/abs/1803.01498.

There are three stages. Every client trains by itself. The server clusters their models by
K-means with trimmed means as centers. Then each group trains in rounds whose mean is
trimmed as well. So a minority of attackers has little influence on groups and models.

Differs from the paper: clients send models after E local epochs, where it sends gradients;
groups start from their centers. Differs from the code of FeSEM, which does the last two
stages in every round and on the last layer only (D34).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.algorithms.fesem.fesem import nearest_center
from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.keys import FAULTS, START, derive_key, derive_keys
from fedjax_cfl.method import Method
from fedjax_cfl.round.aggregate import (
    count_trimmed,
    sort_coordinates,
    trimmed_group_mean,
    trimmed_mean,
)
from fedjax_cfl.round.engine import federated, unassign_empty_clients
from fedjax_cfl.round.start import keep_groups, random_groups
from fedjax_cfl.sharding import put_models
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.faults import with_faults
from fedjax_cfl.system.reports import add_to_ledger, make_bill, make_report, sum_fault_counts
from fedjax_cfl.system.system import System, SystemLike, as_system
from fedjax_cfl.tree import drop_statistics, take_rows, where_rows, zero_rows
from fedjax_cfl.types import Algorithm, FederatedData, Key, Params, Report, State, Task
from fedjax_cfl.validation import Epochs, PositiveInt, Trim, checked


@checked("algorithm")
def tkm(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    beta: Trim = 0.2,
    theta: Trim = 0.05,
    erm_epochs: Epochs | None = None,
    restarts: PositiveInt = 10,
    iterations: PositiveInt = 8,
) -> Algorithm:
    """TKM with m groups, found once, before round 0, from the models of all clients.

    Args: `beta` is the fraction of a group's clients that a round leaves out at both ends
    of each coordinate, `theta` that of the centers, 0.5: the median; `erm_epochs` are the
    local epochs of the first stage, near convergence (None: 10 E); K-means runs at most
    `iterations` from each of `restarts` draws of m clients.
    The start holds K models and their order in memory, and costs K models down, the common start,
    and K up.
    """
    method = Method(
        sgd(task, local),
        start=random_groups(task, m),
        assign=keep_groups,
        aggregate=trimmed_mean(beta, local.execution.mesh),
    )
    rounds = federated(task, local, system, method)
    first = local.replace(epochs=erm_epochs or 10 * local.epochs)
    learn = local_erm(task, first, as_system(system))

    def init(key: Key, data: FederatedData) -> State:
        state = rounds.init(key, data)
        keys = jax.random.split(derive_key(key, START), m + 3)[m:]  # the first m drew the models
        common = jax.tree.map(lambda leaf: leaf[:1], state.groups)
        draws = derive_keys(key, 0).at[FAULTS].set(keys[1])
        models, known, report = learn(keys[0], common, data, draws)
        labels, centers = trimmed_kmeans(keys[2], models, known, m, theta, restarts, iterations)
        state = state.replace(
            groups=centers,
            assignment=labels,
            traffic=add_to_ledger(state.traffic, report.bill),
            start_faults=report.fault_counts,
        )
        return unassign_empty_clients(None, state, data)

    return rounds._replace(init=init)


def local_erm(
    task: Task, local: Local, system: System
) -> Callable[[Key, Params, FederatedData, Key], tuple[Params, jax.Array, Report]]:
    """Returns the first stage, (key, start [1, ...], data, keys [PURPOSES] of what fails) ->
    (models [K, ...], known [K] bool, Report).

    Simulated faults happen as in a round. A client without samples or without an answer
    has the start as its model, and is not known.
    """
    train = over_clients(with_faults(system.faults, sgd(task, local)), local.execution)

    def learn(key, start, data, draws) -> tuple[Params, jax.Array, Report]:
        cohort = make_cohort(jnp.arange(data.num_clients, dtype=jnp.int32), data, local.execution)
        work = system.apply_stragglers(draws, cohort, full_work(jnp.zeros_like(cohort.ids)))
        seen, perturbation = system.perturb(draws, data)
        upload, counts = train(cohort, seen, ((key, start), perturbation), work)
        zeros = zero_rows(data.num_clients, take_rows(start, 0))
        delta = put_models(zeros, cohort.ids, upload.delta, local.execution.mesh)
        known = cohort.put(jnp.zeros(data.num_clients, bool), upload.weight > 0)
        real = cohort.ids < data.num_clients
        samples = TRAIN_TO_INFERENCE * local.batch_size * upload.steps
        sent = make_bill(real, real & (counts.dropped == 0), samples=samples)
        report = make_report(sent, fault_counts=sum_fault_counts(counts, cohort))
        return jax.tree.map(jnp.add, start, delta), known, report

    return learn


def trimmed_kmeans(
    key: Key,
    models: Params,
    known: jax.Array,
    m: PositiveInt,
    theta: ArrayLike,
    restarts: int,
    iterations: int,
) -> tuple[jax.Array, Params]:
    """Clusters models by Lloyd's algorithm with trimmed means; returns (labels [K] int32,
    centers [m, ...]).

    Each restart starts from the models of m different clients. The restart wins whose sum of
    squared distances is least without the farthest fraction `theta` of the clients; with them,
    one far model would get a cluster of its own.

    Args: `models` [K, ...]; `known` [K] bool are the clients that count, the others only get a
    label; `m` is static; `theta`, from 0 to 0.5, is also trimmed at both ends of each
    coordinate; `restarts` and `iterations` are the most of each.
    """

    ordered = sort_coordinates(models)

    def attempt(key):
        seeds = jax.random.choice(
            key, known.size, (m,), replace=False, p=known / jnp.maximum(jnp.sum(known), 1)
        )

        def improve(carry):
            step, labels, centers, _ = carry
            nearest = nearest_center(models, centers)
            means, count = trimmed_group_mean(known, nearest, ordered, m, theta)
            filled = where_rows(count > 0, means, centers)
            return step + 1, nearest, filled, jnp.any(nearest != labels)

        initial = 0, jnp.full(known.size, -1, jnp.int32), take_rows(models, seeds), True
        _, _, centers, _ = lax.while_loop(
            lambda carry: carry[3] & (carry[0] < iterations), improve, initial
        )
        return centers, trimmed_inertia(models, known, centers, theta)

    # one after another: each holds the group of every value of every model
    centers, spreads = lax.map(attempt, jax.random.split(key, restarts))
    best = take_rows(centers, jnp.argmin(spreads))
    return nearest_center(models, best), best


def trimmed_inertia(
    models: Params, known: jax.Array, centers: Params, theta: ArrayLike
) -> jax.Array:
    """Returns the sum [] of squared distances of the known models from their nearest
    centers, without the farthest fraction `theta`.
    """
    own = nearest_center(models, centers)
    gaps = jax.tree.map(
        lambda model, center: jnp.sum((model - center[own]) ** 2, axis=tuple(range(1, model.ndim))),
        drop_statistics(models),
        drop_statistics(centers),
    )
    ascending = jnp.sort(jnp.where(known, sum(jax.tree.leaves(gaps)), jnp.inf))
    count = jnp.sum(known)
    return jnp.sum(
        jnp.where(jnp.arange(known.size) < count - count_trimmed(count, theta), ascending, 0.0)
    )
