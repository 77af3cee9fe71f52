"""Shifts between clients in eight levels, from mild to severe, as in FLUX's benchmark (arXiv
2511.22305), in forms of which the true groups are known.

Clients differ in P(x) (`graded`, shift=x: turned and coloured images), P(y|x) (y_given_x: renamed
classes), P(x|y) (x_given_y: images of some classes turned), or in P(y) (`class_subsets`).
K clients, N samples, C classes, H the height and width of an image.
"""

from typing import Annotated, Literal

import numpy as np
from typing_extensions import TypeAliasType

from fedjax_cfl.data import dealing
from fedjax_cfl.data.concept import ConceptArrays, check_square, draw_concepts, turn_quarters
from fedjax_cfl.data.federated import check_classes
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool
from fedjax_cfl.validation import BelowOne, Count, PositiveInt, Seed, checked, whole

# (angles, colours) of each level of P(x)
PATTERNS = ((2, 1), (3, 1), (4, 1), (5, 1), (2, 3), (3, 3), (4, 3), (5, 3))
LEVELS = len(PATTERNS)
Level = TypeAliasType("Level", Annotated[int, whole(1, LEVELS)])
COLOURS = (0, 2, 1)  # the channel that is full: red, blue, green


@checked("concept")
def graded(
    x: np.ndarray,
    y: np.ndarray,
    owner: np.ndarray,
    clients: int,
    num_classes: int,
    *,
    shift: Literal["x", "y_given_x", "x_given_y"] = "x",
    level: Level = 4,
    seed: Seed = 0,
) -> ConceptArrays:
    """Changes what clients see, by level 1 .. 8 of a shift. Clients that see the same form a group.

    x: images turned by one of 2 to 5 angles, evenly over a circle, and from level 5 on in one of
    three colours, for which grey images get three channels; groups of equal sizes, or, where there
    are more patterns than clients, each client draws one. y_given_x:
    `level` classes, the same of all clients, renamed among themselves by a permutation of each
    client's own. x_given_y: images of `level` classes turned, of each class by 0, 90, 180 or 270
    degrees of each client's own.

    Args: `x` [N, H, H] or [N, H, H, channels]; `y` [N]; `owner` [N], the client of each; `clients`
    is K; `num_classes` is C; `shift` and `level` as above; `seed` draws who sees what.
    Raises InputError for another level, more classes than there are, samples that are no square
    images where they are turned, and colours of images that have other than one or three channels.
    """
    if shift != "y_given_x":
        check_square(x, f"concept=graded concept.shift={shift}")
    if shift == "x":
        patterns = int(np.prod(PATTERNS[level - 1]))
        if patterns <= clients:
            groups = draw_concepts(clients, patterns, True, seed)
        else:
            groups = np.random.RandomState(seed).randint(patterns, size=clients).astype(np.int32)
        return paint(x, y, owner, groups, level)
    check_classes(Pool(x, y, num_classes), "concept=graded", "use concept=none")
    if level > num_classes:
        raise InputError(f"concept.level={level}: the data have {num_classes} classes")
    rng = np.random.RandomState(seed)
    drawn = rng.permutation(num_classes)[:level]
    if shift == "y_given_x":
        maps = np.tile(np.arange(num_classes), (clients, 1))
        maps[:, drawn] = [rng.permutation(drawn) for _ in range(clients)]
        return x, maps[owner, y].astype(y.dtype), number_rows(maps)
    turns = np.zeros((clients, num_classes), int)
    turns[:, drawn] = rng.randint(0, 4, (clients, level))
    return turn_quarters(x, turns[owner, y]), y, number_rows(turns)


def paint(
    x: np.ndarray, y: np.ndarray, owner: np.ndarray, concept: np.ndarray, level: int
) -> ConceptArrays:
    """Returns images turned and coloured by the pattern `concept` [K] of their client: angle
    concept mod angles, colour concept div angles.
    """
    angles, colours = PATTERNS[level - 1]
    if colours > 1:
        x = np.repeat(x[..., None], 3, -1) if x.ndim == 3 else x
        x = np.repeat(x, 3, -1) if x.shape[-1] == 1 else x
        if x.shape[-1] != 3:
            raise InputError(
                f"concept.level={level}: colours images of 1 or 3 channels, not {x.shape[-1]}"
            )
    x, full = x.copy(), 255 if x.dtype == np.uint8 else 1
    for number in range(angles * colours):
        rows = np.flatnonzero(concept[owner] == number)
        x[rows] = turn(x[rows], 360 * (number % angles) / angles)
        if colours > 1:
            x[rows, ..., COLOURS[number // angles]] = full
    return x, y, concept


def turn(x: np.ndarray, degrees: float) -> np.ndarray:
    """Turns images [N, H, H, ...] about their centre, counter-clockwise: each pixel is the nearest
    one of the image, 0 outside of it.
    """
    size, angle = x.shape[1], np.deg2rad(degrees)
    row, column = np.mgrid[:size, :size] - (size - 1) / 2
    from_row = np.cos(angle) * row + np.sin(angle) * column
    from_column = np.cos(angle) * column - np.sin(angle) * row
    at = np.rint(np.round(np.stack([from_row, from_column]) + (size - 1) / 2, 6)).astype(int)
    inside = ((at >= 0) & (at < size)).all(0)
    found = x[:, at[0].clip(0, size - 1), at[1].clip(0, size - 1)]
    found[:, ~inside] = 0
    return found


def number_rows(table: np.ndarray) -> np.ndarray:
    """Returns a number [K] int32 for each row of a table [K, C]: equal rows have the same."""
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)


@checked("partition")
def class_subsets(
    pool: Pool,
    *,
    clients: Count,
    level: Level = 4,
    subsets: PositiveInt = 5,
    samples_per_client: Count | None = None,
    seed: Seed = 0,
    test_fraction: BelowOne = 0.1,
) -> Partition:
    """Deals each class evenly to the clients that keep it (shift of P(y), FLUX): of 10 classes
    those of level 1 .. 8 keep 10, 9, ... 3, one of `subsets` random sets. No sample is drawn twice.

    Args: `clients` is K; `level` is 1 .. 8; client k has set k mod `subsets`, its true group;
    `samples_per_client`, train and test together, are drawn of what each would have, None: all; the
    others are those of all partitions. A class that no set has is left out. Raises InputError for a
    class that more clients keep than it has samples, and a client that has too few.
    """
    rng = dealing.check_partition(class_subsets, locals())
    kept = max(1, round(pool.num_classes * (11 - level) / 10))
    sets = np.zeros((subsets, pool.num_classes), bool)
    for own in sets:
        own[rng.permutation(pool.num_classes)[:kept]] = True
    concept = np.arange(clients) % subsets
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, samples in enumerate(dealing.by_class(pool)):
        keepers = rng.permutation(np.flatnonzero(sets[concept, label]))
        if len(samples) and len(keepers) > len(samples):
            raise InputError(
                f"partition.clients={clients}: {len(keepers)} of them keep class {label}, which has"
                f" {len(samples)} samples; use fewer"
            )
        if len(keepers):
            shares = np.array_split(rng.permutation(samples), len(keepers))
            for k, part in zip(keepers, shares, strict=True):
                parts[k].append(part)
    held = [np.concatenate(part) for part in parts]
    if samples_per_client is not None:
        held = dealing.draw_samples(rng, held, samples_per_client)
    dealt = dealing.split_train_test(held, rng, test_fraction)
    return dealt._replace(concept=concept.astype(np.int32))
