"""One federated round, from the draw of the cohort to the new group models."""

from fedjax_cfl.round import aggregate, select
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.faults import Faults
from fedjax_cfl.round.local import Local

__all__ = ["Faults", "Local", "aggregate", "federated", "select"]
