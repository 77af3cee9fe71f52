"""What clients keep for themselves, on the host: where samples stay there, so do the rows.

Between calls of the programs `Rows.values` are NumPy arrays [K, ...], of layers that
`Algorithm.first_rows` names, which are written in place. The programs get the rows of the clients
of a block of rounds, or of a part of an evaluation, and `Rows.place` says where each client's is.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_cfl.data import prefetch
from fedjax_cfl.simulation.rounds import Carry, carry_shapes, has_host_rows
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Key, Rows, State

CHUNK_BYTES = 2**27  # of models that are made at once


def row_bytes(algorithm: Algorithm, data: FederatedData, key: Key) -> int:
    """Returns the bytes of one client's rows on the host; 0 where rows are not kept there."""
    if not has_host_rows(algorithm, prefetch.is_on_host(data)):
        return 0
    assert algorithm.first_rows is not None
    samples = prefetch.make_block(data, "train", 1, data.num_clients)
    state = jax.eval_shape(algorithm.init, key, samples)
    rows = jax.eval_shape(algorithm.first_rows, state)
    return sum(leaf.size // len(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(rows))


def device_shapes(algorithm: Algorithm, carry: Carry, count: int, mesh: Mesh) -> Carry:
    """Returns what `carry_shapes` returns, with `count` rows of clients; 0: all are there."""
    state, data_state = carry
    if count:

        def few(rows: Rows) -> Rows:
            values = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), rows.values
            )
            place = jax.ShapeDtypeStruct(state.assignment.shape, jnp.int32)
            return rows.replace(values=values, place=place)

        assert algorithm.first_rows is not None
        names = jax.eval_shape(algorithm.first_rows, state)
        state = state.put_rows({name: few(state.rows[name]) for name in names})
    return carry_shapes(algorithm, (state, data_state), mesh)


def list_host_rows(state: State) -> list[str]:
    """Returns the layers whose rows are on the host, of a state between calls of the programs."""
    return [
        name
        for name, rows in state.rows.items()
        if isinstance(rows, Rows)
        and any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(rows.values))
    ]


def make_rows(state: State) -> State:
    """Returns the state after a run's start with the rows of all clients on the host. It has those
    of a client of each group [m, ...], where there are not as many as clients.
    """
    group = np.maximum(np.asarray(state.assignment), 0)

    def spread(first: jax.Array) -> np.ndarray:
        rows = np.empty((group.size, *first.shape[1:]), first.dtype)
        return np.take(np.asarray(first), group, axis=0, out=rows, mode="clip")  # without a buffer

    return state.put_rows(
        {
            name: rows.replace(values=jax.tree.map(spread, rows.values))
            for name, rows in state.rows.items()
            # the rows of a correction, and those of the method, are on the devices
            if isinstance(rows, Rows) and isinstance(rows.group, tuple)
        },
    )


def rows_to_device(carry: Carry, ids: np.ndarray | None, shapes: Carry) -> Carry:
    """Returns the carry with the rows of the clients `ids` [n] alone, on the devices; None: as it
    is, with all rows.

    `shapes` are those that the program was compiled for, with room for n rows or more.
    """
    state, data_state = carry
    if ids is None:
        return carry
    place = np.zeros(state.assignment.size, np.int32)
    place[ids] = np.arange(ids.size, dtype=np.int32)

    def take(rows: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        few = np.zeros(like.shape, like.dtype)
        np.take(rows, ids, axis=0, out=few[: ids.size], mode="clip")
        return jax.device_put(few, like.sharding)

    def take_layer(rows: Rows, like: Rows) -> Rows:
        values = jax.tree.map(take, rows.values, like.values)
        return rows.replace(values=values, place=jax.device_put(place, like.place.sharding))

    names = list_host_rows(state)
    few = {name: take_layer(state.rows[name], shapes[0].rows[name]) for name in names}
    return state.put_rows(few), data_state


def rows_to_host(before: State, after: State, ids: np.ndarray | None) -> State:
    """Returns the state `after` a block with all rows on the host: those of `before`, in which the
    rows of the clients `ids` [n], which `after` has, are written. None: it has all rows already.
    """
    if ids is None:
        return after

    def write(rows: np.ndarray, on_device: jax.Array) -> np.ndarray:
        rows[ids] = np.asarray(on_device)[: ids.size]
        return rows

    def write_layer(rows: Rows, on_device: Rows) -> Rows:
        return on_device.replace(
            values=jax.tree.map(write, rows.values, on_device.values), place=()
        )

    names = list_host_rows(before)
    return after.put_rows(
        {name: write_layer(before.rows[name], after.rows[name]) for name in names}
    )


def collect_models(algorithm: Algorithm, state: State, data: FederatedData) -> Any:
    """Returns the models [K, ...] that clients use as NumPy arrays, of a state with its rows on the
    host: made for some clients after others.
    """
    assert algorithm.personal_models is not None
    clients = state.assignment.size
    model = sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(state.groups))
    at_once = max(1, min(clients, CHUNK_BYTES // model))
    groups: Sequence[Any] = jax.tree.leaves(state.groups)
    kept = list_host_rows(state)
    models = [np.empty((clients, *leaf.shape[1:]), leaf.dtype) for leaf in groups]
    for begin in range(0, clients, at_once):
        ids = np.arange(begin, min(begin + at_once, clients))
        place = np.zeros(clients, np.int32)
        place[ids] = np.arange(ids.size)
        some_rows = {
            name: rows.replace(values=take_rows(rows.values, ids), place=jnp.asarray(place))
            for name, rows in state.rows.items()
            if name in kept
        }
        on_device = state.put_rows(some_rows)
        some = algorithm.personal_models(on_device, data, jnp.asarray(ids))
        for whole, part in zip(models, jax.tree.leaves(some), strict=True):
            whole[ids] = np.asarray(part)
    return jax.tree.unflatten(jax.tree.structure(state.groups), models)
