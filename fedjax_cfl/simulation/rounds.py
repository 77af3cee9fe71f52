"""A run as pure functions of a key and data: its start, its rounds, and what is carried from
one to the next.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl.data import prefetch
from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.data.scaling import Scaling
from fedjax_cfl.keys import DRIFT, derive_key
from fedjax_cfl.sharding import replicated_shapes, replicated_sharding, shape_on, split_sharding
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.tree import zero_rows
from fedjax_cfl.types import Algorithm, ClientIndex, FederatedData, Info, Key, Rows, State, Task
from fedjax_cfl.validation import PositiveInt


class DataState(NamedTuple):
    """What of the data a drift edits, and the drift's own memory: carried from round to
    round, unlike the samples themselves.
    """

    owner: jax.Array
    y: jax.Array
    sample: jax.Array | None
    turns: jax.Array | None
    train: ClientIndex
    test: ClientIndex
    concept: jax.Array
    shifted: jax.Array
    memory: Any

    def apply_to(self, data: FederatedData) -> FederatedData:
        """Returns the data as edited so far."""
        return data.replace(
            **{name: value for name, value in self._asdict().items() if name != "memory"}
        )


class Setup(NamedTuple):
    """What a run is made of, apart from its key and its `Plan`."""

    algorithm: Algorithm
    task: Task
    data: FederatedData
    drift: Drift
    mesh: Mesh
    scaling: Scaling | None = None  # by which the samples of `data` are scaled already


class Plan(NamedTuple):
    """How long a run is, and how it is tested: after every `eval_every` rounds and the
    last.

    `discard` (D17) hides a clustered method's accuracy while its first rounds do not cover all
    clients. `rounds` hides it in round t = 0, 1, ... while t < K / cohort (the FlexCFL code),
    `met` while any client has no model yet, `none` never.
    """

    rounds: PositiveInt
    eval_every: PositiveInt = 1
    discard: Literal["rounds", "met", "none"] = "rounds"
    eval_auxiliary: bool = True  # also test the mean of the models
    # also the mean distance of clients that share a model; quadratic in the clients
    eval_distance: bool = False


Carry = tuple[State, Any]  # what goes from round to round: (state, data_state)


def init_data_state(drift: Drift, key: Key, data: FederatedData) -> DataState:
    """Returns the data's moving part before round 0."""
    data, memory = drift.init(derive_key(key, DRIFT), data)
    return data_state_of(data, memory)


def data_state_of(data: FederatedData, memory: Any) -> DataState:
    """Takes the moving part out of the data."""
    return DataState(
        **{name: getattr(data, name) for name in DataState._fields if name != "memory"},
        memory=memory,
    )


def run_round(
    algorithm: Algorithm,
    drift: Drift,
    key: Key,
    state: State,
    data_state: DataState,
    data: FederatedData,
) -> tuple[State, DataState, Info]:
    """Makes one shift of the data and one round; returns (state, data_state, info).

    Args: `key` is the run's; `data_state` is what the drift has edited so far, and `data` has
    the samples as they were before the run.
    """
    warm = state.assignment >= 0 if algorithm.clustered else jnp.ones_like(state.assignment, bool)
    now, memory, shifted = drift.apply(
        derive_key(key, DRIFT), state.round, data_state.apply_to(data), data_state.memory, warm
    )
    now = now.replace(shifted=shifted, has_drift=drift.moves)
    state, info = algorithm.round(key, state, now)
    return state, data_state_of(now, memory), info


def make_rounds_fn(algorithm: Algorithm, drift: Drift, block: int) -> Callable:
    """Returns f(key, state, data_state, data, count) -> (state, data_state, infos
    [block]): `count` <= block rounds, the other infos 0.
    """

    def rounds(key, state, data_state, data, count):
        @jax.jit  # traced once for its shapes and for the loop
        def step(state, data_state):
            return run_round(algorithm, drift, key, state, data_state, data)

        if block == 1:  # no loop: compiles faster
            state, data_state, info = step(state, data_state)
            return state, data_state, jax.tree.map(lambda part: part[None], info)
        infos = zero_rows(block, jax.eval_shape(step, state, data_state)[2])

        def body(i, carry):
            state, data_state, infos = carry
            state, data_state, info = step(state, data_state)

            def put(whole, part):
                return lax.dynamic_update_index_in_dim(whole, part, i, 0)

            return state, data_state, jax.tree.map(put, infos, info)

        return lax.fori_loop(0, count, body, (state, data_state, infos))

    return rounds


