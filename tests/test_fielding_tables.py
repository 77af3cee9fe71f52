"""The tables of Fielding's paper: measures beside a baseline, settings, and columns of rows."""

import csv
import json
from functools import partial
from pathlib import Path

import hydra
import numpy as np
import pytest
from papers import cells, fielding_server, figures, report, runner
from papers.figures import choose_across
from papers.measures import compute_measures
from papers.report import collect_records

from fedjax_cfl.analysis.sets import compare_to_baseline, time_to_keep
from fedjax_cfl.cli.settings import resolve_settings

SMALL = (
    "dataset.clients=8 clients_per_round=4 rounds=6 local.epochs=1 devices=1 partition=iid"
    " partition.test_fraction=0.3 eval_auxiliary=false eval_distance=true eval_every=2"
    " drift=stream_burst drift.intervals=5 drift.period=2 drift.retained=4 drift.begin=2"
    " drift.end=4 drift.fraction=1.0"
)


def run_of(accuracies, seconds=10.0):
    """Returns rows with these mean accuracies, `seconds` apart."""
    return [
        {
            "round": 2 * i,
            "accuracy": accuracy,
            "macro_accuracy": accuracy,
            "sim_time_s": seconds * i,
        }
        for i, accuracy in enumerate(accuracies, start=1)
    ]


def test_a_target_is_reached_once_it_is_kept():
    rows = run_of([0.2, 0.6, 0.4, 0.5, None, 0.5, 0.7])
    assert [time_to_keep(rows, target) for target in (0.1, 0.5, 0.6, 0.8)] == [60, 60, 70, None]
    assert time_to_keep(run_of([0.2, 0.6, 0.4, 0.5, 0.7], 0.0), 0.4) == 4  # rounds, no clock
    base, run = run_of([0.1, 0.2, 0.3, 0.4, 0.5], 10.0), run_of([0.3, 0.5, 0.6, 0.6, 0.6], 20.0)
    found = compare_to_baseline(run, base)
    assert found["accuracy_gain"] == pytest.approx(0.1) and found["speedup"] == 50 / 40
    assert compare_to_baseline(run_of([0.1, 0.4]), base)["speedup"] is None
    # the last 5 % of 40 tests are two, and the last of them is below their mean
    long = run_of([0.1] * 38 + [0.6, 0.4])
    assert compare_to_baseline([*long], long) == {"accuracy_gain": 0.0, "speedup": None}
    assert compare_to_baseline(long, long) == {"accuracy_gain": 0.0, "speedup": 1.0}
    # which it does not keep itself: its time is the whole run's, 40 tests
    assert compare_to_baseline(run_of([0.1] * 19 + [0.5] * 21), long)["speedup"] == 40 / 20


def test_tests_of_a_few_clients_reach_no_target():
    """Those met in the first rounds may all be right."""
    base, run = run_of([0.1, 0.2, 0.3, 0.4, 0.5]), run_of([0.9, 0.9, 0.9, 0.6, 0.6])
    for row, clients in zip(run, (30, 32, 40, 40, 40), strict=True):
        row["evaluated_clients"] = clients
    assert time_to_keep(run, 0.5) == 30
    assert compare_to_baseline(run, base)["speedup"] == 50 / 30


def test_measures_of_drift_by_hand():
    rows = [
        {"round": r, "mean_client_distance": d, "reclusterings": c, "groups": g}
        for r, d, c, g in ((1, 1.5, 0, 2), (2, None, 1, 4), (3, 0.5, 2, 3))
    ]
    found = compute_measures(rows)
    assert found["reclusterings"] == 3 and found["average_mean_client_distance"] == 1.0
    assert found["average_groups"] == 3 and found["tail_macro_accuracy"] is None


