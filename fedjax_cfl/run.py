"""A whole run: rounds and evaluations. Here and, for many runs at once, in `vectorize` is where rounds are compiled.

`advance` is the program, `whole` runs it to the end as one function of a key (so `jit(vmap(whole))` runs many seeds), and `run` calls the
same two halves from Python, so that numbers appear while the run goes on.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl import evaluate, memory, population, sharding, traffic
from fedjax_cfl.drift import Drift, enlarged
from fedjax_cfl.drift import none as no_drift
from fedjax_cfl.engine import DRIFT, stream
from fedjax_cfl.errors import InputError, NonFiniteUpdate
from fedjax_cfl.metrics import ClientMetrics
from fedjax_cfl.types import Algorithm, FederatedData, State, Task, View


class Shifting(NamedTuple):
    """What of the data a drift edits, and the drift's own memory: carried from round to round, unlike the samples themselves."""

    owner: jax.Array
    y: jax.Array
    train: View
    test: View
    concept: jax.Array
    shifted: jax.Array
    memory: Any

    def on(self, data: FederatedData) -> FederatedData:
        """Returns the data as edited so far."""
        return data.replace(**{name: value for name, value in self._asdict().items() if name != "memory"})


def beginning(drift: Drift, key, data: FederatedData) -> Shifting:
    """Returns the data's moving part before round 0, after the algorithm's own start has seen all of it."""
    data, memory = drift.init(stream(key, DRIFT), data)
    return moving(data, memory)


def moving(data: FederatedData, memory) -> Shifting:
    """Takes the moving part out of the data."""
    return Shifting(**{name: getattr(data, name) for name in Shifting._fields if name != "memory"}, memory=memory)


def one_round(algorithm: Algorithm, drift: Drift, key, state: State, shifting: Shifting, data: FederatedData):
    """One shift and one round; returns (state, shifting, info)."""
    met = state.assignment >= 0 if algorithm.clustered else jnp.ones_like(state.assignment, bool)
    now, memory, shifted = drift.apply(stream(key, DRIFT), state.round, shifting.on(data), shifting.memory, met)
    now = now.replace(shifted=shifted, drifts=drift.moves)
    state, info = algorithm.round(key, state, now)
    return state, moving(now, memory), info


def rounds_of(algorithm: Algorithm, drift: Drift, block: int):
    """Returns f(key, state, shifting, data, count) -> (state, shifting, infos [block]): `count` <= block rounds, the other infos 0."""

    def rounds(key, state, shifting, data, count):
        def step(state, shifting):
            return one_round(algorithm, drift, key, state, shifting, data)

        infos = jax.tree.map(lambda s: jnp.zeros((block, *s.shape), s.dtype), jax.eval_shape(step, state, shifting)[2])

        def body(i, carry):
            state, shifting, infos = carry
            state, shifting, info = step(state, shifting)
            return state, shifting, jax.tree.map(lambda whole, part: whole.at[i].set(part), infos, info)

        return lax.fori_loop(0, count, body, (state, shifting, infos))

    return rounds


def advance(algorithm: Algorithm, task: Task, mesh, eval_every: int, drift: Drift | None = None, with_auxiliary: bool = True):
    """Returns f(key, (state, shifting), data) -> ((state, shifting), (infos [eval_every], metrics)): some rounds and one evaluation."""
    rounds = rounds_of(algorithm, drift or no_drift(), eval_every)

    def step(key, carry, data):
        state, shifting, infos = rounds(key, *carry, data, eval_every)
        found, _ = evaluate.row(algorithm, task, mesh, state, shifting.on(data), with_auxiliary)
        return (state, shifting), (infos, found)

    return step


