"""Incremental release: how many samples are shown when, and which."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once
from papers.flexcfl_2021 import released_last
from test_drift import KEY, assert_views, federated, once, random_data

from fedjax_cfl.data.incremental import incremental


@pytest.mark.parametrize(
    ("whole", "expected"), [("all", [25, 50, 75, 100]), (released_last, [25, 13, 10, 10])]
)
def test_incremental_numbers(whole, expected):
    owner = np.repeat([0, 1, 2, 3], [110, 12, 1, 3])  # client 2 has no training sample
    test = np.arange(126) % 11 == 0
    test[[122]] = True
    made = federated(owner, np.arange(126) % 5, test, 4, 5)
    start = made.train.size.tolist()
    assert start[0] == 100 and start[2] == 0
    moves = incremental(whole=whole)
    now, memory = at_once(moves.init, KEY, made)
    assert (now.owner == made.owner).all()  # nothing is hidden before round 0
    before, sizes = None, start
    for round in range(0, 200, 10):
        now, shifted = once(moves, now, round, False, memory)
        if round % 50 == 0:
            fraction = (0.25, 0.5, 0.75, 1.0)[round // 50]
            wanted = [math.ceil(fraction * n) for n in (sizes if whole != "all" else start)]
            assert shifted.tolist() == [a != b for a, b in zip(sizes, wanted, strict=True)]
            sizes = wanted
            shown = set(np.flatnonzero(np.asarray(now.owner) >= 0).tolist())
            assert before is None or (shown <= before if whole != "all" else before <= shown)
            before = shown
        else:
            assert not shifted.any()
        assert now.train.size.tolist() == sizes and sizes[0] == expected[round // 50]
        assert ((now.owner == made.owner) | (now.owner == -1)).all() and (
            now.owner[test] == made.owner[test]
        ).all()
    assert_views(now, made)
    if whole == "all":
        assert (now.owner == made.owner).all()


def test_incremental_order_is_random_and_fixed():
    made = random_data(9, 4, 4, 400)
    moves = incremental((0.5,), (0,))

    @jax.jit
    def shown(seed):
        now, memory = moves.init(jax.random.key(seed), made)
        return moves.apply(KEY, 0, now, memory, jnp.ones(4, bool))[0].owner >= 0

    assert (shown(0) == shown(0)).all() and (shown(0) != shown(1)).any()
    often = np.mean([np.asarray(shown(seed))[made.train.order] for seed in range(60)], axis=0)
    assert abs(often.mean() - 0.5) < 0.02 and abs(often - 0.5).max() < 0.35


def test_fractions_are_exact_and_late_schedules_wait():
    made = federated(np.zeros(100), np.zeros(100), np.zeros(100), 1, 1)
    assert math.ceil(0.07 * 100) == 8  # what binary rounding makes of it
    moves = incremental((0.07, 1 / 3), (2, 4))
    now, memory = at_once(moves.init, KEY, made)
    sizes = []
    for round in range(6):
        now, _ = once(moves, now, round, memory=memory)
        sizes.append(int(now.train.size[0]))
    assert sizes == [100, 100, 7, 7, 34, 34]
