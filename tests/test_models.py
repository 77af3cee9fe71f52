"""Models: exact sizes, initialisation, and the terms of the loss."""

import pathlib

import flax.linen as nn
import hydra
import jax
import numpy as np
import pytest
from conftest import at_once, nightly
from flax import nnx
from omegaconf import OmegaConf
from test_layers import KEY, close, normal

from fedjax_cfl.errors import InputError
from fedjax_cfl.models.residual import MobileNetV2, ResNet18
from fedjax_cfl.models.task import as_task, count_params, model_bytes
from fedjax_cfl.models.zoo import MCLR, BiGRU, FemnistCNN, LeNet, MnistCNN, StackedLSTM

CONF = pathlib.Path(__file__).parents[1] / "conf" / "model"
IMAGE, WORDS, FACE = (28, 28), (25, 300), (84, 84, 3)
SIZES = [  # conf file, sample shape, classes, parameters as published or as counted from the layers
    ("mclr", IMAGE, 10, 7_850),
    ("mclr", (784,), 26, 20_410),
    ("mclr", (60,), 10, 610),
    ("mlp", (784,), 10, 101_770),
    ("small_mlp", (2,), 2, 102),
    ("femnist_mlp", IMAGE, 10, 407_050),
    ("femnist_mlp", IMAGE, 26, 415_258),
    ("mnist_cnn", IMAGE, 10, 50_186),
    ("femnist_cnn", (28, 28, 1), 10, 325_578),
    ("fmnist_cnn", IMAGE, 10, 3_274_634),
    ("gru", WORDS, 2, 175_938),
    ("lstm", WORDS, 2, 232_386),
    ("fedgroup_lstm", WORDS, 2, 243_861),
    ("char_lstm", (80,), 80, 817_872),
    ("grouprox_gru", WORDS, 2, 81_857),
    ("fesem_cnn", IMAGE, 62, 845_510),
    ("leaf_cnn", IMAGE, 62, 6_603_710),
    ("fesem_celeba_cnn", FACE, 2, 31_202),
    ("celeba_cnn", FACE, 2, 31_202),
    ("lenet", IMAGE, 10, 44_426),
    ("lenet", (32, 32, 1), 10, 61_706),
    ("lenet", (32, 32, 3), 10, 62_006),
    ("resnet18", (32, 32, 3), 10, 11_173_962),
    ("mobilenet_v2", (32, 32, 3), 10, 2_296_922),
    ("resnet18_bn", (32, 32, 3), 10, 11_173_962),
    ("mobilenet_v2_bn", (32, 32, 3), 10, 2_296_922),
]
OTHER_SIZES = [
    (ResNet18(62, stem=7), (224, 224, 3), 62, 11_208_318),
    (MobileNetV2(10, small_images=False), (224, 224, 3), 10, 2_236_682),
]
STATISTICS = {"resnet18_bn": 9_600, "mobilenet_v2_bn": 35_088}
# at small width: test_residual
LARGE = {"resnet18", "mobilenet_v2", *STATISTICS}
SMALL = [  # every conf file once, on the smallest sample it takes, to keep the compilation short
    *(
        (name, (4, 4), 3)
        for name in (
            "mclr",
            "mlp",
            "small_mlp",
            "femnist_mlp",
            "mnist_cnn",
            "fmnist_cnn",
            "fesem_cnn",
            "leaf_cnn",
        )
    ),
    ("femnist_cnn", (14, 14), 3),
    ("fesem_celeba_cnn", (5, 6, 3), 2),
    ("celeba_cnn", (5, 6, 3), 2),
    ("lenet", (16, 16), 3),
    *((name, (3, 4), 2) for name in ("gru", "lstm", "fedgroup_lstm", "grouprox_gru")),
    ("char_lstm", (4,), 3),
]
OFTEN = ("mclr", "mlp", "mnist_cnn", "lenet", "gru")  # in every run: one of every kind
DROPOUT = {"mnist_cnn", "femnist_cnn", "gru", "lstm"}


def build(name: str, num_classes: int) -> nn.Module:
    """Instantiates a file of conf/model as the command line does."""
    return hydra.utils.instantiate(
        OmegaConf.load(CONF / f"{name}.yaml").module, num_classes=num_classes
    )


def started(task):
    """Initial parameters; compiled, which spares the forward pass of Flax."""
    return jax.jit(task.init)(KEY)


@pytest.mark.parametrize(("name", "shape", "classes", "size"), SIZES)
def test_the_number_of_parameters_is_the_published_one(name, shape, classes, size):
    params = jax.eval_shape(as_task(build(name, classes), shape, classes).init, KEY)
    assert count_params(params) == size
    assert model_bytes(params) == 4 * (size + STATISTICS.get(name, 0))


