"""Whether a method of one's own keeps the rules of a round, tried on a few clients without a GPU.

A rule is a function of a `Trial` that yields a sentence for each way in which it is broken, with
what to do about it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedjax_cfl.client import Local, make_execution
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import draw_permutation
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.simulation.personalize import check_rule
from fedjax_cfl.system.reports import count_to_int
from fedjax_cfl.system.select import drawn_ahead, uniform
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, Info, Selection, State, Task, Upload
from fedjax_cfl.validation import checked

CLIENTS, COHORT, ROUNDS = 12, 6, 3  # of a trial: as many as show each rule broken
MOST_SENT = 2**31  # words or models in one round of a trial: none sends as much


class Order(struct.PyTreeNode):
    """What `in_any_order` remembers."""

    inner: Any  # of the selection itself
    turned: jax.Array  # [] bool, True: cohorts are named from the last to the first
    met: jax.Array  # [K] bool, the cohort of the last round


class Trial(NamedTuple):
    """A few rounds of a method, and its second round in other ways."""

    algorithm: Algorithm
    task: Task
    data: FederatedData
    init: Callable[..., State]  # compiled
    round: Callable[..., tuple[State, Info]]  # compiled
    shapes: list[Any]  # of the state before and after a round; as many as could be traced
    states: list[State]  # before round 0 and after each that could be run
    infos: list[Info]
    traces: list[int]  # one entry each time the round was traced
    failures: list[str]  # what could not be traced or run
    turned: State | None = None  # after round 1 with its cohort in another order
    resumed: State | None = None  # after round 1 from a state that was saved and read


@checked()
def check_algorithm(
    method: Callable[[Task, Local, Selection], Algorithm],
    task: Task,
    data: FederatedData,
    local: Local | None = None,
) -> None:
    """Tries a method on a few clients of `data`, one of them without training samples, and raises
    one InputError with a line for every rule of a round that it breaks, and what to do.

    The rules: a round can be traced, keeps the shapes and types of the state and is compiled once;
    groups and models that clients are served exist and have the model's structure; models and
    updates are finite; what is sent is counted in whole numbers from 0 on; a client without
    training samples has no group, one that was selected has; the order of a cohort changes nothing
    but rounding; a state that is saved and read goes on as it would have; new clients are taken
    in, or refused.

    `method(task, local, system)` makes the algorithm, as every function of `cfl.algorithms`; its
    settings are bound to it (`functools.partial`). `local` says how clients train, None: one epoch
    of batches of 10. What the method refuses itself is raised as it is.
    """
    few = take_few(data)
    local = local or Local(0.05, epochs=1, batch_size=10)
    local = local.replace(execution=make_execution(make_mesh(1), 1))

    def make(select: Selection) -> Algorithm:
        return method(task, local, select)

    select = in_any_order(draw_anyone(min(COHORT, few.num_clients)))
    broken = list(find_broken_rules(try_rounds(make(select), task, few)))
    if not broken:
        broken = list(check_newcomers(make, few))
    if broken:
        count = "a rule" if len(broken) == 1 else f"{len(broken)} rules"
        lines = "".join(f"\n- {line}" for line in broken)
        raise InputError(f"the method breaks {count} of a round:{lines}")


def take_few(data: FederatedData) -> FederatedData:
    """Returns the data of a few clients with training samples, where the last has lost them."""
    able = np.flatnonzero(np.asarray(data.train.size) > 0)[:CLIENTS]
    if able.size < 3:
        raise InputError(f"data: {able.size} clients have training samples; a trial needs 3")
    few = take_clients(data, able)
    kept = int(few.train.start[-1])  # samples lie client by client
    lost = few.train.order[kept:]
    train = few.train.replace(order=few.train.order[:kept], size=few.train.size.at[-1].set(0))
    return few.replace(owner=few.owner.at[lost].set(-1), train=train)


def draw_anyone(clients_per_round: int) -> Selection:
    """Selects uniformly, also the client that has lost its training samples."""
    return drawn_ahead(lambda key, _, size: draw_permutation(key, len(size), clients_per_round))


def in_any_order(select: Selection) -> Selection:
    """Returns the selection with a switch in its memory that turns the order of a cohort."""

    def inside(memory: Any) -> Any:
        return memory.inner if isinstance(memory, Order) else memory

    def begin(data: FederatedData) -> Order:
        none = jnp.zeros(data.num_clients, bool)
        return Order(select.init(data), jnp.zeros((), bool), none)

    def choose(key: jax.Array, memory: Order, state: State, data: FederatedData) -> jax.Array:
        state = state.replace(selection=inside(state.selection))
        ids = select.select(key, memory.inner, state, data)
        return jnp.where(memory.turned, ids[::-1], ids)

    def update(memory: Order, state: State, cohort: Cohort, upload: Upload, seconds: Any) -> Order:
        inner = select.update(memory.inner, state, cohort, upload, seconds)
        met = cohort.put(jnp.zeros_like(memory.met), True)
        return memory.replace(inner=inner, met=met)

    def poll(key: jax.Array, state: State, data: FederatedData) -> Any:
        assert select.poll is not None
        return select.poll(key, state.replace(selection=inside(state.selection)), data)

    return Selection(begin, choose, update, select.draw, poll if select.poll else None)


def is_order(node: Any) -> bool:
    """Returns whether this is what `in_any_order` remembers."""
    return isinstance(node, Order)


def find_order(state: State) -> Order | None:
    """Returns what `in_any_order` remembers, None where the method has another selection."""
    found = jax.tree.leaves(state.selection, is_leaf=is_order)
    return next(filter(is_order, found), None)


def turn_order(state: State) -> State:
    """Returns the state after which cohorts are named in the other order."""

    def turn(node: Any) -> Any:
        return node.replace(turned=~node.turned) if is_order(node) else node

    return state.replace(selection=jax.tree.map(turn, state.selection, is_leaf=is_order))


def save_and_read(state: State) -> State:
    """Returns the state as it comes back from the host's memory, without its random keys' types."""

    def copy(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = np.array(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(leaf))
        return jnp.asarray(np.array(leaf))

    return jax.tree.map(copy, state)


def try_rounds(
    algorithm: Algorithm, task: Task, data: FederatedData, rounds: int = ROUNDS
) -> Trial:
    """Runs a few rounds as far as they can be run, and the second of them once more with its
    cohort in another order, and from a state that was saved and read.
    """
    traces = []

    def one_round(key: jax.Array, state: State, data: FederatedData) -> tuple[State, Info]:
        traces.append(len(traces))
        return algorithm.round(key, state, data)

    key, init, step = jax.random.key(0), jax.jit(algorithm.init), jax.jit(one_round)
    trial = Trial(algorithm, task, data, init, step, [], [], [], traces, [])
    if algorithm.check_data is not None:
        algorithm.check_data(data)
    name = "init"
    try:
        trial.shapes.append(init.trace(key, data).out_info)
        name = "round"
        trial.shapes.append(step.trace(key, trial.shapes[0], data).out_info[0])
        trial.states.append(init(key, data))
        for _ in range(rounds if not compare_shapes(*trial.shapes) else 1):
            state, info = step(key, trial.states[-1], data)
            trial.states.append(state)
            trial.infos.append(info)
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        trial.failures.append(f"{name}: it cannot be traced or run ({reason})")
    if len(trial.states) < 3:
        return trial
    before, turned = trial.states[1], None
    if find_order(before) is not None:
        turned = step(key, turn_order(before), data)[0]
    return trial._replace(turned=turned, resumed=step(key, save_and_read(before), data)[0])


def find_broken_rules(trial: Trial) -> Iterator[str]:
    """Yields a line for every rule that is broken, with what to do."""
    for rule in RULES:
        yield from rule(trial)


def name_leaves(tree: Any, name: str = "state") -> dict[str, Any]:
    """Returns the leaves of a tree by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{name}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


