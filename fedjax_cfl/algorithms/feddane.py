"""Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "FedDANE: A Federated Newton-Type
Method", Asilomar 2019, https://arxiv.org/abs/2001.01920.

A round has two phases: clients S1 send their gradients of the received model, whose
mean is g_t; clients S2 then train on their loss with its gradient at w_t replaced by
g_t: F_i(w) + <g_t - grad F_i(w_t), w - w_t> + mu / 2 ||w - w_t||^2. Differs from the
paper: both phases weigh clients by their samples, where the paper draws them with that
probability.
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.round import faults
from fedjax_cfl.round.cohort import make_cohort, over_clients
from fedjax_cfl.round.engine import federated, serve_global
from fedjax_cfl.round.hooks import Hooks, make_report
from fedjax_cfl.round.local import Work, full_work
from fedjax_cfl.round.objective import add_linear_term, erm, proximal
from fedjax_cfl.round.sgd import gradient_step, sgd
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, State


def feddane(task, local, select, *, mu=1.0, same_set: bool = False) -> Algorithm:
    """FedDANE: S1 is a second, independent draw of `select`, or with `same_set` the
    cohort itself.

    Simulated faults strike in the second phase; gradients that are not finite are left
    out of the mean.
    """
    local, objective = local.resolve(), proximal(mu, erm(task))
    algorithm = federated(
        task,
        local,
        select,
        Hooks(
            sgd(task, local, add_linear_term(lambda direction: direction, objective)),
            assign=assign_with_s1_traffic(same_set),
            prepare=gradient_correction(task, local, None if same_set else select),
        ),
    )
    return algorithm._replace(serve=serve_global, clustered=False)  # `assign` only adds to the bill


def gradient_correction(task, local, select):
    """Returns prepare(...), which adds g_t - grad F_i(w_t) [S, ...] to the work; `select`
    draws S1, None: S1 is the cohort. Zero if nobody in S1 has samples.
    """
    gradient = over_clients(gradient_step(task, local), local)

    def prepare(key, state: State, data: FederatedData, cohort: Cohort, work: Work) -> Work:
        draw, noise = jax.random.split(key)

        def asked(cohort):
            return gradient(
                cohort, data, (noise, state.groups), full_work(jnp.zeros_like(cohort.ids))
            )  # delta = -lr grad F_i(w_t)

        own = asked(cohort)
        first = (
            own
            if select is None
            else asked(make_cohort(select.select(draw, state.selection, state, data), data, local))
        )
        first, *_ = faults.guard_nonfinite("skip", first)
        mean, mass = group_mean(
            first.weight, jnp.zeros(first.weight.shape, jnp.int32), first.delta, 1
        )
        correction = jax.tree.map(
            lambda own, mean: jnp.where(mass[0] > 0, (own - mean) / local.lr, 0.0), own.delta, mean
        )
        return work._replace(client_extra=correction)

    return prepare


def assign_with_s1_traffic(same_set: bool):
    """Returns assign(...): everybody trains group 0; the bill of what FedAvg does not
    send.

    With K clients in each phase that is a gradient up, and g_t down next to w_t: 4 K in
    all if the same clients serve both phases and keep w_t, else 5 K.
    """

    def assign(key, state: State, data: FederatedData, cohort: Cohort):
        real = (cohort.ids < data.num_clients).astype(jnp.int32)
        sent = make_traffic(units_down=real * (1 if same_set else 2), units_up=real)
        return jnp.zeros_like(cohort.ids), make_report(sent)

    return assign
