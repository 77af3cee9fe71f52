"""The baselines of FeSEM's tables: FedDist, FedDWS, FedDANE, NonFed and TKM, against
FedAvg, loops in NumPy and SciPy.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, charged, ledger, matrix, nightly, with_execution
from scipy.stats import trim_mean
from sklearn.metrics import adjusted_rand_score
from test_fesem import planted
from test_reductions import COHORT, KEY, SAME, assert_differ, assert_same, play
from test_reference import (
    batches_of,
    gradient,
    mean,
    models_of,
    passes,
    probabilities,
    samples,
    trained,
)

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.feddane import feddane
from fedjax_cfl.algorithms.feddist import feddist, feddws
from fedjax_cfl.algorithms.fedprox import fedprox
from fedjax_cfl.algorithms.nonfed import nonfed
from fedjax_cfl.algorithms.qfedavg import attach_losses
from fedjax_cfl.algorithms.tkm import tkm, trimmed_kmeans
from fedjax_cfl.client.cohort import make_cohort
from fedjax_cfl.client.local import full_work
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import BYZANTINE, PREPARE, SELECT, START, TRAIN, derive_key
from fedjax_cfl.method import Round
from fedjax_cfl.round.aggregate import (
    count_trimmed,
    sort_coordinates,
    trimmed_group_mean,
    uniform_mean,
    weighted_mean,
)
from fedjax_cfl.round.start import random_groups
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.system import faults, select
from fedjax_cfl.tasks.classification import cross_entropy
from fedjax_cfl.types import State, Traffic

K = 14  # clients of the toy problem


def step(algorithm, data):
    """Returns what one round adds to group 0."""
    states = [play(algorithm, data, rounds)[0].groups for rounds in (0, 1)]
    return jax.tree.map(lambda old, new: new - old, *states)


def cohort_of(key, data):
    """Returns the clients with samples among the six that are drawn for round 0."""
    return [client for client in COHORT.draw(key, 0, data.train.size).tolist() if client < K]


def units(state):
    """Returns the models sent so far, (down, up)."""
    sent = ledger(state.traffic)
    return sent.units_down, sent.units_up


# FedDist and FedDWS


@pytest.fixture(scope="module")
def plain(toy, linear, local):
    """FedAvg with plain means and with means weighted by samples, three rounds each."""
    return [
        play(fedavg(linear, local, COHORT, aggregate=how), toy)
        for how in (uniform_mean, weighted_mean)
    ]


@pytest.mark.nightly
def test_a_whole_step_is_fedavg(toy, linear, local, plain):
    assert_same(play(feddist(linear, local, COHORT, epsilon=1.0), toy), plain[0])
    assert_same(play(feddws(linear, local, COHORT, epsilon=1.0), toy), plain[1])
    assert_differ(*plain)


@pytest.mark.nightly
def test_epsilon_scales_the_step(toy, linear, local):
    """Six clients are selected; client 2 has no samples, so that it depends on the draw
    whether six or five answer.
    """
    answered = len(cohort_of(derive_key(KEY, SELECT, 0), toy))
    for method, how, epsilon, part in (
        (feddist, uniform_mean, 0.25, 0.25),
        (feddist, uniform_mean, None, 1 / answered),
        (feddws, weighted_mean, None, 1 / answered),
    ):
        whole = step(fedavg(linear, local, COHORT, aggregate=how), toy)
        expected = jax.tree.map(lambda leaf, part=part: part * leaf, whole)
        chex.assert_trees_all_close(
            step(method(linear, local, COHORT, epsilon=epsilon), toy), expected, **SAME
        )


# FedDANE


@pytest.mark.nightly
@pytest.mark.parametrize("mu", [nightly(0.0), 0.3])
def test_a_lone_client_corrects_nothing(toy, linear, local, mu):
    one = select.rr_then_random(1)
    corrected = play(feddane(linear, local, one, mu=mu, same_set=True), toy)
    assert_same(corrected, play(fedprox(linear, local, one, mu=mu), toy))


@pytest.mark.nightly
def test_equal_clients_correct_nothing(toy_pool, linear, local):
    """All hold the same samples: every gradient is the mean gradient."""
    number, clients = np.arange(20), 8
    held = cfl.Partition(
        np.tile(number, clients),
        np.repeat(np.arange(clients, dtype=np.int32), 20),
        np.tile(number % 4 == 0, clients),
    )
    data = cfl.federate(toy_pool._replace(client=None, test=None), held)
    same, other = (
        play(feddane(linear, local, COHORT, mu=0.3), data),
        play(fedprox(linear, local, COHORT, mu=0.3), data),
    )
    chex.assert_trees_all_close(same[0].groups, other[0].groups, rtol=1e-5, atol=1e-6)
    # the discrepancy of nearly equal updates is a small difference of large squares
    assert_same(same, other, rtol=1e-3, atol=1e-6)


def dane_round(model, data, first, second, local, mu):
    """One round of FedDANE as loops: g_t over `first`, then SGD of `second` on the
    corrected gradients.
    """
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)

    def full(client):
        held = samples(data, client)
        return gradient(model, x[held], y[held])

    g = mean([full(client) for client in first], [len(samples(data, client)) for client in first])
    solutions = []
    for client in second:
        w, tilt = model, g + -1.0 * full(client)
        for batch in batches_of(
            passes(derive_key(KEY, TRAIN, 0), data, client, local.epochs), local.batch_size
        ):
            w = w + -local.lr * (gradient(w, x[batch], y[batch]) + tilt + mu * (w + -1.0 * model))
        solutions.append(w)
    return mean(solutions, [len(samples(data, client)) for client in second])


@pytest.mark.parametrize(("same_set", "mu"), [nightly(True, 0.0), (False, 0.5)])
def test_feddane_twin(toy, linear, local, same_set, mu):
    algorithm = feddane(linear, local, COHORT, mu=mu, same_set=same_set)
    begun, after = (play(algorithm, toy, rounds)[0] for rounds in (0, 1))
    second = cohort_of(derive_key(KEY, SELECT, 0), toy)
    first = second if same_set else cohort_of(jax.random.split(derive_key(KEY, PREPARE, 0))[0], toy)
    assert same_set or set(first) != set(second)
    expected = dane_round(models_of(begun.groups)[0], toy, first, second, local, mu)
    np.testing.assert_allclose(
        models_of(after.groups)[0].flat(), expected.flat(), rtol=2e-5, atol=2e-5
    )
    assert_differ((after,), play(fedprox(linear, local, COHORT, mu=mu), toy, 1))


@pytest.mark.nightly
@pytest.mark.parametrize(("same_set", "down", "up"), [nightly(True, 2, 2), (False, 3, 2)])
def test_feddane_bill(toy, linear, local, same_set, down, up):
    """4 K if the same clients serve both phases, else 5 K."""
    state, _ = play(feddane(linear, local, COHORT, same_set=same_set), toy, 2)
    assert units(state) == (2 * 6 * down, 2 * 6 * up)


@pytest.mark.nightly
def test_a_gradient_that_is_not_finite_is_left_out(toy, linear, local):
    broken = toy.replace(x=jnp.where((toy.owner == 0)[:, None], jnp.nan, toy.x))
    state, infos = play(feddane(linear, local, select.full_participation()), broken, 2)
    chex.assert_tree_all_finite(state.groups)
    assert all(info.fault_counts.nonfinite > 0 for info in infos)


def test_feddane_has_no_sample_space_form(linear, local):
    with pytest.raises(InputError, match="first_layer"):
        feddane(
            linear,
            with_execution(local, first_layer="dual"),
            COHORT,
        )


# NonFed


@pytest.fixture(scope="module")
def alone(toy, linear, local):
    """Three rounds of NonFed."""
    return play(nonfed(linear, local, COHORT), toy)


def own_models(played):
    return played[0].rows["NonFed"].values


def test_nonfed_is_plain_sgd(toy, linear, local, alone):
    """E T = 6 epochs on the client's own samples from a common model agree with float64 loops."""
    common = models_of(random_groups(linear, 1)(derive_key(KEY, START), toy).groups)[0]
    for client, found in enumerate(models_of(own_models(alone))):
        model = common
        for round in range(3 if toy.train.size[client] else 0):
            epochs = passes(derive_key(KEY, TRAIN, round), toy, client, local.epochs)
            model = trained(model, toy, batches_of(epochs, local.batch_size), local.lr)
        np.testing.assert_allclose(found.flat(), model.flat(), rtol=2e-5, atol=2e-5)


