"""A whole run: rounds and evaluations.

`make_block_fn` is the program, `whole` runs it to the end as one function of a key (so
`jit(vmap(whole))` runs many seeds), and `run` calls the same two halves from Python, so
that numbers appear while the run goes on.
"""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import lax

from fedjax_cfl.data import prefetch
from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.data.drift import none as no_drift
from fedjax_cfl.errors import InputError, NonFiniteUpdate
from fedjax_cfl.round import traffic
from fedjax_cfl.round.counts import count_to_int
from fedjax_cfl.sharding import make_mesh, replicate
from fedjax_cfl.simulation import evaluate, memory
from fedjax_cfl.simulation.compilation import (
    DataState,
    compile_run,
    init_data_state,
    make_rounds_fn,
)
from fedjax_cfl.simulation.metrics import ClientMetrics
from fedjax_cfl.types import Algorithm, FederatedData, State, Task
from fedjax_cfl.validation import PositiveInt, check_arguments


def make_block_fn(
    algorithm: Algorithm,
    task: Task,
    mesh,
    eval_every: int,
    drift: Drift | None = None,
    with_auxiliary: bool = True,
):
    """Returns f(key, (state, data_state), data) -> ((state, data_state), (infos
    [eval_every], metrics)): some rounds and one evaluation.
    """
    rounds = make_rounds_fn(algorithm, drift or no_drift(), eval_every)

    def step(key, carry, data):
        state, data_state, infos = rounds(key, *carry, data, eval_every)
        found, _ = evaluate.evaluate_all(
            algorithm, task, mesh, state, data_state.apply_to(data), with_auxiliary
        )
        return (state, data_state), (infos, found)

    return step


def make_run_fn(
    algorithm: Algorithm,
    task: Task,
    mesh,
    rounds: int,
    eval_every: int = 1,
    drift: Drift | None = None,
):
    """Returns f(key, data) -> (state, (infos [T, eval_every], metrics [T])), T = rounds
    / eval_every: a run as one function of a key.
    """
    step = make_block_fn(algorithm, task, mesh, eval_every, drift)

    def go(key, data):
        carry = algorithm.init(key, data), init_data_state(drift or no_drift(), key, data)
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


class Result(NamedTuple):
    """What `run` returns."""

    state: State
    data: FederatedData  # as the drift left it
    rows: list[dict[str, Any]]  # one per evaluation, plain Python values
    clients: ClientMetrics  # the last evaluation, [K]
    times: dict[str, float]  # seconds: compile_s, train_s, eval_s
    memory: dict[str, int]  # bytes that each device was planned to hold, see `memory.plan`


COUNTERS = {
    "client_updates": 0,
    "local_steps": 0,
    "wall_s": 0.0,
    "compile_s": 0.0,
    "train_s": 0.0,
    "eval_s": 0.0,
}
TIMES = ("compile_s", "train_s", "eval_s")


Discard = Literal["rounds", "met", "none"]  # see `run`


