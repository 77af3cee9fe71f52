"""Several runs of one command, one after another by the same programs, and callbacks."""

import json

import jax
import numpy as np
import pytest
from conftest import lasting_rows, nightly

import fedjax_cfl as cfl
from fedjax_cfl.cli import build, launch
from fedjax_cfl.cli.settings import resolve_settings
from fedjax_cfl.cli.sweep import vary_data
from fedjax_cfl.data.padding import measure_room, pad_data, widen_room
from fedjax_cfl.runs.results import read_summary
from fedjax_cfl.simulation import program

SMALL = (
    "dataset.clients=12 clients_per_round=4 rounds=3 local.epochs=1 model=mclr curves=false"
    " eval_auxiliary=false"
)


@pytest.fixture
def compiled(monkeypatch) -> list:
    """What is compiled for each run that does not find its programs."""
    calls, real = [], program.compile_programs
    monkeypatch.setattr(launch, "STORE", program.Store())

    def compile_programs(*given):
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(program, "compile_programs", compile_programs)
    return calls


@pytest.mark.parametrize(
    ("settings", "values", "compiles"),
    [
        nightly("algorithm=flexcfl algorithm.m=2", "algorithm.eta_g=0.1,0.4,0.7", 1),
        # with room for all seeds from the first on
        ("algorithm=fesem algorithm.m=2 drift=swap_all drift.p=0.3", "seed=0,1,2", 1),
        ("algorithm=fedavg personal=ditto", "local.lr=0.1,0.2", 1),
    ],
)
def test_runs_of_a_sweep_share_programs_and_are_the_runs_alone(
    settings, values, compiles, fedjax_cfl, compiled
):
    name, _, listed = values.partition("=")
    assert fedjax_cfl(f"-m {SMALL} {settings} {values} run_dir=sweep")[0] == 0
    assert len(compiled) == compiles
    for number, value in enumerate(listed.split(",")):
        assert fedjax_cfl(f"{SMALL} {settings} {name}={value} run_dir=alone{number}")[0] == 0
        folders = f"sweep/{number}", f"alone{number}"
        assert lasting_rows(folders[0]) == lasting_rows(folders[1])
        one, other = map(cfl.load_run, folders)
        np.testing.assert_equal(one.final.models, other.final.models)
        np.testing.assert_equal(one.table, other.table)
    last = read_summary(folders[0])
    assert last["programs"] == last["programs_from_cache"] == 3


CHANGES = [nightly("clients_per_round=4,5"), nightly("local.epochs=1,2"), "algorithm.m=2,3"]


@pytest.mark.parametrize("change", CHANGES)
def test_runs_of_other_shapes_or_code_do_not(change, fedjax_cfl, compiled):
    name = change.partition("=")[0]
    words = f"{SMALL} algorithm=ifca algorithm.m=2".split()
    line = " ".join(word for word in words if not word.startswith(f"{name}="))
    assert fedjax_cfl(f"-m {line} {change} run_dir=sweep")[0] == 0
    assert len(compiled) == 2


def test_how_long_a_run_is_makes_no_other_programs():
    """Unless a table of all rounds says who takes part."""

    def recipe(line):
        settings = resolve_settings([*SMALL.split(), "algorithm=fedavg", *line.split()])
        return build.find_inputs(settings, *build.build(settings)).recipe

    assert recipe("rounds=3") == recipe("rounds=4 discard=none eval_every=2")
    assert recipe("preset=ref rounds=3") != recipe("preset=ref rounds=4")


@pytest.mark.parametrize(
    ("lines", "varied"),
    [
        (("seed=0", "seed=1"), True),
        (("partition=from_file partition.path=own.json seed=0", "seed=0"), True),
        (("dataset=sine partition=auto seed=0", "dataset=sine partition=auto seed=1"), True),
        (("local.lr=0.1", "local.lr=0.2"), False),
        (("dataset=digits", "dataset=mnist"), False),  # nothing is shared
    ],
)
def test_room_is_left_where_samples_are_dealt_otherwise(lines, varied):
    assert vary_data([resolve_settings(line.split()) for line in lines]) is varied


