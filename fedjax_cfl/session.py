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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fedjax_cfl import checkpoint, hosts, memory, report, settings, sharding
from fedjax_cfl.data import sentence
from fedjax_cfl.download import cache
from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.programs import standing
from fedjax_cfl.run import COUNTERS, Snapshot, run

CHECKPOINTS = "checkpoints"
# Settings that may differ between a run and its continuation: they change neither the numbers nor what has been computed already.
FREE = ("run_dir", "rounds", "eval_every", "eval_auxiliary", "devices", "offline", "resume", "checkpoint.", "paper.")
FREE += ("local.width", "local.first_layer", "vectorize", "seeds", "coordinator", "process")
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


def resumed(config: dict, run_dir: Path, algorithm, task, data, drift, mesh, until: int | None = None) -> Snapshot | None:
    """Returns where an unfinished run of this directory stands, with its metrics cut back to that round, or None to begin.

    `until`: from no checkpoint of a later round.
    Raises InputError if the directory belongs to another run, holds a finished one, or `resume` does not allow either.
    """
    settings.check_run_dir(str(run_dir), config["resume"])
    folder, key = run_dir / CHECKPOINTS, jax.random.key(config["seed"])

    def warn(line):
        print(f"fedjax-cfl: warning: {line}", file=sys.stderr)

    found = None
    if checkpoint.saved(folder):
        like = standing(algorithm, drift, mesh, data, key)
        found = checkpoint.restore_latest(folder, on_host(like) if jax.process_count() > 1 else like, identity(config, data), warn, until)
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


def shared(begin: Callable[[], Snapshot | None], algorithm, data, drift, mesh, key) -> Snapshot | None:
    """Returns in every process what `begin`, a use of `resumed`, returns in process 0; what it raises ends all of them.

    Raises InputError in the other processes, too, and then without a text.
    """
    start, refused = None, None
    if hosts.leads():
        try:
            start = begin()
        except InputError as error:
            refused = error
    verdict = int(hosts.told(np.int32(2 if refused else start is not None)))  # 0 begin, 1 go on, 2 refused
    if verdict == 2:
        raise refused or InputError("")
    if verdict == 0 or jax.process_count() == 1:
        return start
    mine = (start.state, start.shifting) if start else on_host(standing(algorithm, drift, mesh, data, key))
    return Snapshot(*sharding.everywhere(hosts.told(mine), mesh), start.facts if start else dict(COUNTERS))


def on_host(shapes):
    """Returns NumPy arrays of the given shapes."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def train(config: dict, choices: dict, overrides: list[str], run_dir: Path, algorithm, task, data, drift, mesh, start) -> int:
    """Runs, or goes on with, one run, and writes its files; returns the exit status: 0, or 128 + the signal that stopped it.

    Raises RunError if it cannot go on; what was written until then stays, and the last checkpoint can be resumed.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=not hosts.leads())
    key = jax.random.key(config["seed"])
    try:
        console.print(f"[bold]{config['algorithm']['name']}[/] on {config['dataset']['name']}: {sentence(data)}, {machine(mesh)}")
        with stopping() as asked:
            result = rounds(config, run_dir, (algorithm, task, data, drift, mesh, key), start, asked)
            if asked:
                console.print(f"stopped after round {int(result.state.round)}; the same command goes on from there", markup=False)
                return 128 + asked[0]
            if hosts.leads():
                summary = finish(config, choices, overrides, run_dir, algorithm, task, result, mesh)
                tell(config, run_dir, algorithm, summary, console)
    except OSError as error:
        raise RunError(f"run_dir={run_dir}: {error.strerror or error}; what was written before can be resumed") from None
    return 0


def machine(mesh) -> str:
    """Returns the devices in words."""
    several = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return f"{mesh.size} {mesh.devices.flat[0].platform.upper()} device{'s' * (mesh.size > 1)}{several}"


