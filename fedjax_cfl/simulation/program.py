"""The programs of a run, compiled: its start, its rounds and its evaluation. Those of many
runs at once are in `vectorize`.
"""

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_cfl import sharding
from fedjax_cfl.data import prefetch
from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.data.padding import Room, measure_room, merge_rooms, pad_data, widen_room
from fedjax_cfl.errors import InputError
from fedjax_cfl.sharding import replicated_sharding
from fedjax_cfl.simulation import evaluate, host_rows, memory
from fedjax_cfl.simulation.compiler import (
    check_jax_settings,
    compiler_options,
    count_cache_hits,
    parallel_compiler,
)
from fedjax_cfl.simulation.exports import Exports
from fedjax_cfl.simulation.rounds import (
    Carry,
    Plan,
    Setup,
    carry_shapes,
    make_functions,
    make_init,
    run_round,
    state_shapes,
)
from fedjax_cfl.tasks import CLASSIFICATION, Targets, count_outputs, kind_of
from fedjax_cfl.types import Algorithm, FederatedData, Key, State, Task
from fedjax_cfl.validation import check_settings


def check_plan(plan: Plan, data: Sequence[FederatedData]) -> None:
    """Raises InputError for a plan that is not allowed, or data without test samples."""
    check_settings(Plan, plan._asdict())
    if not all(one.test.order.size for one in data):
        raise InputError("data: no client has a test sample, so that nothing can be scored")
    if plan.eval_distance and any(map(prefetch.is_on_host, data)):
        raise InputError(
            "eval_distance=true: needs the labels of all clients at once, as resident=device has"
        )


def check_data(algorithm: Algorithm, task: Task, drift: Drift, data: FederatedData) -> None:
    """Raises InputError for data that the algorithm cannot use, as a drift shows them at first, or
    not from the host, or that the task is not about.
    """
    prefetch.check_host_data(data, algorithm, drift)
    check_targets(task, data)
    if algorithm.check_data is None:
        return
    if drift.moves:
        begin = jax.jit(lambda data: drift.init(jax.random.key(0), data)[0].concept)
        data = data.replace(concept=begin(data))
    algorithm.check_data(data)


def check_targets(task: Task, data: FederatedData) -> None:
    """Raises InputError unless y are what the task is about."""
    kind, count = kind_of(data), count_outputs(data)
    expected = f"data: y are {kind.describe(data)}; give as_task num_classes={data.num_classes}"
    if task.targets.name != kind.name:
        targets = f", targets=cfl.models.{kind.name}()" if kind.settings else ""
        raise InputError(expected + targets)
    x = jax.ShapeDtypeStruct((1, *data.x.shape[1:]), data.x.dtype)
    params = jax.eval_shape(task.init, jax.random.key(0))
    outputs = jax.eval_shape(task.predict, params, x).shape[1]
    if outputs != count:
        raise InputError(f"{expected} and a model of {count} outputs, not {outputs}")


def check_models(algorithm: Algorithm, task: Task, state: State) -> None:
    """Raises InputError where models of the algorithm, whose `state` has shapes, have other
    parameters than those of the task, with which they are tested.
    """
    models = jax.eval_shape(algorithm.serve, state).models
    expected = jax.eval_shape(task.init, jax.random.key(0))
    served = jax.tree.map(lambda leaf: leaf.shape[1:], models)
    if served != jax.tree.map(lambda leaf: leaf.shape, expected):
        raise InputError(
            "task: the algorithm's models have other parameters; give the task that the algorithm"
            " was made with"
        )


def check_without_classes(algorithm: Algorithm, drift: Drift, data: FederatedData) -> None:
    """Raises InputError where y are no classes, and a part of the run needs classes: each
    says so while it is traced. The command line asks before the run has a directory; from Python
    it is raised when the run is compiled.
    """
    if kind_of(data) is CLASSIFICATION or prefetch.is_on_host(data):
        return

    def go(key: Key, data: FederatedData) -> Any:
        state, data_state = make_init(algorithm, drift, on_host=False)(key, data)
        return run_round(algorithm, drift, key, state, data_state, data)

    jax.eval_shape(go, jax.random.key(0), bound_client_samples(data, drift))


MOST_KINDS = 32  # of programs that a process keeps


class Programs(NamedTuple):
    """The compiled programs of runs of the same parts and shapes."""

    by_name: dict[str, Any]  # begin, unless no run of them began; train; test
    trained: Carry  # shapes of the carry that the rounds are given
    tested: Carry  # and the test
    memory: dict[str, int]  # bytes that each device was planned to hold, see `plan_memory`


