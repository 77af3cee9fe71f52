"""Temperatures of clients: a client that departs from its group's model counts less
(FlexCFL's code, not its paper; off by default, D40).

A client's temperature T is between 0 and T_max, and starts at T_max. Whenever the client
has trained, T changes by its bias b, compared with the mean bias b_g of its group's
clients in the cohort; at 0 it stays 0. Its update weighs n_i T / T_max. A client whose
data shifted starts at T_max again.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_cfl.round.aggregate import deviation, weighted_mean
from fedjax_cfl.round.hooks import (
    AggregateFn,
    FinishFn,
    Hooks,
    MigrateFn,
    Start,
    StartFn,
)
from fedjax_cfl.tree import group_mean, group_sum, membership_weights
from fedjax_cfl.types import Cohort, FederatedData, Key, Params, Report, State, Upload
from fedjax_cfl.validation import AboveOne, check_arguments

EPSILON = 1e-5  # the code adds it to divisors


class StrategyFn(Protocol):
    """Returns the new temperatures, given a client's bias, its group's mean bias, all [S],
    and T_max, before they are clipped to 0 .. T_max.
    """

    def __call__(
        self, temperature: jax.Array, bias: jax.Array, mean: jax.Array, highest: float
    ) -> jax.Array: ...


class BiasFn(Protocol):
    """Returns the bias [S] of clients, given the distance [S] of each trained model from the
    new model of its group, and the cosine [S] of its update with the group's step.
    """

    def __call__(self, distance: jax.Array, cosine: jax.Array) -> jax.Array: ...


def step(temperature: jax.Array, bias: jax.Array, mean: jax.Array, highest: float) -> jax.Array:
    """Lowers T by 1 above the mean bias, and raises it by 1 otherwise (a `StrategyFn`)."""
    return jnp.where(bias > mean, temperature - 1.0, temperature + 1.0)


def linear(temperature: jax.Array, bias: jax.Array, mean: jax.Array, highest: float) -> jax.Array:
    """Returns T + (1 - b / b_g) T_max (a `StrategyFn`)."""
    return temperature + (1.0 - bias / (mean + EPSILON)) * highest


def exponential_change(times: jax.Array, highest: float) -> jax.Array:
    """Returns (T_max^(min(x, 10) - 1) - 1) 2 T_max / (T_max - 1), which is 0 at x = 1
    and 2 T_max at x = 2.
    """
    return (highest ** (jnp.minimum(times, 10.0) - 1.0) - 1.0) * 2.0 * highest / (highest - 1.0)


def lied(temperature: jax.Array, bias: jax.Array, mean: jax.Array, highest: float) -> jax.Array:
    """Raises T linearly below the mean bias, and lowers it exponentially in b / b_g above it
    (a `StrategyFn`).
    """
    above = bias > mean
    ratio = jnp.where(above, bias, 1.0) / jnp.where(above & (mean > 0), mean, 1.0)
    lower = temperature - exponential_change(ratio, highest)
    return jnp.where(above, lower, linear(temperature, bias, mean, highest))


def eied(temperature: jax.Array, bias: jax.Array, mean: jax.Array, highest: float) -> jax.Array:
    """Raises and lowers T exponentially in |b - b_g| (a `StrategyFn`).

    Below |b - b_g| = 1 the change has the opposite sign, as in the code.
    """
    change = exponential_change(jnp.abs(bias - mean), highest)
    return jnp.where(bias > mean, temperature - change, temperature + change)


def discrepancy(distance: jax.Array, cosine: jax.Array) -> jax.Array:
    """Returns the distance of a client's model from its group's new one (a `BiasFn`)."""
    return distance


def dissimilarity(distance: jax.Array, cosine: jax.Array) -> jax.Array:
    """Returns the cosine dissimilarity of a client's update and its group's step (a `BiasFn`)."""
    return (1.0 - cosine) / 2.0


class Temperature(NamedTuple):
    """How the temperatures of clients change."""

    temperature: StrategyFn  # step | linear | lied | eied
    temperature_max: AboveOne = 10.0  # T_max; no published value
    temperature_bias: BiasFn = discrepancy  # discrepancy | dissimilarity
    temperature_floor: bool = False  # True: weights are rounded down, as in the code


def with_temperature(hooks: Hooks, heat: Temperature) -> Hooks:
    """Adds temperatures to a method whose memory has a field `temperature`. Raises
    InputError for a highest one that is not above 1.
    """
    assert hooks.start is not None  # it makes the memory
    check_arguments(Temperature, heat._asdict(), "algorithm")
    highest = heat.temperature_max
    return hooks._replace(
        start=init_temperatures(hooks.start, highest),
        migrate=reset_shifted(hooks.migrate, highest) if hooks.migrate else None,
        aggregate=temperature_mean(highest, heat.temperature_floor),
        finish=update_temperatures(heat, hooks.finish),
    )


def next_temperature(
    strategy: StrategyFn, temperature: jax.Array, bias: jax.Array, mean: jax.Array, highest: float
) -> jax.Array:
    """Returns the new temperatures [S] of clients that trained, from 0 to `highest`; 0 stays 0.

    Args: `temperature` [S] are the old ones; `bias` [S] is b of each client; `mean` [S] is b_g
    of its group; `highest` > 1 is T_max.
    """
    new = jnp.clip(strategy(temperature, bias, mean, highest), 0.0, highest)
    return jnp.where(temperature > 0, new, temperature)


def temperature_mean(highest: float, floor: bool = False) -> AggregateFn:
    """Averages updates weighted by n_i T_i / T_max; with `floor`, by floor(n_i T_i / (T_max
    + 1e-5)) as in the code, which is n_i - 1 for T_i = T_max.
    """

    def aggregate(
        upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
    ) -> tuple[Params, jax.Array]:
        temperature = cohort.take(state.memory.temperature)
        if not floor:
            cooled = upload.replace(weight=upload.weight * (temperature / highest))
            return weighted_mean(cooled, gid, cohort, client_extra, state)
        weight = jnp.floor(upload.weight * temperature / (highest + EPSILON))
        coefficient = membership_weights(weight, gid, state.active.size)
        mass = coefficient.sum(0)
        return group_sum(coefficient / (mass + EPSILON), upload.delta), mass

    return aggregate


def update_temperatures(heat: Temperature, mix: FinishFn | None = None) -> FinishFn:
    """Gives new temperatures to the clients that trained, after `mix`, if there is one."""

    def finish(
        state: State, before: State, cohort: Cohort, gid: jax.Array, upload: Upload
    ) -> State:
        state = mix(state, before, cohort, gid, upload) if mix else state
        trained = upload.weight > 0
        own = heat.temperature_bias(*deviation(before, state.groups, gid, upload))
        (mean,), _ = group_mean(trained.astype(jnp.float32), gid, (own,), state.active.size)
        old = cohort.take(state.memory.temperature)
        new = next_temperature(heat.temperature, old, own, mean[gid], heat.temperature_max)
        temperature = cohort.put(state.memory.temperature, new, trained)
        return state.replace(memory=state.memory.replace(temperature=temperature))

    return finish


def init_temperatures(start_groups: StartFn, highest: float) -> StartFn:
    """Sets the temperatures of all clients at the start to `highest`."""

    def start(key: Key, data: FederatedData) -> Start:
        initial = start_groups(key, data)
        temperature = jnp.full(data.num_clients, highest, jnp.float32)
        return initial._replace(memory=initial.memory.replace(temperature=temperature))

    return start


def reset_shifted(move: MigrateFn, highest: float) -> MigrateFn:
    """Sets the temperatures of clients whose data shifted to `highest`.

    `move` is a `migrate.on_shift`, which renews their shift reference.
    """

    def migrate(key: Key, state: State, data: FederatedData) -> tuple[State, Report]:
        after, report = move(key, state, data)
        now, before = (each.memory.shift_reference.reference for each in (after, state))
        renewed = jnp.any(now != before, axis=1)
        temperature = jnp.where(renewed, jnp.float32(highest), after.memory.temperature)
        return after.replace(memory=after.memory.replace(temperature=temperature)), report

    return migrate
