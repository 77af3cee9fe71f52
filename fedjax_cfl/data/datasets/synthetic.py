"""The Synthetic(alpha, beta) data of FedProx."""

import numpy as np

from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, Seed, checked

FEATURES, CLASSES = 60, 10  # of the synthetic data


@checked("dataset.source")
def synthetic(
    alpha: NonNegativeFloat = 1.0,
    beta: NonNegativeFloat = 1.0,
    clients: PositiveInt = 100,
    match_total: PositiveInt | None = 75_349,
    seed: Seed = 0,
    iid: bool = False,
) -> Pool:
    """Returns Synthetic(alpha, beta) of FedProx: 60 features, 10 classes; `client` is
    the device that generated a sample.

    Device k: u ~ N(0, alpha), B ~ N(0, beta) (standard deviations), W [60, 10] and b
    [10] ~ N(u, 1), v [60] ~ N(B, 1), x ~ N(v, diag(j^-1.2)), y = argmax(x W + b),
    int(lognormal(4, 2)) + 50 samples. With `iid`, one W and b ~ N(0, 1) for all and v =
    0. Unless `match_total` is None, the sizes are redrawn until they sum to it within 1
    % (75,349: FedGroup, Table 2).

    Args: `alpha` and `beta` >= 0 are the standard deviations of u and B, 0: all devices share
    them; `clients` is the number of devices; `match_total` is at least 50 for each device;
    `seed` fixes all draws; `iid`: one model for all.
    """
    rng = np.random.RandomState(seed)
    sizes = _synthetic_sizes(rng, clients, match_total)
    scale = np.arange(1, FEATURES + 1) ** -0.6
    shared = rng.normal(0, 1, (FEATURES, CLASSES)), rng.normal(0, 1, CLASSES)
    u, center = rng.normal(0, alpha, clients), rng.normal(0, beta, clients)
    x, y = [], []
    for k, size in enumerate(sizes):
        weights, bias = (
            shared
            if iid
            else (rng.normal(u[k], 1, (FEATURES, CLASSES)), rng.normal(u[k], 1, CLASSES))
        )
        v = 0 if iid else rng.normal(center[k], 1, FEATURES)
        x.append(v + scale * rng.normal(0, 1, (size, FEATURES)))
        y.append(np.argmax(x[-1] @ weights + bias, axis=1))
    client = np.repeat(np.arange(clients), sizes)
    return check_pool(
        Pool(np.concatenate(x).astype(np.float32), np.concatenate(y), CLASSES, client), "synthetic"
    )


def _synthetic_sizes(rng: np.random.RandomState, clients: int, total: int | None) -> np.ndarray:
    if total is not None and 50 * clients > total:
        raise InputError(
            f"dataset.source.clients={clients}: at most {total // 50} are possible with"
            f" match_total={total}, 50 samples each"
        )
    for _ in range(100_000):
        sizes = rng.lognormal(4, 2, clients).astype(int) + 50
        if total is None or abs(sizes.sum() - total) <= 0.01 * total:
            return sizes
    raise InputError(
        f"dataset.source.match_total={total}: not met in 100000 draws of {clients} sizes, expected"
        f" about {400 * clients}"
    )
