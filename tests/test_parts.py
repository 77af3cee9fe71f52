"""Every part of a round against numbers worked out by hand, or by a loop that says what is meant."""

import random
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit

import fedjax_cfl as cfl
from fedjax_cfl import aggregate, assign, evaluate, select, sharding, traffic
from fedjax_cfl import algorithms as zoo
from fedjax_cfl import local as training
from fedjax_cfl.algorithms.fedprox import stragglers
from fedjax_cfl.engine import TRAIN, federated, stream
from fedjax_cfl.sgd import sgd
from fedjax_cfl.types import Cohort, Served, State, Upload

pytestmark = pytest.mark.usefixtures("quickly")

KEY = jax.random.key(11)
EXACT = {"rtol": 1e-6}


def matrix(tree):
    """Returns the leaves of `tree [S, ...]` as one matrix [S, P]."""
    return np.concatenate([np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)], axis=1)


# Selection


def test_round_robin_wraps_and_then_draws():
    pick = select.rr_then_random(4)
    turns = [pick(KEY, round, 10).tolist() for round in range(3)]
    assert turns == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    later = pick(KEY, 3, 10)
    assert later.tolist() == select.uniform(4)(KEY, 3, 10).tolist()
    assert later.tolist() != [2, 3, 4, 5]


def test_round_robin_stops_where_the_clients_end():
    """K = 5 divides n = 10: two rounds cover everybody, the third is already a draw."""
    pick = select.rr_then_random(5)
    assert pick(KEY, 1, 10).tolist() == [5, 6, 7, 8, 9]
    assert pick(KEY, 2, 10).tolist() == select.uniform(5)(KEY, 2, 10).tolist()


def test_uniform_repeats_nobody_and_leaves_nobody_out():
    drawn = np.array([select.uniform(4)(jax.random.key(seed), 0, 10) for seed in range(100)])
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    shares = np.bincount(drawn.ravel(), minlength=10) / 100  # expected 0.4 each, standard deviation 0.05
    assert shares.shape == (10,) and abs(shares - 0.4).max() < 0.2


@pytest.mark.parametrize("round_robin", [False, True])
def test_py_sample_is_pythons_generator(round_robin):
    pick = select.py_sample(4, rounds=6, num_clients=10, seed=2077, round_robin=round_robin)
    drawn = [random.Random(round + 2077).sample(range(10), 4) for round in range(6)]
    if round_robin:
        drawn[:3] = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]
    assert [pick(KEY, round, 10).tolist() for round in range(6)] == drawn
    assert pick(KEY, 7, 10).tolist() == drawn[1], "a run longer than the table starts over"


def test_np_choice_is_numpys_legacy_generator():
    pick = select.np_choice(4, rounds=3, num_clients=10)
    for round in range(3):
        np.random.seed(round)  # noqa: NPY002 - the generator that is repeated
        np.testing.assert_array_equal(pick(KEY, round, 10), np.random.choice(10, 4, replace=False))  # noqa: NPY002


# Dealing to devices


@pytest.mark.parametrize("width", [1, 3])
def test_chunks_of_empty_slots_are_not_visited(toy, width):
    local = cfl.Local(0.1, 1, 5, width, cfl.mesh_of(2))
    cohort = training.dealt(jnp.array([1, 6, 2, 4], jnp.int32), toy, local)
    assert cohort.ids.size > 4
    seen = jit(training.over_clients(lambda client, bucket, data, shared, mine: client + 1, local))(cohort, toy, ())
    visited = jnp.any((cohort.ids < 14).reshape(-1, width), axis=1).repeat(width)
    np.testing.assert_array_equal(seen, jnp.where(visited, cohort.ids + 1, 0))


DEAL = jit(sharding.deal, static_argnums=(2, 3, 4))


