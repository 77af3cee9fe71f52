"""Runs trained as one program are the runs they would be alone: rows, files, checkpoints."""

import json
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import call, last_arrays, lasting_rows, nightly

import fedjax_cfl as cfl
from fedjax_cfl.cli.conf import open_hydra
from fedjax_cfl.cli.names import read_line
from fedjax_cfl.cli.settings import grid_axes
from fedjax_cfl.cli.sweep import find_obstacle
from fedjax_cfl.runs.checkpoint import list_steps
from fedjax_cfl.runs.session import grid_points
from fedjax_cfl.simulation.vectorize import NotMapped, stack_data

SMALL = (
    "dataset.clients=20 model=mclr rounds=4 local.epochs=1 clients_per_round=6 devices=2"
    " checkpoint.every=2"
)
FLEXCFL = "algorithm=flexcfl algorithm.pretrain=iters:3 algorithm.alpha=2 algorithm.m=2"
IFCA = "algorithm=ifca algorithm.m=2"
FAULTS = "faults.dropout=0.2 faults.straggler=0.3 faults.nan=0.1"
CASES = {
    "step sizes, faults": (
        f"algorithm=fedavg {FAULTS}",
        "vectorize=[local.lr] local.lr=0.01,0.1",
    ),
    "step sizes": ("algorithm=fedavg", "vectorize=[local.lr] local.lr=0.01,0.1"),
    "seeds and eta_g, swaps, faults": (
        f"{FLEXCFL} {FAULTS} drift=swap_part drift.p=0.5",
        "vectorize=[algorithm.eta_g,seed] seed=3,1 algorithm.eta_g=0,0.2",
    ),
    "seeds and step sizes, incremental, faults": (
        f"{IFCA} {FAULTS} drift=incremental drift.fractions=[0.5,1] drift.schedule=[0,2]",
        "vectorize=[local.lr,seed] seed=3,1 local.lr=0.01,0.1",
    ),
    "step sizes, directions of gradients": (
        "algorithm=fielding algorithm.represent=gradient",
        "vectorize=[local.lr] local.lr=0.01,0.1",
    ),
    "mu, one data set": (
        "algorithm=fedprox model=mlp",
        "vectorize=[algorithm.mu] algorithm.mu=0,0.1,1",
    ),
    "seeds, a stream that is redrawn": (
        "algorithm=feddane drift=stream_gradual drift.period=1 drift.retained=2 drift.intervals=4",
        "vectorize=[seed] seed=0,1",
    ),
    "cuts in two, a stream": (
        "algorithm=cfl algorithm.m=3 algorithm.warm_up=1 algorithm.eps1=10 algorithm.eps2=0.01"
        " drift=stream_rotate drift.period=1 drift.retained=2 drift.intervals=4",
        "vectorize=[seed] seed=0,1",
    ),
    "a round with everybody": (
        "algorithm=fedcluster algorithm.m=3 algorithm.rounds=1 algorithm.min_size=2",
        "vectorize=[seed] seed=0,1",
    ),
    "one round of clustering": (
        "algorithm=fl_hc algorithm.m=3 algorithm.warm_up=1",
        "vectorize=[seed] seed=0,1",
    ),
    "server step sizes": (
        "algorithm=fedadam",
        "vectorize=[algorithm.server_lr] algorithm.server_lr=0.01,0.1",
    ),
}
# further settings that can be mapped: of which method, and two values
GRIDS = {
    "algorithm.mu": ("algorithm=fednova", "0,0.5"),
    "algorithm.beta": ("algorithm=adaptive_fedavg", "0.3,0.9"),
    "algorithm.delta": ("algorithm=feddrift algorithm.m=4", "0.02,0.5"),
    "algorithm.explore": ("algorithm=auxo algorithm.split_rounds=[2]", "0.1,0.5"),
    "algorithm.factor": ("algorithm=flux algorithm.m=4", "1,2"),
    "algorithm.lam": ("algorithm=fedsoft algorithm.m=2", "0.1,1"),
    "algorithm.q": ("algorithm=qfedavg", "0.1,5"),
    "algorithm.tau": ("algorithm=stocfl algorithm.m=4", "0.1,0.5"),
    "personal.alpha": ("algorithm=fedavg personal=apfl", "0.25,0.75"),
    "personal.lam": ("algorithm=fedavg personal=ditto", "0.1,10"),
    "personal.lr": ("algorithm=fedavg personal=fedala", "0.1,1"),
    "personal.mu": ("algorithm=fedavg personal=moon model=mlp", "0.1,5"),
}
CASES |= {
    f"{method}, {setting}": (method, f"vectorize=[{setting}] {setting}={values}")
    for setting, (method, values) in GRIDS.items()
}
CASES |= {
    "steps of Per-FedAvg": (
        "algorithm=fedavg personal=per_fedavg",
        "vectorize=[personal.alpha] personal.alpha=0.01,0.1",
    ),
    "pulls of pFedMe": (
        "algorithm=fedavg personal=pfedme local.lr=0.1",
        "vectorize=[personal.lam] personal.lam=1,5",
    ),
    "pulls of FedDyn": (
        "algorithm=ifca algorithm.m=2 personal=feddyn",
        "vectorize=[personal.alpha] personal.alpha=0.01,0.1",
    ),
    "centers trimmed": (
        "algorithm=tkm algorithm.m=2",
        "vectorize=[algorithm.beta] algorithm.beta=0.1,0.2",
    ),
}
FAST = ("step sizes",)
NIGHTLY = (
    "step sizes, faults",
    "seeds and step sizes, incremental, faults",
    "cuts in two, a stream",
)


