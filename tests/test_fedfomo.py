"""FedFomo against plain NumPy loops."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, FEATURES, build, nightly, spent

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedfomo import fedfomo, hold_out_samples, pick_peers, take_held_out
from fedjax_cfl.data import stream
from fedjax_cfl.errors import InputError
from fedjax_cfl.system.select import from_table, full_participation

KEY = jax.random.key(5)
CLIENTS, LR, EPOCHS = 5, 0.5, 3
SIZES = (20, 12, 4, 9, 31)  # the third has no sample held out


@pytest.fixture(scope="module")
def five():
    """Five clients of two opposite concepts, whose labels are noisy."""
    rng = np.random.default_rng(2)
    owner = np.repeat(np.arange(CLIENTS), SIZES).astype(np.int32)
    y = rng.integers(CLASSES, size=owner.size)
    x = np.eye(CLASSES, FEATURES)[y] + 0.6 * rng.normal(size=(owner.size, FEATURES))
    y = np.where(owner % 2 == 0, y, CLASSES - 1 - y).astype(np.int32)
    x, y, owner, test = (
        np.concatenate([a, b])
        for a, b in (
            (x.astype(np.float32), x[::7].astype(np.float32)),
            (y, y[::7]),
            (owner, owner[::7]),
            (np.zeros(owner.size, bool), np.ones(owner[::7].size, bool)),
        )
    )
    held = cfl.Partition(np.arange(owner.size), owner, test)
    return cfl.federate(cfl.Pool(x, y, CLASSES), held)


@pytest.fixture(scope="module")
def whole_batches():
    """Every step is one over all samples, so that their order says nothing."""
    return cfl.Local(
        lr=LR, epochs=EPOCHS, batch_size=64, execution=cfl.make_execution(cfl.make_mesh(1), 1)
    )


@pytest.fixture(scope="module")
def softmax_task():
    return cfl.as_task(cfl.models.MCLR(CLASSES), (FEATURES,), CLASSES, l2=0.0)


# a model is a matrix [FEATURES + 1, CLASSES], the bias last


def to_matrix(models, client):
    kernel, bias = models["head"]["kernel"][client], models["head"]["bias"][client]
    return np.concatenate([kernel, bias[None]]).astype(np.float64)


def probabilities(model, x):
    z = np.concatenate([x, np.ones((len(x), 1))], axis=1) @ model
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def mean_loss(model, x, y):
    return -np.mean(np.log(probabilities(model, x)[np.arange(len(y)), y])) if len(y) else 0.0


def train(model, x, y):
    full = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    for _ in range(EPOCHS):
        model = model - LR * full.T @ (probabilities(model, x) - np.eye(CLASSES)[y]) / len(y)
    return model


class Twin(NamedTuple):
    """What the loop remembers of every client."""

    trained: list
    mixed: list
    affinity: np.ndarray
    uploaded: set


def twin_round(twin, cohort, samples, p):
    """One round in which every client that answered in the last is sent to every other."""
    trained, mixed, affinity = list(twin.trained), list(twin.mixed), twin.affinity.copy()
    for i in cohort:
        (fit_x, fit_y), (x, y) = samples[i]
        before = twin.mixed[i]
        gain = {}
        for j in [i, *sorted(twin.uploaded - {i})]:
            distance = np.sum(np.abs(twin.trained[j] - before) ** p) ** (1 / p)
            fall = mean_loss(before, x, y) - mean_loss(twin.trained[j], x, y)
            gain[j] = fall / distance if distance > 0 else 0.0
        positive = sum(max(value, 0) for value in gain.values())
        mixed[i] = before.copy()
        for j, value in gain.items():
            if positive:
                mixed[i] += max(value, 0) / positive * (twin.trained[j] - before)
            if sum(gain.values()):
                affinity[i, j] += value / abs(sum(gain.values()))
        if not len(y):
            mixed[i] = twin.trained[i]
        trained[i] = train(mixed[i], fit_x, fit_y)
    return Twin(trained, mixed, affinity, set(cohort))


def split(data):
    """Returns ((x, y) to train on, (x, y) held out) of each client: every fifth is held out."""
    x, y, order = (np.asarray(a) for a in (data.x, data.y, data.train.order))
    found = []
    for start, size in zip(np.asarray(data.train.start), np.asarray(data.train.size), strict=True):
        own = order[start : start + size]
        last = np.arange(size) % 5 == 4
        found.append([(x[own[part]], y[own[part]]) for part in (~last, last)])
    return found


@pytest.mark.parametrize("norm,p", [nightly("L1", 1), ("L2", 2)])
def test_rounds_equal_a_numpy_loop(five, softmax_task, whole_batches, norm, p):
    cohorts = [[0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [0, 1, 3, 4, 2], [3, 0, 2, 4, 1]]
    select = from_table(np.array(cohorts))
    algorithm = build(fedfomo, softmax_task, whole_batches, select, norm=norm, models=4)
    state, step = jax.jit(algorithm.init)(KEY, five), jax.jit(algorithm.round)
    initial = to_matrix(state.groups, 0)
    twin = Twin([initial] * CLIENTS, [initial] * CLIENTS, 0.1 * np.eye(CLIENTS), set())
    samples = split(five)
    assert [len(held[1]) for _, held in samples] == [size // 5 for size in SIZES]
    for cohort in cohorts:
        state = jax.device_get(step(KEY, state, five)[0])
        twin = twin_round(twin, cohort, samples, p)
        for models, expected in (
            (state.rows["trained"], twin.trained),
            (state.rows["mixed"], twin.mixed),
            (algorithm.serve(state).models, twin.mixed),
        ):
            found = [to_matrix(models, client) for client in range(CLIENTS)]
            np.testing.assert_allclose(found, expected, atol=2e-4)
        np.testing.assert_allclose(state.rows["affinity"], twin.affinity, atol=5e-3)
    same = np.add.outer(np.arange(CLIENTS), np.arange(CLIENTS)) % 2 == 0
    others = ~np.eye(CLIENTS, dtype=bool)
    affinity = twin.affinity
    assert affinity[same & others].mean() > affinity[~same].mean()  # it finds who is alike


@pytest.mark.nightly
@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
def test_a_model_that_is_not_finite_spoils_nobody_else(five, softmax_task, whole_batches, bad):
    algorithm = build(fedfomo, softmax_task, whole_batches, full_participation(), models=4)
    state = algorithm.init(KEY, five)
    for _ in range(2):
        state, _ = jax.jit(algorithm.round)(KEY, state, five)
    spoilt = jax.tree.map(lambda leaf: leaf.at[2].set(bad), state.rows["trained"])
    after, _ = jax.jit(algorithm.round)(KEY, state.put_rows({"trained": spoilt}), five)
    others = np.array([0, 1, 3, 4])
    assert after.rows["peer"].uploaded[others].all()
    for models in (after.rows["trained"], after.rows["mixed"]):
        for leaf in jax.tree.leaves(models):
            assert np.isfinite(leaf[others]).all()


@pytest.mark.nightly
def test_one_device_reads_the_models_of_others_where_they_lie(five, softmax_task, whole_batches):
    """No array has F models of each client of the round."""
    algorithm = build(fedfomo, softmax_task, whole_batches, full_participation(), models=3)
    state = jax.eval_shape(algorithm.init, KEY, five)
    text = jax.jit(algorithm.round).lower(KEY, state, five).compile().as_text()
    assert f"f32[3,{FEATURES},{CLASSES}]" in text
    assert f"f32[{CLIENTS},3,{FEATURES},{CLASSES}]" not in text


@pytest.mark.nightly
def test_clients_of_the_last_round_are_sent_and_no_others(five, softmax_task, whole_batches):
    select = from_table(np.array([[0, 1], [2, 3], [0, 2]]))
    algorithm = fedfomo(softmax_task, whole_batches, select, models=4)
    state, step = algorithm.init(KEY, five), jax.jit(algorithm.round)
    seen = []
    for _ in range(3):
        before = state
        state, _ = step(KEY, state, five)
        sent = spent(before, state)
        seen.append((sent.units_down, sent.units_up, sent.words_down, sent.words_up))
        changed = np.abs(state.rows["affinity"] - before.rows["affinity"]) > 0
        uploaded = np.flatnonzero(before.rows["peer"].uploaded)
        rows, columns = np.nonzero(changed)
        assert all(
            row == column or column in uploaded for row, column in zip(rows, columns, strict=True)
        )
    # nobody is sent in the first round, which ships the start; 0 and 1 to 2 and 3, and the start;
    # 2 and 3 to 0, and 3 to 2
    assert seen == [(2, 2, 0, 0), (6, 2, 0, 4), (3, 2, 0, 3)]


@pytest.mark.nightly
def test_bytes_are_those_of_the_closed_form(five, softmax_task, whole_batches):
    """M models down, one up and M words a participant, once everybody has answered."""
    algorithm = fedfomo(softmax_task, whole_batches, full_participation(), models=3)
    step = jax.jit(algorithm.round)
    before, _ = step(KEY, algorithm.init(KEY, five), five)
    after, _ = step(KEY, before, five)
    sent = spent(before, after)
    assert (sent.units_down, sent.units_up) == (3 * CLIENTS, CLIENTS)
    assert (sent.words_down, sent.words_up) == (0, 3 * CLIENTS)


@pytest.mark.nightly
def test_words_are_sent_with_updates_that_are_not_used(five, softmax_task, whole_batches):
    """They arrive with a model that is not finite, which nobody is sent."""
    usual, bad = (
        fedfomo(softmax_task, whole_batches, cfl.System(full_participation(), faults), models=3)
        for faults in (cfl.Faults(), cfl.Faults(nan=1.0))
    )
    before, _ = jax.jit(usual.round)(KEY, usual.init(KEY, five), five)
    after, info = jax.jit(bad.round)(KEY, before, five)
    assert info.fault_counts.nonfinite == CLIENTS and not after.rows["peer"].uploaded.any()
    assert spent(before, after).words_up == 3 * CLIENTS


@pytest.mark.nightly
def test_a_client_without_peers_is_sent_nothing_but_the_start(five, softmax_task, whole_batches):
    """0 three times, then 1, which is sent the start and the model of 0, then 0 again."""
    pick = from_table(np.array([[0], [0], [0], [1], [0]]))
    algorithm = fedfomo(softmax_task, whole_batches, pick, models=4)
    state, step, down = algorithm.init(KEY, five), jax.jit(algorithm.round), []
    for _ in range(5):
        before = state
        state, _ = step(KEY, state, five)
        down.append(spent(before, state).units_down)
    assert down == [1, 0, 0, 2, 1]


@pytest.mark.nightly
def test_a_client_that_never_answers_changes_nothing(five, softmax_task, whole_batches):
    silent = cfl.System(full_participation(), cfl.Faults(dropout=1.0))
    algorithm = fedfomo(softmax_task, whole_batches, silent, models=3)
    state = algorithm.init(KEY, five)
    after, _ = jax.jit(algorithm.round)(KEY, state, five)
    for one, other in (
        (state.groups, after.groups),
        (state.rows["mixed"], after.rows["mixed"]),
        (state.rows["affinity"], after.rows["affinity"]),
    ):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert not after.rows["peer"].uploaded.any()


def test_peers_are_the_best_known_or_drawn():
    affinity, eligible = jnp.array([0.5, 3.0, 1.0, 2.0, 9.0]), jnp.array([1, 1, 1, 1, 0]) > 0
    draw = jax.jit(pick_peers, static_argnums=4)
    assert draw(KEY, affinity, eligible, 0.0, 3).tolist() == [1, 3, 2]
    assert draw(KEY, affinity, eligible, 0.0, 5).tolist() == [1, 3, 2, 0, 5]
    found = {tuple(draw(jax.random.key(i), affinity, eligible, 1.0, 2).tolist()) for i in range(80)}
    assert len(found) == 12 and all(a != b and 4 not in (a, b) for a, b in found)
    tied = {int(draw(jax.random.key(i), 0 * affinity, eligible, 0.0, 1)[0]) for i in range(40)}
    assert tied == {0, 1, 2, 3}


def test_held_out_samples_are_a_fifth_and_the_others_are_trained_on(toy):
    fit = hold_out_samples(toy, 0.2)
    held = take_held_out(fit)
    sizes = np.asarray(toy.train.size)
    assert held.train.size.tolist() == (sizes // 5).tolist()
    for client in range(toy.num_clients):
        parts = []
        for view in (toy.train, fit.train, held.train):
            start, size = int(view.start[client]), int(view.size[client])
            parts.append(np.asarray(view.order)[start : start + size])
        whole, ours, theirs = parts
        assert sorted([*ours, *theirs]) == sorted(whole)
        assert theirs.tolist() == whole[4::5].tolist()


@pytest.mark.nightly
def test_clients_of_a_stream_hold_out_samples_of_their_own(toy):
    """Hidden samples stay behind those that are shown, in both parts."""
    shift = stream.bucket(intervals=6, period=1, retained=2)
    data, memory = jax.jit(shift.init)(jax.random.key(1), toy)
    met = jnp.ones(toy.num_clients, bool)
    now, _, _ = jax.jit(shift.apply)(jax.random.key(1), 0, data, memory, met)
    fit = hold_out_samples(now, 0.2)
    held = take_held_out(fit)
    assert (now.train.size < toy.train.size).any()
    np.testing.assert_array_equal(fit.train.size + held.train.size, now.train.size)
    for client in range(toy.num_clients):
        for view in (fit.train, held.train):
            start, size = int(view.start[client]), int(view.size[client])
            rows = view.order[start : start + size]
            assert (now.owner[rows] == client).all()


def test_settings_that_are_not_allowed(softmax_task, whole_batches):
    with pytest.raises(InputError, match=r"algorithm\.models=0: must be"):
        fedfomo(softmax_task, whole_batches, full_participation(), models=0)
