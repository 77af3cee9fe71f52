"""CFL-GP: a slow twin of the whole path with NumPy's SVD and scikit-learn's K-means; FedAvg as a
special case; planted groups; clients that come later; the bill.
"""

from itertools import pairwise, permutations
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, nightly, one_line, spent
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from test_reductions import KEY, play
from test_reference import batches_of, mean, models_of, passes, trained

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.cfl_gp import Plan, accumulate, cfl_gp, find_groups
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.keys import ASSIGN, REGROUP, TRAIN, derive_key
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.simulation.personalize import assign_newcomers, check_rule
from fedjax_cfl.system import select

EVERYBODY = select.full_participation()
LATE, BACK, LAST = 1, 5, 3  # a client that has samples only from a round on


class Twin:
    """The method in loops over clients."""

    def __init__(self, models, local, m, period):
        self.models, self.local, self.m, self.period = models, local, m, period
        self.vectors, self.groups, self.initial, self.directions = {}, {}, None, None
        self.down, self.up, self.words = 0, 0, 0

    def train(self, key, model, data, client):
        epochs = passes(key, data, client, self.local.epochs)
        return trained(model, data, batches_of(epochs, self.local.batch_size), self.local.lr)

    def join(self, round, data, able):
        for client in able:
            if client not in self.groups and round > 0:
                key = derive_key(KEY, ASSIGN, round)
                update = self.train(key, self.initial, data, client).flat() - self.initial.flat()
                apart = [np.linalg.norm(update - each) for each in self.directions]
                self.groups[client] = int(np.argmin(apart))
                self.down, self.up = self.down + 1, self.up + 1

    def cluster(self, round, data, solutions):
        criterion = round // self.period % self.m
        beta = 1 / ((round + 1) // (self.m * self.period) + 1)
        key = jax.random.split(derive_key(KEY, REGROUP, round))[0]
        center, sent = self.models[criterion], {}
        for client, (group, model) in solutions.items():
            if group != criterion:
                model = self.train(key, center, data, client)
                self.down, self.words = self.down + 1, self.words + 24
            sent[client] = model.flat() - center.flat()
            blocks = self.vectors.setdefault(client, {})
            old = blocks.get(criterion, sent[client])
            blocks[criterion] = (1 - beta) * old + beta * sent[client]
        ids, zero = sorted(self.vectors), np.zeros(24)
        tall = np.stack(
            [np.hstack([self.vectors[i].get(k, zero) for k in range(self.m)]) for i in ids], axis=1
        )
        points = np.linalg.svd(tall, full_matrices=False)[0][:, : self.m].T @ tall
        found = KMeans(self.m, n_init=50, random_state=0).fit(points.T).labels_
        old = np.array([self.groups.get(i, -1) for i in ids])

        def stay(order):
            return (np.array(order)[found] == old).sum()

        order = max(permutations(range(self.m)), key=stay)
        self.groups |= {i: order[label] for i, label in zip(ids, found, strict=True)}
        self.initial, self.directions = center, []
        for group in range(self.m):
            members = [sent[i] for i in sent if self.groups[i] == group]
            self.directions.append(np.mean(members, axis=0) if members else zero)

    def round(self, round, data):
        able = [k for k in range(data.num_clients) if data.train.size[k] > 0]
        self.join(round, data, able)
        solutions = {}
        for client in able:
            group = self.groups.setdefault(client, 0)
            key = derive_key(KEY, TRAIN, round)
            solutions[client] = group, self.train(key, self.models[group], data, client)
        self.down, self.up = self.down + data.num_clients, self.up + data.num_clients
        if round % self.period == 0 and round <= LAST:
            self.cluster(round, data, solutions)
        for group in range(self.m):
            members = [model for i, (_, model) in solutions.items() if self.groups[i] == group]
            if members:
                self.models[group] = mean(members)


@pytest.mark.parametrize("period", [nightly(1), 2])
def test_slow_twin(toy, linear, local, period):
    """Groups, models and every word of seven rounds; a client comes when clusters are final."""
    algorithm = cfl_gp(linear, local, EVERYBODY, m=2, period=period, last=LAST, restarts=30)
    begun, _ = play(algorithm, toy, 0)
    twin = Twin(models_of(begun.groups), local, 2, period)
    assert (begun.assignment == -1).all()
    absent = toy.replace(train=toy.train.replace(size=toy.train.size.at[LATE].set(0)))
    state, one_round, seen = begun, jax.jit(algorithm.round), set()
    for round in range(7):
        data = absent if round < BACK else toy
        twin.round(round, data)
        state = jax.device_get(one_round(KEY, state, data)[0])
        for client, group in twin.groups.items():
            assert state.assignment[client] == group, (round, client)
        seen.add(tuple(sorted(twin.groups.items())))
        for found, expected in zip(models_of(state.groups), twin.models, strict=True):
            np.testing.assert_allclose(found.flat(), expected.flat(), atol=3e-5)
    for client, blocks in twin.vectors.items():
        kept = models_of(jax.tree.map(lambda leaf, i=client: leaf[i], state.rows["vectors"]))
        for criterion, vector in blocks.items():
            np.testing.assert_allclose(kept[criterion].flat(), vector, atol=3e-5)
    assert state.assignment[2] == -1 and LATE in twin.groups
    assert {0, 1} <= set(twin.groups.values()) and len(seen) > 1
    sent = spent(begun, state)
    assert (sent.units_down, sent.units_up) == (twin.down, twin.up)
    assert (sent.words_down, sent.words_up) == (0, twin.words) and twin.words > 0


@pytest.mark.nightly
def test_one_group_is_fedavg_with_plain_means(toy, linear, local):
    """Bit for bit; nothing more is sent."""
    state, infos = play(cfl_gp(linear, local, EVERYBODY, m=1), toy)
    expected, wanted = play(fedavg(linear, local, EVERYBODY, aggregate=uniform_mean), toy)
    infos, wanted = ([info.replace(cold=0) for info in each] for each in (infos, wanted))
    chex.assert_trees_all_equal(
        (state.groups, infos, state.traffic), (expected.groups, wanted, expected.traffic)
    )


def test_the_schedule_by_hand():
    """Of 3 criteria, every second round: each has weights 1, 1/2, 1/3 in turn."""
    plan, rounds = Plan(3, 2, 12), np.arange(16)
    due = [round for round in rounds if plan.is_due(round)]
    assert due == [0, 2, 4, 6, 8, 10, 12]
    assert [plan.criterion(round) for round in due] == [0, 1, 2, 0, 1, 2, 0]
    np.testing.assert_allclose([1 / plan.rate(round) for round in due], [1, 1, 1, 2, 2, 2, 3])
    every = [1 / Plan(2, 1, 9).rate(round) for round in range(6)]
    np.testing.assert_allclose(every, [1, 2, 2, 3, 3, 4])


def test_a_first_vector_counts_whole_in_whichever_round():
    """Of clients 1 and 3, of whom 3 has sent one for this criterion before, in its second turn."""
    ids, plan = jnp.array([1, 3]), Plan(2, 1, 9)
    rows = {"vectors": jnp.ones((4, 2, 3)), "known": jnp.zeros((4, 2), bool).at[3, 0].set(True)}
    cohort = SimpleNamespace(ids=ids, take=lambda leaf: leaf[ids])
    now = SimpleNamespace(round=2, rows=rows)
    found = at_once(accumulate, plan, now, cohort, jnp.full((2, 3), 5.0), jnp.array([True, True]))
    assert found["vectors"][:, 0, 0].tolist() == [1, 5, 1, 3]
    assert (found["vectors"][:, 1] == 1).all() and found["known"][:, 0].tolist() == [0, 1, 0, 1]


@pytest.mark.nightly
def test_groups_keep_the_numbers_of_most_clients():
    """Of three orthogonal groups; a client that is not known has no say."""
    apart = np.repeat(np.diag([5.0, 1.0, 2.0]), [3, 2, 3], axis=0)
    product, old = apart @ apart.T, jnp.array([2, 2, 0, 0, -1, 1, 1, 0])
    known = np.ones(8, bool)
    for masked in ([], [4], [7]):
        known[:] = True
        known[masked] = False
        kept = np.where(known[:, None] & known, product, 0.0)
        found = np.asarray(find_groups(KEY, jnp.asarray(kept), known, old, 3, 10))
        assert found[known].tolist() == np.repeat([2, 0, 1], [3, 2, 3])[known].tolist()


def test_directions_count_by_what_lies_in_them_and_only_known_clients_do():
    """One group sends twice as much as the other; across lies noise that both share. Six clients
    that are not known, one of whom had a group, would be a cluster of their own.
    """
    points = np.array([[10, 0.1], [10, -0.1], [5, 0.1], [5, -0.1]] + [[0, 0]] * 6)
    known, old = np.arange(10) < 4, jnp.array([1, 1, 0, 0, 1, 1, 1, 1, 1, 1])
    find = jax.jit(lambda gram: find_groups(KEY, gram, known, old, 2, 10))
    assert find(points @ points.T)[:4].tolist() == [1, 1, 0, 0]
    # what all share is long, and is no more than what it is beside what parts them
    points = np.array([[11.5, 2], [8.5, 2], [11.5, -2], [8.5, -2]] + [[0, 0]] * 6)
    assert find(points @ points.T)[:4].tolist() == [1, 1, 0, 0]


@pytest.fixture(scope="module")
def turned():
    """Digits, each client's turned by a quarter as often as its group says."""
    pool = cfl.datasets.digits()
    return cfl.federate(pool, cfl.partition.iid(pool, clients=20, seed=0), cfl.concept.rotate)


@pytest.fixture(scope="module")
def digits():
    return cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)


