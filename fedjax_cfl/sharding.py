"""Devices: one mesh axis `clients`, the dealing of a cohort over it, and the only `shard_map` of the package."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Cohort

AXIS = "clients"


def use_cpu_cores(count: int | None = None) -> None:
    """Makes JAX show one CPU device per usable core (or `count`); call it before anything touches a device.

    A client's matrices are too small to gain from several cores, so clients are spread over cores instead.
    A user's own JAX_NUM_CPU_DEVICES or XLA_FLAGS choice is left alone. Raises InputError if JAX has already started.
    """
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count is None and chosen:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", count or cores)
    except RuntimeError:
        raise InputError("devices: JAX has already started; call use_cpu_cores() before the first JAX operation") from None


def mesh_of(devices: int | None = None) -> Mesh:
    """Returns the mesh over the first `devices` devices (default: all). Raises InputError if there are fewer."""
    found = jax.devices()
    if devices is not None and jax.process_count() > 1:
        raise InputError(f"devices={devices}: several processes use all of their devices; use null")
    if devices is not None and not 1 <= devices <= len(found):
        raise InputError(f"devices={devices}: between 1 and {len(found)} are available ({found[0].platform})")
    return Mesh(np.array(found[:devices]), (AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def shapes(tree, mesh: Mesh):
    """Returns shapes, types and sharding of arrays that every device holds whole, of a tree of arrays or of their shapes."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated(mesh)), tree)


def everywhere(tree, mesh: Mesh):
    """Puts arrays, the same ones in every process, whole on every device."""
    if jax.process_count() == 1:
        return jax.device_put(tree, replicated(mesh))

    def put(leaf):  # an array of one process's device cannot be moved to those of another, but one of the host can
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        held = np.asarray(leaf)
        return jax.make_array_from_callback(held.shape, replicated(mesh), lambda part: held[part])

    return jax.tree.map(put, tree)


def over_devices(block, mesh: Mesh):
    """Maps block(shared, mine) over the devices: `shared` is replicated, `mine` and the result are split along axis 0."""
    if mesh.size == 1:
        return block
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(block, mesh=mesh, in_specs=(whole, split), out_specs=split, check_vma=False)


def deal(ids: jax.Array, load: jax.Array, num_clients: int, devices: int, width: int) -> Cohort:
    """Deals the selected clients to device queues, longest first, in chunks of `width` clients of like size.

    Args: ids [k] in order of selection; load [k] float, any number proportional to a client's work.
    Returns slots [S]: device d trains slots d * S / devices onwards; S >= k is static and a multiple of devices * width.
    Longest-processing-time-first keeps the queues within one chunk of each other; queues are a little longer than even shares
    so that one long client can be balanced by many short ones. With one device the cohort is only sorted.
    """
    chunks = -(-ids.size // width)
    even = -(-chunks // devices)
    length = min(chunks, even + 8) if devices > 1 else even  # chunks in one queue
    rank = jnp.argsort(-load, stable=True).astype(jnp.int32)
    cost = jnp.pad(load[rank], (0, chunks * width - ids.size)).reshape(chunks, width)[:, 0]

    def next_chunk(queues, chunk_cost):
        total, count = queues
        device = jnp.argmin(jnp.where(count < length, total, jnp.inf))
        return (total.at[device].add(chunk_cost), count.at[device].add(1)), device * length + count[device]

    if devices > 1:
        empty = (jnp.zeros(devices), jnp.zeros(devices, jnp.int32))
        _, place = jax.lax.scan(next_chunk, empty, cost)
    else:
        place = jnp.arange(chunks)
    slot = (place[:, None] * width + jnp.arange(width)).reshape(-1)[: ids.size]
    slots = devices * length * width
    return Cohort(
        ids=jnp.full(slots, num_clients, jnp.int32).at[slot].set(ids[rank]),
        rank=jnp.full(slots, ids.size, jnp.int32).at[slot].set(rank),
    )
