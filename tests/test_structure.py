"""The house: which room may import from which, what conf/ names, and how long, wide and
annotated functions are.
"""

import ast
import cProfile
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from conftest import list_entered, nightly
from omegaconf import DictConfig, OmegaConf

import fedjax_cfl
from fedjax_cfl import algorithms
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.settings import resolve_target
from fedjax_cfl.system.select import uniform

HOME = Path(fedjax_cfl.__file__).parent
# Top to bottom: a room imports from its own modules and from rooms below.
FLOORS = (
    ("__main__",),
    ("cli",),
    ("library",),
    ("analysis",),
    ("runs",),
    ("algorithms", "simulation"),
    ("personal",),
    ("clustering",),
    ("round",),
    ("system",),
    ("client",),
    ("data",),
    ("models",),
    (
        "types",
        "method",
        "errors",
        "validation",
        "sharding",
        "distributed",
        "formatting",
        "decompose",
        "keys",
        "tree",
        "scores",
        "tasks",
    ),
)
LINES, PARAMETERS = 50, 8
# every method takes them in addition to its own settings: see `algorithms`
COMMON = ("task", "local", "system")


class Function(NamedTuple):
    """A function of the package, with the node of its definition."""

    name: str  # module.function, or module.Class.function
    node: ast.FunctionDef
    public: bool  # neither it nor its class nor its module is private, nor is it inside another


def module_name(path: Path) -> str:
    """Returns the dotted name of a module of the package, without the package's own."""
    parts = path.relative_to(HOME).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(HOME.rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """Returns the package's modules that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.removeprefix("fedjax_cfl.") in MODULES else str(node.module)
                for name in full
            ]
        else:
            continue
        own = (name for name in names if name.partition(".")[0] == "fedjax_cfl")
        found |= {name.removeprefix("fedjax_cfl").lstrip(".") for name in own}
    return found - {""}  # `import fedjax_cfl as cfl`: the public names, see the package's own file


def floor_of(module: str) -> int:
    """Returns the number of a module's floor, 0 at the top."""
    room = module.partition(".")[0]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def upward(module: str, path: Path) -> list[str]:
    """Returns the imports of a module that run up, or sideways into another room."""
    room, floor = module.partition(".")[0], floor_of(module)
    return [
        f"{module} imports {other}"
        for other in sorted(imported(path))
        if other.partition(".")[0] != room
        and (floor_of(other) < floor or (floor_of(other) == floor and floor < len(FLOORS) - 1))
    ]


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_no_import_runs_up(module):
    assert upward(module, MODULES[module]) == []


def test_the_search_for_imports_finds_them(tmp_path):
    (tmp_path / "x.py").write_text(
        "def f():\n    from fedjax_cfl.runs import resume\nimport fedjax_cfl.cli.main\n"
        "from fedjax_cfl.errors import InputError\nfrom fedjax_cfl import types, library\n"
    )
    assert imported(tmp_path / "x.py") == {"runs.resume", "cli.main", "errors", "types", "library"}
    assert upward("round.engine", tmp_path / "x.py") == [
        "round.engine imports cli.main",
        "round.engine imports library",
        "round.engine imports runs.resume",
    ]


def test_no_circle():
    """A package's own file imports its modules, which do not import it: a circle there
    only works by luck of the order.
    """
    arrows = {module: imported(path) for module, path in MODULES.items() if module}
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        raise AssertionError(f"imports run in a circle: {' -> '.join(error.args[1])}") from None


def targets(node, path: str):
    """Yields (where, dotted name) of every `_target_` in a configuration file."""
    for name in node:
        value = OmegaConf.to_container(node, resolve=False)[name]
        if name == "_target_":
            yield path, str(value)
        elif isinstance(value, dict):
            yield from targets(OmegaConf.create(value), f"{path}.{name}")


def test_every_target_of_conf_exists():
    found = {}
    for file in sorted(CONF.rglob("*.yaml")):
        node = OmegaConf.load(file)
        assert isinstance(node, DictConfig)
        found |= dict(targets(node, file.relative_to(CONF).as_posix()))
    assert len(found) > 60
    for where, name in found.items():
        if not where.startswith("logger"):  # of packages that need not be there
            resolve_target(where, name)


def functions():
    """Yields every function of the package but lambdas."""
    for module, path in MODULES.items():
        pending = [(module, child, True) for child in ast.parse(path.read_text()).body]
        while pending:
            prefix, node, outside = pending.pop()
            inside = isinstance(node, ast.FunctionDef)
            name = f"{prefix}.{node.name}" if isinstance(node, ast.ClassDef) or inside else prefix
            if inside:
                public = outside and not any(part.startswith("_") for part in name.split("."))
                yield Function(name, node, public)
            pending += [
                (name, child, outside and not inside) for child in ast.iter_child_nodes(node)
            ]


def count_lines(node: ast.FunctionDef) -> int:
    """Returns the lines of a function without those of its docstring."""
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    text = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - text


def parameters(node: ast.FunctionDef) -> list[ast.arg]:
    """Returns a function's parameters, without self and *arguments."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [parameter for parameter in named if parameter.arg not in ("self", "cls")]


FUNCTIONS = list(functions())


def test_functions_fit_a_screen():
    assert not {name for name, node, _ in FUNCTIONS if count_lines(node) > LINES}


def test_functions_take_few_parameters():
    """But for those whose parameters are settings, which users name one by one."""
    found = {
        name
        for name, node, _ in FUNCTIONS
        if sum(given.arg not in COMMON for given in parameters(node)) > PARAMETERS
        and not any("checked" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert found == set()


def test_public_functions_are_annotated():
    """Every parameter and what is returned has a type."""
    found = [
        name
        for name, node, public in FUNCTIONS
        if public
        and (node.returns is None or any(given.annotation is None for given in parameters(node)))
    ]
    assert not found


def list_files(title: str) -> list[str]:
    """Returns the files that the table of a section of CONTRIBUTING.md names, in its order."""
    page = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text()
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"[\w/]+\.py", row)]


ROUND = list_files("One round, file by file")
ASKING = {"clustering/clustered.py", "clustering/measure.py"}  # of IFCA alone
# of FlexCFL alone
MIGRATING = {f"clustering/{name}.py" for name in ("assign", "migrate", "distances")}
FOLLOWED = [(algorithms.ifca, set(), set()), nightly(algorithms.flexcfl, MIGRATING, ASKING)]


@pytest.mark.parametrize(("method", "more", "less"), FOLLOWED)
def test_a_round_enters_the_files_of_its_page(method, more, less, mlp, toy, local):
    """Whoever follows a round through the package opens these files, IFCA's in this order."""
    algorithm = method(mlp, local, uniform(4), m=2)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), toy)
    entered = list_entered(algorithm.round, jax.random.key(0), state, toy)
    assert set(entered) == {*ROUND, *more} - less
    assert more or entered == ROUND


