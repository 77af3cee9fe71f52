"""A look at a file of a user's own, and the study that compares methods on it."""

import itertools
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fedjax_cfl as cfl
from fedjax_cfl.analysis.suggest import Clusters
from fedjax_cfl.cli import look
from fedjax_cfl.cli import study as module
from fedjax_cfl.cli.main import COMMANDS, open_hydra, parse_flags
from fedjax_cfl.cli.names import read_line
from fedjax_cfl.cli.settings import check_line
from fedjax_cfl.cli.tune import split_method
from fedjax_cfl.errors import InputError

PARTS = "--y state --client machine"


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """A CSV of text labels, whose features have other scales, in the current folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    machine = np.arange(240) % 6
    rate, temp = rng.normal(70, 11.5, 240), rng.normal(36.6, 0.3, 240)
    state = np.where(np.where(machine < 3, rate > 70, temp > 36.6), "alarm", "ok")
    names = [f"machine {k}" for k in machine]
    frame = pd.DataFrame({"machine": names, "heart rate": rate, "temp": temp, "state": state})
    frame.to_csv("my machines.csv", index=False)
    return frame


def test_a_look_shows_clients_labels_and_scales_and_what_follows(machines, fedjax_cfl, monkeypatch):
    status, out, error = fedjax_cfl(f"look 'my machines.csv' {PARTS}")
    assert (status, error) == (0, "")
    assert "my machines: 6 clients, 2 classes, 216 train and 24 test samples" in out
    line = next(line for line in out.splitlines() if "machine 3" in line)
    assert "36" in line and any(bar in line for bar in "▂▃▄▅▆▇")
    assert "features: heart rate, temp\n" in out
    assert "(temp) to" in out and "(heart rate)" in out
    assert "groups: neither labels nor features say" in out  # of six clients
    command = shlex.split(out.splitlines()[-1])
    assert command[0] == "fedjax-cfl" and "dataset.standardize=pool" in command
    monkeypatch.setattr(look, "suggest_groups", lambda data: [Clusters("labels", 3, 0.9, 0.5)])
    found = fedjax_cfl(f"look 'my machines.csv' {PARTS}")[1].splitlines()
    assert "groups: by their labels clients fall into 3 (silhouette 0.90, by chance at" in found[-2]
    assert shlex.split(found[-1]) == [*command, "dataset.groups=3"]
    with open_hydra():
        _, given = parse_flags(command[1:])
        check_line(read_line(given.overrides, given.multirun, COMMANDS))
    scaled = machines.assign(temp=(machines["temp"] - 36.6) * 3)
    scaled["heart rate"] = (scaled["heart rate"] - 70) / 11.5
    scaled.to_csv("scaled.csv", index=False)
    assert "taken as they are" in fedjax_cfl(f"look scaled.csv {PARTS}")[1]


def test_a_look_at_a_folder_of_images(fedjax_cfl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for client, name, number in itertools.product("abc", ("cat", "dog"), range(4)):
        path = Path("photos", "train" if number else "test", client, name, f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (4, 4), np.uint8)).save(path)
    status, out, error = fedjax_cfl("look photos dataset.source.layout=split/user/class")
    assert (status, error) == (0, "")
    assert "photos: 3 clients, 2 classes, 18 train and 6 test samples" in out
    assert "groups: neither labels nor features say" in out
    assert "dataset=image_folder dataset.source.path=photos dataset.name=photos" in out


def test_what_cannot_be_looked_at_is_refused(machines, fedjax_cfl):
    status, _, error = fedjax_cfl("look 'my machines.csv'")
    assert status == 2 and "y=label is not there, expected one of machine" in error
    status, _, error = fedjax_cfl("look photos")
    assert status == 2 and "photos: ends in none of .csv" in error and error.count("\n") == 1
    assert "and is no folder of images" in error
    status, _, error = fedjax_cfl(f"study 'my machines.csv' {PARTS} --methods fedavg,ifka")
    assert status == 2 and "algorithm=ifka: unknown algorithm" in error


def test_each_method_has_as_many_trials():
    with open_hydra():
        tried = {name: module.list_tried(name, []) for name in ("fedavg", "ifca", "flux")}
        fixed = module.list_tried("ifca+scaffold+ditto", ["local.lr=0.1", "dataset.groups=3"])
    counts = {
        name: np.prod([text.count(",") + 1 for text in values]) for name, values in tried.items()
    }
    assert counts == {"fedavg": 6, "ifca": 6, "flux": 6} and fixed == []
    assert tried["ifca"] == ["local.lr=0.01,0.03,0.1", "dataset.groups=2,4"]
    layered = ["algorithm=ifca", "personal=[scaffold,ditto]", "algorithm.name=ifca+scaffold+ditto"]
    assert split_method("ifca+scaffold+ditto") == layered


def test_a_function_of_the_users_own_is_studied_too(tmp_path, monkeypatch, fedjax_cfl):
    monkeypatch.chdir(tmp_path)
    own = "import fedjax_cfl as cfl\n\n\ndef plain(task, local, system{}):\n"
    own += "    return cfl.algorithms.{}(task, local, system{})\n"
    text = own.format(", *, m", "ifca", ", m=m") + own.format("", "fedavg", "").partition("\n\n")[2]
    (tmp_path / "studied.py").write_text(text.replace("plain", "grouped", 1))
    with open_hydra():
        tried = {name: module.list_tried(f"studied.{name}", []) for name in ("grouped", "plain")}
        more = module.list_tried("studied.grouped", [], ("2", "7"))
    assert tried["grouped"] == ["local.lr=0.01,0.03,0.1", "dataset.groups=2,4"]
    assert tried["plain"] == ["local.lr=0.001,0.003,0.01,0.03,0.1,0.3"]
    assert more[1] == "dataset.groups=2,7"
    chosen = split_method("studied.grouped+ditto")
    with open_hydra():
        _, given = parse_flags([*chosen, "dataset.groups=2"])
        line = read_line(given.overrides, given.multirun, COMMANDS)
        check_line(line)
    assert line.configs[0]["algorithm"]["m"] == 2
    status, _, error = fedjax_cfl("tune --methods studied.missing local.lr=0.1")
    assert status == 2 and "studied.missing: cannot be imported" in error


def test_a_study_prints_the_commands_that_it_stands_for(machines, monkeypatch, capsys):
    """They are allowed, and are what it does."""
    done = []

    def note(name, result=None):
        def call(*given, **options):
            done.append((name, given, options))
            return result

        return call

    for name in ("tune_methods", "compare", "report"):
        monkeypatch.setattr(module, name, note(name, f"result of {name}"))
    asked = {"methods": ["fedavg", "ifca+ditto"], "settings": ["rounds=3"], "seeds": (0, 1)}
    found = cfl.study("my machines.csv", y="state", client="machine", **asked)
    assert found == "result of compare"
    printed = [line for line in capsys.readouterr().out.splitlines() if "fedjax-cfl" in line]
    commands = [shlex.split(line) for line in printed]
    assert [line[1] for line in commands] == ["tune", "tune", "compare", "report"]
    assert [call[0] for call in done] == ["tune_methods", "tune_methods", "compare", "report"]
    tuned = zip(commands[:2], done[:2], strict=True)
    for command, (_, (methods, overrides, out), options) in tuned:
        assert command[2:6] == ["--out", str(out), "--methods", *methods]
        assert command[6:-2] == overrides and options["seeds"] == (0, 1)
        with open_hydra():
            _, given = parse_flags(["-m", *split_method(methods[0]), *overrides])
            check_line(read_line(given.overrides, given.multirun, COMMANDS))
    assert done[2][1][0] == done[3][1][0] == ["study/fedavg/test", "study/ifca+ditto/test"]


@pytest.mark.nightly
def test_a_study_ends_with_a_table_and_a_page_and_goes_on(machines, fedjax_cfl, tmp_path):
    line = f"study 'my machines.csv' {PARTS} --methods fedavg,ifca --seeds 0,1 rounds=2"
    line += " local.lr=0.1 devices=1"
    status, out, error = fedjax_cfl(line)
    assert status == 0, error
    assert "chosen: of those within 0.2 points of the best" in out
    written = {path.name for path in (tmp_path / "study").iterdir()}
    assert {"pivot.md", "pivot.tex", "report.html"} <= written
    assert "validation samples" in (tmp_path / "study/ifca/validation.log").read_text()
    rows = (tmp_path / "study/ifca/test/0/metrics.jsonl").read_bytes()
    status = fedjax_cfl(line)[0]
    assert status == 0 and (tmp_path / "study/ifca/test/0/metrics.jsonl").read_bytes() == rows
    with pytest.raises(InputError, match="names a seed twice"):
        cfl.study("my machines.csv", y="state", client="machine", seeds=(1, 1))