def same(one, other):
    """Counts exactly, the rest within rounding."""
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if isinstance(value, int | type(None)):
                assert value == right[name], name
            else:
                np.testing.assert_allclose(
                    np.array(value, float),
                    np.array(right[name], float),
                    rtol=2e-4,
                    atol=1e-5,
                    err_msg=name,
                )


@pytest.mark.parametrize(
    "case",
    [
        *FAST,
        *(nightly(case) for case in NIGHTLY),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in CASES
            if case not in FAST + NIGHTLY
        ),
    ],
)
def test_every_run_of_a_grid_is_as_it_would_be_alone(case, tmp_path, monkeypatch, capsys):
    setting, together = CASES[case]
    assert call(monkeypatch, f"{SMALL} {setting} {together} run_dir={tmp_path / 'grid'}") == 0
    folders = sorted(path for path in (tmp_path / "grid").iterdir() if path.is_dir())
    # of several settings the second run, which has a value of the first one and one of the last
    for folder in folders[1:2]:
        own = [
            line
            for line in json.loads((folder / "summary.json").read_text())["overrides"]
            if line not in SMALL.split()
        ]
        assert (
            call(
                monkeypatch, f"{SMALL} {shlex.join(own)} run_dir={tmp_path / 'alone' / folder.name}"
            )
            == 0
        )
        alone = tmp_path / "alone" / folder.name
        same(lasting_rows(folder), lasting_rows(alone))
        assert {path.name for path in folder.iterdir()} == {path.name for path in alone.iterdir()}
        ours, theirs = (last_arrays(path) for path in (folder, alone))
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            assert array.shape == theirs[name].shape, name
            np.testing.assert_allclose(array, theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.nightly
def test_a_grid_goes_on_where_its_runs_stand(tmp_path, monkeypatch, capsys):
    single = f"{SMALL} algorithm=fedavg drift=swap_all drift.p=0.4"
    line = f"{single} vectorize=[seed] seed=0,1"
    assert call(monkeypatch, f"{line} run_dir={tmp_path / 'whole'}") == 0
    assert call(monkeypatch, f"{line} rounds=2 run_dir={tmp_path / 'parts'}") == 0
    assert call(monkeypatch, f"{line} run_dir={tmp_path / 'parts'}") == 0
    # killed while it finished, and the last checkpoint of one has suffered
    (tmp_path / "parts" / "1" / "summary.json").unlink()
    newest = list_steps(tmp_path / "parts" / "1" / "checkpoints")[-1]
    (tmp_path / "parts" / "1" / "checkpoints" / f"{newest}.header").write_text("{")
    assert call(monkeypatch, f"{line} run_dir={tmp_path / 'parts'}") == 0
    for member in "01":
        assert lasting_rows(tmp_path / "parts" / member) == lasting_rows(
            tmp_path / "whole" / member
        )
    # a run of a grid can go on alone
    assert call(monkeypatch, f"{single} seed=1 rounds=5 run_dir={tmp_path / 'parts' / '1'}") == 0
    assert [row["round"] for row in lasting_rows(tmp_path / "parts" / "1")] == [1, 2, 3, 4, 5]
    # from the last round that all have
    assert call(monkeypatch, f"{line} rounds=6 run_dir={tmp_path / 'parts'}") == 0
    assert [row["round"] for row in lasting_rows(tmp_path / "parts" / "1")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "vectorize=[seed]": "vectorize=seed: give seed several values, once, as seed=1,2",
        "vectorize=[seed] seed=0,-1": "seed=-1: must be a whole number from 0 to",
        "vectorize=[seed] seed=0,1.5": "seed=1.5: must be a whole number",
        "vectorize=[local.lr] local.lr=0.1,x": "local.lr=x: must be a finite number > 0",
        "vectorize=[seed] seed=1,1": "seed=1,1: names a value twice",
        "-m seed=1,1": "seed=1,1: names a value twice",
        "-m local.lr=0.1,0.10": "local.lr=0.1,0.10: names a value twice",
        "vectorize=[seed] seed=0,1 seeds=2": (
            "seeds=2: seed has several values already; use one of the two"
        ),
        "algorithm=fedavg vectorize=[algorithm.eta_g] algorithm.eta_g=0,1": (
            "algorithm.eta_g=0: unknown setting"
        ),
        "personal=pfedme algorithm=fedavg vectorize=[personal.lam] personal.lam=1,9 local.lr=0.2": (
            "personal.lam=9.0: times local.lr=0.2 it is 1.8, and must be below 1"
        ),
        "seed=0,1": "seed=0,1: several values need -m, a sweep, or vectorize=[seed]",
        "algorithm=ifca,fedavg": "algorithm=ifca,fedavg: several values need -m, a sweep\n",
        "seeds=0": "seeds=0: must be a whole number >= 1",
    }.items(),
)
def test_what_cannot_be_one_program_is_refused(line, said, tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, f"{line} run_dir={tmp_path / 'grid'}") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "grid").exists()