class Recorder:
    """Writes one run's rows as they come, and checkpoints when they are due, at the end, and before stopping."""

    def __init__(self, config: dict, run_dir: Path, data, begun: int, files: contextlib.ExitStack):
        self.last, self.every, self.folder = config["rounds"], config["checkpoint"], run_dir / CHECKPOINTS
        self.identity, self.handle = identity(config, data), files.enter_context(report.open_metrics(run_dir))
        self.saved = {"round": begun, "at": time.monotonic()}

    def save(self, snapshot: Snapshot, accuracy: float | None = None) -> None:
        """Saves where the run stands."""
        step, tree = int(snapshot.state.round), (snapshot.state, snapshot.shifting)
        try:
            checkpoint.save(self.folder, step, tree, snapshot.facts, self.identity, keep=self.every["keep"], score=accuracy)
        except InputError as error:  # nothing was wrong with what was asked for
            raise RunError(str(error)) from None
        self.saved = {"round": step, "at": time.monotonic()}

    def add(self, row: dict) -> None:
        """Writes a row."""
        report.append_row(self.handle, row)

    def keep(self, row: dict, snapshot: Callable[[], Snapshot], stop: bool) -> None:
        """Saves where the run stands after a row, `snapshot()`, if it is time, or if the run stops or ends there."""
        passed, waited = row["round"] - self.saved["round"], time.monotonic() - self.saved["at"]
        if passed >= self.every["every"] or waited >= 60 * self.every["minutes"] or stop or row["round"] >= self.last:
            self.save(snapshot(), row["accuracy"])


def rounds(config: dict, run_dir: Path, parts: tuple, start: Snapshot | None, asked: list[int]):
    """Runs the rounds; every row and checkpoint is written as it comes."""
    algorithm, task, data, drift, mesh, key = parts
    begun = 0 if start is None else int(start.state.round)
    with contextlib.ExitStack() as files:
        recorder = Recorder(config, run_dir, data, begun, files) if hosts.leads() else None
        show = files.enter_context(report.progress(config["rounds"], begun)) if hosts.leads() else None

        def on_row(row, snapshot: Snapshot):
            if recorder:
                recorder.add(row)
                show(row)
            stop = hosts.any_of(bool(asked))  # only now: a signal that came while the row was written still stops here
            if recorder:
                recorder.keep(row, lambda: snapshot, stop)
            return stop and row["round"] < config["rounds"]  # asked meanwhile: after the next block, so that nothing stops unsaved

        def on_start(snapshot: Snapshot):
            if start is None and recorder:  # from now on the directory is known to be this run's
                recorder.save(snapshot)

        options = {"drift": drift, "with_auxiliary": config["eval_auxiliary"], "mesh": mesh, "start": start}
        options |= {name: config[name] for name in ("rounds", "eval_every", "discard")}
        result = run(algorithm, task, data, key, **options, on_start=on_start, on_row=on_row)
    if int(result.state.round) >= config["rounds"]:
        asked.clear()  # there was nothing left to stop
    elif not asked:
        asked.append(signal.SIGTERM)  # another process was
    return result


def finish(config: dict, choices: dict, overrides: list[str], run_dir: Path, algorithm, task, result, mesh) -> dict:
    """Writes clients.parquet, summary.json and curves.png of a finished run; returns the summary."""
    table, served, held = jax.device_get((result.clients, algorithm.serve(result.state).index, result.data.replace(x=None)))
    columns = {"client": np.arange(held.num_clients), "group": served, "concept": held.concept, "train_samples": held.train.size}
    report.write_clients(run_dir, columns | {"test_samples": table.samples, "accuracy": table.accuracy, "loss": table.loss, "f1": table.f1})
    summary = summarise(config, choices, overrides, report.read_metrics(run_dir), task, result, mesh)
    from fedjax_cfl import plot  # here: matplotlib takes a second to import

    plot.curves(run_dir, summary)
    report.write_json(run_dir / "summary.json", summary)  # last: its presence says that the run is finished
    return summary


def tell(config: dict, run_dir: Path, algorithm, summary: dict, console: Console) -> None:
    """Prints the final table of a run."""
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


def summarise(config: dict, choices: dict, overrides: list[str], rows: list[dict], task, result, mesh) -> dict:
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
        "peak_memory_bytes": memory.peak_memory_bytes(),
        "width": memory.width(config["local"], task, result.data, mesh),
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in PACKAGES},
        "overrides": overrides,
    }
