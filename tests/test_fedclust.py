"""FedClust: a slow twin of the whole path with SciPy's linkage; FedAvg and clients alone as special
cases; planted groups; clients that come later; the bill.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ledger, nightly, one_line, spent
from scipy.cluster.hierarchy import fcluster
from scipy.cluster.hierarchy import linkage as link
from scipy.spatial.distance import pdist
from sklearn.metrics import adjusted_rand_score
from test_pacfl import number_by_first
from test_reductions import COHORT, KEY, play
from test_reference import batches_of, mean, models_of, passes, trained

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.fedclust import fedclust
from fedjax_cfl.clustering.hierarchical import largest_gap
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.keys import MIGRATE, SELECT, START, TRAIN, derive_key
from fedjax_cfl.simulation.personalize import assign_newcomers, check_rule
from fedjax_cfl.system import select

LATE = [1, 4, 9]  # clients that have samples only from round 1 on


def solution(key, model, data, client, local, epochs):
    batches = batches_of(passes(key, data, client, epochs), local.batch_size)
    return trained(model, data, batches, local.lr)


def cut_tree(tree, m, threshold):
    """Returns SciPy's labels at the threshold, None: in the largest gap; or at m, if it leaves
    more.
    """
    if threshold is None:
        gaps = np.diff(tree[:, 2])
        at = len(gaps) - 1 - np.argmax(gaps[::-1])
        threshold = tree[at : at + 2, 2].mean()
    labels = fcluster(tree, threshold, "distance")
    return number_by_first(labels if labels.max() <= m else fcluster(tree, m, "maxclust"))


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"m": 6, "epochs": 1}, 2),
        nightly({"m": 12, "threshold": 0.6, "linkage": "complete"}, 6),
        nightly({"m": 3, "threshold": 0.1}, 3),
    ],
)
def test_slow_twin(toy, linear, local, settings, groups):
    """Groups, three rounds of models, clients that come later, and every word."""
    algorithm = fedclust(linear, local, COHORT, **settings)
    size = toy.train.size.at[jnp.array(LATE)].set(0)
    early = toy.replace(train=toy.train.replace(size=size))
    begun, _ = play(algorithm, early, 0)
    first, epochs = models_of(begun.groups)[0], settings.get("epochs", local.epochs)
    able = np.flatnonzero(np.asarray(size) > 0)

    def sent_by(client, key):
        return solution(key, first, toy, client, local, epochs).flat()

    layer = {i: sent_by(i, derive_key(KEY, START)) for i in able}
    tree = link(pdist(np.stack(list(layer.values()))), settings.get("linkage", "average"))
    labels = cut_tree(tree, settings["m"], settings.get("threshold"))
    group = dict(zip(able.tolist(), labels.tolist(), strict=True))
    assert labels.max() + 1 == groups == int(begun.active.sum())
    for client in range(14):
        assert begun.assignment[client] == group.get(client, -1)
    sent = ledger(begun.traffic)
    assert (sent.units_down, sent.units_up) == (len(able), 0)
    assert (sent.words_down, sent.words_up) == (0, 24 * len(able))
    state, models, one_round = begun, models_of(begun.groups), jax.jit(algorithm.round)
    for round in range(3):
        data = early if round == 0 else toy
        if round == 1:
            for client in LATE:
                layer[client] = sent_by(client, derive_key(KEY, MIGRATE, round))
                apart = [
                    np.mean(
                        [np.linalg.norm(layer[client] - layer[i]) for i in group if group[i] == g]
                    )
                    for g in range(groups)
                ]
                group[client] = int(np.argmin(apart))
        before = state
        state, _ = one_round(KEY, state, data)
        solutions, weights = [[] for _ in models], [[] for _ in models]
        ids = COHORT.draw(derive_key(KEY, SELECT, round), round, data.train.size).tolist()
        for client in [client for client in ids if data.train.size[client] > 0]:
            mine, key = group[client], derive_key(KEY, TRAIN, round)
            solutions[mine].append(solution(key, models[mine], toy, client, local, local.epochs))
            weights[mine].append(int(toy.train.size[client]))
        models = [
            mean(members, weight) if members else old
            for old, members, weight in zip(models, solutions, weights, strict=True)
        ]
        for found, wanted in zip(models_of(state.groups), models, strict=True):
            np.testing.assert_allclose(found.flat(), wanted.flat(), atol=2e-5)
        late, sent = 3 * (round == 1), spent(before, state)
        assert (sent.units_down, sent.units_up) == (6 + late, 6)
        assert (sent.words_down, sent.words_up) == (0, 24 * late)
    assert state.assignment.tolist() == [group.get(client, -1) for client in range(14)]
    for client, one in layer.items():
        length = np.linalg.norm(one - first.flat())
        np.testing.assert_allclose(
            np.linalg.norm(state.rows["features"].points[client]), length, rtol=1e-4
        )
    assert len({group[client] for client in LATE}) > 1


@pytest.mark.parametrize("how", ["average", "complete", "single", "ward"])
def test_the_largest_gap_is_that_of_scipys_tree(how):
    rng = np.random.default_rng(1)
    for count in (2, 3, 9):
        points = rng.normal(size=(count, 3)) + 4 * rng.integers(3, size=(count, 1))
        apart, valid = np.full((12, 12), 0.01), np.isin(np.arange(12), rng.permutation(12)[:count])
        apart[np.ix_(valid, valid)] = np.linalg.norm(points[:, None] - points, axis=2)
        heights = link(pdist(points), how)[:, 2]
        if count > 2:
            at = np.argmax(np.diff(heights))
            heights = heights[at : at + 2]
        found = largest_gap(how, jnp.asarray(apart), jnp.asarray(valid))
        np.testing.assert_allclose(found, heights.mean(), rtol=1e-5)


@pytest.mark.nightly
def test_without_a_limit_it_is_fedavg(toy, linear, local):
    state, _ = play(fedclust(linear, local, COHORT, m=1, threshold=1e9), toy)
    expected, _ = play(fedavg(linear, local, COHORT), toy)
    chex.assert_trees_all_equal(state.groups, expected.groups)


@pytest.mark.nightly
def test_a_limit_that_joins_none_leaves_clients_alone(toy, linear, local):
    everybody = select.full_participation()
    state, _ = play(fedclust(linear, local, everybody, m=14, threshold=0.0), toy, 2)
    assert sorted(state.assignment.tolist()) == [-1, *range(13)]
    first = models_of(jax.jit(fedclust(linear, local, COHORT, m=14).init)(KEY, toy).groups)[0]
    for client in (0, 7, 13):
        model = first
        for round in range(2):
            key = derive_key(KEY, TRAIN, round)
            model = solution(key, model, toy, client, local, local.epochs)
        found = models_of(state.groups)[int(state.assignment[client])]
        np.testing.assert_allclose(found.flat(), model.flat(), atol=2e-5)


@pytest.mark.nightly
def test_only_the_last_layer_is_sent(toy, mlp, local):
    """3 x 4 weights and 4 biases of a network of 34 parameters."""
    words = {
        layers: ledger(play(fedclust(mlp, local, COHORT, m=2, layers=layers), toy, 0)[0].traffic)
        for layers in ("last", "all")
    }
    assert (words["last"].words_up, words["all"].words_up) == (16 * 13, 34 * 13)


@pytest.fixture(scope="module")
def turned():
    """Digits, each client's turned by a quarter as often as its group says."""
    pool = cfl.datasets.digits()
    return cfl.federate(pool, cfl.partition.iid(pool, clients=20, seed=0), cfl.concept.rotate)