@pytest.mark.parametrize(("devices", "width"), [(1, 1), (1, 4), (2, 1), (4, 3), (8, 2)])
def test_deal_places_everybody_once(devices, width):
    rng = np.random.default_rng(devices)
    ids = jnp.asarray(rng.permutation(100)[:23], jnp.int32)
    cohort = DEAL(ids, jnp.asarray(rng.lognormal(3, 1.5, 23), jnp.float32), 100, devices, width)
    assert cohort.ids.size % (devices * width) == 0
    real = np.asarray(cohort.ids) < 100
    assert (np.asarray(cohort.ids)[~real] == 100).all() and real.sum() == 23
    np.testing.assert_array_equal(np.sort(np.asarray(cohort.ids)[real]), np.sort(ids))
    np.testing.assert_array_equal(np.asarray(cohort.ids)[real], np.asarray(ids)[np.asarray(cohort.rank)[real]])


@pytest.mark.parametrize("seed", range(5))
def test_deal_keeps_queues_within_one_client(seed):
    """Longest processing time first: no queue is longer than an even share and the longest client."""
    load = np.random.default_rng(seed).lognormal(3, 1, 40).astype(np.float32)
    cohort = DEAL(jnp.arange(40), jnp.asarray(load), 40, 4, 1)
    queues = np.append(load, 0)[np.asarray(cohort.ids)].reshape(4, -1).sum(1)
    assert queues.max() <= max(load.sum() / 4 + load.max(), load.max())
    assert queues.max() - queues.min() <= load.max()
    assert queues.max() <= 4 / 3 * max(load.sum() / 4, load.max()) + 1e-3


def test_deal_sorts_chunks_by_size():
    cohort = DEAL(jnp.array([5, 6, 7, 8]), jnp.array([1.0, 9.0, 2.0, 8.0]), 10, 1, 2)
    assert cohort.ids.tolist() == [6, 8, 7, 5]
    assert cohort.rank.tolist() == [1, 3, 2, 0]


# Aggregation


def sent(delta, weight, loss=0.0):
    """An upload of one-number models."""
    weight = jnp.asarray(weight, jnp.float32)
    nothing = jnp.zeros_like(weight)
    delta = jnp.asarray(delta, jnp.float32)
    return Upload({"w": delta[:, None]}, weight, nothing + loss, nothing, nothing.astype(jnp.int32), delta**2)


def combined(part, delta, weight, gid, groups=1, rank=None, extra=()):
    """Returns (step [m], mass [m]) as NumPy arrays."""
    rank = jnp.arange(len(gid)) if rank is None else jnp.array(rank)
    state = SimpleNamespace(active=jnp.ones(groups, bool))
    step, mass = part(sent(delta, weight), jnp.array(gid), Cohort(ids=jnp.arange(len(gid)), rank=rank), extra, state)
    return np.asarray(step["w"])[:, 0], np.asarray(mass)


def test_means_by_hand():
    """Group 0: deltas 1 and 4 of 1 and 3 samples; group 1: delta 5 of 2 samples, and a client without data; group 2: nobody."""
    world = ([1.0, 5.0, 4.0, 99.0], [1, 2, 3, 0], [0, 1, 0, 1], 3)
    for part, expected, mass in (
        (aggregate.weighted_mean, [13 / 4, 5, 0], [4, 2, 0]),
        (aggregate.uniform_mean, [5 / 2, 5, 0], [2, 1, 0]),
        (aggregate.over_cohort, [5 / 3, 5 / 3, 0], [2, 1, 0]),
    ):
        found = combined(part, *world)
        np.testing.assert_allclose(found[0], expected, **EXACT)
        np.testing.assert_allclose(found[1], mass, **EXACT)


def test_first_client_takes_one_update_for_all():
    """Deltas 1 and 3: the group moves by 1 L / (L + 1e-5), L = 2, where the mean is 2."""
    np.testing.assert_allclose(combined(aggregate.first_client, [1.0, 3.0], [5, 7], [0, 0])[0], [2 / (2 + 1e-5)], **EXACT)
    np.testing.assert_allclose(combined(aggregate.uniform_mean, [1.0, 3.0], [5, 7], [0, 0])[0], [2.0], **EXACT)


