"""FedALA: a slow twin in NumPy of whole rounds, and what it leaves as it is."""

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
from scipy.special import log_softmax
from test_moon import L2, forward, gradient
from test_personal import play
from test_reference import KEY, batches_of, passes, samples

from fedjax_cfl import algorithms
from fedjax_cfl.client.executor import constant
from fedjax_cfl.client.local import Work
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.personal import fedala
from fedjax_cfl.personal.fedala import Mixing, train_from_mixture
from fedjax_cfl.simulation.evaluate import used_models
from fedjax_cfl.system import select
from fedjax_cfl.validation import INT32_MAX

PICK, SHARE, RATE = select.uniform(6), 0.6, 0.7


def blend(weights, own, model):
    """Own + weights (model - own) in the head."""
    head = {name: own[name] + w * (model["head"][name] - own[name]) for name, w in weights.items()}
    return model | {"head": head}


def fit(row, model, data, k, key, batch_size):
    """Returns W, and how many passes it took."""
    x, y, held = np.asarray(data.x, np.float64), np.asarray(data.y), samples(data, k)
    size = int(np.ceil(SHARE * len(held) - 1e-9))
    begin = int(jax.random.randint(jax.random.fold_in(key, INT32_MAX), (), 0, len(held) - size + 1))
    weights, own, losses = dict(row["weights"]), row["model"]["head"], []
    while True:
        for batch in batches_of([held[begin : begin + size]], batch_size):
            mixed = blend(weights, own, model)
            z = forward(mixed, x[batch])[1]
            logits = log_softmax(z @ mixed["head"]["kernel"] + mixed["head"]["bias"], axis=1)
            loss = -logits[np.arange(len(batch)), y[batch]].mean()
            slope = gradient(mixed, None, None, x[batch], y[batch])["head"]
            slope["kernel"] = slope["kernel"] - 2 * L2 * mixed["head"]["kernel"]
            for name, g in slope.items():
                step = RATE * g * (model["head"][name] - own[name])
                weights[name] = np.clip(weights[name] - step, 0, 1)
        losses.append(loss)
        settled = len(losses) > 10 and np.std(losses[-10:]) < 0.1
        if row["fitted"] or settled or len(losses) == 100:
            return weights, len(losses)


@pytest.mark.parametrize(("m", "width"), [(3, 1), nightly(1, 4)])
def test_rounds_equal_a_slow_twin(toy, mlp, local, m, width):
    """Over IFCA clients move; who does fits anew."""
    one = with_execution(local, width=width)
    one = one.replace(personal=fedala(share=SHARE, lr=RATE), epochs=1, lr=0.4)
    algorithm = build(algorithms.ifca, mlp, one, PICK, m=m)
    rounds = 7
    states = play(algorithm, toy, rounds)
    x, y = np.asarray(toy.x, np.float64), np.asarray(toy.y)
    exact = lambda tree, n: jax.tree.map(lambda leaf: np.asarray(leaf[n], np.float64), tree)  # noqa: E731
    groups, rows, seen = [exact(states[0].groups, g) for g in range(m)], {}, set()
    for number, after in enumerate(states[1:]):
        answers, key = [[] for _ in range(m)], derive_key(KEY, TRAIN, number)
        met = [k for k in np.flatnonzero(moved(states[number], after))]
        for k in met:
            g = int(after.assignment[k]) if m > 1 else 0
            model, start = groups[g], groups[g]
            weights = jax.tree.map(np.ones_like, model["head"])
            if k in rows:
                if rows[k]["group"] != g:
                    rows[k] |= {"weights": weights, "fitted": False}
                    seen.add("moved")
                mine = jax.random.fold_in(key, k)
                weights, passed = fit(rows[k], model, toy, k, mine, local.batch_size)
                seen.add(min(passed, 11))
                start = blend(weights, rows[k]["model"]["head"], model)
            new = start
            for batch in batches_of(passes(key, toy, k, 1), local.batch_size):
                slope = gradient(new, None, None, x[batch], y[batch])
                new = jax.tree.map(lambda p, d: p - one.lr * d, new, slope)
            rows[k] = {"model": new, "weights": weights, "group": g, "fitted": k in rows}
            answers[g].append(new)
        for g, found in enumerate(answers):
            if found:
                groups[g] = jax.tree.map(lambda *all: np.mean(all, axis=0), *found)
            agree(exact(after.groups, g), groups[g])
    for k, row in rows.items():
        own = exact(states[-1].rows["FedALA"].values, k)
        agree(own.model, row["model"])
        agree(own.weights["head"], row["weights"])
        agree(exact(used_models(algorithm, states[-1], toy).models, k), row["model"])
    assert seen == {1, 11, "moved"} if m > 1 else seen == {1, 11}
    assert any(np.min(row["weights"]["kernel"]) < 0.9 for row in rows.values())
    sent = spent(states[0], states[-1])
    assert (sent.units_down, sent.units_up) == (6 * rounds * m, 6 * rounds)


