"""PACFL: a slow twin of the whole path with NumPy's SVD and SciPy's linkage; FedAvg as a special
case; planted groups; clients that come later; the bill.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ledger, nightly, one_line, spent
from scipy.cluster.hierarchy import fcluster
from scipy.cluster.hierarchy import linkage as link
from scipy.linalg import subspace_angles
from scipy.spatial.distance import squareform
from sklearn.metrics import adjusted_rand_score
from test_bounds import passes
from test_reductions import COHORT, KEY, SAME, play
from test_reference import batches_of, mean, models_of, samples, trained

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.pacfl import angles, class_directions, leading_directions, pacfl
from fedjax_cfl.clustering.measure import Question
from fedjax_cfl.clustering.one_shot import join_or_found
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.keys import SELECT, derive_key
from fedjax_cfl.method import Round
from fedjax_cfl.simulation.personalize import assign_newcomers, check_rule
from fedjax_cfl.system import select
from fedjax_cfl.system.reports import make_bill
from fedjax_cfl.types import Cohort


def vectors_of(data, client, count):
    """Returns the first left singular vectors of each class that a client has, each [F, <= q]."""
    held = samples(data, client)
    x, y = np.asarray(data.x, float)[held], np.asarray(data.y)[held]
    return [np.linalg.svd(x[y == c].T, full_matrices=False)[0][:, :count] for c in np.unique(y)]


def angle_of(one, other, kind):
    one, other = np.hstack(one), np.hstack(other)
    if kind == "principal":
        return np.rad2deg(subspace_angles(one, other).min())
    return np.rad2deg(np.arccos(min(np.abs(one.T @ other).max(), 1.0)))


def number_by_first(labels):
    """Returns labels that count up by first occurrence."""
    order = list(dict.fromkeys(labels.tolist()))
    return np.array([order.index(label) for label in labels])


def twin_groups(apart, m, threshold, how):
    """Returns the groups of SciPy's tree, cut at the threshold, or at m if it leaves more."""
    tree = link(squareform(apart, checks=False), how)
    labels = fcluster(tree, threshold, "distance")
    if labels.max() > m:
        labels = fcluster(tree, m, "maxclust")
    return number_by_first(labels)


@pytest.fixture(scope="module")
def spread(toy):
    """The toy clients, whose samples lie in other directions from client to client."""
    rng = np.random.default_rng(4)
    turn = np.linalg.qr(rng.normal(size=(3, 5, 5)))[0][np.asarray(toy.owner) % 3]
    x = np.einsum("nf,nfg->ng", np.asarray(toy.x), turn)
    return toy.replace(x=jnp.asarray(x + 0.3 * rng.normal(size=x.shape), jnp.float32))


@pytest.mark.parametrize("kind", ["vectors", "principal"])
@pytest.mark.parametrize("count", [nightly(1), 2])
def test_angles_are_those_of_singular_vectors(spread, local, kind, count):
    """Clients of one sample of a class have one vector of it."""
    able = spread.train.size > 0
    measure, cohort = class_directions(None, local, count), Cohort(jnp.arange(14), jnp.arange(14))
    bases = jax.jit(lambda data: measure.ask(Question(KEY, (), (), data, cohort, {})))(spread)
    apart = np.asarray(angles(bases, kind))
    assert not np.asarray(bases)[2].any()
    for i in np.flatnonzero(able):
        mine = vectors_of(spread, i, count)
        assert np.any(bases[i] != 0, axis=1).sum() == sum(part.shape[1] for part in mine)
        for j in np.flatnonzero(able):
            if i != j:
                wanted = angle_of(mine, vectors_of(spread, j, count), kind)
                assert abs(apart[i, j] - wanted) < 0.1, (i, j)
    assert (apart == apart.T).all() and (np.diag(apart) == 0).all()


