"""Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, https://arxiv.org/abs/2111.04263.

FedAvg whose clients' losses change from round to round, see `personal.feddyn`, which also says
what differs: the same over other methods is `personal=feddyn`.
"""

from fedjax_cfl.client.local import Local, add_layer
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.method import Method
from fedjax_cfl.personal.feddyn import feddyn as dynamic_terms
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import no_clients
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Task
from fedjax_cfl.validation import PositiveFloat, checked


@checked("algorithm")
def feddyn(
    task: Task, local: Local, system: SystemLike, *, alpha: PositiveFloat = 0.01
) -> Algorithm:
    """FedDyn (Algorithm 1): one model, unweighted means.

    `alpha` > 0 is the weight of the pull. Other layers (`personal=ditto`) stand over it. Raises
    InputError as `personal.feddyn` does.
    """
    method = Method(sgd(task, local), aggregate=uniform_mean, start_clients=no_clients)
    return federated(task, add_layer(local, dynamic_terms(alpha=alpha)), system, method)
