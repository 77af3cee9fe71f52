"""Training in sample space against training the kernel itself, on random data, where
both take the same batches.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import at_once, nightly

import fedjax_cfl as cfl
from fedjax_cfl.client import dual_sgd
from fedjax_cfl.client.cohort import over_clients
from fedjax_cfl.client.local import full_work
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import client_cost, sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Cohort

SIZES = (1, 3, 11, 40, 64, 65, 130, 0)
CLOSE = {"rtol": 1e-4, "atol": 2e-6}  # float32 sums in another order, through up to 65 steps
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def noise():
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(len(SIZES)), SIZES).astype(np.int32)
    pool = cfl.Pool(
        rng.integers(0, 256, (owner.size, 6, 5), dtype=np.uint8),
        rng.integers(0, 4, owner.size).astype(np.int32),
        4,
    )
    return cfl.federate(
        pool, cfl.Partition(np.arange(owner.size), owner, np.zeros(owner.size, bool))
    )


def trained(task, noise, way, objective=None, width=1, epochs=5, lr=0.1, **options):
    local = cfl.Local(
        lr,
        epochs,
        10,
        **options,
        execution=cfl.make_execution(cfl.make_mesh(1), width, first_layer=way),
    )
    solve = over_clients(sgd(task, local, objective), local.execution)

    def play():
        models = jax.vmap(task.init)(jax.random.split(KEY, 2))
        clients = jnp.arange(len(SIZES))
        work = full_work(clients % 2)._replace(step_fraction=jnp.where(clients == 3, 0.4, 1.0))
        return solve(Cohort(ids=clients, rank=clients), noise, (KEY, models), work)

    return jax.device_get(at_once(play))


@pytest.mark.parametrize(
    ("hidden", "l2", "mu"),
    [
        nightly((), 0.0, 0.0),
        nightly((), 0.01, 0.5),
        nightly((7,), 0.0, 0.5),
        nightly((7,), 0.01, 0.0),
        ((7, 5), 0.01, 0.5),
    ],
)
def test_equals_training_the_kernel(noise, hidden, l2, mu):
    task = cfl.as_task(cfl.models.MLP(4, hidden=hidden), (6, 5), 4, l2=l2)
    objective = proximal(mu, erm(task)) if mu else None
    direct, other = (trained(task, noise, way, objective) for way in ("direct", "dual"))
    moved = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(direct.delta))
    assert moved > 0.05
    chex.assert_trees_all_close(other, direct, **CLOSE)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hidden", "l2", "mu"),
    [nightly((), 0.0, 0.0), nightly((7,), 0.01, 0.0), ((7, 5), 0.01, 0.5)],
)
def test_equals_training_the_kernel_with_momentum(noise, hidden, l2, mu):
    task = cfl.as_task(cfl.models.MLP(4, hidden=hidden), (6, 5), 4, l2=l2)
    heavy = {"objective": proximal(mu, erm(task)), "momentum": 0.8, "lr": 0.03}
    direct, other = (trained(task, noise, way, **heavy) for way in ("direct", "dual"))
    light = trained(task, noise, "direct", objective=heavy["objective"], lr=0.03)
    apart = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(direct.delta), jax.tree.leaves(light.delta), strict=True)
    )
    assert apart > 0.05  # momentum does something
    chex.assert_trees_all_close(other, direct, **CLOSE)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hidden", "l2", "mu", "momentum"),
    [nightly((), 0.0, 0.0, 0.0), nightly((7,), 0.01, 0.5, 0.0), ((7, 5), 0.01, 0.5, 0.8)],
)
def test_equals_training_the_kernel_with_weight_decay(noise, hidden, l2, mu, momentum):
    task = cfl.as_task(cfl.models.MLP(4, hidden=hidden), (6, 5), 4, l2=l2)
    pulled = {"objective": proximal(mu, erm(task)), "momentum": momentum, "lr": 0.03}
    direct, other = (
        trained(task, noise, way, weight_decay=0.2, **pulled) for way in ("direct", "dual")
    )
    free = trained(task, noise, "direct", **pulled)
    apart = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(direct.delta), jax.tree.leaves(free.delta), strict=True)
    )
    assert apart > 0.02  # weight decay does something
    chex.assert_trees_all_close(other, direct, **CLOSE)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["direct", nightly("dual")])
@pytest.mark.parametrize(
    ("momentum", "weight_decay"), [nightly(0.8, 0.0), nightly(0.0, 0.3), (0.8, 0.3)]
)
def test_momentum_and_weight_decay_are_those_of_optax(noise, way, momentum, weight_decay):
    """One client, full batches: heavy-ball SGD with decayed weights."""
    task = cfl.as_task(cfl.models.MCLR(4), (6, 5), 4)
    local = cfl.Local(
        0.1, 6, 1000, execution=cfl.make_execution(cfl.make_mesh(1), 1, first_layer=way)
    )
    local = local.replace(momentum=momentum, weight_decay=weight_decay)
    start = jax.tree.map(lambda leaf: leaf[None], task.init(KEY))
    one = jnp.array([2])
    upload = jax.jit(over_clients(sgd(task, local), local.execution))(
        Cohort(one, 0 * one), noise, (KEY, start), full_work(0 * one)
    )
    begin, size = int(noise.train.start[2]), int(noise.train.size[2])
    rows = noise.train.order[begin : begin + size]
    params = jax.tree.map(lambda leaf: leaf[0], start)
    heavy = optax.sgd(0.1, momentum=momentum or None)
    optimizer = optax.chain(optax.add_decayed_weights(weight_decay), heavy)
    state = optimizer.init(params)
    for _ in range(6):
        grad = jax.grad(lambda p: task.loss(p, noise.x[rows], noise.y[rows], None).mean())(params)
        update, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, update)
    chex.assert_trees_all_close(
        jax.tree.map(lambda d, s: d[0] + s[0], upload.delta, start), params, rtol=1e-4, atol=1e-5
    )


@pytest.mark.nightly
def test_equals_a_fixed_number_of_steps(noise):
    task = cfl.as_task(cfl.models.MLP(4, hidden=(7,)), (6, 5), 4, l2=0.01)
    direct, other = (trained(task, noise, way, steps=23) for way in ("direct", "dual"))
    np.testing.assert_array_equal(direct.steps, [23, 23, 23, 10, 23, 23, 23, 0])
    chex.assert_trees_all_close(other, direct, **CLOSE)


@pytest.mark.nightly
def test_does_not_depend_on_chunk_mates(noise):
    task = cfl.as_task(cfl.models.MLP(4, hidden=(7,)), (6, 5), 4)
    alone, side_by_side = (trained(task, noise, "dual", width=width) for width in (1, 4))
    chex.assert_trees_all_close(side_by_side, alone, **CLOSE)


@pytest.mark.nightly
def test_a_pull_that_differs_between_clients(noise):
    """`mu` may come from `client_extra`, here a number of each client."""
    task = cfl.as_task(cfl.models.MLP(4, hidden=(7,)), (6, 5), 4)

    def solve(way, objective):
        local = cfl.Local(
            0.1, 3, 10, execution=cfl.make_execution(cfl.make_mesh(1), 1, first_layer=way)
        )
        train = over_clients(sgd(task, local, objective), local.execution)
        clients = jnp.arange(len(SIZES))
        models = jax.tree.map(lambda leaf: leaf[None], task.init(KEY))
        work = full_work(0 * clients)._replace(client_extra=clients / 4)
        return jax.jit(lambda: train(Cohort(clients, clients), noise, (KEY, models), work))()

    pulled = proximal(lambda client_extra: client_extra, erm(task))
    direct, other, free = solve("direct", pulled), solve("dual", pulled), solve("direct", erm(task))
    chex.assert_trees_all_close(other, direct, **CLOSE)
    norms = [
        jnp.sqrt(sum(jnp.sum(leaf[6] ** 2) for leaf in jax.tree.leaves(upload.delta)))
        for upload in (direct, free)
    ]
    assert norms[0] < 0.9 * norms[1]


def test_counts_operations():
    """784-128, E = 10, B = 10: 4 B F H a step directly, 2 B n H and once 2 n^2 F + 4 n
    F H in sample space: 70 % as many at n = 583.
    """
    assert [dual_sgd.is_dual_cheaper(n, 784, 128, 10, n) for n in (16, 256, 575, 590, 4096)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    # one epoch: the Gram matrix does not pay
    assert not dual_sgd.is_dual_cheaper(64, 784, 128, 10, 7)
    # softmax regression on digits: a step is all overhead
    assert not dual_sgd.is_dual_cheaper(16, 64, 10, 10, 1000)


def test_compiles_few_sizes():
    task = cfl.as_task(cfl.models.MLP(4, hidden=(128,)), (784,), 4)

    def sizes(wanted, capacity, width=1):
        local = cfl.Local(
            0.1, 10, 10, execution=cfl.make_execution(cfl.make_mesh(1), width, first_layer=wanted)
        )
        return dual_sgd.dual_sizes(task, erm(task), local, capacity)

    assert sizes("auto", 2000) == [64, 128, 256, 512]
    assert sizes("auto", 20) == [32]
    assert sizes("dual", 1000) == [64, 128, 256, 512, 1024]
    assert sizes("dual", 250) == [64, 128, 256]
    assert sizes("direct", 250) == []
    # lanes: one loop more at most, and only where it saves more than it costs
    assert sizes("dual", 1000, 64) == [1024] and sizes("direct", 1000, 64) == []
    assert sizes("auto", 250, 64) == [256] and sizes("auto", 250, 2) == []
    assert sizes("auto", 2000, 64) == [] and sizes("auto", 2000, 500) == [512]


def test_larger_clients_are_more_work():
    """Also where the way of training changes; and 1,000 samples trained directly are
    more than four times 250 in sample space.
    """
    task, held = cfl.as_task(cfl.models.MLP(4, hidden=(128,)), (784,), 4), jnp.arange(2000)
    work = client_cost(task, cfl.Local(0.1, 10, 10), 2000)(held)
    assert (jnp.diff(work) >= 0).all() and work[1000] > 6 * work[250]
    convolution = cfl.as_task(cfl.models.MnistCNN(4), (8, 8), 4)
    np.testing.assert_array_equal(
        client_cost(convolution, cfl.Local(0.1, 10, 10), 2000)(held), held + 16
    )


@pytest.mark.parametrize("way", ["auto", "direct"])
def test_models_without_a_dense_first_layer_train_directly(way):
    task = cfl.as_task(cfl.models.MnistCNN(4), (8, 8), 4)
    assert task.first_layer is None
    for width in (1, 64):
        local = cfl.Local(
            0.1, 1, 10, execution=cfl.make_execution(cfl.make_mesh(1), width, first_layer=way)
        )
        assert dual_sgd.dual_sizes(task, erm(task), local, 32) == []


def test_says_what_cannot_be():
    task = cfl.as_task(cfl.models.MnistCNN(4), (8, 8), 4)
    with pytest.raises(
        InputError, match=r"local\.first_layer=dual: the model's first layer is not dense"
    ):
        sgd(task, cfl.Local(0.1, 1, 10, execution=cfl.make_execution(first_layer="dual")))
    with pytest.raises(InputError, match=r"local\.first_layer"):
        cfl.Local(0.1, 1, 10, execution=cfl.make_execution(first_layer="sideways"))


def test_a_model_must_name_a_layer_on_the_flat_sample():
    class Wrong(cfl.models.MLP):
        first_layer = "head"

    with pytest.raises(InputError, match="first_layer names 'head'"):
        cfl.as_task(Wrong(4, hidden=(7,)), (6, 5), 4)
