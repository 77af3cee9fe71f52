"""FedEM and FedRC: slow twins in NumPy, what they reduce to, planted mixtures, and mixtures that
are served: tested, saved, read back, and joined by new clients.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    SIZES,
    call,
    ledger,
    matrix,
    nightly,
    one_line,
    others_nightly,
    shuffled,
    with_execution,
)
from scipy.special import log_softmax, logsumexp, softmax
from test_load import NAMES, own_arrays
from test_reference import KEY, L2, Model, mean, models_of, samples

import fedjax_cfl as cfl
from fedjax_cfl.algorithms import fedavg, fedem, fedrc
from fedjax_cfl.algorithms.fedem import ClientMixture, remember_mixture
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.simulation import evaluate, memory
from fedjax_cfl.simulation.personalize import (
    assign_newcomers,
    check_rule,
    finetune_clients,
)
from fedjax_cfl.system import select
from fedjax_cfl.system.clock import device_profiles
from fedjax_cfl.system.reports import count_to_int
from fedjax_cfl.types import Cohort, ServedModels, State

TABLE = np.array([[1, 7, 9, 2], [3, 1, 11, 6], [7, 13, 0, 3]])  # client 2 has no samples
COHORTS = select.from_table(TABLE)
CLASSES, CLIENTS, FLOOR = 4, len(SIZES), 1e-8
METHODS = {"fedem": fedem, "fedrc": fedrc}


def play(algorithm, data, rounds=3, key=KEY):
    """Returns the states before the first and after every round, and what the rounds report."""
    one_round, infos = jax.jit(algorithm.round), []
    states = [jax.jit(algorithm.init)(key, data)]
    for _ in range(rounds):
        state, info = one_round(key, states[-1], data)
        states.append(state)
        infos.append(info)
    return states, infos


@pytest.fixture(scope="module")
def trained(toy, linear, local):
    """FedEM with two models, and its states before and after two rounds."""
    algorithm = fedem(linear, local, COHORTS, m=2)
    return algorithm, play(algorithm, toy, 2)[0]


# the twin


def logits_of(model, x):
    return x @ model.kernel + model.bias


def losses_of(model, x, y):
    return -log_softmax(logits_of(model, x), axis=1)[np.arange(len(y)), y]


def e_step(models, weights, shares, x, y):
    """Returns q [m, n]; `shares` [m, C] are FedRC's R, None: FedEM."""
    pairs = zip(models, weights, strict=True)
    score = np.stack([np.log(weight) - losses_of(one, x, y) for one, weight in pairs])
    if shares is not None:
        score -= np.log(shares)[:, y]
    return softmax(score, axis=0)


def m_step(model, part, words, x, y, local):
    """Trains one model on samples that count `part` [n] times; returns it, and the sum of its
    weighted losses in the first pass.
    """
    first = 0.0
    for epoch in range(local.epochs):
        order = shuffled(words, len(y), epoch)
        for begin in range(0, len(y), local.batch_size):
            batch = order[begin : begin + local.batch_size]
            first += (part[batch] @ losses_of(model, x[batch], y[batch])) * (epoch == 0)
            error = softmax(logits_of(model, x[batch]), axis=1)
            error[np.arange(len(batch)), y[batch]] -= 1
            error *= part[batch][:, None]
            slope = Model(
                x[batch].T @ error / len(batch) + 2 * L2 * model.kernel, error.mean(axis=0)
            )
            model = model + -local.lr * slope
    return model, first


