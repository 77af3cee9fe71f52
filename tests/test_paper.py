"""`fedjax-cfl paper`: cells, measures, what is written. Most tests replace a cell's
program by one that only writes a run's files.
"""

import csv
import importlib
import io
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import call
from matplotlib.image import imread
from omegaconf import OmegaConf
from papers import cells as paper_cells
from papers import fedgroup_fig5, processes, report, runner
from papers.cells import Cell, has_run, load_table
from papers.measures import compute_measures
from papers.report import collect_records
from rich.console import Console

from fedjax_cfl.analysis import plot_costs
from fedjax_cfl.cli import paper
from fedjax_cfl.errors import InputError

# what a cell leaves behind, without training: accuracies that follow from algorithm, data set
# and seed
CELL = """
import json, os, sys, time
from pathlib import Path
asked = dict(text.split("=", 1) for text in sys.argv[1:] if "=" in text)
with open(os.environ["RAN"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
tuned = sys.argv[1] == "tune"
if tuned:  # into the folder of one of its last runs
    out, seeds = Path(sys.argv[3]), [int(seed) for seed in sys.argv[5].split(",")]
    asked |= {"run_dir": str(out / "test" / "0"), "seed": "0"}
if asked["dataset"] == os.environ.get("ABSENT"):
    place = "/cache or into a folder named in FEDJAX_CFL_DATA"
    print(f"fedjax-cfl: mnist: not found: mnist/t10k.gz; put it into {place}")
    sys.exit(2)
if asked["algorithm"] == os.environ.get("BROKEN"):
    print("fedjax-cfl: round 1: client 3 sent a non-finite update")
    sys.exit(1)
time.sleep(float(os.environ.get("SLOW", 0)))
rounds, first = int(asked.get("rounds", 6)), int(asked["seed"])
for seed in range(first, first + int(asked.get("seeds", 1))):
    folder = Path(asked["run_dir"]) / (str(seed) if "seeds" in asked else "")
    base = 0.5 + 0.01 * len(asked["algorithm"]) + 0.02 * seed
    base += 0.05 * (asked["dataset"] == "b")
    rows = [
        {"round": r, "accuracy": None if r == 1 else base + 0.3 * (1 - 0.7 ** r),
         "train_loss": 2 / r, "discrepancy": 1 / r,
         "units_down": 20 * r * len(asked["algorithm"]), "units_up": 20 * r, "migrated_clients": 2}
        for r in range(1, rounds + 1)
    ]
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text("dataset: {rounds: 6}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    of_all = [text for text in sys.argv[1:] if not text.startswith(("seeds=", "seed="))]
    overrides = [*of_all, f"seed={seed}"] if "seeds" in asked else sys.argv[1:]
    (folder / "summary.json").write_text(json.dumps({"overrides": overrides}))
if tuned:
    (out / "test" / "index.csv").write_text("run\\n0\\n")
    given = [text for text in sys.argv[6:] if "=" in text and not text.startswith("devices=")]
    (out / "chosen.json").write_text(json.dumps({"given": given, "seeds": seeds}))
"""
TABLE = """
title: "A table"
measure: best_accuracy
scale: 100
columns:
  Avg: [algorithm=fedavg]
  Flex-eta0.1: [algorithm=flexcfl]
rows:
  first-a:
    overrides: [dataset=a]
    published: {Avg: 80.0, Flex-eta0.1: 85.5}
  second-b:
    title: "second-b, stand-in"
    overrides: [dataset=b]
    published: {Avg: 81.0, Flex-eta0.1: 90.1}
"""


TUNED = TABLE.replace("columns:", 'tune: ["local.lr=1,2"]\ncolumns:').replace(
    "Avg: [algorithm=fedavg]", 'Avg: {overrides: [algorithm=fedavg], tune: ["algorithm.q=1,3"]}'
)
TUNED = TUNED.replace("second-b:", "second-b:\n    trial_seeds: [7, 8]")