def test_clients_alone_never_influence_each_other(toy, linear, local, alone):
    other = play(
        nonfed(linear, local, COHORT), toy.replace(y=jnp.where(toy.owner == 5, 3 - toy.y, toy.y))
    )
    same = np.all(matrix(own_models(alone)) == matrix(own_models(other)), axis=1)
    assert np.flatnonzero(~same).tolist() == [5]


def test_nonfed_sends_nothing(toy, linear, local, alone):
    assert units(alone[0]) == (0, 0)


def test_everybody_is_tested_on_its_own_model(toy, linear, local, alone):
    algorithm = nonfed(linear, local, COHORT)
    assert not algorithm.clustered
    row, table = jax.jit(
        lambda state: evaluate.evaluate_all(
            algorithm, linear, local.execution.mesh, state, toy, True
        )
    )(alone[0])
    x, y, owner = (
        np.asarray(part)[np.asarray(toy.test.order)] for part in (toy.x, toy.y, toy.owner)
    )
    models = models_of(own_models(alone))
    hits = np.array(
        [probabilities(models[k], x[i : i + 1]).argmax() == y[i] for i, k in enumerate(owner)]
    )
    np.testing.assert_allclose(row["accuracy"], hits.mean(), rtol=1e-6)
    np.testing.assert_allclose(table.accuracy[5], hits[owner == 5].mean(), rtol=1e-6)
    assert row["evaluated_clients"] == K and 0 <= row["auxiliary_accuracy"] <= 1


