"""Arguments from Python that are nothing like what a function takes: one line that names the
argument, what was given and what is allowed, before anything is traced.
"""

import datetime
import math
from pathlib import Path

import jax
import pytest
from conftest import one_line

import fedjax_cfl as cfl

STRANGE = {
    "a path": Path("x"),
    "a date": datetime.date(2026, 1, 1),
    "a set": {1, 2},
    "a module": math,
    "an object": object(),
    "a number": 3,
    "text": "x",
}
SELECT = cfl.select.uniform(3)


@pytest.fixture(scope="module")
def given(toy, linear, local):
    """Returns the arguments of a run."""
    method = cfl.algorithms.fedavg(linear, local, SELECT)
    return {"algorithm": method, "task": linear, "data": toy, "key": jax.random.key(0), "rounds": 1}


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("name", ["algorithm", "task", "data", "key", "drift", "mesh", "callbacks"])
def test_a_run_takes_nothing_strange(name, value, given):
    error = one_line(f"{name}=", cfl.run, **given | {name: STRANGE[value]})
    assert ": must be " in error and len(error) < 200


@pytest.mark.parametrize("name", ["algorithm", "task", "rounds"])
def test_a_run_needs_all_of_it(name, given):
    one_line(f"{name}=null: must be ", cfl.run, **given | {name: None})


def test_a_method_that_is_made_is_no_recipe(given):
    one_line("algorithm: is made already", cfl.run, **given | {"data": None})
    recipe = {"algorithm": cfl.algorithms.fedavg(), "task": 3, "data": None}
    one_line("data=3: give what cfl.federate returns", cfl.run, **given | recipe)


def test_a_pool_is_no_data(given, toy_pool, local, linear):
    one_line("must be null or FederatedData", cfl.run, **given | {"data": toy_pool})
    one_line(
        "must be Algorithm, with a task", cfl.run, **given | {"algorithm": cfl.algorithms.fedavg}
    )
    one_line("must be Pool", cfl.federate, given["data"], toy_pool)
    one_line("must be Partition", cfl.federate, toy_pool, toy_pool)
    one_line("algorithm.system=", cfl.algorithms.fedavg, linear, local, given["data"])
    one_line("method=", cfl.check_algorithm, "fedavg", linear, given["data"])


@pytest.mark.parametrize("value", ["a path", "a date", "a set", "a module", "an object"])
def test_settings_of_clients_take_nothing_strange(value):
    good = {"lr": 0.1, "epochs": 1, "batch_size": 5}
    for name in ("lr", "epochs", "schedule", "personal", "execution"):
        one_line(f"local.{name}", cfl.Local, **good | {name: STRANGE[value]})


@pytest.mark.parametrize("function", [cfl.compare, cfl.report, cfl.load_runs])
@pytest.mark.parametrize("value", [3, None, math, [3], {Path}])
def test_paths_are_texts_or_paths(function, value):
    one_line("must be text", function, value)
