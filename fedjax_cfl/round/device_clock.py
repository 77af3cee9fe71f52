"""The time model of FedScale (Lai et al., ICML 2022, https://arxiv.org/abs/2105.11367), and
the devices that it takes: calibrated stand-ins, or a table of the user's own.

A local step of B samples takes 3 B s seconds on a device that infers a sample in s seconds;
a connection carries so many bytes a second, down and up alike. The stand-ins reproduce
two means that Fielding reports (https://arxiv.org/abs/2411.01580, appendix E): 50.4 s for 20
steps of 20 samples, and 116.7 s for ResNet-18 down and up.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.round.clock import Clock, device_profiles
from fedjax_cfl.round.select_by_group import OnlineFn
from fedjax_cfl.types import State
from fedjax_cfl.validation import NonNegativeFloat, PositiveFloat, check_arguments

# log-normal: median and sigma of the logarithm
INFERENCE_SECONDS = 0.035, 0.6  # a sample; the mean is 42 ms
BYTES_PER_SECOND = 10.1e6 / 8, 1.0  # harmonic mean 6.15 Mbit/s
TRAIN_TO_INFERENCE = 3.0  # forward and backward, relative to forward
KBIT = 1024 / 8  # bytes, as FedScale counts
COLUMNS = ("computation", "communication")  # ms a sample, kbit a second


class Profiles(NamedTuple):
    """One device for each client."""

    sample_seconds: np.ndarray  # [K], inference of a sample
    bytes_per_second: np.ndarray  # [K]


def stand_in_profiles(num_clients: int, seed: int = 0) -> Profiles:
    """Returns log-normal devices for K clients, fixed by the seed."""
    rng = np.random.default_rng(seed)
    seconds, rate = (
        median * np.exp(sigma * rng.standard_normal(num_clients))
        for median, sigma in (INFERENCE_SECONDS, BYTES_PER_SECOND)
    )
    return Profiles(seconds, rate)


def read_profiles(path: str, num_clients: int) -> Profiles:
    """Reads devices from a .csv or .parquet table with the columns computation (ms for a
    sample) and communication (kbit/s), as FedScale's. Client i has row (i + 1) modulo the
    number of rows.

    Raises InputError for a file that cannot be read so.
    """
    columns = read_table(Path(path))
    table = []
    for name in COLUMNS:
        try:
            values = np.asarray(columns[name], np.float64)
        except KeyError:
            raise InputError(f"clock.path={path}: has no column {name}") from None
        except (TypeError, ValueError):
            raise InputError(f"clock.path={path}: column {name} must hold numbers") from None
        bad = np.flatnonzero(~np.isfinite(values) | (values <= 0))
        if not values.size or bad.size:
            place = f" in row {bad[0] + 1}" if bad.size else ""
            raise InputError(f"clock.path={path}: column {name} must hold numbers > 0{place}")
        table.append(values)
    row = (np.arange(num_clients) + 1) % len(table[0])
    return Profiles(table[0][row] / 1000, table[1][row] * KBIT)


def read_table(path: Path) -> dict[str, list]:
    """Returns the columns of a .csv or .parquet file."""
    if path.suffix not in (".csv", ".parquet"):
        raise InputError(f"clock.path={path}: must be a .csv or .parquet file")
    if not path.is_file():
        raise InputError(f"clock.path={path}: no such file")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise InputError(
                f"clock.path={path}: reading Parquet needs the package pyarrow; or use a .csv file"
            ) from None
        try:
            return parquet.read_table(path).to_pydict()
        except (OSError, ValueError) as error:
            raise InputError(f"clock.path={path}: {str(error).splitlines()[0]}") from None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"clock.path={path}: is no CSV table: {error}") from None
    names = rows[0].keys() if rows else ()
    return {name: [row[name] for row in rows] for name in names}


def fedscale_clock(
    num_clients: int,
    batch_size: int,
    clients_per_round: int,
    *,
    path: str | None = None,
    seed: int = 0,
    model_factor: PositiveFloat = 1.0,
    overcommit: PositiveFloat = 1.0,
    server_seconds: NonNegativeFloat = 0.0,
) -> Clock:
    """Returns FedScale's clock for K clients.

    Args: `path` of a table of devices, None: stand-ins of the `seed`; `model_factor`
    multiplies the time of a step; a round ends with the first `clients_per_round` /
    `overcommit` answers, so that with 1.3 the slowest quarter counts as late;
    `server_seconds` are added to a round in which clients reported drift.
    """
    check_arguments(fedscale_clock, locals(), "clock")
    if overcommit < 1:
        raise InputError(f"clock.overcommit={overcommit}: must be a number >= 1")
    devices = read_profiles(path, num_clients) if path else stand_in_profiles(num_clients, seed)
    step = TRAIN_TO_INFERENCE * batch_size * model_factor * devices.sample_seconds
    wait_for = None if overcommit == 1 else max(int(clients_per_round / overcommit), 1)
    return device_profiles(step, devices.bytes_per_second, wait_for)._replace(
        event_seconds=report_seconds(devices.bytes_per_second, server_seconds)
    )


def report_seconds(
    bytes_per_second: np.ndarray, server_seconds: float
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function (bytes [K]) -> [] seconds that a drift event adds to its round: the
    slowest report, and `server_seconds` if anybody reports.
    """
    rate = jnp.asarray(bytes_per_second, jnp.float32)

    def seconds(client_bytes: jax.Array) -> jax.Array:
        slowest = jnp.max(client_bytes / rate)
        return jnp.where(slowest > 0, slowest + server_seconds, 0.0)

    return seconds


def online_by_intervals(intervals: np.ndarray, period: float) -> OnlineFn:
    """Returns (state) -> [K] bool, who is online now, for `select_by_group.by_group`.

    `intervals` [K, A, 2] are seconds (from, to), repeated every `period` seconds. Raises
    InputError for intervals that there cannot be.
    """
    table = np.asarray(intervals, np.float64)
    if table.ndim != 3 or table.shape[2] != 2:
        raise InputError(f"clock.intervals: have shape {table.shape}, expected [K, A, 2]")
    wrong = (table[..., 0] > table[..., 1]) | (table[..., 0] < 0) | (table[..., 1] > period)
    if period <= 0 or wrong.any() or not np.isfinite(table).all():
        raise InputError(
            f"clock.intervals: must be pairs 0 <= from <= to <= {period}, the period in seconds"
        )
    begin, end = jnp.asarray(table[..., 0], jnp.float32), jnp.asarray(table[..., 1], jnp.float32)
    period_ms = round(period * 1000)

    def online(state: State) -> jax.Array:
        high, low = state.clock_ms[0], state.clock_ms[1]
        # (high 2^32 + low) modulo the period, without 64 bits
        wrap = jnp.uint32(2**32 % period_ms)
        rest = high % period_ms * wrap % period_ms + low % period_ms
        now = (rest % period_ms).astype(jnp.float32) / 1000
        return jnp.any((begin <= now) & (now < end), axis=1)

    return online
