"""What users see of the package from Python: short signatures, names that it offers and no others,
and a glossary of every field and key.
"""

import inspect
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.data.drift import swap_all, swap_at

ROOT = Path(__file__).parents[1]
MODULES = [name for name in cfl.__all__ if isinstance(getattr(cfl, name), types.ModuleType)]


def public():
    """Yields (name, function or type) of all that `cfl.` and its modules offer to call."""
    for name in cfl.__all__:
        found = getattr(cfl, name)
        names = found.__all__ if name in MODULES else [""]
        for inner in names:
            value = getattr(found, inner) if inner else found
            if callable(value) and name != "models":  # Flax's modules have signatures of Flax
                yield f"{name}.{inner}".rstrip("."), value


def test_signatures_name_what_is_allowed():
    """No rule, no address; names of functions are texts."""
    called = {name: found for name, found in public() if name not in ("InputError", "Method")}
    shown = {name: str(inspect.signature(found)) for name, found in called.items()}
    assert len(shown) > 120
    long = {name for name in shown if re.search(r"Annotated|\bRule\(| at 0x", shown[name])}
    # functions by default of what an advanced author fills in
    assert long == {"Task", "clustered", "drift.Drift"}
    assert "m: Union[PositiveInt, jax" in shown["algorithms.ifca"]
    assert "max_m: Optional[PositiveInt] = None" in shown["algorithms.ifca"]
    names = "Literal['random', 'reject_unbalanced', 'kmeanspp_loss']"
    assert f"start: Union[{names}, MakeStart] = 'random'" in shown["algorithms.ifca"]
    assert "pool: Literal['all', 'warm'] = 'all'" in shown["drift.swap_at"]
    assert shown["Local"].startswith("(lr: Union[PositiveFloat, jax")


TYPED = """
from typing import assert_type

import fedjax_cfl as cfl
from fedjax_cfl.validation import Recipe

pool = cfl.datasets.digits()
data = cfl.federate(pool, cfl.partition.iid(clients=40))
assert_type(cfl.partition.iid(pool, clients=40), cfl.Partition)
task, local, system = cfl.as_task(cfl.models.MLP(), (64,), 10), cfl.Local(), cfl.select.uniform(20)
assert_type(cfl.algorithms.ifca(m=4), Recipe)
assert_type(cfl.algorithms.ifca(task, local, system, m=4), cfl.Algorithm)
cfl.run(cfl.algorithms.ifca(m=4), data, rounds=2)
cfl.run(cfl.algorithms.fedavg, data, rounds=2)
"""
WRONG = "cfl.algorithms.ifca(task, local, m=4)", 'cfl.algorithms.ifca(task, local, system, m="a")'


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("basedpyright") is None, reason="needs basedpyright")
def test_a_type_checker_knows_recipes_and_methods(tmp_path):
    """A method or partition is called with its parts, or with settings alone."""
    (tmp_path / "snippet.py").write_text("\n".join([TYPED, *WRONG]))
    options = "--outputjson", "--pythonpath", sys.executable, "snippet.py"
    done = subprocess.run(["basedpyright", *options], cwd=tmp_path, capture_output=True)
    said = json.loads(done.stdout)["generalDiagnostics"]
    wrong = [each["range"]["start"]["line"] for each in said if each["severity"] == "error"]
    assert wrong == [TYPED.count("\n") + 1, TYPED.count("\n") + 2], said


@pytest.mark.parametrize("name", MODULES)
def test_completion_shows_what_a_module_offers(name):
    found = getattr(cfl, name)
    assert dir(found) == sorted(found.__all__) and "jax" not in dir(found)
    assert all(hasattr(found, one) for one in found.__all__)


# drift


def test_swap_at_moves_in_its_round_alone(toy):
    """As `swap_all`, once: every pair with p = 1."""
    key, warm = jax.random.key(0), np.ones(14, bool)
    at, always = swap_at(3).apply, swap_all(1.0).apply
    for number in (0, 2, 4):
        _, _, shifted = at(key, number, toy, (), warm)
        assert not shifted.any()
    data, _, shifted = at(key, 3, toy, (), warm)
    wanted, _, moved = always(key, 3, toy, (), warm)
    assert shifted.all() and moved.all()
    for found, want in zip(jax.tree.leaves(data), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(found, want)
    with pytest.raises(cfl.InputError, match=r"drift.round=-1: must be a whole number >= 0"):
        swap_at(-1)
