"""One run in its directory: files, checkpoints, signals and resuming. Takes plain
values; knows nothing of Hydra.
"""

import contextlib
import importlib.metadata
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from fedjax_cfl import distributed
from fedjax_cfl.data.federated import format_description
from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.formatting import escape_markup
from fedjax_cfl.runs import checkpoint, plot, results
from fedjax_cfl.runs.display import print_summary, progress
from fedjax_cfl.runs.labels import name_parts
from fedjax_cfl.runs.results import (
    append_row,
    open_metrics,
    read_metrics,
    write_clients,
    write_json,
)
from fedjax_cfl.runs.resume import CHECKPOINTS, run_identity
from fedjax_cfl.runs.scoring import describe_met_rule
from fedjax_cfl.runs.signals import catch_signals
from fedjax_cfl.simulation import memory
from fedjax_cfl.simulation.driver import Snapshot, run

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


def train_run(
    config: dict,
    choices: dict,
    overrides: list[str],
    run_dir: Path,
    algorithm,
    task,
    data,
    drift,
    mesh,
    start,
) -> int:
    """Runs, or goes on with, one run, and writes its files; returns the exit status: 0,
    or 128 + the signal that stopped it.

    Raises RunError if it cannot go on; what was written until then stays, and the last
    checkpoint can be resumed.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=not distributed.is_primary())
    key = jax.random.key(config["seed"])
    names = name_parts({part: config[part]["name"] for part in ("algorithm", "dataset")}, overrides)
    try:
        console.print(
            f"[bold]{escape_markup(names['algorithm'])}[/] on {escape_markup(names['dataset'])}:"
            f" {format_description(data)}, {describe_machine(mesh)}"
        )
        if algorithm.clustered and config["discard"] == "met":
            plan = data.num_clients, config["clients_per_round"], config["rounds"]
            console.print(describe_met_rule(*plan), markup=False)
        with catch_signals() as asked:
            result = run_rounds(
                config, run_dir, (algorithm, task, data, drift, mesh, key), start, asked
            )
            if asked:
                console.print(
                    f"stopped after round {int(result.state.round)}; the same command goes on from"
                    " there",
                    markup=False,
                )
                return 128 + asked[0]
            if distributed.is_primary():
                summary = finish(config, choices, overrides, run_dir, algorithm, task, result, mesh)
                print_summary(config, run_dir, algorithm, summary, console)
    except OSError as error:
        raise RunError(
            f"run_dir={run_dir}: {error.strerror or error}; what was written before can be resumed"
        ) from None
    return 0


def describe_machine(mesh) -> str:
    """Returns the devices in words."""
    several = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return (
        f"{mesh.size} {mesh.devices.flat[0].platform.upper()}"
        f" device{'s' * (mesh.size > 1)}{several}"
    )


class Recorder:
    """Writes one run's rows as they come, and checkpoints when they are due, at the
    end, and before stopping.
    """

    def __init__(self, config: dict, run_dir: Path, data, begun: int, files: contextlib.ExitStack):
        self.last, self.every, self.folder = (
            config["rounds"],
            config["checkpoint"],
            run_dir / CHECKPOINTS,
        )
        self.identity, self.handle = (
            run_identity(config, data),
            files.enter_context(open_metrics(run_dir)),
        )
        self.saved = {"round": begun, "at": time.monotonic()}

    def save(self, snapshot: Snapshot, accuracy: float | None = None) -> None:
        """Saves where the run stands."""
        step, tree = int(snapshot.state.round), (snapshot.state, snapshot.data_state)
        try:
            checkpoint.save(
                self.folder,
                step,
                tree,
                snapshot.counters,
                self.identity,
                keep=self.every["keep"],
                score=accuracy,
            )
        except InputError as error:  # nothing was wrong with what was asked for
            raise RunError(str(error)) from None
        self.saved = {"round": step, "at": time.monotonic()}

    def write_row(self, row: dict) -> None:
        """Writes a row."""
        append_row(self.handle, row)

    def checkpoint_if_due(self, row: dict, snapshot: Callable[[], Snapshot], stop: bool) -> None:
        """Saves where the run stands after a row, `snapshot()`, if it is time, or if
        the run stops or ends there.
        """
        passed, waited = row["round"] - self.saved["round"], time.monotonic() - self.saved["at"]
        if (
            passed >= self.every["every"]
            or waited >= 60 * self.every["minutes"]
            or stop
            or row["round"] >= self.last
        ):
            self.save(snapshot(), row["accuracy"])


def run_rounds(config: dict, run_dir: Path, parts: tuple, start: Snapshot | None, asked: list[int]):
    """Runs the rounds; every row and checkpoint is written as it comes."""
    algorithm, task, data, drift, mesh, key = parts
    begun = 0 if start is None else int(start.state.round)
    with contextlib.ExitStack() as files:
        recorder = (
            Recorder(config, run_dir, data, begun, files) if distributed.is_primary() else None
        )
        show = (
            files.enter_context(progress(config["rounds"], begun))
            if distributed.is_primary()
            else None
        )

        def on_row(row, snapshot: Snapshot):
            if recorder:
                recorder.write_row(row)
                show(row)
            stop = distributed.any_process(
                bool(asked)
            )  # only now: a signal that came while the row was written still stops here
            if recorder:
                recorder.checkpoint_if_due(row, lambda: snapshot, stop)
            return (
                stop and row["round"] < config["rounds"]
            )  # asked meanwhile: after the next block, so that nothing stops unsaved

        def on_start(snapshot: Snapshot):
            if start is None and recorder:  # from now on the directory is known to be this run's
                recorder.save(snapshot)

        options = {
            "drift": drift,
            "with_auxiliary": config["eval_auxiliary"],
            "mesh": mesh,
            "start": start,
        }
        options |= {name: config[name] for name in ("rounds", "eval_every", "discard")}
        result = run(algorithm, task, data, key, **options, on_start=on_start, on_row=on_row)
    if int(result.state.round) >= config["rounds"]:
        asked.clear()  # there was nothing left to stop
    elif not asked:
        asked.append(signal.SIGTERM)  # another process was
    return result


def finish(
    config: dict, choices: dict, overrides: list[str], run_dir: Path, algorithm, task, result, mesh
) -> dict:
    """Writes clients.parquet, summary.json and curves.png of a finished run; returns
    the summary.
    """
    table, served, held = jax.device_get(
        (result.clients, algorithm.serve(result.state).index, result.data.replace(x=None))
    )
    columns = {
        "client": held.client_names.names if held.client_names else np.arange(held.num_clients),
        "group": served,
        "concept": held.concept,
        "train_samples": held.train.size,
    }
    write_clients(
        run_dir,
        columns
        | {
            "test_samples": table.samples,
            "accuracy": table.accuracy,
            "loss": table.loss,
            "f1": table.f1,
        },
    )
    summary = build_summary(config, choices, overrides, read_metrics(run_dir), task, result, mesh)

    plot.plot_curves(run_dir, summary)
    write_json(
        run_dir / "summary.json", summary
    )  # last: its presence says that the run is finished
    return summary


def build_summary(
    config: dict, choices: dict, overrides: list[str], rows: list[dict], task, result, mesh
) -> dict:
    """Returns the contents of summary.json."""
    names = {
        group: choices[group]
        for group in ("algorithm", "dataset", "partition", "model", "concept", "drift", "preset")
    }
    numbers = results.summarize_rows(rows)
    seconds = max(result.times["train_s"], math.ulp(1.0))
    return {
        **name_parts(names, overrides),
        "seed": config["seed"],
        **numbers,
        "client_updates_per_s": numbers["client_updates"] / seconds,
        "local_steps_per_s": numbers["local_steps"] / seconds,
        **result.times,
        "planned_memory_bytes": result.memory,
        "peak_memory_bytes": memory.peak_memory_bytes(),
        "width": memory.choose_width(config["local"], task, result.data, mesh),
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": (
            {"python": sys.version.split()[0]}
            | {name: importlib.metadata.version(name) for name in PACKAGES}
        ),
        "overrides": overrides,
    }
