"""Loops of unequal length side by side: the results of `lax.fori_loop`, and how many
steps are taken for nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_cfl.round.ragged_loop import ragged_fori_loop, stage_widths

LANES = 37
RNG = np.random.default_rng(0)
COUNT = jnp.asarray(RNG.integers(0, 50, LANES).astype(np.int32))
X, MATRIX = (
    jnp.asarray(RNG.normal(size=(LANES, 4)), jnp.float32),
    jnp.asarray(RNG.normal(size=(LANES, 4, 4)), jnp.float32),
)
KEYS = jax.random.split(jax.random.key(0), LANES)
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


def plain(count, body, begin):
    return lax.fori_loop(0, count, body, begin)


def trained(loop, count, x, matrix, key, shared):
    """A loop whose body closes over a matrix, a key and something that is never mapped;
    its carry is a tree of several types.
    """

    def body(i, carry):
        moved = (
            0.9 * carry["x"]
            + 0.01 * matrix @ shared * jnp.sin(i)
            + jax.random.normal(jax.random.fold_in(key, i), (4,))
        )
        return {"x": moved, "steps": carry["steps"] + 1}

    return loop(count, body, {"x": x, "steps": jnp.zeros((), jnp.int32)})


@pytest.mark.parametrize(
    "axes",
    [(0, 0, 0, 0), (0, None, 0, 0), (0, 0, None, None), (None, 0, 0, None), (0, None, None, None)],
)
def test_is_a_loop(axes):
    given = [
        whole if axis == 0 else whole[3]
        for whole, axis in zip((COUNT, X, MATRIX, KEYS), axes, strict=True)
    ]
    expected, found = (
        jax.jit(jax.vmap(partial(trained, loop, shared=jnp.ones(4)), in_axes=axes))(*given)
        for loop in (plain, ragged_fori_loop)
    )
    np.testing.assert_array_equal(found["steps"], expected["steps"])
    np.testing.assert_allclose(found["x"], expected["x"], **ROUNDING)


def test_is_a_loop_of_one_client():
    expected, found = (
        jax.jit(partial(trained, loop))(COUNT[0], X[0], MATRIX[0], KEYS[0], jnp.ones(4))
        for loop in (plain, ragged_fori_loop)
    )
    np.testing.assert_allclose(found["x"], expected["x"], **ROUNDING)


def test_is_a_loop_when_mapped_twice():
    """Members of a vectorised run, and their clients."""

    def both(loop):
        inner = jax.vmap(partial(trained, loop, shared=jnp.ones(4)))
        return jax.jit(jax.vmap(inner, in_axes=(None, 0, None, None)))(
            COUNT, jnp.stack([X, X + 1]), MATRIX, KEYS
        )["x"]

    np.testing.assert_allclose(both(ragged_fori_loop), both(plain), **ROUNDING)


def test_steps_after_the_end_change_nothing():
    """Not even by what is not a number: lane 0 divides by zero from its end on."""
    found = jax.vmap(lambda count: ragged_fori_loop(count, lambda i, x: x + 1 / (count - i), 0.0))(
        jnp.array([1, 3])
    )
    np.testing.assert_allclose(found, [1, 1 / 3 + 1 / 2 + 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("most", "stages"),
    [(1, [1]), (2, [2, 1]), (5, [5, 4, 3, 2, 1]), (20, [20, 16, 12, 8, 6, 4, 3, 2, 1])],
)
def test_widths(most, stages):
    assert stage_widths(most) == stages


def steps_taken(count) -> int:
    """Returns the steps that all lanes take together, those for nothing included."""
    taken = []

    def body(i, x):
        jax.debug.callback(lambda _: taken.append(1), x)
        return x + 1

    jax.block_until_ready(
        jax.jit(jax.vmap(lambda count: ragged_fori_loop(count, body, 0.0)))(count)
    )
    jax.effects_barrier()
    return len(taken)


@pytest.mark.parametrize(
    "sizes", [lambda rng: rng.lognormal(3, 1, 40), lambda rng: rng.uniform(1, 60, 30)]
)
def test_useful_share(sizes):
    count = sizes(np.random.default_rng(1)).astype(np.int32)
    useful = count.sum() / steps_taken(jnp.asarray(count))
    assert 0.87 < useful < 1
    assert count.sum() / (count.max() * count.size) < 0.7  # without a staircase


def test_equal_clients_lose_nothing():
    assert steps_taken(jnp.full(9, 4)) == 36
    assert steps_taken(jnp.array([0, 0, 7, 0, 0])) == 7
