"""FeSEM-MA(K): FeSEM (see `fesem`) with the matched averaging of Wang et al.,
"Federated Learning with Matched Averaging", ICLR 2020,
https://arxiv.org/abs/2002.06440, inside each center (Xie et al., "Multi-Center
Federated Learning", section 5.1).

Two models can be the same up to the order of their hidden units, which neither a
distance nor a mean by index sees. Hence the server first brings the units of every
model it receives, layer by layer, into the order of the center the client trained from
(`matching.align_to_center`). What it stores, compares and averages is the reordered
model, the same function; all else is FeSEM.

With `spare` units a center can grow (PFNM, SPAHM, see `matching`): a unit of a new
model that fits no unit of its group opens one that is not in use. The mean of a unit's
incoming weights is over the models that have it, and to the next layer one that has it
not sends 0.

Differs from the paper, which gives neither details nor code of the combination: a
stored model keeps the order it was given on arrival, also where it is later compared
with another center or averaged into it; where centers grow, each new model is matched
once, not in eight sweeps over all, and a model counts with its spare units in the
traffic; FedMA's rounds that retrain the layers above each matched one are left out.
Clients that train from the center hardly ever change the order
(benchmarks/results/fesem_table3): `head=plain` then is FeSEM.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.algorithms.fesem import (
    e_step_of_all,
    keep_models,
    nearest_center,
    nearest_stored_center,
    rows_of,
    stored_mean,
)
from fedjax_cfl.algorithms.fesem_start import cluster_local_models
from fedjax_cfl.algorithms.matching import (
    align_to_center,
    find_layers,
    permute_hidden_units,
    zero_spare_units,
)
from fedjax_cfl.algorithms.spare_units import (
    MatchedModels,
    mean_over_owners,
    nearest_center_in_use,
    recount,
    store_matched_models,
)
from fedjax_cfl.data.federated import label_counts
from fedjax_cfl.errors import InputError
from fedjax_cfl.round import tree
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.hooks import AggregateFn, Hooks, add_reports, make_report
from fedjax_cfl.round.objective import erm, proximal
from fedjax_cfl.round.sgd import sgd
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, State, Upload


def match_to_center(solve, layers):
    """Returns the solver of one client whose update is that of the trained model with
    its hidden units in the order of its center's.
    """

    def visit(solve, client, bucket, data, shared, mine):
        upload = solve(client, bucket, data, shared, mine)
        center = jax.tree.map(lambda leaf: leaf[mine.group], shared[1])
        orders = align_to_center(layers, jax.tree.map(jnp.add, center, upload.delta), center)
        # Reordering is linear; this way an order that stays leaves the update as it was, to the
        # last bit.
        shift = jax.tree.map(jnp.subtract, permute_hidden_units(layers, center, orders), center)
        return upload.replace(
            delta=jax.tree.map(jnp.add, shift, permute_hidden_units(layers, upload.delta, orders))
        )

    return Partial(visit, solve)


def with_class_counts(begin, words: int):
    """Adds to FeSEM's start the class counts, which come with every client's first model."""

    def start(key, data: FederatedData):
        begun = begin(key, data)
        counts = label_counts(data.train, data.owner, data.y, data.num_classes)
        memory = MatchedModels(begun.memory.models, begun.memory.known, counts)
        sent = make_report(make_traffic(words_up=counts.size * words))
        return begun._replace(memory=memory, report=add_reports(begun.report, sent))

    return start


def mean_over_stored(mean: AggregateFn) -> AggregateFn:
    """Returns the aggregation `mean` of all stored models, as it is."""
    return mean


def mean_over_cohort(mean: AggregateFn) -> AggregateFn:
    """Returns the aggregation `mean` of stored models, but of those alone that arrived
    in this round.
    """

    def aggregated(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
        memory = state.memory
        arrived = (
            jnp.zeros_like(memory.known).at[rows_of(cohort, upload, memory)].set(True, mode="drop")
        )
        return mean(
            upload, gid, cohort, client_extra, state.replace(memory=memory.replace(known=arrived))
        )

    return aggregated


def weigh_plainly(head: str) -> tuple[AggregateFn, int]:
    """Averages the output layer as the others; no class counts are sent."""
    return stored_mean, 0


def weigh_classes(head: str) -> tuple[AggregateFn, int]:
    """Averages the output layer by classes; one word up per class."""
    return class_weighted_mean(head), 1


def class_weighted_mean(head: str) -> AggregateFn:
    """Plain means as in eq. 10 of FeSEM, but for the output layer `head`, whose class c
    is weighted by the samples of class c (FedMA).

    A class that no model of a group has a sample of gets the plain mean.
    """

    def aggregated(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
        step, mass = stored_mean(upload, gid, cohort, client_extra, state)
        m, memory, rows = state.active.size, state.memory, rows_of(cohort, upload, state.memory)
        old = tree.membership_weights(
            memory.known.at[rows].set(False, mode="drop").astype(jnp.float32), state.assignment, m
        )
        new = tree.membership_weights((upload.weight > 0).astype(jnp.float32), gid, m)
        counts = memory.counts.astype(jnp.float32)
        kept = old[:, :, None] * counts[:, None]  # [K, m, C]
        came = (
            new[:, :, None] * counts.at[rows].get(mode="fill", fill_value=0)[:, None]
        )  # [S, m, C]
        samples = kept.sum(0) + came.sum(0)

        def weighted(stored, delta, center, plain):
            total = jnp.einsum("kmc,k...c->m...c", kept, stored) + jnp.einsum(
                "smc,s...c->m...c", came, delta
            )

            def per_class(values):
                return values.reshape(m, *(1,) * (center.ndim - 2), -1)

            gap = total - per_class(kept.sum(0)) * center
            return jnp.where(
                per_class(samples) > 0, gap / per_class(jnp.maximum(samples, 1.0)), plain
            )

        own = jax.tree.map(
            weighted, memory.models[head], upload.delta[head], state.groups[head], step[head]
        )
        return {**step, head: own}, mass

    return aggregated


def fesem_ma(
    task,
    local,
    select,
    *,
    m: int,
    mu=0.1,
    restarts: int = 20,
    mean_over: Callable[[AggregateFn], AggregateFn] = mean_over_stored,
    head: Callable[[str], tuple[AggregateFn, int]] = weigh_classes,
    spare=0.0,
) -> Algorithm:
    """FeSEM-MA with m centers, `mu` and `restarts` as in FeSEM, for a chain of
    convolutions and dense layers.

    Args: a center is the mean of all stored models of its group (`mean_over_stored`,
    eq. 10) or of this round's (`mean_over_cohort`); the output layer `head` is their mean
    with each class weighted by their samples of it (weigh_classes), or plain
    (weigh_plainly); `spare` share of each hidden layer's units that no model uses at first;
    their activation must be 0 at 0. With 0, widths are fixed. A participant costs a model
    down and one up, as in FeSEM, and with weigh_classes a word up per class; matching is
    the server's.
    Raises InputError for a model that is no such chain, or spare units in one with
    normalisations.
    """
    local, layers = local.resolve(), find_layers(task)
    mean, words = head(layers[-1].name)
    if spare and any(layer.norms for layer in layers):
        raise InputError(
            f"algorithm.spare={spare}: 0 is allowed for a model with normalisations, which see all"
            " units of a layer"
        )
    solve = sgd(task, local, proximal(mu, erm(task)))
    if spare:
        begin = task._replace(init=lambda key: zero_spare_units(layers, task.init(key), spare))
        nearest_of = partial(nearest_center_in_use, layers)
        own = {"solve": solve, "regroup": store_matched_models(layers)}
        mean = mean_over_owners(mean, layers)
    else:
        begin, nearest_of = task, nearest_center
        own = {
            "solve": match_to_center(solve, layers),
            "regroup": recount if words else None,
            "finish": keep_models,
        }
    choose = nearest_stored_center(nearest_of)

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        real = (cohort.ids < data.num_clients).astype(jnp.int32)
        sent = make_traffic(words_up=real * data.num_classes * words)
        return choose(key, state, data, cohort)[0], make_report(sent)

    hooks = Hooks(
        **own,
        start=with_class_counts(cluster_local_models(restarts)(begin, local, m), words),
        migrate=e_step_of_all(nearest_of),
        assign=assign,
        aggregate=mean_over(mean),
    )
    return federated(task, local, select, hooks)
