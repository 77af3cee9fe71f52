"""From Python what the command line does: a run in a directory, gone on with and read; tables as
frames; figures.
"""

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

import fedjax_cfl as cfl
from fedjax_cfl import algorithms, library
from fedjax_cfl.analysis import report
from fedjax_cfl.analysis.plot import draw_curves
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.data.scaling import Scaling
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import results, session
from fedjax_cfl.runs.from_python import describe
from fedjax_cfl.runs.settings import RunSettings
from fedjax_cfl.simulation.rows import count_concepts
from fedjax_cfl.system.select import rr_then_random, uniform

KEY = jax.random.key(5)
UNSCALED = Scaling(np.zeros((1, 5), np.float32), np.ones((1, 5), np.float32))
OF_TWO = Scaling(np.zeros((3, 5), np.float32), np.ones((3, 5), np.float32))  # of two clients


@pytest.fixture(scope="module")
def ifca(linear, local):
    return cfl.algorithms.ifca(linear, local, cfl.select.uniform(5), m=2)


def fingerprint(rows) -> list[dict]:
    """Returns rows without seconds."""
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, ifca, linear, toy):
    """(run in a directory, the directory), four rounds."""
    folder = tmp_path_factory.mktemp("library") / "runs" / "0"
    names = {"algorithm": "ifca", "dataset": "toy", "eta": 0.5}
    mesh = cfl.make_mesh(1)
    run = cfl.run(ifca, linear, toy, KEY, rounds=4, mesh=mesh, run_dir=folder, settings=names)
    return run, folder


@pytest.mark.nightly
def test_a_directory_changes_no_number(finished, ifca, linear, toy):
    run, folder = finished
    memory = cfl.run(ifca, linear, toy, KEY, rounds=4, mesh=cfl.make_mesh(1))
    assert fingerprint(run.rows) == fingerprint(results.to_plain(memory.rows))
    names = {path.name for path in folder.iterdir()}
    wanted = {"metrics.jsonl", "summary.json", "clients.parquet", "assignments.parquet"}
    assert (
        wanted | {"curves.png", "final.npz", "best.npz", "checkpoints", ".hydra", "run.log"}
        == names
    )
    assert run.summary["algorithm"] == "ifca" and run.summary["overrides"] == ["eta=0.5"]
    assert run.settings["seed"] == 5 and run.summary["seed"] == 5
    samples = np.zeros((2, 5), np.float32)
    again = cfl.load_run(folder)  # the package's own module is built from the settings
    np.testing.assert_array_equal(again.predict(0, samples), run.predict(0, samples))


@pytest.mark.nightly
def test_a_row_has_the_accuracy_of_each_true_group(finished, toy):
    """Of all test samples of its clients, whatever group they are in; by hand from the clients."""
    run, _ = finished
    right = np.nan_to_num(run.table["accuracy"] * run.table["test_samples"])
    for row in run.rows:
        assert len(row["concept_accuracy"]) == 2
    for concept, found in enumerate(run.rows[-1]["concept_accuracy"]):
        inside = run.table["concept"] == concept
        wanted = right[inside].sum() / run.table["test_samples"][inside].sum()
        assert found == pytest.approx(wanted, rel=1e-5)
    assert run.rows[-1]["concept_accuracy"] != run.rows[-1]["group_accuracy"]
    assert run.summary["concept_accuracy"] == run.rows[-1]["concept_accuracy"]
    assert count_concepts(toy) == 2
    for concept in (-1, 10_000):  # not known; too many for a row
        assert count_concepts(toy.replace(concept=np.full(14, concept))) == 0


def glossary(part: str) -> set[str]:
    """Returns the names that a part of the glossary explains."""
    text = (Path(__file__).parents[1] / "docs/reference/glossary.md").read_text()
    lines = text.partition(f"\n## {part}\n")[2].partition("\n## ")[0].splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_glossary_is_complete(finished):
    """And has nothing that is no more."""
    run, _ = finished
    assert glossary("Rows") == set(run.rows[-1])
    assert glossary("Local") == {field.name for field in dataclasses.fields(cfl.Local)}
    assert glossary("Pool") == set(cfl.Pool._fields)


