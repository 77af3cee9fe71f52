"""What one client does in a round: mini-batch SGD, or one gradient.

`cohort.over_clients` applies it to a cohort.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedjax_cfl.data.federated import gather
from fedjax_cfl.errors import InputError
from fedjax_cfl.models.statistics import move_statistics
from fedjax_cfl.round import dual_sgd
from fedjax_cfl.round.cohort import (
    MIN_BUCKET,
    SAMPLE_BLOCK,
    CostFn,
    bucket_sizes,
    client_range,
    cost_by_samples,
    make_int_array,
)
from fedjax_cfl.round.hooks import ClientFn
from fedjax_cfl.round.local import Local, StepPlan, Work, count_steps, plan_steps, take_rows
from fedjax_cfl.round.objective import Objective, ObjectiveFn, erm
from fedjax_cfl.round.ragged_loop import ragged_fori_loop
from fedjax_cfl.round.shuffle import random_permutations, shuffle_table
from fedjax_cfl.types import FederatedData, Key, Params, Task, Upload

# (client, data, start, client_extra, key, plan) -> (delta, loss sums [2] of the first and the
# last epoch)
TrainClientFn = Callable[
    [jax.Array, FederatedData, Params, Any, Key, StepPlan], tuple[Params, jax.Array]
]


def sgd(task: Task, local: Local, objective: ObjectiveFn | None = None) -> ClientFn:
    """Trains one client by mini-batch SGD from the model of its group (FedAvg's
    ClientUpdate; FlexCFL, Algorithm 1).

    A client runs `local.epochs` reshuffled epochs, or `local.steps` mini-batch steps that
    cycle through reshuffled epochs. `objective` is the loss of the task unless given.
    Raises InputError if `local.first_layer` is dual and there is no sample-space form.
    """
    objective = objective or erm(task)
    if local.first_layer == "dual" and not dual_sgd.has_dual_form(task, objective):
        raise InputError(
            "local.first_layer=dual: the model's first layer is not dense, or the objective is not"
            " plain; use auto or direct"
        )

    def train_client(objective, lr, client, bucket, data, shared, work: Work):
        key, models = shared
        key = jax.random.fold_in(key, client)
        start = jax.tree.map(lambda leaf: leaf[work.group], models)
        count, _ = client_range(client, data)
        plan = plan_steps(local, count, work.step_fraction, jax.random.bits(key, (2,)))
        branches, branch = choose_train(
            task, local._replace(lr=lr * work.lr_scale), objective, data, bucket
        )
        delta, losses = lax.switch(
            branch,
            [
                lambda _, train=train: train(client, data, start, work.client_extra, key, plan)
                for train in branches
            ],
            None,
        )
        first_loss, last_loss = losses / jnp.maximum(plan.count_samples(count, local.batch_size), 1)
        return Upload(
            delta=delta,
            weight=count.astype(jnp.float32),
            loss=first_loss,
            last_loss=last_loss,
            steps=plan.steps,
            start_group=jnp.where(count > 0, work.group, 0),
        )

    return Partial(train_client, as_pytree(objective), local.lr)


def choose_train(
    task: Task, local: Local, objective: ObjectiveFn, data: FederatedData, bucket: jax.Array
) -> tuple[list[TrainClientFn], ArrayLike]:
    """Returns the branches that clients of these data train by, and the number [] of the
    branch of size bucket `bucket`.

    There is one branch for each size that is trained in sample space, and one for direct
    training.
    """

    def passes(size, fewest):
        """Returns the passes that a client of `fewest` to `size` samples can need.

        Side by side, another client of the chunk may have fewer samples.
        """
        fewest = fewest if local.width == 1 else 1
        most = local.epochs if local.steps is None else -(-local.steps // -(-fewest // batch))
        return most + local.fill_batches

    batch, buckets = local.batch_size, bucket_sizes(data.max_client_samples)
    sizes = dual_sgd.dual_sizes(
        task, objective, local.first_layer, buckets, batch, partial(count_steps, local)
    )
    branches = [
        make_dual_train(task, objective, local, size, passes(size, below + 1))
        for below, size in pairwise([0, *sizes])
    ]
    if buckets[-1] not in sizes:
        branches.append(make_direct_train(objective, local, bucket, passes))
    if not sizes:
        return branches, 0
    return branches, make_int_array([bisect_left(sizes, size) for size in buckets])[bucket]


def client_cost(task: Task, local: Local, capacity: int) -> CostFn:
    """Returns what `make_cohort` balances by: about how long clients of at most `capacity`
    samples train.
    """
    steps = partial(count_steps, local)
    sizes = dual_sgd.dual_sizes(
        task, erm(task), local.first_layer, bucket_sizes(capacity), local.batch_size, steps
    )
    return (
        (lambda held: dual_sgd.dual_client_cost(task, sizes, local.batch_size, held, steps(held)))
        if sizes
        else cost_by_samples
    )


def make_direct_train(
    objective: ObjectiveFn, local: Local, bucket: jax.Array, passes: Callable[[int, int], int]
) -> TrainClientFn:
    """Returns the SGD of one client for any model.

    `passes(size, fewest)` is the most passes that a client of `fewest` to `size` samples
    can need.
    """
    batch = local.batch_size

    def train(client, data, start, client_extra, key, plan: StepPlan):
        count, _ = client_range(client, data)
        table = shuffle_table(
            plan.random_words,
            client,
            bucket,
            data,
            lambda size: passes(size, size // 2 + 1 if size > MIN_BUCKET else 1),
            batch,
        )
        stride = make_int_array(bucket_sizes(data.max_client_samples))[bucket]

        def step(s, carry):
            params, velocity, losses = carry
            epoch, _ = plan.locate_batch(s, batch)
            places, real = plan.locate_samples(s, count, stride, local)
            x, y = gather(data, take_rows(table, places, local))
            owner = jnp.where(real, client, -1)

            def batch_loss(params):
                noise = jax.random.fold_in(key, s)
                each = objective(params, start, client_extra, x, y, noise, owner)
                total = jnp.sum(jnp.where(owner >= 0, each, 0.0))
                return total / jnp.sum(owner >= 0), total

            (_, total), grad = jax.value_and_grad(batch_loss, has_aux=True)(params)
            before, raw = params, grad
            if local.weight_decay:
                grad = jax.tree.map(lambda g, p: g + local.weight_decay * p, grad, params)
            if local.momentum:
                grad = velocity = jax.tree.map(lambda v, g: local.momentum * v + g, velocity, grad)
            params = jax.tree.map(lambda p, g: p - local.lr * g, params, grad)
            return (
                move_statistics(params, before, raw),
                velocity,
                losses + total * jnp.stack([epoch == 0, epoch == plan.last_epoch]),
            )

        still = jax.tree.map(jnp.zeros_like, start) if local.momentum else ()
        params, _, losses = ragged_fori_loop(plan.steps, step, (start, still, jnp.zeros(2)))
        return jax.tree.map(jnp.subtract, params, start), losses

    return train


def make_dual_train(
    task: Task, objective: Any, local: Local, size: int, passes: int
) -> TrainClientFn:
    """Returns the same SGD, with the same batches, in sample space (see `dual_sgd`): for a
    client of up to `size` samples and a model with a dense first layer.
    """

    def train(client, data, start, client_extra, key, plan: StepPlan):
        count, first = client_range(client, data)
        rows = data.train.order[jnp.minimum(first + jnp.arange(size), data.train.order.size - 1)]
        order = random_permutations(plan.random_words, count, size, passes).astype(jnp.int32)
        order = jnp.pad(order.reshape(-1), (0, local.batch_size))
        x, y = gather(data, rows)
        samples = dual_sgd.Samples(x, y, count, order)
        return dual_sgd.train_dual(task, objective, local, samples, plan, start, client_extra, key)

    return train


def gradient_step(task: Task, local: Local, objective: ObjectiveFn | None = None) -> ClientFn:
    """Takes one full-batch gradient step of one client: delta = -lr * gradient of its mean
    loss (FedSGD; gradient averaging of IFCA).
    """
    objective = objective or erm(task)

    def step_client(objective, lr, client, bucket, data, shared, work: Work):
        key, models = shared
        key = jax.random.fold_in(key, client)
        start = jax.tree.map(lambda leaf: leaf[work.group], models)
        count, first = client_range(client, data)

        def block(b, carry):
            place = b * SAMPLE_BLOCK + jnp.arange(SAMPLE_BLOCK)
            x, y = gather(data, data.train.order[first + jnp.minimum(place, count - 1)])
            owner = jnp.where(place < count, client, -1)

            def block_loss(params):
                noise = jax.random.fold_in(key, b)
                each = objective(params, start, work.client_extra, x, y, noise, owner)
                return jnp.sum(jnp.where(place < count, each, 0.0)) / count

            return jax.tree.map(jnp.add, carry, jax.value_and_grad(block_loss)(start))

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, start))
        loss, grad = ragged_fori_loop(-(-count // SAMPLE_BLOCK), block, zeros)
        delta = jax.tree.map(lambda g: -lr * work.lr_scale * g, grad)
        delta = move_statistics(delta, zeros[1], grad)
        return Upload(
            delta=delta,
            weight=count.astype(jnp.float32),
            loss=loss,
            last_loss=loss,
            steps=(count > 0).astype(jnp.int32),
            start_group=jnp.where(count > 0, work.group, 0),
        )

    return Partial(step_client, as_pytree(objective), local.lr)


def as_pytree(objective: ObjectiveFn) -> Objective | Partial:
    """Returns an objective as a pytree, whose leaves may be traced; a function has none."""
    return objective if isinstance(objective, Objective | Partial) else Partial(objective)
