"""Ma, Long, Zhou, Jiang, Zhang, "On the Convergence of Clustered Federated Learning", 2022,
https://arxiv.org/abs/2202.06187 (WeCFL).

It is FeSEM in which a client counts as often as it has training samples: K-means of the clients'
models with these weights, centers that are weighted means, and local training without a pull.

Differs from the authors' code: groups are those of the E-step before the training, as in our
FeSEM, where the code runs K-means again after it; clients that are not selected count with the
models they sent last, where the code has all clients take part; K-means starts from the models
that all clients have after one local training; whole models are compared, as in the paper, where
the code compares the last layer (`last_layer_distance`).
"""

from fedjax_cfl.algorithms.fesem.fesem import DistanceFn, DistanceName, fesem
from fedjax_cfl.algorithms.fesem.start import cluster_local_models
from fedjax_cfl.client.local import Local
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Task
from fedjax_cfl.validation import PositiveInt, checked


@checked("algorithm")
def wecfl(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    restarts: PositiveInt = 5,
    distance: DistanceName | DistanceFn = "full",
) -> Algorithm:
    """WeCFL with m centers.

    Args: `restarts` are the runs of K-means that the start chooses from; `distance` is that of
    models, full | last_layer (a model with a dense layer `head`).
    """
    start = cluster_local_models(restarts, by_samples=True)
    return fesem(task, local, system, m=m, mu=0.0, start=start, distance=distance)