def moved(before, after):
    """Returns who has trained in a round."""
    pairs = zip(
        jax.tree.leaves(before.rows["FedALA"].values),
        jax.tree.leaves(after.rows["FedALA"].values),
        strict=True,
    )
    changes = [(np.asarray(a) != b).reshape(len(SIZES), -1).any(1) for a, b in pairs]
    return np.any(changes, axis=0)


def agree(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), found, expected)


@pytest.mark.parametrize(("group", "fitted", "weight"), [(0, True, 0.3), (1, False, 1.0)])
def test_who_changes_its_group_fits_anew(group, fitted, weight):
    seen, one = [], {"head": {"bias": jnp.ones(1)}}
    row = Mixing(one, {"head": {"bias": jnp.full(1, 0.3)}}, jnp.int32(0), jnp.bool_(True))

    def fit(key, client, data, row, model):
        seen.append(row)
        return row.weights, jnp.int32(0)

    work = Work(jnp.int32(group), jnp.ones(()), jnp.ones(()), rows={"FedALA": row})
    models = {"head": {"bias": jnp.zeros((2, 1))}}
    shared = jax.random.key(0), models
    train_from_mixture(fit, lambda *given: constant(None), jnp.int32(3), None, shared, work)
    assert bool(seen[0].fitted) == fitted
    np.testing.assert_allclose(seen[0].weights["head"]["bias"], weight)


@pytest.mark.nightly
def test_without_steps_on_the_mixture_it_is_the_method_below(toy, mlp, local):
    over, alone = (
        play(algorithms.fedavg(mlp, one, PICK), toy)[-1]
        for one in (local.replace(personal=fedala(lr=0.0)), local)
    )
    np.testing.assert_allclose(matrix(over.groups), matrix(alone.groups), atol=1e-5)


REFUSED = {
    "no such layer": ({"layers": ("hed",)}, algorithms.fedavg, "the model has no 'hed' (did"),
    "no layer": ({"layers": []}, algorithms.fedavg, "personal.layers=[]: must name some layers"),
    "a model each": ({}, algorithms.fedfomo, "a model of its own already"),
    "steps uphill": ({"lr": -1.0}, algorithms.fedavg, "personal.lr=-1.0"),
    "more than all": ({"share": 1.5}, algorithms.fedavg, "personal.share=1.5"),
    "nothing": ({"share": 0.0}, algorithms.fedavg, "personal.share=0.0: must be above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(mlp, local, case):
    settings, factory, says = REFUSED[case]
    one_line(says, lambda: factory(mlp, local.replace(personal=fedala(**settings)), PICK))


@pytest.mark.nightly
def test_a_run_that_was_stopped_is_one_that_was_not(fedjax_cfl):
    line = "algorithm=ifca model=mlp personal=fedala clients_per_round=6 dataset.clients=12"
    stop_and_go_on(fedjax_cfl, line)
