"""What one client does in a round: mini-batch SGD, or one gradient;
`cohort.over_clients` makes a cohort of it.
"""

from bisect import bisect_left
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from fedjax_cfl.errors import InputError
from fedjax_cfl.round import dual_sgd
from fedjax_cfl.round.cohort import (
    MIN_BUCKET,
    SAMPLE_BLOCK,
    bucket_sizes,
    client_range,
    cost_by_samples,
    make_int_array,
)
from fedjax_cfl.round.local import Local, Work
from fedjax_cfl.round.objective import Objective, erm
from fedjax_cfl.round.ragged_loop import ragged_fori_loop
from fedjax_cfl.round.shuffle import random_permutations, shuffle_table
from fedjax_cfl.types import FederatedData, Task, Upload


class StepPlan(NamedTuple):
    """The steps of one client."""

    steps: jax.Array  # [] int32, to take
    per_epoch: jax.Array  # [] int32
    last_epoch: jax.Array  # [] int32, the epoch of the last step
    random_words: jax.Array  # [2] uint32, what its permutations are drawn from

    def locate_batch(self, step, batch: int):
        """Returns (epoch, first sample of the step within it)."""
        return lax.div(step, self.per_epoch), lax.rem(step, self.per_epoch) * batch

    def seen(self, count, batch: int):
        """Returns the samples [2] that were reached in the first and in the last epoch."""
        last = self.steps - self.last_epoch * self.per_epoch
        return jnp.stack([jnp.minimum(self.steps * batch, count), jnp.minimum(last * batch, count)])


def sgd(task: Task, local: Local, objective=None) -> Partial:
    """Mini-batch SGD of one client from a received model (FedAvg's ClientUpdate;
    FlexCFL, Algorithm 1).

    Runs `local.epochs` reshuffled epochs, or `local.steps` mini-batch steps that cycle
    through reshuffled epochs.
    Returns visit(client, bucket, data, (key, models [m, ...]), work) -> Upload of one
    client.
    Raises InputError if `local.first_layer` asks for a sample-space form that there is
    not.
    """
    objective = objective or erm(task)
    if local.first_layer == "dual" and not dual_sgd.has_dual_form(task, objective):
        raise InputError(
            "local.first_layer=dual: the model's first layer is not dense, or the objective is not"
            " plain; use auto or direct"
        )

    def visit(objective, lr, client, bucket, data, shared, work: Work):
        key, models = shared
        key = jax.random.fold_in(key, client)
        start = jax.tree.map(lambda leaf: leaf[work.group], models)
        count, _ = client_range(client, data)
        plan = plan_steps(local, count, work.step_fraction, jax.random.bits(key, (2,)))
        branches, way = choose_train(
            task, local._replace(lr=lr * work.lr_scale), objective, data, bucket
        )
        delta, losses = lax.switch(
            way,
            [
                lambda _, train=train: train(client, data, start, work.client_extra, key, plan)
                for train in branches
            ],
            None,
        )
        first_loss, last_loss = losses / jnp.maximum(plan.seen(count, local.batch_size), 1)
        return Upload(
            delta=delta,
            weight=count.astype(jnp.float32),
            loss=first_loss,
            last_loss=last_loss,
            steps=plan.steps,
            start_group=jnp.where(count > 0, work.group, 0),
        )

    return Partial(visit, as_pytree(objective), local.lr)


def plan_steps(local: Local, count, fraction, random_words) -> StepPlan:
    """Plans the steps of a client of `count` samples that completes `fraction` of them."""
    per_epoch = jnp.maximum(lax.div(count + local.batch_size - 1, local.batch_size), 1)
    planned = local.epochs * per_epoch if local.steps is None else local.steps
    steps = jnp.where(count > 0, jnp.ceil(fraction * planned - 1e-3).astype(jnp.int32), 0)
    return StepPlan(steps, per_epoch, lax.div(steps - 1, per_epoch), random_words)


