"""Federated data: one flat pool of samples, and views that say who holds what.

A view is rebuilt from `owner` alone, by one sort: that is all that a distribution shift
or a resumed run has to do.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.data.transform import transform_in_place
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import ClientIndex, FederatedData, Partition, Pool


def federate(
    pool: Pool,
    holdings: Partition,
    concept: Callable | None = None,
    clients: int | None = None,
    on_host: bool = False,
) -> FederatedData:
    """Gathers the held samples of a pool, N of them, and who holds them; a sample held
    twice is there twice.

    `concept` is a function of `concept.py`, None: the groups are those of the
    partition, else unknown, -1. K is
    `clients`, by default the largest owner + 1. With `on_host` nothing is gathered: the
    result is a population for `run`, NumPy arrays whose views number the pool's own
    samples (see `population`).
    """
    owner = np.asarray(holdings.owner, np.int32)
    if not len(owner) or holdings.test.all():
        raise InputError("partition: no client holds a training sample, expected at least one")
    clients = int(owner.max()) + 1 if clients is None else clients
    if owner.min() < 0 or owner.max() >= clients:
        raise InputError(
            f"partition: owners are {owner.min()} .. {owner.max()}, expected 0 .. {clients - 1}"
        )
    groups = np.full(clients, -1, np.int32) if holdings.concept is None else holdings.concept
    names = holdings.client_names
    if on_host:
        if concept is not None or holdings.code is not None:
            raise InputError(
                "resident=host: a concept edits all samples at once; use concept=none, or"
                " resident=device"
            )
        train, test = (
            build_client_index(holdings.sample[rows], owner[rows], clients, np)
            for rows in (np.flatnonzero(~holdings.test), np.flatnonzero(holdings.test))
        )
        return FederatedData(
            pool.x,
            pool.y,
            None,
            train,
            test,
            groups,
            None,
            pool.num_classes,
            int(train.size.max()),
            client_names=names,
        )
    x, y = pool.x[holdings.sample], pool.y[holdings.sample]
    if holdings.code is not None and holdings.label_maps is not None:
        transform_in_place(x, y, holdings.code, holdings.label_maps)
    if concept is not None:
        x, y, groups = concept(x, y, owner, clients, pool.num_classes)
    train, test = (
        build_client_index(np.flatnonzero(rows), owner[rows], clients)
        for rows in (~holdings.test, holdings.test)
    )
    return FederatedData(
        x=jnp.asarray(x),
        y=jnp.asarray(y, jnp.int32),
        owner=jnp.asarray(owner),
        train=train,
        test=test,
        concept=jnp.asarray(groups, jnp.int32),
        shifted=jnp.zeros(clients, bool),
        num_classes=pool.num_classes,
        max_client_samples=int(train.size.max()),
        client_names=names,
    )


def build_client_index(
    numbers: np.ndarray, owner: np.ndarray, clients: int, arrays=jnp
) -> ClientIndex:
    """Groups sample numbers [n] by their owners [n], on the host, as arrays of
    `load_arrays`; within a client their order stays.
    """
    size = np.bincount(owner, minlength=clients)
    order = (
        numbers if np.all(owner[1:] >= owner[:-1]) else numbers[np.argsort(owner, kind="stable")]
    )
    return ClientIndex(
        *(arrays.asarray(array, np.int32) for array in (order, np.cumsum(size) - size, size))
    )


def update_client_index(view: ClientIndex, owner: jax.Array) -> ClientIndex:
    """Regroups a view's samples by new owners [N] int32, where -1 hides a sample: it
    goes to the end and is in no client's range.

    The result depends on `owner` only and not on the order before: within a client,
    samples are ascending by number.
    """
    clients = view.size.shape[0]
    new = owner[view.order]
    new, order = jax.lax.sort((jnp.where(new < 0, clients, new), view.order), num_keys=2)
    size = jnp.zeros_like(view.size).at[new].add(1, mode="drop")  # hidden samples have new = K
    return ClientIndex(order, jnp.cumsum(size, dtype=size.dtype) - size, size)


def label_counts(view: ClientIndex, owner: jax.Array, y: jax.Array, num_classes: int) -> jax.Array:
    """Counts the labels of each client's samples in a view: owner [N] (-1 = hidden), y
    [N] -> [K, C] int32.
    """
    clients = view.size.shape[0]
    held = owner[view.order]
    row = jnp.where(held < 0, clients, held)  # a negative index would count from the end
    return jnp.zeros((clients, num_classes), jnp.int32).at[row, y[view.order]].add(1, mode="drop")


def describe(data: FederatedData) -> dict[str, float]:
    """Returns the numbers that a report prints: clients, classes, samples held (train,
    test) and the sizes of the training sets.
    """
    train, test = np.asarray(data.train.size), np.asarray(data.test.size)
    return {
        "clients": data.num_clients,
        "classes": data.num_classes,
        "train_samples": int(train.sum()),
        "test_samples": int(test.sum()),
        "min_train": int(train.min()),
        "median_train": float(np.median(train)),
        "max_train": int(train.max()),
        "clients_without_train": int((train == 0).sum()),
        "clients_without_test": int((test == 0).sum()),
    }


def format_description(data: FederatedData) -> str:
    """Returns the same numbers in words; clients without samples are mentioned where
    there are any.
    """
    n = describe(data)
    without = [
        f"{n[f'clients_without_{side}']:,} clients without {side} samples"
        for side in ("train", "test")
        if n[f"clients_without_{side}"]
    ]
    parts = [
        f"{n['clients']:,} clients",
        f"{n['classes']:,} classes",
        f"{n['train_samples']:,} train and {n['test_samples']:,} test samples",
        (
            f"{n['min_train']:,} to {n['max_train']:,} train samples a client (median"
            f" {n['median_train']:g})"
        ),
        *without,
    ]
    return ", ".join(parts)