def state_shapes(setup: Setup, key: Key, state: State | None = None) -> tuple[State, DataState]:
    """Returns shapes, types and shardings of a run's state and moving data: what a
    checkpoint is restored into. What lies on the host has NumPy arrays for shapes. `state` has
    those of the state where they are known: tracing a method's start takes half a second.
    """
    algorithm, _, data, drift, mesh, _ = setup
    on_host = prefetch.is_on_host(data)
    data = (
        prefetch.make_block(data, "train", 1, data.num_clients)
        if on_host
        else bound_client_samples(data, drift)
    )
    if state is None or on_host:
        carry = jax.eval_shape(make_init(algorithm, drift, on_host), key, data)
    else:
        carry = state, jax.eval_shape(partial(init_data_state, drift), key, data)
    state, data_state = carry_shapes(algorithm, carry, mesh)
    if has_host_rows(algorithm, on_host):
        assert algorithm.first_rows is not None
        clients = state.assignment.size

        def make_host_shape(leaf: jax.ShapeDtypeStruct) -> np.ndarray:  # it takes no memory
            return np.broadcast_to(np.zeros((), leaf.dtype), (clients, *leaf.shape[1:]))

        first = jax.eval_shape(algorithm.first_rows, carry[0])
        host = {
            name: state.rows[name].replace(values=jax.tree.map(make_host_shape, values))
            for name, values in first.items()
        }
        state = state.put_rows(host)
    return state, data_state


def carry_shapes(algorithm: Algorithm, carry: Carry, mesh: Mesh) -> Carry:
    """Returns shapes, types and shardings of a carry, of one run or of several: whole on
    every device, but for the models of clients, which devices split.
    """
    state, data_state = carry
    leaves, structure = jax.tree.flatten(state)
    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    rows = {
        name: part
        for name, part in numbered.rows.items()
        if isinstance(part, Rows) or name in algorithm.split_rows
    }
    split = set(jax.tree.leaves(rows))
    first = state.round.ndim + 1  # of a model's axes, behind those of several runs and K
    shapes = [
        shape_on(
            leaf, split_sharding(leaf, mesh, first) if n in split else replicated_sharding(mesh)
        )
        for n, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, shapes), replicated_shapes(data_state, mesh)


def has_host_rows(algorithm: Algorithm, on_host: bool) -> bool:
    """Returns whether what clients keep stays on the host, see `host_rows`: where their samples do,
    and one process has all of it.
    """
    return on_host and algorithm.first_rows is not None and jax.process_count() == 1


def make_init(algorithm: Algorithm, drift: Drift, on_host: bool) -> Callable:
    """Returns f(key, data) -> (state, moving data) before round 0; nothing moves in a
    population on the host, and of what clients keep there, there is a row of each group [m, ...].
    The algorithm starts on what the drift shows at first.
    """

    def begin(key: Key, data: FederatedData) -> tuple[State, Any]:
        if on_host:
            state = algorithm.init(key, data)
            if has_host_rows(algorithm, on_host):
                assert algorithm.first_rows is not None
                rows = {
                    name: state.rows[name].replace(values=values)
                    for name, values in algorithm.first_rows(state).items()
                }
                state = state.put_rows(rows)
            return state, ()
        data_state = init_data_state(drift, key, data)
        return algorithm.init(key, data_state.apply_to(data)), data_state

    return begin


def make_functions(
    build: Callable[[Mapping[str, jax.Array]], tuple[Algorithm, Drift]],
    task: Task,
    mesh: Mesh,
    plan: Plan,
    block: int,
    on_host: bool,
) -> tuple[Callable, Callable, Callable]:
    """Returns (begin, train, test), functions of a run's values, key and data: its start, up to
    `block` rounds, and the evaluation of a part of the test data from client `first` on.

    Args: `build(values)` -> (Algorithm, Drift), where values may be traced; the devices of
    `mesh` share an evaluation; `plan` says what is tested; `block` is the most rounds of one
    call; `on_host`: data come in blocks from the host and do not drift.
    """

    def begin(values, key, data):
        return make_init(*build(values), on_host)(key, data)

    def train(values, key, data, state, data_state, done, count):
        rounds = make_rounds_fn(*build(values), block)
        if not on_host:
            return rounds(key, state, data_state, data, count)
        # a block of a population on the host
        state, _, infos = rounds(key, state, data_state_of(data, ()), data, count)
        return state, (), infos

    def test(values, key, data, state, data_state, found, first):
        algorithm, _ = build(values)
        data = data if on_host else data_state.apply_to(data)
        more = evaluate.evaluate_block(
            algorithm, task, mesh, state, data, plan.eval_auxiliary, first, plan.eval_distance
        )
        found = more if found is None else evaluate.merge(found, more, first)
        apart = None
        if data.validation is not None:
            chosen_by = data.replace(test=data.validation)
            apart = evaluate.evaluate_block(algorithm, task, mesh, state, chosen_by, False)
        return found, algorithm.serve(state).model_index, apart

    return begin, train, test
