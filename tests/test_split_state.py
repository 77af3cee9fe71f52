"""Models of clients are split over the devices: where they lie, that nothing else changes,
and that a run goes on with other devices.
"""

import chex
import jax
import jax.numpy as jnp
import pytest
from conftest import build
from jax.sharding import PartitionSpec

import fedjax_cfl as cfl
from fedjax_cfl import sharding
from fedjax_cfl.runs.checkpoint import restore_latest, save
from fedjax_cfl.sharding import AXIS, split_sharding
from fedjax_cfl.simulation.compilation import compile_run
from fedjax_cfl.simulation.driver import Snapshot, drive
from fedjax_cfl.simulation.rounds import Plan, state_shapes

KEY, PLAN = jax.random.key(3), Plan(rounds=3)
METHODS = {
    "fesem": {"m": 2, "start": "local", "restarts": 2},
    "fedfomo": {"models": 2},
    "nonfed": {"trains": "cohort"},
    "cfl": {"m": 3, "stale_updates": True, "warm_up": 1, "eps1": 9.0, "eps2": 0.0},
}
KEPT = {
    "fesem": lambda state: state.memory.models,
    "fedfomo": lambda state: (state.groups, state.memory.mixed),
    "nonfed": lambda state: state.groups,
    "cfl": lambda state: state.memory.last_update,
}


def make(name, mlp, local, devices):
    local = local._replace(mesh=cfl.make_mesh(devices), keep_received=name == "fesem")
    options = METHODS[name]
    return build(getattr(cfl.algorithms, name), mlp, local, cfl.select.uniform(6), **options)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((12, 100, 64), (None, AXIS)),  # the longest axis
        ((12, 50, 64), (None, None, AXIS)),  # that can be divided
        ((40, 70, 30), (AXIS,)),  # none but K
        ((41, 70, 30), ()),
        ((12, 64), ()),  # small
    ],
)
def test_which_axis_is_split(shape, spec):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert split_sharding(leaf, cfl.make_mesh(4)).spec == PartitionSpec(*spec)


@pytest.mark.parametrize(
    "name",
    [
        "fesem",
        "fedfomo",
        pytest.param("nonfed", marks=pytest.mark.slow),
        pytest.param("cfl", marks=pytest.mark.slow),
    ],
)
def test_a_split_state_is_the_same_run(name, mlp, toy, local, monkeypatch, tmp_path):
    """One device, two, and two from where one stood after the first round."""
    monkeypatch.setattr(sharding, "MIN_SPLIT_BYTES", 1)

    def keep(row, snapshot):
        if row["round"] == 1:
            save(tmp_path, 1, (snapshot.state, snapshot.data_state), snapshot.counters, {})

    one = cfl.run(
        make(name, mlp, local, 1), mlp, toy, KEY, rounds=3, mesh=cfl.make_mesh(1), on_row=keep
    )
    mesh, algorithm = cfl.make_mesh(2), make(name, mlp, local, 2)
    like = state_shapes(algorithm, cfl.drift.none(), mesh, toy, KEY)
    start = restore_latest(tmp_path, like, {})
    program = compile_run(algorithm, mlp, toy, KEY, PLAN, cfl.drift.none(), mesh)
    (two,) = drive(program, PLAN)
    (rest,) = drive(program, PLAN, [Snapshot(*start.tree, start.facts)])
    for other in (two, rest):
        chex.assert_trees_all_close(one.state, other.state, rtol=1e-4, atol=1e-5)
        kept = jax.tree.leaves((KEPT[name](other.state), other.state.received))
        assert all(leaf.addressable_shards[0].data.size == leaf.size // 2 for leaf in kept)
    spared = one.memory["models"] + one.memory["client_memory"]
    spared -= two.memory["models"] + two.memory["client_memory"]
    assert spared == sum(leaf.nbytes for leaf in kept) // 2
