"""Ground-truth groups: what differs between clients beside the data they happen to
hold.

Every function is `(x, y, owner, clients, num_classes, ...) -> (x, y, concept)` on host
arrays, after the samples were dealt: x [N, ...], y [N], owner [N]; concept [K] int32 is
the true group of each client.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import jax
import numpy as np
from typing_extensions import TypeAliasType

from fedjax_cfl.data.federated import TURNS, check_classes
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, PositiveInt, Rule, Seed, checked

__all__ = ["exchange_pairs", "permute_labels", "rotate"]
TEN = 10  # clients are parted by the last digit of their number
Groups = TypeAliasType("Groups", Annotated[int, Rule("1, 2 or 4", (1, 2, 4).__contains__)])
Pairs = TypeAliasType(
    "Pairs",
    Annotated[
        Sequence[Sequence[NaturalInt]],
        Rule(
            f"a list of 1 to {TEN} lists of classes, exchanged two by two, as [[1,2],[3,4]]",
            lambda value: (
                0 < len(value) <= TEN
                and all(own and len(own) % 2 == 0 and len({*own}) == len(own) for own in value)
            ),
        ),
    ],
)
ConceptArrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@checked("concept")
def rotate(
    x: np.ndarray,
    y: np.ndarray,
    owner: np.ndarray,
    clients: int,
    num_classes: int,
    *,
    groups: Groups = 4,
    shuffle: bool = True,
    seed: Seed = 0,
) -> ConceptArrays:
    """Turns the images of each group: 2 groups by 0 and 180 degrees, 4 by 0, 90, 180 and 270
    (rotated MNIST of IFCA).

    Args: `x` is [N, H, H] or [N, H, H, channels]; `owner` [N] names the client of each image;
    `clients` is K; `num_classes` is not needed; `groups` is 1, 2 or 4; `shuffle` draws
    equal-sized groups at random with `seed`, False: client k is in group k mod groups, which
    goes in step with any partition that deals classes in a ring.
    """
    check_square(x, "concept=rotate")
    concept = draw_concepts(clients, groups, shuffle, seed)
    return turn_quarters(x, concept[owner] * (TURNS // groups)), y, concept


def check_square(x: np.ndarray | jax.Array, field: str) -> None:
    """Raises InputError for samples that cannot be turned by a quarter."""
    if x.ndim not in (3, 4) or x.shape[1] != x.shape[2]:
        raise InputError(
            f"{field}: samples have shape {x.shape[1:]}, expected square images [H, H] or"
            " [H, H, channels]"
        )


def turn_quarters(x: np.ndarray, quarters: np.ndarray) -> np.ndarray:
    """Returns images [N, H, H, ...], each turned by its number of `quarters` [N]."""
    x = x.copy()
    for turn in range(1, TURNS):
        rows = np.flatnonzero(quarters == turn)
        x[rows] = np.rot90(x[rows], turn, axes=(1, 2))
    return x


def permute_labels(
    x: np.ndarray,
    y: np.ndarray,
    owner: np.ndarray,
    clients: int,
    num_classes: int,
    *,
    groups: PositiveInt = 2,
    shuffle: bool = True,
    seed: Seed = 0,
) -> ConceptArrays:
    """Renames the classes of each group by a fixed permutation of its own; group 0 keeps its
    labels, no two groups agree.

    Args: `y` [N] are the labels, `owner` [N] the client of each; `clients` is K; `num_classes`
    is C; `groups` is at most min(C, 12)! and at most K; `shuffle` is as in `rotate`; `seed`
    also draws the permutations. `x` is returned as it is.
    """
    check_classes(Pool(x, y, num_classes), "concept=permute_labels", "use concept=none")
    limit = math.factorial(min(num_classes, 12))  # permutations there are
    if not 1 <= groups <= limit:
        raise InputError(
            f"concept.groups={groups}: expected 1 .. {limit}, a permutation of {num_classes}"
            " classes for each"
        )
    concept = draw_concepts(clients, groups, shuffle, seed)
    rng = np.random.RandomState(seed)
    tables = {tuple(range(num_classes)): None}  # a dict keeps the order and refuses repeats
    while len(tables) < groups:
        tables.setdefault(tuple(rng.permutation(num_classes).tolist()))
    return x, np.array(list(tables), y.dtype)[concept[owner], y], concept


@checked("concept")
def exchange_pairs(
    x: np.ndarray,
    y: np.ndarray,
    owner: np.ndarray,
    clients: int,
    num_classes: int,
    *,
    pairs: Pairs = ((1, 2), (3, 4), (5, 6)),
    even: bool = False,
    stages: PositiveInt = 1,
) -> ConceptArrays:
    """Exchanges classes of each client two by two, those of its part; of several stages not in the
    first, where all are in group 0 (FedCCFA, https://arxiv.org/abs/2410.18478).

    Args: `y` [N] are the labels, `owner` [N] the client of each; `clients` is K, or T K in
    T `stages`; `num_classes` is C; `pairs` has at most 10 lists of an even number of classes, the
    first two of which are exchanged, and so on; the part of client k is k mod their number if
    `even`, else as `find_part` says. `x` is returned as it is. Raises InputError for classes that
    the data do not have.
    """
    check_classes(Pool(x, y, num_classes), "concept=exchange_pairs", "use concept=none")
    highest = max(map(max, pairs))
    if highest >= num_classes:
        raise InputError(
            f"concept.pairs={pairs}: class {highest}; the data have {num_classes}, from 0 on"
        )
    client = np.arange(clients) % (clients // stages)
    later = np.arange(clients) >= (clients // stages if stages > 1 else 0)
    part = client % len(pairs) if even else find_part(client, len(pairs))
    concept = np.where(later, part + (stages > 1), 0).astype(np.int32)
    maps = np.tile(np.arange(num_classes), (len(pairs) + (stages > 1), 1))
    for own, classes in zip(maps[-len(pairs) :], pairs, strict=True):
        own[list(classes)] = np.reshape(classes, (-1, 2))[:, ::-1].ravel()
    return x, maps[concept[owner], y].astype(y.dtype), concept


def find_part(client: np.ndarray, parts: int) -> np.ndarray:
    """Returns the part [n] of clients [n]: of three, numbers that end in 0 to 2, 3 to 5, 6 to 9."""
    return np.minimum(client % TEN // (TEN // parts), parts - 1)


def draw_concepts(clients: int, groups: int, shuffle: bool, seed: int) -> np.ndarray:
    """Returns the group of each client [K] int32; sizes differ by one at most."""
    if groups > clients:
        raise InputError(f"concept.groups={groups}: at most {clients} are possible, one a client")
    concept = np.arange(clients, dtype=np.int32) % groups
    return np.random.RandomState(seed).permutation(concept) if shuffle else concept
