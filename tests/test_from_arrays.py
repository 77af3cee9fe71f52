"""Arrays from Python, checked as a file is: one line for each mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from conftest import one_line

import fedjax_cfl as cfl
from fedjax_cfl.data.datasets import from_arrays, npz

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 1])
GOOD = {
    "client": ["zoe", "ann", "zoe", "bob"],
    "split": np.array([0, 1, 0, 1]),
    "time": [3, 1, 2, 0],
    "concept": ["b", "a", "b"],
}


def same(pool, other):
    """Asserts that two pools have equal values of equal types."""
    for one, two in zip(pool, other, strict=True):
        np.testing.assert_array_equal(one, two)
        assert getattr(one, "dtype", type(one)) == getattr(two, "dtype", type(two))


def test_arrays_are_read_as_a_file_of_them(tmp_path):
    for more in ({}, {"client": GOOD["client"]}, GOOD):
        np.savez(tmp_path / "a.npz", x=X, y=Y, **more)
        same(from_arrays(X, Y, **more), npz(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", x=np.uint8(X), y=Y + 1)
    same(from_arrays(np.uint8(X), Y + 1, num_classes=4), npz(tmp_path / "b.npz", num_classes=4))
    assert from_arrays(X, Y).x.base is X or np.shares_memory(from_arrays(X, Y).x, X)


class Array:
    """What only `__array__` can be asked for."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values


class Frame:
    """What only `__dataframe__` can be asked for."""

    def __init__(self, table):
        self.table = table

    def __dataframe__(self, **options):
        return self.table.__dataframe__(**options)


TABLE = pa.table(dict(zip("abc", X.T, strict=True)))


@pytest.mark.parametrize("x", [X.tolist(), jnp.asarray(X), Array(X), TABLE, Frame(TABLE), X.T.T])
def test_features_of_any_kind(x):
    pool = from_arrays(x, Y)
    assert pool.columns == (("a", "b", "c") if x is TABLE else None)
    same(pool._replace(columns=None), from_arrays(X, Y))


@pytest.mark.parametrize(
    "words",
    [
        np.array(["b", "a", "b", "b"], dtype=object),  # as pandas has columns of text
        np.array(["b", "a", "b", "b"], dtype=np.dtypes.StringDType()),
        pa.array(["b", "a", "b", "b"]),
        pa.chunked_array([["b", "a"], ["b", "b"]]),
        Array(["b", "a", "b", "b"]),
        (b"b", b"a", b"b", b"b"),
    ],
)
def test_text_of_any_kind(words):
    pool = from_arrays(X, words, client=words)
    assert pool.y.tolist() == [1, 0, 1, 1] and pool.class_names == ("a", "b")
    assert pool.client.tolist() == [1, 0, 1, 1] and pool.client_names == ("a", "b")


def test_numbers_as_objects_and_dates():
    dates = np.array(["2020-01-01T00:00:05.9", "2020-01-01", "2020-01-02", "2020-01-01"], "M8[ms]")
    pool = from_arrays(X.astype(object), np.array([0, True, 2.0, 1], dtype=object), time=dates)
    same(pool, from_arrays(X, Y, time=[5, 0, 86400, 0]))
    one_line("time is missing in sample 1", from_arrays, X, Y, time=np.array(["2020", "NaT"], "M8"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x": None}, "arrays: x is None, expected an array"),
        ({"x": X[:3]}, "y has shape (4,), x has shape (3, 3)"),
        ({"x": X[:, 0]}, "x has samples of shape (), expected at least one feature"),
        ({"x": X[:0], "y": Y[:0]}, "x has 0 samples"),
        ({"x": [[1, 2], [3]]}, "x cannot be made an array"),
        ({"x": X.astype(complex)}, "x has dtype complex128, expected numbers"),
        (
            {"x": np.where(X == 5, np.nan, X)},
            "x is NaN or infinite in 1 samples, first in sample 1",
        ),
        ({"x": X.astype(str)}, "x has dtype <U"),
        ({"x": np.where(X == 7, None, X)}, "x is None in sample 2, expected a number"),
        ({"x": np.where(X == 7, "NA", X.astype(object))}, "x is 'NA' in sample 2, expected a num"),
        ({"x": np.ma.masked_equal(X, 5)}, "x has masked entries"),
        ({"x": {"a": 1}}, "x is {'a': 1} in sample 0, expected a number"),
        ({"y": np.eye(3)[Y]}, "one-hot or several labels a sample"),
        ({"y": Y + 1}, "y is 1 .. 3 and never 0, expected class numbers from 0 on: store y - 1"),
        ({"y": Y - 1}, "y is -1 in sample 0"),
        ({"y": Y / 2}, "looks like a target to regress"),
        ({"y": ["a", None, "b", "c"]}, "y is None in sample 1, expected text as in the others"),
        ({"y": ["a", np.nan, "b", "c"]}, "y is nan in sample 1, expected text as in the others"),
        ({"num_classes": 2}, "y is 2 in sample 2, expected 0 .. 1"),
        ({"num_classes": -1}, "num_classes=-1: must be"),
        ({"client": Y[:2]}, "client has shape (2,)"),
        ({"client": Y + 0.5}, "client is 0.5 in sample 0"),
        ({"client": [None, 1, 2, 3]}, "client is None in sample 0"),
        ({"split": Y}, "split is '2' in sample 2, expected train or test, or 0 or 1"),
        ({"split": Y[:2]}, "split has shape (2,), expected (4,)"),
        ({"time": np.array([["2020"]] * 4, "M8[s]")}, "time has shape (4, 1)"),
        ({"time": np.array([], "M8[s]")}, "time has shape (0,)"),
        ({"time": Y - 1}, "store time - time.min()"),
        ({"concept": Y}, "concept is there without client"),
        ({"client": Y, "concept": Y}, "expected (3,) integers or text, one entry a client"),
    ],
)
def test_each_mistake_is_one_line(changes, says):
    error = one_line(says, from_arrays, **({"x": X, "y": Y} | changes))
    assert len(error) < 1000
    assert error.startswith("arrays: ") == ("num_classes=-1" not in says)


