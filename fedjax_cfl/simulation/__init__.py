"""A whole run in memory: compiled, run, evaluated."""

from fedjax_cfl.simulation.check import check_algorithm
from fedjax_cfl.simulation.driver import make_run_fn

__all__ = ["check_algorithm", "make_run_fn"]