OWN_METHODS = """
from functools import partial

import jax
import jax.numpy as jnp

import fedjax_cfl as cfl
from fedjax_cfl.client.sgd import LocalSGD, choose_loop
from fedjax_cfl.validation import Fraction


def closes(task, local, system, *, m=2, mu: Fraction | jax.Array = 0.1):
    train = LocalSGD(local, partial(choose_loop, task))

    def scaled(params, start, extra, x, y, key, owner):
        return task.loss(params, x, y, key) * (1 + mu)

    def solve(*given):
        return train((), scaled, local.lr, *given)

    return cfl.clustered(task, local, system, m=m, solve=solve)


def decomposes(task, local, system, *, m=2, mu: Fraction | jax.Array = 0.1):
    def choose(loss, old):
        each = jax.vmap(lambda row: jnp.linalg.eigvalsh(jnp.diag(row - row.min())))(loss)
        return jnp.where(each[:, -1] > mu, 0, loss.argmin(1))

    return cfl.clustered(task, local, system, m=m, choose=choose)
"""
OWN = "algorithm=fedavg vectorize=[algorithm.mu] algorithm.mu=0.01,0.9 algorithm._target_=own_grid."


OBSTACLES = {
    "algorithm=fedavg vectorize=[local.epochs] local.epochs=1,2": "they differ in local.epochs",
    "algorithm=fedavg vectorize=[seed] seed=0,1 resident=host": "resident=host keeps their",
    "algorithm=fedavg vectorize=[seed] seed=0,1 evaluate.validation=0.2 evaluate.patience=2": (
        "each ends by a patience"
    ),
}
LOOPED = OBSTACLES | {
    "algorithm=fedavg personal=fedala vectorize=[personal.share] personal.share=0.5,1": (
        "Python code asks for the number of a setting"
    ),
    OWN + "closes": "a function of one client closes over a setting",
    OWN + "decomposes": "eigh of a batch of matrices can hang on several CPU devices",
}


