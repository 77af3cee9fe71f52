"""Features of updates for clustering: EDC and MADC, from a Gram matrix."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.clustering.distances import add_up, as_rows, divide, dot
from fedjax_cfl.decompose import eigh, qr
from fedjax_cfl.types import Key, Params

POWER = 3  # iterations; without one, directions are wrong unless the spectrum decays fast
OVERSAMPLE = 10  # further eigenvectors that are looked for: the first ones become more exact


def _features(
    values: jax.Array,
    vectors: jax.Array,
    square_norm: jax.Array,
    m: int,
    used: ArrayLike | None = None,
) -> jax.Array:
    """Returns the cosines [S, m] of every row with the top m singular directions; 0 for all but
    the first `used`.

    `values` and `vectors` are the eigenpairs of the Gram matrix in ascending order.
    """
    width = min(m, values.shape[0])
    values, vectors = values[::-1][:width], vectors[:, ::-1][:, :width]
    # Eigenvalues below the rounding error of the Gram matrix are noise, and their eigenvectors
    # are arbitrary.
    rounding = jnp.sum(square_norm > 0) * jnp.finfo(jnp.float32).eps * jnp.max(values)
    scores = jnp.where(values > rounding, jnp.sqrt(jnp.maximum(values, 0)), 0) * vectors
    features = jnp.clip(divide(scores, jnp.sqrt(jnp.maximum(square_norm, 0))[:, None]), -1, 1)
    # the largest entry of each column, which is made positive
    pivot = jnp.take_along_axis(features, jnp.argmax(jnp.abs(features), axis=0)[None], axis=0)
    if used is not None:
        features = jnp.where(jnp.arange(width) < used, features, 0)
    return jnp.pad(features * jnp.where(pivot < 0, -1, 1), ((0, 0), (0, m - width)))


def edc(gram: jax.Array, m: int, used: ArrayLike | None = None) -> jax.Array:
    """Returns decomposed cosine features [S, m] of updates with inner products `gram` [S,
    S] (FedGroup, Duan et al., eq. 8).

    The paper takes the cosines of the updates with their top m singular directions. With
    eigenpairs (l_k, q_k) of the Gram matrix these are E_ik = sqrt(l_k) q_ik / sqrt(G_ii);
    the directions themselves are not needed. The largest entry of a column is positive.
    Zero updates give zero rows; columns beyond the rank, and beyond `used` [] of the m, are
    zero.
    """
    values, vectors = eigh(gram)
    return _features(values, vectors, jnp.diag(gram), m, used)


def top_eigenpairs(
    key: Key, multiply: Callable[[jax.Array], jax.Array], size: int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns about the `count` largest eigenvalues [count] of a Gram matrix, in ascending
    order, and their eigenvectors [size, count].

    It is the randomized range finder with `POWER` iterations (Halko, Martinsson, Tropp 2011,
    Algorithm 4.4), and then Rayleigh-Ritz on that range.

    Args: `multiply` takes and returns [size, count]: the product of the Gram matrix, which is
    not needed itself, with a matrix; `size` is its number of rows; `count` is at most `size`.
    """
    basis = sketch = multiply(jax.random.normal(key, (size, count)))
    for _ in range(POWER):
        basis = qr(sketch)[0]
        sketch = multiply(basis)
    values, vectors = eigh(dot(basis.T, sketch))
    return values, dot(basis, vectors)


def edc_randomized(key: Key, delta: Params, m: int) -> jax.Array:
    """Returns about `edc(gram(delta), m)` [S, m] of thousands of updates `delta` [S, ...], without
    their Gram matrix (see `top_eigenpairs`).
    """
    rows = as_rows(delta)
    size = rows[0].shape[0]

    def multiply(basis: jax.Array) -> jax.Array:
        return add_up([dot(part, dot(part.T, basis)) for part in rows])

    values, vectors = top_eigenpairs(key, multiply, size, min(m + OVERSAMPLE, size))
    square_norm = add_up([jnp.sum(jnp.square(part.astype(jnp.float32)), axis=1) for part in rows])
    return _features(values, vectors, square_norm, m)


def madc(gram: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """Returns the mean of absolute differences of cosines [S, S] of updates with inner
    products `gram` [S, S] (FedGroup, eq. 7).

    M_ij = 1 / (N - 2) sum_{z != i, j} |S_iz - S_jz| over the N rows that are `valid` [S]
    bool. Rows and columns that are not are 0.
    """
    index = jnp.arange(gram.shape[0])
    valid = jnp.ones(index.shape, bool) if valid is None else valid
    norm = jnp.sqrt(jnp.maximum(jnp.diag(gram), 0))
    cosines = divide(divide(gram, norm[:, None]), norm)

    def row(i):
        others = valid & (index != i) & (index[:, None] != index)  # [j, z]
        return jnp.sum(jnp.where(others, jnp.abs(cosines[i] - cosines), 0), axis=1)

    total = jax.lax.map(row, index)  # one row at a time: all at once would be an N^3 array
    return jnp.where(valid[:, None] & valid, total / jnp.maximum(jnp.sum(valid) - 2, 1), 0)