def client_words(number, client, m):
    """Returns the seeds of a client's shuffles, one for each model."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, 4), number)  # TRAIN
    key = jax.random.fold_in(key, client)
    others = jax.random.split(jax.random.fold_in(key, 2**32 - 1), m - 1)
    return [np.asarray(jax.random.bits(each, (2,))) for each in (key, *others)]


def twin(models, data, local, with_labels, shrink=False):
    """Yields (models, pi, last A, R, mean training loss) after each round of `TABLE`."""
    x, y, m = np.asarray(data.x, np.float64), np.asarray(data.y), len(models)
    weights, by_label = np.full((CLIENTS, m), 1 / m), {}
    shares = np.full((m, CLASSES), 1 / m) if with_labels else None
    for number, cohort in enumerate(TABLE.tolist()):
        trained, sizes, losses = [], [], []
        for client in cohort:
            held = samples(data, client)
            if not len(held):
                continue
            mine, labels = x[held], y[held]
            q = e_step(models, weights[client], shares, mine, labels)
            np.testing.assert_allclose(q.sum(0), 1)
            weights[client] = q.mean(1)
            by_label[client] = np.stack([q[:, labels == c].sum(1) for c in range(CLASSES)], 1)
            words = client_words(number, client, m)
            found = [m_step(*of, mine, labels, local) for of in zip(models, q, words, strict=True)]
            trained.append([model for model, _ in found])
            losses.append(sum(loss for _, loss in found))
            sizes.append(len(held))
        penalty = L2 * sum(np.sum(model.kernel**2) for model in models)
        part = sum(sizes) / sum(SIZES) if shrink else 1.0
        models = [
            old + part * (mean(new, sizes) + -1.0 * old)
            for old, new in zip(models, zip(*trained, strict=True), strict=True)
        ]
        if with_labels:
            shares = np.maximum(sum(by_label.values()), FLOOR)
            shares /= shares.sum(1, keepdims=True)
        yield models, weights.copy(), dict(by_label), shares, sum(losses) / sum(sizes) + penalty


@pytest.mark.parametrize(
    ("name", "m", "settings"),
    [nightly("fedem", 3, {}), ("fedem", 2, {"shrink": True}), ("fedrc", 3, {})],
)
def test_rounds_are_those_of_the_twin(toy, linear, local, name, m, settings):
    labels = name == "fedrc"
    one = with_execution(local, width=4) if labels else local  # in lanes, which draw one by one
    states, infos = play(METHODS[name](linear, one, COHORTS, m=m, **settings), toy)
    rounds = twin(models_of(states[0].groups), toy, local, labels, **settings)
    met = set()
    for number, (models, weights, by_label, shares, loss) in enumerate(rounds):
        state, info = states[number + 1], infos[number]
        for found, expected in zip(models_of(state.groups), models, strict=True):
            np.testing.assert_allclose(found.flat(), expected.flat(), rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(state.rows["mixture"].weights, weights, atol=2e-5)
        met |= set(TABLE[number].tolist()) - {2}
        assert set(np.flatnonzero(state.rows["mixture"].met).tolist()) == met == set(by_label)
        group = [int(np.argmax(weights[k])) if k in met else -1 for k in range(CLIENTS)]
        assert state.assignment.tolist() == group
        np.testing.assert_allclose(info.loss, loss, rtol=1e-5)
        if labels:
            np.testing.assert_allclose(state.memory, shares, rtol=1e-4)
            np.testing.assert_allclose(
                np.asarray(state.rows["mixture"].by_label)[sorted(met)],
                np.stack([by_label[k] for k in sorted(met)]),
                atol=1e-4,
            )
    sent, rounds = ledger(states[-1].traffic), TABLE.size
    words = rounds * m * CLASSES if labels else 0
    assert sent.units_down == sent.units_up == rounds * m
    assert sent.words_down == sent.words_up == words
    steps = local.epochs * sum(-(-SIZES[k] // local.batch_size) for k in TABLE.reshape(-1).tolist())
    assert sum(count_to_int(info.steps) for info in infos) == m * steps


def test_what_is_lost_is_not_remembered():
    """Client 2 has answered, the answer of client 0 is lost, client 1 was there before."""
    before = ClientMixture(
        jnp.full((3, 2), 0.5), jnp.array([False, True, False]), jnp.zeros((3, 2, 2)).at[1].set(1.0)
    )
    empty = State(*[None] * len(dataclasses.fields(State)))
    sums = jnp.array([[[1.0, 4], [0, 3]], [[6, 0], [0, 2]]])
    r = SimpleNamespace(
        state=empty.replace(memory=jnp.full((2, 2), 0.5), rows={"mixture": before}),
        cohort=Cohort(jnp.array([0, 2]), jnp.arange(2)),
        upload=SimpleNamespace(weight=jnp.array([0.0, 8.0]), extra=sums),
    )
    state = remember_mixture(2.0)(r)  # where there are fewer samples of a label, 2
    kept = state.rows["mixture"]
    np.testing.assert_array_equal(kept.by_label, [np.zeros((2, 2)), np.ones((2, 2)), sums[1]])
    np.testing.assert_allclose(kept.weights, [[0.5, 0.5], [0.5, 0.5], [0.75, 0.25]])
    assert kept.met.tolist() == [False, True, True]
    assert state.assignment.tolist() == [-1, 0, 0]
    np.testing.assert_allclose(state.memory, [[7 / 9, 2 / 9], [2 / 5, 3 / 5]])


def mixed(models, weights, x):
    """Returns the mean of the models' probabilities [n, C]."""
    return sum(
        w * softmax(logits_of(one, x), axis=1) for one, w in zip(models, weights, strict=True)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [1, 4])
