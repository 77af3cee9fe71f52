"""FeSEM against hand numbers, planted groups and a slow twin that keeps every client's
model in a list.
"""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, ledger, matrix, nightly, shuffled, spent, with_execution
from papers import flexcfl_2021 as quirks
from sklearn.metrics import adjusted_rand_score
from test_traffic import units

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.fedprox import fedprox
from fedjax_cfl.algorithms.fesem import start as fesem_start
from fedjax_cfl.algorithms.fesem.fesem import (
    fesem,
    keep_models,
    last_layer_distance,
    nearest_center,
    pull_by_size,
    stored_mean,
)
from fedjax_cfl.algorithms.fesem.start import ClientModels, embed_deltas
from fedjax_cfl.client.local import full_work
from fedjax_cfl.clustering.migrate import tv
from fedjax_cfl.data import drift
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, START, TRAIN, derive_key
from fedjax_cfl.method import Round
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.system import select
from fedjax_cfl.types import Cohort, Traffic, Upload

KEY = jax.random.key(5)
COHORT = select.rr_then_random(6)
L2 = 0.001
REF = {"start": "random_models", "estep": quirks.selected_alone}
REF |= {"aggregate": quirks.first_client, "mu": 0.0}


def play(algorithm, data, rounds, state=None):
    """Returns the states [rounds + 1] of a run."""
    states, one_round = (
        [jax.jit(algorithm.init)(KEY, data) if state is None else state],
        jax.jit(algorithm.round),
    )
    for _ in range(rounds):
        states.append(one_round(KEY, states[-1], data)[0])
    return states


def planted(concepts=3, clients=18, samples=24, features=5, classes=4):
    """Clients of well separated classes whose names are turned by the number of the
    client's concept.
    """
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(clients, dtype=np.int32), samples)
    shape = rng.integers(classes, size=owner.size)
    x = 2.0 * np.eye(classes, features)[shape] + 0.3 * rng.normal(size=(owner.size, features))
    held = cfl.Partition(np.arange(owner.size), owner, np.arange(owner.size) % 4 == 0)
    return cfl.federate(
        cfl.Pool(
            x.astype(np.float32), ((shape + owner % concepts) % classes).astype(np.int32), classes
        ),
        held,
    )


# The twin


