"""Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization",
ICML 2021, https://arxiv.org/abs/2012.04221.

Beside its group's model, every client trains a model of its own, on the same batches, that is
pulled to the model it received. It is never sent.
"""

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.executor import Loop, Program, then, together
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import as_pytree, sgd, train_from
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import FederatedData, Params, Personal, Task, Upload
from fedjax_cfl.validation import Epochs, NonNegativeFloat, check_arguments


def ditto(*, lam: NonNegativeFloat = 1.0, epochs: Epochs | None = None) -> Personal:
    """Ditto (Algorithm 1). Raises InputError for a value that is not allowed.

    `lam` >= 0 is lambda of F_k(v) + lambda / 2 ||v - w||^2, with the received model w: 0 trains
    alone, a large one gives everybody the model of its group. `epochs` passes train v, None: it
    takes as many steps as the model of the group.
    """
    check_arguments(ditto, locals(), "personal")

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        pulled = proximal(lam, erm(task), center=lambda received: received)
        return Partial(train_both, as_pytree(solve), sgd(task, own_steps(local, epochs), pulled))

    return Personal("Ditto", lambda model: model, train, lambda row, model: row)


def own_steps(local: Local, epochs: int | None) -> Local:
    """Returns how a client trains a model of its own: `epochs` passes, None: as its group's; never
    in sample space, for which the steps of two models cannot be taken one by one.
    """
    direct = local.replace(execution=local.execution._replace(first_layer="direct"))
    return direct if epochs is None else direct.replace(epochs=epochs, steps=None)


def train_both(
    solve: ClientFn,
    train_own: ClientFn,
    client: jax.Array,
    data: FederatedData,
    shared: tuple[jax.Array, Params],
    work: Work,
) -> Program:
    """Returns the program that trains one client's group model, and its own (a `ClientFn`).

    Args: `solve` trains the group's model, `train_own` one that is pulled to its
    `client_extra`; the others are those of a `ClientFn`.
    """
    key, models = shared
    pulled = work._replace(client_extra=take_rows(models, work.group))
    second = train_from(work.own, train_own, client, data, key, pulled)
    assert isinstance(second, Loop)  # it is never one of several, see `own_steps`

    def join(found: tuple[Upload, Upload]) -> Upload:
        upload, mine = found
        own = jax.tree.map(jnp.add, work.own, mine.delta)
        return upload.replace(steps=upload.steps + mine.steps, own=own)

    return then(together(solve(client, data, shared, work), second), join)
