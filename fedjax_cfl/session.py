"""One run in its directory: files, checkpoints, signals and resuming. Takes plain values; knows nothing of Hydra."""

import contextlib
import hashlib
import importlib.metadata
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fedjax_cfl import checkpoint, plot, report, settings
from fedjax_cfl.data import sentence
from fedjax_cfl.download import cache
from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.local import widest
from fedjax_cfl.run import Snapshot, peak_memory_bytes, run, standing

CHECKPOINTS = "checkpoints"
# Settings that may differ between a run and its continuation: they change neither the numbers nor what has been computed already.
FREE = ("run_dir", "rounds", "eval_every", "eval_auxiliary", "devices", "offline", "resume", "checkpoint.", "paper.")
FREE += ("local.width", "local.first_layer")
PACKAGES = ("fedjax-cfl", "jax", "jaxlib", "flax", "optax", "numpy", "hydra-core", "orbax-checkpoint")
SPOKEN = ("algorithm", "dataset", "partition", "model", "drift", "seed", "rounds", "best_round", "ari")  # said as they are, with the scores


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


def identity(config: dict, data) -> dict[str, Any]:
    """Returns what a continuation must repeat: every setting that bears on the numbers, and the shape of the data."""
    named = sorted(settings.leaves(config), key=lambda leaf: not leaf[0].endswith((".name", "seed")))  # a refusal lists the first
    kept = {name: value for name, value in named if not name.startswith(FREE)}
    return kept | {"clients": data.num_clients, "samples": int(data.y.size), "capacity": data.capacity}


