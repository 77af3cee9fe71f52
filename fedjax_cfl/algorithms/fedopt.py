"""Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295; server momentum: Hsu, Qi,
Brown 2019, https://arxiv.org/abs/1909.06335.

A server optimizer takes the averaged update for a gradient. Differs from adam and yogi of
optax: Algorithm 2 of the paper has no bias correction and adds tau outside the root.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.method import AggregateFn, Method
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import no_clients
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Params, Task
from fedjax_cfl.validation import BelowOne, PositiveFloat, checked


class Moments(NamedTuple):
    """The first and second moments of the averaged update."""

    first: Params  # like the parameters
    second: Params


def adaptive(
    second: Callable[[jax.Array, jax.Array], jax.Array],
    lr: float | jax.Array,
    b1: float,
    tau: float,
) -> optax.GradientTransformation:
    """Makes the server optimizer of Algorithm 2 of the paper.

    m <- b1 m + (1 - b1) g, v <- second(v, g^2), update -lr m / (sqrt(v) + tau); v starts
    at tau^2.
    """

    def init(params):
        squares = jax.tree.map(lambda p: jnp.full_like(p, tau**2), params)
        return Moments(jax.tree.map(jnp.zeros_like, params), squares)

    def update(updates, state, params=None):
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, updates)
        squares = jax.tree.map(lambda v, g: second(v, g**2), state.second, updates)
        step = jax.tree.map(lambda m, v: -lr * m / (jnp.sqrt(v) + tau), first, squares)
        return step, Moments(first, squares)

    return optax.GradientTransformation(init, update)


def with_server(
    task: Task,
    local: Local,
    system: SystemLike,
    server: optax.GradientTransformation,
    aggregate: AggregateFn | None = None,
) -> Algorithm:
    """FedAvg with a server optimizer.

    Args: `aggregate` averages updates, None: weighted by training samples; the others are as in
    `federated`.
    """
    method = Method(sgd(task, local), server=server, aggregate=aggregate, start_clients=no_clients)
    return federated(task, local, system, method)


@checked("algorithm")
def fedavgm(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    server_lr: PositiveFloat | jax.Array = 1.0,
    momentum: BelowOne = 0.9,
) -> Algorithm:
    """FedAvgM: the server adds momentum.

    Args: `server_lr` > 0 is the server's step size; `momentum` from 0 to below 1: v <- momentum
    v + update, and the server adds server_lr v.
    """
    return with_server(task, local, system, optax.sgd(server_lr, momentum=momentum))


@checked("algorithm")
def fedadagrad(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    server_lr: PositiveFloat | jax.Array = 0.1,
    b1: BelowOne = 0.0,
    tau: PositiveFloat = 1e-3,
) -> Algorithm:
    """FedAdagrad: v <- v + g^2.

    Args: `server_lr` > 0 is the server's step size; `b1` from 0 to below 1 is the decay of the
    first moment, 0: the update itself; `tau` > 0 is added to sqrt(v), and v starts at tau^2.
    """
    return with_server(task, local, system, adaptive(lambda v, g2: v + g2, server_lr, b1, tau))


@checked("algorithm")
def fedadam(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    server_lr: PositiveFloat | jax.Array = 0.1,
    b1: BelowOne = 0.9,
    b2: BelowOne = 0.99,
    tau: PositiveFloat = 1e-3,
) -> Algorithm:
    """FedAdam: v <- b2 v + (1 - b2) g^2.

    Args: `server_lr` > 0 is the server's step size; `b1` and `b2`, from 0 to below 1, are the
    decays of the first and second moment; `tau` > 0 is added to sqrt(v), and v starts at tau^2.
    """
    server = adaptive(lambda v, g2: b2 * v + (1 - b2) * g2, server_lr, b1, tau)
    return with_server(task, local, system, server)


@checked("algorithm")
def fedyogi(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    server_lr: PositiveFloat | jax.Array = 0.1,
    b1: BelowOne = 0.9,
    b2: BelowOne = 0.99,
    tau: PositiveFloat = 1e-3,
) -> Algorithm:
    """FedYogi: v <- v - (1 - b2) g^2 sign(v - g^2). Its settings are those of `fedadam`."""
    return with_server(task, local, system, yogi(server_lr, b1, b2, tau))


def yogi(
    server_lr: float | jax.Array = 0.1, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3
) -> optax.GradientTransformation:
    """FedYogi's server optimizer, for any method."""
    return adaptive(lambda v, g2: v - (1 - b2) * g2 * jnp.sign(v - g2), server_lr, b1, tau)
