"""Pseudo-samples of every group and class, made on the server from the group models alone
(MD-ICFL, sections 3.3 and 4; see `algorithms/md_icfl`).

A `Sampler` looks for inputs that a model is sure to belong to a class, and that lie near
the mean of all inputs: by changing them directly (`back_search`), or through a generator
(`generator`, after Zhu et al. 2021, https://arxiv.org/abs/2105.10056). m models, C
classes, M samples of a class. Samples are in the units that a model reads: pixels as they
are stored if these are float32, else from 0 to 1.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from typing_extensions import TypeAliasType

from fedjax_cfl.client.cohort import run_clients
from fedjax_cfl.client.executor import Loop, Program, map_result
from fedjax_cfl.client.local import Local
from fedjax_cfl.sharding import over_devices
from fedjax_cfl.tasks.classification import cross_entropy
from fedjax_cfl.tree import squared_leaf_norms, take_rows, where_rows
from fedjax_cfl.types import FederatedData, Key, Params, Task
from fedjax_cfl.validation import Count, PositiveFloat, PositiveInt, checked

NOISE = 16  # length of a generator's noise (MD-ICFL, section 4)


class Sampler(NamedTuple):
    """How the server makes pseudo-samples, and what it keeps of them from round to round."""

    init: Callable[..., Any]  # (key, models [m, ...], data) -> memory
    # (key, memory, models [m, ...], data) -> (samples [m, C, M, ...], memory)
    sample: Callable[..., tuple[jax.Array, Any]]


MakeSampler = TypeAliasType("MakeSampler", Callable[[Task, Local], Sampler])


class Prior(NamedTuple):
    """Where samples are likely to lie."""

    prior_mean: float = 0.0  # of every input value
    prior_weight: float = 0.1  # lambda of eqs. 6 and 7
    squared: bool = False  # ||x - mean||^2; False: the norm as it is printed

    def penalty(self, x: jax.Array) -> jax.Array:
        """Returns lambda / 2 ||x - mean|| [B] of samples [B, ...]."""
        square = jnp.sum(jnp.square(x - self.prior_mean).reshape(len(x), -1), axis=1)
        return self.prior_weight / 2 * (square if self.squared else jnp.sqrt(square + 1e-12))


def class_labels(num_classes: int, samples: int) -> jax.Array:
    """Returns the labels [C * samples] int32 of pseudo-samples: 0, 0, ..., 1, 1, ..."""
    return jnp.repeat(jnp.arange(num_classes, dtype=jnp.int32), samples)


def no_memory(key: Key, models: Params, data: FederatedData) -> tuple:
    """Returns the memory of a sampler that keeps nothing from round to round."""
    return ()


def run_models(solve: Callable[[Any], Program], local: Local, inputs: Any) -> Any:
    """Runs the loop solve(input of one model) of each of the `inputs` [m, ...], as the clients of
    a cohort are run.
    """
    models = len(jax.tree.leaves(inputs)[0])

    def solve_slot(slot):
        return solve(take_rows(inputs, slot))

    return run_clients(solve_slot, jnp.ones(models, bool), local.execution)


def draw_noise(samples: int, key: Key, models: Params, data: FederatedData) -> jax.Array:
    """Draws what a search starts from: `samples` of each class and model [C M, m, ...]."""
    count = len(jax.tree.leaves(models)[0])
    return jax.random.normal(key, (data.num_classes * samples, count, *data.x.shape[1:]))


@checked("algorithm")
def back_search(
    samples: Count = 30,
    search_lr: PositiveFloat = 0.1,
    search_steps: PositiveInt = 100,
    prior: Prior = Prior(),
    warm_start: bool = False,
) -> MakeSampler:
    """Searches by Adam, from Gaussian noise, for inputs x that minimise cross-entropy(x, k) +
    lambda / 2 ||x - mean|| for each class k (eq. 6). Each sample has a gradient and an Adam
    state of its own. Devices split the samples.

    Args: `samples` is M; `search_lr` and `search_steps` are Adam's step size and steps; `prior`
    has lambda and the mean; `warm_start` goes on from the samples of the round before, so that
    fewer steps do. Raises InputError for a value that is not allowed.
    """
    adam = optax.adam(search_lr)

    def make(task: Task, local: Local) -> Sampler:
        mesh = local.execution.mesh

        def objective(x, model, label):
            each = cross_entropy(predict_alone(task, model, x), label) + prior.penalty(x)
            return jnp.sum(each)

        def search(one):
            model, x, label = one

            def step(_, carry):
                x, moments = carry
                update, moments = adam.update(jax.grad(objective)(x, model, label), moments)
                return optax.apply_updates(x, update), moments

            return Loop(search_steps, (x, adam.init(x)), step, lambda carry: carry[0])

        def block(models, inputs):
            noise, label = inputs  # [n, m, ...], [n, m]
            found = run_models(search, local, (models, noise.swapaxes(0, 1), label.T))
            return found.swapaxes(0, 1)

        def sample(key: Key, memory: Any, models: Params, data: FederatedData):
            count, shape = len(jax.tree.leaves(models)[0]), data.x.shape[1:]
            label = class_labels(data.num_classes, samples)
            noise = draw_noise(samples, key, models, data)
            if warm_start:
                noise = jnp.where(jnp.isfinite(memory), memory, noise)
            spare = -label.size % mesh.size
            padded, labels = (
                jnp.pad(array, ((0, spare), *[(0, 0)] * (array.ndim - 1)))
                for array in (noise, jnp.broadcast_to(label[:, None], (label.size, count)))
            )
            found = over_devices(block, mesh)(models, (padded, labels))[: label.size]
            drawn = found.swapaxes(0, 1).reshape(count, data.num_classes, samples, *shape)
            return drawn, found if warm_start else memory

        return Sampler(partial(draw_noise, samples) if warm_start else no_memory, sample)

    return make


class Generator(nn.Module):
    """A conditional generator: two dense layers, the first with batch normalisation and relu
    (MD-ICFL, section 4).

    `bounded` ends with tanh: inputs lie in [-1, 1].
    """

    hidden: int
    shape: tuple[int, ...]  # of a sample
    classes: int  # C
    bounded: bool

    @nn.compact
    def __call__(self, noise: jax.Array, label: jax.Array, train: bool) -> jax.Array:
        """Noise [B, noise] and labels [B] int32 -> samples [B, ...]."""
        given = jnp.concatenate([noise, jax.nn.one_hot(label, self.classes)], axis=-1)
        x = nn.Dense(self.hidden)(given)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dense(math.prod(self.shape))(x).reshape(-1, *self.shape)
        return jnp.tanh(x) if self.bounded else x


def new_variables(module: Generator, keys: Key) -> Any:
    """Returns new variables [m, ...] of a generator for each of m keys."""
    noise, label = jnp.zeros((1, NOISE)), jnp.zeros(1, jnp.int32)
    return jax.vmap(lambda key: module.init(key, noise, label, False))(keys)


class GeneratorTraining(NamedTuple):
    """How a generator is trained for one model."""

    task: Task
    prior: Prior
    adam: optax.GradientTransformation
    steps: int
    batch: int  # random labels in one step
    module: Generator

    def train(self, key: Key, variables: Any, model: Params) -> Loop:
        """Returns the training of the variables, `steps` steps that minimise eq. 7. `model` is the
        one whose samples the generator learns.
        """

        def objective(params, statistics, noise, label):
            variables = {"params": params, "batch_stats": statistics}
            x, changed = self.module.apply(variables, noise, label, True, mutable=["batch_stats"])
            logits = predict_alone(self.task, model, x)
            each = cross_entropy(logits, label) + self.prior.penalty(x)
            return jnp.mean(each), changed["batch_stats"]

        def step(number, carry):
            params, statistics, moments = carry
            keys = jax.random.split(jax.random.fold_in(key, number))
            noise = jax.random.normal(keys[0], (self.batch, NOISE))
            label = jax.random.randint(keys[1], (self.batch,), 0, self.module.classes)
            gradient, statistics = jax.grad(objective, has_aux=True)(
                params, statistics, noise, label
            )
            update, moments = self.adam.update(gradient, moments)
            return optax.apply_updates(params, update), statistics, moments

        params, statistics = variables["params"], variables["batch_stats"]
        begun = params, statistics, self.adam.init(params)
        return Loop(
            self.steps, begun, step, lambda carry: {"params": carry[0], "batch_stats": carry[1]}
        )


@checked("algorithm")
def generator(
    samples: Count = 30,
    hidden: PositiveInt = 256,
    generator_lr: PositiveFloat = 0.01,
    generator_steps: PositiveInt = 1000,
    generator_batch: Count = 100,
    prior: Prior = Prior(),
    bounded: bool = True,
    warm_start: bool = False,
) -> MakeSampler:
    """Trains a conditional generator for each model (eq. 7) and draws from it. Devices split
    the models.

    Args: `samples` is M, of each class and group; `hidden` is the width of the generator's
    hidden layer; `generator_lr` is Adam's step size, `generator_steps` the number of steps and
    `generator_batch` the random labels in one; `prior` has lambda and the mean; `bounded` ends
    with tanh; `warm_start` goes on from the generators of the round before, otherwise they are
    new in every round. Raises InputError for a value that is not allowed.
    """
    adam = optax.adam(generator_lr)

    def make(task: Task, local: Local) -> Sampler:
        def make_module(data: FederatedData) -> Generator:
            return Generator(hidden, data.x.shape[1:], data.num_classes, bounded)

        def init(key: Key, models: Params, data: FederatedData):
            keys = jax.random.split(key, len(jax.tree.leaves(models)[0]))
            return new_variables(make_module(data), keys)

        def sample(key: Key, memory: Any, models: Params, data: FederatedData):
            module, labels = make_module(data), class_labels(data.num_classes, samples)
            settings = task, prior, adam, generator_steps, generator_batch
            training = GeneratorTraining(*settings, module)

            def one(inputs):
                keys, variables, model = inputs

                def draw(variables):
                    noise = jax.random.normal(keys[1], (labels.size, NOISE))
                    return module.apply(variables, noise, labels, False), variables

                return map_result(training.train(keys[0], variables, model), draw)

            count = len(jax.tree.leaves(models)[0])
            keys = jax.random.split(key, (count, 3))
            variables = new_variables(module, keys[:, 2])
            if warm_start:
                finite = jnp.isfinite(squared_leaf_norms(memory).sum(0))  # what is not stays so
                variables = where_rows(finite, memory, variables)
            rows = jnp.minimum(jnp.arange(count + -count % local.execution.mesh.size), count - 1)
            inputs = take_rows((keys, variables, models), rows)
            run = over_devices(lambda _, own: run_models(one, local, own), local.execution.mesh)
            drawn, variables = jax.tree.map(lambda leaf: leaf[:count], run((), inputs))
            drawn = drawn.reshape(count, module.classes, samples, *drawn.shape[2:])
            return drawn, variables if warm_start else memory

        return Sampler(init if warm_start else no_memory, sample)

    return make


def predict_alone(task: Task, model: Params, samples: jax.Array) -> jax.Array:
    """Returns the logits [B, C] of samples [B, ...] that share no batch statistics."""
    return task.predict(model, samples, jnp.arange(len(samples)))
