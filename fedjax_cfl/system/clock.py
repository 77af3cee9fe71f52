"""Simulated time: how long each client of a cohort takes, what happens before training, which
clients answer in time, and when a round is over. n is the number of clocks: 1, or m where each
group has a clock of its own (as the cohorts of Auxo have).

With a clock for each group, groups do not wait for one another, except where groups begin or
end: in a clustering of all clients, or when a group is founded or ends. A group that begins, or
that takes over the clients of one that ended, continues from the latest time of the groups that
its clients come from. Single clients that move to another group do not delay it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.system.reports import add_bills, add_counts, list_bills, make_count, sum_bytes
from fedjax_cfl.system.select import groups_of
from fedjax_cfl.types import Bill, Cohort, Report, State, Upload

TRAIN_TO_INFERENCE = 3  # forward and backward, relative to forward


# (cohort, upload, the bytes [S] float32 that each client receives and sends in this round) -> how
# long each takes, [S] float32 seconds
ClockFn = Callable[[Cohort, Upload, jax.Array], jax.Array]


class CohortSizes(NamedTuple):
    """The sizes of a run that its clock depends on."""

    num_clients: int  # K
    batch_size: int  # B, samples in a step
    clients_per_round: int


class Clock(NamedTuple):
    """Simulated time of a round."""

    seconds: ClockFn
    # the answers that end a round; later ones have weight 0 (over-commitment); None: all
    wait_for: int | None = None
    # (bytes [K], samples [K]) -> [K] seconds that a client takes to exchange so many bytes and to
    # infer so many samples before training begins; None: that takes no time
    ask_seconds: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    server_seconds: float = 0.0  # added to a round in which clients report drift
    per_group: bool = False  # each group has a clock of its own, see the module


def device_profiles(
    step_seconds: np.ndarray,
    bytes_per_second: np.ndarray,
    wait_for: int | None = None,
    sample_seconds: np.ndarray | None = None,
) -> Clock:
    """Gives every client a device: `step_seconds` [K] per local step, a connection of
    `bytes_per_second` [K], down and up alike, and `sample_seconds` [K] to infer a sample, None:
    what is exchanged and inferred before training takes no time.

    Raises InputError for seconds < 0, bytes <= 0, or fewer than one answer to wait for.
    """
    if step_seconds.shape != bytes_per_second.shape:
        raise InputError(
            f"clock: {step_seconds.size} step_seconds and {bytes_per_second.size} bytes_per_second:"
            " one of each for every client"
        )
    for name, values, wrong, allowed in (
        ("step_seconds", step_seconds, step_seconds < 0, ">= 0"),
        ("bytes_per_second", bytes_per_second, bytes_per_second <= 0, "> 0"),
    ):
        bad = np.flatnonzero(wrong | ~np.isfinite(values))
        if bad.size:
            raise InputError(
                f"clock: {name} of client {bad[0]} are {values[bad[0]]}: must be finite and"
                f" {allowed}"
            )
    if wait_for is not None and wait_for < 1:
        raise InputError(f"clock: wait_for={wait_for}: must be a whole number >= 1 or null")
    compute, bandwidth = jnp.asarray(step_seconds), jnp.asarray(bytes_per_second)

    def seconds(cohort: Cohort, upload: Upload, slot_bytes: jax.Array) -> jax.Array:
        clients = jnp.minimum(cohort.ids, compute.size - 1)
        return upload.steps * compute[clients] + slot_bytes / bandwidth[clients]

    if sample_seconds is None:
        return Clock(seconds, wait_for)
    each = jnp.asarray(sample_seconds)
    return Clock(seconds, wait_for, lambda sent, samples: sent / bandwidth + samples * each)


def find_duration(
    seconds: jax.Array, answers: jax.Array, wait_for: int | jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (duration [] float32 seconds, late [S] bool) of a round whose clients take
    `seconds` [S].

    `answers` [S] bool are the clients that answer at all. The round ends with the
    `wait_for`-th answer, or with the last one if there are fewer.
    """
    count = jnp.sum(answers)
    waited = count if wait_for is None else jnp.minimum(wait_for, count)
    arrivals = jnp.sort(jnp.where(answers, seconds, jnp.inf))
    duration = jnp.where(waited > 0, arrivals[jnp.maximum(waited - 1, 0)], 0.0)
    return duration, answers & (seconds > duration)


def clock_of(clock: Clock, gid: jax.Array) -> jax.Array:
    """Returns the number of the clock [...] that times group `gid` [...]."""
    return gid if clock.per_group else jnp.zeros_like(gid)


def latest(values: jax.Array, clock: jax.Array, count: int) -> jax.Array:
    """Returns the largest of the `values` [...] >= 0 of each `clock` [...], [count]; 0 where
    there are none.
    """
    return jnp.zeros(count, values.dtype).at[clock].max(values, mode="drop")


