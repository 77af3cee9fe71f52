"""The simulated time of rounds, for `engine`: what happens before training, who answers in
time, and when the round is over. n is 1, or the number of groups m where each group has a clock
of its own (as the cohorts of Auxo have).

With a clock for each group, groups do not wait for one another. Two things bring them
together: a clustering of all clients, and a group that begins or ends. The new group, or the
one that takes members over, begins when the last group has finished that they come from. Single
clients who move to another group do not hold it up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_cfl.round import clock as clocks
from fedjax_cfl.round.availability import Presence
from fedjax_cfl.round.clock import Clock
from fedjax_cfl.round.counts import add_counts, make_count
from fedjax_cfl.round.select_by_group import groups_of
from fedjax_cfl.round.traffic import slot_bytes
from fedjax_cfl.types import (
    Asked,
    Cohort,
    FederatedData,
    Key,
    Report,
    Selection,
    State,
    Upload,
)


class Ended(NamedTuple):
    """How a round ended."""

    duration: jax.Array  # [n] float32 seconds
    late: jax.Array  # [S] bool, the answer came after the end
    gone: jax.Array  # [S] bool, offline before it could answer


def start_clock(clock: Clock | None, num_groups: int) -> jax.Array:
    """Returns the time before round 0: [2], or [m, 2] with a clock for each group."""
    each = clock is not None and clock.per_group
    return make_count(jnp.zeros(num_groups, jnp.int32) if each else 0)


def clock_of(clock: Clock, gid: jax.Array) -> jax.Array:
    """Returns the number of the clock [...] that times group `gid` [...]."""
    return gid if clock.per_group else jnp.zeros_like(gid)


def find_presence(clock: Clock | None, state: State) -> Presence | None:
    """Returns who is online at the start of the round; None: everybody always is."""
    if clock is None or clock.presence is None:
        return None
    times = state.clock_ms.reshape(-1, 2)
    return clock.presence(times[clock_of(clock, groups_of(state))])


def choose_clients(
    clock: Clock | None, select: Selection, key: Key, state: State, data: FederatedData
) -> tuple[jax.Array, Asked | None]:
    """Selects clients [k], only such as are online, and returns what was asked of any before.

    Clients that are offline look to the selection like those without samples. If it does not
    look at samples, their places stay empty.
    """
    here, clients = find_presence(clock, state), data.num_clients
    if here is not None:
        size = jnp.where(here.stay > 0, data.train.size, 0)
        data = data.replace(train=data.train.replace(size=size))
    ids = select.select(key, state.selection, state, data)
    asked = select.ask(key, state, data) if select.ask else None
    if here is not None:
        ids = jnp.where(here.stay[jnp.minimum(ids, clients - 1)] > 0, ids, clients)
    return ids, asked


def latest(values: jax.Array, clock: jax.Array, count: int) -> jax.Array:
    """Returns the largest of the `values` [...] >= 0 of each `clock` [...], [count]; 0 where
    there are none.
    """
    return jnp.zeros(count, values.dtype).at[clock].max(values, mode="drop")


def wait_before(
    clock: Clock | None, state: State, migration: Report, asked: Asked | None, model_bytes: int
) -> jax.Array:
    """Returns the seconds [n] that pass before clients train: for the slowest report of drift,
    where what `migration` sends and infers is known for each client, and for the slowest that
    is asked.

    Nobody waits for the reports of another group, but where all clients are clustered anew.
    """
    count = state.clock_ms.size // 2
    waited = jnp.zeros(count)
    if clock is None or clock.ask_seconds is None:
        return waited
    own = clock_of(clock, groups_of(state))
    client_bytes = slot_bytes(migration.traffic, model_bytes)
    if client_bytes.ndim or migration.samples.ndim:
        reports = latest(clock.ask_seconds(client_bytes, migration.samples), own, count)
        reports = jnp.where(migration.reclustered > 0, reports.max(), reports)
        waited += jnp.where(reports > 0, reports + clock.server_seconds, 0.0)
    if asked is not None:
        client_bytes = slot_bytes(asked.traffic, model_bytes)
        waited += latest(clock.ask_seconds(client_bytes, asked.samples), own, count)
    return waited


def client_seconds(
    clock: Clock,
    cohort: Cohort,
    upload: Upload,
    reports: list[Report],
    model_bytes: int,
    num_clients: int,
) -> jax.Array:
    """Returns the seconds [S] that clients take to train, and to send, receive and infer what
    the `reports` say of each slot; 0 in an empty slot.
    """
    size = [slot_bytes(report.traffic, model_bytes) for report in reports]
    seconds = clock.seconds(cohort, upload, sum(size, jnp.zeros(())))
    if clock.ask_seconds is not None:
        nothing = jnp.zeros(num_clients)
        samples = sum(report.samples for report in reports)
        each = nothing.at[cohort.ids].set(samples, mode="drop")
        seconds += clock.ask_seconds(nothing, each)[jnp.minimum(cohort.ids, num_clients - 1)]
    return jnp.where(cohort.ids < num_clients, seconds, 0.0)


def end_round(
    clock: Clock,
    state: State,
    data: FederatedData,
    cohort: Cohort,
    gid: jax.Array,
    answers: jax.Array,
    seconds: jax.Array,
    waited: jax.Array,
) -> Ended:
    """Ends a round whose cohort trains for groups `gid` [S] and takes `seconds` [S] after the
    first `waited` [n] seconds; `answers` [S] bool are the clients that answer if they can.

    A client whose interval ends before it has answered is gone. Where nobody answers, the round
    lasts until the last one that could have is gone; where nobody was selected because all are
    offline, until the first of them comes back. Each group waits for its share of
    `clock.wait_for` answers, at least one.
    """
    count, clients = waited.size, state.assignment.size
    own = clock_of(clock, gid)
    here, gone, real = find_presence(clock, state), jnp.zeros_like(answers), cohort.ids < clients
    stay = jnp.zeros_like(seconds)
    if here is not None:
        stay = here.stay[jnp.minimum(cohort.ids, clients - 1)]
        gone = real & (waited[own] + seconds > stay)
    mine = (own == jnp.arange(count)[:, None]) & real  # [n, S]
    selected = mine.sum(axis=1)
    shares = selected
    if clock.wait_for is not None:
        shares = clock.wait_for * selected // jnp.maximum(selected.sum(), 1)
        shares = jnp.maximum(shares, 1) if clock.per_group else jnp.full(1, clock.wait_for)
    duration, late = jax.vmap(
        lambda mine, wait: clocks.find_duration(seconds, answers & ~gone & mine, wait)
    )(mine, shares)
    duration += waited
    if here is not None:
        silent = ~jnp.any(mine & answers & ~gone, axis=1)
        absent = jnp.where(data.train.size > 0, here.absent, jnp.inf)
        back = until_online(absent, clock_of(clock, groups_of(state)), count)
        left = latest(jnp.where(gone, stay, 0.0), own, count)
        idle = jnp.where(selected > 0, left, back)
        duration = jnp.where(silent, jnp.maximum(waited, idle), duration)
    return Ended(duration, jnp.any(late, axis=0), gone)


def until_online(absent: jax.Array, clock: jax.Array, count: int) -> jax.Array:
    """Returns the seconds [count] until the first client of each `clock` [K] is online, each
    after `absent` [K] seconds; 0 where nobody ever is.

    Hours are rounded up: float32 has them to a few milliseconds, and a clock that stops short
    of the return makes another idle round.
    """
    first = jnp.full(count, jnp.inf).at[clock].min(absent)
    first *= jnp.where(first > 2.0**12, 1 + 2.0**-22, 1.0)
    return jnp.where(jnp.isfinite(first), first, 0.0)


def advance_clock(clock_ms: jax.Array, duration: jax.Array) -> jax.Array:
    """Adds durations [n] seconds, to the millisecond, to the time [2] or [m, 2]."""
    # no round takes longer than 2^32 - 1 milliseconds, 49 days
    milliseconds = jnp.minimum(jnp.round(duration * 1000.0), 2.0**32 - 256).astype(jnp.uint32)
    return add_counts(clock_ms, make_count(milliseconds).reshape(clock_ms.shape))


def hand_on_clocks(
    clock: Clock | None, before: State, after: State, reclustered: jax.Array | int = 0
) -> State:
    """Returns the state `after` groups may have begun, ended or been made anew, with the time
    of each group; see the module.
    """
    if clock is None or not clock.per_group:
        return after
    count, times = after.active.size, after.clock_ms
    old, new = groups_of(before), groups_of(after)
    fresh = (after.active & ~before.active) | (reclustered > 0)  # [m]
    known = before.assignment >= 0
    arriving = jnp.where(known & (fresh[new] | ~after.active[old]), new, count)  # [K]
    own = jnp.where(fresh, count, jnp.arange(count))  # a group that goes on waits for itself, too
    every = jnp.concatenate([times[old], times])
    into = jnp.concatenate([arriving, own])
    joined = later_of(every, into, count)
    nobody = ~jnp.zeros(count, bool).at[into].set(True, mode="drop")
    # a group of clients that were in none begins now
    now = later_of(times, jnp.where(before.active, 0, 1), 1)
    return after.replace(clock_ms=jnp.where(nobody[:, None], now, joined))


def later_of(times: jax.Array, clock: jax.Array, count: int) -> jax.Array:
    """Returns the latest of the times [k, 2] of each `clock` [k], [count, 2]; 0 where there
    are none, `count` for those of none.
    """
    high = latest(times[:, 0], clock, count)
    newest = times[:, 0] == high[jnp.minimum(clock, count - 1)]
    return jnp.stack([high, latest(jnp.where(newest, times[:, 1], 0), clock, count)], axis=1)
