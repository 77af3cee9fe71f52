"""The models of the reproduced papers, and `as_task`, which makes a Task of any Flax module.

A model is a Flax module with a field `num_classes` that maps [B, ...] to logits [B, C], and `__call__` takes `train` if it has dropout.
Two attributes are optional: `decayed` names the layers whose kernels carry the L2 penalty, and `first_layer` a `nn.Dense` that is
called once, on the flat sample, which nothing else sees: then local training has a faster form (`dual`).
Parameter counts are those of 28x28x1 images and 10 classes, or of 25 x 300 word vectors and 2 classes, unless another shape is named.
FlexCFL: Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift", IEEE TPDS 2022,
https://doi.org/10.1109/TPDS.2021.3134263. FedGroup: Duan et al., "FedGroup: Efficient Federated Learning via Decomposed Similarity-Based
Clustering", 2020, https://arxiv.org/abs/2010.06870. FeSEM: Xie et al., "Multi-Center Federated Learning", 2020,
https://arxiv.org/abs/2005.01026. LEAF: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, https://arxiv.org/abs/1812.01097.
"""

import inspect
import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_cfl.errors import InputError, nearest
from fedjax_cfl.layers import GRU, LSTM, BatchStatNorm, Conv, dense, flat, images, max_pool
from fedjax_cfl.types import FirstLayer, Key, Params, Task


class MCLR(nn.Module):
    """Multinomial logistic regression on the flattened sample (7,850 parameters)."""

    num_classes: int
    decayed: ClassVar[tuple[str, ...]] = ("head",)
    first_layer: ClassVar[str] = "head"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [B, C]."""
        return dense(self.num_classes, "head")(flat(x))


class MLP(nn.Module):
    """Fully connected relu network on the flattened sample (101,770 parameters with 128 hidden units, 407,050 with 512)."""

    num_classes: int
    hidden: tuple[int, ...] = (128,)

    @property
    def decayed(self) -> tuple[str, ...]:
        """All layers carry the L2 penalty."""
        return (*(f"hidden_{i}" for i in range(len(self.hidden))), "head")

    @property
    def first_layer(self) -> str:
        """The layer that sees the sample."""
        return self.decayed[0]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [B, C]."""
        x = flat(x)
        for i, width in enumerate(self.hidden):
            x = nn.relu(dense(width, f"hidden_{i}")(x))
        return dense(self.num_classes, "head")(x)


class MnistCNN(nn.Module):
    """FlexCFL's MNIST CNN: two 3x3 convolutions, dropout before the output layer (50,186 parameters)."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = images(x)
        for features in (32, 64):
            x = max_pool(nn.relu(Conv(features, 3)(x)))
        x = nn.Dropout(0.5, deterministic=not train)(flat(x))
        return dense(self.num_classes, "head")(x)


class FemnistCNN(nn.Module):
    """FlexCFL's FEMNIST CNN: six convolutions, strided instead of pooled, without batch normalisation (325,578 parameters)."""

    num_classes: int
    decayed: ClassVar[tuple[str, ...]] = ("hidden", "head")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = images(x)
        for features in (32, 64):
            x = nn.relu(Conv(features, 3, padding="valid")(x))
            x = nn.relu(Conv(features, 3, padding="valid")(x))
            x = nn.relu(Conv(features, 5, strides=2)(x))
            x = nn.Dropout(0.4, deterministic=not train)(x)
        x = nn.relu(dense(128, "hidden")(flat(x)))
        x = nn.Dropout(0.4, deterministic=not train)(x)
        return dense(self.num_classes, "head")(x)


class LeafCNN(nn.Module):
    """LEAF's FEMNIST CNN: two 5x5 convolutions and one hidden layer, whose width the papers change.

    FlexCFL's FashionMNIST CNN has 1,024 hidden units (3,274,634 parameters); with 62 classes FeSEM's code has 248 (845,510) and
    LEAF itself 2,048 (6,603,710).
    """

    num_classes: int
    hidden: int = 2048

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = images(x)
        for features in (32, 64):
            x = max_pool(nn.relu(Conv(features, 5)(x)))
        x = nn.relu(dense(self.hidden, "hidden")(flat(x)))
        return dense(self.num_classes, "head")(x)