def test_seeds_go_on_where_they_stopped(fedjax_cfl, compiled):
    line = f"{SMALL} algorithm=fedavg seeds=3 run_dir=series"
    assert fedjax_cfl(line)[0] == 0 and len(compiled) == 1
    before = [lasting_rows(f"series/{seed}") for seed in range(3)]
    assert len({json.dumps(rows) for rows in before}) == 3
    status, _, error = fedjax_cfl(line)
    assert status == 2 and "series: already holds this run, finished after 3 rounds" in error
    status, out, _ = fedjax_cfl(line.replace("seeds=3", "seeds=4"))
    assert status == 0 and out.count("passed over") == 3
    assert [lasting_rows(f"series/{seed}") for seed in range(3)] == before
    assert fedjax_cfl(f"{SMALL} algorithm=fedavg seed=3 run_dir=alone")[0] == 0
    assert lasting_rows("series/3") == lasting_rows("alone")


@pytest.mark.nightly
def test_seeds_of_other_sizes_go_on_with_more_rounds(fedjax_cfl, compiled):
    line = f"{SMALL} algorithm=fesem algorithm.m=2"
    assert fedjax_cfl(f"{line.replace('rounds=3', 'rounds=2')} seeds=3 run_dir=series")[0] == 0
    assert len(compiled) == 2, "the data of the seeds have one size, so nothing is padded"
    status, out, error = fedjax_cfl(f"{line} seeds=3 run_dir=series")
    assert status == 0 and out.count("resuming after round 2") == 3, error
    for seed in range(3):
        assert fedjax_cfl(f"{line} seed={seed} run_dir=alone{seed}")[0] == 0
        assert lasting_rows(f"series/{seed}") == lasting_rows(f"alone{seed}")


@pytest.mark.nightly
def test_a_sweep_over_what_is_set_apart_is_the_runs_alone(fedjax_cfl):
    line = f"{SMALL} algorithm=fedavg"
    assert fedjax_cfl(f"-m {line} evaluate.validation=0.3,0 run_dir=sweep")[0] == 0
    for number, share in enumerate(("0.3", "0")):
        name = f"alone{number}"
        assert fedjax_cfl(f"{line} evaluate.validation={share} run_dir={name}")[0] == 0
        assert lasting_rows(f"sweep/{number}") == lasting_rows(name)


def test_a_bad_run_ends_no_sweep(fedjax_cfl):
    line = f"-m {SMALL.replace('clients_per_round=4 ', '')} algorithm=fedavg run_dir=sweep"
    status, _, error = fedjax_cfl(f"{line} clients_per_round=13,3")
    assert status == 2
    assert error.splitlines() == [
        "fedjax-cfl: clients_per_round=13: must be at most 12, the number of clients",
        "fedjax-cfl: 1 of 2 runs failed, 0; the same command with run_dir=sweep runs these again",
    ]
    assert read_summary("sweep/1")
    status, out, error = fedjax_cfl(f"{line} clients_per_round=13,3")
    assert status == 2 and out.count("passed over") == 1 and "1 of 2 runs failed" in error


def test_what_fails_alike_is_said_once_and_leaves_nothing(fedjax_cfl, tmp_path):
    status, _, error = fedjax_cfl("-m dataset=npz dataset.source.path=no.npz seed=0,1 run_dir=new")
    assert status == 2 and error.count("\n") == 1 and "no.npz" in error
    assert not list(tmp_path.iterdir())
    # seeds that fail together end no sweep either
    line = "-m dataset=npz dataset.source.path=no.npz,none.npz seeds=2 run_dir=new"
    status, out, error = fedjax_cfl(line)
    assert status == 2 and "goes on from there" not in out
    assert [text.split(":")[1] for text in error.splitlines()] == [" no.npz", " none.npz"]
    assert not list(tmp_path.iterdir())


