"""FeSEM-MA(K): FeSEM (see `fesem`) with the matched averaging of Wang et al.,
"Federated Learning with Matched Averaging", ICLR 2020,
https://arxiv.org/abs/2002.06440, inside each center (Xie et al., "Multi-Center
Federated Learning", section 5.1).

Two models can differ only in the order of their hidden units; a distance or a mean by
index does not see that they are the same function. So the server first brings the units
of every model it receives, layer by layer, into the order of the center that the client
trained from (`matching.align_to_center`). It stores, compares and averages the reordered
model; the rest is FeSEM.

Differs from the paper, which gives neither details nor code of the combination: a stored
model keeps the order it got on arrival, also where it is later compared with another
center or averaged into it; widths are fixed, where PFNM lets a center grow; FedMA's rounds that
retrain the layers above each matched one are left out. Clients that train from the center
hardly ever change the order (benchmarks/results/fesem_table3): with `head=plain` the
method then is FeSEM.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_cfl.algorithms.fesem.fesem import (
    e_step_of_all,
    keep_models,
    nearest_center,
    nearest_stored_center,
    stored_mean,
)
from fedjax_cfl.algorithms.fesem.matching import (
    Layer,
    align_to_center,
    find_layers,
    permute_hidden_units,
)
from fedjax_cfl.algorithms.fesem.start import MODELS, cluster_local_models
from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import ClientInputs, change_training, sgd
from fedjax_cfl.data.federated import check_classes, train_label_counts
from fedjax_cfl.method import AggregateFn, AssignFn, Method, Round, Start, StartFn
from fedjax_cfl.round.engine import federated
from fedjax_cfl.system.reports import add_bills, make_bill
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import membership_weights
from fedjax_cfl.types import Algorithm, FederatedData, Key, Params, Report, State, Task, Upload
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, checked


def recount(r: Round) -> tuple[State, jax.Array]:
    """Renews the class counts of the clients that trained (a `RegroupFn`): their data may
    have changed.
    """
    state = r.state
    new = r.cohort.take(train_label_counts(r.data))
    stored = state.rows[MODELS]
    counts = r.cohort.put(stored.counts, new, r.upload.weight > 0)
    return state.put_rows({MODELS: stored.replace(counts=counts)}), r.group


def match_to_center(solve: ClientFn, layers: tuple[Layer, ...]) -> ClientFn:
    """Reorders the hidden units of each trained model as those of the center it started from."""

    def match(c: ClientInputs, model: None, upload: Upload) -> Upload:
        center = c.model
        orders = align_to_center(layers, jax.tree.map(jnp.add, center, upload.delta), center)
        # Reordering is linear; done this way, an order that stays leaves the update as it was, bit
        # for bit.
        shift = jax.tree.map(jnp.subtract, permute_hidden_units(layers, center, orders), center)
        moved = permute_hidden_units(layers, upload.delta, orders)
        return upload.replace(delta=jax.tree.map(jnp.add, shift, moved))

    return change_training(solve, match)


def with_class_counts(start_models: StartFn, words: int) -> StartFn:
    """Adds class counts to FeSEM's start; every client sends them with its first model, in
    `words` words per class.
    """

    def start(key: Key, data: FederatedData) -> Start:
        initial = start_models(key, data)
        assert initial.report is not None  # the traffic of the first models
        check_classes(data, "algorithm=fesem_ma", "use algorithm=fesem")
        counts = train_label_counts(data)
        rows = {MODELS: initial.rows[MODELS].replace(counts=counts)}
        sent = make_bill(words_up=jnp.full(len(counts), counts[0].size * words))
        report = initial.report.replace(early=sent)  # of all clients, where the bill is of slots
        return initial._replace(rows=rows, report=report)

    return start


def send_class_counts(assign: AssignFn, words: int) -> AssignFn:
    """Adds to the traffic of `assign` that every client names its samples of each class, in
    `words` words up a class.
    """

    def with_counts(r: Round) -> tuple[jax.Array, Report]:
        gid, report = assign(r)
        sent = make_bill(words_up=r.real * r.data.num_classes * words)
        return gid, report.replace(bill=add_bills(report.bill, sent))

    return with_counts


def mean_over_cohort(mean: AggregateFn) -> AggregateFn:
    """Averages, by `mean`, only the stored models that arrived in this round."""

    def aggregate(r: Round) -> tuple[Params, jax.Array]:
        stored = r.state.rows[MODELS]
        arrived = r.cohort.put(jnp.zeros_like(stored.known), True, r.upload.weight > 0)
        stored = stored.replace(known=arrived)
        return mean(r._replace(state=r.state.put_rows({MODELS: stored})))

    return aggregate


def class_weighted_mean(head: str) -> AggregateFn:
    """Averages stored models as eq. 10 of FeSEM, but class c of the output layer `head` is
    weighted by their samples of class c (FedMA).

    A class without samples in a group gets the unweighted mean.
    """

    def aggregate(r: Round) -> tuple[Params, jax.Array]:
        upload, cohort, state = r.upload, r.cohort, r.state
        step, mass = stored_mean(r)
        m, kept, answered = state.active.size, state.rows[MODELS], upload.weight > 0
        absent = cohort.put(kept.known, False, answered).astype(jnp.float32)
        old = membership_weights(absent, state.assignment, m)
        new = membership_weights(answered.astype(jnp.float32), r.group, m)
        counts = kept.counts.astype(jnp.float32)
        stays = old[:, :, None] * counts[:, None]  # [K, m, C]
        # [S, m, C]
        arrived = new[:, :, None] * jnp.where(answered[:, None], cohort.take(counts), 0)[:, None]
        samples = stays.sum(0) + arrived.sum(0)

        def weighted(stored, delta, center, plain):
            total = jnp.einsum("kmc,k...c->m...c", stays, stored) + jnp.einsum(
                "smc,s...c->m...c", arrived, delta
            )

            def per_class(values):
                return values.reshape(m, *(1,) * (center.ndim - 2), -1)

            gap = total - per_class(stays.sum(0)) * center
            return jnp.where(
                per_class(samples) > 0, gap / per_class(jnp.maximum(samples, 1.0)), plain
            )

        own = jax.tree.map(
            weighted, kept.models[head], upload.delta[head], state.groups[head], step[head]
        )
        return {**step, head: own}, mass

    return aggregate


@checked("algorithm")
def fesem_ma(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    mu: NonNegativeFloat | jax.Array = 0.1,
    restarts: PositiveInt = 20,
    mean_over: Literal["stored", "cohort"] = "stored",
    head: Literal["classes", "plain"] = "classes",
) -> Algorithm:
    """FeSEM-MA with m centers, for a chain of convolutions and dense layers; `mu` and
    `restarts` are as in FeSEM.

    Args: `mean_over` says which models of a group a center is the mean of: all that are stored
    (eq. 10) | those of this round's cohort; `head` how the output layer is averaged: classes (each
    class by the samples of it) | plain.
    A client of the cohort costs a model down and one up, as in FeSEM, and with
    head=classes a word up per class. The server does the matching. Raises InputError for
    a model that is no such chain.
    """
    layers = find_layers(task)
    by_class = head == "classes"
    mean = class_weighted_mean(layers[-1].name) if by_class else stored_mean
    words = int(by_class)  # up for each class
    solve = sgd(task, local, proximal(mu, erm(task)))
    method = Method(
        solve=match_to_center(solve, layers),
        start=with_class_counts(cluster_local_models(restarts)(task, local, system, m), words),
        migrate=e_step_of_all(nearest_center),
        assign=send_class_counts(nearest_stored_center(nearest_center), words),
        regroup=recount if words else None,
        aggregate=mean_over_cohort(mean) if mean_over == "cohort" else mean,
        finish=keep_models(local.execution.mesh),
        split_rows=(MODELS,),
        takes_newcomers=False,
    )
    return federated(task, local, system, method)
