"""Which clients take part in a round: each function returns a `Selection`.

Most selections remember nothing. `drawn_ahead` makes them of a function (key, round, size) -> ids
[k] int32, in order of selection, without repeats, K in a place that stays empty; size [K] counts
each client's training samples.

Selections by group have a quota of slots for each group (Fielding,
https://arxiv.org/abs/2411.01580, Algorithm 1). A round has S slots. With g groups that have
clients, each group gets floor(S / g) slots, and the first S mod g groups get one more.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.data.federated import check_classes, to_shares, train_label_counts
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import permute, put_first
from fedjax_cfl.tree import one_hot
from fedjax_cfl.types import Cohort, FederatedData, Key, Selection, State
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, checked

__all__ = ["from_table", "full_participation", "rr_then_random", "uniform"]
Draw = Callable[..., jax.Array]  # (key, round, size [K]) -> ids [k] int32


def memoryless(select: Callable[..., jax.Array]) -> Selection:
    """Selects by `select`, see `Selection`, which gets () as memory."""
    return Selection(lambda data: (), select, lambda memory, state, cohort, upload, seconds: memory)


def drawn_ahead(draw: Draw) -> Selection:
    """Selects by `draw`, whose cohorts are known before the run: samples on the host can be fetched
    ahead.
    """
    drawn = memoryless(lambda key, memory, state, data: draw(key, state.round, data.train.size))
    return drawn._replace(draw=draw)


def full_participation() -> Selection:
    """Takes all clients every round, in the order of their ids (Sattler et al.)."""
    return drawn_ahead(lambda key, round, size: jnp.arange(len(size), dtype=jnp.int32))


@checked()
def draw_trainable(clients_per_round: PositiveInt, in_turn: bool) -> Draw:
    """Draws clients that have training samples, uniformly without replacement; with `in_turn`,
    in the order of their ids until all have been selected. Places stay empty if they are too few.

    Raises InputError for fewer than one client, and when it draws, for more than there are.
    """

    def draw(key: Key, round: int | jax.Array, size: jax.Array) -> jax.Array:
        if clients_per_round > len(size):
            raise InputError(
                f"clients_per_round={clients_per_round}: must be at most {len(size)}, the number"
                " of clients"
            )
        trainable, place = jnp.asarray(size) > 0, jnp.arange(clients_per_round)
        count = trainable.sum()
        number = permute(jax.random.bits(key, (2,)), count, 0, place)
        if in_turn:
            turn = (round * clients_per_round + place) % jnp.maximum(count, 1)
            number = jnp.where(round * clients_per_round < count, turn, number)
        return jnp.where(place < count, put_first(trainable)[number], len(size)).astype(jnp.int32)

    return draw


def uniform(clients_per_round: PositiveInt) -> Selection:
    """Selects uniformly without replacement every round (FedAvg), see `draw_trainable`."""
    return drawn_ahead(draw_trainable(clients_per_round, in_turn=False))


def rr_then_random(clients_per_round: PositiveInt) -> Selection:
    """Takes clients in the order of their ids until all have been selected, then draws uniformly
    (the clustered trainers of the FlexCFL code), see `draw_trainable`. Where ids go group by group,
    so do the first rounds.
    """
    return drawn_ahead(draw_trainable(clients_per_round, in_turn=True))


def from_table(table: np.ndarray) -> Selection:
    """Follows a table [T, k] of client ids; a run longer than the table starts over."""
    rows = jnp.asarray(table, jnp.int32)
    return drawn_ahead(lambda key, round, size: rows[round % rows.shape[0]])


class ScoreFn(Protocol):
    """Scores all clients [K]; within a group those of highest score are selected."""

    def __call__(self, key: Key, state: State, data: FederatedData) -> jax.Array: ...


def groups_of(state: State) -> jax.Array:
    """Returns the group [K] of each client; clients without one count as of group 0."""
    return jnp.maximum(state.assignment, 0)


def current_groups(state: State, cohort: Cohort) -> jax.Array:
    """Returns the present groups [S] of the clients; -1 for a client without a group and for
    an empty slot.
    """
    clients = state.assignment.size
    met = cohort.take(state.assignment)
    return jnp.where(cohort.ids < clients, met, -1)


def is_unassigned(state: State, cohort: Cohort) -> jax.Array:
    """Returns which slots [S] bool have a client that was never assigned to a group."""
    return (cohort.ids < state.assignment.size) & (current_groups(state, cohort) < 0)


def share_quotas(slots: int, members: jax.Array) -> jax.Array:
    """Returns the quotas [m] of groups with `members` [m] clients; none is larger than its
    group, so that slots may stay empty.
    """
    used = members > 0
    live = jnp.maximum(used.sum(), 1)
    first = jnp.cumsum(used) <= slots % live
    return jnp.where(used, jnp.minimum(slots // live + first, members), 0)


def rank_in_groups(score: jax.Array, group: jax.Array) -> jax.Array:
    """Returns the rank [K] of each client by `score` [K] within its `group` [K], 0 for the
    highest; lower ids come first among equals.
    """
    order = jnp.lexsort((-score, group))
    ordered = group[order]
    place = jnp.arange(len(group))
    begin = jax.lax.cummax(
        jnp.where(jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]), place, 0)
    )
    return jnp.zeros_like(place).at[order].set(place - begin)


def take_quotas(state: State, score: jax.Array, candidates: jax.Array, slots: int) -> jax.Array:
    """Returns the ids [slots] of the candidates [K] bool of highest `score` [K] within the quotas
    of their present groups, K in a slot that stays empty.
    """
    group, clients, num_groups = groups_of(state), state.assignment.size, state.active.size
    own = jnp.where(candidates, group, num_groups)
    members = jnp.zeros(num_groups, jnp.int32).at[own].add(1, mode="drop")
    quota = share_quotas(slots, members)
    taken = candidates & (rank_in_groups(score, own) < quota[jnp.minimum(own, num_groups - 1)])
    order = jnp.lexsort((-score, ~taken))[:slots].astype(jnp.int32)
    ids = jnp.where(taken[order], order, clients)
    return jnp.pad(ids, (0, slots - ids.size), constant_values=clients)


@checked()
def by_group(clients_per_round: PositiveInt, score: ScoreFn | None = None) -> Selection:
    """Selects the clients of highest `score` within each group's quota, uniformly random
    ones if None.

    Clients without training samples are never selected.
    """
    rank = score or (lambda key, state, data: jax.random.uniform(key, (data.num_clients,)))

    def select(key: Key, memory: tuple, state: State, data: FederatedData) -> jax.Array:
        return take_quotas(state, rank(key, state, data), data.train.size > 0, clients_per_round)

    return memoryless(select)


@checked()
def nearest_to_center(
    clients_per_round: PositiveInt, temperature: NonNegativeFloat = 0.0
) -> Selection:
    """Selects, within each group's quota, the clients whose label shares have the smallest
    L1 distance from their group's mean shares.

    A `temperature` > 0 draws with chances proportional to exp(-distance / temperature)
    instead, so that far clients are not starved.
    """

    def score(key: Key, state: State, data: FederatedData) -> jax.Array:
        check_classes(data, "selection=nearest", "use selection=by_group")
        counts = train_label_counts(data)
        size, shares = counts.sum(axis=1), to_shares(counts)
        own = groups_of(state)
        member = one_hot(own, state.active.size, size > 0)
        centers = member.T @ shares / jnp.maximum(member.sum(0), 1)[:, None]
        distance = jnp.sum(jnp.abs(shares - centers[own]), axis=1)
        if temperature == 0:
            return -distance
        return jax.random.gumbel(key, distance.shape) - distance / temperature

    return by_group(clients_per_round, score)
