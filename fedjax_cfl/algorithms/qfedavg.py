"""Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR
2020, https://arxiv.org/abs/1905.10497.

A client counts by the q-th power of its loss of the received model, so that clients with
a high loss count more.
"""

import jax.numpy as jnp

from fedjax_cfl.client.cohort import client_range, over_clients
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.objective import training_loss
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.method import Method, PrepareFn, Round
from fedjax_cfl.round.aggregate import q_fair
from fedjax_cfl.round.client_rows import take_cohort_rows
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import no_clients
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Report, Task
from fedjax_cfl.validation import NonNegativeFloat, checked


@checked("algorithm")
def qfedavg(
    task: Task, local: Local, system: SystemLike, *, q: NonNegativeFloat = 1.0
) -> Algorithm:
    """q-FedAvg: clients are weighted by their loss to the power `q`."""
    method = Method(
        sgd(task, local),
        prepare=attach_losses(task, local),
        aggregate=q_fair(q, local),
        start_clients=no_clients,
    )
    return federated(task, local, system, method)


def attach_losses(task: Task, local: Local) -> PrepareFn:
    """Gives each client its training loss of the model that it received, which `q_fair`
    weighs it by, and which is one word up.
    """
    loss = over_clients(training_loss(task, True, local), local.execution)

    def prepare(r: Round) -> tuple[Work, Report]:
        cohort = r.cohort
        rows = take_cohort_rows(r.state, cohort, local.execution.mesh)
        each = loss(cohort, r.data, r.state.groups, rows)
        own = jnp.take_along_axis(each, r.work.group[:, None], axis=1)[:, 0]
        samples = client_range(cohort.ids, r.data)[0]
        sent = make_bill(words_up=samples > 0, samples=samples)
        return r.work._replace(client_extra=own), make_report(sent)

    return prepare
