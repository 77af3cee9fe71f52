"""What `benchmarks/accelerator.py` and `pod_model.py` compute besides times."""

import argparse
import subprocess

import accelerator
import accelerator_models
import accelerator_sides
import jax
import jax.numpy as jnp
import numpy as np
import pod_model
import pytest
import workloads
from papers.cells import load_table, match_names

import fedjax_cfl as cfl
from fedjax_cfl.client.cohort import balance_over_devices


def as_task(name):
    model = accelerator_models.MODELS[name]
    return cfl.as_task(model.module, model.shape, model.classes, l2=0.0), model.shape


@pytest.mark.parametrize("name, same", [("mlp", "mlp"), ("mclr", "mclr")])
def test_operations_of_a_gradient_are_those_counted_by_hand(name, same):
    assert accelerator_sides.gradient_flops(*as_task(name)) == workloads.flops(same)


def test_operations_of_convolutions_do_not_depend_on_how_they_are_computed(monkeypatch):
    task, shape = as_task("femnist_cnn")
    by_hand = 2 * (2 * 26**2 * 9 * 32 + 3 * (24**2 * 288 * 64 + 9216 * 128 + 128 * 62))
    counts = []
    for backend in ("cpu", "tpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        counts.append(accelerator_sides.gradient_flops(task, shape))
    assert all(by_hand <= count <= 1.1 * by_hand for count in counts), (counts, by_hand)


def test_a_scan_counts_each_pass():
    a = jnp.ones((3, 3))

    def repeat(x):
        return jax.lax.scan(lambda c, _: (c @ a, None), x, length=5)[0]

    assert accelerator_sides.count_products(jax.make_jaxpr(repeat)(a).jaxpr) == 5 * 2 * 27


def test_every_set_up_names_what_there_is():
    for cell in (cell for cells in accelerator.list_cells().values() for cell in cells):
        assert cell.model in accelerator_models.MODELS
        assert cell.held().shape == (cell.clients,) and cell.clients >= cell.cohort
        assert cell.shrink().cohort <= 10


def test_the_tables_have_the_rows_to_be_filled():
    for table, rows in accelerator.TABLES:
        assert len(match_names("rows", list(rows), load_table(table)["rows"])) > len(rows)


def test_what_a_table_has_is_not_measured_again(tmp_path, monkeypatch):
    asked = []

    def run_side(cell, side, *_):
        asked.append((cell, side))
        return {"note": "failed: x"} if side == "torch" else {"cohort": 3}

    monkeypatch.setattr(accelerator, "run_side", run_side)
    given = argparse.Namespace(device="cpu", quick=True, seconds=1.0)
    cells = accelerator.list_cells()["a"]
    for _ in range(2):
        accelerator.measure_cells(cells, tmp_path, given)
    assert asked == [("a", "ours"), ("a", "torch"), ("a", "torch")]


def test_a_peer_that_is_not_installed_is_a_line_that_says_so(monkeypatch):
    ended = subprocess.CompletedProcess(
        [], 1, "", "x\nModuleNotFoundError: No module named 'pfl'\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: ended)
    found = accelerator.run_side("a", "pfl", "float32", True, 1.0)
    assert found == {"note": "peer not installed ('pfl')"}


@pytest.mark.parametrize("count, chips", [(37, 4), (8, 8), (5, 8)])
def test_the_model_deals_clients_as_a_round_does(count, chips):
    held = np.random.RandomState(0).permutation(500)[:count]
    cohort = balance_over_devices(jnp.arange(count), jnp.asarray(held, float), count, chips, True)
    slots = np.append(held, 0)[np.asarray(cohort.ids)].reshape(chips, -1)
    np.testing.assert_array_equal(pod_model.deal(held, chips), slots)


def test_the_model_of_a_chip_adds_up_its_steps():
    measured = np.array([1, 4]), np.array([2.0, 8.0])
    assert pod_model.chip_seconds(np.array([5]), 8, measured) == 10.0
    # two lanes take five steps; three as many, and one eight
    assert pod_model.chip_seconds(np.array([5, 2, 1]), 8, measured) == 8 * 2.0
    dear = np.array([1, 4]), np.array([2.0, 2.5])
    assert pod_model.chip_seconds(np.array([5, 2, 1, 0]), 8, dear) == 5 * (2 + 0.5 / 3)
    assert pod_model.chip_seconds(np.array([5, 5]), 1, measured) == 20.0
    assert pod_model.step_seconds(measured, np.array(8)) == 16.0
