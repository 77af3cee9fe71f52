"""Trackers get the rows of a run, fail alone, and go on with the record of a resumed run."""

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from conftest import call

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import trackers
from fedjax_cfl.runs.assignments import read_assignments
from fedjax_cfl.runs.results import read_metrics
from fedjax_cfl.runs.trackers import Guarded, list_numbers
from fedjax_cfl.simulation.callback import Callback, RunInfo

LINE = (
    "dataset.clients=8 clients_per_round=3 local.epochs=1 model=mclr algorithm=fedavg"
    " checkpoint.every=1 assignments=0 run_dir=run"
)
ROW = {"round": 3, "accuracy": 0.5, "ari": None, "group_sizes": [4, 5], "loss": float("nan")}
NUMBERS = {"round": 3, "accuracy": 0.5, "group_sizes/0": 4, "group_sizes/1": 5}


def fake(lines: list, fails: str = ""):
    """Returns a tracker that writes down what it is told, and fails where asked to."""

    def note(*what):
        lines.append(what)
        if what[0] == fails:
            raise OSError("the disk\nis full")

    class Fake(Callback):
        def on_start(self, run, take):
            note("open", run.begun)

        def on_rows(self, row, grouping, take):
            note("log", row["round"], list_numbers(row))

        def on_end(self, take):
            note("close")

    return Fake()


def tell(trackers: dict, begun: int, rows: list) -> None:
    """Gives rows to trackers as a run does."""
    with contextlib.ExitStack() as files:
        guarded = [Guarded(name, tracker, files) for name, tracker in trackers.items()]
        for tracker in guarded:
            tracker.on_start(RunInfo(Path("run"), {"x.y": 1}, begun), lambda: None)
        for row in rows:
            for tracker in guarded:
                tracker.on_rows(row, None, lambda: None)


def test_a_tracker_gets_the_numbers_of_each_row():
    lines = []
    tell({"a": fake(lines)}, 2, [ROW])
    assert lines == [("open", 2), ("log", 3, NUMBERS), ("close",)]


@pytest.mark.parametrize("when", ["open", "log", "close"])
def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(when, capsys):
    bad, good = [], []
    tell({"bad": fake(bad, when), "good": fake(good)}, 0, [ROW, ROW])
    error = capsys.readouterr().err
    assert (
        error == "fedjax-cfl: warning: logger bad failed and gets no more rows: the disk is full\n"
    )
    assert [line[0] for line in bad].count(when) == 1
    assert [line[0] for line in good] == ["open", "log", "log", "close"]


OWN = """
import json
import fedjax_cfl as cfl

class Own(cfl.Callback):
    def __init__(self, path: str = "lines.jsonl"):
        self.path = path

    def note(self, *what):
        open(self.path, "a").write(json.dumps(what) + "\\n")

    def on_start(self, run, take):
        self.note("open", run.begun, run.run_dir.name, run.settings["rounds"])

    def on_rows(self, row, grouping, take):
        self.note("log", row["round"])

    def on_end(self, take):
        self.note("close")
"""


@pytest.mark.nightly
def test_a_run_and_its_continuation_tell_a_tracker_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "own_tracker.py").write_text(OWN)
    line = f"{LINE} +logger.own._target_=own_tracker.Own"
    assert call(monkeypatch, f"{line} rounds=2", devices=1) == 0
    assert call(monkeypatch, f"{line} rounds=3", devices=1) == 0
    lines = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text().splitlines()]
    begun = [["open", 0, "run", 2], ["log", 1], ["log", 2], ["close"]]
    assert lines == [*begun, ["open", 2, "run", 3], ["log", 3], ["close"]]
    assert len(read_metrics(tmp_path / "run")) == 3
    assert read_assignments(tmp_path / "run") is None, "none were to be kept"


def test_what_is_not_installed_is_said_before_training(fedjax_cfl, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"logger=wandb: .* install fedjax-cfl\[wandb\]"):
        trackers.WandB()
    status, _, error = fedjax_cfl(f"{LINE} rounds=1 logger=[tensorboard,wandb]")
    assert status == 2 and error.startswith("fedjax-cfl: logger=tensorboard: needs the package")


def run_twice(tmp_path, monkeypatch, name: str) -> Path:
    """Runs two rounds and then a third with a tracker; returns the run directory."""
    monkeypatch.chdir(tmp_path)
    for rounds in (2, 3):
        assert call(monkeypatch, f"{LINE} logger={name} rounds={rounds}", devices=1) == 0
    return tmp_path / "run"


def test_tensorboard_has_every_round_once(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboardX", reason="the extra fedjax-cfl[tensorboard] is not installed")
    folder = run_twice(tmp_path, monkeypatch, "tensorboard") / "tensorboard"
    assert "warning" not in capsys.readouterr().err
    assert len(list(folder.glob("events.*"))) == 2
    assert read_events(folder, "accuracy") == {1, 2, 3}


def read_events(folder: Path, name: str) -> set[int]:
    """Returns the steps of a scalar in TensorBoard's files: records of length, CRC, event, CRC."""
    from tensorboardX.proto.event_pb2 import Event

    steps = set()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            steps |= {event.step for value in event.summary.value if value.tag == name}
    return steps


def test_wandb_goes_on_under_the_same_id(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb", reason="the extra fedjax-cfl[wandb] is not installed")
    folder = run_twice(tmp_path, monkeypatch, "wandb") / "wandb"
    assert "warning" not in capsys.readouterr().err
    identity = (folder / "run-id.txt").read_text()
    assert len(list(folder.glob(f"offline-run-*-{identity}"))) == 2


def test_mlflow_has_every_round_once(tmp_path, monkeypatch, capsys):
    package = pytest.importorskip("mlflow", reason="the extra fedjax-cfl[mlflow] is not installed")
    run_dir = run_twice(tmp_path, monkeypatch, "mlflow")
    assert "warning" not in capsys.readouterr().err
    client = package.MlflowClient((tmp_path / "mlruns").as_uri())
    found = client.get_metric_history((run_dir / "mlflow-run.txt").read_text(), "accuracy")
    assert [metric.step for metric in found] == [1, 2, 3]


def test_settings_of_a_tracker_are_checked(fedjax_cfl):
    status, _, error = fedjax_cfl(f"{LINE} logger=wandb logger.wandb.mode=on")
    assert status == 2 and "logger.wandb.mode=on: must be one of offline, online" in error
