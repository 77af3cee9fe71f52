"""Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization",
ICML 2021, https://arxiv.org/abs/2012.04221.

Beside its group's model, every client trains a model of its own, on the same batches, that is
pulled to the model it received. It is never sent.
"""

import jax

from fedjax_cfl.client.steps import Step
from fedjax_cfl.method import Method
from fedjax_cfl.personal.layer import layer
from fedjax_cfl.types import Params
from fedjax_cfl.validation import Epochs, NonNegativeFloat, checked


@checked("personal")
def ditto(*, lam: NonNegativeFloat = 1.0, epochs: Epochs | None = None) -> Method:
    """Ditto (Algorithm 1). Raises InputError for a value that is not allowed.

    `lam` >= 0 is lambda of F_k(v) + lambda / 2 ||v - w||^2, with the received model w: 0 trains
    alone, a large one gives every client the model of its group. `epochs` passes train v, None: it
    takes as many steps as the model of the group.
    """

    def step(c: Step, v: Params) -> Params:
        pulled = jax.tree.map(lambda g, v, w: g + lam * (v - w), c.grad(v), v, c.received)
        return c.descend(v, pulled)

    return layer(
        "Ditto", own=lambda model: model, own_step=step, epochs=epochs, serve=lambda v, model: v
    )
