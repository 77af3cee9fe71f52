"""Data: pools of samples, who holds them, and how that changes over rounds."""

from fedjax_cfl.data import concept, datasets, drift, partition, perturb, stages, stream
from fedjax_cfl.data.federated import federate
from fedjax_cfl.data.scaling import standardize

__all__ = [
    "concept",
    "datasets",
    "drift",
    "federate",
    "partition",
    "perturb",
    "stages",
    "standardize",
    "stream",
]
