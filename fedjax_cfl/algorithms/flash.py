"""Panchal, Choudhary, Mitra, Mukherjee, Sarkhel, Mitra, Guan, "Flash: Concept Drift Adaptation in
Federated Learning", ICML 2023, https://proceedings.mlr.press/v202/panchal23a.html.

FedAdam whose steps grow where the squares of updates rise above their moving mean, as they do when
data drift.

Differs from the paper: clients train all their epochs; they do not stop early by the loss of
samples that they hold out. Where the rise exceeds the root of the moving mean, the paper's steps
would turn round; here they are divided by tau alone, which is therefore larger than the public
rewrites' 1e-9.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.algorithms.fedopt import with_server
from fedjax_cfl.client.local import Local
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Params, Task
from fedjax_cfl.validation import BelowOne, PositiveFloat, checked


class Moments(NamedTuple):
    """What the server remembers of averaged updates; each is like the parameters, 0 at first."""

    first: Params  # m
    second: Params  # v
    rise: Params  # d, the moving mean of how far their squares are above v


@checked("algorithm")
def flash(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    server_lr: PositiveFloat | jax.Array = 0.1,
    b1: BelowOne = 0.9,
    b2: BelowOne = 0.99,
    tau: PositiveFloat = 1e-3,
) -> Algorithm:
    """Flash: an unweighted mean, and the server optimizer `follow_drift`.

    Args: `server_lr` > 0 is the server's step size; `b1` and `b2`, from 0 to below 1, are the
    decays of m and v; `tau` > 0 is the least divisor. Raises InputError for a value that is not
    allowed.
    """
    return with_server(task, local, system, follow_drift(server_lr, b1, b2, tau), uniform_mean)


def follow_drift(
    lr: float | jax.Array = 0.1, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3
) -> optax.GradientTransformation:
    """Flash's server optimizer, for any method: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2,
    d <- b3 d + (1 - b3) (g^2 - v) with b3 = v' / (|g^2 - v| + v') of v' before, in each coordinate;
    the update is -lr m / (max(sqrt(v) - d, 0) + tau).
    """

    def init(params: Params) -> Moments:
        return Moments(*(jax.tree.map(jnp.zeros_like, params) for _ in Moments._fields))

    def update(updates, state, params=None):
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.second, updates)
        rise = jax.tree.map(follow_rise, state.rise, state.second, second, updates)

        def divide(m, v, d):
            return -lr * m / (jnp.maximum(jnp.sqrt(v) - d, 0.0) + tau)

        return jax.tree.map(divide, first, second, rise), Moments(first, second, rise)

    return optax.GradientTransformation(init, update)


def follow_rise(rise: jax.Array, old: jax.Array, new: jax.Array, g: jax.Array) -> jax.Array:
    """Returns d after an update `g`, from d, v before and v after; where all are 0, 0."""
    gap = g**2 - new
    total = jnp.abs(gap) + old
    kept = jnp.where(total > 0, old / jnp.where(total > 0, total, 1.0), 0.0)
    return kept * rise + (1 - kept) * gap
