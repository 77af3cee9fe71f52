"""Run files, summaries, plots, the comparison and the doctor, against numbers small
enough to check by hand.
"""

import contextlib
import csv
import io
import json
import math
import sys

import numpy as np
import pyarrow.parquet
import pytest
from conftest import others_nightly
from matplotlib.image import imread
from rich.console import Console

from fedjax_cfl.analysis import compare, plot
from fedjax_cfl.analysis.runs import find_runs
from fedjax_cfl.cli import doctor
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import callbacks
from fedjax_cfl.runs.display import final_table
from fedjax_cfl.runs.results import (
    append_row,
    atomic_write,
    read_metrics,
    rounds_to,
    summarize_rows,
    write_json,
    write_parquet,
)


def row(number, accuracy, m=1, **more):
    """Fabricates the metrics row of round `number`."""
    return {
        "round": number,
        "accuracy": accuracy,
        "macro_accuracy": accuracy,
        "worst10_accuracy": accuracy,
        "test_loss": 1 / number,
        "train_loss": 0.5 / number,
        "discrepancy": float(number),
        "group_discrepancy": np.arange(m) / number,
        "group_sizes": np.full(m, 5, np.int32),
        "ari": None,
        "units_up": 10 * number,
        "units_down": 20 * number,
        "bytes_up": 1000 * number,
        "bytes_down": 2000 * number,
        "wall_s": 0.5 * number,
        **more,
    }


def save(run_dir, rows, finished=True, **fields):
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "metrics.jsonl").open("a") as handle:
        for item in rows:
            append_row(handle, item)
    if finished:
        write_json(run_dir / "summary.json", {**fields, **summarize_rows(read_metrics(run_dir))})
    return run_dir


def test_rows_round_trip_and_nan_becomes_null(tmp_path):
    with (tmp_path / "metrics.jsonl").open("a") as handle:
        append_row(
            handle,
            {"round": np.int32(1), "accuracy": np.float32(0.5), "group_sizes": np.array([3, 4])},
        )
        append_row(
            handle,
            {
                "round": 2,
                "accuracy": math.nan,
                "loss": np.float32(np.inf),
                "group_discrepancy": np.array([1.0, np.nan]),
            },
        )
        assert len(read_metrics(tmp_path)) == 2, "rows must be readable while the run goes on"
    assert read_metrics(tmp_path) == [
        {"round": 1, "accuracy": 0.5, "group_sizes": [3, 4]},
        {"round": 2, "accuracy": None, "loss": None, "group_discrepancy": [1.0, None]},
    ]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_torn_last_line_is_ignored(tmp_path):
    save(tmp_path, [row(1, 0.1), row(2, 0.2)], finished=False)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"round": 3, "accu')
    assert [item["round"] for item in read_metrics(tmp_path)] == [1, 2]


def test_bad_line_in_the_middle_names_file_and_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\nnonsense\n{"round": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)
    with pytest.raises(InputError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path / "absent")


def test_resumed_rounds_supersede_earlier_rows(tmp_path):
    save(tmp_path, [row(1, 0.1), row(2, 0.2), row(3, 0.3), row(2, 0.25)], finished=False)
    assert [(item["round"], item["accuracy"]) for item in read_metrics(tmp_path)] == [
        (1, 0.1),
        (2, 0.25),
    ]


def test_summary_by_hand():
    accuracy = [None, math.nan, 0.2, 0.6, 0.4, 0.6, 0.5]
    spread = [None, 1, 2, 3, 4, 5, 6]
    summary = summarize_rows([row(5 * i + 5, accuracy[i], discrepancy=spread[i]) for i in range(7)])
    assert (summary["best_accuracy"], summary["best_round"]) == (0.6, 20)
    assert (summary["final_accuracy"], summary["rounds"], summary["units_up"]) == (0.5, 35, 350)
    assert summary["last10_evals_accuracy"] == pytest.approx(2.3 / 5)
    assert (summary["discrepancy_mean"], summary["discrepancy_variance"]) == pytest.approx(
        (3.5, 35 / 12)
    )


def test_last10_uses_ten_rows_and_target_round():
    rows = [row(i, i / 100) for i in range(1, 21)]
    assert summarize_rows(rows)["last10_evals_accuracy"] == pytest.approx(0.155)
    summary = summarize_rows([row(1, 0.9), *rows])
    assert (summary["best_accuracy"], summary["best_of"]) == (0.9, 21)
    assert summary["last10_evals_best_accuracy"] == 0.2
    assert rounds_to(rows, 0.07) == 7
    assert rounds_to([row(1, None), *rows[1:]], 0.9) is None


@pytest.mark.parametrize("rows", [[], [row(1, None), row(2, None)]])
def test_summary_without_accuracy(rows):
    summary = summarize_rows(rows)
    assert (
        summary["best_accuracy"]
        is summary["best_round"]
        is summary["final_accuracy"]
        is summary["last10_evals_accuracy"]
        is summary["last10_evals_best_accuracy"]
        is None
    )
    assert rounds_to(rows, 0.1) is None and summary["best_of"] == 0


