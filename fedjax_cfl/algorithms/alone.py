"""Training without federation: the baseline NonFed of Xie, Long, Shen, Zhou, Wang,
Jiang, Zhang, "Multi-Center Federated Learning", https://arxiv.org/abs/2005.01026.

Every client trains its own model on its own data and sends nothing. A client is a group
of its own: models [K, ...], group k is client k's.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.errors import require
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.hooks import Hooks, Start, make_report
from fedjax_cfl.round.select import full_participation
from fedjax_cfl.round.sgd import sgd
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, State, Upload


def nonfed(task, local, select, *, trains: str = "all", ship_start: bool = False) -> Algorithm:
    """NonFed: all clients start from the same random model and are tested on their own.

    Args: `trains` all: every client trains E epochs in every round | cohort: those whom
    `select` draws, as many steps as FedAvg takes; `ship_start` counts the common start
    as K models down. An evaluation costs at least one block of samples a client
    (`evaluate.BLOCK`); its auxiliary accuracy is that of the mean of all models. Raises
    InputError for a value of `trains` that is not listed here.
    """
    require("algorithm.trains", trains, ("all", "cohort"))
    local = local.resolve()
    algorithm = federated(
        task,
        local,
        full_participation() if trains == "all" else select,
        Hooks(
            sgd(task, local),
            start=shared_model(task, ship_start),
            assign=assign_client_id,
            aggregate=client_delta,
        ),
    )

    def silent_round(key, state: State, data: FederatedData):
        after, info = algorithm.round(key, state, data)
        return after.replace(traffic=state.traffic), info

    return algorithm._replace(
        round=silent_round, clustered=False
    )  # everybody has a model from the start


def shared_model(task, ship_start: bool):
    """Starts every client from the same random model."""

    def start(key, data: FederatedData):
        count = data.num_clients
        models = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), task.init(key)
        )
        return Start(
            models,
            jnp.arange(count, dtype=jnp.int32),
            report=make_report(make_traffic(units_down=count if ship_start else 0)),
        )

    return start


def assign_client_id(key, state: State, data: FederatedData, cohort: Cohort):
    """Each client is its own group."""
    return jnp.minimum(cohort.ids, data.num_clients - 1), make_report()


def client_delta(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
    """Each client's own update: a scatter, where a mean over K groups would be a
    product with a [S, K] matrix.
    """
    rows = jnp.where(upload.weight > 0, cohort.ids, state.active.size)
    step = jax.tree.map(
        lambda leaf, delta: jnp.zeros_like(leaf).at[rows].set(delta, mode="drop"),
        state.groups,
        upload.delta,
    )
    return step, jnp.zeros(state.active.size).at[rows].set(upload.weight, mode="drop")
