"""StoCFL: a slow twin of the whole path; clients alone and FedAvg as special cases; planted groups;
clients that come later; the bill.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import nightly, one_line, spent
from sklearn.metrics import adjusted_rand_score
from test_reductions import KEY, play
from test_reference import batches_of, gradient, mean, models_of, passes, trained

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.stocfl import Common, move_common, place_groups, stocfl
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.keys import ASSIGN, TRAIN, derive_key
from fedjax_cfl.method import Round
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.simulation.personalize import assign_newcomers, check_rule
from fedjax_cfl.system import select
from fedjax_cfl.types import Work

EVERYBODY = select.full_participation()
# by round: some meet; some of them and one without samples; newcomers and known ones; all
COHORTS = ([0, 1, 5], [0, 2, 7, 4], [1, 3, 6, 8], [9, 10, 11, 12, 13, 0], [0, 1, 3, 4, 5, 6])


def pick_cohorts():
    width = max(map(len, COHORTS))
    return select.from_table(np.array([row + [14] * (width - len(row)) for row in COHORTS]))


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


class Twin:
    """The method in loops over clients; a group is a set of clients and its model."""

    def __init__(self, first, data, local, tau, mu, epochs, represent):
        self.anchor = self.common = first
        self.data, self.local = data, local
        self.tau, self.mu, self.epochs, self.represent = tau, mu, epochs, represent
        self.first, self.groups, self.merges = {}, [], 0

    def batches(self, key, client, epochs):
        return batches_of(passes(key, self.data, client, epochs), self.local.batch_size)

    def pulled(self, model, batches):
        x, y = np.asarray(self.data.x, np.float64), np.asarray(self.data.y)
        for batch in batches:
            pull = self.mu * (model + -1.0 * self.common)
            model = model + -self.local.lr * (gradient(model, x[batch], y[batch]) + pull)
        return model

    def meet(self, round, able):
        new = [client for client in able if client not in self.first]
        for client in new:
            batches = self.batches(derive_key(KEY, ASSIGN, round), client, self.epochs)
            model = trained(self.anchor, self.data, batches, self.local.lr)
            self.first[client] = model.flat() - self.anchor.flat()
        nodes = [*self.groups, *([{client}, None] for client in sorted(new))]
        points = []
        for members, _ in nodes:
            mine = members if self.represent == "members" else members & set(able)
            points.append(np.mean([self.first[i] for i in mine], axis=0) if mine else None)
        unions = [[i] for i in range(len(nodes))]
        for i in range(len(nodes)):
            for j in range(i):
                if points[i] is None or points[j] is None:
                    continue
                if cosine(points[i], points[j]) >= self.tau:
                    one, other = (next(u for u in unions if k in u) for k in (i, j))
                    if one is not other:
                        unions.remove(other)
                        one += other
        self.groups, old = [], len(self.groups)
        for union in unions:
            members = set().union(*(nodes[i][0] for i in union))
            parts = sorted((i for i in union if i < old), key=lambda i: (-len(nodes[i][0]), i))
            self.merges += max(len(parts) - 1, 0)
            self.groups.append([members, nodes[parts[0]][1] if parts else self.common])
        return len(new)

    def round(self, round, cohort):
        able = [client for client in cohort if self.data.train.size[client] > 0]
        new, commons = self.meet(round, able), []
        for group in self.groups:
            solutions = []
            for client in able:
                if client in group[0]:
                    batches = self.batches(derive_key(KEY, TRAIN, round), client, 2)
                    solutions.append(self.pulled(group[1], batches))
                    commons.append(trained(self.common, self.data, batches, self.local.lr))
            if solutions:
                group[1] = mean(solutions)
        self.common = mean(commons)
        return new


@pytest.mark.parametrize(
    ("tau", "represent"), [(0.85, "members"), nightly(0.8, "cohort"), nightly(0.4, "members")]
)
def test_slow_twin(toy, linear, local, tau, represent):
    """Groups, models, the common one, and every word, while groups are founded and unite."""
    given = {"tau": tau, "mu": 0.5, "epochs": 3, "represent": represent}
    algorithm = stocfl(linear, local, pick_cohorts(), m=13, **given)
    state, _ = play(algorithm, toy, 0)
    assert (state.assignment == -1).all()
    twin = Twin(models_of(state.groups)[0], toy, local, **given)
    one_round = jax.jit(algorithm.round)
    size = toy.train.size.at[4].set(0)  # client 4 takes part without samples at first
    early = toy.replace(train=toy.train.replace(size=size))
    for round, cohort in enumerate(COHORTS):
        before, twin.data = state, early if round < 3 else toy
        state, _ = one_round(KEY, state, twin.data)
        new = twin.round(round, cohort)
        assert int(state.active.sum()) == len(twin.groups)
        models, group = models_of(state.groups), np.asarray(state.assignment)
        for members, model in twin.groups:
            (number,) = {int(group[client]) for client in members}
            # one without samples has the group of all as long as there is one
            assert set(np.flatnonzero(group == number).tolist()) - {2, 4} == members - {4}
            np.testing.assert_allclose(models[number].flat(), model.flat(), atol=3e-5)
        first = models_of(jax.tree.map(jnp.add, state.memory.anchor, state.rows["directions"]))
        for client, direction in twin.first.items():
            found = first[client].flat() - twin.anchor.flat()
            np.testing.assert_allclose(found, direction, atol=3e-5)
        common = models_of(state.memory.common)[0]
        np.testing.assert_allclose(common.flat(), twin.common.flat(), atol=3e-5)
        sent, taken = spent(before, state), len(cohort)
        assert (sent.units_down, sent.units_up) == (2 * taken + new, 2 * taken + new)
        assert (sent.words_down, sent.words_up) == (0, 0)
    assert state.assignment[2] == (number if len(twin.groups) == 1 else -1) and 4 in twin.first
    assert len(twin.groups) > 1 or tau < 0.8
    assert twin.merges > 0 or tau != 0.85


@pytest.mark.nightly
def test_one_group_without_pull_is_fedavg(toy, linear, local):
    state, _ = play(stocfl(linear, local, EVERYBODY, m=14, tau=-1.0, mu=0.0, epochs=1), toy)
    expected, _ = play(fedavg(linear, local, EVERYBODY, aggregate=uniform_mean), toy)
    assert state.active.sum() == 1
    wanted = models_of(expected.groups)[0].flat()
    for found in (models_of(state.groups)[0], models_of(state.memory.common)[0]):
        np.testing.assert_allclose(found.flat(), wanted, atol=1e-5)


@pytest.mark.nightly
def test_without_unions_and_pull_clients_are_alone(toy, linear, local):
    state, _ = play(stocfl(linear, local, EVERYBODY, m=14, tau=1.5, mu=0.0, epochs=1), toy, 2)
    assert sorted(state.assignment.tolist()) == [-1, *range(13)]
    first = models_of(jax.jit(fedavg(linear, local, EVERYBODY).init)(KEY, toy).groups)[0]
    for client in (0, 7, 13):
        model = first
        for round in range(2):
            epochs = passes(derive_key(KEY, TRAIN, round), toy, client, local.epochs)
            model = trained(model, toy, batches_of(epochs, local.batch_size), local.lr)
        found = models_of(state.groups)[int(state.assignment[client])]
        np.testing.assert_allclose(found.flat(), model.flat(), atol=2e-5)


SLOTS = jax.jit(partial(place_groups, m=3))


def place(apart, count, new, limit=0.5):
    apart = np.asarray(apart, float)
    given = jnp.asarray(apart + apart.T), jnp.array(count), jnp.array(new)
    found = SLOTS(*given, limit=limit)
    return [part.tolist() for part in found]


def test_the_common_model_moves_by_the_rule_of_the_groups():
    """A rule reads for it what it has read for them: the round before the groups have moved, all
    clients in one group.
    """
    old = SimpleNamespace(memory=Common({"w": jnp.zeros((1, 2))}, {"w": jnp.full((1, 2), 3.0)}))
    new = SimpleNamespace(memory=old.memory, replace=lambda memory: memory)
    upload = SimpleNamespace(extra="second", replace=lambda delta: SimpleNamespace(delta=delta))

    def rule(r):
        assert r.state is old and r.upload.delta == "second" and not r.group.any()
        return {"w": jnp.array([[1.0, 2.0], [9.0, 9.0]])}, None

    work = Work(jnp.array([1, 0, 1]), jnp.ones(3), jnp.ones(3))
    memory = move_common(rule)(Round(KEY, new, None, None, work, upload, old))
    assert memory.common["w"].tolist() == [[4.0, 5.0]] and memory.anchor is old.memory.anchor


def test_slots_by_hand():
    """Three groups, of which the last is not in use, and two new clients."""
    far = np.triu(np.full((5, 5), 0.9), 1)
    # the first client founds, and there is no room for the second: nearest of all is group 1
    apart = far.copy()
    apart[1, 4] = 0.8
    assert place(apart, [2, 3, 0], [True, True]) == [[0, 1, 3, 2, 1], [False, False, True]]
    # groups 0 and 1 unite in the slot of more clients, both clients find room
    apart = far.copy()
    apart[0, 1] = 0.1
    assert place(apart, [2, 3, 0], [True, True]) == [[1, 1, 3, 0, 2], [True, False, True]]
    # of equals the first; one client joins, the other is not there
    apart[1, 3] = 0.2
    assert place(apart, [2, 2, 0], [True, False]) == [[0, 0, 3, 0, 3], [False] * 3]
    # new clients unite among themselves, by a chain
    apart = far.copy()
    apart[3, 4] = 0.5
    assert place(apart, [0, 4, 0], [True, True]) == [[3, 1, 3, 0, 0], [True, False, False]]


@pytest.fixture(scope="module")
def turned():
    """Digits, each client's turned by a quarter as often as its group says."""
    pool = cfl.datasets.digits()
    return cfl.federate(pool, cfl.partition.iid(pool, clients=20, seed=0), cfl.concept.rotate)


