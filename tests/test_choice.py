"""Which round is reported, and when a run ends early, by validation samples alone."""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import call
from test_tune import SIZES, TESTS, make_holdings

import fedjax_cfl as cfl
from fedjax_cfl.analysis import trials
from fedjax_cfl.data.dealing import set_apart_validation
from fedjax_cfl.data.federated import gather, take_clients
from fedjax_cfl.data.perturb import share_samples
from fedjax_cfl.runs.callbacks import Validation
from fedjax_cfl.runs.load import load_run
from fedjax_cfl.runs.results import read_metrics, summarize_rows

CLIENTS, SAMPLES, FEATURES = 6, 240, 4
LINE = "dataset=npz dataset.source.path={}.npz model=mclr algorithm=ifca algorithm.m=2 local.lr=0.3"
LINE += " clients_per_round=3 discard=none eval_auxiliary=false evaluate.validation=0.3 run_dir={} "
CHOOSE = "evaluate.choose=best_validation evaluate.patience=3 rounds={}"


def rows_of(values, name="accuracy"):
    return [{"round": n, f"validation_macro_{name}": v, name: 0.5} for n, v in enumerate(values, 1)]


def test_the_first_best_is_chosen_and_waiting_is_counted_from_it():
    def follow(values, patience=3, name="accuracy"):
        settings = SimpleNamespace(patience=patience, choose="last")
        found = Validation(settings, rows_of(values, name))
        return found.best, found.round, found.bad_tests, found.should_stop()

    assert follow([], 1) == (None, None, 0, False)
    values = [None, float("nan"), 0.5, 0.7, 0.7, None, 0.6]
    assert follow(values) == (0.7, 4, 3, True)
    assert not follow(values, 4)[-1] and not follow(values, 0)[-1]
    assert follow([2.0, 1.0, 1.5], name="rmse") == (1.0, 2, 1, False)


def test_the_chosen_row_is_what_a_summary_and_a_trial_report():
    rows = [row | {"macro_accuracy": row["round"] / 10} for row in rows_of([0.4, 0.8, 0.6])]
    for row, value in zip(rows, (0.1, 0.2, 0.9), strict=True):
        row |= {"accuracy": value, "units_up": row["round"]}
    assert "chosen_round" not in (plain := summarize_rows(rows))
    assert (plain["best_accuracy"], plain["final_accuracy"], plain["best_round"]) == (0.9, 0.9, 3)
    assert trials.score(rows) == pytest.approx(0.3)
    rows[-1]["chosen_round"] = 2
    told = summarize_rows(rows)
    assert (told["best_accuracy"], told["final_accuracy"], told["best_round"]) == (0.2, 0.2, 2)
    assert (told["macro_accuracy"], told["validation_macro_accuracy"]) == (0.2, 0.8)
    assert (told["rounds"], told["units_up"], told["chosen_round"]) == (3, 3, 2)
    assert trials.score(rows) == pytest.approx(0.2)


def test_validation_samples_are_nobodys_training_and_no_test():
    holdings, rng = make_holdings(), np.random.RandomState(0)
    pool = cfl.Pool(rng.rand(holdings.sample.size, 5).astype(np.float32), holdings.owner, 3)
    both = set_apart_validation(holdings, 0.2, 0, "both")
    alone, chosen = (
        cfl.federate(pool, set_apart_validation(holdings, 0.2, 0, part))
        for part in ("test", "validation")
    )
    data = cfl.federate(pool, both)

    take = jax.jit(lambda data, order: gather(data, order)[0])

    def held(data, view):
        x, view = np.asarray(take(data, view.order)), jax.device_get(view)
        return [x[b : b + s] for b, s in zip(view.start.tolist(), view.size.tolist(), strict=True)]

    for k in range(len(SIZES)):
        assert len(held(data, data.test)[k]) == TESTS
        np.testing.assert_array_equal(held(data, data.train)[k], held(alone, alone.train)[k])
        np.testing.assert_array_equal(held(data, data.test)[k], held(alone, alone.test)[k])
        np.testing.assert_array_equal(held(data, data.validation)[k], held(chosen, chosen.test)[k])
    some = take_clients(data, np.array([2, 0]))
    for side in ("train", "test", "validation"):
        for now, was in ((0, 2), (1, 0)):
            found, wanted = (held(one, getattr(one, side)) for one in (some, data))
            np.testing.assert_array_equal(found[now], wanted[was])
    shared = cfl.federate(pool, share_samples(pool, both, 1))
    for k in range(len(SIZES)):  # what the server gives to all is in nobody's validation
        got = {x.tobytes() for x in held(shared, shared.train)[k]}
        assert not got & {x.tobytes() for one in held(data, data.validation) for x in one}
        assert len(held(shared, shared.validation)[k]) == len(held(data, data.validation)[k])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of two runs, whose data differ in test samples alone."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.RandomState(1)
    x, client = rng.normal(size=(SAMPLES, FEATURES)), np.arange(SAMPLES) % CLIENTS
    y = ((x[:, 0] + rng.normal(size=SAMPLES) > 0) ^ (client % 2 == 1)).astype(int)
    split = (rng.rand(SAMPLES) < 0.2).astype(int)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in "ab":
            np.savez(f"{name}.npz", x=x, y=y, client=client, split=split)
            assert call(patch, LINE.format(name, name) + CHOOSE.format(30), 1) == 0
            x, y = np.where(split[:, None], -50 * x, x), np.where(split, 1 - y, y)
        yield folder


