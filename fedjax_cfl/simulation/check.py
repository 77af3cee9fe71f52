"""Whether a method of one's own keeps the rules of a round, tried on a few clients without a GPU.

A rule is a row of `RULES`: a function of a `Trial` that finds what breaks it, in words, and what is
said of that, by its name and with what to do.
"""

from collections.abc import Callable
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
    broken = find_broken_rules(try_rounds(make(select), task, few))
    if broken := broken or check_newcomers(make, few):
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

    def bare(state: State) -> State:
        order = find_order(state)
        return state.replace(selection=order.inner) if order else state

    def begin(data: FederatedData) -> Order:
        none = jnp.zeros(data.num_clients, bool)
        return Order(select.init(data), jnp.zeros((), bool), none)

    def choose(key: jax.Array, memory: Order, state: State, data: FederatedData) -> jax.Array:
        ids = select.select(key, memory.inner, bare(state), data)
        return jnp.where(memory.turned, ids[::-1], ids)

    def update(memory: Order, state: State, cohort: Cohort, upload: Upload, seconds: Any) -> Order:
        inner = select.update(memory.inner, state, cohort, upload, seconds)
        return memory.replace(inner=inner, met=cohort.put(jnp.zeros_like(memory.met), True))

    def poll(key: jax.Array, state: State, data: FederatedData) -> Any:
        assert select.poll is not None
        return select.poll(key, bare(state), data)

    return Selection(begin, choose, update, select.draw, select.poll and poll)


def find_order(state: State) -> Order | None:
    """Returns what `in_any_order` remembers, None where the method has another selection."""
    return state.selection if isinstance(state.selection, Order) else None


def try_rounds(
    algorithm: Algorithm, task: Task, data: FederatedData, rounds: int = ROUNDS
) -> Trial:
    """Runs a few rounds as far as they can be run, and the second of them once more with its
    cohort in another order, and from a state that was saved and read.
    """
    traces = []

    def one_round(key: jax.Array, state: State, data: FederatedData) -> tuple[State, Info]:
        traces.append(None)
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
        for _ in range(1 if find_changes(trial) else rounds):
            state, info = step(key, trial.states[-1], data)
            trial.states.append(state)
            trial.infos.append(info)
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        trial.failures.append(f"{name} cannot be traced or run ({reason})")
    if len(trial.states) < 3:
        return trial
    before, turned = trial.states[1], None
    if order := find_order(before):
        other = before.replace(selection=order.replace(turned=~order.turned))
        turned = step(key, other, data)[0].replace(selection=())
    return trial._replace(turned=turned, resumed=step(key, jax.device_get(before), data)[0])


def find_broken_rules(trial: Trial) -> list[str]:
    """Returns a line for every rule that is broken, with what to do."""
    return [line for find, says in RULES for line in describe(find(trial), says)]


def describe(found: list[str], says: str) -> list[str]:
    """Returns the line about what is found, in the place of {}; none where nothing is."""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return [says.format(", ".join(found[:3]) + more)] if found else []