def choose_train(task: Task, local: Local, objective, data: FederatedData, bucket):
    """Returns the ways to train that clients of these data need, and the number [] of the
    one for clients of size class `bucket`: in sample space by size, else directly.
    """

    def passes(size, fewest):
        """Returns the passes that a client of `fewest` to `size` samples can need;
        chunk mates may have fewer.
        """
        fewest = fewest if local.width == 1 else 1
        return local.epochs if local.steps is None else -(-local.steps // -(-fewest // batch))

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


def count_steps(local: Local, size):
    """Returns the most steps that a client of `size` samples takes."""
    per_epoch = -(-size // local.batch_size)
    return local.epochs * per_epoch if local.steps is None else 0 * per_epoch + local.steps


def client_cost(task: Task, local: Local, capacity: int):
    """Returns f(held [k]) -> [k]: about how long clients of so many samples train, for
    `local.make_cohort`.
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


def make_direct_train(objective, local: Local, bucket, passes):
    """Returns train(client, data, start, client_extra, key, plan) -> (delta, loss sums
    [2] of the first and the last epoch), any model.
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
            epoch, place = plan.locate_batch(s, batch)
            rows = lax.dynamic_slice(table, (epoch * stride + place,), (batch,))
            real = (place + jnp.arange(batch) < count).astype(jnp.float32)
            x, y = data.gather(rows)

            def batch_loss(params):
                each = objective(params, start, client_extra, x, y, jax.random.fold_in(key, s))
                total = jnp.sum(jnp.where(real > 0, each, 0.0))
                return total / jnp.sum(real), total

            (_, total), grad = jax.value_and_grad(batch_loss, has_aux=True)(params)
            if local.weight_decay:
                grad = jax.tree.map(lambda g, p: g + local.weight_decay * p, grad, params)
            if local.momentum:
                grad = velocity = jax.tree.map(lambda v, g: local.momentum * v + g, velocity, grad)
            params = jax.tree.map(lambda p, g: p - local.lr * g, params, grad)
            return (
                params,
                velocity,
                losses + total * jnp.stack([epoch == 0, epoch == plan.last_epoch]),
            )

        still = jax.tree.map(jnp.zeros_like, start) if local.momentum else ()
        params, _, losses = ragged_fori_loop(plan.steps, step, (start, still, jnp.zeros(2)))
        return jax.tree.map(jnp.subtract, params, start), losses

    return train


def make_dual_train(task: Task, objective, local: Local, size: int, passes: int):
    """Returns the same train(...) for a client of up to `size` samples and a dense
    first layer, see `dual`; its batches are the same.
    """

    def train(client, data, start, client_extra, key, plan: StepPlan):
        count, first = client_range(client, data)
        rows = data.train.order[jnp.minimum(first + jnp.arange(size), data.train.order.size - 1)]
        order = (
            random_permutations(plan.random_words, count, size, passes)
            .astype(jnp.int32)
            .reshape(-1)
        )
        order = jnp.pad(order, (0, local.batch_size))
        return dual_sgd.train_dual(
            task,
            objective,
            local,
            *data.gather(rows),
            count,
            order,
            plan,
            start,
            client_extra,
            key,
        )

    return train


def gradient_step(task: Task, local: Local, objective=None) -> Partial:
    """One full-batch gradient step of one client (FedSGD; gradient averaging of IFCA):
    delta = -lr * gradient of its mean loss.
    """
    objective = objective or erm(task)

    def visit(objective, lr, client, bucket, data, shared, work: Work):
        key, models = shared
        key = jax.random.fold_in(key, client)
        start = jax.tree.map(lambda leaf: leaf[work.group], models)
        count, first = client_range(client, data)

        def block(b, carry):
            place = b * SAMPLE_BLOCK + jnp.arange(SAMPLE_BLOCK)
            x, y = data.gather(data.train.order[first + jnp.minimum(place, count - 1)])

            def block_loss(params):
                each = objective(params, start, work.client_extra, x, y, jax.random.fold_in(key, b))
                return jnp.sum(jnp.where(place < count, each, 0.0)) / count

            return jax.tree.map(jnp.add, carry, jax.value_and_grad(block_loss)(start))

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, start))
        loss, grad = ragged_fori_loop(-(-count // SAMPLE_BLOCK), block, nothing)
        delta = jax.tree.map(lambda g: -lr * work.lr_scale * g, grad)
        return Upload(
            delta=delta,
            weight=count.astype(jnp.float32),
            loss=loss,
            last_loss=loss,
            steps=(count > 0).astype(jnp.int32),
            start_group=jnp.where(count > 0, work.group, 0),
        )

    return Partial(visit, as_pytree(objective), local.lr)


def as_pytree(objective):
    """Returns an objective as a pytree, whose leaves may be traced: a plain function has none."""
    return objective if isinstance(objective, Objective | Partial) else Partial(objective)
