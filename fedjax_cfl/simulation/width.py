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

from fedjax_cfl.client.lanes import BYTES_PER_SECOND, OPERATIONS_PER_SECOND, PRODUCT_SECONDS
from fedjax_cfl.client.local import Local, count_steps
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import format_bytes
from fedjax_cfl.simulation import memory
from fedjax_cfl.types import FederatedData, Task

NEAR_BEST = 1.05
MOST_PLAYED = 500  # clients of a round that is played; more of them are alike


def choose_width(
    local: Local, task: Task, data: FederatedData, cohort: int, asked: int | None = None
) -> int:
    """Returns how many clients train side by side on a device.

    Args: `local` says how they train, and where; `cohort` is the number of clients of a round on
    all devices; `asked` is the width that was asked for, None: the best one.
    Raises InputError for a width that does not fit into the memory of a device.
    """
    mesh = local.execution.mesh
    if local.execution.executor != "lanes" or asked == 1:
        return 1
    slots = -(-min(cohort, data.num_clients) // mesh.size)
    most = count_fitting(local, task, data, slots)
    if asked is None:
        samples = data.train.size
        steps = np.asarray((samples > 0) * count_steps(local, samples))
        return min(best_width(steps, slots, mesh.size, step_seconds(local, task, data)), most)
    if min(asked, slots) > max(most, 1):
        raise InputError(
            f"local.width={asked}: {format_bytes(memory.available_bytes(mesh) or 0)} hold the data"
            f" and {most} clients side by side; use width={most} or auto"
        )
    return asked


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


def step_seconds(local: Local, task: Task, data: FederatedData) -> StepSeconds:
    """Returns what a step takes: its kernels, by the gradient's products of matrices; and of a
    lane, reading its model and reading and writing it for the update, or computing the gradient,
    whichever is longer.
    """
    lowered = lower_gradient(task, *batch_shapes(local, data))
    products = len(re.findall(r"stablehlo\.(?:dot_general|convolution)", lowered.as_text()))
    operations = float((lowered.cost_analysis() or {}).get("flops", 0.0))
    model = memory.tree_bytes(jax.eval_shape(task.init, jax.random.key(0)))
    moved = (5 if local.momentum else 3) * model
    lane = max(moved / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)
    return StepSeconds(max(products, 1) * PRODUCT_SECONDS, lane)


def count_fitting(local: Local, task: Task, data: FederatedData, slots: int) -> int:
    """Returns how many lanes fit: half of the memory that data and updates leave; at most `slots`,
    the clients of a round on each device.
    """
    has = memory.available_bytes(local.execution.mesh)
    if has is None:
        return slots
    arrays = [leaf for leaf in jax.tree.leaves(data) if isinstance(leaf, jax.Array)]
    taken = memory.tree_bytes(arrays)
    taken += slots * memory.tree_bytes(jax.eval_shape(task.init, jax.random.key(0)))
    return max(1, min(slots, (has - taken) // 2 // lane_bytes(local, task, data)))


def lane_bytes(local: Local, task: Task, data: FederatedData) -> int:
    """Returns about the bytes of a lane: its model, where it started, its gradient (and velocity),
    and what a step needs.
    """
    model = memory.tree_bytes(jax.eval_shape(task.init, jax.random.key(0)))
    is_dual = local.execution.first_layer == "dual"
    gram = 8 * data.max_client_samples**2 if is_dual else 0  # and a copy
    copies = 4 if local.momentum else 3
    return copies * model + gram + step_bytes(task, *batch_shapes(local, data))


def batch_shapes(local: Local, data: FederatedData) -> tuple[Any, Any]:
    """Returns the shapes of the samples and labels of a mini-batch."""
    size = min(local.batch_size, data.max_client_samples)
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
