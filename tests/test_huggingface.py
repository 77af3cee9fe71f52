"""Hugging Face data sets on the disk, written here by pyarrow alone as `datasets` writes them."""

import io
import json
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import one_line
from PIL import Image

from fedjax_cfl.data.datasets import image_files, readers
from fedjax_cfl.data.datasets.huggingface import huggingface
from fedjax_cfl.data.datasets.table_cells import Place, read_features

IMAGE = {"_type": "Image"}
LABEL = {"names": ["dog", "cat"], "_type": "ClassLabel"}
TEXT = {"dtype": "string", "_type": "Value"}
FEATURES = {"image": IMAGE, "label": LABEL, "writer_id": TEXT}
PIXELS = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def encode(pixels, kind="PNG", **more):
    """Returns an image file's bytes."""
    out = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(out, kind, **more)
    return out.getvalue()


def images(contents):
    return pa.array([c and {"bytes": c, "path": "a.png"} for c in contents], STRUCT)


def rows(**changes):
    """Returns a table of four images of two writers; a value None leaves its column out."""
    columns = {
        "image": images(map(encode, PIXELS)),
        "label": pa.array([0, 1, 1, 0]),
        "writer_id": pa.array(["w10", "w2", "w10", "w2"]),
    } | changes
    return pa.table({name: column for name, column in columns.items() if column is not None})


def save(folder, table, features=None, shards=1, state=None, **options):
    """Writes what `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: f for name, f in FEATURES.items() if name in table.column_names}
    info = {"features": known | (features or {}), "citation": "", "license": ""}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        part = table.slice(i * len(table) // shards, len(table) // shards)
        with pa.ipc.new_stream(folder / name, table.schema, **options) as out:
            out.write_table(part)
    good = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1"}
    good |= {"_format_type": None, "_format_columns": ["label"], "_split": None}
    (folder / "state.json").write_text(json.dumps(good | (state or {})))
    return folder


def save_dict(folder, **splits):
    """Writes what `DatasetDict.save_to_disk` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for name, table in splits.items():
        save(folder / name, table)
    return folder