class CelebaCNN(nn.Module):
    """FeSEM's CelebA CNN: four normalised 3x3 convolutions (31,202 parameters on 84x84x3 with 2 classes).

    The batch statistics normalise even in test, as in LEAF's code, so that a prediction depends on the batch it is made in.
    """

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = images(x)
        for _ in range(4):
            x = nn.relu(max_pool(BatchStatNorm()(Conv(32, 3)(x)), "same"))
        return dense(self.num_classes, "head")(flat(x))


class LeNet(nn.Module):
    """LeNet-5 with relu and max-pooling (44,426 parameters; 61,706 on 32x32x1, 62,006 on 32x32x3)."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = images(x)
        for features in (6, 16):
            x = max_pool(nn.relu(Conv(features, 5, padding="valid")(x)))
        x = nn.relu(dense(120, "hidden_0")(flat(x)))
        x = nn.relu(dense(84, "hidden_1")(x))
        return dense(self.num_classes, "head")(x)


class BiGRU(nn.Module):
    """FlexCFL's Sent140 GRU: two bi-directional layers, 64 then 32 units each way (175,938 parameters)."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, T, in] -> [B, C]."""
        return _bidirectional(GRU, x, self.num_classes, train)


class BiLSTM(nn.Module):
    """FlexCFL's Sent140 LSTM: two bi-directional layers, 64 then 32 units each way (232,386 parameters)."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, T, in] -> [B, C]."""
        return _bidirectional(LSTM, x, self.num_classes, train)


def _bidirectional(layer: type[nn.Module], x: jax.Array, num_classes: int, train: bool) -> jax.Array:
    for features, sequences in ((64, True), (32, False)):
        x = jnp.concatenate([layer(features, reverse, sequences)(x) for reverse in (False, True)], axis=-1)
    x = nn.Dropout(0.5, deterministic=not train)(nn.relu(dense(64, "hidden")(x)))
    return dense(num_classes, "head")(x)


class StackedLSTM(nn.Module):
    """FedGroup's Sent140 LSTM: two layers of 100 units and a linear layer of 30 (243,861 parameters, 2 classes only).

    The papers' sigmoid cross-entropy of one output z is the softmax cross-entropy of the logits [0, z] returned here.
    """

    num_classes: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, in] -> [B, 2]."""
        x = LSTM(100)(LSTM(100, sequences=True)(x))
        return _two_logits(dense(1, "head")(dense(30, "hidden")(x)))


class StackedGRU(nn.Module):
    """GrouProx' Sent140 GRU: layers of 64 and 32 units and a linear layer of 64 (81,857 parameters, 2 classes only).

    Differs from that code: its TensorFlow 1 cell resets before the recurrent product, with one bias per gate.
    """

    num_classes: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, in] -> [B, 2]."""
        x = GRU(32)(GRU(64, sequences=True)(x))
        return _two_logits(dense(1, "head")(dense(64, "hidden")(x)))


def _two_logits(z: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros_like(z), z], axis=-1)


