"""Features of updates for clustering: EDC and MADC, from a Gram matrix."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_cfl.clustering.distances import add_up, as_rows, divide, dot
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Key, Params


def _features(values: jax.Array, vectors: jax.Array, square_norm: jax.Array, m: int) -> jax.Array:
    """Returns the cosines [S, m] of every row with the top m singular directions.

    `values` and `vectors` are the eigenpairs of the Gram matrix in ascending order.
    """
    width = min(m, values.shape[0])
    values, vectors = values[::-1][:width], vectors[:, ::-1][:, :width]
    # Eigenvalues below the rounding error of the Gram matrix are noise, and their eigenvectors
    # are arbitrary.
    rounding = vectors.shape[0] * jnp.finfo(jnp.float32).eps * jnp.max(values)
    scores = jnp.where(values > rounding, jnp.sqrt(jnp.maximum(values, 0)), 0) * vectors
    features = jnp.clip(divide(scores, jnp.sqrt(jnp.maximum(square_norm, 0))[:, None]), -1, 1)
    # the largest entry of each column, which is made positive
    pivot = jnp.take_along_axis(features, jnp.argmax(jnp.abs(features), axis=0)[None], axis=0)
    return jnp.pad(features * jnp.where(pivot < 0, -1, 1), ((0, 0), (0, m - width)))


def edc(gram: jax.Array, m: int) -> jax.Array:
    """Returns decomposed cosine features [S, m] of updates with inner products `gram` [S,
    S] (FedGroup, Duan et al., eq. 8).

    The paper takes the cosines of the updates with their top m singular directions. With
    eigenpairs (l_k, q_k) of the Gram matrix these are E_ik = sqrt(l_k) q_ik / sqrt(G_ii);
    the directions themselves are not needed. The largest entry of a column is positive.
    Zero updates give zero rows, and columns beyond the rank are zero.
    """
    values, vectors = jnp.linalg.eigh(gram)
    return _features(values, vectors, jnp.diag(gram), m)


def top_eigenpairs(
    key: Key, multiply: Callable[[jax.Array], jax.Array], size: int, count: int, power: int = 3
) -> tuple[jax.Array, jax.Array]:
    """Returns about the `count` largest eigenvalues, in ascending order, and eigenvectors
    [size, count] of a Gram matrix that is known by its products: `multiply` takes and gives
    [size, count].

    It is the randomized range finder with `power` iterations (Halko, Martinsson, Tropp
    2011, Algorithm 4.4), and then Rayleigh-Ritz on that range. Raises InputError if power
    < 1: without a power iteration the directions are wrong unless the spectrum decays
    fast.
    """
    if power < 1:
        raise InputError(f"power={power}: must be at least 1")
    basis = sketch = multiply(jax.random.normal(key, (size, count)))
    for _ in range(power):
        basis = jnp.linalg.qr(sketch)[0]
        sketch = multiply(basis)
    values, vectors = jnp.linalg.eigh(dot(basis.T, sketch))
    return values, dot(basis, vectors)


def edc_randomized(
    key: Key, delta: Params, m: int, oversample: int = 10, power: int = 3
) -> jax.Array:
    """Returns about `edc(gram(delta), m)` of thousands of updates `delta` [S, ...], without
    their Gram matrix (see `top_eigenpairs`).
    """
    rows = as_rows(delta)
    size = rows[0].shape[0]
    values, vectors = top_eigenpairs(
        key,
        lambda basis: add_up([dot(part, dot(part.T, basis)) for part in rows]),
        size,
        min(m + oversample, size),
        power,
    )
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