def test_clients_are_tested_on_their_mixtures(toy, linear, local, devices):
    states, _ = play(fedem(linear, local, COHORTS, m=3), toy, 2)
    algorithm, state = fedem(linear, local, COHORTS, m=3), states[-1]
    mesh = cfl.make_mesh(devices)
    row, clients = jax.jit(
        lambda state, data: evaluate.evaluate_all(algorithm, linear, mesh, state, data, True)
    )(state, toy)
    x, y, models = np.asarray(toy.x, np.float64), np.asarray(toy.y), models_of(state.groups)
    right = samples_seen = 0
    for client in range(CLIENTS):
        size = int(toy.test.size[client])
        held = np.asarray(toy.test.order)[int(toy.test.start[client]) :][:size]
        if not bool(state.rows["mixture"].met[client]) or not size:
            assert int(clients.samples[client]) == 0
            continue
        p = mixed(models, np.asarray(state.rows["mixture"].weights[client], np.float64), x[held])
        hits = p.argmax(1) == y[held]
        np.testing.assert_allclose(clients.accuracy[client], hits.mean(), rtol=1e-6)
        loss = -np.log(p[np.arange(size), y[held]]).mean()
        np.testing.assert_allclose(clients.loss[client], loss, rtol=1e-4)
        right, samples_seen = right + hits.sum(), samples_seen + size
    np.testing.assert_allclose(row["accuracy"], right / samples_seen, rtol=1e-6)
    tests, auxiliary = np.asarray(toy.test.order), mean(models)
    hits = logits_of(auxiliary, x[tests]).argmax(1) == y[tests]
    np.testing.assert_allclose(row["auxiliary_accuracy"], hits.mean(), rtol=1e-6)
    assert row["evaluated_clients"] == np.sum(state.rows["mixture"].met)
    assert (
        row["group_sizes"].tolist() == np.bincount(state.assignment + 1, minlength=4)[1:].tolist()
    )


@pytest.mark.nightly
def test_parts_of_clients_are_tested_as_all_of_them(trained):
    """As for samples on the host: clients 10 to 13, and room for two more behind the last."""
    algorithm, states = trained
    served = algorithm.serve(states[-1])
    part = evaluate.take_served(served, 10 + jnp.arange(6))
    np.testing.assert_array_equal(part.weights[:4], served.weights[10:])
    np.testing.assert_array_equal(part.model_index, [*served.model_index[10:].tolist(), -1, -1])
    assert not part.weights[4:].any()


# what a mixture is


def served_on(task, data, served):
    return jax.jit(
        lambda served: evaluate.predict_test_samples(task, cfl.make_mesh(1), served, data)
    )(served)


def test_a_mixture_of_one_model_is_that_model(toy, linear, models):
    index = jnp.array([0, 2, -1, 1, 1, 2, -1, 0, 2, 0, 1, -1, 0, 2])
    hard = served_on(linear, toy, ServedModels(models, index))
    soft = served_on(linear, toy, ServedModels(models, index, jax.nn.one_hot(index, 3)))
    np.testing.assert_array_equal(soft[0], hard[0])
    np.testing.assert_allclose(soft[1], hard[1], rtol=1e-5, atol=1e-6)


def test_probabilities_are_averaged_not_logits(toy, linear):
    """Model 0 is sure of class 0, model 1 rather thinks it is 1: in the mean of logits, which is
    the model of mean parameters, the sure one wins.
    """
    bias = np.zeros((2, CLASSES), np.float32)
    bias[0, 0], bias[1, :2], bias[:, 2:] = 14.0, (-2.2, 0.0), -30.0
    models = {"head": {"kernel": jnp.zeros((2, 5, CLASSES)), "bias": jnp.asarray(bias)}}
    weights = jnp.tile(jnp.array([0.3, 0.7]), (CLIENTS, 1))
    nobody = jnp.zeros(CLIENTS, jnp.int32)
    guess, loss = served_on(linear, toy, ServedModels(models, nobody, weights))
    assert (np.asarray(guess) == 1).all()
    assert ([0.3, 0.7] @ bias).argmax() == 0
    y = np.asarray(toy.y)[np.asarray(toy.test.order)]
    p = [0.3, 0.7] @ softmax(bias.astype(float), axis=1)
    np.testing.assert_allclose(loss, -np.log(np.maximum(p, 1e-10))[y], rtol=1e-5)
    assert p[2] < 1e-10 and (y >= 2).any(), "the floor is not seen"