COMMAND = "algorithm=ifca rounds=2 dataset.clients=8 clients_per_round=3 local.epochs=1 devices=1"


@pytest.mark.nightly
def test_a_command_enters_the_files_of_its_page(fedjax_cfl):
    """Whoever follows a command line to its final table opens these files and those of a round."""
    profile = cProfile.Profile(subcalls=False, builtins=False)
    status, out, error = profile.runcall(fedjax_cfl, COMMAND)
    assert status == 0 and "written to" in out, error
    called = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
    paths = {code.co_filename for code in called if code.co_name != "<module>"}
    entered = {path.removeprefix(f"{HOME}/") for path in paths if path.startswith(f"{HOME}/")}
    curves = "analysis/plot.py"  # tests draw none
    assert entered | {curves} == {*ROUND, *list_files("One command line, file by file")}


# of what users read: plain English of the field instead
DIALECT = re.compile(r"\b(told|heard|nobody|lots|vouch\w*|anew|besides|been met|never met)\b")
PLAIN = r"\b(told|heard|everybody|lots|vouch\w*|anew|besides|been met|never met|lent)\b"
SPOKEN = ("cli", "analysis", "runs", "simulation", "library", "formatting", "validation")


def texts(path: Path):
    """Yields every string of a module that is no docstring."""
    tree = ast.parse(path.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    docs = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_messages_are_in_plain_words():
    found = [
        (name, text)
        for name, path in MODULES.items()
        if name.partition(".")[0] in SPOKEN
        for text in texts(path)
        if " " in text and DIALECT.search(text)  # one word is the name of an option
    ]
    assert found == []


# no names: words that say whose or who, and not what
NO_NAMES = {"mine", "theirs", "everybody", "nobody", "together", "said", "anew"}
NO_NAMES |= {"told", "hear", "heard", "lend", "lent", "meet", "judged"}
# names that say how a thing was come by, and not what it is, and how often they are given at most
VAGUE = {
    "found": 155,
    "part": 136,
    "own": 120,
    "place": 85,
    "known": 60,
    "held": 60,
    "given": 50,
    "asked": 38,
    "apart": 30,
    "met": 22,
}
ROOMS = ("algorithms", "client", "clustering", "method", "models", "personal", "round", "system")
ROOMS += ("keys", "sharding", "simulation", "tasks", "tree", "types")


def bound_names(tree: ast.AST):
    """Yields every name that a module gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def test_names_say_what_a_thing_is():
    names = {name: [*bound_names(ast.parse(path.read_text()))] for name, path in MODULES.items()}
    found = {
        (module, name)
        for module, given in names.items()
        if module.partition(".")[0] in ROOMS
        for name in given
        if name in NO_NAMES
    }
    assert not found
    counts = Counter(name for given in names.values() for name in given)
    assert {word: counts[word] for word in VAGUE if counts[word] > VAGUE[word]} == {}


def test_docstrings_are_in_plain_words():
    found = [
        (name, node.name if hasattr(node, "name") else "")
        for name, path in MODULES.items()
        if name.partition(".")[0] in ROOMS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and re.search(PLAIN, ast.get_docstring(node) or "")
    ]
    assert found == []
