"""Metrics against scikit-learn and numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once
from sklearn.metrics import adjusted_rand_score, f1_score

from fedjax_cfl.simulation import evaluate
from fedjax_cfl.tasks import classification, sums
from fedjax_cfl.tasks.targets import Predictions

CLIENTS, CLASSES = 25, 5
PER_CLIENT = jax.jit(classification.measure, static_argnums=(1, 2))
SUMMARISE = jax.jit(classification.summarize)
ARI = jax.jit(evaluate.ari)


@pytest.fixture(scope="module")
def samples():
    """400 samples of 25 clients with few classes each; some belong to nobody, and
    client 3 has none.
    """
    rng = np.random.default_rng(0)
    owner = rng.integers(-1, CLIENTS, 400)
    owner[owner == 3] = -1
    y = (owner + rng.integers(0, 2, 400)) % CLASSES
    prediction = np.where(rng.random(400) < 0.6, y, rng.integers(0, CLASSES, 400))
    return owner, y, prediction, rng.random(400).astype(np.float32)


def summary(*measured):
    """Returns the metrics, computed by a program of JAX and by NumPy alike."""
    program, plain = SUMMARISE(*measured), classification.summarize(*jax.device_get(measured))
    assert set(program) == set(plain)
    for name, value in plain.items():
        assert isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0
        np.testing.assert_allclose(program[name], value, rtol=1e-6, err_msg=name)
    return plain


def rand_index(a, b, valid):
    """Returns the adjusted Rand index, computed by a program of JAX and by NumPy alike."""
    plain = evaluate.ari(np.asarray(a), np.asarray(b), np.asarray(valid))
    np.testing.assert_allclose(
        ARI(jnp.asarray(a), jnp.asarray(b), jnp.asarray(valid)), plain, atol=1e-6
    )
    return plain


def measure(samples):
    owner, y, prediction, loss = samples
    seen = Predictions(*map(jnp.asarray, (prediction, loss, y, owner)))
    return PER_CLIENT(seen, CLIENTS, CLASSES)


def macro_f1(y, prediction):
    labels = np.union1d(y, prediction)
    return f1_score(y, prediction, average="macro", zero_division=0, labels=labels)


def test_per_client_equals_scikit_learn(samples):
    owner, y, prediction, loss = samples
    got, _ = measure(samples)
    for k in range(CLIENTS):
        mine = owner == k
        assert got.samples[k] == mine.sum()
        if mine.any():
            np.testing.assert_allclose(got.accuracy[k], (y == prediction)[mine].mean(), rtol=1e-6)
            np.testing.assert_allclose(got.loss[k], loss[mine].mean(), rtol=1e-5)
            np.testing.assert_allclose(got.f1[k], macro_f1(y[mine], prediction[mine]), atol=1e-6)
    assert np.isnan([got.accuracy[3], got.loss[3], got.f1[3]]).all()


def test_summary_counts_only_clients_with_samples(samples):
    owner, y, prediction, loss = samples
    got = summary(*measure(samples))
    kept = owner >= 0
    clients = np.unique(owner[kept])
    size = np.array([(owner == k).sum() for k in clients])
    accuracy = np.array([(y == prediction)[owner == k].mean() for k in clients])
    f1 = np.array([macro_f1(y[owner == k], prediction[owner == k]) for k in clients])
    expected = {
        "accuracy": (y == prediction)[kept].mean(),
        "macro_accuracy": accuracy.mean(),
        "worst10_accuracy": np.sort(accuracy)[: len(clients) // 10].mean(),
        "loss": loss[kept].mean(),
        "weighted_macro_f1": np.average(f1, weights=size),
        "macro_f1": f1.mean(),
        "pooled_micro_f1": f1_score(y[kept], prediction[kept], average="micro"),
        "pooled_macro_f1": macro_f1(y[kept], prediction[kept]),
    }
    assert len(clients) // 10 == 2 and set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("clients, worst", [(20, 0.025), (5, 0.75)])
def test_worst_tenth_is_at_least_one_client(clients, worst):
    accuracy = (19 - jnp.arange(CLIENTS)) / 20
    table = classification.ClientMetrics(
        (jnp.arange(CLIENTS) < clients).astype(jnp.int32), accuracy, accuracy, accuracy
    )
    np.testing.assert_allclose(
        summary(table, jnp.ones((2, CLASSES), jnp.int32))["worst10_accuracy"], worst
    )


def test_without_samples_there_is_no_number(samples):
    _, *rest = samples
    got = summary(*measure((np.full(400, -1), *rest)))
    assert all(np.isnan(value) for value in got.values())


def test_hand_numbers_of_one_client():
    y, prediction = jnp.asarray([0, 0, 1, 2]), jnp.asarray([0, 1, 1, 3])
    got, counts = PER_CLIENT(Predictions(prediction, jnp.ones(4), y, jnp.zeros(4, int)), 1, CLASSES)
    # Class 0: 2/3, class 1: 2/3, classes 2 and 3: 0, class 4 is in neither.
    np.testing.assert_allclose(got.f1, [1 / 3], rtol=1e-6)
    np.testing.assert_allclose(got.accuracy, [0.5])
    assert counts.tolist() == [[1, 1, 0, 0, 0], [3, 3, 1, 1, 0]]


@pytest.mark.nightly
def test_jit_equals_no_jit(samples):
    owner, y, prediction, loss = samples
    seen = Predictions(*map(jnp.asarray, (prediction, loss, y, owner)))
    plain = classification.measure(seen, CLIENTS, CLASSES)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain, measure(samples))


@pytest.mark.parametrize("clients", [12, 5000])
@pytest.mark.parametrize("agreement", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_ari_equals_scikit_learn(clients, agreement):
    rng = np.random.default_rng(clients)
    a = rng.choice(4, clients, p=[0.7, 0.1, 0.1, 0.1])
    b = np.where(rng.random(clients) < agreement, 5 - a, rng.integers(0, 6, clients))
    valid = rng.random(clients) < 0.9
    got = rand_index(a, b, valid)
    np.testing.assert_allclose(got, adjusted_rand_score(a[valid], b[valid]), atol=1e-6)


def test_ari_is_accurate_on_nearly_trivial_partitions():
    a = np.zeros(5000, int)
    b = a.copy()
    a[:3], b[1:4] = 1, 1
    got = rand_index(a, b, np.ones(5000, bool))
    np.testing.assert_allclose(got, adjusted_rand_score(a, b), atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("clients", [50_000, 1_000_000])
@pytest.mark.parametrize("agreement", [0.0, 0.7])
def test_ari_is_right_for_a_million_clients(clients, agreement):
    """Whose pairs int32 cannot count."""
    rng = np.random.default_rng(clients)
    a = rng.integers(0, 4, clients)
    b = np.where(rng.random(clients) < agreement, a, rng.integers(0, 6, clients))
    expected = adjusted_rand_score(a, b)
    assert expected < 0.6
    everybody = np.ones(clients, bool)
    np.testing.assert_allclose(evaluate.ari(a, b, everybody), expected, atol=1e-9)
    both = jax.jit(jax.vmap(evaluate.ari))(*map(jnp.asarray, ([a, b], [b, b], [everybody] * 2)))
    np.testing.assert_allclose(both, [expected, 1], atol=1e-6)


@pytest.mark.nightly
def test_ari_of_a_group_for_each_of_a_million_clients():
    """No table of all pairs of labels is built."""
    alone = np.arange(1_000_000)
    half = alone // 2
    np.testing.assert_allclose(rand_index(alone, half, alone >= 0), 0, atol=1e-6)
    np.testing.assert_allclose(rand_index(alone, alone, alone >= 0), 1)


@pytest.mark.parametrize(
    "merged, expected",
    [
        ({}, 1.0),
        ({1: 0}, 0.701),
        ({1: 0, 3: 2}, 0.484),
        ({1: 0, 2: 0}, 0.319),
        ({1: 0, 2: 0, 3: 0}, 0),
    ],
)
def test_ari_of_four_groups_of_twelve(merged, expected):
    truth = np.arange(48) // 12
    found = np.array([merged.get(g, g) for g in truth])
    np.testing.assert_allclose(rand_index(truth, found, np.ones(48, bool)), expected, atol=5e-4)


def test_ari_of_trivial_partitions():
    one, alone, valid = jnp.zeros(6, int), jnp.arange(6), jnp.ones(6, bool)
    assert rand_index(one, one, valid) == 1
    assert rand_index(alone, alone, valid) == 1
    assert rand_index(one, alone, valid) == 0
    assert rand_index(one, alone, valid.at[1:].set(False)) == 1
    assert np.isnan(rand_index(one, one, ~valid))
    assert np.isnan(rand_index(one, one - 1, valid))


@pytest.mark.nightly
def test_a_client_may_have_more_samples_than_float32_counts():
    """2^24 ones are as many as a float32 adds up one by one."""
    many = 2**24 + 2**21
    owner, ones = jnp.zeros(many, jnp.int32), jnp.ones(many, bool)
    table, _ = PER_CLIENT(Predictions(owner, 0.5 * ones, owner, owner), 2, 2)
    np.testing.assert_allclose([table.accuracy[0], table.loss[0]], [1, 0.5], rtol=1e-6)


def test_means_by_group_by_hand():
    """Clients without weight, without a group, or of a group that does not exist do not count."""
    values = np.array([1.0, 3.0, np.nan, 5.0, 7.0, 9.0], np.float32)
    weights, groups = np.array([1, 3, 0, 2, 1, 1]), np.array([0, 0, 0, 2, -1, 3])
    for xp in (np, jnp):
        found = sums.means_by_group(*map(xp.asarray, (values, weights, groups)), 3)
        np.testing.assert_allclose(found, [2.5, np.nan, 5.0])


def test_losses_of_many_samples_are_added_up_in_parts(monkeypatch):
    """In one float32, 64 losses of 1 would be lost beside one of 2^24."""
    monkeypatch.setattr(sums, "MAX_SUMMED", 16)
    zero = jnp.zeros(65, jnp.int32)
    loss = jnp.ones(65).at[0].set(2.0**24)
    table, _ = at_once(classification.measure, Predictions(zero, loss, zero, zero), 1, 2)
    np.testing.assert_allclose(table.loss[0] * 65, 2.0**24 + 64, rtol=0, atol=17)
