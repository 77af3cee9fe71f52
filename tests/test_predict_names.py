"""`predict` takes columns, clients and labels by their names, and pixels of any type alike."""

import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from conftest import call, one_line

import fedjax_cfl as cfl
from fedjax_cfl.cli import main

LINE = "algorithm=nonfed rounds=3 clients_per_round=6 local.lr=0.3 curves=false"
LINE += " model=mclr eval_auxiliary=false"
PARTS = "dataset.source.y=state dataset.source.client=site dataset.source.split=part"
COLUMNS = ["temp", "hum", "wind"]


def make_frame(rows=240):
    """Returns samples of six sites, whose labels are text, and of a random linear rule."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    y = np.array(["caf\u00e9", "off", "on"])[(x @ rng.normal(size=(3, 3))).argmax(1)]
    parts = {"site": np.arange(rows) % 6, "state": y, "part": np.arange(rows) // 6 % 4 // 3}
    return pd.DataFrame({"note": ["n"] * rows, **dict(zip(COLUMNS, x.T, strict=True)), **parts})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with runs of the frame as each kind of file, and of pixels."""
    folder = tmp_path_factory.mktemp("names")
    frame = make_frame()
    rng = np.random.default_rng(1)
    pixels = {"x": rng.integers(0, 256, (120, 4, 4), np.uint8), "client": np.arange(120) % 6}
    pixels["y"] = (pixels["x"].mean((1, 2)) > 127).astype(int)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        frame = frame.assign(spare=None)  # which is empty, and no feature
        frame.to_csv("own.csv", index=False)
        frame.to_json("own.jsonl", orient="records", lines=True, double_precision=15)
        turns = pd.Index(rng.normal(size=len(frame)), name="turn")  # which is no feature
        frame.set_index(turns).to_parquet("own.parquet")
        np.savez("uint8.npz", **pixels)
        np.savez("float.npz", **pixels | {"x": pixels["x"].astype(np.float32)})
        for kind in ("csv", "jsonl", "parquet"):
            source = f"dataset={kind} dataset.source.path=own.{kind} run_dir={kind}"
            assert call(patch, f"{LINE} {source} {PARTS}", devices=1) == 0
        for kind in ("uint8", "float"):
            lr = "local.lr=1e-4" if kind == "float" else ""
            source = f"dataset=npz dataset.source.path={kind}.npz run_dir={kind}"
            assert call(patch, f"{LINE} {lr} {source}", devices=1) == 0
    return folder


@pytest.fixture
def predict(folder, fedjax_cfl, monkeypatch):
    """Returns f(run, file, words) -> (status, last line of stdout, stderr)."""
    monkeypatch.chdir(folder)

    def run(name, file, words=""):
        status, out, error = fedjax_cfl(f"predict {name} {file} {words}")
        return status, (out.strip().splitlines() or [""])[-1], error

    return run


def save(frame, kind):
    if kind == "csv":
        frame.to_csv("new.csv", index=False)
    elif kind == "jsonl":
        frame.to_json("new.jsonl", orient="records", lines=True, double_precision=15)
    else:
        frame.to_parquet("new.parquet", index=False)
    return f"new.{kind}"


def as_mac(text):
    """Returns text as a Mac writes it, with a blank behind."""
    return text.replace("\u00e9", "e\u0301") + " "


ALIKE = {
    "reordered": lambda frame: frame[[*reversed(frame.columns)]],
    "float ids": lambda frame: frame.astype({"site": float}),
    "text ids": lambda frame: frame.assign(site=frame["site"].map(lambda site: f" {site}.0")),
    "decomposed labels": lambda frame: frame.assign(state=frame["state"].map(as_mac)),
    "blanks": lambda frame: frame.rename(columns=lambda name: f" {name} "),
    "more columns": lambda frame: frame.assign(winds=1.5, day="2026-01-01"),
    "no note": lambda frame: frame.drop(columns="note"),
    "an empty column": lambda frame: frame.assign(spare=None),
    "a full column": lambda frame: frame.assign(spare=1.5),
    "a gap in it": lambda frame: frame.assign(spare=[1.5] + [None] * (len(frame) - 1)),
    "an index": lambda frame: frame.assign(turn=0.5),
    "row numbers": lambda frame: frame.reset_index(names="Unnamed: 0"),
    "sorted by label": lambda frame: frame.sort_values("state"),
    "a part of it": lambda frame: frame[frame["part"] == 1],
}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("change", ALIKE)
def test_the_same_samples_get_the_same_predictions(change, kind, folder, predict):
    right = predict(kind, f"own.{kind}")
    accuracy = cfl.load_run(folder / kind).summary["final_accuracy"]
    assert right[0] == 0 and "clients of the run: 240 samples" in right[1]
    assert f"accuracy {accuracy:.2%} on 60" in right[1]
    got = predict(kind, save(ALIKE[change](make_frame()), kind))
    rows = "60 samples" if change == "a part of it" else "240 samples"
    assert got == (0, right[1].replace("240 samples", rows), "")


