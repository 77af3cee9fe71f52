"""The programs of a run: its start, its rounds and its evaluation. Here and, for many
runs at once, in `vectorize` they are compiled.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl import sharding
from fedjax_cfl.data import prefetch
from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.engine import DRIFT, derive_key
from fedjax_cfl.sharding import replicated_shapes, replicated_sharding
from fedjax_cfl.simulation import evaluate, memory
from fedjax_cfl.simulation.compiler import compiler_options, count_cache_hits, parallel_compiler
from fedjax_cfl.types import Algorithm, ClientIndex, FederatedData, Info, Key, State, Task
from fedjax_cfl.validation import PositiveInt, check_arguments


class DataState(NamedTuple):
    """What of the data a drift edits, and the drift's own memory: carried from round to
    round, unlike the samples themselves.
    """

    owner: jax.Array
    y: jax.Array
    sample: jax.Array | None
    turns: jax.Array | None
    train: ClientIndex
    test: ClientIndex
    concept: jax.Array
    shifted: jax.Array
    memory: Any

    def apply_to(self, data: FederatedData) -> FederatedData:
        """Returns the data as edited so far."""
        return data.replace(
            **{name: value for name, value in self._asdict().items() if name != "memory"}
        )


class Plan(NamedTuple):
    """How long a run is, and how it is tested: after every `eval_every` rounds and the
    last.

    `discard` (D17) hides a clustered method's accuracy while its first rounds do not
    cover everybody: `rounds` in round t = 0, 1, ... while t < K / cohort (the FlexCFL
    code), `met` while clients have not been met, `none` never.
    """

    rounds: PositiveInt
    eval_every: PositiveInt = 1
    discard: Literal["rounds", "met", "none"] = "rounds"
    with_auxiliary: bool = True  # also test the mean of the models
    # also the mean distance of clients that share a model; quadratic in the clients
    with_distance: bool = False


def check_plan(plan: Plan, data: Sequence[FederatedData]) -> None:
    """Raises InputError for a plan that there cannot be, or data without test samples."""
    check_arguments(Plan, plan._asdict())
    if not all(one.test.order.size for one in data):
        raise InputError("data: nobody holds a test sample, so that nothing can be scored")
    if plan.with_distance and any(map(prefetch.is_on_host, data)):
        raise InputError(
            "eval_distance=true: needs the labels of all clients at once, as resident=device has"
        )


class Inputs(NamedTuple):
    """Numbers that a run's programs are given instead of holding them: runs that differ in
    nothing else share what is compiled.
    """

    values: Mapping[str, float]  # by setting
    build: Callable[[Mapping[str, jax.Array]], tuple[Algorithm, Drift]]  # with traced values


Carry = tuple[State, Any]  # what goes from round to round: (state, data_state)


class Compiled(NamedTuple):
    """What steps a run, or several as one."""

    begin: Callable[[], Carry]
    train: Callable  # (carry, data, done, count) -> (carry, infos [.., >= count])
    test: Callable  # (carry) -> (served models' index [.., K], table, counts, concept [.., K])
    shapes: Any  # of the carry
    memory: dict[str, int]  # bytes that each device was planned to hold, see `plan_memory`
    seconds: float  # of compiling
    programs: dict[str, int]  # how many there are, and how many of them the cache had


class Program(NamedTuple):
    """A compiled run, or several as one, its members.

    A member's arrays stand at its place in the leading axes of the program's; those of
    a run alone have no such axes.
    """

    algorithm: Algorithm  # of any member
    data: list[FederatedData]  # of each member
    shapes: list[Carry]  # of each member's carry alone
    places: list[tuple[int, ...]]  # of each member; () of a run alone
    blocks: Callable  # (done) -> iterator of (count, data) of the blocks from round `done` on
    compiled: Compiled


def init_data_state(drift: Drift, key: Key, data: FederatedData) -> DataState:
    """Returns the data's moving part before round 0."""
    data, memory = drift.init(derive_key(key, DRIFT), data)
    return data_state_of(data, memory)


def data_state_of(data: FederatedData, memory: Any) -> DataState:
    """Takes the moving part out of the data."""
    return DataState(
        **{name: getattr(data, name) for name in DataState._fields if name != "memory"},
        memory=memory,
    )


