"""Comparing runs: files that no run wrote end in one line and nothing is written; names
are drawn as they are.
"""

import json
from pathlib import Path

import pytest

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import compare

NESTED = b"[" * 10_000 + b"]" * 10_000


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Works in an empty folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


ROW = {"round": 1, "accuracy": 0.5, "units_up": 3, "units_down": 3, "wall_s": 1.0}
SUMMARY = {"algorithm": "fedavg", "dataset": "digits", "seed": 0, "overrides": ["rounds=3"]}
COMPARE = {
    "summary garbage": (b"\x00\xff garbage", None, "summary.json: not valid JSON"),
    "summary empty": (b"", None, "summary.json: not valid JSON"),
    "summary a list": ([1], None, "summary.json: expected a JSON object"),
    "summary nested": (NESTED, None, "nested too deeply"),
    "summary a number of 9,999 digits": (b"9" * 9999, None, "not valid JSON"),
    "algorithm a list": (SUMMARY | {"algorithm": [1]}, None, "no plain text"),
    "algorithm of lines": (SUMMARY | {"algorithm": "a\nb"}, None, "no plain text"),
    "algorithm of half a sign": (SUMMARY | {"algorithm": "\ud800"}, None, "no plain text"),
    "algorithm of 10,000 signs": (SUMMARY | {"algorithm": "z" * 10_000}, None, "no plain text"),
    "overrides a number": (SUMMARY | {"overrides": 5}, None, "no plain text"),
    "overrides of numbers": (SUMMARY | {"overrides": [5]}, None, "no plain text"),
    "seed a list": (SUMMARY | {"seed": [1]}, None, "no plain text"),
    "a measure of text": (SUMMARY | {"wall_s": "long"}, None, "wall_s is no number"),
    "metrics garbage": (SUMMARY, b"garbage\n{}\n", "metrics.jsonl, line 1"),
    "metrics nested": (SUMMARY, NESTED, "not a JSON object"),
    "round of text": (SUMMARY, b'{"round": "1"}\n{}\n', "metrics.jsonl, line 1"),
    "round huge": (SUMMARY, ROW | {"round": 10**400}, "round is no number"),
    "round true": (SUMMARY, ROW | {"round": True}, "not a JSON object with an integer"),
    "accuracy of text": (SUMMARY, ROW | {"accuracy": "high"}, "accuracy is no number"),
    "accuracy a list": (SUMMARY, ROW | {"accuracy": [0.5]}, "accuracy is no number"),
    "accuracy NaN": (SUMMARY, ROW | {"accuracy": float("nan")}, "accuracy is no number"),
    "accuracy huge": (SUMMARY, ROW | {"accuracy": 10**400}, "accuracy is no number"),
    "bytes infinite": (SUMMARY, ROW | {"bytes_up": float("inf")}, "bytes_up is no number"),
    "ari an object": (SUMMARY, ROW | {"ari": {}}, "ari is no number"),
    "discrepancy of text": (SUMMARY, ROW | {"discrepancy": "x"}, "discrepancy is no number"),
}


def run_of(folder, summary, metrics):
    for name, content in (
        ("summary.json", summary),
        ("metrics.jsonl", ROW if metrics is None else metrics),
    ):
        content = content if isinstance(content, bytes | str) else json.dumps(content)
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def refuses(says, run):
    with pytest.raises(InputError) as caught:
        compare.compare([run])
    text = str(caught.value)
    assert "\n" not in text and says in text and str(run) in text and len(text) < 1000, text
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("name", COMPARE)
def test_hostile_files_are_refused_in_one_line(name, tmp_path):
    summary, metrics, says = COMPARE[name]
    refuses(says, run_of(tmp_path / "run", summary, metrics))


def test_other_files_are_refused(tmp_path, monkeypatch):
    run = run_of(tmp_path / "run", SUMMARY, None)
    monkeypatch.setattr(compare, "MAX_RUN_FILE_BYTES", 150)
    (run / "metrics.jsonl").write_text(json.dumps(ROW) + "\n" * 200)
    refuses("expected at most 150", run)
    (run / "metrics.jsonl").unlink()
    refuses("metrics.jsonl: file is missing", run)
    (run / "metrics.jsonl").mkdir()
    refuses("metrics.jsonl: file is missing or no regular file", run)
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()
    refuses("summary.json: file is missing or no regular file", run)


def test_a_file_where_the_folder_should_be(tmp_path):
    run, out = run_of(tmp_path / "run", SUMMARY, None), tmp_path / "taken"
    out.write_bytes(b"precious")
    for path in (out, out / "inside"):
        with pytest.raises(InputError, match="cannot be written"):
            compare.compare([run], path)
    assert out.read_bytes() == b"precious"


def test_names_are_drawn_as_they_are(tmp_path):
    run = run_of(tmp_path / "run", SUMMARY | {"algorithm": r"$\frac$ | _[red]"}, None)
    (run / ".hydra").mkdir()
    assert compare.compare([run])[0]["label"] == r"$\frac$ | _[red]"
    assert sorted(path.name for path in Path.cwd().iterdir()) == [
        "compare.csv",
        "compare.md",
        "compare.png",
    ]
