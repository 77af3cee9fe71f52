"""FeSEM, its start, FeSEM with matched averaging, and WeCFL."""

from fedjax_cfl.algorithms.fesem.fesem import fesem
from fedjax_cfl.algorithms.fesem.fesem_ma import fesem_ma
from fedjax_cfl.algorithms.fesem.wecfl import wecfl

__all__ = ["fesem", "fesem_ma", "wecfl"]
