"""Kim, Kim, De Veciana, "Clustered Federated Learning via Gradient-based Partitioning", ICML 2024,
https://proceedings.mlr.press/v235/kim24p.html (CFL-GP).

In some rounds every client also sends its update of one group's model, the criterion, which is
another one each time. The server keeps a running mean of what each client sent for each criterion.
It takes the first m singular directions of these, and clusters clients by K-means of their
coordinates in them. Clients train the model of their group, and a group's updates are averaged.

Differs from the authors' code: the criterion is the same model for all clients, as in the paper,
where the code takes each client's own group's; all groups begin with the same model; what a client
sends for a criterion for the first time counts whole, in whichever round; a client that changes
its group brings the model that it trained; clients that come later train from the last criterion,
and join the group of the nearest mean update.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.algorithms.fesem.matching import solve_assignment
from fedjax_cfl.algorithms.fielding.represent import project
from fedjax_cfl.algorithms.fl_hc import join_nearest_direction
from fedjax_cfl.client.local import Local, count_steps
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import TrainFn, ask_newcomers, train_without_recording
from fedjax_cfl.clustering.distances import as_rows, euclidean, gram
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.decompose import eigh
from fedjax_cfl.method import AggregateFn, Method, PrepareFn, RegroupFn, Round
from fedjax_cfl.round.aggregate import MEANS, MeanName
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import charge, common_model
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.reports import make_bill
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import group_mean, one_hot, take_rows, where_rows
from fedjax_cfl.types import Algorithm, Bill, Cohort, FederatedData, Key, Params, State, Task
from fedjax_cfl.validation import NaturalInt, PositiveInt, checked, pick

# rows of clients: running means [K, m, ...] of updates by criterion, 0 where there are none; and
# whether the client has sent one [K, m] bool
VECTORS, KNOWN = "vectors", "known"


class Criterion(struct.PyTreeNode):
    """What newcomers are compared with."""

    initial: Params  # [1, ...], the last criterion
    directions: Params  # [m, ...], the mean update of it by the clients of each group


class Plan(NamedTuple):
    """In which rounds clients are clustered, and by which criterion."""

    m: int
    period: int
    last: int

    def is_due(self, round: jax.Array) -> jax.Array:
        """Returns whether clients are clustered in a round [] int32."""
        return (round % self.period == 0) & (round <= self.last)

    def criterion(self, round: jax.Array) -> jax.Array:
        """Returns the group [] int32 whose model all clients train: 0 .. m - 1 in turn."""
        return round // self.period % self.m

    def rate(self, round: jax.Array) -> jax.Array:
        """Returns beta [], what a new vector counts in the mean: 1, 1/2, 1/3, ... for each
        criterion.
        """
        return 1.0 / ((round + 1) // (self.m * self.period) + 1)


@checked("algorithm")
def cfl_gp(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    period: PositiveInt = 2,
    last: NaturalInt = 10,
    project_to: PositiveInt | None = None,
    restarts: PositiveInt = 10,
    aggregate: MeanName | AggregateFn = "uniform",
) -> Algorithm:
    """CFL-GP with m groups. It is meant for all clients in every round: otherwise the server
    compares clients by different criteria.

    Args: clients are clustered in the rounds 0, `period`, 2 `period`, ... up to `last`;
    `project_to` is the number of words that a client sends for a criterion, its update projected at
    random, None: all P; `restarts` are the runs of K-means; `aggregate` within a group is
    uniform | samples.
    In a clustering round a client gets one more model down and sends P words (`project_to`) more,
    unless the criterion is its group's model. The server keeps m vectors of each client.
    """
    solve = sgd(task, local)
    train = train_without_recording(solve, local, system)
    plan = Plan(m, period, last)
    method = Method(
        solve,
        start=common_model(task, m),
        memory=lambda groups, data: Criterion(
            take_rows(groups, slice(1)), jax.tree.map(jnp.zeros_like, groups)
        ),
        client_rows=partial(init_means, m, project_to),
        split_rows=(VECTORS,),
        assign=ask_newcomers(join_nearest_direction(train, euclidean), after=0),
        prepare=charge_criterion(local, plan, project_to),
        regroup=partition_updates(train, local, plan, project_to, restarts),
        aggregate=pick(aggregate, **MEANS),
    )
    return federated(task, local, system, method)


def init_means(
    m: int, project_to: int | None, groups: Params, data: FederatedData
) -> dict[str, Any]:
    """Returns the rows of clients of which none has sent anything yet."""
    zeros, known = jax.tree.map(jnp.zeros_like, groups), jnp.zeros((data.num_clients, m), bool)
    vectors = jax.tree.map(
        lambda leaf: jnp.zeros((*known.shape, *leaf.shape[1:])), shorten(zeros, project_to)
    )
    return {VECTORS: vectors, KNOWN: known}


def shorten(delta: Params, project_to: int | None) -> Params:
    """Returns updates [S, ...] as they are sent for a criterion: projected to [S, project_to], with
    None as they are.
    """
    if project_to is None:
        return delta
    return jax.vmap(lambda row: project(row, project_to))(jnp.concatenate(as_rows(delta), axis=1))


def charge_criterion(local: Local, plan: Plan, project_to: int | None) -> PrepareFn:
    """Reports what training the criterion as well takes in a round in which clients are clustered:
    a model down, the vector up, and the training. The clients of the criterion's own group send
    nothing more.
    """

    def bill(r: Round) -> Bill:
        state, size = r.state, r.cohort.take(r.data.train.size)
        other = r.real & (size > 0) & plan.is_due(state.round)
        other &= r.group != plan.criterion(state.round)
        words = project_to or sum(part[0].size for part in as_rows(state.groups))
        samples = TRAIN_TO_INFERENCE * local.batch_size * count_steps(local, size)
        return make_bill(other, words_up=other * words, samples=other * samples)

    return charge(bill)


def partition_updates(
    train: TrainFn, local: Local, plan: Plan, project_to: int | None, restarts: int
) -> RegroupFn:
    """Adds what clients send for the criterion to their means, and clusters all clients that have
    sent anything, in the rounds of the plan.

    Args: `train` trains clients on the criterion; the others are as in `cfl_gp`.
    """

    def regroup(r: Round) -> tuple[State, jax.Array]:
        state, cohort, gid = r.state, r.cohort, r.group

        def cluster_again():
            keys = jax.random.split(r.key)
            delta, sent = update_criterion(train, local, plan, r._replace(key=keys[0]))
            rows = accumulate(plan, state, cohort, shorten(delta, project_to), sent)
            known, old = rows[KNOWN].any(1), cohort.put(state.assignment, gid)
            find = partial(find_groups, m=plan.m, restarts=restarts)
            label = on_every_device(find, local.execution.mesh)(
                keys[1], gram(rows[VECTORS]), known, old
            )
            now = jnp.where(known, label, old)
            group = jnp.where(cohort.take(known), cohort.take(now), gid)
            directions, _ = group_mean(sent.astype(jnp.float32), group, delta, plan.m)
            criterion = take_rows(state.groups, plan.criterion(state.round)[None])
            # the engine stores those of the cohort, and counts who had none before
            others = cohort.put(now, cohort.take(state.assignment))
            after = state.replace(assignment=others, memory=Criterion(criterion, directions))
            return after.put_rows(rows), group

        return lax.cond(plan.is_due(state.round), cluster_again, lambda: (state, gid))

    return regroup


def update_criterion(
    train: TrainFn,
    local: Local,
    plan: Plan,
    r: Round,
) -> tuple[Params, jax.Array]:
    """Returns the clients' updates [S, ...] of the criterion, and which of them count [S] bool.
    Those of the criterion's group have trained it in this round already, the others do so aside.

    Args: `train` and `plan` are those of `partition_updates`; `r` is what `regroup` reads.
    """
    state, cohort, upload = r.state, r.cohort, r.upload
    criterion, answered = plan.criterion(state.round), upload.weight > 0
    other = answered & (r.group != criterion)
    asked = cohort.keep(other, r.data.num_clients)
    model = take_rows(state.groups, criterion[None])
    aside, _ = train(r.key, model, asked, r.data, local.lr_scale(state.round))
    delta = where_rows(other, aside.delta, upload.delta)
    return delta, jnp.where(other, aside.weight > 0, answered)


def accumulate(
    plan: Plan, state: State, cohort: Cohort, vector: Params, sent: jax.Array
) -> dict[str, Any]:
    """Returns the rows with the means g <- (1 - beta) g + beta v of the criterion, for the slots
    that have `sent` [S] bool a `vector` [S, ...]; a client's first one is its mean.
    """
    known, criterion = state.rows[KNOWN], plan.criterion(state.round)
    rows = jnp.where(sent, cohort.ids, len(known))
    first = ~cohort.take(known)[:, criterion]
    rate = jnp.where(first, 1.0, plan.rate(state.round))

    def add(mean, new):
        old = cohort.take(mean)[:, criterion]
        step = jax.vmap(jnp.multiply)(rate, new - old)
        return mean.at[rows, criterion].set(old + step, mode="drop")

    vectors = jax.tree.map(add, state.rows[VECTORS], vector)
    return {VECTORS: vectors, KNOWN: known.at[rows, criterion].set(True, mode="drop")}


def find_groups(
    key: Key, product: jax.Array, known: jax.Array, old: jax.Array, m: int, restarts: int
) -> jax.Array:
    """Returns the groups [K] int32 of clients by K-means of their coordinates in the first m
    singular directions of what they sent, numbered so that most clients keep theirs.

    With eigenpairs (l, q) of the inner products G'G = `product` [K, K] they are sqrt(l) q.

    Args: `known` [K] bool are the clients to cluster; `old` [K] int32 are their groups, -1: none.
    """
    values, vectors = eigh(product)
    points = (jnp.sqrt(jnp.maximum(values, 0.0)) * vectors)[:, -m:]
    found = kmeans(key, points, m, restarts, weight=known.astype(jnp.float32)).labels
    stay = one_hot(found, m, known).T @ one_hot(old, m)  # [found, old]
    return solve_assignment(-stay)[found]