def test_curves_show_true_groups_and_no_zeros_of_single_participants():
    def row(number, spread):
        known = {"concept_accuracy": [0.5, 0.6], "group_discrepancy": [0.2, 0.0]}
        known |= {"group_sizes": [3, 1], "discrepancy": spread, "accuracy": 0.55}
        return known | {"round": number, "group_accuracy": [0.5, 0.7], "ari": 0.4}

    figure = draw_curves([row(1, 0.2), row(2, 0.0)], "")
    titles = [axes.get_title("left") for axes in figure.axes]
    assert len(titles) == 6 and titles[2] == "Test accuracy of each true group"
    drawn = figure.axes[titles.index("Discrepancy")].lines
    values = [np.asarray(line.get_ydata(), float).tolist() for line in drawn[:3]]
    assert values[0] == pytest.approx([0.2, np.nan], nan_ok=True)
    assert not any(0.0 in own for own in values) and values[1] == [0.2, 0.2]
    one = {"round": 1, "accuracy": 0.5, "group_accuracy": [0.5], "concept_accuracy": [0.4, None]}
    assert len(draw_curves([one], "").axes) == 2, "of one model, too"
    assert len(draw_curves([one | {"concept_accuracy": None}], "").axes) == 1


def test_counts_of_clients_have_whole_ticks():
    rows = [
        {"round": k, "accuracy": 0.5, "group_accuracy": [0.5, 0.7], "group_sizes": [1, 1]}
        | {"groups": 2, "ari": None}
        for k in (1, 2)
    ]
    panels = {axes.get_title("left"): axes for axes in draw_curves(rows, "").axes}
    assert all(tick == int(tick) for tick in panels["Clients per group"].get_yticks())


@pytest.fixture
def undrawn(monkeypatch):
    """Runs do not draw curves.png."""
    monkeypatch.setattr("fedjax_cfl.analysis.plot.plot_curves", lambda run_dir, summary: None)


@pytest.mark.usefixtures("undrawn")
def test_a_finished_run_is_read_and_a_longer_one_goes_on(finished, ifca, linear, toy, capsys):
    run, folder = finished
    given = {"mesh": cfl.make_mesh(1), "run_dir": folder}
    given |= {"settings": {"algorithm": "ifca", "dataset": "toy", "eta": 0.5}}
    same = cfl.run(ifca, linear, toy, KEY, rounds=4, **given)
    assert same.rows == run.rows and capsys.readouterr().out == ""
    longer = cfl.run(ifca, linear, toy, KEY, rounds=5, **given)
    assert longer.rows[:4] == run.rows and len(longer.rows) == 5
    said = capsys.readouterr().out
    assert said.startswith("resuming after round 4\n") and "best accuracy" in said
    quiet = cfl.run(ifca, linear, toy, KEY, rounds=6, **given, verbose=False)
    answer = capsys.readouterr()
    assert len(quiet.rows) == 6 and answer.out == "" and answer.err == ""


def test_another_run_in_the_directory_is_refused(finished, linear, local, toy):
    _, folder = finished
    names = {"algorithm": "ifca", "dataset": "toy", "eta": 0.5}
    other = cfl.algorithms.ifca(linear, local.replace(lr=0.3), cfl.select.uniform(5), m=2)
    with pytest.raises(InputError, match=r"different run \(made_of.*lr: 0.2 there, 0.3 here"):
        cfl.run(other, linear, toy, KEY, rounds=9, run_dir=folder, settings=names)
    with pytest.raises(InputError, match="seed: 5 there, 4 here"):
        cfl.run(other, linear, toy, jax.random.key(4), rounds=9, run_dir=folder, settings=names)


