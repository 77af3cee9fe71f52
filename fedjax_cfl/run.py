"""A whole run: rounds and evaluations. The only file that calls `jit`.

`advance` is the program, `whole` runs it to the end as one function of a key (so `jit(vmap(whole))` runs many seeds), and `run` calls the
same two halves from Python, so that numbers appear while the run goes on.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl import evaluate, sharding, traffic
from fedjax_cfl.drift import Drift, enlarged
from fedjax_cfl.drift import none as no_drift
from fedjax_cfl.engine import DRIFT, stream
from fedjax_cfl.metrics import ClientMetrics
from fedjax_cfl.types import Algorithm, FederatedData, State, Task, View


class Result(NamedTuple):
    """What `run` returns."""

    state: State
    data: FederatedData  # as the drift left it
    rows: list[dict[str, Any]]  # one per evaluation, plain Python values
    clients: ClientMetrics  # the last evaluation, [K]
    times: dict[str, float]  # seconds: compile_s, train_s, eval_s


class Shifting(NamedTuple):
    """What of the data a drift edits, and the drift's own memory: carried from round to round, unlike the samples themselves."""

    owner: jax.Array
    y: jax.Array
    train: View
    test: View
    shifted: jax.Array
    memory: Any

    def on(self, data: FederatedData) -> FederatedData:
        """Returns the data as edited so far."""
        return data.replace(owner=self.owner, y=self.y, train=self.train, test=self.test, shifted=self.shifted)


def beginning(drift: Drift, key, data: FederatedData) -> Shifting:
    """Returns the data's moving part before round 0, after the algorithm's own start has seen all of it."""
    data, memory = drift.init(stream(key, DRIFT), data)
    return Shifting(data.owner, data.y, data.train, data.test, data.shifted, memory)


def one_round(algorithm: Algorithm, drift: Drift, key, state: State, shifting: Shifting, data: FederatedData):
    """One shift and one round; returns (state, shifting, info)."""
    met = state.assignment >= 0 if algorithm.clustered else jnp.ones_like(state.assignment, bool)
    now, memory, shifted = drift.apply(stream(key, DRIFT), state.round, shifting.on(data), shifting.memory, met)
    state, info = algorithm.round(key, state, now.replace(shifted=shifted))
    return state, Shifting(now.owner, now.y, now.train, now.test, shifted, memory), info


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
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Result:
    """Runs `rounds` rounds with an evaluation after every `eval_every` of them and after the last.

    `on_row` gets each evaluation's row as soon as it is known. `discard` (D17) hides a clustered method's accuracy while its first rounds
    do not cover everybody: `rounds` while a round began with clients not met (the FlexCFL code), `met` while there are such clients,
    `none` never.
    """
    mesh = mesh or sharding.mesh_of()
    drift = drift or no_drift()
    data = jax.device_put(enlarged(data, drift), sharding.replicated(mesh))
    train, test, begin, compile_s = compiled(algorithm, drift, task, mesh, data, key, min(eval_every, rounds), with_auxiliary)
    state, shifting = begin(key, data)
    watch = {"compile_s": compile_s, "train_s": 0.0, "eval_s": 0.0}
    rows, met, began, table = [], 0, time.perf_counter(), None
    for count in blocks(rounds, eval_every):
        started = time.perf_counter()
        state, shifting, infos = jax.block_until_ready(train(key, state, shifting, data, count))
        trained = time.perf_counter()
        found, table = jax.block_until_ready(test(state, shifting, data))
        watch["train_s"] += trained - started
        watch["eval_s"] += time.perf_counter() - trained
        row = plain_row(state, infos, found, count, rows[-1] if rows else None)
        everybody = data.num_clients
        covered = row["evaluated_clients"] if discard == "met" else met
        if algorithm.clustered and discard != "none" and covered < everybody:
            row["accuracy"] = None
        met = row["evaluated_clients"]
        row["wall_s"] = time.perf_counter() - began
        rows.append(row)
        on_row(row)
    return Result(state, shifting.on(data), rows, table, watch)


def blocks(rounds: int, eval_every: int) -> Iterator[int]:
    """Yields the number of rounds before each evaluation; the last may be fewer."""
    for start in range(0, rounds, eval_every):
        yield min(eval_every, rounds - start)


def compiled(algorithm, drift, task, mesh, data, key, block, with_auxiliary):
    """Compiles the start, the rounds and the evaluation; returns (train, test, begin, seconds)."""
    everywhere = sharding.replicated(mesh)
    started = time.perf_counter()

    def start(key, data):
        return algorithm.init(key, data), beginning(drift, key, data)

    def score(state, shifting, data):
        return evaluate.row(algorithm, task, mesh, state, shifting.on(data), with_auxiliary)

    begin = jax.jit(start, out_shardings=everywhere).lower(key, data).compile()
    shapes = jax.eval_shape(start, key, data)
    state, shifting = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere), shapes)
    rounds = jax.jit(rounds_of(algorithm, drift, block), donate_argnums=(1, 2), out_shardings=everywhere)
    train = rounds.lower(key, state, shifting, data, 1).compile()
    test = jax.jit(score, out_shardings=everywhere).lower(state, shifting, data).compile()
    return train, test, begin, time.perf_counter() - started


def plain_row(state: State, infos, found, count: int, before: dict[str, Any] | None) -> dict[str, Any]:
    """Returns one row of metrics.jsonl in plain Python: the last round's losses, the block's mean discrepancy, everything sent so far."""
    state_round, sent, infos, found = jax.device_get((state.round, state.traffic, infos, found))
    infos = jax.tree.map(lambda values: values[:count], infos)
    model_bytes = sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.groups))
    down, up = traffic.in_bytes(sent, model_bytes)
    before = before or {"client_updates": 0, "local_steps": 0}
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


def peak_memory_bytes() -> int:
    """Returns the most memory used so far: the accelerator's if there is one, else the process's."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "peak_bytes_in_use" in stats:
        return sum(device.memory_stats()["peak_bytes_in_use"] for device in jax.local_devices())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