def test_first_client_is_first_by_selection_and_has_data():
    """Slots hold clients by size: the first selected of group 0 stands in slot 3, but is without data, the next in slot 1."""
    step, mass = combined(aggregate.first_client, [1.0, 2.0, 4.0, 8.0], [9, 7, 5, 0], [0, 0, 1, 0], 2, rank=[3, 1, 2, 0])
    np.testing.assert_allclose(step, [2 * 2 / (2 + 1e-5), 4 / (1 + 1e-5)], **EXACT)
    np.testing.assert_array_equal(mass, [2, 1])


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
def test_q_fair_by_hand(q):
    """sum F^q u / sum h, u = L delta, h = q F^(q-1) |u|^2 + L F^q, L = 1 / lr."""
    loss, delta, lipschitz = np.array([0.5, 2.0]), np.array([0.3, -0.1]), 4.0
    up = loss**q * lipschitz * delta
    down = q * loss ** (q - 1) * (lipschitz * delta) ** 2 + lipschitz * loss**q
    part = aggregate.q_fair(q, 1 / lipschitz)
    step, _ = combined(part, [*delta, 7.0], [3, 8, 0], [0, 0, 0], extra=jnp.array([0.5, 2.0, 0.0]))
    np.testing.assert_allclose(step, [up.sum() / down.sum()], rtol=1e-5)


def groups_of(*rows):
    return {"a": jnp.array(rows, jnp.float32)[:, :1], "b": jnp.array(rows, jnp.float32)[:, 1:]}


def test_inter_group_of_equal_norms():
    """W1' = (W1 + (eta / s) W2) / (1 + eta / s), and the same for W2 from the OLD W1; norms s = 5."""
    old = np.array([[3.0, 4.0, 0.0], [0.0, 5.0, 0.0]])
    for eta in (0.1, 5.0):
        new, sent = aggregate.inter_group(eta)(groups_of(*old), jnp.ones(2, bool))
        np.testing.assert_allclose(matrix(new), (old + eta / 5 * old[::-1]) / (1 + eta / 5), **EXACT)
        assert sent.units_down == 2 and sent.units_up == 0


@pytest.mark.parametrize("form", ["normalized", "paper"])
def test_inter_group_by_a_loop(form):
    """Four groups, the third owns nobody: it neither gives nor takes."""
    old, eta, owning = np.random.default_rng(0).normal(size=(4, 3)), 0.7, [True, True, False, True]
    expected = old.copy()
    for g in (0, 1, 3):
        pull = {other: eta / np.linalg.norm(old[other]) for other in (0, 1, 3) if other != g}
        expected[g] = old[g] + sum(pull[other] * old[other] for other in pull)
        if form == "normalized":
            expected[g] /= 1 + sum(pull.values())
    new, _ = aggregate.inter_group(eta, form)(groups_of(*old), jnp.array(owning))
    np.testing.assert_allclose(matrix(new), expected, rtol=1e-5)


