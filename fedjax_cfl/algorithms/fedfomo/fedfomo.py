"""Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order
Model Optimization", ICLR 2021, https://arxiv.org/abs/2012.08565.

Every client has a model of its own. It receives the models of a few others, weighs each by
how much it lowers the loss on held-out samples of its own per unit of distance, mixes
them, and trains on. An affinity says which others it is sent next time.

Each client is a group, as in `nonfed`: group k is client k's model as it was trained last.
K clients, F other models sent to a client. Differs from the paper: every fifth of a
client's samples is held out, in their order, instead of a random fifth; a client that has
none held out goes on from its own model.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import Partial

from fedjax_cfl.algorithms.fedfomo.mix import PersonalModels, hold_out_samples, l1_norm, mix_models
from fedjax_cfl.algorithms.nonfed import (
    assign_client_id,
    client_delta,
    shared_model,
    train_own_model,
)
from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.executor import Program, then
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.hooks import FinishFn, Hooks, Start, StartFn
from fedjax_cfl.sharding import put_models
from fedjax_cfl.system.reports import make_traffic
from fedjax_cfl.system.system import SystemLike, as_system
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
    Traffic,
    Upload,
)
from fedjax_cfl.validation import BelowOne, Fraction, NonNegativeFloat, PositiveInt, check_arguments


def serve_mixed(state: State) -> ServedModels:
    """Serves each client its model from before its last local training."""
    return ServedModels(state.memory.mixed, jnp.arange(state.assignment.size, dtype=jnp.int32))


def serve_trained(state: State) -> ServedModels:
    """Serves each client its model after its last local training."""
    return ServedModels(state.groups, jnp.arange(state.assignment.size, dtype=jnp.int32))


def fedfomo(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    models: PositiveInt = 4,
    validation: BelowOne = 0.2,
    explore: Fraction = 0.3,
    explore_decay: NonNegativeFloat = 0.05,
    norm: Callable[[Params], jax.Array] = l1_norm,
    test: Callable[[State], ServedModels] = serve_mixed,
) -> Algorithm:
    """FedFomo.

    Args: `models` F sent to a client in a round, in addition to its own; `validation` the share
    of a client's samples that is held out; a model is sent by chance with probability
    `explore` - `explore_decay` * round, otherwise by affinity; `norm` l1_norm | l2_norm of
    the distance between models; `test` serve_mixed | serve_trained, what clients are
    tested on. Raises InputError if `system` keeps what clients received: it is several models.
    """
    check_arguments(fedfomo, locals(), "algorithm")
    if as_system(system).keep_received:
        raise InputError(
            "test_on=received: FedFomo's clients receive several models and mix them, expected"
            " group, which algorithm.test makes the mixed or the trained model"
        )
    hooks = Hooks(
        train_from_mixture(sgd(task, local)),
        start=personal_start(task),
        assign=assign_client_id,
        own_models=True,
        prepare=mix_models(task, local, models, (explore, explore_decay), norm),
        ships_model=False,
        aggregate=client_delta(local.execution.mesh),
        finish=remember_mixture(local.execution.mesh),
    )
    algorithm = federated(task, local, system, hooks)

    def round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        return algorithm.round(key, state, hold_out_samples(data, validation))

    def client_models(state: State) -> tuple:
        return state.groups, state.server, state.memory.mixed, state.memory.affinity

    return algorithm._replace(round=round, serve=test, client_models=client_models)


def personal_start(task: Task) -> StartFn:
    """Starts every client from the same random model."""

    def start(key: Key, data: FederatedData) -> Start:
        initial, clients = shared_model(task, False)(key, data), data.num_clients
        nobody, affinity = jnp.zeros(clients, bool), 0.1 * jnp.eye(clients)
        memory = PersonalModels(initial.groups, affinity, nobody, nobody)
        return initial._replace(memory=memory)

    return start


def train_from_mixture(train: ClientFn) -> ClientFn:
    """Trains one client from its `Mixture` instead of its group's model, and uploads the
    mixture as well. The delta is relative to the group's model.
    """

    def solve(train, client, data, shared, work: Work) -> Program:
        mixture = work.client_extra
        from_mixture = work._replace(client_extra=mixture.model)

        def send(upload: Upload) -> Upload:
            def from_group(change, mixed, trained):
                return mixed + change - trained

            delta = jax.tree.map(from_group, upload.delta, mixture.model, mixture.trained)
            return upload.replace(delta=delta, extra=mixture.replace(trained=()))

        return then(train(client, data, shared, from_mixture), send)

    return Partial(solve, train_own_model(train))


def remember_mixture(mesh: Mesh | None) -> FinishFn:
    """Remembers what the clients that answered have mixed."""

    def finish(
        state: State, before: State, cohort: Cohort, gid: jax.Array, upload: Upload
    ) -> tuple[State, Traffic]:
        memory, mixture, clients = state.memory, upload.extra, state.assignment.size
        answered = upload.weight > 0
        rows = jnp.where(answered, cohort.ids, clients)
        total = jnp.abs(mixture.gain.sum(1, keepdims=True))
        share = mixture.gain / jnp.where(total > 0, total, 1.0)
        judged = jnp.concatenate([cohort.ids[:, None], mixture.peers], axis=1)
        memory = PersonalModels(
            mixed=put_models(memory.mixed, rows, mixture.model, mesh),
            affinity=memory.affinity.at[rows[:, None], judged].add(share, mode="drop"),
            uploaded=cohort.put(jnp.zeros(clients, bool), True, answered),
            started=cohort.put(memory.started, True),
        )
        return state.replace(memory=memory), make_traffic()

    return finish
