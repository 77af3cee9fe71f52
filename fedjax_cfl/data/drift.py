"""Distribution shift: which client has which samples changes from round to round (FlexCFL,
https://arxiv.org/abs/2108.09749, section 5.3).

A shift is an edit of `owner` (and, for other kinds, of `y`), with static shapes; the
views are rebuilt by one sort, and only in a round in which something moved. Every draw
is a function of the key and the round alone, so with pool "all" every algorithm meets
the same shifts.

Differs from the paper: with pool "warm" only clients that have a group can be drawn
(D12), as in the FlexCFL code.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from typing_extensions import TypeAliasType

from fedjax_cfl.data import federated
from fedjax_cfl.keys import draw_permutation, put_first
from fedjax_cfl.types import FederatedData, Key
from fedjax_cfl.validation import Fraction, NaturalInt, PositiveInt, Rule, checked, pick

__all__ = ["Drift", "label_swap", "none", "swap_all", "swap_at", "swap_part"]
# Purposes: every draw comes from fold_in(key, purpose), then the round.
ORDER, COIN, LABELS, RELEASE = range(4)
CHOOSE, SWAP = 11, 12  # of `label_swap`
OTHER_DRIFTS = "use drift=swap_all, swap_at, incremental or by_time"  # without classes
SwapPool = Literal["all", "warm"]
# (which pairs [K // 2] bool are to swap, and which can) -> which may
AllowFn = TypeAliasType("AllowFn", Callable[[jax.Array, jax.Array], jax.Array])


def increasing(values: str) -> Rule:
    """Allows lists of increasing values, which `values` describes."""

    def holds(found: Sequence[float]) -> bool:
        return len(found) > 0 and all(a < b for a, b in pairwise(found))

    return Rule(f"a list of increasing {values}", holds)


class Drift(NamedTuple):
    """A kind of distribution shift."""

    init: Callable[..., tuple[FederatedData, Any]]  # (key, data) -> (data, memory)
    # (key, round, data, memory, warm [K] bool) -> (.., .., shifted [K] bool)
    apply: Callable[..., tuple[FederatedData, Any, jax.Array]]
    # on the host: the most training samples a client may ever hold
    max_client_samples: Callable[[FederatedData], int] = lambda data: data.max_client_samples
    moves: bool = True  # False: nothing ever changes
    # (pool, holdings, concept) -> the data that it needs; None: those of `federate`
    federate: Callable[..., FederatedData] | None = None


class SwapDraws(NamedTuple):
    """All that is random in one round of swaps."""

    order: jax.Array  # [K] int32, a permutation of the clients
    coin: jax.Array  # [K // 2] float32 in [0, 1): the pair swaps if it is below p
    # [K // 2, C] float32: of the labels it may give, the first client of a pair gives the one
    # of highest score
    gives: jax.Array
    takes: jax.Array  # [K // 2, C] float32: the same for the second client


def bound_client_samples(data: FederatedData, drift: Drift) -> FederatedData:
    """Returns data whose `max_client_samples` bounds what any client can ever hold under a drift;
    on the host, before anything is traced.
    """
    return data.replace(max_client_samples=drift.max_client_samples(data))


@functools.cache  # the same object, so that runs without a drift share what is compiled
def none() -> Drift:
    """Returns a drift in which no data ever change."""

    def apply(key, round, data, memory, warm):
        return data, memory, jnp.zeros(data.num_clients, bool)

    return Drift(keep_nothing, apply, moves=False)


@checked("drift")
def swap_all(p: Fraction | jax.Array = 0.05, pool: SwapPool = "all") -> Drift:
    """Pairs the pool's clients at random; each pair exchanges all its training and test
    samples with probability p.
    """

    def apply(key, round, data, memory, warm):
        clients = jnp.arange(data.num_clients, dtype=data.owner.dtype)
        drawn = draw_swaps(key, round, data.num_clients, data.num_classes)
        first, second, real = pair_clients(drawn.order, warm | (pool == "all"))
        swaps = real & (drawn.coin < p)
        # K in place of clients that do not swap, where a scatter drops them
        one, two = (jnp.where(swaps, who, data.num_clients) for who in (first, second))
        heir = clients.at[one].set(second, mode="drop").at[two].set(first, mode="drop")
        shifted = heir != clients
        # the truth about a client's data moves with them
        data = data.replace(concept=data.concept[heir])

        def exchange(owner, train, test):
            new = jnp.where(owner < 0, owner, heir[owner])
            return new, *(federated.move_client_index(view, owner, heir) for view in (train, test))

        return edit_views(data, jnp.any(shifted), exchange), memory, shifted

    return Drift(keep_nothing, apply)


@checked("drift")
def swap_at(round: NaturalInt, p: Fraction | jax.Array = 1.0, pool: SwapPool = "all") -> Drift:
    """As `swap_all`, in one round alone: when `round` rounds have finished, so that the row of that
    number is the last before the shift.
    """

    def apply(key, now, data, memory, warm):
        chance = jnp.where(now == round, p, 0.0)
        return swap_all(chance, pool).apply(key, now, data, memory, warm)

    return Drift(keep_nothing, apply)


@checked("drift")
def swap_part(
    p: Fraction | jax.Array = 0.05,
    pool: SwapPool = "all",
    allow: Literal["all"] | AllowFn = "all",
) -> Drift:
    """Pairs the pool's clients at random. With probability p each client of a pair gives the
    other all its samples of one label that the other lacks.

    A client has a label if it has training and test samples of it. If one client of a pair has
    no label that the other lacks, the pair does not swap. `allow` says which of the others do
    (D13).
    """
    allowed = pick(allow, all=lambda asked, possible: possible)

    def apply(key, round, data, memory, warm):
        federated.check_classes(data, "drift=swap_part", OTHER_DRIFTS)
        drawn = draw_swaps(key, round, data.num_clients, data.num_classes)
        first, second, real = pair_clients(drawn.order, warm | (pool == "all"))
        has = _held_labels(data)
        gives, takes = has[first] & ~has[second], has[second] & ~has[first]  # D1, D2 [K // 2, C]
        asked, possible = real & (drawn.coin < p), gives.any(1) & takes.any(1)
        go = asked & possible & allowed(asked, possible)
        one, two = (jnp.where(go, who, data.num_clients) for who in (first, second))
        given = jnp.argmax(jnp.where(gives, drawn.gives, -1.0), axis=1)
        taken = jnp.argmax(jnp.where(takes, drawn.takes, -1.0), axis=1)
        clients = jnp.arange(data.num_clients, dtype=data.owner.dtype)
        stay = jnp.broadcast_to(clients[:, None], has.shape)
        # [K, C]
        heir = stay.at[one, given].set(second, mode="drop").at[two, taken].set(first, mode="drop")
        shifted = jnp.any(heir != stay, axis=1)
        # from now on of mixed origin
        data = data.replace(concept=jnp.where(shifted, -1, data.concept))

        def edit(owner: jax.Array) -> jax.Array:
            return jnp.where(owner < 0, owner, heir[owner, data.y])

        return edit_owners(data, jnp.any(shifted), edit), memory, shifted

    return Drift(keep_nothing, apply, _most_by_label)


def draw_swaps(key: Key, round: jax.Array, num_clients: int, num_classes: int) -> SwapDraws:
    """Draws everything that a round of swaps may need."""
    order, coin, labels = (
        jax.random.fold_in(jax.random.fold_in(key, purpose), round)
        for purpose in (ORDER, COIN, LABELS)
    )
    pairs = num_clients // 2
    coins = jax.random.uniform(coin, (pairs,))
    scores = jax.random.uniform(labels, (2, pairs, num_classes))
    return SwapDraws(draw_permutation(order, num_clients), coins, *scores)


def pair_clients(order: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pairs the pool Q of clients `inside` [K] bool in their random order: place a with
    place |Q| - 1 - a.

    Returns (first, second, real), each [K // 2]; only floor(|Q| / 2) of the pairs are
    real.
    """
    queue = order[put_first(inside[order])]
    count, place = jnp.sum(inside), jnp.arange(order.size // 2)
    return queue[place], queue[count - 1 - place], place < count // 2


def _held_labels(data: FederatedData) -> jax.Array:
    """Returns the labels of which each client holds training and test samples, [K, C] bool."""
    train, test = (federated.label_counts(view, data) for view in (data.train, data.test))
    return (train > 0) & (test > 0)


def edit_owners(
    data: FederatedData, moves: jax.Array, edit: Callable[[jax.Array], jax.Array]
) -> FederatedData:
    """Edits the owners and rebuilds the views, if `moves`."""

    def rebuild(owner, train, test):
        new = edit(owner)
        return new, *(federated.update_client_index(view, new) for view in (train, test))

    return edit_views(data, moves, rebuild)


def edit_views(data: FederatedData, moves: jax.Array, edit: Callable) -> FederatedData:
    """Returns the data with the owners and views that `edit` makes of both, if `moves`; the samples
    themselves stay outside, where they are not copied.
    """
    views = data.owner, data.train, data.test
    owner, train, test = lax.cond(moves, edit, lambda *same: same, *views)
    return data.replace(owner=owner, train=train, test=test)


def keep_nothing(key: Key, data: FederatedData) -> tuple[FederatedData, Any]:
    """Returns the data as they are, and no memory (the `init` of a drift without any)."""
    return data, ()


def _most_by_label(data: FederatedData) -> int:
    """Bounds a client's training samples under `swap_part`.

    A swap replaces one label that a client has by another, so their number never
    changes. The block of a label travels whole, and takes along the training samples of
    clients that have no test samples of it: at most the largest block and all such
    remainders.
    """
    federated.check_classes(data, "drift=swap_part", OTHER_DRIFTS)
    counts = np.asarray(federated.train_label_counts(data), np.int64)
    has = np.asarray(_held_labels(data))
    remainder = np.where(has, 0, counts)  # [K, C], does not move by itself
    largest = np.where(has, counts, 0).max(axis=0)
    block = np.where(largest > 0, largest + remainder.sum(axis=0), 0)  # [C]
    gain = -np.sort(-np.maximum(block - remainder, 0), axis=1)  # [K, C], largest first
    most = remainder.sum(axis=1) + np.where(
        np.arange(gain.shape[1]) < has.sum(axis=1, keepdims=True), gain, 0
    ).sum(axis=1)
    return max(data.max_client_samples, int(min(most.max(), counts.sum())))


@checked("drift")
def label_swap(fraction: Fraction = 0.5, period: PositiveInt = 30) -> Drift:
    """Concept drift: every `period` rounds a random `fraction` of the clients each exchange
    two labels that they have, in training and test data (Fielding,
    https://arxiv.org/abs/2411.01580, appendix E.1).
    """

    def apply(key, round, data, memory, warm):
        federated.check_classes(data, "drift=label_swap", OTHER_DRIFTS)
        due = (round + 1) % period == 0
        chosen, labels = draw_label_pairs(key, round, data, fraction)
        shifted = chosen & due
        one, two = jnp.where(shifted[:, None], labels, -1).T  # no label is -1
        owner = jnp.where(data.owner < 0, data.num_clients, data.owner)
        one, two = (side.at[owner].get(mode="fill", fill_value=-1) for side in (one, two))
        y = jnp.where(data.y == one, two, jnp.where(data.y == two, one, data.y))
        concept = jnp.where(shifted, -1, data.concept)  # from now on of mixed origin
        return data.replace(y=y, concept=concept), memory, shifted

    return Drift(keep_nothing, apply)


def draw_label_pairs(
    key: Key, round: jax.Array, data: FederatedData, fraction: float
) -> tuple[jax.Array, jax.Array]:
    """Draws which clients [K] bool exchange which two labels [K, 2] of their training data;
    clients with fewer than two labels exchange none.
    """
    who, which = (
        jax.random.fold_in(jax.random.fold_in(key, purpose), round) for purpose in (CHOOSE, SWAP)
    )
    place = draw_permutation(who, data.num_clients)
    has = federated.train_label_counts(data) > 0
    score = jnp.where(has, jax.random.uniform(which, has.shape), -1.0)
    best, labels = lax.top_k(score, min(2, data.num_classes))
    if data.num_classes < 2:
        return jnp.zeros(data.num_clients, bool), jnp.zeros((data.num_clients, 2), jnp.int32)
    count = int(fraction * data.num_clients + 0.5)
    return (place < count) & (best[:, 1] >= 0), labels
