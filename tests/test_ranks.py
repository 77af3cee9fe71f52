"""Ranks of methods over settings: against loops and SciPy, and cflbench's files on hand numbers."""

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from papers import benchmark, report, runner
from papers.cells import load_table, make_cells
from scipy import stats

from fedjax_cfl.analysis import ranks
from fedjax_cfl.analysis.plot import new_figure
from fedjax_cfl.cli.build import assemble
from fedjax_cfl.errors import InputError


def draw_scores(seed=0, settings=5, seeds=3, methods=4):
    rng = np.random.RandomState(seed)
    strength = np.linspace(0, 0.3, methods)
    return [strength + 0.1 * rng.rand(seeds, methods) for _ in range(settings)]


def test_equal_scores_share_the_mean_of_their_ranks():
    means = np.array([[0.9, 0.5, 0.9, 0.1]])
    np.testing.assert_array_equal(ranks.rank_settings(means), [[1.5, 3, 1.5, 4]])


def test_one_setting_with_one_seed_has_its_own_ranks():
    found = ranks.rank_methods([np.array([[0.2, 0.8, 0.5]])])
    for each in (found["mean_rank"], found["low"], found["high"]):
        np.testing.assert_array_equal(each, [3, 1, 2])
    np.testing.assert_array_equal(found["share_first"], [0, 1, 0])


def test_settings_are_drawn_and_seeds_within_them():
    """Against every resample of two settings with two seeds each, all as likely."""
    scores = [np.array([[0.1, 0.2], [0.9, 0.4]]), np.array([[0.3, 0.6], [0.8, 0.4]])]
    firsts = []
    for drawn in itertools.product((0, 1), repeat=2):
        for picked in itertools.product(itertools.product((0, 1), repeat=2), repeat=2):
            means = [scores[n][list(own)].mean(0) for n, own in zip(drawn, picked, strict=True)]
            firsts.append(np.mean([stats.rankdata(-mean) for mean in means], axis=0)[0])
    found = ranks.rank_methods(scores)
    low, high = np.quantile(firsts, [0.05, 0.95], method="inverted_cdf")
    assert found["low"][0] == low and found["high"][0] == high
    assert found["share_first"][0] == pytest.approx(np.mean(np.array(firsts) <= 1.5), abs=0.02)
    assert found["mean_rank"][0] == 1.0


def test_tests_are_those_of_scipy():
    means = np.stack([each.mean(0) for each in draw_scores(settings=7)])
    for tied in (means, np.round(means, 1)):
        expected = stats.friedmanchisquare(*tied.T).pvalue
        assert ranks.friedman(tied) == pytest.approx(expected, rel=1e-12)
    assert ranks.friedman(np.ones((4, 3))) == 1.0
    assert ranks.friedman(means[:1]) is None and ranks.friedman(means[:, :2]) is None
    found = ranks.compare_with(means, 1)
    raw = [stats.wilcoxon(means[:, j], means[:, 1], method="exact").pvalue for j in (0, 2, 3)]
    np.testing.assert_allclose(found[[0, 2, 3]], stats_holm(raw))
    assert np.isnan(found[1])


def test_settings_without_a_difference_have_no_rank():
    """Of seven settings two are equal: Wilcoxon's test is that of the five others."""
    gaps = np.array([0.0, 0.03, -0.01, 0.0, 0.05, -0.02, 0.07])
    found = ranks.compare_with(np.stack([np.full(7, 0.5), 0.5 + gaps], axis=1), 0)
    expected = stats.wilcoxon(gaps[gaps != 0], method="exact").pvalue
    np.testing.assert_allclose(found[1], expected)


def stats_holm(chances):
    """Holm's correction by its definition: the largest of all steps up to its own."""
    order = sorted(range(len(chances)), key=lambda j: chances[j])
    steps = [min(1, (len(chances) - place) * chances[j]) for place, j in enumerate(order)]
    return [max(steps[: order.index(j) + 1]) for j in range(len(chances))]


@pytest.mark.parametrize("methods, q", [(3, 2.343), (5, 2.728), (10, 3.164), (16, 3.426)])
def test_the_critical_difference_is_demsars(methods, q):
    expected = q * np.sqrt(methods * (methods + 1) / (6 * 12))
    assert ranks.critical_difference(methods, 12) == pytest.approx(expected, rel=1e-3)
    exact = stats.studentized_range.ppf(0.95, methods, np.inf) / np.sqrt(2)
    exact *= np.sqrt(methods * (methods + 1) / (6 * 12))
    assert ranks.critical_difference(methods, 12) == pytest.approx(exact, rel=1e-9)
    assert ranks.critical_difference(2, 12) == pytest.approx(0.57, abs=0.005)


