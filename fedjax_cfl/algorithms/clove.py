"""Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty, "CLoVE: Personalized Federated Learning through
Clustering of Loss Vector Embeddings", ICML 2026, https://arxiv.org/abs/2506.22427.

As in IFCA each client of a round tests all m models on its training samples, but the server
clusters the clients by their vectors of m losses: no model needs to suit any group at first. It
then gives each cluster a model, so that the losses of all clients are least in all.

Differs from the authors' code: the number of groups is given; K-means runs several times, not
once; where clients have fewer than m different vectors there are fewer clusters (the code fails);
groups are final once no client has moved for `stable` rounds in a row, where the code compares the
first and the last of three. The paper leaves open what newcomers do among themselves. Here, where
no client of a cohort has a group yet, but in the first round, and where groups are final, each
takes the model of least loss, as in IFCA.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from fedjax_cfl.algorithms.fesem.matching import solve_assignment
from fedjax_cfl.client.cohort import over_clients
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import training_loss
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.distances import dot
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.method import AggregateFn, AssignFn, Method, RegroupFn, Round
from fedjax_cfl.round.aggregate import MEANS, MeanName
from fedjax_cfl.round.client_rows import take_cohort_rows
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import no_clients, random_groups
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.select import current_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import one_hot
from fedjax_cfl.types import Algorithm, FederatedData, Key, Params, Report, State, Task
from fedjax_cfl.validation import PositiveInt, checked, pick


class Stability(struct.PyTreeNode):
    """What the server remembers where groups become final."""

    rounds: jax.Array  # [] int32, since a client has changed its group; the last ones stay


@checked("algorithm")
def clove(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    first: Literal["random", "losses"] = "random",
    stable: PositiveInt | None = None,
    restarts: PositiveInt = 10,
    aggregate: MeanName | AggregateFn = "samples",
) -> Algorithm:
    """CLoVE with m groups, from m random models.

    Args: `first` says how clients are grouped in round 0: random (groups of nearly equal size) |
    losses, as later; groups are final once no client has changed its own for `stable` rounds in a
    row, None: never; `restarts` are the runs of K-means; `aggregate` within a group is
    samples | uniform.
    A client that is asked for its losses gets all m models, and sends m words before it trains.
    """
    method = Method(
        sgd(task, local),
        start=random_groups(task, m),
        memory=None if stable is None else init_stability,
        assign=cluster_losses(task, local, first, stable, restarts),
        regroup=None if stable is None else count_stable_rounds(stable),
        aggregate=pick(aggregate, **MEANS),
        start_clients=no_clients,
    )
    return federated(task, local, system, method)


def init_stability(groups: Params, data: FederatedData) -> Stability:
    """Returns the memory of a server to which no groups are final yet."""
    return Stability(jnp.zeros((), jnp.int32))


def cluster_losses(
    task: Task, local: Local, first: str, stable: int | None, restarts: int
) -> AssignFn:
    """Returns what groups a cohort by its losses, or, in round 0, at random.

    Args: as those of `clove`.
    """
    losses = over_clients(training_loss(task, local=local), local.execution)
    mesh = local.execution.mesh

    def assign(r: Round) -> tuple[jax.Array, Report]:
        state, data, cohort = r.state, r.data, r.cohort
        keys, m, met = jax.random.split(r.key), state.active.size, current_groups(state, cohort)
        size = jnp.where(cohort.ids < data.num_clients, cohort.take(data.train.size), 0)
        at_random = (size > 0) & (first == "random") & (state.round == 0)
        asked = (size > 0) & ~at_random
        if stable is not None:
            asked &= (met < 0) | (state.memory.rounds < stable)
        askers = cohort.keep(asked, data.num_clients)
        loss = losses(askers, data, state.groups, take_cohort_rows(state, cohort, mesh))

        def cluster(key, loss, asked, alone):
            return match_clusters(key, loss, asked, restarts, alone)

        alone = (state.round > 0) & ~jnp.any(asked & (met >= 0))
        order = jnp.argsort(cohort.ids)  # so that no draw depends on slots
        found = on_every_device(cluster, mesh)(keys[0], loss[order], asked[order], alone)
        chosen = jnp.zeros_like(found).at[order].set(found)
        gid = jnp.where(asked, chosen, jnp.maximum(met, 0))
        gid = jnp.where(at_random, deal_groups(keys[1], cohort.ids, at_random, m), gid)
        sent = make_bill(asked * (m - 1), words_up=asked * m, samples=m * asked * size)
        return gid.astype(jnp.int32), make_report(early=sent)

    return assign


def deal_groups(key: Key, ids: jax.Array, dealt: jax.Array, m: int) -> jax.Array:
    """Returns random groups [S] int32 of the clients `ids` [S] that are `dealt` [S] bool one: their
    sizes differ by one at most. Which client gets which does not depend on slots.
    """
    lots = jax.vmap(lambda client: jax.random.uniform(jax.random.fold_in(key, client)))(ids)
    place = jnp.argsort(jnp.where(dealt, lots, 2.0))
    return jnp.zeros_like(ids).at[place].set(jnp.arange(ids.size, dtype=jnp.int32) % m)


def match_clusters(
    key: Key, loss: jax.Array, asked: jax.Array, restarts: int, alone: ArrayLike = False
) -> jax.Array:
    """Returns the model [S] int32 of each client: that of its cluster, for which the losses of all
    clients add up to least.

    Args: `loss` [S, m] are the clients' of each model, one that is not finite counts as the
    highest of all; `asked` [S] bool are the clients that have any; `restarts` are the runs of
    K-means; `alone`: each client takes the model of its least loss instead.
    """
    m, known = loss.shape[1], jnp.isfinite(loss) & asked[:, None]
    worst = jnp.max(jnp.where(known, loss, 0.0))
    loss = jnp.where(known, loss, worst)
    found = kmeans(key, loss, m, restarts, weight=asked.astype(jnp.float32)).labels
    # [cluster, model]; all models cost those who are not asked the same
    cost = dot(one_hot(found, m).T, loss)
    return jnp.where(alone, jnp.argmin(loss, axis=1), solve_assignment(cost)[found])


def count_stable_rounds(stable: int) -> RegroupFn:
    """Counts the rounds in which no client of the cohort changes its group, up to `stable`: from
    then on groups are final. One that gets its first group changes it.
    """

    def regroup(r: Round) -> tuple[State, jax.Array]:
        state = r.state
        answered, rounds = r.upload.weight > 0, state.memory.rounds
        moved = jnp.any(answered & (r.group != current_groups(state, r.cohort)))
        more = jnp.where(moved, 0, rounds + jnp.any(answered))
        rounds = jnp.where(rounds < stable, more, rounds)
        return state.replace(memory=Stability(rounds.astype(jnp.int32))), r.group

    return regroup
