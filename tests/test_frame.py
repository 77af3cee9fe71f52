"""Frames of pandas: the same pool from memory and from files, pandas' own traps, and those of real
files, each of which is met once, for all kinds of files.
"""

import datetime
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
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
    """Asserts that two pools have equal values of equal types."""
    for name, one, two in zip(pool._fields, pool, other, strict=True):
        np.testing.assert_array_equal(one, two, name)
        assert getattr(one, "dtype", type(one)) == getattr(two, "dtype", type(two))


NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32"]
NUMBERS += ["float64", "bool", "Int64", "Float64", "boolean", "int64[pyarrow]", "double[pyarrow]"]
TEXTS = ["str", "object", "category", "string", "string[pyarrow]"]
WORDS = st.text("abc NA.é1", min_size=1, max_size=5).filter(lambda word: word.strip())
WORDS |= st.sampled_from(["NA", "None", "nan", "null", "1.0", "01", "cafe\u0301", " b", "-", "1e5"])


@st.composite
def frames(draw):
    """Returns a frame with a column of each part, of drawn types."""
    rows = draw(st.integers(2, 12))
    columns = {}
    for name in "pq":
        dtype = draw(st.sampled_from(NUMBERS))
        values = draw(st.lists(numbers_of(dtype), min_size=rows, max_size=rows))
        columns[name] = pd.Series(values, dtype=dtype)
    for name in ("y", "client"):
        words = ["word", *draw(st.lists(WORDS, min_size=rows - 1, max_size=rows - 1))]
        columns[name] = pd.Series(words, dtype=draw(st.sampled_from(TEXTS)))
    if draw(st.booleans()):
        ids = st.integers(-(2**40), 2**40)
        ids = pd.Series(draw(st.lists(ids, min_size=rows, max_size=rows)))
        columns["client"] = ids.astype(draw(st.sampled_from(["int64", "float64", "Int64"])))
    days = st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2037, 1, 1))
    when = pd.Series(draw(st.lists(days, min_size=rows, max_size=rows)))
    columns["when"] = when.dt.floor("s")
    return pd.DataFrame(columns)


def numbers_of(dtype):
    if "bool" in dtype:
        return st.booleans()
    if "loat" in dtype or "double" in dtype:
        return st.integers(-(2**40), 2**40).map(lambda n: n / 1024)  # JSON of pandas has 15 digits
    info = np.iinfo(dtype.partition("[")[0].lower())
    return st.integers(int(info.min), int(info.max))


@settings(max_examples=60, deadline=None)
@given(frame=frames())
def test_files_of_all_kinds_are_the_pool_of_the_frame(frame, tmp_path_factory):
    parts = dict(y="y", client="client", time="when", num_classes=len(frame) + 20)
    pool = cfl.from_frame(frame, x=["p", "q"], **parts)
    for kind, read in READERS.items():
        path = tmp_path_factory.mktemp("t") / f"a.{kind}"
        write(frame, path)
        same(read(path, x=["p", "q"], **parts), pool)
    same(cfl.from_frame(pa.Table.from_pandas(frame), x=["p", "q"], **parts), pool)
    names = [clean_name(word) for word in frame["y"]]
    assert [pool.class_names[y] for y in pool.y] == names


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(-3e38, 3e38), min_size=2, max_size=9))
def test_floats_of_a_csv_are_exact(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "a.csv"
    pd.DataFrame({"y": values, "a": values}).to_csv(path, index=False)
    pool = csv(path, "y", x="a", num_classes=0)
    np.testing.assert_array_equal(pool.x[:, 0], np.array(values, np.float32))
    np.testing.assert_array_equal(pool.y, np.array(values, np.float32))


def test_pandas_waits_until_a_table_is_read():
    code = "import sys, fedjax_cfl as cfl; cfl.from_frame, cfl.run; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