def test_writers_are_atomic(tmp_path):
    write_json(tmp_path / "summary.json", {"a": np.arange(2), "b": math.nan, "c": tmp_path})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "a": [0, 1],
        "b": None,
        "c": str(tmp_path),
    }
    write_parquet(
        tmp_path / "clients.parquet",
        {
            "client": np.arange(3),
            "accuracy": np.array([0.1, 0.2, 0.3]),
            "labels": np.eye(3, dtype=np.int32),
        },
    )
    table = pyarrow.parquet.read_table(tmp_path / "clients.parquet").to_pydict()
    assert table == {
        "client": [0, 1, 2],
        "accuracy": [0.1, 0.2, 0.3],
        "labels": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    }
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "summary.json") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads((tmp_path / "summary.json").read_text())["a"] == [
        0,
        1,
    ], "a failed write must leave the old file"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clients.parquet", "summary.json"]


CURVES = {
    "one group": [row(i, None if i < 4 else i / 40) for i in range(1, 31)],
    "four groups": [
        row(i, None if i < 4 else i / 40, m=4, group_discrepancy=[None, 1.0, 2.0, i])
        for i in range(1, 31)
    ],
    "twenty groups, no accuracy": [
        row(i, None, m=20, macro_accuracy=None, worst10_accuracy=None) for i in range(1, 4)
    ],
    "one row": [row(1, 0.5, m=4)],
    "bare rows": [{"round": 1}, {"round": 2}],
    "no rows": [],
}


@pytest.mark.parametrize("name", others_nightly(CURVES, ["four groups", "bare rows"]))
def test_curves_is_a_real_picture(tmp_path, name):
    save(tmp_path, CURVES[name], finished=False)
    plot.plot_curves(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]
    height, width = imread(tmp_path / "curves.png").shape[:2]
    assert width >= 1200 and height >= 400 and (tmp_path / "curves.png").stat().st_size > 10_000


def test_final_table_shows_numbers_and_leaves_out_nulls():
    console = Console(record=True, width=100, file=io.StringIO())
    summary = {
        "algorithm": "ifca",
        "dataset": "mnist",
        "seed": 3,
        **summarize_rows([row(5, 0.125)]),
        "compile_s": np.float32(2),
        **dict.fromkeys(("train_s", "eval_s", "client_updates_per_s", "local_steps_per_s"), 1.0),
        **dict.fromkeys(("programs", "programs_from_cache", "peak_memory_bytes"), 3),
        "devices": "1 x cpu",
    }
    console.print(final_table(summary))
    text = console.export_text()
    assert (
        "ifca, mnist (seed 3)" in text
        and "12.50% in round 5, of" in text
        and "10.00 kB" in text
        and "ARI" not in text
        and "accuracy, worst 10 % of clients" in text
    )


@contextlib.contextmanager
def show_progress(folder):
    """Yields show(row) of a run of ten rounds."""
    with contextlib.ExitStack() as files:
        log = callbacks.Log(10, folder, 0, True, files)
        yield lambda row: log.on_rows(row, None, lambda: None)