TABLE = {
    "title": "A table",
    "measure": "tail_macro_accuracy",
    "scale": 100,
    "baseline": "Avg",
    "against": ["Avg", "Half"],
    "columns": {"Avg": [], "Best": [], "Half": []},
    "rows": {
        "one": {"overrides": []},
        "two": {"overrides": [], "title": "the second"},
        "begun": {"overrides": []},
        "apart": {"overrides": [], "ranked": False},
    },
}


def write_runs(folder, scores, chosen):
    """Writes what `tune` leaves behind; returns its last runs."""
    runs = []
    for seed, score in enumerate(scores):
        run = folder / "test" / "0" / str(seed)
        run.mkdir(parents=True)
        row = {"round": 3, "accuracy": 0.0, "macro_accuracy": score}
        row |= {"worst10_accuracy": score and score / 2}
        row |= {"bytes_down": 2e6 * (seed + 1), "bytes_up": 0, "local_steps": 7}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (run / "summary.json").write_text(json.dumps({"new_clients_accuracy": 0.25}))
        runs.append(run)
    (folder / "chosen.json").write_text(
        json.dumps({"given": [], "seeds": [0, 1], "chosen": {"local.lr": chosen}})
    )
    (folder / "trials.csv").write_text("local.lr,validation_accuracy\n1,0.5\n2,0.9\n3,0.7\n")
    return runs


def read(path):
    with path.open(newline="") as text:
        return list(csv.DictReader(text))


def test_the_files_of_a_benchmark(tmp_path):
    scores = {
        ("one", "Avg"): [0.5, 0.7], ("one", "Best"): [0.9, 0.9], ("one", "Half"): [0.1, 0.1],
        ("two", "Avg"): [0.2, 0.4], ("two", "Best"): [0.6, 0.5], ("begun", "Avg"): [0.3, 0.3],
        ("apart", "Avg"): [0.8, 0.8], ("apart", "Best"): [0.1, 0.1],
    }  # fmt: skip
    found = {
        place: write_runs(tmp_path / "_".join(place), values, "2")
        for place, values in scores.items()
    }
    benchmark.write(TABLE, found, tmp_path / "figure.png")
    first = read(tmp_path / "cells.csv")[0]
    assert (first["setting"], first["method"], first["seeds"]) == ("one", "Avg", "2")
    assert float(first["score"]) == pytest.approx(0.6) and float(first["worst10"]) == 0.3
    assert float(first["sd"]) == pytest.approx(np.std([0.5, 0.7], ddof=1))
    assert float(first["megabytes"]) == 3.0 and float(first["local_steps"]) == 7
    assert float(first["new_clients"]) == 0.25
    assert first["chosen"] == "local.lr=2" and first["trials"] == "3"
    assert float(first["best_minus_median"]) == pytest.approx(0.2)
    best, worst = read(tmp_path / "ranks.csv")  # Half did not run in both
    assert (best["method"], best["mean_rank"], best["share_first"]) == ("Best", "1.0", "1.0")
    assert float(best["minus_baseline"]) == pytest.approx((0.3 + 0.25) / 2)
    assert worst["method"] == "Avg" and worst["p_wilcoxon_holm"] == ""
    assert best["minus_best"] == "0.0"
    assert float(worst["minus_best"]) == pytest.approx(-(0.3 + 0.25) / 2)
    text = (tmp_path / "ranks.md").read_text()
    assert "Not ranked, for they are not complete: Half, begun." in text
    assert "| Best | 1.0 [1.0, 1.0] | 100% | +27.5 | 0.5 | +0.0 |" in text
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_row_may_show_what_is_measured_once_at_the_end(tmp_path):
    table = TABLE | {"rows": {"new": {"overrides": [], "measure": "new_clients_accuracy"}}}
    found = {
        ("new", name): write_runs(tmp_path / name, [0.5, 0.7], "2") for name in ("Avg", "Best")
    }
    average, *_ = report.collect_records(table, found)
    assert (average["mean"], average["sd"], average["seeds"]) == (25, 0, 2)
    benchmark.write(table, found, tmp_path / "figure.png")
    line, _ = read(tmp_path / "cells.csv")
    assert (line["measure"], line["scores"]) == ("new_clients_accuracy", "0.25 0.25")


