"""Clients that train on from their group's model before they use it, Per-FedAvg and fine-tuning:
slow twins in NumPy, who is tested on what, and that nothing is kept or sent for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    CLASSES,
    SIZES,
    at_once,
    build,
    matrix,
    nightly,
    one_line,
    others_nightly,
    run_in_grid_and_alone,
    spent,
    stop_and_go_on,
    with_execution,
)
from test_personal import play
from test_reference import (
    KEY,
    batches_of,
    cross_entropy,
    gradient,
    mean,
    models_of,
    passes,
    samples,
    trained,
)

import fedjax_cfl as cfl
from fedjax_cfl import algorithms
from fedjax_cfl.data import drift
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.personal import fine_tune, per_fedavg
from fedjax_cfl.runs.callbacks import copy_present_models
from fedjax_cfl.simulation.callback import Snapshot
from fedjax_cfl.simulation.evaluate import evaluate_all, used_models
from fedjax_cfl.simulation.rounds import Setup, init_data_state
from fedjax_cfl.system import select

COHORT, ROUNDS, ALPHA, CLIENTS = 6, 3, 0.3, len(SIZES)


def curve(model, direction, x, y, width=1e-4):
    """The Hessian of the loss times a direction."""
    ahead, behind = (gradient(model + far * direction, x, y) for far in (width, -width))
    return (1 / (2 * width)) * (ahead + -1.0 * behind)


def meta_trained(model, data, batches, lr, alpha, second_order):
    """The client's loop of Per-FedAvg: batches in pairs, or in threes."""
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    taken = 3 if second_order else 2
    filled = batches + batches[: -len(batches) % taken]
    filled += filled[: -len(filled) % taken]  # fewer batches than missing
    for first in range(0, len(filled), taken):
        here, there, *rest = filled[first : first + taken]
        adapted = model + -alpha * gradient(model, x[here], y[here])
        direction = gradient(adapted, x[there], y[there])
        for batch in rest:
            direction = direction + -alpha * curve(model, direction, x[batch], y[batch])
        model = model + -lr * direction
    return model


def play_twin(groups, data, pick, local, rounds, train):
    """IFCA, with m = 1 FedAvg whose means are unweighted; returns models and who is where."""
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    # the only group there is, is also that of a client without training samples
    place = [-1 if len(groups) > 1 or size else 0 for size in SIZES]
    for number in range(rounds):
        ids = pick.draw(derive_key(KEY, SELECT, number), number, data.train.size).tolist()
        ids, answers = [k for k in ids if SIZES[k]], {}
        for k in ids:
            held = samples(data, k)
            losses = [cross_entropy(model, x[held], y[held]) for model in groups]
            place[k] = int(np.argmin(losses))
            epochs = passes(derive_key(KEY, TRAIN, number), data, k, local.epochs)
            answers[k] = train(groups[place[k]], data, batches_of(epochs, local.batch_size))
        for g in {place[k] for k in ids}:
            groups[g] = mean([answers[k] for k in ids if place[k] == g])
    return groups, place


def close(found, expected, atol=3e-5):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.flat(), b.flat(), atol=atol)


def later_passes(data, client, count):
    """The passes of a client that trains on after the last round."""
    return passes(derive_key(jax.random.key(0), TRAIN, ROUNDS), data, client, count)


def test_a_client_adapts_by_one_plain_step(local):
    """w - alpha grad F_k(w), whatever the steps of training have."""
    own = {"momentum": 0.5, "weight_decay": 0.1, "fill_batches": True, "schedule": lambda _: 0.5}
    found = per_fedavg(alpha=ALPHA).adapt(local.replace(**own))
    assert found == local.replace(lr=ALPHA, steps=1) and found.schedule is None


@pytest.mark.parametrize(
    ("m", "width", "second_order"), [nightly(1, 1, False), (1, 1, True), nightly(2, 4, False)]
)
def test_per_fedavg_equals_its_twin(toy, linear, local, m, width, second_order):
    pick, one = select.uniform(COHORT), with_execution(local, width=width)
    method = per_fedavg(alpha=ALPHA, second_order=second_order)
    algorithm = build(algorithms.ifca, linear, one.replace(personal=method), pick, m=m)
    states = play(algorithm, toy)

    def train(model, data, batches):
        return meta_trained(model, data, batches, local.lr, ALPHA, second_order)

    groups, place = play_twin(models_of(states[0].groups), toy, pick, one, ROUNDS, train)
    close(models_of(states[-1].groups), groups)
    np.testing.assert_array_equal(states[-1].assignment, place if m > 1 else np.clip(place, -1, 0))
    models, index, *_ = used_models(algorithm, states[-1], toy)
    np.testing.assert_array_equal(index, np.where(np.array(place) < 0, -1, np.arange(CLIENTS)))
    for client, found in enumerate(models_of(models)):
        own = groups[max(place[client], 0)]
        if SIZES[client]:
            batches = batches_of(later_passes(toy, client, 1), local.batch_size)[:1]
            own = trained(own, toy, batches, ALPHA)
        close([found], [own])
    assert not states[-1].rows