@pytest.fixture
def verb(tmp_path, monkeypatch, unrendered):
    """Returns run(*argv) -> exit status of the verb on fake cells, and lines() of the
    cells that were started.
    """
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "fake.yaml").write_text(TABLE)
    monkeypatch.setattr(paper_cells, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(runner, "resolve_settings", lambda overrides: None)
    (tmp_path / "cell.py").write_text(CELL)
    (tmp_path / "ran").touch()
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-S", str(tmp_path / "cell.py")])

    def run(*argv, out="out"):
        return runner.main(["fake", "--out", str(tmp_path / out), *argv])

    run.started = lambda: (tmp_path / "ran").read_text().splitlines()
    run.out = tmp_path / "out" / "fake"
    run.table = tmp_path / "tables" / "fake.yaml"
    return run


def table(folder: Path) -> dict:
    """Returns table.csv by (row, column)."""
    with (folder / "table.csv").open(newline="") as handle:
        return {(line["row"], line["column"]): line for line in csv.DictReader(handle)}


def test_a_figure_takes_up_the_runs_of_its_table(verb, tmp_path, monkeypatch, rendered):
    monkeypatch.chdir(tmp_path)
    figure = "experiment: fake\nfigure: curves\npanels: [accuracy]\n" + TABLE
    verb.table.with_name("drawn.yaml").write_text(figure)
    assert runner.main(["fake", "--rows", "first-a"]) == 0
    assert runner.main(["drawn"]) == 0
    started = verb.started()
    assert len(started) == 4 and all("experiment=fake " in line for line in started)
    assert imread("paper/drawn/figure.png").std() > 0
    assert len(table(Path("paper/drawn"))) == 4 and all(
        record["mean"] for record in table(Path("paper/drawn")).values()
    )
    assert not list(Path("paper/drawn").glob("*/*/seed0"))


def test_numbers_are_those_of_the_cells_own_files(verb, rendered):
    assert verb("--seeds", "2") == 0
    records = table(verb.out)
    assert len(records) == 4 and len(verb.started()) == 8
    for (row, column), record in records.items():
        files = sorted(verb.out.glob(f"{row}/{column}/seed*/metrics.jsonl"))
        lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        best = [100 * max(line["accuracy"] or 0 for line in run) for run in lines]
        assert len(best) == 2
        assert float(record["mean"]) == pytest.approx(statistics.fmean(best))
        assert float(record["sd"]) == pytest.approx(statistics.stdev(best))
        assert (record["seeds"], record["rounds"], record["of_rounds"]) == ("2", "6", "6")
    assert records["second-b", "Flex-eta0.1"]["published"] == "90.1"
    text = (verb.out / "table.md").read_text()
    assert "second-b, stand-in" in text and "(90.1)" in text and " of 6 rounds" not in text
    image = imread(verb.out / "plot.png")
    assert image.shape[0] > 100 and image.std() > 0.01


@pytest.mark.parametrize(("width", "tables"), [(200, 1), (50, 2)])
def test_no_number_is_cut_off_in_a_narrow_terminal(verb, monkeypatch, capsys, width, tables):
    monkeypatch.setenv("COLUMNS", str(width))
    assert verb("--seeds", "2") == 0
    shown = capsys.readouterr().out.partition("A table;")[2]
    assert 1 + shown.count("A table;") == tables
    text = (verb.out / "table.md").read_text()
    cells = [
        cell.strip()
        for line in text.splitlines()
        if "±" in line and "|" in line
        for cell in line.split("|")[2:-1]
    ]
    assert len(cells) == 4 and all(f" {cell} │" in shown for cell in cells)


def test_what_is_finished_is_not_run_again(verb, capsys):
    assert verb("--rows", "first-a") == 0
    assert verb("--seeds", "2") == 0
    assert len(verb.started()) == len(set(verb.started())) == 8
    assert "2 of 8 cells are finished already" in capsys.readouterr().out
    assert verb("--rows", "second-b", "--columns", "Avg") == 0  # the table stays whole
    assert len(verb.started()) == 8 and all(
        record["seeds"] == "2" for record in table(verb.out).values()
    )


def test_a_table_that_tunes_has_one_cell_for_all_seeds(verb):
    verb.table.write_text(TUNED)
    asked = "--rows", "first-a", "--seeds", "2"
    assert verb(*asked) == 0
    folder = verb.out / "first-a" / "Avg"
    assert verb.started()[0] == (
        f"tune --out {folder} --seeds 0,1 experiment=fake dataset=a algorithm=fedavg local.lr=1,2"
        " algorithm.q=1,3"
    )
    assert len(verb.started()) == 2 and verb.started()[1].endswith("algorithm=flexcfl local.lr=1,2")
    assert float(table(verb.out)["first-a", "Avg"]["mean"]) == pytest.approx(
        100 * report.read_measures(folder / "test" / "0")["best_accuracy"]
    )
    assert verb(*asked) == 0 and len(verb.started()) == 2  # finished
    assert verb("--rows", "second-b", "--columns", "Avg") == 0
    assert " --seeds 0 --trial-seeds 7,8 experiment=fake dataset=b " in verb.started()[2]
    with pytest.raises(InputError, match=r"other settings \(2 seeds\); choose another folder"):
        verb("--rows", "first-a", "--seeds", "3")
    with pytest.raises(InputError, match=r"a cell has its own local\.lr"):
        verb("local.lr=3")
    with pytest.raises(InputError, match="was run with other settings"):
        verb(*asked, "algorithm.m=3")


def test_seeds_that_run_together_give_the_same_table(verb, tmp_path):
    asked = "--seeds", "3", "--rows", "first-a"
    assert verb(*asked) == 0 and len(verb.started()) == 6
    alone = (verb.out / "table.csv").read_text()
    verb.table.write_text("seeds: together\n" + TABLE)
    assert verb(*asked, out="together") == 0 and len(verb.started()) == 8
    folder = tmp_path / "together" / "fake"
    assert verb.started()[6] == (
        "experiment=fake dataset=a algorithm=fedavg seed=0 seeds=3"
        f" run_dir={folder / 'first-a' / 'Avg' / 'seeds3'}"
    )
    assert (folder / "table.csv").read_text() == alone
    assert verb(*asked, out="together") == 0 and len(verb.started()) == 8  # finished
    # of a seed that ran alone and together the latter counts, and the former where it is alone
    assert verb("--rows", "*", out="together") == 0 and len(verb.started()) == 12
    seeds = {place: line["seeds"] for place, line in table(folder).items()}
    assert seeds["first-a", "Avg"] == "3" and seeds["second-b", "Avg"] == "1"
    with pytest.raises(InputError, match="was run with other settings"):
        verb(*asked, "algorithm.m=3", out="together")


def test_several_at_a_time_give_the_same_table(verb, tmp_path):
    assert verb("--seeds", "2") == 0
    assert verb("--seeds", "2", "--jobs", "3", out="other") == 0
    assert (verb.out / "table.csv").read_text() == (
        tmp_path / "other" / "fake" / "table.csv"
    ).read_text()
    started = verb.started()
    assert not any("devices" in line for line in started[:8]) and all(
        "devices=1" in line for line in started[8:]
    )


def test_a_terminal_sees_which_cells_run_and_how_far_they_are(tmp_path):
    cell = Cell("first-a", "Avg", 0, tmp_path, [])
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    for metrics, at in [("", 0), ('{"round": 5, "accuracy": 0.5}\n{"round": 10, "acc', 10)]:
        (tmp_path / "metrics.jsonl").write_text(metrics)
        with runner.progress(3, console) as show:
            show(1, [cell])
        assert (
            "1/3" in console.file.getvalue()
            and f"first-a, Avg, seed 0: round {at}" in console.file.getvalue()
        )


def test_missing_data_skip_the_row_with_its_reason(verb, monkeypatch, capsys):
    monkeypatch.setenv("ABSENT", "a")
    assert verb("--seeds", "2") == 0
    out = capsys.readouterr().out
    assert (
        out.count(
            "first-a: skipped, data missing: mnist: not found: mnist/t10k.gz; put it into /cache"
        )
        == 1
    )
    # the others are not tried
    assert len([line for line in verb.started() if "dataset=a" in line]) == 1
    assert (
        "first-a" not in (verb.out / "table.md").read_text()
        and table(verb.out)["second-b", "Avg"]["seeds"] == "2"
    )
    assert verb("--rows", "first-a", "--jobs", "2", out="nothing") == 0


def test_a_failed_cell_is_a_failure(verb, monkeypatch, capsys):
    monkeypatch.setenv("BROKEN", "flexcfl")
    assert verb() == 1
    assert (
        "first-a, Flex-eta0.1, seed 0: failed: round 1: client 3 sent a non-finite update"
        in capsys.readouterr().out
    )
    assert table(verb.out)["first-a", "Flex-eta0.1"]["mean"] == ""


def test_other_rounds_are_stated_and_can_be_changed(verb):
    assert verb("--rows", "first-a", "rounds=3") == 0
    assert "- first-a (Avg, Flex-eta0.1): 3 of 6 rounds." in (verb.out / "table.md").read_text()
    assert verb("--rows", "second-b") == 0
    assert (
        table(verb.out)["first-a", "Avg"]["rounds"] == "3"
        and table(verb.out)["second-b", "Avg"]["rounds"] == "6"
    )
    cell = next(
        paper_cells.make_cells(
            "fake",
            load_table("fake"),
            verb.out,
            ["first-a"],
            ["Avg"],
            [0],
            ["rounds=5"],
        )
    )
    assert not has_run(cell)


def test_cells_of_other_settings_are_refused(verb):
    assert verb("--rows", "first-a") == 0
    assert (
        verb(
            "--rows",
            "first-a",
            "devices=1",
            "rounds=6",
            "checkpoint.every=9",
            "preset=clean",
            "eval_every=1",
            out="other",
        )
        == 0
    )
    # in any order
    assert verb("--rows", "first-a", "eval_every=1", "rounds=6", "preset=clean", out="other") == 0
    assert len(verb.started()) == 4
    with pytest.raises(InputError, match=r"preset=ref.*--out"):
        verb("preset=ref")


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--rows", "third"], "--rows=third: must be one of first-a, second-b"),
        (["--rows", "first"], "did you mean 'first-a'"),
        (["--columns", "Flex"], "--columns=Flex: must be one of Avg"),
        (["--seeds", "0"], "--seeds 0: a whole number >= 1"),
        (["--jobs", "-1"], "--jobs -1: a whole number >= 1"),
        (["--jobs", "x"], "argument --jobs: invalid int value: 'x'; see fedjax-cfl paper --help"),
        (["--out", "/dev/null/x"], "--out=/dev/null/x: /dev/null is not a folder that can be"),
    ],
)
def test_bad_input_is_one_line(verb, argv, words):
    with pytest.raises(InputError) as caught:
        verb(*argv)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override,words",
    [
        ("algorithm=ifca", "algorithm=ifca: a cell has its own algorithm; see --rows, --columns"),
        ("seed=3", "seed=3: a cell has its own seed"),
        ("seeds=3", "seeds=3: a cell has its own seeds"),
        ("+run_dir=x", "+run_dir=x: a cell has its own run_dir"),
        ("rounds=0", "MNIST-MCLR, FedAvg, seed 0: rounds=0: must be a whole number >= 1"),
        ("algorithm.eta_g=1", "MNIST-MCLR, FedAvg, seed 0: algorithm.eta_g=1: unknown setting"),
        (
            "algorithm.mu=-1",
            "MNIST-MCLR, FedProx, seed 0: algorithm.mu=-1: must be a finite number >= 0",
        ),
    ],
)
def test_bad_overrides_are_refused_before_anything_runs(tmp_path, override, words):
    columns = ["--columns", "FedProx" if "mu" in override else "*"]
    with pytest.raises(InputError) as caught:
        runner.main(
            ["flexcfl_table3", "--out", str(tmp_path), *columns, "rounds=2", override],
        )
    assert str(caught.value).startswith(words) and not list(tmp_path.iterdir())


