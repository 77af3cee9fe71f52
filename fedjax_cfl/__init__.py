"""Clustered federated learning in JAX. Start with `types.py`, then `round/engine.py`."""

from fedjax_cfl import algorithms, models
from fedjax_cfl.data import concept, datasets, drift, federate, partition
from fedjax_cfl.errors import InputError
from fedjax_cfl.models import as_task
from fedjax_cfl.round import Faults, Local, federated, select
from fedjax_cfl.sharding import mesh_of, use_cpu_cores
from fedjax_cfl.simulation import advance, choose_k, run, whole
from fedjax_cfl.types import Algorithm, FederatedData, Holdings, Info, Pool, Served, State, Task, Upload, View

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Faults",
    "FederatedData",
    "Holdings",
    "Info",
    "InputError",
    "Local",
    "Pool",
    "Served",
    "State",
    "Task",
    "Upload",
    "View",
    "advance",
    "algorithms",
    "as_task",
    "choose_k",
    "concept",
    "datasets",
    "drift",
    "federate",
    "federated",
    "mesh_of",
    "models",
    "partition",
    "run",
    "select",
    "use_cpu_cores",
    "whole",
]