def gradient(w, x, y):
    """The gradient [P] of mean cross-entropy + 0.001 sum(kernel^2) of the linear
    softmax model w = (bias [4], kernel [5, 4]).
    """
    bias, kernel = w[:4], w[4:].reshape(5, 4)
    z = x @ kernel + bias
    error = np.exp(z - z.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    return np.concatenate([error.mean(axis=0), (x.T @ error / len(y) + 2 * L2 * kernel).ravel()])


def trained(key, w, mu, client, data, local):
    """Local_update (FeSEM, Algorithm 2) with a proximal term of weight mu."""
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    held = np.asarray(data.train.order)[int(data.train.start[client]) :][
        : int(data.train.size[client])
    ]
    words = jax.random.bits(jax.random.fold_in(key, client), (2,))
    center = w
    for number in range(local.epochs):
        row = shuffled(words, len(held), number)
        for first in range(0, len(held), local.batch_size):
            batch = held[row[first : first + local.batch_size]]
            w = w - local.lr * (gradient(w, x[batch], y[batch]) + mu * (w - center))
    return w


def nearest(w, centers):
    return int(np.argmin([np.sqrt(np.sum((w - center) ** 2)) for center in centers]))


def twin(state, data, local, rounds, mu, form, estep):
    """E-step, local training, M-step over all stored models; returns (centers, models,
    assignment).
    """
    centers, models, assignment = (
        matrix(state.groups),
        list(matrix(state.rows["models"].models)),
        state.assignment.tolist(),
    )
    size = np.asarray(data.train.size)
    with_data = [client for client in range(data.num_clients) if size[client] > 0]
    for round in range(rounds):
        cohort = COHORT.draw(derive_key(KEY, SELECT, round), round, data.train.size).tolist()
        for client in with_data:
            if estep == "all" or client in cohort:
                assignment[client] = nearest(models[client], centers)
        for client in set(cohort) & set(with_data):
            pull = mu if form == "prox" else 2 * mu * size.sum() / (data.num_clients * size[client])
            models[client] = trained(
                derive_key(KEY, TRAIN, round),
                centers[assignment[client]],
                pull,
                client,
                data,
                local,
            )
        for k in range(len(centers)):
            members = [models[client] for client in with_data if assignment[client] == k]
            if members:
                centers[k] = np.mean(members, axis=0)
    return centers, models, assignment


@pytest.mark.parametrize(
    ("form", "estep", "mu"),
    [nightly("prox", "all", 0.0), ("prox", "selected", 0.5), nightly("eq8", "all", 0.5)],
)
def test_twin(toy, linear, local, form, estep, mu):
    """Four rounds agree with float64 loops to 2e-5, assignments exactly."""
    moves = "all" if estep == "all" else quirks.selected_alone
    options = {"mu": mu, "form": form, "estep": moves}
    begun, *_, last = play(build(fesem, linear, local, COHORT, m=2, **options), toy, 4)
    centers, models, assignment = twin(begun, toy, local, 4, mu, form, estep)
    assert last.assignment.tolist() == assignment and set(assignment) == {-1, 0, 1}
    np.testing.assert_allclose(matrix(last.groups), centers, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(matrix(last.rows["models"].models), models, rtol=2e-5, atol=2e-5)
    assert np.abs(centers - matrix(begun.groups)).max() > 0.1


def test_start_is_one_local_update_and_k_means(toy, linear, local):
    state = jax.jit(fesem(linear, local, COHORT, m=2).init)(KEY, toy)
    keys = jax.random.split(derive_key(KEY, START), 3)
    common = matrix(jax.tree.map(lambda leaf: leaf[None], linear.init(keys[0])))[0]
    expected = [
        trained(keys[1], common, 0.0, client, toy, local) if toy.train.size[client] else common
        for client in range(14)
    ]
    np.testing.assert_allclose(matrix(state.rows["models"].models), expected, rtol=1e-5, atol=1e-5)
    assert state.rows["models"].known.tolist() == (np.asarray(toy.train.size) > 0).tolist()
    label = np.where(state.rows["models"].known, state.assignment, -1)
    for k in range(2):
        np.testing.assert_allclose(
            matrix(state.groups)[k],
            matrix(state.rows["models"].models)[label == k].mean(axis=0),
            rtol=1e-5,
            atol=1e-5,
        )
    np.testing.assert_array_equal(state.assignment >= 0, state.rows["models"].known)
    assert ledger(state.traffic) == Traffic(14, 14, 0, 0)


# Reductions


@pytest.mark.nightly
def test_one_group_is_fedavg_with_plain_means(toy, linear, local):
    alone = build(fesem, linear, local, COHORT, m=1, aggregate="cohort", mu=0.0)
    begun, *_, last = play(alone, toy, 3)
    plain = fedavg(linear, local, COHORT, aggregate=uniform_mean)
    chex.assert_trees_all_close(
        last.groups, play(plain, toy, 3, begun.replace(rows={}))[-1].groups, rtol=1e-5, atol=1e-6
    )


@pytest.mark.nightly
def test_one_group_weighted_by_samples_is_fedprox(toy, linear, local):
    alone = build(fesem, linear, local, COHORT, m=1, aggregate="samples", mu=0.3)
    begun, *_, last = play(alone, toy, 3)
    prox = play(fedprox(linear, local, COHORT, mu=0.3), toy, 3, begun.replace(rows={}))[-1]
    chex.assert_trees_all_close(last.groups, prox.groups, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_migration_changes_nothing(toy, linear, local):
    """Data have no part in distances: FeSEM-MIG is FeSEM bit for bit, though shifts are
    detected.
    """

    def run(detector):
        algorithm = fesem(linear, local, COHORT, m=2, detector=detector)
        return cfl.run(
            algorithm,
            linear,
            toy,
            KEY,
            rounds=6,
            drift=drift.swap_all(0.5),
            discard="none",
            mesh=local.execution.mesh,
        )

    still, moving = run(None), run(tv)
    for row, same in zip(still.rows, moving.rows, strict=True):
        np.testing.assert_equal(row | {"wall_s": 0}, same | {"wall_s": 0})  # NaN equals NaN
    assert sum(row["shifted_clients"] for row in moving.rows) > 0
    first = jax.jit(fesem(linear, local, COHORT, m=2, detector=tv).init)(KEY, toy)
    assert np.any(
        first.rows["shift_reference"].reference != moving.state.rows["shift_reference"].reference
    )
    chex.assert_trees_all_equal(
        moving.state.replace(rows={"models": moving.state.rows["models"]}), still.state
    )


@pytest.mark.nightly
def test_migration_of_the_selected_follows_centers(linear, local):
    """Where only the selected look for a center, a client whose data shifted moves, if it does, to
    the center nearest to its stored model, for nothing.
    """
    data = planted()
    algorithm = build(fesem, linear, local, COHORT, m=3, estep=quirks.selected_alone, detector="tv")
    state = play(algorithm, data, 1)[-1]
    outside = 17  # not in the first two cohorts
    wrong = state.assignment.at[outside].set((state.assignment[outside] + 1) % 3)
    shifted = data.replace(y=jnp.where(data.owner == outside, 0, data.y))
    for seen, expected in ((data, wrong[outside]), (shifted, state.assignment[outside])):
        after, info = jax.jit(algorithm.round)(KEY, state.replace(assignment=wrong), seen)
        assert after.assignment[outside] == expected and info.migrated == (seen is shifted)
        assert spent(state, after).units_down == 6


# Planted groups and collapses


@pytest.mark.nightly
@pytest.mark.parametrize("estep", ["all", nightly(quirks.selected_alone)])
def test_planted_groups_are_found(linear, local, estep):
    data = planted()
    for state in play(build(fesem, linear, local, COHORT, m=3, estep=estep), data, 4):
        assert adjusted_rand_score(np.arange(18) % 3, state.assignment) == 1


@pytest.mark.nightly
def test_equal_stored_models_collapse_into_one_group(linear, local):
    """D5: all clients are nearest to the same random center, and their models stay near
    it; the others are never touched.

    The steps are small: next to models of so few parameters one round is otherwise
    farther than another random center.
    """
    slow = local.replace(lr=0.01)
    begun, *_, last = play(build(fesem, linear, slow, COHORT, m=3, **REF), planted(), 5)
    assert (begun.assignment == -1).all()
    group = int(last.assignment[0])
    assert last.assignment.tolist() == [group] * 18
    changed = np.abs(matrix(last.groups) - matrix(begun.groups)).max(axis=1) > 0
    assert changed.tolist() == [k == group for k in range(3)]


@pytest.mark.nightly
def test_empty_group_keeps_its_center(linear, local):
    """The same with eq. 10 over all stored models."""
    random = build(fesem, linear, local, COHORT, m=3, start="random_models")
    begun, *_, last = play(random, planted(), 5)
    empty = [k for k in range(3) if k not in last.assignment.tolist()]
    assert empty
    np.testing.assert_array_equal(matrix(last.groups)[empty], matrix(begun.groups)[empty])


@pytest.mark.nightly
def test_lost_clients_leave_their_models(toy, linear, local):
    lost = cfl.System(COHORT, cfl.Faults(dropout=1.0))
    begun, *_, last = play(fesem(linear, local, lost, m=2), toy, 2)
    chex.assert_trees_all_equal(begun.rows, last.rows)


# Parts


def upload_of(delta, weight):
    nothing = jnp.zeros(len(weight))
    return Upload(
        {"w": jnp.array(delta)[:, None]},
        jnp.array(weight, jnp.float32),
        nothing,
        nothing,
        nothing.astype(jnp.int32),
        nothing.astype(jnp.int32),
    )


def test_stored_mean_by_hand():
    """Clients 0 .. 5 store 1, 2, 4, 8, 16, 99; 5 is unknown. 1 trains in group 0 to 10
    + 3, 4 sends nothing, the third slot is empty.
    """
    stored = ClientModels(
        {"w": jnp.array([1.0, 2.0, 4.0, 8.0, 16.0, 99.0])[:, None]}, jnp.arange(6) < 5
    )
    state = SimpleNamespace(
        active=jnp.ones(4, bool),
        rows={"models": stored},
        groups={"w": jnp.array([10.0, 20.0, 30.0, 40.0])[:, None]},
        assignment=jnp.array([0, 0, 1, -1, 1, 2]),
    )
    cohort, upload, gid = (
        Cohort(jnp.array([1, 4, 6]), jnp.arange(3)),
        upload_of([3.0, 0.0, 0.0], [5, 0, 0]),
        jnp.array([0, 1, 0]),
    )
    r = Round(KEY, state, None, cohort, full_work(gid), upload, state)
    step, mass = stored_mean(r)
    np.testing.assert_allclose(
        (state.groups["w"] + step["w"])[:, 0], [(1 + 13) / 2, (4 + 16) / 2, 30, 40], rtol=1e-6
    )
    assert mass.tolist() == [2, 2, 0, 0]
    state.put_rows = lambda rows: rows["models"]
    kept = keep_models()(r)
    assert kept.models["w"][:, 0].tolist() == [1, 13, 4, 8, 16, 99]
    assert kept.known.tolist() == stored.known.tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fesem", "fesem_ma"])
def test_starts_are_billed_alike_on_any_devices(name, toy, mlp, local):
    """Of several devices there are more slots than clients."""
    factory, sent = getattr(cfl.algorithms, name), []
    for devices in (1, 4):
        own = with_execution(local, mesh=cfl.make_mesh(devices))
        algorithm = factory(mlp, own, select.uniform(4), m=2)
        sent.append(ledger(jax.jit(algorithm.init)(KEY, toy).traffic))
    assert sent[0] == sent[1] and sent[0].units_up == toy.num_clients


def test_pull_of_eq_8_by_hand():
    """mu_i = 2 lambda n / (K n_i), n = 40 samples of K = 4 clients."""
    data = SimpleNamespace(num_clients=4, train=SimpleNamespace(size=jnp.array([8, 2, 0, 30])))
    cohort = Cohort(jnp.array([3, 0, 1, 4]), jnp.arange(4))
    _, prepare = pull_by_size(SimpleNamespace(loss=None, sample_loss=None, penalty=None), 0.5)
    work, _ = prepare(Round(KEY, None, data, cohort, full_work(0 * cohort.ids)))
    np.testing.assert_allclose(
        work.client_extra[:3], [2 * 0.5 * 40 / (4 * n) for n in (30, 8, 2)], rtol=1e-6
    )


def test_nearest_center_survives_nearly_equal_models(linear):
    """Models of norm 1e3 that differ by 1e-3: |a|^2 - 2 a.b + |b|^2 would be all
    rounding in float32.
    """
    rng = np.random.default_rng(0)
    common = 1e3 * rng.normal(size=5).astype(np.float32)
    centers = {
        "head": {"kernel": jnp.array(common + 2e-3 * rng.normal(size=(3, 5)).astype(np.float32))}
    }
    own = [2, 0, 1, 1]
    models = jax.tree.map(lambda leaf: leaf[jnp.array(own)], centers)
    for nearest_of in (nearest_center, last_layer_distance(linear)):
        assert nearest_of(models, centers).tolist() == own


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e25])
def test_a_center_that_is_not_finite_is_never_chosen(bad):
    """The others are as near as they would be without it."""
    rng = np.random.default_rng(0)
    models, centers = ({"a": jnp.array(rng.normal(size=(n, 5)), jnp.float32)} for n in (20, 4))
    for place in range(4):
        broken = {"a": centers["a"].at[place, 2].set(bad)}
        others = np.delete(np.arange(4), place)
        expected = others[nearest_center(models, {"a": centers["a"][others]})]
        np.testing.assert_array_equal(nearest_center(models, broken), expected)


def test_last_layer_sees_only_the_head(linear):
    centers = {
        "body": {"kernel": jnp.array([[0.0], [9.0]])},
        "head": {"kernel": jnp.array([[1.0], [0.0]]), "bias": jnp.array([[5.0], [0.0]])},
    }
    model = jax.tree.map(lambda leaf: 0 * leaf[:1], centers)
    assert nearest_center(model, centers).tolist() == [0]
    assert last_layer_distance(linear)(model, centers).tolist() == [1]


def test_embedding_keeps_distances():
    rng = np.random.default_rng(0)
    delta, known = (
        {"a": rng.normal(size=(9, 4, 3)), "b": rng.normal(size=(9, 20))},
        np.arange(9) != 4,
    )
    embed = jax.jit(embed_deltas)
    points = np.asarray(embed(KEY, jax.tree.map(jnp.float32, delta), jnp.array(known)))[known]
    rows = matrix(delta)[known]
    np.testing.assert_allclose(
        *(np.linalg.norm(p[:, None] - p, axis=-1) for p in (points, rows)), atol=1e-4
    )


def test_embedding_of_many_clients_keeps_their_principal_directions(monkeypatch):
    """300 clients in 30 dimensions that matter, found in 40 directions of 300."""
    monkeypatch.setattr(fesem_start, "MAX_EMBEDDING_DIMENSIONS", 40)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 30)) @ rng.normal(size=(30, 70)) + 1e-3 * rng.normal(
        size=(300, 70)
    )
    known = np.arange(300) % 7 != 4
    points = np.asarray(embed_deltas(KEY, {"a": jnp.float32(rows)}, jnp.array(known)))
    assert points.shape == (300, 40) and np.abs(points[~known]).max() < 1e-4
    np.testing.assert_allclose(
        *(np.linalg.norm(p[:, None] - p, axis=-1) for p in (points[known], rows[known])),
        rtol=2e-3,
        atol=1e-2,
    )


