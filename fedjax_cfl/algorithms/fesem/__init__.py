"""FeSEM, its start, and FeSEM with matched averaging."""

from fedjax_cfl.algorithms.fesem.fesem import fesem
from fedjax_cfl.algorithms.fesem.fesem_ma import fesem_ma

__all__ = ["fesem", "fesem_ma"]
