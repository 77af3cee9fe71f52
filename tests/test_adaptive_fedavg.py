"""Adaptive-FedAvg: its step sizes against numbers worked out by hand and a loop of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import matrix
from test_reference import batches_of, mean, models_of, passes, trained

from fedjax_cfl.algorithms.adaptive_fedavg import Movement, adaptive_fedavg, move_on
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.system import select
from fedjax_cfl.system.reports import count_to_int

KEY = jax.random.key(5)
COHORT = select.uniform(6)


def scales(models, harmonic):
    """Returns the scale after each model, one number each."""
    zero = jnp.zeros(())
    memory, found = Movement(jnp.int32(0), {"w": jnp.zeros((1, 1))}, zero, zero, jnp.ones(())), []
    for model in models:
        memory = move_on(memory, {"w": jnp.full((1, 1), float(model))}, 0.5, harmonic)
        found.append(float(memory.scale))
    return found


def test_step_sizes_by_hand():
    np.testing.assert_allclose(scales([1, 2, 2, 5], True), [1, 1 / 2, 0.236584, 1], rtol=1e-5)
    np.testing.assert_allclose(scales([1, 2, 2, 5], False), [1, 1, 0.709751, 1], rtol=1e-5)
    # a model that stands still: ratios 1, 1/3, 3/7, 7/15, which go to 1/2
    ratios, q, want = [1, 1 / 3, 3 / 7, 7 / 15, 15 / 31], 0.0, []
    for t, ratio in enumerate(ratios, 1):
        q = q / 2 + ratio / 2
        want.append(q / (1 - 0.5**t))
    np.testing.assert_allclose(scales([1] * 5, False), want, rtol=1e-5)
    assert scales([0, 0, 1], False) == [1, 1, 1]  # a ratio over nothing counts as 1


def twin(models, lr, beta=0.5):
    """Returns the step sizes after each of the models [t, P], one after another."""
    mean, spread, q, found = np.zeros(models.shape[1]), 0.0, 0.0, []
    for t, model in enumerate(models.astype(np.float64), 1):
        past = mean / (1 - beta ** (t - 1)) if t > 1 else mean
        last = spread / (1 - beta ** (t - 1)) if t > 1 else 0.0
        mean = beta * mean + (1 - beta) * model
        spread = beta * spread + (1 - beta) * np.mean((model - past) ** 2)
        now = spread / (1 - beta**t)
        q = beta * q + (1 - beta) * (now / last if t > 1 and last >= 1e-12 else 1.0)
        found.append(min(lr, lr * q / (1 - beta**t) / t))
    return found


def test_rounds_are_those_of_fedavg_with_the_twin_s_step_sizes(toy, linear, local):
    """A round without an answer, the third one, changes nothing."""
    algorithm = adaptive_fedavg(linear, local, COHORT)
    step_once, state = jax.jit(algorithm.round), jax.device_get(jax.jit(algorithm.init)(KEY, toy))
    empty = toy.replace(train=toy.train.replace(size=jnp.zeros_like(toy.train.size)))
    models, step, sent = [], local.lr, 0
    for number in range(6):
        key, solutions, sizes = derive_key(KEY, TRAIN, number), [], []
        ids = COHORT.draw(derive_key(KEY, SELECT, number), number, toy.train.size).tolist()
        for client in [client for client in ids if toy.train.size[client]]:
            plan = batches_of(passes(key, toy, client, local.epochs), local.batch_size)
            solutions.append(trained(models_of(state.groups)[0], toy, plan, step))
            sizes.append(int(toy.train.size[client]))
        want = mean(solutions, sizes)
        if number == 2:
            idle = step_once(KEY, state, empty)[0]
            np.testing.assert_array_equal(idle.memory.scale, state.memory.scale)
            assert int(idle.memory.updates) == 2
        state = jax.device_get(step_once(KEY, state, toy)[0])
        found = models_of(state.groups)[0].flat()
        np.testing.assert_allclose(found, want.flat(), rtol=1e-4, atol=1e-5)
        models.append(matrix(state.groups)[0])
        step = float(twin(np.stack(models), local.lr)[-1])
        np.testing.assert_allclose(local.lr * state.memory.scale, step, rtol=1e-3)
        sent += 6
    assert count_to_int(state.traffic.words_down) == sent
    assert count_to_int(state.traffic.units_down) == sent


@pytest.mark.nightly
def test_after_a_drift_steps_grow(toy, linear, local):
    algorithm = adaptive_fedavg(linear, local, select.uniform(12), harmonic=False)
    one_round, state = jax.jit(algorithm.round), jax.jit(algorithm.init)(KEY, toy)
    found = []
    for number in range(24):
        swapped = toy.replace(y=toy.num_classes - 1 - toy.y) if number >= 16 else toy
        state = one_round(KEY, state, swapped)[0]
        found.append(float(state.memory.scale))
    assert max(found[12:16]) < 0.9 and min(found[16:20]) == 1.0


def test_what_it_cannot_be_used_with_is_refused(linear, local):
    scheduled = local.replace(schedule=lambda round: 0.5)
    with pytest.raises(InputError, match="schedule: the server of Adaptive-FedAvg picks"):
        adaptive_fedavg(linear, scheduled, COHORT)
    with pytest.raises(InputError, match=r"algorithm\.beta"):
        adaptive_fedavg(linear, local, COHORT, beta=1.0)