@pytest.mark.nightly
@pytest.mark.parametrize(("module", "shape", "classes", "size"), OTHER_SIZES)
def test_other_layouts_have_their_published_size(module, shape, classes, size):
    assert count_params(jax.eval_shape(as_task(module, shape, classes).init, KEY)) == size


def test_every_conf_file_is_tested():
    files = {path.stem for path in CONF.glob("*.yaml")}
    assert files == {row[0] for row in SIZES} == {row[0] for row in SMALL} | LARGE
    assert all(OmegaConf.load(CONF / f"{name}.yaml").name == name for name in files)


@pytest.mark.parametrize(
    ("name", "shape", "classes"), [row if row[0] in OFTEN else nightly(*row) for row in SMALL]
)
def test_losses_are_per_sample_and_gradients_finite_and_dropout_needs_a_key(name, shape, classes):
    task = as_task(build(name, classes), shape, classes)
    params = started(task)
    x = normal(6, *shape)
    y = np.arange(6) % classes

    @jax.jit
    def keyed(params, key):
        def mean_loss(params):
            losses = task.loss(params, x, y, key)
            return losses.mean(), losses

        return jax.grad(mean_loss, has_aux=True)(params)

    grads, once = keyed(params, jax.random.key(2))
    (_, again), (_, other) = keyed(params, jax.random.key(2)), keyed(params, jax.random.key(3))
    plain, logits = jax.jit(lambda p: (task.loss(p, x, y), task.predict(p, x)))(params)
    assert plain.shape == once.shape == (6,) and logits.shape == (6, classes)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads) if leaf.ndim > 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((grads, plain, logits)))
    np.testing.assert_array_equal(once, again)
    assert np.allclose(once, other) == np.allclose(once, plain) == (name not in DROPOUT)
    logits = np.asarray(logits, np.float64)
    cross_entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(6), y]
    penalty = sum(
        0.001 * np.square(params[layer]["kernel"]).sum()
        for layer in getattr(build(name, classes), "decayed", ())
    )
    close(plain, cross_entropy + penalty)  # no dropout in either, or they would differ


def test_kernels_start_in_the_glorot_range_and_biases_at_zero():
    params = started(as_task(MnistCNN(10), IMAGE, 10))
    fans = {"Conv_0": (9 * 1, 9 * 32), "Conv_1": (9 * 32, 9 * 64), "head": (3136, 10)}
    assert set(params) == set(fans)
    for layer, (fan_in, fan_out) in fans.items():
        bound = np.sqrt(6 / (fan_in + fan_out))
        kernel = np.asarray(params[layer]["kernel"])
        assert 0.95 * bound < np.abs(kernel).max() <= bound
        assert abs(kernel.std() / (bound / np.sqrt(3)) - 1) < 0.1
        assert not np.asarray(params[layer]["bias"]).any()


@pytest.mark.nightly
def test_two_logits_give_the_sigmoid_cross_entropy():
    task = as_task(StackedLSTM(), (3, 4), 2)
    params = started(task)
    x = 5 * normal(4, 3, 4)
    y = np.array([0, 1, 1, 0])
    z, loss = jax.jit(lambda p: (task.predict(p, x), task.loss(p, x, y)))(params)
    assert not z[:, 0].any()
    close(loss, np.log1p(np.exp(z[:, 1])) - y * z[:, 1])


def test_l2_is_a_thousandth_of_the_squared_kernels():
    x, y = normal(5, 7), np.arange(5) % 3
    decayed, plain = as_task(MCLR(3), (7,), 3), as_task(MCLR(3), (7,), 3, l2=0)
    params = jax.tree.map(lambda p: p + 0.5, started(plain))
    logits = x @ np.asarray(params["head"]["kernel"]) + 0.5
    cross_entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(5), y]
    close(plain.loss(params, x, y), cross_entropy)
    close(
        decayed.loss(params, x, y),
        cross_entropy + 0.001 * np.sum(np.square(params["head"]["kernel"])),
    )

    with_l2, without = (
        jax.jit(jax.grad(lambda p, task=task: task.loss(p, x, y).mean()))(params)
        for task in (decayed, plain)
    )
    close(
        with_l2["head"]["kernel"] - without["head"]["kernel"],
        0.002 * params["head"]["kernel"],
        1e-4,
    )
    np.testing.assert_array_equal(with_l2["head"]["bias"], without["head"]["bias"])
    with pytest.raises(InputError, match="l2=-1: must be a finite number >= 0"):
        as_task(MCLR(3), (7,), 3, l2=-1)


