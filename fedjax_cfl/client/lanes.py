"""Continuous batching of clients: a fixed number of lanes side by side, refilled from a queue,
longest first.

All clients go through one loop with one body, however their numbers of steps differ: it is
compiled once, and no more models are trained at a time than there are lanes. L lanes, S slots
of a cohort, R lanes that change at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.extend.core import Jaxpr, Literal

from fedjax_cfl.client.executor import Cases, Loop, as_program, has_steps, run_one
from fedjax_cfl.tree import zero_rows

LEAST_REFILL = 4  # R with few lanes; with more it is L / 8
# What a step of all lanes costs, measured on an H100 (benchmarks/results/accelerator): kernels in a
# row, about four for each product of matrices, and the rates that products of one client's size
# reach. Other devices differ in all of them alike, more or less.
PRODUCT_SECONDS, BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 7e-6, 2.8e12, 13e12


def run_lanes(solve: Callable[[jax.Array], Any], real: jax.Array, lanes: int) -> Any:
    """Runs the programs solve(slot) in at most `lanes` lanes, see `cohort.run_clients`.

    Each of several `Cases` has a queue and a loop of its own.
    """
    slots, kinds = real.size, []
    result = jax.eval_shape(lambda slot: run_one(as_program(solve(slot))), jnp.int32(0))
    out = zero_rows(slots, jax.eval_shape(pack, result))

    def which(slot):
        program = as_program(solve(slot))
        kinds.append(len(program.cases) if isinstance(program, Cases) else 1)
        return program.which if isinstance(program, Cases) else jnp.int32(0)

    case = jax.vmap(which)(jnp.arange(slots, dtype=jnp.int32))
    for number in range(kinds[0]):

        def take(slot, number=number):
            program = as_program(solve(slot))
            return program.cases[number]() if isinstance(program, Cases) else program

        in_queue = real if kinds[0] == 1 else real & (case == number)
        out = run_queue(open_loop(take), in_queue, min(lanes, slots), out)
    return unpack(out[0], out[1], result)


def is_small(leaf: Any) -> bool:
    """Returns whether an array is packed: a few numbers of 32 bits, or a few bools."""
    return leaf.size <= 8 and leaf.dtype in (jnp.float32, jnp.int32, jnp.uint32, jnp.bool_)


def pack(tree: Any) -> tuple[jax.Array, list]:
    """Returns (the small arrays of a client as one row [W] int32, the other arrays): a GPU writes
    a row in one kernel, and each array in one of its own.
    """
    leaves = jax.tree.leaves(tree)
    words = [
        (leaf if leaf.dtype == jnp.bool_ else lax.bitcast_convert_type(leaf, jnp.int32))
        .astype(jnp.int32)
        .reshape(-1)
        for leaf in leaves
        if is_small(leaf)
    ]
    row = jnp.concatenate([jnp.zeros(0, jnp.int32), *words])
    return row, [leaf for leaf in leaves if not is_small(leaf)]


def unpack(row: jax.Array, rest: list, shapes: Any) -> Any:
    """Returns the arrays that `pack` was given, from `row` [.., W] and the others; `shapes` are
    those of one client's.
    """
    leaves, structure = jax.tree.flatten(shapes)
    others, at, found = iter(rest), 0, []
    for leaf in leaves:
        if not is_small(leaf):
            found.append(next(others))
            continue
        part = row[..., at : at + leaf.size].reshape(*row.shape[:-1], *leaf.shape)
        at += leaf.size
        found.append(
            part != 0 if leaf.dtype == jnp.bool_ else lax.bitcast_convert_type(part, leaf.dtype)
        )
    return jax.tree.unflatten(structure, found)


class OpenLoop(NamedTuple):
    """The `Loop` of any client, with what its step closes over as an argument, so that this can
    lie in a lane.
    """

    steps: Callable  # (slot) -> [] int32
    begin: Callable  # (slot) -> ((steps, *own), carry): lists of arrays
    step: Callable  # ((steps, *own), i, carry) -> carry
    end: Callable  # (slot, carry) -> result
    has_steps: bool


def open_loop(take: Callable[[jax.Array], Loop]) -> OpenLoop:
    """Finds, by tracing, what a client's step closes over, and what of it depends on the client.
    Only that is `own`: the rest, as all samples, is the same for all clients and never copied.
    """
    traced: dict[str, Any] = {}

    def parts(slot):
        loop = take(slot)
        init = jax.tree.map(jnp.asarray, loop.init)
        step = jax.make_jaxpr(loop.step)(jnp.int32(0), init)
        end, result = jax.make_jaxpr(loop.end, return_shape=True)(init)
        given = [jnp.asarray(loop.steps, jnp.int32)], jax.tree.leaves(init), step.consts, end.consts
        traced.update(step=step.jaxpr, end=end.jaxpr, result=jax.tree.structure(result))
        traced.update(has_steps=has_steps(loop), sizes=[len(part) for part in given])
        return [value for part in given for value in part]

    whole = jax.make_jaxpr(parts)(jnp.int32(0))
    shared = core.eval_jaxpr(whole.jaxpr, whole.consts, jnp.int32(0))  # outside of every loop
    depends = find_dependent(whole.jaxpr)
    _, carries, steps, ends = traced["sizes"]
    in_carry = range(1, 1 + carries)
    in_step = range(1 + carries, 1 + carries + steps)
    in_end = range(1 + carries + steps, 1 + carries + steps + ends)
    own_at = [n for n in in_step if depends[n]]

    def evaluate(slot):
        found = core.eval_jaxpr(whole.jaxpr, whole.consts, slot)
        return [
            own if depends_on_slot else same
            for own, same, depends_on_slot in zip(found, shared, depends, strict=True)
        ]

    def begin(slot):
        values = evaluate(slot)
        return [values[n] for n in (0, *own_at)], [values[n] for n in in_carry]

    def step(own, i, carry):
        values = dict(zip(own_at, own[1:], strict=True))
        closed = [values.get(n, shared[n]) for n in in_step]
        return core.eval_jaxpr(traced["step"], closed, i, *carry)

    def end(slot, carry):
        values = evaluate(slot)
        result = core.eval_jaxpr(traced["end"], [values[n] for n in in_end], *carry)
        return jax.tree.unflatten(traced["result"], result)

    return OpenLoop(lambda slot: evaluate(slot)[0], begin, step, end, traced["has_steps"])


def find_dependent(jaxpr: Jaxpr) -> list[bool]:
    """Returns which results of a traced function depend on its arguments."""
    found = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(v in found for v in equation.invars if not isinstance(v, Literal)):
            found |= set(equation.outvars)
    return [not isinstance(v, Literal) and v in found for v in jaxpr.outvars]


class Lanes(NamedTuple):
    """Where the clients of a queue stand. A lane without a client has slot S and 0 steps."""

    now: jax.Array  # [] int32, steps that every lane has taken
    left: jax.Array  # [] int32, clients that have not ended
    begun: jax.Array  # [] int32, clients that have begun
    row: jax.Array  # [L, W] int32: slot, `now` when its client began, steps, more of `own`
    own: list  # [L, ...], what else its steps read
    carry: list  # [L, ...]
    out: tuple  # [S, ...], results of those that have ended, packed

    @property
    def slot(self) -> jax.Array:
        """[L] int32, whose steps a lane takes."""
        return self.row[:, 0]

    @property
    def since(self) -> jax.Array:
        """[L] int32, `now` when that client began."""
        return self.row[:, 1]

    @property
    def rest(self) -> jax.Array:
        """[L] int32, the steps that a lane still has to take; below 0: long done."""
        return self.row[:, 2] - (self.now - self.since)


def run_queue(loop: OpenLoop, in_queue: jax.Array, lanes: int, out: tuple) -> tuple:
    """Runs the clients of the slots `in_queue` [S] in lanes, and writes their results into `out`,
    packed.

    Lanes that are done, R of them at most, write their results and begin the next clients of the
    queue; then all lanes take as many steps as the first of them still has. A lane without a
    client goes on with what it had, and its result is not read.
    """
    slots = in_queue.size
    # clients without steps all end at once
    refill = max(min(lanes, LEAST_REFILL), lanes // 8) if loop.has_steps else lanes
    steps = jax.vmap(loop.steps)(jnp.arange(slots, dtype=jnp.int32))
    queue = jnp.argsort(jnp.where(in_queue, -steps, 1), stable=True).astype(jnp.int32)
    waiting = jnp.sum(in_queue).astype(jnp.int32)
    own, carry = jax.eval_shape(loop.begin, jnp.int32(0))
    (row, rest), carry = zero_rows(lanes, (jax.eval_shape(pack, own), carry))
    row = jnp.pad(row, ((0, 0), (2, 0))).at[:, 0].set(slots)

    def advance(at: Lanes) -> Lanes:
        at = change_lanes(loop, at, queue, waiting, refill)
        if not loop.has_steps:
            return at
        busy = (at.slot < slots) | (at.begun < waiting)
        first = jnp.min(jnp.where(busy, jnp.maximum(at.rest, 0), jnp.iinfo(jnp.int32).max))
        until = at.now + jnp.where(at.left > 0, first, 0)

        def step(now, carry):
            in_queue = unpack(at.row[:, 2:], at.own, own)
            return jax.vmap(loop.step)(in_queue, now - at.since, carry)

        carry = lax.fori_loop(at.now, until, step, at.carry)
        return at._replace(now=until, carry=carry)

    zero = jnp.int32(0)
    empty = Lanes(zero, waiting, zero, row, rest, carry, out)
    return lax.while_loop(lambda at: at.left > 0, advance, empty).out


def change_lanes(
    loop: OpenLoop, at: Lanes, queue: jax.Array, waiting: jax.Array, refill: int
) -> Lanes:
    """Ends the clients of up to `refill` lanes that are done, and begins the next of the `queue`
    [S] of `waiting` clients there. Only rows are written: no lane is copied.

    Args: `at` is where all clients stand; `queue` [S] int32 are the slots in the order in which
    they begin; `waiting` [] is how many of them have a client; `refill` is R, static.
    """
    lanes, slots = at.row.shape[0], queue.size
    due = (at.rest <= 0) & ((at.slot < slots) | (at.begun < waiting))
    order = jnp.where(due, jnp.cumsum(due) - 1, refill)
    numbers = jnp.arange(lanes, dtype=jnp.int32)
    # [R], L: no lane
    lane = jnp.full(refill, lanes, jnp.int32).at[order].set(numbers, mode="drop")
    from_lane = jnp.minimum(lane, lanes - 1)
    old = jnp.where(lane < lanes, at.slot[from_lane], slots)
    turn = at.begun + numbers[:refill]
    new = jnp.where((lane < lanes) & (turn < waiting), queue[jnp.minimum(turn, slots - 1)], slots)

    def end(slot, carry):
        return pack(loop.end(slot, carry))

    def begin(slot):
        (steps, *own), carry = loop.begin(jnp.minimum(slot, slots - 1))
        row, rest = pack([jnp.where(slot < slots, steps, 0), *own])
        return jnp.concatenate([slot[None], at.now[None], row]), rest, carry

    def put(rows):
        return lambda whole, part: whole.at[rows].set(part, mode="drop")

    ended = jax.vmap(end)(
        jnp.minimum(old, slots - 1), jax.tree.map(lambda leaf: leaf[from_lane], at.carry)
    )
    row, own, carry = jax.tree.map(put(lane), (at.row, at.own, at.carry), jax.vmap(begin)(new))
    return Lanes(
        at.now,
        at.left - jnp.sum(old < slots, dtype=jnp.int32),
        at.begun + jnp.sum(new < slots, dtype=jnp.int32),
        row,
        own,
        carry,
        jax.tree.map(put(old), at.out, ended),
    )