@pytest.mark.parametrize("form", ["normalized", "paper"])
def test_inter_group_of_strength_zero_and_of_zero_models(form):
    old = [[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]
    for eta in (0.0, 2.0):
        new, _ = aggregate.inter_group(eta, form)(groups_of(*old), jnp.ones(2, bool))
        np.testing.assert_allclose(matrix(new)[0], old[0], **EXACT)


# Traffic


def units(algorithm, clients, rounds, swapped=lambda round: 0):
    """Returns the models sent in a whole run on `clients` clients of one sample and one feature each; `swapped` of them shift a round."""
    x = np.linspace(-1, 1, clients, dtype=np.float32)[:, None]
    each_one = cfl.Holdings(np.arange(clients), np.arange(clients), np.zeros(clients, bool))
    data = cfl.federate(cfl.Pool(x, (x[:, 0] > 0).astype(np.int32), 2), each_one)

    def go(key):
        def one(t, state):
            return algorithm.round(key, state, data.replace(shifted=jnp.arange(clients) < swapped(t)))[0]

        return jax.lax.fori_loop(0, rounds, one, algorithm.init(key, data))

    spent = jit(go)(KEY).traffic
    return int(spent.units_down + spent.units_up)


ROUND_ROBIN = select.rr_then_random(20)
QUICKLY = {"alpha": 20, "pretrain": "iters:1", "restarts": 1}


@pytest.mark.parametrize(
    ("clients", "method", "expected"),
    [
        (1000, lambda *parts: zoo.fedavg(*parts, select.uniform(20)), 12_000),
        (1000, lambda *parts: zoo.flexcfl(*parts, ROUND_ROBIN, m=3, **QUICKLY), 15_120),
        (1000, lambda *parts: zoo.ifca(*parts, ROUND_ROBIN, m=3), 24_000),
        (200, lambda *parts: zoo.fedgroup(*parts, ROUND_ROBIN, m=5, **QUICKLY), 13_200),
        (200, lambda *parts: zoo.fedgroup(*parts, ROUND_ROBIN, m=5, eta_g=0.1, **QUICKLY), 14_700),
    ],
    ids=["fedavg", "flexcfl", "ifca", "fedgroup", "fedgroup mixed"],
)
def test_models_sent_are_those_of_figure_6(clients, method, expected):
    """300 rounds of 20 clients (FlexCFL, Fig. 6): K + K a round, 2 alpha m at the start, m a client in its life, m a round for mixing."""
    task = cfl.as_task(cfl.models.MCLR(2), (1,), 2)
    assert units(method(task, cfl.Local(0.1, 1, 10, 1, cfl.mesh_of(1))), clients, 300) == expected


def test_ifca_mig_charges_every_swapped_client_met():
    """FlexCFL, Fig. 6a: 24,000 + 3 x 13,920 = 65,760, with 60 swaps in each of 232 rounds after everybody has been met."""
    task = cfl.as_task(cfl.models.MCLR(2), (1,), 2)
    method = zoo.ifca(task, cfl.Local(0.1, 1, 10, 1, cfl.mesh_of(1)), ROUND_ROBIN, m=3, migrate=True, charge="swapped")
    assert units(method, 1000, 300, lambda t: jnp.where((t >= 50) & (t < 282), 60, 0)) == 65_760


def test_bytes_do_not_overflow():
    entry = traffic.add(traffic.traffic(units_down=2_000_000_000), traffic.traffic(units_up=3, words_down=7, words_up=5))
    assert traffic.in_bytes(entry, 400_000) == (2_000_000_000 * 400_000 + 28, 3 * 400_000 + 20)


# Evaluation


@pytest.fixture(scope="module")
def models(linear):
    """Three different linear models."""
    return jax.vmap(linear.init)(jax.random.split(KEY, 3))


def answers(task, models, index, data):
    """Returns (class, cross-entropy) of every test sample, client by client, -1 and 0 where a client has no model."""
    guess, loss = np.full(data.test.order.size, -1), np.zeros(data.test.order.size)
    for client in range(data.num_clients):
        place = np.arange(data.test.size[client]) + int(data.test.start[client])
        if index[client] < 0 or not place.size:
            continue
        rows = data.test.order[place]
        logits = np.asarray(task.predict(jax.tree.map(lambda leaf: leaf[index[client]], models), data.x[rows]))
        guess[place] = logits.argmax(1)
        loss[place] = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), np.asarray(data.y[rows])]
    return guess, loss


INDICES = {"some without": [0, 2, -1, 1, 1, 2, -1, 0, 2, 0, 1, -1, 0, 2], "one for all": [1] * 14, "nobody has one": [-1] * 14}


@pytest.mark.parametrize("block", [4, 128])
@pytest.mark.parametrize("devices", [1, 4])
def test_predictions_are_those_of_a_loop_over_clients(toy, linear, models, monkeypatch, devices, block):
    monkeypatch.setattr(evaluate, "BLOCK", block)
    predict = jit(lambda index: evaluate.predictions(linear, cfl.mesh_of(devices), Served(models, index), toy))
    for index in INDICES.values():
        guess, loss = predict(jnp.array(index))
        expected = answers(linear, models, index, toy)
        np.testing.assert_array_equal(guess, expected[0])
        np.testing.assert_allclose(loss, expected[1], rtol=1e-5)