def test_progress_without_a_terminal_is_a_line_every_30_seconds(capfd, monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    with show_progress(tmp_path) as show:
        for number in range(1, 8):
            now[0] += 10
            show(row(number, 0.5 if number > 3 else None))
    out, error = capfd.readouterr()
    assert out == ""
    assert error.splitlines() == [
        "fedjax-cfl: round 3 of 10, accuracy -, 1 group",
        "fedjax-cfl: round 6 of 10, accuracy 50.00%, 1 group",
    ]


def test_progress_on_a_terminal(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress(tmp_path) as show:
        show(row(5, None))
        show(row(10, 0.5, m=2))
    captured = capsys.readouterr()
    assert (
        "10/10" in captured.err
        and "50.00%" in captured.err
        and "2 groups" in captured.err
        and captured.out == ""
    )


# the comparison


@pytest.fixture
def multirun(tmp_path):
    """Three algorithms by three seeds; the final accuracy is base + 0.1 * seed after two rounds."""
    for position, (algorithm, base) in enumerate(
        (("fedavg", 0.2), ("ifca", 0.5), ("fedgroup", 0.4))
    ):
        for seed in range(3):
            top = base + 0.1 * seed
            rows = [row(1, top - 0.1), row(2, top, ari=0.5 if algorithm == "ifca" else None)]
            save(
                tmp_path / "multirun" / str(3 * position + seed),
                rows,
                algorithm=algorithm,
                dataset="mnist",
                model="mlp",
                seed=seed,
            )
    return tmp_path / "multirun"


def test_compare_by_hand(multirun, tmp_path, capsys):
    save(multirun / "stopped", [row(1, 0.1)], finished=False)
    save(multirun / "empty", [], finished=False)
    (multirun / "compiled" / ".hydra").mkdir(parents=True)
    (multirun / "compiled" / ".hydra" / "config.yaml").touch()
    out = tmp_path / "new" / "out"
    assert compare.main([str(multirun), "--out", str(out), "--target", "0.4"]) == 0
    printed = capsys.readouterr().out
    skipped = [line.partition(": ")[2] for line in printed.splitlines() if "skipped" in line]
    assert skipped == [
        f"1 run with no summary.json: {multirun / 'stopped'}",
        f"2 runs with no evaluated round yet: {multirun / 'compiled'}, {multirun / 'empty'}",
    ]
    assert "30.00 ± 10.00" in printed and "rounds to 40 %" in printed
    with (out / "compare.csv").open() as handle:
        found = {line["algorithm"]: line for line in csv.DictReader(handle)}
    assert list(found) == ["fedavg", "ifca", "fedgroup"]  # as the runs are
    for algorithm, mean in (("fedavg", 0.3), ("fedgroup", 0.5), ("ifca", 0.6)):
        line = found[algorithm]
        assert float(line["best_accuracy_mean"]) == pytest.approx(mean) and float(
            line["best_accuracy_sd"]
        ) == pytest.approx(0.1)
        assert float(line["last10_evals_accuracy_mean"]) == pytest.approx(mean - 0.05)
        assert (line["runs"], line["seeds"], line["units_mean"], line["wall_s_mean"]) == (
            "3",
            "0 1 2",
            "60.0",
            "1.0",
        )
    # fedavg's seeds end at 0.2, 0.3 and 0.4: only one reaches the target, in its second round
    assert [found["fedavg"][f"rounds_to_target_{part}"] for part in ("mean", "sd", "n")] == [
        "2.0",
        "",
        "1",
    ]
    assert "2.0 (1/3)" in (out / "compare.md").read_text()
    assert (found["fedavg"]["ari_mean"], found["ifca"]["ari_mean"]) == ("", "0.5")
    assert imread(out / "compare.png").shape[1] >= 1200
    names = {"compare.csv", "compare.md", "compare.pdf", "compare.png", "compare.svg"}
    assert {path.name for path in out.iterdir()} == names | {"differences.csv"}
    compare.main([str(multirun), "--out", str(out)])
    assert "(replaced: compare.csv, compare.md, compare.png" in capsys.readouterr().out


def test_swept_overrides_make_sets_of_their_own(tmp_path):
    for number, (mu, seed) in enumerate((mu, seed) for mu in ("0", "0.1") for seed in range(2)):
        asked = ["algorithm=fedprox", f"+algorithm.mu={mu}", "rounds=9", f"seed={seed}"]
        named = {"algorithm": "fedprox", "dataset": "mnist", "seed": seed, "overrides": asked}
        save(tmp_path / str(number), [row(1, 0.5)], **named)
    table = compare.compare([tmp_path], tmp_path)
    assert list(zip(table["label"], table["runs"], strict=True)) == [
        ("fedprox mu=0", 2),
        ("fedprox mu=0.1", 2),
    ]


def test_compare_copes_with_odd_runs(tmp_path, capsys):
    save(tmp_path / "a", [row(1, None), row(2, 0.5)], algorithm="fedavg", dataset="mnist", seed=0)
    save(tmp_path / "b", [row(2, None), row(3, 0.6)], algorithm="fedavg", dataset="mnist", seed=0)
    save(tmp_path / "c", [], algorithm="fedavg", dataset="sent140", seed=0)
    save(
        tmp_path / "d",
        [row(1, 0.5, units_up=None, units_down=None, bytes_up=None)],
        algorithm="fedavg",
        dataset="femnist",
        seed=0,
    )
    table = compare.compare([tmp_path / "a", tmp_path], tmp_path)
    assert list(zip(table["label"], table["runs"], strict=True)) == [
        ("fedavg mnist", 2),
        ("fedavg sent140", 1),
        ("fedavg femnist", 1),
    ]
    assert "same seed more than once" in capsys.readouterr().out


def test_compare_errors(tmp_path):
    (tmp_path / "multirun").mkdir()
    with pytest.raises(InputError, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(InputError, match="did you mean 'multirun'"):
        find_runs([tmp_path / "multirum"])
    with pytest.raises(InputError, match="target must be"):
        compare.compare([tmp_path], target=-80)
    (tmp_path / "multirun" / "summary.json").write_text("{")
    with pytest.raises(InputError, match=r"summary\.json: cannot be read: Expecting property name"):
        compare.compare([tmp_path])


# the doctor


def test_doctor_finds_versions_and_data(tmp_path, monkeypatch, capsys):
    for name in ("femnist", "shakespeare"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("FEDJAX_CFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert "jaxlib" in printed and "the package can run here" in printed
    assert f"data: {tmp_path}: femnist, shakespeare" in printed
    assert "fedjax_cfl: nothing yet; fedjax-cfl download NAME, as mnist" in printed


def test_doctor_shows_the_devices_of_a_run(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "use_run_devices", lambda: asked.append(True))
    assert doctor.describe_devices()[1].startswith("cpu:0 cpu") and asked


def test_doctor_fails_when_something_essential_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PACKAGES", {"no-package-here": "no_package_here"})
    assert doctor.main([]) == 1
    assert "no-package-here: missing; pip install no-package-here" in capsys.readouterr().out
