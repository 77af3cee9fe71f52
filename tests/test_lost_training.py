"""Training that was paid for is not lost: what fails besides rows, models and summary is one line
of warning, and what cannot be written is refused before round 0.
"""

import importlib.metadata
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import one_line

import fedjax_cfl as cfl
from fedjax_cfl.analysis import compare
from fedjax_cfl.cli import doctor, extras, launch
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import assignments, checkpoint, finish, session
from fedjax_cfl.runs.assignments import ASSIGNMENTS_FILE, PART
from fedjax_cfl.runs.labels import find_version
from fedjax_cfl.runs.load import load_run
from fedjax_cfl.runs.results import METRICS_FILE, read_metrics, read_summary
from fedjax_cfl.runs.resume import clear_unsaved, common_step
from fedjax_cfl.simulation.callback import Grouping

SMALL = "dataset=digits dataset.clients=6 clients_per_round=2 local.epochs=1 algorithm=ifca"
SMALL += " algorithm.m=2 model=mclr eval_auxiliary=false devices=1 discard=none"
ALL = np.arange(4)


def grouping(round: int) -> Grouping:
    return Grouping(np.arange(4, dtype=np.int32) % (1 + round), np.full(4, -1, np.int32))


@pytest.mark.parametrize("kind", ["removed", "cut"])
def test_groups_that_are_gone_at_the_end_are_warned_of(kind, fedjax_cfl, tmp_path, monkeypatch):
    real, run = session.finish_run, tmp_path / "run"

    def finish_run(member, *given):
        path = member.run_dir / PART
        if kind == "cut":
            os.truncate(path, path.stat().st_size - 5)
        else:
            path.unlink()
        return real(member, *given)

    monkeypatch.setattr(session, "finish_run", finish_run)
    status, _, error = fedjax_cfl(f"{SMALL} rounds=2 run_dir={run}")
    assert (
        status == 0 and error.count("\n") == error.count(f"{ASSIGNMENTS_FILE} is not written") == 1
    )
    assert assignments.read_assignments(run) is None and read_summary(run)["rounds"] == 2


def sabotage(monkeypatch, function: str, error: BaseException) -> None:
    def fail(*arguments, **named):
        raise error

    monkeypatch.setattr(finish, function, fail, raising=False)


def test_a_run_whose_end_fails_in_every_way_has_its_models_and_summary(
    fedjax_cfl, tmp_path, monkeypatch
):
    """What is measured at the end and the groups fail; a tracker calls sys.exit at each step."""

    class Own(cfl.Callback):
        def on_rows(self, row, grouping, take):
            sys.exit("the tracker ends the run")

        def on_end(self, take):
            sys.exit(4)

    monkeypatch.setattr(launch.build, "build_callbacks", lambda _: ({"own": Own()}, []))
    sabotage(monkeypatch, "finish_assignments", KeyError("groups"))
    monkeypatch.setattr(extras, "finetune_clients", lambda *_: sys.exit(5))
    run = tmp_path / "run"
    status, _, error = fedjax_cfl(f"{SMALL} rounds=2 evaluate.finetune=1 run_dir={run}")
    assert status == 0, error
    warnings = [line for line in error.splitlines() if "warning: " in line]
    assert [line.partition("warning: ")[2].split(":")[0] for line in warnings] == [
        "logger own failed and gets no more rows",
        "evaluate.* is not measured",
        "assignments.parquet is not written",
    ]
    summary = read_summary(run)
    assert summary is not None and summary["rounds"] == 2 and len(read_metrics(run)) == 2
    assert load_run(run).predict(0, np.zeros((2, 8, 8), np.float32)).shape == (2,)


@pytest.mark.nightly
def test_a_stopped_run_whose_groups_were_removed_goes_on(fedjax_cfl, tmp_path):
    run = tmp_path / "run"
    words = f"{SMALL} run_dir={run} checkpoint.every=1"
    assert fedjax_cfl(f"{words} rounds=2")[0] == 0
    (run / ASSIGNMENTS_FILE).unlink()
    status, out, error = fedjax_cfl(f"{words} rounds=3")
    assert status == 0, error
    assert (
        "resuming after round 2" in out
        and "groups are lost; goes on without those before 2" in error
    )
    found = load_run(run).assignments
    assert found is not None and found.rounds.tolist() == [3] and len(read_metrics(run)) == 3


def test_half_a_character_is_refused_before_round_0():
    pool = cfl.Pool(np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1], np.int32), 2)
    held = cfl.Partition(np.arange(4), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1], bool))
    for on_host in (False, True):
        with pytest.raises(InputError, match=r"client 'b\\ud800': half a character"):
            cfl.federate(pool, held._replace(client_names=("a", "b\ud800")), on_host=on_host)
    with pytest.raises(InputError, match=r"class .* half a character"):
        cfl.federate(pool._replace(class_names=("\udfff", "b")), held)
    named = cfl.federate(pool, held._replace(client_names=("ä", "日本\U0001f600")))
    assert named.client_names is not None and named.client_names.names[0] == "ä"


