"""The programs of a run: its start, its rounds and its evaluation. Here and, for many runs at once, in `vectorize` they are compiled."""

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
from fedjax_cfl.data.datasets.download import cache
from fedjax_cfl.data.drift import Drift, enlarged
from fedjax_cfl.round.engine import DRIFT, stream
from fedjax_cfl.sharding import replicated, shapes
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.types import Algorithm, FederatedData, State, View


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
        @jax.jit  # traced once for its shapes and for the loop
        def step(state, shifting):
            return one_round(algorithm, drift, key, state, shifting, data)

        if block == 1:  # no loop: compiles faster
            state, shifting, info = step(state, shifting)
            return state, shifting, jax.tree.map(lambda part: part[None], info)
        infos = jax.tree.map(lambda s: jnp.zeros((block, *s.shape), s.dtype), jax.eval_shape(step, state, shifting)[2])

        def body(i, carry):
            state, shifting, infos = carry
            state, shifting, info = step(state, shifting)
            return state, shifting, jax.tree.map(lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, i, 0), infos, info)

        return lax.fori_loop(0, count, body, (state, shifting, infos))

    return rounds


def standing(algorithm: Algorithm, drift: Drift, mesh, data: FederatedData, key) -> tuple[State, Shifting]:
    """Returns shapes, types and shardings of a run's state and moving data: what a checkpoint is restored into."""
    streamed = prefetch.on_host(data)
    data = prefetch.template(data, "train", 1, data.num_clients, mesh) if streamed else enlarged(data, drift)
    return shapes(jax.eval_shape(starting(algorithm, drift, streamed), key, data), mesh)


def starting(algorithm: Algorithm, drift: Drift, streamed: bool):
    """Returns f(key, data) -> (state, moving data) before round 0; nothing moves in a population on the host."""
    return lambda key, data: (algorithm.init(key, data), () if streamed else beginning(drift, key, data))


@contextlib.contextmanager
def compiler() -> Iterator[Callable[..., Future]]:
    """Yields f(lowered) -> the future program: programs compile side by side and while the next is traced, for XLA uses few cores on one.

    Several hosts compile one after another, all in the same order.
    """
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else None) as pool:
        yield lambda lowered: pool.submit(lowered.compile)


def programs(algorithm, drift, task, mesh, feed, key, with_auxiliary: bool, fresh: bool):
    """Returns the state's shapes and the compiled programs of a run: the start if it is `fresh`, the rounds, the evaluation."""
    everywhere = replicated(mesh)
    rounds = rounds_of(algorithm, drift, feed.length)

    def block(key, state, shifting, data, count):
        if shifting:
            return rounds(key, state, shifting, data, count)
        state, _, infos = rounds(key, state, moving(data, ()), data, count)  # a block of a population on the host
        return state, (), infos

    def part(found, state, shifting, data, first):
        data = shifting.on(data) if shifting else data
        more = evaluate.part(algorithm, task, mesh, state, data, with_auxiliary, first)
        found = more if found is None else evaluate.joined(found, more, first)
        return found, algorithm.serve(state).index

    nothing, client = None, None
    if feed.streamed:
        nothing, client = sharding.everywhere(evaluate.nothing(feed.data.num_clients, feed.data.num_classes), mesh), 0
    with compiler() as compiled:
        begin = jax.jit(starting(algorithm, drift, feed.streamed), out_shardings=everywhere).lower(key, feed.shapes("train"))
        state, shifting = shapes(begin.out_info, mesh)
        begin = compiled(begin) if fresh else None
        train = jax.jit(block, donate_argnums=(1, 2), out_shardings=everywhere)
        train = compiled(train.lower(key, state, shifting, feed.shapes("train"), 1))
        score = compiled(jax.jit(part, out_shardings=everywhere).lower(nothing, state, shifting, feed.shapes("test"), client))
        num_models = evaluate.number(jax.eval_shape(algorithm.serve, state).models)
        return state, begin and begin.result(), train.result(), Scoring(nothing, score.result(), num_models)


class Scoring(NamedTuple):
    """The compiled evaluation, over all the parts of the test data."""

    nothing: Any  # where it begins; None: there is one part
    part: Callable  # (found, state, shifting, data, first client) -> (found, see evaluate.joined; index of the served models [K])
    num_models: int

    def __call__(self, state, shifting, parts):
        """Returns (metrics, per-client table)."""
        found = self.nothing
        for data, first in parts:  # one after another: waiting to be tested, all of them would be in memory
            found, index = jax.block_until_ready(self.part(found, state, shifting, data, first))
        index, (table, counts) = jax.device_get((index, found))
        concept = jax.device_get(shifting.concept) if shifting else np.full_like(index, -1)
        return evaluate.whole(index, self.num_models, table, counts, concept), found[0]


def use_compile_cache() -> None:
    """Keeps compiled programs in the user's cache, readable by nobody else; a folder per kind of processor."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    kind = hashlib.sha256(flags.encode()).hexdigest()[:12]
    folder = cache() / "compiled" / f"{platform.machine()}-{kind}"
    with contextlib.suppress(OSError):  # without a home, programs are compiled every time
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        jax.config.update("jax_compilation_cache_dir", str(folder))
