"""Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized
Federated Learning", AAAI 2023, https://arxiv.org/abs/2212.01197.

A client starts its training not from its group's model w but, in the last layers, from a mixture of
w with its own model v of its last training, v + W (w - v). It learns W, a weight for each
parameter, on its own samples, and is tested on what it has trained.

Differs from the authors' code: clients mix where they train, not all in each round; the short last
batch is kept; the share of its samples by which a client fits is rounded up, where the code
truncates; a first fit ends after `MOST_EPOCHS`; a client that changes its group fits again.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.tree_util import Partial

from fedjax_cfl.client.cohort import ClientFn, client_range
from fedjax_cfl.client.executor import Program, map_result
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import as_pytree, train_from
from fedjax_cfl.data.federated import gather
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method
from fedjax_cfl.personal.layer import list_layers
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import FederatedData, Key, Params, Task, Upload, Work
from fedjax_cfl.validation import INT32_MAX, Fraction, NonNegativeFloat, checked

# a client's first fit ends once the standard deviation of the losses of `WINDOW` epochs is small
SMALL, WINDOW, MOST_EPOCHS = 0.1, 10, 100
NAME = "FedALA"


class Mixing(struct.PyTreeNode):
    """What ONE client keeps."""

    model: Params  # v, as it last trained it
    weights: Params  # W, of the last layers
    group: jax.Array  # [] int32, of which W is, -1: it has not trained yet
    fitted: jax.Array  # [] bool, W has been fitted to this group


@checked("personal")
def fedala(
    *, layers: Sequence[str] = ("head",), share: Fraction = 0.8, lr: NonNegativeFloat = 1.0
) -> Method:
    """FedALA (Algorithm 1).

    A client mixes `layers`, by their names in the model's parameters, and takes all others from its
    group's model. It fits W by steps of size `lr` (0: the method below) on `share` of its training
    samples, one pass a round, and until the losses settle when it first does; these are steps, too.
    Raises InputError for a value that is not allowed, and, when the method is built, for a layer
    that the model does not have.
    """
    if share == 0:
        raise InputError("personal.share=0.0: must be above 0; use personal=none")
    if not layers:
        raise InputError("personal.layers=[]: must name some layers; use personal=none")

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        list_layers(task, layers, "personal.layers")
        fit = Partial(fit_weights(task, share, local.batch_size), lr)
        return Partial(train_from_mixture, fit, as_pytree(solve))

    def init(model: Params) -> Mixing:
        return Mixing(model, fresh(model), jnp.int32(-1), jnp.zeros((), bool))

    def fresh(model: Params) -> Params:
        return {layer: jax.tree.map(jnp.ones_like, model[layer]) for layer in layers}

    return Method(name=NAME, rows=init, train=train, serve=lambda row, model: row.model)


def mix(weights: Params, own: Params, model: Params) -> Params:
    """Returns `model` with own + weights (model - own) in the layers that have `weights`."""
    return model | {
        layer: jax.tree.map(lambda w, v, g: v + w * (g - v), part, own[layer], model[layer])
        for layer, part in weights.items()
    }


def train_from_mixture(
    fit: Any,
    solve: ClientFn,
    client: jax.Array,
    data: FederatedData,
    shared: tuple[Key, Params],
    work: Work,
) -> Program:
    """Returns the program of one client that fits W by `fit`, trains from the mixture by `solve`,
    and keeps both; the other arguments are those of a `ClientFn`.
    """
    (key, models), row = shared, work.rows[NAME]
    model = take_rows(models, work.group)
    stays = row.group == work.group
    weights = jax.tree.map(lambda w: jnp.where(stays, w, jnp.ones_like(w)), row.weights)
    row, met = row.replace(weights=weights, fitted=row.fitted & stays), row.group >= 0
    weights, steps = fit(jax.random.fold_in(key, client), client, data, row, model)
    start = jax.tree.map(
        lambda mixed, g: jnp.where(met, mixed, g), mix(weights, row.model, model), model
    )

    def keep(upload: Upload) -> Upload:
        own = jax.tree.map(jnp.add, start, upload.delta)
        delta = jax.tree.map(jnp.subtract, own, model)
        rows = {**upload.rows, NAME: Mixing(own, weights, work.group, met)}
        return upload.replace(delta=delta, steps=upload.steps + steps, rows=rows)

    return map_result(train_from(start, solve, client, data, key, work), keep)


def fit_weights(task: Task, share: float, batch_size: int) -> Any:
    """Returns f(lr, key, client, data, row, model) -> (W, steps), after one pass over a random
    block of the client's samples, or after those of a first fit; of a client that has not trained,
    W as it is.

    Args: those of `fedala`; `batch_size` is B.
    """
    each_loss = task.sample_loss or task.loss

    def fit(lr, key, client, data, row: Mixing, model: Params) -> tuple[Params, jax.Array]:
        count, first = client_range(client, data)
        size = jnp.ceil(share * count - 1e-3).astype(jnp.int32)
        batches = lax.div(size + batch_size - 1, batch_size)
        draw = jax.random.fold_in(key, INT32_MAX)  # no step of training has that number
        begin = first + jax.random.randint(draw, (), 0, count - size + 1)

        def step(number, carry):
            weights, _ = carry
            at = number * batch_size + jnp.arange(batch_size)
            x, y = gather(data, data.train.order[begin + jnp.minimum(at, size - 1)])
            owner = jnp.where(at < size, client, -1)

            def loss(mixed):
                each = each_loss(mixed, x, y, None, owner)
                return jnp.sum(jnp.where(at < size, each, 0.0)) / jnp.sum(at < size)

            found, slope = jax.value_and_grad(loss)(mix(weights, row.model, model))

            def descend(w, g, v, to):
                return jnp.clip(w - lr * g * (to - v), 0.0, 1.0)

            moved = {
                layer: jax.tree.map(descend, part, slope[layer], row.model[layer], model[layer])
                for layer, part in weights.items()
            }
            return moved, found

        def run_pass(carry):
            weights, losses, passes = carry
            weights, last = lax.fori_loop(0, batches, step, (weights, jnp.zeros(())))
            return weights, jnp.roll(losses, 1).at[0].set(last), passes + 1

        def is_unsettled(carry):
            _, losses, passes = carry
            limit = jnp.where(row.group < 0, 0, jnp.where(row.fitted, 1, MOST_EPOCHS))
            return (passes < limit) & ((passes <= WINDOW) | (jnp.std(losses) >= SMALL))

        begun = row.weights, jnp.zeros(WINDOW), jnp.zeros((), jnp.int32)
        weights, _, passes = lax.while_loop(is_unsettled, run_pass, begun)
        return weights, passes * batches

    return fit
