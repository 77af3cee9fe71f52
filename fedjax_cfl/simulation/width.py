"""How many clients train side by side on an accelerator: `local.width=auto`.

A step of all lanes takes the time of its kernels, one after another, and that of each lane: to
move its numbers through the memory, or to compute, whichever is longer. The number of steps is
found by simulating the queues of a few rounds. With more lanes than (steps of all clients) /
(steps of the longest client), some are idle for long, and cost as much as busy ones. If a model
is so large that a lane costs more than the kernels themselves, more lanes gain little. So the
smallest number within 5 % of the best is taken, which saves memory. Free memory is a bound.
"""

import functools
import heapq
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_cfl import sharding
from fedjax_cfl.client.lanes import BYTES_PER_SECOND, OPERATIONS_PER_SECOND, PRODUCT_SECONDS
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import format_bytes
from fedjax_cfl.simulation import memory
from fedjax_cfl.types import FederatedData, Task

NEAR_BEST = 1.05
MOST_PLAYED = 500  # clients of a round that is played; more of them are alike


def choose_width(
    chosen: dict[str, Any], task: Task, data: FederatedData, mesh: Mesh, cohort: int
) -> int:
    """Returns how many clients train side by side on a device.

    Args: `chosen`, the settings `local`; `cohort`, the clients of a round on all devices.
    Raises InputError for a width that does not fit into the memory of a device.
    """
    asked: Any = chosen["width"]
    executor = chosen["executor"]
    if asked == "auto" and (sharding.is_cpu(mesh) if executor == "auto" else executor != "lanes"):
        return 1
    if asked == 1 or executor not in ("auto", "lanes"):
        return int(asked)
    slots = -(-min(cohort, data.num_clients) // mesh.size)
    most = count_fitting(chosen, task, data, mesh, slots)
    if asked == "auto":
        steps = count_client_steps(chosen, np.asarray(data.train.size))
        step = step_seconds(chosen, task, data)
        return min(best_width(steps, slots, mesh.size, step), most)
    if min(asked, slots) > max(most, 1):
        raise InputError(
            f"local.width={asked}: {format_bytes(memory.available_bytes(mesh) or 0)} hold the data"
            f" and {most} clients side by side; use width={most} or auto"
        )
    return asked


def count_client_steps(chosen: dict[str, Any], samples: np.ndarray) -> np.ndarray:
    """Returns the local steps [K] of clients of so many `samples` [K]."""
    each = -(-samples // chosen["batch_size"])
    return (samples > 0) * chosen["steps"] if chosen.get("steps") else chosen["epochs"] * each


class StepSeconds(NamedTuple):
    """The seconds of a step: those of all lanes together, and those that each lane adds."""

    all: float
    lane: float


def best_width(steps: np.ndarray, slots: int, devices: int, step: StepSeconds) -> int:
    """Returns the smallest number of lanes that takes about the least time.

    `steps` [K] of all clients; `slots` clients of a round on each of the devices.
    """
    few = max(1, min(slots, MOST_PLAYED))
    rng = np.random.RandomState(0)
    drawn = [rng.choice(steps, min(few * devices, steps.size), False)[::devices] for _ in range(8)]
    rounds = tuple(tuple(sorted(each.tolist(), reverse=True)) for each in drawn)
    return round(find_width(rounds, step._replace(lane=step.lane * slots / few)) * slots / few)


@functools.cache  # asked again for every part of a run, and by its summary
def find_width(rounds: tuple[tuple[int, ...], ...], step: StepSeconds) -> int:
    """Returns the number of lanes for rounds of clients of so many steps each, longest first."""
    most = len(rounds[0])
    tried = {-(-most // parts) for parts in range(1, 9)}
    tried |= {min(most, round(1.15**n)) for n in range(50)}
    seconds = {
        lanes: sum(count_lane_steps(steps, lanes) for steps in rounds)
        * (step.all + step.lane * lanes)
        for lanes in tried
    }
    return min(n for n in tried if seconds[n] <= NEAR_BEST * min(seconds.values()))


def count_lane_steps(steps: tuple[int, ...], lanes: int) -> int:
    """Returns the steps until clients of so many steps, longest first, are done."""
    ends = [0] * lanes
    for each in steps:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def step_seconds(chosen: dict[str, Any], task: Task, data: FederatedData) -> StepSeconds:
    """Returns what a step takes: its kernels, by the gradient's products of matrices; and of a
    lane, reading its model and reading and writing it for the update, or computing the gradient,
    whichever is longer.
    """
    lowered = lower_gradient(task, *batch_shapes(chosen, data))
    products = len(re.findall(r"stablehlo\.(?:dot_general|convolution)", lowered.as_text()))
    operations = float((lowered.cost_analysis() or {}).get("flops", 0.0))
    model = memory.tree_bytes(jax.eval_shape(task.init, jax.random.key(0)))
    moved = (5 if chosen.get("momentum") else 3) * model
    lane = max(moved / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)
    return StepSeconds(max(products, 1) * PRODUCT_SECONDS, lane)


def count_fitting(
    chosen: dict[str, Any], task: Task, data: FederatedData, mesh: Mesh, slots: int
) -> int:
    """Returns how many lanes fit: half of the memory that data and updates leave.

    Args: `chosen` are the settings `local`; `slots` is the clients of a round on each device,
    the most that are returned.
    """
    has = memory.available_bytes(mesh)
    if has is None:
        return slots
    taken = memory.tree_bytes(
        [leaf for leaf in jax.tree.leaves(data) if isinstance(leaf, jax.Array)]
    )
    taken += slots * memory.tree_bytes(jax.eval_shape(task.init, jax.random.key(0)))
    return max(1, min(slots, (has - taken) // 2 // lane_bytes(chosen, task, data)))


def lane_bytes(chosen: dict[str, Any], task: Task, data: FederatedData) -> int:
    """Returns about the bytes of a lane: its model, where it started, its gradient (and velocity),
    and what a step needs.
    """
    model = memory.tree_bytes(jax.eval_shape(task.init, jax.random.key(0)))
    gram = 8 * data.max_client_samples**2 if chosen["first_layer"] == "dual" else 0  # and a copy
    copies = 4 if chosen.get("momentum") else 3
    return copies * model + gram + step_bytes(task, *batch_shapes(chosen, data))


def batch_shapes(chosen: dict[str, Any], data: FederatedData) -> tuple[Any, Any]:
    """Returns the shapes of the samples and labels of a mini-batch."""
    size = min(chosen["batch_size"], data.max_client_samples)
    x, y = (jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) for leaf in (data.x, data.y))
    return x, y


@functools.cache  # asked again for every part of a run, and by its summary
def lower_gradient(task: Task, x: Any, y: Any) -> jax.stages.Lowered:
    """Returns the gradient of a mini-batch, traced; `x` and `y` are shapes."""
    model = jax.eval_shape(task.init, jax.random.key(0))
    gradient = jax.grad(lambda model, x, y: task.loss(model, x, y, jax.random.key(0)).mean())
    return jax.jit(gradient).lower(model, x, y)


@functools.cache
def step_bytes(task: Task, x: Any, y: Any) -> int:
    """Returns the bytes that a compiled gradient needs in addition to model, gradient and batch."""
    return memory.work_bytes(lower_gradient(task, x, y).compile())
