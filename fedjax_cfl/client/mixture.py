"""Mixtures of models: which part of each sample a client ascribes to which of m models, and what
all of them predict together.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021, https://arxiv.org/abs/2108.10252. Likelihoods are those of a model's
predictions: without dropout, and without the L2 penalty of its training loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.client.cohort import SAMPLE_BLOCK, pass_over_samples
from fedjax_cfl.tasks.classification import cross_entropy
from fedjax_cfl.types import FederatedData, Params, Task

LEAST_WEIGHT = 1e-30  # of a model, in a logarithm: what has lost all weight can get it back
LEAST_PROBABILITY = 1e-10  # of a label, in a reported loss


class Responsibilities(struct.PyTreeNode):
    """What a client's E-step finds: q_kn, the part of sample n that model k explains; the sum
    over k is 1.
    """

    each: jax.Array  # [m, at least n] q of each training sample, in their order; 0 behind them
    by_label: jax.Array  # [m, C] sums of q over the samples of each label


def mix_predictions(
    task: Task, models: Params, weights: jax.Array, x: jax.Array, owner: jax.Array | None = None
) -> jax.Array:
    """Returns the logarithms [B, C] of probabilities: of their mean over the models.

    Args: `models` are m, [m, ...]; `weights` [B, m] are theirs for each sample x [B, ...], a row
    sums to 1; `owner` is as in `Task`.
    """
    # one after another: convolutions of several models at once are slow on a CPU
    logits = lax.map(lambda model: task.predict(model, x, owner), models)
    return jax.nn.logsumexp(jnp.log(weights.T)[..., None] + jax.nn.log_softmax(logits), axis=0)


def mixture_loss(log_probabilities: jax.Array, y: jax.Array) -> jax.Array:
    """Returns -log p(y) [B], p at least `LEAST_PROBABILITY`, of what `mix_predictions` returns."""
    own = jnp.take_along_axis(log_probabilities, y[:, None], axis=-1)[:, 0]
    # a model that is not finite must show
    return jnp.where(own < jnp.log(LEAST_PROBABILITY), -jnp.log(LEAST_PROBABILITY), -own)


def explain_samples(
    task: Task,
    models: Params,
    label_shares: jax.Array | None,
    weights: jax.Array,
    x: jax.Array,
    y: jax.Array,
    owner: jax.Array,
) -> jax.Array:
    """Returns q [m, B], proportional over k to pi_k p_k(y_n | x_n), with label shares R to pi_k
    p_k(y_n | x_n) / R_k(y_n); 0 for padding.

    Args: `models` [m, ...]; `label_shares` [m, C] are FedRC's R, None: without; `weights` [m] are
    pi; `x` [B, ...] and `y` [B] are samples, and `owner` [B] is as in `Task`.
    """
    logits = jax.vmap(task.predict, (0, None, None))(models, x, owner)
    prior = jnp.log(jnp.maximum(weights, LEAST_WEIGHT))[:, None]
    score = prior - jax.vmap(cross_entropy, (0, None))(logits, y)
    if label_shares is not None:
        score -= jnp.log(label_shares)[:, y]
    return jnp.where(owner >= 0, jax.nn.softmax(score, axis=0), 0.0)


def share_samples(task: Task) -> Any:
    """Returns the E-step as a function of one client, see `explain_samples`, for `over_clients`.

    It is (client, data, (models [m, ...], R [m, C] or None), pi [m]) -> a Loop with the result
    `Responsibilities`.
    """

    def explain(client, data: FederatedData, shared, weights):
        models, label_shares = shared

        def add(found, x, y, owner, number):
            parts = explain_samples(task, models, label_shares, weights, x, y, owner)
            return Responsibilities(
                lax.dynamic_update_slice(found.each, parts, (0, number * SAMPLE_BLOCK)),
                found.by_label.at[:, y].add(parts),
            )

        blocks = -(-data.max_client_samples // SAMPLE_BLOCK)
        nothing = Responsibilities(
            jnp.zeros((weights.size, blocks * SAMPLE_BLOCK)),
            jnp.zeros((weights.size, data.num_classes)),
        )
        return pass_over_samples(client, data, nothing, add)

    return explain


def mean_responsibility(by_label: jax.Array, before: jax.Array) -> jax.Array:
    """Returns pi [..., m], the mean of q over a client's samples, from its sums `by_label` [...,
    m, C]; that `before` where there are none.
    """
    sums = by_label.sum(-1)
    total = sums.sum(-1, keepdims=True)
    return jnp.where(total > 0, sums / jnp.where(total > 0, total, 1.0), before)