@pytest.mark.nightly
@pytest.mark.usefixtures("undrawn")
def test_a_stopped_run_has_a_checkpoint(ifca, linear, toy, tmp_path, monkeypatch):
    """Ctrl-C comes as KeyboardInterrupt, and the same call goes on."""
    begun = session.catch_signals

    class Asked:
        def __enter__(self):
            return [2]

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(session, "catch_signals", Asked)
    given = {"mesh": cfl.make_mesh(1), "run_dir": tmp_path / "run", "verbose": False}
    with pytest.raises(KeyboardInterrupt):
        cfl.run(ifca, linear, toy, KEY, rounds=2, **given)
    monkeypatch.setattr(session, "catch_signals", begun)
    assert len(cfl.run(ifca, linear, toy, KEY, rounds=2, **given).rows) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"settings": {"m": 2}}, "settings: are written to a run_dir"),
        ({"scaling": UNSCALED}, "scaling: is kept in a run_dir"),
        ({"run_dir": "a", "scaling": "pool"}, "scaling=pool: must be null or Scaling"),
        ({"run_dir": "a", "scaling": OF_TWO}, "of shape \\(3, 5\\): must be what standardize"),
        ({"run_dir": "a", "settings": {"algorithm": 3}}, r"settings\['algorithm'\]=3"),
        ({"run_dir": "a", "settings": {"m": "x\ny"}}, r"settings\['m'\]"),
    ],
)
def test_what_cannot_be_is_refused(given, said, ifca, linear, toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        cfl.run(ifca, linear, toy, KEY, rounds=1, **given)
    assert not list(tmp_path.iterdir())


def test_parts_of_other_tasks_are_refused(ifca, mlp, toy, tmp_path):
    """A method made with another model, and a model of more classes than there are."""
    given = {"rounds": 1, "run_dir": tmp_path / "a", "verbose": False}
    with pytest.raises(InputError, match="the algorithm's models have other parameters"):
        cfl.run(ifca, mlp, toy, KEY, **given)
    more = cfl.as_task(cfl.models.MCLR(toy.num_classes + 1), toy.x.shape[1:], toy.num_classes + 1)
    with pytest.raises(InputError, match=f"a model of {toy.num_classes} outputs, not"):
        cfl.run(ifca, more, toy, KEY, **given)


def test_what_python_does_not_say_is_as_on_the_command_line():
    conf = yaml.safe_load((CONF / "config.yaml").read_text())
    own = RunSettings._field_defaults
    assert own["checkpoint"]._asdict() == conf["checkpoint"]
    assert {name: own[name] for name in ("assignments", "resume")}.items() <= conf.items()


def test_a_key_must_be_of_a_seed(ifca, linear, toy, tmp_path):
    with pytest.raises(InputError, match=r"use jax.random.key\(SEED\)"):
        cfl.run(ifca, linear, toy, jax.random.split(KEY)[0], rounds=1, run_dir=tmp_path / "run")


def test_what_a_method_is_made_of(ifca, linear, local, toy):
    """The same calls give the same; a number, a function or a module make another."""

    def made(task, own, **settings):
        ids = cfl.select.uniform(5)
        return describe(cfl.algorithms.ifca(task, own, ids, **{"m": 2, **settings}), "it")

    first = made(linear, local)
    assert first == made(linear, local.replace()) == describe(ifca, "it")
    others = [
        made(linear, local.replace(momentum=0.5)),
        made(linear, local, m=3),
        made(linear, local, mu=0.1),
        made(linear, local, start="reject_unbalanced"),
        made(cfl.as_task(cfl.models.MLP(4, hidden=(3,)), (5,), 4), local),
    ]
    assert all(first != other for other in others)
    assert all(isinstance(value, str | int | float | None) for value in first.values())
    assert json.dumps(first) and not [v for v in first.values() if " at 0x" in str(v)]


RATE = 0.5


class Decay:
    """A schedule of the user's own."""

    def __init__(self, rate):
        self.rate, self.key = rate, KEY

    def __call__(self, round):
        return self.rate**round


def test_functions_of_one_name_are_told_apart(monkeypatch):
    """By what they do, what they read from their module, and what their objects hold."""
    halves, wholes, same = (
        lambda round: 0.5**round,
        lambda round: 1.0**round,
        lambda round: 0.5**round,  # on another line
    )

    def outside(round):
        return (lambda: RATE**round)()

    assert describe(halves, "it") == describe(same, "it") != describe(wholes, "it")
    assert describe(jax.jit(halves), "it") != describe(jax.jit(wholes), "it")
    first, made = describe(Decay(0.5), "it"), describe(Decay(1.0).__call__, "it")
    assert first != describe(Decay(1.0), "it") and made != describe(Decay(0.5).__call__, "it")
    read = describe(outside, "it")
    monkeypatch.setattr(sys.modules[__name__], "RATE", 0.1)
    assert read["it.RATE"] == 0.5 and read != describe(outside, "it")
    monkeypatch.setattr(Decay, "__call__", wholes)
    assert first != describe(Decay(0.5), "it")
    module = describe(Own(), "it")
    monkeypatch.setattr(Own, "__call__", wholes)
    assert module != describe(Own(), "it")


class Own(nn.Module):
    """A module of the user's own."""

    num_classes: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x)


