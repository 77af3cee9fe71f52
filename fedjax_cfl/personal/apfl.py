"""Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020,
https://arxiv.org/abs/2003.13461.

A client mixes a model v of its own with its group's model w, a v + (1 - a) w, and trains both on
the same batches: w as ever, v by the gradient of the mixture.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local, Training
from fedjax_cfl.client.objective import project
from fedjax_cfl.client.sgd import batch_losses, change_steps, no_velocity, take_step
from fedjax_cfl.types import FederatedData, Params, Personal, Task
from fedjax_cfl.validation import Fraction, check_arguments


class Mixture(struct.PyTreeNode):
    """What ONE client keeps."""

    model: Params  # v
    alpha: jax.Array  # [] float32, the share a of v


def apfl(*, alpha: Fraction = 0.5, adaptive: bool = False) -> Personal:
    """APFL (Algorithm 1), mixing parameters.

    `alpha` from 0 (the group's model) to 1 (trains alone) is the share a of a client's own model,
    at first; `adaptive`: each client changes it once a round, by its gradient on the first batch.
    The mixture at a round's first step is of the received model, not of the one before. Raises
    InputError for a value that is not allowed.
    """
    check_arguments(apfl, locals(), "personal")

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        return change_steps(solve, partial(mixture_loop, adaptive), "apfl")

    def combine(row: Mixture, model: Params) -> Params:
        return mix(row.alpha, row.model, model)

    return Personal("APFL", lambda model: Mixture(model, jnp.float32(alpha)), train, combine)


def mix(alpha: jax.Array, own: Params, model: Params) -> Params:
    """Returns alpha own + (1 - alpha) model."""
    return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, own, model)


def mixture_loop(adaptive: bool, training: Training, data: FederatedData) -> Loop:
    """Returns the steps of one client's group model and of its own. `adaptive` is as in `apfl`."""
    start, plan = training.start, training.plan
    loss_of_step = batch_losses(training, data)

    def step(s, carry: tuple[Any, ...]):
        (shared, velocity), (mine, own_velocity), losses = carry
        slope = jax.value_and_grad(loss_of_step(s), has_aux=True)
        (_, total), gradient = slope(shared)
        _, mixed = slope(mix(mine.alpha, mine.model, shared))
        shared, velocity = take_step(training, shared, velocity, gradient)
        own = jax.tree.map(lambda g: mine.alpha * g, mixed)
        model, own_velocity = take_step(training, mine.model, own_velocity, own)
        alpha = mine.alpha
        if adaptive:
            # the derivative of the loss by the share of the client's own model
            slope_of_share = project(mixed, model, shared)
            moved = jnp.clip(alpha - training.lr * slope_of_share, 0.0, 1.0)
            alpha = jnp.where(s == 0, moved, alpha)
        losses = plan.add_loss(s, losses, total)
        return (shared, velocity), (Mixture(model, alpha), own_velocity), losses

    def end(carry):
        (shared, _), (mine, _), losses = carry
        return jax.tree.map(jnp.subtract, shared, start), jnp.stack(losses), mine

    row, local = training.own, training.local
    both = (start, no_velocity(local, start)), (row, no_velocity(local, row.model))
    return Loop(plan.steps, (*both, (jnp.zeros(()), jnp.zeros(()))), step, end)