@pytest.mark.nightly
def test_nonfed_of_the_cohort(toy, linear, local):
    begun, after = (
        own_models(play(nonfed(linear, local, COHORT, trains="cohort"), toy, rounds))
        for rounds in (0, 1)
    )
    moved = np.any(matrix(begun) != matrix(after), axis=1)
    assert np.flatnonzero(moved).tolist() == sorted(cohort_of(derive_key(KEY, SELECT, 0), toy))
    with pytest.raises(InputError, match=r"algorithm\.trains"):
        nonfed(linear, local, COHORT, trains="nobody")


# TKM


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.2, 0.4])
def test_trimmed_mean_is_scipys(beta):
    rng = np.random.default_rng(0)
    gid, present = rng.integers(3, size=40), rng.random(40) < 0.8
    # b: ties
    tree = {
        "a": rng.normal(size=(40, 3, 2)).astype(np.float32),
        "b": rng.integers(3, size=(40, 5)).astype(np.float32),
    }
    found, count = jax.jit(
        lambda tree: trimmed_group_mean(
            jnp.array(present), jnp.array(gid), sort_coordinates(tree), 4, beta
        )
    )(tree)
    for g in range(3):
        mine = present & (gid == g)
        assert count[g] == mine.sum() > 5
        for name, leaf in tree.items():
            np.testing.assert_allclose(
                found[name][g], trim_mean(leaf[mine], beta, axis=0), rtol=1e-5, atol=1e-6
            )
    assert count[3] == 0 and not np.any(found["a"][3])


