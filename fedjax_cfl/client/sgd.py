"""What one client does in a round: mini-batch SGD, or one gradient.

`cohort.over_clients` applies it to a cohort.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.client import dual_sgd
from fedjax_cfl.client.cohort import (
    SAMPLE_BLOCK,
    ClientFn,
    CostFn,
    client_range,
    cost_by_samples,
    make_int_array,
    read_block,
)
from fedjax_cfl.client.executor import Cases, Loop, Program, then
from fedjax_cfl.client.local import Local, Training, Work, count_steps, plan_steps
from fedjax_cfl.client.objective import Objective, ObjectiveFn, erm, split
from fedjax_cfl.data.federated import gather
from fedjax_cfl.errors import InputError
from fedjax_cfl.tree import has_statistics, move_statistics, take_rows
from fedjax_cfl.types import FederatedData, Key, Params, Task, Upload


def sgd(task: Task, local: Local, objective: ObjectiveFn | None = None) -> ClientFn:
    """Trains one client by mini-batch SGD from the model of its group (FedAvg's
    ClientUpdate; FlexCFL, Algorithm 1).

    A client runs `local.epochs` reshuffled epochs, or `local.steps` mini-batch steps that
    cycle through reshuffled epochs. `objective` is the loss of the task unless given.
    Raises InputError for settings that are not allowed, and if `local.execution.first_layer` is
    dual and there is no sample-space form.
    """
    objective = objective or erm(task)
    if local.execution.first_layer == "dual" and not dual_sgd.has_dual_form(task, objective):
        raise InputError(
            "local.first_layer=dual: the model's first layer is not dense, or the objective is not"
            " plain; use auto or direct"
        )

    loop = as_pytree(partial(choose_loop, task))
    return Partial(LocalSGD(local), loop, as_pytree(objective), local.lr)


# (training, data) -> the program of one client's steps; its result is (trained - start, loss sums
# [2] of the first and the last epoch, what it keeps for itself)
MakeLoop = Callable[[Training, FederatedData], Program]


class LocalSGD:
    """Trains one client by mini-batch steps from the model of its group: a `ClientFn`, once its
    `MakeLoop`, its objective and its step size are bound.
    """

    def __init__(self, local: Local):
        self.local = local

    def __call__(self, make_loop, objective, lr, client, data, shared, work: Work) -> Program:
        local, (key, models) = self.local, shared
        key = jax.random.fold_in(key, client)
        start = take_rows(models, work.group)
        count, first = client_range(client, data)
        plan = plan_steps(local, count, work.step_fraction, jax.random.bits(key, (2,)))
        # written here, before the choice of a loop: else each of the loops would compile it
        table = plan.make_table(count, local, data.max_client_samples)
        training = Training(
            local=local,
            lr=lr * work.lr_scale,
            objective=objective,
            start=start,
            client_extra=work.client_extra,
            own=work.own,
            client=client,
            samples=count,
            first=first,
            key=key,
            plan=plan,
            table=table,
        )

        def upload(found: tuple[Params, jax.Array, Any]) -> Upload:
            delta, losses, own = found
            losses = losses / jnp.maximum(plan.count_samples(count, local.batch_size), 1)
            first_loss, last_loss = losses + add_penalties(training, delta)
            return Upload(
                delta=delta,
                weight=count.astype(jnp.float32),
                loss=first_loss,
                last_loss=last_loss,
                steps=plan.steps,
                start_group=jnp.where(count > 0, work.group, 0),
                own=own,
            )

        return then(make_loop(training, data), upload)


def train_from(
    model: Params, solve: ClientFn, client: jax.Array, data: FederatedData, key: Key, work: Work
) -> Program:
    """Returns the program of `solve` that trains ONE client from `model` in place of its group's.

    Args: `model` is what it trains from; `key` is the round's; the others are those of a
    `ClientFn`. It has no row of its own.
    """
    start = jax.tree.map(lambda leaf: leaf[None], model)
    alone = work._replace(group=jnp.zeros_like(work.group), own=())

    def relate(upload: Upload) -> Upload:
        return upload.replace(start_group=jnp.where(upload.weight > 0, work.group, 0))

    return then(solve(client, data, (key, start), alone), relate)


def change_steps(solve: ClientFn, make_loop: MakeLoop, name: str) -> ClientFn:
    """Returns `solve` with other steps, on the same batches, objective and step size. Raises
    InputError where it is no plain SGD; `name` is that of the method which changes it.

    Values of settings that `make_loop` needs are bound to it by a `Partial`, see `over_clients`.
    """
    if not (isinstance(solve, Partial) and isinstance(solve.func, LocalSGD)):
        raise InputError(
            f"personal={name}: changes the steps of the clients' SGD, but clients of this method"
            " train in another way; use personal=ditto, or another algorithm"
        )
    return Partial(solve.func, as_pytree(make_loop), *solve.args[1:])


def choose_loop(task: Task, training: Training, data: FederatedData) -> Program:
    """Returns the training of one client: in sample space, of one of a few sizes, or directly.

    Its result is that of a `MakeLoop`; nothing is kept.
    """
    local, capacity = training.local, data.max_client_samples
    steps = partial(count_steps, local)
    sizes = dual_sgd.dual_sizes(task, training.objective, local, capacity, steps)
    cases: list[Callable[[], Loop]] = [
        lambda size=size: dual_sgd.dual_loop(task, training, data, size) for size in sizes
    ]
    if not sizes or sizes[-1] < capacity:
        cases.append(lambda: direct_loop(training, data))
    if len(cases) == 1:
        return cases[0]()
    bounds = sizes[: len(cases) - 1]  # the last case takes all larger clients
    return Cases(jnp.sum(training.samples > make_int_array(bounds)).astype(jnp.int32), cases)


def add_penalties(training: Training, delta: Params) -> jax.Array:
    """Returns the penalties [2] to add to the reported losses: that of the received model, and that
    of the trained one if the last epoch is not the first. They are added once, here, so that no
    step reads the whole model for them.
    """
    _, penalty = split(training.objective)
    if penalty is None:
        return jnp.zeros(2)
    start, plan = training.start, training.plan
    models = start, jax.tree.map(jnp.add, start, delta)
    first, last = (penalty(model, start, training.client_extra) for model in models)
    terms = jnp.stack([first, jnp.where(plan.last_epoch > 0, last, first)])
    return jnp.where(plan.steps > 0, terms, 0.0)


def client_cost(task: Task, local: Local, capacity: int) -> CostFn:
    """Returns what `make_cohort` balances by: about how long clients of at most `capacity`
    samples train.
    """
    steps = partial(count_steps, local)
    sizes = dual_sgd.dual_sizes(task, erm(task), local, capacity, steps)
    if not sizes:
        return cost_by_samples
    return lambda held: dual_sgd.dual_client_cost(task, sizes, local.batch_size, held, steps(held))


def batch_losses(training: Training, data: FederatedData) -> Callable[..., Any]:
    """Returns f(step) -> g(params) -> (mean objective, summed objective without penalties) on the
    mini-batch of that step of one client.
    """
    plan, start, extra = training.plan, training.start, training.client_extra
    each_loss, penalty = split(training.objective)

    def of_step(s):
        places, real = plan.draw_samples(s, training.samples, training.local, training.table)
        x, y = gather(data, data.train.order[training.first + places])
        owner = jnp.where(real, training.client, -1)
        noise = jax.random.fold_in(training.key, s)

        def batch_loss(params):
            each = each_loss(params, start, extra, x, y, noise, owner)
            if training.weights is not None:
                each = training.weights[places] * each
            total = jnp.sum(jnp.where(owner >= 0, each, 0.0))
            mean = total / jnp.sum(owner >= 0)
            return mean + penalty(params, start, extra) if penalty else mean, total

        return batch_loss

    return of_step


def direct_loop(
    training: Training,
    data: FederatedData,
    correction: Params | None = None,
    choose: Callable[[jax.Array, Params, Params], Params] | None = None,
) -> Loop:
    """Returns the SGD of one client for any model; `correction` is added to every gradient, and
    choose(step, stepped, before) is what it goes on with.
    """
    local, start, plan = training.local, training.start, training.plan
    _, penalty = split(training.objective)
    accumulates = (
        local.execution.executor == "lanes"
        and correction is None
        and choose is None
        and not (penalty or local.momentum or local.weight_decay or has_statistics(start))
    )
    loss_of_step = batch_losses(training, data)

    def step(s, carry):
        params, velocity, losses = carry
        batch_loss = loss_of_step(s)

        def scaled(params):
            mean, total = batch_loss(params)
            # a GPU adds the gradient of -lr times the loss to a kernel within its own product; on
            # a CPU that is a fifth slower
            return -training.lr * mean if accumulates else mean, total

        (_, total), grad = jax.value_and_grad(scaled, has_aux=True)(params)
        if correction is not None:
            grad = jax.tree.map(jnp.add, grad, correction)
        if accumulates:
            params = jax.tree.map(jnp.add, params, grad)
        else:
            before, (params, velocity) = params, take_step(training, params, velocity, grad)
            params = choose(s, params, before) if choose else params
        return params, velocity, plan.add_loss(s, losses, total)

    still = no_velocity(local, start)
    return Loop(
        plan.steps,
        (start, still, (jnp.zeros(()), jnp.zeros(()))),
        step,
        lambda carry: (jax.tree.map(jnp.subtract, carry[0], start), jnp.stack(carry[2]), ()),
    )


def no_velocity(local: Local, params: Params) -> Params:
    """Returns the velocity before a client's first step; () without momentum."""
    return jax.tree.map(jnp.zeros_like, params) if local.momentum else ()


