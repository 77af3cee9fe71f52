"""Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, https://arxiv.org/abs/2002.07948 (Per-FedAvg).

A group's model w is trained so that one step of each client from it, w - alpha grad F_k(w), fits
that client. Clients keep nothing: each takes its step whenever it uses the model.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local, Training
from fedjax_cfl.client.sgd import batch_losses, change_steps, no_velocity, take_step
from fedjax_cfl.tree import copy_statistics, move_statistics
from fedjax_cfl.types import FederatedData, Params, Personal, Task
from fedjax_cfl.validation import NonNegativeFloat, check_arguments, is_number

Losses = tuple[jax.Array, jax.Array]  # [], [], see `StepPlan.add_loss`


def per_fedavg(*, alpha: NonNegativeFloat = 0.01, second_order: bool = False) -> Personal:
    """Per-FedAvg (Algorithm 1). Raises InputError for a value that is not allowed.

    `alpha` >= 0 is the size of the step by which a client adapts its group's model, on one batch
    of its training samples: in every step of its training, and before it is tested.
    `second_order` differentiates through that step, by a Hessian-vector product (the paper: by a
    finite difference, HF); False: the first-order form, FO.

    The paper's beta is the step size of `Local`. A step takes two batches, with `second_order`
    three, so that the batches of a round are as many steps fewer.
    """
    check_arguments(per_fedavg, locals(), "personal")

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        loop = Partial(partial(adapting_loop, second_order), alpha)
        return change_steps(solve, loop, "per_fedavg")

    def adapt(local: Local) -> Local:
        return local.replace(
            lr=alpha, steps=1, fill_batches=False, momentum=0.0, weight_decay=0.0, schedule=None
        )

    adapts = not is_number(alpha) or alpha > 0
    return Personal(
        "Per-FedAvg", lambda model: (), train, combine=None, adapt=adapt if adapts else None
    )


def adapting_loop(
    second_order: bool, alpha: float, training: Training, data: FederatedData
) -> Loop:
    """Returns the steps of one client (a `MakeLoop`), each on two batches or three, as long as
    there are any; the last step goes on with the first ones. `second_order` and `alpha` are as in
    `per_fedavg`.
    """
    start, plan = training.start, training.plan
    loss_of_step, taken = batch_losses(training, data), 3 if second_order else 2

    def find_slope(number: jax.Array) -> tuple[Callable, Callable[[Losses, jax.Array], Losses]]:
        """Returns the gradient on a batch, and what adds its loss to the sums, each batch once."""
        at = lax.rem(number, jnp.maximum(plan.steps, 1))

        def add_loss(losses: Losses, total: jax.Array) -> Losses:
            return plan.add_loss(at, losses, jnp.where(number < plan.steps, total, 0.0))

        return jax.value_and_grad(loss_of_step(at), has_aux=True), add_loss

    def step(s, carry):
        params, velocity, losses = carry
        slopes = [find_slope(s * taken + n) for n in range(taken)]
        (slope, add_loss), (slope_there, add_loss_there), *rest = slopes
        (_, total), gradient = slope(params)
        adapted = jax.tree.map(lambda p, g: p - alpha * g, params, gradient)
        adapted = move_statistics(adapted, params, gradient)
        (_, total_there), direction = slope_there(adapted)
        losses = add_loss_there(add_loss(losses, total), total_there)
        seen = move_statistics(params, adapted, direction)  # the statistics of both batches
        for slope, add_loss in rest:
            ((_, total), _), (_, bend) = jax.jvp(slope, (params,), (direction,))
            direction = jax.tree.map(lambda g, b: g - alpha * b, direction, bend)
            losses = add_loss(losses, total)
        moved, velocity = take_step(training, params, velocity, direction)
        return copy_statistics(moved, seen), velocity, losses

    def end(carry) -> tuple[Params, jax.Array, tuple]:
        return jax.tree.map(jnp.subtract, carry[0], start), jnp.stack(carry[2]), ()

    still = no_velocity(training.local, start)
    steps = lax.div(plan.steps + taken - 1, taken)
    return Loop(steps, (start, still, (jnp.zeros(()), jnp.zeros(()))), step, end)
