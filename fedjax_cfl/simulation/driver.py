"""A whole run: rounds and evaluations.

`make_run_fn` is the definition, one function of a key (so `jit(vmap(...))` runs many
seeds). `drive` calls the same parts from Python, compiled as a Program of one run or of
several, so that numbers appear while it goes on: no other loop writes rows.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl.data.drift import Drift
from fedjax_cfl.data.drift import none as no_drift
from fedjax_cfl.distributed import any_process, gather_to_hosts
from fedjax_cfl.formatting import describe_settings, to_frame
from fedjax_cfl.scores import describe_rows, pick_columns
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.simulation.callback import Callback, Grouping, RunInfo, Snapshot, Take
from fedjax_cfl.simulation.program import Inputs, Program, compile_run
from fedjax_cfl.simulation.rounds import Carry, Plan, Setup, make_init, make_rounds_fn
from fedjax_cfl.simulation.rows import COUNTERS, TIMES, Measured, make_row, update_counters
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Key, State, Task
from fedjax_cfl.validation import checked

if TYPE_CHECKING:
    from pandas import DataFrame

NOTHING: Mapping[str, Any] = MappingProxyType({})


@checked()
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


class Result(NamedTuple):
    """What a run leaves."""

    state: State
    data: FederatedData  # as the drift left it
    rows: list[dict[str, Any]]  # one per evaluation, plain Python values
    clients: evaluate.ClientTable  # the last evaluation, [K]
    times: dict[str, float]  # seconds: compile_s, train_s, eval_s
    memory: dict[str, int]  # bytes that each device was planned to hold, see `memory.plan_memory`
    programs: dict[str, int]  # how many were compiled or read: programs, programs_from_cache
    settings: Mapping[str, Any] = NOTHING  # by name, what `cfl.run` was given or chose

    def frame(self) -> "DataFrame":
        """Returns the rows as a pandas.DataFrame: a row per test."""
        return to_frame(self.rows)

    def __repr__(self) -> str:
        """Shows the last test, and what ran."""
        return f"<{describe_rows(self.rows)}{describe_settings(self.settings)}>"

    def _repr_html_(self) -> str:
        """Shows the last five tests in a notebook."""
        return to_frame(map(pick_columns, self.rows[-5:])).to_html(index=False)


def run_setup(
    setup: Setup,
    plan: Plan,
    key: Key,
    callbacks: Sequence[Callback] = (),
    inputs: Inputs | None = None,
) -> Result:
    """Runs what a setup describes in memory; `inputs` are as in `compile_run`."""
    program = compile_run(setup, key, plan, inputs=inputs)
    return drive(program, plan, None, [Watch(callbacks)])[0]


class Watch(NamedTuple):
    """The callbacks of one run."""

    callbacks: Sequence[Callback]  # in this order
    run: RunInfo = RunInfo()


def drive(
    program: Program,
    plan: Plan,
    start: Sequence[Snapshot] | None = None,
    watches: Sequence[Watch] = (),
) -> list[Result]:
    """Runs a program up to round `plan.rounds`; returns the results of its members, who share
    its seconds evenly.

    Args: `start` has where each member stands, None: they begin; `watches` have their callbacks,
    one of each member or none; all end where a callback of one says so. Raises NonFiniteUpdate
    where the faults ask for it.
    """
    carry, members = begin(program, start), range(len(program.places))
    compile_s = program.compiled.seconds / len(members)
    counters = [s.counters for s in start] if start else [COUNTERS] * len(members)
    counters = [one | {"compile_s": one["compile_s"] + compile_s} for one in counters]

    def locate(member: int) -> Snapshot:
        state, data_state = take_member(program, member, carry)
        return Snapshot(state, data_state, counters[member])

    takes: list[Take] = [functools.partial(locate, member) for member in members]
    tell(watches, takes, lambda callback, run, take: callback.on_start(run, take))
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
        if tell_rows(watches, [each[-1] for each in rows], groupings, takes):
            break
        started = time.perf_counter()
    tell(watches, takes, lambda callback, run, take: callback.on_end(take))
    if tested is None:  # a finished run was taken up again
        tested = jax.device_get(program.compiled.test(carry))
    return [
        make_result(program, member, locate(member), rows[member], tested) for member in members
    ]


def tell_rows(
    watches: Sequence[Watch],
    rows: list[dict[str, Any]],
    groupings: list[Grouping],
    takes: list[Take],
) -> bool:
    """Tells callbacks of an evaluation; returns whether the runs end there. The others are of each
    run.
    """
    wanted = any(
        callback.wants_snapshot(row)
        for watch, row in zip(watches, rows, strict=bool(watches))
        for callback in watch.callbacks
    )
    takes = take_together(takes) if any_process(wanted) else takes
    ends = [
        callback.on_rows(row, grouping, take)
        for watch, row, grouping, take in zip(watches, rows, groupings, takes, strict=bool(watches))
        for callback in watch.callbacks
    ]
    return any_process(any(ends))


def tell(watches: Sequence[Watch], takes: list[Take], call: Callable[..., None]) -> None:
    """Calls `call(callback, run, take)` for each callback of all runs; `takes` are of each run."""
    takes = take_together(takes)
    for watch, take in zip(watches, takes, strict=bool(watches)):
        for callback in watch.callbacks:
            call(callback, watch.run, take)


def take_together(takes: list[Take]) -> list[Take]:
    """Returns what takes snapshots; of several processes they are taken at once, because each holds
    a share of them.
    """
    if jax.process_count() == 1:
        return takes
    taken = [take() for take in takes]
    return [functools.partial(lambda snapshot: snapshot, snapshot) for snapshot in taken]


def find_grouping(tested: evaluate.Tested, place: tuple[int, ...]) -> Grouping:
    """Returns who is in which group in the run at `place` of a program, by a test of all."""
    return Grouping(*take_rows((tested.index, tested.concept, tested.evaluation.clients), place))


def begin(program: Program, start: Sequence[Snapshot] | None) -> Carry:
    """Returns the carry before the first round, with what the members' snapshots keep
    written over its leading parts.
    """
    if start and not program.places[0] and not program.padded:
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
    """Returns a member's own carry, without what `pad_data` added to it. All processes of a
    run must call this together.
    """
    place = program.places[member]
    if not place and not program.padded:
        return gather_to_hosts(carry)

    def take(leaf: Any, like: Any) -> Any:
        if leaf.shape == like.shape:
            return leaf
        # of a run alone by NumPy: in JAX each size would be a program of its own
        whole = leaf if place else np.asarray(leaf)
        return whole[(*place, *map(slice, like.shape))]

    return jax.tree.map(take, carry, program.shapes[member])


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
