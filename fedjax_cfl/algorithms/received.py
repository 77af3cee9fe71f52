"""Testing every client on the model it received when it last took part, instead of its
group's present one.

So the FlexCFL code tests since November 2022, after the paper's tables were made (D9).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.round.engine import SELECT, derive_key
from fedjax_cfl.types import Algorithm, FederatedData, Params, ServedModels, State


class ReceivedModels(struct.PyTreeNode):
    """The memory of an algorithm, and what its clients have received."""

    algorithm_memory: Any
    # [K, ...], at the beginning of the round in which the client last took part; the initial
    # one before that
    models: Params


def evaluate_received(algorithm: Algorithm, select) -> Algorithm:
    """Returns the same algorithm, tested on the models received; `select` is the one it
    draws its cohorts with. It stores K models more.

    A client that is served no model (it never met the server) is not tested.
    """

    def init(key, data: FederatedData):
        state = algorithm.init(key, data)
        served = algorithm.serve(state)
        models = jax.tree.map(lambda leaf: leaf[jnp.maximum(served.index, 0)], served.models)
        return state.replace(memory=ReceivedModels(state.memory, models))

    def round(key, state: State, data: FederatedData):
        before = inner(state)
        after, info = algorithm.round(key, before, data)
        sent = algorithm.serve(before.replace(assignment=after.assignment))
        ids = select(derive_key(key, SELECT, state.round), state.round, data.num_clients)
        own = sent.index.at[ids].get(mode="clip")
        models = jax.tree.map(
            lambda old, new: old.at[ids].set(new[own], mode="drop"),
            state.memory.models,
            sent.models,
        )
        return after.replace(memory=ReceivedModels(after.memory, models)), info

    def inner(state: State) -> State:
        return state.replace(memory=state.memory.algorithm_memory)

    def serve(state: State) -> ServedModels:
        return algorithm.serve(inner(state))

    def test(state: State) -> ServedModels:
        index = serve(state).index
        return ServedModels(state.memory.models, jnp.where(index >= 0, jnp.arange(index.size), -1))

    return algorithm._replace(init=init, round=round, serve=serve, eval_models=test)
