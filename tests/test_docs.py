"""What README and docs say is so: their Python runs, their commands are allowed, their links
lead somewhere, and nothing that they should mention is missing.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
import yaml
from conftest import call, nightly

import fedjax_cfl as cfl
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.main import COMMANDS, open_hydra, parse_flags
from fedjax_cfl.cli.names import read_line
from fedjax_cfl.cli.settings import check_line
from fedjax_cfl.cli.sweep import check_folders
from fedjax_cfl.system.clock import CohortSizes
from fedjax_cfl.system.devices import fedscale_clock

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# what a block may do less of here
FASTER = {
    "epochs=5, batch_size=10)": (
        "epochs=1, batch_size=10, execution=cfl.make_execution(cfl.make_mesh(1)))"
    ),
    "rounds=40, seeds=3)": "rounds=40, seeds=3, mesh=cfl.make_mesh(1))",
}
SLOW_PAGES = ("own_algorithm.md", "choosing_k.md", "hosts.md", "regression.md")
SLOW_PAGES += ("multilabel.md", "run_directory.md", "first_run.md", "own_data.md", "own_model.md")
# what they show has tests of its own
PLACEHOLDER = re.compile(r"KEY=|RUN_DIR|TABLE|NAME\.\.\.|NPZ")


def blocks(page: Path, python: bool) -> list[str]:
    """Returns the fenced blocks of a page: those in Python, or the others."""
    return [text for kind, text in FENCE.findall(page.read_text()) if (kind == "python") is python]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A finished run, as the page on run directories has one."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call(patch, "algorithm=fedavg local.epochs=1 rounds=2 run_dir=run", devices=1) == 0
    return folder / "run"


@pytest.mark.parametrize(
    "page",
    [nightly(page) if page.name in SLOW_PAGES else page for page in PAGES if blocks(page, True)],
    ids=[name_of(page) for page in PAGES if blocks(page, True)],
)
def test_python_runs(page, tmp_path, monkeypatch, request, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # use_cpu_cores: the tests chose already
    if page.name == "run_directory.md":
        (tmp_path / "run").symlink_to(request.getfixturevalue("run_dir"))
    names = {"__name__": "page"}
    for block in blocks(page, True):
        for slow, fast in FASTER.items():
            block = block.replace(slow, fast)
        exec(compile(block, name_of(page), "exec"), names)
    if page == ROOT / "README.md":
        assert capsys.readouterr().out in page.read_text(), "it prints these numbers"
        check_method(names["sticky_ifca"])
        pool = cfl.datasets.digits()
        task = cfl.as_task(cfl.models.MCLR(), pool.x.shape[1:], 10)
        made = names["both"](task, cfl.Local(), cfl.select.uniform(10), m=4)
        state = jax.eval_shape(made.init, jax.random.key(0), names["data"])
        jax.eval_shape(made.round, jax.random.key(0), state, names["data"])


def check_method(method):
    """Runs README's method under a clock, and compares what it reaches and what it costs: 18
    updates, each of a client that receives and infers four models, with what they were.
    """
    pool, mesh = cfl.datasets.digits(), cfl.make_mesh(1)
    data = cfl.federate(pool, cfl.partition.iid(pool, clients=16), cfl.concept.rotate)
    task = cfl.as_task(cfl.models.MCLR(10), pool.x.shape[1:], 10)
    execution = cfl.make_execution(mesh, first_layer="direct")
    local = cfl.Local(lr=0.05, epochs=2, batch_size=10, execution=execution)
    clock = fedscale_clock(CohortSizes(num_clients=16, batch_size=10, clients_per_round=6))
    made = method(task, local, cfl.System(cfl.select.uniform(6), clock=clock), m=4)
    key = jax.random.key(0)
    row = cfl.run(made, task, data, key, rounds=3, discard="none", mesh=mesh).rows[-1]
    assert (row["units_down"], row["units_up"]) == (18 * 4, 18)
    assert row["sim_time_s"] == pytest.approx(229.665, abs=0.01)
    assert row["accuracy"] == pytest.approx(0.2333, abs=0.02)


def commands() -> list[tuple[str, str]]:
    """Returns (page, arguments) of every command in a block."""
    found = []
    for page in PAGES:
        for line in "\n".join(blocks(page, False)).splitlines():
            match = re.match(r"(?:.*(?:&& \.venv/bin/|--command=\"|task=1 ))?fedjax-cfl ", line)
            if match and not PLACEHOLDER.search(line):
                rest = line[match.end() :].partition(" #")[0].strip().removesuffix('"')
                found.append((name_of(page), rest))
    return found


def test_there_are_commands_and_they_are_copied_as_they_are():
    assert len(commands()) > 25
    plain = {name_of(page): "\n".join(blocks(page, False)) for page in PAGES}
    assert [name for name, text in plain.items() if re.search(r"^\$ ", text, re.M)] == []


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_are_allowed(page, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(line)
    if arguments and (arguments[0] in COMMANDS or arguments[0].startswith("--")):
        return
    absolute = [text.replace("run_dir=/", f"run_dir={tmp_path}/") for text in arguments]
    for text in arguments:  # a function of the user's own is looked at, and takes anything
        _, named, target = text.partition("._target_=")
        if named and not target.startswith("fedjax_cfl."):
            module = target.rpartition(".")[0]
            (tmp_path / f"{module}.py").write_text("def __getattr__(name):\n    return dict\n")
            monkeypatch.syspath_prepend(tmp_path)
            monkeypatch.delitem(sys.modules, module, raising=False)
    _, given = parse_flags(absolute)
    with open_hydra():
        asked = read_line(given.overrides, given.multirun, COMMANDS)
        check_line(asked)
        if not given.multirun:
            check_folders(asked.configs[0])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_method_has_a_row():
    text = (ROOT / "docs/guides/which_method.md").read_text()
    missing = [
        path.stem
        for path in sorted((CONF / "algorithm").glob("*.yaml"))
        if f"`{path.stem}`" not in text
    ]
    assert missing == []


def test_every_disagreement_of_the_presets_is_explained():
    text = (ROOT / "docs/reference/disagreements.md").read_text()
    named = set(re.findall(r"\bD\d+\b", "".join(p.read_text() for p in CONF.rglob("*.yaml"))))
    explained = set(re.findall(r"\bD\d+\b", text))
    assert named <= explained and len(named) > 15


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}


def test_examples_are_listed():
    text = (ROOT / "docs/tutorials/notebooks.md").read_text()
    for path in (ROOT / "examples").iterdir():
        assert path.suffix not in (".py", ".ipynb") or f"`{path.name}`" in text, path.name


def test_test_files_are_listed():
    text = (ROOT / "tests/README.md").read_text()
    for path in (ROOT / "tests").glob("test_*.py"):
        assert f"`{path.name}`" in text, path.name


LIBRARY = """
import sys
ABSENT = ("hydra", "omegaconf", "matplotlib", "pyarrow", "orbax", "sklearn", "pooch")


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Absent())
import jax
import numpy as np
import fedjax_cfl as cfl

