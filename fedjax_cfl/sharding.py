"""Devices: their mesh, over which clients are spread, and what is put and computed where."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_cfl.errors import InputError


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
    found = jax.devices()
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
    over some by one axis of a layer, over the others by another (`client_models`).
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
