"""FedCluster, the form of CFL that the FeSEM paper compares with: FedAvg where nothing
is cut, planted groups, and when it cuts.
"""

from itertools import pairwise

import jax
import numpy as np
import pytest
from conftest import matrix, nightly, spent
from sklearn.metrics import adjusted_rand_score
from test_fesem import planted
from test_twins import Rule, follow, uneven

from fedjax_cfl.algorithms.fedcluster import fedcluster
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, derive_key
from fedjax_cfl.system import select

KEY = jax.random.key(5)
CLIENTS, CONCEPTS, COHORT, ROUNDS = 18, 3, 6, 2
TRUTH = np.arange(CLIENTS) % CONCEPTS


@pytest.fixture(scope="module")
def concepts():
    """18 clients whose class names are turned by 0, 1 or 2: three groups of six."""
    return planted(CONCEPTS, CLIENTS)


@pytest.fixture(scope="module")
def cutting(concepts, linear, local):
    """Runs cycles of two rounds and a round with everybody, with room for five groups:
    cutting(gamma, min_size, rounds) -> states.
    """

    def algorithm(gamma, min_size):
        return fedcluster(
            linear,
            local,
            select.rr_then_random(COHORT),
            m=5,
            rounds=ROUNDS,
            gamma=gamma,
            min_size=min_size,
        )

    one_round = jax.jit(
        lambda gamma, least, state, data: algorithm(gamma, least).round(KEY, state, data)[0]
    )

    def run(gamma, min_size, rounds, data=concepts):
        states = [jax.jit(algorithm(0.0, 1).init)(KEY, data)]
        for _ in range(rounds):
            states.append(one_round(gamma, min_size, states[-1], data))
        assert one_round._cache_size() == 1, "a cut never retraces"
        return states

    return run


def group(groups, g=0):
    return jax.tree.map(lambda leaf: leaf[g : g + 1], groups)


@pytest.mark.parametrize(
    ("gamma", "min_size"), [nightly(1.0, 2, id="gamma"), pytest.param(0.0, CLIENTS, id="min_size")]
)
def test_thresholds_never_met_are_fedavg(concepts, local, cutting, gamma, min_size):
    """A cycle, and the next one's begin: FedAvg whose every third round has all clients."""
    data, pick = uneven(concepts), select.rr_then_random(COHORT)
    states = cutting(gamma, min_size, 4, data)
    for round, (before, after) in enumerate(pairwise(states)):
        ids = pick.draw(derive_key(KEY, SELECT, round), round, data.train.size).tolist()
        follow(before, after, data, local, range(CLIENTS) if round == 2 else ids, Rule(), KEY)
        assert after.active.tolist() == [True] + [False] * 4
    sent = [spent(a, b).units_up for a, b in pairwise(states)]
    assert sent == [COHORT, COHORT, CLIENTS, COHORT]


@pytest.mark.nightly
def test_planted_groups_are_found_and_then_no_more(cutting):
    """Groups of 18 and 12 are cut and those of 6 are not; only rounds with everybody
    cut, and each half goes on from its parent's model.
    """
    states = cutting(0.13, 6, 12)
    counts = [int(state.active.sum()) for state in states]
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3]
    assert adjusted_rand_score(TRUTH, states[-1].assignment) == 1
    assert all(adjusted_rand_score(TRUTH, state.assignment) >= 0.5 for state in states[3:6])
    cut = states[3]
    assert cut.memory.parent.tolist() == [-1, 0, -1, -1, -1]
    np.testing.assert_allclose(matrix(cut.memory.models)[1], matrix(states[2].groups)[0], rtol=1e-6)
    assert matrix(cut.groups)[2:].tolist() == matrix(states[0].groups)[2:].tolist(), (
        "groups without clients wait"
    )


def test_only_large_groups_are_cut_and_there_is_room_for_m(cutting):
    """With gamma 0 whatever is large enough is cut: until the five groups are there, or
    no group has more than `min_size` clients.
    """
    for min_size, most in ((2, 5), (8, 5), (17, 2)):
        states = cutting(0.0, min_size, 12)
        assert int(states[-1].active.sum()) <= most
        for before, after in pairwise(states):
            size = np.bincount(np.maximum(before.assignment, 0), minlength=5)
            for created in np.flatnonzero(np.asarray(after.active & ~before.active)):
                assert size[int(after.memory.parent[created])] > min_size
        size = np.bincount(states[-1].assignment, minlength=5)
        assert size.sum() == CLIENTS and (size[np.asarray(states[-1].active)] > 0).all()
        assert states[-1].active.all() or (size <= min_size).all()


def test_a_model_without_a_head_is_refused(linear, local):
    headless = linear._replace(init=lambda key: {"body": linear.init(key)["head"]})
    with pytest.raises(InputError, match="fedcluster: the model has no dense layer named head"):
        fedcluster(headless, local, select.full_participation(), m=2)
