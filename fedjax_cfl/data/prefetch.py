"""Populations larger than a device: samples stay on the host, and those of a block of
rounds are fetched while the block before trains.

Such a population is a FederatedData of NumPy arrays, `x` perhaps memory-mapped; see
`federate(..., on_host=True)`. A block is ordinary data on the devices. In one that
trains every client keeps its number and its count of samples, but the samples are those of a few;
one that tests has consecutive clients, numbered from 0. Its size is static: the most that
any block of the run needs, known beforehand because cohorts are functions of the key.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.data.drift import Drift
from fedjax_cfl.errors import InputError
from fedjax_cfl.sharding import replicate, replicated_shapes
from fedjax_cfl.types import Algorithm, ClientIndex, FederatedData, Key

MAX_BLOCK_ROUNDS = 8  # in a block, at most: longer blocks hide no more and take more memory
LENT_BYTES = 2**28  # of rows that clients of a block of rounds keep, about, see `host_rows`
TEST_BLOCK_BYTES = 2**25  # bytes of test samples in a block of an evaluation, about
DRAW_BATCH = 64  # rounds whose cohorts are drawn at once


def is_on_host(data: FederatedData) -> bool:
    """Returns whether these data stay on the host."""
    return isinstance(data.x, np.ndarray)


def check_host_data(data: FederatedData, algorithm: Algorithm, drift: Drift) -> None:
    """Raises InputError for data on the host if the algorithm or the drift needs
    the samples of all clients at once.
    """
    if is_on_host(data) and algorithm.data_clients is None:
        raise InputError(
            "resident=host: this algorithm reads the samples of clients outside its cohort, or"
            " is a method of your own whose Method have no start_clients (which clients' samples"
            " init reads; no_clients: none); use resident=device"
        )
    if is_on_host(data) and drift.moves:
        raise InputError(
            "resident=host: a drift edits who holds which sample of all; use drift=none, or"
            " resident=device"
        )


def make_block(data: FederatedData, side: str, most: int, clients: int) -> FederatedData:
    """Returns a block in which no client holds a sample, on the host.

    Args: `side` is train or test; `most` is the number of its samples, and `clients` that of
    its clients, both with room for the largest block.
    """
    number = np.zeros(clients, np.int32)
    arrays: list[Any] = [np.zeros(1, np.int32), number, number]
    nobody = ClientIndex(*arrays)
    views = {"train": nobody, "test": nobody}
    views[side] = nobody.replace(order=np.arange(most, dtype=np.int32))
    return data.replace(
        x=np.zeros((most, *data.x.shape[1:]), data.x.dtype),
        y=np.zeros((most, *data.y.shape[1:]), data.y.dtype),
        owner=np.full(most, -1, np.int32),
        concept=np.full(clients, -1, np.int32),
        shifted=np.zeros(clients, bool),
        **views,
    )


class DeviceFeed:
    """Data that are whole on the devices, as one block."""

    on_host, row_bytes = False, 0

    def __init__(self, data: FederatedData, rounds: int, eval_every: int):
        self.data, self.rounds, self.eval_every = data, rounds, eval_every
        self.length = min(eval_every, rounds)

    def shapes(self, side: str) -> FederatedData:
        """Returns what the programs are compiled for."""
        return self.data

    def peak_shapes(self) -> Any:
        """Returns the shapes of what is on the devices at the same time."""
        return self.data

    def initial_data(self) -> FederatedData:
        """Returns the data that a run's start reads."""
        return self.data

    def train_blocks(self, done: int) -> Iterator[tuple[int, FederatedData]]:
        """Yields (rounds, data) of the blocks from round `done` on, each up to an evaluation."""
        for _, count in plan_blocks(self, done):
            yield count, self.data

    def test_blocks(self) -> Iterator[tuple[FederatedData, None]]:
        """Yields the test samples of all clients."""
        yield self.data, None


