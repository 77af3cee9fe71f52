"""Devices: their mesh, over which clients are spread, and what is put and computed where.

Of models of clients [K, ...] each of several devices holds some parameters of all of them: a
client's model is then read and written in place, and of the models of a cohort [S, ...] a device
sends and receives its share, and never holds all.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_cfl.errors import InputError
from fedjax_cfl.tree import drop_statistics, take_rows
from fedjax_cfl.types import Params

MIN_SPLIT_BYTES = 2**16  # a smaller array is whole on every device: splitting it gains nothing
Split = list[tuple[str, ...]]  # for each axis of an array, the axes of the mesh that split it


def use_cpu_cores(count: int | None = None) -> None:
    """Makes JAX show one CPU device per usable core (or `count`); call it before
    anything touches a device.

    A client's matrices are too small to gain from several cores, so clients are spread
    over cores instead. A user's own JAX_NUM_CPU_DEVICES or XLA_FLAGS choice is left
    alone. Raises InputError if JAX has already started.
    """
    chosen = (
        "JAX_NUM_CPU_DEVICES" in os.environ
        or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    )
    if count is None and chosen:
        return
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        jax.config.update("jax_num_cpu_devices", count or cores)
    except RuntimeError:
        raise InputError(
            "devices: JAX has already started; call use_cpu_cores() before the first JAX operation"
        ) from None


def make_mesh(devices: int | None = None) -> Mesh:
    """Returns the mesh over the first `devices` devices (default: all). Raises
    InputError if there are fewer.
    """
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:
        named = os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split())[:200] or "there is no such device"
        raise InputError(f"JAX_PLATFORMS={named}: JAX cannot use it: {reason}; unset it") from None
    if devices is not None and jax.process_count() > 1:
        raise InputError(f"devices={devices}: several processes use all of their devices; use null")
    if devices is not None and not 1 <= devices <= len(found):
        raise InputError(
            f"devices={devices}: between 1 and {len(found)} are available ({found[0].platform})"
        )
    return mesh_over(found[:devices])


def mesh_over(devices: Sequence[Any]) -> Mesh:
    """Returns the mesh over devices, which keep their order. It has an axis for each prime
    factor of their number: clients are split over all of them together, and models of clients
    over some by one axis of a layer, over the others by another (`find_split`).
    """
    factors, rest = [], len(devices)
    while rest > 1:
        factors.append(next(n for n in range(2, rest + 1) if rest % n == 0))
        rest //= factors[-1]
    factors = factors or [1]
    names = tuple(f"clients_{n}" for n in range(len(factors)))
    return Mesh(np.array(devices).reshape(factors), names)


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def replicated_shapes(tree: Any, mesh: Mesh) -> Any:
    """Returns shapes, types and sharding of arrays that every device holds whole, of a
    tree of arrays or of their shapes.
    """
    return jax.tree.map(lambda leaf: shape_on(leaf, replicated_sharding(mesh)), tree)


def shape_on(leaf: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of an array, with the sharding `place`."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays, the same ones in every process, whole on every device."""
    if jax.process_count() == 1:
        return jax.device_put(tree, replicated_sharding(mesh))
    return place(tree, replicated_shapes(tree, mesh))


def place(tree: Any, shapes: Any) -> Any:
    """Puts arrays, the same ones in every process, where the shardings of `shapes` say."""

    def put(leaf, where):
        # an array of one process's device cannot be moved to those of another, but one of the host
        # can
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                put(jax.random.key_data(leaf), where), impl=jax.random.key_impl(leaf)
            )
        held = np.asarray(leaf)
        return jax.make_array_from_callback(held.shape, where.sharding, lambda part: held[part])

    return jax.tree.map(put, tree, shapes)


def over_devices(block: Callable, mesh: Mesh) -> Callable:
    """Maps block(shared, client_inputs) over the devices: `shared` is replicated,
    `client_inputs` and the result are split along axis 0.
    """
    if mesh.size == 1:
        return block
    split, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    return jax.shard_map(
        block, mesh=mesh, in_specs=(whole, split), out_specs=split, check_vma=False
    )


def on_every_device(block: Callable, mesh: Mesh | None) -> Callable:
    """Makes every device compute the whole of block(*arrays) by itself: for loops over small
    arrays, as a clustering has. The compiler may split these otherwise, and then every pass
    waits for all devices.
    """
    if mesh is None or mesh.size == 1:
        return block
    whole = PartitionSpec()
    return jax.shard_map(block, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def is_cpu(mesh: Mesh) -> bool:
    """Returns whether the devices are CPU cores."""
    return mesh.devices.flat[0].platform == "cpu"


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
