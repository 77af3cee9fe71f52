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


WRITTEN = [".lock", "run.log", "metrics.jsonl", ".hydra", "checkpoints", "best"]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("way", ["seed=0", "seeds=2", "-m seed=0,1"])
def test_nothing_is_written_through_a_link(way, name, fedjax_cfl, tmp_path):
    """A directory that somebody else prepared could have any file of the user's replaced."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.yaml").write_text("mine")
    (tmp_path / "own.txt").write_text("mine")
    target = "own" if name in (".hydra", "checkpoints", "best") else "own.txt"
    folder = tmp_path / "run" / ("" if way == "seed=0" else "0")
    folder.mkdir(parents=True)
    (folder / name).symlink_to(tmp_path / target)
    status, _, error = fedjax_cfl(f"{way} rounds=1 algorithm=fedavg run_dir=run")
    assert status == 2 and error.count("\n") == 1
    assert "run_dir=" in error and (f"{name} in it is a link" in error or "is not empty" in error)
    assert (tmp_path / "own.txt").read_text() == "mine"
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["config.yaml"]
    assert (tmp_path / "own" / "config.yaml").read_text() == "mine"


def test_a_sweep_does_not_go_on_behind_a_link(fedjax_cfl, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "index.csv").write_text("run,seed\n0,0\n1,1\n")
    (tmp_path / "sweep" / "0").symlink_to(tmp_path / "own")
    status, _, error = fedjax_cfl("-m seed=0,1 rounds=1 algorithm=fedavg run_dir=sweep")
    assert status == 2 and "run_dir=sweep: 0 in it is a link" in error
    assert not list((tmp_path / "own").iterdir())


def test_a_lock_is_not_a_link(tmp_path):
    """A program that trains in a directory locks it first."""
    (tmp_path / "own").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "own")
    with pytest.raises(InputError, match="in it is a link; remove it"), lock(tmp_path):
        pass
    assert (tmp_path / "own").read_text() == "mine"
