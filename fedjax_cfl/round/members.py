"""Many runs as one: the members of a `vmap` of runs, whose cohorts are trained
together.

Mapping local training itself would be the wrong thing: under `vmap` a `lax.switch` runs
every branch and a loop runs as long as its longest member. Here the member axis joins
the cohort axis instead, so that the members' clients queue up one after another, each
with its own branch and its own trip count; everything else of a round is mapped.
"""

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.sharding import over_devices
from fedjax_cfl.types import Cohort, FederatedData


class RunView:
    """The member's own array [n, ...] within the stack [D, n, ...] of all members'
    arrays; it can be indexed, and nothing is copied.
    """

    def __init__(self, stack, member):
        self.flat, self.member = stack.reshape(-1, *stack.shape[2:]), member
        self.shape, self.size = stack.shape[1:], stack.size // stack.shape[0]

    def __getitem__(self, at):
        rows = self.shape[0]
        return self.flat[
            self.member * rows + jnp.clip(jnp.where(at < 0, at + rows, at), 0, rows - 1)
        ]


def over_clients_of_members(visit, local, in_chunks):
    """Returns what `cohort.over_clients` does, in a form that may be mapped
    over members at the price of their clients alone.
    """
    fixed, structure = jax.tree.flatten(visit if isinstance(visit, Partial) else Partial(visit))
    devices = local.mesh.size

    def block(stacks, client_inputs):
        data, rest = stacks
        clients, (data_index, rest_index), own = client_inputs
        num_clients = data.train.size.shape[1]
        size = data.train.size[data_index.train.size, jnp.minimum(clients, num_clients - 1)]

        def one(client, bucket, xs):
            (data_at, rest_at), own = xs
            fixed, shared = jax.tree.map(lambda stack, member: stack[member], rest, rest_at)
            return structure.unflatten(fixed)(
                client, bucket, jax.tree.map(RunView, data, data_at), shared, own
            )

        held = jnp.where(clients < num_clients, size, -1)
        return in_chunks(
            one,
            held,
            clients,
            ((data_index, rest_index), own),
            data.max_client_samples,
            local.width,
        )

    mapped = over_devices(block, local.mesh)

    @jax.custom_batching.custom_vmap
    def joined(stacks, clients, index, own):
        return mapped(stacks, (clients, index, own))

    @joined.def_vmap
    def _(count, batched, stacks, clients, index, own):
        stacks_batched, *mine_batched = batched

        def each(is_batched, leaf):
            return leaf if is_batched else jnp.broadcast_to(leaf, (count, *leaf.shape))

        def shifted(is_batched, stack, index):
            return index + jnp.arange(count)[:, None] * stack.shape[1] if is_batched else index

        def flat(is_batched, leaf):
            return leaf.reshape(-1, *leaf.shape[2:]) if is_batched else leaf

        clients, index, own = jax.tree.map(each, tuple(mine_batched), (clients, index, own))
        index = jax.tree.map(shifted, stacks_batched, stacks, index)
        stacks = jax.tree.map(flat, stacks_batched, stacks)
        folded = jax.tree.map(lambda leaf: fold(leaf, devices), (clients, index, own))
        out = jax.tree.map(lambda leaf: unfold(leaf, count, devices), joined(stacks, *folded))
        return out, jax.tree.map(lambda _: True, out)

    def run(cohort: Cohort, data: FederatedData, shared, client_inputs=()):
        stacks = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (data, (fixed, shared)))
        index = jax.tree.map(lambda _: jnp.zeros_like(cohort.ids), stacks)
        return joined(stacks, cohort.ids, index, client_inputs)

    return run


def fold(leaf, devices: int):
    """Returns [members, S, ...] as [members * S, ...], every device keeping its own slots."""
    count, rest = leaf.shape[0], leaf.shape[2:]
    return leaf.reshape(count, devices, -1, *rest).swapaxes(0, 1).reshape(-1, *rest)


def unfold(leaf, count: int, devices: int):
    """Returns what `fold` has made of [members, S, ...]."""
    rest = leaf.shape[1:]
    return leaf.reshape(devices, count, -1, *rest).swapaxes(0, 1).reshape(count, -1, *rest)
