"""This package: FedAvg over one CPU device per core."""

import time

import flax.linen as nn
import jax
import numpy as np
from workloads import CLASSES, COHORT, LR, Workload, cohorts, initial, population

import fedjax_cfl as cfl
from fedjax_cfl.models.convolution import Conv, max_pool
from fedjax_cfl.models.layers import add_channel_axis, dense, flatten
from fedjax_cfl.sharding import replicated_sharding
from fedjax_cfl.system.reports import count_to_int
from peers import Trained


class TwoConvolutions(nn.Module):
    """W3's model."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W] or [B, H, W, channels] -> [B, C]."""
        x = add_channel_axis(x)
        for layer, features in enumerate((32, 64)):
            x = max_pool(nn.relu(Conv(features, 5, name=f"conv_{layer}")(x)))
        return dense(self.num_classes, "head")(flatten(x))


# of the layers, first to last
NAMES = {
    "mlp": ["hidden_0", "head"],
    "mclr": ["head"],
    "cnn": ["conv_0", "conv_1", "head"],
}


def module(model: str) -> nn.Module:
    """Returns the Flax module of a workload."""
    return (
        TwoConvolutions(CLASSES)
        if model == "cnn"
        else cfl.models.MLP(CLASSES, hidden=(128,) if model == "mlp" else ())
    )


def train(work: Workload, rounds: int, count: int = COHORT, first_layer: str = "auto") -> Trained:
    """Runs FedAvg with `count` clients a round from the given first model; `jit` of the
    whole round is what the engine's users run.
    """
    cfl.use_cpu_cores()
    mesh, names = cfl.make_mesh(), NAMES[work.model]
    x, y, start = population(work.model)
    owner = np.repeat(np.arange(work.clients), np.diff(start)).astype(np.int32)
    held = cfl.Partition(np.arange(y.size), owner, np.zeros(y.size, bool))
    everywhere = replicated_sharding(mesh)
    data = jax.device_put(cfl.federate(cfl.Pool(x, y, CLASSES), held), everywhere)
    task = cfl.as_task(module(work.model), x.shape[1:], CLASSES, l2=0.0)
    local = cfl.Local(
        LR, work.epochs, work.batch, execution=cfl.make_execution(mesh, first_layer=first_layer)
    )
    algorithm = cfl.algorithms.fedavg(
        task, local, cfl.select.from_table(cohorts(work, rounds, count))
    )
    key = jax.device_put(jax.random.key(0), everywhere)
    state, step = jax.jit(algorithm.init)(key, data), jax.jit(algorithm.round)
    given = {
        name: {"kernel": kernel[None], "bias": bias[None]}
        for name, (kernel, bias) in zip(names, initial(work.model), strict=True)
    }
    state = jax.device_put(state.replace(groups=given), everywhere)
    seconds, steps, model = [], [], None
    for _ in range(rounds):
        began = time.perf_counter()
        state, info = jax.block_until_ready(step(key, state, data))
        seconds.append(time.perf_counter() - began)
        steps.append(count_to_int(info.steps))
        model = model or [
            tuple(np.asarray(state.groups[name][part][0]) for part in ("kernel", "bias"))
            for name in names
        ]
    return Trained(seconds, steps, model)
