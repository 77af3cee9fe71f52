"""Programs that are written to the user's cache, so that another process need not trace them."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lasting_rows, nightly

import fedjax_cfl as cfl
from fedjax_cfl.cli import build, launch
from fedjax_cfl.cli.conf import COMMAND
from fedjax_cfl.cli.settings import resolve_settings
from fedjax_cfl.errors import InputError
from fedjax_cfl.simulation import exports, program
from fedjax_cfl.simulation.exports import Exports
from fedjax_cfl.system.reports import no_traffic

SMALL = "algorithm.m=2 dataset.clients=12 clients_per_round=4 rounds=2 model=mclr local.epochs=1"
SMALL += " curves=false"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    monkeypatch.setattr(exports, "find_compile_cache", lambda: tmp_path)
    return tmp_path / "exported"


@pytest.fixture
def traced(folder):
    """A function, and how often it has been traced."""
    calls = []

    def step(state, count):
        calls.append(count)
        keys = jax.random.split(state["key"])
        return {"sum": state["x"] * count, "bill": no_traffic(), "keys": keys}

    return step, calls


STATE = {"x": np.arange(3.0, dtype=np.float32), "key": jax.random.key(3)}


def test_another_process_calls_what_one_has_traced(traced, folder):
    step, calls = traced
    expected = jax.jit(step)(STATE, 2)
    calls.clear()
    for made_of in ("a", "a", "b"):  # as three processes would
        found = jax.jit(Exports(made_of).wrap("step", step, STATE, 0))(STATE, 2)
        jax.tree.map(np.testing.assert_array_equal, *map(key_data, (found, expected)))
        assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert len(calls) == 2
    assert len(list(folder.iterdir())) == 2


def key_data(tree):
    return tree | {"keys": jax.random.key_data(tree["keys"])}


@pytest.mark.parametrize("changed", ["digest_code", "jax.devices", "optax.__version__"])
def test_other_code_devices_and_versions_trace_anew(traced, monkeypatch, changed):
    step, calls = traced
    Exports("a").wrap("step", step, STATE, 0)
    other = (lambda: "") if changed == "digest_code" else (lambda: jax.local_devices()[:0])
    other = "0" if changed.endswith("version__") else other
    monkeypatch.setattr(f"fedjax_cfl.simulation.exports.{changed}", other)
    Exports("a").wrap("step", step, STATE, 0)
    assert len(calls) == 2


def test_the_digest_is_of_the_text_of_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "HOME", tmp_path)
    (tmp_path / "room").mkdir()
    digests = set()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "room" / "a.py").write_text(text)
        digests.add(exports.digest_code.__wrapped__())
    (tmp_path / "room" / "a.py").rename(tmp_path / "room" / "b.py")
    assert len(digests | {exports.digest_code.__wrapped__()}) == 3


def test_a_file_that_is_not_as_it_was_written_is_traced_anew(traced, folder):
    step, calls = traced
    Exports("a").wrap("step", step, STATE, 0)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    for bad in (b"", good[:100], good[:200] + b"?" + good[201:]):
        path.write_bytes(bad)
        Exports("a").wrap("step", step, STATE, 0)
        assert path.read_bytes()[exports.DIGEST :]
    assert len(calls) == 4


def test_what_cannot_be_written_is_traced_as_it_is(folder):
    def ask(x):
        return jax.pure_callback(np.sin, x, x)

    x = jnp.ones(2)
    assert Exports("a").wrap("ask", ask, x) is ask
    assert not folder.exists()


def test_what_a_method_says_while_it_is_traced_is_said(folder):
    def refuse(x):
        raise InputError("algorithm: cannot use it")

    with pytest.raises(InputError, match="cannot use it"):
        jax.jit(Exports("a").wrap("refuse", refuse, jnp.ones(2)))(jnp.ones(2))


def test_files_that_nobody_reads_go(traced, folder, monkeypatch):
    step, calls = traced
    monkeypatch.setattr(exports, "MOST_FILES", 2)
    for made_of in "ab":
        Exports(made_of).wrap("step", step, STATE, 0)
    for path in folder.iterdir():
        os.utime(path, (1, 1))  # long ago: the clock of files is coarse
    for made_of in "ac":
        Exports(made_of).wrap("step", step, STATE, 0)
    assert len(calls) == 3
    Exports("a").wrap("step", step, STATE, 0)
    assert len(calls) == 3 and len(list(folder.iterdir())) == 2


def test_without_a_folder_programs_are_traced_every_time(traced, tmp_path, monkeypatch):
    step, calls = traced
    (tmp_path / "file").touch()
    monkeypatch.setattr(exports, "find_compile_cache", lambda: tmp_path / "file")
    for _ in range(2):
        Exports("a").wrap("step", step, STATE, 0)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("settings", "lasting"),
    [
        ("", True),
        ("personal=ditto drift=swap_all schedule=cosine", True),
        ("algorithm._target_=test_exports.own_method", False),
        ("callbacks=[{_target_:fedjax_cfl.Callback},{_target_:test_exports.Own}]", False),
        ("clock=fedscale clock.path=devices.csv", False),
    ],
)
def test_only_runs_of_known_parts_are_kept(settings, lasting, monkeypatch, tmp_path):
    (tmp_path / "devices.csv").write_text("computation,communication\n1,2\n")
    monkeypatch.chdir(tmp_path)
    config = resolve_settings(["algorithm=ifca", *SMALL.split(), *settings.split()])
    setup, local = build.build(config)
    assert not build.find_inputs(config, setup, local).lasting  # others may have changed functions
    monkeypatch.setenv(COMMAND, "1")
    assert build.find_inputs(config, setup, local).lasting is lasting


def own_method(task, local, system, m=2, **_):
    """A method of somebody's own."""
    from fedjax_cfl.algorithms import ifca

    return ifca(task, local, system, m=m)


class Own:
    """A callback of somebody's own."""


@pytest.mark.parametrize("method", ["ifca personal=ditto", nightly("flexcfl")])
def test_a_command_reads_what_one_before_has_written(method, fedjax_cfl, folder, monkeypatch):
    exported, real = [], exports.write_program
    monkeypatch.setenv(COMMAND, "1")
    monkeypatch.setattr(exports, "write_program", lambda *a: exported.append(a) or real(*a))

    def run(line):
        monkeypatch.setattr(launch, "STORE", program.Store())  # a process of its own
        assert fedjax_cfl(f"{SMALL} algorithm={method} drift=swap_all drift.p=0.5 {line}")[0] == 0

    run("run_dir=one")
    assert len(exported) == 3
    run("run_dir=two seed=0")
    run("run_dir=parts rounds=1")
    run("run_dir=parts")
    assert len(exported) == 3
    monkeypatch.delenv(COMMAND)
    run("run_dir=traced")
    for other in ("two", "parts", "traced"):
        assert lasting_rows("one") == lasting_rows(other)
        np.testing.assert_equal(*(cfl.load_run(name).final.models for name in ("one", other)))
