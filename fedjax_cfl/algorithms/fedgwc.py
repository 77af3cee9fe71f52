"""Licciardi, Leo, Fanì, Caputo, Ciccone, "Interaction-Aware Gaussian Weighting for Clustered
Federated Learning", ICML 2025, https://arxiv.org/abs/2502.03340 (FedGWC).

While it trains, a client tells the losses of its mini-batches. In each round the server rewards
clients for being near the mean loss of their group's cohort, and keeps for each pair of clients a
running mean of the rewards that the one got beside the other. Once these stand still, it cuts the
group in two to four by spectral clustering of clients that see others alike, and goes on with each.

Differs from the authors' code: clients of a round are shared out among groups, where the code takes
as many in each; a group that is cut is cut before the round's mean is taken, so that each part
goes on with the updates of its own clients; one group is cut in a round, and the parts are no more
than there is room for; eigenvectors are clustered by K-means of their rows at length 1, not by QR,
and the index that judges a cut is of these rows, where the code takes that of another embedding;
losses of less than 1e-5 spread count as equal; clients that come later join the group of least
loss.

Losses tell groups apart that the model fits unlike well. Where half of the clients had renamed
labels (digits, 40 clients, 300 rounds), the groups found had nothing to do with the true ones:
adjusted Rand index -0.03 to 0.04, three seeds.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import ClientInputs, add_change, change_training, sgd
from fedjax_cfl.client.steps import Step, StepChange
from fedjax_cfl.clustering.clustered import clustered
from fedjax_cfl.clustering.distances import divide, squared_euclidean
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.decompose import eigh
from fedjax_cfl.method import RegroupFn, Round
from fedjax_cfl.round.start import charge, one_active_group
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.system.reports import make_bill
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import one_hot, take_rows
from fedjax_cfl.types import (
    Algorithm,
    Cohort,
    FederatedData,
    Key,
    Params,
    State,
    Task,
    Upload,
    Work,
)
from fedjax_cfl.validation import NonNegativeFloat, PositiveFloat, PositiveInt, checked

LOSSES = "losses of mini-batches"  # the name of what a client records
SPREAD = 1e-10  # added to the variance of losses, which are rounded


# the row of each client: its weights in W [K, K] float32, running means of rewards beside others
WEIGHTS = "weights"


class Interactions(struct.PyTreeNode):
    """What the server remembers of the rewards of a group."""

    change: jax.Array  # [m] float32, running mean of the squared changes of a group's pairs
    patience: jax.Array  # [m] int32, rounds in a row in which that was small


@checked("algorithm")
def fedgwc(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    steps: PositiveInt = 7,
    tolerance: NonNegativeFloat | jax.Array = 1e-5,
    gamma: PositiveFloat | jax.Array = 0.1,
    parts: PositiveInt = 4,
) -> Algorithm:
    """FedGWC with at most m groups; all clients begin in one.

    Args: `steps` are the mini-batches that a client trains, whatever it has; a group is cut once
    the mean squared change of its pairs has been below `tolerance` for as many rounds in a row as
    it takes to meet all of it (0: never); `gamma` is that of the kernel; a group is cut in at most
    `parts`, and never where all of it takes part.
    A client sends a word for each step beside its model. The server keeps a word for each pair.
    """
    local = local.replace(steps=steps)
    solve = add_change(sgd(task, local), StepChange(LOSSES, step=record_loss))
    find = partial(find_parts, most=parts, gamma=gamma)
    return clustered(
        task,
        local,
        system,
        m=m,
        once=True,
        solve=send_losses(solve, steps),
        start=one_active_group(task, m, joined=True),
        memory=lambda groups, data: Interactions(jnp.ones(m), jnp.zeros(m, jnp.int32)),
        client_rows=init_weights,
        prepare=charge(lambda r: make_bill(words_up=steps * r.real)),
        regroup=weigh_and_cut(tolerance, on_every_device(find, local.execution.mesh)),
    )


def init_weights(groups: Params, data: FederatedData) -> dict[str, jax.Array]:
    """Returns equal weights of all pairs of clients."""
    clients = data.num_clients
    return {WEIGHTS: jnp.full((clients, clients), 1 / clients**2, jnp.float32)}


def record_loss(c: Step, model: Params, losses: jax.Array) -> tuple[Params, jax.Array]:
    """Returns the group's model after a step of SGD, and the mean losses [steps] of a client's
    mini-batches with that of this step.
    """
    return c.sgd, losses.at[c.number].set(c.loss / jnp.maximum(c.size, 1))


def send_losses(solve: ClientFn, steps: int) -> ClientFn:
    """Returns `solve` whose client sends the mean loss of each of its mini-batches, -1 for steps
    that it does not take.
    """

    def begin(c: ClientInputs) -> tuple[None, Work]:
        return None, c.work._replace(rows={**c.work.rows, LOSSES: jnp.full(steps, -1.0)})

    def send(c: ClientInputs, model: None, upload: Upload) -> Upload:
        rows = dict(upload.rows)
        return upload.replace(extra=rows.pop(LOSSES), rows=rows)

    return change_training(solve, send, begin)


def reward(losses: jax.Array, size: jax.Array, member: jax.Array) -> jax.Array:
    """Returns the share [S] of each client in the rewards of its group's cohort.

    A reward is the mean over steps of exp(-(loss - mean)^2 / (2 variance)), both of the group's
    losses of that step, weighted by samples.

    Args: `losses` [S, steps], -1: none; `size` [S] are the samples; `member` [S, m] is 1 in the
    column of the group of each client that counts.
    """
    taken = (losses >= 0) & (size > 0)[:, None]
    weight = jnp.where(taken, size[:, None], 0.0)
    total = jnp.maximum(member.T @ weight, 1e-30)  # [m, steps]
    away = losses - member @ ((member.T @ (weight * losses)) / total)
    variance = (member.T @ (weight * away**2)) / total
    near = jnp.exp(-(away**2) / (2 * (member @ variance + SPREAD)))
    gained = jnp.sum(jnp.where(taken, near, 0.0), axis=1) / jnp.maximum(taken.sum(1), 1)
    return divide(gained, member @ (member.T @ gained))


def weigh_pairs(
    state: State,
    cohort: Cohort,
    upload: Upload,
    member: jax.Array,
    held: jax.Array,
    tolerance: ArrayLike,
) -> tuple[jax.Array, Interactions]:
    """Returns the weights [K, K] with the rewards of a round in those of the pairs that met, and
    the memory.

    Args: `member` [S, m] is 1 in the column of the group of each client that counts; `held` [m] are
    the clients of the groups; `tolerance` is as in `fedgwc`.
    """
    memory, pairs, met = state.memory, state.rows[WEIGHTS], member.sum(0)
    rate = divide(met, held)
    share = reward(upload.extra, upload.weight, member)
    columns = jnp.minimum(cohort.ids, len(pairs) - 1)
    old = cohort.take(pairs)[:, columns]
    step = (member @ member.T) * (member @ rate)[:, None] * (share[:, None] - old)
    ids = jnp.where(upload.weight > 0, cohort.ids, len(pairs))
    weights = pairs.at[ids[:, None], ids].add(step, mode="drop")
    moved = divide(member.T @ jnp.sum(step**2, axis=1), met**2)
    change = jnp.where(met > 0, (1 - rate) * memory.change + rate * moved, memory.change)
    patience = jnp.where(met > 0, (memory.patience + 1) * (change < tolerance), memory.patience)
    return weights, Interactions(change, patience)


def weigh_and_cut(tolerance: ArrayLike, find: Callable[..., tuple]) -> RegroupFn:
    """Adds the rewards of a round to the weights of pairs, and cuts the first group whose weights
    have stood still for long enough.

    Args: `tolerance` is as in `fedgwc`; `find` is `find_parts`, its settings given.
    """

    def regroup(r: Round) -> tuple[State, jax.Array]:
        state, cohort, gid = r.state, r.cohort, r.group
        m, now = state.active.size, cohort.put(state.assignment, gid)
        now = jnp.where(r.data.train.size > 0, now, -1)
        member = one_hot(gid, m, r.upload.weight > 0)
        met, held = member.sum(0), one_hot(now, m).sum(0)
        weights, memory = weigh_pairs(state, cohort, r.upload, member, held, tolerance)
        target = jnp.maximum(jnp.round(divide(held, met)), 1)
        due = (met > 0) & (met < held) & (memory.patience >= target)
        group = jnp.argmax(due)

        def cut():
            rooms = jnp.minimum(held[group] // met[group], 1 + jnp.sum(~state.active))
            return find(r.key, weights, now == group, rooms)

        none = jnp.zeros_like(now), jnp.zeros((), bool)
        part, found = lax.cond(due.any(), cut, lambda: none)
        free = jnp.argsort(state.active, stable=True)  # free slots first
        goal = jnp.where(part > 0, free[jnp.maximum(part - 1, 0)], group)
        leaves = (now == group) & found
        after = jnp.where(leaves, goal, now).astype(jnp.int32)
        source = jnp.arange(m).at[jnp.where(leaves, goal, m)].set(group, mode="drop")
        touched = due.any() & (source == group)
        groups, server = take_rows((state.groups, state.server), source)
        memory = memory.replace(
            change=jnp.where(touched, 1.0, memory.change),
            patience=jnp.where(touched, 0, memory.patience),
        )
        state = state.replace(
            groups=groups,
            server=server,
            active=state.active | touched,
            assignment=cohort.put(
                jnp.where(now >= 0, after, state.assignment), cohort.take(state.assignment)
            ),
            memory=memory,
        ).put_rows({WEIGHTS: weights})
        return state, jnp.where(cohort.take(leaves), cohort.take(after), gid)

    return regroup


def find_parts(
    key: Key,
    weights: jax.Array,
    inside: jax.Array,
    rooms: int | jax.Array,
    most: int,
    gamma: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the part [K] int32 of each client `inside` [K] bool of a group, and whether it is
    worth cutting: the number of parts, 2 .. `most` and at most `rooms` [], whose Davies-Bouldin
    index is least, if that is below 1.

    Args: `weights` [K, K] are those of pairs; `gamma` is that of the kernel.
    """
    both = inside[:, None] & inside
    least = jnp.min(jnp.where(both, weights, jnp.inf))
    most_weight = jnp.max(jnp.where(both, weights, -jnp.inf))
    scaled = jnp.where(both, divide(weights - least, most_weight - least), 0.0).T
    gap = squared_euclidean(scaled, scaled)
    diagonal = jnp.diag(scaled)
    # without the two columns of the pair itself
    gap -= (diagonal[:, None] - scaled.T) ** 2 + (scaled - diagonal) ** 2
    kernel = jnp.where(both & ~jnp.eye(len(inside), dtype=bool), jnp.exp(-gamma * gap), 0.0)
    root = jnp.sqrt(kernel.sum(1))
    near = divide(divide(kernel, root[:, None]), root) - 2.0 * jnp.diag(~inside)  # others come last
    _, vectors = eigh(near)
    labels, indices = [], []
    for count in range(2, most + 1):
        rows = vectors[:, ::-1][:, :count]
        rows = divide(rows, jnp.linalg.norm(rows, axis=1, keepdims=True))
        found = kmeans(key, rows, count, weight=inside.astype(jnp.float32))
        labels.append(found.labels)
        index = davies_bouldin(rows, found.labels, inside, count)
        indices.append(jnp.where(count <= rooms, index, jnp.inf))
    best = jnp.argmin(jnp.stack(indices))
    return jnp.stack(labels)[best], jnp.stack(indices)[best] < 1


def davies_bouldin(
    points: jax.Array, labels: jax.Array, inside: jax.Array, count: int
) -> jax.Array:
    """Returns the Davies-Bouldin index [] of `points` [K, p] in `count` clusters: the mean over
    clusters of the worst (spread + spread of another) / distance of their centers; infinite where
    a cluster is empty.
    """
    member = one_hot(labels, count, inside)
    size = member.sum(0)
    centers = divide(member.T @ jnp.where(inside[:, None], points, 0.0), size[:, None])
    away = jnp.linalg.norm(points - centers[labels], axis=1)
    spread = divide(member.T @ away, size)
    apart = jnp.sqrt(squared_euclidean(centers, centers))
    pairs = (spread[:, None] + spread) / jnp.where(apart > 0, apart, 1e-30)
    worst = jnp.max(jnp.where(jnp.eye(count, dtype=bool), -jnp.inf, pairs), axis=1)
    return jnp.where((size > 0).all(), worst.mean(), jnp.inf)