@contextlib.contextmanager
def stopping() -> Iterator[list[int]]:
    """Yields a list that the first SIGTERM or SIGINT is put into; a second one ends the process at once.

    A thread listens, because Python's own handlers have to wait until a compiled block of rounds returns.
    """
    asked: list[int] = []
    listening, waking = os.pipe()
    os.set_blocking(waking, False)

    def listen():
        while number := os.read(listening, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            if asked:
                os._exit(128 + number[0])
            asked.append(number[0])
            print("fedjax-cfl: stopping after this block of rounds; once more stops at once", file=sys.stderr)

    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    descriptor = signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(waking)
        listener.join()
        os.close(listening)


def resumed(config: dict, run_dir: Path, algorithm, task, data, drift, mesh) -> Snapshot | None:
    """Returns where an unfinished run of this directory stands, with its metrics cut back to that round, or None to begin.

    Raises InputError if the directory belongs to another run, holds a finished one, or `resume` does not allow either.
    """
    settings.check_run_dir(str(run_dir), config["resume"])
    folder, key = run_dir / CHECKPOINTS, jax.random.key(config["seed"])

    def warn(line):
        print(f"fedjax-cfl: warning: {line}", file=sys.stderr)

    found = None
    if checkpoint.saved(folder):
        found = checkpoint.restore_latest(folder, standing(algorithm, drift, mesh, data, key), identity(config, data), warn)
    if found is None:
        if config["resume"] == "must":
            raise InputError(f"resume=must: {run_dir} has no checkpoint to resume from")
        if not {inside.name for inside in run_dir.iterdir()} <= settings.RUN_FILES:
            raise InputError(f"run_dir={run_dir}: already exists and is not empty; choose another")
        (run_dir / report.METRICS).unlink(missing_ok=True)  # rows of a run that was killed before its first checkpoint
        return None
    if found.step >= config["rounds"] and report.read_summary(run_dir) is not None:
        raise InputError(f"run_dir={run_dir}: already holds this run, finished after {found.step} rounds; choose another or more rounds")
    report.cut_metrics(run_dir, found.step)
    print(f"resuming after round {found.step}")
    return Snapshot(*found.tree, found.facts)


def train(config: dict, choices: dict, overrides: list[str], run_dir: Path, algorithm, task, data, drift, mesh, start) -> int:
    """Runs, or goes on with, one run, and writes its files; returns the exit status: 0, or 128 + the signal that stopped it.

    Raises RunError if it cannot go on; what was written until then stays, and the last checkpoint can be resumed.
    """
    console = Console(highlight=False, soft_wrap=True)
    key = jax.random.key(config["seed"])
    try:
        machine = f"{mesh.size} {mesh.devices.flat[0].platform.upper()} device{'s' * (mesh.size > 1)}"
        console.print(f"[bold]{config['algorithm']['name']}[/] on {config['dataset']['name']}: {sentence(data)}, {machine}")
        with stopping() as asked:
            result = rounds(config, run_dir, (algorithm, task, data, drift, mesh, key), start, asked)
            if asked:
                console.print(f"stopped after round {int(result.state.round)}; the same command goes on from there", markup=False)
                return 128 + asked[0]
            finish(config, choices, overrides, run_dir, algorithm, result, mesh, console)
    except OSError as error:
        raise RunError(f"run_dir={run_dir}: {error.strerror or error}; what was written before can be resumed") from None
    return 0


def rounds(config: dict, run_dir: Path, parts: tuple, start: Snapshot | None, asked: list[int]):
    """Runs the rounds; appends every row, and saves checkpoints when they are due, at the end, and before stopping."""
    algorithm, task, data, drift, mesh, key = parts
    folder, identified, every = run_dir / CHECKPOINTS, identity(config, data), config["checkpoint"]
    saved = {"round": 0 if start is None else int(start.state.round), "at": time.monotonic()}
    with report.open_metrics(run_dir) as handle, report.progress(config["rounds"], saved["round"]) as show:

        def save(snapshot: Snapshot, row):
            step, accuracy = int(snapshot.state.round), row and row["accuracy"]
            tree = (snapshot.state, snapshot.shifting)
            try:
                checkpoint.save(folder, step, tree, snapshot.facts, identified, keep=every["keep"], score=accuracy)
            except InputError as error:  # nothing was wrong with what was asked for
                raise RunError(str(error)) from None
            saved.update(round=step, at=time.monotonic())

        def on_row(row, snapshot: Snapshot):
            report.append_row(handle, row)
            show(row)
            late = row["round"] - saved["round"] >= every["every"] or time.monotonic() - saved["at"] >= 60 * every["minutes"]
            stop, last = bool(asked), row["round"] >= config["rounds"]
            if late or stop or last:
                save(snapshot, row)
            return stop and not last  # asked meanwhile: after the next block, so that nothing stops unsaved

        def on_start(snapshot: Snapshot):
            if start is None:  # from now on the directory is known to be this run's
                save(snapshot, None)

        options = {"drift": drift, "with_auxiliary": config["eval_auxiliary"], "mesh": mesh, "start": start}
        options |= {name: config[name] for name in ("rounds", "eval_every", "discard")}
        result = run(algorithm, task, data, key, **options, on_start=on_start, on_row=on_row)
    if asked and int(result.state.round) >= config["rounds"]:
        asked.clear()  # there was nothing left to stop
    return result


def finish(config: dict, choices: dict, overrides: list[str], run_dir: Path, algorithm, result, mesh, console: Console) -> None:
    """Writes clients.parquet, summary.json and curves.png from a finished run, and prints the final table."""
    table, served = result.clients, algorithm.serve(result.state).index
    held = result.data
    columns = {"client": np.arange(held.num_clients), "group": served, "concept": held.concept, "train_samples": held.train.size}
    report.write_clients(run_dir, columns | {"test_samples": table.samples, "accuracy": table.accuracy, "loss": table.loss, "f1": table.f1})
    summary = summarise(config, choices, overrides, report.read_metrics(run_dir), result, mesh)
    plot.curves(run_dir, summary)
    report.write_json(run_dir / "summary.json", summary)  # last: its presence says that the run is finished
    console.print(report.final_table(spoken(summary)))
    if algorithm.clustered and summary["best_accuracy"] is None:
        console.print(f"no accuracy yet: discard={config['discard']} waits until every client has been met; more rounds, or discard=none")
    console.print(f"written to {run_dir}", markup=False)


def spoken(summary: dict) -> dict:
    """Returns a summary as its reader wants it: scores, then counts beside their rates and sizes with their units."""
    sizes = {name: report.scaled(summary[name], "B") for name in ("bytes_up", "bytes_down", "peak_memory_bytes")}
    words = {name: f"{value:,}" for name, value in summary.items() if isinstance(value, int)} | sizes
    return {name: summary[name] for name in summary if name in SPOKEN or "accuracy" in name or "_f1" in name} | {
        "clients per group": ", ".join(map(str, summary["group_sizes"])),
        "models sent": "{units_up} up, {units_down} down".format(**words),
        "data sent": "{bytes_up} up, {bytes_down} down".format(**words),
        "client updates": "{client_updates} ({client_updates_per_s:,.0f} /s)".format(**summary | words),
        "local steps": "{local_steps} ({local_steps_per_s:,.0f} /s)".format(**summary | words),
        "seconds": "compiling {compile_s:.2f}, training {train_s:.2f}, evaluating {eval_s:.2f}".format(**summary),
        "peak memory": words["peak_memory_bytes"],
        "devices": summary["devices"],
    }


def summarise(config: dict, choices: dict, overrides: list[str], rows: list[dict], result, mesh) -> dict:
    """Returns the contents of summary.json."""
    names = {group: choices[group] for group in ("algorithm", "dataset", "partition", "model", "concept", "drift", "preset")}
    numbers = report.summarise(rows)
    seconds = max(result.times["train_s"], math.ulp(1.0))
    return {
        **names,
        "seed": config["seed"],
        **numbers,
        "client_updates_per_s": numbers["client_updates"] / seconds,
        "local_steps_per_s": numbers["local_steps"] / seconds,
        **result.times,
        "planned_memory_bytes": result.memory,
        "peak_memory_bytes": peak_memory_bytes(),
        "width": widest(mesh) if config["local"]["width"] == "auto" else config["local"]["width"],
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in PACKAGES},
        "overrides": overrides,
    }
