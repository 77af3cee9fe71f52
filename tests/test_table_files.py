"""CSV, JSON lines and Parquet of the user's own, and frames: read as a plain reader of Python reads
them, and one line, with column and row, for everything that is refused.
"""

import csv as plain
import functools
import gzip
import http.server
import io
import os
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import one_line, refusal
from PIL import Image

from fedjax_cfl.cli.build import deal_samples, describe_unused, resolve_settings
from fedjax_cfl.data import partition
from fedjax_cfl.data.datasets import csv, jsonl, parquet
from fedjax_cfl.data.federated import federate

ALL = dict(y="state", client="user", split="part", time="when", concept="kind")
NAMES = ["", "user", "when", "temp", "part", "state", "hum", "kind", "note"]


def rows_of(count=60, decimal="."):
    """Returns rows of a table of sensors as text, with quotes and line breaks in notes."""
    rng = np.random.default_rng(0)
    return [
        [
            str(i),
            ["10", "9", "100"][i % 3],
            f"2020-01-01 00:{i // 60:02}:{i % 60:02}",
            f"{rng.normal():.4f}".replace(".", decimal),
            ["train", "Test"][i % 4 == 3],
            ["on", "off", "über"][int(rng.integers(3))],
            f" {rng.normal():.3e}".replace(".", decimal),
            ["wet", "dry", "dry"][i % 3],
            f'a "note",\nof {i}; {decimal}',
        ]
        for i in range(count)
    ]


def written(path, rows, delimiter=",", head=NAMES):
    """Writes a CSV by Python's own writer; returns its path."""
    out = io.StringIO(newline="")
    plain.writer(out, delimiter=delimiter).writerows([head, *rows])
    content = out.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def assert_as_plain(pool, rows, decimal="."):
    """Asserts that a pool holds what the rows say."""
    column = dict(zip(NAMES, zip(*rows, strict=True), strict=True))
    x = [[float(v.replace(decimal, ".")) for v in column[name]] for name in ("temp", "hum")]
    np.testing.assert_array_equal(np.float32(pool.x), np.array(x, np.float32).T)
    assert pool.class_names == ("off", "on", "über") and pool.num_classes == 3
    assert [pool.class_names[y] for y in pool.y] == list(column["state"])
    assert pool.client_names == (9, 10, 100)  # digits sort as numbers
    assert [str(pool.client_names[k]) for k in pool.client] == list(column["user"])
    assert pool.test.tolist() == [part == "Test" for part in column["part"]]
    assert pool.time.tolist() == list(range(len(rows)))
    assert pool.concept.tolist() == [0, 1, 0]  # 9 dry, 10 wet, 100 dry: text in sorted order


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
@pytest.mark.parametrize(("delimiter", "decimal"), [(",", "."), (";", ","), ("tab", ".")])
def test_a_csv_is_what_a_plain_reader_reads(delimiter, decimal, ending, tmp_path, capsys):
    rows = rows_of(decimal=decimal)
    sign = "\t" if delimiter == "tab" else delimiter
    path = written(tmp_path / f"a{ending}", rows, sign)
    assert_as_plain(csv(path, **ALL, delimiter=delimiter, decimal=decimal), rows, decimal)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "columns 'note' hold no numbers and are not used" in said


def test_features_are_named_or_all_numbers(tmp_path):
    path = written(tmp_path / "a.csv", [["1", "b", "0"], ["2", "a", "1"]], head=["p", "q", "y"])
    assert csv(path, "y", x="p").x.tolist() == [[1], [2]]
    assert csv(path, "y", x=["q", "p"], number_text=True).x.tolist() == [[1, 1], [0, 2]]
    assert csv(path, "y", number_text=True).x.tolist() == [[1, 1], [2, 0]]
    assert csv(path, "q", x=["p", "y"]).class_names == ("a", "b")
    assert csv(path, "y", x="p", client="q").client_names == ("a", "b")


