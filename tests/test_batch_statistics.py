"""A model that normalises over a batch sees a client's own real samples and nothing else; running
statistics are averaged with the model, and are no part of a direction.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    CLASSES,
    FEATURES,
    SIZES,
    at_once,
    matrix,
    nightly,
    one_line,
    with_execution,
)
from test_fedbn import train
from test_layers import close, normal
from test_reference import batches_of, passes
from test_scaffold import Normed

import fedjax_cfl as cfl
from fedjax_cfl import keys
from fedjax_cfl.algorithms.auxo import last_tenth
from fedjax_cfl.algorithms.fedfomo import l1_norm
from fedjax_cfl.algorithms.fesem.fesem import nearest_center
from fedjax_cfl.client.cohort import over_clients
from fedjax_cfl.client.local import full_work
from fedjax_cfl.client.objective import erm, proximal, pull_back, training_loss
from fedjax_cfl.client.sgd import gradient_step, sgd
from fedjax_cfl.clustering.distances import gram, manhattan
from fedjax_cfl.clustering.features import edc, edc_randomized
from fedjax_cfl.models import (
    BatchNorm,
    BatchStatNorm,
    CelebaCNN,
    GroupNorm,
    count_params,
    model_bytes,
)
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.system.faults import guard_nonfinite
from fedjax_cfl.system.select import full_participation
from fedjax_cfl.tasks.classification import cross_entropy
from fedjax_cfl.tree import drop_statistics, squared_norms
from fedjax_cfl.types import Cohort, Partition, Pool, ServedModels, Upload

SHAPE, BATCH, CLIENT = (4, 5, 3), 10, 1  # CLIENT is the one looked at
TRAIN, TEST = (6, 8, 70), (3, 4, 2)  # samples: CLIENT's one batch is padded by two
KEY = jax.random.key(3)


@pytest.fixture(params=["batch statistics", nightly("groups")], scope="module")
def task(request):
    """FeSEM's CelebA CNN, small, in both forms."""
    own = {} if request.param == "batch statistics" else {"norm": GroupNorm}
    return cfl.as_task(CelebaCNN(2, **own), SHAPE, 2)


def faces(others: float):
    """Three clients; the pixels of all but CLIENT are multiplied by `others`."""
    owner = np.concatenate([np.repeat(np.arange(3), sizes) for sizes in (TRAIN, TEST)])
    x = normal(len(owner), *SHAPE)
    test = np.arange(len(owner)) >= sum(TRAIN)
    pool = Pool(x, (np.arange(len(owner)) % 2).astype(np.int32), 2)
    data = cfl.federate(pool, Partition(np.arange(len(owner)), owner, test))
    x[owner != CLIENT] *= others  # only now: NaN is refused above
    return data.replace(x=jnp.asarray(x))


@pytest.fixture(scope="module")
def models(task):
    """Two models."""
    return jax.jit(jax.vmap(task.init))(jax.random.split(KEY, 2))


@pytest.fixture(scope="module")
def measure(task, models):
    """Returns f(others) -> a client's update by SGD and by one gradient, its training losses, and
    its test losses; one program.
    """
    local = cfl.Local(0.1, 1, BATCH, execution=cfl.make_execution(cfl.make_mesh(1), 1))
    cohort = Cohort(jnp.arange(3, dtype=jnp.int32), jnp.arange(3, dtype=jnp.int32))

    @jax.jit
    def run(data):
        work = full_work(jnp.zeros(3, jnp.int32))
        uploads = [
            over_clients(way, local.execution)(cohort, data, (KEY, models), work)
            for way in (sgd(task, local), gradient_step(task, local))
        ]
        losses = [
            over_clients(training_loss(task, with_l2), local.execution)(cohort, data, models)
            for with_l2 in (False, True)
        ]
        served = ServedModels(models, jnp.zeros(3, jnp.int32))
        return (
            uploads,
            losses,
            evaluate.predict_test_samples(task, local.execution.mesh, served, data)[1],
        )

    def measure(others, client=CLIENT):
        data = faces(others)
        uploads, losses, tested = run(data)
        own = np.asarray(data.owner)[np.asarray(data.test.order)] == client
        steps = [(matrix(upload.delta)[client], upload.loss[client]) for upload in uploads]
        return steps, [loss[client] for loss in losses], tested[own]

    return measure


