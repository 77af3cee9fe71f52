"""One run of a session, and the files that are written when it has ended."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_cfl.errors import RunError, warn
from fedjax_cfl.runs import results
from fedjax_cfl.runs.assignments import ASSIGNMENTS_FILE, finish_assignments, sample_clients
from fedjax_cfl.runs.callbacks import copy_models
from fedjax_cfl.runs.labels import PACKAGES, find_version, name_parts
from fedjax_cfl.runs.saved_models import BEST_FILE, FINAL_FILE, load_arrays, save_arrays
from fedjax_cfl.runs.settings import RunSettings, digest_identity, run_identity
from fedjax_cfl.scores import SCORES
from fedjax_cfl.simulation import memory
from fedjax_cfl.simulation.callback import Callback
from fedjax_cfl.simulation.driver import Result
from fedjax_cfl.simulation.rounds import Setup
from fedjax_cfl.types import FederatedData

# those there are
CLIENT_SCORES = (*(name for score in SCORES for name in score.measured), "loss", "f1")
MAX_LABEL_COUNTS = 2**24  # clients x classes, in clients.parquet


class Extras(NamedTuple):
    """What is measured in addition, once, when a run has ended."""

    columns: dict[str, Any]  # [K], for clients.parquet
    tables: dict[str, dict[str, Any]]  # columns of further files, by name
    numbers: dict[str, Any]  # for summary.json


class Member(NamedTuple):
    """One run of a session, alone or of several."""

    settings: RunSettings  # as it would have them alone
    overrides: list[str]
    run_dir: Path
    trackers: Mapping[str, Callback]  # by name, whose failures end no run, see `trackers.py`
    callbacks: Sequence[Callback] = ()  # the user's own
    extras: Callable[[Result], Extras] = lambda result: Extras({}, {}, {})
    draw: Callable[[Path, dict], None] = lambda run_dir, summary: None  # curves.png
    verbose: bool = True  # show progress and the final table


def finish_run(member: Member, setup: Setup, result: Result) -> dict:
    """Writes final.npz, clients.parquet, assignments.parquet and summary.json of a finished run;
    returns the summary.

    The training is paid for: what fails besides the models and the summary is one line of
    warning. Where the disk refuses, OSError is raised, and the run can be gone on with.
    """
    run_dir = member.run_dir
    run_id = digest_identity(run_identity(member.settings, setup.data))
    save_final(run_dir, setup, result, run_id)
    measured = attempt(
        "evaluate.* is not measured", lambda: member.extras(result), without_disk=True
    )
    extras = measured or Extras({}, {}, {})
    rows = results.read_metrics(run_dir)
    number = rows[-1].get("chosen_round")

    def write_own() -> None:
        chosen = number and find_chosen(run_dir, number)
        columns = describe_clients(setup, result, chosen) | extras.columns
        results.write_parquet(run_dir / results.CLIENTS_FILE, columns, run_id)

    attempt(f"{results.CLIENTS_FILE} is not written", write_own)
    for name, table in extras.tables.items():
        attempt(
            f"{name} is not written", lambda: results.write_parquet(run_dir / name, table, run_id)
        )
    clients = result.data.num_clients
    recorded = sample_clients(clients, member.settings.assignments, member.settings.seed)
    attempt(
        f"{ASSIGNMENTS_FILE} is not written",
        lambda: finish_assignments(run_dir, recorded, clients, run_id),
    )
    summary = build_summary(member, rows, setup, result) | extras.numbers
    summary |= {"run_id": run_id, "data_id": member.settings.data_digest, "clients": clients}
    # last: its presence says that the run is finished
    results.write_json(run_dir / results.SUMMARY_FILE, summary)
    return summary


def attempt(what: str, call: Callable[[], Any], *, without_disk: bool = False) -> Any:
    """Returns what a call returns. Where it fails, warns of `what` with the reason and returns
    None.

    An OSError is raised, unless the run can end `without_disk`.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:  # of settings of matplotlib, or a method's own code
        if isinstance(error, OSError) and not without_disk:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        warn(f"{what}: {reason}")