def run_round(
    algorithm: Algorithm,
    drift: Drift,
    key: Key,
    state: State,
    data_state: DataState,
    data: FederatedData,
) -> tuple[State, DataState, Info]:
    """One shift and one round; returns (state, data_state, info)."""
    met = state.assignment >= 0 if algorithm.clustered else jnp.ones_like(state.assignment, bool)
    now, memory, shifted = drift.apply(
        derive_key(key, DRIFT), state.round, data_state.apply_to(data), data_state.memory, met
    )
    now = now.replace(shifted=shifted, has_drift=drift.moves)
    state, info = algorithm.round(key, state, now)
    return state, data_state_of(now, memory), info


def make_rounds_fn(algorithm: Algorithm, drift: Drift, block: int) -> Callable:
    """Returns f(key, state, data_state, data, count) -> (state, data_state, infos
    [block]): `count` <= block rounds, the other infos 0.
    """

    def rounds(key, state, data_state, data, count):
        @jax.jit  # traced once for its shapes and for the loop
        def step(state, data_state):
            return run_round(algorithm, drift, key, state, data_state, data)

        if block == 1:  # no loop: compiles faster
            state, data_state, info = step(state, data_state)
            return state, data_state, jax.tree.map(lambda part: part[None], info)
        infos = jax.tree.map(
            lambda s: jnp.zeros((block, *s.shape), s.dtype),
            jax.eval_shape(step, state, data_state)[2],
        )

        def body(i, carry):
            state, data_state, infos = carry
            state, data_state, info = step(state, data_state)
            return (
                state,
                data_state,
                jax.tree.map(
                    lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, i, 0),
                    infos,
                    info,
                ),
            )

        return lax.fori_loop(0, count, body, (state, data_state, infos))

    return rounds


def state_shapes(
    algorithm: Algorithm, drift: Drift, mesh: Mesh, data: FederatedData, key: Key
) -> tuple[State, DataState]:
    """Returns shapes, types and shardings of a run's state and moving data: what a
    checkpoint is restored into.
    """
    streamed = prefetch.is_on_host(data)
    data = (
        prefetch.block_shapes(data, "train", 1, data.num_clients, mesh)
        if streamed
        else bound_client_samples(data, drift)
    )
    return replicated_shapes(jax.eval_shape(make_init(algorithm, drift, streamed), key, data), mesh)


def make_init(algorithm: Algorithm, drift: Drift, streamed: bool) -> Callable:
    """Returns f(key, data) -> (state, moving data) before round 0; nothing moves in a
    population on the host. The algorithm starts on what the drift shows at first.
    """

    def begin(key: Key, data: FederatedData) -> tuple[State, Any]:
        if streamed:
            return algorithm.init(key, data), ()
        data_state = init_data_state(drift, key, data)
        return algorithm.init(key, data_state.apply_to(data)), data_state

    return begin


def compile_run(
    algorithm: Algorithm,
    task: Task,
    data: FederatedData,
    key: Key,
    plan: Plan,
    drift: Drift,
    mesh: Mesh,
    fresh: bool = True,
    inputs: Inputs | None = None,
) -> Program:
    """Compiles one run: its start if it is `fresh`, its rounds, its evaluation.

    `inputs.build` makes the same algorithm and drift of traced values; None: the programs
    hold all numbers.

    Raises InputError for data without test samples, for data on the host that the
    algorithm cannot use, and for a run that does not fit into memory.
    """
    check_plan(plan, [data])
    prefetch.check_host_data(data, algorithm, drift)
    key, data = sharding.replicate(key, mesh), bound_client_samples(data, drift)
    if prefetch.is_on_host(data):
        feed = prefetch.HostFeed(data, algorithm, key, plan.rounds, plan.eval_every, mesh)
    else:
        on_device = sharding.replicate(data, mesh)
        feed = prefetch.DeviceFeed(on_device, plan.rounds, plan.eval_every)
    values, build = inputs or Inputs({}, lambda values: (algorithm, drift))
    values = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
    functions = make_functions(build, task, mesh, plan, feed.length, feed.streamed)
    given = sharding.replicate(values, mesh), key
    compiled = compile_functions(functions, given, feed, mesh, task, fresh)
    return Program(algorithm, [data], [compiled.shapes], [()], feed.train_blocks, compiled)