def test_evaluation_counts_only_clients_with_a_model(toy, linear, models):
    index = INDICES["some without"]

    def evaluated(index):
        table = evaluate.per_client(linear, cfl.mesh_of(1), Served(models, index), toy)
        return evaluate.scores(Served(models, index), table, toy.concept), table

    row, table = jit(evaluated)(jnp.array(index))
    guess, loss = answers(linear, models, index, toy)
    counted = guess >= 0
    np.testing.assert_allclose(row["accuracy"], np.mean((guess == np.asarray(toy.y[toy.test.order]))[counted]), rtol=1e-6)
    np.testing.assert_allclose(row["test_loss"], np.mean(loss[counted]), rtol=1e-5)
    assert row["group_sizes"].tolist() == [4, 3, 4]
    assert row["evaluated_clients"] == 11
    np.testing.assert_array_equal(table.samples, np.where(np.array(index) >= 0, toy.test.size, 0))


def test_auxiliary_model_is_the_mean_of_the_models_in_use(toy, linear, models):
    index = jnp.array([0, 2] * 7)  # model 1 serves nobody
    mean = jax.tree.map(lambda leaf: (leaf[0] + leaf[2]) / 2, models)
    hits = jnp.argmax(linear.predict(mean, toy.x[toy.test.order]), 1) == toy.y[toy.test.order]
    right, total = jit(lambda index: evaluate.auxiliary(linear, cfl.mesh_of(1), Served(models, index), toy))(index)
    assert (right, total) == (hits.sum(), hits.size)


def idle(task, local, pick):
    """A clustered algorithm that only meets clients."""

    def visit(client, bucket, data, shared, mine):
        nothing = jnp.zeros(())
        return Upload(jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), shared[1]), nothing, nothing, nothing, jnp.int32(0))

    return federated(task, local, select=pick, solve=visit, assign=lambda key, state, data, cohort: (0 * cohort.ids, traffic.traffic()))


@pytest.mark.parametrize(("rule", "hidden"), [("rounds", 3), ("met", 2), ("none", 0)])
def test_discard_rule(toy, linear, local, rule, hidden):
    """14 clients by 5: rounds 0, 1 and 2 begin with somebody not met, rounds 0 and 1 end so."""
    result = cfl.run(idle(linear, local, select.rr_then_random(5)), linear, toy, KEY, rounds=5, discard=rule, mesh=local.mesh)
    assert [row["evaluated_clients"] for row in result.rows] == [5, 10, 14, 14, 14]
    assert [row["accuracy"] is None for row in result.rows] == [n < hidden for n in range(5)]


def test_single_models_are_never_discarded(toy, linear, local):
    algorithm = idle(linear, local, select.rr_then_random(5))._replace(clustered=False)
    result = cfl.run(algorithm, linear, toy, KEY, rounds=2, mesh=local.mesh)
    assert all(row["accuracy"] is not None for row in result.rows)


# What a round reports


def test_a_group_of_one_has_no_discrepancy(toy, linear, local):
    """Exactly: rounding must not show up as a distance between a client's model and the group model that it alone made."""
    algorithm = zoo.ifca(linear, local, select.listed(np.array([[1]])), m=2)
    _, info = jit(algorithm.round)(KEY, jit(algorithm.init)(KEY, toy), toy)
    assert info.clients == 1 and info.discrepancy == 0 and info.loss > 0
    np.testing.assert_allclose(info.dissimilarity, 0, atol=1e-6)


