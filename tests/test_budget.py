"""Budgets: how large the package is, in whole and by room, and how many files a round enters. A
change that makes something smaller lowers its number here. The whole never grows; a room may take
what others give up in the same change.
"""

import ast
from pathlib import Path

import jax
import pytest
from conftest import list_entered

import fedjax_cfl
from fedjax_cfl import algorithms
from fedjax_cfl.system.select import uniform

HOME = Path(fedjax_cfl.__file__).parent
LINES = {
    "algorithms": 7625,
    "analysis": 2929,
    "cli": 3064,
    "client": 2325,
    "clustering": 1945,
    "data": 6755,
    "models": 1290,
    "personal": 1103,
    "round": 1139,
    "runs": 3210,
    "simulation": 3323,
    "system": 1520,
    "tasks": 547,
}
ALL_LINES, IMPORT_LINES = 39_484, 2044
ENTERED = {"ifca": 26, "flexcfl": 27}  # files of a traced round


def count_lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


@pytest.mark.parametrize("room", LINES)
def test_a_room_does_not_grow(room):
    assert count_lines(HOME / room) <= LINES[room]


def test_the_package_does_not_grow():
    rooms = {path.name for path in HOME.iterdir() if path.is_dir()} - {"__pycache__", "conf"}
    assert rooms == {*LINES}
    assert count_lines(HOME) <= ALL_LINES


def test_imports_of_our_own_names_do_not_grow():
    found = 0
    for path in HOME.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fedjax_cfl"):
                found += (node.end_lineno or 0) - node.lineno + 1
    assert found <= IMPORT_LINES


@pytest.mark.parametrize("method", ENTERED)
def test_a_round_enters_no_more_files(method, mlp, toy, local):
    algorithm = getattr(algorithms, method)(mlp, local, uniform(4), m=2)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), toy)
    entered = list_entered(algorithm.round, jax.random.key(0), state, toy)
    assert len(entered) <= ENTERED[method], entered