@pytest.mark.nightly
@pytest.mark.parametrize("value", [jnp.nan, nightly(-jnp.inf)])
def test_a_model_that_is_not_finite_is_seen_by_all(toy, linear, trained, value):
    """Also by clients to whom the other one says more, and where probabilities are finite."""
    algorithm, (*_, state) = trained
    met = np.asarray(state.rows["mixture"].met) & (np.asarray(toy.test.size) > 0)
    weaker = int(np.argmin(np.bincount(np.asarray(state.assignment)[met], minlength=2)))
    bias = state.groups["head"]["bias"].at[weaker, 0].set(value)
    groups = {"head": state.groups["head"] | {"bias": bias}}
    broken, mesh = state.replace(groups=groups), cfl.make_mesh(1)
    row, _ = jax.jit(
        lambda state, data: evaluate.evaluate_all(algorithm, linear, mesh, state, data, False)
    )(broken, toy)
    assert np.isnan(row["accuracy"]) and row["nonfinite_model_clients"] == met.sum()


# reductions


@pytest.mark.nightly
@pytest.mark.parametrize("name", others_nightly(METHODS, ["fedrc"]))
def test_one_model_is_fedavg_bit_for_bit(toy, linear, local, name):
    local = with_execution(local, first_layer="direct").replace(momentum=0.5, weight_decay=0.01)
    mine, infos = play(METHODS[name](linear, local, COHORTS, m=1), toy)
    plain, expected = play(fedavg(linear, local, COHORTS), toy)
    for one, other in zip(mine, plain, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.groups, other.groups)
        sent = ledger(one.traffic)
        assert sent.units_down == ledger(other.traffic).units_down
    for one, other in zip(infos, expected, strict=True):
        for field in ("loss", "last_loss", "discrepancy", "group_discrepancy", "dissimilarity"):
            values = getattr(one, field), getattr(other, field)
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_fedrc_is_fedem_while_label_shares_are_equal(toy, linear, local):
    """The first round always; later rounds where what is known of labels is forgotten."""
    soft, hard = (method(linear, local, COHORTS, m=3) for method in (fedem, fedrc))
    (first, *states), _ = play(soft, toy)
    state, one_round = jax.jit(hard.init)(KEY, toy), jax.jit(hard.round)
    constant = state.memory
    for expected in states:
        forgot = state.replace(memory=constant)
        state, other = one_round(KEY, forgot, toy)[0], one_round(KEY, state, toy)[0]
        jax.tree.map(np.testing.assert_array_equal, state.groups, expected.groups)
        np.testing.assert_array_equal(
            state.rows["mixture"].weights, expected.rows["mixture"].weights
        )
    assert np.abs(matrix(other.groups) - matrix(state.groups)).max() > 1e-4
    assert first.round == 0


@pytest.mark.nightly
def test_models_that_begin_alike_have_equal_parts(toy, trained):
    algorithm, (begun, *_) = trained
    same = jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[0]]), begun.groups)
    after, _ = jax.jit(algorithm.round)(KEY, begun.replace(groups=same), toy)
    np.testing.assert_allclose(after.rows["mixture"].weights, 0.5, atol=1e-6)
    one, other = matrix(after.groups)
    assert np.abs(one - other).max() > 1e-4, "each model has shuffles of its own"


# planted mixtures


def planted(x, y, owner, classes):
    """Returns data whose samples are all for training, and one of each client also for a test."""
    first = np.unique(owner, return_index=True)[1]
    place = np.concatenate([np.arange(len(y)), first])
    pool = cfl.Pool(x.astype(np.float32), y.astype(np.int32), classes)
    test = np.arange(len(place)) >= len(y)
    return cfl.federate(pool, cfl.Partition(place, owner[place].astype(np.int32), test))


@pytest.fixture(scope="module")
def two_concepts():
    """Eight clients; client i answers samples by concept 0 with probability `share[i]`, else by
    concept 1, which has the labels the other way round.
    """
    rng, share = np.random.default_rng(4), np.array([0, 0.1, 0.3, 0.5, 0.5, 0.7, 0.9, 1.0])
    owner = np.repeat(np.arange(8), 80)
    x = rng.normal(size=(len(owner), 3))
    x[:, 0] += 1.5 * np.sign(x[:, 0])  # nobody is near the border
    first = np.arange(len(owner)) % 80 < 80 * share[owner]
    return planted(x, (x[:, 0] > 0) ^ first, owner, 2), share


@pytest.fixture(scope="module")
def bare():
    """Softmax regression without a penalty."""
    return cfl.as_task(cfl.models.MCLR(2), (3,), 2, 0.0)


