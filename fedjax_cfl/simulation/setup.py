"""What a run is made of."""

from typing import NamedTuple

from jax.sharding import Mesh

from fedjax_cfl.data.drift import Drift
from fedjax_cfl.data.scaling import Scaling
from fedjax_cfl.types import Algorithm, FederatedData, Task


class Setup(NamedTuple):
    """What a run is made of, apart from its key and its `Plan`."""

    algorithm: Algorithm
    task: Task
    data: FederatedData
    drift: Drift
    mesh: Mesh
    scaling: Scaling | None = None  # by which the samples of `data` are scaled already
