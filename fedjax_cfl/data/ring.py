"""Partitions that deal classes in a ring: the released recipes of MNIST, FEMNIST and
Fashion-MNIST, under the rules of `partition`.
"""

from typing import Literal

import numpy as np

from fedjax_cfl.data import dealing
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool
from fedjax_cfl.validation import BelowOne, Count, PositiveFloat, PositiveInt, Seed, checked


@checked("partition")
def power_law(
    pool: Pool,
    *,
    clients: Count,
    classes_per_client: PositiveInt = 2,
    sigma: PositiveFloat = 2.0,
    seed_samples: PositiveInt = 5,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Deals classes in a ring with lognormal sizes: FedProx's MNIST recipe (1000
    clients, 2 classes), for any pool.

    Client u owns classes (u + j) mod C. First `seed_samples` of each of its classes,
    then int(props[l, u div C, j]) more, if the class has that many left, else none;
    props = lognormal(0, sigma), scaled so that a class is used up on average.

    Args: `clients` is K, as far as the seed samples suffice; `classes_per_client` is from 1 to C;
    `sigma` > 0 is that of the lognormal; the others are those of all partitions.
    """
    rng = dealing.check_partition(power_law, locals())
    dealing.check_range("seed_samples", seed_samples, 1, len(pool.y))
    # no more rows than could ever be dealt
    owns = _ring(pool, min(clients, len(pool.y) // seed_samples + 1), classes_per_client)
    samples, counts = dealing.by_class(pool), np.bincount(pool.y, minlength=pool.num_classes)
    # [K, C], of the first k + 1 clients
    needs = seed_samples * np.cumsum(np.eye(pool.num_classes, dtype=int)[owns].sum(axis=1), axis=0)
    feasible = int((needs <= counts).all(axis=1).sum())
    what = f"{seed_samples} samples of each of {classes_per_client} classes per client"
    dealing.check_clients(clients, feasible, what)
    extra = _scaled_lognormal(rng, owns, counts - needs[-1], sigma)
    held, cursor = [[] for _ in range(clients)], np.zeros(pool.num_classes, int)
    for u, j in np.ndindex(*owns.shape):
        held[u].append(samples[owns[u, j]][cursor[owns[u, j]] :][:seed_samples])
        cursor[owns[u, j]] += seed_samples
    for u, j in np.ndindex(*owns.shape):
        label, take = owns[u, j], extra[u, j]
        if cursor[label] + take < counts[label]:
            held[u].append(samples[label][cursor[label] : cursor[label] + take])
            cursor[label] += take
    return dealing.split_train_test([np.concatenate(parts) for parts in held], rng, test_fraction)


def _ring(pool: Pool, clients: int, classes_per_client: int) -> np.ndarray:
    """Returns the classes of each client, (u + j) mod C [K, c]."""
    dealing.check_range("classes_per_client", classes_per_client, 1, pool.num_classes)
    return (np.arange(clients)[:, None] + np.arange(classes_per_client)) % pool.num_classes


def _scaled_lognormal(
    rng: np.random.RandomState, owns: np.ndarray, spare: np.ndarray, sigma: float
) -> np.ndarray:
    """Returns whole numbers [K, c]: lognormal draws, scaled so that those of class l
    sum to spare[l] before they are cut to integers.
    """
    (clients, per_client), classes = owns.shape, len(spare)
    place = owns, np.arange(clients)[:, None] // classes, np.arange(per_client)
    draws = rng.lognormal(0, sigma, (classes, -(-clients // classes), per_client))
    used = np.zeros_like(draws)
    used[place] = draws[place]  # everything, where C divides K
    totals = used.sum(axis=(1, 2), keepdims=True)
    return (spare[:, None, None] * used / np.where(totals > 0, totals, 1))[place].astype(int)


@checked("partition")
def femnist_power_law(
    pool: Pool,
    *,
    clients: Count = 200,
    classes_per_client: PositiveInt = 3,
    variant: Literal["disjoint", "released"] = "disjoint",
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Deals classes in a ring, about lognormal(4, 1) + 5 samples a client: FedProx's
    FEMNIST recipe (200 clients, 3 classes).

    Client u gets max(2, int(n_u / c)) samples of each class (u + j) mod C. With "disjoint" the
    cursor of a class advances, and goes back to 0 only when the class is exhausted; from then
    on clients share samples. "released" repeats a defect of the released script: the cursor
    goes back to 0 whenever there are enough samples left. So clients share the first samples,
    and a test sample of one client may be a training sample of another.

    Args: `classes_per_client` is c, from 1 to C; `variant` is disjoint | released; the others are
    those of all partitions.
    """
    rng = dealing.check_partition(femnist_power_law, locals())
    owns = _ring(pool, clients, classes_per_client)
    sizes = rng.lognormal(4, 1, clients) + 5
    samples, held = dealing.by_class(pool), []
    cursor = np.zeros(pool.num_classes, int)
    for u in range(clients):
        parts = []
        take = max(2, int(sizes[u] / classes_per_client))
        for label in owns[u]:
            enough = cursor[label] + take <= len(samples[label])
            if enough == (variant == "released"):
                cursor[label] = 0
            parts.append(samples[label][cursor[label] : cursor[label] + take])
            cursor[label] += take
        held.append(np.concatenate(parts))
    return dealing.split_train_test(held, rng, test_fraction)


@checked("partition")
def ditto(
    pool: Pool, *, clients: Count = 500, seed: Seed = 233, classes_per_client: PositiveInt = 5
) -> Partition:
    """Deals the pool's own train and test parts: Ditto's Fashion-MNIST recipe (500
    clients, 5 classes, seed 233).

    Sizes are n ~ lognormal(3, 1) + 10, scaled to sum to the training samples. Client u has the
    classes (u + j) mod C in proportions p ~ lognormal(1, 1), normalised. Of each it gets
    int(p n) + 1 training and int(p n / ratio) + 1 test samples in order, where ratio = train /
    test samples (6). A class starts again at its first sample if a block would overrun, so that
    clients share a few samples. Official Fashion-MNIST: 61,251 + 11,254.
    """
    rng = dealing.check_partition(ditto, locals())
    owns = _ring(pool, clients, classes_per_client)
    if pool.test is None:
        raise InputError(
            "partition=ditto: the dataset has no test split; use another one (fashion_mnist:"
            " dataset.source.split=random)"
        )
    sides = [dealing.by_class(pool, ~pool.test), dealing.by_class(pool, pool.test)]
    if not all(len(part) for side in sides for part in side):
        raise InputError(
            "partition=ditto: a class has no training or no test samples, expected every class in"
            " both"
        )
    ratio = (~pool.test).sum() / pool.test.sum()
    sizes = rng.lognormal(3, 1, clients) + 10
    sizes = (~pool.test).sum() * sizes / sizes.sum()
    cursor = np.zeros((2, pool.num_classes), int)
    held = [[[] for _ in range(clients)] for _ in sides]
    for u in range(clients):
        props = rng.lognormal(1, 1, classes_per_client)
        props /= props.sum()
        for label, share in zip(owns[u], props * sizes[u], strict=True):
            for t, take in enumerate((int(share) + 1, int(share / ratio) + 1)):
                if cursor[t, label] + take > len(sides[t][label]):
                    cursor[t, label] = 0
                held[t][u].append(sides[t][label][cursor[t, label] : cursor[t, label] + take])
                cursor[t, label] += take
    return dealing.join_clients(*([np.concatenate(parts) for parts in side] for side in held))
