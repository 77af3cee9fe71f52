"""The lock of a run directory: one process at a time, whatever happens to it."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys

import pytest

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.run_dir import LOCK, lock


def fails(number):
    def call(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return call


HOLD = """
import sys, time
from fedjax_cfl.runs.run_dir import LOCK, lock
with lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_second_process_is_told_who_holds_the_directory(tmp_path):
    run_dir = tmp_path / "new" / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, run_dir], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(InputError, match=f"in use by process {holder.pid} on ") as caught,
            lock(run_dir),
        ):
            pass
        assert str(caught.value).startswith(f"run_dir={run_dir}: ")
    finally:
        holder.kill()
        holder.wait()
    with lock(run_dir):
        assert f"process {os.getpid()} on" in (run_dir / LOCK).read_text(), (
            "the dead process's lock is taken over"
        )
    assert list(run_dir.iterdir()) == [], "and nothing is left behind"


def test_the_lock_is_not_reentrant_and_ends_with_an_error(tmp_path):
    with pytest.raises(RuntimeError), lock(tmp_path):
        with pytest.raises(InputError, match=f"process {os.getpid()}"), lock(tmp_path):
            pass
        assert (tmp_path / LOCK).exists(), "a refused process leaves the holder's file alone"
        raise RuntimeError
    with lock(tmp_path), lock(tmp_path / "other"):
        pass


def test_a_holder_that_leaves_while_we_wait_takes_its_file_along(tmp_path, monkeypatch):
    real, path = fcntl.flock, tmp_path / LOCK

    def leave_first(descriptor, how):
        monkeypatch.undo()
        path.unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", leave_first)
    with (
        lock(tmp_path),
        pytest.raises(InputError, match=f"process {os.getpid()}"),
        lock(tmp_path),
    ):
        pass


def test_a_stale_file_and_a_removed_directory_do_no_harm(tmp_path):
    (tmp_path / LOCK).write_text("process 1 on some very long name of a machine that is gone")
    with lock(tmp_path):
        assert "gone" not in (tmp_path / LOCK).read_text()
    with lock(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")


def test_a_directory_that_cannot_be_locked_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"cannot be locked: (File exists|Not a directory)"),
        lock(tmp_path / "file"),
    ):
        pass
    monkeypatch.setattr(os, "open", fails(errno.EROFS))
    with (
        pytest.raises(InputError, match="cannot be locked: Read-only file system"),
        lock(tmp_path),
    ):
        pass
