"""Comparing runs: files that no run wrote end in one line and nothing is written; names
are drawn as they are; seeds are pooled, bests are over the same tests.
"""

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import nightly

import fedjax_cfl as cfl
from fedjax_cfl import formatting
from fedjax_cfl.analysis import compare, pivot, plot, sets
from fedjax_cfl.analysis.report import report
from fedjax_cfl.analysis.sets import compare_to_baseline, read_sets, time_to_keep
from fedjax_cfl.analysis.statistics import MAX_PAIRED_SETS, list_differences
from fedjax_cfl.analysis.tables import MEASURES, fit_digits, format_mean, format_number
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.display import chance_all_met, describe_met_rule
from fedjax_cfl.runs.labels import name_parts
from fedjax_cfl.runs.run_dir import common_folder

NESTED = b"[" * 10_000 + b"]" * 10_000


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch, unrendered):
    """Works in an empty folder; only tests of pictures render them."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


ROW = {"round": 1, "accuracy": 0.5, "units_up": 3, "units_down": 3, "wall_s": 1.0}
SUMMARY = {"algorithm": "fedavg", "dataset": "digits", "seed": 0, "overrides": ["rounds=3"]}
COMPARE = {
    "summary garbage": (b"\x00\xff garbage", None, "summary.json: cannot be read"),
    "summary empty": (b"", None, "summary.json: cannot be read"),
    "summary a list": ([1], None, "summary.json: cannot be read: expected a JSON object"),
    "summary nested": (NESTED, None, "summary.json: cannot be read: maximum recursion"),
    "summary a number of 9,999 digits": (b"9" * 9999, None, "cannot be read: Exceeds the limit"),
    "algorithm a list": (SUMMARY | {"algorithm": [1]}, None, "no plain text"),
    "algorithm of lines": (SUMMARY | {"algorithm": "a\nb"}, None, "no plain text"),
    "algorithm of half a sign": (SUMMARY | {"algorithm": "\ud800"}, None, "no plain text"),
    "algorithm of 10,000 signs": (SUMMARY | {"algorithm": "z" * 10_000}, None, "no plain text"),
    "overrides a number": (SUMMARY | {"overrides": 5}, None, "no plain text"),
    "overrides of numbers": (SUMMARY | {"overrides": [5]}, None, "no plain text"),
    "seed a list": (SUMMARY | {"seed": [1]}, None, "no plain text"),
    "metrics garbage": (SUMMARY, b"garbage\n{}\n", "metrics.jsonl, line 1"),
    "metrics nested": (SUMMARY, NESTED, "not a JSON object"),
    "round of text": (SUMMARY, b'{"round": "1"}\n{}\n', "metrics.jsonl, line 1"),
    "round huge": (SUMMARY, ROW | {"round": 10**400}, "round is no number"),
    "round true": (SUMMARY, ROW | {"round": True}, "not a JSON object with an integer"),
    "accuracy of text": (SUMMARY, ROW | {"accuracy": "high"}, "accuracy is no number"),
    "accuracy a list": (SUMMARY, ROW | {"accuracy": [0.5]}, "accuracy is no number"),
    "accuracy NaN": (SUMMARY, ROW | {"accuracy": float("nan")}, "accuracy is no number"),
    "accuracy huge": (SUMMARY, ROW | {"accuracy": 10**400}, "accuracy is no number"),
    "bytes infinite": (SUMMARY, ROW | {"bytes_up": float("inf")}, "bytes_up is no number"),
    "ari an object": (SUMMARY, ROW | {"ari": {}}, "ari is no number"),
    "discrepancy of text": (SUMMARY, ROW | {"discrepancy": "x"}, "discrepancy is no number"),
}


def run_of(folder, summary, metrics):
    for name, content in (
        ("summary.json", summary),
        ("metrics.jsonl", ROW if metrics is None else metrics),
    ):
        content = content if isinstance(content, bytes | str) else json.dumps(content)
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def refuses(says, run):
    with pytest.raises(InputError) as caught:
        compare.compare([run])
    text = str(caught.value)
    assert "\n" not in text and says in text and str(run) in text and len(text) < 1000, text
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("name", COMPARE)
def test_hostile_files_are_refused_in_one_line(name, tmp_path):
    summary, metrics, says = COMPARE[name]
    refuses(says, run_of(tmp_path / "run", summary, metrics))


def test_other_files_are_refused(tmp_path):
    run = run_of(tmp_path / "run", SUMMARY, None)
    (run / "metrics.jsonl").unlink()
    refuses("no metrics.jsonl in", run)
    (run / "metrics.jsonl").mkdir()
    refuses("metrics.jsonl: cannot be read: Is a directory", run)
    (run / "metrics.jsonl").rmdir()
    os.mkfifo(run / "metrics.jsonl")  # it would never answer
    refuses("metrics.jsonl is not a regular file", run)
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()
    refuses("summary.json: cannot be read: Is a directory", run)


def test_numbers_are_those_of_the_rows(tmp_path):
    """A summary that was edited says nothing of them."""
    (row,) = compare.compare(
        [run_of(tmp_path / "run", SUMMARY | {"wall_s": "long"}, None)], "."
    ).to_dict("records")
    assert row["wall_s_mean"] == ROW["wall_s"]


def test_a_file_where_the_folder_should_be(tmp_path):
    run, out = run_of(tmp_path / "run", SUMMARY, None), tmp_path / "taken"
    out.write_bytes(b"precious")
    for path in (out, out / "inside"):
        with pytest.raises(InputError, match="cannot be written"):
            compare.compare([run], path)
    assert out.read_bytes() == b"precious"


def test_names_are_drawn_as_they_are(tmp_path, rendered):
    run = run_of(tmp_path / "run", SUMMARY | {"algorithm": r"$\frac$ | _[red]"}, None)
    (run / ".hydra").mkdir()
    assert list(compare.compare([run], ".")["label"]) == [r"$\frac$ | _[red]"]
    plot.plot_curves(run)
    assert (run / "curves.png").is_file()
    names = {"compare.csv", "compare.md", "compare.pdf", "compare.png", "compare.svg"}
    assert {path.name for path in Path.cwd().iterdir()} == names


def run_with(folder, overrides, accuracy=(0.5,), **fields):
    """Writes a finished run with an accuracy a round."""
    rows = [ROW | {"round": r, "accuracy": a} for r, a in enumerate(accuracy, 1)]
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return run_of(folder, SUMMARY | {"overrides": overrides} | fields, metrics)


def test_settings_of_any_length_and_letters_are_read(tmp_path, rendered):
    """Such as a list of 300 columns, and a path with a space that does not break."""
    long = ",".join(f"feature_{n}" for n in range(300))
    for name, columns in (("0", long), ("1", f"{long},more")):
        path = "dataset.source.path=a\xa0b\udcff.csv"
        run_with(tmp_path / name, [path, f"dataset.source.columns.x=[{columns}]"])
    one, other = compare.compare([tmp_path])["label"]
    assert one != other and max(len(one), len(other)) < 150
    page = report([tmp_path], tmp_path / "page.html").read_text()
    assert "feature_299,more" in page
    run_with(tmp_path / "0", ["local.lr=\ud800\x1b"])
    labels = list(compare.compare([tmp_path])["label"])
    assert r"fedavg lr=\ud800\x1b" in labels


def test_seeds_are_pooled_wherever_and_however_they_ran(tmp_path):
    elsewhere = (
        "devices=1 resume=never checkpoint.every=5 offline=true local.width=4 local.executor=lanes"
    )
    elsewhere += " local.first_layer=direct +logger=csv vectorize=[] seeds=1 coordinator=auto"
    elsewhere += " processes=2 process=0 hydra/launcher=cores hydra.sweep.dir=x"
    run_with(tmp_path / "0", ["rounds=3", "run_dir=0", "seed=0"])
    run_with(tmp_path / "1", ["rounds=3", "run_dir=1", "seed=1", *elsewhere.split()], seed=1)
    run_with(tmp_path / "2", ["rounds=3", "seed=2", "local.lr=0.1"], seed=2)
    table = compare.compare([tmp_path])
    assert list(zip(table["label"], table["seeds"], strict=True)) == [
        ("fedavg", "0 1"),
        ("fedavg lr=0.1", "2"),
    ]


def test_cells_of_a_table_are_pooled(tmp_path):
    for column in ("fedavg", "ifca"):
        for seed in range(2):
            folder = tmp_path / "T" / "row" / column / f"seed{seed}"
            asked = ["experiment=T", "dataset=digits", f"algorithm={column}", f"seed={seed}"]
            asked.append(f"run_dir={folder}")
            run_with(folder, asked, algorithm=column, seed=seed)
    table = compare.compare([tmp_path / "T"])
    assert list(table["label"]) == ["fedavg", "ifca"] and list(table["runs"]) == [2, 2]


def test_a_best_says_over_how_many_tests_and_stands_behind(tmp_path):
    run_with(tmp_path / "a", [], [0.9, 0.2, 0.5, 0.4])
    run_with(tmp_path / "i", [], [None, None, 0.3, 0.6], algorithm="ifca")
    found = compare.compare([tmp_path]).set_index("label")
    assert found["best_accuracy_mean"].tolist() == [0.9, 0.6]
    assert found["evaluations_mean"].tolist() == [4, 2]
    head = (tmp_path / "compare.md").read_text().splitlines()[0].split(" | ")
    assert (
        head[2] == "final %" and head.index("best over tests %") > head.index("worst 10 %")
        if "worst 10 %" in head
        else head.index("best over tests %") > 2
    )


def test_labels_name_what_ran(tmp_path):
    own = ["model.module._target_='my_file.MyModel'", "+algorithm._target_=mine.method"]
    named = name_parts({"algorithm": "ifca", "model": "mclr", "dataset": "digits"}, own)
    assert named == {"algorithm": "mine.method", "model": "my_file.MyModel", "dataset": "digits"}
    run_with(tmp_path / "0", own, algorithm="ifca", model="mclr")
    run_with(tmp_path / "1", [], algorithm="ifca", model="mclr")
    labels = list(compare.compare([tmp_path])["label"])
    assert labels == ["mine.method my_file.MyModel", "ifca mclr"]


def test_a_data_set_goes_by_the_name_that_it_was_given(tmp_path):
    """Two CSV files are two columns, and their settings tell nothing more."""
    for name in ("sensors", "houses"):
        for method in ("fedavg", "ifca"):
            asked = [f"dataset.name='{name}'", f"dataset.source.path={name}.csv"]
            run_with(tmp_path / name / method, asked, algorithm=method, dataset="csv")
    compare.main([str(tmp_path), "--out", str(tmp_path), "--pivot", "algorithm", "dataset"])
    head = (tmp_path / "pivot.md").read_text().splitlines()[0]
    assert head == "|  | houses | sensors |"
    found, _ = compare.compare_runs([tmp_path])
    assert list(found["label"]) == [
        "fedavg houses",
        "ifca houses",
        "fedavg sensors",
        "ifca sensors",
    ]
    assert {*found["method"]} == {"fedavg", "ifca"}


def test_names_of_settings_are_short_where_that_is_clear():
    names = ["algorithm.m", "local.lr", "model.lr", "partition.seed", "hydra.model"]
    assert list(sets.shorten_names(names).values()) == ["m", *names[1:]]


@pytest.fixture
def swept(tmp_path):
    """A folder of runs: two methods, IFCA with two m, on two data sets, three seeds each."""
    finals = {("fedavg", "", "digits"): [0.5, 0.6, 0.7], ("ifca", "2", "digits"): [0.6, 0.5, 0.7]}
    finals |= {("ifca", "3", "digits"): [0.1, 0.2, 0.3], ("fedavg", "", "mnist"): [0.9] * 3}
    finals |= {("ifca", "2", "mnist"): [0.91, 0.92, 0.93]}
    for (method, m, data), accuracies in finals.items():
        for seed, accuracy in enumerate(accuracies):
            asked = [f"algorithm={method}", *([f"algorithm.m={m}"] if m else [])]
            folder = tmp_path / "sweep" / f"{method}{m}{data}{seed}"
            named = {"algorithm": method, "dataset": data, "seed": seed, "data_id": data}
            run_with(folder, asked, [accuracy], **named)
            (folder / ".hydra").mkdir()
            number = f"m: {m}" if m else ""  # fedavg has none
            written = f"algorithm: {{{number}}}\nmodel: {{module: {{}}}}\n"
            (folder / ".hydra" / "config.yaml").write_text(written)
    return tmp_path / "sweep"


def read_pivot(folder):
    with (folder / "pivot.csv").open() as file:
        return {(line["row"], line["column"]): line for line in csv.DictReader(file)}


def test_a_pivot_names_the_best_of_each_column_and_its_files_say_the_same(swept, tmp_path, capsys):
    asked = [str(swept), "--out", str(tmp_path), "--pivot", "algorithm+algorithm.m", "dataset"]
    compare.main(asked)
    cells = read_pivot(tmp_path)
    ranks = {place: cell["rank"] for place, cell in cells.items()}
    # of three seeds the exact test cannot tell anything: the best mean alone is marked
    assert ranks == {
        ("FedAvg", "digits"): "first",
        ("FedAvg", "MNIST"): "plain",
        ("IFCA, m=2", "digits"): "plain",
        ("IFCA, m=2", "MNIST"): "first",
        ("IFCA, m=3", "digits"): "plain",
    }
    cell = cells["IFCA, m=3", "digits"]
    np.testing.assert_allclose([float(cell["mean"]), float(cell["sd"])], [0.2, 0.1])
    latex = (tmp_path / "pivot.tex").read_text()
    for line in (
        r"\begin{table}[t]",
        r"\label{tab:final-accuracy}",
        r"\begin{tabular}{lrr}",
        r" & digits & MNIST \\",
        r"IFCA, m=2 & 60.00 $\pm$ 10.00 & 92.00 $\pm$ 1.00 \\",
        r"IFCA, m=3 & 20.00 $\pm$ 10.00 & - \\",
        r"\end{table}",
    ):
        assert f"\n{line}\n" in latex
    assert (
        r"\caption{Test accuracy in \%, final: mean $\pm$ sample sd over 3 seeds. Nothing is"
        in latex
    )
    assert "which takes 7 seeds or more" in latex and latex.count("{") == latex.count("}")
    assert "test, $p < 0.05$ after Holm's correction" in latex  # in one piece, on one line
    assert "\n\\smallskip\n\\begin{tabular}" in latex and "tabcolsep" not in latex
    text = (tmp_path / "pivot.md").read_text()
    assert "| IFCA, m=3 | 20.00 ± 10.00 | - |" in text and "**" not in text
    for (row, column), cell in cells.items():  # printed cells are those of the CSV
        printed = f"{100 * float(cell['mean']):.2f} ± {100 * float(cell['sd']):.2f}"
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
        assert line.split(" | ")[["digits", "MNIST"].index(column) + 1].strip(" |") == printed
    compare.main([*asked, "--transpose", "--decimals", "1"])
    assert "| MNIST | 90.0 ± 0.0 | 92.0 ± 1.0 | - |" in (tmp_path / "pivot.md").read_text()
    assert "best mean of a row differs" in (tmp_path / "pivot.tex").read_text()
    assert "note:" not in capsys.readouterr().out
    with pytest.raises(InputError, match="--decimals 9: between 0 and 6"):
        compare.main([*asked, "--decimals", "9"])


def test_bold_is_what_an_exact_test_of_six_seeds_says(tmp_path):
    for method, base in (("fedavg", 0.5), ("ifca", 0.52), ("fesem", 0.1)):
        for seed in range(8):
            named = {"algorithm": method, "seed": seed, "data_id": "a"}
            run_with(tmp_path / f"{method}{seed}", [], [base + seed / 100], **named)
    places = {method: (method, "digits") for method in ("fedavg", "ifca", "fesem")}
    for seeds, rank in ((8, "best"), (6, "first")):  # two comparisons: of six seeds p is 0.0625
        found = read_sets([tmp_path / f"{m}{seed}" for m in places for seed in range(seeds)])
        table = pivot.fill_cells(found, places, "final").set_index("row")
        assert table["rank"].to_dict() == {"fedavg": "plain", "ifca": rank, "fesem": "plain"}
        lines = pivot.lay_out(table.reset_index(), str, "**{}**")
        assert any("**" in cell for line in lines for cell in line) == (rank == "best")
    # five columns of two decimals do not fit into the margins of a page as they are: 411 of 345 pt
    wide = table.reset_index().assign(row="permute_labels", column=["a", "b", "c"])
    wide = pd.concat([wide, wide.iloc[:2].assign(column=["d", "e"])], ignore_index=True)
    pivot.write_pivot(wide, tmp_path)
    latex = (tmp_path / "pivot.tex").read_text()
    assert "\n\\footnotesize\\setlength{\\tabcolsep}{3pt}\n\\begin{tabular}{lrrrrr}" in latex
    named = {"algorithm": "ifca", "seed": 3, "data_id": "a"}
    run_with(tmp_path / "ifca3", [], [0.5], **named)  # behind fedavg in one seed of eight: p 0.07
    found = read_sets([tmp_path / f"{m}{seed}" for m in places for seed in range(8)])
    assert "best" not in set(pivot.fill_cells(found, places, "final")["rank"])


def test_each_task_of_a_pivot_shows_its_own_score(tmp_path, monkeypatch):
    for number, (method, score) in enumerate((("fedavg", 0.5), ("ifca", 0.75))):
        run_with(tmp_path / f"classes{number}", [], [score], algorithm=method)
        rows = [{"round": 1, "rmse": 3 - number}]
        named = SUMMARY | {"algorithm": method, "dataset": "houses", "overrides": []}
        run_of(tmp_path / f"numbers{number}", named, json.dumps(rows[0]) + "\n")
    compare.main([str(tmp_path), "--out", "by-data", "--pivot", "algorithm", "dataset"])
    text = Path("by-data/pivot.md").read_text()
    assert text.startswith("|  | digits, final % | houses, final RMSE |\n")
    assert "| FedAvg | 50.00 | 3.000 |\n| IFCA | 75.00 | 2.000 |" in text
    ranks = {place: cell["rank"] for place, cell in read_pivot(Path("by-data")).items()}
    assert ranks["IFCA", "houses"] == "first"
    numbers = read_sets([tmp_path / "numbers0", tmp_path / "numbers1"])
    (found,) = list_differences(numbers, ["final_rmse"]).to_dict("records")
    assert found["set"] == "ifca" and (found["mean"], found["ahead"], found["behind"]) == (-1, 1, 0)
    asked = ["--pivot", "dataset", "algorithm", "--measure", "best"]
    compare.main([str(tmp_path), "--out", "by-method", *asked])
    text = Path("by-method/pivot.md").read_text()  # the columns mix scores: none is the best
    assert "| digits, best over tests % | 50.00 | 75.00 |" in text
    assert "| houses, best over tests RMSE | 3.000 | 2.000 |" in text
    compare.main([str(tmp_path / "numbers0"), "--out", "one", "--pivot", "algorithm", "dataset"])
    assert Path("one/pivot.md").read_text().startswith("|  | houses |")
    monkeypatch.setattr("fedjax_cfl.analysis.report.to_png", lambda figure: b"")
    page = report([tmp_path], "page.html").read_text()
    assert " A best accuracy over tests is a maximum, a best RMSE over tests is a minimum" in page


def test_costs_are_best_when_small(swept):
    found = read_sets([swept / f"{name}{seed}" for name in TWO for seed in range(3)])
    first, second = (found[found["algorithm"] == method].copy() for method in ("ifca", "fedavg"))
    cheap = {"a": first.assign(units=3.0), "b": second.assign(units=1.0)}
    assert pivot.rank_cells(cheap, "units").to_dict() == {"a": "plain", "b": "first"}
    assert set(pivot.rank_cells({"ifca": first}, "final_accuracy")) == {"plain"}


def test_files_go_where_the_runs_are(swept, tmp_path, monkeypatch, capsys):
    """And never into another folder that happens to be the current one."""
    before = {*tmp_path.rglob("*")}
    compare.main([str(swept / "fedavgdigits0"), str(swept / "ifca2digits0")])
    assert "wrote compare.csv, compare.md, compare.png" in capsys.readouterr().out
    names = {path.name for path in {*tmp_path.rglob("*")} - before if path.parent == swept}
    assert names == {path.name for path in {*tmp_path.rglob("*")} - before}
    assert {"compare.csv", "differences.csv"} <= names and not list(Path.cwd().iterdir())
    monkeypatch.setattr("fedjax_cfl.analysis.report.to_png", lambda figure: b"")
    assert report([swept / "ifca2digits0"]) == swept / "ifca2digits0" / "report.html"
    monkeypatch.chdir(swept)
    assert common_folder(["fedavgdigits0", swept / "ifca2digits0"]) == Path(".")


def test_what_others_were_given_says_its_default(swept):
    """And sets and rows stand in the order in which the runs were made, 2 before 10."""
    for number, m in ((2, 5), (10, 4), (11, None)):
        asked = [f"algorithm.m={m}"] if m else []
        folder = run_with(swept / "again" / str(number), asked, algorithm="flexcfl")
        (folder / ".hydra").mkdir()
        text = f"algorithm: {{m: {m or 3}}}\nmodel: {{module: {{}}}}\n"
        (folder / ".hydra" / "config.yaml").write_text(text)
    labels = list(read_sets([swept / "again"])["label"])
    assert labels == ["flexcfl m=5", "flexcfl m=4", "flexcfl m=3 (default)"]


@pytest.mark.parametrize("width", [50, 80, 400])
def test_a_table_fits_its_terminal_and_is_whole_elsewhere(width, swept, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    compare.compare([swept / "fedavgdigits0", swept / "ifca2mnist1"], "out")
    whole = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    compare.compare([swept / "fedavgdigits0", swept / "ifca2mnist1"], "out")
    narrow = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line for line in narrow.splitlines() if set("┃│━") & {*line}]
    assert max(map(len, lines)) <= width and "50.00" in narrow and "final %" in narrow
    assert "…" not in narrow and not any("50.0 " in line for line in lines)
    # of 80 columns headings of two lines let all stand there
    assert ("not shown here, but in" in " ".join(narrow.split())) == (width == 50)
    for heading in ("final %", "best over tests %", "wall s"):
        assert heading in whole
        assert heading in " ".join(narrow.split()) or width == 80


@pytest.mark.parametrize(
    ("estimate", "measure", "text"),
    [
        ((8.04, 0.03252, 3), "best_rmse", "8.040 ± 0.033"),
        ((123.456, 7.0, 3), "mae", "123.5 ± 7.0"),
        ((2.5e-6, 1e-7, 3), "mae", "2.5e-06 ± 1e-07"),
        ((52345.6, 7.89, 3), "mae", "52,346 ± 8"),
        ((8.04, math.nan, 1), "mae", "8.040 (1/3)"),
        ((0.5, 0.0123, 3), "best_accuracy", "50.00 ± 1.23"),
        ((0.5, 0.0, 3), "best_accuracy", "50.00 ± 0.00"),
        ((4.0, 0.0, 3), "evaluations", "4"),
        ((19.8, 0.01, 3), "wall_s", "19.8"),  # runs of one program have one time
        ((math.nan, math.nan, 0), "mae", "-"),
    ],
)
def test_a_deviation_has_the_decimals_of_its_mean(estimate, measure, text):
    fitted = fit_digits(MEASURES[measure], estimate[:1])
    assert format_mean(estimate, 3, fitted) == text


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        ([3.14159, 12.56637, 0.98712], "3.142 12.566 0.987"),
        ([0.98712, 2.5e9], "0.9871 2,500,000,000.0000"),  # the lower of two
        ([0.98712, 1.5, 2.5e30, math.nan, math.inf], "0.987 1.500 2.5e+30 nan inf"),
        ([0.0, 3e-4, -0.1234, 0.2], "0.0000 0.0003 -0.1234 0.2000"),
        ([0.0, math.nan], "0 nan"),
        ([2.5e-6, 1.0], "2.5e-06 1"),
    ],
)
def test_numbers_of_a_column_have_as_many_decimals(column, texts):
    fitted = fit_digits(MEASURES["final_rmse"], column)
    assert " ".join(format_number(value, fitted) for value in column) == texts
    assert fit_digits(MEASURES["ari"], column) == MEASURES["ari"]


def test_every_table_has_as_many_decimals_of_rmse_in_a_column(tmp_path, monkeypatch, capsys):
    scores = {"fedavg": (3.1, 3.18318), "ifca": (12.5, 12.63274), "flexcfl": (0.98, 0.99424)}
    for method, values in scores.items():
        for seed, score in enumerate(values):
            named = SUMMARY | {"algorithm": method, "dataset": "houses", "overrides": []}
            run = tmp_path / f"{method}{seed}"
            run_of(run, named | {"seed": seed}, json.dumps({"round": 1, "rmse": score}) + "\n")
    compare.main([str(tmp_path), "--out", "out", "--pivot", "algorithm", "dataset"])
    shown = "3.142 ± 0.059", "12.566 ± 0.094", "0.987 ± 0.010"
    written = [Path("out", name).read_text() for name in ("compare.md", "pivot.md", "pivot.tex")]
    for text in (capsys.readouterr().out, *written):
        assert all(cell in text.replace(r"$\pm$", "±") for cell in shown), text
    for table, prefix in (("compare", "final_rmse_"), ("pivot", "")):
        rows = pd.read_csv(f"out/{table}.csv").to_dict("records")
        cells = [f"{row[f'{prefix}mean']:.3f} ± {row[f'{prefix}sd']:.3f}" for row in rows]
        assert sorted(cells) == sorted(shown)
    monkeypatch.setattr("fedjax_cfl.analysis.report.to_png", lambda figure: b"")
    page = report([tmp_path], "page.html").read_text()
    assert all(cell in page for cell in shown)
    # differences of pairs
    assert all(cell in page for cell in ("-2.154 ± 0.049", "-11.579 ± 0.084", "-9.425 ± 0.035"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("algorithm", "dataset"), "two sets of runs share the cell IFCA x digits"),
        (("algorithm", "algorithm.k"), "--pivot: no setting algorithm.k, of the columns"),
        (("algorithm", "dataset", "--measure", "nice"), "--measure nice: unknown measure"),
    ],
)
def test_a_pivot_that_cannot_be_is_refused(swept, asked, said):
    with pytest.raises(InputError, match=said):
        compare.main([str(swept), "--pivot", *asked])
    assert not Path("compare.csv").exists()


TWO = ("fedavgdigits", "ifca2digits")
LABELS = {
    "one short": ["fedavg"],
    "seven short": [f"method {i}" for i in range(7)],
    "long": [f"flexcfl algorithm.eta_g={i} dataset.source.path=/a/{'b' * 60}" for i in range(5)],
    "a whole screen": ["W" * 1000, "$" * 400, "é" * 400],
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_legends_are_not_cut_off(tmp_path, rendered, labels):
    figure = plot.new_figure(13, 5)
    axes = figure.subplots()
    lines = [axes.plot([0, 1])[0] for _ in labels]
    plot.add_legend(figure, lines, labels)
    plot.save_figure(figure, tmp_path / "legend.png")
    box, (width, height) = figure.legends[0].get_window_extent(), figure.canvas.get_width_height()
    assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0
    assert axes.get_window_extent().height > 0.5 * height  # the figure grew with its legend


def test_the_same_picture_is_the_same_file(tmp_path, rendered):
    found = []
    for name in ("one", "other"):
        figure = plot.new_figure(4, 3)
        figure.subplots().plot([0, 1, 0.5], marker="o")
        found.append([path.read_bytes() for path in plot.save_pictures(figure, tmp_path / name)])
    assert found[0] == found[1]


def test_texts_from_files_do_nothing():
    text = "=1+1|<b>\x1b[31m\n\ud800"
    assert formatting.escape_text(text) == r"=1+1|<b>\x1b[31m\n\ud800"
    assert formatting.escape_markdown(text) == r"=1+1\|&lt;b>\x1b[31m\n\ud800"
    assert formatting.escape_markup("[red]x") == r"\[red]x"
    assert [formatting.escape_csv(sign + "1") for sign in "=+-@1"] == [
        "'=1",
        "'+1",
        "'-1",
        "'@1",
        "11",
    ]
    assert formatting.escape_csv(-1.5) == -1.5
    assert formatting.escape_plot("$x$") == r"\$x\$"


def test_hostile_run_directories_are_shown_as_text(tmp_path, capsys, rendered):
    folder = tmp_path / "\x1b]0;taken\x07[bold]" / "run"
    run_with(folder, [], algorithm="=cmd()|[red]<img>", dataset="@x")
    (folder.parent / "half\x1b[2J\n").mkdir()
    (folder.parent / "half\x1b[2J\n" / "metrics.jsonl").write_text("")
    compare.compare([tmp_path], ".")
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"half\x1b[2J\n" in out and "=cmd()|[red]<img>" in out
    assert r"| =cmd()\|[red]&lt;img> |" in Path("compare.md").read_text()
    with Path("compare.csv").open(newline="") as handle:
        (line,) = csv.DictReader(handle)
    assert (line["algorithm"], line["dataset"]) == ("'=cmd()|[red]<img>", "'@x")


def test_discard_met_says_when_it_counts():
    assert chance_all_met(4, 4, 1) == 1 and chance_all_met(4, 2, 0) == 0
    assert chance_all_met(4, 2, 2) == pytest.approx(0.75**4)
    said = describe_met_rule(1000, 20, 300)
    assert "within 300 rounds in about 0.097 of all runs" in said and "\n" not in said
    assert "in half of them by round 36" in said and "round robin it is round 50" in said


def test_gain_and_speedup_over_a_baseline_of_the_same_seed(tmp_path, capsys):
    """The baseline ends at 0.5, which it keeps from second 20 on, the other from second 10."""

    def rows(*accuracies):
        return "".join(
            json.dumps(ROW | {"round": t, "macro_accuracy": value, "sim_time_s": 10.0 * t}) + "\n"
            for t, value in enumerate(accuracies, 1)
        )

    run_of(tmp_path / "a", SUMMARY, rows(0.1, 0.6, 0.5))
    run_of(tmp_path / "b", SUMMARY | {"algorithm": "ifca"}, rows(0.55, 0.6, 0.7))
    run_of(tmp_path / "c", SUMMARY | {"algorithm": "ifca", "seed": 9}, rows(0.1, 0.1, 0.1))
    _, ifca = compare.compare([tmp_path], baseline="fedavg").to_dict("records")
    assert ifca["accuracy_gain_mean"] == pytest.approx(0.2) and ifca["speedup_mean"] == 2.0
    assert ifca["speedup_n"] == 1, "nobody to compare seed 9 with"
    assert "speed-up" in capsys.readouterr().out
    for name in ("cfl", ""):
        with pytest.raises(InputError, match=f"--baseline {name}: must name one of"):
            compare.compare([tmp_path], baseline=name)


def test_an_accuracy_is_kept_from_where_all_later_tests_of_all_clients_reach_it():
    """In round 2 the accuracy is high, but only 3 of the 5 clients had a model."""
    rows = [
        {"round": t, "macro_accuracy": value, "evaluated_clients": clients}
        for t, value, clients in ((1, 0.1, 2), (2, 0.9, 3), (3, 0.5, 5), (4, 0.8, 5))
    ]
    assert [time_to_keep(rows, target) for target in (0.1, 0.5, 0.6, 0.81)] == [3, 3, 4, None]
    slow = [row | {"macro_accuracy": 0.1} for row in rows[:3]] + [rows[3]]
    # the last twentieth is the last test, of 0.8
    assert compare_to_baseline(rows, slow) == {"accuracy_gain": 0.0, "speedup": 1.0}
    # kept from round 3 on instead of round 4
    quick = [*rows[:2], rows[2] | {"macro_accuracy": 0.8}, rows[3]]
    assert compare_to_baseline(quick, slow)["speedup"] == 4 / 3
    assert compare_to_baseline(slow, rows[:2])["accuracy_gain"] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.2, None, 0.4], (0.3, math.sqrt(0.02), 2)),
        ([0.5, None], (0.5, math.nan, 1)),
        ([None], (math.nan, math.nan, 0)),
    ],
)
def test_mean_and_sample_sd_of_the_seeds_that_have_a_number(values, wanted):
    runs = [{"algorithm": "a", "final_accuracy": value} for value in values]
    (row,) = sets.list_measures(label(runs)).to_dict("records")
    found = [row[f"final_accuracy_{part}"] for part in ("mean", "sd", "n")]
    assert found == pytest.approx(wanted, nan_ok=True)


def label(runs):
    """Returns what `label_runs` makes of runs with these fields."""
    each = [{"seed": n, "overrides": {}, "rows": []} | run for n, run in enumerate(runs)]
    return sets.label_runs(pd.DataFrame(each, dtype=object))


def test_a_target_of_everything_is_allowed(tmp_path, capsys):
    run_of(tmp_path / "run", SUMMARY, ROW | {"accuracy": 1.0})
    (rounds,) = compare.compare([tmp_path / "run"], target=1.0)["rounds_to_target_mean"]
    assert rounds == 1 and "rounds to 100 %" in capsys.readouterr().out
    for target in (0.0, 1.01):
        with pytest.raises(InputError, match=r"target must be a (score|share)"):
            compare.compare([tmp_path / "run"], target=target)


@pytest.mark.parametrize("count", [3, MAX_PAIRED_SETS, MAX_PAIRED_SETS + 1])
def test_few_sets_are_compared_in_pairs_and_many_with_the_best(count):
    each = [{"algorithm": str(n), "final_accuracy": n / 10, "seed": 0} for n in range(count)]
    found = list_differences(label(each), ["final_accuracy"])
    pairs = set(zip(found["set"], found["minus"], strict=True))
    every = {(str(a), str(b)) for a in range(count) for b in range(a)}
    wanted = every if count <= MAX_PAIRED_SETS else {p for p in every if p[0] == str(count - 1)}
    assert pairs == wanted and len(found) == len(wanted)
    # a set whose runs have no accuracy is not the best one
    none = {"algorithm": "none", "final_accuracy": None, "seed": 0, "ari": 1.0}
    found = list_differences(label([none, *(run | {"ari": 0.0} for run in each)]), ["ari"])
    assert "none" not in set(found["set"]) and "none" in set(found["minus"])


def test_a_gain_is_over_a_run_on_the_same_data(tmp_path, capsys):
    """Data of another partition.seed, file or alpha have another identity."""
    ours, other = {"data_id": "a"}, {"data_id": "b"}
    row = json.dumps(ROW | {"macro_accuracy": 0.5}) + "\n"
    run_of(tmp_path / "a", SUMMARY | ours, row)
    run_of(tmp_path / "b", SUMMARY | {"algorithm": "ifca"} | other, row)
    counts = compare.compare([tmp_path], baseline="fedavg")["accuracy_gain_n"]
    assert list(counts) == [1, 0]
    said = "1 of 1 runs of ifca have no gain: no run of fedavg has the same seed and the same data"
    assert said in capsys.readouterr().out
    run_of(tmp_path / "b", SUMMARY | {"algorithm": "ifca"} | ours, json.dumps(ROW) + "\n")
    compare.compare([tmp_path], baseline="fedavg")  # of a run without accuracy: not for its data
    assert "have no gain" not in capsys.readouterr().out
    run_of(tmp_path / "b", SUMMARY | {"algorithm": "ifca"} | other, row)
    assert list_differences(read_sets([tmp_path]), ["final_accuracy"]).empty
    run_of(tmp_path / "c", SUMMARY | ours, row)
    with pytest.raises(InputError, match="--baseline fedavg: holds a seed more than once"):
        compare.compare([tmp_path], baseline="fedavg")


def test_runs_of_other_partition_seeds_are_not_pooled(tmp_path):
    for seed in (1, 2):
        summary = SUMMARY | {"seed": 0, "overrides": [f"partition.seed={seed}"]}
        run_of(tmp_path / str(seed), summary, json.dumps(ROW) + "\n")
    labels = list(read_sets([tmp_path])["label"])
    assert labels == ["fedavg partition.seed=1", "fedavg partition.seed=2"]


def test_runs_from_python_that_differ_in_their_parts_are_not_pooled(tmp_path):
    """Such as a step size, which no name says; arrays are of the seed's data."""
    for number, (seed, lr) in enumerate([(0, 0.1), (1, 0.1), (0, 0.2)]):
        run = run_with(tmp_path / str(number), [], algorithm="ifca", seed=seed)
        (run / ".hydra").mkdir()
        parts = {"made_of.algorithm.round.lr": lr, "made_of.algorithm.round.m": 2}
        parts["made_of.algorithm.round.2"] = lr  # of a list: the same again
        parts["made_of.algorithm.truth"] = f"int32[14] {seed:016x}"
        settings = {"model": {"module": {}}, "seed": seed, "made_of": parts}
        (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    table = compare.compare([tmp_path])
    assert list(table["label"]) == ["ifca lr=0.1", "ifca lr=0.2"]
    assert list(table["seeds"]) == ["0 1", "0"]


def test_all_runs_are_one_frame(swept):
    frame = cfl.load_runs(swept)
    assert len(frame) == 15 and frame["run"].nunique() == 15
    assert frame.groupby("algorithm")["accuracy"].mean().round(3).to_dict() == {
        "fedavg": 0.75,
        "ifca": 0.573,
    }
    assert set(frame.loc[frame["algorithm"] == "ifca", "algorithm.m"].astype(str)) == {"2", "3"}
    run = run_of(
        swept.parent / "groups",
        SUMMARY,
        ROW | {"group_accuracy": [0.2, None], "group_sizes": [3, 0]},
    )
    groups = cfl.load_runs([run], per="group")
    assert groups[["group", "group_sizes"]].to_numpy().tolist() == [[0, 3], [1, 0]]
    assert groups["group_accuracy"].tolist() == pytest.approx([0.2, math.nan], nan_ok=True)
    assert cfl.load_runs([run], per="client").empty
    with pytest.raises(InputError, match="per=round: must be one of test, group, client"):
        cfl.load_runs(run, per="round")


NO_JAX = "raise ImportError('JAX is not needed for this')"


@pytest.mark.parametrize("verb", ["compare", nightly("report"), nightly("rank")])
def test_what_compares_needs_no_jax(verb, swept, tmp_path):
    (tmp_path / "without" / "jax").mkdir(parents=True)
    (tmp_path / "without" / "jax" / "__init__.py").write_text(NO_JAX)
    cells = tmp_path / "cells.csv"
    cells.write_text("setting,method,score\none,A,1\none,B,2\n")
    code = "import sys; from fedjax_cfl.cli.main import main; sys.exit(main())"
    path = os.pathsep.join([str(tmp_path / "without"), str(Path(cfl.__file__).parents[1])])
    given = [str(cells)] if verb == "rank" else [str(swept / "fedavgdigits0")]
    ended = subprocess.run(
        [sys.executable, "-c", code, verb, *given],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and "wrote " in ended.stdout, ended.stderr


def test_methods_with_layers_have_the_names_of_papers():
    assert pivot._name_place({"algorithm": "flexcfl+ditto"}, "algorithm") == "FlexCFL+Ditto"
    assert pivot._name_place({"algorithm": "mine+ditto"}, "algorithm") == "mine+Ditto"
