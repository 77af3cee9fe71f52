"""Pseudo-samples of group models: the two samplers of MD-ICFL."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FEATURES, nightly, with_execution
from sklearn.datasets import load_digits

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.md_icfl.md_icfl import answer
from fedjax_cfl.algorithms.md_icfl.synthesis import Prior, back_search, class_labels, generator
from fedjax_cfl.errors import InputError
from fedjax_cfl.models.layers import BatchStatNorm
from fedjax_cfl.tasks.classification import cross_entropy

KEY = jax.random.key(3)
TURNS = 4


class Normalized(nn.Module):
    """A convolution whose channels are normalised over each client's batch, and a dense layer."""

    num_classes: int

    @nn.compact
    def __call__(self, x, owner=None):
        x = nn.relu(BatchStatNorm()(nn.Conv(4, (3, 3))(x), owner))
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))


@pytest.fixture(scope="module")
def rotated():
    """Sixteen clients of 150 digits, four for each quarter turn, all classes at each."""
    images, y = load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.permutation(len(y))[:150] for _ in range(4 * TURNS)])
    owner = np.repeat(np.arange(4 * TURNS), 150).astype(np.int32)
    turned = np.stack(
        [np.rot90(x[row], client // 4) for row, client in zip(rows, owner, strict=True)]
    )
    pool = cfl.Pool(turned, y[rows].astype(np.int32), 10)
    held = cfl.Partition(np.arange(len(rows)), owner, np.arange(len(rows)) % 10 == 9)
    return cfl.federate(pool, held, None)


@pytest.fixture(scope="module")
def reader():
    return cfl.as_task(cfl.models.MLP(10, hidden=(32,)), (8, 8), 10, l2=0.0)


@pytest.fixture(scope="module")
def trained(rotated, reader):
    """A model [4, ...] for each quarter turn, trained on its clients' digits."""
    owner = np.asarray(rotated.owner)

    def train(turn):
        rows = np.flatnonzero((owner // 4 == turn) & (np.arange(owner.size) % 10 != 9))
        return fit(reader, KEY, rotated.x[rows], rotated.y[rows], 300, 0.2)

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(train, range(TURNS)))


def fit(task, key, x, y, steps, lr):
    """Returns parameters after full-batch gradient steps."""

    def step(_, params):
        def loss(params):
            return jnp.mean(task.loss(params, x, y))

        return jax.tree.map(lambda p, g: p - lr * g, params, jax.grad(loss)(params))

    return jax.jit(lambda: jax.lax.fori_loop(0, steps, step, task.init(key)))()


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def confidence(task, models, samples, wrong=0):
    """Returns the mean cross-entropy of each model's samples at their labels + wrong."""
    label = (class_labels(samples.shape[1], samples.shape[2]) + wrong) % samples.shape[1]

    def one(model, own):
        return cross_entropy(task.predict(model, own.reshape(-1, *own.shape[2:])), label).mean()

    return np.asarray(jax.vmap(one)(models, samples))


@pytest.mark.nightly
def test_back_searched_samples_are_classified_by_a_trained_lenet(local):
    images, y = load_digits(return_X_y=True)
    x = np.pad(np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    x = (x[:100] / 8 - 1).astype(np.float32)
    task = cfl.as_task(cfl.models.LeNet(10, pytorch_init=False), (28, 28), 10, l2=0.0)
    model = fit(task, KEY, x, y[:100], 60, 0.1)
    assert np.mean(np.argmax(task.predict(model, x), -1) == y[:100]) > 0.8
    models = jax.tree.map(lambda leaf: leaf[None], model)
    data = cfl.federate(
        cfl.Pool(x, y[:100].astype(np.int32), 10),
        cfl.Partition(np.arange(100), np.zeros(100, np.int32), np.arange(100) > 80),
    )
    sampler = back_search(samples=1)(task, local)
    samples, _ = jax.jit(lambda: sampler.sample(KEY, (), models, data))()
    assert samples.shape == (1, 10, 1, 28, 28)
    assert confidence(task, models, samples)[0] < 0.1
    assert confidence(task, models, samples, wrong=1)[0] > 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    "make",
    [nightly(back_search(samples=5)), generator(samples=5, hidden=32, generator_steps=200)],
    ids=["back_search", "generator"],
)
def test_samples_do_not_depend_on_devices(make, reader, rotated, trained, local):
    three = jax.tree.map(lambda leaf: leaf[:3], trained)
    drawn = []
    for devices in (1, 4):
        sampler = make(
            reader,
            with_execution(local, mesh=cfl.make_mesh(devices)),
        )
        samples, _ = jax.jit(lambda s=sampler: s.sample(KEY, (), three, rotated))()
        drawn.append(np.asarray(samples))
    assert drawn[0].shape == (3, 10, 5, 8, 8)
    np.testing.assert_allclose(drawn[0], drawn[1], atol=2e-2)
    assert (confidence(reader, three, drawn[1]) < 0.3).all()


@pytest.mark.parametrize("mean,squared", [(0.0, False), (0.5, True)])
def test_back_search_is_adam_on_each_sample(linear, toy, models, local, mean, squared):
    """Of a linear model, step by step in NumPy: samples know nothing of each other."""
    settings = {"samples": 3, "prior": Prior(mean, 0.8, squared), "search_lr": 0.1}
    start, found = (
        np.asarray(
            back_search(**settings, search_steps=steps)(linear, local).sample(KEY, (), models, toy)[
                0
            ],
            np.float64,
        )
        for steps in (1, 12)
    )
    bias, kernel = (np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(models))

    def twin(x, model, label, steps):
        first = second = np.zeros_like(x)
        for step in range(1, steps + 1):
            error = softmax(x @ kernel[model] + bias[model]) - np.eye(toy.num_classes)[label]
            gap = x - mean
            pull = 0.8 * gap if squared else 0.4 * gap / np.linalg.norm(gap)
            slope = kernel[model] @ error + pull
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
            scale = np.sqrt(second / (1 - 0.999**step)) + 1e-8
            x = x - 0.1 * first / (1 - 0.9**step) / scale
        return x

    noise = np.asarray(jax.random.normal(KEY, (toy.num_classes * 3, 3, FEATURES)), np.float64)
    noise = noise.swapaxes(0, 1).reshape(3, toy.num_classes, 3, FEATURES)
    for model, label, number in np.ndindex(noise.shape[:3]):
        for steps, got in ((1, start), (12, found)):
            expected = twin(noise[model, label, number], model, label, steps)
            np.testing.assert_allclose(got[model, label, number], expected, atol=1e-4)


@pytest.mark.nightly
def test_samples_side_by_side_are_those_one_after_another(reader, rotated, trained, local):
    drawn = []
    for width in (1, 3):
        sampler = back_search(samples=2)(reader, with_execution(local, width=width))
        samples, _ = jax.jit(lambda s=sampler: s.sample(KEY, (), trained, rotated))()
        drawn.append(np.asarray(samples))
    np.testing.assert_allclose(drawn[0], drawn[1], atol=2e-2)


@pytest.mark.nightly
def test_the_prior_pulls_samples_to_its_mean(reader, rotated, trained, local):
    def distance(**settings):
        sampler = back_search(samples=2, **settings)(reader, local)
        samples, _ = jax.jit(lambda: sampler.sample(KEY, (), trained, rotated))()
        return float(jnp.mean(jnp.square(samples - 0.5)))

    weak, plain, square = (
        distance(prior=Prior(0.5, weight, squared))
        for weight, squared in ((0.0, False), (2.0, False), (2.0, True))
    )
    assert square < weak and plain < weak


@pytest.mark.nightly
def test_a_generator_minds_its_prior_and_its_bound(reader, rotated, trained, local):
    def draw(**settings):
        make = generator(samples=3, hidden=32, generator_steps=200, **settings)
        sampler = make(reader, local)
        return np.asarray(jax.jit(lambda: sampler.sample(KEY, (), trained, rotated))()[0])

    pulled, plain = (
        np.abs(draw(bounded=False, prior=Prior(3.0, weight, True)) - 3).mean()
        for weight in (10.0, 0.0)
    )
    assert pulled < 0.5 < 2 < plain
    assert np.abs(draw(prior=Prior(3.0, 10.0, True))).max() <= 1


WARM = pytest.mark.parametrize(
    "make",
    [
        lambda warm: back_search(samples=3, search_steps=3, warm_start=warm),
        nightly(lambda warm: generator(samples=3, hidden=32, generator_steps=30, warm_start=warm)),
    ],
    ids=["back_search", "generator"],
)


@pytest.mark.nightly
@WARM
def test_a_warm_sampler_goes_on_from_the_last_round(make, reader, rotated, trained, local):
    warm, cold = (make(each)(reader, local) for each in (True, False))
    memory = warm.init(KEY, trained, rotated)
    step = jax.jit(lambda memory: warm.sample(KEY, memory, trained, rotated))
    first, memory = step(memory)
    for _ in range(5):
        last, memory = step(memory)
    again, kept = jax.jit(lambda: cold.sample(KEY, (), trained, rotated))()
    assert kept == () and cold.init(KEY, trained, rotated) == ()
    before, after = (confidence(reader, trained, samples).mean() for samples in (first, last))
    assert after < before and after < confidence(reader, trained, again).mean()


@pytest.mark.nightly
@WARM
def test_a_warm_sampler_recovers_from_a_model_that_was_not_finite(
    make, reader, rotated, trained, local
):
    warm = make(True)(reader, local)
    spoilt = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), trained)
    step = jax.jit(lambda memory, models: warm.sample(KEY, memory, models, rotated))
    samples, memory = step(warm.init(KEY, trained, rotated), spoilt)
    assert np.isfinite(samples[0]).all() and not np.isfinite(samples[1]).any()
    samples, _ = step(memory, trained)
    assert np.isfinite(samples).all()


@pytest.mark.nightly
def test_pseudo_samples_share_no_batch_statistics(toy, local):
    """Of a network that normalises over a client's batch: one device or four, alone or together."""
    task = cfl.as_task(Normalized(10), (8, 8, 1), 10)
    models = jax.tree.map(lambda leaf: leaf[None], task.init(KEY))
    data = toy.replace(x=jnp.zeros((len(toy.y), 8, 8, 1)), num_classes=10)
    drawn = []
    for devices in (1, 4):
        own = with_execution(local, mesh=cfl.make_mesh(devices))
        sampler = back_search(samples=3, search_steps=5)(task, own)
        drawn.append(np.asarray(jax.jit(lambda s=sampler: s.sample(KEY, (), models, data))()[0]))
    np.testing.assert_allclose(drawn[0], drawn[1], atol=1e-4)
    model, samples = task.init(KEY), jnp.asarray(drawn[0][0])
    together, alone = answer(task, model, samples), answer(task, model, samples[:, :1])
    np.testing.assert_allclose(together[:, :1], alone, atol=1e-5)


@pytest.mark.parametrize(
    "make,settings",
    [(back_search, {"samples": 0}), (back_search, {"search_lr": -1.0}), (generator, {"hidden": 0})],
)
def test_settings_that_are_not_allowed(make, settings):
    name = next(iter(settings))
    with pytest.raises(InputError, match=f"algorithm.{name}=.*must be"):
        make(**settings)
