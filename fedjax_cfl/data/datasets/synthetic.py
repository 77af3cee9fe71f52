"""Synthetic data: Synthetic(alpha, beta) of FedProx, and SINE, CIRCLE and SEA, points whose
labelling rule, the concept of a client, changes from stage to stage, as in FedDrift's experiments
(Jothimurugesan et al., AISTATS 2023, https://arxiv.org/abs/2206.00799).

A table says which concept each client has in each stage. T stages, K clients; a row of the table is
a word of one digit a client.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.random import RandomState
from typing_extensions import TypeAliasType

from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import Fraction, NonNegativeFloat, PositiveInt, Rule, Seed, checked

FEATURES, CLASSES = 60, 10  # of FedProx's data
# FedDrift's tables of 10 clients in 11 stages. A has two concepts, which change client by client
# and come back; B to F have four.
CHANGES = {
    name: tuple(words.split())
    for name, words in {
        "A": "0000000000 0100000000 0100000100 0111010100 0111010110 1011011010"
        " 1001001010 1000101011 1000101001 1000101001 1000101001",
        "B": "0000000000 1110000000 1112220000 2212222100 2221222130 2321233130"
        " 3321133210 3033133213 0033313223 0003311322 0003311322",
        "C": "0000000000 1112220000 1112220030 2211222130 2221232130 2321133130"
        " 3323133210 3033313213 0033313223 0003311322 0003311322",
        "D": "1112220033 1112220033 2211222032 2221232002 2321133002 3323133202"
        " 3033313201 0033313221 0003311321 0003311321 0003311321",
        "E": "0000000000 1113330000 1113330020 3311333120 3331323120 3231122120"
        " 2232122310 2022212312 0022212332 0002211233 0002211233",
        "F": "0000000000 0000000000 1112220000 1112220030 2211222130 2221232130"
        " 2321133133 3323133213 3033313213 0033312223 0033312223",
    }.items()
}
Words = Annotated[
    Sequence[str],
    Rule(
        "a list of two or more words of equal length, one a stage, each of one digit a client, as"
        " ['000','011']",
        lambda words: (
            len(words) > 1 and len(set(map(len, words))) == 1 and all(map(str.isdecimal, words))
        ),
    ),
]
Changes = TypeAliasType("Changes", Literal["A", "B", "C", "D", "E", "F"] | Words)
Limits = TypeAliasType(
    "Limits", Annotated[Sequence[float], Rule("a list of one or more numbers", bool)]
)


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


@checked("dataset.source")
def sine(
    changes: Changes = "A",
    clients: PositiveInt = 10,
    samples: PositiveInt = 500,
    test_samples: PositiveInt = 500,
    noise: Fraction = 0.0,
    seed: Seed = 0,
) -> Pool:
    """Returns SINE-2: x [N, 2] in [0, 1), y = 1 on or below the curve sin x1; concept 1 has these
    labels exchanged.

    Args: `changes` is a table; client k of `clients` follows its column k, counted round and round;
    `samples` for training, and `test_samples`, of each client and stage; `noise` is the chance of
    either to have the other label; `seed` fixes all draws. Raises InputError for a table with more
    concepts than there are.
    """

    def label(x: np.ndarray, concept: np.ndarray) -> np.ndarray:
        return (x[:, 1] <= np.sin(x[:, 0])) != (concept == 1)

    return _draw(label, (2, 1.0, 2), changes, clients, (samples, test_samples), noise, seed)


@checked("dataset.source")
def circle(
    changes: Changes = "A",
    clients: PositiveInt = 10,
    samples: PositiveInt = 500,
    test_samples: PositiveInt = 500,
    noise: Fraction = 0.0,
    seed: Seed = 0,
) -> Pool:
    """Returns CIRCLE-2: x [N, 2] in [0, 1), y = 1 outside of a circle, of concept 0 about
    (0.2, 0.5) with radius 0.15, of concept 1 about (0.6, 0.5) with radius 0.25.

    Arguments and errors are those of `sine`.
    """

    def label(x: np.ndarray, concept: np.ndarray) -> np.ndarray:
        centre, radius = np.array([0.2, 0.6])[concept], np.array([0.15, 0.25])[concept]
        return (x[:, 0] - centre) ** 2 + (x[:, 1] - 0.5) ** 2 > radius**2

    return _draw(label, (2, 1.0, 2), changes, clients, (samples, test_samples), noise, seed)


@checked("dataset.source")
def sea(
    changes: Changes = "C",
    clients: PositiveInt = 10,
    samples: PositiveInt = 500,
    test_samples: PositiveInt = 500,
    noise: Fraction = 0.1,
    theta: Limits = (8.0, 9.0, 7.0, 9.5),
    seed: Seed = 0,
) -> Pool:
    """Returns SEA: x [N, 3] in [0, 10), y = 1 where x2 + x3 > theta[concept]; x1 says nothing.

    Args: `theta`, numbers, one a concept; the others, and errors, are those of `sine`. In the files
    of FedDrift's authors the labels of concept 3 are those of 9.0, as of concept 1; 9.5 is usual.
    """
    limits = np.asarray(theta, float)

    def label(x: np.ndarray, concept: np.ndarray) -> np.ndarray:
        return x[:, 1] + x[:, 2] > limits[concept]

    kind = 3, 10.0, len(limits)
    return _draw(label, kind, changes, clients, (samples, test_samples), noise, seed)


def _draw(
    label: Callable[[np.ndarray, np.ndarray], np.ndarray],
    kind: tuple[int, float, int],
    changes: str | Sequence[str],
    clients: int,
    sizes: tuple[int, int],
    noise: float,
    seed: int,
) -> Pool:
    """Returns fresh samples of every client and stage, those for training first.

    Args: `label(x, concept)` -> whether y is 1; `kind` is (features, end of their range, concepts);
    `sizes` are those of a client and stage, for training and for testing; the others are
    those of `sine`.
    """
    features, end, concepts = kind
    words = CHANGES[changes] if isinstance(changes, str) else changes
    table, rng = np.array([[*map(int, word)] for word in words], np.int32), RandomState(seed)
    if table.max() >= concepts:
        raise InputError(
            f"dataset.source.changes={changes}: names concept {table.max()}, and there are"
            f" {concepts}, from 0 on; use another table"
        )
    table = table[:, np.arange(clients) % table.shape[1]]  # [T, K]
    count = table.size * sum(sizes)
    time, client, place = np.unravel_index(np.arange(count), (*table.shape, sum(sizes)))
    x = (end * rng.random_sample((count, features))).astype(np.float32)
    y = label(x.astype(float), table[time, client]) != (rng.random_sample(count) < noise)
    pool = Pool(x, y.astype(np.int32), 2, client, place >= sizes[0], concept=table, time=time)
    return check_pool(pool, "dataset.source")
