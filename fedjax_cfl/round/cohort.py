"""How the clients of a cohort, of very different sizes, work side by side without
padding anyone to the largest.

A solver (`sgd`) is written for ONE client; `over_clients` adds the cohort
axis in one visible place. Chunks of up to `width` clients run one after another, within
a chunk in ever fewer lanes (`ragged_loop`): 1 on a CPU core (a client's weights stay in
its cache), as many as fit on an accelerator. Devices split the cohort.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.round import members
from fedjax_cfl.round.local import Local
from fedjax_cfl.sharding import over_devices
from fedjax_cfl.types import Cohort, FederatedData

MIN_BUCKET = 16  # samples in the smallest size bucket
SAMPLE_BLOCK = 64  # samples in one step of a pass over a client's whole training set
NO_CLIENT = jnp.iinfo(jnp.int32).max  # no client's number


def bucket_sizes(capacity: int) -> list[int]:
    """Returns the power-of-two bucket sizes up to the first that holds `capacity` samples."""
    sizes = [MIN_BUCKET]
    while sizes[-1] < capacity:
        sizes.append(2 * sizes[-1])
    return sizes


def make_int_array(numbers: list[int]):
    """Returns an int32 array [n] made by the program: a branch that trains and captures
    constants cannot be mapped, see `members`.
    """
    return jnp.stack([jnp.full((), number, jnp.int32) for number in numbers])


def over_clients(visit, local: Local):
    """Turns visit(client, bucket, data, shared, client_inputs) for one client into a
    function of a whole cohort.

    The result (cohort, data, shared, client_inputs [S, ...]) -> [S, ...] does not
    depend on `width`, on the slots or on the devices, up to rounding. `bucket` [] int32
    indexes the smallest size bucket that holds every client of the chunk: the one thing
    chunk mates share. A `visit` that depends on values which differ between the members
    of a vectorised run is a `Partial` of them.
    """
    assert local.width is not None and local.mesh is not None  # `Local.resolve` has settled them
    width = local.width
    if local.vmap_runs:
        return members.over_clients_of_members(visit, local, in_chunks)

    def block(shared, client_inputs):
        (data, shared), (clients, own) = shared, client_inputs
        held = jnp.where(
            clients < data.num_clients,
            data.train.size[jnp.minimum(clients, data.num_clients - 1)],
            -1,
        )

        def one(client, bucket, own):
            return visit(client, bucket, data, shared, own)

        return in_chunks(one, held, clients, own, data.max_client_samples, width)

    mapped = over_devices(block, local.mesh)

    def run(cohort: Cohort, data: FederatedData, shared, client_inputs=()):
        return mapped((data, shared), (cohort.ids, client_inputs))

    return run


def in_chunks(one, held, clients, own, capacity: int, width: int):
    """Applies one(client, bucket, own) to the slots of one device, in chunks of up to
    `width` clients of like size, longest first.

    `held` [S] are the clients' training samples, -1 in an empty slot. Chunks of empty
    slots cost nothing; what was not visited gives 0.
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

    begun = jax.tree.map(
        lambda s: jnp.zeros((slots, *s.shape[width > 1 :]), s.dtype),
        jax.eval_shape(chunk, order[0]),
    )

    def visit(i, done):
        return jax.tree.map(lambda whole, part: enter(whole, part, order[i]), done, chunk(order[i]))

    return lax.fori_loop(0, -(-jnp.sum(held >= 0) // width), visit, begun)


def cost_by_samples(held):
    """Returns how long clients of `held` [k] samples take, in any unit: a visit costs
    about the steps of a few samples.
    """
    return held + 16.0


def make_cohort(ids, data: FederatedData, local: Local, load=cost_by_samples) -> Cohort:
    """Returns the clients `ids` (K: nobody) in slots, dealt by the work they are,
    `load(held [k])`.
    """
    assert local.width is not None and local.mesh is not None  # `Local.resolve` has settled them
    load = jnp.where(
        ids < data.num_clients, load(data.train.size[jnp.minimum(ids, data.num_clients - 1)]), 0.0
    )
    return balance_over_devices(ids, load, data.num_clients, local.mesh.size, local.width)


def client_range(client, data: FederatedData):
    """Returns (number of training samples, first position in the view) of one client; 0
    samples for an empty slot.
    """
    clamped = jnp.minimum(client, data.num_clients - 1)
    return (
        jnp.where(client < data.num_clients, data.train.size[clamped], 0),
        data.train.start[clamped],
    )


def balance_over_devices(
    ids: jax.Array, load: jax.Array, num_clients: int, devices: int, width: int
) -> Cohort:
    """Deals the selected clients to device queues, longest first.

    Args: ids [k] in order of selection; load [k] float, any number proportional to a
    client's work; `width` as in `Local`.
    Returns slots [S]: device d trains slots d * S / devices onwards; S >= k is static
    and a multiple of devices. One at a time, longest-processing-time-first keeps the
    queues within one client of each other; queues are a little longer than even shares
    so that one long client can be balanced by many short ones. Side by side a device
    takes as long as its longest client, and dealing back and forth gives all devices a
    like mixture. With one device the cohort is only sorted.
    """
    even = -(-ids.size // devices)
    length = min(ids.size, even + 8) if devices > 1 and width == 1 else even  # slots in one queue
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