@pytest.mark.nightly
@pytest.mark.parametrize("others", [nightly(30.0), np.nan])
def test_nothing_of_a_client_changes_with_other_clients_pixels(measure, others):
    expected = measure(1.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, measure(others), expected)


@pytest.mark.nightly
def test_padding_is_not_there(task, models, measure):
    """Against the client's own samples, cut out by hand."""
    steps, (loss, _), tested = measure(1.0)
    data = jax.device_get(faces(1.0))
    model = jax.tree.map(lambda leaf: leaf[0], models)
    own = [
        view.order[view.start[CLIENT] :][: view.size[CLIENT]] for view in (data.train, data.test)
    ]
    losses = jax.jit(task.loss)
    train, test = (losses(model, data.x[rows], data.y[rows]) for rows in own)
    close([loss[0], steps[0][1], steps[1][1]], [train.mean()] * 3)
    close(tested, test)
    # a block of test samples is filled up with the last one, of client 2
    _, _, tested = measure(1.0, client=2)
    rows = data.test.order[data.test.start[2] :][:2]
    close(tested, losses(model, data.x[rows], data.y[rows]))

    @jax.jit
    @jax.grad
    def mean_gradient(model):
        return task.loss(model, data.x[own[0]], data.y[own[0]]).mean()

    grad = mean_gradient(model)
    for delta, _ in steps:
        close(delta, -0.1 * matrix(jax.tree.map(lambda leaf: leaf[None], grad))[0], 1e-4)


# running statistics


class Small(nn.Module):
    @nn.compact
    def __call__(self, x, owner=None):
        x = nn.relu(BatchNorm()(nn.Conv(3, (3, 3), use_bias=False)(x), owner))
        return nn.Dense(2, name="head")(x.reshape(len(x), -1))


RUNNING, MU = Small(), 0.3


@pytest.fixture(scope="module")
def running():
    return cfl.as_task(RUNNING, SHAPE, 2)


def change_statistics(params, change):
    return {**params, "batch_stats": jax.tree.map(change, params["batch_stats"])}


def train_by_hand(start, x, y, steps, local, mu):
    """Steps on one batch, with Flax's own way to keep statistics; returns the parameters."""
    weights, statistics = drop_statistics(start), start["batch_stats"]

    def loss(weights, statistics):
        both = {"params": weights, "batch_stats": statistics}
        out, new = RUNNING.apply(both, x, mutable="batch_stats")
        pull = pull_back(mu, weights, drop_statistics(start))
        return cross_entropy(out, y).mean() + pull, new["batch_stats"]

    velocity = jax.tree.map(jnp.zeros_like, weights)
    for _ in range(steps):
        grad, statistics = jax.grad(loss, has_aux=True)(weights, statistics)
        velocity = jax.tree.map(
            lambda v, g, p: local.momentum * v + g + local.weight_decay * p, velocity, grad, weights
        )
        weights = jax.tree.map(lambda p, v: p - local.lr * v, weights, velocity)
    return {**weights, "batch_stats": statistics}


@pytest.mark.nightly
def test_a_client_keeps_running_statistics_as_flax_does(running):
    """In padded batches; neither penalty nor momentum nor weight decay touches them."""
    data, mesh = faces(1.0), cfl.make_mesh(1)
    local = cfl.Local(
        0.1, 3, BATCH, momentum=0.5, weight_decay=0.1, execution=cfl.make_execution(mesh, 1)
    )
    plain = cfl.Local(0.1, 1, BATCH, execution=cfl.make_execution(mesh, 1))
    start = change_statistics(running.init(KEY), lambda leaf: leaf + 0.5)
    models = jax.tree.map(lambda leaf: leaf[None], start)
    ids = jnp.arange(3, dtype=jnp.int32)
    ways = (
        (sgd(running, local, proximal(MU, erm(running))), local, 3, MU),
        (gradient_step(running, plain), plain, 1, 0.0),
    )
    work = full_work(jnp.zeros(3, jnp.int32))
    view = jax.device_get(data.train)
    own = view.order[view.start[CLIENT] :][: view.size[CLIENT]]  # fewer than a batch
    for solve, local, steps, mu in ways:
        run = over_clients(solve, local.execution)
        upload = jax.jit(lambda run=run: run(Cohort(ids, ids), data, (KEY, models), work))()
        found = jax.tree.map(lambda leaf, old: leaf[CLIENT] + old, upload.delta, start)
        expected = train_by_hand(start, data.x[own], data.y[own], steps, local, mu)
        close(found, expected, 1e-3)
        moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), found, start)["batch_stats"]
        assert min(map(float, jax.tree.leaves(moved))) > 1e-3