def whole(algorithm: Algorithm, task: Task, mesh, rounds: int, eval_every: int = 1, drift: Drift | None = None):
    """Returns f(key, data) -> (state, (infos [T, eval_every], metrics [T])), T = rounds / eval_every: a run as one function of a key."""
    step = advance(algorithm, task, mesh, eval_every, drift)

    def go(key, data):
        carry = algorithm.init(key, data), beginning(drift or no_drift(), key, data)
        (state, _), found = lax.scan(lambda carry, _: step(key, carry, data), carry, length=rounds // eval_every)
        return state, found

    return go


class Snapshot(NamedTuple):
    """Where a run stands after an evaluation: what a checkpoint keeps. The arrays are only valid until the run goes on."""

    state: State
    shifting: Shifting
    facts: dict[str, Any]  # counters and seconds so far, see COUNTERS


class Result(NamedTuple):
    """What `run` returns."""

    state: State
    data: FederatedData  # as the drift left it
    rows: list[dict[str, Any]]  # one per evaluation, plain Python values
    clients: ClientMetrics  # the last evaluation, [K]
    times: dict[str, float]  # seconds: compile_s, train_s, eval_s
    memory: dict[str, int]  # bytes that each device was planned to hold, see `memory.plan`


COUNTERS = {"client_updates": 0, "local_steps": 0, "wall_s": 0.0, "compile_s": 0.0, "train_s": 0.0, "eval_s": 0.0}
TIMES = ("compile_s", "train_s", "eval_s")


def run(
    algorithm: Algorithm,
    task: Task,
    data: FederatedData,
    key,
    *,
    rounds: int,
    eval_every: int = 1,
    drift: Drift | None = None,
    discard: str = "rounds",
    with_auxiliary: bool = True,
    mesh=None,
    start: Snapshot | None = None,
    on_start: Callable[[Snapshot], None] = lambda snapshot: None,
    on_row: Callable[[dict[str, Any], Snapshot], bool | None] = lambda row, snapshot: None,
) -> Result:
    """Runs up to round `rounds`, from `start` or from the beginning, with an evaluation after every `eval_every` rounds and the last.

    `on_start` gets where the run stands before its first round, `on_row` each evaluation's row as soon as it is known, and where the run
    stands then; the run ends early if it returns true. `discard` (D17) hides a clustered method's accuracy while its first rounds do not
    cover everybody: `rounds` in round t = 0, 1, ... while t < K / cohort (the FlexCFL code), `met` while clients have not been met,
    `none` never. Raises InputError for data without test samples and for a run that does not fit into memory, NonFiniteUpdate where the
    faults ask for it.
    """
    if not data.test.order.size:
        raise InputError("data: nobody holds a test sample, so that nothing can be scored")
    mesh, drift = mesh or sharding.mesh_of(), drift or no_drift()
    key, data = sharding.everywhere(key, mesh), enlarged(data, drift)
    if population.on_host(data):
        if drift.moves:
            raise InputError("resident=host: a drift edits who holds which sample of all; use drift=none, or resident=device")
        feed = population.Blocks(data, algorithm, key, rounds, eval_every, mesh)
    else:
        feed = population.Resident(sharding.everywhere(data, mesh), rounds, eval_every)
    began = time.perf_counter()
    shapes, begin, train, test = programs(algorithm, drift, task, mesh, feed, key, with_auxiliary)
    begin = begin.compile() if start is None else None
    compile_s = time.perf_counter() - began
    planned = memory.plan(shapes, feed.at_once(), [program for program in (begin, train, test.first) if program])
    memory.check(planned, mesh)
    state, shifting, facts = start or (*begin(key, feed.beginning()), dict(COUNTERS))
    facts = facts | {"compile_s": facts["compile_s"] + compile_s}
    on_start(Snapshot(state, shifting, facts))
    done, rows, table, blocks, started = int(state.round), [], None, [], time.perf_counter()
    for count, block in feed.training(done):
        state, shifting, infos = jax.block_until_ready(train(key, state, shifting, block, count))
        blocks.append(jax.tree.map(lambda values, count=count: values[:count], jax.device_get(infos)))
        done += count
        if done % eval_every and done < rounds:
            continue
        trained = time.perf_counter()
        found, table = jax.block_until_ready(test(state, shifting, feed.testing()))
        infos, blocks = jax.tree.map(lambda *parts: np.concatenate(parts), *blocks), []
        ended = time.perf_counter()
        complain(algorithm, state, infos)  # first: neither row nor checkpoint may lead past it
        row = plain_row(state, infos, found, facts)
        if algorithm.clustered and hidden(discard, row, int(infos.selected[0]), data.num_clients):
            row["accuracy"] = None
        facts = counted(facts, row, trained - started, ended - trained)
        rows.append(row)
        if on_row(row, Snapshot(state, shifting, facts)):
            break
        started = time.perf_counter()
    if table is None:  # a finished run was taken up again
        _, table = test(state, shifting, feed.testing())
    return Result(state, shifting.on(data) if shifting else data, rows, table, {name: facts[name] for name in TIMES}, planned)


def counted(facts: dict[str, Any], row: dict[str, Any], train_s: float, eval_s: float) -> dict[str, Any]:
    """Returns the counters and seconds after a block of rounds, and gives its row the seconds so far."""
    spent = {"wall_s": train_s + eval_s, "train_s": train_s, "eval_s": eval_s}
    facts = facts | {name: facts[name] + value for name, value in spent.items()}
    row["wall_s"] = facts["wall_s"]
    return facts | {name: row[name] for name in ("client_updates", "local_steps")}


def hidden(discard: str, row: dict[str, Any], selected: int, num_clients: int) -> bool:
    """Returns whether the accuracy of a clustered method's row does not count yet."""
    if discard == "rounds":
        return (row["round"] - 1) * selected < num_clients
    return discard == "met" and row["evaluated_clients"] < num_clients


def complain(algorithm: Algorithm, state: State, infos) -> None:
    """Raises NonFiniteUpdate for the first update of the rounds just done that was not finite, if that is the policy."""
    if algorithm.nonfinite != "raise":
        return
    culprits = np.asarray(infos.lost.culprit)
    for place in np.flatnonzero(culprits[:, 0] >= 0):
        client, leaf = culprits[place]
        layer = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(state.groups)[leaf][0], simple=True, separator="/")
        raise NonFiniteUpdate(f"round {int(state.round) - len(culprits) + place + 1}: client {client} sent a non-finite update of {layer}")


