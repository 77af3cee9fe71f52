"""Partitions: which client gets which samples of a pool. Every function is `(pool, *, clients,
seed, test_fraction, ...) -> Partition`, and without a pool a recipe, which `federate` and `cfl.run`
take: `iid(clients=40)`.

K clients, N samples, C classes. The legacy generator np.random.RandomState is used
throughout: its streams are frozen, so that a seed is part of a recipe. Arguments that the
pool cannot satisfy raise InputError, as a rule before anything is drawn. Unless a docstring
says otherwise, no two clients have the same sample and the pool's own test split is ignored.
Each client's n samples are shuffled; the first floor((1 - test_fraction) n) are for training.

Args of all of them: `clients` is K; `seed` fixes all draws; `test_fraction`, from 0 to below 1, is
the share of each client's samples that are for testing; `min_samples` of a client, train and test
together, are at most N / K.
"""

import numpy as np

from fedjax_cfl.data import dealing
from fedjax_cfl.data.by_group import class_groups, ifca_rotations, rotated_groups, source_groups
from fedjax_cfl.data.partition_file import from_file
from fedjax_cfl.data.ring import ditto, femnist_power_law, power_law
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool
from fedjax_cfl.validation import (
    BelowOne,
    Count,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_value,
    checked,
)

__all__ = [
    "auto", "by_user", "class_groups", "dirichlet", "dirichlet_per_client", "ditto",
    "femnist_power_law", "from_file", "ifca_rotations", "iid", "power_law", "quantity_skew",
    "rotated_groups", "shards", "source_groups",
]  # fmt: skip

MAX_REDRAWS = 1000  # redraws of a random split before giving up
DEALT = 100  # clients that samples are dealt to, where neither the data nor the user say how many


@checked("partition")
def by_user(
    pool: Pool, *, clients: Count | None = None, seed: Seed = 0, test_fraction: BelowOne = 0.1
) -> Partition:
    """Deals each sample to its natural owner; the pool's own test split is kept where
    it has one.

    Args: `clients` of the owners are drawn, who stay in the order of the pool, None: all; the
    others are those of all partitions. Raises InputError where there are no owners, or fewer.
    """
    rng = dealing.check_partition(by_user, locals())
    if pool.client is None:
        raise InputError(
            "partition=by_user: the dataset names no clients, expected one with natural owners or"
            " another partition"
        )
    named = int(pool.client.max()) + 1
    check_value("partition.clients", named, Count)
    held = dealing.group_places(pool.client, named)
    own = {"concept": pool.concept, "client_names": pool.client_names}
    if clients not in (None, named):
        dealing.check_clients(clients, named, "the owners that the data name")
        chosen = np.sort(rng.choice(named, clients, replace=False))
        held, names = [held[k] for k in chosen], pool.client_names or range(named)
        own["client_names"] = tuple(names[k] for k in chosen)
        own["concept"] = None if pool.concept is None else pool.concept[..., chosen]
    return dealing.split_train_test(held, rng, test_fraction, pool.test)._replace(**own)


