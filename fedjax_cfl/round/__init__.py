"""One federated round, from the draw of the cohort to the new group models."""

from fedjax_cfl.round import aggregate
from fedjax_cfl.round.engine import federated

__all__ = ["aggregate", "federated"]
