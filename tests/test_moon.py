"""MOON: its term by hand, a slow twin in NumPy of whole rounds, and what it leaves as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    SIZES,
    build,
    matrix,
    nightly,
    one_line,
    spent,
    stop_and_go_on,
    with_execution,
)
from scipy.special import expit, log_softmax
from test_personal import play
from test_reference import KEY, batches_of, cohort_of, passes

from fedjax_cfl import algorithms
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.personal import moon
from fedjax_cfl.personal.moon import cosine
from fedjax_cfl.system import select

PICK, MU, TEMPERATURE, L2 = select.uniform(6), 0.8, 0.5, 0.001


def test_cosines_by_hand():
    """Of a row of zeros it is 0, and so is its slope."""
    a, b = jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.array([[4.0, 3.0], [1.0, 0.0]])
    np.testing.assert_allclose(cosine(a, b), [24 / 25, 0.0], rtol=1e-6)
    slope = jax.grad(lambda a: cosine(a, a).sum())(a)
    np.testing.assert_allclose(slope, np.zeros((2, 2)), atol=1e-6)


def forward(model, x):
    h = x @ model["hidden_0"]["kernel"] + model["hidden_0"]["bias"]
    return h, np.maximum(h, 0)


def slope_of_cosine(z, c):
    """The cosine [B] of rows, and its gradient by z; 0 where a row is."""
    long, wide = np.linalg.norm(z, axis=1, keepdims=True), np.linalg.norm(c, axis=1, keepdims=True)
    both = (long > 0) & (wide > 0)
    long, wide = np.where(both, long, 1), np.where(both, wide, 1)
    s = np.where(both, (z * c).sum(1, keepdims=True) / long / wide, 0)
    return s[:, 0], np.where(both, c / long / wide - s * z / long**2, 0)


def gradient(model, received, previous, x, y):
    """The gradient of the mean of cross-entropy and MOON's term, and of 0.001 sum(kernel^2)."""
    h, z = forward(model, x)
    logits = z @ model["head"]["kernel"] + model["head"]["bias"]
    error = np.exp(log_softmax(logits, axis=1))
    error[np.arange(len(y)), y] -= 1
    back = error @ model["head"]["kernel"].T
    if previous is not None:
        s, up = slope_of_cosine(z, forward(received, x)[1])
        t, away = slope_of_cosine(z, forward(previous, x)[1])
        back = back + MU * (expit((t - s) / TEMPERATURE) / TEMPERATURE)[:, None] * (away - up)
    back, error = back * (h > 0) / len(y), error / len(y)
    found = {
        "hidden_0": {"kernel": x.T @ back, "bias": back.sum(0)},
        "head": {"kernel": z.T @ error, "bias": error.sum(0)},
    }
    for name, layer in found.items():
        layer["kernel"] = layer["kernel"] + 2 * L2 * model[name]["kernel"]
    return found


@pytest.mark.parametrize(("width", "momentum"), [(1, 0.5), nightly(4, 0.0)])
def test_rounds_equal_a_slow_twin(toy, mlp, local, width, momentum):
    own = with_execution(local, width=width).replace(
        momentum=momentum, personal=moon(mu=MU, temperature=TEMPERATURE)
    )
    states = play(algorithms.fedavg(mlp, own, PICK), toy, 6)
    server = jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), states[0].groups)
    previous, met = {}, 0
    x, y = np.asarray(toy.x, np.float64), np.asarray(toy.y)
    for number in range(6):
        answers, ids = [], cohort_of(PICK, number, toy)
        for k in ids:
            model, velocity = server, jax.tree.map(np.zeros_like, server)
            epochs = passes(derive_key(KEY, TRAIN, number), toy, k, local.epochs)
            for batch in batches_of(epochs, local.batch_size):
                g = gradient(model, server, previous.get(k), x[batch], y[batch])
                velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, g)
                model = jax.tree.map(lambda p, v: p - local.lr * v, model, velocity)
            met += k in previous
            previous[k] = model
            answers.append(model)
        weights = [SIZES[k] for k in ids]
        server = jax.tree.map(lambda *all, w=weights: np.average(all, axis=0, weights=w), *answers)
        mine = jax.tree.map(lambda leaf: leaf[0], states[number + 1].groups)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), mine, server)
    rows = states[-1].rows["MOON"].values
    np.testing.assert_array_equal(rows.known, [k in previous for k in range(len(SIZES))])
    for k, model in previous.items():
        mine = jax.tree.map(lambda leaf, k=k: leaf[k], rows.model)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), mine, model)
    assert met > 10
    sent = spent(states[0], states[-1])
    assert sent == type(sent)(6 * 6, 6 * 6, 0, 0)


@pytest.mark.nightly
def test_without_the_term_it_is_the_method_below(toy, mlp, local):
    """And all but so with a temperature at which cosines do not matter."""
    direct = with_execution(local, first_layer="direct")
    alone = play(build(algorithms.ifca, mlp, direct, PICK, m=2), toy)[-1]
    for method in (moon(mu=0.0), moon(temperature=1e9)):
        one = direct.replace(personal=method)
        state = play(build(algorithms.ifca, mlp, one, PICK, m=2), toy)[-1]
        np.testing.assert_allclose(matrix(state.groups), matrix(alone.groups), atol=1e-5)


REFUSED = {
    "no such layer": (
        {"layer": "hed"},
        algorithms.fedavg,
        "the model has no 'hed' (did",
    ),
    "another way to train": ({}, algorithms.fedsgd, "personal=moon: changes the steps"),
    "a pull away": ({"mu": -1.0}, algorithms.fedavg, "personal.mu=-1.0"),
    "no temperature": ({"temperature": 0.0}, algorithms.fedavg, "personal.temperature=0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(mlp, local, case):
    settings, factory, says = REFUSED[case]
    one_line(says, lambda: factory(mlp, local.replace(personal=moon(**settings)), PICK))


def test_a_model_without_features_is_refused(linear, local):
    says = "personal=moon: head is the model's only layer"
    one_line(says, algorithms.fedavg, linear, local.replace(personal=moon()), PICK)


@pytest.mark.nightly
def test_a_run_that_was_stopped_is_one_that_was_not(fedjax_cfl):
    line = "algorithm=ifca model=mlp personal=moon clients_per_round=6 dataset.clients=12"
    stop_and_go_on(fedjax_cfl, line)
