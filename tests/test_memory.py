"""The memory plan: its bytes against the arrays', and refusal before anything is trained."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build
from jax.sharding import NamedSharding, PartitionSpec

import fedjax_cfl as cfl
from fedjax_cfl.errors import InputError
from fedjax_cfl.simulation import memory


@pytest.fixture(scope="module")
def fesem(mlp, local):
    options = {"m": 2, "start": "local", "restarts": 2}
    return build(cfl.algorithms.fesem, mlp, local, cfl.select.uniform(4), **options)


@pytest.mark.nightly
def test_counts_what_a_run_holds(fesem, mlp, toy, local):
    found = cfl.run(fesem, mlp, toy, jax.random.key(0), rounds=1, mesh=local.execution.mesh).memory
    parameters = 34
    assert found["models"] == 2 * parameters * 4
    assert found["client_memory"] == 14 * (parameters * 4 + 1)  # W_i and whether it is known
    assert found["data"] == sum(leaf.nbytes for leaf in jax.tree.leaves(toy))
    assert found["work"] > 4 * parameters * 4  # at least what the cohort uploads


def test_refuses_before_the_first_round(linear, toy, local, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda mesh: 2_000)
    fedavg, begun = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(4)), []

    class Begin(cfl.Callback):
        def on_start(self, run, take):
            begun.append(run)

    with pytest.raises(
        InputError, match=r"^memory: each device needs .* and has 2\.00 kB; use "
    ) as error:
        mesh = local.execution.mesh
        cfl.run(fedavg, linear, toy, jax.random.key(0), rounds=1, mesh=mesh, callbacks=[Begin()])
    assert not begun and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "knob"),
    [("data", "dataset.clients"), ("models", "algorithm.m"), ("work", "clients_per_round")],
)
def test_names_the_knob_of_the_largest_part(part, knob, local):
    planned = dict.fromkeys(("data", "models", "client_memory", "work"), 1) | {part: 2**60}
    with pytest.raises(InputError, match=knob):
        memory.check_memory(planned, local.execution.mesh)


def test_keys_take_nothing_and_a_split_array_its_share():
    mesh = cfl.make_mesh(4)
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    tree = {"key": jax.random.key(0), "x": jnp.zeros((3, 2)), "y": jnp.zeros((8, 5), jnp.int16)}
    assert memory.tree_bytes(tree) == memory.tree_bytes(tree, of_device=True) == 24 + 80
    tree["y"] = jax.device_put(tree["y"], split)
    assert memory.tree_bytes(tree) == 24 + 80
    assert memory.tree_bytes(tree, of_device=True) == 24 + 20


def test_devices_of_the_cpu_share_its_memory():
    one, four = (memory.available_bytes(cfl.make_mesh(count)) for count in (1, 4))
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) for line in file if line.startswith("MemTotal:"))
    assert one == 1024 * total and four == one // 4


@pytest.mark.parametrize("stats", [{"bytes_limit": 100}, {}, None])
def test_an_accelerator_is_asked_and_may_not_say(stats, monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: stats)
    mesh = SimpleNamespace(devices=np.array([device] * 2))
    monkeypatch.setattr(memory.sharding, "is_cpu", lambda mesh: False)
    planned = dict.fromkeys(("data", "models", "client_memory", "work"), 25)
    assert memory.available_bytes(mesh) == (100 if stats else None)
    memory.check_memory(planned, mesh)
    if stats:
        with pytest.raises(InputError, match=r"needs 101 B .* has 100 B"):
            memory.check_memory(planned | {"work": 26}, mesh)
    else:
        memory.check_memory(planned | {"work": 2**60}, mesh)
