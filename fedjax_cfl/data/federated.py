"""Federated data: one flat pool of samples, and views that say which client has which.

A view is rebuilt from `owner` alone, by one sort: that is all that a distribution shift
or a resumed run has to do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.data.datasets.pool import check_pool, to_float32
from fedjax_cfl.errors import InputError
from fedjax_cfl.tasks import kind_of
from fedjax_cfl.types import (
    ClientIndex,
    ExactSamples,
    FederatedData,
    Partition,
    Pool,
    SourceNames,
)
from fedjax_cfl.validation import checked

TURNS = 4  # quarters of a whole turn
LOST = 1e-4  # of a feature's range: what is rounded more is kept exactly


def check_arrays(pool: Pool, on_host: bool) -> Pool:
    """Returns a pool with the types of `Pool`. Raises InputError for what `datasets.npz` would
    refuse in a file; `on_host` samples are only looked at when they are read.
    """
    if pool.num_classes < 0:
        raise InputError(
            f"pool: num_classes={pool.num_classes}, expected at least 1, or 0 where y are numbers"
            " to regress, or labels"
        )
    if not on_host:
        return check_pool(pool, "pool")
    stand_in = np.zeros((len(pool.x), 1), np.uint8)
    return check_pool(pool._replace(x=stand_in), "pool")._replace(x=pool.x)


def check_holdings(holdings: Partition, samples: int) -> Partition:
    """Returns a partition with the types of `Partition`. Raises InputError for one that does not
    fit a pool of so many samples, and where no client holds a training sample.
    """
    sample, owner, test = map(np.asarray, (holdings.sample, holdings.owner, holdings.test))
    for name, array, end in (("sample", sample, samples), ("owner", owner, 2**31)):
        if array.ndim != 1 or array.shape != test.shape or array.dtype.kind not in "iu":
            raise InputError(
                f"partition: {name} has shape {array.shape} and dtype {array.dtype}, expected"
                f" integers [N], as many as test, of shape {test.shape}"
            )
        if array.size and not (array.min() >= 0 and array.max() < end):
            raise InputError(
                f"partition: {name}s are {array.min()} .. {array.max()}, expected 0 .. {end - 1}"
            )
    if not np.isin(test, (0, 1)).all():
        raise InputError(f"partition: test has dtype {test.dtype}, expected True or False")
    test = test.astype(bool)
    if test.all():
        alone = owner.size and np.bincount(owner).max() == 1
        reason = ", for each has one sample, which is for testing" if alone else ""
        raise InputError(
            f"partition: no client holds a training sample{reason}, expected at least one; give"
            " clients two samples or more, or mark training samples with 0 in a split"
        )
    return holdings._replace(sample=sample, owner=owner.astype(np.int32), test=test)


def check_classes(data: FederatedData | Pool, what: str, remedy: str) -> None:
    """Raises InputError where y are no classes, which `what` needs; `remedy` says what to use."""
    if not data.num_classes:
        raise InputError(f"{what}: needs a class of each sample, which y are not; {remedy}")


@checked()
def federate(
    pool: Pool,
    holdings: Partition | Callable[[Pool], Partition],
    concept: Callable | None = None,
    clients: int | None = None,
    on_host: bool = False,
) -> FederatedData:
    """Returns the N holdings of a partition as data of K clients. A sample of the pool that
    several clients hold is stored once, unless a concept changes it.

    Args: `holdings` may be a function of the pool, such as `cfl.partition.iid(clients=40)`;
    `concept` is a function of `concept.py`, None: the true groups are those of the
    partition, or unknown (-1); `clients` is K, None: the largest owner + 1; `on_host`: samples
    stay on the host, as NumPy arrays whose views number the pool's own samples (see
    `prefetch`). Raises InputError for an owner outside of 0 .. K - 1, or if no client holds a
    training sample.
    """
    pool = check_arrays(pool, on_host)
    holdings = check_holdings(holdings(pool) if callable(holdings) else holdings, len(pool.y))
    owner = holdings.owner
    check_names(pool, holdings)
    clients = int(owner.max()) + 1 if clients is None else clients
    if owner.max() >= clients:
        raise InputError(
            f"partition: owners are {owner.min()} .. {owner.max()}, expected 0 .. {clients - 1}"
        )
    check_turned(holdings, concept, on_host)
    groups = np.full(clients, -1, np.int32) if holdings.concept is None else holdings.concept
    if on_host:
        return federate_on_host(pool, holdings, find_lasting(groups))
    rows, sample, y = holdings.sample, None, read_labels(pool, holdings)
    stored, number = np.unique(rows, return_inverse=True)
    if concept is not None:
        x, y, groups = concept(to_float32(pool.x[rows]), y, owner, clients, pool.num_classes)
    elif stored.size < len(rows):
        x, sample = pool.x[stored], number
    else:
        x = pool.x[rows]
    train, test, validation = build_views(holdings, clients, np.arange(len(rows)))
    return FederatedData(
        x=jax.device_put(to_float32(x)),  # of its own: nobody else can change it
        y=_to_device(y, pool.y.dtype),
        owner=_to_device(owner),
        train=train,
        test=test,
        concept=_to_device(find_lasting(groups)),
        concepts=_to_device(groups if np.ndim(groups) > 1 else None),
        validation=validation,
        shifted=_to_device(np.zeros(clients), bool),
        max_client_samples=int(np.asarray(train.size).max()),
        sample=_to_device(sample),
        turns=_to_device(holdings.turns),
        time=_to_device(find_times(pool, holdings)),
        exact=keep_exact(x),
        **describe_source(pool, holdings),
    )


def describe_source(pool: Pool, holdings: Partition) -> dict[str, Any]:
    """Returns what a run keeps of the source of its samples, to predict others of it."""
    return {
        "num_classes": pool.num_classes,
        "client_names": holdings.client_names and SourceNames(holdings.client_names),
        "class_names": pool.class_names,
        "columns": pool.columns and SourceNames(pool.columns),
        "pixels": pool.x.dtype == np.uint8,
    }


def _to_device(values: np.ndarray | None, dtype: Any = np.int32) -> Any:
    # converted by NumPy: JAX would compile a program for each shape
    return None if values is None else jax.device_put(np.array(values, dtype))


def keep_exact(x: np.ndarray) -> ExactSamples | None:
    """Returns samples x [rows, F] float64 as they are where float32 would lose what a feature
    varies by, because it is far from 0; None: it does not.
    """
    if x.dtype != np.float64:
        return None
    lost, spread = np.abs(x - to_float32(x)).max(0), np.ptp(x, 0)
    return ExactSamples(x) if ((lost > LOST * spread) & (spread > 0)).any() else None


def build_views(
    holdings: Partition, clients: int, numbers: np.ndarray, on_host: bool = False
) -> tuple[ClientIndex, ClientIndex, ClientIndex | None]:
    """Returns who of the K `clients` has which holdings, by `numbers` [N] of theirs, for training,
    for testing, and to choose a round by, None: there are none of these; as NumPy's `on_host`.
    """
    owner, test, apart = holdings.owner, holdings.test, holdings.validation
    sides = (~test, test) if apart is None else (~test & ~apart, test, apart)
    views = [build_client_index(numbers[side], owner[side], clients, on_host) for side in sides]
    return views[0], views[1], views[2] if len(views) > 2 else None


def check_turned(holdings: Partition, concept: Callable | None, on_host: bool) -> None:
    """Raises InputError for what data on the host, or a partition that turns its samples, cannot
    have.
    """
    turned, edited = holdings.turns is not None, concept is not None
    if turned and edited:
        raise InputError(
            "concept: this partition turns and relabels the samples of its own groups; use"
            " concept=none"
        )
    if on_host and (turned or edited):
        what = "this partition turns" if turned else "a concept edits"
        raise InputError(
            f"resident=host: {what} all samples, on the device; use resident=device"
            f"{', or concept=none' if edited else ''}"
        )


def read_labels(pool: Pool, holdings: Partition) -> np.ndarray:
    """Returns the label of each holding [N], as its client sees it."""
    return pool.y[holdings.sample] if holdings.labels is None else holdings.labels


def turn_images(x: jax.Array, turns: jax.Array) -> jax.Array:
    """Turns each of the images [B, H, H, ...] by its number of quarters [B],
    counter-clockwise.
    """
    turned = x
    for quarter in range(1, TURNS):
        whole = jnp.rot90(x, quarter, axes=(1, 2))
        turned = jax.vmap(jnp.where)(turns == quarter, whole, turned)
    return turned


def gather(data: FederatedData, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x [B, ...], y [B]) of the holdings `rows` [B], as their clients see them: the
    one place where samples are read.
    """
    x = data.x[rows if data.sample is None else data.sample[rows]]
    return x if data.turns is None else turn_images(x, data.turns[rows]), data.y[rows]


