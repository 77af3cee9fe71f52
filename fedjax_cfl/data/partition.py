"""Partitions: who holds which sample of a pool. Every function is `(pool, *, clients,
seed, test_fraction, ...) -> Holdings`.

K clients, N samples, C classes. The legacy generator np.random.RandomState is used
throughout: its streams are frozen, so that a seed is part of a recipe. What is
impossible is refused before anything is drawn. Unless a docstring says otherwise no
sample is held twice, the pool's own test split is ignored, and each client's samples
are shuffled, the first int((1 - test_fraction) n) being train.
"""

from collections.abc import Sequence

import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool

MAX_REDRAWS = 1000  # redraws of a random split before giving up
MAX_CLIENTS = 10_000_000  # a typing error beyond this should not end in a lack of memory


def power_law(
    pool: Pool,
    *,
    clients: int,
    classes_per_client: int = 2,
    sigma: float = 2.0,
    seed_samples: int = 5,
    seed: int = 0,
    test_fraction: float = 0.1,
) -> Partition:
    """Deals classes in a ring with lognormal sizes: FedProx's MNIST recipe (1000
    clients, 2 classes), for any pool.

    Client u owns classes (u + j) mod C. First `seed_samples` of each of its classes,
    then int(props[l, u div C, j]) more, if the class has that many left, else none;
    props = lognormal(0, sigma), scaled so that a class is used up on average.
    """
    rng = _check(clients, seed, test_fraction)
    _check_range("seed_samples", seed_samples, 1, len(pool.y))
    _check_positive("sigma", sigma)
    owns = _ring(
        pool, min(clients, len(pool.y) // seed_samples + 1), classes_per_client
    )  # no more rows than could ever be dealt
    samples, counts = _by_class(pool), np.bincount(pool.y, minlength=pool.num_classes)
    needs = seed_samples * np.cumsum(
        np.eye(pool.num_classes, dtype=int)[owns].sum(axis=1), axis=0
    )  # [K, C], of the first k + 1 clients
    feasible = int((needs <= counts).all(axis=1).sum())
    _check_clients(
        clients,
        feasible,
        f"{seed_samples} samples of each of {classes_per_client} classes per client",
    )
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
    return _split([np.concatenate(parts) for parts in held], rng, test_fraction)


def _ring(pool: Pool, clients: int, classes_per_client: int) -> np.ndarray:
    """Returns the classes of each client, (u + j) mod C [K, c]."""
    _check_range("classes_per_client", classes_per_client, 1, pool.num_classes)
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


def femnist_power_law(
    pool: Pool,
    *,
    clients: int = 200,
    classes_per_client: int = 3,
    variant: str = "disjoint",
    seed: int = 0,
    test_fraction: float = 0.1,
) -> Partition:
    """Deals classes in a ring, about lognormal(4, 1) + 5 samples a client: FedProx's
    FEMNIST recipe (200 clients, 3 classes).

    Client u gets max(2, int(n_u / c)) samples of each class (u + j) mod C. With
    "disjoint" the cursor of a class advances and wraps only when the class is exhausted
    (samples are shared from there on). "released" repeats a defect of the released
    script: the cursor goes back to 0 whenever there IS enough, so clients share the
    first samples, and test samples are others' training samples.
    """
    rng = _check(clients, seed, test_fraction)
    owns = _ring(pool, clients, classes_per_client)
    if variant not in ("disjoint", "released"):
        raise InputError(f"partition.variant={variant}: expected disjoint or released")
    sizes = rng.lognormal(4, 1, clients) + 5
    samples, held = _by_class(pool), []
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
    return _split(held, rng, test_fraction)


def ditto(
    pool: Pool, *, clients: int = 500, seed: int = 233, classes_per_client: int = 5
) -> Partition:
    """Deals the pool's own train and test parts: Ditto's Fashion-MNIST recipe (500
    clients, 5 classes, seed 233).

    Sizes n ~ lognormal(3, 1) + 10, scaled to sum to the training samples; client u,
    class (u + j) mod C: proportion p ~ lognormal(1, 1), normalised, int(p n) + 1
    training and int(p n / ratio) + 1 test samples in order, where ratio = train / test
    samples (6). A class starts again at its first sample if a block would overrun, so a
    few samples are held twice. Official Fashion-MNIST: 61,251 + 11,254.
    """
    rng = _check(clients, seed, 0)
    owns = _ring(pool, clients, classes_per_client)
    if pool.test is None:
        raise InputError(
            "partition=ditto: the dataset has no test split; use another one (fashion_mnist:"
            " dataset.source.split=random)"
        )
    sides = [_by_class(pool, ~pool.test), _by_class(pool, pool.test)]
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
    return _collect(*([np.concatenate(parts) for parts in side] for side in held))


def by_user(pool: Pool, *, seed: int = 0, test_fraction: float = 0.1) -> Partition:
    """Deals each sample to its natural owner; the pool's own test split is kept where
    it has one.
    """
    if pool.client is None:
        raise InputError(
            "partition=by_user: the dataset names no clients, expected one with natural owners or"
            " another partition"
        )
    clients = int(pool.client.max()) + 1
    rng = _check(clients, seed, test_fraction)
    held = _groups(pool.client, clients)
    test = pool.test
    if test is None:
        return _split(held, rng, test_fraction)._replace(natural=True)
    return _collect(
        [part[~test[part]] for part in held], [part[test[part]] for part in held]
    )._replace(natural=True)


def auto(
    pool: Pool,
    *,
    clients: int,
    alpha: float,
    min_samples: int = 10,
    seed: int = 0,
    test_fraction: float = 0.1,
) -> Partition:
    """Deals as `by_user` where the pool names natural owners, else as `dirichlet`."""
    if pool.client is not None:
        return by_user(pool, seed=seed, test_fraction=test_fraction)
    return dirichlet(
        pool,
        clients=clients,
        alpha=alpha,
        min_samples=min_samples,
        seed=seed,
        test_fraction=test_fraction,
    )


def iid(pool: Pool, *, clients: int, seed: int = 0, test_fraction: float = 0.1) -> Partition:
    """Deals all samples at random, the same number to every client (plus or minus one)."""
    rng = _check(clients, seed, test_fraction)
    _check_clients(clients, len(pool.y), "at least 1 sample per client")
    return _split(np.array_split(rng.permutation(len(pool.y)), clients), rng, test_fraction)


def shards(
    pool: Pool,
    *,
    clients: int,
    shards_per_client: int = 2,
    seed: int = 0,
    test_fraction: float = 0.1,
) -> Partition:
    """Sorts the samples by label, cuts them into K x `shards_per_client` shards and
    deals these at random (McMahan et al. 2017).
    """
    rng = _check(clients, seed, test_fraction)
    _check_range("shards_per_client", shards_per_client, 1, len(pool.y))
    _check_clients(
        clients,
        len(pool.y) // shards_per_client,
        f"{shards_per_client} shards of at least 1 sample per client",
    )
    order = rng.permutation(len(pool.y))
    pieces = np.array_split(
        order[np.argsort(pool.y[order], kind="stable")], clients * shards_per_client
    )
    dealt = rng.permutation(len(pieces)).reshape(clients, shards_per_client)
    return _split([np.concatenate([pieces[i] for i in row]) for row in dealt], rng, test_fraction)


def dirichlet(
    pool: Pool,
    *,
    clients: int,
    alpha: float,
    min_samples: int = 10,
    seed: int = 0,
    test_fraction: float = 0.1,
) -> Partition:
    """Deals each class over the clients in proportions ~ Dir(alpha), redrawn until
    every client has `min_samples`.

    A client that has reached N / K samples gets nothing of the later classes (Yurochkin
    et al. 2019); all samples are dealt.
    """
    rng = _check(clients, seed, test_fraction)
    _check_positive("alpha", alpha)
    _check_range("min_samples", min_samples, 0, len(pool.y))
    _check_clients(clients, len(pool.y) // max(min_samples, 1), f"{min_samples} samples per client")
    samples = [rng.permutation(part) for part in _by_class(pool)]
    best = 0
    for _ in range(MAX_REDRAWS):
        cuts = _dirichlet_cuts(rng, [len(part) for part in samples], clients, alpha)
        smallest = sum(np.diff(cut) for cut in cuts).min()
        if smallest >= min_samples:
            pieces = [np.split(part, cut[1:-1]) for part, cut in zip(samples, cuts, strict=True)]
            return _split(
                [np.concatenate(parts) for parts in zip(*pieces, strict=True)], rng, test_fraction
            )
        best = max(best, smallest)
    advice = (
        f"the smallest client had {best} at best; lower it or partition.clients, or raise"
        " partition.alpha"
    )
    raise InputError(
        f"partition.min_samples={min_samples}: not met in {MAX_REDRAWS} draws with alpha={alpha}"
        f" and {clients} clients: {advice}"
    )


def _dirichlet_cuts(
    rng: np.random.RandomState, counts: Sequence[int], clients: int, alpha: float
) -> list[np.ndarray]:
    """Returns for each class the K + 1 places at which its samples are cut."""
    sizes, cuts = np.zeros(clients, int), []
    for count in counts:
        props = _proportions(rng, clients, alpha, sizes < sum(counts) / clients)
        cuts.append(np.concatenate([[0], np.round(np.cumsum(props) * count).astype(int)]))
        sizes += np.diff(cuts[-1])
    return cuts


def dirichlet_per_client(
    pool: Pool,
    *,
    clients: int,
    alpha: float,
    samples_per_client: int,
    seed: int = 0,
    test_fraction: float = 0.1,
) -> Partition:
    """Draws a label distribution p ~ Dir(alpha / C) for each client, then its samples
    (MD-ICFL); samples ARE shared between clients.

    Training counts ~ Multinomial(samples_per_client, p) from the training part, test
    counts ~ Multinomial(samples_per_client test_fraction / (1 - test_fraction), p) from
    the test part, so no training sample is anyone's test sample. The parts are the
    pool's own, else test_fraction of the pool is set aside. A client repeats a sample
    only if it needs more than the class has.
    """
    rng = _check(clients, seed, test_fraction)
    _check_positive("alpha", alpha)
    _check_range("samples_per_client", samples_per_client, 1, 2**31)
    mask = (
        rng.permutation(len(pool.y)) < test_fraction * len(pool.y)
        if pool.test is None
        else pool.test
    )
    wanted = samples_per_client, round(samples_per_client * test_fraction / (1 - test_fraction))
    sides = [_by_class(pool, ~mask), _by_class(pool, mask)]
    present = np.array([len(part) > 0 for part in sides[0]])
    held = [], []
    for _ in range(clients):
        props = _proportions(rng, pool.num_classes, alpha / pool.num_classes, present)
        for side, size, out in zip(sides, wanted, held, strict=True):
            out.append(_draw(rng, side, size, props))
    return _collect(*held)


def _draw(
    rng: np.random.RandomState, by_class: list[np.ndarray], size: int, props: np.ndarray
) -> np.ndarray:
    """Returns about `size` samples with label proportions `props` [C], over the classes
    that have any sample.
    """
    props = np.where([len(part) > 0 for part in by_class], props, 0.0)
    if size == 0 or not props.any():
        return np.zeros(0, int)
    counts = rng.multinomial(size, props / props.sum())
    # Whole passes over a class that is too small, then a part of one: repeats only where they
    # cannot be avoided.
    wanted = [(part, n, -(-n // len(part))) for part, n in zip(by_class, counts, strict=True) if n]
    return np.concatenate(
        [
            np.concatenate([rng.permutation(part) for _ in range(passes)])[:n]
            for part, n, passes in wanted
        ]
    )


def quantity_skew(
    pool: Pool,
    *,
    clients: int,
    sigma: float = 1.0,
    min_samples: int = 10,
    seed: int = 0,
    test_fraction: float = 0.1,
) -> Partition:
    """Deals all samples at random with uneven sizes: min_samples each, the rest in
    proportion to lognormal(0, sigma).
    """
    rng = _check(clients, seed, test_fraction)
    _check_positive("sigma", sigma)
    _check_range("min_samples", min_samples, 0, len(pool.y))
    _check_clients(clients, len(pool.y) // max(min_samples, 1), f"{min_samples} samples per client")
    props = np.cumsum(rng.lognormal(0, sigma, clients))
    spare = len(pool.y) - clients * min_samples
    cuts = np.round(props / props[-1] * spare).astype(int) + min_samples * np.arange(1, clients + 1)
    return _split(np.split(rng.permutation(len(pool.y)), cuts[:-1]), rng, test_fraction)


def _proportions(
    rng: np.random.RandomState, length: int, alpha: float, allowed: np.ndarray
) -> np.ndarray:
    """Returns a draw of Dir(alpha) [length], restricted to the allowed places and normalised."""
    props = rng.dirichlet(np.full(length, alpha)) * allowed
    if props.sum() > 0:
        return props / props.sum()
    # No mass on an allowed place, or alpha so small that the draw underflowed to NaN: its
    # limit, all on one place.
    return np.eye(length)[rng.choice(np.flatnonzero(allowed) if allowed.any() else length)]


def _by_class(pool: Pool, keep: np.ndarray | None = None) -> list[np.ndarray]:
    """Returns the samples of each class in the order of the pool, those where `keep`
    [N] is True.
    """
    parts = _groups(pool.y, pool.num_classes)
    return parts if keep is None else [part[keep[part]] for part in parts]


def _groups(values: np.ndarray, length: int) -> list[np.ndarray]:
    """Returns for each value 0 .. length - 1 the places where it stands, ascending."""
    return np.split(
        np.argsort(values, kind="stable"), np.cumsum(np.bincount(values, minlength=length))[:-1]
    )


def _split(
    held: Sequence[np.ndarray], rng: np.random.RandomState, test_fraction: float
) -> Partition:
    """Shuffles each client's samples and makes the first int((1 - test_fraction) n) of
    them train, the rest test.
    """
    parts = [
        np.split(rng.permutation(part), [int((1 - test_fraction) * len(part))]) for part in held
    ]
    return _collect([train for train, _ in parts], [test for _, test in parts])


def _collect(train: Sequence[np.ndarray], test: Sequence[np.ndarray]) -> Partition:
    """Joins the samples of each client, first all training samples, then all test samples."""
    parts = [*train, *test]
    number = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Partition(
        np.concatenate(parts).astype(np.int64),
        (number % len(train)).astype(np.int32),
        number >= len(train),
    )


def _check(clients: int, seed: int, test_fraction: float) -> np.random.RandomState:
    """Checks what every partition takes and returns its generator."""
    _check_range("clients", clients, 1, MAX_CLIENTS)
    _check_range("seed", seed, 0, 2**32 - 1)
    if not 0 <= test_fraction < 1:
        raise InputError(
            f"partition.test_fraction={test_fraction}: expected 0 <= test_fraction < 1"
        )
    return np.random.RandomState(seed)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    """Raises unless `value` is a whole number in low .. high."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or not low <= value <= high
    ):
        raise InputError(f"partition.{name}={value}: expected an integer, {low} .. {high}")


def _check_positive(name: str, value: float) -> None:
    """Raises unless `value` is a finite number above 0."""
    if not 0 < value < np.inf:
        raise InputError(f"partition.{name}={value}: expected a number above 0")


def _check_clients(clients: int, limit: int, what: str) -> None:
    """Raises if more clients are asked for than the pool can serve."""
    if clients > limit:
        raise InputError(
            f"partition.clients={clients}: at most {limit} clients are possible with {what}; lower"
            " dataset.clients or partition.clients"
        )
