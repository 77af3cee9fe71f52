"""The processes of cells: each runs its cell, writes seedN.log and ends with its parent."""

import contextlib
import datetime
import fcntl
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fedjax_cfl.errors import InputError
from fedjax_cfl.papers.cells import Cell, has_run, list_runs
from fedjax_cfl.runs.results import METRICS_FILE, SUMMARY_FILE

PROGRAM = Path(__file__).resolve().with_name("cell_process.py")
# -P: a module in the current folder must not stand in for an installed one
COMMAND = [sys.executable, "-P", str(PROGRAM), "fedjax_cfl"]
ATTEMPT = "--- "  # begins the line of a log above which all is of earlier attempts


def log_path(cell: Cell) -> Path:
    """Returns the path of a cell's log, beside its run directory."""
    return cell.folder.with_name(f"{cell.folder.name}.log")


def open_log(cell: Cell) -> IO[str]:
    """Opens a cell's log for appending and locks it. Raises InputError if a process
    that runs this cell holds it.

    The lock belongs to the open file: the cell's process holds it as its output and
    lets go of it when it ends, however it ends.
    """
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    log = log_path(cell).open("a", encoding="utf-8")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        raise InputError(f"another process runs this cell; see {log_path(cell)}") from None
    return log


def start_process(cell: Cell, alone: bool) -> subprocess.Popen:
    """Starts a cell's process, its output added to seedN.log; beside others it gets one
    device. Raises InputError if another process runs the cell.
    """
    several = not alone and not any(text.startswith("devices=") for text in cell.overrides)
    devices = ["devices=1"] * several
    together = [f"seed={cell.seed}", f"seeds={len(cell.seeds)}"] if cell.seeds else []
    arguments = [*cell.overrides, *together, *devices, f"run_dir={cell.folder}"]
    if cell.grid:
        seeds = ",".join(map(str, cell.seeds))
        arguments = ["tune", "--out", str(cell.folder), "--seeds", seeds]
        if cell.trial_seeds:
            arguments += ["--trial-seeds", ",".join(map(str, cell.trial_seeds))]
        arguments += [*cell.overrides, *cell.grid, *devices]
    with open_log(cell) as log:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        log.write(f"{ATTEMPT}{now} fedjax-cfl {shlex.join(arguments)}\n")
        log.flush()
        # a session of its own: Ctrl-C must reach it once, from here, because a second one would
        # end it at once
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.PIPE,  # held open until this process ends: see cell_process.py
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
                if cell.row in skipped:
                    continue
                try:
                    if has_run(cell):  # another process has finished it meanwhile
                        yield cell, 0, ""
                        continue
                    active[start_process(cell, alone=jobs == 1)] = cell
                except InputError as error:
                    yield cell, 2, str(error)
            for process in [process for process in active if process.poll() is not None]:
                cell = active.pop(process)
                close_pipe(process)
                yield cell, process.returncode, read_error(cell) if process.returncode else ""
            show(len(todo) - len(queue) - len(active), list(active.values()))
            time.sleep(0.1 if active else 0)
    finally:
        stop_processes(list(active))


def close_pipe(process: subprocess.Popen) -> None:
    """Closes the pipe of a process that has ended."""
    if process.stdin is not None:
        process.stdin.close()


def stop_processes(processes: list[subprocess.Popen]) -> None:
    """Asks processes to stop and waits until they have; an interrupt meanwhile kills them."""
    for process in processes:
        process.terminate()
    try:
        for process in processes:
            process.wait()
            close_pipe(process)
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM interrupt as Ctrl-C does, so that the cells save where they stand."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def read_error(cell: Cell) -> str:
    """Returns the one-line error that a cell's last attempt ended with, or where to look."""
    lines = log_path(cell).read_text(encoding="utf-8", errors="replace").splitlines()
    begun = max((i for i, line in enumerate(lines) if line.startswith(ATTEMPT)), default=0)
    errors = [line for line in lines[begun:] if line.startswith("fedjax-cfl: ")]
    return errors[-1].removeprefix("fedjax-cfl: ") if errors else f"see {log_path(cell)}"


def describe_progress(cell: Cell) -> str:
    """Returns the last round that a cell has evaluated so far, 0 if none; where it tunes, how many
    runs have finished.
    """
    if cell.grid:
        return f"{sum(1 for _ in cell.folder.rglob(SUMMARY_FILE))} runs"
    try:
        written = (list_runs(cell)[0] / METRICS_FILE).read_bytes()
    except FileNotFoundError:
        written = b""
    rounds = [b"0", *re.findall(rb'^{"round": (\d+)', written, re.MULTILINE)]
    return f"round {int(rounds[-1])}"
