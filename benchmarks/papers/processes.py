"""The processes of cells: each runs its cell, adds to its log and ends with its parent."""

import contextlib
import datetime
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from fedjax_cfl.runs.results import METRICS_FILE, SUMMARY_FILE
from papers.cells import Cell, list_runs

# -P: a module in the current folder must not stand in for an installed one
COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("cell_process.py"))]
ATTEMPT = "--- "  # begins the line of a log above which all is of earlier attempts


def log_path(cell: Cell) -> Path:
    """Returns the path of a cell's log, beside its run directory."""
    return cell.folder.with_name(f"{cell.folder.name}.log")


def list_arguments(cell: Cell, alone: bool) -> list[str]:
    """Returns the command line of a cell; beside others it gets one device."""
    several = not alone and not any(text.startswith("devices=") for text in cell.overrides)
    devices = ["devices=1"] * several
    if not cell.grid:
        together = [f"seed={cell.seed}", f"seeds={len(cell.seeds)}"] if cell.seeds else []
        return [*cell.overrides, *together, *devices, f"run_dir={cell.folder}"]
    arguments = ["tune", "--out", str(cell.folder), "--seeds", ",".join(map(str, cell.seeds))]
    if cell.trial_seeds:
        arguments += ["--trial-seeds", ",".join(map(str, cell.trial_seeds))]
    return [*arguments, *cell.overrides, *cell.grid, *devices]


def start_process(cell: Cell, alone: bool) -> subprocess.Popen:
    """Starts a cell's process, its output added to its log."""
    arguments = list_arguments(cell, alone)
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    with log_path(cell).open("a", encoding="utf-8") as log:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        log.write(f"{ATTEMPT}{now} fedjax-cfl {shlex.join(arguments)}\n")
        log.flush()
        # a session of its own: Ctrl-C must reach it once, from here, because a second one would
        # end it at once; the pipe is held open until this process ends, see cell_process.py
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_in_parallel(
    todo: list[Cell], jobs: int, skipped: set[str], show: Callable[[int, list[Cell]], None]
) -> Iterator[tuple[Cell, int, str]]:
    """Yields (cell, exit status, its one-line error or "") as cells end, `jobs` at a
    time; rows that the caller puts into `skipped` are not begun any more.

    `show(ended, active)` is called again and again with the number of ended cells and the cells
    that run. However the loop ends, also by an interrupt, it stops the cells: they save where
    they stand, and go on from there another time.
    """
    queue, active = deque(todo), {}
    try:
        while queue or active:
            while queue and len(active) < jobs:
                cell = queue.popleft()
                if cell.row not in skipped:
                    active[start_process(cell, alone=jobs == 1)] = cell
            for process in [process for process in active if process.poll() is not None]:
                cell = active.pop(process)
                process.communicate()  # closes the pipe
                yield cell, process.returncode, read_error(cell) if process.returncode else ""
            show(len(todo) - len(queue) - len(active), list(active.values()))
            time.sleep(0.1 if active else 0)
    finally:
        stop_processes(list(active))


def stop_processes(processes: list[subprocess.Popen]) -> None:
    """Asks processes to stop and waits until they have; an interrupt meanwhile kills them."""
    for process in processes:
        process.terminate()
    try:
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM interrupt as Ctrl-C does, so that the cells save where they stand."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def read_error(cell: Cell) -> str:
    """Returns the one-line error that a cell's last attempt ended with, or where to look."""
    text = log_path(cell).read_text(encoding="utf-8", errors="replace")
    last = f"\n{text}".rpartition(f"\n{ATTEMPT}")[2]
    errors = [line for line in last.splitlines() if line.startswith("fedjax-cfl: ")]
    return errors[-1].removeprefix("fedjax-cfl: ") if errors else f"see {log_path(cell)}"


def describe_progress(cell: Cell) -> str:
    """Returns the last round that a cell has evaluated so far, 0 if none; where it tunes, how many
    runs have finished.
    """
    if cell.grid:
        return f"{sum(1 for _ in cell.folder.rglob(SUMMARY_FILE))} runs"
    path = list_runs(cell)[0] / METRICS_FILE
    written = path.read_bytes() if path.exists() else b""
    rounds = [b"0", *re.findall(rb'^{"round": (\d+)', written, re.MULTILINE)]
    return f"round {int(rounds[-1])}"
