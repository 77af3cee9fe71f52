"""FeSEM-MA(K): FeSEM (see `fesem`) with the matched averaging of Wang et al., "Federated Learning with Matched Averaging", ICLR 2020,
https://arxiv.org/abs/2002.06440, inside each center (Xie et al., "Multi-Center Federated Learning", section 5.1).

Two models can be the same up to the order of their hidden units, which neither a distance nor a mean by index sees. Hence the server first
brings the units of every model it receives, layer by layer, into the order of the center the client trained from (`matching.aligned`).
What it stores, compares and averages is the reordered model, the same function; all else is FeSEM.

Differs from the paper, which gives neither details nor code of the combination: no unit is added to a center (models trained from it would
add next to none: benchmarks/results/fesem_table3); a stored model keeps the order it was given on arrival, also where it is later compared
with another center or averaged into it; FedMA's rounds that retrain the layers above each matched one are left out. Clients that train
from the center hardly ever change the order: `head=plain` then is FeSEM.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.tree_util import Partial

from fedjax_cfl import aggregate
from fedjax_cfl.algorithms.fesem import e_step_of_all, keep_models, own_nearest, pure_clustering, rows_of, stored_mean
from fedjax_cfl.data import label_counts
from fedjax_cfl.engine import federated
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.matching import aligned, layers_of, permuted
from fedjax_cfl.objective import erm, proximal
from fedjax_cfl.sgd import sgd
from fedjax_cfl.traffic import add, traffic
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, Params, State, Upload


@struct.dataclass
class Solutions:
    """What the server keeps of every client."""

    models: Params  # [K, ...], W_i, the model it last sent, its units in a center's order
    known: jax.Array  # [K] bool, False: it never trained, takes no part in the means and stays in its group
    counts: jax.Array  # [K, C] int32, training samples per class when it last trained


def fesem_ma(task, local, select, *, m: int, mu=0.1, restarts: int = 20, head: str = "classes", fixed_width: bool = True) -> Algorithm:
    """FeSEM-MA with m centers, `mu` and `restarts` as in FeSEM, for a chain of convolutions and dense layers.

    Args: `head` the output layer is the mean of stored models, each class weighted by their samples of it (classes), or plain;
    `fixed_width` must be true: shapes inside a round are static. `matching.matched_average` makes a wider model of the stored ones.
    A participant costs a model down and one up, as in FeSEM, and with head=classes a word up per class; matching is the server's.
    Raises InputError for a value that is not listed here or a model that is no such chain.
    """
    require("algorithm.head", head, ("classes", "plain"))
    if not fixed_width:
        raise InputError("algorithm.fixed_width=false: true is allowed; layers cannot grow in a round (matching.matched_average)")
    local, layers = local.resolved(), layers_of(task)
    choose, words = own_nearest("full"), int(head == "classes")

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        sent = jnp.sum(cohort.ids < data.num_clients) * data.num_classes * words
        return choose(key, state, data, cohort), traffic(words_up=sent)

    return federated(
        task,
        local,
        select=select,
        solve=matched(sgd(task, local, proximal(mu, erm(task))), layers),
        start=counted(pure_clustering(task, local, m, restarts), words),
        migrate=e_step_of_all("full"),
        assign=assign,
        regroup=recount if words else None,
        aggregate=stored_mean if head == "plain" else by_class(layers[-1].name),
        remember=keep_models,
    )


def matched(solve, layers):
    """Returns the solver of one client whose update is that of the trained model with its hidden units in the order of its center's."""

    def visit(solve, client, bucket, data, shared, mine):
        upload = solve(client, bucket, data, shared, mine)
        center = jax.tree.map(lambda leaf: leaf[mine.group], shared[1])
        orders = aligned(layers, jax.tree.map(jnp.add, center, upload.delta), center)
        # Reordering is linear; this way an order that stays leaves the update as it was, to the last bit.
        shift = jax.tree.map(jnp.subtract, permuted(layers, center, orders), center)
        return upload.replace(delta=jax.tree.map(jnp.add, shift, permuted(layers, upload.delta, orders)))

    return Partial(visit, solve)


def counted(begin, words: int):
    """Adds to FeSEM's start the class counts, which come with every client's first model."""

    def start(key, data: FederatedData):
        begun = begin(key, data)
        counts = label_counts(data.train, data.owner, data.y, data.num_classes)
        memory = Solutions(begun.memory.models, begun.memory.known, counts)
        return begun._replace(memory=memory, spent=add(begun.spent, traffic(words_up=counts.size * words)))

    return start


def recount(key, state: State, data: FederatedData, cohort: Cohort, gid, upload: Upload):
    """Renews the class counts of the clients that trained: their data may have changed."""
    rows = rows_of(cohort, upload, state.memory)
    new = label_counts(data.train, data.owner, data.y, data.num_classes)[jnp.minimum(cohort.ids, data.num_clients - 1)]
    return state.replace(memory=state.memory.replace(counts=state.memory.counts.at[rows].set(new, mode="drop"))), gid


def by_class(head: str):
    """Plain means as in eq. 10 of FeSEM, but for the output layer `head`, whose class c is weighted by the samples of class c (FedMA).

    A class that no model of a group has a sample of gets the plain mean.
    """

    def aggregated(upload: Upload, gid, cohort: Cohort, extra, state: State):
        step, mass = stored_mean(upload, gid, cohort, extra, state)
        m, memory, rows = state.active.size, state.memory, rows_of(cohort, upload, state.memory)
        old = aggregate.members(memory.known.at[rows].set(False, mode="drop").astype(jnp.float32), state.assignment, m)
        new = aggregate.members((upload.weight > 0).astype(jnp.float32), gid, m)
        counts = memory.counts.astype(jnp.float32)
        kept = old[:, :, None] * counts[:, None]  # [K, m, C]
        came = new[:, :, None] * counts.at[rows].get(mode="fill", fill_value=0)[:, None]  # [S, m, C]
        samples = kept.sum(0) + came.sum(0)

        def weighted(stored, delta, center, plain):
            total = jnp.einsum("kmc,k...c->m...c", kept, stored) + jnp.einsum("smc,s...c->m...c", came, delta)

            def per_class(values):
                return values.reshape(m, *(1,) * (center.ndim - 2), -1)

            gap = total - per_class(kept.sum(0)) * center
            return jnp.where(per_class(samples) > 0, gap / per_class(jnp.maximum(samples, 1.0)), plain)

        own = jax.tree.map(weighted, memory.models[head], upload.delta[head], state.groups[head], step[head])
        return {**step, head: own}, mass

    return aggregated
