"""Data: pools of samples, who holds them, and how that changes over rounds."""

from fedjax_cfl.data import concept, datasets, drift, partition, perturb, stream
from fedjax_cfl.data.federated import federate

__all__ = ["concept", "datasets", "drift", "federate", "partition", "perturb", "stream"]