class Store:
    """The programs that a process has compiled, for later runs that are made of the same and
    differ in inputs, key and data alone.
    """

    def __init__(self):
        self._programs: dict[Any, Programs] = {}
        self._rooms: dict[Any, Room] = {}
        self._states: dict[Any, State] = {}  # their shapes, which sizes of data do not change
        self.varied = False  # the data of runs to come have other sizes

    def pad(self, recipe: str, data: FederatedData) -> FederatedData:
        """Returns data of the size that the programs of a recipe have: theirs, or, where it is
        too small for them, one with room for the next. The first data are left as they are,
        unless sizes will vary.
        """
        own = measure_room(data)
        # with other clients, features or sides nothing is shared
        alike = recipe, *own.sides, data.num_clients, data.x.shape[1:]
        room = self._rooms.setdefault(alike, widen_room(own) if self.varied else own)
        if (both := merge_rooms([room, own])) != room:
            room = self._rooms[alike] = widen_room(both)
        return data if room == own else pad_data(data, room)

    def find_shapes(self, made_of: Any, setup: Setup, key: Key, wide: FederatedData) -> Carry:
        """Returns the shapes of the carry of a run alone whose programs are of the size of `wide`.
        Those of the state are found once, if they are the same for data of which all sizes differ.
        """
        shapes = state_shapes(setup, key, self._states.get(made_of))
        rooms = measure_room(bound_client_samples(setup.data, setup.drift)), measure_room(wide)
        sizes = [(room.rows, room.client_samples, *room.sides.values()) for room in rooms]
        states = describe_shapes(shapes[0]), describe_shapes(self._programs[made_of].trained[0])
        if states[0] == states[1] and all(map(operator.ne, *sizes)):
            self._states[made_of] = shapes[0]
        return shapes

    def find(self, made_of: Any, fresh: bool) -> Programs | None:
        """Returns the programs of this kind, None: there are none, or none to begin with."""
        programs = self._programs.get(made_of)
        return None if programs and fresh and "begin" not in programs.by_name else programs

    def keep(self, made_of: Any, programs: Programs) -> None:
        """Keeps programs for runs of this kind."""
        self._programs.pop(made_of, None)  # the last one used is the last to go
        self._programs[made_of] = programs
        for oldest in list(self._programs)[:-MOST_KINDS]:
            del self._programs[oldest]


class Inputs(NamedTuple):
    """Settings that are arguments of the compiled programs, not constants in them: runs that differ
    in these alone share a program.
    """

    values: Mapping[str, float]  # by setting
    build: Callable[[Mapping[str, jax.Array]], tuple[Algorithm, Drift]]  # with traced values
    # all else that the programs are made of, but for shapes of data and the plan; hashable
    recipe: Any = ""
    store: Store | None = None  # has the programs of other runs; None: they are this run's own
    lasting: bool = False  # and so has the user's cache, see `exports`


class Compiled(NamedTuple):
    """What steps a run, or several as one."""

    begin: Callable[[], Carry]
    train: Callable  # (carry, data, done, count) -> (carry, infos [.., >= count])
    test: Callable[[Carry], evaluate.Tested]  # leading axes as those of the program
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
    targets: Targets  # of all members
    data: list[FederatedData]  # of each member
    shapes: list[Carry]  # of each member's carry alone
    places: list[tuple[int, ...]]  # of each member; () of a run alone
    num_models: list[int]  # that each member serves
    padded: bool  # its data have more samples than a member's
    blocks: Callable  # (done) -> iterator of (count, data) of the blocks from round `done` on
    compiled: Compiled


OF_OBJECTS = Store()  # of runs that callers from Python describe by objects


def hold_numbers(setup: Setup) -> Inputs:
    """Returns the inputs of programs that hold all numbers: later runs of the same algorithm, task
    and drift, with data of the same sizes, use them again.
    """
    algorithm, task, drift, store = setup.algorithm, setup.task, setup.drift, OF_OBJECTS
    try:
        hash((algorithm, task, drift))
    except TypeError:  # of somebody's own, which holds a dict or an array
        store = None
    return Inputs({}, lambda values: (algorithm, drift), (algorithm, task, drift), store)


