"""What a client keeps for itself, over any method: one file per idea, one function (...) ->
`Method` per layer. `Local.personal` takes one or several.
"""

from fedjax_cfl.personal.apfl import apfl
from fedjax_cfl.personal.ditto import ditto
from fedjax_cfl.personal.fedala import fedala
from fedjax_cfl.personal.feddyn import feddyn
from fedjax_cfl.personal.fine_tune import fine_tune
from fedjax_cfl.personal.moon import moon
from fedjax_cfl.personal.per_fedavg import per_fedavg
from fedjax_cfl.personal.pfedme import pfedme
from fedjax_cfl.personal.scaffold import scaffold
from fedjax_cfl.personal.split import fedbabu, fedbn, fedper, fedrep, lg_fedavg

__all__ = [
    "apfl",
    "ditto",
    "fedala",
    "fedbabu",
    "fedbn",
    "feddyn",
    "fedper",
    "fedrep",
    "fine_tune",
    "lg_fedavg",
    "moon",
    "per_fedavg",
    "pfedme",
    "scaffold",
]


def __dir__() -> list[str]:
    return __all__
