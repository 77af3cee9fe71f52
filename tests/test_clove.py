"""CLoVE: a slow twin of the whole path with scikit-learn's K-means and SciPy's matching; FedAvg and
IFCA as special cases; planted groups; clients that come later; the bill.
"""

from itertools import permutations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, nightly, one_line, spent
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from test_bounds import passes
from test_reductions import KEY, SAME, play
from test_reference import batches_of, cross_entropy, mean, models_of, samples, trained

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.clove import clove, deal_groups, match_clusters
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.keys import ASSIGN, derive_key
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.simulation.personalize import assign_newcomers, check_rule
from fedjax_cfl.system import select

EVERYBODY = select.full_participation()
# by round: all meet; nobody answers; some; one of them has not met yet; newcomers alone; those that
# are final
COHORTS = (
    [0, 1, 2, 3, 4, 5],
    [2],
    [0, 3, 4, 5, 1],
    [0, 3, 4, 9, 5, 1],
    [7, 10],
    [0, 1, 4, 8, 9, 11],
)


def pick_cohorts():
    width = max(map(len, COHORTS))
    return select.from_table(np.array([row + [14] * (width - len(row)) for row in COHORTS]))


class Twin:
    """The method in loops over clients."""

    def __init__(self, models, data, local, stable):
        self.models, self.data, self.local, self.stable = models, data, local, stable
        self.groups, self.still, self.asked, self.alone = {}, 0, 0, 0

    def losses(self, clients):
        x, y = np.asarray(self.data.x, float), np.asarray(self.data.y)
        rows = [samples(self.data, client) for client in clients]
        return np.array([[cross_entropy(w, x[r], y[r]) for w in self.models] for r in rows])

    def choose(self, round, able):
        final = self.stable is not None and self.still >= self.stable
        asked = [i for i in able if not (final and i in self.groups)]
        self.asked += len(asked)
        if not asked:
            return {}
        loss, m = self.losses(asked), len(self.models)
        if round > 0 and not set(asked) & set(self.groups):
            self.alone += 1
            return dict(zip(asked, loss.argmin(axis=1).tolist(), strict=True))
        found = KMeans(m, n_init=50, random_state=0).fit(loss).labels_
        cost = np.stack([loss[found == c].sum(axis=0) for c in range(m)])
        model = linear_sum_assignment(cost)[1]
        return dict(zip(asked, model[found].tolist(), strict=True))

    def round(self, round, cohort, dealt=None):
        able = [client for client in cohort if self.data.train.size[client] > 0]
        new = dealt or self.choose(round, able)
        moved = any(self.groups.get(client) != group for client, group in new.items())
        if able and (self.stable is None or self.still < self.stable):
            self.still = 0 if moved else self.still + 1
        self.groups |= new
        members, weights = [[] for _ in self.models], [[] for _ in self.models]
        for client in able:
            group = self.groups[client]
            epochs = passes(round, self.data, client, self.local.epochs)
            batches = batches_of(epochs, self.local.batch_size)
            members[group].append(trained(self.models[group], self.data, batches, self.local.lr))
            weights[group].append(len(epochs[0]))
        self.models = [
            mean(mine, weight) if mine else old
            for old, mine, weight in zip(self.models, members, weights, strict=True)
        ]


@pytest.mark.parametrize(
    ("first", "stable"), [nightly("random", 2), nightly("losses", None), ("losses", 1)]
)
def test_slow_twin(toy, linear, local, first, stable):
    """Groups, models and every word, with cohorts of known clients, of newcomers, and of both."""
    algorithm = clove(linear, local, pick_cohorts(), m=2, first=first, stable=stable, restarts=30)
    begun, _ = play(algorithm, toy, 0)
    assert (begun.assignment == -1).all()
    twin = Twin(models_of(begun.groups), toy, local, stable)
    state, one_round = begun, jax.jit(algorithm.round)
    rounds = [*COHORTS, *COHORTS[:5]]
    for round, cohort in enumerate(rounds):
        state, _ = one_round(KEY, state, toy)
        found = np.asarray(state.assignment)
        dealt = None
        if first == "random" and round == 0:
            able = [client for client in cohort if client != 2]
            dealt = {client: int(found[client]) for client in able}
            assert sorted(np.bincount(list(dealt.values()), minlength=2)) == [2, 3]
        twin.round(round, cohort, dealt)
        if stable is not None:
            assert int(state.memory.rounds) == twin.still, round
        for client, group in twin.groups.items():
            assert found[client] == group, (round, client)
        for one, expected in zip(models_of(state.groups), twin.models, strict=True):
            np.testing.assert_allclose(one.flat(), expected.flat(), atol=3e-5)
    assert twin.alone >= 1 and state.assignment[2] == -1
    assert stable is None or twin.still == stable
    sent, taken = spent(begun, state), sum(map(len, rounds))
    assert (sent.units_down, sent.units_up) == (taken + twin.asked, taken)
    assert (sent.words_down, sent.words_up) == (0, 2 * twin.asked)


