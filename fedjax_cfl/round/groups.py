"""Which groups the clients of a cohort have before they are assigned."""

import jax
import jax.numpy as jnp

from fedjax_cfl.method import Round
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.types import Cohort, Report, State


def current_groups(state: State, cohort: Cohort) -> jax.Array:
    """Returns the present groups [S] of the clients; -1 for a client without a group and for
    an empty slot.
    """
    clients = state.assignment.size
    met = cohort.take(state.assignment)
    return jnp.where(cohort.ids < clients, met, -1)


def is_unassigned(state: State, cohort: Cohort) -> jax.Array:
    """Returns which slots [S] bool have a client that was never assigned to a group."""
    return (cohort.ids < state.assignment.size) & (current_groups(state, cohort) < 0)


def keep_groups(r: Round) -> tuple[jax.Array, Report]:
    """Leaves every client in its group; clients without one train group 0 (an `AssignFn`)."""
    return jnp.maximum(current_groups(r.state, r.cohort), 0), make_report()