@pytest.mark.nightly
def test_running_statistics_are_averaged_by_samples_whatever_the_server_does(running):
    data, select = faces(1.0), full_participation()
    local = cfl.Local(0.1, 1, BATCH, execution=cfl.make_execution(cfl.make_mesh(1), 1))
    method = cfl.algorithms.fedadam(running, local, select, server_lr=0.05)
    alone = cfl.algorithms.nonfed(running, local, select)
    state, own = method.init(KEY, data), alone.init(KEY, data)
    rows = own.rows["NonFed"]
    common = jax.tree.map(lambda leaf: jnp.repeat(leaf, 3, axis=0), state.groups)
    after, _ = jax.jit(method.round)(KEY, state, data)
    begun = own.put_rows({"NonFed": rows.replace(values=common)})
    each = jax.jit(alone.round)(KEY, begun, data)[0].rows["NonFed"].values
    mean = jax.tree.map(lambda leaf: np.average(leaf, 0, weights=TRAIN)[None], each)
    close(after.groups["batch_stats"], mean["batch_stats"], 1e-4)
    head, expected = (tree["head"]["kernel"] for tree in (after.groups, mean))
    assert not np.allclose(head, expected, atol=1e-3), "weights are stepped by the server's rule"


def test_a_model_answers_by_its_running_statistics(running):
    data = faces(1.0)
    params = change_statistics(running.init(KEY), lambda leaf: leaf + 0.2 * jnp.arange(leaf.size))
    x, y = np.asarray(data.x[:4]), np.asarray(data.y[:4])
    predict, loss = jax.jit(running.predict), jax.jit(running.loss)
    whole = predict(params, x)
    close(whole, np.concatenate([predict(params, x[i : i + 1]) for i in range(4)]))
    assert not np.allclose(predict(jax.jit(running.init)(KEY), x), whole, atol=1e-2)
    assert not np.allclose(loss(params, x, y, KEY), loss(params, x, y), atol=1e-2)
    slope = jax.jit(jax.grad(lambda params: running.loss(params, x, y).sum()))
    still = slope(params)["batch_stats"]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(still))


@pytest.mark.nightly
def test_no_feature_of_an_update_has_statistics_in_it(running):
    updates = jax.vmap(running.init)(jax.random.split(KEY, 5))
    other = change_statistics(updates, lambda leaf: 9 * leaf - 3)
    for measure in (
        gram,
        manhattan,
        squared_norms,
        last_tenth,
        l1_norm,
        lambda tree: edc(gram(tree), 3),
        lambda tree: edc_randomized(KEY, tree, 3),
        lambda tree: pull_back(MU, tree, jax.tree.map(jnp.zeros_like, tree)),
        lambda tree: nearest_center(tree, updates),
    ):
        np.testing.assert_array_equal(measure(other), measure(updates))
    bare = drop_statistics(updates)
    assert model_bytes(updates) - model_bytes(bare) == 4 * 5 * 2 * 3
    assert count_params(updates) == count_params(bare)


@pytest.mark.nightly
def test_statistics_that_are_not_finite_are_dropped(running):
    updates = jax.vmap(running.init)(jax.random.split(KEY, 3))
    broken = change_statistics(updates, lambda leaf: leaf.at[1].set(jnp.nan))
    ones = jnp.ones(3)
    upload = Upload(broken, ones, ones, ones, ones.astype(jnp.int32), jnp.zeros(3, jnp.int32))
    assert guard_nonfinite("drop", upload)[1].tolist() == [False, True, False]