def test_a_star_stands_for_anything(verb):
    assert verb("--rows", "*-b", "--columns", "Fl*") == 0
    assert [line.split(" seed")[0] for line in verb.started()] == [
        "experiment=fake dataset=b algorithm=flexcfl"
    ]


def test_bests_over_different_numbers_of_tests_are_stated_and_given_over_the_same(tmp_path):
    found = {}
    accuracies = {"Avg": [0.9, 0.5, 0.6, 0.55], "Flex": [None, None, 0.7, 0.8], "Far": [None] * 4}
    for column, accuracy in accuracies.items():
        (tmp_path / column).mkdir()
        rows = [{"round": r, "accuracy": a} for r, a in enumerate(accuracy, 1)]
        (tmp_path / column / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        found["one", column] = [tmp_path / column]
    fake = {"title": "T", "scale": 100, "columns": {name: [] for name in accuracies}}
    fake["rows"] = {"one": {"overrides": []}}
    records = collect_records(fake, found)
    values = [(r["mean"], r["evaluations"], r["shared_best"]) for r in records]
    assert values == [(90.0, "4", 60.0), (80.0, "2", 80.0), (None, "0", None)]
    note = "- one: best of 4 (Avg); 2 (Flex); 0 (Far) tests; over the same 2: Avg 60.0, Flex 80.0."
    assert report.best_note(fake, records) == [note]
    report.write(fake, records, tmp_path, "command")
    assert note in (tmp_path / "table.md").read_text()
    assert table(tmp_path)["one", "Avg"]["shared_evaluations"] == "2"
    alike = {key: folders for key, folders in found.items() if key[1] == "Avg"}
    assert report.best_note(fake, collect_records(fake, alike)) == []


def test_columns_may_be_measures_of_one_run(verb, rendered):
    verb.table.write_text(
        "{title: T, scale: 100, measures: {max: best_accuracy, to 85: rounds_to_85, mean d:"
        " discrepancy_mean}, rows: {one: {overrides: [dataset=a, algorithm=fedavg], published:"
        " {max: 87.9, to 85: 39, mean d: 0.767}}}}"
    )
    assert verb() == 0
    assert len(verb.started()) == 1
    records = table(verb.out)
    assert float(records["one", "mean d"]["mean"]) == pytest.approx(
        np.mean([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6])
    )
    assert (
        records["one", "to 85"]["mean"] == ""
        and "not reached (39)" in (verb.out / "table.md").read_text()
    )
    assert imread(verb.out / "plot.png").std() > 0.01
    with pytest.raises(InputError, match="one run a row"):
        verb("--columns", "max")


@pytest.mark.parametrize(
    "kind",
    ["figure: curves\npanels: [accuracy, train_loss]", "figure: communication\nbaseline: Avg"],
)
def test_figures_are_drawn(verb, rendered, kind):
    verb.table.write_text(f"{kind}\n{TABLE}")
    assert verb("--seeds", "2") == 0
    image = imread(verb.out / "figure.png")
    assert image.shape[1] > 300 and image.std() > 0.01


def test_running_mean_leaves_out_what_is_missing():
    found = plot_costs.smooth(np.array([1.0, np.nan, 3.0, 5.0, 10.0]), 3)
    np.testing.assert_allclose(found, [1.0, np.nan, 4.0, 6.0, 7.5])


def test_measures_by_hand():
    accuracy = [None, 0.5, 0.86, 0.7, 0.9, 0.84]
    rows = [
        {
            "round": r,
            "accuracy": a,
            "discrepancy": d,
            "units_down": 10 * r,
            "units_up": 4 * r,
            "migrated_clients": r,
        }
        for r, a, d in zip(range(1, 7), accuracy, [1.0, 2.0, 3.0, None, 2.0, 2.0], strict=True)
    ]
    found = compute_measures(rows)
    assert (
        found["best_accuracy"] == 0.9
        and found["last_accuracy"] == 0.84
        and found["rounds_to_85"] == 3
    )
    assert found["median_accuracy"] == pytest.approx(0.84) and found[
        "last10_evals_accuracy"
    ] == pytest.approx(3.8 / 5)
    assert found["discrepancy_mean"] == pytest.approx(2.0) and found[
        "discrepancy_variance"
    ] == pytest.approx(0.4)
    assert found["units"] == 84 and found["migrations"] == 21
    assert (
        compute_measures(rows[:2])["rounds_to_85"] is None
        and compute_measures(rows[:1])["median_accuracy"] is None
    )


def test_directions_of_all_founders_are_edc():
    updates = np.random.default_rng(0).normal(size=(12, 7)).astype(np.float32)
    gram = updates @ updates.T
    _, _, directions = np.linalg.svd(updates[:8])
    cosines = updates @ directions[:3].T / np.linalg.norm(updates, axis=1)[:, None]
    assert np.allclose(
        np.abs(fedgroup_fig5.edc_features(gram, np.arange(8), 3)), np.abs(cosines), atol=1e-4
    )


def test_methods_of_ones_own_are_columns(verb, tmp_path):
    path = tmp_path / "mine=1.yaml"
    path.write_text("Mine: [algorithm=fedavg, +algorithm.m=3]\n")
    assert verb("--methods", str(path), "--rows", "first-a") == 0
    assert len(verb.started()) == 3 and "+algorithm.m=3" in verb.started()[2]
    mine = table(verb.out)["first-a", "Mine"]
    assert float(mine["mean"]) > 50 and mine["published"] == ""
    verb.table.write_text(TUNED)
    path.write_text("Mine: {overrides: [algorithm=mine], tune: ['+algorithm.q=1,3']}\n")
    assert verb("--methods", str(path), "--columns", "Mine", out="tuned") == 0
    for line in verb.started()[3:]:
        assert line.startswith("tune") and "algorithm=mine local.lr=1,2 +algorithm.q=1,3" in line
    assert len(verb.started()) == 5


@pytest.mark.parametrize(
    ("tables", "written", "said"),
    [
        (TABLE, "Avg: [algorithm=fedavg]", "Avg: expected a name that the table has not"),
        (TABLE, "../x: [algorithm=fedavg]", "x: expected a name that the table has not, without /"),
        (TABLE, "1: [algorithm=fedavg]", "1: expected a name"),
        (TABLE, "Mine: algorithm=fedavg", r"Mine: expected \[KEY=VALUE, ...\]"),
        (TABLE, "Mine: [fedavg]", r"Mine: expected \[KEY=VALUE"),
        (TABLE, "Mine: {overrides: [algorithm=fedavg]}", r"Mine: expected \[KEY=VALUE"),
        (TUNED, "Mine: {tuned: [algorithm=fedavg]}", r"Mine: expected \{overrides: \["),
        (TUNED, "Mine: {tune: ['local.lr=1,2,3']}", "Mine: 3 trials, where each method has 4"),
        (TABLE, "- Mine", "expected NAME: and its settings"),
        (TABLE, "{", "cannot be read"),
        (TABLE, None, r"cannot be read \(no such file\)"),
        (TABLE.replace("columns", "measures"), "Mine: [a=b]", "A table has no methods as its"),
    ],
)
def test_what_is_no_method_of_ones_own_is_refused(verb, tmp_path, tables, written, said):
    verb.table.write_text(tables)
    path = tmp_path / "mine.yaml"
    if written is None:
        path.symlink_to("/dev/zero")
    else:
        path.write_text(written)
    with pytest.raises(InputError, match=f"^--methods {path}.*{said}"):
        verb("--methods", str(path))
    assert not verb.started()


def test_settings_of_ones_own_method_are_checked_before_anything_runs(verb, tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text("Mine: [algorithm=fedavg, algorithm.unknown=1]\n")
    asked = ["fake", "--methods", str(path), "--out", str(tmp_path / "out")]

    def refuse(overrides):
        if "algorithm.unknown=1" in overrides:
            raise InputError("algorithm.unknown=1: unknown setting")

    monkeypatch.setattr(runner, "resolve_settings", refuse)
    with pytest.raises(InputError, match=r"Mine, seed 0: algorithm\.unknown=1: unknown setting"):
        runner.main(asked)
    assert not verb.started()


@pytest.mark.nightly
def test_real_cells(tmp_path, monkeypatch, capsys):
    """Two methods on the embedded digits, at once; FedAvg once more, from the command line."""
    small = ["rounds=2", "clients_per_round=3", "local.epochs=1", "devices=1"]
    asked = [
        "planted_clusters",
        "--rows",
        "digits-rotate",
        "--columns",
        "FedAvg",
        "IFCA",
        "--jobs",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert runner.main([*asked, *small]) == 0
    node = load_table(asked[0])
    row, column = node["rows"]["digits-rotate"]["overrides"], node["columns"]["FedAvg"]
    line = [f"experiment={asked[0]}", *row, *column, *small, f"run_dir={tmp_path / 'alone'}"]
    assert call(monkeypatch, " ".join(line)) == 0
    cells = tmp_path / asked[0] / "digits-rotate"
    one = [
        json.loads((folder / "summary.json").read_text())["best_accuracy"]
        for folder in (cells / "FedAvg" / "seed0", tmp_path / "alone")
    ]
    assert (
        one[0] == one[1]
        and float(table(cells.parent)["digits-rotate", "FedAvg"]["mean"]) == 100 * one[0]
    )
    assert (
        OmegaConf.load(cells / "IFCA" / "seed0" / ".hydra" / "config.yaml").algorithm.name == "ifca"
    )


def test_a_folder_may_have_an_equals_sign_in_its_name(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["fake", "--rows", "first-a", "--out", "eta=0.1", "local.lr=0.5"]
    assert runner.main(arguments) == 0
    assert all("local.lr=0.5" in line for line in verb.started())
    assert (tmp_path / "eta=0.1" / "fake" / "table.csv").exists()


@pytest.mark.parametrize("name", sorted(runner.PROGRAMS.values()))
def test_the_module_of_a_figure_is_beside_the_runner(name):
    module = importlib.import_module(f"papers.{name}")
    assert hasattr(module, "reproduce") or hasattr(module, "draw_figures")


def test_an_installed_package_says_where_tables_are(tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "HERE", tmp_path / "site-packages" / "fedjax_cfl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^papers: published tables .* in a checkout, .* clone"):
        paper.main(["flexcfl_table3"])
    for folder in ("fedjax_cfl", "benchmarks/papers"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "benchmarks" / "papers" / "runner.py").touch()
    assert paper.find_papers() == tmp_path / "benchmarks" / "papers"


def test_trials_of_other_seeds_are_other_settings(verb):
    verb.table.write_text(TUNED)
    asked = "--rows", "first-a", "--columns", "Avg"
    assert verb(*asked) == 0
    path = verb.out / "first-a" / "Avg" / "chosen.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trial_seeds": [5]}))
    with pytest.raises(InputError, match=r"other settings \(trials of seeds 5\); choose"):
        verb(*asked)
