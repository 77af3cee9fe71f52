"""Frames of pandas: the same pool from memory and from files, pandas' own traps, and those of real
files, each of which is met once, for all kinds of files.
"""

import datetime
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from conftest import one_line
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_cfl as cfl
from fedjax_cfl.data.datasets import csv, jsonl, parquet
from fedjax_cfl.formatting import clean_name

READERS = {"csv": csv, "jsonl": jsonl, "parquet": parquet}


def write(frame, path):
    """Writes a frame by pandas, in the format of the path's ending."""
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True, double_precision=15, date_format="iso")
    else:
        frame.to_parquet(path)


def same(pool, other):
    """Asserts that two pools have equal values of equal types, and x as models take them."""
    assert pool.x.dtype.kind == other.x.dtype.kind
    pools = (each._replace(x=np.float32(each.x)) for each in (pool, other))
    for name, one, two in zip(pool._fields, *pools, strict=True):
        np.testing.assert_array_equal(one, two, name)
        assert getattr(one, "dtype", type(one)) == getattr(two, "dtype", type(two))


NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32"]
NUMBERS += ["float64", "bool", "Int64", "Float64", "boolean", "int64[pyarrow]", "double[pyarrow]"]
NUMBERS += ["float16", "Int8", "UInt32", "object int64", "category int64", "category float64"]
TEXTS = ["str", "object", "category", "string", "string[pyarrow]"]
LABELS = ["int8", "uint64", "float32", "Int64", "boolean", "bool", "category int64", "object int64"]
TIMES = ["datetime64[s]", "datetime64[ns]", "datetime64[us, UTC]", "datetime64[ns, Asia/Tokyo]"]
WORDS = st.text("abc NA.é1", min_size=1, max_size=5).filter(lambda word: word.strip())
WORDS |= st.sampled_from(["NA", "None", "nan", "null", "1.0", "01", "cafe\u0301", " b", "-", "1e5"])


@st.composite
def frames(draw):
    """Returns a frame with a column of each part, of drawn types."""
    rows = draw(st.integers(2, 12))
    columns = {}
    for name in "pq":
        dtype = draw(st.sampled_from(NUMBERS))
        columns[name] = make_column(draw, dtype, numbers_of(dtype.split()[-1]), rows)
    for name in ("y", "client"):
        words = ["word", *draw(st.lists(WORDS, min_size=rows - 1, max_size=rows - 1))]
        columns[name] = pd.Series(words, dtype=draw(st.sampled_from(TEXTS)))
    if draw(st.booleans()):
        ids = st.integers(-(2**40), 2**40)
        ids = pd.Series(draw(st.lists(ids, min_size=rows, max_size=rows)))
        columns["client"] = ids.astype(draw(st.sampled_from(["int64", "float64", "Int64"])))
    elif draw(st.booleans()):
        columns["client"] = columns["client"].astype(str).str.encode("utf-8")
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(LABELS))
        numbers = st.booleans() if "bool" in dtype else st.integers(0, 19)
        columns["y"] = make_column(draw, dtype, numbers, rows)
    days = st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2037, 1, 1))
    when = pd.Series(draw(st.lists(days, min_size=rows, max_size=rows)))
    dtype = draw(st.sampled_from(TIMES))
    when = when.dt.floor("s").dt.tz_localize("UTC") if "," in dtype else when.dt.floor("s")
    columns["when"] = when.astype(dtype)
    return pd.DataFrame(columns)


def make_column(draw, dtype, values, rows):
    """Returns a column of drawn values, stored as one type and then, if two are named, as another:
    "category int64" are categories of whole numbers.
    """
    outer, _, inner = dtype.rpartition(" ")
    column = pd.Series(draw(st.lists(values, min_size=rows, max_size=rows)), dtype=inner)
    return column.astype(outer) if outer else column


def numbers_of(dtype):
    if "bool" in dtype:
        return st.booleans()
    if dtype == "float16":  # of which pandas writes the shortest decimals to a CSV
        return st.integers(-2048, 2048)
    if "loat" in dtype or "double" in dtype:
        return st.integers(-(2**40), 2**40).map(lambda n: n / 1024)  # JSON of pandas has 15 digits
    info = np.iinfo(dtype.partition("[")[0].lower())
    return st.integers(int(info.min), int(info.max))


