"""A whole run in memory: compiled, run, evaluated."""

from fedjax_cfl.simulation.check import check_algorithm
from fedjax_cfl.simulation.choose_k import choose_k
from fedjax_cfl.simulation.driver import make_run_fn

__all__ = ["check_algorithm", "choose_k", "make_run_fn"]
