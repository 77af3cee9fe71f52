"""The catalogue of methods: one file per paper, one function (task, local, system, ...) ->
Algorithm per method.
"""

from fedjax_cfl.algorithms.adaptive_fedavg import adaptive_fedavg
from fedjax_cfl.algorithms.auxo import auxo
from fedjax_cfl.algorithms.centralised import centralised
from fedjax_cfl.algorithms.cfl import cfl
from fedjax_cfl.algorithms.cfl_gp import cfl_gp
from fedjax_cfl.algorithms.clove import clove
from fedjax_cfl.algorithms.fedavg import fedavg, fedsgd
from fedjax_cfl.algorithms.fedclust import fedclust
from fedjax_cfl.algorithms.fedcluster import fedcluster
from fedjax_cfl.algorithms.feddane import feddane
from fedjax_cfl.algorithms.feddist import feddist, feddws
from fedjax_cfl.algorithms.feddrift import feddrift, feddrift_eager
from fedjax_cfl.algorithms.feddyn import feddyn
from fedjax_cfl.algorithms.fedem import fedem
from fedjax_cfl.algorithms.fedfomo import fedfomo
from fedjax_cfl.algorithms.fedgwc import fedgwc
from fedjax_cfl.algorithms.fednova import fednova
from fedjax_cfl.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_cfl.algorithms.fedprox import fedprox
from fedjax_cfl.algorithms.fedrc import fedrc
from fedjax_cfl.algorithms.fedsoft import fedsoft
from fedjax_cfl.algorithms.fesem.fesem import fesem
from fedjax_cfl.algorithms.fesem.fesem_ma import fesem_ma
from fedjax_cfl.algorithms.fesem.wecfl import wecfl
from fedjax_cfl.algorithms.fielding.fielding import fielding
from fedjax_cfl.algorithms.fl_hc import fl_hc
from fedjax_cfl.algorithms.flash import flash
from fedjax_cfl.algorithms.flexcfl.flexcfl import fedgroup, flexcfl
from fedjax_cfl.algorithms.flux import flux
from fedjax_cfl.algorithms.ifca.ifca import ifca, ifca_mig
from fedjax_cfl.algorithms.ifca.restarts import ifca_restarts
from fedjax_cfl.algorithms.known_groups import known_groups
from fedjax_cfl.algorithms.md_icfl.md_icfl import md_icfl
from fedjax_cfl.algorithms.nonfed import nonfed
from fedjax_cfl.algorithms.pacfl import pacfl
from fedjax_cfl.algorithms.qfedavg import qfedavg
from fedjax_cfl.algorithms.scaffold import scaffold
from fedjax_cfl.algorithms.stocfl import stocfl
from fedjax_cfl.algorithms.tkm import tkm
from fedjax_cfl.system import select

__all__ = [
    "adaptive_fedavg",
    "auxo",
    "centralised",
    "cfl",
    "cfl_gp",
    "clove",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedclust",
    "fedcluster",
    "feddane",
    "feddist",
    "feddrift",
    "feddrift_eager",
    "feddws",
    "feddyn",
    "fedem",
    "fedfomo",
    "fedgroup",
    "fedgwc",
    "fednova",
    "fedprox",
    "fedrc",
    "fedsgd",
    "fedsoft",
    "fedyogi",
    "fesem",
    "fesem_ma",
    "fielding",
    "fl_hc",
    "flash",
    "flexcfl",
    "flux",
    "ifca",
    "ifca_mig",
    "ifca_restarts",
    "known_groups",
    "md_icfl",
    "nonfed",
    "pacfl",
    "qfedavg",
    "scaffold",
    "stocfl",
    "tkm",
    "wecfl",
]
# who takes part where a caller does not say, as conf/algorithm/ has it; of other methods `uniform`
SELECTIONS = {
    **dict.fromkeys(("cfl", "cfl_gp"), select.full_participation),
    **dict.fromkeys(("auxo", "fedgwc", "fielding"), select.by_group),
    **dict.fromkeys(
        ("fedcluster", "fedem", "fedgroup", "fedrc", "fesem", "fesem_ma", "flexcfl", "ifca",
         "ifca_mig", "ifca_restarts", "known_groups", "tkm", "wecfl"),
        select.rr_then_random,
    ),
}  # fmt: skip


def __dir__() -> list[str]:
    return __all__
