"""SGD in sample space: the exact same local training, without touching the kernel of a
dense first layer in the loop.

Every gradient of that kernel W [F, H] is X_b^T g, a combination of the client's own
samples, and weight decay and the proximal term only scale W. So after any number of
steps W = W_0 + V with V = s W_0 + X^T D: a scalar s and a row of D [n, H] per sample
say all, and with G = X X^T and Z = X W_0, made once, a step needs X_b V = s Z_b + G_b D
[B, H] instead of products with F. For a client of n samples that is 2 B n H operations
a step instead of 4 B F H, and W itself is neither read nor written. With momentum the
velocity of W is of the same form, s_u W_0 + X^T U.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.round.objective import Objective, penalty
from fedjax_cfl.round.ragged_loop import ragged_fori_loop
from fedjax_cfl.types import Task

MIN_DUAL_SAMPLES = (
    64  # samples: steps of smaller clients take no longer, and each size is compiled anew
)
STEP_OVERHEAD, CLIENT_OVERHEAD = (
    6e5,
    4e7,
)  # operations that take as long as what a step and a visit cost besides their products, about
MIN_KERNEL_OPERATIONS = (
    STEP_OVERHEAD / 4
)  # operations of a step on the kernel, below which saving them saves no time
MATMUL_PRECISION = lax.Precision.HIGHEST  # G and Z are reused by every step


class Velocity(NamedTuple):
    """With momentum, what the last step was made of: u of the other parameters, and U =
    scale W_0 + X^T rows of the kernel.
    """

    rest: Any
    scale: jax.Array
    rows: jax.Array  # [n, H]
    products: tuple[jax.Array, ...]  # <U, U>, <U, V>, <U, W_0>


def has_dual_form(task: Task, objective) -> bool:
    """Returns whether this training has a sample-space form."""
    return (
        task.first_layer is not None
        and isinstance(objective, Objective)
        and objective.loss == task.loss
    )


def count_fixed_operations(size: int, features: int, hidden: int) -> int:
    """Returns the operations before and after the steps of a client of `size` samples:
    G, Z and X^T D.
    """
    return 2 * size**2 * features + 4 * size * features * hidden


def is_dual_cheaper(size: int, features: int, hidden: int, batch: int, steps: int) -> bool:
    """Returns whether `steps` steps take less than 0.7 times the operations that SGD on
    the kernel itself takes, on `size` samples.

    0.7: its gathers and scatters are slower than matrix products. Never for a kernel so
    small that a step costs its overhead anyway.
    """
    directly = 4 * batch * features * hidden
    return (
        directly >= MIN_KERNEL_OPERATIONS
        and count_fixed_operations(size, features, hidden) + steps * 2 * batch * size * hidden
        < 0.7 * steps * directly
    )


def dual_sizes(
    task: Task, objective, wanted: str, buckets: list[int], batch: int, steps
) -> list[int]:
    """Returns the sizes that training in sample space is compiled for, ascending;
    larger clients train directly.

    `wanted` is `Local.first_layer`; `steps(size)` the most steps that a client of that
    size takes.
    """
    if wanted == "direct" or not has_dual_form(task, objective):
        return []
    fitting = [
        size
        for size in buckets
        if wanted == "dual" or is_dual_cheaper(size, *task.first_layer.shape, batch, steps(size))
    ]
    return [size for size in fitting if size >= MIN_DUAL_SAMPLES] or fitting[-1:]


def dual_client_cost(task: Task, sizes: list[int], batch: int, held, steps):
    """Returns about the operations that training clients of `held` [k] samples for
    `steps` [k] steps takes, given `sizes`.
    """
    features, hidden = task.first_layer.shape
    way = jnp.searchsorted(jnp.array(sizes), held, method="compare_all")
    begin = jnp.array(
        [count_fixed_operations(size, features, hidden) for size in sizes] + [0], jnp.float32
    )
    each = jnp.array(
        [2 * batch * size * hidden for size in sizes] + [4 * batch * features * hidden], jnp.float32
    )
    return CLIENT_OVERHEAD + begin[way] + steps * (STEP_OVERHEAD + each[way])


def drop_kernel(params, name: str):
    """Returns the parameters without the kernel of layer `name`."""
    return params | {
        name: {leaf: value for leaf, value in params[name].items() if leaf != "kernel"}
    }


def train_dual(
    task: Task, objective: Objective, local, x, y, count, order, plan, start, client_extra, key
):
    """Returns (trained - start, loss sums [2] of the first and the last epoch) of one
    client of up to n samples.

    Args: `x` [n, ...], `y` [n] its samples, of which the first `count` are real;
    `order` [passes * n] the passes over them, as positions; `plan` an `sgd.StepPlan`;
    `start` the received model; `key` folded with the step for dropout.
    """
    first, lr, batch = task.first_layer, local.lr, local.batch_size
    size = y.shape[0]
    kernel = start[first.name]["kernel"]
    inputs = jnp.where(jnp.arange(size)[:, None] < count, first.inputs(x), 0.0)
    gram = jnp.matmul(inputs, inputs.T, precision=MATMUL_PRECISION)
    z_start = jnp.matmul(inputs, kernel, precision=MATMUL_PRECISION)
    square = jnp.sum(kernel**2)  # ||W_0||^2
    mu = objective.weight(client_extra)
    pulled = mu is not None or first.l2 > 0 or local.weight_decay > 0
    mu = 0.0 if mu is None else mu
    decay = 2 * first.l2 + local.weight_decay
    keep = 1 - lr * (decay + mu)
    rest_start = drop_kernel(start, first.name)

    def heavy(rest, scale, rows, products, velocity: Velocity, grad, batch):
        """One step with momentum: u' = momentum u + decay W_0 + (decay + mu) V + A and
        V' = V - lr u', where A = X_b^T g.
        """
        at, g, z_b, moved, gram_b = batch
        (vv, vw), (uu, uv, uw), beta, pull = products, velocity.products, local.momentum, decay + mu
        au = jnp.sum((velocity.scale * z_b + gram_b @ velocity.rows) * g)
        aw, av, aa = jnp.sum(z_b * g), jnp.sum(moved * g), jnp.sum((gram_b[:, at] @ g) * g)
        step_w, step_v = (
            aw + decay * square + pull * vw,
            av + decay * vw + pull * vv,
        )  # <u' - momentum u, .>
        step_u = au + decay * uw + pull * uv
        step_step = (
            aa + decay * (decay * square + 2 * aw) + pull * (pull * vv + 2 * av + 2 * decay * vw)
        )
        uu, uv, uw = (
            beta**2 * uu + 2 * beta * step_u + step_step,
            beta * uv + step_v,
            beta * uw + step_w,
        )
        new = jax.tree.map(lambda u, d: beta * u + d, velocity.rest, grad)
        scale_u, rows_u = (
            beta * velocity.scale + decay + pull * scale,
            (beta * velocity.rows + pull * rows).at[at].add(g),
        )
        rest = jax.tree.map(lambda p, u: p - lr * u, rest, new)
        products = vv - 2 * lr * uv + lr**2 * uu, vw - lr * uw
        return (
            rest,
            scale - lr * scale_u,
            rows - lr * rows_u,
            products,
            Velocity(new, scale_u, rows_u, (uu, uv - lr * uu, uw)),
        )

    def step(t, carry):
        (rest, scale, rows, (vv, vw), velocity), losses = carry  # s, D, <V, V>, <V, W_0>
        epoch, place = plan.locate_batch(t, batch)
        at = lax.dynamic_slice(order, (epoch * size + place,), (batch,))
        real = (place + jnp.arange(batch) < count).astype(jnp.float32)
        gram_b, z_b = gram[at], z_start[at]
        moved = scale * z_b + gram_b @ rows  # X_b V
        kernel_terms = (
            first.l2 * (square + 2 * vw + vv) + 0.5 * mu * vv
        )  # of the objective, per sample

        def batch_loss(rest, z):
            each = first.loss(rest, z, y[at], jax.random.fold_in(key, t))
            if objective.weight(client_extra) is not None:
                each = each + penalty(mu, rest, rest_start)
            total = jnp.sum(jnp.where(real > 0, each, 0.0))
            return total / jnp.sum(real), total

        (_, total), (grad, g) = jax.value_and_grad(batch_loss, argnums=(0, 1), has_aux=True)(
            rest, z_b + moved
        )
        if local.weight_decay:
            grad = jax.tree.map(lambda d, p: d + local.weight_decay * p, grad, rest)
        total = total + jnp.sum(real) * kernel_terms
        losses = losses + total * jnp.stack([epoch == 0, epoch == plan.last_epoch])
        if local.momentum:
            return (
                heavy(rest, scale, rows, (vv, vw), velocity, grad, (at, g, z_b, moved, gram_b)),
                losses,
            )
        rest = jax.tree.map(lambda p, d: p - lr * d, rest, grad)
        if pulled:  # the products of V' = keep V - lr (decay W_0 + X_b^T g)
            w = decay * square + jnp.sum(z_b * g)  # <W_0, decay W_0 + X_b^T g>
            v = decay * vw + jnp.sum(moved * g)  # <V, decay W_0 + X_b^T g>
            gg = decay * (w + jnp.sum(z_b * g)) + jnp.sum((gram_b[:, at] @ g) * g)  # its square
            vv, vw = keep**2 * vv - 2 * keep * lr * v + lr**2 * gg, keep * vw - lr * w
            scale, rows = keep * scale - lr * decay, keep * rows
        rows = rows.at[at].add(-lr * g)
        return (rest, scale, rows, (vv, vw), velocity), losses

    zero, still = jnp.zeros(()), jnp.zeros_like(z_start)
    velocity = (
        Velocity(jax.tree.map(jnp.zeros_like, rest_start), zero, still, (zero,) * 3)
        if local.momentum
        else ()
    )
    begun = (rest_start, zero, still, (zero, zero), velocity), jnp.zeros(2)
    (rest, scale, rows, _, _), losses = ragged_fori_loop(plan.steps, step, begun)
    delta = jax.tree.map(jnp.subtract, rest, rest_start)
    delta[first.name]["kernel"] = scale * kernel + jnp.matmul(
        inputs.T, rows, precision=MATMUL_PRECISION
    )
    return delta, losses
