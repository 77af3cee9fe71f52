"""Numbers instead of classes: losses and scores against twins in NumPy, planted groups, what files
may hold, and what of the catalogue needs classes.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import call, lasting_rows, nightly, one_line, others_nightly, run_in, stop_and_go_on

import fedjax_cfl as cfl
from fedjax_cfl.cli.build import assemble, load_pool, resolve_settings
from fedjax_cfl.data.datasets import csv, from_arrays, leaf, npy, npz, parquet
from fedjax_cfl.scores import ACCURACY, RMSE
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.types import ServedModels

LINE = (
    "task=regression dataset=npz dataset.source.path=own.npz algorithm=ifca algorithm.m=2"
    " discard=none local.lr=0.05 local.epochs=2 clients_per_round=12 seed=3"
)
SMALL = f"{LINE} model=mclr preset.l2=0"
PIVOT = "algorithm", "dataset"
NEEDS = "needs a class of each sample, which y are not; "


def planted(clients: int = 12, samples: int = 40, seed: int = 0) -> dict[str, np.ndarray]:
    """Two groups, the even and the odd clients: y = ax and y = -ax, with noise of 0.1."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), samples)
    x = rng.normal(size=(client.size, 3)).astype(np.float32)
    sign = np.where(client % 2, -1, 1)
    y = sign * (x @ [2.0, -1.0, 0.5]) + 0.1 * rng.normal(size=client.size)
    split = np.tile(np.arange(samples) % 4 == 0, clients).astype(np.int32)
    return {"x": x, "y": y.astype(np.float32), "client": client, "split": split,
            "concept": np.arange(clients) % 2}  # fmt: skip


