"""Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "FedDANE: A Federated Newton-Type
Method", Asilomar 2019, https://arxiv.org/abs/2001.01920.

A round has two phases. First the clients S1 send the gradients of the received model w_t;
their mean is g_t. Then the clients S2 train on their loss with its gradient at w_t
replaced by g_t: F_i(w) + <g_t - grad F_i(w_t), w - w_t> + mu / 2 ||w - w_t||^2.

Differs from the paper: both phases weigh clients by their samples, where the paper draws
them with that probability.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import client_range, make_cohort, over_clients
from fedjax_cfl.client.local import Local, Work, full_work
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import gradient_step, sgd
from fedjax_cfl.method import Method, PrepareFn, Round
from fedjax_cfl.round.engine import federated
from fedjax_cfl.system import faults
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike, as_system
from fedjax_cfl.tree import group_mean
from fedjax_cfl.types import Algorithm, Cohort, Report, Selection, Task, Upload
from fedjax_cfl.validation import NonNegativeFloat, checked


@checked("algorithm")
def feddane(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    mu: NonNegativeFloat | jax.Array = 1.0,
    same_set: bool = False,
) -> Algorithm:
    """FedDANE: two phases in every round.

    Simulated faults happen in the second phase only. The mean leaves out gradients that are not
    finite.

    Args: `mu` >= 0 is the weight of the proximal term; `same_set`: S1 is the cohort itself,
    False: a second, independent draw of the selection.
    """
    objective = proximal(mu, erm(task)).replace(direction=lambda extra: extra)
    method = Method(
        sgd(task, local, objective),
        prepare=gradient_correction(task, local, None if same_set else as_system(system).select),
    )
    return federated(task, local, system, method)


def gradient_correction(task: Task, local: Local, select: Selection | None) -> PrepareFn:
    """Adds g_t - grad F_i(w_t) [S, ...] to the work of each client.

    `select` draws S1; None: S1 is the cohort. The term is 0 if no client in S1 has samples. It
    costs more than FedAvg a gradient up, and g_t down next to w_t: with K clients in each phase
    a round costs 4 K models if the same clients take part in both phases and keep w_t, else 5 K.
    The gradients take the cohort's time, also where S1 is another draw.
    """
    gradient = over_clients(gradient_step(task, local), local.execution)

    def prepare(r: Round) -> tuple[Work, Report]:
        state, data, cohort = r.state, r.data, r.cohort
        draw, noise = jax.random.split(r.key)

        def take_step(cohort: Cohort) -> Upload:  # delta = -lr grad F_i(w_t)
            work = full_work(jnp.zeros_like(cohort.ids))
            return gradient(cohort, data, (noise, state.groups), work)

        own = first = take_step(cohort)
        if select is not None:
            ids = select.select(draw, state.selection, state, data)
            first = take_step(make_cohort(ids, data, local.execution))
        first, *_ = faults.guard_nonfinite("skip", first)
        alone = jnp.zeros(first.weight.shape, jnp.int32)
        mean, mass = group_mean(first.weight, alone, first.delta, 1)
        correction = jax.tree.map(
            lambda own, mean: jnp.where(mass[0] > 0, (own - mean) / local.lr, 0.0), own.delta, mean
        )
        real, samples = r.real, client_range(cohort.ids, data)[0]
        models = real * (1 if select is None else 2)
        sent = make_bill(models, units_up=real, samples=TRAIN_TO_INFERENCE * samples)
        # the gradients of the first phase arrive
        return r.work._replace(client_extra=correction), make_report(early=sent)

    return prepare
