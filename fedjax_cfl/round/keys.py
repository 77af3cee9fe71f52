"""The keys of a run: one for each purpose, round and client."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.types import Key

# Purposes: every draw of a run is made with fold_in(key, purpose), then the round, then the
# client's id; never with a position in the cohort.
SELECT, START, ASSIGN, PREPARE, TRAIN, DRIFT, MIGRATE, FAULTS, BYZANTINE, REGROUP = range(
    PURPOSES := 10
)


def derive_key(key: Key, purpose: ArrayLike, round: ArrayLike | None = None) -> Key:
    """Returns the key of one purpose; of one round, if given."""
    key = jax.random.fold_in(key, purpose)
    return key if round is None else jax.random.fold_in(key, round)


def derive_keys(key: Key, round: ArrayLike) -> Key:
    """Returns the keys [PURPOSES] of all purposes in one round.

    All at once, because each would be compiled by itself.
    """
    return jax.vmap(derive_key, (None, 0, None))(key, jnp.arange(PURPOSES), round)
