"""FeSEM-MA and the matching of units: SciPy, permutations that must not matter, hand
numbers, FeSEM where nothing is permuted.
"""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, build, ledger, matrix, nightly, spent
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from test_fesem import planted, play, twin

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fesem.fesem import fesem, stored_mean
from fedjax_cfl.algorithms.fesem.fesem_ma import (
    class_weighted_mean,
    fesem_ma,
    match_to_center,
    mean_over_cohort,
)
from fedjax_cfl.algorithms.fesem.matching import (
    align_to_center,
    find_layers,
    permute_hidden_units,
    solve_assignment,
)
from fedjax_cfl.algorithms.fesem.start import ClientModels
from fedjax_cfl.client.executor import constant, run_one
from fedjax_cfl.client.local import full_work
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Round
from fedjax_cfl.models.zoo import (
    MCLR,
    MLP,
    BiGRU,
    CelebaCNN,
    FemnistCNN,
    LeafCNN,
    LeNet,
    MnistCNN,
    StackedLSTM,
)
from fedjax_cfl.system import select
from fedjax_cfl.types import Cohort, State, Traffic, Upload

KEY = jax.random.key(5)
COHORT = select.rr_then_random(6)
NETWORKS = {
    "mclr": (MCLR(3), (6,)),
    "mlp": (MLP(3, hidden=(8, 5)), (6,)),
    "mnist_cnn": (MnistCNN(3), (8, 8)),
    "femnist_cnn": (FemnistCNN(3), (26, 26, 1)),
    "leaf_cnn": (LeafCNN(3, hidden=9), (8, 8, 1)),
    "celeba_cnn": (CelebaCNN(3), (12, 12, 3)),
    "lenet": (LeNet(3), (16, 16, 1)),
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
    keys = jax.tree.unflatten(
        jax.tree.structure(params), list(jax.random.split(key, len(jax.tree.leaves(params))))
    )
    return jax.tree.map(
        lambda k, leaf: leaf + scale * jax.random.normal(k, leaf.shape), keys, params
    )


def network(name):
    """Returns (task, its layers, random parameters, random orders of its hidden units)."""
    module, shape = NETWORKS[name]
    task = cfl.as_task(module, shape, 3)
    rng = np.random.default_rng(0)
    orders = [jnp.asarray(rng.permutation(width)) for width in WIDTHS[name]]
    return task, find_layers(task), noisy(KEY, jax.jit(task.init)(KEY), 0.1), orders


# The assignment


@pytest.mark.parametrize("n", [1, nightly(2), 9, nightly(32)])
def test_assignment_equals_scipy(n):
    rng = np.random.default_rng(n)
    costs = rng.normal(size=(8, n, n)).astype(np.float32)
    costs[1] = rng.integers(3, size=(n, n))  # ties
    # nearly a permutation
    costs[2] = 0.5 * rng.normal(size=(n, n)) + np.where(np.eye(n)[rng.permutation(n)] > 0, -9, 0)
    costs[3] = -np.outer(np.arange(n), np.arange(n))  # everybody wants the same
    found = np.asarray(jax.jit(jax.vmap(solve_assignment))(costs))
    for cost, columns, alone in zip(
        costs, found, map(jax.jit(solve_assignment), costs), strict=True
    ):
        rows, best = linear_sum_assignment(cost)
        assert sorted(columns) == list(rows) and columns.tolist() == alone.tolist()
        np.testing.assert_allclose(
            cost[rows, columns].sum(), cost[rows, best].sum(), rtol=1e-5, atol=1e-5
        )
    assert found[0].tolist() == linear_sum_assignment(costs[0])[1].tolist()


def test_assignment_ends_whatever_the_costs():
    costs = np.zeros((3, 5, 5), np.float32)
    costs[0], costs[1, 2], costs[2, :, 1] = np.nan, np.inf, -np.inf
    assert (np.sort(jax.jit(jax.vmap(solve_assignment))(costs)) == np.arange(5)).all()


# Reordering hidden units


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_are_found_in_the_order_of_calls(name):
    module, shape = NETWORKS[name]
    task = cfl.as_task(module, shape, 3)
    layers = find_layers(task)
    assert [layer.width for layer in layers] == [*WIDTHS[name], 3]
    assert layers[-1].name == "head"
    assert {part for layer in layers for part in (layer.name, *layer.norms)} == set(
        jax.eval_shape(task.init, KEY)
    )


@pytest.mark.parametrize(
    "name", ["mlp", nightly("femnist_cnn"), nightly("leaf_cnn"), nightly("celeba_cnn")]
)
def test_reordered_networks_are_the_same_function_and_are_put_back(name):
    task, layers, params, orders = network(name)
    reorder = jax.jit(lambda params: permute_hidden_units(layers, params, orders))
    other = reorder(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(other, params)
    x = jax.random.uniform(KEY, (4, *NETWORKS[name][1]))
    predict = jax.jit(task.predict)
    np.testing.assert_allclose(predict(other, x), predict(params, x), rtol=2e-4, atol=1e-4)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (other, params)), strict=True))
    back = jax.jit(
        lambda params, center: permute_hidden_units(
            layers, params, align_to_center(layers, params, center)
        )
    )
    chex.assert_trees_all_equal(back(other, params), params)
    near = noisy(KEY, params, 0.003)
    chex.assert_trees_all_equal(back(reorder(near), params), near)


@pytest.mark.parametrize(
    ("module", "shape", "layer"), [(BiGRU(2), (5, 3), "GRU_0"), (StackedLSTM(), (5, 3), "LSTM_1")]
)
def test_recurrent_models_are_refused(local, module, shape, layer):
    with pytest.raises(InputError, match=f"model layer {layer}: ") as caught:
        fesem_ma(cfl.as_task(module, shape, 2), local, COHORT, m=2)
    assert "\n" not in str(caught.value)


