"""Fielding and what it represents clients by."""

from fedjax_cfl.algorithms.fielding.fielding import fielding

__all__ = ["fielding"]
