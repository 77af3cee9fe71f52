"""What a run in a directory does after each evaluation, a class for each thing, in the order in
which `session.watch_run` has them.

A checkpoint stores how many rows and groups there were before it, which are flushed to the disk
first: a run that goes on from it keeps so many of them.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedjax_cfl.data import prefetch
from fedjax_cfl.errors import RunError
from fedjax_cfl.runs import checkpoint, results
from fedjax_cfl.runs.assignments import PART, format_grouping
from fedjax_cfl.runs.display import LOG_SECONDS, format_progress
from fedjax_cfl.runs.results import METRICS_FILE
from fedjax_cfl.runs.saved_models import BEST_FILE, save_arrays
from fedjax_cfl.runs.settings import RunSettings, digest_identity, run_identity
from fedjax_cfl.scores import find_score, score_of
from fedjax_cfl.simulation.callback import (
    Callback,
    Grouping,
    RowCallback,
    RunInfo,
    Snapshot,
    Take,
)
from fedjax_cfl.simulation.evaluate import each_its_own, used_models
from fedjax_cfl.simulation.host_rows import collect_models
from fedjax_cfl.simulation.rounds import Setup, has_host_rows
from fedjax_cfl.types import Algorithm, FederatedData, State

CHECKPOINTS, LOG_FILE = "checkpoints", "run.log"
MIXTURE = "weights", "label_shares"  # what only mixtures have, of `ServedModels`


class Validation(RowCallback):
    """Adds to each row the round that is best so far on validation samples, `chosen_round`, and
    ends the run after so many tests without a better one: `evaluate.choose`, `evaluate.patience`.
    """

    best: float | None = None  # mean over clients of their scores on validation samples
    round: int | None = None  # of the first test that has it
    bad_tests = 0  # after it

    def __init__(self, settings: RunSettings, rows: Iterable[dict[str, Any]]):
        """`rows` are those of the run so far."""
        self.settings = settings
        for row in rows:
            self.update(row)

    def update(self, row: dict[str, Any]) -> None:
        """Enters a test. One whose scores do not count yet, see `Plan`, is no reason to end."""
        score = find_score(row)
        value = results.to_plain(row.get(f"validation_macro_{score.name}"))
        if value is not None and (self.best is None or score.is_better(value, self.best)):
            self.best, self.round, self.bad_tests = value, row["round"], 0
        elif self.best is not None:
            self.bad_tests += 1

    def should_stop(self) -> bool:
        """Returns whether a run of this patience ends here; 0: it never does."""
        return 0 < self.settings.patience <= self.bad_tests

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> bool:
        """Enters a test, and the round."""
        self.update(row)
        if self.settings.choose == "best_validation":
            row["chosen_round"] = self.round
        return self.should_stop()


class Rows(RowCallback):
    """Appends each row to metrics.jsonl, and the groups to assignments.jsonl, at once."""

    def __init__(self, run_dir: Path, clients: np.ndarray, files: contextlib.ExitStack):
        """`clients` [R] are those whose groups are kept; the files are closed with `files`."""
        self.run_dir, self.clients = run_dir, clients
        # of a run that goes on cut to its last checkpoint, see `resume.cut_rows`
        self.metrics, self.groups = (
            files.enter_context((run_dir / name).open("a", encoding="utf-8"))
            for name in (METRICS_FILE, PART)
        )
        self.counts = [(run_dir / n).read_bytes().count(b"\n") for n in (METRICS_FILE, PART)]

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> None:
        """Raises RunError if metrics.jsonl is no longer the file that the run writes to."""
        self._check_present()
        both = (np.asarray(each)[self.clients] for each in (grouping.groups, grouping.concepts))
        self.groups.write(format_grouping(row["round"], *both))
        self.groups.flush()
        results.append_row(self.metrics, row)
        self.counts = [count + 1 for count in self.counts]

    def flush(self) -> None:
        """Flushes what was written to the disk."""
        for handle in (self.groups, self.metrics):
            os.fsync(handle.fileno())

    def _check_present(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            there = (self.run_dir / METRICS_FILE).stat()
            if os.path.samestat(os.fstat(self.metrics.fileno()), there):
                return
        raise RunError(
            f"run_dir={self.run_dir}: {METRICS_FILE} was removed or replaced while the run went on;"
            " it ends here"
        )


class Log(RowCallback):
    """Adds a line to run.log LOG_SECONDS after the last one or with a further tenth of the rounds,
    and moves a bar on stderr; where that is no terminal it gets the lines after LOG_SECONDS.
    """

    def __init__(
        self, rounds: int, run_dir: Path, begun: int, verbose: bool, files: contextlib.ExitStack
    ):
        """`begun` of the `rounds` were run before; `verbose`: stderr gets something; bar and file
        are closed with `files`.
        """
        self.rounds, self.verbose = rounds, verbose
        self.terminal = verbose and sys.stderr.isatty()
        self.logged = self.shown = begun, time.monotonic()  # round, when
        self.log = files.enter_context((run_dir / LOG_FILE).open("a", encoding="utf-8"))
        said = TextColumn("{task.description}")
        columns = BarColumn(), MofNCompleteColumn(), said, TimeRemainingColumn()
        # the pace is a mean over an hour, because the default of 30 s is empty where evaluations
        # are further apart
        self.bar = Progress(
            *columns,
            console=Console(stderr=True),
            disable=not self.terminal,
            speed_estimate_period=3600,
        )
        files.enter_context(self.bar)
        self.task = self.bar.add_task("training", total=rounds, completed=begun)

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> None:
        """Says where the run stands."""
        done, now, said = row["round"], time.monotonic(), format_progress(row)
        self.bar.update(self.task, completed=done)
        speed = self.bar.tasks[0].speed
        self.bar.update(self.task, description=said + (f", {speed:.1f} rounds/s" if speed else ""))
        tenth = 10 * done // self.rounds > 10 * self.logged[0] // self.rounds
        if tenth or now - self.logged[1] >= LOG_SECONDS:
            self.logged = done, now
            line = f"{time.strftime('%F %T')} round {done} of {self.rounds}, {said}"
            print(line, file=self.log, flush=True)
        if self.verbose and not self.terminal and now - self.shown[1] >= LOG_SECONDS:
            self.shown = done, now
            line = f"fedjax-cfl: round {done} of {self.rounds}, {said}"
            print(line, file=sys.stderr, flush=True)


class Interrupt(RowCallback):
    """Ends the run once a signal has come. It is asked last: a signal that comes while rows are
    written still stops the run there, a later one after the next evaluation.
    """

    def __init__(self, signals: list[int]):
        """`signals` are those that have come."""
        self.signals = signals

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> bool:
        """Returns whether the run ends."""
        return bool(self.signals)


class Checkpoints(Callback):
    """Saves a checkpoint at the start, when one is due, and where the run ends or is stopped; and
    with it, in best.npz, the models of the best evaluation so far, or of the chosen round.
    """

    def __init__(self, settings: RunSettings, setup: Setup, rows: Rows):
        """`rows` writes those of the run."""
        self.settings, self.setup, self.rows = settings, setup, rows
        self.folder = rows.run_dir / CHECKPOINTS
        self.identity = run_identity(settings, setup.data)
        before = results.read_metrics(rows.run_dir)
        self.best = results.summarize_rows(before)[f"best_{score_of(before).name}"]
        self.models: tuple[int, dict[str, Any]] | None = None  # of the best, if not saved
        self.saved = -1, time.monotonic()  # round, when

    def on_start(self, run: RunInfo, take: Take) -> None:
        """Saves where the run begins: from now on the directory is known to be this run's."""
        self.saved = run.begun, time.monotonic()
        if not checkpoint.list_steps(self.folder):
            self.save(take())

    def wants_snapshot(self, row: dict[str, Any]) -> bool:
        """Returns whether the models of a row are the best so far, or a checkpoint is due."""
        return is_better(row, self.best) or self.is_due(row["round"])

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> None:
        """Saves what is due."""
        if is_better(row, self.best):
            self.best = results.to_plain(row[find_score(row).name])
            kept = copy_present_models(self.setup, take())
            if "chosen_round" in row:  # with who was in which group, and what each client measured
                kept["chosen"] = vars(grouping.clients) | {"group": grouping.groups}
            self.models = row["round"], kept
        if self.is_due(row["round"]):
            self.save(take())

    def on_end(self, take: Take) -> None:
        """Saves where the run ends, unless that has been saved."""
        snapshot = take()
        if int(snapshot.state.round) != self.saved[0] or self.models:
            self.save(snapshot)

    def is_due(self, done: int) -> bool:
        """Returns whether a checkpoint is due after `done` rounds."""
        every, minutes, _ = self.settings.checkpoint
        passed, waited = done - self.saved[0], time.monotonic() - self.saved[1]
        return passed >= every or waited >= 60 * minutes

    def save(self, snapshot: Snapshot) -> None:
        """Saves a checkpoint, and the best models before it."""
        self.rows.flush()
        if self.models:
            number, kept = self.models
            facts = {"round": number, "run_id": digest_identity(self.identity)}
            save_arrays(self.rows.run_dir / BEST_FILE, kept, facts)
        rows, groups = self.rows.counts
        facts = {"counters": snapshot.counters, "rows": rows, "groups": groups}
        step, tree = int(snapshot.state.round), (snapshot.state, snapshot.data_state)
        keep = self.settings.checkpoint.keep
        checkpoint.save(self.folder, step, tree, facts, self.identity, keep=keep)
        self.models, self.saved = None, (step, time.monotonic())


