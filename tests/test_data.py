"""Federated data: the views against loops, on the host and under jit."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_cfl as cfl
from fedjax_cfl.data import concept, partition
from fedjax_cfl.data import federated as federation
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Partition, Pool

K, N, C = 5, 40, 3
REOWN, COUNTS = jax.jit(federation.update_client_index), jax.jit(federation.label_counts)
NUMBERS = np.arange(0, N, 2)  # a view of every second sample


def held(view, k):
    """Returns the samples of one client."""
    order, start, size = map(np.asarray, (view.order, view.start, view.size))
    return order[start[k] :][: size[k]].tolist()


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
    data = toy(np.arange(N) % K, [False] * N)
    for owner in owners:
        new = jnp.array(owner, jnp.int32)
        view = REOWN(view, new)
        counts = COUNTS(view, data.replace(owner=new)).tolist()
        for k in range(K):
            mine = [i for i in NUMBERS if owner[i] == k]
            assert held(view, k) == mine
            assert counts[k] == [sum(i % C == c for i in mine) for c in range(C)]
        assert sorted(view.order.tolist()) == NUMBERS.tolist()
        assert {a.dtype for a in jax.tree.leaves(view)} == {jnp.dtype(jnp.int32)}
    # the way there does not matter: a resumed run rebuilds the same view
    direct = REOWN(start, new)
    assert all(
        (a == b).all() for a, b in zip(jax.tree.leaves(view), jax.tree.leaves(direct), strict=True)
    )


def list_rows(count):
    """Returns (owner, is it for tests) of `count` samples."""
    return st.lists(st.tuples(st.integers(0, K - 1), st.booleans()), min_size=count, max_size=count)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.sampled_from([1, 2, 5, N]).flatmap(list_rows))  # a program for each length
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
    counts = federation.label_counts(made.train, made)
    np.testing.assert_array_equal(counts.sum(axis=1), made.train.size)


def test_describe_and_clients():
    made = toy([0, 0, 0, 2, 2, 4], [False, False, True, False, True, True])
    assert federation.format_description(made) == (
        f"5 clients, {C} classes, 3 train and 3 test samples, 0 to 2 train samples a client"
        " (median 0), 3 clients without train samples, 2 clients without test samples"
    )
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


GOOD = {"x": np.eye(6, 4, dtype=np.float32), "y": np.arange(6) % 3, "client": np.arange(6) % 2}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"y": np.arange(6) % 3 + 1}, "y is 3 in sample 2, expected 0 .. 2"),
        ({"y": np.arange(6) / 2}, "y is 0.5 in sample 1"),
        ({"y": np.arange(5)}, "y has shape (5,), x has shape (6, 4)"),
        ({"y": np.arange(6) - 1}, "y is -1 in sample 0"),
        ({"x": np.full((6, 4), np.nan)}, "x is NaN or infinite in 6 samples"),
        ({"x": np.array(list("abcdef"))}, "x has dtype <U1"),
        ({"client": np.arange(5)}, "client has shape (5,)"),
        ({"client": np.arange(6) - 1}, "client is -1 in sample 0"),
        ({"num_classes": -1}, "num_classes=-1, expected at least 1"),
        ({"test": np.full(6, 2)}, "test is 2 in sample 0, expected True or False"),
        ({"time": 10**12 + np.arange(6)}, "time is 1000000000000 in sample 0"),
    ],
)
def test_arrays_from_python_are_refused_as_those_of_files_are(changes, line):
    """Labels beyond the last class train without a word otherwise."""
    arrays = GOOD | {"num_classes": 3} | changes
    with pytest.raises(InputError, match=re.escape(f"pool: {line}")):
        cfl.federate(cfl.Pool(**arrays), hold(6))


def hold(samples, test=None, **changes):
    test = np.zeros(samples, bool) if test is None else np.array(test)
    parts = {"sample": np.arange(samples), "owner": np.arange(samples) % 2, "test": test}
    return cfl.Partition(**parts | changes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sample": np.arange(6) + 1}, "samples are 1 .. 6, expected 0 .. 5"),
        ({"sample": np.arange(6) - 1}, "samples are -1 .. 4"),
        ({"owner": np.arange(6) / 2}, "owner has shape (6,) and dtype float64"),
        ({"owner": np.arange(6) - 1}, "owners are -1 .. 4"),
        ({"owner": np.arange(6) + 2**32}, "owners are 4294967296 .. 4294967301"),
        (
            {"owner": np.arange(5)},
            "owner has shape (5,) and dtype int64, expected integers [N], as many as test",
        ),
        ({"test": np.arange(6)}, "test has dtype int64"),
        ({"test": np.zeros(5, bool)}, "sample has shape (6,)"),
        ({"test": np.ones(6, bool)}, "no client holds a training sample"),
    ],
)
def test_partitions_that_do_not_fit_are_refused(changes, line):
    with pytest.raises(InputError, match=re.escape(f"partition: {line}")):
        cfl.federate(cfl.Pool(**GOOD, num_classes=3), hold(6, **changes))


def test_gaps_between_labels_are_closed_and_named(tmp_path):
    np.savez(tmp_path / "a.npz", **GOOD | {"y": np.array([10, 20, 30, 10, 20, 30])})
    pool = cfl.datasets.npz(tmp_path / "a.npz")
    assert pool.num_classes == 3 and pool.class_names == ("10", "20", "30")
    assert pool.y.tolist() == [0, 1, 2, 0, 1, 2]
    said = cfl.datasets.npz(tmp_path / "a.npz", num_classes=31)
    assert said.num_classes == 31 and said.class_names is None
    rng = np.random.default_rng(0)
    targets = {"x": np.zeros((5000, 2), np.float32), "y": rng.permutation(5000)}
    np.savez(tmp_path / "b.npz", **targets)
    with pytest.raises(InputError, match="5,000 different values in 5,000 samples, which looks"):
        cfl.datasets.npz(tmp_path / "b.npz")


@pytest.mark.parametrize("shift", [2**62, -5, 2**63])
def test_clients_may_have_any_whole_number_as_their_name(tmp_path, shift):
    ids = np.array([shift + k % 2 for k in range(6)])
    np.savez(tmp_path / "a.npz", **GOOD | {"client": ids})
    pool = cfl.datasets.npz(tmp_path / "a.npz")
    assert pool.client.tolist() == [0, 1] * 3
    assert [int(name) for name in pool.client_names] == [shift, shift + 1]