class HostFeed:
    """The blocks of a population on the host, fetched one ahead."""

    on_host = True

    def __init__(
        self,
        data: FederatedData,
        algorithm: Algorithm,
        key,
        rounds: int,
        eval_every: int,
        mesh,
        row_bytes: int = 0,  # of what a client keeps on the host, 0: nothing is kept there
    ):
        self.row_bytes = row_bytes
        self.data, self.mesh, self.rounds, self.eval_every = data, mesh, rounds, eval_every
        self.length = min(MAX_BLOCK_ROUNDS, eval_every, rounds)
        assert algorithm.data_clients is not None  # `check_host_data` has looked
        starters = algorithm.data_clients(key, None, data.train.size)
        self.start_clients = np.unique(np.asarray(starters))
        self.cohorts = draw_cohorts(algorithm, key, rounds, data.train.size)
        if row_bytes:
            cohort = self.cohorts.shape[1] * row_bytes
            self.length = max(1, min(self.length, LENT_BYTES // cohort))
        parts = [self.block_clients(begin, count) for begin, count in plan_blocks(self, 0)]
        samples = max(1, TEST_BLOCK_BYTES * len(data.x) // data.x.nbytes)
        row = -(-row_bytes * samples // TEST_BLOCK_BYTES)  # counts as so many samples
        ends = np.cumsum(np.asarray(data.test.size, np.int64) + row)
        cuts = np.searchsorted(ends, np.arange(samples, ends[-1], samples), side="left") + 1
        self.tested = [
            part
            for part in np.split(np.arange(data.num_clients), cuts)
            if data.test.size[part].sum()
        ]
        self.most = {  # samples and clients of a block
            "train": (
                max(int(data.train.size[ids].sum()) for ids in [self.start_clients, *parts]),
                data.num_clients,
            ),
            "test": (
                max(int(data.test.size[part].sum()) for part in self.tested),
                max(part.size for part in self.tested),
            ),
        }
        # clients whose rows a block has
        self.lent = {"train": max(ids.size for ids in parts), "test": self.most["test"][1]}

    def block_clients(self, begin: int, count: int) -> np.ndarray:
        """Returns the clients, ascending, of `count` rounds from round `begin` on."""
        ids = np.unique(self.cohorts[begin : begin + count])
        return ids[ids < self.data.num_clients]

    def _fetch(self, ids: np.ndarray, side: str) -> FederatedData:
        held, (most, clients) = getattr(self.data, side), self.most[side]
        who = ids if side == "train" else np.arange(ids.size)
        size = np.zeros(clients, np.int32)
        size[who] = held.size[ids]
        start = np.cumsum(size, dtype=np.int32) - size
        numbers = held.order[
            np.repeat(held.start[ids] - start[who], size[who]) + np.arange(size.sum())
        ]
        place = np.argsort(numbers, kind="stable")  # a mapped file is read in its own order
        block: Any = make_block(self.data, side, most, clients)
        block.x[place] = self.data.x[numbers[place]]
        block.y[: numbers.size] = self.data.y[numbers]
        block.owner[: numbers.size] = np.repeat(who, size[who])
        # of all clients where they train: the selection asks who has samples
        shown = np.asarray(held.size, np.int32) if side == "train" else size
        view = getattr(block, side).replace(start=start, size=shown)
        return replicate(block.replace(**{side: view}), self.mesh)

    def shapes(self, side: str) -> FederatedData:
        """Returns what the programs are compiled for."""
        return replicated_shapes(make_block(self.data, side, *self.most[side]), self.mesh)

    def peak_shapes(self) -> Any:
        """Returns the shapes of what is on the devices at the same time: of each side a
        block in use and the next.
        """
        return [self.shapes(side) for side in ("train", "train", "test", "test")]

    def initial_data(self) -> FederatedData:
        """Returns the data that a run's start reads."""
        return self._fetch(self.start_clients, "train")

    def train_blocks(self, done: int) -> Iterator[tuple[int, FederatedData]]:
        """Yields (rounds, data) of the blocks from round `done` on; none goes past an
        evaluation.
        """

        def fetch(begin: int, count: int):
            return count, self._fetch(self.block_clients(begin, count), "train")

        yield from prefetch(fetch, plan_blocks(self, done))

    def test_blocks(self) -> Iterator[tuple[FederatedData, int]]:
        """Yields the test samples of all clients, block by block, each with the number of its
        first client.
        """
        yield from prefetch(
            lambda ids: (self._fetch(ids, "test"), int(ids[0])), zip(self.tested, strict=True)
        )


def plan_blocks(feed: DeviceFeed | HostFeed, done: int) -> Iterator[tuple[int, int]]:
    """Yields (first round, rounds) of the blocks from round `done` on; they end in the same rounds
    wherever a run is taken up.
    """
    while done < feed.rounds:
        since = done % feed.eval_every  # the last evaluation
        count = min(feed.length - since % feed.length, feed.eval_every - since, feed.rounds - done)
        yield done, count
        done += count


def prefetch(fetch: Callable, plan: Iterable[tuple]) -> Iterator:
    """Yields fetch(*each) for each of a plan; while one is in use, the next is being fetched."""
    with ThreadPoolExecutor(1) as pool:
        waiting = None
        for each in plan:
            coming = pool.submit(fetch, *each)
            if waiting:
                yield waiting.result()
            waiting = coming
        if waiting:
            yield waiting.result()


def draw_cohorts(algorithm: Algorithm, key: Key, rounds: int, size: jax.Array) -> np.ndarray:
    """Returns whom every round reads, [rounds, n]; K in a place that is empty."""
    clients_of = algorithm.data_clients
    assert clients_of is not None  # `check_host_data` has looked
    draw = jax.jit(
        lambda size, first: jax.lax.map(
            lambda i: clients_of(key, first + i, size), jnp.arange(min(rounds, DRAW_BATCH))
        )
    )
    parts = [np.asarray(draw(size, first)) for first in range(0, rounds, DRAW_BATCH)]
    return np.concatenate(parts)[:rounds]
