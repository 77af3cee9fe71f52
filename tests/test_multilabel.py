"""Several labels a sample: loss, steps and F1 against twins in NumPy and scikit-learn, planted
groups, what files may hold, and what of the catalogue needs classes.
"""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import call, lasting_rows, nightly, one_line, run_in
from sklearn.metrics import f1_score
from test_regression import compare_heads, train_two

import fedjax_cfl as cfl
from fedjax_cfl.cli.build import assemble
from fedjax_cfl.data.datasets import csv, from_arrays, npy, npz, parquet
from fedjax_cfl.scores import LABEL_SCORES, MICRO_F1
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.types import ServedModels

LINE = (
    "task=multilabel dataset=npz dataset.source.path=own.npz algorithm=ifca algorithm.m=2"
    " discard=none local.lr=1.0 local.epochs=2 clients_per_round=12 seed=3 model=mclr preset.l2=0"
)


def planted(clients: int = 12, samples: int = 40, seed: int = 0) -> dict[str, np.ndarray]:
    """Two groups, the even and the odd clients: what is a label for the ones is none for the
    others.
    """
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), samples)
    x = rng.normal(size=(client.size, 4)).astype(np.float32)
    meaning = np.array([[2, 1, 0], [-1, 2, 1], [0, -2, 2], [1, 0, -1]])
    y = (x @ meaning > 0) ^ (client % 2 == 1)[:, None]
    split = np.tile(np.arange(samples) % 4 == 0, clients).astype(np.int32)
    return {"x": x, "y": y.astype(np.int32), "client": client, "split": split,
            "concept": np.arange(clients) % 2}  # fmt: skip


def federate(arrays: dict[str, np.ndarray]) -> cfl.FederatedData:
    pool = from_arrays(**arrays, num_classes=0)
    return cfl.federate(pool, cfl.partition.by_user(pool, seed=0))