@pytest.mark.nightly
def test_the_weights_of_a_planted_mixture_are_found(two_concepts, bare, local):
    data, share = two_concepts
    everybody = local.replace(lr=0.5, epochs=1, batch_size=20)
    algorithm = fedem(bare, everybody, select.full_participation(), m=2)
    state = play(algorithm, data, 30)[0][-1]
    found = np.asarray(state.rows["mixture"].weights)
    mine = found[:, 0] if found[-1, 0] > 0.5 else found[:, 1]
    np.testing.assert_allclose(mine, share, atol=0.05)


@pytest.mark.nightly
def test_the_likelihood_does_not_fall(two_concepts, bare, local):
    """Full batches and a small step: every round is a step of generalised EM."""
    data, _ = two_concepts
    whole = local.replace(lr=0.05, epochs=1, batch_size=80)
    states, _ = play(fedem(bare, whole, select.full_participation(), m=2), data, 12)
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    likelihood = []
    for state in states:
        total = 0.0
        models, weights = (
            models_of(state.groups),
            np.asarray(state.rows["mixture"].weights, np.float64),
        )
        for client in range(8):
            held = samples(data, client)
            each = [-losses_of(model, x[held], y[held]) for model in models]
            total += logsumexp(each, axis=0, b=weights[client][:, None]).sum()
        likelihood.append(total)
    gain = np.diff(likelihood)
    assert (gain > -1e-3).all() and likelihood[-1] > likelihood[0] + 1, likelihood


@pytest.mark.nightly
def test_clients_that_differ_in_labels_alone_are_put_together_by_fedrc(local):
    """One concept; two clients have labels 0 and 1, two have labels 2 and 3."""
    rng = np.random.default_rng(2)
    owner = np.repeat(np.arange(4), 60)
    y = np.where(owner < 2, 0, 2) + rng.integers(2, size=len(owner))
    x = 2 * np.eye(4)[y] + 0.3 * rng.normal(size=(len(y), 4))
    data = planted(x, y, owner, 4)
    task = cfl.as_task(cfl.models.MCLR(4), (4,), 4, 0.0)
    local = local.replace(lr=0.3, epochs=1, batch_size=20)
    weights = {
        name: np.asarray(
            play(method(task, local, select.full_participation(), m=2), data, 40)[0][-1]
            .rows["mixture"]
            .weights
        )[:, 0]
        for name, method in METHODS.items()
    }
    assert np.ptp(weights["fedrc"]) < 0.1, weights
    assert np.abs(weights["fedem"][:2] - weights["fedem"][2:]).min() > 0.9, weights


# whatever the machine


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "devices", "width"),
    [("fedrc", 2, 2), nightly("fedrc", 4, 1), nightly("fedem", 1, 3), nightly("fedem", 8, 2)],
)
def test_lanes_and_devices_change_nothing(toy, linear, local, name, devices, width):
    how = {"mesh": cfl.make_mesh(devices), "width": width}
    plain, _ = play(METHODS[name](linear, local, COHORTS, m=3), toy)
    other, _ = play(METHODS[name](linear, with_execution(local, **how), COHORTS, m=3), toy)
    for found, expected in zip(*map(jax.tree.leaves, (other[-1], plain[-1])), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [nightly("fedem"), "fedrc"])
