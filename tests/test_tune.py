"""Choice on validation samples: what is set apart, and that no test sample is read for it."""

import json

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import one_line

import fedjax_cfl as cfl
from fedjax_cfl.analysis import trials
from fedjax_cfl.cli import main, tune
from fedjax_cfl.cli.build import (
    assemble,
    deal_samples,
    federate_samples,
    hold_out,
    name_newcomers,
    resolve_settings,
)
from fedjax_cfl.data.dealing import set_apart_validation
from fedjax_cfl.errors import InputError, SaidBefore
from fedjax_cfl.scores import RMSE
from fedjax_cfl.types import Partition

SIZES, TESTS = (9, 10, 37), 3  # of clients' training, and of the tests of each


def make_holdings():
    owner = np.repeat(np.arange(3), [size + TESTS for size in SIZES]).astype(np.int32)
    test = np.concatenate([np.arange(size + TESTS) >= size for size in SIZES])
    sample = np.random.RandomState(4).permutation(owner.size)
    return Partition(sample, owner, test, client_names=("a", "b", "c"))


@pytest.mark.parametrize(
    "share, counts", [(0.2, (0, 2, 8)), (0.01, (0, 2, 2)), (0.5, (0, 5, 19)), (0.99, (0, 9, 36))]
)
def test_a_share_of_each_clients_training_is_set_apart(share, counts):
    holdings = make_holdings()
    tested, chosen = (
        set_apart_validation(holdings, share, 0, part) for part in ("test", "validation")
    )
    for k, (size, count) in enumerate(zip(SIZES, counts, strict=True)):

        def own(held, test, k=k):
            return set(held.sample[(held.owner == k) & (held.test == test)].tolist())

        trained = own(tested, False)
        assert trained == own(chosen, False) and len(trained) == size - count
        assert own(tested, True) == own(holdings, True)  # the test samples as they were
        assert own(chosen, True) == own(holdings, False) - trained
    assert tested.client_names == holdings.client_names
    other = set_apart_validation(holdings, share, 1, "test")
    assert sorted(other.sample) != sorted(tested.sample)  # another seed, other samples


