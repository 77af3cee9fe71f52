"""Temperatures of clients: who strays from its group's model counts for less in it
(FlexCFL's code, not its paper; off by default, D40).

A client's temperature T lies in 0 .. T_max, begins at T_max and changes whenever it has
trained, by its bias b against the mean bias b_g of its group's participants; at 0 it
stays 0. Its update weighs n_i T / T_max. A client that starts cold again is at T_max
again.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.hooks import FinishFn, Hooks, chain_finish
from fedjax_cfl.round.info import deviation
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean, group_sum, membership_weights
from fedjax_cfl.types import Cohort, FederatedData, State, Upload
from fedjax_cfl.validation import AboveOne, check_arguments

EPSILON = 1e-5  # the code's guard of divisions


def step(temperature, bias, mean, highest):
    """One degree down above the mean bias, one up otherwise."""
    return jnp.where(bias > mean, temperature - 1.0, temperature + 1.0)


def linear(temperature, bias, mean, highest):
    """T + (1 - b / b_g) T_max."""
    return temperature + (1.0 - bias / (mean + EPSILON)) * highest


def exponential_change(times, highest):
    """Returns (T_max^(min(x, 10) - 1) - 1) 2 T_max / (T_max - 1), which is 0 at x = 1
    and 2 T_max at x = 2.
    """
    return (highest ** (jnp.minimum(times, 10.0) - 1.0) - 1.0) * 2.0 * highest / (highest - 1.0)


def lied(temperature, bias, mean, highest):
    """Linear increase, exponential decrease: by the surge of b / b_g above the mean."""
    above = bias > mean
    ratio = jnp.where(above, bias, 1.0) / jnp.where(above & (mean > 0), mean, 1.0)
    return jnp.where(
        above,
        temperature - exponential_change(ratio, highest),
        linear(temperature, bias, mean, highest),
    )


def eied(temperature, bias, mean, highest):
    """Exponential increase, exponential decrease: by the surge of |b - b_g|, which is
    negative below 1, as the code has it.
    """
    change = exponential_change(jnp.abs(bias - mean), highest)
    return jnp.where(bias > mean, temperature - change, temperature + change)


def discrepancy(distance, cosine):
    """The bias of a client is the distance of its trained model from its group's new one."""
    return distance


def dissimilarity(distance, cosine):
    """The bias of a client is the cosine dissimilarity of its update to its group's step."""
    return (1.0 - cosine) / 2.0


class Temperature(NamedTuple):
    """How clients heat up and cool down."""

    temperature: Callable  # step | linear | lied | eied
    temperature_max: AboveOne = 10.0  # T_max, > 1; no published value
    temperature_bias: Callable = discrepancy  # discrepancy | dissimilarity
    temperature_floor: bool = False  # True: whole weights, as the code rounds them down


def with_temperature(hooks: Hooks, heat: Temperature) -> Hooks:
    """Adds temperatures to a method whose memory has a field `temperature`. Raises
    InputError for a highest one that is not above 1.
    """
    check_arguments(Temperature, heat._asdict(), "algorithm")
    highest, update = heat.temperature_max, update_temperatures(heat)
    return hooks._replace(
        start=init_temperatures(hooks.start, highest),
        migrate=reset_shifted(hooks.migrate, highest) if hooks.migrate else None,
        aggregate=temperature_mean(highest, heat.temperature_floor),
        finish=chain_finish(hooks.finish, update) if hooks.finish else update,
    )


def next_temperature(strategy: Callable, temperature, bias, mean, highest):
    """Returns the new temperatures of clients that trained, given their own bias and
    their group's mean; all of one shape.
    """
    new = jnp.clip(strategy(temperature, bias, mean, highest), 0.0, highest)
    return jnp.where(temperature > 0, new, temperature)


def temperature_mean(highest: float, floor: bool = False):
    """Means weighted by n_i T_i / T_max; with `floor` by the code's floor(n_i T_i /
    (T_max + 1e-5)), which is n_i - 1 for T_i = T_max.
    """

    def aggregate(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
        temperature = state.memory.temperature[jnp.minimum(cohort.ids, state.assignment.size - 1)]
        if not floor:
            return weighted_mean(
                upload.replace(weight=upload.weight * (temperature / highest)),
                gid,
                cohort,
                client_extra,
                state,
            )
        coefficient = membership_weights(
            jnp.floor(upload.weight * temperature / (highest + EPSILON)), gid, state.active.size
        )
        mass = coefficient.sum(0)
        return group_sum(coefficient / (mass + EPSILON), upload.delta), mass

    return aggregate


def update_temperatures(heat: Temperature) -> FinishFn:
    """Returns the `finish` of a round that gives new temperatures to the clients that
    trained.
    """

    def finish(state: State, before: State, cohort: Cohort, gid, upload: Upload):
        num_clients, trained = state.assignment.size, upload.weight > 0
        own = heat.temperature_bias(*deviation(before, state.groups, gid, upload))
        (mean,), _ = group_mean(trained.astype(jnp.float32), gid, (own,), state.active.size)
        old = state.memory.temperature[jnp.minimum(cohort.ids, num_clients - 1)]
        new = next_temperature(heat.temperature, old, own, mean[gid], heat.temperature_max)
        rows = jnp.where(trained, cohort.ids, num_clients)
        temperature = state.memory.temperature.at[rows].set(new, mode="drop")
        return state.replace(memory=state.memory.replace(temperature=temperature)), make_traffic()

    return finish


def init_temperatures(begin, highest: float):
    """Adds to a start the temperatures of all clients."""

    def start(key, data: FederatedData):
        begun = begin(key, data)
        return begun._replace(
            memory=begun.memory.replace(
                temperature=jnp.full(data.num_clients, highest, jnp.float32)
            )
        )

    return start


def reset_shifted(move, highest: float):
    """Sets to T_max the clients that `migrate.on_shift` lets start cold again: those
    whose reference it has renewed.
    """

    def migrate(key, state: State, data: FederatedData):
        after, report = move(key, state, data)
        renewed = jnp.any(
            after.memory.shift_reference.reference != state.memory.shift_reference.reference, axis=1
        )
        temperature = jnp.where(renewed, jnp.float32(highest), after.memory.temperature)
        return after.replace(memory=after.memory.replace(temperature=temperature)), report

    return migrate
