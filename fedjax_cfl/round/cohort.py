"""How the clients of a cohort train side by side, whatever their sizes, without padding
anyone to the largest.

A solver (`sgd`) is written for ONE client; `over_clients` adds the cohort axis, here and
nowhere else. Chunks of up to `width` clients run one after another; within a chunk lanes
end as their clients are done (`ragged_loop`). The width is 1 on a CPU core, where a
client's weights stay in the cache, and as many as fit on an accelerator. Devices split
the cohort.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.round.local import Local
from fedjax_cfl.round.runs_as_one import CohortFn, over_clients_of_runs
from fedjax_cfl.sharding import over_devices
from fedjax_cfl.types import Cohort, FederatedData

MIN_BUCKET = 16  # samples in the smallest size bucket
SAMPLE_BLOCK = 64  # samples in one step of a pass over a client's whole training set
NO_CLIENT = jnp.iinfo(jnp.int32).max  # the id in an empty slot of a chunk

CostFn = Callable[[jax.Array], jax.Array]  # samples [k] -> cost [k] of such clients, in any unit


def bucket_sizes(capacity: int) -> list[int]:
    """Returns the power-of-two bucket sizes up to the first that holds `capacity` samples."""
    sizes = [MIN_BUCKET]
    while sizes[-1] < capacity:
        sizes.append(2 * sizes[-1])
    return sizes


def make_int_array(numbers: list[int]) -> jax.Array:
    """Returns the numbers [n] int32 as an array that the compiled program makes.

    A branch that captures constants cannot be mapped over runs, see `runs_as_one`.
    """
    return jnp.stack([jnp.full((), number, jnp.int32) for number in numbers])


def over_clients(client_fn: Callable[..., Any], local: Local) -> CohortFn:
    """Turns `client_fn`, a function of one client, into a function of a whole cohort.

    `client_fn` is a `ClientFn`, or has its arguments with other `shared` values and
    inputs: (client, bucket, data, shared, client_inputs) -> any pytree. `bucket` [] int32
    is the number of the smallest size bucket that holds every client of the chunk. The
    result does not depend on `width`, slots or devices, up to rounding. Where a grid maps
    runs whose settings differ, `client_fn` must be a `Partial` of the values that differ.
    """
    assert local.width is not None and local.mesh is not None  # `Local.resolve` has settled them
    width = local.width
    if local.vmap_runs:
        return over_clients_of_runs(client_fn, local, in_chunks)

    def block(shared, client_inputs):
        (data, shared), (clients, own) = shared, client_inputs
        held = jnp.where(
            clients < data.num_clients,
            data.train.size[jnp.minimum(clients, data.num_clients - 1)],
            -1,
        )

        def one(client, bucket, own):
            return client_fn(client, bucket, data, shared, own)

        return in_chunks(one, held, clients, own, data.max_client_samples, width)

    mapped = over_devices(block, local.mesh)

    def run(cohort: Cohort, data: FederatedData, shared: Any, client_inputs: Any = ()) -> Any:
        return mapped((data, shared), (cohort.ids, client_inputs))

    return run


def reads_in_place(local: Local) -> bool:
    """Returns whether a client's solver can read rows of models [K, ...] of all clients where
    they lie: on one device. Several devices each hold a part of every row
    (`client_models.split_sharding`), and the runs of a grid would copy their K rows for each
    client.
    """
    assert local.mesh is not None  # `Local.resolve` has settled it
    return local.mesh.size == 1 and not local.vmap_runs


def in_chunks(
    one: Callable[..., Any],
    held: jax.Array,
    clients: jax.Array,
    own: Any,
    capacity: int,
    width: int,
) -> Any:
    """Applies one(client, bucket, own) to the slots of one device, in chunks of up to
    `width` clients of similar size, largest first.

    `held` [S] are the training samples of the `clients` [S], -1 in an empty slot; `own`
    [S, ...] are their inputs. Chunks of empty slots cost nothing and give 0.
    """
    slots = held.size
    width = min(width, slots)
    sizes = make_int_array(bucket_sizes(capacity))
    order = jnp.pad(
        jnp.argsort(-held).astype(jnp.int32), (0, -slots % width), constant_values=slots
    ).reshape(-1, width)

    @jax.jit  # traced once for its shapes and for the loop
    def chunk(at):
        bucket = jnp.searchsorted(sizes, held[at[0]], method="compare_all").astype(jnp.int32)
        if width == 1:
            return one(clients[at[0]], bucket, jax.tree.map(lambda a: a[at[0]], own))
        client = clients.at[at].get(mode="fill", fill_value=NO_CLIENT)
        return jax.vmap(one, in_axes=(0, None, 0))(
            client, bucket, jax.tree.map(lambda a: a[jnp.minimum(at, slots - 1)], own)
        )

    def enter(whole, part, at):
        return (
            lax.dynamic_update_index_in_dim(whole, part, at[0], 0)
            if width == 1
            else whole.at[at].set(part, mode="drop")
        )

    zeros = jax.tree.map(
        lambda s: jnp.zeros((slots, *s.shape[width > 1 :]), s.dtype),
        jax.eval_shape(chunk, order[0]),
    )

    def run_chunk(i, done):
        return jax.tree.map(lambda whole, part: enter(whole, part, order[i]), done, chunk(order[i]))

    return lax.fori_loop(0, -(-jnp.sum(held >= 0) // width), run_chunk, zeros)


def cost_by_samples(held: jax.Array) -> jax.Array:
    """Returns how long clients of `held` [k] samples take, in any unit.

    The constant is what a client costs besides its steps: about those of 16 samples.
    """
    return held + 16.0


def make_cohort(
    ids: jax.Array, data: FederatedData, local: Local, cost: CostFn = cost_by_samples
) -> Cohort:
    """Gives the clients `ids` [k] (K: nobody) slots on the devices, balanced by `cost`."""
    assert local.width is not None and local.mesh is not None  # `Local.resolve` has settled them
    load = jnp.where(
        ids < data.num_clients, cost(data.train.size[jnp.minimum(ids, data.num_clients - 1)]), 0.0
    )
    return balance_over_devices(ids, load, data.num_clients, local.mesh.size, local.width)


def client_range(client: jax.Array, data: FederatedData) -> tuple[jax.Array, jax.Array]:
    """Returns (number of training samples, first position in `train.order`) of a client.

    An empty slot has 0 samples.
    """
    clamped = jnp.minimum(client, data.num_clients - 1)
    return (
        jnp.where(client < data.num_clients, data.train.size[clamped], 0),
        data.train.start[clamped],
    )


def balance_over_devices(
    ids: jax.Array, load: jax.Array, num_clients: int, devices: int, width: int
) -> Cohort:
    """Distributes the selected clients over the queues of the devices, longest first.

    Args: `ids` [k] in order of selection; `load` [k] float, proportional to a client's
    work, in any unit; `width` as in `Local`.
    Returns slots [S]: device d trains slots d * S / devices onwards. S >= k is static and
    a multiple of `devices`. Where clients train one at a time, each goes to the shortest
    queue, so that queues differ by one client at most; there are a few slots more than
    even shares need, so that many short clients can balance a long one. Where they train
    side by side, a device takes as long as its longest client; clients are handed out
    back and forth, so that all devices get a similar mixture. With one device the cohort
    is only sorted.
    """
    even = -(-ids.size // devices)
    # slots in one queue
    length = min(ids.size, even + 8) if devices > 1 and width == 1 else even
    rank = jnp.argsort(-load, stable=True).astype(jnp.int32)

    def next_client(queues, cost):
        total, count = queues
        device = jnp.argmin(jnp.where(count < length, total, jnp.inf))
        return (total.at[device].add(cost), count.at[device].add(1)), device * length + count[
            device
        ]

    if width == 1 and devices > 1:
        empty = (jnp.zeros(devices), jnp.zeros(devices, jnp.int32))
        _, slot = jax.lax.scan(next_client, empty, load[rank])
    else:
        turn, seat = jnp.divmod(jnp.arange(ids.size), devices)
        slot = jnp.where(turn % 2, devices - 1 - seat, seat) * length + turn
    slots = devices * length
    return Cohort(
        ids=jnp.full(slots, num_clients, jnp.int32).at[slot].set(ids[rank]),
        rank=jnp.full(slots, ids.size, jnp.int32).at[slot].set(rank),
    )
