"""Models of clients are split over the devices: where they lie, that nothing else changes,
and that a run goes on with other devices.
"""

import functools
import math

import chex
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, nightly, with_execution
from jax.sharding import NamedSharding, PartitionSpec

import fedjax_cfl as cfl
from fedjax_cfl import sharding
from fedjax_cfl.clustering.distances import gram
from fedjax_cfl.runs.checkpoint import restore_latest, save
from fedjax_cfl.sharding import (
    find_split,
    flatten_updates,
    mesh_over,
    put_models,
    split_by_parameter,
    split_sharding,
    take_models,
)
from fedjax_cfl.simulation.callback import Snapshot
from fedjax_cfl.simulation.driver import drive
from fedjax_cfl.simulation.program import compile_run
from fedjax_cfl.simulation.rounds import Plan, Setup, state_shapes

KEY, PLAN = jax.random.key(3), Plan(rounds=3)
METHODS = {
    "fesem": {"m": 2, "start": "local", "restarts": 2},
    "fedfomo": {"models": 2},
    "nonfed": {"trains": "cohort"},
    "cfl": {"m": 3, "stale_updates": True, "warm_up": 1, "eps1": 9.0, "eps2": 0.0},
}
KEPT = {
    "fesem": lambda state: state.rows["models"],
    "fedfomo": lambda state: [state.rows[name] for name in ("mixed", "trained", "affinity")],
    "nonfed": lambda state: state.rows["NonFed"].values,
    "cfl": lambda state: state.rows["last_update"],
}


def make(name, mlp, local, devices):
    local = with_execution(local, mesh=cfl.make_mesh(devices))
    return build(getattr(cfl.algorithms, name), mlp, local, cfl.select.uniform(6), **METHODS[name])


@pytest.mark.parametrize(
    ("devices", "shape", "parts"),
    [
        (4, (12, 100, 64), (1, 4, 1)),  # the longest axis
        (4, (12, 70, 64), (1, 2, 2)),  # as far as it can be divided
        (4, (40, 75, 30), (2, 1, 2)),  # and K for the rest
        (4, (41, 75, 31), (1, 1, 1)),
        (4, (12, 64), (1, 1)),  # small
        (256, (3072, 784, 128), (1, 16, 16)),
        (256, (3072, 64, 37), (4, 64, 1)),
        (12, (30, 784, 129), (1, 4, 3)),
    ],
)
def test_which_axes_are_split(devices, shape, parts):
    """By axes of parameters, the longest first, then by clients."""
    mesh = make_abstract_mesh(devices)
    split = find_split(jax.ShapeDtypeStruct(shape, jnp.float32), mesh)
    assert tuple(math.prod(mesh.shape[name] for name in names) for names in split) == parts


def make_abstract_mesh(devices):
    """A mesh of devices that nobody has."""
    shape = mesh_over(np.arange(devices)).shape
    return jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))


MOVED = {"wide": (6, 10), "bias": (10,), "odd": (5,)}  # split 2 x 2, 2 with 2 by K, 4 by K


