"""What the server does about drift: individual moves with frozen centers, triggers of a new
clustering, and the mixing of old models that follows one (Fielding,
https://arxiv.org/abs/2411.01580, Algorithm 2 and appendix F.2).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_cfl.clustering.distances import MetricFn, dot
from fedjax_cfl.clustering.kmeans import cluster_means
from fedjax_cfl.clustering.metric_kmeans import largest_distance
from fedjax_cfl.tree import group_sum, one_hot
from fedjax_cfl.types import Params
from fedjax_cfl.validation import NonNegativeFloat, PositiveFloat, pick


class DriftEvent(NamedTuple):
    """What the individual moves of one drift event have done."""

    points: jax.Array  # [K, p], reported representations
    valid: jax.Array  # [K] bool, clients with data
    labels: jax.Array  # [K] int32, groups after the moves
    before: jax.Array  # [m, p], centers before the event
    after: jax.Array  # [m, p], centers after the moves
    occupied: jax.Array  # [m] bool, the group has a client with data
    metric: MetricFn


class Trigger(NamedTuple):
    """Decides when all clients are clustered again, and remembers what it needs to."""

    fires: Callable[[Any, DriftEvent], jax.Array]  # (memory, moves) -> [] bool
    init: Callable[[jax.Array], Any] = lambda centers: ()  # (centers [m, p]) -> memory
    # (memory, fired [] bool, centers [m, p] after the event) -> memory
    update: Callable[[Any, jax.Array, jax.Array], Any] = lambda memory, fired, centers: memory


def rowwise(metric: MetricFn, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the distance [A] of each row of `a` [A, p] from the same row of `b`."""
    return jax.vmap(lambda x, y: metric(x[None], y[None])[0, 0])(a, b)


def apply_moves(
    points: jax.Array,
    valid: jax.Array,
    moving: jax.Array,
    old: jax.Array,
    centers: jax.Array,
    active: jax.Array,
    metric: MetricFn,
) -> DriftEvent:
    """Moves the drifted clients to the nearest centers and recomputes the center of every group
    that has lost, gained or kept one of them (Algorithm 2, lines 1-3). Returns what the moves
    have done.

    Centers do not move meanwhile, so that the order of the clients does not matter. An empty
    group keeps its center and may be joined again.

    Args: `points` [K, p] represent the clients; `valid` [K] bool are those with data; `moving`
    [K] bool are the drifted ones; `old` [K] int32 are the groups before; `centers` [m, p] are
    those of the groups; `active` [m] bool are the groups in use.
    """
    m = active.size
    distance = jnp.where(active[:, None], metric(centers, points), jnp.inf)
    labels = jnp.where(moving, jnp.argmin(distance, axis=0), old).astype(jnp.int32)
    groups = jnp.arange(m)
    affected = (old[:, None] == groups) | (labels[:, None] == groups)
    touched = jnp.any(affected & moving[:, None], axis=0)
    means, size = cluster_means(points, labels, valid, m)
    after = jnp.where((touched & (size > 0))[:, None], means, centers)
    return DriftEvent(points, valid, labels, centers, after, size > 0, metric)


def center_shift(tau: NonNegativeFloat | jax.Array = 1 / 3) -> Trigger:
    """Fires when a center has moved in this event by at least `tau` times theta, the mean
    distance between centers of occupied groups (Algorithm 2, lines 4-5). It never fires with one
    group.
    """

    def fires(memory: Any, moves: DriftEvent) -> jax.Array:
        shift = jnp.max(rowwise(moves.metric, moves.before, moves.after))
        apart = moves.metric(moves.after, moves.after)
        pairs = jnp.triu(moves.occupied[:, None] & moves.occupied, 1)
        theta = jnp.sum(jnp.where(pairs, apart, 0)) / jnp.sum(pairs)  # NaN where there are none
        return shift >= tau * theta

    return Trigger(fires)


