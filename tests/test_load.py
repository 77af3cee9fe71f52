"""A finished run read back: settings, rows, clients, models that predict; `predict`."""

import json
import shutil
import zipfile
from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest
from conftest import call, nightly

import fedjax_cfl as cfl
from fedjax_cfl.cli.predict import can_place
from fedjax_cfl.errors import InputError

LINE = (
    "dataset=npz dataset.source.path=own.npz algorithm=ifca algorithm.m=2 discard=none rounds=4"
    " seed=1 clients_per_round=6 local.epochs=3 local.lr=0.5 eval_auxiliary=false run_dir=run"
)
NAMES = ["ann", "bob", "cy", "dan", "eva", "fay"]


def own_arrays(clients, samples: int = 40, seed: int = 0) -> dict[str, np.ndarray]:
    """Two groups, the even and the odd clients, with opposite labels."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(clients)), samples)
    x = rng.normal(size=(len(owner), 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32) ^ (owner % 2).astype(np.int32)
    split = np.tile(np.arange(samples) % 4 == 0, len(clients)).astype(np.int32)
    return {"x": x, "y": y, "client": np.array(clients)[owner], "split": split}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with own.npz and a run of it."""
    folder = tmp_path_factory.mktemp("load")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        np.savez("own.npz", **own_arrays(NAMES))
        assert call(patch, LINE, devices=1) == 0
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return cfl.load_run(folder / "run")


@pytest.fixture(scope="module")
def own(folder):
    return dict(np.load(folder / "own.npz"))


def test_a_run_comes_back_as_it_was(run, folder):
    assert run.settings["algorithm"]["name"] == "ifca" and run.settings["rounds"] == 4
    assert [row["round"] for row in run.rows] == [1, 2, 3, 4]
    assert run.table["client"].tolist() == NAMES
    assert run.final.round == 4 and run.best.round == run.summary["best_round"]
    np.testing.assert_array_equal(run.final.model_index, run.table["group"])
    assert run.sample_shape == (4,) and run.num_classes == 2
    with zipfile.ZipFile(folder / "run" / "final.npz") as file:
        assert all(name.endswith(".npy") for name in file.namelist())


def test_predictions_are_those_that_the_run_was_tested_on(run, own):
    for client, accuracy in zip(run.table["client"].tolist(), run.table["accuracy"], strict=True):
        rows = (own["client"] == client) & (own["split"] == 1)
        right = run.predict(client, own["x"][rows]) == own["y"][rows]
        assert right.mean() == pytest.approx(accuracy)


def test_best_models_are_those_of_their_round(run, own):
    test, right = own["split"] == 1, 0
    for client in NAMES:
        rows = test & (own["client"] == client)
        right += (run.predict(client, own["x"][rows], run.best) == own["y"][rows]).sum()
    assert right / test.sum() == pytest.approx(run.summary["best_accuracy"])


def test_more_samples_than_a_block(run):
    x = np.random.default_rng(1).normal(size=(600, 4))
    whole = run.predict("ann", x)
    assert whole.shape == (600,)
    np.testing.assert_array_equal(whole[300:], run.predict("ann", x[300:]))


def test_a_client_never_met_joins_the_model_of_lowest_loss(run):
    group = dict(zip(NAMES, run.table["group"].tolist(), strict=True))
    new = own_arrays(["ann", "bob"], samples=300, seed=5)
    for client in ("ann", "bob"):
        rows = new["client"] == client
        assert run.find_model(new["x"][rows], new["y"][rows]) == group[client]
    assert group["ann"] != group["bob"], "one group: nothing to get wrong"


def test_padding_has_no_say(run):
    """One sample of class 1, which model 0 knows; empty samples of class 0 would like model 1."""
    head = {"kernel": np.zeros((2, 4, 2), np.float32), "bias": np.array([[0, 3], [3, 0]], float)}
    both = run.final._replace(models={"head": head})
    assert run.find_model(np.ones((1, 4)), [1], both) == 0


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda run: run.predict("anne", np.zeros((1, 4))), "did you mean 'ann'?"),
        (lambda run: run.predict("ann", np.zeros((2, 5))), "expected numbers of shape (B, 4)"),
        (lambda run: run.predict("ann", np.full((1, 4), np.nan)), "x is NaN or infinite"),
        (lambda run: run.predict("ann", [np.ma.masked_equal(range(4), 2)]), "x has masked entries"),
        (lambda run: run.predict_with(2, np.zeros((1, 4))), "between 0 and 1 is allowed"),
        (lambda run: run.find_model(np.zeros((1, 4)), [7]), "y is 7 in sample 0, expected 0 .. 1"),
        (lambda run: run.find_model(np.zeros((1, 4)), ["a"]), "y has dtype <U1, expected integers"),
    ],
)
def test_bad_input_is_one_line(run, ask, text):
    with pytest.raises(InputError) as error:
        ask(run)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_a_client_without_a_model_is_named(run):
    index = np.where(np.arange(6) == 1, -1, run.final.model_index)
    early = run._replace(final=run.final._replace(model_index=index))
    with pytest.raises(InputError, match=r"client=bob: never took part.*find_model"):
        early.predict("bob", np.zeros((1, 4)))


