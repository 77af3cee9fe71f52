"""FeSEM-MA and the matching of units: SciPy, permutations that must not matter, hand numbers, FeSEM where nothing is permuted."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, FEATURES, matrix
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from test_fesem import planted, play

import fedjax_cfl as cfl
from fedjax_cfl import algorithms as zoo
from fedjax_cfl import matching, models, select
from fedjax_cfl.algorithms.fesem import stored_mean
from fedjax_cfl.algorithms.fesem_ma import Solutions, by_class, matched, of_cohort, over_owners, store_placed
from fedjax_cfl.errors import InputError
from fedjax_cfl.matched_average import matched_atoms, matched_average
from fedjax_cfl.matching import aligned, assignment, gains, in_use, layers_of, narrowed, permuted
from fedjax_cfl.types import Cohort, State, Upload

KEY = jax.random.key(5)
COHORT = select.rr_then_random(6)
NETWORKS = {
    "mclr": (models.MCLR(3), (6,)),
    "mlp": (models.MLP(3, hidden=(8, 5)), (6,)),
    "mnist_cnn": (models.MnistCNN(3), (8, 8)),
    "femnist_cnn": (models.FemnistCNN(3), (26, 26, 1)),
    "leaf_cnn": (models.LeafCNN(3, hidden=9), (8, 8, 1)),
    "celeba_cnn": (models.CelebaCNN(3), (12, 12, 3)),
    "lenet": (models.LeNet(3), (16, 16, 1)),
}
WIDTHS = {
    "mclr": [],
    "mlp": [8, 5],
    "mnist_cnn": [32, 64],
    "femnist_cnn": [32, 32, 32, 64, 64, 64, 128],
    "leaf_cnn": [32, 64, 9],
    "celeba_cnn": [32] * 4,
    "lenet": [6, 16, 120, 84],
}


@jax.jit
def noisy(key, params, scale):
    """Returns the parameters with normal noise, so that biases are not zero."""
    keys = jax.tree.unflatten(jax.tree.structure(params), list(jax.random.split(key, len(jax.tree.leaves(params)))))
    return jax.tree.map(lambda k, leaf: leaf + scale * jax.random.normal(k, leaf.shape), keys, params)


def network(name):
    """Returns (task, its layers, random parameters, random orders of its hidden units)."""
    module, shape = NETWORKS[name]
    task = cfl.as_task(module, shape, 3)
    rng = np.random.default_rng(0)
    orders = [jnp.asarray(rng.permutation(width)) for width in WIDTHS[name]]
    return task, layers_of(task), noisy(KEY, jax.jit(task.init)(KEY), 0.1), orders


# The assignment


@pytest.mark.parametrize("n", [1, 2, 9, 32])
def test_assignment_equals_scipy(n):
    rng = np.random.default_rng(n)
    costs = rng.normal(size=(8, n, n)).astype(np.float32)
    costs[1] = rng.integers(3, size=(n, n))  # ties
    costs[2] = 0.5 * rng.normal(size=(n, n)) + np.where(np.eye(n)[rng.permutation(n)] > 0, -9, 0)  # nearly a permutation
    costs[3] = -np.outer(np.arange(n), np.arange(n))  # everybody wants the same
    found = np.asarray(jax.jit(jax.vmap(assignment))(costs))
    for cost, columns, alone in zip(costs, found, map(jax.jit(assignment), costs), strict=True):
        rows, best = linear_sum_assignment(cost)
        assert sorted(columns) == list(rows) and columns.tolist() == alone.tolist()
        np.testing.assert_allclose(cost[rows, columns].sum(), cost[rows, best].sum(), rtol=1e-5, atol=1e-5)
    assert found[0].tolist() == linear_sum_assignment(costs[0])[1].tolist()


def test_assignment_ends_whatever_the_costs():
    costs = np.zeros((3, 5, 5), np.float32)
    costs[0], costs[1, 2], costs[2, :, 1] = np.nan, np.inf, -np.inf
    assert (np.sort(jax.jit(jax.vmap(assignment))(costs)) == np.arange(5)).all()


# Reordering hidden units


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_are_found_in_the_order_of_calls(name):
    module, shape = NETWORKS[name]
    task = cfl.as_task(module, shape, 3)
    layers = layers_of(task)
    assert [layer.width for layer in layers] == [*WIDTHS[name], 3]
    assert layers[-1].name == "head"
    assert {part for layer in layers for part in (layer.name, *layer.norms)} == set(jax.eval_shape(task.init, KEY))


@pytest.mark.parametrize("name", ["mlp", "femnist_cnn", "leaf_cnn", "celeba_cnn"])
def test_reordered_networks_are_the_same_function_and_are_put_back(name):
    task, layers, params, orders = network(name)
    reorder = jax.jit(lambda params: permuted(layers, params, orders))
    other = reorder(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(other, params)
    x = jax.random.uniform(KEY, (4, *NETWORKS[name][1]))
    predict = jax.jit(task.predict)
    np.testing.assert_allclose(predict(other, x), predict(params, x), rtol=2e-4, atol=1e-4)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (other, params)), strict=True))
    back = jax.jit(lambda params, center: permuted(layers, params, aligned(layers, params, center)))
    chex.assert_trees_all_equal(back(other, params), params)
    near = noisy(KEY, params, 0.003)
    chex.assert_trees_all_equal(back(reorder(near), params), near)


@pytest.mark.parametrize(("module", "shape", "layer"), [(models.BiGRU(2), (5, 3), "GRU_0"), (models.StackedLSTM(), (5, 3), "LSTM_1")])
def test_recurrent_models_are_refused(local, module, shape, layer):
    with pytest.raises(InputError, match=f"model layer {layer}: ") as caught:
        zoo.fesem_ma(cfl.as_task(module, shape, 2), local, COHORT, m=2)
    assert "\n" not in str(caught.value)


def test_a_client_that_renames_its_units_does_not_matter():
    """Its update is what it had been, though the model it trained is another one."""
    _, layers, params, orders = network("mlp")
    groups = jax.tree.map(lambda leaf: jnp.stack([leaf + 1, leaf]), params)
    trained = noisy(KEY, params, 0.02)

    def update(model):
        upload = SimpleNamespace(delta=jax.tree.map(jnp.subtract, model, params))
        upload.replace = lambda delta: delta
        visit = matched(lambda *given: upload, layers)
        return visit(0, 0, None, (KEY, groups), SimpleNamespace(group=1))

    plain, renamed = (jax.jit(update)(model) for model in (trained, permuted(layers, trained, orders)))
    chex.assert_trees_all_equal(plain, jax.tree.map(jnp.subtract, trained, params))
    chex.assert_trees_all_close(renamed, plain, atol=1e-6)


# The algorithm


@pytest.mark.parametrize("average", ["stored", "cohort"])
def test_fesem_where_no_unit_changes_its_place(toy, mlp, local, average):
    """Clients that train from the center keep their units in its order: FeSEM, bit for bit but for how XLA fuses."""
    begun, *_, last = play(zoo.fesem_ma(mlp, local, COHORT, m=2, head="plain", average=average), toy, 4)
    plain = play(zoo.fesem(mlp, local, COHORT, m=2, average=average), toy, 4)
    chex.assert_trees_all_close(last.groups, plain[-1].groups, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(last.memory.models, plain[-1].memory.models, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_equal(last.assignment, plain[-1].assignment)
    assert np.abs(matrix(last.groups) - matrix(begun.groups)).max() > 0.1
    chex.assert_trees_all_equal(last.traffic, plain[-1].traffic)


def test_planted_groups_are_found(mlp, local):
    data = planted()
    states = play(zoo.fesem_ma(mlp, local._replace(epochs=5), COHORT, m=3), data, 3)
    for state in states:
        assert adjusted_rand_score(np.arange(18) % 3, state.assignment) == 1
    first, second = (states[i].traffic for i in (0, 1))
    assert (first.units_down, first.units_up, first.words_up) == (18, 18, 18 * 4)
    assert (second.units_down - 18, second.units_up - 18, second.words_up - 18 * 4) == (6, 6, 6 * 4)


def test_stored_models_of_a_group_are_merged_after_a_run(mlp, local):
    """The one-shot use of `matched_average`: the merged model, whatever its width, serves the group as its center does."""
    data = planted(concepts=1, clients=6)
    state = play(zoo.fesem_ma(mlp, local._replace(epochs=5), select.everybody(), m=1), data, 3)[-1]
    stored = [jax.tree.map(lambda leaf, k=k: np.asarray(leaf[k]), state.memory.models) for k in range(6)]
    merged, _ = matched_average(stored, layers_of(mlp), state.memory.counts)
    width = merged["hidden_0"]["bias"].size
    wide = cfl.as_task(models.MLP(CLASSES, hidden=(width,)), (FEATURES,), CLASSES)
    scores = [np.mean(np.argmax(task.predict(params, data.x), axis=1) == data.y) for task, params in ((wide, merged), (mlp, stored[0]))]
    assert width >= 3 and scores[0] > scores[1] - 0.05 > 0.7, (width, scores)


def test_class_means_by_hand():
    """Two groups; clients 0, 1, 2 are stored in group 0, 3 in 1; client 1 trains anew, from 10; classes 0, 1, 2."""
    head = {"kernel": jnp.array([1.0, 2.0, 3.0, 5.0])[:, None, None] * jnp.ones((4, 1, 3))}
    counts = jnp.array([[1, 0, 0], [3, 2, 0], [0, 2, 0], [1, 1, 1]])
    memory = Solutions({"head": head}, jnp.ones(4, bool), counts)
    groups = {"head": {"kernel": jnp.array([10.0, 20.0])[:, None, None] * jnp.ones((2, 1, 3))}}
    state = State(0, groups, (), jnp.ones(2, bool), jnp.array([0, 0, 0, 1]), (), memory)
    upload = Upload({"head": {"kernel": jnp.array([[[4.0, 4.0, 4.0]], [[0.0, 0.0, 0.0]]])}}, jnp.array([5.0, 0.0]), *[jnp.zeros(2)] * 3)
    cohort, gid = Cohort(jnp.array([1, 4]), jnp.arange(2)), jnp.array([0, 0])
    step, mass = by_class("head")(upload, gid, cohort, (), state)
    found = (state.groups["head"]["kernel"] + step["head"]["kernel"])[:, 0]
    np.testing.assert_allclose(found[0], [(1 + 3 * 14) / 4, (2 * 14 + 2 * 3) / 4, (1 + 14 + 3) / 3], rtol=1e-6)
    np.testing.assert_allclose(found[1], [5, 5, 5], rtol=1e-6)
    np.testing.assert_allclose(mass, stored_mean(upload, gid, cohort, (), state)[1])
    step, mass = of_cohort(by_class("head"))(upload, gid, cohort, (), state)
    np.testing.assert_allclose((state.groups["head"]["kernel"] + step["head"]["kernel"])[0, 0], [14, 14, 14], rtol=1e-6)
    np.testing.assert_allclose(mass, [1, 0])


def test_what_does_not_fit_is_refused(linear, local):
    with pytest.raises(InputError, match=r"algorithm.head=nonsense: "):
        zoo.fesem_ma(linear, local, COHORT, m=2, head="nonsense")
    with pytest.raises(InputError, match=r"algorithm.spare=0.2: 0 is allowed for a model with normalisations"):
        zoo.fesem_ma(network("celeba_cnn")[0], local, COHORT, m=2, spare=0.2)


# Growing width


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