def find_lasting(groups: np.ndarray) -> np.ndarray:
    """Returns the true groups [K] of clients, of [T, K] in stages; -1 where they are not the same
    in all of them: together these are a mixture.
    """
    return groups if np.ndim(groups) == 1 else np.where((groups == groups[0]).all(0), groups[0], -1)


def take_holdings(holdings: Partition, rows: np.ndarray) -> Partition:
    """Returns some of the holdings, in the order of `rows`: numbers [n], or a mask [N]."""
    names = ("sample", "owner", "test", "turns", "labels", "shared", "validation")
    columns = {name: getattr(holdings, name) for name in names}
    taken = {name: column[rows] for name, column in columns.items() if column is not None}
    return holdings._replace(**taken)


def find_times(pool: Pool, holdings: Partition) -> np.ndarray | None:
    """Returns when each holding came into being [N], -1 for those that the server shared;
    None where neither is known.
    """
    if pool.time is None and holdings.shared is None:
        return None
    time = np.zeros(len(pool.y), np.int32) if pool.time is None else pool.time
    shared = False if holdings.shared is None else holdings.shared
    return np.where(shared, -1, time[holdings.sample])


def check_names(pool: Pool, holdings: Partition) -> None:
    """Raises InputError for a name that no file of a run can hold: before the training."""
    lists = {"client": holdings.client_names, "class": pool.class_names, "column": pool.columns}
    for what, names in lists.items():
        for name in map(str, names or ()):
            if not name.isascii() and any("\ud800" <= sign <= "\udfff" for sign in name):
                raise InputError(
                    f"{what} {name!a}: half a character (a lone surrogate) is in its name,"
                    " which cannot be written; give it a name of whole characters"
                )


