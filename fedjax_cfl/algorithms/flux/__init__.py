"""FLUX and its descriptions of clients."""

from fedjax_cfl.algorithms.flux.flux import flux

__all__ = ["flux"]
