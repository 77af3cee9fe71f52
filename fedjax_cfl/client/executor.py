"""What one client computes, described as a `Loop`, and the executors that run the loops of a
cohort: one client after another, side by side in lanes (`lanes`), or in a Python loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core, lax

from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import put_first
from fedjax_cfl.tree import zero_rows

Carry = Any


class Loop(NamedTuple):
    """What one client computes: step(i, carry) for i = 0 .. steps - 1 from `init`, then end(carry).

    What `step` closes over is computed once, when the client begins. What only `end` closes
    over is computed when the client ends.
    """

    steps: jax.Array | int  # [] int32
    init: Carry
    step: Callable[[jax.Array, Carry], Carry]
    end: Callable[[Carry], Any]


class Cases(NamedTuple):
    """A client's program that is one of several loops. Their carries may differ in shape; their
    results have the same types.
    """

    which: jax.Array  # [] int32
    cases: list[Callable[[], Loop]]


Program = Loop | Cases


def constant(result: Any) -> Loop:
    """Returns the program of a client that has only a result, and no steps."""
    return Loop(0, (), lambda i, carry: carry, lambda carry: result)


def as_program(found: Any) -> Program:
    """Returns a program as it is, and anything else as the program of that result."""
    return found if isinstance(found, Loop | Cases) else constant(found)


def change_loops(program: Program, change: Callable[[Loop], Loop]) -> Program:
    """Returns the program with its loop changed, or each of its loops."""
    if isinstance(program, Loop):
        return change(program)
    return program._replace(cases=[lambda case=case: change(case()) for case in program.cases])


def map_result(program: Program, change: Callable[[Any], Any]) -> Program:
    """Returns the program with its result changed."""
    return change_loops(
        program, lambda loop: loop._replace(end=lambda carry: change(loop.end(carry)))
    )


def zip_loops(first: Program, second: Loop) -> Program:
    """Returns the program of both, step by step; its result is (that of `first`, that of
    `second`). One that has fewer steps waits at its end for the other.
    """

    def join(loop: Loop) -> Loop:
        loops = loop, second

        def step(i, carries):
            return tuple(
                lax.cond(i < each.steps, each.step, lambda i, carry: carry, i, carry)
                for each, carry in zip(loops, carries, strict=True)
            )

        def end(carries):
            return tuple(each.end(carry) for each, carry in zip(loops, carries, strict=True))

        steps = jnp.maximum(loop.steps, second.steps)
        return Loop(steps, (loop.init, second.init), step, end)

    return change_loops(first, join)


def has_steps(loop: Loop) -> bool:
    """Returns whether a loop can have steps at all."""
    return not (isinstance(loop.steps, int) and loop.steps == 0)


def run_one(program: Program) -> Any:
    """Runs one client's program to its end."""
    if isinstance(program, Cases):
        return lax.switch(
            program.which, [lambda _, case=case: run_one(case()) for case in program.cases], None
        )
    if not has_steps(program):
        return program.end(program.init)
    return program.end(lax.fori_loop(0, program.steps, program.step, program.init))


def run_sequential(solve: Callable[[jax.Array], Any], real: jax.Array) -> Any:
    """Runs the programs solve(slot) one client after another; see `cohort.run_clients`."""
    order = put_first(real)

    @jax.jit  # traced once for its shapes and for the loop
    def one(slot):
        return run_one(as_program(solve(slot)))

    zeros = zero_rows(real.size, jax.eval_shape(one, order[0]))

    def run(n, done):
        at = order[n]
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, at, 0), done, one(at)
        )

    return lax.fori_loop(0, jnp.sum(real), run, zeros)


def run_debug(solve: Callable[[jax.Array], Any], real: jax.Array) -> Any:
    """Runs the programs solve(slot) in a Python loop: a step sees real numbers, and may print
    them or stop in a debugger.

    Raises InputError within `jit`, where there are no numbers.
    """
    if isinstance(real, core.Tracer):
        raise InputError(
            "local.executor=debug: runs outside of jit only; call algorithm.init and"
            " algorithm.round yourself under jax.disable_jit() (docs/tutorials/own_algorithm.md),"
            " or use sequential or lanes"
        )
    rows = []
    for slot in range(real.size):
        program = as_program(solve(jnp.int32(slot)))
        if isinstance(program, Cases):
            program = program.cases[int(program.which)]()
        carry = program.init
        for i in range(int(program.steps) if real[slot] else 0):
            carry = program.step(jnp.int32(i), carry)
        row = program.end(carry)
        rows.append(row if real[slot] else jax.tree.map(jnp.zeros_like, row))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
