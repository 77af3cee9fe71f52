"""How many clients an accelerator trains side by side: by the steps of its clients, what a lane
costs, and the memory that is free.
"""

import jax
import numpy as np
import pytest
from conftest import with_execution

from fedjax_cfl import sharding
from fedjax_cfl.client import execution
from fedjax_cfl.client.execution import LANES
from fedjax_cfl.client.local import count_steps
from fedjax_cfl.errors import InputError
from fedjax_cfl.simulation import memory, width

STEP = width.StepSeconds(34e-6, 1e-6)


@pytest.fixture
def accelerator(monkeypatch):
    """Makes the package take these devices for an accelerator; returns what sets its memory."""
    for module in (sharding, execution):
        monkeypatch.setattr(module, "is_cpu", lambda mesh: False)
    return lambda has: monkeypatch.setattr(memory, "available_bytes", lambda mesh: has)


def choose(local, task, data, cohort, width_asked=None, **options):
    """Returns the width of a run on `local`'s devices, by default `local.width=auto`."""
    trained = with_execution(local, width=width_asked, **options)
    return width.choose_width(trained, task, data, cohort, width_asked)


def test_a_cpu_core_trains_one_client_after_another(mlp, toy, local):
    assert choose(local, mlp, toy, 7) == 1
    assert choose(local, mlp, toy, 7, 3) == 3
    assert choose(local, mlp, toy, 7, executor="lanes") > 1
    for executor in ("sequential", "debug"):
        assert choose(local, mlp, toy, 7, executor=executor) == 1
    assert with_execution(local).execution.executor == "sequential"
    assert with_execution(local, executor="lanes").execution.width == LANES


def test_an_accelerator_has_lanes(local, accelerator):
    found = with_execution(local).execution
    assert found.executor == "lanes" and found.width == LANES
    assert local.execution.executor == "sequential"  # a width of 1


def test_lanes_are_busy():
    """Total over longest, of a small model; all clients, where they are alike; few of a model whose
    lanes cost more than the kernels themselves.
    """
    rng = np.random.default_rng(0)
    steps = 10 * np.ceil(rng.lognormal(3, 1.5, 1000) / 10)
    for slots in (20, 200, 1000):
        drawn = np.stack([rng.choice(steps, slots, replace=False) for _ in range(200)])
        most = drawn.sum() / drawn.max(axis=1).sum()
        assert 0.6 * most < width.best_width(steps, slots, 1, STEP) < 1.6 * most + 1
    assert width.best_width(np.full(1000, 25), 50, 1, STEP) == 50
    # 4 devices share a round of 1,000
    assert width.best_width(np.full(1000, 25), 250, 4, STEP) == 250
    heavy = width.best_width(np.full(1000, 25), 1000, 1, STEP._replace(lane=1e-4))
    assert 1 < heavy < 20
    # three thirds, not one of 900 and one of 100
    assert width.best_width(np.full(1000, 25), 1000, 1, STEP._replace(lane=2e-6)) == 334
    assert width.best_width(np.zeros(5), 3, 1, STEP) == 1  # nobody has a step


def test_the_queue_is_played():
    assert width.count_lane_steps((5, 3, 2, 2), 2) == 7
    assert width.count_lane_steps((5, 3, 2, 2), 1) == 12
    assert width.count_lane_steps((5, 3, 2, 2), 9) == 5


def test_steps_of_clients(local):
    samples = np.array([0, 1, 5, 6, 40])
    np.testing.assert_array_equal(count_steps(local, samples), [0, 2, 2, 4, 16])
    np.testing.assert_array_equal(count_steps(local.replace(steps=7), samples), np.full(5, 7))


def test_clients_without_samples_take_no_steps(mlp, toy, local, accelerator, monkeypatch):
    """The width is that of the steps that are taken: `steps` of every client that has samples."""
    found = []
    monkeypatch.setattr(width, "best_width", lambda steps, *_: found.append(steps) or 3)
    accelerator(None)
    size = toy.train.size.at[0].set(0)
    data = toy.replace(train=toy.train.replace(size=size))
    assert choose(local.replace(steps=7), mlp, data, 14) == 3
    np.testing.assert_array_equal(found, [np.where(size > 0, 7, 0)])


def test_a_lane_holds_models_and_a_step(mlp, toy, local):
    model = memory.tree_bytes(jax.eval_shape(mlp.init, jax.random.key(0)))
    each = width.lane_bytes(local, mlp, toy)
    assert 3 * model <= each < 3 * model + 20 * model
    assert width.lane_bytes(local.replace(momentum=0.9), mlp, toy) == each + model
    dual = width.lane_bytes(with_execution(local, first_layer="dual"), mlp, toy)
    assert dual == each + 8 * 40**2  # the largest client has 40 samples
    step = width.step_seconds(local, mlp, toy)
    assert step.all == 5 * 7e-6  # two layers: five products
    assert step.lane >= 3 * model / 2.8e12
    assert width.step_seconds(local.replace(batch_size=40), mlp, toy).lane >= step.lane


def test_memory_bounds_the_lanes(mlp, toy, local, accelerator):
    """Half of what data and updates leave; everybody where the backend does not say."""
    each, data = width.lane_bytes(local, mlp, toy), memory.tree_bytes(toy)
    updates = 14 * memory.tree_bytes(jax.eval_shape(mlp.init, jax.random.key(0)))
    accelerator(None)
    best = choose(local, mlp, toy, 14)
    assert 3 < best <= 14
    for has, most in [(2 * 3 * each, 3), (2 * 3 * each - 1, 2), (0, 1), (2**50, best)]:
        accelerator(data + updates + has)
        assert choose(local, mlp, toy, 14) == most


def test_more_lanes_than_fit_are_refused(mlp, toy, local, accelerator):
    each, data = width.lane_bytes(local, mlp, toy), memory.tree_bytes(toy)
    updates = 14 * memory.tree_bytes(jax.eval_shape(mlp.init, jax.random.key(0)))
    accelerator(data + updates + 2 * 3 * each)
    with pytest.raises(
        InputError, match=r"^local\.width=9: .* hold the data and 3 clients"
    ) as said:
        choose(local, mlp, toy, 14, 9)
    assert "use width=3 or auto" in str(said.value) and "\n" not in str(said.value)
    # a round of three has three lanes, whatever is asked for
    accelerator(None)
    assert choose(local, mlp, toy, 3, 9000) == 9000