@pytest.mark.parametrize(
    ("labels", "each", "classes"), [(51, 1, False), (50, 1, True), (51, 2, True)]
)
def test_whole_numbers_that_hardly_repeat_are_no_classes(labels, each, classes):
    """As prices are, or years."""
    y = 1900 + np.repeat(np.arange(labels), each)
    x = np.ones((len(y), 2))
    if classes:
        assert from_arrays(x, y).num_classes == labels
    else:
        one_line("51 different values in 51 samples, which looks like a target", from_arrays, x, y)
        assert from_arrays(x, y, num_classes=2000).num_classes == 2000


def test_what_raises_by_itself_is_one_line():
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("it is\non another device")

    one_line("x cannot be made an array (it is on another device)", from_arrays, Broken(), Y)


def test_a_pool_of_arrays_can_be_run(linear, local):
    pool = cfl.datasets.from_arrays(np.ones((12, 5)), np.arange(12) % 4, client=list("abc") * 4)
    data = cfl.federate(pool, cfl.partition.by_user(pool, seed=0))
    fedavg = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(2))
    state = jax.eval_shape(fedavg.init, jax.random.key(0), data)
    jax.eval_shape(fedavg.round, jax.random.key(0), state, data)


HIDDEN = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])


@pytest.mark.parametrize(
    "x",
    [np.ma.stack([HIDDEN] * 4), [HIDDEN] * 4, (X[0], X[1], X[2], HIDDEN), [[HIDDEN], [X[1]]] * 2],
    ids=["an array", "a list", "a tuple", "lists in lists"],
)
def test_what_a_mask_hides_is_not_read(x):
    """NumPy makes arrays of rows without their masks."""
    one_line("x has masked entries, expected a value in each", from_arrays, x, Y)
    one_line("x has masked entries", cfl.federate, cfl.Pool(x, Y, 3), cfl.Partition(Y, Y, Y > 0))


def test_groups_may_be_named_by_client():
    groups = {"zoe": "b", "ann": "a", " bob ": "b"}
    pool = from_arrays(X, Y, client=GOOD["client"], concept=groups)
    same(pool, from_arrays(X, Y, client=GOOD["client"], concept=["a", "b", "b"]))
    assert from_arrays(X, Y, client=[7, 2, 7, 2], concept={7: 1, 2: 0}).concept.tolist() == [0, 1]
    for change, says in (
        ({"bob": None}, "concept has no group of client 'bob', expected a group of each client"),
        ({"bob": "b", "eve": "a"}, "concept has 'eve', expected a group of each client"),
    ):
        named = {"zoe": "b", "ann": "a"} | {k: v for k, v in change.items() if v is not None}
        one_line(says, from_arrays, X, Y, client=GOOD["client"], concept=named)
    frame = pd.DataFrame({"a": [1.0, 2], "who": ["u", "v"], "y": [0, 1]})
    says = "concept={'u': 0}: must be null or the name of a column"
    one_line(says, cfl.from_frame, frame, "y", client="who", concept={"u": 0})


def test_columns_of_text_are_named():
    frame = pd.DataFrame({"a": [1.0, 2], "city": ["Rome", "Oslo"], "b": [3, 4]})
    says = "x is 'Rome' in sample 0, expected a number as in the others: column 'city' holds it"
    for table in (frame, frame.convert_dtypes(), pa.Table.from_pandas(frame)):
        one_line(says, from_arrays, table, [0, 1])
    one_line("number_text=True", from_arrays, frame[["city"]], [0, 1])


def test_a_row_whose_mask_hides_nothing_is_a_row():
    rows = [np.ma.array(row) for row in X]
    np.testing.assert_array_equal(from_arrays(rows, Y).x, X)