@settings(max_examples=30, deadline=None)
@given(frame=frames())
def test_files_of_all_kinds_are_the_pool_of_the_frame(frame, tmp_path_factory):
    parts = dict(y="y", client="client", time="when", num_classes=len(frame) + 20)
    pool = cfl.from_frame(frame, x=["p", "q"], **parts)
    packed = isinstance(frame["client"].iloc[0], bytes)  # which a text file has no word for
    for kind, read in READERS.items() if not packed else [("parquet", parquet)]:
        path = tmp_path_factory.mktemp("t") / f"a.{kind}"
        write(frame, path)
        same(read(path, x=["p", "q"], **parts), pool)
    same(cfl.from_frame(pa.Table.from_pandas(frame), x=["p", "q"], **parts), pool)
    names = [clean_name(word) for word in frame["y"]]
    assert [str(y) if pool.class_names is None else pool.class_names[y] for y in pool.y] == names


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(-3e38, 3e38), min_size=2, max_size=9))
def test_floats_of_a_csv_are_exact(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "a.csv"
    pd.DataFrame({"y": values, "a": values}).to_csv(path, index=False)
    pool = csv(path, "y", x="a", num_classes=0)
    np.testing.assert_array_equal(pool.x[:, 0], values)  # what float32 rounds stays exact
    np.testing.assert_array_equal(pool.y, np.array(values, np.float32))


def test_pandas_waits_until_a_table_is_read():
    code = "import sys, fedjax_cfl as cfl; cfl.from_frame, cfl.run; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# traps, where x is not named


ROWS = 40
RNG = np.random.default_rng(0)
SOUND = {
    "a": RNG.normal(size=ROWS),
    "b": RNG.normal(size=ROWS),
    "y": RNG.integers(0, 2, ROWS),
}


def read_as(kind, frame, tmp_path, **parts):
    """Returns the pool of a frame that was written as a kind of file, or of itself."""
    if kind == "frame":
        return cfl.from_frame(frame, **{"y": "y", **parts})
    write(frame, tmp_path / f"a.{kind}")
    return READERS[kind](tmp_path / f"a.{kind}", **{"y": "y", **parts})


@pytest.mark.parametrize("kind", ["frame", *READERS])
@pytest.mark.parametrize(
    "name", ["Unnamed: 0", "Unnamed: 0.1", "index", "Id", "ID", "row", "sample_id", "level_0"]
)
def test_row_numbers_are_left_out_unless_they_are_named(name, kind, tmp_path, capsys):
    frame = pd.DataFrame({name: RNG.permutation(ROWS) + 7, **SOUND})
    pool = read_as(kind, frame, tmp_path)
    assert pool.columns == ("a", "b")
    assert f"columns '{name}' are row numbers and not used" in capsys.readouterr().err
    pool = read_as(kind, frame, tmp_path, x=[name, "a"])
    assert pool.columns == (name, "a") and capsys.readouterr().err == ""


def test_an_index_that_was_written_twice_is_left_out(tmp_path):
    pd.DataFrame(SOUND).to_csv(tmp_path / "a.csv")
    pd.read_csv(tmp_path / "a.csv").to_csv(tmp_path / "a.csv")
    pd.read_csv(tmp_path / "a.csv").to_csv(tmp_path / "a.csv")
    assert csv(tmp_path / "a.csv", "y").columns == ("a", "b")
    pd.DataFrame(SOUND).iloc[::2].to_parquet(tmp_path / "a.parquet")
    assert parquet(tmp_path / "a.parquet", "y").columns == ("a", "b")
    named = pd.DataFrame(SOUND, index=pd.Index(list("uv") * (ROWS // 2), name="who"))
    for frame in (named, pa.Table.from_pandas(named)):
        assert cfl.from_frame(frame, "y", client="who").client_names == ("u", "v")


@pytest.mark.parametrize("kind", ["frame", *READERS])
def test_an_empty_column_is_left_out_unless_it_is_named(kind, tmp_path, capsys):
    frame = pd.DataFrame({"none": [None] * ROWS, **SOUND, "nan": np.full(ROWS, np.nan)})
    for text in (False, True):
        assert read_as(kind, frame, tmp_path, number_text=text).columns == ("a", "b")
    said = capsys.readouterr().err
    assert said.count("columns 'none', 'nan' are empty and not used\n") == said.count("\n") == 2
    one_line("column nan has no value in row 1", read_as, kind, frame, tmp_path, x=["a", "nan"])
    frame["id"] = np.arange(ROWS)
    read_as(kind, frame, tmp_path)
    assert "; columns 'id' are row numbers and not used; name the" in capsys.readouterr().err


@pytest.mark.parametrize("kind", READERS)
def test_a_column_is_empty_where_all_files_have_none_of_it(kind, tmp_path):
    sides = {side: pd.DataFrame({**SOUND, "c": [None] * ROWS}) for side in ("train", "test")}
    files = {f"{side}.{kind}": frame for side, frame in sides.items()}
    pool = READERS[kind](write_folder(tmp_path, **files), "y")
    assert pool.columns == ("a", "b") and pool.test.sum() == ROWS
    files[f"test.{kind}"] = sides["test"].assign(c=1.5)
    one_line(f"column c has no value in row 1 of train.{kind}", READERS[kind],
             write_folder(tmp_path, **files), "y")  # fmt: skip
    files[f"test.{kind}"] = sides["test"].assign(c="word")
    assert READERS[kind](write_folder(tmp_path, **files), "y").columns == ("a", "b")
    files[f"test.{kind}"] = sides["test"].drop(columns="c")
    assert READERS[kind](write_folder(tmp_path, **files), "y").columns == ("a", "b")


@pytest.mark.parametrize("index", ["key", ["key", None]])
@pytest.mark.parametrize("kind", ["frame", "arrow", "file", "folder"])
def test_an_index_is_no_feature_unless_it_is_named(kind, index, tmp_path, capsys):
    frame = pd.DataFrame({**SOUND, "key": np.repeat(RNG.permutation(ROWS // 4) * 7, 4)})
    keys = [frame[name] if name else frame.index for name in np.atleast_1d(index)]
    frame = frame.drop(columns="key").set_index(keys)
    read, path = cfl.from_frame, frame
    if kind == "arrow":
        path = pa.Table.from_pandas(frame)
    elif kind != "frame":
        files = {f"{name}.parquet": frame for name in ("ab" if kind == "folder" else "a")}
        read, path = parquet, write_folder(tmp_path, **files)
        path = path if kind == "folder" else path / "a.parquet"
    assert read(path, "y").columns == ("a", "b")
    said = "columns 'key'" if index == "key" else "columns 'key', 'level_1'"
    assert f"{said} are the index and not used" in capsys.readouterr().err
    assert len(read(path, "y", client="key").client_names) == ROWS // 4
    assert read(path, "key", num_classes=0).columns == ("a", "b", "y")
    assert read(path, "y", x=["a", "key"]).columns == ("a", "key")


@pytest.mark.parametrize("kind", ["frame", *READERS])
@pytest.mark.parametrize(
    ("column", "says"),
    [
        (np.arange(ROWS), "column c counts the rows, 0, 1, ..., expected a feature"),
        (np.arange(ROWS) + 1, "column c counts the rows, 1, 2, ..., expected a feature"),
        (SOUND["y"] + 1, "column c tells y alone (each of its 2 values comes with one label)"),
        (5.5 * SOUND["y"], "column c tells y alone"),
        (SOUND["y"] + 2 * (np.arange(ROWS) % 2), "column c tells y alone (each of its 4 values"),
    ],
)
def test_what_is_hardly_a_feature_is_refused_unless_it_is_named(column, says, kind, tmp_path):
    frame = pd.DataFrame({**SOUND, "c": column})
    one_line(says, read_as, kind, frame, tmp_path)
    assert read_as(kind, frame, tmp_path, x=["c", "a"]).columns == ("c", "a")
    assert read_as(kind, frame.head(10), tmp_path).columns == ("a", "b", "c")  # by chance


def test_rows_are_counted_in_each_file(tmp_path):
    counted = pd.DataFrame({"Id": np.arange(ROWS) + 1, **SOUND})
    steps = counted.rename(columns={"Id": "step"}).astype({"step": float})
    for name in ("a", "b"):
        write(counted, tmp_path / f"{name}.csv")
    assert csv(tmp_path, "y").columns == ("a", "b")
    for name in ("a", "b"):
        write(steps, tmp_path / f"{name}.csv")
    one_line("column step counts the rows, 1, 2, ...", csv, tmp_path, "y")
    write(steps.iloc[::-1], tmp_path / "b.csv")
    assert csv(tmp_path, "y").columns == ("step", "a", "b")


def test_what_looks_alike_but_is_a_feature_is_taken():
    hours, other = np.arange(ROWS) % 24, np.where(np.arange(ROWS) == 0, 1, SOUND["y"])
    other[0] = 1 - SOUND["y"][0]
    frame = pd.DataFrame({**SOUND, "hour": hours, "alike": other, "still": np.ones(ROWS)})
    assert cfl.from_frame(frame, "y").columns == ("a", "b", "hour", "alike", "still")
    assert cfl.from_frame(frame, "alike", num_classes=0).columns[-1] == "still"


def test_a_second_label_in_words_is_not_used(capsys):
    words = np.array(["off", "on"])[SOUND["y"]]
    assert cfl.from_frame(pd.DataFrame({**SOUND, "state": words}), "y").columns == ("a", "b")
    assert "columns 'state' hold no numbers and are not used" in capsys.readouterr().err
    frame = pd.DataFrame({**SOUND, "state": words})
    one_line("column state tells y alone", cfl.from_frame, frame, "y", number_text=True)


@pytest.mark.parametrize(
    ("one", "other"), [("50K", "50K."), ("yes", "Yes"), ("a b", "a  b"), ("on", "'on'")]
)
def test_classes_that_differ_in_a_sign_are_refused_unless_they_are_counted(one, other):
    frame = pd.DataFrame({**SOUND, "y": [one, other] * (ROWS // 2)})
    says = f"classes {one!r} and {other!r} look like one"
    error = one_line("look like one, expected one spelling", cfl.from_frame, frame, "y")
    assert says in error or f"classes {other!r} and {one!r}" in error
    assert cfl.from_frame(frame, "y", num_classes=2).num_classes == 2
    letters = pd.DataFrame({**SOUND, "y": ["a", "A"] * (ROWS // 2)})
    assert cfl.from_frame(letters, "y").num_classes == 2


# files of a folder


def write_folder(root, **files):
    for name, frame in files.items():
        path = root / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(pd.DataFrame(frame), path)
    return root


@pytest.mark.parametrize("kind", READERS)
def test_files_that_share_what_stands_before_the_first_dot_are_all_read(kind, tmp_path):
    for year in (2025, 2024):
        write(pd.DataFrame({"a": [year, year], "y": [0, 1]}), tmp_path / f"data.{year}.{kind}")
    pool = READERS[kind](tmp_path, "y")
    assert pool.x[:, 0].tolist() == [2024, 2024, 2025, 2025]
    (tmp_path / f"data.2025.{kind}").rename(tmp_path / f"DATA.2023.{kind.upper()}")
    assert READERS[kind](tmp_path, "y").x[:, 0].tolist() == [2025, 2025, 2024, 2024]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("first", ["numbers", "words"])
@pytest.mark.parametrize("role", ["y", "client", "concept", "split"])
def test_what_differs_between_files_is_decided_over_all(role, first, kind, tmp_path):
    """Numbers in one and words in another are words, or refused: never places in a list."""
    values = {"numbers": [0, 1], "words": ["train", "test"]}
    for place, name in enumerate(sorted(values, key=lambda each: each != first)):
        parts = {
            "y": [0, 1],
            "client": [f"{name}0", f"{name}1"],
            "concept": [0, 0],
            "split": [0, 1],
        }
        write(
            pd.DataFrame({"a": [1, 2], **parts, role: values[name]}), tmp_path / f"{place}.{kind}"
        )
    parts = dict(y="y", client="client", concept="concept", split="split")
    if kind != "csv":
        one_line("", READERS[kind], tmp_path, **parts)
        return
    pool = csv(tmp_path, **parts)
    if role == "split":
        assert pool.test.tolist() == [False, True] * 2
    elif role == "concept":
        assert sorted(pool.concept.tolist()) == [0, 1, 2, 3]
    else:
        names, number = pool.class_names, pool.y
        if role == "client":
            names, number = pool.client_names, pool.client
        files = [values.pop(first), *values.values()]
        assert [names[place] for place in number] == [str(v) for file in files for v in file]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "names",
    [
        ("fashion-mnist_train", "fashion-mnist_test"),
        ("train", "test"),
        ("Training", "Testing"),
        ("a-train-00000-of-00001", "a-test-00000-of-00001"),
        ("train/part-0", "test/part-0"),
    ],
)
def test_files_for_training_and_for_testing_are_the_split(names, kind, tmp_path, capsys):
    for name, rows in zip(names, (3, 2), strict=True):
        write_folder(tmp_path, **{f"{name}.{kind}": {"a": range(rows), "y": [0, 1, 1][:rows]}})
    pool = READERS[kind](tmp_path, "y")
    assert sorted(pool.test.tolist()) == [False] * 3 + [True] * 2
    assert pool.x[pool.test, 0].tolist() == [0, 1]
    assert "are for testing, as the files' names say" in capsys.readouterr().err


def test_files_that_are_neither_are_refused_unless_a_column_says(tmp_path):
    for name in ("train", "test", "more"):
        write_folder(tmp_path, **{f"{name}.csv": {"a": [1, 2], "y": [0, 1], "part": [0, 1]}})
    one_line("by their names, and more.csv neither", csv, tmp_path, "y", x="a")
    assert csv(tmp_path, "y", x="a", split="part").test.tolist() == [False, True] * 3
    (tmp_path / "test.csv").unlink()
    assert csv(tmp_path, "y", x="a").test is None
    pd.DataFrame({"a": [1], "y": [0], "part": [0]}).to_csv(tmp_path / "more.csv.gz")
    one_line("more.csv and more.csv.gz have one name", csv, tmp_path, "y", x="a")


@pytest.mark.parametrize("packed", ["gz", "bz2", "xz", "zip"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_packed_files_are_read(kind, packed, tmp_path):
    frame, path = pd.DataFrame(SOUND), tmp_path / f"a.{kind}.{packed}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=True, double_precision=15)
    for where in (path, tmp_path):
        pool = READERS[kind](where, "y")
        np.testing.assert_allclose(pool.x, frame[["a", "b"]], atol=1e-15)


def test_folders_of_parquet_are_a_column(tmp_path):
    for site in ("b", "a"):
        write_folder(tmp_path, **{f"site={site}/part-0.parquet": {"a": [1.5, 2], "y": [0, 1]}})
    pool = parquet(tmp_path, "y", client="site")
    assert pool.client_names == ("a", "b") and pool.client.tolist() == [0, 0, 1, 1]


# names


def test_names_have_one_form_in_arrays_and_partitions(tmp_path):
    forms = ["caf\u00e9", "cafe\u0301", " caf\u00e9 ", "caf\u00e9".encode()]
    for one in forms:
        pool = cfl.from_arrays(np.ones((4, 1)), [0, 1, 0, 1], client=["caf\u00e9", "x"] * 2)
        other = cfl.from_arrays(np.ones((2, 1)), [0, 1], client=np.array([one, one]))
        assert other.client_names == ("caf\u00e9",) and pool.client_names == ("caf\u00e9", "x")
        assert cfl.from_arrays(np.ones((2, 1)), np.array([one] * 2)).class_names == ("caf\u00e9",)
    (tmp_path / "p.json").write_text(json.dumps({"cafe\u0301": [0], " 1.0": [1]}))
    made = cfl.partition.from_file(pool, path=str(tmp_path / "p.json"), test_fraction=0)
    assert made.client_names == ("1", "caf\u00e9") and made.sample.tolist() == [1, 0]
    (tmp_path / "p.json").write_text(json.dumps({"1": [0], "1.0": [1]}))
    one_line(
        "client '1' is there twice", cfl.partition.from_file, pool, path=str(tmp_path / "p.json")
    )
    for gap in ("nan", "NA", "None", "?"):
        client = ["1", gap, "2", "2"]
        says = f"client is {gap} in sample 1 and numbers in others"
        one_line(says, cfl.from_arrays, np.ones((4, 1)), [0, 1, 0, 1], client=client)
    one_line("client is empty in sample 1", cfl.from_arrays, np.ones((2, 1)), [0, 1], ["a", " "])
    assert cfl.from_arrays(np.ones((2, 1)), [10, 1_000_000]).class_names == ("10", "1000000")


def test_a_table_that_is_none_is_one_line():
    one_line("is a list, expected a pandas.DataFrame", cfl.from_frame, [[1]], "y")
    frame = pd.DataFrame([[1, 2, 0]], columns=["a", "a ", "y"])
    one_line("column 'a' is there 2 times", cfl.from_frame, frame, "y")
    indexed = frame.iloc[:, 1:].set_index(pd.Index([0], name="y"))
    one_line("column 'y' is there 2 times", cfl.from_frame, indexed, "y")
    one_line("table has no rows", cfl.from_frame, frame.head(0).iloc[:, 1:], "y")
    mixed = pd.DataFrame({"a": [1, 2], "y": ["u", 3]})
    one_line("column y holds numbers and text", cfl.from_frame, mixed, "y")
