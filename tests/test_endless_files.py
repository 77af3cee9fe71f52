"""Pipes, names that lead out of a folder and aliases of aliases in a run: one line, no hanging."""

import os
import threading

import pytest

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import results
from fedjax_cfl.runs.run_dir import check_run_dir

SECONDS = 20  # of what takes milliseconds


def answer(call) -> str:
    """Returns the one line with which a call refuses, within the time limit."""
    said = []

    def run():
        try:
            call()
            said.append("nothing")
        except (InputError, ValueError) as error:
            said.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert said, "it hangs"
    assert "\n" not in said[0]
    return said[0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "assignments.jsonl", "run.log", "checkpoints"])
def test_a_run_does_not_begin_beside_a_pipe(name, tmp_path):
    os.mkfifo(tmp_path / name)
    said = answer(lambda: check_run_dir(str(tmp_path), "auto"))
    assert said.endswith(
        f"{name} in it is neither a file nor a folder; remove it, or choose another"
    )


def test_pipes_among_the_results_of_a_run_are_refused(tmp_path):
    os.mkfifo(tmp_path / "clients.parquet")
    assert "not a regular file" in answer(lambda: results.read_clients(tmp_path))
    (tmp_path / ".hydra").mkdir()
    os.mkfifo(tmp_path / ".hydra" / "config.yaml")
    assert "not a regular file" in answer(lambda: results.read_settings(tmp_path))


@pytest.mark.parametrize("kind", ["lists", "merged"])
def test_aliases_of_aliases_are_refused(kind, tmp_path):
    (tmp_path / ".hydra").mkdir()
    lines = ["model: {module: {a: 1}}", "k0: &k0 {x: 1}"]
    for number in range(1, 12):
        many = ", ".join([f"*k{number - 1}"] * 12)
        node = f"[{many}]" if kind == "lists" else f"{{<<: [{many}]}}"
        lines.append(f"k{number}: &k{number} {node}")
    (tmp_path / ".hydra" / "config.yaml").write_text("\n".join(lines))
    said = answer(lambda: results.read_settings(tmp_path))
    assert said.endswith("cannot be read: it has an alias, *name")


def test_settings_without_aliases_are_read_as_before(tmp_path):
    (tmp_path / ".hydra").mkdir()
    text = "model: {module: {a: '*b', c: 1e-3, d: [1, null]}}\n"
    (tmp_path / ".hydra" / "config.yaml").write_text(text)
    expected = {"a": "*b", "c": "1e-3", "d": [1, None]}
    assert results.read_settings(tmp_path)["model"]["module"] == expected