MINE = """
import fedjax_cfl as cfl

class StopAfter(cfl.Callback):
    def __init__(self, rounds: int):
        self.rounds = rounds
    def on_start(self, run, take):
        print("begun", run.begun, run.settings["algorithm.name"], run.run_dir.name)
    def on_rows(self, row, grouping, take):
        return row["round"] >= self.rounds
    def on_end(self, take):
        print("ended", int(take().state.round))
"""


def test_callbacks_of_ones_own(fedjax_cfl, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    line = f"{SMALL} algorithm=fedavg run_dir=run"
    stop = "'callbacks=[{_target_:mine.StopAfter,rounds:2}]'"
    status, out, error = fedjax_cfl(f"{line} {stop}")
    assert "begun 0 fedavg run\n" in out and "ended 2\n" in out, error
    assert status == 143 and "stopped after round 2" in out
    assert fedjax_cfl(line)[0] == 0 and len(lasting_rows("run")) == 3
    for wrong, said in (
        ("[1]", "callbacks[0]=1: give {_target_:my_file.MyCallback}"),
        ("[{_target_:fractions.Fraction}]", "callbacks[0]._target_=fractions.Fraction: is no cfl"),
    ):
        status, _, error = fedjax_cfl(f"{SMALL} 'callbacks={wrong}' run_dir=other")
        assert status == 2 and error.count("\n") == 1 and said in error


def test_padded_data_hold_the_same(toy):
    room = widen_room(measure_room(toy))
    padded = pad_data(toy, room)
    assert measure_room(padded) == room != measure_room(toy)
    for side in ("train", "test"):
        own, wide = getattr(toy, side), getattr(padded, side)
        np.testing.assert_array_equal(wide.order[: own.order.size], own.order)
        np.testing.assert_array_equal(wide.size, own.size)
    spare = np.asarray(padded.owner[len(toy.y) :])
    assert spare.size and (spare == -1).all()


@pytest.fixture
def score(toy, linear, local, compiled, monkeypatch):
    """Returns f(size, seed, data) -> the losses of two rounds of FedAvg with so large a cohort, and
    how many of its programs were there.
    """
    monkeypatch.setattr(program, "OF_OBJECTS", program.Store())
    mesh, uniform = local.execution.mesh, cfl.select.uniform
    fedavg = {size: cfl.algorithms.fedavg(linear, local, uniform(size)) for size in (5, 6)}

    def run(size, seed, data=toy, rounds=2, discard="none"):
        key = jax.random.key(seed)
        found = cfl.run(fedavg[size], linear, data, key, rounds=rounds, discard=discard, mesh=mesh)
        return [row["train_loss"] for row in found.rows], found.programs["programs_from_cache"]

    return run


def test_runs_of_the_same_objects_share_programs(score, compiled):
    first, again, other = score(6, 0), score(6, 0), score(6, 1)
    assert len(compiled) == 1 and again[1] == other[1] == 3
    assert first[0] == again[0] != other[0]
    longer = score(6, 0, rounds=3, discard="met")
    assert longer[0][:2] == first[0] and longer[1] == 3 and len(compiled) == 1
    assert score(5, 0)[0] != first[0] and len(compiled) == 2


@pytest.mark.nightly
def test_wider_data_and_settings_of_jax_have_programs_of_their_own(score, compiled, toy):
    first = score(6, 0)[0]
    wider = jax.tree.map(jax.numpy.asarray, pad_data(toy, widen_room(measure_room(toy))))
    assert score(6, 0, wider)[0] == pytest.approx(first, rel=1e-5) and len(compiled) == 2
    with jax.default_matmul_precision("bfloat16"):
        score(6, 0)
    assert len(compiled) == 3, "what JAX is told to do is in no object"
