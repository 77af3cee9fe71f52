"""When clients are online: intervals of simulated time that repeat (FedScale, Lai et al., ICML
2022, https://arxiv.org/abs/2105.11367).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl.data.tables import read_numbers, read_table
from fedjax_cfl.errors import InputError

NEVER = 2**31 - 1  # milliseconds: longer than any interval
LONGEST = 1_000_000  # seconds, of a period
COLUMNS = ("client", "begin", "end")  # a number from 0, seconds, seconds


class Presence(NamedTuple):
    """Who is online at one moment, and until when."""

    stay: jax.Array  # [K] float32 seconds, until the client's interval ends, 0: it is offline
    absent: jax.Array  # [K] float32 seconds, until its next interval begins, 0: it is online


PresenceFn = Callable[[jax.Array], Presence]  # (now [K, 2] uint32 counts of milliseconds)


def merge_intervals(table: np.ndarray, period: int) -> np.ndarray:
    """Returns the intervals [K, A, 2] (begin, end) of `table` [K, A, 2], sorted, and merged where
    they touch or overlap. Places that become free are empty, (period, period).

    All lie between 0 and `period`. An interval that goes on in the next period gets an end
    beyond the period; one that covers the whole period ends at `NEVER`.
    """
    merged = np.full(table.shape, period, np.int64)
    for client, intervals in enumerate(table):
        kept: list[list[int]] = []
        for begin, end in sorted(intervals.tolist()):
            if begin == end:
                continue
            if kept and begin <= kept[-1][1]:
                kept[-1][1] = max(kept[-1][1], end)
            else:
                kept.append([begin, end])
        if kept and kept[0] == [0, period]:
            kept[0][1] = NEVER
        elif kept and kept[0][0] == 0 and kept[-1][1] == period:
            kept[-1][1] += kept[0][1]
        merged[client, : len(kept)] = np.array(kept).reshape(-1, 2)
    return merged


def online_by_intervals(intervals: np.ndarray, period: float) -> PresenceFn:
    """Returns a function that says who is online: clients are so in their `intervals` [K, A, 2],
    seconds (from, to), rounded to milliseconds, which repeat every `period` seconds.

    Raises InputError for intervals outside of the period or with an end before their begin, and
    for a period that is shorter than a millisecond or longer than `LONGEST` seconds.
    """
    table = np.asarray(intervals, np.float64)
    if table.ndim != 3 or table.shape[2] != 2:
        raise InputError(f"clock.availability: has shape {table.shape}, expected [K, A, 2]")
    if not 0.001 <= period <= LONGEST:
        raise InputError(f"clock.repeat={period}: must be a number from 0.001 to {LONGEST} seconds")
    wrong = (table[..., 0] > table[..., 1]) | (table[..., 0] < 0) | (table[..., 1] > period)
    wrong |= ~np.isfinite(table).all(axis=-1)
    if wrong.any():
        client, place = np.argwhere(wrong)[0]
        begin, end = table[client, place]
        raise InputError(
            f"clock.availability: client {client} is online from {begin} to {end}: must be 0 <="
            f" from <= to <= {period}, after which intervals repeat"
        )
    period_ms = round(period * 1000)
    merged = merge_intervals(np.minimum(np.round(table * 1000), period_ms), period_ms)
    begin, end = (jnp.asarray(np.minimum(merged[..., i], NEVER), jnp.int32) for i in (0, 1))

    def presence(now: jax.Array) -> Presence:
        place = modulo(now, period_ms)[:, None]
        before = place + period_ms  # an interval of the period before may go on
        inside, still = (begin <= place) & (place < end), (begin <= before) & (before < end)
        left = jnp.where(end == NEVER, NEVER, end - jnp.where(inside, place, before))
        stay = jnp.max(jnp.where(inside | still, left, 0), axis=1)
        ahead = jnp.where(begin >= place, begin - place, begin - place + period_ms)
        absent = jnp.min(jnp.where(begin < period_ms, ahead, NEVER), axis=1)
        seconds = jnp.where(stay == NEVER, jnp.inf, stay / 1000)
        waits = jnp.where(absent == NEVER, jnp.inf, absent / 1000)
        return Presence(seconds, jnp.where(stay > 0, 0.0, waits))

    return presence


def modulo(count: jax.Array, divisor: int) -> jax.Array:
    """Returns counts [..., 2] modulo a divisor below 2^31, [...] int32, without 64 bits."""
    divide_by = jnp.uint32(divisor)
    high = lax.fori_loop(0, 32, lambda _, rest: 2 * rest % divide_by, count[..., 0] % divide_by)
    return ((high + count[..., 1] % divide_by) % divide_by).astype(jnp.int32)


def read_availability(
    path: str | None, repeat: float | None, num_clients: int
) -> PresenceFn | None:
    """Returns who is online when, read from a table; None if no table is given.

    The table is a .csv or .parquet file with the columns client (0, 1, ...), begin and end
    (seconds), and one row for each interval. A client without a row is never online. A table of
    n clients, the largest number plus one, serves more than n clients: client i then has the
    intervals of client i mod n.

    Raises InputError for a file that cannot be read, or whose values are not allowed.
    """
    if path is None:
        if repeat is not None:
            raise InputError(f"clock.repeat={repeat}: needs a table, clock.availability")
        return None
    field = f"clock.availability={path}"
    columns = read_table(Path(path), field)
    client, begin, end = (read_numbers(columns, name, field) for name in COLUMNS)
    bad = np.flatnonzero((client < 0) | (client != np.floor(client)))
    if bad.size:
        raise InputError(f"{field}: column client must hold 0, 1, ..., not {client[bad[0]]}")
    if client.max() >= num_clients:
        raise InputError(f"{field}: column client has {client.max():.0f}, of {num_clients} clients")
    owner = client.astype(np.int64)
    counts = np.bincount(owner)
    table = np.zeros((counts.size, counts.max(), 2))
    order = np.argsort(owner, kind="stable")
    place = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
    table[owner[order], place] = np.stack([begin[order], end[order]], axis=1)
    rows = np.arange(num_clients) % counts.size
    period = float(end.max()) if repeat is None else repeat
    if repeat is None and not 0.001 <= period <= LONGEST:
        raise InputError(
            f"{field}: intervals repeat after the last one, which ends at {period} seconds: must be"
            f" 0.001 to {LONGEST}; or say clock.repeat"
        )
    return online_by_intervals(table[rows], period)
