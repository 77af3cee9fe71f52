"""FedFomo and its mixing of models."""

from fedjax_cfl.algorithms.fedfomo.fedfomo import fedfomo

__all__ = ["fedfomo"]