def wait_before(
    clock: Clock | None, state: State, migration: Report, poll: Bill, model_bytes: int
) -> jax.Array:
    """Returns the seconds [n] that pass before clients train: the time of the slowest drift
    report, and that of the slowest client that is polled before the selection.

    A group waits for its own clients only; all groups wait for all reports if all clients are
    clustered again.

    Args: `clock` of None takes no time; `migration` and `poll`, of all clients [K] or of nobody,
    are what clients did before the selection, and for it; `model_bytes` is the size of one model.
    """
    count = state.clock_ms.size // 2
    waited = jnp.zeros(count)
    if clock is None or clock.ask_seconds is None:
        return waited
    own = clock_of(clock, groups_of(state))
    moving = add_bills(migration.bill, migration.early)
    if moving.samples.size:
        asked = clock.ask_seconds(sum_bytes(moving, model_bytes), moving.samples)
        reports = latest(asked, own, count)
        reports = jnp.where(migration.reclustered > 0, reports.max(), reports)
        waited += jnp.where(reports > 0, reports + clock.server_seconds, 0.0)
    if poll.samples.size:
        asked = clock.ask_seconds(sum_bytes(poll, model_bytes), poll.samples)
        waited += latest(asked, own, count)
    return waited


def client_seconds(
    clock: Clock,
    cohort: Cohort,
    upload: Upload,
    reports: list[Report],
    model_bytes: int,
    num_clients: int,
) -> jax.Array:
    """Returns the seconds [S] that each client of the cohort takes to train, and to exchange
    and infer what the `reports` say; 0 in an empty slot.

    Args: `reports` have bills of the slots [S], the model's among them; `model_bytes` is the size
    of one model; `num_clients` is K.
    """
    bills, begin = list_bills(reports), jnp.zeros(cohort.ids.shape)
    size = sum((sum_bytes(bill, model_bytes) for bill in bills), begin)
    seconds = clock.seconds(cohort, upload, size)
    if clock.ask_seconds is not None:
        nothing = jnp.zeros(num_clients)
        each = cohort.put(nothing, sum((bill.samples for bill in bills), begin))
        seconds += cohort.take(clock.ask_seconds(nothing, each))
    return jnp.where(cohort.ids < num_clients, seconds, 0.0)


def end_round(
    clock: Clock,
    cohort: Cohort,
    gid: jax.Array,
    answers: jax.Array,
    seconds: jax.Array,
    waited: jax.Array,
    num_clients: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns how long a round lasts on each clock, [n] float32 seconds, and whose answers [S] bool
    come too late.

    With a clock for each group, a group waits for its share of `clock.wait_for` answers, at least
    one. If no client on a clock answers, its round lasts as long as what came before training.

    Args: `gid` [S] int32 is the group whose model each slot trained; `answers` [S] bool are the
    clients that answer; `seconds` [S] is how long each takes once training begins; `waited` [n]
    are the seconds before that, see `wait_before`; `num_clients` is K.
    """
    own, real = clock_of(clock, gid), cohort.ids < num_clients
    member = (own == jnp.arange(waited.size)[:, None]) & real  # [n, S]
    selected = member.sum(axis=1)
    shares = selected
    if clock.wait_for is not None:
        shares = clock.wait_for * selected // jnp.maximum(selected.sum(), 1)
        shares = jnp.maximum(shares, 1) if clock.per_group else jnp.full(1, clock.wait_for)
    duration, late = jax.vmap(lambda member, wait: find_duration(seconds, answers & member, wait))(
        member, shares
    )
    return duration + waited, jnp.any(late, axis=0)


def advance_clock(clock_ms: jax.Array, duration: jax.Array) -> jax.Array:
    """Adds durations [n] seconds, to the millisecond, to the time [2] or [m, 2]."""
    # no round takes longer than 2^32 - 1 milliseconds, 49 days
    milliseconds = jnp.minimum(jnp.round(duration * 1000.0), 2.0**32 - 256).astype(jnp.uint32)
    return add_counts(clock_ms, make_count(milliseconds).reshape(clock_ms.shape))


def merge_clocks(
    clock: Clock | None, before: State, after: State, reclustered: jax.Array | int = 0
) -> State:
    """Returns the state `after` a change of groups, with the clock of each group set as the
    module says. Without a clock for each group the state is returned as it is.

    `before` is the state before the change. `reclustered` > 0: all clients were clustered
    again, so that every group counts as one that begins.
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
    empty = ~jnp.zeros(count, bool).at[into].set(True, mode="drop")
    # a group of clients that were in none begins now
    now = later_of(times, jnp.where(before.active, 0, 1), 1)
    return after.replace(clock_ms=jnp.where(empty[:, None], now, joined))


def later_of(times: jax.Array, clock: jax.Array, count: int) -> jax.Array:
    """Returns the latest time of each clock, [count, 2]; 0 for a clock without times.

    `times` [k, 2] are counts of milliseconds. `clock` [k] int32 is the clock that each belongs
    to, from 0 to `count` - 1; `count`: to none.
    """
    high = latest(times[:, 0], clock, count)
    newest = times[:, 0] == high[jnp.minimum(clock, count - 1)]
    return jnp.stack([high, latest(jnp.where(newest, times[:, 1], 0), clock, count)], axis=1)