@pytest.mark.parametrize(
    ("names", "labels"),
    [(("9", "10"), [10, 9, 10]), (("dog", "cat"), ["cat", "dog", "cat"])],
)
def test_names_of_classes_need_no_order(run, names, labels):
    """As 9, 10 in a file of labels with gaps, and as the features of a Hugging Face data set."""
    assert run._replace(class_names=names).check_labels(labels, 3).tolist() == [1, 0, 1]


# hostile and unfinished directories


@pytest.fixture
def copy(folder, tmp_path):
    return Path(shutil.copytree(folder / "run", tmp_path / "run"))


def test_an_unfinished_run_is_refused(copy):
    (copy / "summary.json").unlink()
    with pytest.raises(InputError, match="has not finished"):
        cfl.load_run(copy)


def test_damage_is_noticed(copy):
    file = copy / "final.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="Bad CRC-32"):
        cfl.load_run(copy)


@pytest.mark.parametrize("target", ["os.system", "fedjax_cfl.models.as_task", "own.Net"])
def test_nothing_that_a_directory_names_is_called(copy, target):
    path = copy / ".hydra" / "config.yaml"
    text = path.read_text().replace("_target_: fedjax_cfl.models.MCLR", f"_target_: {target}")
    path.write_text(text)
    with pytest.raises(InputError, match=r"^model\.module\._target_="):
        cfl.load_run(copy)