@pytest.mark.nightly
def test_four_rotations_of_digits_are_found(turned, local):
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)
    state = jax.jit(fedclust(task, local, COHORT, m=8).init)(KEY, turned)
    assert adjusted_rand_score(turned.concept, state.assignment) == 1.0


@pytest.mark.nightly
def test_clients_held_out_join_by_their_last_layer(turned, local):
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)

    def make(pick):
        return fedclust(task, local, pick, m=4)

    run = take_clients(turned, np.arange(15))
    check_rule(make, run, KEY, 3)
    state, _ = play(make(select.uniform(6)), run, 1)
    new = assign_newcomers(make, task, local.execution.mesh, state, turned, KEY, 3)
    groups = np.concatenate([state.assignment, new.groups])
    assert adjusted_rand_score(turned.concept, groups) == 1.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 0}, "algorithm.m=0"),
        ({"m": 2, "threshold": -1.0}, "algorithm.threshold=-1.0"),
        ({"m": 2, "epochs": 0}, "algorithm.epochs=0"),
        ({"m": 2, "linkage": "centroid"}, "algorithm.linkage=centroid"),
        ({"m": 2, "layers": "first"}, "algorithm.layers=first"),
    ],
)
def test_refusals(linear, local, settings, says):
    one_line(says, fedclust, linear, local, COHORT, **settings)


def test_a_model_without_a_head_is_refused(linear, local):
    nameless = linear._replace(init=lambda key: {"body": linear.init(key)["head"]})
    one_line("no layer named head", fedclust, nameless, local, COHORT, m=2)