def test_labels_are_numbers_where_all_are(tmp_path):
    def read(labels, **more):
        rows = [["1.5", label] for label in labels]
        return csv(written(tmp_path / "a.csv", rows, head=["p", "y"]), "y", **more)

    assert read(["1", "0", "2"]).y.tolist() == [1, 0, 2]
    assert read(["1.0", "0.0", "02"]).class_names is None
    assert read(["10", "30", "20"]).class_names == ("10", "20", "30")
    assert read(["10", "9", "x"]).class_names == ("10", "9", "x")
    assert read(["NA", "x", "x"]).class_names == ("NA", "x")  # a word as any other
    one_line("y is NA in sample 1 and numbers in others", read, ["1", "NA", "0"])
    one_line("y is 1 .. 2 and never 0", read, ["1", "2"])
    one_line("looks like a target to regress", read, ["0.5", "2"])
    one_line("column y has no value in row 2 (the first is 1)", read, ["a", " ", "b"])


def test_clients_keep_their_names(tmp_path):
    def names(ids):
        rows = [["1.5", "a", one] for one in ids]
        path = written(tmp_path / "a.csv", rows, head=["p", "y", "c"])
        pool = csv(path, "y", client="c")
        data = federate(pool, partition.by_user(pool, test_fraction=0))
        assert data.client_names.names == pool.client_names
        return pool.client_names, pool.client.tolist()

    assert names(["10", "9", "10"]) == ((9, 10), [1, 0, 1])
    assert names(["010", "9", "10"]) == (("9", "010", "10"), [1, 0, 2])
    assert names(["10", "9", "f0"]) == (("10", "9", "f0"), [0, 1, 2])
    assert names(["3.5", "NA", "a"]) == (("3.5", "NA", "a"), [0, 1, 2])  # a user called NA
    assert names(["1", "1.0", " 2", "2.00"]) == ((1, 2), [0, 0, 1, 1])
    assert names(["caf\u00e9", "cafe\u0301"]) == (("caf\u00e9",), [0, 0])
    for gap in ("nan", "NA", "None", "null", "?"):
        one_line(f"client is {gap} in sample 1 and numbers in others", names, ["1", gap, "2"])


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        (["2020-01-02", "2020-01-01"], [86400, 0]),
        (["1960-01-01T00:00:01.9", "1960-01-01T00:00:00"], [1, 0]),
        (["2020-01-01 01:00:00+01:00", "2020-01-01 00:00:07Z"], [0, 7]),
        (["5", "3"], [5, 3]),
        (["5.0", "3"], [5, 3]),
    ],
)
def test_times_are_numbers_or_dates(cells, seconds, tmp_path):
    rows = [["1.5", "a", cell] for cell in cells]
    path = written(tmp_path / "a.csv", rows, head=["p", "y", "t"])
    assert csv(path, "y", time="t").time.tolist() == seconds