def is_better(row: dict[str, Any], best: float | None) -> bool:
    """Returns whether a row's score is better than the `best` so far, None if there is none; where
    a round is chosen on validation samples, whether it is that of the row.
    """
    if "chosen_round" in row:
        return row["chosen_round"] == row["round"]
    score = find_score(row)
    value = results.to_plain(row[score.name])
    return value is not None and (best is None or score.is_better(value, best))


# models


def copy_models(algorithm: Algorithm, state: State, data: FederatedData) -> dict[str, Any]:
    """Returns a copy on the host of the models that clients use, and of who uses which; of
    mixtures also the weights, and what a new client needs to find its own.
    """
    if has_host_rows(algorithm, prefetch.is_on_host(data)) and algorithm.personal_models:
        index = each_its_own((), algorithm.serve(state).model_index).model_index
        return {"models": collect_models(algorithm, state, data), "index": np.array(index)}
    served = used_models(algorithm, state, data)
    kept = {"models": served.models, "index": served.model_index}
    kept |= {name: part for name in MIXTURE if (part := getattr(served, name)) is not None}
    return jax.tree.map(np.array, jax.device_get(kept))


def copy_present_models(setup: Setup, snapshot: Snapshot) -> dict[str, Any]:
    """Returns what `copy_models` returns where a run stands, on the data as they are there."""
    state, moved, _ = snapshot
    data = moved.apply_to(setup.data) if moved else setup.data
    return copy_models(setup.algorithm, state, data)
