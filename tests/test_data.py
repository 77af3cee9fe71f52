"""Federated data: the views against loops, on the host and under jit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_cfl.data import concept, partition
from fedjax_cfl.data import federated as federation
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool

K, N, C = 5, 40, 3
REOWN, COUNTS = (
    jax.jit(federation.update_client_index),
    jax.jit(federation.label_counts, static_argnums=3),
)
NUMBERS = np.arange(0, N, 2)  # a view of every second sample


def held(view, k):
    """Returns the samples of one client."""
    return np.asarray(view.order)[
        int(view.start[k]) : int(view.start[k]) + int(view.size[k])
    ].tolist()


def toy(owner, test, clients=None):
    """Returns federated data of N samples with these owners."""
    n = len(owner)
    pool = Pool(
        np.arange(2 * n, dtype=np.float32).reshape(n, 2), (np.arange(n) % C).astype(np.int32), C
    )
    return federation.federate(
        pool,
        Partition(np.arange(n), np.array(owner, np.int32), np.array(test, bool)),
        clients=clients,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    owners=st.lists(
        st.lists(st.integers(-1, K - 1), min_size=N, max_size=N), min_size=1, max_size=3
    )
)
def test_reown_equals_brute_force(owners):
    start = view = federation.build_client_index(NUMBERS, NUMBERS % K, K)
    labels = jnp.arange(N, dtype=jnp.int32) % C
    for owner in owners:
        new = jnp.array(owner, jnp.int32)
        view = REOWN(view, new)
        for k in range(K):
            mine = [i for i in NUMBERS if owner[i] == k]
            assert held(view, k) == mine
            assert COUNTS(view, new, labels, C)[k].tolist() == [
                sum(i % C == c for i in mine) for c in range(C)
            ]
        assert sorted(view.order.tolist()) == NUMBERS.tolist()
        assert {a.dtype for a in jax.tree.leaves(view)} == {jnp.dtype(jnp.int32)}
    # the way there does not matter: a resumed run rebuilds the same view
    direct = REOWN(start, new)
    assert all(
        (a == b).all() for a, b in zip(jax.tree.leaves(view), jax.tree.leaves(direct), strict=True)
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.lists(st.tuples(st.integers(0, K - 1), st.booleans()), min_size=1, max_size=N))
def test_federate_equals_brute_force(rows):
    owner, test = zip(*rows, strict=True)
    if all(test):
        with pytest.raises(InputError, match="training sample"):
            toy(owner, test)
        return
    made = toy(owner, test, clients=K)
    for k in range(K):
        assert held(made.train, k) == [i for i, (o, t) in enumerate(rows) if o == k and not t]
        assert held(made.test, k) == [i for i, (o, t) in enumerate(rows) if o == k and t]
    assert (
        made.num_clients == K
        and made.max_client_samples == made.train.size.max()
        and made.concept.tolist() == [-1] * K
    )
    same = REOWN(made.train, made.owner)
    assert all(
        (a == b).all()
        for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(made.train), strict=True)
    )


def test_a_whole_composition():
    rng = np.random.default_rng(0)
    pool = Pool(
        rng.integers(0, 256, (300, 4, 4), np.uint8), rng.integers(0, C, 300).astype(np.int32), C
    )
    holdings = partition.dirichlet_per_client(pool, clients=8, alpha=3.0, samples_per_client=20)
    made = federation.federate(pool, holdings, partial(concept.rotate, groups=2, seed=1))
    assert (
        made.x.dtype == jnp.uint8
        and made.y.dtype == made.owner.dtype == made.concept.dtype == jnp.int32
    )
    for i, (sample, k) in enumerate(zip(holdings.sample, holdings.owner, strict=True)):
        np.testing.assert_array_equal(made.x[i], np.rot90(pool.x[sample], 2 * int(made.concept[k])))
    counts = federation.label_counts(made.train, made.owner, made.y, C)
    np.testing.assert_array_equal(counts.sum(axis=1), made.train.size)


def test_describe_and_clients():
    made = toy([0, 0, 0, 2, 2, 4], [False, False, True, False, True, True])
    assert federation.describe(made) == {
        "clients": 5,
        "classes": C,
        "train_samples": 3,
        "test_samples": 3,
        "min_train": 0,
        "median_train": 0.0,
        "max_train": 2,
        "clients_without_train": 3,
        "clients_without_test": 2,
    }
    assert toy([0, 1], [False, False], clients=9).num_clients == 9
    with pytest.raises(InputError, match="owners are 0"):
        toy([0, 3], [False, False], clients=3)


def test_no_retrace():
    calls = []

    @jax.jit
    def step(view, owner):
        calls.append(None)
        return federation.update_client_index(view, owner)

    view = federation.build_client_index(NUMBERS, NUMBERS % K, K)
    for k in range(3):
        view = step(view, jnp.full(N, k, jnp.int32))
    assert len(calls) == 1 and view.size.tolist() == [0, 0, len(NUMBERS), 0, 0]
