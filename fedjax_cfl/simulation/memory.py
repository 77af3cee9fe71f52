"""What a run will take, known before round 0 from its arrays and its compiled programs."""

import math
import os
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_cfl import sharding
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import format_bytes
from fedjax_cfl.types import FederatedData, State

FEWER_ROWS = "fewer clients (dataset.clients), a smaller model, or personal=none"
REMEDIES = {  # by what takes most of a device's memory
    "host_rows": FEWER_ROWS,
    "data": "fewer clients or samples (dataset.clients)",
    "models": "fewer groups (algorithm.m) or a smaller model",
    "client_memory": (
        "fewer clients (dataset.clients), a smaller model, or an algorithm that keeps nothing per"
        " client"
    ),
    "work": (
        "fewer clients at a time (clients_per_round, local.width), fewer models of a mixture"
        " (algorithm.m) or a smaller model"
    ),
}


def tree_bytes(tree: Any, of_device: bool = False) -> int:
    """Returns the bytes of a pytree of arrays or of their shapes; `of_device`: those that each
    device holds, by the sharding of its leaves.
    """

    def shape_of(leaf: Any) -> tuple[int, ...]:
        return leaf.sharding.shard_shape(leaf.shape) if of_device and leaf.sharding else leaf.shape

    return sum(
        math.prod(shape_of(leaf)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def plan_memory(
    state: State, data: FederatedData, programs: Any, host_rows: int = 0
) -> dict[str, int]:
    """Returns the bytes that each device holds at once: data, models, what is kept per
    client, and the work of the largest program; and `host_rows`, those of what clients keep on the
    host, if there are any. `state` has shardings, see `carry_shapes`.
    """
    work = max(map(work_bytes, programs), default=0)
    kept = {"host_rows": host_rows} if host_rows else {}
    return kept | {
        "data": tree_bytes(data),
        "models": tree_bytes((state.groups, state.server), of_device=True),
        "client_memory": tree_bytes((state.memory, state.rows), of_device=True),
        "work": work,
    }


def work_bytes(program: Any) -> int:
    """Returns the bytes that a compiled program needs in addition to arguments and results."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes if analysis else 0


def machine_bytes() -> int:
    """Returns the bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes(mesh: Mesh) -> int | None:
    """Returns the bytes of memory that one device has, None where the backend does not
    say; CPU devices share the machine's.
    """
    device = mesh.devices.flat[0]
    if sharding.is_cpu(mesh):
        return machine_bytes() // len(mesh.local_devices)
    return (device.memory_stats() or {}).get("bytes_limit")


def check_host_rows(needed: int) -> None:
    """Raises InputError if what clients keep on the host, so many bytes, is more than it has."""
    host = machine_bytes()
    if needed > host:
        raise InputError(
            f"memory: what clients keep on the host (resident=host) needs {format_bytes(needed)},"
            f" and the machine has {format_bytes(host)}; use {FEWER_ROWS}"
        )


def check_memory(planned: dict[str, int], mesh: Mesh) -> None:
    """Raises InputError if the plan cannot fit, naming its largest part and what to turn. CPU
    devices share the host's memory.
    """
    share = planned.get("host_rows", 0) // len(mesh.local_devices) if sharding.is_cpu(mesh) else 0
    planned = {name: value for name, value in planned.items() if name != "host_rows"}
    planned |= {"host_rows": share} if share else {}
    has = available_bytes(mesh)
    if has is None or sum(planned.values()) <= has:
        return
    parts = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(value)}" for name, value in planned.items()
    )
    largest = max(planned, key=lambda name: planned[name])
    total = format_bytes(sum(planned.values()))
    raise InputError(
        f"memory: each device needs {total} ({parts}) and has {format_bytes(has)}; use"
        f" {REMEDIES[largest]}, or fewer devices="
    )


def peak_memory_bytes() -> int:
    """Returns the most memory used so far: the accelerator's if there is one, else the
    process's.
    """
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "peak_bytes_in_use" in stats:
        return sum(device.memory_stats()["peak_bytes_in_use"] for device in jax.local_devices())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
