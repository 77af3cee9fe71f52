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
    """Returns the key for one purpose of a run. With `round` it is the key for that purpose in
    that round.
    """
    key = jax.random.fold_in(key, purpose)
    return key if round is None else jax.random.fold_in(key, round)


def derive_keys(key: Key, round: ArrayLike) -> Key:
    """Returns the keys [PURPOSES] of all purposes in one round. That of BYZANTINE is the same
    in every round, because the attackers are.

    They are derived together, because each derivation by itself would be compiled separately.
    """
    keys = jax.vmap(derive_key, (None, 0))(key, jnp.arange(PURPOSES))
    each = jax.vmap(jax.random.fold_in, (0, None))(keys, round)
    return each.at[BYZANTINE].set(keys[BYZANTINE])
