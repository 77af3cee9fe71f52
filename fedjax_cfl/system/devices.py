"""The time model of FedScale (Lai et al., ICML 2022, https://arxiv.org/abs/2105.11367), and
the devices that it takes: calibrated stand-ins, or a table of the user's own.

A local step of B samples takes 3 B s seconds on a device that infers a sample in s seconds;
a connection carries so many bytes a second, down and up alike. The stand-ins reproduce
two means that Fielding reports (https://arxiv.org/abs/2411.01580, appendix E): 50.4 s for 20
steps of 20 samples, and 116.7 s for ResNet-18 down and up.
"""

from typing import NamedTuple

import numpy as np

from fedjax_cfl.data.datasets.table import csv, parquet
from fedjax_cfl.errors import InputError
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE, Clock, CohortSizes, device_profiles
from fedjax_cfl.validation import FromOne, NonNegativeFloat, PositiveFloat, checked

# log-normal: median and sigma of the logarithm
INFERENCE_SECONDS = 0.035, 0.6  # a sample; the mean is 42 ms
BYTES_PER_SECOND = 10.1e6 / 8, 1.0  # harmonic mean 6.15 Mbit/s
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

    Raises InputError for a file that cannot be read, or has values that are not > 0.
    """
    field, read = f"clock.path={path}", parquet if path.lower().endswith(".parquet") else csv
    try:
        table = read(path, y=None, x=list(COLUMNS)).x.astype(np.float64)
    except InputError as error:
        raise InputError(f"{field}: {error}") from None
    for row, column in np.argwhere(table <= 0).tolist():  # the first one is said
        wrong = f"{COLUMNS[column]} is {table[row, column]:g} in row {row + 1}, expected > 0"
        raise InputError(f"{field}: {wrong}")
    computation, communication = table[(np.arange(num_clients) + 1) % len(table)].T
    return Profiles(computation / 1000, communication * KBIT)


@checked("clock")
def fedscale_clock(
    sizes: CohortSizes,
    *,
    path: str | None = None,
    seed: int = 0,
    model_factor: PositiveFloat = 1.0,
    overcommit: FromOne = 1.0,
    server_seconds: NonNegativeFloat = 0.0,
    per_group: bool = False,
) -> Clock:
    """Returns FedScale's clock.

    Args: `sizes` are those of the run; `path` is that of a table of devices, None: stand-ins drawn
    by `seed`; `model_factor` > 0 multiplies the time of a sample; a round ends with the first
    clients_per_round / `overcommit` answers, so that with 1.3 the slowest quarter counts as late;
    `server_seconds` >= 0 are added to a round in which clients report drift; `per_group`: each
    group has a clock of its own, see `system.clock`.
    """
    clients = sizes.num_clients
    devices = read_profiles(path, clients) if path else stand_in_profiles(clients, seed)
    sample = model_factor * devices.sample_seconds
    wait_for = None if overcommit == 1 else max(int(sizes.clients_per_round / overcommit + 1e-9), 1)
    step = TRAIN_TO_INFERENCE * sizes.batch_size * sample
    clock = device_profiles(step, devices.bytes_per_second, wait_for, sample)
    return clock._replace(server_seconds=server_seconds, per_group=per_group)
