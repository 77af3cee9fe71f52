"""Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020, https://arxiv.org/abs/2007.07481 (FedNova).

FedAvg favours clients that take more steps. Here each update is divided by its length, how far
the client's steps would go along one and the same gradient, and their mean is multiplied by the
mean length.

Differs from the authors' code: clients are weighed by their shares of the cohort's samples, not of
all clients'; lengths with momentum and a proximal term are those that such steps have.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import check_pull, erm, proximal
from fedjax_cfl.client.sgd import ClientInputs, change_training, sgd
from fedjax_cfl.method import AggregateFn, Method, Round
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import charge, no_clients
from fedjax_cfl.system.reports import make_bill
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import copy_statistics, group_sum, membership_weights
from fedjax_cfl.types import Algorithm, Params, Task, Upload
from fedjax_cfl.validation import BelowOne, NonNegativeFloat, checked


@checked("algorithm")
def fednova(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    mu: NonNegativeFloat = 0.0,
    server_momentum: BelowOne = 0.0,
) -> Algorithm:
    """FedNova for clients of plain SGD, momentum, a proximal term, or both; weight decay counts as
    a part of the gradient.

    Args: `mu` >= 0 is the weight of the proximal term; with one, the mean update is multiplied by
    the mean number of steps instead of the mean length (the code), which clients send, too.
    `server_momentum`, from 0 to below 1, is that of the server's step. Raises InputError for a
    value that is not allowed, and for a step size of 1 / mu or more, with which steps turn back.
    """
    check_pull("algorithm.mu", mu, local.lr)
    pulled = mu > 0
    solve = sgd(task, local, proximal(mu, erm(task)))
    method = Method(
        measure_length(solve, local, mu),
        prepare=charge(lambda r: make_bill(words_up=jnp.where(pulled, 2, 1) * r.real)),
        aggregate=mean_of_normalized(by_steps=pulled),
        server=optax.sgd(1.0, momentum=server_momentum or None),
        start_clients=no_clients,
    )
    return federated(task, local, system, method)


def measure_length(solve: ClientFn, local: Local, mu: float | jax.Array) -> ClientFn:
    """Returns `solve` whose client also sends (length, steps), both [] float32; `local` and `mu`
    are those of `fednova`.
    """
    lr, momentum = local.lr, local.momentum

    def send(c: ClientInputs, model: None, upload: Upload) -> Upload:
        length = find_length(upload.steps, momentum, mu * lr * c.work.lr_scale)
        return upload.replace(extra=(length, upload.steps.astype(jnp.float32)))

    return change_training(solve, send)


def find_length(steps: jax.Array, momentum: float, pull: jax.Array | float) -> jax.Array:
    """Returns how far `steps` [] int32 steps of size 1 along the gradient 1 go, [] float32: with
    `momentum`, and a proximal term of weight `pull`, mu times the step size.
    """

    def step(_, position):
        length, speed = position
        speed = momentum * speed + 1.0 - pull * length
        return length + speed, speed

    return lax.fori_loop(0, steps, step, (jnp.zeros(()), jnp.zeros(())))[0]


def mean_of_normalized(by_steps: bool | jax.Array) -> AggregateFn:
    """Averages updates that are each divided by its length, and multiplies the mean by that of the
    lengths; with `by_steps` by that of the steps. Running statistics are averaged as they are.
    """

    def aggregate(r: Round) -> tuple[Params, jax.Array]:
        upload = r.upload
        mean, mass = weighted_mean(r)
        share = membership_weights(upload.weight, r.group, mass.size)
        share = share / jnp.where(mass > 0, mass, 1.0)
        length, steps = upload.extra
        reach = (share * jnp.where(by_steps, steps, length)[:, None]).sum(0)  # [m]
        # 0 in the slots of updates that are not used
        each = share * reach / jnp.where(length > 0, length, 1.0)[:, None]
        return copy_statistics(group_sum(each, upload.delta), mean), mass

    return aggregate
