"""T Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
https://arxiv.org/abs/2006.08848.

A client's own model theta is near its group's model w and fits its data; w follows theta. So the
group minimises the Moreau envelope of its clients' losses.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local, Training
from fedjax_cfl.client.objective import check_pull
from fedjax_cfl.client.sgd import batch_losses, change_steps
from fedjax_cfl.tree import move_statistics
from fedjax_cfl.types import FederatedData, Params, Personal, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveFloat, PositiveInt, check_arguments


def pfedme(
    *, lam: NonNegativeFloat = 15.0, inner_steps: PositiveInt = 5, inner_lr: PositiveFloat = 0.1
) -> Personal:
    """pFedMe (Algorithm 1). The steps of `Local` are the paper's R local rounds: each takes one
    batch, `inner_steps` steps (K) of size `inner_lr` on F(theta) + lam / 2 ||theta - w||^2, and
    then w <- w - lr lam (w - theta), with the step size of `Local`.

    The server averages as the method below does; the paper's beta is the step size of its server,
    as in FedAvgM without momentum. Raises InputError for a value that is not allowed, and for a
    step size of 1 / lam or more, with which w leaves its clients' models.
    """
    check_arguments(pfedme, locals(), "personal")

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        check_pull("personal.lam", lam, local.lr)
        loop = Partial(partial(envelope_loop, inner_steps), lam, inner_lr)
        return change_steps(solve, loop, "pfedme")

    return Personal("pFedMe", lambda model: model, train, lambda row, model: row)


def envelope_loop(
    inner_steps: int, lam: float, inner_lr: float, training: Training, data: FederatedData
) -> Loop:
    """Returns the steps of one client's group model and of its own (a `MakeLoop`).

    Args: the first three are as in `pfedme`; the others are those of a `MakeLoop`.
    """
    start, plan, lr = training.start, training.plan, training.lr
    loss_of_step = batch_losses(training, data)

    def step(s, carry):
        shared, theta, losses = carry
        slope = jax.value_and_grad(loss_of_step(s), has_aux=True)

        def pull(theta, _):
            (_, total), gradient = slope(theta)
            moved = jax.tree.map(
                lambda t, g, w: t - inner_lr * (g + lam * (t - w)), theta, gradient, shared
            )
            return move_statistics(moved, theta, gradient), total

        theta, totals = lax.scan(pull, theta, length=inner_steps)
        shared = jax.tree.map(lambda w, t: w - lr * lam * (w - t), shared, theta)
        return shared, theta, plan.add_loss(s, losses, totals[0])

    def end(carry) -> tuple[Params, jax.Array, Params]:
        shared, theta, losses = carry
        return jax.tree.map(jnp.subtract, shared, start), jnp.stack(losses), theta

    return Loop(plan.steps, (start, start, (jnp.zeros(()), jnp.zeros(()))), step, end)
