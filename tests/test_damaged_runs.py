"""A finished run whose files were damaged, re-made or exchanged: `report` and `predict` refuse it
in one line that names the file, and never end in a traceback.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from conftest import call, one_line, refusal

from fedjax_cfl.analysis.report import report
from fedjax_cfl.cli import predict
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.load import load_run
from fedjax_cfl.runs.results import read_clients, to_arrow
from fedjax_cfl.runs.saved_models import load_arrays

LINE = (
    "dataset.clients=12 clients_per_round=4 rounds=3 local.epochs=1 model=mclr algorithm=ifca"
    " algorithm.m=2 dataset.groups=2 partition=iid concept=rotate discard=none"
    " checkpoint.every=50"
)
K = 12
WHOLE = [0] * K
INDEX, BIAS = "['index']", "['models']['head']['bias']"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two finished runs, `run` and `other` of another seed, and samples for `predict`."""
    folder = tmp_path_factory.mktemp("damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed, name in enumerate(("run", "other")):
            assert call(patch, f"{LINE} seed={seed} run_dir={name}", devices=1) == 0
        x = np.zeros((4, 8, 8), np.float32)
        np.savez("s.npz", x=x, y=np.arange(4), client=np.arange(4))
        np.savez("nan.npz", x=x, y=np.arange(4), split=np.array([0, 1, np.nan, 0]))
    return folder


@pytest.fixture
def copy(runs, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(runs)
    return Path(shutil.copytree(runs / "run", tmp_path / "run"))


def change(file: str, **columns):
    """Returns what replaces columns of a Parquet file; None: is left out."""

    def damage(folder: Path) -> None:
        table = parquet.read_table(folder / file)
        for name, values in columns.items():
            table = table.drop_columns([name]) if name in table.column_names else table
            if values is not None:
                table = table.append_column(name, pa.array(values))
        parquet.write_table(table, folder / file)

    return damage


def cut(file: str, rows: int):
    return lambda folder: parquet.write_table(
        parquet.read_table(folder / file).slice(0, rows), folder / file
    )


def note_clients(text: str):
    """Returns what notes other clients in the file of their groups."""

    def damage(folder: Path) -> None:
        table = parquet.read_table(folder / A).replace_schema_metadata({"clients": text})
        parquet.write_table(table, folder / A)

    return damage


def name_twice(folder: Path) -> None:
    table = parquet.read_table(folder / C)
    parquet.write_table(table.append_column("group", table["group"]), folder / C)


def exchange(file: str):
    return lambda folder: shutil.copy(Path("other") / file, folder / file)


def edit_row(number: int = 1, **values):
    def damage(folder: Path) -> None:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        lines[number] = json.dumps(json.loads(lines[number]) | values)
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    return damage


def edit_summary(**values):
    def damage(folder: Path) -> None:
        path = folder / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def write_settings(text: str, after: bool = False):
    def damage(folder: Path) -> None:
        path = folder / ".hydra" / "config.yaml"
        path.write_text((path.read_text() if after else "") + text)

    return damage


def save_again(edit=lambda arrays: arrays, **more):
    """Returns what saves the last models again, with other arrays or facts."""

    def damage(folder: Path) -> None:
        arrays, facts = load_arrays(folder / "final.npz")
        arrays = edit(arrays)
        np.savez(folder / "final.npz", facts=np.array(json.dumps(facts | more)), **arrays)

    return damage


def without(name: str):
    return save_again(lambda arrays: {key: arrays[key] for key in arrays if name not in key})


def with_index(change):
    return save_again(lambda arrays: arrays | {INDEX: change(arrays[INDEX])})


C, A = "clients.parquet", "assignments.parquet"
ANOTHER = "is of another run than the files beside it"
ROW = "is no number up to 3.5e+38, expected what a run writes"

BOTH = {  # what `report` and `predict` refuse
    "no client": (change(C, client=None), "it has no column client"),
    "no group": (change(C, group=None), "it has no column group"),
    "no concept": (change(C, concept=None), "it has no column concept"),
    "two columns of a name": (name_twice, 'Field "group" exists 2 times'),
    "a null group": (change(C, group=[None, *WHOLE[1:]]), "column group has nulls"),
    "text groups": (change(C, group=["a"] * K), "Failed to parse string: 'a'"),
    "half a group": (change(C, group=[0.5] * K), "0.500000 was truncated"),
    "lists of groups": (change(C, group=[[0]] * K), "it has no column group as a run writes it"),
    "text accuracy": (change(C, accuracy=["a"] * K), "Failed to parse string: 'a'"),
    "structures": (change(C, more=[{"a": 1}] * K), "Unsupported cast from struct"),
    "no names": (change(C, client=[None] * K), "column client has nulls"),
    "ragged labels": (change(C, labels=[[1]] + [[1, 2]] * (K - 1)), "labels are empty or not"),
    "a null list of labels": (
        change(C, labels=[None] + [[1]] * (K - 1)),
        "labels are empty or not",
    ),
    "null in labels": (change(C, labels=[[None]] * K), "column labels has nulls"),
    "no rows": (cut(C, 0), "it has no rows"),
    "no Parquet": (lambda folder: (folder / C).write_bytes(b"PAR1"), "cannot be read"),
    "other clients": (exchange(C), ANOTHER),
    "other assignments": (exchange(A), ANOTHER),
    "assignments as clients": (lambda folder: shutil.copy(folder / A, folder / C), "no column"),
    "assignments without rounds": (change(A, round=None), "it has no column round"),
    "assignments of no evaluation": (cut(A, 0), "it has no rows"),
    "ragged assignments": (change(A, group=[[0], [0], [0, 1]]), "group are empty or not"),
    "assignments of nobody": (
        change(A, group=pa.array([[]] * 3, pa.list_(pa.int8()))),
        "group are empty or not",
    ),
    "a sample of text": (note_clients('["a", "b"]'), "invalid literal for int"),
    "a sample of no JSON": (note_clients("[1, "), "cannot be read: Expecting value"),
    "text loss": (edit_row(test_loss="abc"), f"round 2: test_loss {ROW}"),
    "text in sizes": (edit_row(group_sizes=["a", 1]), f"group_sizes {ROW}"),
    "lists of lists": (edit_row(group_discrepancy=[[1], [2]]), f"group_discrepancy {ROW}"),
    "an object": (edit_row(train_loss={"a": 1}), f"train_loss {ROW}"),
    "a number beyond floats": (edit_row(test_loss=10**400), f"test_loss {ROW}"),
    "text clients": (edit_row(dropped_clients="a"), f"dropped_clients {ROW}"),
    "a round before 0": (edit_row(0, round=-5), "with an integer 'round'"),
    "a run_id that is a list": (edit_summary(run_id=[1]), ANOTHER),
    "an alias of itself": (write_settings("\nz: &a [*a]\n", after=True), "it has an alias"),
    "a mapping of itself": (write_settings("\nz: &a {b: *a}\n", after=True), "it has an alias"),
    "settings of a list": (write_settings("[1]"), "config.yaml: cannot be read"),
    "no model": (write_settings("model: {module: null}"), "model.module is no group of settings"),
    "parts without names": (
        write_settings("\nmade_of: [1]\n", after=True),
        "made_of is no group of settings",
    ),
}
MODEL = "model: {module: {_target_: fedjax_cfl.models.MLP, "
LOADED = {  # what only `predict` reads
    "an unknown argument": (write_settings(f"{MODEL}3: 1}}}}"), "unexpected keyword"),
    "an argument of text": (write_settings(f"{MODEL}hidden: abc}}}}"), "cannot take samples"),
    "a parent": (write_settings(f"{MODEL}parent: 3}}}}"), "model.module: parent must be"),
    "another shape": (save_again(sample_shape=[7, 8]), "other parameters than this module"),
    "models of another run": (save_again(run_id="x"), ANOTHER),
    "no index": (without("index"), "cannot be read: 'index'"),
    "no models": (without("models"), "cannot be read: 'models'"),
    "nobody with a model": (
        with_index(lambda index: np.full(K, -1)),
        "no client of the run has a model",
    ),
    "half a file": (lambda folder: os.truncate(folder / "final.npz", 700), "cannot be read"),
    "no clients": (lambda folder: (folder / C).unlink(), f"{C}: cannot be read: No such file"),
}


@pytest.mark.parametrize("name", BOTH)
def test_both_refuse(name, copy, tmp_path, monkeypatch):
    damage, says = BOTH[name]
    damage(copy)
    monkeypatch.setattr("fedjax_cfl.analysis.report.to_png", lambda figure: b"")
    one_line(says, report, [copy], tmp_path / "r.html")
    one_line(says, predict.main, [str(copy), "s.npz"])
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("name", LOADED)
def test_predict_refuses(name, copy):
    damage, says = LOADED[name]
    damage(copy)
    one_line(says, predict.main, [str(copy), "s.npz"])


def test_a_flipped_bit_of_values_is_refused(copy):
    """A page of values has a checksum; what describes the columns, at the end of a file, has none:
    there the values that are read are mostly the same.
    """
    whole, before = (copy / C).read_bytes(), read_clients(copy)
    described = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    found = {"refused": 0, "the same": 0}
    for place in range(0, described, 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (copy / C).write_bytes(damaged)
        try:
            after = read_clients(copy)
        except InputError as error:
            assert "\n" not in str(error)
            found["refused"] += 1
        else:
            found["the same"] += 1
            np.testing.assert_equal(after, before)
    assert found["refused"] > 3 * found["the same"] > 0, found


def test_a_split_of_nan_is_refused(copy):
    one_line(
        "split is nan in sample 2 and numbers in others",
        predict.main,
        [str(copy), "nan.npz"],
    )


def test_files_that_another_tool_wrote_again_are_read(copy, runs):
    """Columns may be left out or added, numbers stored as floats, and the run not be noted."""
    before = load_run(runs / "run")
    table = parquet.read_table(copy / C).to_pydict()
    del table["loss"], table["labels"]
    table |= {"group": [float(group) for group in table["group"]], "accuracy": [None] * K}
    parquet.write_table(pa.table(table | {"mine": [0.5] * K}), copy / C)
    again = load_run(copy)
    np.testing.assert_array_equal(again.table["group"], before.table["group"])
    assert np.isnan(again.table["accuracy"]).all() and again.table["group"].dtype == np.int64
    assert again.summary["clients"] == K
    assert refusal(again.find_client, "zoe").startswith("client=zoe")


@pytest.mark.parametrize(
    "values",
    [
        [True, False, True] * 5,
        [1, -2, 3],
        np.array([1.5, np.nan], np.float32)[::-1],
        np.arange(12, dtype=np.uint8).reshape(4, 3).T,
        ["a", "", "\u00e9\u4e2d"],
        [b"a", b"bc"],
        np.array(["2026-01-01"], "datetime64[D]"),
    ],
)
def test_columns_hold_what_they_are_given(values):
    assert str(to_arrow(values).to_pylist()) == str(np.asarray(values).tolist())