def compare_shapes(one: Any, other: Any, name: str = "state") -> list[str]:
    """Returns in words how the shapes and types of the leaves of `one` differ from `other`."""
    first, second = name_leaves(one, name), name_leaves(other, name)

    def describe(leaf: Any) -> str:
        return "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"

    pairs = {path: (first.get(path), second.get(path)) for path in {**first, **second}}
    texts = {path: tuple(map(describe, pair)) for path, pair in pairs.items()}
    return [f"{path}: {a} became {b}" for path, (a, b) in texts.items() if a != b]


def join_few(texts: Iterable[str]) -> str:
    """Returns the first of some texts, and how many more there are."""
    listed = list(texts)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def check_tracing(trial: Trial) -> Iterator[str]:
    """The functions of a method are of arrays whose values are not known yet."""
    for failure in trial.failures:
        yield (
            f"{failure}; use jnp.where or jax.lax.cond for what depends on arrays, not Python's if,"
            " int() or NumPy, and the shapes that the docstrings of `method.py` say"
        )


def check_shapes(trial: Trial) -> Iterator[str]:
    """A round leaves the shapes and types of the state."""
    if len(trial.shapes) == 2 and (differ := compare_shapes(*trial.shapes)):
        yield (
            f"shapes: a round changes the state's arrays ({join_few(differ)}); return every array"
            " in the shape and type that it has at the start (.astype, a fixed number of rows)"
        )


