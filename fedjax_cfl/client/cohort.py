"""How the clients of a cohort train, whatever their sizes, without padding all to the
largest.

A solver (`sgd`) is written for ONE client and returns its loop (`executor`); `over_clients`
adds the cohort axis, here and nowhere else. On a CPU core clients train one after another, each
with its weights in the cache, on an accelerator side by side (`lanes`). Devices split the
cohort.

Many runs train as one: a `vmap` over runs of local training itself would waste work, since a
mapped `lax.switch` runs every branch, and a mapped loop runs as long as the longest run needs.
Instead the axis of the runs joins the cohort axis. The clients of all runs train as one cohort,
each with its own branch and its own number of steps; the rest of a round is mapped.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.client import executor, lanes
from fedjax_cfl.client.execution import Execution
from fedjax_cfl.client.executor import Loop, Program
from fedjax_cfl.client.local import Work, full_work
from fedjax_cfl.data.federated import gather
from fedjax_cfl.sharding import over_devices
from fedjax_cfl.types import Cohort, FederatedData, Key, Params

SAMPLE_BLOCK = 64  # samples in one step of a pass over a client's whole training set


class ClientFn(Protocol):
    """Returns the program that trains ONE client from models [m, ...], see `executor`; its result
    is an Upload. `over_clients` makes it train a cohort.
    """

    def __call__(
        self,
        client: jax.Array,  # [] int32
        data: FederatedData,
        shared: tuple[Key, Params],  # the round's key, the models [m, ...]
        work: Work,  # of this client, without the axis S
    ) -> Program: ...


class CohortFn(Protocol):
    """Applies a function of one client to a whole cohort: `client_inputs` [S, ...] and the
    result [S, ...] have its axis, `shared` is the same for all.
    """

    def __call__(
        self, cohort: Cohort, data: FederatedData, shared: Any, client_inputs: Any = ()
    ) -> Any: ...


CostFn = Callable[[jax.Array], jax.Array]  # samples [k] -> cost [k] of such clients, in any unit


def make_int_array(numbers: list[int]) -> jax.Array:
    """Returns the numbers [n] int32 as an array that the compiled program makes.

    A branch that captures constants cannot be mapped over runs, see `over_clients_of_runs`.
    """
    return jnp.stack([jnp.full((), number, jnp.int32) for number in numbers])


def over_clients(client_fn: Callable[..., Any], execution: Execution) -> CohortFn:
    """Turns `client_fn`, a function of one client, into a function of a whole cohort.

    `client_fn` is a `ClientFn`, or has its arguments with other `shared` values and
    inputs: (client, data, shared, client_inputs) -> a program (see `executor`), or the result
    itself, any pytree. The result does not depend on the executor, its lanes, slots or devices,
    up to rounding. What a `Partial` binds may differ between the runs of a grid (`vectorize`); runs
    that differ in what a function closes over follow one another.
    """
    if execution.runs_as_one:
        return over_clients_of_runs(client_fn, execution)

    def block(shared, client_inputs):
        (data, shared), (clients, own) = shared, client_inputs

        def solve(slot):
            return client_fn(clients[slot], data, shared, jax.tree.map(lambda a: a[slot], own))

        return run_clients(solve, clients < data.num_clients, execution)

    mapped = over_devices(block, execution.mesh)

    def run(cohort: Cohort, data: FederatedData, shared: Any, client_inputs: Any = ()) -> Any:
        return mapped((data, shared), (cohort.ids, client_inputs))

    return run


def run_clients(solve: Callable[[jax.Array], Any], real: jax.Array, execution: Execution) -> Any:
    """Runs the programs solve(slot), see `executor`, of the slots of one device where `real` [S],
    by the executor of `execution`. Returns their results [S, ...], 0 in the other slots.
    """
    if execution.executor == "debug":
        return executor.run_debug(solve, real)
    if execution.executor == "sequential":
        return executor.run_sequential(solve, real)
    return lanes.run_lanes(solve, real, execution.width)


def reads_in_place(execution: Execution) -> bool:
    """Returns whether a client's solver can read rows of models [K, ...] of all clients where
    they lie: on one device. Several devices each hold a part of every row
    (`sharding.split_sharding`), and the runs of a grid would copy their K rows for each
    client.
    """
    return execution.mesh.size == 1 and not execution.runs_as_one


def cost_by_samples(held: jax.Array) -> jax.Array:
    """Returns how long clients of `held` [k] samples take, in any unit.

    The constant is what a client costs in addition to its steps: about those of 16 samples.
    """
    return held + 16.0


def make_cohort(
    ids: jax.Array, data: FederatedData, execution: Execution, cost: CostFn = cost_by_samples
) -> Cohort:
    """Gives the clients `ids` [k] (K: none) slots on the devices, balanced by `cost`."""
    load = jnp.where(
        ids < data.num_clients, cost(data.train.size[jnp.minimum(ids, data.num_clients - 1)]), 0.0
    )
    devices, side_by_side = execution.mesh.size, execution.width > 1
    return balance_over_devices(ids, load, data.num_clients, devices, side_by_side)


def client_range(client: jax.Array, data: FederatedData) -> tuple[jax.Array, jax.Array]:
    """Returns (number of training samples, first position in `train.order`) of a client.

    An empty slot has 0 samples.
    """
    clamped = jnp.minimum(client, data.num_clients - 1)
    return (
        jnp.where(client < data.num_clients, data.train.size[clamped], 0),
        data.train.start[clamped],
    )


def pass_over_samples(
    client: jax.Array,
    data: FederatedData,
    begin: Any,
    add: Callable[..., Any],
    end: Callable[[Any, jax.Array], Any] = lambda total, count: total,
) -> Loop:
    """Returns the program of ONE client that passes over its training samples, in blocks of B =
    `SAMPLE_BLOCK`; it begins with `begin`.

    Args: `add` is (total, x [B, ...], y [B], owner [B], number of the block []) -> the total with
    this block, where `owner` is the client's number, -1 for padding; `end` is (total, number of
    samples []) -> the result.
    """
    count, first = client_range(client, data)

    def step(number: jax.Array, total: Any) -> Any:
        place = number * SAMPLE_BLOCK + jnp.arange(SAMPLE_BLOCK)
        x, y = gather(data, data.train.order[first + jnp.minimum(place, count - 1)])
        return add(total, x, y, jnp.where(place < count, client, -1), number)

    return Loop(-(-count // SAMPLE_BLOCK), begin, step, lambda total: end(total, count))


def mean_over_samples(total: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the mean over `count` [] samples of what adds up to `total`; 0 for none."""
    return total / jnp.maximum(count, 1)


