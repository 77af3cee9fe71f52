"""A population that stays on the host trains as one that is on the devices."""

import threading

import jax
import numpy as np
import pytest
from conftest import VARYING, build, call, nightly

import fedjax_cfl as cfl
from fedjax_cfl.data import prefetch
from fedjax_cfl.data.datasets import files
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import draw_permutation
from fedjax_cfl.runs.checkpoint import restore_latest, save
from fedjax_cfl.runs.results import read_metrics
from fedjax_cfl.simulation.callback import Snapshot
from fedjax_cfl.simulation.driver import drive
from fedjax_cfl.simulation.program import compile_run
from fedjax_cfl.simulation.rounds import Plan, Setup, state_shapes

QUICK = {"rounds": 5, "eval_every": 2, "discard": "none"}


@pytest.fixture
def both(toy_pool):
    held = cfl.Partition(np.arange(len(toy_pool.y)), toy_pool.client, toy_pool.test)
    return cfl.federate(toy_pool, held), cfl.federate(toy_pool, held, on_host=True)


def methods(task, local):
    select = cfl.select.rr_then_random(4)
    return {
        "fedavg": lambda: cfl.algorithms.fedavg(task, local, select),
        "qfedavg": lambda: cfl.algorithms.qfedavg(task, local, select),
        "ifca": lambda: cfl.algorithms.ifca(task, local, select, m=2),
        "fedgroup": lambda: build(
            cfl.algorithms.flexcfl,
            task,
            local,
            select,
            m=2,
            alpha=2,
            pretrain="iters:3",
            detector=None,
        ),
    }


def same(one, other):
    for left, right in zip(one, other, strict=True):
        for name in left.keys() - {"wall_s"}:
            np.testing.assert_allclose(
                np.array(left[name], float),
                np.array(right[name], float),
                rtol=1e-5,
                atol=1e-6,
                err_msg=name,
            )


@pytest.mark.parametrize("name", [nightly("qfedavg"), "ifca", nightly("fedgroup")])
def test_rows_clients_and_models_are_those_of_data_on_the_devices(
    name, both, linear, local, monkeypatch
):
    # several parts in an evaluation
    monkeypatch.setattr(prefetch, "TEST_BLOCK_BYTES", 20 * both[1].x[0].nbytes)
    monkeypatch.setattr(prefetch, "MAX_BLOCK_ROUNDS", 1)  # several blocks between evaluations
    algorithm = methods(linear, local)[name]()
    device, host = (
        cfl.run(algorithm, linear, data, jax.random.key(3), mesh=local.execution.mesh, **QUICK)
        for data in both
    )
    assert len(device.rows) == 3
    same(device.rows, host.rows)
    np.testing.assert_allclose(device.clients.accuracy, host.clients.accuracy, rtol=1e-6)
    for ours, theirs in zip(
        jax.tree.leaves(host.state), jax.tree.leaves(device.state), strict=True
    ):
        if ours.shape == theirs.shape and ours.dtype == np.float32:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert host.memory["data"] < device.memory["data"]


@pytest.mark.nightly
def test_a_run_goes_on_from_a_checkpoint(both, linear, local, tmp_path):
    algorithm = methods(linear, local)["ifca"]()

    class Keep(cfl.Callback):
        def on_rows(self, row, grouping, take):
            if row["round"] == 2:
                state, data_state, counters = take()
                save(tmp_path, 2, (state, data_state), counters, {})

    whole = cfl.run(
        algorithm,
        linear,
        both[1],
        jax.random.key(1),
        mesh=local.execution.mesh,
        callbacks=[Keep()],
        **QUICK,
    )
    setup = Setup(algorithm, linear, both[1], cfl.drift.none(), local.execution.mesh)
    like = state_shapes(setup, jax.random.key(1))
    found = restore_latest(tmp_path, like, {})
    plan = Plan(**QUICK)
    program = compile_run(setup, jax.random.key(1), plan, fresh=False)
    (rest,) = drive(program, plan, [Snapshot(*found.tree, found.facts)])
    assert [row["round"] for row in rest.rows] == [4, 5]
    same(rest.rows, whole.rows[1:])


@pytest.mark.nightly
def test_a_run_is_taken_up_inside_a_block(both, linear, local, monkeypatch):
    """Its rounds and evaluations may have been others until then; a block has room for
    what is left of it.
    """
    monkeypatch.setattr(prefetch, "MAX_BLOCK_ROUNDS", 3)
    algorithm = methods(linear, local)["fedavg"]()

    def blocks(done: int, rounds: int):
        feed = prefetch.HostFeed(
            both[1], algorithm, jax.random.key(1), rounds, 8, local.execution.mesh
        )
        plan = zip(prefetch.plan_blocks(feed, done), feed.train_blocks(done), strict=True)
        return [
            count
            for at, (count, block) in plan
            if (block.owner >= 0).sum() == block.train.size[feed.block_clients(*at)].sum()
        ]

    assert blocks(0, 20) == [3, 3, 2, 3, 3, 2, 3, 1]
    assert blocks(1, 20) == [2, 3, 2, 3, 3, 2, 3, 1]
    assert blocks(12, 20) == [2, 2, 3, 1]
    assert blocks(20, 20) == []


