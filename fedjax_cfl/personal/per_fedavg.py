"""Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, https://arxiv.org/abs/2002.07948 (Per-FedAvg).

A group's model w is trained so that one step of each client from it, w - alpha grad F_k(w), fits
that client. Clients keep nothing: each takes its step whenever it uses the model.
"""

from typing import Any

import jax

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import add_change
from fedjax_cfl.client.steps import Step, StepChange
from fedjax_cfl.method import Method
from fedjax_cfl.tree import copy_statistics, move_statistics
from fedjax_cfl.types import Params, Task
from fedjax_cfl.validation import NonNegativeFloat, checked, is_number


@checked("personal")
def per_fedavg(*, alpha: NonNegativeFloat = 0.01, second_order: bool = False) -> Method:
    """Per-FedAvg (Algorithm 1). Raises InputError for a value that is not allowed.

    `alpha` >= 0 is the size of the step by which a client adapts its group's model, on one batch
    of its training samples: in every step of its training, and before it is tested.
    `second_order` differentiates through that step, by a Hessian-vector product (the paper: by a
    finite difference, HF); False: the first-order form, FO.

    The paper's beta is the step size of `Local`. A step takes two batches, with `second_order`
    three, so that the batches of a round are as many steps fewer.
    """

    def step(c: Step, w: Params, own: Any) -> tuple[Any, ...]:
        total, gradient = c.slope(w, 0)
        adapted = jax.tree.map(lambda p, g: p - alpha * g, w, gradient)
        adapted = move_statistics(adapted, w, gradient)
        total_there, direction = c.slope(adapted, 1)
        seen = move_statistics(w, adapted, direction)  # the statistics of both batches
        totals = [total, total_there]
        if second_order:
            (total, _), (_, bend) = jax.jvp(lambda p: c.slope(p, 2), (w,), (direction,))
            direction = jax.tree.map(lambda g, b: g - alpha * b, direction, bend)
            totals.append(total)
        return copy_statistics(c.follow(direction), seen), own, *totals

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        batches = 3 if second_order else 2
        return add_change(solve, StepChange("Per-FedAvg", step=step, batches=batches))

    def adapt(local: Local) -> Local:
        return local.replace(
            lr=alpha, steps=1, fill_batches=False, momentum=0.0, weight_decay=0.0, schedule=None
        )

    adapts = not is_number(alpha) or alpha > 0
    return Method(name="Per-FedAvg", train=train, adapt=adapt if adapts else None)
