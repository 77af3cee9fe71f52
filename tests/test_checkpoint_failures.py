"""Checkpoints that cannot be written, and writers that are killed: one line, and what
was saved before is still there.
"""

import errno
import multiprocessing
import os
import random
import resource
import shutil
import time
from pathlib import Path

import pytest
from test_checkpoint import latest, names, save

from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.runs import checkpoint


def fails(number):
    def call(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return call


def check_failed_save(folder, reason):
    """Asserts that a save fails with one line, twice, and leaves the checkpoints as
    they were and nothing else.
    """
    before = names(folder)
    for _ in range(2):
        with pytest.raises(RunError) as caught:
            save(folder, 9)
        assert (
            str(caught.value)
            == f"checkpoint of round 9 in {folder} could not be written: {os.strerror(reason)}"
        )
    left = set(names(folder)) - {"9"}  # which does not count without a header
    assert [name for name in sorted(left) if "tmp" not in name] == before
    assert latest(folder) == (1, [])


@pytest.mark.parametrize("where", ["replace", "write_header", "free"])
def test_a_full_disk_is_one_line(tmp_path, monkeypatch, where):
    save(tmp_path, 1)
    if where == "free":
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000)
        )
    else:
        place = checkpoint if where == "write_header" else os
        monkeypatch.setattr(place, where, fails(errno.ENOSPC))
    check_failed_save(tmp_path, errno.ENOSPC)
    monkeypatch.undo()
    save(tmp_path, 2)
    assert latest(tmp_path) == (2, [])


def test_a_write_that_fails_inside_orbax_is_one_line(tmp_path):
    save(tmp_path, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # bytes in one file
    try:
        check_failed_save(tmp_path, errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    save(tmp_path, 2)
    assert latest(tmp_path) == (2, [])


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_one_line(tmp_path, monkeypatch, number):
    save(tmp_path, 1)
    monkeypatch.setattr(Path, "mkdir", fails(number))
    check_failed_save(tmp_path, number)


def test_a_folder_without_write_permission(tmp_path):
    save(tmp_path, 1)
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("the superuser may write everywhere")
        check_failed_save(tmp_path, errno.EACCES)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        save(tmp_path / "file", 1)
    with pytest.raises(InputError, match="Not a directory"):
        latest(tmp_path / "file")


def test_the_old_ones_stay_until_the_new_one_is_whole(tmp_path, monkeypatch):
    save(tmp_path, 5, keep=1)
    monkeypatch.setattr(checkpoint, "write_header", fails(errno.EIO))
    with pytest.raises(RunError):
        save(tmp_path, 6, keep=1)
    assert latest(tmp_path) == (5, [])
    monkeypatch.undo()
    save(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["6", "6.header"]


def test_what_cannot_be_deleted_now_is_deleted_later(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "remove", lambda *_: None)
    save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert latest(tmp_path) == (2, [])
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["3", "3.header"]


def save_forever(folder, step, said):
    while True:
        step += 1
        save(folder, step, keep=2)
        said.value = step


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedjax_cfl.runs.checkpoint", "optax", "pytest"])
    chance = random.Random(0)
    step = 0
    for _ in range(10):
        said = context.Value("i", step)
        process = context.Process(target=save_forever, args=(tmp_path, step, said), daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while said.value == step:
            assert time.monotonic() < deadline and process.is_alive()
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.join()
        found, warned = latest(tmp_path)
        assert found in (said.value, said.value + 1), "a save that returned is never lost"
        assert warned == []
        assert len(names(tmp_path)) <= 8, "two kept, one to be deleted, one unfinished"
        step = found
    save(tmp_path, step + 1, keep=2)
    assert len(names(tmp_path)) == 4
