"""Clustered federated learning in JAX. Start with `types.py`, then `engine.py`."""

from fedjax_cfl import algorithms, concept, drift, models, partition, select, sources
from fedjax_cfl.choose import choose_k
from fedjax_cfl.data import federate
from fedjax_cfl.engine import federated
from fedjax_cfl.errors import InputError
from fedjax_cfl.faults import Faults
from fedjax_cfl.local import Local
from fedjax_cfl.models import as_task
from fedjax_cfl.run import advance, run, whole
from fedjax_cfl.sharding import mesh_of, use_cpu_cores
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
    "drift",
    "federate",
    "federated",
    "mesh_of",
    "models",
    "partition",
    "run",
    "select",
    "sources",
    "use_cpu_cores",
    "whole",
]