def check_plan(rounds: PositiveInt, eval_every: PositiveInt, discard: Discard) -> None:
    """Raises InputError for a number of rounds, or a way to test them, that there cannot be."""
    check_arguments(check_plan, locals())


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
    """Runs up to round `rounds`, from `start` or from the beginning, with an evaluation
    after every `eval_every` rounds and the last.

    `on_start` gets where the run stands before its first round, `on_row` each
    evaluation's row as soon as it is known, and where the run stands then; the run ends
    early if it returns true. `discard` (D17) hides a clustered method's accuracy while
    its first rounds do not cover everybody: `rounds` in round t = 0, 1, ... while t < K
    / cohort (the FlexCFL code), `met` while clients have not been met, `none` never.
    Raises InputError for data without test samples and for a run that does not fit into
    memory, NonFiniteUpdate where the faults ask for it.
    """
    if not data.test.order.size:
        raise InputError("data: nobody holds a test sample, so that nothing can be scored")
    mesh, drift = mesh or make_mesh(), drift or no_drift()
    check_plan(rounds, eval_every, discard)
    prefetch.check_host_data(data, algorithm, drift)
    key, data = replicate(key, mesh), bound_client_samples(data, drift)
    if prefetch.is_on_host(data):
        feed = prefetch.HostFeed(data, algorithm, key, rounds, eval_every, mesh)
    else:
        feed = prefetch.DeviceFeed(replicate(data, mesh), rounds, eval_every)
    began = time.perf_counter()
    shapes, begin, train, test = compile_run(
        algorithm, drift, task, mesh, feed, key, with_auxiliary, fresh=start is None
    )
    compile_s = time.perf_counter() - began
    planned = memory.plan_memory(
        shapes,
        feed.peak_shapes(),
        [program for program in (begin, train, test.evaluate_block) if program],
    )
    memory.check_memory(planned, mesh)
    state, data_state, counters = start or (*begin(key, feed.initial_data()), dict(COUNTERS))
    counters = counters | {"compile_s": counters["compile_s"] + compile_s}
    on_start(Snapshot(state, data_state, counters))
    done, rows, table, blocks, started = int(state.round), [], None, [], time.perf_counter()
    for count, block in feed.train_blocks(done):
        state, data_state, infos = jax.block_until_ready(
            train(key, state, data_state, block, count)
        )
        blocks.append(
            jax.tree.map(lambda values, count=count: values[:count], jax.device_get(infos))
        )
        done += count
        if done % eval_every and done < rounds:
            continue
        trained = time.perf_counter()
        found, table = jax.block_until_ready(test(state, data_state, feed.test_blocks()))
        infos, blocks = jax.tree.map(lambda *parts: np.concatenate(parts), *blocks), []
        ended = time.perf_counter()
        raise_if_nonfinite(
            algorithm, state, infos
        )  # first: neither row nor checkpoint may lead past it
        row = metrics_row(state, infos, found, counters)
        if algorithm.clustered and discards_accuracy(
            discard, row, int(infos.selected[0]), data.num_clients
        ):
            row["accuracy"] = None
        counters = update_counters(counters, row, trained - started, ended - trained)
        rows.append(row)
        if on_row(row, Snapshot(state, data_state, counters)):
            break
        started = time.perf_counter()
    if table is None:  # a finished run was taken up again
        _, table = test(state, data_state, feed.test_blocks())
    return Result(
        state,
        data_state.apply_to(data) if data_state else data,
        rows,
        table,
        {name: counters[name] for name in TIMES},
        planned,
    )


def update_counters(
    counters: dict[str, Any], row: dict[str, Any], train_s: float, eval_s: float
) -> dict[str, Any]:
    """Returns the counters and seconds after a block of rounds, and gives its row the
    seconds so far.
    """
    spent = {"wall_s": train_s + eval_s, "train_s": train_s, "eval_s": eval_s}
    counters = counters | {name: counters[name] + value for name, value in spent.items()}
    row["wall_s"] = counters["wall_s"]
    return counters | {name: row[name] for name in ("client_updates", "local_steps")}


def discards_accuracy(discard: str, row: dict[str, Any], selected: int, num_clients: int) -> bool:
    """Returns whether the accuracy of a clustered method's row does not count yet."""
    if discard == "rounds":
        return (row["round"] - 1) * selected < num_clients
    return discard == "met" and row["evaluated_clients"] < num_clients


def raise_if_nonfinite(algorithm: Algorithm, state: State, infos) -> None:
    """Raises NonFiniteUpdate for the first update of the rounds just done that was not
    finite, if that is the policy.
    """
    if algorithm.nonfinite != "raise":
        return
    culprits = np.asarray(infos.fault_counts.first_nonfinite)
    for place in np.flatnonzero(culprits[:, 0] >= 0):
        client, leaf = culprits[place]
        layer = jax.tree_util.keystr(
            jax.tree_util.tree_leaves_with_path(state.groups)[leaf][0], simple=True, separator="/"
        )
        raise NonFiniteUpdate(
            f"round {int(state.round) - len(culprits) + place + 1}: client {client} sent a"
            f" non-finite update of {layer}"
        )


def metrics_row(state: State, infos, found, before: dict[str, Any]) -> dict[str, Any]:
    """Returns one row of metrics.jsonl in plain Python: the last round's losses, the
    block's mean discrepancy, everything sent so far.
    """
    state_round, sent, clock_ms, infos, found = jax.device_get(
        (state.round, state.traffic, state.clock_ms, infos, found)
    )
    model_bytes = sum(
        leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.groups)
    )
    down, up = traffic.count_bytes(sent, model_bytes)
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
        "dropped_clients": int(infos.fault_counts.dropped.sum()),
        "nonfinite_clients": int(infos.fault_counts.nonfinite.sum()),
        "hostile_clients": int(infos.fault_counts.byzantine.sum()),
        "idle_groups": int(infos.idle_groups.sum()),
        "late_clients": int(infos.late.sum()),
        "units_down": count_to_int(sent.units_down),
        "units_up": count_to_int(sent.units_up),
        "bytes_down": down,
        "bytes_up": up,
        "client_updates": before["client_updates"] + int(infos.clients.sum()),
        "local_steps": before["local_steps"] + sum(map(count_to_int, infos.steps)),
        "sim_time_s": count_to_int(clock_ms) / 1000,
    }