@pytest.mark.parametrize("clients", [nightly(1), 2, 5, nightly(8)])
def test_half_trimmed_is_the_median(clients):
    values = np.random.default_rng(clients).normal(size=(clients, 7)).astype(np.float32)
    everybody = jnp.ones(clients, bool), jnp.zeros(clients, jnp.int32)
    found = at_once(trimmed_group_mean, *everybody, sort_coordinates(values), 1, 0.5)[0][0]
    np.testing.assert_allclose(found, np.median(values, axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("share", "count", "drop"),
    [(0.05, 20, 1), (0.05, 19, 0), (0.2, 5, 1), (0.29, 100, 29), (0.5, 4, 1), (0.2, 0, 0)],
)
def test_dropped_by_hand(share, count, drop):
    assert count_trimmed(jnp.int32(count), share) == drop


@pytest.mark.parametrize("theta", [0.2, nightly(0.5)])
def test_one_far_point_gets_no_cluster_of_its_own(theta):
    """Three planted groups of seven; one more point far away, and one of NaN-free
    nonsense that is not known.
    """
    rng = np.random.default_rng(1)
    truth = np.repeat(np.arange(3), 7)
    points = 3.0 * np.eye(3, 6)[truth] + 0.1 * rng.normal(size=(21, 6))
    points = np.concatenate([points, np.full((1, 6), 40.0), np.full((1, 6), -9.0)]).astype(
        np.float32
    )
    models = {"a": jnp.array(points[:, :2]), "b": jnp.array(points[:, 2:].reshape(-1, 2, 2))}
    known = jnp.arange(23) < 22
    labels, centers = jax.jit(lambda key: trimmed_kmeans(key, models, known, 3, theta, 10, 8))(KEY)
    assert adjusted_rand_score(truth, labels[:21]) == 1.0
    expected = [
        np.median(points[np.flatnonzero(np.asarray(labels[:22]) == g)], axis=0) for g in range(3)
    ]
    np.testing.assert_allclose(matrix(centers), expected, atol=0.2)


@pytest.mark.nightly
def test_tkm_of_one_group_without_trimming_is_fedavg_with_plain_means(toy, linear, local):
    robust = tkm(linear, local, COHORT, m=1, beta=0.0)
    begun, _ = play(robust, toy, 0)
    plain = fedavg(linear, local, COHORT, aggregate=uniform_mean)
    chex.assert_trees_all_close(
        play(robust, toy, 3, begun)[0].groups, play(plain, toy, 3, begun)[0].groups, **SAME
    )


@pytest.mark.nightly
def test_tkm_finds_planted_groups_in_spite_of_a_hostile_client(linear, local):
    """18 clients in three groups of six, one of them sends five times its update the
    wrong way, before the rounds and in them.
    """
    data = planted()
    hostile = cfl.Faults(byzantine=0.06, scale=5.0)
    attacker = np.flatnonzero(faults.draw_byzantine(hostile, derive_key(KEY, BYZANTINE), 18))
    assert len(attacker) == 1
    honest, truth = np.delete(np.arange(18), attacker), np.arange(18) % 3
    troubled = cfl.System(select.full_participation(), hostile)
    algorithm = tkm(linear, local, troubled, m=3, theta=0.2, erm_epochs=6)
    begun, after = (play(algorithm, data, rounds)[0] for rounds in (0, 2))
    assert adjusted_rand_score(truth[honest], np.asarray(begun.assignment)[honest]) == 1.0
    assert (
        after.assignment.tolist() == begun.assignment.tolist()
        and units(begun) == (18, 18)
        and units(after) == (18 + 36, 18 + 36)
    )
    assert score(algorithm, linear, local, after, data)[honest].mean() > 0.97
    quiet = play(
        tkm(linear, local, select.full_participation(), m=3, theta=0.2, erm_epochs=6), data, 2
    )[0]
    naive = play(
        tkm(linear, local, troubled, m=3, theta=0.2, erm_epochs=6, beta=0.0),
        data,
        2,
    )[0]
    away = [
        np.abs(matrix(run.groups)[:, None] - matrix(quiet.groups)).sum(-1).min(axis=0).max()
        for run in (after, naive)
    ]
    assert away[0] < 0.5 * away[1]  # how far the worst group is from where it is without an attack


def score(algorithm, task, local, state, data):
    """Returns each client's accuracy [K]."""
    return np.asarray(
        jax.jit(
            lambda state: (
                evaluate.evaluate_all(algorithm, task, local.execution.mesh, state, data, False)[
                    1
                ].accuracy
            )
        )(state)
    )


@pytest.mark.nightly
def test_the_loss_of_q_fedavg_has_the_l2_of_the_update(toy, linear, local):
    """F_k of client 1 at one model, by hand: cross-entropy and penalty."""
    model = linear.init(jax.random.key(3))
    cohort = make_cohort(jnp.array([1]), toy, local.execution)
    groups = jax.tree.map(lambda leaf: leaf[None], model)
    given = {"groups": groups, "assignment": jnp.zeros(K, jnp.int32), "rows": {}}
    state = State(**dict.fromkeys(State.__dataclass_fields__) | given)
    r = Round(jax.random.key(0), state, toy, cohort, full_work(jnp.zeros(1, jnp.int32)))
    prepared, report = attach_losses(linear, local)(r)
    assert charged(report.bill) == Traffic(0, 0, 0, 1)  # one client, one word
    rows = np.flatnonzero(np.asarray(toy.owner) == 1)
    rows = rows[np.isin(rows, np.asarray(toy.train.order))]
    each = [
        linear.loss(model, toy.x[row][None], toy.y[row][None], None, jnp.array([1]))[0]
        for row in rows
    ]
    np.testing.assert_allclose(prepared.client_extra, [np.mean(each)], rtol=1e-5)
    plain = np.mean([cross_entropy(linear.predict(model, toy.x[rows]), toy.y[rows])])
    assert np.mean(each) > plain * (1 + 1e-4)