def test_differences_are_paired_by_seeds():
    scores = {
        ("one", "Avg"): [0.5, 0.7, 0.6], ("one", "Half"): [0.4, 0.9], ("one", "Best"): [0.9, 0.8],
        ("two", "Avg"): [0.2, float("nan")], ("two", "Best"): [],
    }  # fmt: skip
    means = {("two", "Avg"): float("nan"), ("two", "Best"): 0.5}
    cells = [
        {"setting": setting, "method": method, "scores": found}
        | {"score": means.get((setting, method), np.mean(found or [0]))}
        for (setting, method), found in scores.items()
    ]
    lines = ranks.list_differences(cells, ["Avg", "Half"])
    found = {(line["setting"], line["method"], line["minus"]): line for line in lines}
    assert sorted(found) == [
        ("one", "Avg", "Best"), ("one", "Avg", "Half"), ("one", "Best", "Avg"),
        ("one", "Best", "Half"), ("one", "Half", "Avg"), ("one", "Half", "Best"),
        ("two", "Avg", "Best"), ("two", "Best", "Avg"),
    ]  # fmt: skip
    half = found["one", "Half", "Avg"]  # -0.1 and 0.2
    assert (half["seeds"], half["best"]) == (2, False)
    assert half["mean"] == pytest.approx(0.05) and half["p"] == 1.0
    assert (half["low"], half["high"]) == (pytest.approx(-0.1), pytest.approx(0.2))
    assert found["one", "Best", "Avg"]["p"] == 0.5 and found["one", "Avg", "Best"]["best"]
    means_alone = found["two", "Best", "Avg"]  # of which the mean is no number
    assert means_alone["seeds"] == 0 and np.isnan([means_alone["mean"], means_alone["p"]]).all()


FOUND = {
    ("one", "Avg"): [0.5, 0.7], ("one", "Best"): [0.9, 0.8],
    ("two", "Avg"): [0.2, 0.4], ("two", "Best"): [None, 0.5],  # not finite
}  # fmt: skip


def write_benchmark(folder):
    """Writes runs and the files of a benchmark into a folder; returns the runs."""
    found = {place: write_runs(folder / "_".join(place), FOUND[place], "2") for place in FOUND}
    (folder / "whole").mkdir()
    benchmark.write(TABLE, found, folder / "whole" / "figure.png")
    return found


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> str:
    """The text of the cells of a benchmark."""
    folder = tmp_path_factory.mktemp("benchmark")
    write_benchmark(folder)
    return (folder / "whole" / "cells.csv").read_text()


def test_cells_read_from_a_file_make_the_files_that_their_runs_do(tmp_path):
    found = write_benchmark(tmp_path)
    others = benchmark.read_cells(TABLE, [tmp_path / "whole" / "cells.csv"])
    for name, own in (("none", {}), ("one", {("two", "Avg"): found["two", "Avg"]})):
        (tmp_path / name).mkdir()
        benchmark.write(TABLE, own, tmp_path / name / "figure.png", others)
        for file in ("cells.csv", "differences.csv", "ranks.csv", "ranks.md"):
            made = (tmp_path / name / file).read_bytes()
            assert made == (tmp_path / "whole" / file).read_bytes()
    of_runs = report.collect_records(TABLE, found)
    of_cells = report.add_cells(TABLE, report.collect_records(TABLE, {}), others)
    for one, other in zip(of_runs, of_cells, strict=True):
        for name in ("mean", "sd", "seeds", "runs"):
            assert one[name] == pytest.approx(other[name]), (one["row"], one["column"], name)
        assert report.format_cell(TABLE, one) == report.format_cell(TABLE, other)


