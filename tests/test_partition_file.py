"""Partitions that somebody else has made: lists by client in JSON, arrays in an .npz."""

import json

import numpy as np
import pytest
from conftest import one_line

import fedjax_cfl as cfl

POOL = cfl.Pool(np.zeros((12, 2), np.float32), np.arange(12) % 3, 3)


def dealt(holdings) -> dict:
    """Returns client -> (training, test samples) of a partition."""
    names = holdings.client_names or range(holdings.owner.max() + 1)
    return {
        name: tuple(
            holdings.sample[(holdings.owner == k) & (holdings.test == side)].tolist()
            for side in (False, True)
        )
        for k, name in enumerate(names)
    }


def read(tmp_path, content, **more):
    """Returns the partition of a file of JSON or, of a dict of arrays, an .npz."""
    if isinstance(content, dict) and "client" in content:
        path = tmp_path / "p.npz"
        np.savez(path, **content)
    else:
        path = tmp_path / "p.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return cfl.partition.from_file(POOL, path=str(path), **more)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"train": {"b": [3, 1], "a": [0]}, "test": {"a": [5], "c": [6, 1]}},
         {"a": ([0], [5]), "b": ([3, 1], []), "c": ([], [6, 1])}),
        ({"train": [[4], [], [0, 1]], "test": [[5], [2]]},
         {0: ([4], [5]), 1: ([], [2]), 2: ([0, 1], [])}),
        ({"client": np.array(["z", "y", "z"]), "sample": np.array([3, 3, 0]),
          "split": np.array([0, 0, 1])}, {"y": ([3], []), "z": ([3], [0])}),
        ({"client": np.array([7, 9, 7]), "sample": np.array([2, 1, 0]), "split": np.zeros(3, int)},
         {7: ([2, 0], []), 9: ([1], [])}),
    ],
)  # fmt: skip
def test_samples_are_dealt_as_the_file_says(content, expected, tmp_path):
    assert dealt(read(tmp_path, content)) == expected


def test_without_a_split_each_client_tests_on_a_share(tmp_path):
    listed = {"10": [0, 1, 2, 3, 4], "9": [5, 6, 7, 8, 9]}
    holdings = read(tmp_path, listed, test_fraction=0.2)
    assert holdings.client_names == (9, 10)  # digits sort as numbers
    for name, (train, test) in dealt(holdings).items():
        assert len(train) == 4 and sorted(train + test) == listed[str(name)]
    again = read(tmp_path, listed, test_fraction=0.2, seed=1)
    assert dealt(again) != dealt(holdings)
    column = read(tmp_path, {"client": np.arange(12) % 4}, test_fraction=0)
    assert {name: sorted(train) for name, (train, _) in dealt(column).items()} == {
        k: [k, k + 4, k + 8] for k in range(4)
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[[0, 12]]", "has sample 12, expected numbers from 0 to 11"),
        ('{"a": [-1]}', "has sample -1, expected numbers from 0 to 11"),
        ('{"a": [3, 4, 3]}', "client 'a' has sample 3 twice"),
        ('{"train": {"a": [3]}, "test": {"a": [3]}}', "client 'a' has sample 3 twice"),
        ('{"a": [1.5]}', "client 'a' holds [1.5], expected a list of sample numbers"),
        ('{"a": [true]}', "client 'a' holds [True], expected a list"),
        ('{"a": 3}', "client 'a' holds 3, expected a list"),
        ("[[1" + "0" * 30 + "]]", "expected a list of sample numbers"),
        ('{"train": {"a": [1]}, "test": [[2]]}', "a list and an object, expected the same"),
        ("3", "holds a int, expected an object of lists"),
        ('{"train": 3, "test": 3}', "holds a int, expected an object of lists"),
        ("{}", "has no samples"),
        ("[[], []]", "has no samples"),
        ("[[1", "expected JSON, an object"),
        ({"client": np.zeros((2, 2))}, "client has shape (2, 2)"),
        ({"client": np.zeros(3)}, "client has shape (3,), expected (12,)"),
        ({"client": np.zeros(2), "sample": np.array([0.5, 1])}, "sample has shape (2,) and dtype"),
        (
            {"client": np.zeros(2), "sample": np.arange(2), "split": np.array([0, 2])},
            "split is '2' in sample 1",
        ),
    ],
)
def test_what_is_no_partition_is_one_line(content, says, tmp_path):
    one_line(says, read, tmp_path, content)


def test_no_file(tmp_path):
    one_line("file cannot be read", cfl.partition.from_file, POOL, path="absent.json")
    one_line("file cannot be read", cfl.partition.from_file, POOL, path="absent.npz")
    (tmp_path / "partition.pkl").write_bytes(b"\x80\x04anything")
    said = "is a pickle and is not opened, expected an .npz"
    one_line(said, cfl.partition.from_file, POOL, path=str(tmp_path / "partition.pkl"))


@pytest.mark.nightly
def test_a_run_on_a_partition_of_ones_own(fedjax_cfl, tmp_path):
    (tmp_path / "p.json").write_text(
        json.dumps({f"site {k}": [*range(k, 60, 6)] for k in range(6)})
    )
    line = "algorithm=fedavg model=mclr rounds=1 partition=from_file partition.path=p.json"
    status, out, error = fedjax_cfl(f"{line} run_dir=run")
    assert (status, error) == (0, "") and "6 clients, 10 classes, 54 train and 6 test" in out
    assert cfl.load_run("run").table["client"].tolist() == [f"site {k}" for k in range(6)]
    status, _, error = fedjax_cfl(line.replace("p.json", "''"))
    assert status == 2 and error.count("\n") == 1
