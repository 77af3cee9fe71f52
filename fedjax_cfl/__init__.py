"""Clustered federated learning in JAX. Start with `types.py`, then `round/engine.py`."""

from fedjax_cfl import algorithms, models
from fedjax_cfl.data import concept, datasets, drift, federate, partition
from fedjax_cfl.errors import InputError
from fedjax_cfl.models import as_task
from fedjax_cfl.round import Faults, Local, federated, select
from fedjax_cfl.sharding import make_mesh, use_cpu_cores
from fedjax_cfl.simulation import choose_k, make_block_fn, make_run_fn, run
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
    "ClientIndex",
    "Faults",
    "FederatedData",
    "Info",
    "InputError",
    "Local",
    "Partition",
    "Pool",
    "ServedModels",
    "State",
    "Task",
    "Upload",
    "algorithms",
    "as_task",
    "choose_k",
    "concept",
    "datasets",
    "drift",
    "federate",
    "federated",
    "make_block_fn",
    "make_mesh",
    "make_run_fn",
    "models",
    "partition",
    "run",
    "select",
    "use_cpu_cores",
]