def make_functions(
    build: Callable[[Mapping[str, jax.Array]], tuple[Algorithm, Drift]],
    task: Task,
    mesh: Mesh,
    plan: Plan,
    block: int,
    streamed: bool,
) -> tuple[Callable, Callable, Callable]:
    """Returns the functions of a run, of its values, key and data: its start; up to `block`
    rounds; the evaluation of a part of the test data, from client `first` on.
    """

    def begin(values, key, data):
        return make_init(*build(values), streamed)(key, data)

    def train(values, key, data, state, data_state, done, count):
        rounds = make_rounds_fn(*build(values), block)
        if not streamed:
            return rounds(key, state, data_state, data, count)
        # a block of a population on the host
        state, _, infos = rounds(key, state, data_state_of(data, ()), data, count)
        return state, (), infos

    def test(values, key, data, state, data_state, found, first):
        algorithm, _ = build(values)
        data = data if streamed else data_state.apply_to(data)
        more = evaluate.evaluate_block(
            algorithm, task, mesh, state, data, plan.with_auxiliary, first, plan.with_distance
        )
        found = more if found is None else evaluate.merge(found, more, first)
        return found, algorithm.serve(state).model_index

    return begin, train, test


def found_before(feed: Any, mesh: Mesh) -> Any:
    """Returns what tests begin with: nothing, where there is one part of the test data."""
    if not feed.streamed:
        return None
    return sharding.replicate(evaluate.empty(feed.data.num_clients, feed.data.num_classes), mesh)


def lower_programs(
    functions: Any, given: tuple, feed: Any, mesh: Mesh
) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """Yields (name, program) of begin, train and test, see `compile_functions`, each traced
    when it is asked for. Of the arguments only shapes, types and shardings count.
    """
    jit, side = functools.partial(jax.jit, out_shardings=replicated_sharding(mesh)), len(given) + 1
    begin, train, test = functions
    start = jit(begin).lower(*given, feed.shapes("train"))
    yield "begin", start
    shapes = replicated_shapes(start.out_info, mesh)
    step = jit(train, donate_argnums=(side, side + 1))
    yield "train", step.lower(*given, feed.shapes("train"), *shapes, 0, 1)
    found, first = found_before(feed, mesh), 0 if feed.streamed else None
    yield "test", jit(test).lower(*given, feed.shapes("test"), *shapes, found, first)


def compile_functions(
    functions: Any, given: tuple, feed: Any, mesh: Mesh, task: Task, fresh: bool = True
) -> Compiled:
    """Compiles (begin, train, test), functions of (*given, data), (*given, data,
    *carry, done, count) and (*given, data, *carry, found, first client).

    Raises InputError for what does not fit into memory.
    """
    began = time.perf_counter()
    quick, training = compiler_options(mesh), compiler_options(mesh, task)
    lowered, futures, nothing = {}, {}, found_before(feed, mesh)
    with count_cache_hits() as hits, parallel_compiler() as compiled:
        for name, program in lower_programs(functions, given, feed, mesh):
            lowered[name] = program
            if fresh or name != "begin":
                futures[name] = compiled(program, training if name == "train" else quick)
        programs = {name: future.result() for name, future in futures.items()}
    shapes = replicated_shapes(lowered["begin"].out_info, mesh)
    begin, train, score = programs.get("begin"), programs["train"], programs["test"]

    def start() -> Carry:
        assert begin is not None, "only compiled for a fresh run"
        return begin(*given, feed.initial_data())

    def step(carry: Carry, data, done: int, count: int):
        state, data_state, infos = train(*given, data, *carry, done, count)
        return (state, data_state), infos

    def test(carry: Carry):
        found: Any = nothing
        index: Any = None
        for data, first in feed.test_blocks():
            # one after another: waiting to be tested, all of them would be in memory
            found, index = jax.block_until_ready(score(*given, data, *carry, found, first))
        return index, *found, carry[1].concept if carry[1] else np.full(index.shape, -1)

    planned = memory.plan_memory(shapes[0], feed.peak_shapes(), programs.values())
    memory.check_memory(planned, mesh)
    counts = {"programs": len(programs), "programs_from_cache": hits()}
    return Compiled(start, step, test, shapes, planned, time.perf_counter() - began, counts)
