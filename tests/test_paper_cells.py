"""Cells of `fedjax-cfl paper` as processes: interrupted, killed, locked, failed."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import nightly
from papers import processes
from test_paper import CELL, table, verb

__all__ = ["verb"]
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"  # where `papers` is found
PATH = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("number", [nightly(signal.SIGINT), nightly(signal.SIGTERM)])
def test_an_interrupt_stops_the_cells_and_the_rest_is_run_later(verb, tmp_path, number):
    code = f"""
        import signal
        from pathlib import Path
        from papers import cells, processes, runner
        # a shell that runs the tests in the background has SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cells.TABLES = Path({str(verb.table.parent)!r})
        processes.COMMAND = {processes.COMMAND!r}
        try:
            arguments = ["fake", "--out", {str(verb.out.parent)!r}, "--jobs", "2"]
            runner.main(arguments)
        except KeyboardInterrupt:
            raise SystemExit(130)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"SLOW": "60", "PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(verb.started()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "goes on from here" in out
    assert len(verb.started()) == 2 and not list(verb.out.glob("**/summary.json"))
    assert verb() == 0
    assert len(verb.started()) == 6 and len(list(verb.out.glob("**/summary.json"))) == 4


def wait_until(condition, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_locked(log: Path) -> bool:
    """Returns whether a process writes this log."""
    with log.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


OWN = """
import fcntl, sys
from papers.cell_process import end_with_parent
fcntl.flock(sys.stdout, fcntl.LOCK_EX)
end_with_parent()
print("begun", flush=True)
"""


@pytest.mark.nightly
def test_cells_die_with_their_parent_and_the_same_command_goes_on(verb, tmp_path):
    """A real SIGKILL, and what the processes of users' cells do first."""
    (tmp_path / "fake_cell.py").write_text(OWN + CELL)
    command = [sys.executable, "-P", str(tmp_path / "fake_cell.py")]
    code = f"""
        from pathlib import Path
        from papers import cells, processes, runner
        cells.TABLES = Path({str(verb.table.parent)!r})
        processes.COMMAND = {command!r}
        arguments = ["fake", "--out", {str(verb.out.parent)!r}, "--jobs", "2"]
        raise SystemExit(runner.main(arguments))
    """
    line, place = [sys.executable, "-c", textwrap.dedent(code)], os.environ | {"PYTHONPATH": PATH}
    parent = subprocess.Popen(line, env=place | {"SLOW": "600"}, stdout=subprocess.DEVNULL)
    assert wait_until(lambda: len(verb.started()) == 2)
    logs = sorted(verb.out.glob("**/seed0.log"))
    assert len(logs) == 2 and all(map(is_locked, logs))
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(map(is_locked, logs)), 20), "a cell has outlived its parent"
    again = subprocess.run(line, env=place, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(verb.started()) == 6 and len(list(verb.out.glob("**/summary.json"))) == 4
    for log in logs:  # the killed attempt is still there
        text = log.read_text()
        assert text.count(processes.ATTEMPT) == 2 and text.count("begun") == 2


def test_a_table_does_not_look_into_live_runs(verb, monkeypatch):
    """Their folders come and go while they save."""
    (verb.out / "first-a" / "Avg" / "seed0" / "checkpoints").mkdir(parents=True)
    scan = os.scandir

    def scandir(path="."):
        if "checkpoints" in str(path):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert verb("--rows", "second-b", "--seeds", "2") == 0
    assert table(verb.out)["second-b", "Avg"]["seeds"] == "2"


def test_an_error_is_that_of_the_last_attempt(verb, monkeypatch, capsys):
    monkeypatch.setenv("BROKEN", "fedavg")
    assert verb("--rows", "first-a", "--columns", "Avg") == 1
    assert "non-finite update" in capsys.readouterr().out
    monkeypatch.setenv("BROKEN", "")
    monkeypatch.setenv("SLOW", "soon")
    assert verb("--rows", "first-a", "--columns", "Avg") == 1
    assert "failed: see " in capsys.readouterr().out
