"""How the clients of a cohort, of very different sizes, work side by side without padding anyone to the largest.

A solver (`sgd`) is written for ONE client; `over_clients` adds the cohort axis in one visible place. Chunks of up to `width` clients run
one after another, within a chunk in ever fewer lanes (`staircase`): 1 on a CPU core (a client's weights stay in its cache), as many as fit
on an accelerator. Devices split the cohort.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl import members, settings, sharding
from fedjax_cfl.faults import Faults
from fedjax_cfl.types import Cohort, FederatedData

SMALLEST = 16  # samples in the smallest size bucket
BLOCK = 64  # samples in one step of a pass over a client's whole training set
WIDEST = 4096  # clients side by side, unless more are asked for
NOBODY = jnp.iinfo(jnp.int32).max  # no client's number


class Local(NamedTuple):
    """How clients train: plain SGD over reshuffled epochs; and how they fail."""

    lr: float | jax.Array  # step size
    epochs: int  # E, passes over the client's samples
    batch_size: int  # B; the short last batch is kept
    width: int | None = None  # most clients trained side by side on one device; None: 1 on a CPU, on an accelerator all of its share
    mesh: jax.sharding.Mesh | None = None  # None: every device JAX shows
    faults: Faults = Faults()
    first_layer: str = "auto"  # how a dense first layer is trained: direct | dual (in sample space) | auto: per client the cheaper
    momentum: float = 0.0  # v <- momentum v + gradient, w <- w - lr v; v begins at 0 in every round
    members: bool = False  # True: under `vmap`, the cohorts of all members are trained as one, see `members`

    def resolved(self) -> "Local":
        """Returns the same with mesh, width and first layer settled for the machine. Raises InputError for what is not allowed.

        Side by side, sample space would be padded to the largest client, so that there auto is direct.
        """
        for name in ("epochs", "batch_size", "first_layer", *(("lr",) if isinstance(self.lr, int | float) else ())):
            settings.allow(f"local.{name}", getattr(self, name))
        mesh = self.mesh or sharding.mesh_of()
        width = self.width or (1 if sharding.on_cpu(mesh) else WIDEST)
        return self._replace(mesh=mesh, width=width, first_layer="direct" if self.first_layer == "auto" and width > 1 else self.first_layer)


class Work(NamedTuple):
    """What each client of a cohort is asked to do."""

    group: jax.Array  # [S] int32, the model it starts from
    effort: jax.Array  # [S] float32, the share of its local steps that it completes
    extra: Any = ()  # [S, ...], what `prepare` computed for it


def full(group) -> Work:
    """Returns work without anything extra, all of it completed."""
    return Work(group, jnp.ones(group.shape))


def buckets(capacity: int) -> list[int]:
    """Returns the power-of-two bucket sizes up to the first that holds `capacity` samples."""
    sizes = [SMALLEST]
    while sizes[-1] < capacity:
        sizes.append(2 * sizes[-1])
    return sizes


def array_of(numbers: list[int]):
    """Returns an int32 array [n] made by the program: a branch that trains and captures constants cannot be mapped, see `members`."""
    return jnp.stack([jnp.full((), number, jnp.int32) for number in numbers])


def over_clients(visit, local: Local):
    """Turns visit(client, bucket, data, shared, mine) for one client into a function of a whole cohort.

    The result (cohort, data, shared, mine [S, ...]) -> [S, ...] does not depend on `width`, on the slots or on the devices, up to rounding.
    `bucket` [] int32 indexes the smallest size bucket that holds every client of the chunk: the one thing chunk mates share.
    A `visit` that depends on values which differ between the members of a vectorised run is a `Partial` of them.
    """
    if local.members:
        return members.over_clients(visit, local, in_chunks)

    def block(shared, mine):
        (data, shared), (clients, own) = shared, mine
        held = jnp.where(clients < data.num_clients, data.train.size[jnp.minimum(clients, data.num_clients - 1)], -1)

        def one(client, bucket, own):
            return visit(client, bucket, data, shared, own)

        return in_chunks(one, held, clients, own, data.capacity, local.width)

    mapped = sharding.over_devices(block, local.mesh)

    def run(cohort: Cohort, data: FederatedData, shared, mine=()):
        return mapped((data, shared), (cohort.ids, mine))

    return run


def in_chunks(one, held, clients, own, capacity: int, width: int):
    """Applies one(client, bucket, own) to the slots of one device, in chunks of up to `width` clients of like size, longest first.

    `held` [S] are the clients' training samples, -1 in an empty slot. Chunks of empty slots cost nothing; what was not visited gives 0.
    """
    slots = held.size
    width = min(width, slots)
    sizes = array_of(buckets(capacity))
    order = jnp.pad(jnp.argsort(-held).astype(jnp.int32), (0, -slots % width), constant_values=slots).reshape(-1, width)

    @jax.jit  # traced once for its shapes and for the loop
    def chunk(at):
        bucket = jnp.searchsorted(sizes, held[at[0]], method="compare_all").astype(jnp.int32)
        if width == 1:
            return one(clients[at[0]], bucket, jax.tree.map(lambda a: a[at[0]], own))
        client = clients.at[at].get(mode="fill", fill_value=NOBODY)
        return jax.vmap(one, in_axes=(0, None, 0))(client, bucket, jax.tree.map(lambda a: a[jnp.minimum(at, slots - 1)], own))

    def enter(whole, part, at):
        return lax.dynamic_update_index_in_dim(whole, part, at[0], 0) if width == 1 else whole.at[at].set(part, mode="drop")

    begun = jax.tree.map(lambda s: jnp.zeros((slots, *s.shape[width > 1 :]), s.dtype), jax.eval_shape(chunk, order[0]))

    def visit(i, done):
        return jax.tree.map(lambda whole, part: enter(whole, part, order[i]), done, chunk(order[i]))

    return lax.fori_loop(0, -(-jnp.sum(held >= 0) // width), visit, begun)


def by_samples(held):
    """Returns how long clients of `held` [k] samples take, in any unit: a visit costs about the steps of a few samples."""
    return held + 16.0


def dealt(ids, data: FederatedData, local: Local, load=by_samples) -> Cohort:
    """Returns the clients `ids` (K: nobody) in slots, dealt by the work they are, `load(held [k])`."""
    load = jnp.where(ids < data.num_clients, load(data.train.size[jnp.minimum(ids, data.num_clients - 1)]), 0.0)
    return sharding.deal(ids, load, data.num_clients, local.mesh.size, local.width)


def samples_of(client, data: FederatedData):
    """Returns (number of training samples, first position in the view) of one client; 0 samples for an empty slot."""
    clamped = jnp.minimum(client, data.num_clients - 1)
    return jnp.where(client < data.num_clients, data.train.size[clamped], 0), data.train.start[clamped]