def test_only_the_listed_layers_are_decayed():
    sizes = {
        "mlp": 2,
        "mclr": 1,
        "femnist_cnn": 2,
        "mnist_cnn": 0,
        "fmnist_cnn": 0,
        "gru": 0,
        "lstm": 0,
    }
    for name, layers_decayed in sizes.items():
        assert len(getattr(build(name, 3), "decayed", ())) == layers_decayed
        assert (OmegaConf.load(CONF / f"{name}.yaml").l2 > 0) == (layers_decayed > 0)


def test_uint8_pixels_are_read_as_fractions():
    x = np.random.default_rng(0).integers(0, 256, (4, 28, 28), np.uint8)
    y = np.arange(4)
    task = as_task(LeNet(10), IMAGE, 10)
    params = started(task)
    fractions = x.astype(np.float32) / 255
    close(jax.jit(task.predict)(params, x), jax.jit(task.predict)(params, fractions))
    close(jax.jit(task.loss)(params, x, y), jax.jit(task.loss)(params, fractions[..., None], y))


@pytest.mark.nightly
def test_lenet_starts_as_in_pytorch_or_as_in_keras():
    """PyTorch's layers: kernels and biases uniform in +-1 / sqrt(inputs of an output)."""
    params = started(as_task(LeNet(10), IMAGE, 10))
    assert len(params) == 5
    for layer in params.values():
        reach = np.prod(layer["kernel"].shape[:-1]) ** -0.5
        for values in (layer["kernel"], layer["bias"]):
            assert 0.6 < np.abs(values).max() / reach <= 1
        np.testing.assert_allclose(np.std(layer["kernel"]), reach / 3**0.5, rtol=0.1)
    params = started(as_task(LeNet(10, pytorch_init=False), IMAGE, 10))
    assert all(not layer["bias"].any() for layer in params.values())
    reach = (6 / (256 + 120)) ** 0.5
    assert 0.95 < np.abs(params["hidden_0"]["kernel"]).max() / reach <= 1


class Plain(nn.Module):
    num_classes: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x)


class Trained(nn.Module):
    num_classes: int = 4
    decayed = ("Dense_0",)

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(self.num_classes)(x))


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("counts", "calls", np.zeros, ())
        return nn.Dense(4)(x)


class Running(Plain):
    first_layer = "Dense_0"

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(self.num_classes)(x)
        return nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)


class Misspelt(Plain):
    decayed = ("Dense_O",)


def test_a_users_module_works_with_and_without_train():
    x, y = normal(3, 5), np.array([0, 3, 1])
    plain, trained = as_task(Plain(), (5,), 4), as_task(Trained(), (5,), 4)
    params = started(plain)
    np.testing.assert_array_equal(plain.loss(params, x, y, KEY), plain.loss(params, x, y))
    assert not np.allclose(trained.loss(params, x, y, KEY), trained.loss(params, x, y))
    close(
        trained.loss(params, x, y) - plain.loss(params, x, y),
        np.full(3, 0.001 * np.square(params["Dense_0"]["kernel"]).sum()),
        1e-4,
    )
    task = as_task(Running(), (5,), 4)
    assert task.first_layer is None, "statistics have no sample-space form"
    params = started(task)
    gradient = at_once(jax.grad(lambda params: task.loss(params, x, y, KEY).mean()), params)
    mean = (x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]).mean(0)
    close(gradient["batch_stats"]["BatchNorm_0"]["mean"], 0 - 0.5 * mean)


@pytest.mark.parametrize(
    ("module", "shape", "classes", "words"),
    [
        (LeNet(10), (784,), 10, r"LeNet .*\(784,\).*\[H, W\]"),
        (LeNet(10), (8, 8), 10, "LeNet .*larger images"),
        (FemnistCNN(10), (2, 28, 28, 1), 10, "FemnistCNN .*images"),
        (BiGRU(2), (300,), 2, r"BiGRU .*\[T, features\]"),
        (StackedLSTM(10), (25, 300), 10, r"StackedLSTM returns \(2, 2\).*\(2, 10\) is allowed"),
        (MCLR(10), (784,), 26, r"MCLR returns \(2, 10\)"),
        (Plain(), (5, 5), 4, r"Plain returns \(2, 5, 4\)"),
        (Counting(), (5,), 4, "Counting .*keeps .'counts'. beside params and batch_stats"),
        (LeNet(10), (3, 32, 32), 10, "LeNet .*come first here: store numpy.moveaxis"),
        (
            nnx.Linear(5, 4, rngs=nnx.Rngs(0)),
            (5,),
            4,
            "model Linear: .*flax.nnx module with flax.lin",
        ),
        (Misspelt(), (5,), 4, r"Misspelt: decayed .*did you mean 'Dense_0'"),
        ("lenet", (28, 28), 10, "module=lenet: must be a Module of flax"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(module, shape, classes, words):
    with pytest.raises(InputError, match=words) as caught:
        as_task(module, shape, classes)
    assert "\n" not in str(caught.value)
