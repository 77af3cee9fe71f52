"""The communication ledger: whole models (the papers' unit u) and 4-byte words of
everything else (FlexCFL Fig. 6).
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.system.counts import (
    add_counts,
    count_to_float,
    count_to_int,
    make_count,
    sum_counts,
)
from fedjax_cfl.types import Params, Traffic


def make_traffic(
    units_down: ArrayLike = 0,
    units_up: ArrayLike = 0,
    words_down: ArrayLike = 0,
    words_up: ArrayLike = 0,
) -> Traffic:
    """Returns one entry of the ledger. Each argument is a whole number, or one for each
    slot of a cohort [S].
    """
    return Traffic(*(make_count(count) for count in (units_down, units_up, words_down, words_up)))


def add_traffic(*entries: Traffic) -> Traffic:
    """Returns the sum of ledger entries, over their slots too."""
    first, *rest = (jax.tree.map(sum_counts, entry) for entry in entries)
    for entry in rest:
        first = jax.tree.map(add_counts, first, entry)
    return first


def slot_bytes(entry: Traffic, model_bytes: int) -> jax.Array:
    """Returns the bytes [S] float32, down and up together, of an entry's slots; 0 if it has none.
    What is of the whole step is no slot's.
    """

    def of_slots(count: jax.Array) -> jax.Array:
        return jnp.zeros(()) if count.ndim == 1 else count_to_float(count)

    units, words = (
        of_slots(down) + of_slots(up)
        for down, up in ((entry.units_down, entry.units_up), (entry.words_down, entry.words_up))
    )
    return units * model_bytes + 4.0 * words


def count_bytes(entry: Traffic, model_bytes: int) -> tuple[int, int]:
    """Returns (bytes down, bytes up) as Python integers, which cannot overflow."""
    units_down, units_up, words_down, words_up = (
        count_to_int(count)
        for count in (entry.units_down, entry.units_up, entry.words_down, entry.words_up)
    )
    return units_down * model_bytes + 4 * words_down, units_up * model_bytes + 4 * words_up


def model_bytes_of(groups: Params) -> int:
    """Returns the bytes of one of the models [m, ...]."""
    return sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(groups))
