"""IFCA, its starts and its variants."""

from fedjax_cfl.algorithms.ifca.ifca import ifca, ifca_mig
from fedjax_cfl.algorithms.ifca.restarts import ifca_restarts

__all__ = ["ifca", "ifca_mig", "ifca_restarts"]