def test_a_client_that_renames_its_units_does_not_matter():
    """Its update is what it had been, though the model it trained is another one."""
    _, layers, params, orders = network("mlp")
    groups = jax.tree.map(lambda leaf: jnp.stack([leaf + 1, leaf]), params)
    trained = noisy(KEY, params, 0.02)

    def update(model):
        upload = SimpleNamespace(delta=jax.tree.map(jnp.subtract, model, params))
        upload.replace = lambda delta: delta
        visit = match_to_center(lambda *given: constant(upload), layers)
        return run_one(visit(0, None, (KEY, groups), SimpleNamespace(group=1)))

    other = at_once(permute_hidden_units, layers, trained, orders)
    step = jax.jit(update)
    plain, renamed = step(trained), step(other)
    chex.assert_trees_all_equal(plain, jax.tree.map(jnp.subtract, trained, params))
    chex.assert_trees_all_close(renamed, plain, atol=1e-6)


# The algorithm


@pytest.mark.nightly
def test_without_hidden_units_it_is_fesem(toy, linear, local):
    options = {"m": 2, "head": "plain", "mu": 0.5}
    begun, *_, last = play(build(fesem_ma, linear, local, COHORT, **options), toy, 2)
    centers, models, assignment = twin(begun, toy, local, 2, 0.5, "prox", "all")
    assert last.assignment.tolist() == assignment
    np.testing.assert_allclose(matrix(last.groups), centers, atol=2e-5)
    np.testing.assert_allclose(matrix(last.rows["models"].models), models, atol=2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("mean_over", ["stored", nightly("cohort")])
def test_fesem_where_no_unit_changes_its_place(toy, mlp, local, mean_over):
    """Clients that train from the center keep their units in its order: FeSEM, bit for
    bit but for how XLA fuses.
    """
    options = {"m": 2, "head": "plain", "mean_over": mean_over}
    begun, *_, last = play(build(fesem_ma, mlp, local, COHORT, **options), toy, 4)
    plain = play(build(fesem, mlp, local, COHORT, m=2, aggregate=mean_over), toy, 4)
    chex.assert_trees_all_close(last.groups, plain[-1].groups, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(
        last.rows["models"].models, plain[-1].rows["models"].models, rtol=1e-6, atol=1e-6
    )
    chex.assert_trees_all_equal(last.assignment, plain[-1].assignment)
    assert np.abs(matrix(last.groups) - matrix(begun.groups)).max() > 0.1
    chex.assert_trees_all_equal(last.traffic, plain[-1].traffic)


@pytest.mark.nightly
def test_planted_groups_are_found(mlp, local):
    data = planted()
    states = play(fesem_ma(mlp, local.replace(epochs=5), COHORT, m=3), data, 3)
    for state in states:
        assert adjusted_rand_score(np.arange(18) % 3, state.assignment) == 1
    assert ledger(states[0].traffic) == Traffic(18, 18, 0, 18 * 4)
    assert spent(*states[:2]) == Traffic(6, 6, 0, 6 * 4)


def test_class_means_by_hand():
    """Two groups; clients 0, 1, 2 are stored in group 0, 3 in 1; client 1 trains anew,
    from 10; classes 0, 1, 2.
    """
    head = {"kernel": jnp.array([1.0, 2.0, 3.0, 5.0])[:, None, None] * jnp.ones((4, 1, 3))}
    counts = jnp.array([[1, 0, 0], [3, 2, 0], [0, 2, 0], [1, 1, 1]])
    stored = ClientModels({"head": head}, jnp.ones(4, bool), counts=counts)
    groups = {"head": {"kernel": jnp.array([10.0, 20.0])[:, None, None] * jnp.ones((2, 1, 3))}}
    state = State(
        round=jnp.int32(0),
        groups=groups,
        server=(),
        active=jnp.ones(2, bool),
        assignment=jnp.array([0, 0, 0, 1]),
        traffic=(),
        memory=(),
        selection=(),
        clock_ms=(),
        start_faults=(),
        rows={"models": stored},
    )
    upload = Upload(
        {"head": {"kernel": jnp.array([[[4.0, 4.0, 4.0]], [[0.0, 0.0, 0.0]]])}},
        jnp.array([5.0, 0.0]),
        *[jnp.zeros(2)] * 3,
        start_group=jnp.zeros(2, jnp.int32),
    )
    cohort, gid = Cohort(jnp.array([1, 4]), jnp.arange(2)), jnp.array([0, 0])
    r = Round(None, state, None, cohort, full_work(gid), upload)
    step, mass = at_once(class_weighted_mean("head"), r)
    found = (state.groups["head"]["kernel"] + step["head"]["kernel"])[:, 0]
    np.testing.assert_allclose(
        found[0], [(1 + 3 * 14) / 4, (2 * 14 + 2 * 3) / 4, (1 + 14 + 3) / 3], rtol=1e-6
    )
    np.testing.assert_allclose(found[1], [5, 5, 5], rtol=1e-6)
    np.testing.assert_allclose(mass, at_once(stored_mean, r)[1])
    step, mass = at_once(mean_over_cohort(class_weighted_mean("head")), r)
    np.testing.assert_allclose(
        (state.groups["head"]["kernel"] + step["head"]["kernel"])[0, 0], [14, 14, 14], rtol=1e-6
    )
    np.testing.assert_allclose(mass, [1, 0])


def test_what_does_not_fit_is_refused(linear, local):
    with pytest.raises(InputError, match=r"algorithm.head=nonsense: "):
        build(fesem_ma, linear, local, COHORT, m=2, head="nonsense")