OTHER = {
    "renamed": ({"hum": "humid"}, {}, "column hum is missing", "(did you mean 'humid'?)"),
    "missing": ({"hum": None}, {}, "column hum is missing", "expected one of"),
    "no client": ({"site": "sites"}, {}, "client=site is not there", "did you mean 'sites'?"),
}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("change", OTHER)
def test_other_columns_are_refused_with_the_nearest(change, kind, predict):
    renamed, more, says, near = OTHER[change]
    frame = make_frame().drop(columns=[name for name, new in renamed.items() if new is None])
    frame = frame.rename(columns={name: new for name, new in renamed.items() if new}).assign(**more)
    status, _, error = predict(kind, save(frame, kind))
    assert status == 2 and says in error and near in error and error.count("\n") == 1


def test_a_table_without_labels_needs_no_label_column(folder, predict):
    file = save(make_frame().drop(columns="state"), "csv")
    status, line, _ = predict("csv", file, "--no-labels")
    assert (status, line) == (0, "clients of the run: 240 samples, models 0, 1, 2, 3, 4, 5")
    status, _, error = predict("csv", file)
    assert status == 2 and "y=state is not there" in error


def test_rows_that_cannot_be_predicted_are_named_and_the_others_written(folder, predict):
    """Without a value, or of a client that the run does not know and no label says anything of."""
    frame = make_frame().astype({"site": "string"}).drop(columns="state")
    frame.loc[[4, 7], "hum"] = None
    frame.loc[frame.index % 6 == 5, "site"] = "zoe"
    for kind, out in (("csv", "p.csv"), ("parquet", "p.parquet")):
        status, line, error = predict(kind, save(frame, kind), f"--no-labels --out {out}")
        assert (status, line) == (1, f"written to {out}")
        assert error == (
            f"fedjax-cfl: new.{kind}: 42 of 240 rows are not predicted: a value is missing in row"
            " 4, 7 (the first is 0); client zoe has no model in this run, and without y of"
            " training samples none can be chosen\n"
        )
        table = pd.read_csv(out) if kind == "csv" else pd.read_parquet(out)
        rows = [row for row in range(240) if row % 6 != 5 and row not in (4, 7)]
        assert table["row"].tolist() == rows
        run = cfl.load_run(folder / kind)
        whole = frame[frame["site"] == "3"]
        right = run.predict(3, whole[COLUMNS])
        assert table["predicted"][table["client"].astype(str) == "3"].tolist() == right.tolist()
    status, _, error = predict("csv", save(frame[frame["site"] == "zoe"], "csv"), "--no-labels")
    assert status == 2 and "40 of 40 rows are not predicted: client zoe" in error
    arrays = dict(np.load("float.npz"))
    arrays["x"][3, 0, 0] = np.nan
    np.savez("new.npz", **arrays)
    status, _, error = predict("float", "new.npz", "--out p.npz")
    assert status == 1 and "1 of 120 rows are not predicted: a value is missing in row 3" in error
    assert np.load("p.npz")["row"].tolist() == [0, 1, 2, *range(4, 120)]


@pytest.mark.parametrize("end", [0, 2])
def test_the_command_ends_at_once(end, monkeypatch):
    """Threads that are still at work could abort a usual exit, after the last line."""
    ends = []
    monkeypatch.setattr(main, "main", lambda: end)
    monkeypatch.setattr(main.os, "_exit", ends.append)
    for verb in ("predict", "doctor"):
        monkeypatch.setattr(main.sys, "argv", ["fedjax-cfl", verb])
        with pytest.raises(SystemExit):
            main.enter()
    assert ends == [end]


