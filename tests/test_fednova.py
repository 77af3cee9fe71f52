"""FedNova: a slow twin in NumPy, lengths in closed form, and when it is FedAvg."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SIZES, matrix, nightly, one_line, spent, with_execution
from test_personal import play
from test_reference import KEY, batches_of, cohort_of, gradient, models_of, passes

import fedjax_cfl as cfl
from fedjax_cfl import algorithms
from fedjax_cfl.algorithms.fednova import find_length, mean_of_normalized
from fedjax_cfl.client.local import full_work
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.method import Round
from fedjax_cfl.personal import ditto, scaffold
from fedjax_cfl.system import select
from fedjax_cfl.types import Upload

PICK = select.uniform(6)


def test_lengths_by_hand():
    """Those of the closed forms, and of both terms, where momentum is of both gradients."""
    lengths = [(0.9, 0.0, 13.1441), (0.0, 0.05, 4.524381), (0.9, 0.05, 11.6569), (0.0, 0.0, 5.0)]
    for rho, pull, length in lengths:
        np.testing.assert_allclose(find_length(np.int32(5), rho, pull), length, rtol=1e-5)


def twin(model, data, local, mu, beta, rounds):
    """Returns the models after each round: Wang et al. 2020, eq. 8, and 2 for the tau that is
    effective with a proximal term. Step sizes fall from round to round.
    """
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    buffer, found = 0.0 * model, []
    for number in range(rounds):
        normalized, lengths, taken, counts = [], [], [], []
        lr = local.lr / (1 + number)
        for client in cohort_of(PICK, number, data):
            epochs = passes(derive_key(KEY, TRAIN, number), data, client, local.epochs)
            trained, velocity, far, speed = model, 0.0 * model, 0.0, 0.0
            batches = batches_of(epochs, local.batch_size)
            for batch in batches:
                pull = mu * (trained + -1.0 * model)
                slope = gradient(trained, x[batch], y[batch]) + pull
                velocity = local.momentum * velocity + slope
                speed = local.momentum * speed + 1.0 - mu * lr * far
                trained, far = trained + -lr * velocity, far + speed
            normalized.append((1.0 / (lr * far)) * (model + -1.0 * trained))
            lengths.append(far)
            taken.append(len(batches))
            counts.append(SIZES[client])
        shares = np.array(counts) / sum(counts)
        effective = shares @ (taken if mu else lengths)
        step = 0.0 * model
        for share, direction in zip(shares, normalized, strict=True):
            step = step + float(share * effective) * direction
        buffer = beta * buffer + -lr * step
        model = model + buffer
        found.append(model)
    return found


@pytest.mark.parametrize(
    ("rho", "mu", "beta", "width"),
    [(0.5, 0.8, 0.3, 1), nightly(0.5, 0.0, 0.0, 4), nightly(0.0, 0.0, 0.3, 1)],
)
def test_rounds_equal_a_slow_twin(toy, linear, local, rho, mu, beta, width):
    own = with_execution(local, width=width).replace(momentum=rho)
    own = own.replace(schedule=lambda round: 1 / (1 + round))
    algorithm = algorithms.fednova(linear, own, PICK, mu=mu, server_momentum=beta)
    states = play(algorithm, toy)
    rounds = len(states) - 1
    expected = twin(models_of(states[0].groups)[0], toy, own, mu, beta, rounds)
    for state, model in zip(states[1:], expected, strict=True):
        np.testing.assert_allclose(models_of(state.groups)[0].flat(), model.flat(), atol=3e-5)
    sent, models = spent(states[0], states[-1]), 6 * rounds
    assert (sent.units_down, sent.units_up, sent.words_down) == (models, models, 0)
    assert sent.words_up == models * (2 if mu else 1)


@pytest.mark.nightly
def test_with_equal_steps_it_is_fedavg(toy, linear, local):
    """With momentum, too; and where steps differ it is not. Ditto's own steps do not count."""
    for changes, same in (({"steps": 3}, True), ({"personal": ditto()}, False)):
        one = local.replace(momentum=0.5, **changes)
        plain, nova = (
            matrix(play(method(linear, one, PICK), toy, 2)[-1].groups)
            for method in (algorithms.fedavg, algorithms.fednova)
        )
        gap = np.abs(plain - nova).max()
        assert gap < 1e-5 if same else gap > 1e-3, gap
    alone = play(algorithms.fednova(linear, local.replace(momentum=0.5), PICK), toy, 2)
    np.testing.assert_allclose(matrix(alone[-1].groups), nova, atol=1e-5)


def test_a_mean_by_hand():
    """In two groups of three; one answer is not used. Running statistics are averaged as ever."""
    delta = {"w": jnp.array([[2.0], [6.0], [9.0], [5.0]]), "batch_stats": jnp.arange(4.0)[:, None]}
    weight = jnp.array([1.0, 3.0, 0.0, 2.0])
    extra = jnp.array([2.0, 3.0, 0.0, 5.0]), jnp.array([4.0, 8.0, 0.0, 5.0])
    upload = Upload(delta, weight, weight, weight, jnp.arange(4), jnp.zeros(4), extra=extra)
    state = SimpleNamespace(active=jnp.ones(3, bool))
    work = full_work(jnp.array([0, 0, 0, 2]))
    for by_steps, first in ((False, (1 / 4 + 3 / 4 * 2) * 11 / 4), (True, (1 / 4 + 3 / 2) * 7)):
        aggregate = mean_of_normalized(by_steps)
        step, mass = aggregate(Round(None, state, None, None, work, upload))
        np.testing.assert_array_equal(mass, [4, 0, 2])
        np.testing.assert_allclose(step["w"][:, 0], [first, 0.0, 5.0], rtol=1e-6)
        np.testing.assert_allclose(step["batch_stats"][:, 0], [3 / 4, 0.0, 3.0], rtol=1e-6)


@pytest.mark.nightly
def test_lost_answers_count_for_nothing(toy, linear, local):
    """Neither in the means nor in bytes; with none at all the model stays."""
    for dropout in (0.5, 1.0):
        system = cfl.System(PICK, cfl.Faults(dropout=dropout))
        algorithm = algorithms.fednova(linear, local, system)
        before = jax.jit(algorithm.init)(KEY, toy)
        after, info = jax.jit(algorithm.round)(KEY, before, toy)
        dropped, sent = int(info.fault_counts.dropped), spent(before, after)
        assert dropped and sent.units_up == sent.words_up == 6 - dropped
        assert np.isfinite(matrix(after.groups)).all()
        still = (matrix(after.groups) == matrix(before.groups)).all()
        assert still == (int(info.clients) == 0)


def test_what_does_not_fit_is_refused_in_one_line(linear, local):
    nova = algorithms.fednova
    one_line("algorithm.mu=5.0: times local.lr=0.2 it is 1,", nova, linear, local, PICK, mu=5.0)
    one_line("algorithm.mu=-1.0", nova, linear, local, PICK, mu=-1.0)
    one_line("algorithm.server_momentum", nova, linear, local, PICK, server_momentum=1.0)
    corrected = local.replace(personal=scaffold())
    one_line("personal=scaffold: changes the steps", nova, linear, corrected, PICK)
