"""Random files and random command lines: each is accepted or refused with an
`InputError`, and nothing is written.

FEDJAX_CFL_EXAMPLES sets the number of examples of each test of a reader, for a longer
search; the nightly run takes five times as many.
"""

import gzip
import io
import json
import os
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedjax_cfl.cli.main import COMMANDS, open_hydra, parse_flags
from fedjax_cfl.cli.names import compose, list_known, read_line
from fedjax_cfl.cli.settings import check_line
from fedjax_cfl.data.datasets import csv, files, leaf, parquet, readers
from fedjax_cfl.errors import InputError

# of each test of a reader, and of the one of command lines, which is slower
EXAMPLES = int(os.environ.get("FEDJAX_CFL_EXAMPLES", "60"))
LINES = 15
TIMES = pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.nightly)])
some = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
HEX = "0123456789abcdef"


def npz(compressed, **arrays):
    """Returns the bytes of an npz file."""
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, **arrays)
    return out.getvalue()


def table(compression, use_dictionary):
    """Returns the bytes of a Parquet file of lists, text, whole numbers and dates."""
    out, lists = io.BytesIO(), pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int8()))
    times = pa.array([1, 2, 3], pa.timestamp("s"))
    columns = {"a": lists, "y": ["u", "v", "u"], "c": [1, 2, 1], "t": times}
    pyarrow.parquet.write_table(
        pa.table(columns), out, compression=compression, use_dictionary=use_dictionary
    )
    return out.getvalue()


PARTS = dict(y="y", x="a", client="c", time="t")


X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 1])
USER = {"x": [[1.5, 2, 3], [4, 5, 6]], "y": [0, 1]}
SHARD = json.dumps(
    {"users": ["a", "b"], "num_samples": [2, 2], "user_data": {"a": USER, "b": USER}}
).encode()
READ = {
    "idx": (
        readers.read_idx,
        bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]) + bytes(range(24)),
    ),
    "npz": (files.npz, npz(False, x=X, y=Y, client=Y, split=Y % 2)),
    "packed npz": (files.npz, npz(True, x=X, y=Y, client=Y, split=Y % 2)),
    "leaf": (leaf, SHARD),
    "csv": (lambda path: csv(path, **PARTS), b"a,y,c,t\n1.5,u,7,2020-01-01\n2,v,8,2020-01-02\n"),
    "parquet": (lambda path: parquet(path, **PARTS), table("snappy", True)),
    "plain parquet": (lambda path: parquet(path, **PARTS), table("none", False)),
}


@st.composite
def mutated(draw, content):
    """Returns `content` with 1 to 8 changes: a byte flipped or replaced, bytes
    inserted, doubled or removed, the end cut off.
    """
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        length = draw(st.integers(1, 12))
        change = draw(st.integers(0, 5))
        if change == 0 and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif change == 1:
            content[at : at + length] = draw(st.binary(min_size=length, max_size=length))
        elif change == 2:
            content[at:at] = draw(
                st.sampled_from(
                    [
                        b"[",
                        b"]",
                        b"-",
                        b"9" * 30,
                        b"\xff" * 4,
                        b"NaN",
                        b'"',
                        b",",
                        b"\0",
                        b"PK\x01\x02",
                    ]
                )
            )
        elif change == 3:
            content[at:at] = content[at : at + 4 * length]
        elif change == 4:
            del content[at : at + length]
        elif draw(st.booleans()):
            del content[at:]
    return bytes(content)


def reads_or_refuses(path, read, content, packed):
    """Returns whether a file was accepted; any exception but an InputError of one line
    is the test's failure.
    """
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    try:
        read(path)
    except InputError as error:
        assert "\n" not in str(error) and path.name in str(error) and len(str(error)) < 1000
        return False
    finally:
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    return True


@TIMES
@pytest.mark.parametrize("kind", READ)
def test_random_bytes(kind, tmp_path, times):
    read, good = READ[kind]

    @settings(some, max_examples=times * EXAMPLES)
    @given(
        st.one_of(
            st.binary(max_size=400),
            st.builds(lambda head, rest: good[:head] + rest, st.integers(1, 40), st.binary()),
        ),
        st.booleans(),
    )
    def search(content, packed):
        reads_or_refuses(tmp_path / "f", read, content, packed)

    search()


