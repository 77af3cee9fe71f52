"""Concept drift by label swaps: all samples stay, their labels change (Fielding,
https://arxiv.org/abs/2411.01580, appendix E.1).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.data.drift import Drift, keep_nothing
from fedjax_cfl.data.federated import train_label_counts
from fedjax_cfl.keys import draw_permutation
from fedjax_cfl.types import FederatedData, Key
from fedjax_cfl.validation import Fraction, PositiveInt, check_arguments

CHOOSE, SWAP = 11, 12  # purposes of draws, see `drift`


def label_swap(fraction: Fraction = 0.5, period: PositiveInt = 30) -> Drift:
    """Concept drift: every `period` rounds a random `fraction` of the clients each exchange
    two labels that they have, in training and test data.
    """
    check_arguments(label_swap, locals(), "drift")

    def apply(
        key: Key, round: jax.Array, data: FederatedData, memory: Any, warm: jax.Array
    ) -> tuple[FederatedData, Any, jax.Array]:
        due = (round + 1) % period == 0
        chosen, labels = draw_label_pairs(key, round, data, fraction)
        shifted = chosen & due
        one, two = jnp.where(shifted[:, None], labels, -1).T  # no label is -1
        owner = jnp.where(data.owner < 0, data.num_clients, data.owner)
        one, two = (side.at[owner].get(mode="fill", fill_value=-1) for side in (one, two))
        y = jnp.where(data.y == one, two, jnp.where(data.y == two, one, data.y))
        concept = jnp.where(shifted, -1, data.concept)  # from now on of mixed origin
        return data.replace(y=y, concept=concept), memory, shifted

    return Drift(keep_nothing, apply)


def draw_label_pairs(
    key: Key, round: jax.Array, data: FederatedData, fraction: float
) -> tuple[jax.Array, jax.Array]:
    """Draws which clients [K] bool exchange which two labels [K, 2] of their training data;
    clients with fewer than two labels exchange none.
    """
    who, which = (
        jax.random.fold_in(jax.random.fold_in(key, purpose), round) for purpose in (CHOOSE, SWAP)
    )
    place = draw_permutation(who, data.num_clients)
    has = train_label_counts(data) > 0
    score = jnp.where(has, jax.random.uniform(which, has.shape), -1.0)
    best, labels = lax.top_k(score, min(2, data.num_classes))
    if data.num_classes < 2:
        return jnp.zeros(data.num_clients, bool), jnp.zeros((data.num_clients, 2), jnp.int32)
    count = int(fraction * data.num_clients + 0.5)
    return (place < count) & (best[:, 1] >= 0), labels