def test_test_samples_choose_nothing(runs):
    one, other = (load_run(runs / name) for name in "ab")
    keys = "round", "chosen_round", "validation_accuracy", "validation_macro_accuracy"
    assert [[row[key] for key in keys] for row in one.rows] == [
        [row[key] for key in keys] for row in other.rows
    ]
    assert [row["accuracy"] for row in one.rows] != [row["accuracy"] for row in other.rows]
    for a, b in zip(*(jax.tree.leaves(run.best.models) for run in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_run_says_which_round_it_reports(runs):
    run = load_run(runs / "a")
    rows, summary = run.rows, run.summary
    scores = [row["validation_macro_accuracy"] for row in rows]
    chosen = int(np.argmax(scores)) + 1
    assert 1 < len(rows) < 30 and len(rows) == chosen + 3
    assert summary["ended_early"] == "3 tests without a better validation score"
    assert summary["chosen_round"] == rows[-1]["chosen_round"] == chosen == run.best.round
    assert summary["final_accuracy"] == rows[chosen - 1]["accuracy"]
    assert summary["worst10_accuracy"] == rows[chosen - 1]["worst10_accuracy"]
    assert summary["validation_macro_accuracy"] == max(scores)
    assert summary["final_accuracy"] != rows[-1]["accuracy"]  # or the test says little
    # clients.parquet is of the chosen round, by the models of best.npz
    table, given = pq.read_table(runs / "a" / "clients.parquet"), np.load(runs / "a.npz")
    for k, row in enumerate(table.to_pylist()):
        mine = (given["client"] == k) & (given["split"] == 1)
        right = run.predict(k, given["x"][mine], run.best) == given["y"][mine]
        assert row["accuracy"] == pytest.approx(right.mean())
        assert row["group"] == run.best.model_index[k]
    assert np.mean(table["accuracy"]) == pytest.approx(summary["macro_accuracy"])


@pytest.mark.nightly
def test_without_a_choice_rows_are_as_they_were(runs, monkeypatch):
    monkeypatch.chdir(runs)
    assert call(monkeypatch, LINE.format("a", "plain") + "rounds=4", 1) == 0
    plain, rows = (read_metrics(runs / name) for name in ("plain", "a"))
    assert not any("validation" in name or "chosen" in name for name in plain[0])
    for one, other in zip(plain, rows, strict=False):
        assert [one[key] for key in ("accuracy", "train_loss", "ari")] == [
            other[key] for key in ("accuracy", "train_loss", "ari")
        ]
    summary = json.loads((runs / "plain" / "summary.json").read_text())
    assert "chosen_round" not in summary and "ended_early" not in summary


@pytest.mark.nightly
def test_an_interrupted_run_chooses_and_ends_as_another(runs, monkeypatch, capsys):
    """Stopped before its end; killed after its last row and before its summary; ended."""
    monkeypatch.chdir(runs)
    whole = load_run(runs / "a")
    assert call(monkeypatch, LINE.format("a", "c") + CHOOSE.format(2), 1) == 0
    for _ in range(2):
        assert call(monkeypatch, LINE.format("a", "c") + CHOOSE.format(30), 1) == 0
        found = load_run(runs / "c")
        for key in ("accuracy", "validation_macro_accuracy", "chosen_round", "round"):
            assert [row[key] for row in found.rows] == [row[key] for row in whole.rows]
        same = "final_accuracy", "chosen_round", "ended_early", "macro_accuracy", "rounds"
        assert [found.summary[key] for key in same] == [whole.summary[key] for key in same]
        assert found.table["accuracy"].tolist() == whole.table["accuracy"].tolist()
        for a, b in zip(*(jax.tree.leaves(r.best.models) for r in (found, whole)), strict=True):
            np.testing.assert_array_equal(a, b)
        (runs / "c" / "summary.json").unlink()
        (runs / "c" / "final.npz").unlink()
    assert call(monkeypatch, LINE.format("a", "a") + CHOOSE.format(40), 1) == 2
    assert "already holds this run, finished after" in capsys.readouterr().err


@pytest.mark.nightly
def test_comparisons_and_pages_say_it(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    for name in "ab":
        shutil.copytree(runs / name, runs / "compared" / name, dirs_exist_ok=True)
    cfl.compare(runs / "compared", out=runs / "out")
    said = capsys.readouterr().out
    assert "report the round that was best on validation samples" in " ".join(said.split())
    assert "round chosen on validation" in (runs / "out" / "compare.md").read_text()
    cfl.report(runs / "compared" / "a", out=runs / "page.html")
    page = (runs / "page.html").read_text()
    assert "round chosen on validation" in page and "tests chose nothing" in page


@pytest.mark.nightly
def test_runs_of_one_program_choose_each_its_own_round(runs, monkeypatch):
    monkeypatch.chdir(runs)
    settings = "evaluate.choose=best_validation rounds=8 "
    assert call(monkeypatch, LINE.format("a", "grid") + settings + "seeds=2", 1) == 0
    for seed in (0, 1):
        line = LINE.format("a", f"alone{seed}") + settings + f"seed={seed}"
        assert call(monkeypatch, line, 1) == 0
        member, alone = (load_run(runs / name) for name in (f"grid/{seed}", f"alone{seed}"))
        for key in ("accuracy", "validation_macro_accuracy", "chosen_round"):
            assert [row[key] for row in member.rows] == pytest.approx(
                [row[key] for row in alone.rows]
            )
        assert member.table["accuracy"] == pytest.approx(alone.table["accuracy"])