@pytest.mark.parametrize(("line", "why"), OBSTACLES.items())
def test_settings_that_keep_runs_from_being_one_program(line, why):
    with open_hydra():
        (config,) = read_line(line.split(), False, ()).configs
    assert find_obstacle(config, grid_axes(config)).startswith(why)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (line, why) if line == f"{OWN}decomposes" else nightly(line, why)
        for line, why in LOOPED.items()
    ],
)
def test_what_cannot_be_one_program_is_run_one_after_another(
    line, why, tmp_path, monkeypatch, capsys
):
    (tmp_path / "own_grid.py").write_text(OWN_METHODS)
    monkeypatch.syspath_prepend(tmp_path)
    line = f"{SMALL} rounds=2 eval_auxiliary=false {line}"
    assert call(monkeypatch, f"{line} run_dir={tmp_path / 'grid'}") == 0
    assert f"vectorize: the runs follow one another: {why}" in capsys.readouterr().out
    texts = [text for text in shlex.split(line) if not text.startswith("vectorize")]
    first = [text.partition(",")[0] for text in texts]
    assert call(monkeypatch, shlex.join([*first, f"run_dir={tmp_path / 'alone'}"])) == 0
    rows = lasting_rows(tmp_path / "grid" / "0")
    assert rows == lasting_rows(tmp_path / "alone")
    assert rows != lasting_rows(tmp_path / "grid" / "1")


def test_data_sets_of_different_sizes_are_stacked_without_a_new_holder(toy, toy_pool):
    fewer = np.flatnonzero(np.arange(len(toy_pool.y)) % 5 != 0)
    smaller = cfl.federate(
        toy_pool,
        cfl.Partition(fewer, toy_pool.client[fewer], toy_pool.test[fewer]),
        clients=toy.num_clients,
    )
    both = stack_data([toy, smaller])
    for number, one in enumerate([toy, smaller]):
        own = jax.tree.map(lambda leaf, number=number: leaf[number], both)
        for side in ("train", "test"):
            view, before = getattr(own, side), getattr(one, side)
            np.testing.assert_array_equal(view.size, before.size)
            np.testing.assert_array_equal(view.order[: before.order.size], before.order)
            assert (own.owner[view.order[before.order.size :]] == -1).all()
        assert sorted(np.concatenate([own.train.order, own.test.order])) == list(range(own.y.size))
    with pytest.raises(NotMapped, match=r"the seeds' data differ in their clients \(14, 15\)"):
        stack_data(
            [
                toy,
                cfl.federate(
                    toy_pool,
                    cfl.Partition(fewer, toy_pool.client[fewer], toy_pool.test[fewer]),
                    clients=15,
                ),
            ]
        )


@pytest.mark.nightly
@pytest.mark.parametrize("width", [3, nightly(4096)])
def test_a_wide_mapped_cohort_is_what_its_members_are_alone(toy, linear, width):
    """Nested maps, chunks of several clients, a traced step size, on several devices."""
    mesh, rates, keys = (
        cfl.make_mesh(2),
        jnp.array([0.05, 0.3]),
        jax.random.split(jax.random.key(5), 2),
    )

    def after(members: bool, lr, key):
        local = cfl.Local(
            lr, 2, 4, execution=cfl.make_execution(mesh, width)._replace(runs_as_one=members)
        )
        algorithm = cfl.algorithms.ifca(linear, local, cfl.select.uniform(5), m=2)
        return algorithm.round(key, algorithm.init(key, toy), toy)[0]

    together = jax.jit(
        jax.vmap(jax.vmap(lambda lr, key: after(True, lr, key), (0, None)), (None, 0))
    )(rates, keys)
    alone = jax.jit(lambda lr, key: after(False, lr, key))
    for s, key in enumerate(keys):
        for h, lr in enumerate(rates):
            one = jax.tree.map(lambda leaf, place=(s, h): leaf[place], together)
            for ours, theirs in zip(
                jax.tree.leaves(one), jax.tree.leaves(alone(lr, key)), strict=True
            ):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_first_axis_is_outermost():
    config = {
        "vectorize": ["algorithm.eta_g=0,0.5", "seed=4,2"],
        "seeds": 1,
        "seed": 0,
        "coordinator": None,
        "resident": "device",
        "evaluate": {"patience": 0},
    }
    assert grid_points(grid_axes(config)) == [
        {"seed": 4, "algorithm.eta_g": 0.0},
        {"seed": 4, "algorithm.eta_g": 0.5},
        {"seed": 2, "algorithm.eta_g": 0.0},
        {"seed": 2, "algorithm.eta_g": 0.5},
    ]