def test_where_a_cell_has_no_scores_of_seeds_its_setting_counts_by_means(tmp_path, cells):
    path = tmp_path / "cells.csv"
    path.write_text(cells.replace("0.9 0.8", ""))
    others = benchmark.read_cells(TABLE, [path])
    found = ranks.collect_scores(list(others.values()))
    np.testing.assert_allclose(found.of_seeds[0], [[0.6, 0.85]])
    np.testing.assert_allclose(found.of_seeds[1], [[0.2, 0.0], [0.4, 0.5]])
    record = report.record_cell(TABLE, others["one", "Best"])
    assert (record["seeds"], record["mean"]) == (2, pytest.approx(85))
    assert record["sd"] == pytest.approx(100 * np.std([0.9, 0.8], ddof=1))
    benchmark.write(TABLE, {}, tmp_path / "figure.png", others)
    text = (tmp_path / "ranks.md").read_text()
    assert "settings and seeds (in 1 of them each method has one score, its mean)" in text


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("one,Avg", "three,Avg", ": three, Avg: no cell of the table"),
        ("tail_macro", "best_macro", ": one, Avg: measure best_macro_accuracy: the table shows "),
        ("0.5 0.7", "0.5", ", line 2: scores 0.5: as many as seeds, 2, or none"),
        ("0.5 0.7", "half", ", line 2: scores 'half': must be a finite number"),
        ("0.5 0.7", "0.5 inf", ", line 2: scores 'inf': must be a finite number"),
        ("0.5 0.7", "0.5 0.6", ", line 2: score 0.6: of scores 0.5 0.6 it is 0.55"),
        ("0.5 0.7", "0.4 0.8", ", line 2: sd 0.1414.*: of scores 0.4 0.8 it is 0.28"),
        ("0.5 0.7", "-0.5 1.7", ", line 2: sd 0.14"),
        ("Avg,2,3,", "Avg,0,3,", ", line 2: seeds '0': must be a whole number >= 1"),
        ("Avg,2,3,", "Avg,2,-3,", ": one, Avg: rounds '-3': must be a finite number >= 1"),
        (",3.0,", ",-3.0,", ": one, Avg: megabytes '-3.0': must be a finite number >= 0"),
        ("one,Best", "one,Avg", ", line 3: one, Avg is there already"),
        ("setting,", "place,", ": has no column setting, expected a cells.csv"),
    ],
)
def test_a_cell_that_is_none_of_the_table_is_refused(tmp_path, cells, old, new, message):
    assert old in cells
    path = tmp_path / "cells.csv"
    path.write_text(cells.replace(old, new))
    with pytest.raises(InputError, match=f"^--cells {path}{message}"):
        benchmark.read_cells(TABLE, [path])


@pytest.mark.parametrize(
    ("score", "sd", "said"),
    [
        ("inf", "", "score 'inf': must be a finite number"),
        ("1.5", "", "score 1.5: must be a share from 0 to 1"),
        ("-0.5", "", "score -0.5: must be a share from 0 to 1"),
        ("0.5", "-0.1", "sd '-0.1': must be a finite number >= 0"),
        ("0.5", "nan", "sd 'nan': must be a finite number >= 0"),
    ],
)
def test_numbers_without_scores_of_seeds_are_checked_too(tmp_path, score, sd, said):
    line = {"setting": "one", "method": "Avg", "seeds": "2", "rounds": "3", "trials": "3"}
    line |= {"measure": "tail_macro_accuracy", "score": score, "sd": sd}
    path = tmp_path / "cells.csv"
    with path.open("w", newline="") as text:
        writer = csv.DictWriter(text, benchmark.COLUMNS)
        writer.writeheader()
        writer.writerow(line)
    with pytest.raises(InputError, match=said):
        benchmark.read_cells(TABLE, [path])


def test_the_published_cells_fit():
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "cflbench" / "cells.csv"
    if not path.exists():
        pytest.skip("results are no part of a source archive")
    found = benchmark.read_cells(load_table("cflbench"), [path])
    assert len(found) > 400


