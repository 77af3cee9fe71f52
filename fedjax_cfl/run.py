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
from fedjax_cfl.metrics import ClientMetrics
from fedjax_cfl.types import Algorithm, FederatedData, State, Task


class Result(NamedTuple):
    """What `run` returns."""

    state: State
    rows: list[dict[str, Any]]  # one per evaluation, plain Python values
    clients: ClientMetrics  # the last evaluation, [K]
    times: dict[str, float]  # seconds: compile_s, train_s, eval_s


def rounds_of(algorithm: Algorithm, block: int):
    """Returns f(key, state, data, count) -> (state, infos [block]): `count` <= block rounds; the rest of the infos stays zero."""

    def rounds(key, state, data, count):
        infos = jax.tree.map(lambda s: jnp.zeros((block, *s.shape), s.dtype), jax.eval_shape(algorithm.round, key, state, data)[1])

        def body(i, carry):
            state, infos = carry
            state, info = algorithm.round(key, state, data)
            return state, jax.tree.map(lambda whole, part: whole.at[i].set(part), infos, info)

        return lax.fori_loop(0, count, body, (state, infos))

    return rounds


def advance(algorithm: Algorithm, task: Task, mesh, eval_every: int, with_auxiliary: bool = True):
    """Returns f(key, state, data) -> (state, (infos [eval_every], metrics)): `eval_every` rounds and one evaluation."""
    rounds = rounds_of(algorithm, eval_every)

    def step(key, state, data):
        state, infos = rounds(key, state, data, eval_every)
        return state, (infos, evaluate.row(algorithm, task, mesh, state, data, with_auxiliary)[0])

    return step


def whole(algorithm: Algorithm, task: Task, mesh, rounds: int, eval_every: int = 1):
    """Returns f(key, data) -> (state, (infos [T, eval_every], metrics [T])), T = rounds / eval_every: a run as one function of a key."""
    step = advance(algorithm, task, mesh, eval_every)

    def go(key, data):
        return lax.scan(lambda state, _: step(key, state, data), algorithm.init(key, data), length=rounds // eval_every)

    return go


def run(
    algorithm: Algorithm,
    task: Task,
    data: FederatedData,
    key,
    *,
    rounds: int,
    eval_every: int = 1,
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
    data = jax.device_put(data, sharding.replicated(mesh))
    train, test, begin, compile_s = compiled(algorithm, task, mesh, data, key, min(eval_every, rounds), with_auxiliary)
    state = begin()
    watch = {"compile_s": compile_s, "train_s": 0.0, "eval_s": 0.0}
    rows, met, began, table = [], 0, time.perf_counter(), None
    for count in blocks(rounds, eval_every):
        started = time.perf_counter()
        state, infos = jax.block_until_ready(train(key, state, data, count))
        trained = time.perf_counter()
        found, table = jax.block_until_ready(test(state, data))
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
    return Result(state, rows, table, watch)


def blocks(rounds: int, eval_every: int) -> Iterator[int]:
    """Yields the number of rounds before each evaluation; the last may be fewer."""
    for start in range(0, rounds, eval_every):
        yield min(eval_every, rounds - start)


def compiled(algorithm, task, mesh, data, key, block, with_auxiliary):
    """Compiles init, rounds and evaluation; returns (train, test, begin, seconds)."""
    everywhere = sharding.replicated(mesh)
    started = time.perf_counter()
    init = jax.jit(algorithm.init, out_shardings=everywhere).lower(key, data).compile()
    state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere), jax.eval_shape(algorithm.init, key, data))
    train = jax.jit(rounds_of(algorithm, block), donate_argnums=1, out_shardings=everywhere).lower(key, state, data, 1).compile()

    def score(state, data):
        return evaluate.row(algorithm, task, mesh, state, data, with_auxiliary)

    test = jax.jit(score, out_shardings=everywhere).lower(state, data).compile()
    return train, test, lambda: init(key, data), time.perf_counter() - started


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
