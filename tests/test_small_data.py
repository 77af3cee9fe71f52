"""Files of a few clients, or of one sample a client; what of a file a run does not use; settings
of the environment that would change numbers.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import call, one_line

import fedjax_cfl as cfl
from fedjax_cfl.cli import launch
from fedjax_cfl.cli.build import (
    build,
    deal_samples,
    describe_unused,
    resolve_settings,
    shrink_cohort,
)
from fedjax_cfl.data.drift import none
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.results import read_clients
from fedjax_cfl.simulation.compiler import JAX_SETTINGS, check_jax_settings
from fedjax_cfl.simulation.program import compile_run
from fedjax_cfl.simulation.rounds import Plan, Setup


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes own.npz of some clients in the current folder; returns what makes settings of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")  # other tests may have started JAX already
    launch.show_notes()

    def write(clients: int, samples: int = 200, **more):
        x, client = np.random.default_rng(0).normal(size=(samples, 4)), np.arange(samples) % clients
        np.savez("own.npz", x=x, y=np.arange(samples) % 3, client=client, **more)
        return lambda *overrides: resolve_settings(
            ["dataset=npz", "dataset.source.path=own.npz", *overrides]
        )

    return write


def test_all_of_a_few_clients_take_part(own, capsys):
    ask = own(5)
    config = ask("algorithm=ifca")
    build(config)
    said = capsys.readouterr().out
    assert config["clients_per_round"] == 5
    assert config["algorithm"]["select"]["clients_per_round"] == 5
    assert "clients_per_round=5: all clients of the data, fewer than the 20" in said
    one_line("clients_per_round=10: must be at most 5", build, ask("clients_per_round=10"))
    config = ask("algorithm=fedavg")
    shrink_cohort(config, 20)
    assert config["clients_per_round"] == 20 and not capsys.readouterr().out


@pytest.mark.parametrize("more", ["", " seeds=2"])
def test_as_many_as_the_default_are_refused_where_they_are_asked_for(more, own, fedjax_cfl):
    own(5)
    line = "dataset=npz dataset.source.path=own.npz clients_per_round=20 algorithm=fedavg run_dir=r"
    status, _, err = fedjax_cfl(line + more)
    assert status == 2 and not Path("r").exists()
    assert err == "fedjax-cfl: clients_per_round=20: must be at most 5, the number of clients\n"


def test_clients_of_one_sample_are_told_why(own):
    ask = own(100, samples=100)
    one_line(
        "each has one sample, which is for testing, expected at least one; give clients two",
        build,
        ask(),
    )


@pytest.mark.parametrize(
    ("partition", "unused"),
    [("iid", "client, split, concept of the file are not used"), ("auto", ""), ("by_user", "")],
)
def test_what_of_a_file_is_not_used_is_said(partition, unused, own):
    ask = own(5, concept=np.arange(5) % 2, split=np.arange(200) // 5 % 4 == 0)
    config = ask(f"partition={partition}", "dataset.clients=4")
    said = describe_unused(config, *deal_samples(config))
    assert (unused in said) if unused else said is None


def test_clients_of_a_file_are_as_many_as_are_asked_for(own, fedjax_cfl):
    """Its own names stay; what no part of a run reads is refused before anything is read."""
    own(5)
    line = "dataset=npz dataset.source.path=own.npz algorithm=fedavg rounds=1 curves=false"
    status, out, err = fedjax_cfl(f"{line} dataset.clients=3 clients_per_round=3 run_dir=r")
    assert (status, err) == (0, "") and ": 3 clients," in out and "not used" not in out
    names = read_clients("r")["client"]
    assert len(set(names)) == 3 and set(names) < set(range(5))
    for wrong, says in (
        ("dataset.clients=9", "partition.clients=9: at most 5 clients are possible"),
        ("dataset.clients=9 partition.clients=3", "dataset.clients=9: is not read by partition"),
        ("partition=from_file partition.path=a.json dataset.clients=3", "is not read by partition"),
    ):
        status, _, err = fedjax_cfl(f"{line} {wrong} run_dir=other")
        assert status == 2 and says in err and err.count("\n") == 1 and not Path("other").exists()


def test_times_of_a_file_are_said_to_be_unused_without_a_drift_that_reads_them(own):
    ask = own(5, time=np.arange(200))
    for drift, unused in (("none", True), ("by_time", False)):
        config = ask(f"drift={drift}", "resident=device")
        said = describe_unused(config, *deal_samples(config))
        assert (said == "time of the file is not used (drift=by_time uses it)") == unused


def test_what_a_refused_run_has_written_is_removed(own, fedjax_cfl, monkeypatch):
    own(5)

    def refuse(*arguments):
        raise InputError("algorithm: refused when it is compiled")

    monkeypatch.setattr(launch, "train_in_dir", refuse)
    monkeypatch.setattr(launch, "train_grid", refuse)
    for more, folder in ((" run_dir=r", "r"), (" seeds=2 run_dir=g", "g")):
        status, _, err = fedjax_cfl("dataset=npz dataset.source.path=own.npz rounds=1" + more)
        assert (status, err) == (2, "fedjax-cfl: algorithm: refused when it is compiled\n")
        assert [path.name for path in Path.cwd().iterdir()] == ["own.npz"], folder
    Path("mine").mkdir()  # nothing is written into it before the clients are too few
    line = "dataset=npz dataset.source.path=own.npz rounds=1 run_dir=mine clients_per_round=50"
    assert fedjax_cfl(line)[0] == 2 and Path("mine").is_dir()


def test_settings_that_hydra_cannot_use_are_refused_in_one_line(fedjax_cfl):
    for line, says in (
        ("hydra.verbose=[1]", "settings of Hydra are for sweeps; use -m, or leave it out"),
        ("-m hydra.verbose=[1] seed=0,1", "Hydra cannot use it: "),
    ):
        status, _, err = fedjax_cfl(line)
        assert status == 2 and err.count("\n") == 1
        assert err.startswith(f"fedjax-cfl: hydra.verbose=[1]: {says}")


@pytest.mark.nightly
def test_it_is_said_once_and_every_run_of_a_grid_has_all_of_a_few_clients(own, fedjax_cfl):
    own(5, split=np.arange(200) // 5 % 4 == 0)
    line = "dataset=npz dataset.source.path=own.npz partition=iid dataset.clients=5 rounds=1"
    line += " algorithm=fedavg vectorize=[local.lr] local.lr=0.1,0.2 run_dir=r"
    line += " evaluate.new_clients=0.2"
    status, out, err = fedjax_cfl(line)
    assert (status, err) == (0, "")
    assert out.count("client, split of the file are not used") == 1
    for member in "01":
        settings = (Path("r") / member / ".hydra" / "config.yaml").read_text()
        assert "clients_per_round: 4" in settings and "clients_per_round: 20" not in settings


@pytest.mark.parametrize(
    ("name", "value"),
    [("jax_enable_x64", True), ("jax_default_prng_impl", "rbg"), ("jax_debug_nans", True)],
)
def test_numbers_do_not_depend_on_the_environment(name, value, toy, linear, local):
    check_jax_settings()
    assert name in JAX_SETTINGS
    jax.config.update(name, value)
    try:
        fedavg = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(3))
        with pytest.raises(InputError, match=f"{name.upper()}={value}: runs need"):
            cfl.run(fedavg, linear, toy, jax.random.key(0), rounds=1)
    finally:
        jax.config.update(name, JAX_SETTINGS[name])


def test_a_platform_that_is_not_there_is_one_line(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'foo'")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "foo")
    one_line("JAX_PLATFORMS=foo: JAX cannot use it: Unable to init", cfl.make_mesh)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("+hydra.foo=1", "+hydra.foo=1: unknown setting"),
        ("-m algorithm=fedavg,ifca algorithm.m=2", "dataset.groups=2 is m of every method"),
    ],
)
def test_settings_that_do_not_exist(line, says, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, line) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.nightly
def test_a_run_that_goes_on_plans_the_same_memory(toy, linear, local):
    """What the start takes, which it does not compile, is not counted in the summary."""
    fedavg = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(3))
    setup = Setup(fedavg, linear, toy, none(), local.execution.mesh)
    plan, key = Plan(1, 1, "none"), jax.random.key(0)
    planned = [compile_run(setup, key, plan, fresh).compiled.memory for fresh in (True, False)]
    assert planned[0] == planned[1]