def federate(arrays: dict[str, np.ndarray]) -> cfl.FederatedData:
    pool = from_arrays(**arrays, num_classes=0)
    return cfl.federate(pool, cfl.partition.by_user(pool, seed=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with own.npz and a run of IFCA."""
    folder = tmp_path_factory.mktemp("regression")
    np.savez(folder / "own.npz", **planted())
    run_in(folder, f"{SMALL} rounds=8 run_dir=run")
    return folder


@pytest.fixture(scope="module")
def with_fedavg(folder):
    """The same folder with a run of FedAvg, too."""
    line = SMALL.replace("algorithm=ifca algorithm.m=2", "algorithm=fedavg")
    run_in(folder, f"{line} rounds=8 run_dir=fedavg")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return cfl.load_run(folder / "run")


# losses and scores


def train_two(task, data, lr, first_layer):
    """Returns a linear model, as float64, what a round of FedAvg makes of it, in which both clients
    take two steps of all their samples, and the round's Info.
    """
    execution = cfl.make_execution(cfl.make_mesh(1), first_layer=first_layer)
    local = cfl.Local(lr=lr, epochs=2, batch_size=30, execution=execution)
    algorithm = cfl.algorithms.fedavg(task, local, cfl.select.uniform(2))
    state = algorithm.init(jax.random.key(0), data)
    head = jax.tree.map(lambda leaf: np.asarray(leaf[0], float), state.groups["head"])
    after, info = jax.jit(algorithm.round)(jax.random.key(0), state, data)
    return head, jax.tree.map(lambda leaf: leaf[0], after.groups["head"]), info


def compare_heads(after, info, trained, losses):
    """Compares a round with the (kernel, bias) that each client of a twin has trained, and the
    losses of its first steps.
    """
    kernel, bias = (np.mean(part, axis=0) for part in zip(*trained, strict=True))
    np.testing.assert_allclose(after["kernel"], kernel, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(after["bias"], bias, rtol=2e-5, atol=1e-6)
    assert float(info.loss) == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(
    ("first_layer", "loss"),
    [
        ("direct", "huber"),
        nightly("dual", "squared"),
        nightly("direct", "squared"),
        nightly("dual", "huber"),
    ],
)
def test_a_step_is_that_of_a_twin(loss, first_layer):
    arrays = planted(clients=2)
    data, delta = federate(arrays), 0.7
    targets = cfl.models.regression(loss, delta)
    task = cfl.as_task(cfl.models.MCLR(1), (3,), data.num_classes, 0.0, targets)
    head, after, info = train_two(task, data, 0.1, first_layer)
    trained, losses = [], []
    for client in range(2):
        own = (arrays["client"] == client) & (arrays["split"] == 0)
        x, y, w, b = arrays["x"][own].astype(float), arrays["y"][own], head["kernel"], head["bias"]
        for step in range(2):
            e = (x @ w)[:, 0] + b[0] - y
            huber = np.where(abs(e) <= delta, e**2 / 2, delta * (abs(e) - delta / 2))
            slope = 2 * e if loss == "squared" else np.clip(e, -delta, delta)
            losses += [np.mean(e**2 if loss == "squared" else huber)] if step == 0 else []
            w, b = w - 0.1 * (x.T @ slope / len(e))[:, None], b - 0.1 * slope.mean()
        trained.append((w, b))
    compare_heads(after, info, trained, losses)
    # as clients are tested, and as they choose
    by_hand = [0.25, 9.0] if loss == "squared" else [0.125, 0.7 * (3 - 0.35)]
    tested = targets.loss_value(np.array([[0.5], [1.0]]), np.array([0.0, 4.0]))
    np.testing.assert_allclose(tested, by_hand, rtol=1e-6)


def twin(y, guess, owner, groups):
    """Returns the scores of a row in float64, where `groups` names the group of each client."""

    def score(rows):
        e, t = guess[rows] - y[rows], y[rows]
        return {
            "rmse": np.sqrt(np.mean(e**2)),
            "mae": np.mean(abs(e)),
            "r2": 1 - np.mean(e**2) / np.var(t) if np.ptp(t) else np.nan,
        }

    clients = [score(owner == k) for k in np.unique(owner)]
    row = score(owner >= 0)
    for name, least in (("rmse", -1), ("mae", -1), ("r2", 1)):
        values = np.array([one[name] for one in clients])
        values = values[np.isfinite(values)]
        worst = np.sort(least * values)[: max(len(values) // 10, 1)]
        row |= {f"macro_{name}": values.mean(), f"worst10_{name}": least * worst.mean()}
    each = [score(np.isin(owner, np.flatnonzero(groups == g))) for g in range(max(groups) + 1)]
    return row | {f"group_{name}": [one[name] for one in each] for name in each[0]}, clients


@pytest.mark.parametrize("shift", [0.0, 1000.0])  # large targets must not lose their variance
def test_scores_are_those_of_a_twin_in_float64(shift):
    rng, clients = np.random.default_rng(1), 23
    arrays = planted(clients)
    arrays["y"] = (arrays["y"] + shift + 0.3 * arrays["client"]).astype(np.float32)
    arrays["y"][arrays["client"] == 4] = 7.0  # without variance: no R2
    data = federate(arrays)
    task = cfl.as_task(cfl.models.MCLR(1), (3,), 0)
    models = {"head": {"kernel": rng.normal(size=(2, 3, 1)), "bias": np.full((2, 1), shift)}}
    models = jax.tree.map(jnp.float32, models)
    index = jnp.asarray(np.where(np.arange(clients) == 9, -1, np.arange(clients) % 2), jnp.int32)
    table, _ = jax.jit(evaluate.evaluate_clients, static_argnums=(0, 1))(
        task, cfl.make_mesh(1), ServedModels(models, index), data
    )
    own = (arrays["split"] == 1) & (arrays["client"] != 9)
    x, y, owner = (arrays[name][own].astype(float) for name in ("x", "y", "client"))
    kernel, bias = (np.asarray(models["head"][name], float) for name in ("kernel", "bias"))
    group = owner.astype(int) % 2
    guess = (x * kernel[group][:, :, 0]).sum(1) + bias[group, 0]
    expected, each = twin(y, guess, owner, np.where(np.asarray(index) < 0, -1, index))
    zero = np.zeros((), np.int32)
    totals = evaluate.Totals(np.zeros((2, 0), np.int32), np.float32(0), zero, zero, np.float32(0))
    found = evaluate.Evaluation(jax.device_get(table), totals)
    tested = evaluate.Tested(np.asarray(index), found, np.asarray(data.concept), np.ones(clients))
    row = evaluate.finalize(task.targets, tested, 2, 2)
    for name, value in expected.items():
        np.testing.assert_allclose(row[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
    met = np.unique(owner).astype(int)
    for name in ("rmse", "mae", "r2"):
        values = [one[name] for one in each]
        np.testing.assert_allclose(getattr(table, name)[met], values, rtol=1e-3, err_msg=name)
        # group 0 is concept 0, but for client 9, which is in none
        np.testing.assert_allclose(row[f"concept_{name}"], row[f"group_{name}"])
    # one client with a model that is not finite: no score, but for groups with other models
    broken = found._replace(totals=totals._replace(nonfinite_models=np.int32(1)))
    row = evaluate.finalize(task.targets, tested._replace(evaluation=broken), 2)
    assert np.isnan([row["rmse"], row["macro_mae"], row["worst10_r2"]]).all()
    assert np.isfinite(row["group_rmse"]).all()
    assert table.samples[9] == 0 and np.isnan(table.rmse[9]) and np.isnan(table.r2[4])


# runs


@pytest.mark.nightly
def test_two_planted_groups_are_found(run, with_fedavg):
    last = run.rows[-1]
    assert last["ari"] == 1.0 and last["rmse"] < 0.13 and last["r2"] > 0.99
    assert max(last["group_rmse"]) < 0.14 and len(last["concept_mae"]) == 2
    mixed = cfl.load_run(with_fedavg / "fedavg").rows[-1]  # whose one model can learn nothing
    assert mixed["rmse"] > 1.5 and mixed["r2"] < 0.1
    assert "accuracy" not in json.dumps([run.rows[-1], run.summary])


@pytest.mark.nightly
def test_the_best_is_the_lowest(run):
    scores = [row["rmse"] for row in run.rows]
    assert run.summary["best_rmse"] == min(scores) and run.summary["final_rmse"] == scores[-1]
    assert run.best.round == run.summary["best_round"] == 1 + int(np.argmin(scores))
    assert run.summary["last10_evals_best_rmse"] == min(scores)
    assert {"rmse", "mae", "r2", "loss"} <= set(run.table) and "labels" not in run.table


def test_predictions_are_numbers(run, folder):
    own = planted()
    rows = (own["client"] == 3) & (own["split"] == 1)
    guess = run.predict(3, own["x"][rows])
    error = np.sqrt(np.mean((guess - own["y"][rows]) ** 2))
    assert error == pytest.approx(run.table["rmse"][3], rel=1e-5)
    odd = run.find_model(own["x"][rows], own["y"][rows])
    assert odd == run.final.model_index[3] != run.find_model(own["x"][rows], -own["y"][rows])
    one_line("no probabilities", run.predict_proba, 3, own["x"][rows])
    one_line("expected numbers to regress", run.find_model, own["x"][:2], ["a", "b"])


def test_predict_on_the_command_line(folder, fedjax_cfl, run):
    np.savez("new.npz", **{k: v for k, v in planted(seed=1).items() if k != "concept"})
    status, out, _ = fedjax_cfl(f"predict {folder / 'run'} new.npz --out out.npz")
    assert status == 0 and "RMSE 0.1" in out and "accuracy" not in out
    written = np.load("out.npz")
    assert "probabilities" not in written and written["predicted"].dtype == np.float32
    status, _, err = fedjax_cfl(f"predict {folder / 'run'} new.npz --confusion")
    assert status == 2 and "counts classes" in err


@pytest.mark.nightly
def test_comparisons_know_that_lower_is_better(with_fedavg, tmp_path, monkeypatch):
    found = cfl.compare(with_fedavg, out=tmp_path, baseline="fedavg", target=0.5)
    rows = {name: found.table[name] for name in found.table}
    place = list(rows["algorithm"]).index("ifca")
    assert rows["best_rmse_mean"][place] < 0.13 and rows["rounds_to_target_mean"][place] < 8
    assert rows["rmse_reduction_mean"][place] > 1 and rows["speedup_mean"][place] > 1
    assert not any("accuracy" in name for name in rows)
    differences = found.differences
    final = list(differences["measure"]).index("final_rmse")
    assert differences["set"][final].startswith("ifca") and differences["mean"][final] < -1
    assert differences["ahead"][final] == 1 and differences["behind"][final] == 0
    axes = found.figure.axes
    assert axes[0].get_title(loc="left") == "RMSE against round" and "%" not in (
        axes[0].yaxis.get_major_formatter()(0.5, 0)
    )
    assert "best over tests RMSE" in (tmp_path / "compare.md").read_text()
    one_line("target", cfl.compare, with_fedavg, target=-1.0)
    pivot = cfl.compare(with_fedavg, pivot=PIVOT).pivot  # the best of its own score
    assert set(pivot["measure"]) == {"final_rmse"}
    wrong = {"pivot": PIVOT, "measure": "best_accuracy"}
    one_line("none of these runs has it; use final_rmse", cfl.compare, with_fedavg, **wrong)
    ranks = dict(zip(pivot["row"], pivot["rank"], strict=True))
    assert ranks == {"IFCA": "first", "FedAvg": "plain"}


@pytest.mark.nightly
def test_pages_and_curves_are_of_rmse(folder, tmp_path):
    cfl.report(folder, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "RMSE and what it costs" in page
    assert "lower is the better" in page and "accuracy" not in page.partition("<script")[0].lower()
    curves = cfl.draw_run(folder / "run")["curves"]
    titles = [axes.get_title(loc="left") for axes in curves.axes]
    assert (
        titles[0].startswith("Test RMSE; star: best") and "Test RMSE of each true group" in titles
    )
    assert curves.axes[0].get_ylim()[0] == 0


@pytest.mark.nightly
def test_the_final_table_says_what_is_measured(fedjax_cfl):
    np.savez("own.npz", **planted())
    status, out, _ = fedjax_cfl(f"{SMALL} rounds=2 eval_every=2 run_dir=run")
    assert status == 0 and "numbers to regress" in out and "accuracy" not in out
    for words in ("best RMSE", "final RMSE", "MAE", "R2, mean over clients", "RMSE per group"):
        assert words in out
    assert "RMSE, worst 10 % of clients" in out and "RMSE" in open("run/run.log").read()


@pytest.mark.nightly
def test_tuning_takes_the_lowest(fedjax_cfl):
    np.savez("own.npz", **planted())
    line = f"{SMALL} rounds=4 --trial-seeds 5 --seeds 6".replace(
        "local.lr=0.05", "local.lr=1e-4,0.05"
    )
    status, out, _ = fedjax_cfl(f"tune {line.replace('seed=3', '')}")
    assert status == 0 and "RMSE, mean over clients" in out
    chosen = json.loads(open("tune/chosen.json").read())
    assert chosen["chosen"] == {"local.lr": "0.05"}
    assert 0 < chosen["test_rmse"] < 0.5 and len(chosen["test_rmses"]) == 1


@pytest.mark.nightly
def test_extras_are_of_rmse(fedjax_cfl):
    np.savez("own.npz", **planted())
    extras = "evaluate.finetune=1 evaluate.new_clients=0.2"
    assert fedjax_cfl(f"{SMALL} {extras} clients_per_round=6 rounds=6 run_dir=run")[0] == 0
    summary = cfl.load_run("run").summary
    assert summary["new_clients_rmse"] < 0.3 and summary["finetuned_rmse"] < 0.3


@pytest.mark.nightly
def test_a_run_goes_on_as_if_it_had_not_stopped(fedjax_cfl):
    np.savez("own.npz", **planted())
    stop_and_go_on(fedjax_cfl, SMALL)


def close(one, two, rtol):
    """Asserts that the rows of two runs are close."""
    for a, b in zip(one, two, strict=True):
        for name in a:
            values = (np.array(row[name], float) for row in (a, b))
            np.testing.assert_allclose(*values, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.nightly
def test_devices_and_the_place_of_the_samples_change_nothing(fedjax_cfl, monkeypatch):
    np.savez("own.npz", **planted())
    runs = {"one": "devices=1", "four": "devices=4", "host": "devices=1 resident=host"}
    for name, settings in runs.items():
        line = f"{SMALL} {settings} rounds=3 run_dir={name}"
        assert call(monkeypatch, line, devices=4) == 0
    one, four, host = map(lasting_rows, runs)
    close(one, four, 1e-4)
    unknown = {"ari", "concept_rmse", "concept_mae", "concept_r2"}
    close(*([{k: v for k, v in row.items() if k not in unknown} for row in rows]
            for rows in (one, host)), 1e-4)  # fmt: skip


def run_from_python(targets, run_dir="run"):
    data = federate(planted(clients=2))
    task = cfl.as_task(cfl.models.MCLR(1), (3,), 0, 0.0, targets)
    algorithm = cfl.algorithms.fedavg(task, cfl.Local(0.05, 1, 10), cfl.select.uniform(2))
    key, settings = jax.random.key(0), {"algorithm": "fedavg"}
    more = {"rounds": 1, "run_dir": run_dir, "settings": settings, "verbose": False}
    return cfl.run(algorithm, task, data, key, **more)


@pytest.mark.nightly
def test_a_run_from_python_keeps_its_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    huber = cfl.models.regression("huber", 0.5)
    run_from_python(huber)
    run = cfl.load_run("run")
    params, x = jax.tree.map(lambda leaf: 0 * leaf[0], run.final.models), jnp.zeros((1, 3))
    np.testing.assert_allclose(run.task.loss(params, x, jnp.ones(1)), 0.5 * (1 - 0.25))
    said = one_line("not those of the run", cfl.load_run, "run", None, cfl.models.regression())
    assert "loss=huber delta=0.5" in said and cfl.load_run("run", targets=huber)
    for other in (cfl.models.regression("huber", 0.7), cfl.models.regression()):
        one_line("is of a different run", run_from_python, other)


@pytest.mark.nightly
def test_a_loss_of_ones_own_is_given_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = cfl.models.regression(jnp.abs)
    assert run_from_python(own).task.targets is own
    one_line("the run had a loss of your own", cfl.load_run, "run")
    run = cfl.load_run("run", targets=own)
    params = jax.tree.map(lambda leaf: 0 * leaf[0], run.final.models)
    np.testing.assert_allclose(run.task.loss(params, jnp.zeros((1, 3)), 3 * jnp.ones(1)), 3)


# files


def test_files_of_numbers(tmp_path):
    own = planted(clients=3, samples=8)
    y, names = own["y"], {"y": "y", "client": "who"}
    columns = {**dict(zip("abc", own["x"].T, strict=True)), "y": y, "who": own["client"]}
    np.savez(tmp_path / "a.npz", **own)
    (tmp_path / "npy").mkdir()
    for name, values in own.items():
        np.save(tmp_path / "npy" / f"{name}.npy", values)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    cells = [
        [f"{value:.9g}".replace(".", ",") for value in row]
        for row in zip(*columns.values(), strict=True)
    ]
    lines = [";".join(columns), *map(";".join, cells)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    pools = [
        from_arrays(own["x"], y, own["client"], num_classes=0),
        npz(tmp_path / "a.npz", num_classes=0),
        npy(tmp_path / "npy", num_classes=0),
        parquet(tmp_path / "a.parquet", **names, num_classes=0),
        csv(tmp_path / "a.csv", **names, num_classes=0, delimiter=";", decimal=","),
    ]
    for pool in pools:
        assert pool.y.dtype == np.float32 and pool.num_classes == 0 and pool.class_names is None
        np.testing.assert_array_equal(pool.y, y)
    (tmp_path / "a.jsonl").write_text(pd.DataFrame(columns).to_json(orient="records", lines=True))
    source = [f"dataset.source.{name}={value}" for name, value in names.items()]
    config = resolve_settings(
        ["dataset=jsonl", "task=regression", f"dataset.source.path={tmp_path}/a.jsonl", *source]
    )
    np.testing.assert_allclose(load_pool(config).y, y, rtol=1e-6)
    whole = from_arrays(own["x"], np.arange(24), num_classes=0)  # whole numbers are numbers, too
    assert whole.y.dtype == np.float32 and whole.num_classes == 0


def test_leaf_may_have_numbers(tmp_path):
    held = {"u": {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0.5, -1.5]}, "v": {"x": [[5, 6]], "y": [2]}}
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"users": ["u", "v"], "num_samples": [2, 1], "user_data": held}))
    pool = leaf(file, num_classes=0)
    assert pool.y.tolist() == [0.5, -1.5, 2.0] and pool.client.tolist() == [0, 0, 1]
    text = {"u": {"x": ["ab"], "y": ["c"]}}
    file.write_text(json.dumps({"user_data": text}))
    assert leaf(file, num_classes=0).num_classes > 0  # the next character is a class


X = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    ("y", "says"),
    [
        ([1.0, np.nan, 2.0], "y is nan in sample 1, expected numbers to regress that are finite"),
        ([1.0, 2.0, 1e60], "y is inf in sample 2"),
        (["a", "b", "c"], "y has dtype <U1 and shape (3,), expected numbers to regress [N]"),
        (np.full((3, 2), 2.0), "label 0 of y is 2.0 in sample 0, expected 0 or 1 of each label"),
        (np.zeros((3, 2, 1)), "y has shape (3, 2, 1)"),
    ],
)
def test_numbers_that_nothing_can_be_learned_of(y, says):
    one_line(says, from_arrays, X, y, num_classes=0)


def test_words_among_the_numbers_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("a,y\n1,2.5\n2,high\n")
    said = one_line("column y is 'high' in row 2", csv, tmp_path / "a.csv", y="y", num_classes=0)
    assert "fill it in or leave the row out" in said


def test_numbers_under_classification_are_refused_with_the_task():
    one_line("task=regression, in Python num_classes=0", from_arrays, X, [0.5, 1.5, 2.5])


def test_pools_from_python():
    pool = cfl.Pool(X, np.array([1, 2, 3]), 0, np.array([0, 0, 1]), np.array([0, 1, 1]))
    data = cfl.federate(pool, cfl.partition.by_user(pool))
    assert data.y.dtype == jnp.float32 and data.num_classes == 0
    wrong, holdings = pool._replace(num_classes=-1), cfl.partition.by_user(pool)
    one_line("or 0 where y are numbers", cfl.federate, wrong, holdings)
    scaled, _ = cfl.standardize(data, "pool")
    np.testing.assert_array_equal(scaled.y, data.y)


# what does not fit


def test_tasks_and_data_must_agree():
    data = federate(planted(clients=2))
    local = cfl.Local(0.1, 1, 10)
    classes = cfl.as_task(cfl.models.MCLR(2), (3,), 2)
    algorithm = cfl.algorithms.fedavg(classes, local, cfl.select.uniform(2))
    run = {"rounds": 1}
    said = one_line("y are numbers", cfl.run, algorithm, classes, data, jax.random.key(0), **run)
    assert "num_classes=0" in said
    targets = cfl.models.regression()
    one_line("num_classes=2: y are", cfl.as_task, cfl.models.MCLR(2), (3,), 2, targets=targets)
    one_line("(2, 1) is allowed", cfl.as_task, cfl.models.MCLR(2), (3,), 0)
    one_line("task.delta=-1", cfl.models.regression, "huber", -1.0)


REFUSED = {
    "algorithm=fielding": "represent=labels",
    "algorithm=fielding algorithm.represent=embedding": "represent=embedding",
    "algorithm=flux": "algorithm=flux",
    "algorithm=fedem": "algorithm=fedem",
    "algorithm=fedrc": "algorithm=fedrc",
    "algorithm=pacfl": "algorithm=pacfl",
    "algorithm=md_icfl": "algorithm=md_icfl",
    "algorithm=fesem_ma": "algorithm=fesem_ma",
    "algorithm=flexcfl drift=swap_all": "a drift under a method that detects shifts",
    "partition=dirichlet dataset.clients=4": "partition=dirichlet",
    "partition=power_law dataset.clients=4": "partition=power_law",
    "partition=rotated_groups": "partition=rotated_groups",
    "concept=permute_labels": "concept=permute_labels",
    "concept=graded concept.shift=y_given_x": "concept=graded",
    "drift=swap_part": "drift=swap_part",
    "drift=label_swap": "drift=label_swap",
    "drift=stream_bucket": "drift=stream_bucket",
    "drift=stream_burst": "drift=stream_gradual or stream_burst",
    "selection=nearest": "selection=nearest",
    "faults.byzantine=0.2 faults.attack=label_flip": "faults.attack=label_flip",
    "shared_samples.per_label=1": "shared_samples.per_label=1",
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The current folder, with own.npz in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # the tests chose already
    np.savez("own.npz", **planted())


@pytest.mark.parametrize("settings", others_nightly(REFUSED, list(REFUSED)[::3]))
def test_what_needs_classes_says_so(settings, own):
    line = f"{LINE} model=mclr clients_per_round=6".replace(" algorithm=ifca algorithm.m=2", "")
    line += f" {settings}" if "algorithm=" in settings else f" algorithm=ifca {settings}"
    said = one_line(NEEDS, assemble, line.split())
    assert said.startswith(f"{REFUSED[settings]}: ")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("task=regression dataset.source.num_classes=3", "task=regression has no classes"),
        ("dataset.source.num_classes=0", "use task=regression"),
        ("task=regression task.delta=0", "task.delta=0"),
        ("task=regression task.loss=absolute", "must be one of squared, huber"),
    ],
)
def test_settings_that_do_not_fit(settings, says, own):
    line = LINE.replace("task=regression ", "") + f" {settings}"
    one_line(says, assemble, line.split())


def test_a_data_set_of_classes_is_refused(own):
    settings = ["task=regression", "dataset=digits", "algorithm=ifca"]
    one_line(
        "y of dataset=digits are 10 classes; use task=classification, or a file of your own",
        assemble,
        settings,
    )


@pytest.mark.nightly
def test_every_other_method_regresses(own):
    """Every file of conf/algorithm/ is refused above, or can be traced on numbers."""
    from fedjax_cfl.cli.conf import CONF

    known = {settings.split()[0] for settings in REFUSED if len(settings.split()) == 1}
    base = f"{LINE} model=mlp clients_per_round=6".replace(" algorithm=ifca algorithm.m=2", "")
    for path in sorted((CONF / "algorithm").glob("*.yaml")):
        line = f"{base} algorithm={path.stem}"
        if f"algorithm={path.stem}" in known or path.stem.startswith("fielding"):
            one_line(NEEDS, assemble, line.split())
        else:
            assemble(line.split())


def test_scores_know_their_direction():
    assert ACCURACY.pick_best([0.1, 0.4]) == 0.4 and RMSE.pick_best([0.1, 0.4]) == 0.1
    assert ACCURACY.is_better(0.4, 0.1) and not RMSE.is_better(0.4, 0.1)
    assert RMSE.format(0.12345) == "0.1235" and ACCURACY.format(0.5) == "50.00%"


def test_from_python_it_is_said_when_the_run_is_compiled():
    task = cfl.as_task(cfl.models.MCLR(1), (3,), 0, 0.0)
    local = cfl.Local(lr=0.05, epochs=1, batch_size=10)
    method = cfl.algorithms.fedem(task, local, cfl.select.uniform(6), m=2)
    data = federate(planted())
    said = one_line(NEEDS, cfl.run, method, task, data, jax.random.key(0), rounds=1)
    assert said.startswith("algorithm=fedem: ")