def test_a_frame_is_taken_by_name_from_python(folder):
    run, frame = cfl.load_run(folder / "csv"), make_frame()[COLUMNS]
    assert run.columns == tuple(COLUMNS)
    right = run.predict(3, frame.to_numpy())
    assert set(right) <= {"caf\u00e9", "off", "on"}, "by their names"
    table = pa.Table.from_pandas(frame[["wind", "temp", "hum"]])
    for client in (3, 3.0, "3", " 3.0", np.int64(3)):
        for x in (frame, frame[COLUMNS[::-1]], table):
            np.testing.assert_array_equal(run.predict(client, x), right)
    one_line("no column hum, which the run was trained on (did you mean 'humid'?)",
             run.predict, 3, frame.rename(columns={"hum": "humid"}))  # fmt: skip
    np.testing.assert_array_equal(run.predict(3, frame.assign(more=1)), right)
    one_line("no client of this name", run.predict, "31", frame)
    twice = frame.assign(more=1).set_axis([*COLUMNS, " temp"], axis=1)
    one_line("x: column 'temp' is there more than once", run.predict, 3, twice)
    one_line("x: column 'temp' is there more than once", cfl.from_arrays, twice, [0] * len(twice))
    x, y = frame.to_numpy(), make_frame()["state"]
    pool = cfl.from_arrays(frame, y.tolist())
    assert pool.columns == tuple(COLUMNS)
    assert run.find_model(x, y.map(as_mac).to_numpy(str)) == run.find_model(x, y.to_numpy(str))


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16", "float32", "float64"])
def test_pixels_of_any_type_are_the_pixels_of_the_run(dtype, folder, predict):
    arrays = dict(np.load(folder / "uint8.npz"))
    if dtype == "int8":
        arrays["x"] = arrays["x"] // 2
    np.savez("new.npz", **arrays)
    right = predict("uint8", "new.npz", "--out right.npz")
    np.savez("new.npz", **arrays | {"x": arrays["x"].astype(dtype)})
    got = predict("uint8", "new.npz", "--out got.npz")
    assert right[0] == got[0] == 0
    one, other = np.load("right.npz"), np.load("got.npz")
    for name in one.files:
        np.testing.assert_array_equal(one[name], other[name])
    run = cfl.load_run(folder / "uint8")
    scaled = arrays["x"].astype(np.float32) / 255
    np.testing.assert_array_equal(run.predict(0, scaled), run.predict(0, arrays["x"]))


def test_what_are_no_pixels_is_refused(folder):
    run, x = cfl.load_run(folder / "uint8"), np.zeros((2, 4, 4), np.float32)
    assert run.pixels is True
    for wrong in (x - 0.5, x + 1.5, x + 256, x + np.nan, (x - 1).astype(int)):
        one_line("and the run was trained on uint8, read as x / 255", run.predict, 0, wrong)


def test_numbers_of_uint8_are_the_numbers_of_a_run_on_floats(folder):
    run, x = cfl.load_run(folder / "float"), np.load(folder / "uint8.npz")["x"]
    right = run.predict_proba(2, x.astype(np.float32))
    np.testing.assert_array_equal(run.predict_proba(2, x), right)


def test_predictions_are_written_as_a_table(folder, predict):
    status, line, _ = predict("csv", "own.csv", "--out p.csv")
    assert (status, line) == (0, "written to p.csv")
    predict("csv", "own.csv", "--out p.npz")
    table, arrays = pd.read_csv("p.csv"), np.load("p.npz")
    chances = [f"probabilities {name}" for name in ("caf\u00e9", "off", "on")]
    assert list(table.columns) == ["client", "predicted", "model", "known", *chances]
    for name in ("client", "predicted", "model", "known"):
        assert table[name].astype(str).tolist() == arrays[name].astype(str).tolist()
    np.testing.assert_allclose(table[chances], arrays["probabilities"])
    assert predict("csv", "own.csv", "--out p.parquet")[1] == "written to p.parquet"
    again = pd.read_parquet("p.parquet")
    assert list(again.columns) == list(table.columns)
    assert again["predicted"].tolist() == table["predicted"].tolist()
    status, _, error = predict("csv", "own.csv", "--out p.xlsx")
    assert status == 2 and "--out=p.xlsx: must end in .csv, .npz or .parquet" in error


@pytest.mark.parametrize("kind", ["csv", "uint8"])
def test_a_setting_that_the_reader_of_a_run_does_not_have_is_one_line(
    kind, folder, predict, tmp_path
):
    copy = shutil.copytree(folder / kind, tmp_path / kind)
    path = copy / ".hydra" / "config.yaml"
    path.write_text(path.read_text().replace("  source:\n", "  source:\n    colour: red\n"))
    file = "own.csv" if kind == "csv" else "folder"
    status, _, error = predict(copy, file)
    assert status == 2 and error.count("\n") == 1
    assert "dataset.source._target_=" in error and "argument 'colour'; correct the run's" in error
