"""Callbacks: what a run reports while it goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_cfl.simulation.evaluate import ClientTable
from fedjax_cfl.simulation.rounds import DataState
from fedjax_cfl.types import State


class Snapshot(NamedTuple):
    """Where a run stands after an evaluation: what a checkpoint keeps. The arrays are
    only valid until the run goes on.
    """

    state: State
    data_state: DataState
    counters: dict[str, Any]  # counters and seconds so far, see COUNTERS


class Grouping(NamedTuple):
    """Who is in which group at an evaluation, on the host."""

    groups: np.ndarray  # [K] int32, the model that each client is served, -1: it has none yet
    concepts: np.ndarray  # [K] int32, the true group at the time, -1 where unknown
    clients: ClientTable | None = None  # [K], what each client measures


class RunInfo(NamedTuple):
    """Which run a callback belongs to."""

    run_dir: Path | None = None  # None: it has none
    settings: dict[str, Any] = {}  # noqa: RUF012, by dotted name
    begun: int = 0  # rounds that were run before, by a process that was stopped


Take = Callable[[], Snapshot]  # where the run stands, copied from the devices when it is called


class Callback:
    """Follows one run: override what you need, and give an instance to `cfl.run` as
    `callbacks=[...]`, or name the class in the settings, as
    `callbacks=[{_target_:my_file.MyCallback}]`. Keep what you copy: the snapshot's arrays are only
    valid until the run goes on.
    """

    def on_start(self, run: RunInfo, take: Take) -> None:
        """Is called before the first round, or the first after those that were run before."""

    def wants_snapshot(self, row: dict[str, Any]) -> bool:
        """Returns whether `on_rows` reads the snapshot: several processes of a run take it
        together, whatever each needs.
        """
        return True

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> bool | None:
        """Is called after every evaluation with its row, as metrics.jsonl has it; the run ends
        there if any callback returns true. Callbacks may add entries to the row, for those
        behind them.
        """

    def on_end(self, take: Take) -> None:
        """Is called after the last round, also where a callback or a signal has ended the run."""


class RowCallback(Callback):
    """Reads rows alone."""

    def wants_snapshot(self, row: dict[str, Any]) -> bool:
        """Returns False."""
        return False
