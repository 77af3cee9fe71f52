"""Graded shifts: who sees what, pixel by pixel and class by class."""

import math

import numpy as np
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.data import graded
from fedjax_cfl.errors import InputError

CLIENTS, CLASSES = 60, 10
RNG = np.random.RandomState(3)
X = RNG.randint(1, 200, (CLIENTS * 4, 7, 7)).astype(np.uint8)
Y = np.tile(np.arange(CLASSES), 24).astype(np.int32)
OWNER = np.repeat(np.arange(CLIENTS), 4)


def see(shift, level, x=X, seed=0):
    return graded.graded(x, Y, OWNER, CLIENTS, CLASSES, shift=shift, level=level, seed=seed)


@pytest.mark.parametrize("quarters", range(4))
def test_quarter_turns_are_exact(quarters):
    for size in (7, 8):
        x = RNG.rand(3, size, size, 2)
        np.testing.assert_array_equal(
            graded.turn(x, 90.0 * quarters), np.rot90(x, quarters, (1, 2))
        )


def test_a_turn_looks_pixel_by_pixel():
    x, degrees = RNG.rand(1, 9, 9), 72.0
    found, angle = graded.turn(x, degrees)[0], math.radians(degrees)
    for i in range(9):
        for j in range(9):
            r, c = i - 4, j - 4
            at = (
                round(4 + r * math.cos(angle) + c * math.sin(angle)),
                round(4 + c * math.cos(angle) - r * math.sin(angle)),
            )
            inside = all(0 <= place < 9 for place in at)
            assert found[i, j] == (x[0][at] if inside else 0)


@pytest.mark.parametrize("level, groups", list(enumerate((2, 3, 4, 5, 6, 9, 12, 15), 1)))
def test_patterns_are_groups_of_equal_size(level, groups):
    x, y, concept = see("x", level)
    sizes = np.bincount(concept)
    assert y is Y and sizes.size == groups and sizes.max() - sizes.min() <= 1
    angles = (2, 3, 4, 5, 2, 3, 4, 5)[level - 1]
    for row in range(0, len(X), 7):
        number = concept[OWNER[row]]
        wanted = graded.turn(X[row : row + 1], 360 * (number % angles) / angles)[0]
        if level <= 4:
            np.testing.assert_array_equal(x[row], wanted)
            continue
        full = "rbg"[number // angles]  # of red, blue and green
        for channel, name in enumerate("rgb"):
            np.testing.assert_array_equal(
                x[row, ..., channel], np.full_like(wanted, 255) if name == full else wanted
            )


def test_colours_of_floats_and_of_two_channels():
    assert see("x", 5, (X / 255.0)[..., None])[0].max() == 1.0
    with pytest.raises(InputError, match="images of 1 or 3 channels, not 2"):
        see("x", 5, np.stack([X, X], -1))


@pytest.mark.parametrize("level", [1, 3, 8])
def test_renamed_classes_stay_in_their_pool(level):
    x, y, concept = see("y_given_x", level)
    assert x is X
    maps = {}
    for was, now, k in zip(Y, y, OWNER, strict=True):
        assert maps.setdefault(k, {}).setdefault(was, now) == now  # one name a client and class
    moved = {was for own in maps.values() for was, now in own.items() if was != now}
    assert len(moved) <= level and (level == 1) == (not moved)
    assert {now for own in maps.values() for was, now in own.items() if was in moved} <= moved
    for one in range(CLIENTS):
        for other in range(one):
            if concept[one] == concept[other]:  # those who share classes agree on them
                both = maps[one].keys() & maps[other].keys()
                assert all(maps[one][label] == maps[other][label] for label in both)
    assert level == 1 or len(set(concept)) > min(level, 6) - 1


@pytest.mark.parametrize("level", [1, 4])
def test_images_of_some_classes_are_turned(level):
    x, y, concept = see("x_given_y", level)
    assert y is Y
    turns = [
        next(q for q in range(4) if np.array_equal(now, np.rot90(was, q)))
        for was, now in zip(X, x, strict=True)
    ]
    assert len({label for label, turned in zip(Y, turns, strict=True) if turned}) == level
    first = {}
    for label, k, turned in zip(Y, OWNER, turns, strict=True):
        assert first.setdefault((concept[k], label), turned) == turned
    assert len(set(concept)) > 3


@pytest.mark.parametrize("level, kept", list(enumerate((10, 9, 8, 7, 6, 5, 4, 3), 1)))
def test_each_client_has_the_classes_of_its_set(level, kept):
    pool = cfl.Pool(
        np.zeros((2000, 2), np.float32), np.tile(np.arange(10), 200).astype(np.int32), 10
    )
    held = graded.class_subsets(pool, clients=40, level=level, seed=1)
    assert len(set(held.sample)) == len(held.sample)
    sets = {}
    for k in range(40):
        own = set(pool.y[held.sample[held.owner == k]].tolist())
        assert len(own) == kept and sets.setdefault(held.concept[k], own) == own
    sizes = np.bincount(held.owner)
    assert level > 1 or sizes.max() - sizes.min() <= 10
    if level == 1:
        assert len(held.sample) == 2000


def test_bad_levels_are_refused():
    with pytest.raises(InputError, match=r"concept\.level=9"):
        see("x", 9)
    with pytest.raises(InputError, match="the data have 3 classes"):
        graded.graded(X, Y % 3, OWNER, CLIENTS, 3, shift="y_given_x", level=4)
    with pytest.raises(InputError, match="expected square images"):
        see("x_given_y", 2, X[:, :5])
    pool = cfl.Pool(np.zeros((30, 2), np.float32), np.tile(np.arange(3), 10).astype(np.int32), 3)
    with pytest.raises(InputError, match="keep class"):
        graded.class_subsets(pool, clients=60, level=1)
    with pytest.raises(InputError, match=r"partition\.level=0"):
        graded.class_subsets(pool, clients=3, level=0)
