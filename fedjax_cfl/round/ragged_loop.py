"""A loop written for ONE client, which many clients with very different numbers of steps
can run side by side.

A `vmap` of `lax.fori_loop` runs every client as long as the longest one needs. Here
clients are sorted, longest first, and run in stages of fewer and fewer lanes: as soon as
all clients beyond the next width are done, the others continue without them.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.typing import ArrayLike

Carry = TypeVar("Carry")


def stage_widths(most: int) -> list[int]:
    """Returns the lanes of each stage: `most`, then two widths per power of two (..., 8, 6,
    4, 3, 2, 1).

    More stages waste fewer steps, but each stage is compiled by itself. With 20 clients
    of MNIST (a power law) 95 % of the steps are useful, in 9 stages, instead of 16 %;
    with 1,000 clients 85 %, in 20 stages, instead of 4 %.
    """
    powers = [2**power for power in range(most.bit_length())]
    return sorted(
        {most, *(width for power in powers for width in (power, 3 * power // 2) if width < most)},
        reverse=True,
    )


def ragged_fori_loop(
    count: ArrayLike, body: Callable[[jax.Array, Carry], Carry], initial: Carry
) -> Carry:
    """Returns lax.fori_loop(0, count, body, initial); its `vmap` over `count` runs in
    stages of fewer and fewer lanes, with the same results.

    `body(i, carry)` may close over anything, mapped or not. What it returns in a lane
    that is done is ignored.
    """
    # the trace shows what `body` closes over: a rule for `vmap` must be given it
    traced = jax.make_jaxpr(body)(jnp.zeros((), jnp.int32), initial)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, initial))

    def step(own, i, carry):
        return core.eval_jaxpr(traced.jaxpr, own, i, *carry)

    @jax.custom_batching.custom_vmap
    def loop(count, own, carry):
        return lax.fori_loop(0, count, lambda i, carry: step(own, i, carry), carry)

    @loop.def_vmap
    def _(lanes, mapped, count, own, carry):
        count_mapped, own_mapped, carry_mapped = mapped
        carry = map_leaves(
            carry_mapped,
            carry,
            lambda leaf: leaf,
            lambda leaf: jnp.broadcast_to(leaf, (lanes, *leaf.shape)),
        )
        side_by_side = jax.vmap(
            step, in_axes=(map_leaves(own_mapped, own, lambda _: 0, lambda _: None), None, 0)
        )
        if count_mapped:
            out = run_narrowing(side_by_side, count, own, own_mapped, carry)
        else:
            out = lax.fori_loop(0, count, lambda i, carry: side_by_side(own, i, carry), carry)
        return out, [True] * len(out)

    return jax.tree.unflatten(structure, loop(jnp.asarray(count, jnp.int32), traced.consts, leaves))


def run_narrowing(
    step: Callable[..., list[jax.Array]],
    count: jax.Array,
    own: Sequence[Any],
    own_mapped: Sequence[bool],
    carry: list[jax.Array],
) -> list[jax.Array]:
    """Runs step(own, i, carry) `count` [lanes] times in each lane, in stages; returns the
    carry [lanes, ...].

    A leaf of `own` has a lane axis where `own_mapped` says so.
    """
    order = jnp.argsort(-count)
    count, carry = count[order], [leaf[order] for leaf in carry]
    own = map_leaves(own_mapped, own, lambda leaf: leaf[order])
    finished, done = [], 0
    for width, after in pairwise([*stage_widths(count.size), 0]):
        own = map_leaves(own_mapped, own, lambda leaf, width=width: leaf[:width])

        def advance(i, carry, own=own, due=count[:width]):
            return [
                jax.vmap(jnp.where)(i < due, new, old)
                for new, old in zip(step(own, i, carry), carry, strict=True)
            ]

        carry = lax.fori_loop(done, count[after], advance, carry)
        finished.append([leaf[after:] for leaf in carry])
        carry, done = [leaf[:after] for leaf in carry], count[after]
    place = jnp.argsort(order)
    return [jnp.concatenate(parts[::-1])[place] for parts in zip(*finished, strict=True)]


def map_leaves(
    mapped: Sequence[bool],
    leaves: Sequence[Any],
    change: Callable[[Any], Any],
    otherwise: Callable[[Any], Any] = lambda leaf: leaf,
) -> list[Any]:
    """Applies `change` to the leaves that are mapped, and `otherwise` to the others."""
    return [
        change(leaf) if is_mapped else otherwise(leaf)
        for is_mapped, leaf in zip(mapped, leaves, strict=True)
    ]