def save_final(run_dir: Path, setup: Setup, result: Result, run_id: str) -> None:
    """Saves the models of the last round in final.npz, with what `load_run` needs to use them.
    Raises RunError where they cannot be written.
    """
    data = result.data
    facts: dict[str, Any] = {
        "round": int(result.state.round),
        "run_id": run_id,
        "sample_shape": list(data.x.shape[1:]),
        "num_classes": data.num_classes,
        "pixels": data.pixels,
        "columns": data.columns and list(data.columns.names),
        "labels": data.y.shape[1] if data.y.ndim > 1 else None,
        "class_names": data.class_names and list(data.class_names),
    }
    models = copy_models(setup.algorithm, result.state, data)
    if setup.scaling is not None:
        models["scaling"] = setup.scaling._asdict()
    facts = {name: value for name, value in facts.items() if value is not None}
    save_arrays(run_dir / FINAL_FILE, models, facts)


def find_chosen(run_dir: Path, round: int) -> dict[str, np.ndarray]:
    """Returns who was in which group in the chosen round, as `group` [K], and what each client
    measured, by name [K]. Raises RunError where best.npz does not have that round.
    """
    arrays, facts = load_arrays(run_dir / BEST_FILE)
    if facts["round"] != round:
        raise RunError(f"{run_dir / BEST_FILE}: does not hold the chosen round, {round}")
    begin = "['chosen']['"
    return {name[len(begin) : -2]: arrays[name] for name in arrays if name.startswith(begin)}


def describe_clients(
    setup: Setup, result: Result, chosen: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the columns of clients.parquet that every run has: of the last round, or of the
    `chosen` one, see `find_chosen`.
    """
    served = setup.algorithm.serve(result.state).model_index
    table, served, held = jax.device_get((result.clients, served, result.data.replace(x=None)))
    if chosen is not None:
        served = chosen["group"]
        table = table.replace(**{name: chosen[name] for name in vars(table)})
    columns = {
        "client": held.client_names.names if held.client_names else np.arange(held.num_clients),
        "group": served,
        "concept": held.concept,
        "train_samples": held.train.size,
        "test_samples": table.samples,
        **{name: getattr(table, name) for name in CLIENT_SCORES if hasattr(table, name)},
    }
    if 0 < held.num_clients * held.num_classes <= MAX_LABEL_COUNTS:
        columns["labels"] = count_labels(held)
    return columns


def count_labels(held: FederatedData) -> np.ndarray:
    """Returns how many training samples of each label every client holds, [K, C]; on the
    host.
    """
    order, start, size = map(np.asarray, (held.train.order, held.train.start, held.train.size))
    client = np.repeat(np.arange(held.num_clients), size)
    inside = np.arange(client.size) - np.repeat(np.cumsum(size) - size, size)
    labels = np.asarray(held.y)[order[start[client] + inside]]
    shape = held.num_clients, held.num_classes
    counts = np.bincount(client * held.num_classes + labels, minlength=shape[0] * shape[1])
    return counts.reshape(shape)


def build_summary(member: Member, rows: list[dict], setup: Setup, result: Result) -> dict:
    """Returns the contents of summary.json.

    Args: `rows` are those of metrics.jsonl; `result` is what the run left.
    """
    settings, mesh = member.settings, setup.mesh
    names = {
        group: settings.choices.get(group)
        for group in ("algorithm", "dataset", "partition", "model", "concept", "drift", "preset")
    }
    numbers = results.summarize_rows(rows)
    if numbers["rounds"] < settings.plan.rounds:
        numbers["ended_early"] = f"{settings.patience} tests without a better validation score"
    seconds = max(result.times["train_s"], math.ulp(1.0))
    return {
        **name_parts(names, member.overrides),
        "seed": settings.seed,
        **numbers,
        "client_updates_per_s": numbers["client_updates"] / seconds,
        "local_steps_per_s": numbers["local_steps"] / seconds,
        **result.times,
        **result.programs,
        "planned_memory_bytes": result.memory,
        "peak_memory_bytes": memory.peak_memory_bytes(),
        "width": settings.width,
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": {
            "python": sys.version.split()[0],
            **{name: find_version(name) for name in ("fedjax-cfl", *PACKAGES)},
        },
        "overrides": member.overrides,
    }
