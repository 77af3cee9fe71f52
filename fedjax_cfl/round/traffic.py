"""The communication ledger: whole models (the papers' unit u) and 4-byte words of
everything else (FlexCFL Fig. 6).
"""

import jax
import jax.numpy as jnp

from fedjax_cfl.types import Traffic


def make_traffic(units_down=0, units_up=0, words_down=0, words_up=0) -> Traffic:
    """Returns one entry of the ledger; every count is a scalar."""
    return Traffic(
        *(jnp.asarray(count, jnp.int32) for count in (units_down, units_up, words_down, words_up))
    )


def add_traffic(*entries: Traffic) -> Traffic:
    """Returns the sum of ledger entries."""
    return jax.tree.map(lambda *counts: sum(counts), *entries)


def count_bytes(entry: Traffic, model_bytes: int) -> tuple[int, int]:
    """Returns (bytes down, bytes up) as Python integers, which cannot overflow."""
    down = int(entry.units_down) * model_bytes + 4 * int(entry.words_down)
    return down, int(entry.units_up) * model_bytes + 4 * int(entry.words_up)
