"""Streams: samples arrive at their clients interval by interval and are forgotten after a
while (Fielding, https://arxiv.org/abs/2411.01580, section 3 and appendix D).

An `ArrangeFn` of `traces` says in which interval each holding arrives. A window slides
over the intervals: it begins with those of the last `retained` rounds and moves on by one
every `period` rounds. Holdings are sorted by client and interval once. From then on the
window of a client is a start and a size: only the window's two ends are new in a round,
and nothing is sorted again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from fedjax_cfl.data import traces
from fedjax_cfl.data.concept import check_square
from fedjax_cfl.data.drift import Drift, edit_views
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import ClientIndex, FederatedData, Key
from fedjax_cfl.validation import Fraction, PositiveFloat, PositiveInt, checked

__all__ = ["bucket", "burst", "by_time", "gradual", "rotate"]
ALWAYS = -1  # the interval of a holding that is in every window
ARRANGE = 10  # purpose of a draw, see `drift`


class Window(NamedTuple):
    """When data arrive, and how long they are kept."""

    intervals: int  # B, of the whole trace
    period: int  # g, rounds between two arrivals
    retained: int  # rounds of data that a client keeps, and begins with
    prequential: bool = False  # clients are tested on what arrives next, not on the window

    @property
    def length(self) -> int:
        """W, intervals in the window."""
        return min(-(-self.retained // self.period), self.intervals)

    def tested(self, oldest: jax.Array | int) -> tuple[jax.Array | int, jax.Array | int]:
        """Returns the oldest and newest interval of the test samples that belong to a window
        of training samples; at the end of the trace, where nothing is next, the last one.
        """
        if not self.prequential:
            return oldest, oldest + self.length - 1
        following = jnp.minimum(oldest + self.length, self.intervals - 1)
        return following, following


class StreamMemory(struct.PyTreeNode):
    """What a stream remembers."""

    owner: jax.Array  # [N] int32, the client of each sample while it is in the window
    interval: jax.Array  # [N] int32, when it arrives, -1: it is in every window
    # [K, B + 1] int32, samples of a client that arrive before interval b, or are always there
    train_offset: jax.Array
    test_offset: jax.Array
    is_test: jax.Array  # [N] bool


def find_oldest(window: Window, round: jax.Array | int) -> jax.Array:
    """Returns the oldest interval of the window in round 1, 2, ...; round 0 is the start of
    the run. The newest is that + `window.length` - 1.
    """
    return jnp.minimum(round // window.period, window.intervals - window.length)


def stream(
    arrange: traces.ArrangeFn,
    window: Window,
    check: Callable[[FederatedData], None] = lambda data: None,
) -> Drift:
    """Shows each client the holdings of a window of intervals, which moves on until the last
    interval has arrived. A window of all intervals never moves: the data are static.

    `arrange` says when each holding arrives; `check` refuses data on the host, before anything is
    traced. Raises InputError for a window that is not allowed, and where a test needs what arrives
    next, but nothing does.
    """
    intervals = window.intervals
    is_static = window.length == intervals
    if is_static and window.prequential:
        raise InputError(
            f"drift.prequential=true: all drift.intervals={intervals} are in the window of"
            f" drift.retained={window.retained} rounds, so that nothing arrives next"
        )

    def init(key: Key, data: FederatedData) -> tuple[FederatedData, Any]:
        data, interval = arrange(jax.random.fold_in(key, ARRANGE), data, intervals)
        if is_static:
            return data, ()
        interval = jnp.where(traces.find_shared(data), ALWAYS, interval)
        train, train_offset = sort_by_interval(data.train, data.owner, interval, intervals)
        test, test_offset = sort_by_interval(data.test, data.owner, interval, intervals)
        is_test = jnp.zeros(interval.size, bool).at[test.order].set(True, mode="drop")
        memory = StreamMemory(data.owner, interval, train_offset, test_offset, is_test)
        owner, train, test = show_window(train, test, memory, window, None, 0)
        return data.replace(owner=owner, train=train, test=test), memory

    def apply(key, round, data, memory, warm):
        if is_static:
            return data, memory, jnp.zeros(data.num_clients, bool)
        before, now = find_oldest(window, round), find_oldest(window, round + 1)
        shifted = jnp.zeros(data.num_clients, bool)
        for offset, ends in (
            (memory.train_offset, lambda oldest: (oldest, oldest + window.length - 1)),
            (memory.test_offset, window.tested),
        ):
            (begin, end), (begin_now, end_now) = ends(before), ends(now)
            shifted |= offset[:, begin] != offset[:, begin_now]
            shifted |= offset[:, end + 1] != offset[:, end_now + 1]

        def show(owner, train, test):
            return show_window(train, test, memory, window, before, now)

        return edit_views(data, before != now, show), memory, shifted

    def max_client_samples(data: FederatedData) -> int:
        check(data)
        return data.max_client_samples

    return Drift(init, apply, max_client_samples)


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
    train: ClientIndex,
    test: ClientIndex,
    memory: StreamMemory,
    window: Window,
    before: jax.Array | None,
    oldest: jax.Array | int,
) -> tuple[jax.Array, ClientIndex, ClientIndex]:
    """Returns the owners [N] and the views of training and test samples that clients see in a
    window.

    Args: `train` and `test` are the views in the window before, or have samples in the order of
    their intervals; `memory` is that of the stream; `window` says how long it is; `before` [] is
    the oldest interval of the window before, None: there was none; `oldest` [] that of the new one.
    """
    newest = oldest + window.length - 1
    first, last = window.tested(oldest)
    train_before, test_before = (0, 0) if before is None else (before, window.tested(before)[0])
    begin = jnp.where(memory.is_test, first, oldest)
    end = jnp.where(memory.is_test, last, newest)
    inside = (memory.interval >= begin) & (memory.interval <= end)
    visible = inside | (memory.interval == ALWAYS)
    owner = memory.owner
    return (
        jnp.where(visible, owner, -1),
        _turn_ranges(train, owner, memory.train_offset, train_before, oldest, newest),
        _turn_ranges(test, owner, memory.test_offset, test_before, first, last),
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


@checked("drift")
def bucket(
    intervals: PositiveInt = 10,
    period: PositiveInt = 50,
    retained: PositiveInt = 100,
    prequential: bool = False,
) -> Drift:
    """Each client deals its labels to the intervals at random; an interval brings all
    samples of its labels (the Open Images trace of Fielding).

    Args: as the fields of `Window`, in this drift and those below: `intervals` of the whole trace,
    `period` rounds between two arrivals, `retained` rounds of data that a client keeps;
    `prequential`: clients are tested on what arrives next.
    """
    return stream(traces.deal_labels, Window(intervals, period, retained, prequential))


@checked("drift")
def gradual(
    alpha: PositiveFloat = 1.0,
    epsilon: Fraction = 0.1,
    intervals: PositiveInt = 10,
    period: PositiveInt = 30,
    retained: PositiveInt = 100,
    prequential: bool = False,
) -> Drift:
    """The label shares of a client move slowly: p_{b+1} = (1 - epsilon) p_b + epsilon
    Dir(alpha / C). Its samples are redrawn from those shares, see `traces.redraw_samples`.

    `alpha` > 0, the larger the more even are label shares; `epsilon`, from 0 to 1, is how much of
    them is new in an interval.
    """
    window = Window(intervals, period, retained, prequential)
    settings = alpha, epsilon, np.zeros(intervals, bool), 0.0
    return stream(functools.partial(traces.redraw_samples, settings=settings), window)


@checked("drift")
def burst(
    alpha: PositiveFloat = 1.0,
    epsilon: Fraction = 0.02,
    fraction: Fraction = 0.5,
    begin: PositiveInt = 600,
    end: PositiveInt = 730,
    intervals: PositiveInt = 105,
    period: PositiveInt = 20,
    retained: PositiveInt = 100,
    prequential: bool = False,
) -> Drift:
    """As `gradual`, and with every arrival in some rounds each client may draw new label shares
    (the heavy drift of Fielding's Fig. 1).

    Args: `begin` and `end` are the first and the last of these rounds, from 1; `fraction`, from
    0 to 1, is the probability; the others are those of `gradual`. Raises InputError if no data
    arrive in those rounds.
    """
    window = Window(intervals, period, retained, prequential)
    # round, <= 0 at the start
    arrival = (np.arange(window.intervals) - window.length + 1) * window.period
    is_burst = (arrival >= begin) & (arrival <= end)
    if not is_burst.any():
        raise InputError(
            f"drift.begin={begin}: no data arrive from round {begin} to drift.end={end}; they"
            f" arrive every drift.period={window.period} rounds until round {max(arrival[-1], 0)}"
        )
    settings = alpha, epsilon, is_burst, fraction
    return stream(functools.partial(traces.redraw_samples, settings=settings), window)


@checked("drift")
def rotate(
    p: Fraction = 0.1,
    intervals: PositiveInt = 10,
    period: PositiveInt = 20,
    retained: PositiveInt = 100,
    prequential: bool = False,
) -> Drift:
    """Covariate drift: what arrives at a client is turned by a number of quarters, random at
    first; with each interval it turns by one more with probability `p`, from 0 to 1.
    """
    window = Window(intervals, period, retained, prequential)
    turn = functools.partial(traces.turn_arrivals, p=p)
    return stream(turn, window, lambda data: check_square(data.x, "drift=stream_rotate"))


@checked("drift")
def by_time(
    intervals: PositiveInt = 10,
    period: PositiveInt = 50,
    retained: PositiveInt = 100,
    prequential: bool = False,
) -> Drift:
    """Samples arrive in the order of their real times, which are cut into intervals of equal
    length. Raises InputError for data without times.
    """
    window = Window(intervals, period, retained, prequential)
    return stream(traces.cut_times, window, lambda data: traces.check_times(data, intervals))