@checked("partition")
def auto(
    pool: Pool,
    *,
    clients: Count | None = None,
    alpha: PositiveFloat = 0.5,
    min_samples: NaturalInt = 10,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Deals as `by_user` where the pool names natural owners, else as `dirichlet`.

    Args: `clients` are drawn of the owners or dealt samples, None: all owners, or `DEALT`; the
    others are as those of `dirichlet`; with natural owners only `seed` and `test_fraction` count.
    """
    common = {"seed": seed, "test_fraction": test_fraction}
    if pool.client is not None:
        return by_user(pool, clients=clients, **common)
    dealt = DEALT if clients is None else clients
    try:
        return dirichlet(pool, clients=dealt, alpha=alpha, min_samples=min_samples, **common)
    except InputError as error:
        # who forgot to name them would look for the cause in numbers that they never set
        raise InputError(
            f"{error}. The data name no clients, so samples are dealt; if they have some, name"
            " their column, as dataset.source.client=user, or give an array client"
        ) from None


@checked("partition")
def iid(pool: Pool, *, clients: Count, seed: Seed = 0, test_fraction: BelowOne = 0.1) -> Partition:
    """Deals all samples at random, the same number to every client (plus or minus one)."""
    rng = dealing.check_partition(iid, locals())
    dealing.check_clients(clients, len(pool.y), "at least 1 sample per client")
    dealt = np.array_split(rng.permutation(len(pool.y)), clients)
    return dealing.split_train_test(dealt, rng, test_fraction)


@checked("partition")
def shards(
    pool: Pool,
    *,
    clients: Count,
    shards_per_client: PositiveInt = 2,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Sorts the samples by label, cuts them into K x `shards_per_client` shards and
    deals these at random (McMahan et al. 2017).

    Args: K x `shards_per_client` is at most N; the others are those of all partitions.
    """
    rng = dealing.check_partition(shards, locals())
    if pool.y.ndim > 1:
        raise InputError("partition=shards: samples have several labels, and none to be sorted by")
    dealing.check_range("shards_per_client", shards_per_client, 1, len(pool.y))
    what = f"{shards_per_client} shards of at least 1 sample per client"
    dealing.check_clients(clients, len(pool.y) // shards_per_client, what)
    order = rng.permutation(len(pool.y))
    by_label = order[np.argsort(pool.y[order], kind="stable")]
    pieces = np.array_split(by_label, clients * shards_per_client)
    rows = rng.permutation(len(pieces)).reshape(clients, shards_per_client)
    dealt = [np.concatenate([pieces[i] for i in row]) for row in rows]
    return dealing.split_train_test(dealt, rng, test_fraction)


@checked("partition")
def dirichlet(
    pool: Pool,
    *,
    clients: Count,
    alpha: PositiveFloat,
    min_samples: NaturalInt = 10,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Deals each class over the clients in proportions ~ Dir(alpha), redrawn until
    every client has `min_samples`.

    A client that has reached N / K samples gets nothing of the later classes (Yurochkin
    et al. 2019); all samples are dealt.

    Args: `alpha` > 0, the larger the more even; the others are those of all partitions.
    """
    rng = dealing.check_partition(dirichlet, locals())
    _check_least(pool, clients, min_samples)
    samples = [rng.permutation(part) for part in dealing.by_class(pool)]
    best, even = 0, len(pool.y) / clients
    for _ in range(MAX_REDRAWS):
        sizes, cuts = np.zeros(clients, int), []  # of each class the K + 1 places where it is cut
        for part in samples:
            props = dealing.draw_proportions(rng, clients, alpha, sizes < even)
            cuts.append(np.concatenate([[0], np.round(np.cumsum(props) * len(part)).astype(int)]))
            sizes += np.diff(cuts[-1])
        smallest = sizes.min()
        if smallest >= min_samples:
            pieces = [np.split(part, cut[1:-1]) for part, cut in zip(samples, cuts, strict=True)]
            dealt = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
            return dealing.split_train_test(dealt, rng, test_fraction)
        best = max(best, smallest)
    raise InputError(
        f"partition.min_samples={min_samples}: not met in {MAX_REDRAWS} draws with alpha={alpha}"
        f" and {clients} clients: the smallest client had {best} at best; lower it or"
        " partition.clients, or raise partition.alpha"
    )


def _check_least(pool: Pool, clients: int, min_samples: int) -> None:
    dealing.check_range("min_samples", min_samples, 0, len(pool.y))
    what = f"{min_samples} samples per client"
    dealing.check_clients(clients, len(pool.y) // max(min_samples, 1), what)


@checked("partition")
def dirichlet_per_client(
    pool: Pool,
    *,
    clients: Count,
    alpha: PositiveFloat,
    samples_per_client: Count,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Draws a label distribution p ~ Dir(alpha / C) for each client, then its samples
    (MD-ICFL). Clients share samples.

    Training counts ~ Multinomial(samples_per_client, p) from the training part, test
    counts ~ Multinomial(samples_per_client test_fraction / (1 - test_fraction), p) from
    the test part, so no training sample is a client's test sample. The parts are the
    pool's own, else test_fraction of the pool is set aside. A client repeats a sample
    only if it needs more than the class has.

    Args: `clients` is K; `alpha` > 0, the larger the more even; `samples_per_client` are for
    training; `seed` fixes all draws; `test_fraction`, from 0 to below 1, is that of the pool
    and of the test samples that a client gets.
    """
    rng = dealing.check_partition(dirichlet_per_client, locals())
    mask = dealing.draw_test_mask(rng, pool, test_fraction)
    wanted = samples_per_client, round(samples_per_client * test_fraction / (1 - test_fraction))
    sides = [dealing.by_class(pool, ~mask), dealing.by_class(pool, mask)]
    present = np.array([len(part) > 0 for part in sides[0]])
    held = [], []
    for _ in range(clients):
        props = dealing.draw_proportions(rng, pool.num_classes, alpha / pool.num_classes, present)
        for side, size, out in zip(sides, wanted, held, strict=True):
            out.append(dealing.draw_by_class(rng, side, size, props))
    return dealing.join_clients(*held)


@checked("partition")
def quantity_skew(
    pool: Pool,
    *,
    clients: Count,
    sigma: PositiveFloat = 1.0,
    min_samples: NaturalInt = 10,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Deals all samples at random with uneven sizes: min_samples each, the rest in
    proportion to lognormal(0, sigma).

    Args: `sigma` > 0, the larger the more uneven; the others are those of all partitions.
    """
    rng = dealing.check_partition(quantity_skew, locals())
    _check_least(pool, clients, min_samples)
    props = np.cumsum(rng.lognormal(0, sigma, clients))
    spare = len(pool.y) - clients * min_samples
    cuts = np.round(props / props[-1] * spare).astype(int) + min_samples * np.arange(1, clients + 1)
    return dealing.split_train_test(
        np.split(rng.permutation(len(pool.y)), cuts[:-1]), rng, test_fraction
    )