def compile_run(
    setup: Setup, key: Key, plan: Plan, fresh: bool = True, inputs: Inputs | None = None
) -> Program:
    """Compiles one run: its start, its rounds, its evaluation.

    Args: `key` fixes all draws, and the cohorts where the data are on the host; `fresh`: the
    start is compiled, too; `inputs.build` makes the same algorithm and drift of traced values,
    None: the programs hold all numbers.
    Raises InputError for data without test samples, for data that the algorithm cannot use, or
    not from the host, and for a run that does not fit into memory.
    """
    check_jax_settings()
    algorithm, task, data, drift, mesh, _ = setup
    check_plan(plan, [data])
    check_data(algorithm, task, drift, data)
    values, build, recipe, store, lasting = inputs or hold_numbers(setup)
    values = {name: np.float32(value) for name, value in values.items()}
    replicated, data = sharding.replicate(key, mesh), bound_client_samples(data, drift)
    if prefetch.is_on_host(data) or jax.process_count() > 1:
        store = None  # how much of them is on a device depends on the key
    if prefetch.is_on_host(data):
        row_bytes = host_rows.row_bytes(algorithm, data, replicated)
        memory.check_host_rows(row_bytes * data.num_clients)
        rounds = plan.rounds, plan.eval_every
        feed = prefetch.HostFeed(data, algorithm, replicated, *rounds, mesh, row_bytes)
    else:
        wide = store.pad(recipe, data) if store and inputs else data
        feed = prefetch.DeviceFeed(sharding.replicate(wide, mesh), plan.rounds, plan.eval_every)
    functions = make_functions(build, task, mesh, plan, feed.length, feed.on_host)
    given = sharding.replicate(values, mesh), replicated
    parts = feed.length, plan.eval_auxiliary, plan.eval_distance, str(jax.config.values)
    stored = store and (store, (recipe, *parts, describe_shapes((given, feed.data))))
    exports = Exports(stored[1]) if stored and lasting else None
    padded = feed.data.y.shape != data.y.shape
    # what a run goes on from is written over a start of the padded size, see `driver.begin`
    source = Source(functions, setup, given, feed, exports)
    compiled = compile_functions(source, fresh or padded, stored)
    shapes = compiled.shapes
    if store and stored and padded:
        shapes = store.find_shapes(stored[1], setup, key, feed.data)
    return make_program(setup, [data], [shapes], [()], padded, feed, compiled)


def make_program(
    setup: Setup,
    data: list[FederatedData],
    shapes: list[Carry],
    places: list[tuple[int, ...]],
    padded: bool,
    feed: Any,
    compiled: Compiled,
) -> Program:
    """Returns a program of runs, each with the algorithm and task of the `setup`.

    Args: `data`, `shapes` and `places` are of each member, see `Program`; `padded` as there;
    `feed` brings the data; `compiled` is what steps them.
    """
    serve, targets = setup.algorithm.serve, setup.task.targets
    served = [jax.eval_shape(serve, state).models for state, _ in shapes]
    counts = [evaluate.count_models(models) for models in served]
    blocks = feed.train_blocks
    return Program(setup.algorithm, targets, data, shapes, places, counts, padded, blocks, compiled)


def describe_shapes(arrays: Any) -> Any:
    """Returns what a compiled program needs to know of its arguments, to be compared."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)


class Source(NamedTuple):
    """What the programs of a run, or of several as one, are traced from and called with."""

    # begin(*given, data), train(*given, data, *carry, done, count) and test(*given, data, *carry,
    # found, first client)
    functions: Sequence[Callable]
    setup: Setup  # of any member
    given: tuple  # the values of settings and the key
    feed: Any  # brings the data, a `DeviceFeed` or `HostFeed`
    exports: Exports | None = None  # None: they are traced, whatever runs were before

    def find_shapes(self, carry: Carry, side: str) -> Carry:
        """Returns the shapes of the carry that the program of a side gets, see `host_rows`."""
        count = self.feed.lent[side] if self.feed.row_bytes else 0
        return host_rows.device_shapes(self.setup.algorithm, carry, count, self.setup.mesh)

    def init_evaluation(self) -> Any:
        """Returns what tests begin with: nothing, where there is one part of the test data."""
        if not self.feed.on_host:
            return None
        empty = evaluate.empty(self.setup.task.targets, self.feed.data)
        return sharding.replicate(empty, self.setup.mesh)


def plan_run(feed: Any, state: State, programs: dict[str, Any], mesh: Mesh) -> dict[str, int]:
    """Returns the bytes that each device will hold. Raises InputError for more than there are.

    Args: `feed` brings the data; `state` has shapes; `programs` are compiled, by name.
    """
    parts, kept = (state, feed.peak_shapes()), feed.row_bytes * feed.data.num_clients
    memory.check_memory(memory.plan_memory(*parts, programs.values(), kept), mesh)
    # without the start, which a run that goes on does not compile: the summary says the same
    lasting = [program for name, program in programs.items() if name != "begin"]
    return memory.plan_memory(*parts, lasting, kept)


def place_carry(shapes: Carry) -> Carry:
    """Returns the shardings of a carry."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def trace_programs(source: Source) -> Iterator[tuple[str, jax.stages.Traced]]:
    """Yields (name, program) of begin, train and test, each traced when the caller asks for the
    next. Of the arguments only shapes, types and shardings count.
    """
    (begin, train, test), setup, given, feed, exports = source
    wrap = exports.wrap if exports else lambda name, function, *arguments: function
    side, whole = len(given) + 1, replicated_sharding(setup.mesh)
    arguments = *given, feed.shapes("train")
    begin = wrap("begin", begin, *arguments)
    before = jax.eval_shape(begin, *arguments)
    one = jax.tree.map(  # of one run
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[before[0].round.ndim :], leaf.dtype), before[0]
    )
    check_models(setup.algorithm, setup.task, one)
    places = place_carry(carry_shapes(setup.algorithm, before, setup.mesh))
    yield "begin", jax.jit(begin, out_shardings=places).trace(*arguments)
    shapes = source.find_shapes(before, "train")
    results = (*place_carry(shapes), whole)
    arguments = *given, feed.shapes("train"), *shapes, 0, 1
    train = wrap("train", train, *arguments)
    step = jax.jit(train, donate_argnums=(side, side + 1), out_shardings=results)
    yield "train", step.trace(*arguments)
    found, first = source.init_evaluation(), 0 if feed.on_host else None
    shapes = source.find_shapes(before, "test")
    arguments = *given, feed.shapes("test"), *shapes, found, first
    test = wrap("test", test, *arguments)
    yield "test", jax.jit(test, out_shardings=whole).trace(*arguments)


