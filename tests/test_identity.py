"""What makes a run that run: its settings, its data, and the files that it has written itself."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import nightly

import fedjax_cfl as cfl
from fedjax_cfl.data.federated import federate
from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.runs import session
from fedjax_cfl.runs.results import read_metrics, read_summary
from fedjax_cfl.runs.resume import describe_end
from fedjax_cfl.runs.settings import digest_data, digest_identity, run_identity
from fedjax_cfl.simulation.callback import Callback

OURS = "fedjax_cfl.algorithms.ifca"

LINE = "algorithm=fedavg model=mclr local.epochs=1 clients_per_round=3 eval_auxiliary=false"
OWN = f"dataset=npz dataset.source.path=own.npz partition=by_user {LINE}"


def make_arrays(seed=0, samples=60):
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=samples)
    x = (np.eye(3, 4)[y] + 0.1 * rng.normal(size=(samples, 4))).astype(np.float32)
    return {"x": x, "y": y, "client": np.arange(samples) % 6}


def change(arrays, name):
    value = arrays[name].copy()
    value[-1] = value[0] if name == "client" else (value[-1] + 1) % 3
    return arrays | {name: value}


@pytest.mark.parametrize(
    ("name", "finished"),
    [
        ("x", False),
        nightly("y", False),
        nightly("client", True),
        *(nightly(name, True) for name in "xy"),
    ],
)
def test_a_file_that_has_changed_is_not_mixed_in(name, finished, fedjax_cfl, tmp_path, monkeypatch):
    """The numbers of a run that went on with other samples would be those of no data set."""
    arrays = make_arrays()
    np.savez(tmp_path / "own.npz", **arrays)
    if finished:
        assert fedjax_cfl(f"{OWN} rounds=2 run_dir=run")[0] == 0
    else:
        with monkeypatch.context() as patch:
            stop_in_round(patch, 1)
            assert fedjax_cfl(f"{OWN} rounds=3 checkpoint.every=1 run_dir=run")[0] == 1
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    np.savez(tmp_path / "own.npz", **change(arrays, name))
    status, _, err = fedjax_cfl(f"{OWN} rounds=3 checkpoint.every=1 run_dir=run")
    assert status == 2 and err.count("\n") == 1 and "is of a different run (data: " in err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    np.savez(tmp_path / "own.npz", **arrays)
    assert fedjax_cfl(f"{OWN} rounds=3 checkpoint.every=1 run_dir=run")[0] == 0
    assert [row["round"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


def stop_in_round(patch, round):
    """Lets a run end, with an error, after the row of a round."""
    watch_run = session.watch_run

    class Stop(Callback):
        def on_rows(self, row, grouping, take):
            if row["round"] == round:
                raise RunError("stopped")

    def watch(*given):
        watch = watch_run(*given)
        return watch._replace(callbacks=[*watch.callbacks, Stop()])

    patch.setattr(session, "watch_run", watch)


@pytest.mark.nightly
def test_a_longer_run_that_was_interrupted_is_not_finished(fedjax_cfl, tmp_path, monkeypatch):
    assert fedjax_cfl(f"{LINE} rounds=2 run_dir=run")[0] == 0
    with monkeypatch.context() as patch:
        stop_in_round(patch, 3)
        assert fedjax_cfl(f"{LINE} rounds=5 run_dir=run")[0] == 1
    assert read_summary(tmp_path / "run") is None
    with pytest.raises(InputError, match="has not finished"):
        cfl.load_run(tmp_path / "run")
    assert "no finished run" in fedjax_cfl("compare run")[2]
    assert fedjax_cfl(f"{LINE} rounds=5 run_dir=run")[0] == 0
    assert fedjax_cfl(f"{LINE} rounds=5 run_dir=whole")[0] == 0
    ours, theirs = (read_summary(tmp_path / name) for name in ("run", "whole"))
    assert ours is not None and theirs is not None
    for name in ("rounds", "final_accuracy", "best_accuracy", "bytes_up", "run_id", "data_id"):
        assert ours[name] == theirs[name]


@pytest.mark.nightly
@pytest.mark.parametrize("file", ["final.npz", nightly("best.npz")])
def test_models_of_another_run_are_refused(file, fedjax_cfl, tmp_path):
    for seed in (0, 1):
        assert fedjax_cfl(f"{LINE} discard=none rounds=2 seed={seed} run_dir=run{seed}")[0] == 0
    cfl.load_run(tmp_path / "run0")
    shutil.copy(tmp_path / "run1" / file, tmp_path / "run0" / file)
    with pytest.raises(InputError, match=f"{file}: cannot be read: it is of another run"):
        cfl.load_run(tmp_path / "run0")


def test_what_a_continuation_may_change_is_no_part_of_the_identity(toy):
    def identity(data=toy, digest="d", **more):
        nodes = {"local": {"lr": 0.1}, "seed": 0, "rounds": 5, "algorithm": {"rounds": 5}}
        settings = SimpleNamespace(everything=nodes | more, data_digest=digest)
        return digest_identity(run_identity(settings, data))

    free = {"rounds": 9, "eval_every": 2, "eval_auxiliary": True, "eval_distance": True}
    for name, value in free.items():
        assert identity(**{name: value}) == identity(), name
    assert identity(evaluate={"finetune": 3}) == identity()
    for more in (
        {"local": {"lr": 0.2}},
        {"seed": 1},
        {"algorithm": {"rounds": 9}},
        {"evaluate": {"new_clients": 0.2}},
        {"digest": "e"},
        {"data": toy.replace(max_client_samples=99)},
    ):
        assert identity(**more) != identity(), more


def test_an_identity_does_not_depend_on_the_order_of_settings():
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert digest_identity(one) == digest_identity(other) != digest_identity({"a": 2, "b": 1})


def test_the_kind_and_the_shape_of_an_array_are_part_of_the_digest(toy):
    samples, features = toy.x.shape
    others = toy.replace(x=toy.x.reshape(samples, 1, features)), toy.replace(x=toy.x.view("int32"))
    assert len({digest_data(data) for data in (toy, *others)}) == 3


def test_every_array_is_part_of_the_digest(toy_pool):
    held = cfl.Partition(np.arange(len(toy_pool.y)), toy_pool.client, toy_pool.test)
    data = federate(toy_pool, held)
    other = toy_pool.x.copy()
    other[3, 1] += 1e-6
    moved = held._replace(owner=np.roll(held.owner, 1))
    found = {
        digest_data(data),
        digest_data(federate(toy_pool._replace(x=other), held)),
        digest_data(federate(toy_pool, moved)),
        digest_data(data.replace(concept=data.concept + 1)),
    }
    assert len(found) == 4 and digest_data(federate(toy_pool, held)) in found


def test_names_are_part_of_the_digest(toy_pool):
    """A file whose labels or line of names were corrected is another one."""
    held = cfl.Partition(np.arange(len(toy_pool.y)), toy_pool.client, toy_pool.test)
    named = [
        federate(toy_pool._replace(class_names=tuple(classes), columns=tuple(columns)), held)
        for classes, columns in (("abcd", "abcde"), ("abdc", "abcde"), ("abcd", "abced"))
    ]
    clients = [held._replace(client_names=tuple(range(first, first + 14))) for first in (1, 2)]
    data = [federate(toy_pool, held), *named, *(federate(toy_pool, each) for each in clients)]
    assert len({digest_data(each) for each in data}) == len(data) == 6


def test_a_finished_run_says_whose_edits_are_not_seen():
    parts = {"model": {"module": {"_target_": "my_models.Tiny"}}, "algorithm": {"_target_": OURS}}
    said = describe_end(SimpleNamespace(everything=parts), 3)
    assert "finished after 3 rounds (edits of my_models.Tiny since then are not seen); " in said
    assert "edits" not in describe_end(SimpleNamespace(everything={"_target_": OURS}), 3)
