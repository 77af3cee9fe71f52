"""Training outside of a round's own: the first updates of founders, newcomers and
clients whose data shifted.
"""

from fedjax_cfl.round.cohort import over_clients
from fedjax_cfl.round.faults import Faults, sum_fault_counts, with_faults
from fedjax_cfl.round.local import Local, Work
from fedjax_cfl.types import Cohort, FaultCounts, FederatedData, Upload


def train_aside(solve, local: Local):
    """Returns train(cohort, data, (key, models [m, ...]), work) -> (Upload, FaultCounts).

    No simulated faults strike. An update that is not finite is counted and treated as
    `local.faults.nonfinite` says: by default its weight and its delta are 0.
    """
    train = over_clients(with_faults(Faults(nonfinite=local.faults.nonfinite), solve), local)

    def run(cohort: Cohort, data: FederatedData, shared, work: Work) -> tuple[Upload, FaultCounts]:
        upload, counts = train(cohort, data, (shared, (shared[0], ())), work)
        return upload, sum_fault_counts(counts, cohort)

    return run
