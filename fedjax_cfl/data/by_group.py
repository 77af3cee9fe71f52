"""Partitions with true groups of clients: the constructions of MD-ICFL, IFCA and CLoVE.

MD-ICFL: "Communication-efficient clustered federated learning via model distance", Machine
Learning 2024. IFCA: Ghosh et al., "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020, https://arxiv.org/abs/2006.04088. CLoVE: Bhatia et al., ICML 2026. A group differs
from the others by the turn and the label map of its samples (see `transform`), by their source, or
by its classes. K clients, N holdings, C classes, G groups.
"""

import re
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from typing_extensions import TypeAliasType

from fedjax_cfl.data import dealing
from fedjax_cfl.data.concept import check_square
from fedjax_cfl.data.federated import TURNS
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool
from fedjax_cfl.validation import (
    BelowOne,
    Count,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Seed,
    checked,
)

Drawn = Annotated[
    str,
    Rule(
        "drawn:N with such a number, where each client draws its group",
        lambda text: re.fullmatch("drawn:[1-9][0-9]{0,6}", text),
    ),
]
# clients of each group; drawn:N: each client draws its group, N of them is the mean
GroupSize = TypeAliasType("GroupSize", Count | Drawn)
Classes = TypeAliasType(
    "Classes",
    Annotated[
        Sequence[Sequence[NaturalInt]],
        Rule(
            "a list of lists of classes, one for each group, as [[0,1],[2,3]]",
            lambda value: value and all(value),
        ),
    ],
)
EVEN, STEP = 0.1, 0.05  # of a class, dealt evenly beside the Dirichlet shares; more, step by step