def test_any_table_of_scores_is_ranked(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("setting,method,scores\none,A,1 2\none,B,3 4\ntwo,A,5 5\ntwo,B,6 4\n")
    assert ranks.main([str(path), "--out", str(tmp_path / "out"), "--baseline", "A"]) == 0
    best, worst = read(tmp_path / "out" / "ranks.csv")
    assert (best["method"], best["mean_rank"], worst["mean_rank"]) == ("B", "1.25", "1.75")
    assert float(best["minus_baseline"]) == 1.0
    assert "| B | 1.2 [" in capsys.readouterr().out
    assert len(read(tmp_path / "out" / "differences.csv")) == 2
    with pytest.raises(InputError, match=r"^--baseline C: no such method; A, B"):
        ranks.main([str(path), "--baseline", "C"])
    path.write_text("setting,method,score\none,A,1\ntwo,B,2\n")
    with pytest.raises(InputError, match="no two methods that have the same settings"):
        ranks.main([str(path), "--out", str(tmp_path)])


def test_cells_of_a_file_are_shown_and_not_run(tmp_path, capsys):
    line = {"setting": "digits-rotated", "method": "FedAvg", "seeds": "2", "rounds": "60"}
    line |= {"measure": "tail_macro_accuracy", "score": "0.5", "sd": "0.1", "trials": "9"}
    path = tmp_path / "given.csv"
    with path.open("w", newline="") as text:
        writer = csv.DictWriter(text, benchmark.COLUMNS)
        writer.writeheader()
        writer.writerow(line)
    asked = ["cflbench", "--rows", "digits-rotated", "--columns", "FedAvg", "--seeds", "2"]
    asked += ["--out", str(tmp_path / "out"), "--cells", str(path)]
    assert runner.main(asked) == 0
    assert "1 of 1 cells are in the files of --cells" in capsys.readouterr().out
    assert "| digits-rotated | 50.0 ± 10.0 |" in (tmp_path / "out/cflbench/table.md").read_text()
    assert (tmp_path / "out/cflbench/cells.csv").read_text().splitlines()[1].startswith("digits-")
    with pytest.raises(InputError, match=r"^rounds=3: the cells of --cells ran with"):
        runner.main([*asked, "rounds=3"])
    with pytest.raises(InputError, match=r"^--cells: clove_table writes no cells\.csv"):
        runner.main(["clove_table", "--cells", str(path)])
    with pytest.raises(InputError, match=r"^--cells nowhere\.csv: cannot be read"):
        runner.main([*asked[:-1], "nowhere.csv"])


def test_a_run_that_is_not_finite_is_the_worst():
    cells = [
        {"setting": "one", "method": method, "scores": scores}
        for method, scores in (("Avg", [0.2, 0.4]), ("Best", [0.5, float("nan")]))
    ]
    found = ranks.collect_scores(cells)
    np.testing.assert_array_equal(found.of_seeds[0], [[0.2, 0.5], [0.4, 0.0]])
    assert ranks.rank_methods(found.of_seeds)["mean_rank"].tolist() == [1.0, 2.0]


def test_a_method_of_ones_own_is_ranked_where_it_ran():
    scores = {
        ("one", "Avg"): [0.2], ("one", "Best"): [0.5], ("one", "Mine"): [0.3],
        ("two", "Avg"): [0.2], ("two", "Best"): [0.5],
    }  # fmt: skip
    cells = [
        {"setting": setting, "method": method, "scores": found}
        for (setting, method), found in scores.items()
    ]
    found = ranks.collect_scores(cells, ["Mine"])
    assert found.settings == ["one"] and found.methods == ["Avg", "Best", "Mine"]
    assert ranks.collect_scores(cells).settings == ["one", "two"]
    assert ranks.collect_scores(cells, ["Other"]).settings == ["one", "two"]


def test_one_method_is_not_ranked(tmp_path):
    runs = write_runs(tmp_path / "cell", [0.5], "1")
    benchmark.write(TABLE, {("one", "Avg"): runs}, tmp_path / "figure.png")
    assert len(read(tmp_path / "cells.csv")) == 1 and not (tmp_path / "ranks.md").exists()


def test_all_methods_have_the_same_budget(tmp_path):
    """Nine trials: three step sizes by three values of a setting of the method's own, or nine."""
    table = load_table("cflbench")
    cells = make_cells("cflbench", table, tmp_path, list(table["rows"]), None, [0, 1], [])
    for cell in cells:
        values = [text.partition("=")[2].split(",") for text in cell.grid]
        assert np.prod([len(each) for each in values]) == 9 and cell.seeds == (0, 1)


@pytest.mark.nightly
def test_the_methods_that_meet_new_clients_have_a_rule(tmp_path):
    table = load_table("cflbench")
    for cell in make_cells("cflbench", table, tmp_path, ["mnist-newcomers"], None, [0], []):
        values = [text.partition(",")[0] for text in cell.grid]
        small = ["dataset=digits", "dataset.clients=40", "partition=iid", "devices=1"]
        own = [text for text in cell.overrides if text.split("=")[0].split(".")[0] != "partition"]
        own = [text for text in own if not text.startswith("dataset")]
        assemble([*own, *values, *small])
    for row in table["rows"].values():
        assert set(row.get("columns", [])) <= set(table["columns"])


def test_names_of_near_points_do_not_meet():
    figure = new_figure(4, 3)
    axes = figure.subplots()
    points = [("Left", 0.0, 0.0), ("A long name", 1.0, 1.0), ("Another", 1.05, 1.0)]
    axes.plot([0, 1, 1.05, 3], [0, 1, 1, 1], "o")
    figure.draw_without_rendering()
    benchmark.name_points(axes, points)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [name for name, *_ in points]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    dots = axes.transData.transform([point[1:] for point in points])
    assert not any(box.contains(*dot) for box in boxes for dot in dots)
    assert all(axes.bbox.contains(*corner) for box in boxes for corner in box.get_points())