@pytest.mark.nightly
@pytest.mark.usefixtures("undrawn")
def test_a_module_of_ones_own_is_read_with_it(local, toy, tmp_path):
    task = cfl.as_task(Own(), (5,), 4)
    method = cfl.algorithms.fedavg(task, local, cfl.select.uniform(5))
    given = {"run_dir": tmp_path / "run", "verbose": False, "mesh": cfl.make_mesh(1)}
    run = cfl.run(method, task, toy, KEY, rounds=1, **given)
    assert run.predict(0, np.zeros((2, 5), np.float32)).shape == (2,)
    assert run.summary["algorithm"].startswith("method-") and run.summary["model"] == "Own"
    with pytest.raises(InputError, match=r"test_library\.Own: is no model of the package"):
        cfl.load_run(tmp_path / "run")
    cfl.load_run(tmp_path / "run", Own())


# recipes: methods without task, local and system


@pytest.fixture(scope="module")
def own_file(tmp_path_factory):
    """An .npz of a user's own, of 14 clients whose numbers of samples differ."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(14), rng.integers(9, 25, 14))
    x = rng.normal(size=(client.size, 4)).astype(np.float32)
    path = tmp_path_factory.mktemp("own") / "own.npz"
    np.savez(path, x=x, y=(x[:, 0] > 0) ^ (client % 2 == 1), client=client)
    return path


@pytest.mark.usefixtures("undrawn")
def test_a_recipe_is_run_as_on_the_command_line(own_file, fedjax_cfl, tmp_path, monkeypatch):
    """Every number of every seed, with what nobody has said."""
    monkeypatch.chdir(tmp_path)
    asked = f"dataset=npz dataset.source.path={own_file} algorithm=ifca rounds=2 seeds=2"
    status, _, error = fedjax_cfl(f"{asked} devices=1 curves=false run_dir=line")
    assert status == 0, error
    given = {"rounds": 2, "seeds": 2, "mesh": cfl.make_mesh(1)}
    runs = cfl.run(cfl.algorithms.ifca(m=3), cfl.datasets.npz(own_file), **given)
    for seed, run in runs.by_seed.items():
        rows = results.read_metrics(tmp_path / "line" / str(seed))
        assert fingerprint(rows) == fingerprint(results.to_plain(run.rows))
    assert runs.by_seed[1].programs["programs_from_cache"] == 3, "the seeds share them"
    frame = runs.frame()
    assert frame[["seed", "round"]].to_numpy().tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
    named = runs.by_seed[0].settings
    assert named["algorithm"] == "ifca" and named["algorithm.m"] == 3
    assert named["selection"] == "rr_then_random(14)" and named["local.lr"] == 0.03


def test_defaults_are_those_of_files_of_ones_own():
    for option in ("csv", "jsonl", "npy", "npz", "parquet"):
        conf = yaml.safe_load((CONF / "dataset" / f"{option}.yaml").read_text())
        local = {name: conf[name] for name in ("lr", "epochs", "batch_size")}
        assert local.items() <= vars(cfl.Local()).items()
        assert conf["clients_per_round"] == library.CLIENTS_PER_ROUND
        chosen = {each for line in conf["defaults"] for each in line.items()}
        assert ("override /model@_global_.model", "mclr") in chosen
        assert ("override /partition@_global_.partition", "auto") in chosen
    auto = yaml.safe_load((CONF / "partition" / "auto.yaml").read_text())
    taken = inspect.signature(cfl.partition.auto).parameters
    for name in ("alpha", "min_samples", "test_fraction"):
        assert auto[name] == taken[name].default
    assert yaml.safe_load((CONF / "model" / "mclr.yaml").read_text())["l2"] == 0.001


@pytest.mark.parametrize("name", cfl.algorithms.__all__)
def test_a_selection_is_that_of_the_methods_file(name):
    text = (CONF / "algorithm" / f"{name}.yaml").read_text()
    while "\nselect:" not in text:  # of the file that it is based on
        base = re.search(r"^defaults:\n  - (\w+)", text, re.M)
        assert base, name
        text = (CONF / "algorithm" / f"{base[1]}.yaml").read_text()
    presets = {"single": uniform, "clustered": rr_then_random}
    named = re.search(r"\nselect:[^\n]*(?:preset\.select_(\w+)|\n  _target_: .*\.(\w+))", text)
    wanted = presets[named[1]].__name__ if named[1] else named[2]
    assert algorithms.SELECTIONS.get(name, uniform).__name__ == wanted


def test_a_recipe_is_shown_as_it_is_written_and_checked_at_once():
    recipe = cfl.algorithms.ifca(m=4, mu=0.1)
    assert repr(recipe) == "ifca(m=4, mu=0.1)" and repr(cfl.partition.iid(clients=3)) != ""
    with pytest.raises(InputError, match=r"algorithm\.m=-1"):
        cfl.algorithms.ifca(m=-1)
    with pytest.raises(TypeError, match=r"ifca\(\) missing a required .*argument: 'm'"):
        cfl.algorithms.ifca()
    pool = cfl.datasets.digits()
    dealt = cfl.federate(pool, cfl.partition.iid(clients=12))
    same = cfl.federate(pool, cfl.partition.iid(pool, clients=12))
    np.testing.assert_array_equal(dealt.owner, same.owner)


def test_a_run_is_shown_in_one_line_and_in_a_small_table(finished, ifca, linear, toy):
    run, _ = finished
    memory = cfl.run(ifca, linear, toy, KEY, rounds=1, mesh=cfl.make_mesh(1))
    for one in (run, memory):
        assert "\n" not in repr(one) and len(repr(one)) < 300 and "accuracy" in repr(one)
        assert one.frame()["round"].tolist() == [row["round"] for row in one.rows]
        assert one._repr_html_().count("<tr") == 1 + len(one.rows)
    assert "algorithm=ifca" in repr(run) and len(repr(memory)) < 300


@pytest.mark.usefixtures("undrawn")
@pytest.mark.usefixtures("undrawn")
def test_seeds_in_a_directory_are_one_line_of_a_table(linear, local, toy, own_file, tmp_path):
    both = cfl.chain(cfl.algorithms.fedavg(), cfl.personal.fine_tune(epochs=1))
    given = {"rounds": 1, "run_dir": tmp_path / "runs", "mesh": cfl.make_mesh(1), "verbose": False}
    runs = cfl.run(both, cfl.datasets.npz(own_file), seeds=[4, 2], **given)
    assert list(runs.by_seed) == [4, 2] and len(repr(runs).splitlines()) == 2
    table = cfl.compare(tmp_path / "runs").table
    assert table["seeds"].tolist() == ["4 2"] and table["algorithm"][0].startswith("fedavg+")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seeds": 0}, "seeds=0: must be a whole number >= 1"),
        ({"seeds": [1, 1]}, "must be different whole numbers"),
        ({"seeds": [1], "key": KEY}, "without a key"),
        ({"settings": {"m": 2}}, "settings: are written to a run_dir"),
        ({"key": jax.random.split(KEY)[0]}, r"use jax.random.key\(SEED\)"),
    ],
)
def test_what_a_recipe_cannot_be_run_with_is_refused(given, said, toy):
    with pytest.raises(InputError, match=said):
        cfl.run(cfl.algorithms.fedavg, toy, rounds=1, **given)


@pytest.mark.parametrize("data", [3, "my.csv", (1, 2), (cfl.Pool, 3)])
def test_what_are_no_data_is_refused(data):
    with pytest.raises(InputError, match=r"^data=.*give what cfl.federate returns, a pool"):
        cfl.run(cfl.algorithms.fedavg, data, rounds=1)


def test_a_method_that_is_made_has_its_parts(ifca, linear, toy):
    for given in ((toy,), (linear, toy, KEY)):
        more = {"model": cfl.models.MCLR()} if len(given) > 1 else {}
        with pytest.raises(InputError, match="algorithm: is made already"):
            cfl.run(ifca, *given, rounds=1, **more)


# tables and figures


@pytest.mark.nightly
def test_comparisons_and_reports_are_frames_and_figures(finished, tmp_path, monkeypatch, capsys):
    _, folder = finished
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for number, (algorithm, seed) in enumerate([("ifca", 0), ("ifca", 1), ("a", 0), ("a", 1)]):
        copy_run(folder, runs / str(number), algorithm, seed)
    found = cfl.compare(runs, pivot=("algorithm", "dataset"))
    assert found.table["algorithm"].tolist() == ["ifca", "a"]
    assert found.table["best_accuracy_n"].tolist() == [2, 2]
    assert set(found.differences["measure"]) >= {"final_accuracy", "ari"}
    assert found.differences["p_holm"][0] == 1
    assert found.pivot["column"].tolist() == ["toy", "toy"]
    assert isinstance(found.figure, Figure) and capsys.readouterr().out == ""
    assert set(cfl.draw_run(runs / "0")) >= {"curves", "alluvial"}
    monkeypatch.setattr(report, "draw_run", lambda run: {"curves": found.figure})
    page = cfl.report(runs)
    assert page.page is None and page.results.equals(found.table)
    each = {f"{method}-seed-{seed}-curves" for method in ("ifca", "a") for seed in (0, 1)}
    assert {"costs"} | each == set(page.figures)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}, "nothing is written"
    cfl.compare([runs], out="tables")
    monkeypatch.setattr(report, "to_png", lambda figure: b"")
    assert cfl.report([runs], "page.html").page == Path("page.html")
    assert (tmp_path / "tables/differences.csv").exists() and (tmp_path / "page.html").exists()


def copy_run(folder: Path, to: Path, algorithm: str, seed: int) -> None:
    """Copies what tables and pictures are made of, under another name and seed."""
    to.mkdir(parents=True)
    for name in ("metrics.jsonl", "clients.parquet", "assignments.parquet"):
        (to / name).write_bytes((folder / name).read_bytes())
    summary = json.loads((folder / "summary.json").read_text())
    (to / "summary.json").write_text(json.dumps(summary | {"algorithm": algorithm, "seed": seed}))


def test_rows_are_a_frame():
    rows = [{"round": 1, "group_sizes": [1, 2]}, {"round": 2, "ari": 0.5}]
    columns = {"round": [1, 2], "group_sizes": [[1, 2], None], "ari": [None, 0.5]}
    frame = cfl.to_frame(rows)
    assert list(frame) == list(columns) and frame.equals(cfl.to_frame(columns))
    assert frame["group_sizes"][0] == [1, 2] and frame["ari"].isna().tolist() == [True, False]