@pytest.mark.nightly
@pytest.mark.parametrize("project_to", [None, 40])
def test_four_rotations_of_digits_are_found(turned, digits, local, project_to):
    """In the first round, and again when they are looked for later."""
    algorithm = cfl_gp(digits, local, EVERYBODY, m=4, last=2, project_to=project_to)
    states, one_round = [jax.jit(algorithm.init)(KEY, turned)], jax.jit(algorithm.round)
    for _ in range(3):
        states.append(one_round(KEY, states[-1], turned)[0])
        assert adjusted_rand_score(turned.concept, states[-1].assignment) == 1.0
        assert (states[-1].assignment == states[1].assignment).all()
    sent = [spent(*pair) for pair in pairwise(states)]
    others = int((states[2].assignment != 1).sum())
    assert [each.units_down for each in sent] == [20, 20, 20 + others]
    assert [each.words_up for each in sent] == [0, 0, others * (project_to or 650)]
    if project_to:
        assert states[-1].rows["vectors"].shape == (20, 4, 40)


@pytest.mark.nightly
def test_clients_held_out_join_the_group_of_the_nearest_update(turned, digits, local):
    def make(pick):
        return cfl_gp(digits, local, pick, m=4, last=2)

    run = take_clients(turned, np.arange(15))
    check_rule(make, run, KEY, 3)
    state, _ = play(make(EVERYBODY), run, 3)
    new = assign_newcomers(make, digits, local.execution.mesh, state, turned, KEY, 3)
    groups = np.concatenate([state.assignment, new.groups])
    assert adjusted_rand_score(turned.concept, groups) == 1.0


@pytest.mark.nightly
def test_lost_clients_leave_their_means(toy, linear, local):
    begun, _ = play(cfl_gp(linear, local, EVERYBODY, m=2), toy, 1)
    silent = cfl.System(EVERYBODY, cfl.Faults(dropout=1.0))
    after, _ = play(cfl_gp(linear, local, silent, m=2), toy, 2, begun)
    chex.assert_trees_all_equal(after.rows["vectors"], begun.rows["vectors"])
    assert after.assignment.tolist() == begun.assignment.tolist()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 0}, "algorithm.m=0"),
        ({"m": 2, "period": 0}, "algorithm.period=0"),
        ({"m": 2, "last": -1}, "algorithm.last=-1"),
        ({"m": 2, "project_to": 0}, "algorithm.project_to=0"),
    ],
)
def test_refusals(linear, local, settings, says):
    one_line(says, cfl_gp, linear, local, EVERYBODY, **settings)
