"""Decompositions of one matrix that stay one at a time where runs are mapped over.

On a CPU, LAPACK's kernels split a BATCH of matrices over the threads in which the programs of
all devices run, and wait for them. Where every thread is itself a device's program that waits
so, none can go on: a grid of runs (`seeds=3`) hangs for ever. Mapped by `jax.vmap`, what is here
becomes a loop over matrices instead; of one matrix it is what `jax.numpy.linalg` does, to the
bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_cfl.types import Key


def _decompose(function: Callable, matrix: jax.Array) -> Any:
    if jnp.ndim(matrix) != 2:
        raise ValueError(
            f"one matrix, [rows, columns], is decomposed; map over {jnp.shape(matrix)}"
        )
    return jax.custom_batching.sequential_vmap(lambda matrix: tuple(function(matrix)))(matrix)


def eigh(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the eigenvalues [n], ascending, and eigenvectors [n, n] of a symmetric matrix."""
    return _decompose(jnp.linalg.eigh, matrix)


def svd(matrix: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (U [n, k], singular values [k], V' [k, p]) of a matrix [n, p], k = min(n, p)."""
    return _decompose(partial(jnp.linalg.svd, full_matrices=False), matrix)


def svdvals(matrix: jax.Array) -> jax.Array:
    """Returns the singular values [min(n, p)] of a matrix [n, p], the largest first."""
    return _decompose(lambda matrix: (jnp.linalg.svd(matrix, compute_uv=False),), matrix)[0]


def qr(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (Q [n, k], R [k, p]) of a matrix [n, p], k = min(n, p)."""
    return _decompose(jnp.linalg.qr, matrix)


def one_at_a_time(init: Callable) -> Callable:
    """Returns an initializer (key, shape, dtype) that decomposes a matrix, as an orthogonal one
    does, so that several models are drawn one after another.
    """

    def draw(key: Key, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
        return jax.custom_batching.sequential_vmap(lambda key: init(key, shape, dtype))(key)

    return draw
