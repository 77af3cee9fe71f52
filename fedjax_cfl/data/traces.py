"""Traces: in which interval each sample arrives at its client (`ArrangeFn`), for `stream`.

All of them are functions of the key, so that each run of a grid has its own. Samples that
the server shared (`data.time` is -1) belong to no interval and are left as they are.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl.data.drift import OTHER_DRIFTS
from fedjax_cfl.data.federated import TURNS, check_classes
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import ClientIndex, FederatedData, Key

MIX, LABEL, PICK, PLACE = range(4)  # purposes of draws
INT32_MAX = 2**31 - 1


# (key, data, B intervals) -> the data, perhaps edited, and the interval [N] int32 in which each
# holding arrives
ArrangeFn = Callable[[Key, FederatedData, int], tuple[FederatedData, jax.Array]]


def find_shared(data: FederatedData) -> jax.Array:
    """Returns which holdings [N] bool the server gave out."""
    return jnp.zeros(len(data.y), bool) if data.time is None else data.time < 0


def deal_labels(key: Key, data: FederatedData, intervals: int) -> tuple[FederatedData, jax.Array]:
    """Deals each client's labels to the intervals in a random order, as evenly as can be (an
    `ArrangeFn`).
    """
    check_classes(data, "drift=stream_bucket", OTHER_DRIFTS)
    clients = data.num_clients
    own = jnp.where((data.owner < 0) | find_shared(data), clients, data.owner)
    has = jnp.zeros((clients, data.num_classes), bool).at[own, data.y].set(True, mode="drop")
    order, offset = jax.random.split(key)
    score = jnp.where(has, jax.random.uniform(order, has.shape), 2.0)
    rank = jnp.argsort(jnp.argsort(score, axis=1), axis=1)  # of the labels that a client has
    first = jax.random.randint(offset, (clients, 1), 0, intervals)
    place = (rank * intervals + first) // jnp.maximum(has.sum(axis=1, keepdims=True), 1)
    return data, place.astype(jnp.int32)[data.owner, data.y]


def cut_times(key: Key, data: FederatedData, intervals: int) -> tuple[FederatedData, jax.Array]:
    """Cuts the time from the first to the last sample into intervals of equal length (an
    `ArrangeFn`).
    """
    assert data.time is not None  # see `check_times`
    real = (data.owner >= 0) & (data.time >= 0)
    first = jnp.min(jnp.where(real, data.time, INT32_MAX))
    span = jnp.max(jnp.where(real, data.time, -1)) - first + 1
    interval = (data.time - first) * intervals // jnp.maximum(span, 1)
    return data, jnp.clip(interval, 0, intervals - 1)


def check_times(data: FederatedData, intervals: int) -> None:
    """Raises InputError for data without times, or with more of them than int32 can cut; on
    the host.
    """
    time = np.zeros(0) if data.time is None else np.asarray(data.time)
    time = time[time >= 0]
    if not time.size:
        raise InputError(
            "drift=by_time: the data set has no times; use elec2 or sent140, an .npz with an array"
            " time, or another drift"
        )
    span = int(time.max()) - int(time.min()) + 1
    if span * intervals > INT32_MAX:
        raise InputError(
            f"drift.intervals={intervals}: at most {INT32_MAX // span} for times {time.min()} .."
            f" {time.max()}; count them in a longer unit"
        )


def turn_arrivals(
    key: Key, data: FederatedData, intervals: int, p: float
) -> tuple[FederatedData, jax.Array]:
    """Deals each client's samples to the intervals at random, and turns those of one interval
    alike: by a random quarter at first, and by one more per interval with probability p.

    The true groups are unknown from then on.
    """
    place, begin, turn = jax.random.split(key, 3)
    interval = jax.random.randint(place, data.owner.shape, 0, intervals)
    shape = intervals, data.num_clients
    quarter = jax.random.randint(begin, shape[1:], 0, TURNS) + jnp.cumsum(
        (jax.random.uniform(turn, shape) < p).at[0].set(False), axis=0
    )
    more = jnp.where(find_shared(data), 0, quarter[interval, data.owner])
    turns = more if data.turns is None else data.turns + more
    concept = jnp.full_like(data.concept, -1)
    return data.replace(turns=(turns % TURNS).astype(jnp.int32), concept=concept), interval


def redraw_samples(
    key: Key, data: FederatedData, intervals: int, settings: tuple[float, float, np.ndarray, float]
) -> tuple[FederatedData, jax.Array]:
    """Deals each client's samples to the intervals at random, and replaces each by a random
    one whose label is drawn from the client's label shares of that interval.

    Clients keep their numbers of samples. Training samples are drawn from the training
    samples of all clients of the same true group, test samples from their test samples, with
    replacement; so natural owners lose what is their own but the label shares.

    Args: `intervals` is B; `settings` are the last four arguments of `draw_label_shares`.
    """
    check_classes(data, "drift=stream_gradual or stream_burst", OTHER_DRIFTS)
    keys = [jax.random.fold_in(key, purpose) for purpose in (MIX, LABEL, PICK, PLACE)]
    shares = draw_label_shares(keys[0], data.num_clients, data.num_classes, *settings)
    interval = jax.random.randint(keys[3], data.owner.shape, 0, intervals)
    source = jnp.arange(len(data.y), dtype=jnp.int32)
    for one, view in ((keys[1], data.train), (keys[2], data.test)):
        source = source.at[view.order].set(_draw_sources(one, data, view, interval, shares))
    rows = source if data.sample is None else data.sample[source]
    turns = None if data.turns is None else data.turns[source]
    return data.replace(y=data.y[source], sample=rows, turns=turns), interval


def draw_label_shares(
    key: Key,
    clients: int,
    classes: int,
    alpha: float,
    epsilon: float,
    is_burst: np.ndarray,
    fraction: float,
) -> jax.Array:
    """Draws the label shares [B, K, C] of clients over the intervals: p_{b+1} = (1 - epsilon)
    p_b + epsilon Dir(alpha / C).

    Args: `clients` is K and `classes` is C; `alpha` > 0, the larger the more even; `epsilon`,
    from 0 to 1, is the part that is new; `is_burst` [B] bool, on the host, are the intervals in
    which each client takes the new shares as they are, with probability `fraction`.
    """

    def step(shares, now):
        key, burst = now
        draw, who = jax.random.split(key)
        fresh = jax.random.dirichlet(draw, jnp.full(classes, alpha / classes), (clients,))
        jumps = burst & (jax.random.uniform(who, (clients, 1)) < fraction)
        shares = jnp.where(jumps, fresh, (1 - epsilon) * shares + epsilon * fresh)
        return shares, shares

    keys = jax.random.split(key, len(is_burst))
    first = jax.random.dirichlet(keys[0], jnp.full(classes, alpha / classes), (clients,))
    _, rest = lax.scan(step, first, (keys[1:], jnp.asarray(is_burst[1:])))
    return jnp.concatenate([first[None], rest])


def _draw_sources(
    key: Key, data: FederatedData, view: ClientIndex, interval: jax.Array, shares: jax.Array
) -> jax.Array:
    """Returns the number of the holding that each of a view's holdings becomes [n], in the
    order of `view.order`.
    """
    numbers, classes = view.order, data.num_classes
    owner, when = data.owner[numbers], interval[numbers]
    free = (owner >= 0) & ~find_shared(data)[numbers]
    group = data.concept + 1  # 0 where unknown
    kind = jnp.where(free, group[owner] * classes + data.y[numbers], INT32_MAX)
    kind, by_kind = lax.sort((kind, numbers), num_keys=2)
    wanted = group[:, None] * classes + jnp.arange(classes)  # [K, C]
    first = jnp.searchsorted(kind, wanted)
    count = jnp.searchsorted(kind, wanted, side="right") - first
    mass = jnp.cumsum(jnp.where(count > 0, shares, 0.0), axis=2)  # [B, K, C]
    # one axis each: data that a grid has padded get the same draws as alone
    label, pick = (jax.random.uniform(one, numbers.shape) for one in jax.random.split(key))
    label = _find_label(mass, when, owner, label * mass[when, owner, -1])
    size = count[owner, label]
    place = jnp.minimum((pick * size).astype(jnp.int32), size - 1)
    found = by_kind[first[owner, label] + jnp.maximum(place, 0)]
    return jnp.where(free & (size > 0) & (mass[when, owner, -1] > 0), found, numbers)


def _find_label(
    mass: jax.Array, interval: jax.Array, client: jax.Array, target: jax.Array
) -> jax.Array:
    """Returns the first label [n] whose cumulative share in `mass` [B, K, C] is above
    `target` [n], by bisection: the shares of all samples would not fit into memory.
    """
    classes = mass.shape[2]
    label = jnp.zeros_like(client)
    for bit in reversed(range((classes - 1).bit_length())):
        further = label + 2**bit
        below = mass[interval, client, jnp.minimum(further, classes) - 1] <= target
        label = jnp.where((further < classes) & below, further, label)
    return label