def federate_on_host(pool: Pool, holdings: Partition, groups: np.ndarray) -> FederatedData:
    """Returns a population whose samples stay on the host; `groups` [K] are the true groups."""
    train, test, _ = build_views(holdings, len(groups), holdings.sample, on_host=True)
    x, most = to_float32(pool.x), int(train.size.max())
    host: Any = {"x": x, "y": pool.y, "owner": None, "shifted": None, "concept": groups}
    host |= describe_source(pool, holdings)
    return FederatedData(**host, train=train, test=test, max_client_samples=most)


def build_client_index(
    numbers: np.ndarray, owner: np.ndarray, clients: int, on_host: bool = False
) -> ClientIndex:
    """Groups sample numbers [n] by their owners [n], as NumPy arrays if they stay `on_host`; within
    a client their order stays.
    """
    size = np.bincount(owner, minlength=clients)
    parts: Any = numbers[np.argsort(owner, kind="stable")], np.cumsum(size) - size, size
    return ClientIndex(*(part.astype(np.int32) if on_host else _to_device(part) for part in parts))


def update_client_index(view: ClientIndex, owner: jax.Array) -> ClientIndex:
    """Regroups a view's samples by new owners [N] int32, where -1 hides a sample: it
    goes to the end and is in no client's range.

    The result depends on `owner` only and not on the order before: within a client,
    samples are ascending by number.
    """
    clients = view.size.shape[0]
    new = owner[view.order]
    # no two samples are equal: a sort need not be stable, and compiles in half the time
    keys = jnp.where(new < 0, clients, new), view.order
    new, order = jax.lax.sort(keys, num_keys=2, is_stable=False)
    size = jnp.zeros_like(view.size).at[new].add(1, mode="drop")  # hidden samples have new = K
    return ClientIndex(order, jnp.cumsum(size, dtype=size.dtype) - size, size)


