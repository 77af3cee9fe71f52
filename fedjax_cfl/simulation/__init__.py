"""A whole run in memory: compiled, run, evaluated."""

from fedjax_cfl.simulation.choose_k import choose_k
from fedjax_cfl.simulation.driver import advance, run, whole

__all__ = ["advance", "choose_k", "run", "whole"]