@TIMES
@pytest.mark.parametrize("kind", READ)
def test_mutations_of_good_files(kind, tmp_path, times):
    read, good = READ[kind]
    assert reads_or_refuses(tmp_path / "f", read, good, False)

    @settings(some, max_examples=times * EXAMPLES)
    @given(mutated(good), st.booleans(), st.none() | st.data())
    def search(content, packed, inside):
        if packed and inside is not None:  # the mutation is in the gzip stream itself
            content, packed = inside.draw(mutated(gzip.compress(good, 1, mtime=0))), False
        reads_or_refuses(tmp_path / "f", read, content, packed)

    search()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["a", "x", "", 10**400, -(2**63), 1e308]),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y", "a"]), inside, max_size=3)
    ),
    max_leaves=12,
)


@TIMES
def test_leaf_of_any_json(tmp_path, times):
    rows = (
        st.lists(st.lists(st.integers(-5, 5) | st.floats(), max_size=3) | values, max_size=3)
        | values
    )
    user = (
        st.fixed_dictionaries({"x": rows, "y": st.lists(st.integers(-1, 5), max_size=3) | values})
        | values
    )
    data = st.dictionaries(st.sampled_from(["a", "b"]), user) | values
    names = st.lists(st.sampled_from(["a", "b"]), max_size=3) | values
    shards = st.fixed_dictionaries(
        {},
        optional={
            "users": names,
            "num_samples": st.lists(st.integers(0, 3)) | values,
            "user_data": data,
        },
    )

    @settings(some, max_examples=times * EXAMPLES)
    @given(shards | values, st.booleans())
    def search(shard, packed):
        reads_or_refuses(tmp_path / "f", leaf, json.dumps(shard).encode(), packed)

    search()


@TIMES
def test_npz_of_any_header(tmp_path, times):
    descr = st.sampled_from(
        [
            "<f4",
            ">f8",
            "|O",
            "<U3",
            "|b1",
            "<M8[s]",
            "|V4",
            "<c16",
            "|u1",
            "<f2",
            "",
            3,
            None,
            [("a", "<f4")],
            "(2,)<f4",
        ]
    )
    shape = (
        st.lists(st.integers(-2, 5) | st.integers(), max_size=4).map(tuple)
        | st.integers()
        | st.none()
        | st.booleans()
    )
    header = (
        st.fixed_dictionaries(
            {"descr": descr, "fortran_order": st.booleans() | st.integers(), "shape": shape}
        ).map(repr)
        | st.text()
    )
    array = np.lib.format.magic(1, 0)

    @settings(some, max_examples=times * EXAMPLES)
    @given(header, st.binary(max_size=64))
    def search(text, data):
        content = text.encode("latin1", "replace")
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("x.npy", array + len(content).to_bytes(2, "little") + content + data)
            archive.writestr("y.npy", array + len(content).to_bytes(2, "little") + content + data)
        reads_or_refuses(tmp_path / "f", files.npz, out.getvalue(), False)

    search()


@pytest.fixture(scope="module")
def names():
    """Returns the names of all settings and groups, and some that do not exist."""
    with open_hydra():
        known = list_known(compose([])[0])
    return [
        *known,
        *(name.partition(".")[0] for name in known),
        "nope",
        "algorithm.nope",
        "hydra.run.dir",
        "",
    ]


NOISE = [
    "'",
    '"',
    "[",
    "]",
    "{",
    "}",
    "${",
    "\\",
    ",",
    ":",
    "=",
    "(",
    ")",
    "\n",
    "\0",
    "null",
    "???",
    "é",
    "名",
    "\ud800",
    " ",
    "~",
    "@",
    "nan",
]


@TIMES
def test_overrides(names, tmp_path, monkeypatch, times):
    monkeypatch.chdir(tmp_path)
    noise = st.lists(st.sampled_from(NOISE) | st.text(max_size=3), max_size=8).map("".join)
    plausible = (
        st.integers().map(str)
        | st.floats().map(str)
        | st.sampled_from(["true", "[1,2]", "{a:1}", "x" * 100_000, "[" * 50, "1" * 4000])
    )
    setting = st.builds(
        "{}{}{}".format,
        st.sampled_from(["", "", "", "+", "++", "~"]),
        st.sampled_from(names),
        noise | plausible.map("={}".format),
    )
    line = (
        st.builds(
            "{}{}={}".format,
            st.sampled_from(["", "", "+", "++"]),
            st.sampled_from(names),
            noise | plausible,
        )
        | setting
        | noise
    )

    @settings(some, max_examples=times * LINES)
    @given(
        st.lists(line, min_size=1, max_size=2),
        st.sampled_from([[], [], [], ["-m"], ["--cfg", "job"]]),
    )
    def search(lines, flags):
        try:
            _, asked = parse_flags([*flags, *lines])
            with open_hydra():
                check_line(read_line(asked.overrides, asked.multirun, COMMANDS))
        except InputError as error:
            assert str(error)
        assert not list(tmp_path.iterdir())

    search()