GOOD = ["1", "2.5", "a", "0", "x"]
HEAD = ["c", "p", "y", "s", "k"]
NAMED = dict(y="y", x=["p"], client="c", split="s", concept="k")
TIMED = dict(y="y", x=["p"], time="s")
BAD_CSV = {
    "empty": (b"", NAMED, "cannot be read (No columns to parse from file), expected a CSV"),
    "no rows": (b"c,p,y,s,k\n", NAMED, "table has no rows"),
    "a row too short": (b"p,y\n1,a\n2\n", dict(y="y"), "column y has no value in row 2"),
    "a row too long": (b"p,y\n1,a\n2,b,3\n", dict(y="y"), "Expected 2 fields in line 3, saw 3"),
    "all rows too long": (b"p,y\n1,a,3\n2,b,3\n", dict(y="y"), "loss of data"),
    "no line of names": (b"1,2\n3,4\n", dict(y="y"), "has the file no line of names?"),
    "latin-1": ("p,y\n1,\xfc\n".encode("latin-1"), dict(y="y"), "expected a CSV in UTF-8"),
    "utf-16": ("p,y\n1,a\n".encode("utf-16"), dict(y="y"), "is text in UTF-16"),
    "two of a name": (b"p,p,y\n1,2,a\n", dict(y="y"), "column 'p' is there 2 times"),
    "no such column": (b"p,label\n1,a\n", dict(y="lable"), "did you mean 'label'?"),
    "decimal commas": (b"p;y\n1,5;a\n", dict(y="y"), "cells between ',', see delimiter"),
    "another delimiter": (b"p;y\n1;a\n", dict(y="y"), "p;y: is it the delimiter?"),
    "a column twice": (b"p,y\n1,2\n", dict(y="y", x=["p", "y"]), "y is y, x"),
    "no features": (b"p,y\na,2\n", dict(y="y"), "no column of features is left"),
    "text as feature": (b"p,y\n1,a\nx,a\n", dict(y="y", x="p"), "column p is 'x' in row 2"),
    "decimal comma": (b'p,y\n"1,5",a\n', dict(y="y", x="p"), "decimal=',' is the other point"),
    "missing feature": (b"p,y\n1,a\nNA,a\n", dict(y="y"), "column p has no value in row 2"),
    "missing client": (
        b"c,p,y\n,1,a\n", dict(y="y", client="c"), "column c has no value in row 1",
    ),
    "infinite": (b"p,y\ninf,a\n", dict(y="y"), "x is NaN or infinite"),
    "beyond float32": (b"p,y\n1e300,a\n", dict(y="y"), "x is NaN or infinite"),
    "third split": (
        b"p,y,s\n1,a,train\n2,b,val\n", dict(y="y", split="s"), "split is 'val' in sample 1",
    ),
    "split of 2": (b"p,y,s\n1,a,2\n", dict(y="y", split="s"), "split is '2'"),
    "local date": (b"p,y,s\n1,a,28.2.2018\n", TIMED, "column s is '28.2.2018' in row 1"),
    "some dates": (b"p,y,s\n1,a,7\n1,a,2018-02-28\n", TIMED, "column s is '7' in row 1"),
    "times before": (b"p,y,s\n1,a,-7\n", TIMED, "store time - time.min()"),
    "half a second": (b"p,y,s\n1,a,0.5\n", TIMED, "time is 0.5 in sample 0"),
    "no time": (b"p,y,s\n1,a,\n", TIMED, "column s has no value in row 1"),
    "concept changes": (
        b"c,p,y,k\n1,1,a,u\n2,1,a,u\n1,1,a,v\n", dict(y="y", client="c", concept="k"),
        "concept changes within client 1, first in sample 2",
    ),
    "concept of nobody": (
        b"p,y,k\n1,a,u\n", dict(y="y", concept="k"), "concept is there without client",
    ),
    "gzip cut": (gzip.compress(b"p,y\n1,a\n")[:-8], dict(y="y"), "packed by gzip"),
    "pickle": (b"\x80\x04\x95anything", dict(y="y"), "is a pickle"),
    "zero bytes": (b"\0" * 99, dict(y="y"), "is no text"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CSV)
def test_what_is_refused_of_a_csv_says_where(name, tmp_path):
    content, columns, says = BAD_CSV[name]
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    error = one_line(says, csv, path, **columns)
    assert str(path) in error and "expected" in error and len(error) < 1000
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]


def test_settings_of_a_csv(tmp_path):
    path = written(tmp_path / "a.csv", [GOOD], head=HEAD)
    assert csv(path, **NAMED).client_names == (1,)
    one_line("delimiter=;;: must be one character, or tab", csv, path, **NAMED, delimiter=";;")
    one_line("delimiter=,: is decimal as well", csv, path, **NAMED, decimal=",")
    written(path, [GOOD], ";", HEAD)
    one_line("column p is '2.5' in row 1", csv, path, **NAMED, delimiter=";", decimal=",")
    one_line("decimal=;: must be one of", csv, path, **NAMED, decimal=";")


