"""SGD in sample space: the same local training, without the kernel of a dense first
layer in the loop.

Every gradient of that kernel W [F, H] is X_b^T g, a combination of the client's own
samples; weight decay and the proximal term only scale W. So after any number of steps
W = W_0 + V with V = s W_0 + X^T D: a scalar s and a row of D [n, H] per sample are
enough. G = X X^T and Z = X W_0 are made once; a step then needs X_b V = s Z_b + G_b D
[B, H] and no product over the F features. For a client of n samples that is 2 B n H
operations per step instead of 4 B F H, and W itself is neither read nor written. With
momentum the velocity of W has the same form, s_u W_0 + X^T U.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.client import lanes
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local, Training, count_steps
from fedjax_cfl.client.objective import Objective, ObjectiveFn, pull_back
from fedjax_cfl.data.federated import gather
from fedjax_cfl.types import FederatedData, FirstLayer, Params, Task

# samples: steps of a smaller size take as long, and every size is compiled by itself
MIN_DUAL_SAMPLES = 64
# operations: about what a step and a client cost in addition to their matrix products
STEP_OVERHEAD, CLIENT_OVERHEAD = 6e5, 4e7
# operations of a step on the kernel, below which saving them saves no time
MIN_KERNEL_OPERATIONS = STEP_OVERHEAD / 4
MATMUL_PRECISION = lax.Precision.HIGHEST  # every step uses G and Z again


def has_dual_form(task: Task, objective: ObjectiveFn) -> bool:
    """Returns whether training on this objective has a sample-space form."""
    return (
        task.first_layer is not None
        and isinstance(objective, Objective)
        and objective.direction is None
        and objective.center is None
        and objective.loss == (task.sample_loss or task.loss)
    )


def count_fixed_operations(size: int, features: int, hidden: int) -> int:
    """Returns the operations outside of the steps of a client of `size` samples: G, Z and
    X^T D.
    """
    return 2 * size**2 * features + 4 * size * features * hidden


def is_dual_cheaper(size: int, features: int, hidden: int, batch: int, steps: int) -> bool:
    """Returns whether sample space takes less than 0.7 times the operations of SGD on the
    kernel itself, for `steps` steps on `size` samples.

    0.7, because its gathers and scatters are slower than matrix products. It never is
    for a kernel so small that the overhead of a step costs most.

    Args: `size` is the client's number of samples; `features` and `hidden` are F and H, the
    shape of the first layer's kernel; `batch` is B, the samples of a step; `steps` are the
    local steps that the client takes.
    """
    directly = 4 * batch * features * hidden
    return (
        directly >= MIN_KERNEL_OPERATIONS
        and count_fixed_operations(size, features, hidden) + steps * 2 * batch * size * hidden
        < 0.7 * steps * directly
    )


def lane_seconds(size: int, features: int, hidden: int, batch: int, steps: int) -> float:
    """Returns the seconds of a lane in a step in sample space, for a client of `size` samples
    that takes `steps` steps; its G, Z and X^T D included.

    Args: as those of `is_dual_cheaper`.
    """
    moved = 4 * (size * hidden + batch * size + 3 * batch * hidden) / lanes.BYTES_PER_SECOND
    computed = 2 * batch * size * hidden / lanes.OPERATIONS_PER_SECOND
    fixed = count_fixed_operations(size, features, hidden) / lanes.OPERATIONS_PER_SECOND
    return max(moved, computed) + fixed / max(steps, 1)


def choose_lane_sizes(local: Local, capacity: int, features: int, hidden: int) -> list[int]:
    """Returns the size that training in sample space is compiled for where clients train in
    lanes: a list of one size, or of none.

    All clients train so if that saves 0.3 of a step's time. Otherwise only those up to the
    largest size for which a step saves more time than the launches of its kernels take: clients
    of two kinds run in two loops, one after the other. A lane's G has at most four times as many
    entries as the kernel, unless the smallest size has more.

    Args: `local` says how clients train; `capacity` is the most samples that one client holds;
    `features` and `hidden` are F and H, the shape of the first layer's kernel.
    """
    width, batch = local.execution.width, local.batch_size
    step = 5 * lanes.PRODUCT_SECONDS  # of a network with one hidden layer
    direct = max(
        3 * 4 * features * hidden / lanes.BYTES_PER_SECOND,
        6 * batch * features * hidden / lanes.OPERATIONS_PER_SECOND,
    )
    sizes = bucket_sizes(capacity)
    sizes = [size for size in sizes if size**2 <= 4 * features * hidden] or sizes[:1]
    saved = {}
    for size in sizes:
        seconds = lane_seconds(size, features, hidden, batch, count_steps(local, size))
        saved[size] = width * (direct - seconds)
    if sizes[-1] >= capacity and saved[sizes[-1]] > 0.3 * (step + width * direct):
        return sizes[-1:]
    return [size for size in sizes if size < capacity and saved[size] > step][-1:]


def dual_sizes(task: Task, objective: ObjectiveFn, local: Local, capacity: int) -> list[int]:
    """Returns the sizes, ascending, that training in sample space is compiled for; larger
    clients, of `capacity` samples at most, train directly.

    Args: `objective` is what a client minimises; `local` says how clients train; `capacity` is
    the most samples that one client holds.
    """
    first_layer = local.execution.first_layer
    if first_layer == "direct" or not has_dual_form(task, objective):
        return []
    assert task.first_layer is not None
    shape, batch, sizes = task.first_layer.shape, local.batch_size, bucket_sizes(capacity)
    if local.execution.executor == "lanes":
        if first_layer == "dual":
            return sizes[-1:]
        return choose_lane_sizes(local, capacity, *shape)
    fitting = [
        size
        for size in sizes
        if first_layer == "dual" or is_dual_cheaper(size, *shape, batch, count_steps(local, size))
    ]
    return [size for size in fitting if size >= MIN_DUAL_SAMPLES] or fitting[-1:]


def bucket_sizes(capacity: int) -> list[int]:
    """Returns the powers of two from 16 up to the first that holds `capacity` samples."""
    sizes = [16]
    while sizes[-1] < capacity:
        sizes.append(2 * sizes[-1])
    return sizes


def dual_client_cost(task: Task, sizes: list[int], local: Local, held: jax.Array) -> jax.Array:
    """Returns about how many operations [k] clients take, in sample space up to the largest of
    `sizes` and directly above it.

    Args: `sizes` are those of `dual_sizes`, ascending; `local` says how clients train; `held` [k]
    are their samples.
    """
    assert task.first_layer is not None
    (features, hidden), batch = task.first_layer.shape, local.batch_size
    branch = jnp.searchsorted(jnp.array(sizes), held, method="compare_all")
    fixed = jnp.array(
        [count_fixed_operations(size, features, hidden) for size in sizes] + [0], jnp.float32
    )
    each = jnp.array(
        [2 * batch * size * hidden for size in sizes] + [4 * batch * features * hidden], jnp.float32
    )
    steps = count_steps(local, held)
    return CLIENT_OVERHEAD + fixed[branch] + steps * (STEP_OVERHEAD + each[branch])


class DualProblem(NamedTuple):
    """What the steps of one client read and do not change."""

    first: FirstLayer
    training: Training
    y: jax.Array  # [n], the labels of its samples
    gram: jax.Array  # [n, n], G = X X^T
    z_start: jax.Array  # [n, H], Z = X W_0
    rest: Params  # the received model without the kernel
    mu: float | jax.Array | None  # weight of the proximal term, None if there is none
    decay: float  # weight decay of the kernel in every step: twice the model's L2, and `Local`'s


class Velocity(NamedTuple):
    """The velocity, with momentum: `rest` of the other parameters, and scale W_0 + X^T rows
    = u of the kernel.
    """

    rest: Params
    scale: jax.Array
    rows: jax.Array  # [n, H]


class Position(NamedTuple):
    """Where training is: `rest` are the other parameters, and V = scale W_0 + X^T rows."""

    rest: Params
    scale: jax.Array
    rows: jax.Array  # [n, H]
    velocity: Any  # a Velocity; () without momentum
    losses: tuple[jax.Array, jax.Array]  # sums of the first and the last epoch


class Batch(NamedTuple):
    """One mini-batch and its gradient."""

    at: jax.Array  # [B] int32, positions of its samples
    grad: Params  # of the other parameters
    g: jax.Array  # [B, H], of the kernel's outputs; the kernel's gradient is X_b^T g


def dual_loop(task: Task, training: Training, data: FederatedData, size: int) -> Loop:
    """Returns the SGD of one client in sample space, with the batches of `steps.direct_loop`: for
    up to `size` samples and a model with a dense first layer.

    Its result is (trained - start, loss sums [2] of the first and the last epoch, no rows).
    """
    assert task.first_layer is not None
    first, start, local, plan = task.first_layer, training.start, training.local, training.plan
    kernel = start[first.name]["kernel"]
    last = data.train.order.size - 1
    x, y = gather(data, data.train.order[jnp.minimum(training.first + jnp.arange(size), last)])
    inputs = jnp.where(jnp.arange(size)[:, None] < training.samples, first.inputs(x), 0.0)
    problem = DualProblem(
        first,
        training,
        y,
        gram=jnp.matmul(inputs, inputs.T, precision=MATMUL_PRECISION),
        z_start=jnp.matmul(inputs, kernel, precision=MATMUL_PRECISION),
        rest=drop_kernel(start, first.name),
        mu=training.objective.weight(training.client_extra),
        decay=2 * first.l2 + local.weight_decay,
    )

    def step(t, position: Position) -> Position:
        batch, losses = take_gradient(problem, t, position)
        advance = step_with_momentum if local.momentum else step_plainly
        return advance(problem, position, batch)._replace(losses=losses)

    zero, still = jnp.zeros(()), jnp.zeros_like(problem.z_start)
    velocity = ()
    if local.momentum:
        velocity = Velocity(jax.tree.map(jnp.zeros_like, problem.rest), zero, still)

    def end(position: Position) -> tuple[Params, jax.Array, dict]:
        delta = jax.tree.map(jnp.subtract, position.rest, problem.rest)
        combined = jnp.matmul(inputs.T, position.rows, precision=MATMUL_PRECISION)
        delta[first.name]["kernel"] = position.scale * kernel + combined
        return delta, jnp.stack(position.losses), {}

    return Loop(plan.steps, Position(problem.rest, zero, still, velocity, (zero, zero)), step, end)


def drop_kernel(params: Params, name: str) -> Params:
    """Returns the parameters without the kernel of layer `name`."""
    return params | {
        name: {leaf: value for leaf, value in params[name].items() if leaf != "kernel"}
    }


def take_gradient(
    problem: DualProblem, t: jax.Array, position: Position
) -> tuple[Batch, tuple[jax.Array, jax.Array]]:
    """Returns the mini-batch of step t with its gradient, and the loss sums after it."""
    training = problem.training
    local, plan = training.local, training.plan
    at, real = plan.draw_samples(t, training.samples, local, training.table)
    z = (1 + position.scale) * problem.z_start[at] + problem.gram[at] @ position.rows

    def batch_loss(rest, z):
        each = problem.first.loss(rest, z, problem.y[at], jax.random.fold_in(training.key, t))
        total = jnp.sum(jnp.where(real, each, 0.0))
        mean = total / jnp.sum(real) + problem.first.penalty(rest)
        if problem.mu is not None:
            mean = mean + pull_back(problem.mu, rest, problem.rest)
        return mean, total

    (_, total), (grad, g) = jax.value_and_grad(batch_loss, argnums=(0, 1), has_aux=True)(
        position.rest, z
    )
    if local.weight_decay:
        grad = jax.tree.map(lambda d, p: d + local.weight_decay * p, grad, position.rest)
    return Batch(at, grad, g), plan.add_loss(t, position.losses, total)


def pull_weight(problem: DualProblem) -> float | jax.Array:
    """Returns the weight of the proximal term, 0 if there is none."""
    return 0.0 if problem.mu is None else problem.mu


def step_plainly(problem: DualProblem, position: Position, batch: Batch) -> Position:
    """Takes one step: V' = keep V - lr (decay W_0 + X_b^T g)."""
    lr, decay = problem.training.lr, problem.decay
    rest, scale, rows, *_ = position
    rest = jax.tree.map(lambda p, d: p - lr * d, rest, batch.grad)
    if problem.mu is not None or decay > 0:
        keep = 1 - lr * (decay + pull_weight(problem))
        scale, rows = keep * scale - lr * decay, keep * rows
    rows = rows.at[batch.at].add(-lr * batch.g)
    return position._replace(rest=rest, scale=scale, rows=rows)


def step_with_momentum(problem: DualProblem, position: Position, batch: Batch) -> Position:
    """Takes one step with momentum: V' = V - lr u', where u' = momentum u + decay W_0 +
    (decay + mu) V + A, and A = X_b^T g.
    """
    training, decay = problem.training, problem.decay
    lr, beta, pull = training.lr, training.local.momentum, decay + pull_weight(problem)
    rest, scale, rows, velocity, _ = position
    new = jax.tree.map(lambda u, d: beta * u + d, velocity.rest, batch.grad)
    scale_u = beta * velocity.scale + decay + pull * scale
    rows_u = (beta * velocity.rows + pull * rows).at[batch.at].add(batch.g)
    return position._replace(
        rest=jax.tree.map(lambda p, u: p - lr * u, rest, new),
        scale=scale - lr * scale_u,
        rows=rows - lr * rows_u,
        velocity=Velocity(new, scale_u, rows_u),
    )