def move_client_index(view: ClientIndex, owner: jax.Array, heir: jax.Array) -> ClientIndex:
    """Regroups a view whose clients exchange all their samples: those of client k, by `owner`
    [N] int32 so far, become those of client heir[k]; `heir` [K] int32 is a permutation.

    It is what `update_client_index` gives for the new owners, without a sort: samples of a client
    stay together, in the same order, and hidden ones at the end.
    """
    size = jnp.zeros_like(view.size).at[heir].set(view.size, unique_indices=True)
    start = jnp.cumsum(size, dtype=size.dtype) - size
    before, place = owner[view.order], jnp.arange(view.order.size, dtype=view.order.dtype)
    moved = start[heir[before]] + place - view.start[before]
    place = jnp.where(before < 0, place, moved)
    order = jnp.zeros_like(view.order).at[place].set(view.order, unique_indices=True)
    return ClientIndex(order, start, size)


def label_counts(view: ClientIndex, data: FederatedData) -> jax.Array:
    """Counts the labels of each client's samples in a view of the data, [K, C] int32."""
    held, none = data.owner[view.order], jnp.zeros((data.num_clients, data.num_classes), jnp.int32)
    row = jnp.where(held < 0, data.num_clients, held)  # a negative index would count from the end
    return none.at[row, data.y[view.order]].add(1, mode="drop")


def train_label_counts(data: FederatedData) -> jax.Array:
    """Returns how many training samples of each label every client has, [K, C] int32. Raises
    InputError where y are no classes.
    """
    remedy = "use a method, a selection and a drift that count no labels"
    check_classes(data, "label counts", remedy)
    return label_counts(data.train, data)


def train_label_shares(data: FederatedData) -> jax.Array:
    """Returns each client's shares [K, C] of its training labels, 0 for one without any."""
    return to_shares(train_label_counts(data))


def to_shares(counts: jax.Array) -> jax.Array:
    """Returns the counts [K, C] as shares of each row's sum; 0 where that is 0."""
    return counts / jnp.maximum(counts.sum(axis=1, keepdims=True), 1)


def format_description(data: FederatedData, tested: str = "test") -> str:
    """Returns how many clients, classes and samples there are, in words, and the sizes of the
    training sets; clients without samples are mentioned where there are any. `tested` says what
    samples those are that rows are scored on.
    """
    train, test = np.asarray(data.train.size), np.asarray(data.test.size)
    without = [
        f"{count:,} client{'s' * (count != 1)} without {side} samples"
        for side, sizes in (("train", train), ("test", test))
        if (count := int((sizes == 0).sum()))
    ]
    parts = [
        f"{data.num_clients:,} clients",
        kind_of(data).describe(data),
        f"{train.sum():,} train and {test.sum():,} {tested} samples",
        f"{train.min():,} to {train.max():,} train samples a client (median {np.median(train):g})",
        *without,
        *([] if data.concepts is None else [f"in {len(data.concepts)} stages"]),
    ]
    return ", ".join(parts)


def take_clients(data: FederatedData, clients: np.ndarray) -> FederatedData:
    """Returns the data of some clients, who are numbered in the order given."""
    number = np.full(data.num_clients + 1, -1, np.int32)  # the last: of holdings without an owner
    number[clients] = np.arange(clients.size)
    owner = number[np.asarray(data.owner)]
    rows = np.flatnonzero(owner >= 0)

    def view(whole: ClientIndex) -> ClientIndex:
        kept = np.flatnonzero(np.isin(rows, whole.order))
        return build_client_index(kept, owner[rows][kept], clients.size)

    def cut(column, places):
        return None if column is None else jnp.asarray(np.asarray(column)[places])

    names = data.client_names
    sample = rows if data.sample is None else np.asarray(data.sample)[rows]
    return data.replace(
        y=cut(data.y, rows),
        owner=jnp.asarray(owner[rows]),
        train=view(data.train),
        test=view(data.test),
        validation=data.validation and view(data.validation),
        concept=cut(data.concept, clients),
        concepts=None if data.concepts is None else data.concepts[:, clients],
        shifted=cut(data.shifted, clients),
        sample=jnp.asarray(sample, jnp.int32),
        turns=cut(data.turns, rows),
        time=cut(data.time, rows),
        client_names=names and SourceNames(tuple(names.names[k] for k in clients.tolist())),
    )