def check_compiled_once(trial: Trial) -> Iterator[str]:
    """A round is compiled once."""
    if len(trial.shapes) < 2 or compare_shapes(*trial.shapes):
        return
    before, after = (name_leaves(shapes) for shapes in trial.shapes)
    weak = [name for name in before if before[name].weak_type != after[name].weak_type]
    if weak or len(trial.traces) > 1:
        where = f" ({join_few(weak)} comes from a Python number in one of them)" if weak else ""
        yield (
            f"compiled once: the second round is compiled again{where}; give every array of the"
            " start its type, as jnp.zeros((), jnp.float32) for 0.0"
        )


def check_rounds(trial: Trial) -> Iterator[str]:
    """The state counts its rounds."""
    found = [int(state.round) for state in trial.states]
    if found != list(range(len(found))):
        yield f"rounds: state.round is {found[:4]}; add 1 in every round, by which draws differ"


def check_groups(trial: Trial) -> Iterator[str]:
    """Clients are in groups that exist."""
    for number, state in enumerate(trial.states):
        count, found = state.active.size, np.asarray(state.assignment)
        wrong = np.flatnonzero((found < -1) | (found >= count))
        if wrong.size:
            yield (
                f"groups: after {number} rounds client {wrong[0]} is in group {found[wrong[0]]};"
                " let assign, regroup and what changes state.assignment name 0 to"
                f" {count - 1}, or -1"
            )
            return


def check_models(trial: Trial) -> Iterator[str]:
    """Models are finite, and so are the updates that they are made of."""
    for number, state in enumerate(trial.states):
        bad = [
            name
            for name, leaf in name_leaves(state.groups, "state.groups").items()
            if not np.isfinite(leaf).all()
        ]
        if bad:
            yield (
                f"finite: after {number} rounds {join_few(bad)} is not; a group without updates has"
                " mass 0 and divides by nothing: jnp.maximum(mass, 1)"
            )
            return  # clients that train from it send what is not finite, too
    lost = sum(int(info.fault_counts.nonfinite) for info in trial.infos)
    if lost:
        yield (
            f"updates: {lost} were not finite and are left out; look at the solver's delta and at"
            " Upload.extra"
        )
    if trial.infos and not any(int(info.clients) for info in trial.infos):
        yield "updates: none is used; a solver's Upload.weight is the client's training samples"


def check_traffic(trial: Trial) -> Iterator[str]:
    """What is sent is counted in whole numbers that are not negative."""
    for name in ("units_down", "units_up", "words_down", "words_up"):
        counts = [count_to_int(getattr(state.traffic, name)) for state in trial.states]
        sent = np.diff(np.array(counts, object))
        wrong = [number for number, one in enumerate(sent) if not 0 <= one < MOST_SENT]
        if wrong:
            yield (
                f"traffic: round {wrong[0]} sends {sent[wrong[0]]} {name.replace('_', ' ')}; report"
                " finite whole numbers from 0 on (make_bill), 0 for what is not sent"
            )