def inertia(state):
    gaps = matrix(state.rows["models"].models) - matrix(state.groups)[np.asarray(state.assignment)]
    return np.sum(gaps[np.asarray(state.rows["models"].known)] ** 2)


@pytest.mark.nightly
def test_restarts_find_tighter_groups(toy, linear, local):
    """20 seedings against one, five keys, four groups."""
    found = {}
    for restarts in (1, 20):
        start = {"start": "local", "restarts": restarts}
        init = jax.jit(build(fesem, linear, local, COHORT, m=4, **start).init)
        found[restarts] = [inertia(init(jax.random.key(seed), toy)) for seed in range(5)]
    assert all(many <= one * (1 + 1e-5) for many, one in zip(found[20], found[1], strict=True)), (
        found
    )
    assert sum(found[20]) < 0.99 * sum(found[1])


@pytest.mark.nightly
@pytest.mark.parametrize(("start", "extra"), [nightly("random_models", 0), ("local", 2 * 100)])
def test_models_sent(start, extra):
    """FlexCFL Fig. 6: K + K a round, 12,000 in 300 rounds of 20 clients; the start from
    local models costs one more visit to everybody.
    """
    task, local = (
        cfl.as_task(cfl.models.MCLR(2), (1,), 2),
        cfl.Local(0.1, 1, 10, execution=cfl.make_execution(cfl.make_mesh(1), 1)),
    )
    options = {"start": start, "restarts": 1, "detector": "tv"}
    algorithm = build(fesem, task, local, select.rr_then_random(20), m=3, **options)
    assert units(algorithm, 100, 300) == 12_000 + extra


@pytest.mark.parametrize("name", ["form", "start", "estep", "aggregate", "distance", "detector"])
def test_unknown_choices_are_refused(linear, local, name):
    with pytest.raises(InputError, match=f"algorithm.{name}=nonsense"):
        build(fesem, linear, local, COHORT, m=2, **{name: "nonsense"})


def test_last_layer_needs_a_head(linear, local):
    headless = linear._replace(init=lambda key: {"body": linear.init(key)["head"]})
    with pytest.raises(InputError, match="no dense layer named head"):
        build(fesem, headless, local, COHORT, m=2, distance="last_layer")