@pytest.mark.parametrize("steps", [None, nightly(3)])
def test_fine_tuning_tests_models_that_were_trained_on(toy, linear, local, steps):
    """And trains as the method below, to the last bit; that, once a night."""
    pick, settings = select.uniform(COHORT), {"m": 2}
    method = fine_tune(epochs=2, steps=steps)
    algorithm = build(algorithms.ifca, linear, local.replace(personal=method), pick, **settings)
    states = play(algorithm, toy)
    if steps is not None:
        below = play(build(algorithms.ifca, linear, local, pick, **settings), toy)
        np.testing.assert_array_equal(matrix(states[-1].groups), matrix(below[-1].groups))
        np.testing.assert_array_equal(states[-1].assignment, below[-1].assignment)
        assert spent(states[0], states[-1]) == spent(below[0], below[-1])
    groups, place = models_of(states[-1].groups), np.asarray(states[-1].assignment)
    models, index, *_ = used_models(algorithm, states[-1], toy)
    np.testing.assert_array_equal(index, np.where(place < 0, -1, np.arange(CLIENTS)))
    for client, found in enumerate(models_of(models)):
        own = groups[max(place[client], 0)]
        if SIZES[client]:
            count = 2 if steps is None else steps
            batches = batches_of(later_passes(toy, client, count), local.batch_size)
            own = trained(own, toy, batches[:steps], local.lr)
        close([found], [own])
    mesh, predict = cfl.make_mesh(1), jax.jit(linear.predict)
    last = jax.tree.map(jnp.asarray, states[-1])
    row, table = at_once(evaluate_all, algorithm, linear, mesh, last, toy, True)
    assert row["groups"] == len(set(place[place >= 0].tolist()))  # those of the method
    x, y = np.asarray(toy.x), np.asarray(toy.y)
    for client in np.flatnonzero((place >= 0) & (np.asarray(toy.test.size) > 0)).tolist():
        held = np.asarray(toy.test.order)[int(toy.test.start[client]) :]
        held = held[: int(toy.test.size[client])]
        model = jax.tree.map(lambda leaf, k=client: leaf[k], models)
        right = np.argmax(predict(model, x), -1)[held] == y[held]
        np.testing.assert_allclose(table.accuracy[client], right.mean(), rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("method", [nightly(fine_tune(epochs=0)), per_fedavg(alpha=0.0)])
def test_without_a_step_it_is_the_method_below(toy, linear, local, method):
    """Fine-tuning always; Per-FedAvg where the second of its two batches is all that a client has:
    the same batch in another order."""
    pick = select.uniform(COHORT)
    tuned = method.name == "fine_tune"
    whole = local if tuned else local.replace(batch_size=64)
    once = whole if tuned else whole.replace(epochs=1)
    algorithm = algorithms.fedavg(linear, whole.replace(personal=method), pick)
    states, below = play(algorithm, toy), play(algorithms.fedavg(linear, once, pick), toy)
    atol = 0 if tuned else 2e-6
    np.testing.assert_allclose(
        matrix(states[-1].groups), matrix(below[-1].groups), rtol=0, atol=atol
    )
    assert algorithm.personal_models is None


@pytest.mark.nightly
def test_the_schedule_is_of_fine_tuning_and_not_of_alpha(toy, linear, local):
    def half(round):
        return 0.5**round

    def first(method):
        one = local.replace(personal=method, schedule=half)
        algorithm = algorithms.fedavg(linear, one, select.full_participation())
        state = jax.jit(algorithm.init)(KEY, toy).replace(round=np.int32(ROUNDS))
        return models_of(used_models(algorithm, state, toy).models)[1], models_of(state.groups)[0]

    batches = batches_of(later_passes(toy, 1, 1), local.batch_size)[:1]
    for method, lr in ((fine_tune(steps=1), local.lr / 8), (per_fedavg(alpha=ALPHA), ALPHA)):
        found, start = first(method)
        close([found], [trained(start, toy, batches, lr)], 2e-6)


@pytest.mark.nightly
def test_losses_are_of_each_batch_once(toy, linear, local):
    """A client of 7 samples has 4 batches in 2 epochs: of threes the second begins anew."""
    x, y = np.asarray(toy.x, np.float64), np.asarray(toy.y)
    method = per_fedavg(alpha=0.0, second_order=True)
    one = local.replace(personal=method, lr=1e-30)
    system = cfl.System(select.uniform(COHORT))
    _, info = jax.jit(algorithms.fedavg(linear, one, system).round)(
        KEY, jax.jit(algorithms.fedavg(linear, one, system).init)(KEY, toy), toy
    )
    model = models_of(jax.jit(algorithms.fedavg(linear, one, system).init)(KEY, toy).groups)[0]
    ids = [k for k in system.select.draw(derive_key(KEY, SELECT, 0), 0, toy.train.size).tolist()]
    held = np.concatenate([samples(toy, k) for k in ids])
    expected = cross_entropy(model, x[held], y[held]) + 0.001 * np.sum(model.kernel**2)
    np.testing.assert_allclose((info.loss, info.last_loss), expected, rtol=1e-5)


def test_models_that_are_kept_are_of_the_data_as_they_were(toy, linear, local):
    one = local.replace(personal=fine_tune(steps=1))
    algorithm = algorithms.fedavg(linear, one, select.uniform(COHORT))
    state, still = jax.jit(algorithm.init)(KEY, toy), drift.none()
    moved = init_data_state(still, KEY, toy)._replace(y=CLASSES - 1 - toy.y)
    setup = Setup(algorithm, linear, toy, still, cfl.make_mesh(1))
    kept = copy_present_models(setup, Snapshot(state, moved, {}))["models"]
    there, here = (
        used_models(algorithm, state, data).models for data in (moved.apply_to(toy), toy)
    )
    np.testing.assert_array_equal(matrix(kept), matrix(there))
    assert np.abs(matrix(kept) - matrix(here)).max() > 1e-3


METHODS = {
    "per_fedavg": per_fedavg(alpha=0.1, second_order=True),
    "fine_tune": fine_tune(),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", others_nightly(METHODS, ["per_fedavg"]))
def test_lanes_and_devices_change_nothing(toy, mlp, local, name):
    pick, one = select.uniform(COHORT), local.replace(personal=METHODS[name])
    first = build(algorithms.ifca, mlp, one, pick, m=2)
    other = with_execution(one, mesh=cfl.make_mesh(4), width=3)
    second = build(algorithms.ifca, mlp, other, pick, m=2)
    expected, found = (play(each, toy, 2)[-1] for each in (first, second))
    np.testing.assert_array_equal(expected.assignment, found.assignment)
    np.testing.assert_allclose(matrix(expected.groups), matrix(found.groups), atol=3e-5)
    a, b = (matrix(used_models(*pair, toy).models) for pair in ((first, expected), (second, found)))
    np.testing.assert_allclose(a, b, atol=3e-5)


REFUSED = {
    "another way to train": (algorithms.fedsgd, per_fedavg(), "personal=per_fedavg: changes the"),
    "a model each": (algorithms.nonfed, fine_tune(), "a model of its own already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(linear, local, case):
    factory, method, says = REFUSED[case]
    one_line(says, factory, linear, local.replace(personal=method), select.uniform(COHORT))


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        (per_fedavg, "alpha", -0.1),
        (fine_tune, "epochs", -1),
        (fine_tune, "steps", 0),
    ],
)
def test_values_that_are_not_allowed_are_refused(method, setting, value):
    one_line(f"personal.{setting}={value}", method, **{setting: value})


@pytest.mark.nightly
@pytest.mark.parametrize("name", others_nightly(METHODS, ["fine_tune"]))
def test_a_run_that_was_stopped_is_one_that_was_not(fedjax_cfl, name):
    """To the last bit, while data drift; final.npz has the models that clients were tested on."""
    line = f"algorithm=ifca model=mclr personal={name} clients_per_round=6 local.epochs=2"
    line += " eval_every=2 dataset.clients=12 drift=swap_all drift.p=0.4"
    _, whole = stop_and_go_on(fedjax_cfl, line)
    assert len(jax.tree.leaves(whole.final.models)[0]) == 12
    row = whole.rows[-1]
    one = sum(leaf.nbytes // 12 for leaf in jax.tree.leaves(whole.final.models))
    assert row["bytes_down"] == one * row["units_down"] > 0


def test_samples_on_the_host_are_refused(fedjax_cfl):
    line = "algorithm=fedavg model=mclr personal=fine_tune resident=host rounds=1 run_dir=host"
    status, _, err = fedjax_cfl(line)
    assert status == 2
    assert "resident=host: " in err


@pytest.mark.nightly
def test_runs_of_a_grid_are_what_they_are_alone(fedjax_cfl):
    line = "algorithm=ifca model=mclr personal=fine_tune clients_per_round=6 rounds=2"
    line += " dataset.clients=12 local.epochs=1"
    member, alone = run_in_grid_and_alone(fedjax_cfl, line)
    assert member.rows[-1]["accuracy"] == pytest.approx(alone.rows[-1]["accuracy"], abs=1e-6)