class Image(Normed):
    """The same of images of one pixel."""

    @nn.compact
    def __call__(self, x, owner=None):
        return nn.Dense(CLASSES)(BatchNorm()(x[:, None, None, :], owner)[:, 0, 0, :])


class OfFlax(Normed):
    """The same by Flax's layer, which knows nothing of padding."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="BatchNorm_0")(x)
        return nn.Dense(CLASSES)(x)


@pytest.mark.parametrize("width", [1, nightly(4)])
@pytest.mark.parametrize("kind", [Normed, nightly(Image), nightly(OfFlax)])
def test_a_round_with_short_last_batches_equals_a_slow_twin(kind, width, toy, local):
    """Clients of 0 to 40 samples in batches of 5, on dense features."""
    task = cfl.as_task(kind(), (FEATURES,), CLASSES)
    one = with_execution(local, width=width)
    method = cfl.algorithms.fedavg(task, one, full_participation())
    before = method.init(KEY, toy)
    after = jax.jit(method.round)(KEY, before, toy)[0]
    start = jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), before.groups)
    clients = [k for k, size in enumerate(SIZES) if size]
    trained = [
        train(start, toy, batches_of(passes(key, toy, k, one.epochs), one.batch_size), one.lr)
        for key in [keys.derive_key(KEY, keys.TRAIN, 0)]
        for k in clients
    ]
    weights = [SIZES[k] for k in clients]
    mean = jax.tree.map(lambda *all: np.average(all, axis=0, weights=weights)[None], *trained)
    close(after.groups, mean, 1e-4)


@pytest.mark.parametrize("shape", [nightly((7, 6)), (7, 4, 6)])
def test_normalisations_take_samples_of_any_rank(shape):
    """As an image of as many pixels would be; padding is not there."""
    x, owner = normal(*shape), np.array([0, 0, 0, 0, 0, -1, -1])
    image = x.reshape(7, 1, -1, 6)
    given = (x, owner), (image, owner), (x[:5], owner[:5])
    for layer in (BatchNorm(), BatchStatNorm(), GroupNorm()):
        shapes = (jax.eval_shape(layer.init, KEY, each) for each in (x, image))
        chex.assert_trees_all_equal_shapes(*shapes)

        def answer(layer=layer):
            start = layer.init(KEY, image)
            return [layer.apply(start, *each, mutable="batch_stats") for each in given]

        (found, kept), (expected, same), (alone, own) = at_once(answer)
        close(found, expected.reshape(shape))
        close((found[:5], kept), (alone, own))
        close(kept, same)


class Merged(OfFlax):
    """It normalises time steps as if they were samples: which are padding cannot be known."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 1))
        return nn.Dense(CLASSES)(x.reshape(-1, FEATURES))


class Masked(Merged):
    """The same with a mask of its own."""

    @nn.compact
    def __call__(self, x, train=False, owner=None):
        real = None if owner is None else jnp.repeat(owner >= 0, FEATURES)[:, None]
        x = nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 1), mask=real)
        return nn.Dense(CLASSES)(x.reshape(-1, FEATURES))


def test_flax_normalises_real_samples_or_none(toy, local):
    x, y, owner = normal(6, FEATURES), np.zeros(6, np.int32), np.array([2, 2, 2, 2, -1, -1])
    merged, masked = (cfl.as_task(m, (FEATURES,), CLASSES) for m in (Merged(), Masked()))
    params = masked.init(KEY)
    mean = lambda params: masked.loss(params, x, y, KEY, owner)[:4].mean()  # noqa: E731
    slope = jax.jit(jax.grad(mean))(params)
    close(slope["batch_stats"]["BatchNorm_0"]["mean"], -0.01 * x[:4].mean(keepdims=True)[0])
    plain = cfl.as_task(OfFlax(), (FEATURES,), CLASSES)
    mean = lambda params: plain.loss(params, x, y, KEY, owner)[:4].mean()  # noqa: E731
    slope = jax.jit(jax.grad(mean))(plain.init(KEY))
    close(slope["batch_stats"]["BatchNorm_0"]["mean"], -0.1 * x[:4].mean(axis=0))
    one_line("receives (30, 1) of a batch of 6 samples", merged.loss, params, x, y, KEY, owner)