def test_the_next_block_is_fetched_while_one_is_in_use(both, linear, local, monkeypatch):
    """Also past an evaluation, of which there is one after every round here."""
    feed = prefetch.HostFeed(
        both[1], methods(linear, local)["fedavg"](), jax.random.key(1), 3, 1, local.execution.mesh
    )
    fetched, began = feed._fetch, [threading.Event() for _ in range(3)]

    def watched(*asked):
        next(event for event in began if not event.is_set()).set()
        return fetched(*asked)

    monkeypatch.setattr(feed, "_fetch", watched)
    blocks = feed.train_blocks(0)
    for number in range(2):
        assert next(blocks)[0] == 1
        assert began[number + 1].wait(60), "the next block is only fetched when it is asked for"
    assert [count for count, _ in blocks] == [1]


@pytest.mark.nightly
def test_the_command_line_keeps_samples_on_the_host(tmp_path, monkeypatch, capsys):
    line = (
        "algorithm=fedavg dataset.clients=20 model=mclr rounds=3 local.epochs=1 clients_per_round=6"
    )
    for resident in ("host", "device"):
        assert call(monkeypatch, f"{line} resident={resident} run_dir={tmp_path / resident}") == 0
    host, device = (read_metrics(tmp_path / resident) for resident in ("host", "device"))
    same(
        *(
            [{name: row[name] for name in row.keys() - VARYING} for row in rows]
            for rows in (host, device)
        )
    )
    assert call(monkeypatch, f"{line} resident=device rounds=4 run_dir={tmp_path / 'host'}") == 2
    assert "resident: host there, device here" in capsys.readouterr().err
    for needs in ("drift=swap_part", "algorithm=fesem"):
        assert call(monkeypatch, f"{line} resident=host {needs} run_dir={tmp_path / 'none'}") == 2
        assert (
            capsys.readouterr().err.startswith("fedjax-cfl: resident=host: ")
            and not (tmp_path / "none").exists()
        )


def test_what_needs_everybodys_samples_is_refused(both, linear, local):
    select, key = cfl.select.uniform(5), jax.random.key(0)
    flexcfl = build(cfl.algorithms.flexcfl, linear, local, select, m=2, alpha=2)
    with pytest.raises(
        InputError,
        match="resident=host: this algorithm reads the samples of clients outside its cohort, or"
        " is a method of your own whose Method have no start_clients",
    ):
        cfl.run(flexcfl, linear, both[1], key, mesh=local.execution.mesh, rounds=1)
    fedavg = cfl.algorithms.fedavg(linear, local, select)
    with pytest.raises(
        InputError, match="resident=host: a drift edits who holds which sample of all"
    ):
        cfl.run(
            fedavg,
            linear,
            both[1],
            key,
            mesh=local.execution.mesh,
            rounds=1,
            drift=cfl.drift.swap_all(),
        )
    with pytest.raises(InputError, match="resident=host: a concept edits all samples, on the"):
        cfl.federate(
            cfl.Pool(np.zeros((2, 1), np.uint8), np.zeros(2, np.int32), 2),
            cfl.Partition(*np.zeros((3, 2), int)),
            cfl.concept.rotate,
            on_host=True,
        )


def test_a_folder_of_arrays_is_read_without_being_loaded(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    arrays = {
        "x": x,
        "y": np.arange(30) % 3,
        "client": np.arange(30) // 3,
        "split": np.arange(30) % 3 == 2,
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    pool = files.npy(str(tmp_path))
    assert isinstance(pool.x.base, np.memmap) and pool.num_classes == 3
    np.testing.assert_array_equal(pool.x, x)
    np.testing.assert_array_equal(pool.test, arrays["split"])
    data = cfl.federate(pool, cfl.partition.by_user(pool), on_host=True)
    assert (data.num_clients, data.max_client_samples, int(data.test.size.sum())) == (10, 2, 10)


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("x", np.full((4, 2), np.nan, np.float32), "x is NaN or infinite in .* first in sample 0"),
        ("x", np.zeros((4, 2)), "x has dtype float64, expected uint8 or float32"),
        ("x", np.zeros((3, 2), np.float32), r"y has shape \(4,\), x has shape \(3, 2\)"),
        ("x", np.array([object()]), "of objects, which are pickles and never read"),
        ("y", np.array([0, 1, -1, 0]), "y is -1 in sample 2"),
        ("client", np.zeros(3, int), r"client has shape \(3,\)"),
        ("split", np.array([0, 1, 2, 0]), "split is '2' in sample 2"),
    ],
)
def test_a_bad_folder_gets_one_line(name, array, said, tmp_path):
    arrays = {"x": np.zeros((4, 2), np.float32), "y": np.zeros(4, int)} | {name: array}
    for each, values in arrays.items():
        np.save(tmp_path / f"{each}.npy", values, allow_pickle=True)
    with pytest.raises(InputError, match=said):
        files.npy(str(tmp_path))


@pytest.mark.parametrize("clients", [nightly(5), nightly(64), 65, 100_000, nightly(2**20 + 7)])
def test_a_cohort_of_many_is_drawn_without_repeats_and_evenly(clients):
    count = min(clients, 2000)
    drawn = np.stack([draw_permutation(jax.random.key(seed), clients, count) for seed in range(5)])
    for ids in drawn:
        assert ids.min() >= 0 and ids.max() < clients and len(set(ids.tolist())) == count
    assert not (drawn[0] == drawn[1]).all() or clients == 5
    if clients > 1000:
        tenths = np.bincount(drawn.reshape(-1) * 10 // clients, minlength=10)  # 1,000 each, sd 30
        assert np.abs(tenths - 1000).max() < 150
        assert np.abs(np.corrcoef(drawn[0], np.arange(count))[0, 1]) < 0.1
