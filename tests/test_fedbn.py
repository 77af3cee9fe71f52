"""FedBN: which parts of models are normalisations, and a slow twin in NumPy of whole rounds."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from conftest import (
    CLASSES,
    FEATURES,
    SIZES,
    build,
    matrix,
    nightly,
    one_line,
    spent,
    stop_and_go_on,
    with_execution,
)
from test_personal import play
from test_reference import KEY, batches_of, passes
from test_scaffold import Normed

import fedjax_cfl as cfl
from fedjax_cfl import algorithms, models
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.models import layers
from fedjax_cfl.personal import fedbn
from fedjax_cfl.personal.split import take_norms
from fedjax_cfl.simulation.evaluate import used_models
from fedjax_cfl.system import select

PICK = select.uniform(6)
KINDS = (layers.BatchNorm, layers.BatchStatNorm, layers.GroupNorm, nn.LayerNorm)


class Tokens(nn.Module):
    """A module of a user's own, whose normalisation is Flax's."""

    num_classes: int = 3

    @nn.compact
    def __call__(self, x):
        """[B, 4, 8] -> [B, C]."""
        x = x + nn.Dense(8)(nn.LayerNorm()(x))
        return nn.Dense(self.num_classes)(nn.LayerNorm()(x).mean(1))


MODELS = {
    "resnet": (models.ResNet18(3, norm=layers.BatchNorm, features=(4, 4, 8, 8)), (16, 16, 3)),
    "tokens": (Tokens(), (4, 8)),
    "faces": (models.CelebaCNN(2), (4, 5, 3)),
}


@pytest.mark.parametrize("name", ["tokens", nightly("resnet"), nightly("faces")])
def test_normalisations_are_found_as_by_their_types(name):
    """Wherever they stand in the model, and whatever they are called."""
    module, shape = MODELS[name]
    found = set()

    def note(call, arguments, options, context):
        if isinstance(context.module, KINDS):
            found.add(context.module.path)
        return call(*arguments, **options)

    with nn.intercept_methods(note):
        task = cfl.as_task(module, shape, module.num_classes)
        whole = jax.eval_shape(task.init, KEY)
    leaves = jax.tree.leaves_with_path(take_norms(whole))
    paths = [tuple(key.key for key in path) for path, _ in leaves]
    assert {path[path[0] == "batch_stats" : -1] for path in paths} == found != set()
    assert {path[-1] for path in paths} <= {"scale", "bias", "mean", "var"}


def test_normalisations_by_hand():
    """At any depth; statistics make one, too, without a scale."""
    model = {
        "shift": {"bias": 1},
        "outer": {"inner": {"scale": 2, "bias": 3}, "kernel": 4},
        "dense": {"kernel": 5, "bias": 6},
        "batch_stats": {"shift": {"mean": 7, "var": 8}},
    }
    own = {"shift": {"bias": 1}, "outer": {"inner": {"scale": 2, "bias": 3}}}
    assert take_norms(model) == own | {"batch_stats": model["batch_stats"]}


def slope(model, x, y):
    """The gradient of the mean loss of a dense layer after batch normalisation, and statistics."""
    norm, dense = model["BatchNorm_0"], model["Dense_0"]
    mean, var = x.mean(0), x.var(0)
    hat = (x - mean) / np.sqrt(var + 1e-5)
    seen = hat * norm["scale"] + norm["bias"]
    error = np.exp(seen @ dense["kernel"] + dense["bias"])
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    back = error @ dense["kernel"].T
    return {
        "BatchNorm_0": {"scale": (back * hat).sum(0), "bias": back.sum(0)},
        "Dense_0": {"kernel": seen.T @ error, "bias": error.sum(0)},
    }, {"mean": mean, "var": var}


def train(model, data, batches, lr):
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    for batch in batches:
        gradient, seen = slope(model, x[batch], y[batch])
        running = model["batch_stats"]["BatchNorm_0"]
        running = {name: 0.9 * running[name] + 0.1 * seen[name] for name in seen}
        weights = {name: model[name] for name in gradient}
        model = jax.tree.map(lambda p, g: p - lr * g, weights, gradient)
        model["batch_stats"] = {"BatchNorm_0": running}
    return model


@pytest.mark.parametrize("width", [1, nightly(4)])
def test_rounds_equal_a_slow_twin(toy, local, width):
    task = cfl.as_task(Normed(), (FEATURES,), CLASSES)
    one = with_execution(local, width=width).replace(personal=fedbn())
    algorithm = algorithms.fedavg(task, one, PICK)
    states = play(algorithm, toy)
    exact = lambda leaf: np.asarray(leaf[0], np.float64)  # noqa: E731
    first = jax.tree.map(exact, states[0].groups)
    server, own = first["Dense_0"], {}
    for number in range(3):
        answers, weights = [], []
        for k in PICK.draw(derive_key(KEY, SELECT, number), number, np.array(SIZES)).tolist():
            if not SIZES[k]:
                continue
            epochs = passes(derive_key(KEY, TRAIN, number), toy, k, local.epochs)
            model = own.get(k, first) | {"Dense_0": server}
            own[k] = train(model, toy, batches_of(epochs, local.batch_size), local.lr)
            answers.append(own[k]["Dense_0"])
            weights.append(SIZES[k])
        server = jax.tree.map(lambda *all, w=weights: np.average(all, axis=0, weights=w), *answers)
    used = used_models(algorithm, states[-1], toy).models
    for k in range(len(SIZES)):
        expected = own.get(k, first) | {"Dense_0": server}
        mine = jax.tree.map(lambda leaf, k=k: leaf[k], used)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), mine, expected)
    # nothing of a normalisation is averaged, or sent: 24 words of 44 are
    for name in ("BatchNorm_0", "batch_stats"):
        np.testing.assert_array_equal(
            matrix(states[-1].groups[name]), matrix(states[0].groups[name])
        )
    assert sum(leaf.size for leaf in jax.tree.leaves(algorithm.sent_part(states[0].groups))) == 24
    assert spent(states[0], states[-1]).units_up == 6 * 3


@pytest.mark.nightly
def test_over_groups_clients_judge_by_norms_of_the_start_or_their_own(toy, local):
    task = cfl.as_task(Normed(), (FEATURES,), CLASSES)
    for judge in ("template", "own"):
        one = local.replace(personal=fedbn(judge=judge))
        state = play(build(algorithms.ifca, task, one, PICK, m=2), toy)[-1]
        norms_of_groups = matrix(state.groups["batch_stats"])
        np.testing.assert_array_equal(norms_of_groups[0], norms_of_groups[1])
        assert np.isfinite(matrix(state.rows["FedBN"].values)).all()


class Still(nn.Module):
    """Nothing but a normalisation."""

    decayed = ()

    @nn.compact
    def __call__(self, x):
        """[B, 5] -> [B, 4]."""
        return nn.LayerNorm()(x)[:, :CLASSES]


def test_models_without_both_parts_are_refused(mlp, local):
    still = cfl.as_task(Still(), (FEATURES,), CLASSES)
    for task in (mlp, still):
        says = "personal=fedbn: some modules of the model must be normalisations"
        one_line(says, algorithms.fedavg, task, local.replace(personal=fedbn()), PICK)
    one_line("personal.judge=mine", fedbn, judge="mine")


@pytest.mark.nightly
def test_a_run_that_was_stopped_is_one_that_was_not(fedjax_cfl):
    line = "algorithm=ifca model=celeba_cnn personal=fedbn clients_per_round=4 dataset.clients=8"
    stop_and_go_on(fedjax_cfl, line)
