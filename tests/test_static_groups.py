"""Groups with room for more of them, `max_m`: a run is what it is without the room, and all m
share one program.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, ledger, nightly

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.flexcfl.flexcfl import flexcfl
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.clustering import features
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.data.drift import swap_all
from fedjax_cfl.errors import InputError
from fedjax_cfl.system import select

KEY, ROUNDS, ROOM = jax.random.key(5), 4, 4
METHODS = {
    "ifca": (ifca, {}),
    "gradients": (ifca, {"solve": "gradient_step", "aggregate": "all_participants"}),
    "flexcfl": (flexcfl, {"alpha": 3, "eta_g": 0.1}),
    "madc": (flexcfl, {"detector": None, "alpha": 3, "measure": "madc", "pretrain": "epochs:1"}),
    "rcc": (flexcfl, {"alpha": 1, "measure": "none", "newcomers": "random"}),
}


def run(method, toy, linear, local, **groups):
    factory, settings = METHODS[method]
    algorithm = build(factory, linear, local, select.uniform(6), **settings, **groups)
    drift, mesh = swap_all(0.6), local.execution.mesh
    return cfl.run(
        algorithm, linear, toy, KEY, rounds=ROUNDS, drift=drift, discard="none", mesh=mesh
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "m"),
    [
        ("ifca", 3),
        ("gradients", 1),
        ("flexcfl", 3),
        ("madc", 2),
        ("rcc", 3),
    ],
)
def test_room_for_more_groups_changes_nothing(method, m, toy, linear, local):
    alone = run(method, toy, linear, local, m=m)
    roomy = run(method, toy, linear, local, m=m, max_m=ROOM)
    assert np.array_equal(roomy.state.assignment, alone.state.assignment)
    assert ledger(roomy.state.traffic) == ledger(alone.state.traffic)
    assert roomy.state.active.tolist() == [group < m for group in range(ROOM)]
    for one, other in zip(
        jax.tree.leaves(roomy.state.groups), jax.tree.leaves(alone.state.groups), strict=True
    ):
        np.testing.assert_allclose(one[:m], other, rtol=1e-5, atol=1e-6)
    for row, expected in zip(roomy.rows, alone.rows, strict=True):
        assert row.keys() == expected.keys()
        for name in row.keys() - {"wall_s", "train_s", "eval_s", "compile_s"}:
            assert np.shape(row[name]) == np.shape(expected[name]), name
            np.testing.assert_allclose(
                np.array(row[name], float),
                np.array(expected[name], float),
                1e-4,
                1e-5,
                err_msg=name,
            )


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["ifca", nightly("flexcfl")])
def test_all_numbers_of_groups_have_one_program(method, toy, linear, local):
    factory, settings = METHODS[method]
    traced = []  # counted here: what JAX has compiled may have left its cache again

    def step(m, state):
        traced.append(state)
        given = settings | {"m": m, "max_m": ROOM}
        algorithm = factory(linear, local, select.uniform(6), **given)
        state = algorithm.init(KEY, toy) if state is None else state
        return algorithm.round(KEY, state, toy)[0]

    program: Any = jax.jit(step)
    for m in (1, 2, 4):
        again = program(jnp.float32(m), program(jnp.float32(m), None))
        assert int(again.active.sum()) == m and int(again.assignment.max()) < m
    assert len(traced) == 2  # with a state and without


@pytest.mark.nightly
def test_some_of_the_clusters_are_those_of_so_many_alone():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 3)) + 4 * rng.integers(0, 3, (40, 1))
    weight = jnp.asarray(rng.random(40) > 0.2, jnp.float32)
    for used in (1, 3, 8):
        alone = kmeans(KEY, jnp.asarray(x), used, weight=weight)
        some = jax.jit(kmeans, static_argnums=(2,))(
            KEY, jnp.asarray(x), 8, weight=weight, used=used
        )
        np.testing.assert_array_equal(some.labels, alone.labels)
        np.testing.assert_allclose(some.centers[:used], alone.centers, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(some.inertia, alone.inertia, rtol=1e-5)
        assert int(some.labels.max()) < used


@pytest.mark.nightly
def test_coincident_points_leave_clusters_empty_whatever_the_room():
    x = jnp.asarray(np.repeat(np.eye(3), 4, axis=0))  # three distinct points
    some = kmeans(KEY, x, 7, used=jnp.int32(5))
    assert len(np.unique(some.labels)) == 3 and int(some.labels.max()) < 5
    assert float(some.inertia) == 0.0


@pytest.mark.nightly
def test_features_and_linkage_of_fewer_groups(toy):
    updates = np.random.default_rng(1).normal(size=(9, 20)).astype(np.float32)
    gram = jnp.asarray(updates @ updates.T)
    for used in (1, 2, 5):
        some = features.edc(gram, 6, jnp.int32(used))
        np.testing.assert_allclose(some[:, :used], features.edc(gram, used), atol=1e-6)
        assert not some[:, used:].any()
        apart = features.madc(gram)
        np.testing.assert_array_equal(agglomerate(apart, jnp.int32(used)), agglomerate(apart, used))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"m": 5, "max_m": 4}, "algorithm.max_m=4: must be at least algorithm.m=5"),
        ({"m": jnp.float32(2)}, "algorithm.m: may be an array only with algorithm.max_m"),
        ({"m": 2, "max_m": 0}, "algorithm.max_m=0: must be null or a whole number >= 1"),
        ({"m": 2, "max_m": 4, "start": "kmeanspp_loss"}, "algorithm.max_m: needs start=random"),
    ],
)
def test_what_cannot_have_room_is_said(settings, said, linear, local):
    with pytest.raises(InputError, match=said):
        build(ifca, linear, local, select.uniform(6), **settings)


def test_randomized_features_need_their_own_number_of_groups(toy, linear, local):
    settings = {"m": 2, "max_m": 3, "alpha": 2, "measure": "edc_randomized"}
    algorithm = build(flexcfl, linear, local, select.uniform(6), detector=None, **settings)
    with pytest.raises(InputError, match="cannot be used with measure=edc_randomized"):
        jax.eval_shape(algorithm.init, KEY, toy)


@pytest.mark.nightly
def test_a_sweep_over_m_says_how_its_runs_share_programs(fedjax_cfl, tmp_path):
    small = "dataset.clients=8 clients_per_round=3 rounds=1 local.epochs=1 devices=1"
    sweep = f"-m algorithm=ifca algorithm.m=2,3 {small}"
    status, out, error = fedjax_cfl(f"{sweep} run_dir=apart")
    assert status == 0, error
    assert "algorithm.max_m=3 lets the runs share what is compiled" in out
    kept = "jax_persistent_cache_min_compile_time_secs"
    seconds = getattr(jax.config, kept)
    jax.config.update(kept, 0.0)  # programs as small as these are kept, too
    try:
        status, out, error = fedjax_cfl(f"{sweep} algorithm.max_m=3 run_dir=together")
    finally:
        jax.config.update(kept, seconds)
    assert status == 0 and "lets the runs" not in out, error
    summaries = {
        (name, n): json.loads((tmp_path / name / n / "summary.json").read_text())
        for name in ("apart", "together")
        for n in ("0", "1")
    }
    assert summaries["together", "1"]["programs_from_cache"] == 3
    for n in ("0", "1"):
        one, other = summaries["apart", n], summaries["together", n]
        assert one["final_accuracy"] == pytest.approx(other["final_accuracy"], abs=1e-6)
        assert one["bytes_down"] == other["bytes_down"]
    models = cfl.load_run(tmp_path / "together" / "0").final.models
    assert {len(leaf) for leaf in jax.tree.leaves(models)} == {2}