@checked("partition")
def class_groups(
    pool: Pool,
    *,
    clients: Count,
    classes: Classes,
    samples_per_client: Count,
    others: BelowOne = 0.0,
    alpha: PositiveFloat | None = None,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Deals each class to the groups of clients that have it, and the samples of a group at random
    to its clients: the label skews of CLoVE.

    Args: client k is in group k mod G; `classes` are those of each group; `samples_per_client`,
    train and test together; the share `others` of a class goes evenly to the groups that do not
    have it; `alpha`: the rest goes to those that have it in Dirichlet shares, but for a tenth, or
    as much as must be for every group to have enough, which is dealt evenly, None: all of it. A
    class that no group has is left out; the others are those of all partitions. Raises InputError
    for classes that the data do not have, and for groups that have too few samples.
    """
    rng = dealing.check_partition(class_groups, locals())
    highest = max(map(max, classes))
    dealing.check_range("classes", highest, 0, pool.num_classes - 1)
    concept = np.arange(clients, dtype=np.int32) % len(classes)
    members = np.bincount(concept, minlength=len(classes))
    has = np.zeros((len(classes), pool.num_classes), bool)
    for row, own in zip(has, classes, strict=True):
        row[list(own)] = True
    samples = dealing.by_class(pool)
    counts, even = np.array([len(part) for part in samples]), EVEN if alpha else 1.0
    while True:
        shares = _share_classes(rng, has, others, alpha, even)
        if even >= 1 or (shares @ counts >= members * samples_per_client + len(counts)).all():
            break
        even += STEP
    cuts = np.round(np.cumsum(shares, axis=0) * counts).astype(int)  # [G, C]
    pieces = [
        np.split(rng.permutation(part), cut)[:-1] for part, cut in zip(samples, cuts.T, strict=True)
    ]
    held: list[np.ndarray] = [np.zeros(0, int)] * clients
    for group, parts in enumerate(zip(*pieces, strict=True)):
        own = np.flatnonzero(concept == group)
        dealt = np.array_split(rng.permutation(np.concatenate(parts)), max(1, len(own)))
        for k, part in zip(own, dealt, strict=False):
            held[k] = part
    held = dealing.draw_samples(rng, held, samples_per_client)
    return dealing.split_train_test(held, rng, test_fraction)._replace(concept=concept)


def _share_classes(
    rng: np.random.RandomState, has: np.ndarray, others: float, alpha: float | None, even: float
) -> np.ndarray:
    """Returns what part of each class goes to each group [G, C]: of those that have it [G, C] in
    Dirichlet shares, but for a part `even`; of the others `others` in all.
    """
    shares = np.zeros(has.shape)
    for share, own in zip(shares.T, has.T, strict=True):
        if not own.any():
            continue
        rest = others if not own.all() else 0.0
        share[own] = even / own.sum()
        if even < 1:
            share[own] += (1 - even) * rng.dirichlet(np.full(own.sum(), alpha))
        share *= 1 - rest
        share[~own] = rest / max(1, (~own).sum())
    return shares


@checked("partition")
def rotated_groups(
    pool: Pool,
    *,
    clients_per_group: GroupSize = 12,
    samples_per_client: Count = 1000,
    test_samples: PositiveInt | None = None,
    alpha: PositiveFloat = 100.0,
    swap_labels: bool = False,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Deals one pool to four groups that see it turned by 0, 90, 180 and 270 degrees (MD-ICFL,
    Rotated MNIST).

    Samples are drawn as in `source_groups`, from the whole pool.

    Args: `clients_per_group`, so that K is four times as many; as text drawn:N each client draws
    its group, as in the paper, and N is the mean (what clients hold stays the same);
    `samples_per_client` training samples; `test_samples` of each client, None: all that are for
    testing; `alpha` > 0: label shares are Dir(alpha / C), the larger the more even; `swap_labels`:
    group j also has classes 2 j + 1 and 2 j + 2 exchanged (Swapped rotated CIFAR10), which needs 9
    classes; `seed` fixes all draws; `test_fraction`, from 0 to below 1, is for testing where the
    pool has no test split.
    """
    rng = dealing.check_partition(rotated_groups, locals())
    check_square(pool.x, "partition=rotated_groups")
    maps = None
    if swap_labels:
        maps = np.tile(np.arange(pool.num_classes, dtype=np.int32), (TURNS, 1))
        if pool.num_classes < 2 * TURNS + 1:
            raise InputError(
                f"partition.swap_labels=True: {pool.num_classes} classes, expected at least"
                f" {2 * TURNS + 1}"
            )
        for group, row in enumerate(maps):
            row[[2 * group + 1, 2 * group + 2]] = row[[2 * group + 2, 2 * group + 1]]
    mask = dealing.draw_test_mask(rng, pool, test_fraction)
    concept = _deal_clients(TURNS, clients_per_group, seed)
    held = _draw_group(rng, pool, mask, len(concept), samples_per_client, test_samples, alpha)
    return _turn(pool, held, concept, maps)


@checked("partition")
def source_groups(
    pool: Pool,
    *,
    clients_per_group: GroupSize = 12,
    samples_per_client: Count = 1000,
    test_samples: PositiveInt | None = None,
    alpha: PositiveFloat = 100.0,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.2,
) -> Partition:
    """Deals each source of a pool to a group of its own (MD-ICFL, Multi-source digits).

    A client draws its label distribution p ~ Dir(alpha / C), its label counts ~
    Multinomial(samples_per_client, p), and that many training samples of each class: clients
    share samples, one client repeats none unless the class is used up.

    Args: `clients_per_group`: K is as many for each source; as text drawn:N each client draws its
    source, as in the paper, and N is the mean; `samples_per_client` training samples;
    `test_samples` are drawn for each client without replacement from the group's test samples,
    None, as in the paper: all; `alpha` > 0, the larger the more even; `seed` fixes all draws;
    `test_fraction`, from 0 to below 1, is for testing where the pool has no test split.
    """
    if pool.source is None:
        raise InputError(
            "partition=source_groups: the dataset has one source, expected several"
            " (dataset=multi_source_digits) or another partition"
        )
    groups = int(pool.source.max()) + 1
    rng = dealing.check_partition(source_groups, locals())
    mask = dealing.draw_test_mask(rng, pool, test_fraction)
    concept = _deal_clients(groups, clients_per_group, seed)
    amounts = samples_per_client, test_samples, alpha
    parts = []
    for source in range(groups):
        clients = int(np.sum(concept == source))
        parts.append(_draw_group(rng, pool, mask, clients, *amounts, pool.source == source))
    train, test = ([part for side in parts for part in side[i]] for i in (0, 1))
    return dealing.join_clients(train, test)._replace(concept=concept)


@checked("partition")
def ifca_rotations(pool: Pool, *, samples_per_client: Count = 100, seed: Seed = 0) -> Partition:
    """Deals the whole pool once for each of four rotations: IFCA's Rotated MNIST (n =
    100: 4 x 600 clients).

    For each rotation the training samples are shuffled again and cut into clients of
    `samples_per_client`; what is left over is not used. Differs from the paper: its
    test samples, cut the same way, belong to 400 machines without training data; here
    they are dealt to the clients, so that each counts once for every rotation.
    """
    rng = dealing.check_partition(ifca_rotations, locals())
    check_square(pool.x, "partition=ifca_rotations")
    if pool.test is None:
        raise InputError("partition=ifca_rotations: the dataset has no test split, expected one")
    train, test = (np.flatnonzero(pool.test == side) for side in (False, True))
    dealing.check_range("samples_per_client", samples_per_client, 1, len(train))
    clients = len(train) // samples_per_client
    held = [], []
    for _ in range(TURNS):
        used = rng.permutation(train)[: clients * samples_per_client]
        held[0].extend(np.split(used, clients))
        held[1].extend(np.array_split(rng.permutation(test), clients))
    return _turn(pool, held, np.repeat(np.arange(TURNS, dtype=np.int32), clients))


def _draw_group(
    rng: np.random.RandomState,
    pool: Pool,
    mask: np.ndarray,
    clients: int,
    samples: int,
    test_samples: int | None,
    alpha: float,
    keep: np.ndarray | bool = True,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the training and the test samples of each of `clients` clients, of those
    that are to be kept [N] bool.
    """
    parts, tests = dealing.by_class(pool, ~mask & keep), np.flatnonzero(mask & keep)
    present = np.array([len(part) > 0 for part in parts])
    if not present.any() or not len(tests):
        raise InputError("partition: a group has no training or no test samples, expected both")
    count = len(tests) if test_samples is None else test_samples
    dealing.check_range("test_samples", count, 1, len(tests))
    train, test = [], []
    for _ in range(clients):
        props = dealing.draw_proportions(rng, pool.num_classes, alpha / pool.num_classes, present)
        train.append(dealing.draw_by_class(rng, parts, samples, props))
        test.append(np.sort(rng.permutation(tests)[:count]))
    return train, test


def _deal_clients(groups: int, clients_per_group: int | str, seed: int) -> np.ndarray:
    """Returns the group [K] int32 of each client, ascending. Those that are drawn have draws of
    their own, so that the seed's others stay the same.
    """
    size = int(str(clients_per_group).removeprefix("drawn:"))
    group = np.repeat(np.arange(groups, dtype=np.int32), size)
    if not isinstance(clients_per_group, str):
        return group
    own = np.random.RandomState([seed, groups])
    return np.sort(own.randint(groups, size=len(group))).astype(np.int32)


def _turn(
    pool: Pool,
    held: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    concept: np.ndarray,
    label_maps: np.ndarray | None = None,
) -> Partition:
    """Returns the partition of clients that see their samples turned as many times as their
    group `concept` [K] says, and through its row of `label_maps` [G, C], if there are some.
    """
    holdings = dealing.join_clients(*held)
    turns = concept[holdings.owner]
    labels = None if label_maps is None else label_maps[turns, pool.y[holdings.sample]]
    return holdings._replace(concept=concept, turns=turns, labels=labels)
