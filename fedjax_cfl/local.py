"""Local training: a cohort of clients of very different sizes, without padding anyone to the largest.

A solver is written for ONE client; `over_clients` adds the cohort axis in one visible place. Chunks of `width` clients run one after
another, each with its own trip count: 1 on a CPU core (a client's weights stay in its cache), wide on an accelerator. Devices split the
chunks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl import sharding
from fedjax_cfl.faults import Faults
from fedjax_cfl.objective import erm
from fedjax_cfl.types import Cohort, FederatedData, Task, Upload

SMALLEST = 16  # samples in the smallest size bucket
BLOCK = 64  # samples in one step of a pass over a client's whole training set


class Local(NamedTuple):
    """How clients train: plain SGD over reshuffled epochs; and how they fail."""

    lr: float | jax.Array  # step size
    epochs: int  # E, passes over the client's samples
    batch_size: int  # B; the short last batch is kept
    width: int | None = None  # clients trained side by side on one device; None: 1 on a CPU, 64 on an accelerator
    mesh: jax.sharding.Mesh | None = None  # None: every device JAX shows
    faults: Faults = Faults()

    def resolved(self) -> "Local":
        """Returns the same with mesh and width filled in for the machine."""
        mesh = self.mesh or sharding.mesh_of()
        wide = 1 if mesh.devices.flat[0].platform == "cpu" else 64
        return self._replace(mesh=mesh, width=self.width or wide)


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


def over_clients(visit, local: Local):
    """Turns visit(client, bucket, data, shared, mine) for one client into a function of a whole cohort.

    The result (cohort, data, shared, mine [S, ...]) -> [S, ...] does not depend on `width`, on the slots or on the devices, up to rounding.
    `bucket` [] int32 indexes the smallest size bucket that holds every client of the chunk: the one thing chunk mates share.
    """
    width = local.width

    def block(shared, mine):
        data, shared = shared
        sizes = jnp.array(buckets(data.capacity))
        clients = mine[0]
        held = jnp.where(clients < data.num_clients, data.train.size[jnp.minimum(clients, data.num_clients - 1)], 0)

        def chunk(xs):
            size, client, own = xs
            bucket = jnp.searchsorted(sizes, jnp.max(size)).astype(jnp.int32)
            if width == 1:
                out = visit(client[0], bucket, data, shared, jax.tree.map(lambda a: a[0], own))
                return jax.tree.map(lambda a: jnp.asarray(a)[None], out)
            return jax.vmap(visit, in_axes=(0, None, None, None, 0))(client, bucket, data, shared, own)

        chunked = jax.tree.map(lambda a: a.reshape(-1, width, *a.shape[1:]), (held, *mine))
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), lax.map(chunk, chunked))

    mapped = sharding.over_devices(block, local.mesh)

    def run(cohort: Cohort, data: FederatedData, shared, mine=()):
        return mapped((data, shared), (cohort.ids, mine))

    return run


def dealt(ids, data: FederatedData, local: Local) -> Cohort:
    """Returns the clients `ids` (K: nobody) in slots, dealt by the work they are: a visit costs about the steps of a few samples."""
    load = jnp.where(ids < data.num_clients, data.train.size[jnp.minimum(ids, data.num_clients - 1)] + 16.0, 0.0)
    return sharding.deal(ids, load, data.num_clients, local.mesh.size, local.width)


def samples_of(client, data: FederatedData):
    """Returns (number of training samples, first position in the view) of one client; 0 samples for an empty slot."""
    clamped = jnp.minimum(client, data.num_clients - 1)
    return jnp.where(client < data.num_clients, data.train.size[clamped], 0), data.train.start[clamped]


def scramble(words, passes, place):
    """Returns uniform uint32 per (pass, place), a counter-based hash of two random words (the 32-bit finaliser of MurmurHash3, twice)."""
    x = place * jnp.uint32(0x9E3779B9) + passes * jnp.uint32(0x7FEB352D) + words[0]
    for word in (words[1], jnp.uint32(0)):
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x = (x ^ (x >> 16)) + word
    return x


def permutations(words, count, size: int, passes: int):
    """Returns [passes, size]: each row a fresh random permutation of 0 .. count - 1, then the unused places.

    The rows do not depend on `size`. 19 random bits decide, ties go by place; with the place in the low 13 bits both sort as one number,
    three times faster than a sort that carries the place along.
    """
    place = jnp.arange(size, dtype=jnp.uint32)
    low = jnp.uint32(2**13 - 1)
    bits = scramble(words, jnp.arange(passes, dtype=jnp.uint32)[:, None], place) | low
    bits = jnp.where(place < count, bits ^ low, ~low)
    if size <= 2**13:
        return lax.sort(bits | place, is_stable=False) & low
    return lax.sort((jnp.where(place < count, bits, ~jnp.uint32(0)), jnp.broadcast_to(place, bits.shape)), num_keys=1, is_stable=True)[1]


def shuffles(key, client, bucket, data: FederatedData, passes, tail: int):
    """Returns a flat table of sample numbers, pass e at e * sizes[bucket]: each pass a fresh random permutation of the client's samples.

    `passes(bucket size)` is the static number of passes a client of that bucket can need. Only the bucket in use is shuffled; the table
    has the largest bucket's length.
    """
    count, start = samples_of(client, data)
    sizes = buckets(data.capacity)
    length = max(passes(size) * size for size in sizes) + tail
    words = jax.random.bits(key, (2,))

    def branch(size):
        def shuffle(_):
            order = permutations(words, count, size, passes(size)).astype(jnp.int32)
            numbers = data.train.order[jnp.minimum(start + order, data.train.order.size - 1)]
            return jnp.pad(numbers.reshape(-1), (0, length - numbers.size))

        return shuffle

    return lax.switch(bucket, [branch(size) for size in sizes], None)


def sgd(task: Task, local: Local, objective=None, iterations: int | None = None):
    """Mini-batch SGD of one client from a received model (FedAvg's ClientUpdate; FlexCFL, Algorithm 1).

    Runs `local.epochs` reshuffled epochs, or with `iterations` that many mini-batch steps cycling through reshuffled epochs.
    Returns visit(client, bucket, data, (key, models [m, ...]), work) -> Upload of one client.
    """
    objective = objective or erm(task)
    batch = local.batch_size

    def passes(size):
        if iterations is None:
            return local.epochs
        alone = local.width == 1 and size > SMALLEST  # otherwise chunk mates may belong to smaller buckets
        fewest = size // 2 + 1 if alone else 1
        return -(-iterations // -(-fewest // batch))

    def visit(client, bucket, data, shared, mine):
        (key, models), (gid, effort, extra) = shared, mine
        key = jax.random.fold_in(key, client)
        start = jax.tree.map(lambda leaf: leaf[gid], models)
        count, _ = samples_of(client, data)
        table = shuffles(key, client, bucket, data, passes, batch)
        stride = jnp.array(buckets(data.capacity), jnp.int32)[bucket]
        per_epoch = jnp.maximum(-(-count // batch), 1)
        planned = local.epochs * per_epoch if iterations is None else iterations
        steps = jnp.where(count > 0, jnp.ceil(effort * planned - 1e-3).astype(jnp.int32), 0)
        last = (steps - 1) // per_epoch
        seen = jnp.minimum(steps * batch, count)  # samples of the first epoch that were reached

        def step(s, carry):
            params, losses = carry
            epoch, place = s // per_epoch, s % per_epoch * batch
            rows = lax.dynamic_slice(table, (epoch * stride + place,), (batch,))
            real = (place + jnp.arange(batch) < count).astype(jnp.float32)

            def batch_loss(params):
                each = objective(params, start, extra, data.x[rows], data.y[rows], jax.random.fold_in(key, s))
                total = jnp.sum(jnp.where(real > 0, each, 0.0))
                return total / jnp.sum(real), total

            (_, total), grad = jax.value_and_grad(batch_loss, has_aux=True)(params)
            params = jax.tree.map(lambda p, g: p - local.lr * g, params, grad)
            return params, losses + total * jnp.stack([epoch == 0, epoch == last])

        params, losses = lax.fori_loop(0, steps, step, (start, jnp.zeros(2)))
        first_loss, last_loss = losses / jnp.maximum(jnp.stack([seen, jnp.minimum((steps - last * per_epoch) * batch, count)]), 1)
        return Upload(
            delta=jax.tree.map(jnp.subtract, params, start),
            weight=count.astype(jnp.float32),
            loss=first_loss,
            last_loss=last_loss,
            steps=steps,
        )

    return visit


def one_gradient(task: Task, local: Local, objective=None):
    """One full-batch gradient step of one client (FedSGD; gradient averaging of IFCA): delta = -lr * gradient of its mean loss."""
    objective = objective or erm(task)

    def visit(client, bucket, data, shared, mine):
        (key, models), (gid, _, extra) = shared, mine
        key = jax.random.fold_in(key, client)
        start = jax.tree.map(lambda leaf: leaf[gid], models)
        count, first = samples_of(client, data)

        def block(b, carry):
            place = b * BLOCK + jnp.arange(BLOCK)
            rows = data.train.order[jnp.minimum(first + place, data.train.order.size - 1)]

            def block_loss(params):
                each = objective(params, start, extra, data.x[rows], data.y[rows], jax.random.fold_in(key, b))
                return jnp.sum(jnp.where(place < count, each, 0.0)) / count

            return jax.tree.map(jnp.add, carry, jax.value_and_grad(block_loss)(start))

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, start))
        loss, grad = lax.fori_loop(0, -(-count // BLOCK), block, nothing)
        delta = jax.tree.map(lambda g: -local.lr * g, grad)
        return Upload(delta=delta, weight=count.astype(jnp.float32), loss=loss, last_loss=loss, steps=(count > 0).astype(jnp.int32))

    return visit