assert not {"flax", "optax", "scipy"} & set(sys.modules), "nothing is imported before it is used"
x, y = np.random.rand(40, 3).astype(np.float32), np.arange(40, dtype=np.int32) % 2
pool = cfl.Pool(x, y, 2, np.repeat(np.arange(4, dtype=np.int32), 10))
data = cfl.federate(pool, cfl.partition.by_user(pool, seed=0))
task = cfl.as_task(cfl.models.MCLR(2), (3,), 2)
algorithm = cfl.algorithms.fedavg(task, cfl.Local(0.1, 1, 5), cfl.select.uniform(2))
state = jax.eval_shape(algorithm.init, jax.random.key(0), data)
jax.eval_shape(algorithm.round, jax.random.key(0), state, data)
"""


def test_a_method_from_python_needs_no_program():
    """Neither the command line's packages nor those of plots, tables and checkpoints."""
    subprocess.run([sys.executable, "-c", LIBRARY], check=True, timeout=120)


def test_what_is_packed():
    """A wheel has conf, the licence and the mark of a typed package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["license-files"] == ["LICENSE"]
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"conf": "fedjax_cfl/conf"}
    assert (ROOT / "fedjax_cfl" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_version_is_the_same_wherever_it_stands():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "fedjax_cfl/__init__.py"
    changes, readme = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "README.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.M)[1] == cfl.__version__
    assert f"version = {{{cfl.__version__}}}" in readme
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == cfl.__version__


def test_the_citation_names_the_five_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    titles = " ".join(paper["title"] for paper in cited["references"])
    words = ("Flexible", "FedGroup", "Multi-Center", "Fielding", "model distance")
    assert len(cited["references"]) == 5 and all(word in titles for word in words)
