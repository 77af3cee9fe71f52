"""A whole run: rounds and evaluations.

`make_run_fn` is the definition, one function of a key (so `jit(vmap(...))` runs many
seeds). `drive` calls the same parts from Python, compiled as a Program of one run or of
several, so that numbers appear while it goes on: no other loop writes rows.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl.data.drift import Drift
from fedjax_cfl.data.drift import none as no_drift
from fedjax_cfl.distributed import gather_to_hosts
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.simulation.program import Program, compile_run
from fedjax_cfl.simulation.rounds import Carry, DataState, Plan, make_init, make_rounds_fn
from fedjax_cfl.simulation.rows import COUNTERS, TIMES, Measured, make_row, update_counters
from fedjax_cfl.simulation.setup import Setup
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Key, State, Task


def make_run_fn(
    algorithm: Algorithm,
    task: Task,
    mesh: Mesh,
    rounds: int,
    eval_every: int = 1,
    drift: Drift | None = None,
) -> Callable:
    """Returns f(key, data) -> (state, (infos [T, eval_every], metrics [T])): a run as one
    function of a key.

    Args: `mesh` has the devices that share an evaluation; `rounds` and `eval_every`: T = rounds
    // eval_every, and rounds beyond the last evaluation are not run; `drift` of None: no data
    change.
    """
    rounds_fn = make_rounds_fn(algorithm, drift or no_drift(), eval_every)

    def step(key, carry, data):
        state, data_state, infos = rounds_fn(key, *carry, data, eval_every)
        now = data_state.apply_to(data)
        found, _ = evaluate.evaluate_all(algorithm, task, mesh, state, now, True)
        return (state, data_state), (infos, found)

    def go(key, data):
        carry = make_init(algorithm, drift or no_drift(), on_host=False)(key, data)
        (state, _), found = lax.scan(
            lambda carry, _: step(key, carry, data), carry, length=rounds // eval_every
        )
        return state, found

    return go


class Snapshot(NamedTuple):
    """Where a run stands after an evaluation: what a checkpoint keeps. The arrays are
    only valid until the run goes on.
    """

    state: State
    data_state: DataState
    counters: dict[str, Any]  # counters and seconds so far, see COUNTERS


class Grouping(NamedTuple):
    """Who is in which group at an evaluation, on the host."""

    groups: np.ndarray  # [K] int32, the model that each client is served, -1: it has none yet
    concepts: np.ndarray  # [K] int32, the true group at the time, -1 where unknown
    clients: evaluate.ClientTable | None = None  # [K], what each client measures


class Result(NamedTuple):
    """What a run leaves."""

    state: State
    data: FederatedData  # as the drift left it
    rows: list[dict[str, Any]]  # one per evaluation, plain Python values
    clients: evaluate.ClientTable  # the last evaluation, [K]
    times: dict[str, float]  # seconds: compile_s, train_s, eval_s
    memory: dict[str, int]  # bytes that each device was planned to hold, see `memory.plan_memory`
    programs: dict[str, int]  # how many were compiled or read: programs, programs_from_cache


def run_setup(
    setup: Setup,
    plan: Plan,
    key: Key,
    on_row: Callable[[dict[str, Any], Snapshot], bool | None] = lambda row, snapshot: None,
) -> Result:
    """Runs what a setup describes in memory; `fedjax_cfl.run` says what `on_row` gets."""
    program = compile_run(setup, key, plan)
    (result,) = drive(
        program, plan, on_rows=lambda rows, groupings, snapshots: on_row(rows[0], snapshots[0]())
    )
    return result


Snapshots = list[Callable[[], Snapshot]]  # of each member, taken when it is called


def drive(
    program: Program,
    plan: Plan,
    start: Sequence[Snapshot] | None = None,
    on_start: Callable[[Snapshots], None] = lambda snapshots: None,
    on_rows: Callable[
        [list[dict[str, Any]], list[Grouping], Snapshots], bool | None
    ] = lambda rows, groupings, snapshots: None,
) -> list[Result]:
    """Runs a program up to round `plan.rounds`; returns the results of its members, who share
    its seconds evenly.

    Args: `start` has where each member stands, None: they begin; `on_start` gets where they
    stand before the first round; `on_rows` gets their rows of each evaluation as soon as they
    are known, who is in which group, and where they stand then; the run ends early if it
    returns true. Raises NonFiniteUpdate where the faults ask for it.
    """
    carry, members = begin(program, start), range(len(program.places))
    compile_s = program.compiled.seconds / len(members)
    counters = [s.counters for s in start] if start else [COUNTERS] * len(members)
    counters = [one | {"compile_s": one["compile_s"] + compile_s} for one in counters]

    def locate(member: int) -> Snapshot:
        state, data_state = take_member(program, member, carry)
        return Snapshot(state, data_state, counters[member])

    snapshots: Snapshots = [functools.partial(locate, member) for member in members]
    on_start(snapshots)
    done = int(np.max(jax.device_get(carry[0].round)))
    rows, blocks, tested, started = [[] for _ in members], [], None, time.perf_counter()
    for count, block in program.blocks(done):
        carry, infos = jax.block_until_ready(program.compiled.train(carry, block, done, count))
        blocks.append((count, jax.device_get(infos)))
        done += count
        if done % plan.eval_every and done < plan.rounds:
            continue
        trained = time.perf_counter()
        tested = jax.device_get(program.compiled.test(carry))
        seconds = {"train_s": trained - started, "eval_s": time.perf_counter() - trained}
        seconds = {name: value / len(members) for name, value in seconds.items()}
        traffic, clock_ms = jax.device_get((carry[0].traffic, carry[0].clock_ms))
        measured = Measured(done, traffic, clock_ms, blocks, tested)
        for member in members:
            row = make_row(program, plan, member, measured, counters[member])
            counters[member] = update_counters(counters[member], row, **seconds)
            rows[member].append(row)
        blocks = []
        groupings = [find_grouping(tested, place) for place in program.places]
        if on_rows([each[-1] for each in rows], groupings, snapshots):
            break
        started = time.perf_counter()
    if tested is None:  # a finished run was taken up again
        tested = jax.device_get(program.compiled.test(carry))
    return [
        make_result(program, member, locate(member), rows[member], tested) for member in members
    ]


def find_grouping(tested: evaluate.Tested, place: tuple[int, ...]) -> Grouping:
    """Returns who is in which group in the run at `place` of a program, by a test of all."""
    return Grouping(*take_rows((tested.index, tested.concept, tested.evaluation.clients), place))


def begin(program: Program, start: Sequence[Snapshot] | None) -> Carry:
    """Returns the carry before the first round, with what the members' snapshots keep
    written over its leading parts.
    """
    if start and not program.places[0]:
        return start[0].state, start[0].data_state
    carry = program.compiled.begin()
    if not start:
        return carry

    def write(base, *parts):
        base = np.array(base)
        for place, part in zip(program.places, parts, strict=True):
            base[(*place, *map(slice, part.shape))] = part
        return base

    kept = jax.device_get([(one.state, one.data_state) for one in start])
    kept = jax.tree.map(write, jax.device_get(carry), *kept)
    return jax.tree.map(lambda base, leaf: jax.device_put(leaf, base.sharding), carry, kept)


def take_member(program: Program, member: int, carry: Carry) -> tuple[State, Any]:
    """Returns a member's own carry, without what `stack_data` added to it. All processes of a
    run must call this together.
    """
    place = program.places[member]
    if not place:
        return gather_to_hosts(carry)
    return jax.tree.map(
        lambda leaf, like: leaf[(*place, *map(slice, like.shape))], carry, program.shapes[member]
    )


def make_result(
    program: Program, member: int, ends: Snapshot, rows: list, tested: evaluate.Tested
) -> Result:
    """Returns what a member leaves.

    Args: `member` is its number in the program; `ends` is where it ends; `rows` are those of
    all its evaluations; `tested` is the last evaluation of the whole program.
    """
    data, place = program.data[member], program.places[member]
    return Result(
        ends.state,
        ends.data_state.apply_to(data) if ends.data_state else data,
        rows,
        take_rows(tested.evaluation.clients, place),
        {name: ends.counters[name] for name in TIMES},
        program.compiled.memory,
        program.compiled.programs,
    )