def test_info_by_numpy(toy, linear, local):
    """IFCA with two models: discrepancy, losses, dissimilarity and counts, client by client."""
    algorithm = zoo.ifca(linear, local, select.listed(np.arange(14)[None]), m=2)
    before = jit(algorithm.init)(KEY, toy)
    after, info = jit(algorithm.round)(KEY, before, toy)
    cohort = Cohort(ids=jnp.arange(14), rank=jnp.arange(14))
    train = jit(training.over_clients(sgd(linear, local), local))
    upload = train(cohort, toy, (stream(KEY, TRAIN, 0), before.groups), training.full(after.assignment))
    old, new, delta = matrix(before.groups), matrix(after.groups), matrix(upload.delta)
    gaps, turns, group = {0: [], 1: []}, [], after.assignment.tolist()
    for client in range(14):
        if toy.train.size[client] == 0:
            continue
        step = new[group[client]] - old[group[client]]
        gaps[group[client]].append(np.linalg.norm(old[group[client]] + delta[client] - new[group[client]]))
        turns.append((1 - delta[client] @ step / np.linalg.norm(delta[client]) / np.linalg.norm(step)) / 2)
    assert all(gaps.values()), "both groups have members"
    close = {"rtol": 1e-4}
    np.testing.assert_allclose(info.discrepancy, np.mean(gaps[0] + gaps[1]), **close)
    np.testing.assert_allclose(info.group_discrepancy, [np.mean(gaps[0]), np.mean(gaps[1])], **close)
    np.testing.assert_allclose(info.dissimilarity, np.mean(turns), **close)
    np.testing.assert_allclose(info.loss, np.average(upload.loss, weights=upload.weight), **close)
    np.testing.assert_allclose(info.last_loss, np.average(upload.last_loss, weights=upload.weight), **close)
    assert info.clients == 13 and info.cold == 14
    assert info.steps == 2 * np.ceil(np.array(toy.train.size) / 5).sum()


# Assignment


def met(models, assignment, active=None, memory=()):
    """Returns a state with these groups."""
    count = jax.tree.leaves(models)[0].shape[0]
    active = jnp.ones(count, bool) if active is None else jnp.array(active)
    return State(jnp.int32(0), models, (), active, jnp.array(assignment, jnp.int32), traffic.traffic(), memory)


@pytest.mark.parametrize("with_l2", [False, True])
def test_best_model_is_that_of_brute_force(toy, linear, local, models, with_l2):
    """The second model is scaled up, so that its L2 penalty costs it clients; then the most popular one is switched off."""
    models = jax.tree.map(lambda leaf: leaf.at[1].multiply(8.0), models)
    table = np.zeros((14, 3))
    for client in np.flatnonzero(toy.train.size):
        rows = toy.train.order[int(toy.train.start[client]) :][: int(toy.train.size[client])]
        for g in range(3):
            model = jax.tree.map(lambda leaf, g=g: leaf[g], models)
            logits = np.asarray(linear.predict(model, toy.x[rows]), np.float64)
            each = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), np.asarray(toy.y[rows])]
            table[client, g] = each.mean() + with_l2 * 0.001 * np.sum(np.square(model["head"]["kernel"]))
    choose = jit(assign.best_model(linear, local, with_l2))
    cohort = Cohort(ids=jnp.arange(14), rank=jnp.arange(14))
    chosen = choose(KEY, met(models, [-1] * 14), toy, cohort)
    np.testing.assert_array_equal(chosen, table.argmin(1))
    assert chosen[2] == 0, "ties, here the client without data, go to the lowest number"
    popular = int(np.bincount(chosen).argmax())
    active = np.arange(3) != popular
    np.testing.assert_array_equal(choose(KEY, met(models, [-1] * 14, active), toy, cohort), np.where(active, table, np.inf).argmin(1))


def test_every_round_charges_the_real_clients(toy, models):
    cohort = Cohort(ids=jnp.array([3, 14, 5, 14, 0]), rank=jnp.arange(5))
    gid, cost = assign.every_round(lambda *_: jnp.array([2, 0, 1, 0, 2]))(KEY, met(models, [-1] * 14), toy, cohort)
    assert gid.tolist() == [2, 0, 1, 0, 2]
    assert (cost.units_down, cost.units_up, cost.words_up) == (3 * (3 - 1), 0, 3)


