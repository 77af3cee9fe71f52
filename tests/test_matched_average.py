"""Networks of different units in one: SPAHM's posterior, copies and unions, and FeSEM-MA's centers that grow by spare units."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, FEATURES
from sklearn.metrics import adjusted_rand_score
from test_fesem import planted, play
from test_fesem_ma import COHORT, KEY, NETWORKS, WIDTHS, network, noisy

import fedjax_cfl as cfl
from fedjax_cfl import algorithms as zoo
from fedjax_cfl import matching, models
from fedjax_cfl.algorithms.fesem import stored_mean
from fedjax_cfl.algorithms.fesem_ma import Solutions, over_owners, store_placed
from fedjax_cfl.matched_average import matched_atoms, matched_average
from fedjax_cfl.matching import gains, in_use, layers_of, narrowed, permuted
from fedjax_cfl.types import Cohort, Upload


def test_score_is_the_posterior_of_the_papers():
    """With any prior mean, up to a number per row: f(x + s, c + 1) - f(s, c) + 2 ln(c / (J - c)), and what a new atom gains.

    In float32 too, where the sums of squares of f cancel.
    """
    rng = np.random.default_rng(0)
    rows, count, sums, mean = rng.normal(size=(4, 3)), np.array([1, 2]), rng.normal(size=(2, 3)), rng.normal(size=3)
    sigma, sigma0, gamma, models = 0.7, 1.9, 1.3, 5

    def f(v, c):
        return np.sum((sigma0 / sigma * v**2 + 2 * mean * v - c * mean**2) / (c * sigma0 + sigma) - np.log(c * sigma0 + sigma))

    old = [[f(x + s, c + 1) - f(s, c) + 2 * np.log(c / (models - c)) for s, c in zip(sums, count, strict=True)] for x in rows]
    new = [[f(x, 1) - f(0 * x, 0) + 2 * np.log(gamma / models) - 2 * np.log(r) for r in range(1, 5)] for x in rows]
    padded, counts = np.vstack([sums - count[:, None] * mean, np.zeros((4, 3))]), np.append(count, np.zeros(4))
    for xp, exact in ((np, 1e-9), (jnp, 1e-5)):
        gap = np.hstack([old, new]) - np.asarray(gains(rows - mean, padded, counts, models, sigma, sigma0, gamma, xp))
        np.testing.assert_allclose(gap, np.broadcast_to(gap[:, :1], gap.shape), rtol=exact)


@pytest.mark.parametrize("name", ["mlp", "leaf_cnn", "celeba_cnn"])
def test_permuted_copies_of_a_network_are_one(name):
    _, layers, params, orders = network(name)
    copies = [params, permuted(layers, params, orders), permuted(layers, params, [order[::-1] for order in orders])]
    merged, places = matched_average(copies, layers)
    for j, order in ((1, orders), (2, [order[::-1] for order in orders])):
        for first, own, by in zip(places[0], places[j], order, strict=True):
            np.testing.assert_array_equal(own, first[np.asarray(by)])
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, params)
    chex.assert_trees_all_close(permuted(layers, merged, places[0]), params, rtol=1e-4, atol=1e-4)


def test_disjoint_networks_are_united_and_answer_with_the_mean_logit():
    """Far apart, 8 and 6 units become 14 and 5 and 4 become 9; the function is the mean of the two."""
    tasks = [cfl.as_task(models.MLP(3, hidden=hidden), (40,), 3) for hidden in ((8, 5), (6, 4), (14, 9))]
    two = [jax.tree.map(lambda leaf: 20 * leaf, task.init(key)) for task, key in zip(tasks[:2], jax.random.split(KEY), strict=True)]
    merged, places = matched_average(two, layers_of(tasks[0]))
    for hidden, width in ((0, 14), (1, 9)):
        assert sorted(np.concatenate([place[hidden] for place in places])) == list(range(width))
    x = jax.random.normal(KEY, (50, 40))
    first, second, united = (task.predict(params, x) for task, params in zip(tasks, [*two, merged], strict=True))
    np.testing.assert_allclose(united, (first + second) / 2, atol=1e-4 * float(np.abs(first + second).max()))
    alone, (order,) = matched_average(two[:1], layers_of(tasks[0]))
    chex.assert_trees_all_close(permuted(layers_of(tasks[0]), alone, order), two[0], rtol=1e-4, atol=1e-4)


def test_atoms_seen_by_some_models_are_kept_once():
    """Four models that hold 5, 4, 6 and 5 of 7 true atoms, with noise: the atoms and who has which are found."""
    rng = np.random.default_rng(2)
    truth = 3 * rng.normal(size=(7, 20))
    own = [rng.permutation(7)[:count] for count in (5, 4, 6, 5)]
    found, labels = matched_atoms([truth[atoms] + 0.1 * rng.normal(size=(atoms.size, 20)) for atoms in own])
    assert set(np.concatenate(own)) == set(range(7)) and found.shape == (7, 20)
    assert adjusted_rand_score(np.concatenate(own), np.concatenate(labels)) == 1
    np.testing.assert_allclose(found[labels[0]], truth[own[0]], atol=0.5)


def test_classes_are_weighted_by_their_samples():
    _, layers, params, _ = network("mclr")
    both = [params, jax.tree.map(lambda leaf: leaf + 4, params)]
    merged, _ = matched_average(both, layers, [[1, 0, 0], [3, 2, 0]])
    np.testing.assert_allclose(merged["head"]["kernel"] - params["head"]["kernel"], np.broadcast_to([3, 4, 2], (6, 3)), rtol=1e-5)


SPARE = cfl.as_task(models.MLP(CLASSES, hidden=(8, 5)), (FEATURES,), CLASSES)


def narrow_start(key):
    return narrowed(layers_of(SPARE), SPARE.init(key), 0.5)


def units(layers, params):
    return [np.flatnonzero(in_use(layer, params)).tolist() for layer in layers[:-1]]


def test_a_center_grows_by_units_unlike_its_own_and_by_each_of_them_once(toy):
    """Of 4 clients one moves unit 2 and one unit 0 to the same new place, one unit 1 to another, one none."""
    layers = layers_of(SPARE)
    narrow = jax.jit(lambda params: narrowed(layers, params, 0.5))
    center = narrow(noisy(KEY, jax.jit(SPARE.init)(KEY), 0.3))
    assert units(layers, center) == [[0, 1, 2, 3], [0, 1, 2]]
    near = [narrow(noisy(key, center, 0.01)) for key in jax.random.split(KEY, 18)]
    trained, place = near[14:], {1: (2, 4.0), 2: (0, 4.0), 3: (1, -4.0)}
    for j, (unit, value) in place.items():
        changed = jax.tree.map(lambda leaf, unit=unit, value=value + 0.01 * j: leaf.at[..., unit].set(value), trained[j]["hidden_0"])
        trained[j] = {**trained[j], "hidden_0": changed}

    def stack(trees):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    ids = jnp.array([1, 3, 5, 8])
    memory = Solutions(stack(near[:14]), jnp.ones(14, bool), jnp.zeros((14, CLASSES), jnp.int32))
    state = SimpleNamespace(active=jnp.ones(1, bool), memory=memory, groups=stack([center]), assignment=jnp.zeros(14, jnp.int32))
    state.replace = lambda memory: SimpleNamespace(**{**vars(state), "memory": memory})
    delta = jax.tree.map(lambda leaf, old: leaf - old, stack(trained), center)
    upload, cohort, gid = Upload(delta, jnp.ones(4), *[jnp.zeros(4)] * 3), Cohort(ids, jnp.arange(4)), jnp.zeros(4, jnp.int32)
    after = state.replace(jax.jit(lambda: store_placed(layers)(KEY, state, toy, cohort, gid, upload)[0].memory)())
    stored = [jax.tree.map(lambda leaf, k=k: np.asarray(leaf)[k], after.memory.models) for k in range(14)]
    chex.assert_trees_all_equal([stored[k] for k in (0, 2, 13)], [near[k] for k in (0, 2, 13)])
    assert [units(layers, stored[k])[0] for k in (1, 3, 5, 8)] == [[0, 1, 2, 3], [0, 1, 3, 4], [1, 2, 3, 4], [0, 2, 3, 5]]
    predict = jax.jit(SPARE.predict)
    for k, model in zip((1, 3, 5, 8), trained, strict=True):
        np.testing.assert_allclose(predict(stored[k], toy.x), predict(model, toy.x), rtol=1e-5, atol=1e-5)
    step, mass = jax.jit(lambda: over_owners(stored_mean, layers)(upload, gid, cohort, (), after))()
    new = jax.tree.map(lambda old, part: old + part[0], center, step)
    assert mass == 14 and units(layers, new)[0] == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(new["hidden_0"]["kernel"][:, 4], np.full(FEATURES, 4.015), rtol=1e-5)
    np.testing.assert_allclose(new["hidden_0"]["kernel"][:, 5], np.full(FEATURES, -3.97), rtol=1e-5)
    owners = sum(np.array(in_use(layers[1], model), float) for model in stored)
    total = sum(model["hidden_1"]["kernel"] for model in stored)
    np.testing.assert_allclose(new["hidden_1"]["kernel"], total / np.maximum(owners, 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new["head"]["kernel"], sum(model["head"]["kernel"] for model in stored) / 14, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("average", ["stored", "cohort"])
def test_spare_units_that_nothing_opens_change_nothing(toy, local, monkeypatch, average):
    """FeSEM on the narrow network; spare units stay 0 to the last bit."""
    monkeypatch.setattr(matching, "gains", lambda *given: gains(*given) - 1e6 * (given[2] == 0))
    plain = play(zoo.fesem(SPARE._replace(init=narrow_start), local, COHORT, m=2, average=average), toy, 4)[-1]
    spared = play(zoo.fesem_ma(SPARE, local, COHORT, m=2, head="plain", average=average, spare=0.5), toy, 4)[-1]
    for k in range(14):
        assert units(layers_of(SPARE), jax.tree.map(lambda leaf, k=k: leaf[k], spared.memory.models)) == [[0, 1, 2, 3], [0, 1, 2]]
    chex.assert_trees_all_equal(plain.assignment, spared.assignment)
    chex.assert_trees_all_close(plain.groups, spared.groups, rtol=1e-5, atol=1e-5)


def test_centers_grow_in_a_run_and_serve_their_clients(local):
    data = planted()
    begun, *_, last = play(zoo.fesem_ma(SPARE, local._replace(epochs=5), COHORT, m=3, spare=0.5), data, 4)
    widths = [
        [sum(map(len, units(layers_of(SPARE), jax.tree.map(lambda leaf, g=g: leaf[g], state.groups)))) for g in range(3)]
        for state in (begun, last)
    ]
    assert widths[0] == [7, 7, 7] and min(widths[1]) >= 7 and max(widths[1]) > 7, widths
    assert adjusted_rand_score(np.arange(18) % 3, last.assignment) == 1
    predicted = jax.vmap(lambda group: SPARE.predict(jax.tree.map(lambda leaf: leaf[group], last.groups), data.x))(last.assignment)
    right = np.mean([np.mean(np.argmax(predicted[k], 1)[data.owner == k] == data.y[data.owner == k]) for k in range(18)])
    assert right > 0.7, right


@pytest.mark.parametrize("name", ["mlp", "leaf_cnn"])
def test_no_gradient_reaches_a_unit_that_is_not_in_use(name):
    """Also where a dense layer sees a flattened image."""
    task, layers, params, _ = network(name)
    narrow = narrowed(layers, params, 0.3)
    assert [len(own) for own in units(layers, narrow)] == [width - int(0.3 * width) for width in WIDTHS[name]]
    x, y = jax.random.normal(KEY, (4, *NETWORKS[name][1])), jnp.array([0, 1, 2, 0])
    gradient = jax.jit(jax.grad(lambda params: task.loss(params, x, y).sum()))(narrow)
    chex.assert_trees_all_equal(narrowed(layers, gradient, 0.3), gradient)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradient))
