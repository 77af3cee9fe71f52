"""One run of a session, and the files that are written when it has ended."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_cfl.runs import plot, results
from fedjax_cfl.runs.assignments import finish_assignments
from fedjax_cfl.runs.labels import name_parts
from fedjax_cfl.runs.record import save_final
from fedjax_cfl.runs.trackers import Opener
from fedjax_cfl.runs.versions import find_version
from fedjax_cfl.simulation import memory
from fedjax_cfl.simulation.driver import Result
from fedjax_cfl.simulation.width import choose_width
from fedjax_cfl.types import Algorithm, FederatedData, Task

PACKAGES = (
    "fedjax-cfl",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "hydra-core",
    "orbax-checkpoint",
)
MAX_LABEL_COUNTS = 2**24  # clients x classes, in clients.parquet


class Extras(NamedTuple):
    """What is measured besides, once, when a run has ended."""

    columns: dict[str, Any]  # [K], for clients.parquet
    tables: dict[str, dict[str, Any]]  # columns of further files, by name
    numbers: dict[str, Any]  # for summary.json


def measure_nothing(result: Result) -> Extras:
    """Measures nothing besides."""
    return Extras({}, {}, {})


class Member(NamedTuple):
    """One run of a session, alone or of several."""

    config: dict  # its own settings, as it would have them alone
    overrides: list[str]
    run_dir: Path
    trackers: Mapping[str, Opener]  # by name, see `trackers.py`
    extras: Callable[[Result], Extras] = measure_nothing


def finish_run(
    member: Member, choices: dict, algorithm: Algorithm, task: Task, result: Result, mesh: Mesh
) -> dict:
    """Writes clients.parquet, assignments.parquet, final/, summary.json and curves.png of a
    finished run; returns the summary.
    """
    run_dir = member.run_dir
    table, served, held = jax.device_get(
        (result.clients, algorithm.serve(result.state).model_index, result.data.replace(x=None))
    )
    columns = {
        "client": held.client_names.names if held.client_names else np.arange(held.num_clients),
        "group": served,
        "concept": held.concept,
        "train_samples": held.train.size,
        "test_samples": table.samples,
        "accuracy": table.accuracy,
        "loss": table.loss,
        "f1": table.f1,
    }
    if held.num_clients * held.num_classes <= MAX_LABEL_COUNTS:
        columns["labels"] = count_labels(held)
    extras = member.extras(result)
    results.write_clients(run_dir, columns | extras.columns)
    for name, table in extras.tables.items():
        results.write_clients(run_dir, table, name)
    finish_assignments(run_dir, member.config, held.num_clients)
    save_final(run_dir, algorithm, result.state, result.data)
    rows = results.read_metrics(run_dir)
    summary = build_summary(member, choices, rows, task, result, mesh) | extras.numbers
    try:
        plot.plot_curves(run_dir, summary)
    except Exception as error:  # of the user's own settings of matplotlib, say
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(f"fedjax-cfl: warning: curves.png is not drawn: {reason}", file=sys.stderr)
    # last: its presence says that the run is finished
    results.write_json(run_dir / "summary.json", summary)
    return summary


def count_labels(held: FederatedData) -> np.ndarray:
    """Returns how many training samples of each label every client holds, [K, C]; on the
    host.
    """
    order, start, size = (
        np.asarray(part) for part in (held.train.order, held.train.start, held.train.size)
    )
    client = np.repeat(np.arange(held.num_clients), size)
    inside = np.arange(client.size) - np.repeat(np.cumsum(size) - size, size)
    labels = np.asarray(held.y)[order[start[client] + inside]]
    shape = held.num_clients, held.num_classes
    counts = np.bincount(client * held.num_classes + labels, minlength=shape[0] * shape[1])
    return counts.reshape(shape)


def build_summary(
    member: Member, choices: dict, rows: list[dict], task: Task, result: Result, mesh: Mesh
) -> dict:
    """Returns the contents of summary.json."""
    config = member.config
    names = {
        group: choices[group]
        for group in ("algorithm", "dataset", "partition", "model", "concept", "drift", "preset")
    }
    numbers = results.summarize_rows(rows)
    seconds = max(result.times["train_s"], math.ulp(1.0))
    return {
        **name_parts(names, member.overrides),
        "seed": config["seed"],
        **numbers,
        "client_updates_per_s": numbers["client_updates"] / seconds,
        "local_steps_per_s": numbers["local_steps"] / seconds,
        **result.times,
        **result.programs,
        "planned_memory_bytes": result.memory,
        "peak_memory_bytes": memory.peak_memory_bytes(),
        "width": choose_width(
            config["local"], task, result.data, mesh, config["clients_per_round"]
        ),
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": (
            {"python": sys.version.split()[0]} | {name: find_version(name) for name in PACKAGES}
        ),
        "overrides": member.overrides,
    }