def test_cold_start_touches_only_newcomers(toy, models):
    asked = []

    def choose(key, state, data, newcomers):
        asked.append(newcomers.ids.tolist())
        return jnp.full(newcomers.ids.shape, 2)

    state = met(models, [0, 1, -1, 1, -1, *[0] * 9])
    cohort = Cohort(ids=jnp.array([1, 4, 14, 0, 2, 3]), rank=jnp.arange(6))
    gid, cost = assign.cold_start(choose)(KEY, state, toy, cohort)
    assert asked == [[14, 4, 14, 14, 2, 14]], "the others are shown as empty slots"
    assert gid[jnp.array([0, 1, 3, 4, 5])].tolist() == [1, 2, 0, 2, 1]
    assert (cost.units_down, cost.units_up) == (2 * 3, 0)


def test_nearest_direction_finds_the_planted_group(toy):
    """Directions along the axes, whatever their lengths; the fourth, though the nearest to the last client, has no founders."""
    directions = {"w": jnp.diag(jnp.array([1.0, 100.0, 0.01, 1.0]))}
    memory = SimpleNamespace(start=None, directions=directions, planted=jnp.array([True, True, True, False]))
    delta = jnp.array([[9, 1, 1, 0], [-9, 0.5, 0.4, 0], [0.1, 1, 3, 0], [0, 0.2, 0.1, 5.0]])

    def pretrain(newcomers, data, shared, mine):
        return sent([0.0] * 4, [1] * 4).replace(delta={"w": delta})

    cohort = Cohort(ids=jnp.arange(4), rank=jnp.arange(4))
    chosen = assign.nearest_direction(pretrain)(KEY, met(directions, [-1] * 14, memory=memory), toy, cohort)
    assert chosen.tolist() == [0, 1, 2, 1]


def test_random_group_depends_on_the_client_and_uses_every_group(toy, models):
    state = met(models, [-1] * 14)
    ids = jnp.arange(300)
    drawn = assign.random_group(KEY, state, toy, Cohort(ids=ids, rank=ids))
    assert (np.bincount(drawn, minlength=3) > 60).all() and set(drawn.tolist()) == {0, 1, 2}
    chex.assert_trees_all_equal(assign.random_group(KEY, state, toy, Cohort(ids=ids[::-1], rank=ids))[::-1], drawn)


# Stragglers


@pytest.mark.parametrize(("share", "slow"), [(0.0, 0), (0.2, 2), (0.35, 3), (0.5, 4), (1.0, 8)])
def test_stragglers_are_a_share_of_the_cohort(toy, share, slow):
    """8 clients in 11 slots; each straggler trains 1 .. 4 of 5 epochs."""
    ids = jnp.array([3, 14, 5, 0, 1, 14, 7, 9, 2, 14, 4])
    effort = jit(stragglers(share, 5))
    seen = set()
    for seed in range(12):
        epochs = np.asarray(effort(jax.random.key(seed), toy, Cohort(ids=ids, rank=ids)))[np.asarray(ids) < 14] * 5
        np.testing.assert_allclose(epochs, np.round(epochs), atol=1e-5)
        assert (epochs < 4.5).sum() == slow and epochs.max() <= 5 and epochs.min() >= 1
        seen |= set(np.round(epochs).astype(int).tolist())
    assert seen == ({5} if slow == 0 else {1, 2, 3, 4} if slow == 8 else {1, 2, 3, 4, 5})


def test_stragglers_of_one_epoch_have_nothing_to_drop(toy):
    ids = jnp.arange(6)
    assert stragglers(1.0, 1)(KEY, toy, Cohort(ids=ids, rank=ids)).tolist() == [1.0] * 6


def test_stragglers_take_their_share_of_steps(toy, linear, local):
    """2 of 3 epochs are two thirds of the steps, for every size of client."""
    three = local._replace(epochs=3)
    train = jit(training.over_clients(sgd(linear, three), three))
    ids = jnp.arange(14)
    work = training.full(0 * ids)._replace(effort=jnp.full(14, 2 / 3))
    model = jax.tree.map(lambda leaf: leaf[None], linear.init(KEY))
    upload = train(Cohort(ids=ids, rank=ids), toy, (KEY, model), work)
    np.testing.assert_array_equal(upload.steps, 2 * np.ceil(np.array(toy.train.size) / 5))