def test_principal_angles_are_those_of_the_spaces_that_all_classes_span():
    """Vectors of several classes lean on each other, or are the same."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(1, 12))
    vectors = common + rng.normal(size=(5, 4, 12)) * [[[0.3]], [[1.0]], [[1.0]], [[3.0]], [[0.3]]]
    vectors[:, 1] = vectors[:, 0]  # the space is smaller than its vectors are many
    vectors -= 0.7 * np.eye(5)[:, :1, None] * vectors.mean(0)
    bases = vectors / np.linalg.norm(vectors, axis=2, keepdims=True)
    bases[2, 3] = 0  # a class that a client does not have
    found = np.asarray(angles(jnp.asarray(bases, jnp.float32), "principal"))
    for i in range(5):
        for j in range(5):
            one, other = (part[np.any(part != 0, 1)].T for part in (bases[i], bases[j]))
            wanted = np.rad2deg(subspace_angles(one, other).min()) if i != j else 0
            assert abs(found[i, j] - wanted) < 0.1, (i, j)
    assert found.max() > 5


def test_directions_of_more_samples_than_features_and_of_fewer_are_the_same():
    """Up to the sign, and 0 beyond the rank."""
    rows = np.random.default_rng(0).normal(size=(9, 4)) * [3, 2, 1, 0]
    wide = np.concatenate([rows, np.zeros((9, 16))], axis=1)
    tall, flat = (np.asarray(leading_directions(jnp.asarray(x), 5)) for x in (rows, wide))
    expected = np.linalg.svd(rows)[2][:3]
    for found in (tall, flat[:, :4]):
        np.testing.assert_allclose(np.abs(found[:3]), np.abs(expected), atol=1e-5)
        assert not found[3:].any()


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        nightly({"m": 9, "threshold": 15.0}, 5),
        nightly({"m": 3, "threshold": 12.0}, 3),
        ({"m": 4, "threshold": None, "linkage": "average", "directions": 1}, 4),
    ],
)
def test_slow_twin(spread, linear, local, settings, groups):
    """Groups, three rounds of models, and every word."""
    algorithm = pacfl(linear, local, COHORT, **settings)
    begun, _ = play(algorithm, spread, 0)
    state, _ = play(algorithm, spread, 3, begun)
    able = np.flatnonzero(np.asarray(spread.train.size) > 0)
    own = [vectors_of(spread, client, settings.get("directions", 3)) for client in able]
    apart = np.array([[angle_of(a, b, "vectors") for b in own] for a in own])
    np.fill_diagonal(apart, 0)
    how, threshold = settings.get("linkage", "weighted"), settings["threshold"] or 0.0
    labels = twin_groups(apart, settings["m"], threshold, how)
    assert labels.max() + 1 == groups == int(begun.active.sum())
    expected = np.full(spread.num_clients, -1)
    expected[able] = labels
    assert begun.assignment.tolist() == expected.tolist() == state.assignment.tolist()
    vectors = sum(part.shape[1] for parts in own for part in parts)
    sent = ledger(begun.traffic)
    assert (sent.words_up, sent.units_down, sent.units_up) == (5 * vectors, 0, 0)
    models = models_of(begun.groups)
    for round in range(3):
        solutions, weights = [[] for _ in models], [[] for _ in models]
        ids = COHORT.draw(derive_key(KEY, SELECT, round), round, spread.train.size)
        for client in [client for client in ids.tolist() if client in able]:
            epochs, group = passes(round, spread, client, local.epochs), expected[client]
            batches = batches_of(epochs, local.batch_size)
            solutions[group].append(trained(models[group], spread, batches, local.lr))
            weights[group].append(len(epochs[0]))
        models = [
            mean(members, weight) if members else old
            for old, members, weight in zip(models, solutions, weights, strict=True)
        ]
    for found, wanted in zip(models_of(state.groups), models, strict=True):
        np.testing.assert_allclose(found.flat(), wanted.flat(), atol=2e-5)
    sent = spent(begun, state)
    assert (sent.units_down, sent.units_up, sent.words_down, sent.words_up) == (18, 18, 0, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("m", [nightly(1), 3])
def test_without_a_limit_it_is_fedavg(toy, linear, local, m):
    """Bit for bit; room for more groups changes nothing but rounding."""
    algorithm = pacfl(linear, local, COHORT, m=m, threshold=91.0)
    begun, _ = play(algorithm, toy, 0)
    assert (begun.assignment == 0).all()  # also of the client without samples
    state, infos = play(algorithm, toy, 3, begun)
    expected, wanted = play(fedavg(linear, local, COHORT), toy)
    first = jax.tree.map(lambda leaf: leaf[:1], state.groups)
    infos, wanted = (
        [info.replace(group_discrepancy=info.group_discrepancy[:1], cold=0) for info in each]
        for each in (infos, wanted)
    )
    same = chex.assert_trees_all_equal if m == 1 else chex.assert_trees_all_close
    same((first, infos), (expected.groups, wanted), **({} if m == 1 else SAME))
    assert state.active.sum() == 1 and (state.assignment == 0).all()


@pytest.fixture(scope="module")
def turned():
    """Digits, each client's turned by a quarter as often as its group says."""
    pool = cfl.datasets.digits()
    holdings = cfl.partition.iid(pool, clients=20, seed=0)
    return cfl.federate(pool, holdings, cfl.concept.rotate)


def test_four_rotations_of_digits_are_found(turned, local):
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)
    state = jax.jit(pacfl(task, local, COHORT, m=4).init)(KEY, turned)
    assert adjusted_rand_score(turned.concept, state.assignment) == 1.0


def place(apart, groups, active, newcomers, threshold):
    """Returns groups and which are in use, after newcomers were placed one after another."""
    groups, active = groups.copy(), active.copy()
    for i in newcomers:
        means = {g: apart[i, groups == g].mean() for g in set(groups[groups >= 0].tolist())}
        nearest = min(sorted(means), key=means.get)
        if means[nearest] > threshold and not active.all():
            nearest = int(np.argmin(active))
        groups[i], active[nearest] = nearest, True
    return groups, active


