"""What partitions share: checks, draws, and how a `Partition` is made."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
from numpy.random import RandomState

from fedjax_cfl.data.federated import check_classes, take_holdings
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool
from fedjax_cfl.validation import check_value, whole

# recipes that look at no labels, or, as shards, at their order alone
WITHOUT_CLASSES = ("by_user", "from_file", "iid", "quantity_skew", "shards")
LEAST_TO_SHARE = 10  # training samples of a client, below which none is set apart


def draw_proportions(
    rng: RandomState, length: int, alpha: float, allowed: np.ndarray
) -> np.ndarray:
    """Returns a draw of Dir(alpha) [length], restricted to the allowed places and normalised."""
    props = rng.dirichlet(np.full(length, alpha)) * allowed
    if props.sum() > 0:
        return props / props.sum()
    # No mass on an allowed place, or alpha so small that the draw underflowed to NaN: its
    # limit, all on one place.
    return np.eye(length)[rng.choice(np.flatnonzero(allowed) if allowed.any() else length)]


def draw_by_class(
    rng: RandomState, parts: list[np.ndarray], size: int, props: np.ndarray
) -> np.ndarray:
    """Returns about `size` samples with label proportions `props` [C], over the classes
    that have any sample.
    """
    props = np.where([len(part) > 0 for part in parts], props, 0.0)
    if size == 0 or not props.any():
        return np.zeros(0, int)
    counts = rng.multinomial(size, props / props.sum())
    # Whole passes over a class that is too small, then a part of one: repeats only where they
    # cannot be avoided.
    wanted = [(part, n, -(-n // len(part))) for part, n in zip(parts, counts, strict=True) if n]
    return np.concatenate(
        [
            np.concatenate([rng.permutation(part) for _ in range(passes)])[:n]
            for part, n, passes in wanted
        ]
    )


def by_class(pool: Pool, keep: np.ndarray | None = None) -> list[np.ndarray]:
    """Returns the samples of each class in the order of the pool, those where `keep`
    [N] is True.
    """
    parts = group_places(pool.y, pool.num_classes)
    return parts if keep is None else [part[keep[part]] for part in parts]


def group_places(values: np.ndarray, length: int) -> list[np.ndarray]:
    """Returns for each value 0 .. length - 1 the places where it stands, ascending."""
    return np.split(
        np.argsort(values, kind="stable"), np.cumsum(np.bincount(values, minlength=length))[:-1]
    )


def count_train(count: int, test_fraction: float) -> int:
    """Returns floor((1 - test_fraction) count), with the fraction as it is written: in floating
    point, (1 - 0.8) * 5 is below 1.
    """
    return int((1 - Fraction(repr(float(test_fraction)))) * count)


def draw_test_mask(rng: RandomState, pool: Pool, test_fraction: float) -> np.ndarray:
    """Returns which samples are for testing [N] bool: the pool's own, else a random share."""
    if pool.test is not None:
        return pool.test
    samples = len(pool.y)
    return rng.permutation(samples) < samples - count_train(samples, test_fraction)


def split_train_test(
    held: Sequence[np.ndarray],
    rng: RandomState,
    test_fraction: float,
    test: np.ndarray | None = None,
) -> Partition:
    """Shuffles each client's samples and makes the first floor((1 - test_fraction) n) of
    them train, the rest test; where `test` [N] says which samples are for testing, they stay so,
    in their order.
    """
    if test is None:
        parts = [
            np.split(rng.permutation(part), [count_train(len(part), test_fraction)])
            for part in held
        ]
    else:
        parts = [[part[test[part] == side] for side in (False, True)] for part in held]
    return join_clients([train for train, _ in parts], [test for _, test in parts])


def draw_samples(rng: RandomState, held: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Returns `count` samples of each client, drawn of those it would have. Raises InputError for a
    client that has fewer.
    """
    least = min(map(len, held))
    if count > least:
        raise InputError(
            f"partition.samples_per_client={count}: a client would have {least}; lower it or"
            " partition.clients"
        )
    return [rng.permutation(part)[:count] for part in held]


def join_clients(train: Sequence[np.ndarray], test: Sequence[np.ndarray]) -> Partition:
    """Joins the samples of each client, first all training samples, then all test samples."""
    parts = [*train, *test]
    number = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Partition(
        np.concatenate(parts).astype(np.int64),
        (number % len(train)).astype(np.int32),
        number >= len(train),
    )


def set_apart_validation(
    holdings: Partition, share: float, seed: int, part: Literal["test", "validation", "both"]
) -> Partition:
    """Takes a share of each client's training samples out of its training, for the choice between
    runs: at least two of them and never all, and none where a client has fewer than ten.

    Args: `share` in [0, 1); `part`: what the client is tested on, its test samples, or, as if it
    had no others, those that were set apart; the samples of the other part are left out. With both,
    they are kept as `validation`. Raises InputError where the last client then has none.
    """
    rng, count = RandomState(seed), int(holdings.owner.max(initial=-1)) + 1
    train = np.flatnonzero(~holdings.test)
    apart = np.zeros(len(holdings.sample), bool)
    for own in group_places(holdings.owner[train], count):
        if len(own) >= LEAST_TO_SHARE:
            kept = max(1, min(count_train(len(own), share), len(own) - 2))
            apart[train[rng.permutation(own)[kept:]]] = True
    if part == "both":
        return holdings._replace(validation=apart)
    keep = ~apart if part == "test" else apart | ~holdings.test
    if count and not keep[holdings.owner == count - 1].any():
        raise InputError(
            f"evaluate.part={part}: client {count - 1} has no training samples, and would be none;"
            " leave it out of the data"
        )
    tested = holdings.test if part == "test" else apart
    return take_holdings(holdings._replace(test=tested), keep)


def check_partition(recipe: Callable[..., Partition], values: Mapping[str, Any]) -> RandomState:
    """Checks the arguments that a recipe was given, and returns its generator. Raises InputError
    where it deals classes, and the pool has none.
    """
    if recipe.__name__ not in WITHOUT_CLASSES:
        remedy = "name clients in the data, or use partition=iid, quantity_skew or shards"
        check_classes(values["pool"], f"partition={recipe.__name__}", remedy)
    return RandomState(values["seed"])


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raises unless `value` is a whole number in low .. high, which the pool decides."""
    check_value(f"partition.{name}", value, Annotated[int, whole(low, high)])


def check_clients(clients: int, limit: int, what: str) -> None:
    """Raises if there are to be more clients than the pool can serve."""
    if clients > limit:
        raise InputError(
            f"partition.clients={clients}: at most {limit} clients are possible with {what}; lower"
            " dataset.clients or partition.clients"
        )