@pytest.mark.nightly
def test_four_rotations_of_digits_are_found(turned, local):
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)
    method = stocfl(task, local, select.uniform(8), m=16, tau=0.3, epochs=5)
    state, _ = play(method, turned, 8)
    met = np.asarray(state.assignment) >= 0
    assert met.sum() > 15 and state.active.sum() == 4
    assert adjusted_rand_score(np.asarray(turned.concept)[met], state.assignment[met]) == 1.0


@pytest.mark.nightly
def test_clients_held_out_join_by_their_first_update(turned, local):
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)

    def make(pick):
        return stocfl(task, local, pick, m=16, tau=0.3, epochs=5)

    run = take_clients(turned, np.arange(15))
    check_rule(make, run, KEY, 3)
    state, _ = play(make(EVERYBODY), run, 1)
    new = assign_newcomers(make, task, local.execution.mesh, state, turned, KEY, 3)
    groups = np.concatenate([state.assignment, new.groups])
    assert adjusted_rand_score(turned.concept, groups) == 1.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 0}, "algorithm.m=0"),
        ({"m": 2, "tau": -1.5}, "algorithm.tau=-1.5"),
        ({"m": 2, "mu": -1.0}, "algorithm.mu=-1.0"),
        ({"m": 2, "epochs": 0}, "algorithm.epochs=0"),
        ({"m": 2, "represent": "code"}, "algorithm.represent=code"),
    ],
)
def test_refusals(linear, local, settings, says):
    one_line(says, stocfl, linear, local, EVERYBODY, **settings)