def write_parquet(path, table, features=FEATURES):
    """Writes a file as the hub has it; without `features`, as any other tool does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"huggingface": json.dumps({"info": {"features": features}})} if features else {}
    pq.write_table(table.replace_schema_metadata(known), path)
    return path


def test_a_saved_data_set(tmp_path, capsys):
    pool = huggingface(save(tmp_path / "a", rows(), shards=2), client="writer_id")
    np.testing.assert_array_equal(pool.x, PIXELS)
    assert pool.x.dtype == np.uint8 and pool.test is None and pool.time is None
    assert pool.y.tolist() == [0, 1, 1, 0] and pool.class_names == ("dog", "cat")
    assert pool.client.tolist() == [0, 1, 0, 1] and pool.client_names == ("w10", "w2")
    assert capsys.readouterr().err == ""


def test_numbers_and_labels(tmp_path):
    values, marks = [0.5, -1.0, 2.0, 3.5], [[1, 0], [0, 0], [1, 1], [0, 1]]
    table = rows(price=pa.array(values, pa.float32()), marks=pa.array(marks))
    folder = save(tmp_path / "a", table)
    pool = huggingface(folder, y="price", num_classes=0)
    assert pool.y.tolist() == values and pool.num_classes == 0 and pool.class_names is None
    assert huggingface(folder, y="marks", num_classes=0).y.tolist() == marks
    assert huggingface(folder, y="label", num_classes=0).y.tolist() == [0, 1, 1, 0]
    one_line("expected one label a sample", huggingface, folder, y="marks")
    one_line("has type string, expected numbers", huggingface, folder, y="writer_id", num_classes=0)


def test_owners_that_are_not_used_are_mentioned(tmp_path, capsys):
    assert huggingface(save(tmp_path / "a", rows())).client is None
    assert "dataset.source.client=writer_id" in capsys.readouterr().err


def test_clients_of_digits_are_ordered_as_numbers(tmp_path):
    users = pa.array(["10", "2", "10", "30"])
    pool = huggingface(save(tmp_path / "a", rows(writer_id=users)), client="writer_id")
    assert pool.client.tolist() == [1, 0, 1, 2] and pool.client_names == (2, 10, 30)


def test_splits(tmp_path):
    test = rows().slice(0, 1)
    pool = huggingface(save_dict(tmp_path / "a", train=rows(), test=test), client="writer_id")
    assert pool.test.tolist() == [False] * 4 + [True]
    three = save_dict(tmp_path / "b", train=rows(), validation=test, test=rows())
    one_line("splits are train, validation, test, expected", huggingface, three)
    pool = huggingface(three, splits=["train", "validation"])
    assert pool.test.tolist() == [False] * 4 + [True]
    assert huggingface(three, splits=["validation"]).test is None
    # those of the data set come in any order
    turned = save_dict(tmp_path / "c", test=test, train=rows())
    assert huggingface(turned).test.tolist() in ([False] * 4 + [True], [True] + [False] * 4)
    for wrong in (["train", "val"], [], ["test", "test"]):
        error = one_line(f"splits={wrong}, expected", huggingface, three, splits=wrong)
        assert "splits are train, validation, test, and" in error
    one_line("has splits of its own", huggingface, tmp_path / "a", split="label")


def test_a_column_of_splits(tmp_path):
    for values in (["train", "test", "train", "test"], [0, 1, 0, 1]):
        folder = save(tmp_path / str(values[0]), rows(part=pa.array(values)))
        assert huggingface(folder, split="part").test.tolist() == [False, True] * 2
    folder = save(tmp_path / "a", rows(part=pa.array(["train", "validation"] * 2)))
    one_line(
        "split is 'validation' in sample 1, expected train or test",
        huggingface,
        folder,
        split="part",
    )


@pytest.mark.parametrize(
    "where", ["{0}-00000-of-00001.parquet", "data/{0}-00000-of-00001-0f.parquet",
              "plain_text/{0}-00000-of-00001.parquet", "default/{0}/0000.parquet",
              "{0}/0000.parquet", "{0}.parquet"]
)  # fmt: skip
def test_parquet_of_the_hub(where, tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / where.format(split), rows())
    (tmp_path / "README.md").write_text("---\n---")
    pool = huggingface(tmp_path, client="writer_id")
    np.testing.assert_array_equal(pool.x, np.concatenate([PIXELS, PIXELS]))
    assert sorted(pool.test.tolist()) == [False] * 4 + [True] * 4
    assert pool.class_names == ("dog", "cat")


def test_parquet_of_other_tools(tmp_path):
    write_parquet(tmp_path / "all.parquet", rows(label=pa.array(["no", "yes", "yes", "no"])), None)
    one_line(
        "no column holds images or arrays, expected dataset.source.x=NAME", huggingface, tmp_path
    )
    one_line("no column is of class labels", huggingface, tmp_path, x="image")
    pool = huggingface(tmp_path, x="image", y="label")
    np.testing.assert_array_equal(pool.x, PIXELS)
    assert pool.class_names == ("no", "yes") and pool.y.tolist() == [0, 1, 1, 0]


def test_columns_of_numbers_side_by_side_and_times(tmp_path):
    stamps = pa.array([10**12, 2 * 10**12, 10**12 + 999_999, 10**12], pa.timestamp("us"))
    table = pa.table({"a": [1.0, 2, 3, 4], "b": [5, 6, 7, 8], "y": [True, False] * 2, "at": stamps})
    write_parquet(tmp_path / "t.parquet", table, None)
    pool = huggingface(tmp_path, x=["b", "a"], y="y", time="at")
    assert pool.x.tolist() == [[5, 1], [6, 2], [7, 3], [8, 4]] and pool.y.tolist() == [1, 0, 1, 0]
    assert pool.time.tolist() == [0, 10**6, 0, 0]


@pytest.mark.parametrize("order", ["folders", "parquet"])
def test_partitions(order, tmp_path, capsys):
    for i in range(11):
        table = rows(label=pa.array([i % 2] * 4))
        if order == "folders":
            save(tmp_path / f"partition_{i}", table)
        else:
            write_parquet(tmp_path / f"partition_{i}.parquet", table)
    save(tmp_path / "centralized", rows())
    pool = huggingface(tmp_path)
    assert pool.client.tolist() == np.repeat(range(11), 4).tolist() and pool.client_names is None
    assert pool.y.tolist() == np.repeat(np.arange(11) % 2, 4).tolist()  # 0, 1, 2, ..., 10
    assert "centralized is of no client" in capsys.readouterr().err
    # a natural column beats the numbers of the folders
    assert huggingface(tmp_path, client="writer_id").client_names == ("w10", "w2")


def test_partitions_with_splits_of_their_own(tmp_path):
    for i in range(2):
        save_dict(tmp_path / f"partition_{i}", train=rows(), test=rows())
    pool = huggingface(tmp_path)
    assert pool.client.tolist() == ([0] * 4 + [1] * 4) * 2
    assert pool.test.tolist() == [False] * 8 + [True] * 8
    save(tmp_path / "partition_2", rows())
    one_line("partition_2 has splits [None] and partition_0", huggingface, tmp_path)


def test_partitions_that_do_not_belong_together(tmp_path):
    for i in (0, 1, 3):
        save(tmp_path / f"partition_{i}", rows())
    one_line("partition_2 is missing", huggingface, tmp_path)
    save(tmp_path / "partition_2", rows(more=pa.array([1, 2, 3, 4])))
    one_line("partition_2 has other columns than partition_0", huggingface, tmp_path)
    save(tmp_path / "partition_2", rows(), {"label": LABEL | {"names": ["cat", "dog"]}})
    one_line("column label has another type or other class names", huggingface, tmp_path)
    save(tmp_path / "partition_2", rows(label=pa.array([0, 1, 1, 0], pa.int8())))
    one_line("column label has another type or other class names", huggingface, tmp_path)
    save(tmp_path / "partition_02", rows())
    one_line("another one is there twice", huggingface, tmp_path)


# arrays and images


class Square(pa.ExtensionType):
    """Array2D as the package `datasets` has it, and a program may register it."""

    def __init__(self):
        super().__init__(pa.list_(pa.list_(pa.float32())), "datasets.features.Array2DExtensionType")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        return cls()


VALUES = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
NESTED = pa.array(VALUES.tolist(), pa.list_(pa.list_(pa.float32())))
ARRAY = {"shape": [2, 3], "dtype": "float32", "_type": "Array2D"}


@pytest.mark.parametrize("is_registered", [False, True])
def test_arrays_are_read_by_their_storage(is_registered, tmp_path):
    wrapped = pa.ExtensionArray.from_storage(Square(), NESTED)
    folder = save(tmp_path / "a", rows(image=wrapped), {"image": ARRAY})
    if is_registered:
        pa.register_extension_type(Square())
    try:
        np.testing.assert_array_equal(huggingface(folder).x, VALUES)
    finally:
        if is_registered:
            pa.unregister_extension_type("datasets.features.Array2DExtensionType")


def test_pickled_types_stay_closed(tmp_path, monkeypatch):
    """As versions of `datasets` of before 2024 wrote them."""
    monkeypatch.chdir(tmp_path)
    payload = pickle.dumps(Evil())
    name = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": payload}
    field = pa.field("image", NESTED.type, metadata=name)
    table = pa.table(
        [NESTED, pa.array([0, 1, 1, 0])], schema=pa.schema([field, ("label", pa.int64())])
    )
    folder = save(tmp_path / "a", table, {"image": ARRAY})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(huggingface(folder).x, VALUES)
    assert not (tmp_path / "pwned").exists()


class Evil:
    def __reduce__(self):
        return open, ("pwned", "w")


@pytest.mark.parametrize(
    ("feature", "column"),
    [
        ({"feature": {"dtype": "int32", "_type": "Value"}, "length": 6, "_type": "List"},
         pa.FixedSizeListArray.from_arrays(pa.array(VALUES.ravel()), 6)),
        ({"feature": {"dtype": "int32", "_type": "Value"}, "length": 6, "_type": "Sequence"},
         pa.array(VALUES.reshape(4, 6).tolist())),
        ([{"dtype": "int32", "_type": "Value"}],
         pa.array(VALUES.reshape(4, 6).tolist(), pa.list_(pa.float64(), 6)).slice(0)),
    ],
)  # fmt: skip
def test_lists_of_a_fixed_length(feature, column, tmp_path):
    folder = save(tmp_path / "a", rows(image=column), {"image": feature})
    np.testing.assert_array_equal(huggingface(folder).x, VALUES.reshape(4, 6))


def test_slices_of_arrays():
    """Whose buffers begin earlier: files have none, batches of Parquet may."""
    for array in (NESTED, pa.FixedSizeListArray.from_arrays(pa.array(VALUES.ravel()), 6)):
        x = read_features(Place(Path("x"), "x", 1, "."), array.slice(1, 2))
        np.testing.assert_array_equal(x.reshape(2, 6), VALUES[1:3].reshape(2, 6))


WIDE = (np.arange(6).reshape(2, 3) * 13107).astype(np.uint16)
COLOURS = np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8)
PALETTE = Image.fromarray(np.full((2, 3, 3), 99, np.uint8)).quantize(4)
TURNED = Image.Exif()
TURNED[0x0112] = 6


@pytest.mark.parametrize(
    ("content", "pixels"),
    [
        (encode(PIXELS[0]), PIXELS[0]),
        (encode(PIXELS[0] > 2), 255 * (PIXELS[0] > 2)),
        (encode(COLOURS), COLOURS),
        (encode(Image.fromarray(COLOURS).convert("RGBA")), COLOURS),
        (encode(PALETTE), np.full((2, 3, 3), 99)),
        (encode(WIDE), WIDE / np.float32(65535)),
        (encode(WIDE, "TIFF"), WIDE / np.float32(65535)),
        (encode(np.full((2, 3), 7, np.uint8), "JPEG", exif=TURNED), np.full((3, 2), 7)),
        (encode(COLOURS, "WEBP", lossless=True), COLOURS),
    ],
    ids=["grey", "bits", "rgb", "opaque", "palette", "16 bits", "TIFF", "turned", "WebP"],
)
def test_kinds_of_images(content, pixels, tmp_path):
    x = huggingface(save(tmp_path / "a", rows(image=images([content] * 4)))).x
    np.testing.assert_allclose(x[3], pixels, atol=0)
    assert x.dtype == (np.float32 if pixels.dtype == np.float32 else np.uint8)


BAD_IMAGES = {
    "null": (None, "in row 4 (the first is 1) has no bytes"),
    "no image": (b"hello", "in row 4: image cannot be read"),
    "cut": (encode(COLOURS[..., 0])[:-30], "in row 4: image cannot be"),
    "larger": (encode(np.zeros((3, 3), np.uint8)), "row[\"image\"].resize((3,2))})"),
    "coloured": (encode(COLOURS), "images are grey ("),
    "transparent": (encode(np.zeros((2, 3, 4), np.uint8)), "it is transparent"),
    "a GIF": (encode(PIXELS[0], "GIF"), "in row 4: image cannot be read"),
    "32 bits": (encode(Image.fromarray(WIDE.astype(np.int32)), "TIFF"), "pixels are I, neither"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_bad_images(name, tmp_path):
    content, says = BAD_IMAGES[name]
    good = [encode(pixels) for pixels in PIXELS[:3]]
    folder = save(tmp_path / "a", rows(image=images([*good, content])))
    error = one_line(says, huggingface, folder)
    assert "column image" in error and "expected" in error


def test_images_take_no_more_memory_than_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MOST_BYTES", 23)
    one_line("4 images as 2x3 take 24 bytes", huggingface, save(tmp_path / "a", rows()))


def test_paths_of_images_are_not_followed(tmp_path):
    (tmp_path / "a.png").write_bytes(encode(PIXELS[0]))
    paths = [{"bytes": None, "path": str(tmp_path / "a.png")}] * 4
    folder = save(tmp_path / "a", rows(image=pa.array(paths, STRUCT)))
    one_line(
        "in row 1 (the first is 1) has no bytes, at most a path, expected", huggingface, folder
    )


def test_text_may_be_stored_as_views(tmp_path):
    table = rows(writer_id=pa.array(list("dbca"), pa.string_view()))
    pool = huggingface(save(tmp_path / "a", table), client="writer_id")
    assert pool.client_names == ("a", "b", "c", "d") and pool.client.tolist() == [3, 1, 2, 0]


# tables that do not fit

PLAIN = pa.array([1.0, 2, 3, 4])
TABLES = {
    "hidden labels": (
        {"label": pa.array([0, -1, 1, 0])},
        {},
        "label is -1 in row 2 of all (the first is 1), expected labels",
    ),
    "no label": (
        {"label": pa.array([0, 1, None, 0])},
        {},
        "label has no value in row 3 (the first is 1), expected one",
    ),
    "a class too many": (
        {"label": pa.array([0, 1, 2, 0])},
        {},
        "is 2 in row 3 of all (the first is 1), expected one of its 2",
    ),
    "labels in lists": (
        {"label": pa.array([[0], [1], [0], [1]])},
        {"y": "label"},
        "one label a sample",
    ),
    "text as classes": (
        {"image": pa.array(list("abcd"))},
        {"x": "image"},
        "expected numbers or images",
    ),
    "no owner": (
        {"writer_id": pa.array(["a", None, "b", "a"])},
        {"client": "writer_id"},
        "writer_id has no value in row 2",
    ),
    "owners in lists": (
        {"writer_id": pa.array([[1]] * 4)},
        {"client": "writer_id"},
        "expected numbers",
    ),
    "no such column": ({}, {"x": "img"}, "column 'img' is missing, expected one of image"),
    "no such label": ({}, {"y": "labels"}, "column 'labels' is missing, expected one of image"),
    "null in x": (
        {"image": pa.array([1, None, 2, 3])},
        {"x": "image"},
        "image has no value in row 2",
    ),
    "lists of two lengths": (
        {"image": pa.array([[1], [1, 2], [1], [1]])},
        {"x": "image"},
        "lists of 1 and, in row 2 (the first is 1), of 2 values",
    ),
    "empty lists": (
        {"image": pa.array([[]] * 4, pa.list_(pa.int8()))},
        {"x": "image"},
        "at least one feature",
    ),
    "null in a list": ({"image": pa.array([[1, None]] * 4)}, {"x": "image"}, "no value in row 1"),
    "only nulls": ({"image": pa.nulls(4)}, {"x": "image"}, "type null, expected numbers"),
    "views": ({"image": pa.array([[1]] * 4, pa.list_view(pa.int8()))}, {"x": "image"}, "list_view"),
    "half a client": (
        {"writer_id": pa.array([0.5, 1, 2, 3])},
        {"client": "writer_id"},
        "client is 0.5",
    ),
    "times of text": ({}, {"time": "writer_id"}, "has type string, expected numbers"),
    "several columns of images": (
        {},
        {"x": ["image", "label"]},
        "column image holds images, expected it as the only one of x",
    ),
    "a regression": (
        {"label": pa.array([0.5, 1.5, 2, 3])},
        {"y": "label"},
        "looks like a target to regress",
    ),
    "few classes": ({}, {"num_classes": 1}, "num_classes=1, expected null or at least 2"),
}


@pytest.mark.parametrize("kind", ["stream", "parquet"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_that_do_not_fit(name, kind, tmp_path):
    changes, options, says = TABLES[name]
    table = rows(**changes)
    known = {n: None for n in changes if n != "label" or "y" in options}
    features = {n: f for n, f in FEATURES.items() if n not in known}
    if kind == "stream":
        folder = save(tmp_path / "a", table)
        (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    else:
        try:
            write_parquet(tmp_path / "a" / "train.parquet", table, features)
        except pa.ArrowNotImplementedError:
            pytest.skip("Parquet has no such type")
        folder = tmp_path / "a"
    assert str(folder) in one_line(says, huggingface, folder, **options)


def test_several_candidates(tmp_path):
    more = {"coarse": pa.array([0, 0, 1, 1]), "other": images(map(encode, PIXELS))}
    folder = save(tmp_path / "a", rows(**more), {"coarse": LABEL, "other": IMAGE})
    one_line("columns image, other all hold images", huggingface, folder)
    one_line("label, coarse are both class labels, expected dataset.source.y=NAME", huggingface,
             folder, x="image")  # fmt: skip
    assert huggingface(folder, x="image", y="coarse").y.tolist() == [0, 0, 1, 1]
    twice = pa.table([PLAIN, PLAIN, pa.array([0, 1, 0, 1])], names=["a", "a", "y"])
    one_line(
        "column 'a' is there 2 times, expected once",
        huggingface,
        save(tmp_path / "b", twice),
        x="a",
        y="y",
    )


# folders and files that are no data set, or a stranger's

STATES = {
    "an index file": ({"_indices_data_files": [{"filename": "i.arrow"}]}, "flatten_indices()"),
    "no files": ({"_data_files": []}, "_data_files are missing"),
    "files of text": ({"_data_files": ["a.arrow"]}, "_data_files are missing"),
    "a folder above": ({"_data_files": [{"filename": "../a.arrow"}]}, "names the file '../a"),
    "an absolute path": ({"_data_files": [{"filename": "/etc/passwd"}]}, "names the file '/etc/"),
    "a drive": ({"_data_files": [{"filename": "C:a.arrow"}]}, "names the file 'C:a.arrow'"),
    "a number": ({"_data_files": [{"filename": 3}]}, "names the file a int"),
    "a file twice": ({"_data_files": [{"filename": "data-00000-of-00001.arrow"}] * 2}, "twice"),
    "an absent file": ({"_data_files": [{"filename": "b.arrow"}]}, "b.arrow: file cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_states_that_do_not_fit(name, tmp_path):
    state, says = STATES[name]
    error = one_line(says, huggingface, save(tmp_path / "a", rows(), state=state))
    assert "expected" in error


def test_links_that_leave_the_folder(tmp_path):
    folder, file = save(tmp_path / "a", rows()), "data-00000-of-00001.arrow"
    os.rename(folder / file, tmp_path / file)
    (folder / file).symlink_to(tmp_path / file)
    one_line("is a link that leaves the folder", huggingface, folder)
    parts = save_dict(tmp_path / "b", train=rows())
    os.rename(parts / "train", tmp_path / "train")
    (parts / "train").symlink_to(tmp_path / "train")
    one_line("is a link that leaves the folder", huggingface, parts)


def test_json_that_does_not_fit(tmp_path, monkeypatch):
    folder = save(tmp_path / "a", rows())
    for name in ("state.json", "dataset_info.json"):
        good = (folder / name).read_text()
        for content, says in (
            ("[" * 100_000, "not JSON"),
            ("[]", "holds a list"),
            ("{", "not JSON"),
        ):
            (folder / name).write_text(content)
            assert name in one_line(says, huggingface, folder)
        (folder / name).write_text(good)
    for wrong in ({}, {"features": []}, {"features": {"label": 3}}):
        (folder / "dataset_info.json").write_text(json.dumps(wrong))
        one_line("features are missing or none", huggingface, folder)
    for names in (3, [], ["a", "a"], [1, 2]):
        save(folder, rows(), {"label": {"names": names, "_type": "ClassLabel"}})
        one_line("names of its classes are none", huggingface, folder)
    monkeypatch.setattr("fedjax_cfl.data.datasets.huggingface_folder.MOST_JSON_BYTES", 50)
    one_line("longer than 50 bytes", huggingface, folder)
    for splits in (3, [], ["train", "train"], ["../a"], ["a/b"], [1]):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        assert "expected" in one_line("dataset_dict.json", huggingface, tmp_path)


def test_folders_that_are_no_data_set(tmp_path):
    one_line("folder cannot be read", huggingface, tmp_path / "absent")
    (tmp_path / "file").write_text("")
    one_line("folder cannot be read", huggingface, tmp_path / "file")
    one_line("holds no data set", huggingface, tmp_path)
    (tmp_path / "cache").mkdir()
    for name in ("dataset_info.json", "mnist-train.arrow"):
        (tmp_path / "cache" / name).write_text("")
    one_line("holds a cache of datasets (no state.json)", huggingface, tmp_path / "cache")
    for config in ("fine", "coarse"):
        write_parquet(tmp_path / "hub" / config / "train-00000-of-00001.parquet", rows())
    one_line("holds the configurations coarse, fine", huggingface, tmp_path / "hub")
    write_parquet(tmp_path / "some" / "train-00000-of-00002.parquet", rows())
    one_line("1 files train-*-of-00002.parquet, expected all 2", huggingface, tmp_path / "some")


def test_damaged_and_hostile_files(tmp_path, monkeypatch):
    folder = save(tmp_path / "a", rows())
    path = folder / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    for content in (b"", b"ARROW1\0\0" + whole, whole[: len(whole) // 2], whole[:40]):
        path.write_bytes(content)
        one_line("data-00000-of-00001.arrow: file cannot be read", huggingface, folder)
    offsets = [np.array(ends, "<i4").tobytes() for ends in ([0, 3, 5, 8, 10], [0, 3, 5, 8, 2**30])]
    assert whole.count(offsets[0]) == 1
    path.write_bytes(whole.replace(*offsets))  # would read what lies behind the file
    one_line("file cannot be read", huggingface, folder, client="writer_id")
    path.unlink()
    os.mkfifo(path)
    one_line("not a regular file", huggingface, folder)
    path.unlink()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    save(folder, rows(), options=options)  # what it unpacks to is what the file claims
    one_line("its values are compressed", huggingface, folder)
    parquet = write_parquet(tmp_path / "b" / "train.parquet", rows())
    whole = parquet.read_bytes()
    for content in (b"", b"PAR1", whole[:-20], whole[: len(whole) // 2]):
        parquet.write_bytes(content)
        one_line("train.parquet: file cannot be read", huggingface, tmp_path / "b")
    # rows of one long text take few bytes in the file, and in memory
    monkeypatch.setattr(readers, "MAX_UNPACKED_BYTES", 2**22)
    long = pa.array(["z" * 2**16] * 1000).dictionary_encode().cast(pa.string())
    table = pa.table({"x": np.zeros(1000), "y": np.arange(1000) % 2, "c": long})
    pq.write_table(table, parquet)
    assert parquet.stat().st_size < 2**18
    assert huggingface(tmp_path / "b", x="x", y="y", client="c").client_names == ("z" * 2**16,)
    many = pa.table({"x": np.zeros(2**19), "y": np.zeros(2**19, np.int8), "c": np.arange(2**19)})
    pq.write_table(many, parquet)
    assert parquet.stat().st_size < 2**23
    one_line("columns take", huggingface, tmp_path / "b", x="x", y="y", client="c")
    monkeypatch.setattr(readers, "MAX_UNPACKED_BYTES", 2**22 + 2**20)
    assert len(huggingface(tmp_path / "b", x="x", y="y").y) == 2**19  # others are never read


@pytest.mark.nightly
def test_a_run(fedjax_cfl, tmp_path):
    for i in range(3):
        save_dict(tmp_path / "mine" / f"partition_{i}", train=rows(), test=rows())
    line = "dataset=huggingface algorithm=fedavg rounds=2 clients_per_round=3 run_dir=run"
    status, out, error = fedjax_cfl(f"{line} dataset.source.path=mine")
    assert status == 0 and error == "" and out.startswith("fedavg on huggingface: 3 clients, 2 cl")
    status, out, error = fedjax_cfl(f"{line} dataset.source.path=mine dataset.source.y=labels")
    assert status == 2 and "column 'labels' is missing" in error and error.count("\n") == 1
    status, out, error = fedjax_cfl(f"{line} dataset.source.path=mine dataset.source.x=3")
    assert status == 2 and "dataset.source.x=3: must be null, the name of a column" in error
