"""The files that a run writes while it goes on: rows, who is in which group, a log,
checkpoints, the models of its best evaluation.

A checkpoint stores the number and the SHA-256 of the rows and groups before it, which are
flushed to the disk first: a run that goes on from it can tell whether they have changed.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from fedjax_cfl.data import prefetch
from fedjax_cfl.data.scaling import Scaling
from fedjax_cfl.errors import RunError
from fedjax_cfl.runs import checkpoint, results
from fedjax_cfl.runs.assignments import open_assignments
from fedjax_cfl.runs.display import LOG_SECONDS, format_progress
from fedjax_cfl.runs.results import METRICS_FILE
from fedjax_cfl.runs.settings import RunSettings, digest_identity
from fedjax_cfl.scores import find_score, score_of
from fedjax_cfl.simulation.driver import Grouping, Snapshot
from fedjax_cfl.simulation.evaluate import each_its_own, used_models
from fedjax_cfl.simulation.host_rows import collect_models
from fedjax_cfl.simulation.rounds import has_host_rows
from fedjax_cfl.simulation.setup import Setup
from fedjax_cfl.types import Algorithm, FederatedData, State

CHECKPOINTS, BEST, FINAL, LOG_FILE = "checkpoints", "best", "final", "run.log"
MIXTURE = "weights", "label_shares"  # what only mixtures have, of `ServedModels`


class Record(NamedTuple):
    """What writes the files of one run."""

    write: Callable[[dict[str, Any], Grouping], None]  # (row, grouping): at once
    save: Callable[[Snapshot], None]  # (snapshot): a checkpoint
    # (row) -> whether `save_if_due` will read the snapshot; where the run stops it always does
    wants: Callable[[dict[str, Any]], bool]
    # (row, snapshot, stop): the models if they are the best so far, and a checkpoint if it is
    # time, or if the run stops or ends there
    save_if_due: Callable[[dict[str, Any], Callable[[], Snapshot], bool], None]


@contextlib.contextmanager
def open_record(
    settings: RunSettings, run_dir: Path, setup: Setup, identity: dict, begun: int
) -> Iterator[Record]:
    """Yields what writes the files of a run. Raises RunError where a checkpoint cannot be
    written or `run_dir` has gone.

    Args: `settings` are those of the run, `setup` its parts; `identity` is that of `run_identity`,
    for its checkpoints; `begun` is the round after which the run begins, or goes on.
    """
    rounds, keep = settings.plan.rounds, settings.checkpoint.keep
    clients, run_id = settings.draw_recorded_clients(identity["clients"]), digest_identity(identity)
    saved = logged = (begun, time.monotonic())  # round, when
    with (
        results.open_metrics(run_dir) as handle,
        open_assignments(run_dir, clients) as assignments,
        open(run_dir / LOG_FILE, "a", encoding="utf-8") as log,
    ):
        held, rows = (run_dir / METRICS_FILE).read_bytes(), results.read_metrics(run_dir)
        best = results.summarize_rows(rows)[f"best_{score_of(rows).name}"]
        digest, written, chosen = hashlib.sha256(held), held.count(b"\n"), {}
        pending = None  # (round, models and who uses which) of the best evaluation, if not saved

        def write(row: dict[str, Any], grouping: Grouping) -> None:
            nonlocal written, logged, chosen
            chosen = keep_chosen(row, grouping)
            check_present(handle, run_dir)
            assignments.append(row["round"], grouping)
            digest.update(results.append_row(handle, row).encode())
            written += 1
            logged = log_if_due(log, logged, row, rounds)

        def save(snapshot: Snapshot) -> None:
            nonlocal pending, saved
            os.fsync(handle.fileno())
            groups, numbers = assignments.fingerprint(), [written, digest.hexdigest()]
            facts = {"counters": snapshot.counters, "metrics": numbers, "assignments": groups}
            step, tree = int(snapshot.state.round), (snapshot.state, snapshot.data_state)
            if pending:
                checkpoint.save(run_dir / BEST, *pending, {"run_id": run_id}, {}, keep=1)
            path = checkpoint.save(run_dir / CHECKPOINTS, step, tree, facts, identity, keep=keep)
            if step == begun:  # it has not been trained yet, and nothing is lost
                checkpoint.read_back(path)
            pending, saved = None, (step, time.monotonic())

        def wants(row) -> bool:
            return is_better(row, best) or is_time_to_save(row["round"], saved, settings)

        def save_if_due(row, locate: Callable[[], Snapshot], stop: bool) -> None:
            nonlocal best, pending
            if is_better(row, best):
                best = results.to_plain(row[find_score(row).name])
                pending = row["round"], copy_present_models(setup, locate()) | chosen
            if is_time_to_save(row["round"], saved, settings) or stop:
                save(locate())

        yield Record(write, save, wants, save_if_due)


def copy_models(algorithm: Algorithm, state: State, data: FederatedData) -> dict[str, Any]:
    """Returns a copy on the host of the models that clients use, and of who uses which; of
    mixtures also the weights, and what a new client needs to find its own.
    """
    if has_host_rows(algorithm, prefetch.is_on_host(data)) and algorithm.personal_models:
        index = each_its_own((), algorithm.serve(state).model_index).model_index
        return {"models": collect_models(algorithm, state, data), "index": np.array(index)}
    served = used_models(algorithm, state, data)
    kept = {"models": served.models, "index": served.model_index}
    for name in MIXTURE:
        if getattr(served, name) is not None:
            kept[name] = getattr(served, name)
    return jax.tree.map(np.array, jax.device_get(kept))


def keep_chosen(row: dict[str, Any], grouping: Grouping) -> dict[str, Any]:
    """Returns what of a test is kept with the models of the chosen round, for `find_chosen`; {}
    where no round is chosen.
    """
    if "chosen_round" not in row:
        return {}
    assert grouping.clients is not None
    columns = {one.name: getattr(grouping.clients, one.name) for one in fields(grouping.clients)}
    return {"chosen": columns | {"group": grouping.groups}}


def find_chosen(run_dir: Path, round: int) -> dict[str, np.ndarray]:
    """Returns who was in which group in the chosen round, as `group` [K], and what each client
    measured, by name [K]. Raises RunError where best/ does not have that round.
    """
    for path in checkpoint.list_checkpoints(run_dir / BEST)[-1:]:
        if checkpoint.read_header(path)["step"] == round:
            begin, arrays = "['chosen']['", checkpoint.load_arrays(path)
            return {
                name[len(begin) : -2]: array
                for name, array in arrays.items()
                if name.startswith(begin)
            }
    raise RunError(f"{run_dir / BEST}: does not hold the models of round {round}, which was chosen")


def copy_present_models(setup: Setup, snapshot: Snapshot) -> dict[str, Any]:
    """Returns what `copy_models` returns where a run stands, on the data as they are there."""
    state, moved, _ = snapshot
    data = moved.apply_to(setup.data) if moved else setup.data
    return copy_models(setup.algorithm, state, data)


def save_final(
    run_dir: Path,
    algorithm: Algorithm,
    state: State,
    data: FederatedData,
    run_id: str,
    scaling: Scaling | None = None,
) -> None:
    """Saves the models of the last round in final/, with what `load_run` needs to use
    them. Raises RunError where they cannot be written.

    Args: `state` is where the run ended; `data` are its data; `run_id` is what `digest_identity`
    returns; `scaling` is that of the samples, None: they are as they were.
    """
    facts: dict[str, Any] = {
        "run_id": run_id,
        "sample_shape": list(data.x.shape[1:]),
        "num_classes": data.num_classes,
        "pixels": data.pixels,
    }
    if data.columns is not None:
        facts["columns"] = list(data.columns.names)
    if data.y.ndim > 1:
        facts["labels"] = data.y.shape[1]
    if data.class_names is not None:
        facts["class_names"] = list(data.class_names)
    models = copy_models(algorithm, state, data)
    if scaling is not None:
        models["scaling"] = scaling._asdict()
    path = checkpoint.save(run_dir / FINAL, int(state.round), models, facts, {}, keep=1)
    checkpoint.read_back(path)


def is_better(row: dict[str, Any], best: float | None) -> bool:
    """Returns whether a row's score is better than the `best` so far, None if there is none; where
    a round is chosen on validation samples, whether it is that of the row.
    """
    if "chosen_round" in row:
        return row["chosen_round"] == row["round"]
    score = find_score(row)
    value = results.to_plain(row[score.name])
    return value is not None and (best is None or score.is_better(value, best))


def is_time_to_save(done: int, saved: tuple[int, float], settings: RunSettings) -> bool:
    """Returns whether a checkpoint is due after `done` rounds, the last one `saved` (its round,
    when).
    """
    passed, waited = done - saved[0], time.monotonic() - saved[1]
    due = passed >= settings.checkpoint.every or waited >= 60 * settings.checkpoint.minutes
    return due or done >= settings.plan.rounds


def log_if_due(
    log: IO[str], logged: tuple[int, float], row: dict[str, Any], rounds: int
) -> tuple[int, float]:
    """Adds a line about a row to the log, LOG_SECONDS after the last one or with a further tenth of
    the rounds; returns the round of the last one, and when it was.
    """
    done, now = row["round"], time.monotonic()
    if 10 * done // rounds <= 10 * logged[0] // rounds and now - logged[1] < LOG_SECONDS:
        return logged
    line = f"{time.strftime('%F %T')} round {done} of {rounds}, {format_progress(row)}"
    print(line, file=log, flush=True)
    return done, now


def check_present(handle: Any, run_dir: Path) -> None:
    """Raises RunError if metrics.jsonl is no longer the file that the run writes to."""
    with contextlib.suppress(FileNotFoundError):
        there = (run_dir / METRICS_FILE).stat()
        if os.path.samestat(os.fstat(handle.fileno()), there):
            return
    raise RunError(
        f"run_dir={run_dir}: {METRICS_FILE} was removed or replaced while the run went on; it"
        " ends here"
    )
