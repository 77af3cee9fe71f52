"""Simulated time: how long each client of a cohort takes, and when a round ends."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.system.availability import PresenceFn
from fedjax_cfl.types import Cohort, Upload

TRAIN_TO_INFERENCE = 3  # forward and backward, relative to forward


class ClockFn(Protocol):
    """Says how long each client of a cohort takes, [S] float32 seconds. `slot_bytes` [S]
    float32 are the bytes that it receives and sends in this round.
    """

    def __call__(self, cohort: Cohort, upload: Upload, slot_bytes: jax.Array) -> jax.Array: ...


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
    presence: PresenceFn | None = None  # who is online; None: all clients always are
    per_group: bool = False  # each group has a clock of its own, see `timing`


def device_profiles(
    step_seconds: np.ndarray, bytes_per_second: np.ndarray, wait_for: int | None = None
) -> Clock:
    """Gives every client a device: `step_seconds` [K] per local step, and a connection of
    `bytes_per_second` [K], down and up alike. Raises InputError as `check_profiles` does.
    """
    check_profiles(np.asarray(step_seconds), np.asarray(bytes_per_second), wait_for)
    compute, bandwidth = jnp.asarray(step_seconds), jnp.asarray(bytes_per_second)

    def seconds(cohort: Cohort, upload: Upload, slot_bytes: jax.Array) -> jax.Array:
        clients = jnp.minimum(cohort.ids, compute.size - 1)
        return upload.steps * compute[clients] + slot_bytes / bandwidth[clients]

    return Clock(seconds, wait_for)


def check_profiles(
    step_seconds: np.ndarray, bytes_per_second: np.ndarray, wait_for: int | None
) -> None:
    """Raises InputError for seconds < 0, bytes <= 0, or fewer than one answer."""
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
