"""Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020,
https://arxiv.org/abs/2003.13461.

A client mixes a model v of its own with its group's model w, a v + (1 - a) w, and trains both on
the same batches: w as ever, v by the gradient of the mixture.
"""

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.client.objective import project
from fedjax_cfl.client.steps import Step
from fedjax_cfl.method import Method
from fedjax_cfl.personal.layer import layer
from fedjax_cfl.types import Params
from fedjax_cfl.validation import Fraction, checked


class Mixture(struct.PyTreeNode):
    """What ONE client keeps."""

    model: Params  # v
    alpha: jax.Array  # [] float32, the share a of v


@checked("personal")
def apfl(*, alpha: Fraction = 0.5, adaptive: bool = False) -> Method:
    """APFL (Algorithm 1), mixing parameters.

    `alpha` from 0 (the group's model) to 1 (trains alone) is the share a of a client's own model,
    at first; `adaptive`: each client changes it once a round, by its gradient on the first batch,
    a - lr <gradient of the mixture, v - w>, all of before the step (Algorithm 1, line 9): where v
    is w, as in a client's first step, the share stays.
    The mixture at a round's first step is of the received model, not of the one before. Raises
    InputError for a value that is not allowed.
    """

    def step(c: Step, w: Params, own: Mixture) -> tuple[Params, Mixture]:
        slope, a = c.grad(mix(own, w)), own.alpha
        v = c.descend(own.model, jax.tree.map(lambda g: own.alpha * g, slope))
        if adaptive:  # the derivative of the loss by a
            moved = jnp.clip(a - c.lr * project(slope, own.model, w), 0.0, 1.0)
            a = jnp.where(c.number == 0, moved, a)
        return c.sgd, Mixture(v, a)

    return layer("APFL", own=lambda model: Mixture(model, jnp.float32(alpha)), step=step, serve=mix)


def mix(own: Mixture, model: Params) -> Params:
    """Returns a v + (1 - a) w, of a client's own model v and its group's, w."""
    a = own.alpha
    return jax.tree.map(lambda v, w: a * v + (1 - a) * w, own.model, model)
