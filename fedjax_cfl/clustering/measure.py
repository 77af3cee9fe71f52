"""What clients measure so that they, or the server, can choose groups, each together with what it
costs: `clustered` writes the bill from it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from typing_extensions import TypeAliasType

from fedjax_cfl.client.cohort import mean_over_samples, over_clients, pass_over_samples
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import training_loss
from fedjax_cfl.data.federated import train_label_counts
from fedjax_cfl.errors import InputError
from fedjax_cfl.models.task import watch_inputs
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.tree import flatten_tree
from fedjax_cfl.types import Cohort, FederatedData, Key, Params, Task


class Question(NamedTuple):
    """What clients are asked with."""

    key: Key
    models: Params  # [m, ...]
    active: jax.Array  # [m] bool, which of them are in use
    data: FederatedData
    cohort: Cohort  # who is asked
    rows: dict[str, Any]  # by layer, [S, ...], what they keep


class Measure(NamedTuple):
    """What clients measure, and what it costs each of them."""

    ask: Callable[[Question], jax.Array]  # (question) -> values [S, ...]
    models: Callable[[ArrayLike], ArrayLike]  # (groups in use []) -> models that a client measures
    # (training samples [n]) -> how many are inferred with each of the models, [n]; one that is
    # trained on counts as `clock.TRAIN_TO_INFERENCE`
    samples: Callable[[jax.Array], ArrayLike] = lambda size: size
    # (values [n, ...]) -> words of 4 bytes [n] in which they are sent; None: one for each number
    words: Callable[[jax.Array], ArrayLike] | None = None
    of_groups: bool = True  # False: the models are not those of groups, of which it trains one

    def count_words(self, values: jax.Array) -> ArrayLike:
        """Returns in how many words of 4 bytes each client [n] sends its values [n, ...]."""
        return self.words(values) if self.words else values.size // len(values)


MakeMeasure = TypeAliasType("MakeMeasure", Callable[[Task, Local], Measure])


def losses(task: Task, local: Local, with_l2: bool = False) -> Measure:
    """Measures the mean loss of each group's model on the client's training samples, [S, m].

    The loss of a group that is not in use, or that is not finite, is infinite. Each client gets
    all m models and infers all of its samples with each of them (IFCA, Algorithm 1, line 6).
    `with_l2` adds the model's L2 penalty (D10).
    """
    each = over_clients(training_loss(task, with_l2, local), local.execution)

    def ask(q: Question) -> jax.Array:
        loss = each(q.cohort, q.data, q.models, q.rows)
        return jnp.where(q.active & jnp.isfinite(loss), loss, jnp.inf)

    return Measure(ask, lambda groups: groups)


def gradients(task: Task, local: Local) -> Measure:
    """Measures the gradient of the client's mean training loss at the mean of the groups' models,
    one vector a client, [S, P] float32. Each client gets that model.
    """

    def block(model: Params, x: jax.Array, y: jax.Array, real: jax.Array) -> jax.Array:
        def total(model: Params) -> jax.Array:
            owner = jnp.where(real, 0, -1)
            return jnp.sum(jnp.where(real, task.loss(model, x, y, None, owner), 0.0))

        return flatten_tree(jax.grad(total)(model))

    return average_over_samples(block, local, TRAIN_TO_INFERENCE)


def embeddings(task: Task, local: Local, layer: str = "head") -> Measure:
    """Measures the mean over the client's training samples of what the module `layer` receives,
    in the mean of the groups' models, [S, r] float32. Each client gets that model.

    Raises InputError, when a round is traced, for a model without a module of that name.
    """

    def block(model: Params, x: jax.Array, y: jax.Array, real: jax.Array) -> jax.Array:
        def is_layer(module: nn.Module) -> bool:
            return module.path == (layer,)

        with watch_inputs(is_layer) as seen:
            task.predict(model, x, jnp.where(real, 0, -1))
        if not seen:
            raise InputError(f"layer={layer!r}: the model has no module of that name")
        return jnp.sum(jnp.where(real[:, None], seen[-1], 0.0), axis=0)

    return average_over_samples(block, local, 1)


def label_counts(task: Task, local: Local) -> Measure:
    """Counts the client's training samples of each label, [S, C] int32; no model is needed."""

    def ask(q: Question) -> jax.Array:
        return q.cohort.take(train_label_counts(q.data))

    return Measure(ask, lambda groups: 0, of_groups=False)


def average_over_samples(
    add_up: Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array],
    local: Local,
    inferences: int,
) -> Measure:
    """Measures a mean over the client's training samples with the mean of the groups' models.

    Args: `add_up` is (model, x [B, ...], y [B], real [B] bool) -> the sum [d] over the samples that
    are real; `inferences` is what it costs each sample.
    """

    def of_client(client, data: FederatedData, model: Params, nothing: Any) -> Loop:
        def add(total, x, y, owner, number):
            return total + add_up(model, x, y, owner >= 0)

        once = pass_over_samples(client, data, jnp.zeros(()), add, mean_over_samples)
        width = jax.eval_shape(once.step, jnp.int32(0), once.init).shape
        return once._replace(init=jnp.zeros(width))

    each = over_clients(of_client, local.execution)

    def ask(q: Question) -> jax.Array:
        return each(q.cohort, q.data, average_models(q.models, q.active))

    return Measure(ask, lambda groups: 1, lambda size: inferences * size, of_groups=False)


def average_models(models: Params, active: jax.Array) -> Params:
    """Returns the mean of the models [m, ...] that are `active` [m] bool."""
    share = active / jnp.maximum(active.sum(), 1)
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, 1), models)