def name_leaves(tree: Any, name: str = "state") -> dict[str, Any]:
    """Returns the leaves of a tree by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{name}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


def compare_shapes(one: Any, other: Any, name: str = "state") -> list[str]:
    """Returns in words how the shapes and types of the leaves of `one` differ from `other`."""
    first, second = (
        {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in name_leaves(tree, name).items()}
        for tree in (one, other)
    )
    pairs = (
        (path, first.get(path, "nothing"), second.get(path, "nothing")) for path in first | second
    )
    return [f"{path}: {a} became {b}" for path, a, b in pairs if a != b]


def find_differences(trial: Trial, other: State | None, rtol: float, atol: float) -> list[str]:
    """Returns the names of leaves of `other` that differ from those after the second round, by more
    than a tolerance.
    """
    first = name_leaves(trial.states[2]) if other is not None else {}

    def plain(leaf: Any) -> np.ndarray:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [
        name
        for name, leaf in name_leaves(other).items()
        if not np.allclose(plain(first[name]), plain(leaf), rtol, atol, equal_nan=True)
    ]


def find_changes(trial: Trial) -> list[str]:
    """Returns in words the arrays of the state that a round leaves in another shape or type."""
    return compare_shapes(*trial.shapes) if len(trial.shapes) == 2 else []


def find_second_compile(trial: Trial) -> list[str]:
    """Returns why a round is compiled twice."""
    if len(trial.shapes) < 2 or find_changes(trial):
        return []
    before, after = map(name_leaves, trial.shapes)
    weak = [name for name in before if before[name].weak_type != after[name].weak_type]
    again = ["its arguments have other types"] if len(trial.traces) > 1 else []
    return [f"{name} comes from a Python number in one of them" for name in weak] or again


def in_each_state(find: Callable[[Trial, State], list[str]]) -> Callable[[Trial], list[str]]:
    """Returns what finds what breaks a rule in the first state where there is such a thing, and
    says in which.
    """

    def first(trial: Trial) -> list[str]:
        for number, state in enumerate(trial.states):
            if found := find(trial, state):
                return [f"after {number} rounds {found[0]}", *found[1:]]
        return []

    return first


@in_each_state
def find_other_groups(trial: Trial, state: State) -> list[str]:
    """Returns the clients that are in a group that does not exist."""
    last, group = state.active.size - 1, np.asarray(state.assignment)
    wrong = np.flatnonzero((group < -1) | (group > last))
    return [f"client {client} is in group {group[client]} of 0 to {last}" for client in wrong]


@in_each_state
def find_infinite(trial: Trial, state: State) -> list[str]:
    """Returns the arrays of models that are not finite."""
    leaves = name_leaves(state.groups, "state.groups").items()
    return [name for name, leaf in leaves if not np.isfinite(leaf).all()]


def find_lost_updates(trial: Trial) -> list[str]:
    """Returns in words which updates are not used, unless the models make them infinite."""
    if not trial.infos or find_infinite(trial):
        return []
    lost = sum(int(info.fault_counts.nonfinite) for info in trial.infos)
    found = [f"{lost} were not finite and are left out"] if lost else []
    return found + ["none is used"] * (not any(int(info.clients) for info in trial.infos))


def find_traffic(trial: Trial) -> list[str]:
    """Returns in words the first of each count of what is sent that is no whole number from 0."""
    found = []
    for name in ("units_down", "units_up", "words_down", "words_up"):
        counts = [count_to_int(getattr(state.traffic, name)) for state in trial.states]
        sent, what = enumerate(np.diff(np.array(counts, object))), name.replace("_", " ")
        wrong = [f"round {n} sends {one} {what}" for n, one in sent if not 0 <= one < MOST_SENT]
        found += wrong[:1]
    return found


def find_unfit_service(trial: Trial) -> list[str]:
    """Returns in words what does not fit in the models that clients are served."""
    if not trial.states:
        return []
    models, index, weights, _ = trial.algorithm.serve(trial.states[-1])
    one = jax.eval_shape(trial.task.init, jax.random.key(0))
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), models)
    if differ := compare_shapes(one, rows, "model"):
        return ["models are not stacked models of the task", *differ]
    clients, count = trial.data.num_clients, len(jax.tree.leaves(models)[0])
    index, found = np.asarray(index), []
    if index.shape != (clients,) or not np.issubdtype(index.dtype, np.integer):
        form = f"{index.dtype}{list(index.shape)}"
        found = [f"model_index is {form}, not a whole number for each of {clients} clients"]
    elif index.min() < -1 or index.max() >= count:
        found = [f"model_index has {index.min()} to {index.max()} of {count} models"]
    if weights is not None:
        far = np.abs(np.asarray(weights).sum(-1) - 1).max() > 1e-3
        if weights.shape != (clients, count) or np.min(weights) < 0 or far:
            found.append("weights are not shares")
    return found


def is_stray(state: State) -> Any:
    """Returns which clients [K] took part in the last round and have no group."""
    order = find_order(state)
    return (state.assignment < 0) & (order.met if order else False)


def find_members(trial: Trial, state: State, able: bool, who: Any) -> list[str]:
    """Returns the clients of `who` [K] bool while there are several groups, of those with training
    samples where they are `able`, else of the others.
    """
    several = trial.algorithm.clustered and int(state.active.sum()) > 1
    wrong = np.asarray(who & ((trial.data.train.size > 0) == able)) & several
    return [f"client {client}" for client in np.flatnonzero(wrong)]


def check_newcomers(make: Callable[[Selection], Algorithm], data: FederatedData) -> list[str]:
    """Returns a line where new clients are not taken in by a rule, with the state of a run of fewer
    clients, nor refused.

    Args: `make` returns the method with a selection; `data` are those of all clients.
    """
    key, known = jax.random.key(0), data.num_clients - 1
    try:
        check_rule(make, data, key, 1)
    except InputError:
        return []
    init, few = make(uniform(1)).init, take_clients(data, np.arange(known))
    fewer, whole = (jax.eval_shape(init, key, one) for one in (few, data))
    none = {"assignment": (), "selection": (), "rows": {}}
    found = compare_shapes(fewer.replace(**none), whole.replace(**none))
    rows = name_leaves(whole.rows, "state.rows").items()
    wrong = [(name, leaf.shape) for name, leaf in rows if leaf.shape[:1] != (known + 1,)]
    found += [f"{name}: {list(shape)} of {known + 1} clients" for name, shape in wrong]
    return describe(
        found,
        "newcomers: with one client more {}; keep what there is of each client in"
        " Method.client_rows, whose first axis is of length K",
    )


RULES: tuple[tuple[Callable[[Trial], list[str]], str], ...] = (
    (
        lambda trial: trial.failures,
        "traced: {}; use jnp.where or jax.lax.cond for what depends on arrays, not Python's if,"
        " int() or NumPy, and the shapes that the docstrings of `method.py` say",
    ),
    (
        find_changes,
        "shapes: a round changes the state's arrays ({}); return every array in the shape and"
        " type that it has at the start (.astype, a fixed number of rows)",
    ),
    (
        find_second_compile,
        "compiled once: the second round is compiled again ({}); give every array of the start"
        " its type, as jnp.zeros((), jnp.float32) for 0.0",
    ),
    (
        lambda trial: [str(one.round) for n, one in enumerate(trial.states) if one.round != n],
        "rounds: state.round is {}; add 1 in every round, by which draws differ",
    ),
    (
        find_other_groups,
        "groups: {}; let assign, regroup and what changes state.assignment name one of these, or"
        " -1",
    ),
    (
        find_infinite,
        "finite: {} is not; a group without updates has mass 0 and divides by nothing:"
        " jnp.maximum(mass, 1)",
    ),
    (
        find_lost_updates,
        "updates: {}; look at the solver's delta, at Upload.extra, and at Upload.weight, the"
        " client's training samples",
    ),
    (
        find_traffic,
        "traffic: {}; report finite whole numbers from 0 on (make_bill), 0 for what is not sent",
    ),
    (
        find_unfit_service,
        "served: {}; give ServedModels of models [M, ...], model_index [K] from 0 to M - 1, -1"
        " for a client without one, and weights [K, M] from 0 on, whose rows add up to 1, or none",
    ),
    (
        in_each_state(lambda trial, one: find_members(trial, one, False, one.assignment >= 0)),
        "no samples: {} is in one of several groups, without training samples; leave -1 in"
        " state.assignment where data.train.size is 0 (finish may not change that)",
    ),
    (
        in_each_state(lambda trial, one: find_members(trial, one, True, is_stray(one))),
        "selected: {} has no group, and took part; name one for every slot in assign",
    ),
    (
        lambda trial: find_differences(trial, trial.turned, rtol=1e-3, atol=1e-4),
        "order: the second round gives another {} when its cohort is named in another order; use"
        " cohort.ids and upload.weight, not a slot's number, and do not sort by slots",
    ),
    (
        lambda trial: find_differences(trial, trial.resumed, rtol=0, atol=0),
        "resume: from a state that was saved and read the second round gives another {}; keep"
        " what changes in state.memory, not in Python variables",
    ),
)
