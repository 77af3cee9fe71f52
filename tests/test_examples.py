"""The examples run, smaller and with fewer methods; the notebooks are what their scripts say."""

import json
import re
import runpy
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from conftest import others_nightly

FOLDER = Path(__file__).parents[1] / "examples"
SMALL = {r"\bROUNDS = \d+": "ROUNDS = 2", r"(\bROUNDS, RUN_DIR) = \d+": r"\1 = 4"}
SMALL |= {r"\bROUNDS, SITES, HOURS = \d+": "ROUNDS, SITES, HOURS = 2"}
SMALL |= {r"(FILE, ROUNDS, GROUPS, COHORT) = ([^,]+), \d+": r"\1 = \2, 2"}
SMALL |= {r'(?m)^    "(FedProx|NonFed|FeSEM)":.*\n': ""}  # each takes seconds to compile
SAYS = {
    "compare_methods": "against FedAvg",
    "first_run": "worst tenth of clients",
    "known_groups": "adjusted Rand index",
    "own_algorithm": "round 2",
    "regress_series": "RMSE of the worst tenth of sites",
    "use_models": "(chosen)",
}
MAKER = runpy.run_path(str(FOLDER / "make_notebooks.py"))
NOTEBOOKS, split_cells = MAKER["NOTEBOOKS"], MAKER["split_cells"]


def test_the_list_is_complete():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"make_notebooks"}
    assert scripts == set(SAYS) and set(NOTEBOOKS) <= scripts


@pytest.mark.nightly
@pytest.mark.parametrize("name", others_nightly(SAYS, ["first_run"]))
def test_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # use_cpu_cores: the tests chose already
    matplotlib.use("Agg")
    text = (FOLDER / f"{name}.py").read_text()
    for pattern, smaller in SMALL.items():
        text = re.sub(pattern, smaller, text)
    assert text != (FOLDER / f"{name}.py").read_text(), "nothing was made smaller"
    exec(compile(text, name, "exec"), {"__name__": "example"})
    assert SAYS[name] in capsys.readouterr().out
    if name == "compare_methods":
        assert (tmp_path / "compare_methods.png").stat().st_size > 10_000
        assert np.load(tmp_path / "my.npz")["concept"].shape == (24,)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_their_scripts_with_output(name):
    book = json.loads((FOLDER / f"{name}.ipynb").read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    assert cells == split_cells((FOLDER / f"{name}.py").read_text())
    assert "".join(map(str, book["cells"])).count("'output_type'") >= 3
    assert "/" + "tmp" not in json.dumps(book), "a path of some machine"
