"""The programs of a run: its start, its rounds and its evaluation. Here and, for many
runs at once, in `vectorize` they are compiled.
"""

import contextlib
import hashlib
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl import sharding
from fedjax_cfl.data import prefetch
from fedjax_cfl.data.datasets.download import cache_dir
from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.round.engine import DRIFT, derive_key
from fedjax_cfl.sharding import replicated_shapes, replicated_sharding
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.types import Algorithm, ClientIndex, FederatedData, State


class DataState(NamedTuple):
    """What of the data a drift edits, and the drift's own memory: carried from round to
    round, unlike the samples themselves.
    """

    owner: jax.Array
    y: jax.Array
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


def init_data_state(drift: Drift, key, data: FederatedData) -> DataState:
    """Returns the data's moving part before round 0, after the algorithm's own start
    has seen all of it.
    """
    data, memory = drift.init(derive_key(key, DRIFT), data)
    return data_state_of(data, memory)


def data_state_of(data: FederatedData, memory) -> DataState:
    """Takes the moving part out of the data."""
    return DataState(
        **{name: getattr(data, name) for name in DataState._fields if name != "memory"},
        memory=memory,
    )


def run_round(
    algorithm: Algorithm,
    drift: Drift,
    key,
    state: State,
    data_state: DataState,
    data: FederatedData,
):
    """One shift and one round; returns (state, data_state, info)."""
    met = state.assignment >= 0 if algorithm.clustered else jnp.ones_like(state.assignment, bool)
    now, memory, shifted = drift.apply(
        derive_key(key, DRIFT), state.round, data_state.apply_to(data), data_state.memory, met
    )
    now = now.replace(shifted=shifted, has_drift=drift.moves)
    state, info = algorithm.round(key, state, now)
    return state, data_state_of(now, memory), info


def make_rounds_fn(algorithm: Algorithm, drift: Drift, block: int):
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
    algorithm: Algorithm, drift: Drift, mesh, data: FederatedData, key
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


def make_init(algorithm: Algorithm, drift: Drift, streamed: bool):
    """Returns f(key, data) -> (state, moving data) before round 0; nothing moves in a
    population on the host.
    """
    return lambda key, data: (
        algorithm.init(key, data),
        () if streamed else init_data_state(drift, key, data),
    )


@contextlib.contextmanager
def parallel_compiler() -> Iterator[Callable[..., Future]]:
    """Yields f(lowered) -> the future program: programs compile side by side and while
    the next is traced, for XLA uses few cores on one.

    Several hosts compile one after another, all in the same order.
    """
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else None) as pool:
        yield lambda lowered: pool.submit(lowered.compile)


def compile_run(algorithm, drift, task, mesh, feed, key, with_auxiliary: bool, fresh: bool):
    """Returns the state's shapes and the compiled programs of a run: the start if it is
    `fresh`, the rounds, the evaluation.
    """
    everywhere = replicated_sharding(mesh)
    rounds = make_rounds_fn(algorithm, drift, feed.length)

    def block(key, state, data_state, data, count):
        if data_state:
            return rounds(key, state, data_state, data, count)
        state, _, infos = rounds(
            key, state, data_state_of(data, ()), data, count
        )  # a block of a population on the host
        return state, (), infos

    def part(found, state, data_state, data, first):
        data = data_state.apply_to(data) if data_state else data
        more = evaluate.evaluate_block(algorithm, task, mesh, state, data, with_auxiliary, first)
        found = more if found is None else evaluate.merge(found, more, first)
        return found, algorithm.serve(state).index

    nothing, client = None, None
    if feed.streamed:
        nothing, client = (
            sharding.replicate(evaluate.empty(feed.data.num_clients, feed.data.num_classes), mesh),
            0,
        )
    with parallel_compiler() as compiled:
        begin = jax.jit(make_init(algorithm, drift, feed.streamed), out_shardings=everywhere).lower(
            key, feed.shapes("train")
        )
        state, data_state = replicated_shapes(begin.out_info, mesh)
        begin = compiled(begin) if fresh else None
        train = jax.jit(block, donate_argnums=(1, 2), out_shardings=everywhere)
        train = compiled(train.lower(key, state, data_state, feed.shapes("train"), 1))
        score = compiled(
            jax.jit(part, out_shardings=everywhere).lower(
                nothing, state, data_state, feed.shapes("test"), client
            )
        )
        num_models = evaluate.count_models(jax.eval_shape(algorithm.serve, state).models)
        return (
            state,
            begin and begin.result(),
            train.result(),
            CompiledEvaluation(nothing, score.result(), num_models),
        )


class CompiledEvaluation(NamedTuple):
    """The compiled evaluation, over all the parts of the test data."""

    empty: Any  # where it begins; None: there is one part
    # (found, state, data_state, data, first client) -> (found, see evaluate.joined; index of
    # the served models [K])
    evaluate_block: Callable
    num_models: int

    def __call__(self, state, data_state, parts):
        """Returns (metrics, per-client table)."""
        found = self.empty
        for (
            data,
            first,
        ) in parts:  # one after another: waiting to be tested, all of them would be in memory
            found, index = jax.block_until_ready(
                self.evaluate_block(found, state, data_state, data, first)
            )
        index, (table, counts) = jax.device_get((index, found))
        concept = jax.device_get(data_state.concept) if data_state else np.full_like(index, -1)
        return evaluate.finalize(index, self.num_models, table, counts, concept), found[0]


def use_compile_cache() -> None:
    """Keeps compiled programs in the user's cache, readable by nobody else; a folder
    per kind of processor.
    """
    try:
        flags = next(
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        flags = platform.processor()
    kind = hashlib.sha256(flags.encode()).hexdigest()[:12]
    folder = cache_dir() / "compiled" / f"{platform.machine()}-{kind}"
    with contextlib.suppress(OSError):  # without a home, programs are compiled every time
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        jax.config.update("jax_compilation_cache_dir", str(folder))
