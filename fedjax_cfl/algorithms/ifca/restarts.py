"""IFCA from the best of several starts, which its paper asks for: it depends on them."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.algorithms.ifca.ifca import IfcaMean, ifca
from fedjax_cfl.algorithms.ifca.start import StartName
from fedjax_cfl.client.local import Local
from fedjax_cfl.clustering.measure import MakeMeasure
from fedjax_cfl.method import AggregateFn
from fedjax_cfl.round.start import MakeStart
from fedjax_cfl.system.reports import add_fault_counts, add_to_ledger, sum_rounds
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Key, State, Task
from fedjax_cfl.validation import Fraction, NonNegativeFloat, PositiveInt, checked


@checked("algorithm")
def ifca_restarts(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    restarts: PositiveInt = 5,
    restart_rounds: PositiveInt = 10,
    start: StartName | MakeStart = "random",
    share: Fraction = 0.1,
    aggregate: IfcaMean | AggregateFn = "uniform",
    measure: Literal["losses"] | MakeMeasure = "losses",
    mu: NonNegativeFloat | jax.Array = 0.0,
) -> Algorithm:
    """IFCA from the best of several starts: the one whose training loss is lowest after a few
    rounds. The traffic of all of them counts.

    Args: `restarts` is how many starts are tried, for `restart_rounds` rounds each; `start`,
    `share`, `aggregate`, `measure` and `mu` are those of `ifca`.
    """
    options = {"start": start, "share": share, "aggregate": aggregate, "measure": measure, "mu": mu}
    algorithm = ifca(task, local, system, m=m, **options)

    def init(key: Key, data: FederatedData) -> State:
        def attempt(number):
            attempt_key = jax.random.fold_in(key, number)
            initial = algorithm.init(attempt_key, data)
            state, info = lax.scan(
                lambda state, _: algorithm.round(attempt_key, state, data),
                initial,
                length=restart_rounds,
            )
            faults = add_fault_counts(initial.start_faults, sum_rounds(info.fault_counts))
            return initial.groups, info.last_loss[-1], state.traffic, faults

        groups, loss, sent, faults = lax.map(attempt, jnp.arange(restarts))
        best = jnp.argmin(jnp.where(jnp.isfinite(loss), loss, jnp.inf))
        chosen = take_rows(groups, best)
        return algorithm.init(key, data).replace(
            groups=chosen, traffic=add_to_ledger(sent), start_faults=sum_rounds(faults)
        )

    return algorithm._replace(init=init, data_clients=None)