def check_served(trial: Trial) -> Iterator[str]:
    """Clients are served models of the task, by an index of each client."""
    if not trial.states:
        return
    state, clients = trial.states[-1], trial.data.num_clients
    served = trial.algorithm.serve(state)
    one = jax.eval_shape(trial.task.init, jax.random.key(0))
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), served.models
    )
    if differ := compare_shapes(one, rows, "model"):
        yield (
            f"served: models are not stacked models of the task ({join_few(differ)}); give"
            " ServedModels(models [M, ...], model_index [K])"
        )
        return
    index, count = np.asarray(served.model_index), len(jax.tree.leaves(served.models)[0])
    if index.shape != (clients,) or not np.issubdtype(index.dtype, np.integer):
        yield (
            f"served: model_index is {index.dtype}{list(index.shape)}; give a whole number for each"
            f" of {clients} clients"
        )
    elif index.min() < -1 or index.max() >= count:
        yield (
            f"served: model_index has {index.min()} to {index.max()}; of {count} models name 0 to"
            f" {count - 1}, -1 for a client without one"
        )
    weights = served.weights
    if weights is None:
        return
    total = np.asarray(weights).sum(-1)
    if weights.shape != (clients, count) or np.min(weights) < 0 or np.abs(total - 1).max() > 1e-3:
        yield "served: weights are not shares; give [K, M] from 0 on, whose rows add up to 1"


def check_members(trial: Trial) -> Iterator[str]:
    """Of several groups, who was selected has one, and who has no training samples has none."""
    if not trial.algorithm.clustered:
        return
    empty = np.asarray(trial.data.train.size) == 0
    several = [state for state in trial.states if int(state.active.sum()) > 1]
    if any((np.asarray(state.assignment)[empty] >= 0).any() for state in several):
        yield (
            "no samples: a client without training samples is in one of several groups; leave -1 in"
            " state.assignment where data.train.size is 0 (finish may not change that)"
        )
    for state in several:
        order = find_order(state)
        if order is not None and (np.asarray(order.met) & ~empty & (state.assignment < 0)).any():
            yield (
                "selected: a client that took part has no group after its round; name one for every"
                " slot in assign"
            )
            return


def check_order(trial: Trial) -> Iterator[str]:
    """The order in which a cohort is named changes nothing but rounding."""
    if trial.turned is None:
        return
    states = [state.replace(selection=()) for state in (trial.states[2], trial.turned)]
    differ = list_differences(*states, rtol=1e-3, atol=1e-4)
    if differ:
        yield (
            f"order: the second round gives another {join_few(differ)} when its cohort is named in"
            " another order; use cohort.ids and upload.weight, not a slot's number, and do not sort"
            " by slots"
        )


def check_resume(trial: Trial) -> Iterator[str]:
    """All that a run carries is in the state."""
    if trial.resumed is not None and (differ := list_differences(trial.states[2], trial.resumed)):
        yield (
            f"resume: from a state that was saved and read the second round gives another"
            f" {join_few(differ)}; keep what changes in state.memory, not in Python variables"
        )


def list_differences(one: Any, other: Any, rtol: float = 0.0, atol: float = 0.0) -> list[str]:
    """Returns the names of leaves that differ, by more than a tolerance."""
    found = name_leaves(other)

    def plain(leaf: Any) -> np.ndarray:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [
        name
        for name, leaf in name_leaves(one).items()
        if not np.allclose(plain(leaf), plain(found[name]), rtol, atol, equal_nan=True)
    ]


def check_newcomers(make: Callable[[Selection], Algorithm], data: FederatedData) -> Iterator[str]:
    """New clients are taken in by a rule, with the state of a run of fewer clients, or refused.

    Args: `make` returns the method with a selection; `data` are those of all clients.
    """
    key, known = jax.random.key(0), data.num_clients - 1
    try:
        check_rule(make, data, key, 1)
    except InputError:
        return
    algorithm, fewer = make(uniform(1)), take_clients(data, np.arange(known))
    both = [jax.eval_shape(algorithm.init, key, one) for one in (fewer, data)]
    small, large = (name_leaves(state.replace(selection=(), rows={})) for state in both)
    bad = [
        f"{name}: {list(leaf.shape)} of {known} clients, {list(large[name].shape)} of {known + 1}"
        for name, leaf in small.items()
        if leaf.shape != large[name].shape and not name.startswith("state.assignment")
    ]
    bad += [
        f"{name}: {list(leaf.shape)} of {known + 1} clients"
        for name, leaf in name_leaves(both[1]).items()
        if name.startswith("state.rows") and leaf.shape[:1] != (known + 1,)
    ]
    if bad:
        yield (
            f"newcomers: {join_few(bad)}; keep what there is of each client in Method.client_rows,"
            " whose first axis is of length K"
        )


RULES = (
    check_tracing,
    check_shapes,
    check_compiled_once,
    check_rounds,
    check_groups,
    check_models,
    check_traffic,
    check_served,
    check_members,
    check_order,
    check_resume,
)
