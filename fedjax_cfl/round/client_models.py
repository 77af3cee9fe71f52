"""Models of clients [K, ...] on several devices: each holds some parameters of all of them.

By parameters, because a client's model is then read and written in place: of the models of
a cohort [S, ...] a device sends and receives its share, and never holds all.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_cfl.models.statistics import drop_statistics
from fedjax_cfl.system.faults import find_nonfinite
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Cohort, OwnRows, Params, State, Upload

MIN_SPLIT_BYTES = 2**16  # a smaller array is whole on every device: splitting it gains nothing

Split = list[tuple[str, ...]]  # for each axis of an array, the axes of the mesh that split it


def find_split(leaf: Any, mesh: Mesh, first: int = 1) -> Split:
    """Returns how the devices split an array [K, ...] of models of clients: by its axes of
    parameters, the longest before the others, as far as they can be divided, and by K for what
    is left of the devices. A small array is whole. `first` is the first axis of parameters.

    Of 256 devices 16 share an axis of 784, and 16 an axis of 128.
    """
    split, left = [()] * leaf.ndim, list(mesh.axis_names[::-1])
    if mesh.size == 1 or leaf.size * leaf.dtype.itemsize < MIN_SPLIT_BYTES:
        return split
    for axis in [*sorted(range(first, leaf.ndim), key=lambda n: -leaf.shape[n]), first - 1]:
        size = leaf.shape[axis]
        for name in left.copy():
            if size % mesh.shape[name] == 0:
                size //= mesh.shape[name]
                left.remove(name)
                split[axis] = (name, *split[axis])
    return split


def place_split(split: Split, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that is split so."""
    if not any(split):
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[names or None for names in split]))


def split_sharding(leaf: Any, mesh: Mesh, first: int = 1) -> NamedSharding:
    """Returns the sharding of an array [K, ...] of models of clients, see `find_split`."""
    return place_split(find_split(leaf, mesh, first), mesh)


def list_moves(split: Split, mesh: Mesh) -> list[NamedSharding]:
    """Returns how an array [S, ...] gets from a split by clients to that by parameters, one
    axis after another, the first and the last included; what K is split by, all devices get.

    Each move is one all-to-all of what a device holds. For all of them at once the compiler
    finds nothing better than to make the array whole on every device.
    """
    now = [mesh.axis_names, *[()] * (len(split) - 1)]
    moves = [now]
    axes = [axis for axis in range(1, len(split)) if split[axis]]
    # the last axes of the mesh leave first: no device needs the part of another's place
    for axis in sorted(axes, key=lambda axis: -mesh.axis_names.index(split[axis][0])):
        now = now.copy()
        now[0], now[axis] = tuple(n for n in now[0] if n not in split[axis]), split[axis]
        moves.append(now)
    return [place_split(each, mesh) for each in [*moves, [(), *split[1:]]]]


def constrain(leaf: jax.Array, places: list[NamedSharding]) -> jax.Array:
    """Asks the compiler to hold an array at `places`, one after another."""
    for place in places:
        leaf = lax.with_sharding_constraint(leaf, place)
    return leaf


def flatten_updates(delta: Params, mesh: Mesh | None) -> Params:
    """Returns updates [S, ...], whose clients devices share, as one matrix [S, P] for inner
    products and distances, of which each device has some columns.

    Zeros make the columns divisible, and running statistics are left out. On one device the
    updates are returned as they are.
    """
    if mesh is None or mesh.size == 1:
        return delta
    rows = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(drop_statistics(delta))]
    width = sum(part.shape[1] for part in rows)
    flat = jnp.pad(jnp.concatenate(rows, axis=1), ((0, 0), (0, -width % mesh.size)))
    return constrain(flat, [place_split([(), mesh.axis_names], mesh)])


def split_by_parameter(tree: Params, mesh: Mesh | None) -> Params:
    """Returns arrays [S, ...], whose clients devices share, split by parameters instead. A
    computation on one coordinate of all clients then needs no device to have all of them.
    """
    if mesh is None or mesh.size == 1:
        return tree

    return jax.tree.map(
        lambda leaf: constrain(leaf, list_moves(find_split(leaf, mesh), mesh)[1:]), tree
    )


def take_models(models: Params, rows: jax.Array, mesh: Mesh | None) -> Params:
    """Returns models [*R, ...] of clients `rows` [*R] int32, whose first axis is one of a
    cohort's slots, from all `models` [K, ...]: each device gets those of its slots.
    """
    if mesh is None or mesh.size == 1:
        return take_rows(models, rows)

    def take(leaf):
        moves = list_moves(find_split(leaf, mesh), mesh)
        taken = constrain(leaf[rows.reshape(-1)], moves[::-1])
        return taken.reshape(*rows.shape, *leaf.shape[1:])

    return jax.tree.map(take, models)


def take_own(state: State, cohort: Cohort, mesh: Mesh | None) -> Any:
    """Returns what each client of the cohort keeps for itself [S, ...], see `Personal`; () where
    nothing is kept.
    """
    if not jax.tree.leaves(state.own):
        return ()
    clients = jnp.minimum(cohort.ids, state.assignment.size - 1)
    return take_models(state.own.rows, find_places(state.own, clients), mesh)


def find_places(own: OwnRows, clients: jax.Array) -> jax.Array:
    """Returns where the rows of `clients` [n] int32 are."""
    return clients if isinstance(own.place, tuple) else own.place[clients]


def put_own(
    state: State, cohort: Cohort, upload: Upload, kept: jax.Array, mesh: Mesh | None
) -> State:
    """Returns the state with what clients of the cohort now keep, those in the slots `kept` [S]
    bool; rows that are not finite are dropped.
    """
    kept = kept & ~find_nonfinite(upload.own, kept.shape)
    clients = state.assignment.size
    at = jnp.where(kept, cohort.ids, clients)
    trained = state.own.trained.at[at].set(True, mode="drop")
    if not isinstance(state.own.place, tuple):
        nowhere = len(jax.tree.leaves(state.own.rows)[0])
        at = jnp.where(kept, state.own.place[jnp.minimum(at, clients - 1)], nowhere)
    rows = put_models(state.own.rows, at, upload.own, mesh)
    return state.replace(own=state.own.replace(rows=rows, trained=trained))


def put_models(models: Params, rows: jax.Array, new: Params, mesh: Mesh | None) -> Params:
    """Returns `models` [K, ...] with the `new` ones [S, ...] of a cohort written into the rows
    `rows` [S] int32; one whose row is K is dropped.
    """

    def put(leaf, new):
        if mesh is not None and mesh.size > 1:
            split = find_split(leaf, mesh)
            new = constrain(new, list_moves(split, mesh)[1:])
            leaf = constrain(leaf, [place_split(split, mesh)])
        return leaf.at[rows].set(new, mode="drop")

    return jax.tree.map(put, models, new)
