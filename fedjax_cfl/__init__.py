"""Clustered federated learning in JAX. Start with `types.py`, then `round/engine.py`.

What is listed here is imported when it is first used, so that `fedjax-cfl --help`
need not wait for JAX.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_cfl import algorithms, models, personal
    from fedjax_cfl.analysis.runs import load_runs
    from fedjax_cfl.cli.study import study
    from fedjax_cfl.client import Execution, Local, make_execution
    from fedjax_cfl.clustering.clustered import clustered
    from fedjax_cfl.clustering.measure import embeddings, gradients, label_counts, losses
    from fedjax_cfl.data import (
        concept,
        datasets,
        drift,
        federate,
        partition,
        perturb,
        standardize,
        stream,
    )
    from fedjax_cfl.data.datasets import from_arrays, from_frame
    from fedjax_cfl.errors import InputError
    from fedjax_cfl.formatting import to_frame
    from fedjax_cfl.library import compare, draw_run, report, run
    from fedjax_cfl.method import Method, Round
    from fedjax_cfl.models import as_task
    from fedjax_cfl.personal.layer import chain, layer
    from fedjax_cfl.round import federated
    from fedjax_cfl.runs.load import load_run
    from fedjax_cfl.sharding import make_mesh, use_cpu_cores
    from fedjax_cfl.simulation import check_algorithm, make_run_fn
    from fedjax_cfl.simulation.callback import Callback
    from fedjax_cfl.system import Faults, System, select
    from fedjax_cfl.types import (
        Algorithm,
        ClientIndex,
        FederatedData,
        Info,
        Partition,
        Pool,
        ServedModels,
        State,
        Task,
        Upload,
    )

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Callback",
    "ClientIndex",
    "Execution",
    "Faults",
    "FederatedData",
    "Info",
    "InputError",
    "Local",
    "Method",
    "Partition",
    "Pool",
    "Round",
    "ServedModels",
    "State",
    "System",
    "Task",
    "Upload",
    "algorithms",
    "as_task",
    "chain",
    "check_algorithm",
    "clustered",
    "compare",
    "concept",
    "datasets",
    "draw_run",
    "drift",
    "embeddings",
    "federate",
    "federated",
    "from_arrays",
    "from_frame",
    "gradients",
    "label_counts",
    "layer",
    "load_run",
    "load_runs",
    "losses",
    "make_execution",
    "make_mesh",
    "make_run_fn",
    "models",
    "partition",
    "personal",
    "perturb",
    "report",
    "run",
    "select",
    "standardize",
    "stream",
    "study",
    "to_frame",
    "use_cpu_cores",
]
HOMES = {  # where each of them is from, for Python what stands above for type checkers
    "analysis.runs": ("load_runs",),
    "cli.study": ("study",),
    "client": ("Execution", "Local", "make_execution"),
    "clustering.clustered": ("clustered",),
    "clustering.measure": ("embeddings", "gradients", "label_counts", "losses"),
    "data": (
        "concept",
        "datasets",
        "drift",
        "federate",
        "partition",
        "perturb",
        "standardize",
        "stream",
    ),
    "data.datasets": ("from_arrays", "from_frame"),
    "errors": ("InputError",),
    "formatting": ("to_frame",),
    "library": ("compare", "draw_run", "report", "run"),
    "method": ("Method", "Round"),
    "models": ("as_task",),
    "personal.layer": ("chain", "layer"),
    "round": ("federated",),
    "runs.load": ("load_run",),
    "sharding": ("make_mesh", "use_cpu_cores"),
    "simulation": ("check_algorithm", "make_run_fn"),
    "simulation.callback": ("Callback",),
    "system": ("Faults", "System", "select"),
}


def __getattr__(name: str):
    """Imports one of `__all__`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("algorithms", "models", "personal"):
        found: Any = importlib.import_module(f"fedjax_cfl.{name}")
    else:
        home = next((room for room, names in HOMES.items() if name in names), "types")
        found = getattr(importlib.import_module(f"fedjax_cfl.{home}"), name)
    if isinstance(found, ModuleType):  # completion shows what it offers, not what it imports
        vars(found).setdefault("__dir__", lambda: found.__all__)
    return found


def __dir__() -> list[str]:
    return __all__