@pytest.mark.nightly
def test_a_grid_that_cannot_be_compared_has_ended_well(fedjax_cfl, tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no LaTeX")

    monkeypatch.setattr(compare, "compare", fail)
    status, _, error = fedjax_cfl(f"{SMALL} rounds=1 seeds=2 run_dir={tmp_path / 'grid'}")
    assert status == 0 and "warning: the runs are not compared: RuntimeError: no LaTeX" in error
    assert all(read_summary(tmp_path / "grid" / number) for number in "01")


@pytest.mark.parametrize("name", ["r[1]", "lr=[0.1]", "a*b?"])
def test_a_folder_whose_name_is_a_pattern_keeps_checkpoints(name, tmp_path):
    (tmp_path / "aXbY" / "checkpoints").mkdir(parents=True)
    folder, tree = tmp_path / name / "checkpoints", {"a": np.arange(3.0), "b": np.ones((2, 2))}
    checkpoint.save(folder, 1, tree, {"n": 1}, {})
    found = checkpoint.restore_latest(folder, tree, {})
    assert found is not None and found.facts == {"n": 1}
    for leaf, before in zip(found.tree.values(), tree.values(), strict=True):
        np.testing.assert_array_equal(leaf, before)
    assert not list((tmp_path / "aXbY" / "checkpoints").iterdir())


@pytest.mark.nightly
def test_a_run_in_a_folder_with_brackets_is_read_again(fedjax_cfl, tmp_path):
    words = f"{SMALL} 'run_dir=\"r[1]/lr=[0.1]\"'"
    status, _, error = fedjax_cfl(f"{words} rounds=1")
    assert status == 0, error
    status, out, error = fedjax_cfl(f"{words} rounds=2")
    assert status == 0 and "resuming after round 1" in out, error
    run = load_run(tmp_path / "r[1]" / "lr=[0.1]")
    assert run.final.round == 2 and run.predict(0, np.zeros((2, 8, 8), np.float32)).shape == (2,)


def test_doctor_names_what_a_run_would_miss_at_its_end(fedjax_cfl, monkeypatch):
    monkeypatch.setattr(doctor, "is_importable", lambda module: module != "pyarrow")
    real = doctor.find_version
    monkeypatch.setattr(doctor, "find_version", lambda name: None if name == "jax" else real(name))
    status, out, _ = fedjax_cfl("doctor")
    assert status == 1 and "missing: pyarrow" in out and "jax: no version known; pip" in out


@pytest.mark.parametrize("damaged", [None, ValueError("no version"), KeyError("Version")])
def test_a_version_that_cannot_be_read_is_none(damaged, monkeypatch):
    def version(package):
        if damaged:
            raise damaged
        return damaged

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert find_version.__wrapped__("jax") is None


@pytest.mark.nightly
def test_a_grid_that_was_killed_while_it_wrote_its_first_checkpoints_begins(fedjax_cfl, tmp_path):
    both = "vectorize=[seed] seed=0,1 rounds=1 run_dir=grid"
    words = f"{SMALL} {both} checkpoint.every=1 checkpoint.keep=1"
    assert fedjax_cfl(words)[0] == 0
    before = [read_metrics(tmp_path / "grid" / number)[-1]["accuracy"] for number in "01"]
    for number, kept in ("0", 1), ("1", 0):
        room = tmp_path / "grid" / number
        assert checkpoint.list_steps(room / "checkpoints") == [0, 1]  # of a grid: two at least
        for step in range(kept, 2):
            (room / "checkpoints" / f"{step}.header").unlink()
        for name in ("summary.json", "clients.parquet", "final.npz", ASSIGNMENTS_FILE):
            (room / name).unlink()
    status, _, error = fedjax_cfl(words)
    assert status == 0, error
    assert before == [read_metrics(tmp_path / "grid" / n)[-1]["accuracy"] for n in "01"]


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [((), (), None), ((0,), (), None), ((0,), (0,), 0), ((0, 5), (0,), 0), ((0, 5), (0, 5), 5)],
)
def test_where_a_grid_goes_on(first, second, common, tmp_path):
    make_checkpoints(tmp_path, first, second)
    assert common_step([tmp_path / "0", tmp_path / "1"]) == common


def make_checkpoints(room, *members) -> None:
    for number, steps in enumerate(members):
        (room / str(number) / "checkpoints").mkdir(parents=True)
        for step in steps:
            (room / str(number) / "checkpoints" / f"{step}.header").touch()


def test_members_that_stand_apart_are_not_thrown_away(tmp_path):
    make_checkpoints(tmp_path, (0, 5), ())
    with pytest.raises(InputError, match="continue each by itself"):
        common_step([tmp_path / "0", tmp_path / "1"])


def test_rows_whose_checkpoints_were_removed_are_not_gone_on_with(tmp_path):
    settings = SimpleNamespace(resume="auto")
    for name in (METRICS_FILE, PART, "run.log"):
        (tmp_path / name).write_text("old")
    clear_unsaved(settings, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.log"]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / METRICS_FILE).write_text("old")
    one_line(
        "already exists and is not empty", clear_unsaved, SimpleNamespace(resume="auto"), tmp_path
    )
    assert (tmp_path / METRICS_FILE).exists()
