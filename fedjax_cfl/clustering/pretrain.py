"""Training outside of a round: the first updates of founders, newcomers and clients
whose data shifted.
"""

from typing import Protocol

from fedjax_cfl.client.cohort import ClientFn, over_clients
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.faults import Faults, sum_fault_counts, with_faults
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.system import SystemLike, as_system
from fedjax_cfl.types import Cohort, FederatedData, Key, Params, Report, Upload


class TrainFn(Protocol):
    """Trains a cohort from models [m, ...]; `shared` is (key, models). Its report has faults
    and the samples [S] of its steps. The caller adds what is sent.
    """

    def __call__(
        self, cohort: Cohort, data: FederatedData, shared: tuple[Key, Params], work: Work
    ) -> tuple[Upload, Report]: ...


def train_aside(solve: ClientFn, local: Local, system: SystemLike) -> TrainFn:
    """Returns a function that trains a cohort by `solve`, without simulated faults.

    An update that is not finite is counted and treated as `faults.nonfinite` of the
    system says:
    by default its weight and its delta are 0.
    """
    guard = Faults(nonfinite=as_system(system).faults.nonfinite)
    train = over_clients(with_faults(guard, solve), local.execution)

    def run(
        cohort: Cohort, data: FederatedData, shared: tuple[Key, Params], work: Work
    ) -> tuple[Upload, Report]:
        upload, counts = train(cohort, data, (shared, (shared[0], ())), work)
        samples = TRAIN_TO_INFERENCE * local.batch_size * upload.steps
        return upload, make_report(fault_counts=sum_fault_counts(counts, cohort), samples=samples)

    return run