def center_shift_since_clustering(tau: NonNegativeFloat | jax.Array = 1 / 3) -> Trigger:
    """As `center_shift`, with centers compared to those of the last clustering of all
    clients, so that slow drift adds up.
    """

    def fires(memory: jax.Array, moves: DriftEvent) -> jax.Array:
        return center_shift(tau).fires((), moves._replace(before=memory))

    def update(memory: jax.Array, fired: jax.Array, centers: jax.Array) -> jax.Array:
        return jnp.where(fired, centers, memory)

    return Trigger(fires, lambda centers: centers, update)


def pairwise(delta: PositiveFloat = 0.1) -> Trigger:
    """Fires when two clients of a group are more than Delta apart (appendix F.2). Delta is
    `delta` at first, doubles when two events in a row fire, and otherwise becomes
    max(delta, Delta - delta). (The paper prints the minimum, with which every event fires after the
    first.)
    """

    def init(centers: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(delta, jnp.float32), jnp.zeros((), bool)

    def fires(memory: tuple[jax.Array, jax.Array], moves: DriftEvent) -> jax.Array:
        return largest_distance(moves.points, moves.labels, moves.valid, moves.metric) > memory[0]

    def update(
        memory: tuple[jax.Array, jax.Array], fired: jax.Array, centers: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        present, before = memory
        lower = jnp.maximum(jnp.float32(delta), present - delta)
        return jnp.where(fired & before, 2 * present, lower), fired

    return Trigger(fires, init, update)


def pairwise_fixed(delta: PositiveFloat = 0.1) -> Trigger:
    """Fires when two clients of a group are more than `delta` apart (Algorithm 4, line 9)."""

    def fires(memory: Any, moves: DriftEvent) -> jax.Array:
        return largest_distance(moves.points, moves.labels, moves.valid, moves.metric) > delta

    return Trigger(fires)


def always() -> Trigger:
    """Clusters all clients again at every drift event."""
    return Trigger(lambda memory, moves: jnp.array(True))


def never() -> Trigger:
    """Never clusters all clients again; clients only move one by one."""
    return Trigger(lambda memory, moves: jnp.array(False))


TriggerName = Literal[
    "center_shift", "since_clustering", "pairwise", "pairwise_fixed", "always", "never"
]


def pick_trigger(trigger: TriggerName | Trigger, tau: float | jax.Array, delta: float) -> Trigger:
    """Returns the trigger of this name; `tau` and `delta` are those of the functions above."""
    return pick(
        trigger,
        center_shift=center_shift(tau),
        since_clustering=center_shift_since_clustering(tau),
        pairwise=pairwise(delta),
        pairwise_fixed=pairwise_fixed(delta),
        always=always(),
        never=never(),
    )


def mixing_weights(old: jax.Array, new: jax.Array, valid: jax.Array, m: int) -> jax.Array:
    """Returns W [m, m], whose row k has the share of each old cluster among the members of
    the new cluster k; a cluster without members keeps its own.
    """
    before, after = (one_hot(labels, m, valid) for labels in (old, new))
    return transition_shares(dot(before.T, after)).T


def transition_shares(joined: jax.Array) -> jax.Array:
    """Returns the columns of `joined` as shares that sum to 1. `joined` [m, m] counts the
    clients that went from an old group (row) to a new one (column).

    The column of a new group without clients is 1 for the old group of the same number, 0
    elsewhere: it keeps its own model.
    """
    size = joined.sum(0)
    return jnp.where(size > 0, joined / jnp.maximum(size, 1.0), jnp.eye(len(joined)))


def mix_former_models(weights: jax.Array, tree: Params) -> Any:
    """Returns sum_l weights[k, l] tree[l] of every float leaf [m, ...]; other leaves, such as
    counters, stay (Fielding, Algorithm 2: a new model is the mean of its members' old ones).
    """

    def mix(leaf: jax.Array) -> jax.Array:
        return group_sum(weights.T, leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(mix, tree)
