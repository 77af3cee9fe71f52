"""Auxo and its scores."""

from fedjax_cfl.algorithms.auxo.auxo import auxo

__all__ = ["auxo"]