def test_runs_of_a_grid_are_those_alone(toy, linear, local, name):
    """Two seeds and two step sizes as one program."""
    grid = local.replace(execution=local.execution._replace(runs_as_one=True))

    def begun(local, key, lr):
        algorithm = METHODS[name](linear, local.replace(lr=lr), COHORTS, m=2)
        state = algorithm.round(key, algorithm.init(key, toy), toy)[0]
        state = algorithm.round(key, state, toy)[0]
        return state.groups, state.memory, state.rows

    keys, steps = jax.random.split(KEY, 2), jnp.array([0.1, 0.2])
    together = jax.jit(jax.vmap(lambda key, lr: begun(grid, key, lr)))(keys, steps)
    for number in range(2):
        alone = jax.jit(lambda key, lr: begun(local, key, lr))(keys[number], steps[number])
        mine = jax.tree.map(lambda leaf, n=number: leaf[n], together)
        for found, expected in zip(*map(jax.tree.leaves, (mine, alone)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


# what goes wrong


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault", [nightly({"dropout": 1.0}), {"nan": 1.0}, nightly({"nan": 1.0, "nonfinite": "zero"})]
)
def test_updates_that_are_not_used_leave_no_trace(toy, linear, local, fault):
    system = cfl.System(COHORTS, cfl.Faults(**fault))
    (first, last), (info,) = play(fedrc(linear, local, system, m=2), toy, 1)
    lost = int(info.fault_counts.dropped + info.fault_counts.nonfinite)
    assert lost == 3
    sent = ledger(last.traffic)
    # a client without samples answers as well, and loses nothing
    answers = TABLE.shape[1] - int(info.fault_counts.dropped)
    assert (sent.units_down, sent.units_up) == (2 * TABLE.shape[1], 2 * answers)
    assert (sent.words_down, sent.words_up) == (2 * CLASSES * 4, 2 * CLASSES * answers)
    jax.tree.map(np.testing.assert_array_equal, first.groups, last.groups)
    if fault.get("nonfinite") != "zero":
        kept = [(state.memory, state.rows) for state in (first, last)]
        jax.tree.map(np.testing.assert_array_equal, *kept)
        assert (last.assignment == -1).all()


@pytest.mark.nightly
def test_attackers_attack_all_models(toy, linear, local, trained):
    """All turn their updates round: the models take the opposite step."""
    honest = trained[1][:2]
    hostile = cfl.System(COHORTS, cfl.Faults(byzantine=1.0, scale=2.0))
    attacked = play(fedem(linear, local, hostile, m=2), toy, 1)[0]
    step, wrong = (
        matrix(after.groups) - matrix(before.groups) for before, after in (honest, attacked)
    )
    np.testing.assert_allclose(wrong, -2.0 * step, atol=1e-5)


@pytest.mark.nightly
def test_time_counts_all_models_and_the_inference(toy, linear, local):
    """A client of n samples infers m n of them, takes m times the steps, and exchanges 2 m models
    and, in FedRC, 2 m C words. The second answer ends the round.
    """
    m, size = 3, np.array(SIZES)
    step, rate, sample = np.linspace(0.1, 1, CLIENTS), 1000.0, np.linspace(0.02, 0.01, CLIENTS)
    clock = device_profiles(step, np.full(CLIENTS, rate), 2, sample)
    algorithm = fedrc(linear, local, cfl.System(COHORTS, clock=clock), m=m)
    (_, state), (info,) = play(algorithm, toy, 1)
    who = TABLE[0]
    steps = m * local.epochs * -(-size[who] // local.batch_size)
    sent = 2 * m * (4 * 24 + 4 * CLASSES) / rate
    seconds = steps * step[who] + sent + m * size[who] * sample[who]
    np.testing.assert_allclose(info.seconds, np.sort(seconds)[1], rtol=1e-5)
    on_time = set(who[seconds <= np.sort(seconds)[1]].tolist()) - {2}
    assert set(np.flatnonzero(state.rows["mixture"].met).tolist()) == on_time
    assert int(info.late) == 2
    late = np.setdiff1d(who, list(on_time))
    np.testing.assert_allclose(np.asarray(state.rows["mixture"].weights)[late], 1 / m)


# clients that took no part


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedem", {}), ("fedrc", {}), ("fedrc", {"newcomers_use_shares": False})],
)
def test_new_clients_take_one_e_step(toy, linear, local, name, settings):
    """Clients 10 to 13 join a run of the others; nobody else's weights and no model changes."""
    few = take_clients(toy, np.arange(10))
    pick = select.from_table(np.array([[1, 7, 9, 3]]))

    def make(pick):
        return METHODS[name](linear, local, pick, m=2, **settings)

    check_rule(make, few, KEY, at_once=3)
    state = play(make(pick), few, 3)[0][-1]
    mesh = local.execution.mesh
    new = assign_newcomers(make, linear, mesh, state, toy, KEY, at_once=3)
    x, y, models = np.asarray(toy.x, np.float64), np.asarray(toy.y), models_of(state.groups)
    shares = None
    if name == "fedrc" and settings.get("newcomers_use_shares", True):
        shares = np.asarray(state.memory, np.float64)
    for number, client in enumerate(range(10, 14)):
        held = samples(toy, client)
        weights = e_step(models, [0.5, 0.5], shares, x[held], y[held]).mean(1)
        np.testing.assert_allclose(new.served.weights[client], weights, rtol=1e-3, atol=1e-5)
        assert new.groups[number] == weights.argmax()
        size = int(toy.test.size[client])
        tests = np.asarray(toy.test.order)[int(toy.test.start[client]) :][:size]
        hits = mixed(models, weights, x[tests]).argmax(1) == y[tests]
        np.testing.assert_allclose(new.metrics.accuracy[number], hits.mean(), rtol=1e-6)
    assert (np.asarray(new.served.model_index)[:10] == -1).all()
    jax.tree.map(np.testing.assert_array_equal, new.served.models, state.groups)


def test_clients_that_come_later_find_their_weights_by_training(linear, local):
    for hard in (False, True):
        assert fedrc(linear, local, select.uniform(2), m=2, hard=hard).takes_newcomers


@pytest.mark.nightly
def test_hard_fedrc_serves_one_model(toy, linear, local):
    """New clients join by a round, and get the model of their largest weight."""
    few = take_clients(toy, np.arange(10))

    def make(pick):
        return fedrc(linear, local, pick, m=2, hard=True)

    check_rule(make, few, KEY, at_once=4)
    state = play(make(select.from_table(np.array([[1, 7, 9, 3]]))), few, 2)[0][-1]
    served = make(COHORTS).serve(state)
    assert served.weights is None
    strongest = np.asarray(state.rows["mixture"].weights).argmax(1)
    np.testing.assert_array_equal(
        served.model_index, np.where(np.asarray(state.rows["mixture"].met), strongest, -1)
    )
    new = assign_newcomers(make, linear, local.execution.mesh, state, toy, KEY, at_once=4)
    x, y, models = np.asarray(toy.x, np.float64), np.asarray(toy.y), models_of(state.groups)
    shares = np.asarray(state.memory, np.float64)
    for number, client in enumerate(range(10, 14)):
        held = samples(toy, client)
        weights = e_step(models, [0.5, 0.5], shares, x[held], y[held]).mean(1)
        assert new.groups[number] == weights.argmax()


# a finished run

LINE = (
    "dataset=npz dataset.source.path=own.npz algorithm=fedrc algorithm.m=2 discard=none rounds=4"
    " seed=1 clients_per_round=6 local.epochs=2 local.lr=0.5 run_dir=run"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with own.npz and a run of it; its clients have both answers to a sample."""
    folder = tmp_path_factory.mktemp("mixtures")
    arrays = own_arrays(NAMES)
    swapped = np.random.default_rng(3).random(len(arrays["y"])) < 0.3
    arrays["y"] = np.where(swapped, 1 - arrays["y"], arrays["y"]).astype(np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        np.savez("own.npz", **arrays)
        assert call(patch, LINE, devices=1) == 0
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    return cfl.load_run(folder / "run")


@pytest.mark.nightly
def test_a_finished_run_predicts_by_its_mixtures(finished, folder):
    own = dict(np.load(folder / "own.npz"))
    weights = finished.final.weights
    assert weights.shape == (6, 2) and finished.final.label_shares.shape == (2, 2)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    assert ((weights > 0.01) & (weights < 0.99)).any(), "as good as hard"
    np.testing.assert_array_equal(finished.final.model_index, weights.argmax(1))
    models, right = models_of(finished.final.models), 0
    for place, client in enumerate(NAMES):
        rows = (own["client"] == client) & (own["split"] == 1)
        guess = finished.predict(client, own["x"][rows])
        by_hand = mixed(models, weights[place].astype(float), own["x"][rows].astype(float))
        np.testing.assert_array_equal(guess, by_hand.argmax(1))
        assert np.mean(guess == own["y"][rows]) == pytest.approx(finished.table["accuracy"][place])
        best = finished.predict(client, own["x"][rows], finished.best)
        right += np.sum(best == own["y"][rows])
    test = own["split"] == 1
    assert right / test.sum() == pytest.approx(finished.summary["best_accuracy"])


@pytest.mark.nightly
@pytest.mark.parametrize("shares", [np.array([[0.9, 0.1], [0.2, 0.8]], np.float32), None])
def test_a_client_never_met_finds_its_weights(finished, shares):
    new = own_arrays(["gil"], samples=300, seed=5)
    rows = new["y"] + np.arange(300) % 3 > 0  # more of label 1
    x, y = new["x"][rows], new["y"][rows]
    assert finished.final.label_shares.shape == (2, 2)
    found = finished.find_weights(x, y, finished.final._replace(label_shares=shares))
    models = models_of(finished.final.models)
    expected = e_step(models, [0.5, 0.5], shares, x.astype(float), y).mean(1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.nightly
def test_predict_mixes_for_clients_of_the_run_and_others(finished, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    new = own_arrays(["ann", "gil"], samples=40, seed=6)
    np.savez("new.npz", **new)
    assert call(monkeypatch, "predict run new.npz --out found.npz", devices=1) == 0
    assert "mixtures, the heaviest of each model" in capsys.readouterr().out
    found = np.load("found.npz")
    ann, training = new["client"] == "ann", new["split"] == 0
    np.testing.assert_array_equal(found["known"], ann)
    np.testing.assert_array_equal(found["predicted"][ann], finished.predict("ann", new["x"][ann]))
    rows = ~ann & training
    weights = finished.find_weights(new["x"][rows], new["y"][rows])
    np.testing.assert_array_equal(
        found["predicted"][~ann], finished.predict_with(weights, new["x"][~ann])
    )
    assert (found["model"][~ann] == weights.argmax()).all()
    np.savez("bare.npz", x=new["x"], client=new["client"])
    assert call(monkeypatch, "predict run bare.npz", devices=1) == 1  # the rest is written
    assert "client gil has no model in this run, and without y of" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda run: run.find_model(np.zeros((1, 4)), [0]), "mix all models; find_weights(x, y)"),
        (
            lambda run: run.predict_with(np.ones(3), np.zeros((1, 4))),
            "expected weights of shape (2,)",
        ),
        (
            lambda run: run.predict_with(np.ones(2), np.zeros((1, 4))),
            "must be >= 0 and have the sum 1",
        ),
        (lambda run: unmet(run).predict("bob", np.zeros((1, 4))), "never took part"),
        (
            lambda run: run.find_weights(
                np.zeros((1, 4)), [0], run.final._replace(weights=None, label_shares=None)
            ),
            "use one model each; find_model(x, y)",
        ),
    ],
)
def test_what_a_run_of_mixtures_cannot_answer_is_said(finished, ask, text):
    one_line(text, ask, finished)


def unmet(run):
    return run._replace(final=run.final._replace(model_index=np.array([0, -1, 0, 0, 0, 0])))


# refusals


def clocked(**settings):
    clock = device_profiles(np.ones(CLIENTS), np.ones(CLIENTS))._replace(**settings)
    return cfl.System(COHORTS, clock=clock)


@pytest.mark.parametrize(
    ("change", "system", "says"),
    [
        ({"personal": cfl.personal.ditto()}, COHORTS, "personal: clients of FedEM receive"),
        ({}, clocked(per_group=True), "clock.per_group=true: clients of FedEM"),
        ({}, COHORTS._replace(poll=COHORTS.select), "selection: clients of FedEM receive"),
    ],
)
def test_what_is_meant_for_single_models_is_refused(linear, local, change, system, says):
    one_line(says, fedem, linear, local.replace(**change), system, m=2)


def test_settings_are_refused(linear, local):
    dual = with_execution(local, first_layer="dual")
    one_line("local.first_layer=dual: clients of FedRC", fedrc, linear, dual, COHORTS, m=2)
    one_line("algorithm.m=0: must be a whole number >= 1", fedem, linear, local, COHORTS, m=0)
    one_line("algorithm.m=1.5", fedrc, linear, local, COHORTS, m=1.5)
    given = {"m": 2, "least_count": 0.0}
    one_line("algorithm.least_count=0.0", fedrc, linear, local, COHORTS, **given)
    given = {"m": 2, "hard": True, "newcomers_use_shares": False}
    one_line("algorithm.newcomers_use_shares=false: with", fedrc, linear, local, COHORTS, **given)


def test_fine_tuning_is_refused_before_the_run(fedjax_cfl, tmp_path):
    line = "algorithm=fedem dataset.clients=8 clients_per_round=3 evaluate.finetune=2 run_dir=r"
    status, _, error = fedjax_cfl(line)
    assert status == 2 and "evaluate.finetune=2: clients of this method" in error
    assert error.count("\n") == 1 and not (tmp_path / "r").exists()


def test_what_trains_on_from_one_model_is_refused(toy, linear, local, models):
    nobody = jnp.zeros(CLIENTS, jnp.int32)
    served = ServedModels(models, nobody, jnp.full((CLIENTS, 3), 1 / 3))
    given = linear, local, 2, served, toy, KEY, 4
    one_line(
        "evaluate.finetune: clients of this method predict by mixtures", finetune_clients, *given
    )


@pytest.mark.nightly
def test_more_models_than_memory_holds_are_refused(toy, linear, local, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda mesh: 2_000_000)
    many = fedem(linear, local, COHORTS, m=4000)
    given = {"rounds": 1, "mesh": local.execution.mesh}
    error = one_line("memory: each device needs", cfl.run, many, linear, toy, KEY, **given)
    assert "fewer models of a mixture (algorithm.m)" in error or "fewer groups" in error