def as_float(x: jax.Array) -> jax.Array:
    """Reads uint8 pixels as x / 255; leaves any other type as it is."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def as_task(module: nn.Module, sample_shape: tuple[int, ...], num_classes: int, l2: float = 0.001) -> Task:
    """Makes a Task of a Flax module: cross-entropy plus l2 * sum(kernel^2) over the layers the module calls `decayed`.

    Every sample of `loss` carries the whole penalty, so that the mean over any batch carries it once. Dropout is active only with a key.
    Raises InputError if the module cannot take samples of this shape or does not return one logit per class.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"model {module!r}: a flax.linen.Module is allowed")
    if not l2 >= 0:
        raise InputError(f"l2 {l2}: a number >= 0 is allowed")
    takes_train = "train" in inspect.signature(module.__call__).parameters
    decayed = getattr(module, "decayed", ()) if l2 else ()

    def init(key: Key) -> Params:
        variables = module.init(key, jnp.zeros((1, *sample_shape)), **({"train": False} if takes_train else {}))
        if extra := sorted(set(variables) - {"params"}):
            raise ValueError(f"it keeps {extra} besides params, which are not trained: batch or group statistics are allowed")
        return variables.get("params", {})

    def cross_entropy(z: jax.Array, y: jax.Array) -> jax.Array:
        # One-hot instead of indexing: the gradient of a gather is a scatter, slow inside a loop.
        return jax.nn.logsumexp(z, axis=-1) - jnp.sum(z * jax.nn.one_hot(y, num_classes, dtype=z.dtype), axis=-1)

    def logits(params: Params, x: jax.Array, key: Key | None) -> jax.Array:
        rngs = None if key is None else {"dropout": key}
        return module.apply({"params": params}, as_float(x), rngs=rngs, **({"train": key is not None} if takes_train else {}))

    def loss(params: Params, x: jax.Array, y: jax.Array, key: Key | None = None) -> jax.Array:
        each = cross_entropy(logits(params, x, key), y)
        return each + l2 * sum(jnp.sum(jnp.square(params[name]["kernel"])) for name in decayed) if decayed else each

    def predict(params: Params, x: jax.Array) -> jax.Array:
        return logits(params, x, None)

    def from_first(params: Params, z: jax.Array, y: jax.Array, key: Key | None) -> jax.Array:
        def instead(call, arguments, options, context):
            bias = params[first].get("bias", 0.0) if first in params else 0.0
            return z + bias if context.module.path == (first,) and context.method_name == "__call__" else call(*arguments, **options)

        with nn.intercept_methods(instead):
            out = logits(params, jnp.zeros((z.shape[0], *sample_shape)), key)
        others = [name for name in decayed if name != first]
        return cross_entropy(out, y) + l2 * sum(jnp.sum(jnp.square(params[name]["kernel"])) for name in others)

    first = getattr(module, "first_layer", None)
    task = Task(init, loss, predict)
    params = _check(task, type(module).__name__, sample_shape, num_classes, decayed, first)
    if not first:
        return task
    shape = params[first]["kernel"].shape
    return task._replace(first=FirstLayer(first, shape, l2 if first in decayed else 0.0, lambda x: flat(as_float(x)), from_first))


def _check(task: Task, name: str, sample_shape: tuple[int, ...], num_classes: int, decayed: tuple[str, ...], first: str | None) -> Params:
    # Returns the parameters' shapes; nothing is computed. What a foreign module may raise is unknown, hence the broad except.
    try:
        params = jax.eval_shape(task.init, jax.random.key(0))
        out = jax.eval_shape(task.predict, params, jax.ShapeDtypeStruct((2, *sample_shape), jnp.float32))
    except Exception as error:
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"model {name} cannot take samples of shape {tuple(sample_shape)}: {cause}") from error
    shape = getattr(out, "shape", type(out).__name__)
    if shape != (2, num_classes):
        raise InputError(f"model {name} returns {shape} for 2 samples of shape {tuple(sample_shape)}: (2, {num_classes}) is allowed")
    if first and params.get(first, {}).get("kernel", out).shape[:1] != (math.prod(sample_shape),):
        allowed = f"a Dense layer called on the flat sample is allowed{nearest(first, params)}"
        raise InputError(f"model {name}: first_layer names {first!r}, {allowed}")
    for layer in decayed:
        if "kernel" not in params.get(layer, {}):
            raise InputError(f"model {name}: decayed names {layer!r}, a layer with a kernel is allowed{nearest(layer, params)}")
    return params


def count(params: Params) -> int:
    """Returns the number of parameters, of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def model_bytes(params: Params) -> int:
    """Returns the bytes one model takes, in memory and on the wire."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