@pytest.fixture
def moved(monkeypatch):
    """Models [24, ...], new ones [8, ...], their rows, one of them nobody's, and a mesh."""
    monkeypatch.setattr(sharding, "MIN_SPLIT_BYTES", 1)
    mesh, rng = cfl.make_mesh(4), np.random.default_rng(0)
    models, new = (
        {name: rng.normal(size=(count, *shape)).astype("f") for name, shape in MOVED.items()}
        for count in (24, 8)
    )
    places = {name: split_sharding(leaf, mesh) for name, leaf in models.items()}
    held = jax.device_put(models, places)
    sent = jax.device_put(new, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    return held, jnp.array([3, 0, 24, 23, 9, 8, 1, 2]), sent, mesh


def exchanged(function, *arguments):
    """Returns kind -> floats that a device holds after each exchange of a program."""
    found = hlo.find_collectives(jax.jit(function).lower(*arguments).compile().as_text())
    kinds = {each.kind for each in found}
    return {kind: sorted(each.bytes // 4 for each in found if each.kind == kind) for kind in kinds}


def test_models_are_written_by_shares(moved):
    """A device sends and receives what it keeps: 8 rows of 60 floats are 480, a share is 120."""
    held, rows, sent, mesh = moved
    write = functools.partial(put_models, mesh=mesh)
    written, real = jax.jit(write)(held, rows, sent), np.array(rows) < 24
    for name, old in held.items():
        want = np.array(old)
        want[np.array(rows)[real]] = np.array(sent[name])[real]
        np.testing.assert_array_equal(written[name], want)
    assert exchanged(write, held["wide"], rows, sent["wide"]) == {"all-to-all": [120, 120]}


def test_models_are_read_by_shares(moved):
    held, rows, _, mesh = moved
    rows = jnp.stack([jnp.minimum(rows, 23), rows[::-1] % 24], axis=1)  # two of each client
    read = functools.partial(take_models, mesh=mesh)
    for name, got in jax.jit(read)(held, rows).items():
        np.testing.assert_array_equal(got, np.array(held[name])[np.array(rows)])
        assert got.sharding.shard_shape(got.shape) == (2, *got.shape[1:])
    assert exchanged(read, held["wide"], rows) == {"all-to-all": [240, 240]}


def test_updates_are_compared_by_shares(moved):
    """75 floats of an update are 19 columns of each device, with one more; one sum of products."""
    _, _, sent, mesh = moved

    def multiply(updates):
        return gram(flatten_updates(updates, mesh))

    assert exchanged(multiply, sent) == {"all-to-all": [8 * 19], "all-reduce": [64]}
    rows = np.concatenate([np.array(leaf).reshape(8, -1) for leaf in jax.tree.leaves(sent)], axis=1)
    np.testing.assert_allclose(jax.jit(multiply)(sent), rows @ rows.T, rtol=1e-5, atol=1e-4)


def test_updates_are_sorted_by_shares(moved):
    _, _, sent, mesh = moved

    def sort(wide):
        return jnp.sort(split_by_parameter(wide, mesh), axis=0)

    assert exchanged(sort, sent["wide"]) == {"all-to-all": [120, 120]}
    np.testing.assert_array_equal(jax.jit(sort)(sent["wide"]), np.sort(sent["wide"], axis=0))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "fesem",
        nightly("fedfomo"),
        pytest.param("nonfed", marks=pytest.mark.slow),
        pytest.param("cfl", marks=pytest.mark.slow),
    ],
)
def test_a_split_state_is_the_same_run(name, mlp, toy, local, monkeypatch, tmp_path):
    """One device, two, and two from where one stood after the first round."""
    monkeypatch.setattr(sharding, "MIN_SPLIT_BYTES", 1)

    class Keep(cfl.Callback):
        def on_rows(self, row, grouping, take):
            if row["round"] == 1:
                state, data_state, counters = take()
                save(tmp_path, 1, (state, data_state), counters, {})

    one = cfl.run(
        make(name, mlp, local, 1),
        mlp,
        toy,
        KEY,
        rounds=3,
        mesh=cfl.make_mesh(1),
        callbacks=[Keep()],
    )
    mesh, algorithm = cfl.make_mesh(2), make(name, mlp, local, 2)
    setup = Setup(algorithm, mlp, toy, cfl.drift.none(), mesh)
    like = state_shapes(setup, KEY)
    start = restore_latest(tmp_path, like, {})
    program = compile_run(setup, KEY, PLAN)
    (two,) = drive(program, PLAN)
    (rest,) = drive(program, PLAN, [Snapshot(*start.tree, start.facts)])
    for other in (two, rest):
        chex.assert_trees_all_close(one.state, other.state, rtol=1e-4, atol=1e-5)
        kept = jax.tree.leaves(KEPT[name](other.state))
        assert all(leaf.addressable_shards[0].data.size == leaf.size // 2 for leaf in kept)
    spared = one.memory["models"] + one.memory["client_memory"]
    spared -= two.memory["models"] + two.memory["client_memory"]
    assert spared == sum(leaf.nbytes for leaf in kept) // 2