def test_no_module_that_a_directory_names_is_imported(copy, tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("open('sprung', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = copy / ".hydra" / "config.yaml"
    path.write_text(path.read_text().replace("fedjax_cfl.models.MCLR", "trap.Net"))
    with pytest.raises(InputError, match="is no model of the package"):
        cfl.load_run(copy)
    assert not (tmp_path / "sprung").exists()


class Net(nn.Module):
    """A module of somebody's own."""

    num_classes: int = 2
    layer: str = "head"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes, name=self.layer)(x.reshape(x.shape[0], -1))


def test_an_own_module_is_an_argument(copy, run):
    path = copy / ".hydra" / "config.yaml"
    path.write_text(path.read_text().replace("fedjax_cfl.models.MCLR", "own.Net"))
    x = np.random.default_rng(2).normal(size=(20, 4))
    again = cfl.load_run(copy, module=Net())
    np.testing.assert_array_equal(again.predict("cy", x), run.predict("cy", x))
    with pytest.raises(InputError, match="other parameters"):
        cfl.load_run(copy, module=Net(layer="other"))


# the command


@pytest.fixture
def predict(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    return lambda line: (call(monkeypatch, f"predict {line}", devices=1), *capsys.readouterr())


def test_predict_scores_clients_met_and_new(predict, folder, run, own):
    arrays = own_arrays([*NAMES, "gus", "hal"], seed=3)
    np.savez(folder / "new.npz", **arrays)
    status, out, error = predict("run new.npz --out out.npz")
    assert (status, error) == (0, "")
    first, known, new, written = out.splitlines()
    assert first == "ifca, models of round 4" and written == "written to out.npz"
    assert new.endswith(" on 20")  # the test samples alone
    assert known.startswith("clients of the run: 240 samples, models 0, 1, accuracy ")
    assert new.startswith("clients new to the run: 80 samples, models 0, 1, accuracy ")
    found = np.load(folder / "out.npz")
    for name, twin in (("gus", "ann"), ("hal", "bob")):  # the same truth
        model = found["model"][arrays["client"] == name]
        assert set(model.tolist()) == {run.table["group"][NAMES.index(twin)]}
    rows = arrays["client"] == "cy"
    np.testing.assert_array_equal(found["predicted"][rows], run.predict("cy", arrays["x"][rows]))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["U", nightly("S")])
def test_predict_knows_classes_by_name(predict, folder, tmp_path, monkeypatch, kind):
    """Text labels, numbered in sorted order: the same run as with 0 and 1."""
    arrays = own_arrays(NAMES)
    names = np.array(["cat", "dog"], kind)
    np.savez(folder / "text.npz", **{**arrays, "y": names[arrays["y"]]})
    line = LINE.replace("own.npz", "text.npz").replace("run_dir=run", f"run_dir={tmp_path}/run")
    assert call(monkeypatch, line, devices=1) == 0
    status, out, error = predict(f"{tmp_path}/run text.npz --out {tmp_path}/out.npz")
    _, twin, _ = predict(f"run own.npz --out {tmp_path}/twin.npz")
    assert (status, error) == (0, "") and out.splitlines()[-2] == twin.splitlines()[-2]
    found, numbers = (np.load(tmp_path / f"{name}.npz")["predicted"] for name in ("out", "twin"))
    np.testing.assert_array_equal(found, np.array(["cat", "dog"])[numbers])
    np.savez(folder / "text.npz", **{**arrays, "y": np.array(["cat", "cow"])[arrays["y"]]})
    status, _, error = predict(f"{tmp_path}/run text.npz")
    assert status == 2 and "y=cow: the classes of the run are cat, dog" in error


def test_predict_leaves_its_input_alone(predict, folder):
    np.savez(folder / "mine.npz", **own_arrays(NAMES))
    before = (folder / "mine.npz").read_bytes()
    status, _, error = predict("run mine.npz --out ../" + folder.name + "/mine.npz")
    assert status == 2 and "would replace the samples" in error
    assert (folder / "mine.npz").read_bytes() == before


def test_predict_without_labels(predict, folder):
    arrays = own_arrays(NAMES)
    np.savez(folder / "x.npz", x=arrays["x"], client=arrays["client"])
    status, out, _ = predict("run x.npz --best")
    assert status == 0 and "accuracy" not in out and "clients of the run: 240 samples" in out
    np.savez(folder / "x.npz", x=arrays["x"])
    status, _, error = predict("run x.npz")
    assert status == 2 and "client of a file without client has no model" in error


@pytest.mark.nightly
def test_predict_reads_clients_and_split_as_training_does(fedjax_cfl, tmp_path):
    """Ids that a table program has stored as 0.0, 1.0 ...; a split in words."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=80)
    x = (np.eye(2, 4)[y] + rng.normal(size=(80, 4))).astype(np.float32)
    arrays = {"x": x, "y": y + 5, "client": np.arange(80.0) % 4, "split": np.arange(80) // 60}
    np.savez(tmp_path / "own.npz", **arrays)
    own = "dataset=npz dataset.source.path=own.npz algorithm=nonfed clients_per_round=4"
    assert fedjax_cfl(f"{own} rounds=3 run_dir=run")[0] == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    _, out, _ = fedjax_cfl("predict run own.npz")
    assert (
        f"clients of the run: 80 samples, models 0, 1, 2, 3, accuracy {row['accuracy']:.2%}" in out
    )
    words = np.where(arrays["split"] == 1, "test", "train")
    np.savez(tmp_path / "words.npz", **arrays | {"split": words})
    assert fedjax_cfl("predict run words.npz")[1].splitlines()[:-1] == out.splitlines()[:-1]
    np.savez(tmp_path / "words.npz", **arrays | {"split": np.char.replace(words, "test", "tent")})
    status, _, err = fedjax_cfl("predict run words.npz")
    assert status == 2 and "expected train or test, or 0 or 1" in err and err.count("\n") == 1
    (tmp_path / "out.npz").touch()
    status, _, err = fedjax_cfl("predict run missing.npz --out out.npz")
    assert status == 2 and "missing.npz" in err and err.count("\n") == 1


def shifted_arrays(clients, seed: int = 0) -> dict[str, np.ndarray]:
    """Two groups, the even and the odd clients, whose inputs lie apart."""
    arrays = own_arrays(clients, seed=seed)
    group = np.repeat(np.arange(len(clients)) % 2, 40)
    return arrays | {"x": arrays["x"] + 6 * group[:, None].astype(np.float32)}


@pytest.mark.nightly
def test_clients_without_labels_are_placed_where_the_method_needs_none(fedjax_cfl, tmp_path):
    """FLUX compares inputs: its newcomers join those whose inputs are like theirs."""
    np.savez("own.npz", **shifted_arrays(NAMES))
    line = LINE.replace("algorithm=ifca", "algorithm=flux algorithm.warm_up=1")
    line = line.replace("algorithm.m=2", "algorithm.m=2 algorithm.cluster=kmeans")
    assert fedjax_cfl(line)[0] == 0
    run = cfl.load_run("run")
    group = dict(zip(NAMES, run.table["group"].tolist(), strict=True))
    assert group["ann"] == group["cy"] != group["bob"]
    new = shifted_arrays(["gus", "hal", "ida", "joe"], seed=7)
    for split in ({"split": new["split"]}, {"split": np.ones_like(new["split"])}, {}):
        np.savez("new.npz", x=new["x"], client=new["client"], **split)
        status, out, error = fedjax_cfl("predict run new.npz --out out.npz")
        assert (status, error) == (0, "") and "clients new to the run: 160 samples" in out
        found = np.load("out.npz")
        for name, twin in (("gus", "ann"), ("hal", "bob"), ("ida", "ann"), ("joe", "bob")):
            rows = new["client"] == name
            assert set(found["model"][rows].tolist()) == {group[twin]}
            right = run.predict_with(group[twin], new["x"][rows])
            np.testing.assert_array_equal(found["predicted"][rows], right)
    shutil.rmtree("run/checkpoints")
    status, _, error = fedjax_cfl("predict run new.npz")
    assert status == 2 and "by which clients without labels are placed" in error


def test_methods_that_need_labels_place_nobody_without_them(run):
    assert not can_place(run, run.final)
    own = {"_target_": "fedjax_cfl.algorithms.flux", "newcomers": "inputs", "warm_up": 3}
    for changes, expected in (
        ({}, True),
        ({"warm_up": 4}, False),
        ({"newcomers": "labels"}, False),
        ({"_target_": "mine.flux"}, False),
    ):
        settings = {"algorithm": own | changes, "personal": None}
        assert can_place(run._replace(settings=settings), run.final) == expected
    settings = {"algorithm": own, "personal": {"name": "ditto"}}
    assert not can_place(run._replace(settings=settings), run.final)