@pytest.mark.nightly
def test_one_group_is_fedavg(toy, linear, local):
    """Bit for bit."""
    pick = select.uniform(6)
    state, infos = play(clove(linear, local, pick, m=1), toy)
    expected, wanted = play(fedavg(linear, local, pick), toy)
    infos, wanted = ([info.replace(cold=0) for info in each] for each in (infos, wanted))
    chex.assert_trees_all_equal((state.groups, infos), (expected.groups, wanted))


@pytest.mark.nightly
def test_newcomers_alone_choose_as_in_ifca(toy, linear, local):
    pick = select.from_table(np.array([[0, 1], [3, 4], [5, 6], [7, 8]]))
    begun, _ = play(clove(linear, local, pick, m=3), toy, 1)
    state, _ = play(clove(linear, local, pick, m=3), toy, 3, begun)
    other = ifca(linear, local, pick, m=3, aggregate=weighted_mean)
    expected, _ = play(other, toy, 3, begun)
    chex.assert_trees_all_close(state.groups, expected.groups, **SAME)
    assert state.assignment.tolist() == expected.assignment.tolist()


def test_clusters_get_the_models_that_cost_least_together():
    """Both clusters like model 0 best; against all permutations. A loss that is not finite is none
    to be liked, and clients that are not asked have no say.
    """
    loss = np.array([[1.0, 2.0, 9.0], [1.1, 2.1, 9.1], [0.5, 5.0, 6.0], [0.6, 5.1, 6.1]])
    loss = np.concatenate([loss, [[0.1, np.nan, 0.0]], [[np.inf, 30.0, 30.0]]])
    asked = np.array([True, True, True, True, False, True])
    match = jax.jit(lambda key: match_clusters(key, jnp.asarray(loss), asked, 10))
    several = [np.asarray(match(jax.random.key(seed))) for seed in range(8)]
    clusters, held = [[0, 1], [2, 3], [5]], np.where(np.isfinite(loss), loss, 30.0)

    def cost(order):
        return sum(held[c, model].sum() for c, model in zip(clusters, order, strict=True))

    best = min(permutations(range(3)), key=cost)
    assert best != tuple(held[c].sum(0).argmin() for c in clusters)
    for found in several:  # whatever K-means has called the clusters
        assert found[asked].tolist() == [best[0]] * 2 + [best[1]] * 2 + [best[2]]
    pair = jnp.asarray(loss[:3, :2]), asked[:3]
    few = np.asarray(at_once(match_clusters, KEY, *pair, 10, alone=True))
    assert few.tolist() == [0, 0, 0]


def test_groups_are_dealt_evenly_whatever_the_slots():
    ids = jnp.arange(12, dtype=jnp.int32)
    few = np.asarray(deal_groups(KEY, ids, ids % 2 == 0, 3))
    assert np.bincount(few[::2]).tolist() == [2, 2, 2]
    dealt = ids != 5
    groups = np.asarray(deal_groups(KEY, ids, dealt, 3))
    assert sorted(np.bincount(groups[dealt])) == [3, 4, 4]
    order = jnp.array([3, 0, 11, 5, 4, 9, 1, 2, 10, 8, 6, 7])
    again = np.asarray(deal_groups(KEY, ids[order], dealt[order], 3))
    assert (again == groups[order])[dealt[order]].all()
    other = np.asarray(deal_groups(derive_key(KEY, ASSIGN), ids, dealt, 3))
    assert (groups != other).any()


@pytest.fixture(scope="module")
def turned():
    """Digits, each client's turned by a quarter as often as its group says."""
    pool = cfl.datasets.digits()
    return cfl.federate(pool, cfl.partition.iid(pool, clients=20, seed=0), cfl.concept.rotate)


@pytest.mark.nightly
def test_four_rotations_of_digits_are_found(turned, local):
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)
    state, _ = play(clove(task, local, EVERYBODY, m=4), turned, 4)
    assert adjusted_rand_score(turned.concept, state.assignment) == 1.0


@pytest.mark.nightly
def test_clients_held_out_join_the_model_of_least_loss(turned, local):
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)

    def make(pick):
        return clove(task, local, pick, m=4)

    run = take_clients(turned, np.arange(15))
    check_rule(make, run, KEY, 3)
    state, _ = play(make(EVERYBODY), run, 6)
    new = assign_newcomers(make, task, local.execution.mesh, state, turned, KEY, 3)
    groups = np.concatenate([state.assignment, new.groups])
    assert adjusted_rand_score(turned.concept, groups) == 1.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 0}, "algorithm.m=0"),
        ({"m": 2, "first": "ward"}, "algorithm.first=ward"),
        ({"m": 2, "stable": 0}, "algorithm.stable=0"),
    ],
)
def test_refusals(linear, local, settings, says):
    one_line(says, clove, linear, local, EVERYBODY, **settings)
