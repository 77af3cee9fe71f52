"""T Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
https://arxiv.org/abs/2006.08848.

A client's own model theta is near its group's model w and fits its data; w follows theta. So the
group minimises the Moreau envelope of its clients' losses.

Differs from the paper and the authors' code: a client renews theta in the rounds in which it takes
part, where theirs has all clients train in each round, and averages the models of some.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import check_pull
from fedjax_cfl.client.sgd import add_change
from fedjax_cfl.client.steps import Step, StepChange
from fedjax_cfl.method import Method
from fedjax_cfl.tree import move_statistics
from fedjax_cfl.types import Params, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveFloat, PositiveInt, checked


@checked("personal")
def pfedme(
    *, lam: NonNegativeFloat = 15.0, inner_steps: PositiveInt = 5, inner_lr: PositiveFloat = 0.1
) -> Method:
    """pFedMe (Algorithm 1). The steps of `Local` are the paper's R local rounds: each takes one
    batch, `inner_steps` steps (K) of size `inner_lr` on F(theta) + lam / 2 ||theta - w||^2, and
    then w <- w - lr lam (w - theta), with the step size of `Local`. Theta begins each round as w.

    The server averages as the method below does; the paper's beta is the step size of its server,
    as in FedAvgM without momentum. Raises InputError for a value that is not allowed, and for a
    step size of 1 / lam or more, with which w leaves its clients' models.
    """

    def step(c: Step, w: Params, theta: Params) -> tuple[Params, Params, jax.Array]:
        def pull(theta, _):
            total, gradient = c.slope(theta, 0)
            moved = jax.tree.map(
                lambda t, g, w: t - inner_lr * (g + lam * (t - w)), theta, gradient, w
            )
            return move_statistics(moved, theta, gradient), total

        begin = jax.tree.map(lambda t, r: jnp.where(c.number == 0, r, t), theta, c.received)
        theta, totals = lax.scan(pull, begin, length=inner_steps)
        return jax.tree.map(lambda w, t: w - c.lr * lam * (w - t), w, theta), theta, totals[0]

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        check_pull("personal.lam", lam, local.lr)
        return add_change(solve, StepChange("pFedMe", step=step, gradients=inner_steps))

    return Method(
        name="pFedMe", rows=lambda model: model, train=train, serve=lambda theta, model: theta
    )
