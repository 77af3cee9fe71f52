"""Flash: its server's steps by hand, a slow twin of whole rounds, and what a drift does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import matrix, nightly, one_line, spent, with_execution
from test_personal import play
from test_reference import KEY, batches_of, cohort_of, mean, models_of, passes, trained

from fedjax_cfl import algorithms
from fedjax_cfl.algorithms.flash import follow_drift
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.system import select

PICK = select.uniform(6)


def test_steps_by_hand():
    """One number a coordinate; the second is too large a rise, the third never moves."""
    server = follow_drift(0.1, tau=1e-3)
    update = {"w": jnp.array([-0.05, -2.0, 0.0])}
    step, state = server.update(update, server.init(update))
    expected = [0.1 * 0.005 / (0.002525 + 1e-3), 0.1 * 0.2 / 1e-3, 0.0]
    np.testing.assert_allclose(step["w"], expected, rtol=1e-4)
    np.testing.assert_allclose(state.rise["w"], [0.002475, 3.96, 0.0], rtol=1e-5)
    memory, state, rng = (np.zeros(5),) * 3, server.init(jnp.zeros(5)), np.random.default_rng(0)
    for g in 0.1 * rng.normal(size=(6, 5)):
        step, state = server.update(jnp.float32(-g), state)
        expected, memory = twin_step(memory, g, 0.1)
        np.testing.assert_allclose(step, expected, rtol=1e-3)


def twin_step(memory, g, lr, b1=0.9, b2=0.99, tau=1e-3):
    m, v, d = memory
    m, old, v = b1 * m + (1 - b1) * g, v, b2 * v + (1 - b2) * g**2
    with np.errstate(invalid="ignore"):
        b3 = np.nan_to_num(np.abs(old) / (np.abs(g**2 - v) + np.abs(old)))
    d = b3 * d + (1 - b3) * (g**2 - v)
    return lr * m / (np.maximum(np.sqrt(v) - d, 0) + tau), (m, v, d)


@pytest.mark.parametrize("width", [1, nightly(4)])
def test_rounds_equal_a_slow_twin(toy, linear, local, width):
    one = with_execution(local, width=width)
    states = play(algorithms.flash(linear, one, PICK, server_lr=0.02), toy, 4)
    model = models_of(states[0].groups)[0]
    memory = [(0.0 * part, 0.0 * part, 0.0 * part) for part in model]
    for number, state in enumerate(states[1:]):
        key = derive_key(KEY, TRAIN, number)
        plans = [passes(key, toy, k, local.epochs) for k in cohort_of(PICK, number, toy)]
        plans = [batches_of(epochs, local.batch_size) for epochs in plans]
        step = mean([trained(model, toy, plan, local.lr) for plan in plans]) + -1.0 * model
        moves = [twin_step(old, g, 0.02) for old, g in zip(memory, step, strict=True)]
        memory = [new for _, new in moves]
        model = type(model)(*(p + move for p, (move, _) in zip(model, moves, strict=True)))
        np.testing.assert_allclose(models_of(state.groups)[0].flat(), model.flat(), atol=2e-4)
    sent = spent(states[0], states[-1])
    assert sent == type(sent)(6 * 4, 6 * 4, 0, 0)


@pytest.mark.nightly
def test_after_a_drift_steps_grow(toy, linear, local):
    """Within three rounds the mean factor of a step is larger than in the three before."""
    algorithm = algorithms.flash(linear, local, select.uniform(12), server_lr=0.01)
    one_round, state = jax.jit(algorithm.round), jax.jit(algorithm.init)(KEY, toy)
    found = []
    for number in range(24):
        swapped = toy.replace(y=toy.num_classes - 1 - toy.y) if number >= 18 else toy
        state = one_round(KEY, state, swapped)[0]
        v, d = matrix(state.server.second), matrix(state.server.rise)
        found.append((1 / (np.maximum(np.sqrt(v) - d, 0) + 1e-3)).mean())
    assert max(found[18:21]) > 1.2 * max(found[15:18])


def test_values_that_are_not_allowed_are_refused_in_one_line(linear, local):
    for name, value in {"server_lr": 0.0, "b1": 1.0, "b2": -0.1, "tau": 0.0}.items():
        one_line(f"algorithm.{name}", algorithms.flash, linear, local, PICK, **{name: value})
