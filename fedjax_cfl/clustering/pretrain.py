"""Training outside of a round: the first updates of founders, newcomers and clients
whose data shifted.
"""

from typing import Protocol

import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import ClientFn, over_clients
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.faults import Faults, sum_fault_counts, with_faults
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.system import SystemLike, as_system
from fedjax_cfl.types import Cohort, FederatedData, Key, Params, Report, Upload


class TrainFn(Protocol):
    """Trains a cohort, all of it from one `model` [1, ...]. Its report has faults and the
    samples [S] of its steps. The caller adds what is sent.

    Args: `lr_scale` multiplies the step size; the others are those of a round.
    """

    def __call__(
        self,
        key: Key,
        model: Params,
        cohort: Cohort,
        data: FederatedData,
        lr_scale: ArrayLike = 1.0,
    ) -> tuple[Upload, Report]: ...


def train_aside(solve: ClientFn, local: Local, system: SystemLike) -> TrainFn:
    """Returns a function that trains a cohort by `solve`, without simulated faults.

    An update that is not finite is counted and treated as `faults.nonfinite` of the system says:
    by default its weight and its delta are 0.
    """
    guard = Faults(nonfinite=as_system(system).faults.nonfinite)
    train = over_clients(with_faults(guard, solve), local.execution)

    def run(
        key: Key,
        model: Params,
        cohort: Cohort,
        data: FederatedData,
        lr_scale: ArrayLike = 1.0,
    ) -> tuple[Upload, Report]:
        work = full_work(jnp.zeros_like(cohort.ids), lr_scale)
        upload, counts = train(cohort, data, ((key, model), (key, ())), work)
        samples = TRAIN_TO_INFERENCE * local.batch_size * upload.steps
        return upload, make_report(fault_counts=sum_fault_counts(counts, cohort), samples=samples)

    return run