@pytest.mark.nightly
@pytest.mark.parametrize("threshold", [8.0, nightly(None)])
def test_clients_that_get_samples_later_join_or_found_a_group(spread, linear, local, threshold):
    """Their groups are those of a slow twin; others stay; each sends its vectors once."""
    m = 4 if threshold is None else 13
    algorithm = pacfl(linear, local, COHORT, m=m, threshold=threshold)
    late = [1, 5, 9, 11]
    size = np.asarray(spread.train.size).copy()
    size[late] = 0
    early = spread.replace(train=spread.train.replace(size=jnp.asarray(size)))
    begun, _ = play(algorithm, early, 0)
    assert (np.asarray(begun.assignment)[late] == -1).all()
    one_round = jax.jit(algorithm.round)
    after, info = one_round(KEY, begun, spread)
    own = [np.hstack(vectors_of(spread, i, 3)) if i != 2 else np.zeros((5, 1)) for i in range(14)]
    apart = np.array([[angle_of([a], [b], "vectors") for b in own] for a in own])
    limit = np.inf if threshold is None else threshold
    first = np.asarray(begun.assignment), np.asarray(begun.active)
    groups, active = place(apart, *first, late, limit)
    assert after.assignment.tolist() == groups.tolist()
    assert after.active.tolist() == active.tolist()
    assert info.migrated == 0
    founded = active.sum() - begun.active.sum()
    assert founded == 0 if threshold is None else 0 < founded < len(late), founded
    sent = spent(begun, after).words_up
    assert sent == 5 * sum(own[i].shape[1] for i in late)
    assert spent(after, one_round(KEY, after, spread)[0]).words_up == 0


def test_newcomers_count_for_those_after_them_by_hand(toy, linear, local):
    """Client 1 is far from 0 and founds group 1, which 2 joins; 3 is far from all, and there is no
    room for a third group: it joins the nearest, of 70 and (40 + 80) / 2 degrees.
    """
    apart = np.zeros((14, 14))
    apart[0, 1:4], apart[1, 2:4], apart[2, 3] = (50, 50, 70), (10, 40), 80
    apart = jnp.asarray(apart + apart.T)
    begun, _ = play(pacfl(linear, local, COHORT, m=2, threshold=91.0), toy, 0)
    features = begun.rows["features"]
    features = features.replace(known=features.known.at[1:4].set(False))
    state = begun.replace(active=jnp.array([True, False])).put_rows({"features": features})
    four = toy.replace(train=toy.train.replace(size=jnp.ones(14, jnp.int32).at[4:].set(0)))
    state = state.replace(assignment=jnp.full(14, -1).at[0].set(0))

    def describe(key, first, data, who):
        return jnp.ones_like(features.points)

    def bill(bases, data, who):
        return make_bill(jnp.zeros(14))

    mesh = local.execution.mesh
    take_in = join_or_found(describe, bill, lambda bases: apart, 30.0, mesh)
    after, _ = take_in(Round(KEY, state, four))
    assert after.assignment[:4].tolist() == [0, 1, 1, 1]
    assert after.assignment[4:].tolist() == [-1] * 10 and after.active.all()


@pytest.mark.nightly
def test_a_founded_group_begins_with_the_first_model(spread, linear, local):
    """A threshold of 0 keeps all apart: each newcomer founds a group as long as there is room."""
    algorithm = pacfl(linear, local, COHORT, m=13, threshold=0.0)
    size = spread.train.size.at[jnp.array([1, 5])].set(0)
    early = spread.replace(train=spread.train.replace(size=size))
    begun, _ = play(algorithm, early, 2)
    after, _ = jax.jit(algorithm.round)(KEY, begun, spread)
    assert int(begun.active.sum()) == 11
    assert after.assignment[jnp.array([1, 5])].tolist() == [11, 12]
    initial, _ = play(algorithm, early, 0)
    first = jax.tree.map(lambda leaf: leaf[0], initial.groups)
    for group in (11, 12):
        one = jax.tree.map(lambda leaf, group=group: leaf[group], begun.groups)
        chex.assert_trees_all_equal(one, first)


@pytest.mark.nightly
def test_clients_held_out_join_by_their_angles(turned, local):
    """One of them has labels only in its test samples, and finds no group."""
    task = cfl.as_task(cfl.models.MCLR(10), (8, 8), 10)

    def make(pick):
        return pacfl(task, local, pick, m=4)

    run = take_clients(turned, np.arange(15))
    check_rule(make, run, KEY, 3)
    state, _ = play(make(select.uniform(6)), run, 1)
    size = turned.train.size.at[17].set(0)
    data = turned.replace(train=turned.train.replace(size=size))
    new = assign_newcomers(make, task, local.execution.mesh, state, data, KEY, 3)
    groups = np.concatenate([state.assignment, new.groups])
    assert groups[17] == -1
    met = groups >= 0
    assert adjusted_rand_score(np.asarray(turned.concept)[met], groups[met]) == 1.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 2, "threshold": -1.0}, "algorithm.threshold=-1.0"),
        ({"m": 2, "directions": 0}, "algorithm.directions=0"),
        ({"m": 2, "angle": "signed"}, "algorithm.angle=signed"),
        ({"m": 2, "linkage": "ward"}, "algorithm.linkage=ward"),
    ],
)
def test_refusals(linear, local, settings, says):
    one_line(says, pacfl, linear, local, COHORT, **settings)