def take_step(
    training: Training, params: Params, velocity: Params, gradient: Params
) -> tuple[Params, Params]:
    """Returns (params, velocity) after a step of SGD, with momentum and weight decay."""
    local, direction = training.local, gradient
    if local.weight_decay:
        direction = jax.tree.map(lambda g, p: g + local.weight_decay * p, direction, params)
    if local.momentum:
        direction = velocity = jax.tree.map(
            lambda v, g: local.momentum * v + g, velocity, direction
        )
    moved = jax.tree.map(lambda p, d: p - training.lr * d, params, direction)
    return move_statistics(moved, params, gradient), velocity


def gradient_step(task: Task, local: Local, objective: ObjectiveFn | None = None) -> ClientFn:
    """Takes one full-batch gradient step of one client: delta = -lr * gradient of its mean
    loss (FedSGD; gradient averaging of IFCA).
    """
    objective = objective or erm(task)

    def step_client(objective, lr, client, data, shared, work: Work) -> Loop:
        key, models = shared
        key = jax.random.fold_in(key, client)
        start = take_rows(models, work.group)
        count, first = client_range(client, data)

        def block(b, carry):
            x, y, owner = read_block(client, data, (count, first), b)

            def block_loss(params):
                noise = jax.random.fold_in(key, b)
                each = objective(params, start, work.client_extra, x, y, noise, owner)
                return jnp.sum(jnp.where(owner >= 0, each, 0.0)) / count

            return jax.tree.map(jnp.add, carry, jax.value_and_grad(block_loss)(start))

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, start))

        def end(carry):
            loss, grad = carry
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

        return Loop(-(-count // SAMPLE_BLOCK), zeros, block, end)

    return Partial(step_client, as_pytree(objective), local.lr)


def as_pytree(function: Callable[..., Any]) -> Any:
    """Returns an objective, or a solver, as a pytree, whose leaves may be traced; a function has
    none.
    """
    return function if isinstance(function, Objective | Partial) else Partial(function)
