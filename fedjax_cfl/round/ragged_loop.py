"""A loop written for ONE client that many clients with very different numbers of steps
can run side by side.

`vmap` of `lax.fori_loop` runs every client as long as the longest. Here the clients are
sorted, longest first, and go on in ever fewer lanes: as soon as all clients beyond the
next width are done, the others continue without them.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import core, lax


def stage_widths(most: int) -> list[int]:
    """Returns the lanes of each stage: `most`, then two to a power of two (..., 8, 6,
    4, 3, 2, 1).

    Closer stages waste fewer steps, but every stage is compiled anew. Of 20 clients of
    MNIST (a power law) 95 % of the steps are of use, in 9 stages, instead of 16 %; of
    1,000 clients 85 % in 20 stages, instead of 4 %.
    """
    powers = [2**power for power in range(most.bit_length())]
    return sorted(
        {most, *(width for power in powers for width in (power, 3 * power // 2) if width < most)},
        reverse=True,
    )


def ragged_fori_loop(count, body, begin):
    """Returns lax.fori_loop(0, count, body, begin), whose `vmap` over `count` is a
    staircase; the results are the same.

    `body(i, carry)` may close over anything, mapped or not; once a lane is done, what
    it returns there is ignored.
    """
    traced = jax.make_jaxpr(body)(
        jnp.zeros((), jnp.int32), begin
    )  # shows what `body` closes over: a rule for `vmap` must be given it
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, begin))

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


def run_narrowing(step, count, own, own_mapped, carry):
    """Runs step(own, i, carry) for count [lanes] steps each; a leaf of `own` has a lane
    axis where `own_mapped` says so.
    """
    order = jnp.argsort(-count)
    count, carry = count[order], [leaf[order] for leaf in carry]
    own = map_leaves(own_mapped, own, lambda leaf: leaf[order])
    finished, begun = [], 0
    for width, after in pairwise([*stage_widths(count.size), 0]):
        own = map_leaves(own_mapped, own, lambda leaf, width=width: leaf[:width])

        def advance(i, carry, own=own, due=count[:width]):
            return [
                jax.vmap(jnp.where)(i < due, new, old)
                for new, old in zip(step(own, i, carry), carry, strict=True)
            ]

        carry = lax.fori_loop(begun, count[after], advance, carry)
        finished.append([leaf[after:] for leaf in carry])
        carry, begun = [leaf[:after] for leaf in carry], count[after]
    place = jnp.argsort(order)
    return [jnp.concatenate(parts[::-1])[place] for parts in zip(*finished, strict=True)]


def map_leaves(mapped, leaves, change, otherwise=lambda leaf: leaf):
    """Returns the leaves, changed by one of two functions: those that are mapped, and
    the others.
    """
    return [
        change(leaf) if is_mapped else otherwise(leaf)
        for is_mapped, leaf in zip(mapped, leaves, strict=True)
    ]
