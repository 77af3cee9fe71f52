"""Classification: y [N] int32 are classes 0 .. C - 1, models return a logit for each, the loss is
cross-entropy and the score accuracy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedjax_cfl.scores import ACCURACY
from fedjax_cfl.tasks import sums
from fedjax_cfl.tasks.targets import Measure, Predictions, Targets


class ClientMetrics(struct.PyTreeNode):
    """What every client measures on its own test samples; NaN for a client without samples."""

    samples: jax.Array  # [K] int32, test samples
    accuracy: jax.Array  # [K] float32, fraction
    loss: jax.Array  # [K] float32, mean
    f1: jax.Array  # [K] float32, mean F1 over the classes among the client's labels or predictions


def train_cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cross-entropy [B] of logits [B, C] and classes y [B]."""
    # One-hot instead of indexing: the gradient of a gather is a scatter, slow inside a loop.
    hot = jax.nn.one_hot(y, logits.shape[-1], dtype=logits.dtype)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * hot, axis=-1)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the same by index, for values."""
    own = jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - own


def measure(p: Predictions, num_clients: int, num_classes: int) -> tuple[ClientMetrics, jax.Array]:
    """Returns what every client measures, and two counts [2, C] over all of them: a class's true
    positives tp, and how often it is a label or a prediction, 2 tp + fp + fn.
    """
    owner, samples = sums.drop_unowned(p.owner, num_clients)
    none, right = jnp.zeros((num_clients, num_classes), jnp.int32), p.guess == p.y
    hits = none.at[owner, p.y].add(right.astype(jnp.int32), mode="drop")
    named = none.at[owner, p.y].add(1, mode="drop").at[owner, p.guess].add(1, mode="drop")
    accuracy, loss = (sums.mean_by_client(each, owner, samples) for each in (right, p.loss))
    table = ClientMetrics(samples, accuracy, loss, sums.count_macro_f1(hits, named))
    return table, jnp.stack([hits.sum(0), named.sum(0)])


def by_group(table: ClientMetrics, groups: Any, count: int) -> dict[str, Any]:
    """Returns accuracy and loss of each group; accuracy is NaN where the loss is not finite."""
    xp = table.samples.__array_namespace__()
    right, loss = (
        sums.means_by_group(values, table.samples, groups, count)
        for values in (table.accuracy, table.loss)
    )
    return {"accuracy": xp.where(xp.isfinite(loss), right, xp.nan), "loss": loss}


def summarize(table: ClientMetrics, counts: Any) -> dict[str, Any]:
    """Returns one number per measure over all clients.

    accuracy, loss and weighted_macro_f1 weight clients by samples; macro_accuracy and macro_f1 are
    plain means over clients. Both F1 are of each client's macro-F1 over its classes (FeSEM's tables
    call them Micro-F1 and Macro-F1). worst10_accuracy is that of the worst tenth of the clients, at
    least one. pooled_micro_f1 and pooled_macro_f1 are micro-F1 and macro-F1 of the samples of all
    clients together.
    """
    xp, evaluated = table.samples.__array_namespace__(), table.samples > 0
    return {
        "accuracy": sums.average(table.accuracy, table.samples),
        **sums.over_clients({"accuracy": Measure(table.accuracy, evaluated)}),
        "loss": sums.average(table.loss, table.samples),
        "weighted_macro_f1": sums.average(table.f1, table.samples),
        "macro_f1": sums.average(table.f1, evaluated),
        "pooled_micro_f1": xp.where(evaluated.any(), sums.count_f1(*counts.sum(1)), xp.nan),
        "pooled_macro_f1": sums.count_macro_f1(*counts),
    }


def compute_chances(outputs: np.ndarray) -> np.ndarray:
    """Returns the probabilities [B, C] of the classes."""
    from scipy.special import softmax  # a slow import that no run needs

    return softmax(outputs, axis=1)


CLASSIFICATION = Targets(
    "classification",
    ACCURACY,
    loss=train_cross_entropy,
    loss_value=cross_entropy,
    guess=lambda outputs: outputs.argmax(-1).astype("int32"),
    chances=compute_chances,
    measure=measure,
    by_group=by_group,
    summarize=summarize,
    sums=lambda guess, y, held: (((guess == y) & held).sum(), held.sum()),
    rate=sums.divide,
    needs="a class of each sample, a whole number from 0 or text",
    describe=lambda data: f"{data.num_classes:,} classes",
)