def make_task(outputs: int = 3) -> cfl.Task:
    return cfl.as_task(cfl.models.MCLR(outputs), (4,), 0, 0.0, cfl.models.multilabel())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with own.npz and a run of IFCA."""
    folder = tmp_path_factory.mktemp("multilabel")
    np.savez(folder / "own.npz", **planted())
    run_in(folder, f"{LINE} rounds=8 run_dir=run")
    return folder


@pytest.fixture(scope="module")
def with_fedavg(folder):
    """The same folder with a run of FedAvg, too."""
    line = LINE.replace("algorithm=ifca algorithm.m=2", "algorithm=fedavg")
    run_in(folder, f"{line} rounds=8 run_dir=fedavg")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return cfl.load_run(folder / "run")


# losses and scores


@pytest.mark.parametrize("first_layer", [nightly("direct"), "dual"])
def test_a_step_is_that_of_a_twin(first_layer):
    arrays = planted(clients=2)
    data, task = federate(arrays), make_task()
    head, after, info = train_two(task, data, 0.5, first_layer)
    trained, losses = [], []
    for client in range(2):
        own = (arrays["client"] == client) & (arrays["split"] == 0)
        x, y, w, b = arrays["x"][own].astype(float), arrays["y"][own], head["kernel"], head["bias"]
        for step in range(2):
            p = 1 / (1 + np.exp(-(x @ w + b)))
            entropy = -np.where(y == 1, np.log(p), np.log(1 - p))
            losses += [entropy.mean()] if step == 0 else []
            slope = (p - y) / y.size
            w, b = w - 0.5 * x.T @ slope, b - 0.5 * slope.sum(0)
        trained.append((w, b))
    compare_heads(after, info, trained, losses)
    tested = task.targets.loss_value(jnp.array([[2.0, -1.0]]), jnp.array([[1, 1]]))
    np.testing.assert_allclose(tested, [np.mean(np.log1p(np.exp([-2.0, 1.0])))], rtol=1e-6)


def twin(y, guess):
    """Returns the scores of labels [n, T] by scikit-learn; NaN where no label is or is predicted,
    which it calls 0.
    """
    there = y.any(0) | guess.any(0)
    f1 = dict.fromkeys(("micro", "macro"), np.nan)
    if there.any():
        labels = np.flatnonzero(there).tolist()
        both = np.pad(y, ((0, 0), (0, 1))), np.pad(guess, ((0, 0), (0, 1)))  # T > 1, as it needs
        f1 = {name: f1_score(*both, labels=labels, average=name) for name in f1}
    return {
        "micro_f1": f1["micro"],
        "label_f1": f1["macro"],
        "exact_match": np.mean((y == guess).all(1)),
    }


def test_scores_are_those_of_scikit_learn():
    rng, clients = np.random.default_rng(1), 23
    arrays = planted(clients)
    rare, none = arrays["client"] == 4, arrays["client"] == 6
    arrays["y"][rare, 1:] = 0
    arrays["y"][none] = 0  # with x of 0, and biases below 0, nothing is predicted either
    arrays["x"][none] = 0
    data, task = federate(arrays), make_task()
    models = {"head": {"kernel": rng.normal(size=(2, 4, 3)), "bias": np.full((2, 3), -0.5)}}
    models = jax.tree.map(jnp.float32, models)
    index = np.where(np.arange(clients) == 9, -1, np.arange(clients) % 2)
    table, _ = jax.jit(evaluate.evaluate_clients, static_argnums=(0, 1))(
        task, cfl.make_mesh(1), ServedModels(models, jnp.asarray(index, jnp.int32)), data
    )
    own = (arrays["split"] == 1) & (arrays["client"] != 9)
    x, y, owner = (arrays[name][own] for name in ("x", "y", "client"))
    kernel, bias = (np.asarray(models["head"][name], float) for name in ("kernel", "bias"))
    guess = (np.einsum("nf,nft->nt", x, kernel[owner % 2]) + bias[owner % 2] > 0).astype(int)
    zero = np.zeros((), np.int32)
    totals = evaluate.Totals(np.zeros((2, 0), np.int32), zero, zero, zero, np.float32(0))
    found = evaluate.Evaluation(jax.device_get(table), totals)
    tested = evaluate.Tested(index, found, np.asarray(data.concept), np.ones(clients))
    row = evaluate.finalize(task.targets, tested, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what scikit-learn does not define
        each = [twin(y[owner == k], guess[owner == k]) for k in range(clients) if k != 9]
        groups = [twin(y[owner % 2 == g], guess[owner % 2 == g]) for g in range(2)]
        everything = twin(y, guess)
    met = np.flatnonzero(np.arange(clients) != 9)
    for name in LABEL_SCORES:
        values = np.array([one[name] for one in each])
        np.testing.assert_allclose(getattr(table, name)[met], values, rtol=1e-5, err_msg=name)
        known = np.sort(values[np.isfinite(values)])
        assert row[name] == pytest.approx(everything[name], rel=1e-5)
        assert row[f"macro_{name}"] == pytest.approx(known.mean(), rel=1e-5)
        assert row[f"worst10_{name}"] == pytest.approx(known[: len(known) // 10].mean(), rel=1e-5)
        by_group = [one[name] for one in groups]
        np.testing.assert_allclose(row[f"group_{name}"], by_group, rtol=1e-5)
        np.testing.assert_allclose(row[f"concept_{name}"], by_group, rtol=1e-5)
    assert np.isnan(table.micro_f1[6]) and table.exact_match[6] == 1
    assert table.samples[9] == 0 and np.isnan(table.exact_match[9])
    broken = found._replace(totals=totals._replace(nonfinite_models=np.int32(1)))
    row = evaluate.finalize(task.targets, tested._replace(evaluation=broken), 2)
    assert np.isnan([row["micro_f1"], row["macro_label_f1"], row["worst10_exact_match"]]).all()


# runs


@pytest.mark.nightly
def test_two_planted_groups_are_found(run):
    last = run.rows[-1]
    assert last["ari"] == 1.0 and last["micro_f1"] > 0.95 and last["label_f1"] > 0.95
    assert min(last["group_micro_f1"]) > 0.93 and len(last["concept_exact_match"]) == 2
    assert "accuracy" not in json.dumps([run.rows[-1], run.summary])
    assert run.summary["best_micro_f1"] == max(row["micro_f1"] for row in run.rows)
    assert {*LABEL_SCORES, "loss"} <= set(run.table) and "labels" not in run.table


@pytest.mark.nightly
def test_the_mean_of_the_models_is_tested(fedjax_cfl):
    np.savez("own.npz", **planted())
    assert fedjax_cfl(f"{LINE} rounds=2 eval_auxiliary=true run_dir=run")[0] == 0
    run, own = cfl.load_run("run"), planted()
    mean = jax.tree.map(lambda leaf: leaf.mean(0), run.final.models)
    test = own["split"] == 1
    guess = np.asarray(run.task.predict(mean, own["x"][test]) > 0)
    expected = f1_score(own["y"][test], guess, average="micro")
    assert run.rows[-1]["auxiliary_micro_f1"] == pytest.approx(expected, rel=1e-5)


def test_the_glossary_has_every_key_of_a_row(run):
    text = (Path(__file__).parents[1] / "docs/reference/glossary.md").read_text()
    own = set(run.rows[-1]) - set(text.partition("## Rows\n")[2].partition("\n## ")[0].split("`"))
    part = text.partition("## Rows of labels\n")[2].partition("\n## ")[0]
    names = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    assert {name for cell in names for name in cell.split("`")[1::2]} == own


def test_predictions_are_labels(run):
    own = planted()
    rows = (own["client"] == 3) & (own["split"] == 1)
    x, y = own["x"][rows], own["y"][rows]
    guess = run.predict(3, x)
    assert guess.shape == y.shape and guess.dtype == np.int32
    expected = f1_score(y, guess, average="micro")
    assert expected == pytest.approx(run.table["micro_f1"][3], rel=1e-5)
    chances = run.predict_proba(3, x)
    np.testing.assert_array_equal(chances > 0.5, guess == 1)
    assert 0 <= chances.min() and chances.max() <= 1
    assert run.find_model(x, y) == run.final.model_index[3] != run.find_model(x, 1 - y)
    one_line(
        "y are 2 labels a sample; models of this run have 3 outputs", run.find_model, x, y[:, :2]
    )
    one_line("expected 0 or 1 of each label", run.find_model, x, 2 * y)


def test_predict_on_the_command_line(folder, fedjax_cfl):
    own = {name: values for name, values in planted(seed=1).items() if name != "concept"}
    np.savez("new.npz", **own)
    status, out, _ = fedjax_cfl(f"predict {folder / 'run'} new.npz --out out.npz")
    written = np.load("out.npz")
    test = own["split"] == 1
    f1 = f1_score(own["y"][test], written["predicted"][test], average="micro")
    assert status == 0 and f"micro-F1 {f1:.2%} on 120" in out
    assert written["probabilities"].shape == written["predicted"].shape == (480, 3)
    status, _, err = fedjax_cfl(f"predict {folder / 'run'} new.npz --confusion")
    assert status == 2 and "counts classes" in err


@pytest.mark.nightly
def test_comparisons_and_pages_are_of_f1(with_fedavg, tmp_path):
    folder = with_fedavg
    mixed = cfl.load_run(folder / "fedavg").rows[-1]  # whose one model can learn nothing
    assert mixed["micro_f1"] < 0.7 and mixed["exact_match"] < 0.3
    found = cfl.compare(folder, out=tmp_path, baseline="fedavg", target=0.9)
    rows = {name: list(found.table[name]) for name in found.table}
    place = rows["algorithm"].index("ifca")
    assert rows["best_micro_f1_mean"][place] > 0.95 and rows["f1_gain_mean"][place] > 0.2
    assert rows["rounds_to_target_mean"][place] <= 8
    assert not any("accuracy" in name or "rmse" in name for name in rows)
    text = (tmp_path / "compare.md").read_text()
    assert "best over tests micro-F1 %" in text and "exact match %" in text and "RMSE" not in text
    one_line(
        "target must be a share in (0, 1], as micro-F1 is, not 2", cfl.compare, folder, target=2.0
    )
    page = cfl.report(folder, tmp_path / "page.html").page.read_text()
    assert "Micro-F1 and what it costs" in page
    assert "accuracy" not in page.partition("<script")[0].lower()
    curves = cfl.draw_run(folder / "run")["curves"]
    titles = [axes.get_title(loc="left") for axes in curves.axes]
    assert (
        titles[0].startswith("Test micro-F1; star") and "Test micro-F1 of each true group" in titles
    )


@pytest.mark.nightly
def test_the_final_table_says_what_is_measured(fedjax_cfl):
    np.savez("own.npz", **planted())
    extras = "evaluate.finetune=1 evaluate.new_clients=0.2 clients_per_round=6"
    status, out, err = fedjax_cfl(f"{LINE} {extras} rounds=6 eval_every=3 run_dir=run")
    assert status == 0, err
    assert "3 labels a sample" in out and "accuracy" not in out
    for words in ("best micro-F1", "macro-F1", "exact match, mean over clients"):
        assert words in out
    assert "micro-F1, worst 10 % of clients" in out and "micro-F1 per group" in out
    summary = cfl.load_run("run").summary
    assert summary["new_clients_micro_f1"] > 0.9 and summary["finetuned_micro_f1"] > 0.9


@pytest.mark.nightly
@pytest.mark.parametrize("settings", ["resident=host", "devices=4"])
def test_devices_and_the_place_of_the_samples_change_nothing(
    settings, folder, fedjax_cfl, monkeypatch
):
    np.savez("own.npz", **planted())
    settings += "" if "devices" in settings else " devices=1"
    assert call(monkeypatch, f"{LINE} {settings} rounds=8 run_dir=run", devices=4) == 0
    for a, b in zip(lasting_rows(folder / "run"), lasting_rows("run"), strict=True):
        for name in a.keys() - {"ari", *(f"concept_{score}" for score in LABEL_SCORES)}:
            values = (np.array(row[name], float) for row in (a, b))
            np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-4, err_msg=name)


# files


def test_files_of_labels(tmp_path):
    own = planted(clients=3, samples=8)
    labels = ["warm", "wet", "windy"]
    columns = {
        **dict(zip("abcd", own["x"].T, strict=True)),
        **dict(zip(labels, own["y"].T, strict=True)),
        "who": own["client"],
    }
    np.savez(tmp_path / "a.npz", **own)
    (tmp_path / "npy").mkdir()
    for name, values in own.items():
        np.save(tmp_path / "npy" / f"{name}.npy", values)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = [
        ",".join(f"{value:.9g}" for value in row) for row in zip(*columns.values(), strict=True)
    ]
    (tmp_path / "a.csv").write_text("\n".join([",".join(columns), *rows]) + "\n")
    pools = [
        from_arrays(own["x"], own["y"].astype(bool), own["client"], num_classes=0),
        npz(tmp_path / "a.npz", num_classes=0),
        npy(tmp_path / "npy", num_classes=0),
        parquet(tmp_path / "a.parquet", y=labels, client="who", num_classes=0),
        csv(tmp_path / "a.csv", y=labels, client="who", num_classes=0),
    ]
    for pool in pools:
        assert pool.y.dtype == np.float32 and pool.num_classes == 0 and pool.class_names is None
        np.testing.assert_array_equal(pool.y, own["y"])
        np.testing.assert_allclose(pool.x, own["x"], rtol=1e-6)
    one = csv(tmp_path / "a.csv", y=["wet"], x=["a"], num_classes=0)
    np.testing.assert_array_equal(one.y, own["y"][:, 1:2])
    said = one_line("are several columns, expected one", csv, tmp_path / "a.csv", y=labels)
    assert "task=multilabel, in Python num_classes=0" in said
    one_line("y=wett is not there", csv, tmp_path / "a.csv", y=["warm", "wett"], num_classes=0)
    twice = {"y": ["wet", "who"], "client": "who", "num_classes": 0}
    one_line("column who is y, client", csv, tmp_path / "a.csv", **twice)


@pytest.mark.nightly
def test_a_run_of_a_table(fedjax_cfl):
    own = planted(clients=4)
    names = [f"x{i}" for i in range(4)] + [f"y{i}" for i in range(3)] + ["who"]
    cells = np.column_stack([own["x"], own["y"], own["client"]])
    np.savetxt("own.csv", cells, delimiter=",", header=",".join(names), comments="", fmt="%.6g")
    table = "dataset=csv dataset.source.path=own.csv dataset.source.client=who"
    line = LINE.replace("dataset=npz dataset.source.path=own.npz", table).replace("=12", "=4")
    status, out, err = fedjax_cfl(f"{line} dataset.source.y=[y0,y1,y2] rounds=2 run_dir=run")
    assert status == 0 and "4 clients, 3 labels a sample" in out, err
    unknown = [0, 1, 2, 3, 7]
    head = ",".join(names[i] for i in unknown)
    np.savetxt("new.csv", cells[:, unknown], delimiter=",", header=head, comments="", fmt="%.6g")
    status, out, err = fedjax_cfl("predict run new.csv --no-labels")
    assert status == 0 and "160 samples" in out, err


X = np.zeros((3, 2), np.float32)
BAD = [
    ([[0, 1], [1, 2], [0, 0]], "label 1 of y is 2 in sample 1, expected 0 or 1 of each label"),
    ([[0, 1], [1, np.nan], [0, 0]], "label 1 of y is nan in sample 1"),
    (np.zeros((3, 0)), "y has dtype float64 and shape (3, 0)"),
    (np.zeros((2, 2)), "with the same N"),
    ([["a", "b"]] * 3, "or labels, 0 or 1, [N, T]"),
]


@pytest.mark.parametrize(("y", "says"), BAD)
def test_what_are_no_labels(y, says):
    one_line(says, from_arrays, X, y, num_classes=0)


def test_labels_under_classification_are_refused_with_the_task():
    one_line("of several labels, 0 or 1, use task=multilabel", from_arrays, X, np.eye(3)[:, :2])


# what does not fit


def test_tasks_and_data_must_agree():
    data, local = federate(planted(clients=2)), cfl.Local(0.1, 1, 10)

    def refused(task, says, data=data):
        algorithm = cfl.algorithms.fedavg(task, local, cfl.select.uniform(2))
        return one_line(says, cfl.run, algorithm, task, data, jax.random.key(0), rounds=1)

    numbers = cfl.as_task(cfl.models.MCLR(1), (4,), 0)
    refused(numbers, "y are 3 labels a sample; give as_task num_classes=0, targets=cfl.models.mul")
    refused(cfl.as_task(cfl.models.MCLR(3), (4,), 3), "targets=cfl.models.multilabel()")
    refused(make_task(2), "give as_task num_classes=0 and a model of 3 outputs, not 2")
    arrays = planted(clients=2)
    arrays["y"] = arrays["y"][:, 0]
    refused(make_task(), "targets=cfl.models.regression()", federate(arrays))


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # the tests chose already
    np.savez("own.npz", **planted())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("partition=shards dataset.clients=4", "samples have several labels"),
        ("partition=dirichlet dataset.clients=4", "needs a class of each sample, which y are not"),
        ("dataset.source.num_classes=3", "task=multilabel has no classes"),
        ("task=regression", "y of dataset=npz are 3 labels a sample; use task=multilabel"),
        ("task=classification", "of several labels, 0 or 1, use task=multilabel"),
        ("task=classification dataset.source.num_classes=0", "use task=multilabel"),
        ("dataset=digits", "task=multilabel: needs 0 or 1 of each label [N, T], in a table"),
    ],
)
def test_settings_that_do_not_fit(settings, says, own):
    given = dict(text.split("=", 1) for text in f"{LINE} {settings}".split())
    if given["dataset"] == "digits":
        del given["dataset.source.path"]
    one_line(says, assemble, [f"{name}={value}" for name, value in given.items()])


def test_numbers_under_multilabel_are_refused(own):
    arrays = planted()
    np.savez("own.npz", **arrays | {"y": arrays["y"][:, 0]})
    one_line("are numbers to regress; use task=regression", assemble, LINE.split())


def test_every_score_is_shown():
    assert MICRO_F1.measured == LABEL_SCORES and MICRO_F1.format(0.5) == "50.00%"