def balance_over_devices(
    ids: jax.Array, load: jax.Array, num_clients: int, devices: int, side_by_side: bool
) -> Cohort:
    """Distributes the selected clients over the queues of the devices, longest first.

    Args: `ids` [k] in order of selection; `load` [k] float, proportional to a client's
    work, in any unit; `side_by_side`: a device has several lanes.
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
    length = min(ids.size, even + 8) if devices > 1 and not side_by_side else even
    rank = jnp.argsort(-load, stable=True).astype(jnp.int32)

    def next_client(queues, cost):
        total, count = queues
        device = jnp.argmin(jnp.where(count < length, total, jnp.inf))
        place = device * length + count[device]
        return (total.at[device].add(cost), count.at[device].add(1)), place

    if devices > 1 and not side_by_side:
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


def map_clients(
    client_fn: Callable[..., Any],
    execution: Execution,
    shared: Any,
    data: FederatedData,
    who: jax.Array,
) -> jax.Array:
    """Returns what `client_fn` gives for each client [K, p]; 0 for clients that are not in
    `who`, and in the place of a number that is not finite.

    Args: `client_fn` is a function of one client as `over_clients` takes it, and `execution` says
    how it is run; `shared` is its argument of that name; `who` [K] bool are the clients that
    compute.
    """
    clients = data.num_clients
    ids = jnp.where(who, jnp.arange(clients, dtype=jnp.int32), clients)
    cohort = make_cohort(ids, data, execution)
    work = full_work(jnp.zeros_like(cohort.ids))
    points = over_clients(client_fn, execution)(cohort, data, shared, work)
    points = jnp.where(jnp.isfinite(points), points, 0.0)
    return cohort.put(jnp.zeros((clients, points.shape[1])), points)


class RunView:
    """The array [n, ...] of one run within the stack [D, n, ...] of all runs' arrays.

    It can be indexed, and nothing is copied.
    """

    def __init__(self, stack: jax.Array, run: jax.Array) -> None:
        self.flat, self.run = stack.reshape(-1, *stack.shape[2:]), run
        self.shape, self.size = stack.shape[1:], stack.size // stack.shape[0]

    def __getitem__(self, at: jax.Array) -> jax.Array:
        rows = self.shape[0]
        return self.flat[self.run * rows + jnp.clip(jnp.where(at < 0, at + rows, at), 0, rows - 1)]


def over_clients_of_runs(client_fn: Callable[..., Any], execution: Execution) -> CohortFn:
    """Returns what `over_clients` returns, in a form that can be mapped over runs:
    D runs cost what their clients cost.
    """
    partial_fn = client_fn if isinstance(client_fn, Partial) else Partial(client_fn)
    fixed, structure = jax.tree.flatten(partial_fn)
    devices = execution.mesh.size

    def block(stacks, client_inputs):
        data, rest = stacks
        clients, (data_index, rest_index), own = client_inputs
        num_clients = data.train.size.shape[1]

        def solve(slot):
            client, data_at, rest_at, inputs = jax.tree.map(
                lambda a: a[slot], (clients, data_index, rest_index, own)
            )
            fixed, shared = jax.tree.map(lambda stack, run: stack[run], rest, rest_at)
            return structure.unflatten(fixed)(
                client, jax.tree.map(RunView, data, data_at), shared, inputs
            )

        return run_clients(solve, clients < num_clients, execution)

    mapped = over_devices(block, execution.mesh)

    @jax.custom_batching.custom_vmap
    def joined(stacks, clients, index, own):
        return mapped(stacks, (clients, index, own))

    @joined.def_vmap
    def _(count, batched, stacks, clients, index, own):
        stacks, *each = join_runs(count, batched, stacks, (clients, index, own))
        folded = jax.tree.map(lambda leaf: fold(leaf, devices), each)
        out = jax.tree.map(lambda leaf: unfold(leaf, count, devices), joined(stacks, *folded))
        return out, jax.tree.map(lambda _: True, out)

    def run(cohort: Cohort, data: FederatedData, shared: Any, client_inputs: Any = ()) -> Any:
        stacks = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (data, (fixed, shared)))
        index = jax.tree.map(lambda _: jnp.zeros_like(cohort.ids), stacks)
        return joined(stacks, cohort.ids, index, client_inputs)

    return run


def join_runs(count: int, batched: Any, stacks: Any, each: tuple) -> tuple:
    """Returns the stacks of `count` runs as one stack, and what each client has, (clients,
    index, inputs) [count, S, ...], with indices into that stack.
    """
    stacks_batched, *each_batched = batched

    def give_axis(is_batched, leaf):
        return leaf if is_batched else jnp.broadcast_to(leaf, (count, *leaf.shape))

    def offset_index(is_batched, stack, index):
        return index + jnp.arange(count)[:, None] * stack.shape[1] if is_batched else index

    def flatten(is_batched, leaf):
        return leaf.reshape(-1, *leaf.shape[2:]) if is_batched else leaf

    clients, index, own = jax.tree.map(give_axis, tuple(each_batched), each)
    index = jax.tree.map(offset_index, stacks_batched, stacks, index)
    return jax.tree.map(flatten, stacks_batched, stacks), clients, index, own


def fold(leaf: jax.Array, devices: int) -> jax.Array:
    """Returns `leaf` [D, S, ...] of D runs as [D * S, ...]; slots stay on their device."""
    count, rest = leaf.shape[0], leaf.shape[2:]
    return leaf.reshape(count, devices, -1, *rest).swapaxes(0, 1).reshape(-1, *rest)


def unfold(leaf: jax.Array, count: int, devices: int) -> jax.Array:
    """Returns the [D, S, ...] that `fold` was given, from its result, for D = `count`."""
    rest = leaf.shape[1:]
    return leaf.reshape(devices, count, -1, *rest).swapaxes(0, 1).reshape(count, -1, *rest)
