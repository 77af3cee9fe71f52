"""MD-ICFL: the federated model distance and the samples that it is measured on."""

from fedjax_cfl.algorithms.md_icfl.md_icfl import md_icfl

__all__ = ["md_icfl"]