def test_a_gain_is_over_the_baseline_of_the_same_seed(tmp_path):
    table = {
        "measure": "tail_macro_accuracy",
        "scale": 100,
        "baseline": "Avg",
        "columns": {"Avg": [], "Flex": [], "Other": []},
        "rows": {
            "a": {"overrides": []},
            "a-gain": {"runs": "a", "measure": "accuracy_gain"},
            "b": {"overrides": [], "baseline": "Other", "columns": ["Other", "Flex"]},
            "b-speed": {"runs": "b", "measure": "speedup"},
        },
    }
    found = {}
    for row, column, seeds in (
        ("a", "Avg", {0: [0.1, 0.5], 1: [0.1, 0.8]}),
        ("a", "Flex", {0: [0.5, 0.6], 1: [0.8, 0.7], 2: [0.9, 0.9]}),
        ("b", "Other", {0: [0.1, 0.5]}),
        ("b", "Flex", {0: [0.5, 0.5]}),
    ):
        for seed, accuracies in seeds.items():
            folder = tmp_path / row / column / f"seed{seed}"
            folder.mkdir(parents=True)
            lines = map(json.dumps, run_of(accuracies))
            (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            found.setdefault((row, column), []).append(folder)
    records = {(r["row"], r["column"]): r for r in collect_records(table, found)}
    gain, speed = records["a-gain", "Flex"], records["b-speed", "Flex"]
    assert gain["mean"] == pytest.approx(0.0, abs=1e-9)  # +10 and -10; seed 2 has no baseline
    assert gain["sd"] == pytest.approx(np.std([10, -10], ddof=1)) and gain["runs"] == 2
    assert speed["mean"] == 2.0 and report.format_cell(table, speed) == "2"
    assert records["a-gain", "Avg"]["mean"] == 0
    assert "speedup" not in report.format_finished_cell(table, "b", found["b", "Flex"])


@pytest.mark.parametrize("name", ["fielding_fig1", "fielding_ablation"])
def test_a_figures_cells_are_those_of_its_table(name):
    """Same folder, same settings: otherwise the runs would not be taken up, or refused."""
    main, own = cells.load_table("fielding_main"), cells.load_table(name)
    where = Path("out")
    known = {
        str(cell.folder): cell
        for cell in cells.make_cells(
            "fielding_main", main, where, list(main["rows"]), None, [0], []
        )
    }
    assert own["experiment"] == "fielding_main"
    shared = 0
    for cell in cells.make_cells("fielding_main", own, where, list(own["rows"]), None, [0], []):
        other = known.get(str(cell.folder))
        if other is not None:
            shared += 1
            assert cells.filter_overrides(other.overrides) == cells.filter_overrides(cell.overrides)
    assert shared >= 6


def test_presets_of_the_local_solver():
    plain, scale, clean = (
        resolve_settings(["algorithm=fielding", *asked])
        for asked in (["preset=plain"], ["preset=fedscale"], [])
    )
    assert plain["local"] == clean["local"] and plain["schedule"] == clean["schedule"] == {}
    assert clean["algorithm"] == plain["algorithm"] and plain["algorithm"]["mu"] == 0.01
    assert (scale["local"]["momentum"], scale["local"]["weight_decay"]) == (0.9, 5e-4)
    assert scale["algorithm"]["mu"] == 0.1
    factor = hydra.utils.instantiate(scale["schedule"])
    np.testing.assert_allclose(
        [factor(9), factor(10), factor(25), factor(9999)], [1, 0.98, 0.98**2, 1e-3], rtol=1e-5
    )
    assert {k: v for k, v in scale["preset"].items() if k not in ("name", "fielding_mu")} == {
        k: v for k, v in clean["preset"].items() if k not in ("name", "fielding_mu")
    }


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_columns_of_drift_reach_rows_resumed_runs_and_grids(fedjax_cfl, tmp_path):
    line = f"{SMALL} algorithm=fielding_global algorithm.m=4 algorithm.cluster=k_center"
    for run_dir, more in (("two", "rounds=4"), ("two", ""), ("grid", "seeds=2")):
        status, _, error = fedjax_cfl(f"{line} {more} run_dir={run_dir}")
        assert status == 0, error
    names = ("round", "mean_client_distance", "reclusterings", "groups", "migrated_clients")
    one, member = read_rows(tmp_path / "two"), read_rows(tmp_path / "grid" / "0")
    for row, other in zip(one, member, strict=True):
        np.testing.assert_allclose(
            [row[name] for name in names], [other[name] for name in names], rtol=1e-5
        )
        assert 0 <= row["mean_client_distance"] <= 2 and 1 <= row["groups"] <= 8
    assert [row["reclusterings"] for row in one] == [1, 1, 1]  # data arrive in rounds 2, 4, 6


def test_the_distance_needs_all_labels_at_once(fedjax_cfl):
    status, _, error = fedjax_cfl("algorithm=fedavg eval_distance=true resident=host")
    assert status == 2 and "eval_distance=true" in error and len(error.splitlines()) == 1


@pytest.mark.nightly
def test_the_servers_seconds_are_a_table(tmp_path, monkeypatch):
    small = {
        "labels": partial(fielding_server.time_label_clustering, 30, 6),
        "updates": partial(fielding_server.time_update_clustering, 12, [50, 300], 3),
    }
    monkeypatch.setattr(fielding_server, "MEASUREMENTS", small)
    asked = ["fielding_server", "--rows", *small, "--seeds", "2", "--out", str(tmp_path)]
    assert runner.main(asked) == 0
    with (tmp_path / "fielding_server" / "table.csv").open(newline="") as handle:
        found = {(line["row"], line["column"]): line for line in csv.DictReader(handle)}
    assert len(found) == 4 and all(line["seeds"] == "2" for line in found.values())
    assert found["labels", "seconds"]["published"] == "0.05"
    for row in small:
        assert 0 < float(found[row, "seconds"]["mean"]) < float(found[row, "first call"]["mean"])
    labels, _, _ = small["updates"](0)
    assert len({(int(label), i % 3) for i, label in enumerate(labels)}) == 3
    assert sum(fielding_server.RESNET18) == 11_166_912  # without norms and the last layer


@pytest.mark.parametrize(("measures", "across"), [(2, 2), (4, 4), (6, 3), (7, 7), (8, 4), (9, 3)])
def test_measures_of_the_same_runs_fill_whole_lines_of_the_plot(measures, across):
    rows = {"burst": {"overrides": []}}
    rows |= {f"measure {i}": {"runs": "burst", "measure": "ari"} for i in range(1, measures)}
    assert choose_across({"rows": rows}, list(rows), 2 * measures, True) == across


def test_a_panel_lists_the_columns_that_its_row_has(monkeypatch, tmp_path):
    table = {"title": "t", "measure": "ari", "scale": 1, "columns": {"A": [], "B": [], "C": []}}
    table["rows"] = {name: {"title": name, "overrides": []} for name in ("one", "two", "none")}
    values = {
        ("one", "A"): 0.5,
        ("one", "B"): None,
        ("one", "C"): None,
        ("two", "B"): 0.1,
        ("none", "C"): None,
    }
    records = [
        {"row": row, "column": column, "mean": mean, "sd": 0.0, "published": None}
        | {"rounds": 3, "of_rounds": 3, "runs": int(column != "C")}
        for (row, column), mean in values.items()
    ]
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    figures.plot(table, records, tmp_path / "plot.png")
    lines = [[text.get_text() for text in axes.get_yticklabels()] for axes in drawn[0].axes]
    assert lines == [["A", "B"], ["B"]]
