"""Training without federation: the baseline NonFed of Xie, Long, Shen, Zhou, Wang,
Jiang, Zhang, "Multi-Center Federated Learning", https://arxiv.org/abs/2005.01026.

Every client trains its own model on its own data and sends nothing. Each client is a
group: models [K, ...], group k is that of client k.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import Partial

from fedjax_cfl.client.cohort import ClientFn, reads_in_place
from fedjax_cfl.client.executor import Program
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.sgd import sgd, train_from
from fedjax_cfl.method import AggregateFn, Method, PrepareFn, Round, Start, StartFn
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import common_model
from fedjax_cfl.sharding import put_models, take_models
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.system import System, SystemLike, as_system, use_all_clients
from fedjax_cfl.types import (
    Algorithm,
    Cohort,
    FederatedData,
    Info,
    Key,
    Params,
    Report,
    State,
    Task,
    Upload,
)
from fedjax_cfl.validation import checked


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
    solve, in_place = sgd(task, local), reads_in_place(local.execution)
    method = Method(
        solve if in_place else train_own_model(solve),
        start=shared_model(task),
        assign=assign_client_id,
        own_models=True,
        prepare=None if in_place else send_own_model(local.execution.mesh),
        aggregate=client_delta(local.execution.mesh),
    )
    if trains == "all":
        system = use_all_clients(system)
    algorithm = federated(task, local, send_nothing(as_system(system)), method)

    def silent_round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        after, info = algorithm.round(key, state, data)
        return after.replace(traffic=state.traffic), info

    return algorithm._replace(round=silent_round)


def send_nothing(system: System) -> System:
    """Returns the system in whose time nothing is sent: models stay where they are."""
    clock = system.clock
    if clock is None:
        return system

    def seconds(cohort: Cohort, upload: Upload, slot_bytes: jax.Array) -> jax.Array:
        return clock.seconds(cohort, upload, jnp.zeros_like(slot_bytes))

    return system._replace(clock=clock._replace(seconds=seconds))


def shared_model(task: Task) -> StartFn:
    """Starts every client from the same random model."""

    def start(key: Key, data: FederatedData) -> Start:
        begun = common_model(task, data.num_clients)(key, data)
        return begun._replace(assignment=jnp.arange(data.num_clients, dtype=jnp.int32))

    return start


def assign_client_id(r: Round) -> tuple[jax.Array, Report]:
    """Assigns each client the group of its own id (an `AssignFn`)."""
    return jnp.minimum(r.cohort.ids, r.data.num_clients - 1), make_report()


def send_own_model(mesh: Mesh | None) -> PrepareFn:
    """Gives each client of the cohort the model of its group, and no device those of others."""

    def prepare(r: Round) -> tuple[Work, Report]:
        own = take_models(r.state.groups, r.work.group, mesh)
        return r.work._replace(client_extra=own), make_report()

    return prepare


def train_own_model(train: ClientFn) -> ClientFn:
    """Trains one client from the model in its `client_extra` instead of its group's."""

    def solve(train, client, data, shared, work: Work) -> Program:
        bare = work._replace(client_extra=())
        return train_from(work.client_extra, train, client, data, shared[0], bare)

    return Partial(solve, train)


def client_delta(mesh: Mesh | None) -> AggregateFn:
    """Returns each client's own update as the step of its group.

    It is a scatter; a mean over K groups would be a product with a matrix [S, K].
    """

    def aggregate(r: Round) -> tuple[Params, jax.Array]:
        upload, state = r.upload, r.state
        rows = jnp.where(upload.weight > 0, r.cohort.ids, state.active.size)
        zeros = jax.tree.map(jnp.zeros_like, state.groups)
        mass = jnp.zeros(state.active.size).at[rows].set(upload.weight, mode="drop")
        return put_models(zeros, rows, upload.delta, mesh), mass

    return aggregate
