"""Data sets of Hugging Face, written and read by its package `datasets`."""

import datetime
import importlib.util
import sys

import numpy as np
import pytest
from conftest import one_line
from PIL import Image

from fedjax_cfl.data.datasets import huggingface

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None,
    reason="the package datasets is missing: pip install 'fedjax-cfl[huggingface]'",
)
PIXELS = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
COLOURS = np.random.default_rng(0).integers(0, 256, (4, 2, 3, 3), np.uint8)
ARRAYS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 2, 3)


def test_the_package_is_asked_for(fedjax_cfl, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    status, out, error = fedjax_cfl("dataset=huggingface dataset.source.path=a algorithm=fedavg")
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert "pip install 'fedjax-cfl[huggingface]'" in error


@pytest.fixture
def hf(tmp_path, monkeypatch):
    """Returns the package, which keeps its copies here and asks nobody."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


def rows(hf, **changes):
    """Returns four images of two writers; a column is given as (feature, values), None leaves it
    out.
    """
    label = hf.ClassLabel(names=["dog", "cat"])
    columns = {
        "image": (hf.Image(), [Image.fromarray(pixels) for pixels in PIXELS]),
        "label": (label, [0, 1, 1, 0]),
        "writer_id": (hf.Value("string"), ["w10", "w2", "w10", "w2"]),
    } | changes
    held = {name: column for name, column in columns.items() if column is not None}
    features = hf.Features({name: feature for name, (feature, _) in held.items()})
    return hf.Dataset.from_dict({name: values for name, (_, values) in held.items()}, features)


def save(folder, table, **options):
    table.save_to_disk(folder, **options)
    return folder


@needs_datasets
def test_a_saved_data_set(hf, tmp_path, capsys):
    folder = save(tmp_path / "a", rows(hf), num_shards=2)
    pool = huggingface(folder, client="writer_id")
    np.testing.assert_array_equal(pool.x, PIXELS)
    assert pool.x.dtype == np.uint8 and pool.test is None and pool.time is None
    assert pool.y.tolist() == [0, 1, 1, 0] and pool.class_names == ("dog", "cat")
    assert pool.client.tolist() == [0, 1, 0, 1] and pool.client_names == ("w10", "w2")
    assert capsys.readouterr().err == ""
    one_line("splits are none, and dataset.source.splits=", huggingface, folder, splits=["train"])
    assert huggingface(folder).client is None
    assert "dataset.source.client=writer_id" in capsys.readouterr().err


@needs_datasets
def test_rows_that_were_chosen_and_mixed(hf, tmp_path):
    folder = save(tmp_path / "a", rows(hf).select([3, 1]))
    pool = huggingface(folder, client="writer_id")
    np.testing.assert_array_equal(pool.x, PIXELS[[3, 1]])
    assert pool.y.tolist() == [0, 1] and pool.class_names == ("dog", "cat")


@needs_datasets
def test_numbers_and_labels(hf, tmp_path):
    values, marks = [0.5, -1.0, 2.0, 3.5], [[1, 0], [0, 0], [1, 1], [0, 1]]
    more = {"price": (hf.Value("float32"), values), "marks": (hf.List(hf.Value("int8")), marks)}
    more["kind"] = rows(hf).features["label"], [0, 1, 1, 0]
    folder = save(tmp_path / "a", rows(hf, **more))
    pool = huggingface(folder, y="price", num_classes=0)
    assert pool.y.tolist() == values and pool.num_classes == 0 and pool.class_names is None
    assert huggingface(folder, y="marks", num_classes=0).y.tolist() == marks
    assert huggingface(folder, y="label", num_classes=0).y.tolist() == [0, 1, 1, 0]
    pool = huggingface(folder, x=["price", "label"], y="writer_id", client="kind")
    assert pool.x.tolist() == [[0.5, 0], [-1, 1], [2, 1], [3.5, 0]]
    assert pool.class_names == ("w10", "w2") and pool.client_names == ("cat", "dog")


@needs_datasets
def test_arrays_lists_and_times(hf, tmp_path):
    days = [datetime.datetime(2020, 1, day) for day in (2, 1, 1, 3)]
    more = {
        "image": None,
        "array": (hf.Array2D((2, 3), "float32"), list(ARRAYS)),
        "bytes": (hf.Array2D((2, 3), "uint8"), list(PIXELS)),
        "list": (hf.List(hf.Value("int32"), length=6), PIXELS.reshape(4, 6).tolist()),
        "at": (hf.Value("timestamp[us]"), days),
    }
    folder = save(tmp_path / "a", rows(hf, **more))
    pool = huggingface(folder, x="array", time="at")
    np.testing.assert_array_equal(pool.x, ARRAYS)
    assert pool.time.tolist() == [86400, 0, 0, 2 * 86400]
    pool = huggingface(folder, x="bytes")
    np.testing.assert_array_equal(pool.x, PIXELS)
    assert pool.x.dtype == np.uint8
    np.testing.assert_array_equal(huggingface(folder, x="list").x, PIXELS.reshape(4, 6))
    one_line("columns array, bytes are arrays, expected dataset.source.x=NAME", huggingface, folder)


@needs_datasets
def test_kinds_of_images(hf, tmp_path):
    wide = PIXELS.astype(np.uint16) * 1000
    for name, images, x in (
        ("colours", COLOURS, COLOURS),
        ("wide", wide, wide.astype(np.float32) / 65535),
    ):
        column = hf.Image(), [Image.fromarray(pixels) for pixels in images]
        folder = save(tmp_path / name, rows(hf, image=column))
        np.testing.assert_array_equal(huggingface(folder).x, x)
    assert huggingface(tmp_path / "colours", size=[5, 4], mode="grey").x.shape == (4, 5, 4)
    mixed = hf.Image(), [Image.fromarray(COLOURS[0]), *map(Image.fromarray, PIXELS[1:])]
    one_line(
        "or mode=rgb or mode=grey", huggingface, save(tmp_path / "mixed", rows(hf, image=mixed))
    )


@needs_datasets
def test_splits(hf, tmp_path):
    test = rows(hf).select([0])
    folder = save(tmp_path / "a", hf.DatasetDict(train=rows(hf), test=test))
    pool = huggingface(folder, client="writer_id")
    assert pool.test.tolist() == [False] * 4 + [True] and len(pool.x) == 5
    one_line("has splits of its own", huggingface, folder, split="label")
    three = save(tmp_path / "b", hf.DatasetDict(train=rows(hf), validation=test, test=rows(hf)))
    one_line("splits are train, validation, test, expected", huggingface, three)
    pool = huggingface(three, splits=["train", "validation"])
    assert pool.test.tolist() == [False] * 4 + [True]
    assert huggingface(three, splits=["validation"]).test is None
    parts = hf.ClassLabel(names=["train", "test"]), [0, 1, 0, 1]
    folder = save(tmp_path / "c", rows(hf, part=parts))
    assert huggingface(folder, y="label", split="part").test.tolist() == [False, True] * 2


@needs_datasets
@pytest.mark.parametrize("where", ["{0}-00000-of-00001.parquet", "default/{0}/0000.parquet"])
def test_parquet_of_the_hub(where, hf, tmp_path):
    for split in ("train", "test"):
        path = tmp_path / "a" / where.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows(hf).to_parquet(path)
    pool = huggingface(tmp_path / "a", client="writer_id")
    np.testing.assert_array_equal(pool.x, np.concatenate([PIXELS, PIXELS]))
    assert pool.test.tolist() == [False] * 4 + [True] * 4 and pool.class_names == ("dog", "cat")


@needs_datasets
@pytest.mark.parametrize("kind", ["folders", "parquet"])
def test_partitions(kind, hf, tmp_path, capsys):
    root = tmp_path / "a"
    root.mkdir()
    for i in range(11):
        table = rows(hf, label=(hf.ClassLabel(names=["dog", "cat"]), [i % 2] * 4))
        if kind == "folders":
            save(root / f"partition_{i}", table)
        else:
            table.to_parquet(root / f"partition_{i}.parquet")
    (root / "centralized").mkdir()
    pool = huggingface(root)
    assert pool.client.tolist() == np.repeat(range(11), 4).tolist() and pool.client_names is None
    assert pool.y.tolist() == np.repeat(np.arange(11) % 2, 4).tolist()  # 0, 1, 2, ..., 10
    assert "centralized is of no client" in capsys.readouterr().err
    # a natural column beats the numbers of the folders
    assert huggingface(root, client="writer_id").client_names == ("w10", "w2")


@needs_datasets
def test_partitions_with_splits_of_their_own(hf, tmp_path):
    for i in (0, 1):
        save(tmp_path / f"partition_{i}", hf.DatasetDict(train=rows(hf), test=rows(hf)))
    pool = huggingface(tmp_path)
    assert pool.client.tolist() == ([0] * 4 + [1] * 4) * 2
    assert pool.test.tolist() == [False] * 8 + [True] * 8
    save(tmp_path / "partition_3", rows(hf))
    one_line("partition_2 is missing", huggingface, tmp_path)
    save(tmp_path / "partition_2", rows(hf))
    one_line("partition_2 has splits [None] and partition_0 ['train', 'test']", huggingface,
             tmp_path)  # fmt: skip


@needs_datasets
def test_what_does_not_fit(hf, tmp_path):
    label, folder = hf.ClassLabel(names=["dog", "cat"]), save(tmp_path / "a", rows(hf))
    one_line("Column name", huggingface, folder, y="labels")
    one_line("column label is y, client", huggingface, folder, client="label")
    hidden = save(tmp_path / "b", rows(hf, label=(label, [-1] * 4)))
    one_line("this split is published without them", huggingface, hidden)
    two = save(tmp_path / "c", rows(hf, other=(label, [0] * 4)))
    one_line("columns label, other are class labels, expected dataset.source.y=", huggingface, two)
    none = save(tmp_path / "d", rows(hf, image=None))
    one_line("no column holds images or arrays or lists", huggingface, none)
    for i, names in enumerate((["dog", "cat"], ["cat", "dog"])):
        part = hf.ClassLabel(names=names), [0, 1, 1, 0]
        save(tmp_path / "e" / f"partition_{i}", rows(hf, label=part))
    one_line("data set cannot be read", huggingface, tmp_path / "e")


@needs_datasets
def test_damaged_and_absent_files(hf, tmp_path):
    one_line("no such folder", huggingface, tmp_path / "absent")
    one_line("data set cannot be read", huggingface, tmp_path)
    folder = save(tmp_path / "a", rows(hf))
    file = next(folder.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:300])
    one_line("data set cannot be read", huggingface, folder)
    (folder / "state.json").write_text("[")
    one_line("data set cannot be read", huggingface, folder)


@needs_datasets
@pytest.mark.nightly
def test_a_run(fedjax_cfl, hf, tmp_path):
    for i in range(3):
        save(tmp_path / f"mine/partition_{i}", hf.DatasetDict(train=rows(hf), test=rows(hf)))
    line = "dataset=huggingface algorithm=fedavg rounds=2 clients_per_round=3 run_dir=run"
    status, out, error = fedjax_cfl(f"{line} dataset.source.path={tmp_path}/mine")
    assert status == 0 and error == "" and out.startswith("fedavg on huggingface: 3 clients, 2 cl")
    status, out, error = fedjax_cfl(f"{line} dataset.source.path=mine dataset.source.x=3")
    assert status == 2 and "dataset.source.x=3: must be null, text or a list of names" in error