def compile_programs(source: Source, fresh: bool) -> Programs:
    """Compiles rounds and evaluation, and the start where the run is `fresh`."""
    mesh = source.setup.mesh
    quick, training = compiler_options(mesh), compiler_options(mesh, source.setup.task)
    lowered, futures = {}, {}
    with parallel_compiler() as compiled:
        for name, traced in trace_programs(source):
            lowered[name] = program = traced.lower()
            if fresh or name != "begin":
                futures[name] = compiled(program, training if name == "train" else quick)
        programs = {name: future.result() for name, future in futures.items()}
    begun = lowered["begin"].out_info
    trained, tested = (source.find_shapes(begun, side) for side in ("train", "test"))
    return Programs(programs, trained, tested, plan_run(source.feed, trained[0], programs, mesh))


def compile_functions(
    source: Source, fresh: bool = True, stored: tuple[Store, Any] | None = None
) -> Compiled:
    """Compiles the start, the rounds and the evaluation of a run, or of several as one, unless
    they have been.

    Args: `fresh`: the start is compiled, too; `stored` is where programs are kept, and as what,
    None: nowhere. Raises InputError for what does not fit into memory.
    """
    began = time.perf_counter()
    before = stored[0].find(stored[1], fresh) if stored else None
    with count_cache_hits() as hits:
        programs = before or compile_programs(source, fresh)
        from_cache = len(programs.by_name) if before else hits()
    if stored:
        stored[0].keep(stored[1], programs)
    counts = {"programs": len(programs.by_name), "programs_from_cache": from_cache}
    steps = bind_programs(programs, source)
    seconds = time.perf_counter() - began
    return Compiled(*steps, programs.trained, programs.memory, seconds, counts)


def bind_programs(programs: Programs, source: Source) -> tuple[Callable, Callable, Callable]:
    """Returns begin, train and test of a run, or of several as one, as `Compiled` has them."""
    by_name, shapes, tested, _ = programs
    given, feed, nothing = source.given, source.feed, source.init_evaluation()

    def start() -> Carry:
        state, data_state = by_name["begin"](*given, feed.initial_data())
        return host_rows.make_rows(state) if feed.row_bytes else state, data_state

    def step(carry: Carry, data, done: int, count: int):
        ids = feed.block_clients(done, count) if feed.row_bytes else None
        on_device = host_rows.rows_to_device(carry, ids, shapes)
        state, data_state, infos = by_name["train"](*given, data, *on_device, done, count)
        return (host_rows.rows_to_host(carry[0], state, ids), data_state), infos

    def test(carry: Carry) -> evaluate.Tested:
        found: Any = nothing
        index: Any = None
        apart: evaluate.Evaluation | None = None
        for data, first in feed.test_blocks():
            # one after another: waiting to be tested, all of them would be in memory
            ids = None
            if feed.row_bytes:
                ids = np.arange(first, min(first + feed.lent["test"], feed.data.num_clients))
            on_device = host_rows.rows_to_device(carry, ids, tested)
            arguments = *given, data, *on_device, found, first
            found, index, apart = jax.block_until_ready(by_name["test"](*arguments))
        if carry[1]:
            sizes = carry[1].concept, carry[1].train.size
            return evaluate.Tested(index, found, *sizes, apart)
        unknown = np.full(index.shape, -1)
        return evaluate.Tested(index, found, unknown, np.asarray(feed.data.train.size))

    return start, step, test