def test_no_test_sample_is_read_where_rows_are_scored_on_validation():
    holdings, rng = make_holdings(), np.random.RandomState(0)
    x = rng.rand(holdings.sample.size, 5).astype(np.float32)
    y = rng.randint(0, 3, len(x)).astype(np.int32)
    poisoned = holdings.sample[holdings.test]
    other_x, other_y = x.copy(), y.copy()
    other_x[poisoned], other_y[poisoned] = 1e9, (y[poisoned] + 1) % 3
    apart = set_apart_validation(holdings, 0.2, 0, "validation")
    one, other = (cfl.federate(cfl.Pool(*pair, 3), apart) for pair in ((x, y), (other_x, other_y)))
    for leaf, same in zip(*map(np_leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(leaf, same)


def np_leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_last_client_that_only_tests_is_refused():
    held = Partition(
        np.arange(12), np.array([0] * 11 + [1], np.int32), np.array([False] * 11 + [True])
    )
    assert set_apart_validation(held, 0.2, 0, "test").owner.max() == 1
    with pytest.raises(InputError, match="client 1 has no training samples"):
        set_apart_validation(held, 0.2, 0, "validation")


def trial(name, scores, units):
    return trials.Trial({"local.lr": name}, scores, [units] * len(scores))


def test_the_best_mean_is_chosen_and_of_near_ones_the_cheapest():
    low, high, near = trial("1", [0.5, 0.6], 1), trial("2", [0.8, 0.82], 9), trial("3", [0.8095], 5)
    assert trials.choose([low, high]) is high
    assert trials.choose([low, high, near]) is near  # within 0.2 points, and sends less
    broken = trial("4", [0.99, float("nan")], 1)
    assert trials.choose([broken, low]) is low
    with pytest.raises(InputError, match="no trial has a finite accuracy"):
        trials.choose([broken])
    spoilt = high._replace(nonfinite=1)  # what is left of its models was scored
    assert trials.choose([spoilt, low]) is low
    assert trials.choose([broken, spoilt]) is spoilt
    assert trials.choose([spoilt, low._replace(nonfinite=7)]) is spoilt


def test_trials_count_updates_that_were_not_finite(tmp_path, capsys):
    """The score of a model that was drawn, and that no update has changed, is finite."""
    (tmp_path / "index.csv").write_text("run,local.lr,seed\n0,9,0\n1,9,1\n2,0.1,0\n3,0.1,1\n")
    for n, (score, lost) in enumerate([(0.9, 3), (0.9, 4), (0.5, 0), (0.5, 0)]):
        (tmp_path / str(n)).mkdir()
        row = {"macro_accuracy": score, "accuracy": score, "nonfinite_clients": lost}
        text = "".join(json.dumps({"round": r, **row}) + "\n" for r in (1, 2))
        (tmp_path / str(n) / "metrics.jsonl").write_text(text)
        summary = {"algorithm": "fedavg", "dataset": "digits", "seed": n % 2}
        (tmp_path / str(n) / "summary.json").write_text(json.dumps(summary))
    spoilt, sound = found = trials.read_trials(tmp_path)
    assert (spoilt.nonfinite, sound.nonfinite) == (14, 0)
    assert trials.choose(found) is sound
    assert trials.describe(spoilt)["nonfinite_clients"] == 14
    tune.show(found, sound, sound)
    out = capsys.readouterr().out
    assert "1 of 2 trials had updates of clients that were not finite: they come last" in out
    assert out.index("50.00%") < out.index("90.00%")


def test_trials_have_as_many_decimals_of_rmse(capsys):
    found = [trials.Trial({"local.lr": str(n)}, [score], [3.0], RMSE)
             for n, score in enumerate((0.98712, 3.14159, 12.56637, np.inf))]  # fmt: skip
    tune.show(found, found[0], found[0])
    out = capsys.readouterr().out
    assert all(f" {score} " in out for score in ("0.987", "3.142", "12.566", "inf"))


@pytest.mark.parametrize("flag", ["seeds", "trial_seeds"])
@pytest.mark.parametrize("given", [(0, 0), (1, 2, 1), (-1,), (2**31,)])
def test_seeds_are_checked_before_any_trial(flag, given, monkeypatch, tmp_path):
    monkeypatch.setattr(main, "run_arguments", lambda arguments: pytest.fail("a trial began"))
    with pytest.raises(InputError, match=f"--{flag.replace('_', '-')}"):
        tune.tune(["local.lr=0.1,0.2"], tmp_path, **{flag: given})


def test_a_run_is_scored_by_the_last_tenth_of_its_tests():
    rows = [{"macro_accuracy": value / 100} for value in range(30)] + [{"macro_accuracy": None}]
    assert trials.score(rows) == pytest.approx(0.28)  # of 27, 28 and 29
    assert trials.score(rows[:3]) == pytest.approx(0.02)
    assert np.isnan(trials.score([]))


@pytest.mark.parametrize("sign", ["", "+"])  # of the configuration, or added to it
def test_trials_and_last_runs_have_their_parts_and_seeds(tmp_path, monkeypatch, sign):
    """Runs are replaced by rows: what is asked of them, and what is made of them."""
    asked, tried = [], f"{sign}local.lr"

    def pretend(arguments):
        asked.append(arguments)
        given = dict(text.split("=", 1) for text in arguments[1:])
        part, folder = given["evaluate.part"], given["hydra.sweep.dir"]
        folder = tmp_path / "out" / part
        folder.mkdir(parents=True)
        rates, seeds = given[tried].split(","), given["seed"].split(",")
        runs = [(rate, seed) for rate in rates for seed in seeds]
        names = ["run", *([tried] if len(rates) > 1 else []), "seed"]
        lines = [
            ",".join([str(n), *([rate] if len(rates) > 1 else []), seed])
            for n, (rate, seed) in enumerate(runs)
        ]
        (folder / "index.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
        for n, (rate, seed) in enumerate(runs):
            (folder / str(n)).mkdir()
            row = {"round": 1, "macro_accuracy": float(rate) + int(seed) / 1e4, "units_up": 2}
            (folder / str(n) / "metrics.jsonl").write_text(
                json.dumps(row | {"accuracy": 0.5}) + "\n"
            )
            summary = {"algorithm": "fedavg", "dataset": "digits", "seed": int(seed)}
            (folder / str(n) / "summary.json").write_text(json.dumps(summary))
        return 0

    monkeypatch.setattr(main, "run_arguments", pretend)
    found = tune.tune([f"{tried}=0.1,0.3", "rounds=1"], tmp_path / "out", seeds=(0, 1))
    trials, last = asked
    assert "evaluate.part=validation" in trials and "seed=1000,1001" in trials
    assert "evaluate.part=test" in last and "seed=0,1" in last
    assert last[1:3] == ["rounds=1", f"{tried}=0.3"]
    assert "evaluate.validation=0.2" in trials and "evaluate.validation=0.2" in last
    assert "curves=false" in trials and "curves=false" in last
    assert found["chosen"] == {"local.lr": "0.3"}
    assert found["validation_accuracy"] == pytest.approx(0.3 + 0.10005)
    assert found["test_accuracies"] == pytest.approx([0.3, 0.3001])
    assert json.loads((tmp_path / "out" / "chosen.json").read_text())["trials"] == 2


def test_trials_are_scored_by_the_clients_held_out_for_validation(tmp_path):
    (tmp_path / "index.csv").write_text("run,seed\n0,1000\n1,1001\n2,1002\n")
    for n, more in enumerate(({"macro": 0.9}, {"macro": None}, {})):
        folder = tmp_path / str(n)
        folder.mkdir()
        row = {"round": 1, "macro_accuracy": 0.4, "units_up": 2, "accuracy": 0.5}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        found = {f"validation_clients_{name}_accuracy": value for name, value in more.items()}
        summary = {"algorithm": "fedavg", "dataset": "digits", "seed": 1000 + n, **found}
        (folder / "summary.json").write_text(json.dumps(summary))
    (trial_,) = trials.read_trials(tmp_path)
    assert trial_.scores == pytest.approx([0.9, float("nan"), 0.4], nan_ok=True)


def test_clients_for_validation_are_met_by_trials_alone(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # the tests chose already
    line = "algorithm=fedavg dataset.clients=20 evaluate.validation=0.2 evaluate.new_clients=0.1"
    for part, met, count in (
        ("test", "new_clients", 2),
        ("validation", "validation_clients", 4),
    ):
        ask = f"{line} evaluate.validation_clients=0.2 evaluate.part={part}".split()
        config, _, data, _ = assemble(ask)
        everybody = federate_samples(config, *deal_samples(config))
        kept, held = hold_out(config, everybody)
        assert name_newcomers(config) == met and len(held) == count
        assert data.num_clients == len(kept) == 14 and not set(kept) & set(held)
        assert int(data.train.size.sum()) == int(np.asarray(everybody.train.size)[kept].sum())
    assert name_newcomers(resolve_settings([*line.split(), "evaluate.part=validation"])) == (
        "new_clients"
    )


@pytest.mark.nightly
def test_a_run_measures_the_clients_for_validation(fedjax_cfl, tmp_path):
    line = "algorithm=ifca algorithm.m=2 rounds=3 discard=none dataset.clients=20 run_dir=r"
    line += " evaluate.validation=0.3 evaluate.validation_clients=0.2 evaluate.part=validation"
    status, _, error = fedjax_cfl(line)
    assert status == 0, error
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    new = pq.read_table(tmp_path / "r" / "new_clients.parquet").to_pydict()
    assert summary["new_clients"] == len(new["client"]) == 4
    assert summary["validation_clients_macro_accuracy"] == pytest.approx(np.mean(new["accuracy"]))


@pytest.mark.parametrize("given", ["seed=1", "evaluate.part=test", "hydra.sweep.dir=x"])
def test_settings_of_its_own_are_refused(given, tmp_path):
    with pytest.raises(InputError, match="is set by tune itself"):
        tune.tune([given], tmp_path)


@pytest.mark.nightly
def test_a_second_call_goes_on(tmp_path, fedjax_cfl):
    """Through the command line: trials, the choice, the last runs; then nothing trains again."""
    command = f"tune --out {tmp_path}/t --trial-seeds 1000 --seeds 0,1"
    command += " algorithm=fedavg rounds=3 local.lr=0.01,0.1"
    status, out, error = fedjax_cfl(command)
    assert status == 0, error
    assert "no test sample is read" in out and "over 2 seeds" in out
    first = json.loads((tmp_path / "t" / "chosen.json").read_text())
    assert first["chosen"] == {"local.lr": "0.1"} and len(first["test_accuracies"]) == 2
    before = (tmp_path / "t" / "test" / "1" / "summary.json").stat().st_mtime_ns
    assert fedjax_cfl(command)[0] == 0
    assert json.loads((tmp_path / "t" / "chosen.json").read_text()) == first
    assert (tmp_path / "t" / "test" / "1" / "summary.json").stat().st_mtime_ns == before
    status, _, error = fedjax_cfl(f"{command} local.epochs=2")
    assert status == 2 and error.startswith(f"fedjax-cfl: {tmp_path}/t: was begun with "), error
    assert error.count("\n") == 1


def test_a_run_that_fails_is_said_without_a_traceback(tmp_path, fedjax_cfl):
    command = f"tune --out {tmp_path}/t --trial-seeds 1000 --seeds 0 algorithm=fedavg rounds=2"
    command += " model=mclr local.epochs=1 dataset.clients=8 clients_per_round=3"
    status, _, error = fedjax_cfl(f"{command} local.lr=0.1 faults.nan=1 faults.nonfinite=raise")
    first, second = error.splitlines()
    assert status == 1 and first.startswith("fedjax-cfl: round 1: client ")
    assert second.endswith("t/validation: not all runs have ended; the same command goes on")


def test_trials_of_another_command_are_refused_before_anything_runs(tmp_path):
    """Finished runs would go on with more rounds, and the choice would be among runs of both."""
    tune.check_folder(tmp_path, ["roudns=40"])  # a slip that no trial followed
    tune.check_folder(tmp_path, ["rounds=40", "local.lr=0.1,0.2", "--share=0.2"])
    (tmp_path / "validation").mkdir()
    tune.check_folder(tmp_path, ["rounds=40", "local.lr=0.1,0.2", "--share=0.2"])
    again = ["rounds=60", "local.lr=0.1,0.2", "--share=0.2"]
    for other in (again, again[1:]):
        one_line("was begun with rounds=40 local.lr", tune.check_folder, tmp_path, other)


def test_a_run_that_is_refused_has_the_last_line(tmp_path, fedjax_cfl):
    """Not that the same command goes on: it is refused again. Python's callers get a text."""
    command = f"tune --out {tmp_path}/t --trial-seeds 1000,1001 --seeds 0 algorithm=fedavg"
    status, _, error = fedjax_cfl(f"{command} dataset.clients=20 clients_per_round=30")
    assert status == 2 and error.startswith("fedjax-cfl: clients_per_round=30")
    assert error.count("\n") == 1
    with pytest.raises(SaidBefore, match="a run was refused; a line above says why"):
        tune.tune(
            ["algorithm=fedavg", "dataset.clients=20", "clients_per_round=30"], tmp_path / "p"
        )
