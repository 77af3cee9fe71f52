"""Pipes, names that lead out of a folder and aliases of aliases in a run: one line, no hanging."""

import json
import os
import threading

import numpy as np
import pytest

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import atomic_folder, checkpoint, results
from fedjax_cfl.runs.run_dir import check_run_dir

TREE = {"a": np.arange(3.0)}
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


@pytest.fixture
def saved(tmp_path):
    return checkpoint.save(tmp_path / "final", 1, TREE, {}, {})


def replace_by_pipe(path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["manifest.json", "checkpoint.json", "arrays/_METADATA"])
def test_a_pipe_in_a_checkpoint_is_refused(name, saved):
    replace_by_pipe(saved / name)
    assert "is not a regular file" in answer(lambda: checkpoint.load_arrays(saved))


def edit_manifest(saved, change) -> None:
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["../../endless", "/dev/zero", "arrays/../../../endless"])
def test_a_name_out_of_the_folder_is_refused(name, saved, tmp_path):
    os.mkfifo(tmp_path / "endless")
    edit_manifest(saved, lambda manifest: manifest.update({name: "0"}))
    said = answer(lambda: checkpoint.load_arrays(saved))
    assert f"manifest.json names {name!r}, which is not in the folder" in said


def test_a_link_to_a_device_is_refused(saved):
    (saved / "arrays" / "_METADATA").unlink()
    (saved / "arrays" / "_METADATA").symlink_to("/dev/zero")
    assert "not a regular file" in answer(lambda: checkpoint.load_arrays(saved))


def test_what_the_manifest_does_not_name_is_not_read(saved):
    edit_manifest(saved, lambda manifest: manifest.pop("arrays/_METADATA"))
    replace_by_pipe(saved / "arrays" / "_METADATA")
    assert "is not in manifest.json" in answer(lambda: checkpoint.load_arrays(saved))
    (saved / "manifest.json").write_text("[1]")
    assert "no JSON object" in answer(lambda: atomic_folder.read_manifest(saved))


@pytest.mark.parametrize("name", ["metrics.jsonl", "assignments.part", "run.log", "checkpoints"])
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
    assert "cannot be read (it has an alias, *name), expected what a run writes" in said


def test_settings_without_aliases_are_read_as_before(tmp_path):
    (tmp_path / ".hydra").mkdir()
    text = "model: {module: {a: '*b', c: 1e-3, d: [1, null]}}\n"
    (tmp_path / ".hydra" / "config.yaml").write_text(text)
    expected = {"a": "*b", "c": "1e-3", "d": [1, None]}
    assert results.read_settings(tmp_path)["model"]["module"] == expected
