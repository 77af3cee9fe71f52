"""Training without federation: the baseline NonFed of Xie, Long, Shen, Zhou, Wang,
Jiang, Zhang, "Multi-Center Federated Learning", https://arxiv.org/abs/2005.01026.

Every client trains its own model on its own data and sends nothing. The model of the one group is
that from which all begin.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import ClientInputs, change_training, sgd
from fedjax_cfl.method import Method
from fedjax_cfl.round.aggregate import zero_step
from fedjax_cfl.round.client_rows import refuse_layers
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import one_active_group
from fedjax_cfl.system.system import System, SystemLike, as_system, use_all_clients
from fedjax_cfl.types import (
    Algorithm,
    Cohort,
    FederatedData,
    Info,
    Key,
    Params,
    ServedModels,
    State,
    Task,
    Upload,
)
from fedjax_cfl.validation import checked

NAME = "NonFed"  # of the rows that clients keep: their models


@checked("algorithm")
def nonfed(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    trains: Literal["all", "cohort"] = "all",
) -> Algorithm:
    """NonFed: every client trains a model of its own, from the same random start.

    `trains` is all (every client trains E epochs in every round) | cohort (only those that the
    selection draws, as many steps as FedAvg takes).
    A test costs at least one block of samples per client (`evaluate.EVAL_BLOCK`). Its auxiliary
    accuracy is that of the mean of all models. Raises InputError for another value of
    `trains`.
    """
    refuse_layers(local)
    own = Method(name=NAME, rows=lambda model: model, serve=lambda row, model: row)
    method = Method(
        train_own(sgd(task, local)),
        start=one_active_group(task, 1, joined=True),
        takes_newcomers=False,
        aggregate=zero_step,
    )
    if trains == "all":
        system = use_all_clients(system)
    local, system = local.replace(personal=own), send_nothing(as_system(system))
    algorithm = federated(task, local, system, method)

    def silent_round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        after, info = algorithm.round(key, state, data)
        return after.replace(traffic=state.traffic), measure_alone(info)

    # a test reads the models of all clients at once: their rows stay on the devices
    return algorithm._replace(round=silent_round, serve=serve_own, first_rows=None)


def send_nothing(system: System) -> System:
    """Returns the system in whose time nothing is sent: models stay where they are."""
    clock = system.clock
    if clock is None:
        return system

    def seconds(cohort: Cohort, upload: Upload, slot_bytes: jax.Array) -> jax.Array:
        return clock.seconds(cohort, upload, jnp.zeros_like(slot_bytes))

    return system._replace(clock=clock._replace(seconds=seconds))


def train_own(solve: ClientFn) -> ClientFn:
    """Trains one client's own model by `solve`, and keeps it."""

    def keep(c: ClientInputs, own: Params, upload: Upload) -> Upload:
        return upload.replace(rows={NAME: jax.tree.map(jnp.add, own, upload.delta)})

    return change_training(solve, keep, lambda c: (c.work.rows[NAME], c.work))


def measure_alone(info: Info) -> Info:
    """Returns what a round reports, with models that are no distance from those of their groups:
    clients have their own.
    """
    return info.replace(
        discrepancy=0 * info.discrepancy,
        group_discrepancy=jnp.nan * info.group_discrepancy,
        dissimilarity=0 * info.dissimilarity,
    )


def serve_own(state: State) -> ServedModels:
    """Serves each client its own model; to reports each client is a group."""
    clients = jnp.arange(state.assignment.size, dtype=jnp.int32)
    return ServedModels(state.rows[NAME].values, clients)