def test_a_decimal_point_reaches_every_column(tmp_path):
    """pandas writes whole numbers as 1,0 where one of them is missing, in some files of several."""
    head, rows = ["p", "y", "k", "s", "c"], [["1,5", "2,0", "7,0", "0,0", "3,0"]]
    rows += [["2,5", "4,0", "7", "1,0", "3"], ["3,5", "4", "8", "1", "5,0"]]
    path = written(tmp_path / "a.csv", rows, ";", head)
    pool = csv(path, y="y", client="k", split="s", concept="c", delimiter=";", decimal=",")
    assert pool.class_names == ("2", "4") and pool.client_names == (7, 8)
    assert pool.y.tolist() == [0, 1, 1] and pool.test.tolist() == [False, True, True]
    assert pool.client.tolist() == [0, 0, 1] and pool.concept.tolist() == [0, 1]


def image(mode="L", fill=0, size=(5, 4)):
    """Returns the bytes of a PNG, and its pixels as Pillow has them."""
    out = io.BytesIO()
    whole = Image.fromarray(
        np.random.default_rng(fill).integers(0, 256, (size[1], size[0], 3), np.uint8)
    ).convert(mode)
    whole.save(out, "PNG")
    return out.getvalue(), np.asarray(whole)


IMAGES = [image(fill=i)[0] for i in range(4)]
COLUMNS = {
    "y": ["b", "a", "b", "a"],
    "user": pa.array([10, 9, 10, 9], pa.int16()),
    "word": pa.array(["x", "y", "x", "y"]).dictionary_encode(),
    "when": pa.array([7_000_000, 0, 1_999_999, 1], pa.timestamp("us", "UTC")),
    "day": pa.array([18000, 18001, 18000, 18002], pa.date32()),
    "half": pa.array([0.5, 1.5, 2.5, 3.5], pa.float16()),
    "small": pa.array([1, 2, 3, 4], pa.uint8()),
    "money": pa.array([1, 2, 3, 4], pa.decimal128(9, 2)),
    "yes": [True, False, True, True],
    "pixels": pa.array([[0, 255]] * 4, pa.list_(pa.uint8())),
    "fixed": pa.array([[0.5, i] for i in range(4)], pa.list_(pa.float64(), 2)),
    "deep": [[[1.0, 2, 3], [i, 5, 6]] for i in range(4)],
    "png": IMAGES,
    "hf": [{"bytes": content, "path": "a.png"} for content in IMAGES],
    "gap": [1.5, None, 2, 3],
    "nan": [1.5, float("nan"), 2, 3],
    "ragged": [[1], [1], [1, 2], [1]],
    "holes": [[1], None, [1], [1]],
    "inner": [[1, 2], [1, None], [1, 2], [1, 2]],
    "words": [["a"]] * 4,
    "paths": [{"bytes": content, "path": "/a.png"} for content in (*IMAGES[:2], None, IMAGES[3])],
    "broken": [*IMAGES[:3], IMAGES[3][:50]],
    "coloured": [*IMAGES[:3], image("RGB")[0]],
    "sizes": [*IMAGES[:3], image(size=(6, 4))[0]],
    "other": [{"a": 1}] * 4,
    "many": pa.array([[]] * 4, pa.list_(pa.float32())),
    "empty": pa.array([[]] * 4, pa.list_(pa.list_(pa.float32()))),
}


