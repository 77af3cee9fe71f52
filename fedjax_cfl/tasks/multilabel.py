"""Several labels a sample: y [N, T] float32 are 0 or 1 for each of T labels, models return a logit
for each, the loss is the mean of the labels' binary cross-entropies, and the score the F1 of all
labels together (micro-F1). A label is predicted where its sigmoid is above 0.5.

Beside it the mean F1 of the labels (macro-F1) is measured, and the share of samples all of whose
labels are right.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from fedjax_cfl.scores import MICRO_F1
from fedjax_cfl.tasks import sums
from fedjax_cfl.tasks.targets import Measure, Predictions, Targets


class LabelMetrics(struct.PyTreeNode):
    """What every client measures on its own test samples; NaN for a client without samples, and F1
    also for one whose samples have no label and are predicted none.
    """

    samples: jax.Array  # [K] int32, test samples
    micro_f1: jax.Array  # [K] float32, F1 of all labels together
    label_f1: jax.Array  # [K] float32, mean F1 of the labels that occur or are predicted
    exact_match: jax.Array  # [K] float32, share of samples all of whose labels are right
    loss: jax.Array  # [K] float32, mean
    hits: jax.Array  # [K, T] int32, true positives of each label
    named: jax.Array  # [K, T] int32, how often it is there, and how often it is predicted, in all


def binary_cross_entropy(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean over labels [B] of the cross-entropy of the sigmoid of each output."""
    return optax.sigmoid_binary_cross_entropy(outputs, y).mean(axis=1)


def measure(p: Predictions, num_clients: int, num_classes: int) -> tuple[LabelMetrics, jax.Array]:
    """Returns what every client measures, and counts of no classes [2, 0]."""
    owner, samples = sums.drop_unowned(p.owner, num_clients)
    none = jnp.zeros((num_clients, p.y.shape[1]), jnp.int32)
    guess, y = p.guess.astype(jnp.int32), p.y.astype(jnp.int32)
    hits = none.at[owner].add(guess * y, mode="drop")
    named = none.at[owner].add(guess + y, mode="drop")
    match, loss = (
        sums.mean_by_client(each, owner, samples) for each in ((guess == y).all(1), p.loss)
    )
    f1 = count_label_f1(hits, named)
    table = LabelMetrics(samples, f1["micro_f1"], f1["label_f1"], match, loss, hits, named)
    return table, jnp.zeros((2, num_classes), jnp.int32)


def count_label_f1(hits: Any, named: Any) -> dict[str, Any]:
    """Returns micro_f1 and label_f1 [..] of counts [.., T] as in `LabelMetrics`."""
    xp, all_named = hits.__array_namespace__(), named.sum(-1)
    micro = xp.where(all_named > 0, sums.count_f1(hits.sum(-1), all_named), xp.nan)
    return {"micro_f1": micro, "label_f1": sums.count_macro_f1(hits, named)}


def list_measures(table: LabelMetrics) -> dict[str, Measure]:
    """Returns micro-F1, macro-F1 and exact match of clients."""
    named = table.named.sum(1) > 0
    return {
        "micro_f1": Measure(table.micro_f1, named),
        "label_f1": Measure(table.label_f1, named),
        "exact_match": Measure(table.exact_match, table.samples > 0),
    }


def by_group(table: LabelMetrics, groups: Any, count: int) -> dict[str, Any]:
    """Returns micro-F1, macro-F1, exact match and loss of each group."""
    hits, named = (sums.sums_by_group(part, groups, count) for part in (table.hits, table.named))
    match, loss = (
        sums.means_by_group(values, table.samples, groups, count)
        for values in (table.exact_match, table.loss)
    )
    return count_label_f1(hits, named) | {"exact_match": match, "loss": loss}


def add_up(guess: Any, y: Any, held: Any) -> tuple[Any, Any]:
    """Returns twice the true positives of the samples held, and how often labels are there and are
    predicted, in all.
    """
    xp = guess.__array_namespace__()
    guess, y = (xp.where(held[:, None], part, 0).astype("int32") for part in (guess, y))
    return 2 * (guess * y).sum(), (guess + y).sum()


def compute_chances(outputs: np.ndarray) -> np.ndarray:
    """Returns the probabilities [B, T] of the labels."""
    from scipy.special import expit  # a slow import that no run needs

    return expit(outputs)


MULTILABEL = Targets(
    "multilabel",
    MICRO_F1,
    loss=binary_cross_entropy,
    loss_value=binary_cross_entropy,
    guess=lambda outputs: (outputs > 0).astype("int32"),
    chances=compute_chances,
    measure=measure,
    by_group=by_group,
    summarize=partial(sums.summarize, by_group, list_measures),
    sums=add_up,
    rate=sums.divide,
    needs="0 or 1 of each label [N, T], in a table dataset.source.y=[a,b]",
    describe=lambda data: f"{data.y.shape[1]} labels a sample",
    settings=(("_target_", "fedjax_cfl.models.multilabel"),),
)


def multilabel() -> Targets:
    """Returns the task of T labels a sample, which it has (1) or not (0); its loss is the mean over
    labels of the cross-entropy of the sigmoid of each output.
    """
    return MULTILABEL