def standing(algorithm: Algorithm, drift: Drift, mesh, data: FederatedData, key) -> tuple[State, Shifting]:
    """Returns shapes, types and shardings of a run's state and moving data: what a checkpoint is restored into."""
    streamed = population.on_host(data)
    data = population.template(data, "train", 1, mesh) if streamed else enlarged(data, drift)
    shapes = jax.eval_shape(starting(algorithm, drift, streamed), key, data)
    everywhere = sharding.replicated(mesh)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere), shapes)


def starting(algorithm: Algorithm, drift: Drift, streamed: bool):
    """Returns f(key, data) -> (state, moving data) before round 0; nothing moves in a population on the host."""
    return lambda key, data: (algorithm.init(key, data), () if streamed else beginning(drift, key, data))


def programs(algorithm, drift, task, mesh, feed, key, with_auxiliary):
    """Returns the state's shapes and the programs of a run: the start, lowered; the rounds, compiled; the evaluation, see `Scoring`."""
    everywhere = sharding.replicated(mesh)
    rounds = rounds_of(algorithm, drift, feed.length)

    def block(key, state, shifting, data, count):
        if shifting:
            return rounds(key, state, shifting, data, count)
        state, _, infos = rounds(key, state, moving(data, ()), data, count)  # a block of a population on the host
        return state, (), infos

    begin = jax.jit(starting(algorithm, drift, feed.streamed), out_shardings=everywhere).lower(key, feed.shapes("train"))
    state, shifting = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere), begin.out_info)
    train = jax.jit(block, donate_argnums=(1, 2), out_shardings=everywhere)
    train = train.lower(key, state, shifting, feed.shapes("train"), 1).compile()
    return state, begin, train, Scoring(algorithm, task, mesh, with_auxiliary, state, shifting, feed.shapes("test"))


class Scoring:
    """The compiled evaluation, over all the parts of the test data."""

    def __init__(self, algorithm, task, mesh, with_auxiliary: bool, state, shifting, data):
        def part(state, shifting, data):
            data = shifting.on(data) if shifting else data
            return evaluate.part(algorithm, task, mesh, state, data, with_auxiliary), data.concept

        everywhere = sharding.replicated(mesh)
        self.first = jax.jit(part, out_shardings=everywhere).lower(state, shifting, data).compile()
        self.join = jax.jit(evaluate.joined, out_shardings=everywhere)
        (table, right), concept = self.first.out_info
        whole = jax.jit(lambda *given: evaluate.whole(algorithm, *given), out_shardings=everywhere)
        self.last = whole.lower(state, table, right, concept).compile()

    def __call__(self, state, shifting, parts):
        """Returns (metrics, per-client table)."""
        found = None
        for data in parts:
            one, concept = self.first(state, shifting, data)
            found = one if found is None else self.join(found, one)
        return self.last(state, *found, concept), found[0]


def plain_row(state: State, infos, found, before: dict[str, Any]) -> dict[str, Any]:
    """Returns one row of metrics.jsonl in plain Python: the last round's losses, the block's mean discrepancy, everything sent so far."""
    state_round, sent, infos, found = jax.device_get((state.round, state.traffic, infos, found))
    model_bytes = sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.groups))
    down, up = traffic.in_bytes(sent, model_bytes)
    row = {name: value.tolist() for name, value in found.items()}
    return {
        "round": int(state_round),
        **row,
        "train_loss": float(infos.loss[-1]),
        "train_loss_last": float(infos.last_loss[-1]),
        "discrepancy": float(infos.discrepancy.mean()),
        "group_discrepancy": infos.group_discrepancy[-1].tolist(),
        "dissimilarity": float(infos.dissimilarity.mean()),
        "cold_clients": int(infos.cold.sum()),
        "shifted_clients": int(infos.shifted.sum()),
        "migrated_clients": int(infos.migrated.sum()),
        "dropped_clients": int(infos.lost.dropped.sum()),
        "nonfinite_clients": int(infos.lost.nonfinite.sum()),
        "hostile_clients": int(infos.lost.hostile.sum()),
        "idle_groups": int(infos.idle_groups.sum()),
        "units_down": int(sent.units_down),
        "units_up": int(sent.units_up),
        "bytes_down": down,
        "bytes_up": up,
        "client_updates": before["client_updates"] + int(infos.clients.sum()),
        "local_steps": before["local_steps"] + int(np.sum(infos.steps, dtype=np.int64)),
    }
