"""Streams: samples arrive at their clients interval by interval and are forgotten after a
while (Fielding, https://arxiv.org/abs/2411.01580, sections 5.1 and E.1).

An `ArrangeFn` of `traces` says in which interval each holding arrives. A window slides
over the intervals: it begins with those of the last `retained` rounds and moves on by one
every `period` rounds. Holdings are sorted by client and interval once. From then on the
window of a client is a start and a size: only the window's two ends are new in a round,
and nothing is sorted again.

`label_swap` is concept drift without a window: all samples stay, labels change.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from fedjax_cfl.data import traces
from fedjax_cfl.data.drift import Drift, keep_nothing
from fedjax_cfl.data.federated import label_counts
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import ClientIndex, FederatedData, Key
from fedjax_cfl.validation import Fraction, PositiveFloat, PositiveInt, check_arguments

ALWAYS = -1  # the interval of a holding that is in every window
ARRANGE, CHOOSE, SWAP = 10, 11, 12  # purposes of draws, see `drift`


class Window(NamedTuple):
    """When data arrive, and how long they are kept."""

    intervals: int  # B, of the whole trace
    period: int  # g, rounds between two arrivals
    retained: int  # rounds of data that a client keeps, and begins with

    @property
    def length(self) -> int:
        """W, intervals in the window."""
        return min(-(-self.retained // self.period), self.intervals)


class StreamMemory(struct.PyTreeNode):
    """What a stream remembers."""

    owner: jax.Array  # [N] int32, who holds each sample while it is in the window
    interval: jax.Array  # [N] int32, when it arrives, -1: it is in every window
    # [K, B + 1] int32, samples of a client that arrive before interval b, or are always there
    train_offset: jax.Array
    test_offset: jax.Array


def find_oldest(window: Window, round: jax.Array | int) -> jax.Array:
    """Returns the oldest interval of the window in round 1, 2, ...; round 0 is the start of
    the run. The newest is that + `window.length` - 1.
    """
    return jnp.minimum(round // window.period, window.intervals - window.length)


def stream(
    arrange: traces.ArrangeFn, intervals: PositiveInt, period: PositiveInt, retained: PositiveInt
) -> Drift:
    """Shows each client the holdings of a window of `retained` rounds, which moves on every
    `period` rounds until the last of the `intervals` has arrived.

    A window of everything never moves: the data are static.
    """
    check_arguments(stream, locals(), "drift")
    window = Window(intervals, period, retained)
    is_static = window.length == intervals

    def init(key: Key, data: FederatedData) -> tuple[FederatedData, Any]:
        data, interval = arrange(jax.random.fold_in(key, ARRANGE), data, window)
        if is_static:
            return data, ()
        interval = jnp.where(traces.find_shared(data), ALWAYS, interval)
        train, train_offset = sort_by_interval(data.train, data.owner, interval, intervals)
        test, test_offset = sort_by_interval(data.test, data.owner, interval, intervals)
        memory = StreamMemory(data.owner, interval, train_offset, test_offset)
        return show_window(data.replace(train=train, test=test), memory, window, 0, 0), memory

    def apply(
        key: Key, round: jax.Array, data: FederatedData, memory: Any, warm: jax.Array
    ) -> tuple[FederatedData, Any, jax.Array]:
        if is_static:
            return data, memory, jnp.zeros(data.num_clients, bool)
        before, now = find_oldest(window, round), find_oldest(window, round + 1)
        size = window.length
        shifted = jnp.zeros(data.num_clients, bool)
        for offset in (memory.train_offset, memory.test_offset):
            shifted |= offset[:, before] != offset[:, now]
            shifted |= offset[:, before + size] != offset[:, now + size]

        def show() -> tuple[jax.Array, ClientIndex, ClientIndex]:
            shown = show_window(data, memory, window, before, now)
            return shown.owner, shown.train, shown.test

        # the samples themselves stay outside, where they are not copied
        owner, train, test = lax.cond(
            before != now, show, lambda: (data.owner, data.train, data.test)
        )
        return data.replace(owner=owner, train=train, test=test), memory, shifted

    return Drift(init, apply)


def sort_by_interval(
    view: ClientIndex, owner: jax.Array, interval: jax.Array, intervals: int
) -> tuple[ClientIndex, jax.Array]:
    """Sorts each client's samples by the interval [N] of their arrival, then by number; what
    is always there comes first.

    Returns the view and the offsets [K, B + 1] of the intervals in a client's range.
    """
    clients = view.size.shape[0]
    held = owner[view.order]
    held, when, order = lax.sort(
        (jnp.where(held < 0, clients, held), interval[view.order], view.order), num_keys=3
    )
    counts = jnp.zeros((clients, intervals + 1), jnp.int32)
    counts = counts.at[held, when + 1].add(1, mode="drop")  # ALWAYS is -1
    size = counts.sum(axis=1, dtype=jnp.int32)
    start = jnp.cumsum(size, dtype=jnp.int32) - size
    return ClientIndex(order, start, size), jnp.cumsum(counts, axis=1, dtype=jnp.int32)


def show_window(
    data: FederatedData,
    memory: StreamMemory,
    window: Window,
    before: jax.Array | int,
    oldest: jax.Array | int,
) -> FederatedData:
    """Returns the data with the window that begins at interval `oldest`; the one before began
    at `before`.
    """
    newest = oldest + window.length - 1
    inside = (memory.interval >= oldest) & (memory.interval <= newest)
    visible = inside | (memory.interval == ALWAYS)
    return data.replace(
        owner=jnp.where(visible, memory.owner, -1),
        train=_turn_ranges(data.train, memory.owner, memory.train_offset, before, oldest, newest),
        test=_turn_ranges(data.test, memory.owner, memory.test_offset, before, oldest, newest),
    )


def _turn_ranges(view, owner, offset, before, oldest, newest) -> ClientIndex:
    """Turns what comes and goes in each client's range until the window is in front, right
    behind what is always there. The order of arrival is a ring, so that a move by some places
    is all that is needed.
    """
    always, total = offset[:, 0], offset[:, -1]
    ring, step = total - always, offset[:, oldest] - offset[:, before]
    client = owner[view.order]
    first = view.start[client] + always[client]
    place = jnp.arange(view.order.size, dtype=jnp.int32) - first
    source = first + (place + step[client]) % jnp.maximum(ring[client], 1)
    turned = view.order[jnp.where((client >= 0) & (place >= 0), source, first + place)]
    return view.replace(order=turned, size=always + offset[:, newest + 1] - offset[:, oldest])


def bucket(
    intervals: PositiveInt = 10, period: PositiveInt = 50, retained: PositiveInt = 100
) -> Drift:
    """Each client deals its labels to the intervals at random; an interval brings all
    samples of its labels (the Open Images trace of Fielding).
    """
    check_arguments(bucket, locals(), "drift")
    return stream(traces.deal_labels, intervals, period, retained)


def gradual(
    alpha: PositiveFloat = 1.0,
    epsilon: Fraction = 0.1,
    intervals: PositiveInt = 10,
    period: PositiveInt = 30,
    retained: PositiveInt = 100,
) -> Drift:
    """The label shares of a client move slowly: p_{b+1} = (1 - epsilon) p_b + epsilon
    Dir(alpha / C). Its samples are redrawn from those shares, see `traces.redraw_samples`.
    """
    check_arguments(gradual, locals(), "drift")

    def arrange(key: Key, data: FederatedData, window: Window):
        return traces.redraw_samples(
            key, data, intervals, alpha, epsilon, np.zeros(intervals, bool), 0.0
        )

    return stream(arrange, intervals, period, retained)


def burst(
    alpha: PositiveFloat = 1.0,
    epsilon: Fraction = 0.02,
    fraction: Fraction = 0.5,
    begin: PositiveInt = 600,
    end: PositiveInt = 730,
    intervals: PositiveInt = 105,
    period: PositiveInt = 20,
    retained: PositiveInt = 100,
) -> Drift:
    """As `gradual`, and with every arrival in the rounds `begin` to `end` each client draws
    new label shares with probability `fraction` (the heavy drift of Fielding's Fig. 1).

    Raises InputError if no data arrive in those rounds.
    """
    check_arguments(burst, locals(), "drift")
    window = Window(intervals, period, retained)
    arrival = (np.arange(intervals) - window.length + 1) * period  # round, <= 0 at the start
    is_burst = (arrival >= max(begin, 1)) & (arrival <= end)
    if not is_burst.any():
        raise InputError(
            f"drift.begin={begin}: no data arrive from round {begin} to drift.end={end}; they"
            f" arrive every drift.period={period} rounds until round {max(arrival[-1], 0)}"
        )

    def arrange(key: Key, data: FederatedData, window: Window):
        return traces.redraw_samples(key, data, intervals, alpha, epsilon, is_burst, fraction)

    return stream(arrange, intervals, period, retained)


def rotate(
    p: Fraction = 0.1,
    intervals: PositiveInt = 10,
    period: PositiveInt = 20,
    retained: PositiveInt = 100,
) -> Drift:
    """Covariate drift: what arrives at a client is turned by a number of quarters, random at
    first; with each interval it turns by one more with probability p.
    """
    check_arguments(rotate, locals(), "drift")

    def arrange(key: Key, data: FederatedData, window: Window):
        return traces.turn_arrivals(key, data, intervals, p)

    return stream(arrange, intervals, period, retained)


def by_time(
    intervals: PositiveInt = 10, period: PositiveInt = 50, retained: PositiveInt = 100
) -> Drift:
    """Samples arrive in the order of their real times, which are cut into intervals of equal
    length. Raises InputError for data without times.
    """
    check_arguments(by_time, locals(), "drift")
    made = stream(traces.cut_times, intervals, period, retained)

    def check(data: FederatedData) -> int:
        traces.check_times(data, intervals)
        return data.max_client_samples

    return made._replace(max_client_samples=check)


def label_swap(fraction: Fraction = 0.5, period: PositiveInt = 30) -> Drift:
    """Concept drift: every `period` rounds a random `fraction` of the clients each exchange
    two labels that they have, in training and test data (Fielding, section 5.6).
    """
    check_arguments(label_swap, locals(), "drift")

    def apply(
        key: Key, round: jax.Array, data: FederatedData, memory: Any, warm: jax.Array
    ) -> tuple[FederatedData, Any, jax.Array]:
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
    nobody with less than two labels.
    """
    who, which = (
        jax.random.fold_in(jax.random.fold_in(key, purpose), round) for purpose in (CHOOSE, SWAP)
    )
    place = jax.random.permutation(who, data.num_clients)
    has = label_counts(data.train, data.owner, data.y, data.num_classes) > 0
    score = jnp.where(has, jax.random.uniform(which, has.shape), -1.0)
    best, labels = lax.top_k(score, min(2, data.num_classes))
    if data.num_classes < 2:
        return jnp.zeros(data.num_clients, bool), jnp.zeros((data.num_clients, 2), jnp.int32)
    count = int(fraction * data.num_clients + 0.5)
    return (place < count) & (best[:, 1] >= 0), labels
