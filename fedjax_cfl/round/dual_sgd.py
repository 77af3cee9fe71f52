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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.round.local import Local, StepPlan, take_rows
from fedjax_cfl.round.objective import Objective, ObjectiveFn, penalty
from fedjax_cfl.round.ragged_loop import ragged_fori_loop
from fedjax_cfl.types import FirstLayer, Key, Params, Task

# samples: steps of a smaller size take as long, and every size is compiled by itself
MIN_DUAL_SAMPLES = 64
# operations: about what a step and a client cost besides their matrix products
STEP_OVERHEAD, CLIENT_OVERHEAD = 6e5, 4e7
# operations of a step on the kernel, below which saving them saves no time
MIN_KERNEL_OPERATIONS = STEP_OVERHEAD / 4
MATMUL_PRECISION = lax.Precision.HIGHEST  # every step uses G and Z again


def has_dual_form(task: Task, objective: ObjectiveFn) -> bool:
    """Returns whether training on this objective has a sample-space form."""
    return (
        task.first_layer is not None
        and isinstance(objective, Objective)
        and objective.loss == task.loss
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
    """
    directly = 4 * batch * features * hidden
    return (
        directly >= MIN_KERNEL_OPERATIONS
        and count_fixed_operations(size, features, hidden) + steps * 2 * batch * size * hidden
        < 0.7 * steps * directly
    )


def dual_sizes(
    task: Task,
    objective: ObjectiveFn,
    wanted: str,
    buckets: list[int],
    batch: int,
    steps: Callable[[int], int],
) -> list[int]:
    """Returns the sizes, ascending, that training in sample space is compiled for; larger
    clients train directly.

    `wanted` is `Local.first_layer`; `steps(size)` is the most steps that a client of that
    size takes.
    """
    if wanted == "direct" or task.first_layer is None or not has_dual_form(task, objective):
        return []
    shape = task.first_layer.shape
    fitting = [
        size
        for size in buckets
        if wanted == "dual" or is_dual_cheaper(size, *shape, batch, steps(size))
    ]
    return [size for size in fitting if size >= MIN_DUAL_SAMPLES] or fitting[-1:]


def dual_client_cost(
    task: Task, sizes: list[int], batch: int, held: jax.Array, steps: jax.Array
) -> jax.Array:
    """Returns about how many operations [k] clients of `held` [k] samples take for `steps`
    [k] steps, in sample space up to the largest of `sizes`.
    """
    assert task.first_layer is not None
    features, hidden = task.first_layer.shape
    branch = jnp.searchsorted(jnp.array(sizes), held, method="compare_all")
    fixed = jnp.array(
        [count_fixed_operations(size, features, hidden) for size in sizes] + [0], jnp.float32
    )
    each = jnp.array(
        [2 * batch * size * hidden for size in sizes] + [4 * batch * features * hidden], jnp.float32
    )
    return CLIENT_OVERHEAD + fixed[branch] + steps * (STEP_OVERHEAD + each[branch])


class Samples(NamedTuple):
    """One client's samples, up to n of them, and the order of its steps."""

    x: jax.Array  # [n, ...]
    y: jax.Array  # [n]
    held: jax.Array  # [] int32, the number of real ones
    order: jax.Array  # [passes * n], their positions, in the order of each pass


class DualProblem(NamedTuple):
    """What the steps of one client read and do not change."""

    first: FirstLayer
    objective: Objective
    local: Local
    samples: Samples
    plan: StepPlan
    client_extra: Any
    key: Key  # folded with the step, for dropout
    gram: jax.Array  # [n, n], G = X X^T
    z_start: jax.Array  # [n, H], Z = X W_0
    square: jax.Array  # [], ||W_0||^2
    rest: Params  # the received model without the kernel
    mu: float | jax.Array  # weight of the proximal term, 0 if there is none
    decay: float  # weight decay of the kernel in every step: twice the model's L2, and `Local`'s


class Velocity(NamedTuple):
    """The velocity, with momentum: `rest` of the other parameters, and scale W_0 + X^T rows
    = u of the kernel.
    """

    rest: Params
    scale: jax.Array
    rows: jax.Array  # [n, H]
    products: tuple[jax.Array, ...]  # <u, u>, <u, V>, <u, W_0>


class Position(NamedTuple):
    """Where training is: `rest` are the other parameters, and V = scale W_0 + X^T rows."""

    rest: Params
    scale: jax.Array
    rows: jax.Array  # [n, H]
    products: tuple[jax.Array, ...]  # <V, V>, <V, W_0>
    velocity: Any  # a Velocity; () without momentum
    losses: jax.Array  # [2], loss sums of the first and the last epoch


class Batch(NamedTuple):
    """One mini-batch and its gradient."""

    at: jax.Array  # [B] int32, positions of its samples
    gram: jax.Array  # [B, n]
    z_start: jax.Array  # [B, H]
    change: jax.Array  # [B, H], X_b V
    grad: Params  # of the other parameters
    g: jax.Array  # [B, H], of the kernel's outputs; the kernel's gradient is X_b^T g


def train_dual(
    task: Task,
    objective: Objective,
    local: Local,
    samples: Samples,
    plan: StepPlan,
    start: Params,
    client_extra: Any,
    key: Key,
) -> tuple[Params, jax.Array]:
    """Returns (trained - start, loss sums [2] of the first and the last epoch) of one
    client.
    """
    assert task.first_layer is not None
    first = task.first_layer
    kernel = start[first.name]["kernel"]
    real = jnp.arange(samples.y.shape[0])[:, None] < samples.held
    inputs = jnp.where(real, first.inputs(samples.x), 0.0)
    mu = objective.weight(client_extra)
    problem = DualProblem(
        first,
        objective,
        local,
        samples,
        plan,
        client_extra,
        key,
        gram=jnp.matmul(inputs, inputs.T, precision=MATMUL_PRECISION),
        z_start=jnp.matmul(inputs, kernel, precision=MATMUL_PRECISION),
        square=jnp.sum(kernel**2),
        rest=drop_kernel(start, first.name),
        mu=0.0 if mu is None else mu,
        decay=2 * first.l2 + local.weight_decay,
    )

    def step(t, position: Position) -> Position:
        batch, losses = take_gradient(problem, t, position)
        advance = step_with_momentum if local.momentum else step_plainly
        return advance(problem, position, batch)._replace(losses=losses)

    zero, still = jnp.zeros(()), jnp.zeros_like(problem.z_start)
    velocity = ()
    if local.momentum:
        velocity = Velocity(jax.tree.map(jnp.zeros_like, problem.rest), zero, still, (zero,) * 3)
    begin = Position(problem.rest, zero, still, (zero, zero), velocity, jnp.zeros(2))
    end = ragged_fori_loop(plan.steps, step, begin)
    delta = jax.tree.map(jnp.subtract, end.rest, problem.rest)
    combined = jnp.matmul(inputs.T, end.rows, precision=MATMUL_PRECISION)
    delta[first.name]["kernel"] = end.scale * kernel + combined
    return delta, end.losses


def drop_kernel(params: Params, name: str) -> Params:
    """Returns the parameters without the kernel of layer `name`."""
    return params | {
        name: {leaf: value for leaf, value in params[name].items() if leaf != "kernel"}
    }


def take_gradient(
    problem: DualProblem, t: jax.Array, position: Position
) -> tuple[Batch, jax.Array]:
    """Returns the mini-batch of step t with its gradient, and the loss sums [2] after it."""
    samples, local, plan = problem.samples, problem.local, problem.plan
    epoch, _ = plan.locate_batch(t, local.batch_size)
    size = samples.y.shape[0]
    places, real = plan.locate_samples(t, samples.held, size, local)
    at = take_rows(samples.order, places, local)
    gram_b, z_b = problem.gram[at], problem.z_start[at]
    change = position.scale * z_b + gram_b @ position.rows
    vv, vw = position.products
    # the kernel's part of the objective of each sample
    kernel_terms = problem.first.l2 * (problem.square + 2 * vw + vv) + 0.5 * problem.mu * vv

    def batch_loss(rest, z):
        each = problem.first.loss(rest, z, samples.y[at], jax.random.fold_in(problem.key, t))
        if problem.objective.weight(problem.client_extra) is not None:
            each = each + penalty(problem.mu, rest, problem.rest)
        total = jnp.sum(jnp.where(real, each, 0.0))
        return total / jnp.sum(real), total

    (_, total), (grad, g) = jax.value_and_grad(batch_loss, argnums=(0, 1), has_aux=True)(
        position.rest, z_b + change
    )
    if local.weight_decay:
        grad = jax.tree.map(lambda d, p: d + local.weight_decay * p, grad, position.rest)
    total = total + jnp.sum(real) * kernel_terms
    losses = position.losses + total * jnp.stack([epoch == 0, epoch == plan.last_epoch])
    return Batch(at, gram_b, z_b, change, grad, g), losses


def step_plainly(problem: DualProblem, position: Position, batch: Batch) -> Position:
    """Takes one step: V' = keep V - lr (decay W_0 + X_b^T g)."""
    lr, decay, g = problem.local.lr, problem.decay, batch.g
    rest, scale, rows, (vv, vw), *_ = position
    rest = jax.tree.map(lambda p, d: p - lr * d, rest, batch.grad)
    if problem.objective.weight(problem.client_extra) is not None or decay > 0:
        keep = 1 - lr * (decay + problem.mu)
        w = decay * problem.square + jnp.sum(batch.z_start * g)  # <W_0, decay W_0 + X_b^T g>
        v = decay * vw + jnp.sum(batch.change * g)  # <V, decay W_0 + X_b^T g>
        # ||decay W_0 + X_b^T g||^2
        gg = decay * (w + jnp.sum(batch.z_start * g)) + jnp.sum((batch.gram[:, batch.at] @ g) * g)
        vv, vw = keep**2 * vv - 2 * keep * lr * v + lr**2 * gg, keep * vw - lr * w
        scale, rows = keep * scale - lr * decay, keep * rows
    rows = rows.at[batch.at].add(-lr * g)
    return position._replace(rest=rest, scale=scale, rows=rows, products=(vv, vw))


def step_with_momentum(problem: DualProblem, position: Position, batch: Batch) -> Position:
    """Takes one step with momentum: V' = V - lr u', where u' = momentum u + decay W_0 +
    (decay + mu) V + A, and A = X_b^T g.
    """
    lr, decay, g = problem.local.lr, problem.decay, batch.g
    beta, pull = problem.local.momentum, problem.decay + problem.mu
    rest, scale, rows, (vv, vw), velocity, _ = position
    uu, uv, uw = velocity.products
    au = jnp.sum((velocity.scale * batch.z_start + batch.gram @ velocity.rows) * g)
    aw, av = jnp.sum(batch.z_start * g), jnp.sum(batch.change * g)
    aa = jnp.sum((batch.gram[:, batch.at] @ g) * g)
    # <u' - momentum u, .>
    step_w = aw + decay * problem.square + pull * vw
    step_v = av + decay * vw + pull * vv
    step_u = au + decay * uw + pull * uv
    step_step = (
        aa
        + decay * (decay * problem.square + 2 * aw)
        + pull * (pull * vv + 2 * av + 2 * decay * vw)
    )
    uu = beta**2 * uu + 2 * beta * step_u + step_step
    uv, uw = beta * uv + step_v, beta * uw + step_w
    new = jax.tree.map(lambda u, d: beta * u + d, velocity.rest, batch.grad)
    scale_u = beta * velocity.scale + decay + pull * scale
    rows_u = (beta * velocity.rows + pull * rows).at[batch.at].add(g)
    return position._replace(
        rest=jax.tree.map(lambda p, u: p - lr * u, rest, new),
        scale=scale - lr * scale_u,
        rows=rows - lr * rows_u,
        products=(vv - 2 * lr * uv + lr**2 * uu, vw - lr * uw),
        velocity=Velocity(new, scale_u, rows_u, (uu, uv - lr * uu, uw)),
    )
