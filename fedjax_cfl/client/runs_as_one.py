"""Many runs as one: under a `vmap` over runs, the cohorts of all runs train together.

A `vmap` of local training itself would waste work: a mapped `lax.switch` runs every
branch, and a mapped loop runs as long as the longest run needs. Here the axis of the runs
joins the cohort axis instead. The clients of all runs train as one cohort, each with
its own branch and its own number of steps; the rest of a round is mapped.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.client.execution import Execution
from fedjax_cfl.sharding import over_devices
from fedjax_cfl.types import Cohort, FederatedData


class CohortFn(Protocol):
    """Applies a function of one client to a whole cohort: `client_inputs` [S, ...] and the
    result [S, ...] have its axis, `shared` is the same for all.
    """

    def __call__(
        self, cohort: Cohort, data: FederatedData, shared: Any, client_inputs: Any = ()
    ) -> Any: ...


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


def over_clients_of_runs(
    client_fn: Callable[..., Any], execution: Execution, run_clients: Callable[..., Any]
) -> CohortFn:
    """Returns what `cohort.over_clients` returns, in a form that can be mapped over runs:
    D runs cost what their clients cost.

    `run_clients` is that of `cohort`.
    """
    partial_fn = client_fn if isinstance(client_fn, Partial) else Partial(client_fn)
    fixed, structure = jax.tree.flatten(partial_fn)
    devices = execution.mesh.size

    def block(stacks, client_inputs):
        data, rest = stacks
        clients, (data_index, rest_index), own = client_inputs
        num_clients = data.train.size.shape[1]

        def solve(slot):
            client, data_at, rest_at, mine = jax.tree.map(
                lambda a: a[slot], (clients, data_index, rest_index, own)
            )
            fixed, shared = jax.tree.map(lambda stack, run: stack[run], rest, rest_at)
            return structure.unflatten(fixed)(
                client, jax.tree.map(RunView, data, data_at), shared, mine
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