@pytest.fixture
def path(tmp_path):
    pyarrow.parquet.write_table(pa.table(COLUMNS), tmp_path / "a.parquet", row_group_size=3)
    return tmp_path / "a.parquet"


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ("half", [[0.5], [1.5], [2.5], [3.5]]),
        (["small", "money", "yes"], [[1, 1, 1], [2, 2, 0], [3, 3, 1], [4, 4, 1]]),
        ("pixels", np.array([[0, 255]] * 4, np.uint8)),
        ("fixed", COLUMNS["fixed"].to_pylist()),
        ("deep", COLUMNS["deep"]),
        ("png", np.stack([image(fill=i)[1] for i in range(4)])[..., None]),
        ("hf", np.stack([image(fill=i)[1] for i in range(4)])[..., None]),
    ],
)
def test_features_of_a_parquet_file(x, expected, path):
    pool = parquet(path, "y", x=x, client="user", time="when")
    kind = np.uint8 if getattr(expected, "dtype", None) == np.uint8 else np.float32
    assert pool.x.dtype == kind
    np.testing.assert_array_equal(pool.x, np.array(expected))
    assert pool.client_names == (9, 10) and pool.client.tolist() == [1, 0, 1, 0]
    assert pool.time.tolist() == [7, 0, 1, 0] and pool.class_names == ("a", "b")


def test_other_parts_of_a_parquet_file(path):
    pool = parquet(path, "word", x="half", client="y", time="day", split="yes")
    assert pool.class_names == ("x", "y") and pool.client_names == ("a", "b")
    assert pool.time.tolist() == [0, 86400, 0, 2 * 86400]
    assert pool.test.tolist() == [True, False, True, True]
    assert parquet(path, "y", x="word", number_text=True).x.tolist() == [[0], [1]] * 2
    resized = parquet(path, "y", x="sizes", size=[2, 3], mode="rgb").x
    assert resized.shape == (4, 2, 3, 3) and resized.dtype == np.uint8


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (None, "could be the features, expected x=NAME"),
        ("gap", "column gap has no value in row 2"),
        ("nan", "column nan has no value in row 2"),
        ("ragged", "column ragged has (2,) values, and (1,) before it, in row 3"),
        ("holes", "column holes has no value in row 2"),
        ("inner", "x is NaN or infinite in 1 samples, first in sample 1"),
        ("words", "column words has lists of unequal lengths, of text"),
        ("many", "or an empty one, in row 1"),
        ("empty", "or an empty one, in row 1"),
        ("when", "column when holds dates, expected numbers: name it time"),
        ("word", "column word is 'x' in row 1 (the first is 1), expected a number"),
        ("other", "column other holds others, expected numbers, lists or images"),
        (["fixed", "half"], "column fixed holds lists, expected it as the only one"),
        ("paths", "column paths has no bytes, at most a path in row 3 (the first is 1)"),
        ("broken", "column broken in row 4 (the first is 1): image cannot be read"),
        ("coloured", "or mode=rgb or mode=grey"),
        ("sizes", "expected one, or size=[4,5]"),
        ("nope", "x=nope is not there"),
    ],
)
def test_what_is_refused_of_a_parquet_file_says_where(x, says, path):
    error = one_line(says, parquet, path, "y", x=x)
    assert str(path) in error and "expected" in error and len(error) < 1000


def test_a_label_that_is_neither_number_nor_text(path):
    for name in ("when", "fixed", "other"):
        one_line("expected numbers or text", parquet, path, name, x="half")


