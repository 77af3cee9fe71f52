"""The catalogue: one file per paper, one factory (task, local, select, ...) -> Algorithm per method."""

from fedjax_cfl.algorithms.fedavg import fedavg, fedsgd
from fedjax_cfl.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_cfl.algorithms.fedprox import fedprox
from fedjax_cfl.algorithms.fesem import fesem
from fedjax_cfl.algorithms.flexcfl import fedgroup, flexcfl, rac, rcc
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.algorithms.qfedavg import qfedavg

__all__ = [
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedgroup",
    "fedprox",
    "fedsgd",
    "fedyogi",
    "fesem",
    "flexcfl",
    "ifca",
    "qfedavg",
    "rac",
    "rcc",
]
