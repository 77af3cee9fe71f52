"""What clients keep for themselves stays on the host where their samples do: the numbers are those
of rows on the devices, to the bit.
"""

import jax
import numpy as np
import pytest
from conftest import kept, stop_and_go_on, with_execution

import fedjax_cfl as cfl
from fedjax_cfl.data import prefetch
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.callbacks import copy_models
from fedjax_cfl.simulation import host_rows, memory

KEEP = {
    "ditto": cfl.personal.ditto(),
    "apfl": cfl.personal.apfl(adaptive=True),
    "fedper": cfl.personal.fedper(),
    "fedbabu": cfl.personal.fedbabu(),
    "scaffold": cfl.personal.scaffold(),
    "pfedme": cfl.personal.pfedme(lam=2.0),
    "fedrep": cfl.personal.fedrep(),
    "lg_fedavg": cfl.personal.lg_fedavg(),
    "fedala": cfl.personal.fedala(),
    "moon": cfl.personal.moon(),
    "feddyn": cfl.personal.feddyn(),
}
ON_DEVICES = ("fedbabu", "scaffold", "feddyn")  # keep nothing, or need all rows at once
METHODS = {"fedavg": (cfl.algorithms.fedavg, {}), "ifca": (cfl.algorithms.ifca, {"m": 2})}
QUICK = {"rounds": 4, "eval_every": 3, "discard": "none"}


@pytest.fixture
def population(toy_pool, monkeypatch):
    """Data on the host; several blocks between evaluations, and several parts of each."""
    monkeypatch.setattr(prefetch, "MAX_BLOCK_ROUNDS", 2)
    monkeypatch.setattr(prefetch, "TEST_BLOCK_BYTES", 600)
    held = cfl.Partition(np.arange(len(toy_pool.y)), toy_pool.client, toy_pool.test)
    return cfl.federate(toy_pool, held, on_host=True)


def play(algorithm, task, data, mesh):
    return cfl.run(algorithm, task, data, jax.random.key(3), mesh=mesh, **QUICK)


def assert_equal(one, other):
    """Asserts that two runs left the same to the last bit."""
    jax.tree.map(
        np.testing.assert_array_equal, one.state.replace(rows={}), other.state.replace(rows={})
    )
    for name in ("values", "trained"):
        left, right = (getattr(kept(each.state), name) for each in (one, other))
        jax.tree.map(np.testing.assert_array_equal, left, right)
    jax.tree.map(np.testing.assert_array_equal, one.clients, other.clients)
    for left, right in zip(one.rows, other.rows, strict=True):
        for name in left.keys() - {"wall_s"}:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


CASES = [(name, method, 1) for name in KEEP for method in METHODS] + [("ditto", "ifca", 4)]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "method", "devices"), CASES)
def test_rows_on_the_host_are_those_on_the_devices(
    name, method, devices, population, mlp, local, monkeypatch
):
    mesh = cfl.make_mesh(devices)
    own = with_execution(local, mesh=mesh).replace(personal=KEEP[name])
    factory, settings = METHODS[method]
    algorithm = factory(mlp, own, cfl.select.uniform(5), **settings)
    monkeypatch.setattr(host_rows, "CHUNK_BYTES", 400)  # of models, 3 at once
    host = play(algorithm, mlp, population, mesh)
    device = play(algorithm._replace(first_rows=None), mlp, population, mesh)
    assert_equal(host, device)
    rows = jax.tree.leaves(kept(host.state).values)
    on_host = name not in ON_DEVICES
    assert all(isinstance(leaf, np.ndarray) == on_host for leaf in rows)
    assert ("host_rows" in host.memory) == on_host
    if on_host:
        assert host.memory["host_rows"] == sum(leaf.nbytes for leaf in rows)
        assert host.memory["client_memory"] < device.memory["client_memory"]
        group = np.maximum(host.state.assignment, 0)
        first = algorithm.first_rows(host.state)
        few = {name: kept(host.state).replace(values=values) for name, values in first.items()}
        begun = host_rows.make_rows(host.state.replace(rows=few))
        jax.tree.map(
            lambda made, few: np.testing.assert_array_equal(made, few[group]),
            {name: rows.values for name, rows in begun.rows.items()},
            first,
        )
    models = [
        copy_models(algorithm._replace(first_rows=first), run.state, population)
        for first, run in ((algorithm.first_rows, host), (None, device))
    ]
    jax.tree.map(np.testing.assert_array_equal, *models)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "layer"),
    [(name, "ditto") for name in ("flexcfl", "fesem", "fielding", "feddrift")]
    + [(name, layer) for name in METHODS for layer in ("fine_tune", "per_fedavg")],
)
def test_who_reads_more_than_a_cohort_is_refused(method, layer, population, linear, local):
    own = local.replace(personal=getattr(cfl.personal, layer)())
    settings = {} if method == "fedavg" else {"m": 2}
    algorithm = getattr(cfl.algorithms, method)(linear, own, cfl.select.uniform(5), **settings)
    with pytest.raises(InputError, match="resident=host: this algorithm reads the samples"):
        play(algorithm, linear, population, cfl.make_mesh(1))


def test_as_many_rows_are_lent_as_fit(population, linear, local, monkeypatch):
    """Rounds and tests of fewer clients at once, where each has a large row."""
    algorithm, mesh = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(5)), cfl.make_mesh(1)
    given = population, algorithm, jax.random.key(0), 4, 3, mesh
    monkeypatch.setattr(prefetch, "TEST_BLOCK_BYTES", 2**20)
    assert prefetch.HostFeed(*given).lent["test"] == 14
    feed = prefetch.HostFeed(*given, row_bytes=2**18)
    assert feed.lent["test"] == 4 and sum(part.size for part in feed.tested) == 14
    assert feed.length == 2 and 5 < feed.lent["train"] <= 10
    monkeypatch.setattr(prefetch, "LENT_BYTES", 9 * 2**18)  # of one cohort, not of two
    feed = prefetch.HostFeed(*given, row_bytes=2**18)
    assert feed.length == 1 and feed.lent["train"] == 5


@pytest.mark.nightly
def test_a_run_on_the_host_stops_and_goes_on(fedjax_cfl):
    """final.npz has the rows, too."""
    line = "dataset.clients=20 model=mclr local.epochs=1 clients_per_round=4 resident=host"
    stopped, _ = stop_and_go_on(fedjax_cfl, f"algorithm=fedavg personal=ditto {line}")
    assert len(jax.tree.leaves(stopped.final.models)[0]) == 20


def test_more_than_the_machine_has_is_refused_before_training(
    population, linear, local, monkeypatch
):
    own = local.replace(personal=cfl.personal.ditto())
    algorithm = cfl.algorithms.fedavg(linear, own, cfl.select.uniform(5))
    monkeypatch.setattr(memory, "machine_bytes", lambda: 1000)
    said = r"what clients keep on the host \(resident=host\) needs 1\.34 kB, and the machine has"
    with pytest.raises(InputError, match=said):
        play(algorithm, linear, population, cfl.make_mesh(1))
    plan = {"host_rows": 600, "data": 10, "models": 10, "client_memory": 10, "work": 500}
    with pytest.raises(InputError, match=r"host rows .*; use fewer clients \(dataset.clients\)"):
        memory.check_memory(plan, cfl.make_mesh(1))