def test_shards_are_read_in_order_of_their_names(tmp_path):
    for name, first in {"2": 0, "10": 2}.items():
        table = pa.table({"x": [first, first + 1], "y": ["a", "b"], "c": ["u", name]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
        written(tmp_path / f"{name}.csv", zip(*table.to_pydict().values(), strict=True), head="xyc")
    (tmp_path / "_metadata").write_text("none of the shards")
    (tmp_path / ".hidden.parquet").write_text("none of the shards")
    for read in (csv, parquet):
        pool = read(tmp_path, "y", client="c")
        assert pool.x.tolist() == [[0], [1], [2], [3]] and pool.client.tolist() == [2, 1, 2, 0]
    pyarrow.parquet.write_table(pa.table({"x": [0], "y": ["a"]}), tmp_path / "11.parquet")
    one_line("column c has no value in row 1 of 11.parquet", parquet, tmp_path, "y", client="c")
    pyarrow.parquet.write_table(pa.table({"x": [0], "y": [1]}), tmp_path / "11.parquet")
    one_line("column y holds numbers and text", parquet, tmp_path, "y", x="x")
    (tmp_path / "empty").mkdir()
    one_line("holds no *.parquet", parquet, tmp_path / "empty", "y")
    one_line("holds no *.csv,", csv, tmp_path / "empty", "y")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_an_address_is_read_as_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    table = pa.table({"a": [0.5, 1.5, 2.5], "y": ["u", "v", "u"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    table.to_pandas().to_csv(tmp_path / "t.csv.gz", index=False)
    table.to_pandas().to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    folder = functools.partial(Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), folder) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{running.server_port}"
        for read, name in ((parquet, "t.parquet"), (csv, "t.csv.gz"), (jsonl, "t.jsonl")):
            pool = read(f"{home}/{name}", "y")
            assert pool.x.tolist() == [[0.5], [1.5], [2.5]] and pool.class_names == ("u", "v")
            one_line("expected an address that answers", read, f"{home}/none", "y")
        running.shutdown()


def test_shards_of_other_pixels_are_not_mixed(tmp_path):
    for name, kind in (("1", pa.uint8()), ("2", pa.float32())):
        table = pa.table({"x": pa.array([[1, 2]], pa.list_(kind)), "y": ["a"]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    one_line("has float32 values, and uint8 before it, in row 1 of 2", parquet, tmp_path, "y")


def test_extension_types_run_nothing_and_give_their_storage(tmp_path, monkeypatch):
    """A file may name a pickled type, as old versions of pyarrow read them."""
    monkeypatch.chdir(tmp_path)
    pickled = b"cos\nsystem\n(S'touch pwned'\ntR."
    told = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickled,
    }
    fields = [
        pa.field("x", pa.list_(pa.float32(), 2), metadata=told),
        pa.field("y", pa.string(), metadata=told),
    ]
    table = pa.table([pa.array([[1, 2], [3, 4]], fields[0].type), ["a", "b"]], pa.schema(fields))
    pyarrow.parquet.write_table(table, "a.parquet")
    assert pyarrow.parquet.read_schema("a.parquet").metadata is None
    pool = parquet("a.parquet", "y")
    assert pool.x.tolist() == [[1, 2], [3, 4]] and os.listdir() == ["a.parquet"]
    tensor = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2]), table["x"].chunk(0)
    )
    pyarrow.parquet.write_table(pa.table({"x": tensor, "y": ["a", "b"]}), "a.parquet")
    assert parquet("a.parquet", "y").x.tolist() == [[1, 2], [3, 4]]


def test_damaged_parquet_files(path):
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[:-30], whole[: len(whole) // 2], b"y,half\n1,2\n"):
        path.write_bytes(content)
        assert "cannot be read" in refusal(parquet, path, "y")


@pytest.mark.parametrize("read", [csv, parquet])
def test_no_regular_file(read, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nothing").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("loop", "nothing", "pipe", "absent", "z" * 300, "loop/inside", "a\0b"):
        one_line("cannot be read", read, f"{tmp_path}/{name}", "y")
    one_line("cannot be read", read, "/dev/zero", "y")
    one_line("cannot be read", read, "~nobody_of_this_name/a", "y")


def test_what_a_run_leaves_unused_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = {"x": range(9, 69), "y": [0, 1] * 30, "c": [0, 1, 2] * 20, "t": range(60)}
    pyarrow.parquet.write_table(pa.table({k: list(v) for k, v in table.items()}), "a.parquet")
    line = "dataset=parquet dataset.source.path=a.parquet dataset.source.y=y"
    line += " dataset.source.client=c dataset.source.time=t dataset.clients=2"
    for more, says in {"iid": "client of the file is not used", "auto": "time of the file"}.items():
        config = resolve_settings([*line.split(), f"partition={more}"])
        assert says in describe_unused(config, *deal_samples(config)).splitlines()[0]


def test_a_run_on_a_csv(fedjax_cfl, tmp_path):
    written(tmp_path / "sensors.csv", rows_of())
    line = "dataset=csv dataset.source.path=sensors.csv dataset.source.y=state"
    line += " dataset.source.client=user dataset.source.split=part"
    line += " 'dataset.source.x=[temp,hum]' rounds=1 algorithm=fedavg"
    line += " local.epochs=1 model=mclr run_dir=run"
    status, out, error = fedjax_cfl(line)
    assert (status, error) == (0, "")
    assert "fedavg on csv: 3 clients, 3 classes, 45 train and 15 test samples" in out
    clients = pyarrow.parquet.read_table(tmp_path / "run" / "clients.parquet")
    assert clients["client"].to_pylist() == [9, 10, 100]
    for change, says in {
        "y=stat": "sensors.csv: y=stat is not there",
        "y=[]": "dataset.source.y=[]: must be null, the name of a column or a list of names",
        "x=[]": "dataset.source.x=[]: must be null, the name of a column or a list of names",
        "why=a": "dataset.source.why=a: unknown setting",
        "num_classes=2": "num_classes=2",
    }.items():
        status, _, error = fedjax_cfl(f"{line}2 'dataset.source.{change}'")
        assert status == 2 and says in error and error.count("\n") == 1


KINDS = {
    "an .xlsx": (b"PK\3\4" + bytes(range(60)), "or a file such as .xlsx, expected what is in it"),
    "an .xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "save it as CSV"),
    "a renamed .gz": (gzip.compress(b"a,y\n1,2\n"), "is packed by gzip, expected it unpacked"),
    "a 7z": (b"7z\xbc\xaf\x27\x1c\0\4", "is an archive, expected what is in it"),
    "a tar": (b"a.csv" + bytes(507) + b"a,y\n1,2\n", "is no text, expected a table"),
    "a Parquet file": (b"PAR1\x15\x04\x15", "is a Parquet file, which dataset=parquet reads"),
    "UTF-16": ("a,y\n1,2\n".encode("utf-16"), "is text in UTF-16, expected UTF-8: iconv"),
    "a web page": (b"<!DOCTYPE html><html>404</html>", "as a download that failed leaves"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid 1\n", "git lfs pull"),
    "ARFF": (b"@RELATION iris\n@ATTRIBUTE a REAL\n@DATA\n1.5\n", "scipy.io.arff.loadarff"),
    "IDX": (b"\0\0\x08\x03" + bytes(12), "is no text, expected a table"),
    "HAR": (b"  2.88e-001 -2.02e-002\n  2.78e-001 -1.64e-002\n", "cfl.from_frame or cfl.from_arr"),
    "libsvm": (b"+1 1:0.3 4:2\n-1 1:0.2 3:1\n", "cfl.from_frame or cfl.from_arrays"),
    "no names": (b"5.1,3.5,setosa\n4.9,3.0,setosa\n", "has the file no line of names?"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.csv", "data.bin"])
def test_a_file_of_another_kind_says_what_to_do(kind, name, tmp_path):
    content, says = KINDS[kind]
    (tmp_path / name).write_bytes(content)
    error = one_line(says, csv, tmp_path / name, y="y")
    assert str(tmp_path / name) in error and error.isprintable() and "\\x" not in error


def test_a_comma_more_in_the_line_of_names_is_no_column(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("a,b,y,\n1,2.5,0\n2,3,1\n")
    assert csv(tmp_path / "a.csv", y="y").columns == ("a", "b")
    assert capsys.readouterr().err == ""


def test_words_of_text_keep_their_commas(tmp_path):
    """What looks like a number in a column of text is text, whatever the decimal point is."""
    (tmp_path / "own.csv").write_text("a;b;label\n1,5;x;0\n1.5;y;1\nz;x;0\n0,5;y;1\n")
    pool = csv(
        tmp_path / "own.csv", "label", ["a", "b"], delimiter=";", decimal=",", number_text=True
    )
    assert len({*pool.x[:, 0].tolist()}) == 4
