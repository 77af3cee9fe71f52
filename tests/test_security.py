"""What the package must not do: load code from data, run what it is told, reach the
network unasked, or share its cache.
"""

import ast
import stat
from pathlib import Path

import jax
import pytest

import fedjax_cfl
from fedjax_cfl.simulation import compiler
from fedjax_cfl.simulation.compiler import use_compile_cache

HOME = Path(fedjax_cfl.__file__).parent
SOURCES = {path.relative_to(HOME).as_posix(): path for path in sorted(HOME.rglob("*.py"))}
FETCHER = "data/datasets/download.py"  # the one module that reaches the network
REPORTER = "runs/trackers.py"  # the one module that imports trackers, where a run asks for them
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
NETWORK = {
    "aiohttp",
    "ftplib",
    "http",
    "httpx",
    "pooch",
    "requests",
    "smtplib",
    "socket",
    "telnetlib",
    "urllib",
    "urllib3",
    "xmlrpc",
}
REPORTING = {"comet_ml", "mlflow", "neptune", "posthog", "segment", "sentry_sdk", "wandb"}
EXECUTORS = {"eval", "exec", "compile", "__import__"}
SHELLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "pty.spawn",
}


def name_of(node) -> str:
    """Returns the dotted name of an expression like a.b.c, or an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(node) -> list[str]:
    """Returns the full names that an import statement brings in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return (
        [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.ImportFrom)
        else []
    )


def keyword(node: ast.Call, name: str):
    return next((ast.unparse(given.value) for given in node.keywords if given.arg == name), None)


def complaints(source: str, networked: bool = False, reporting: bool = False) -> list[str]:
    """Returns what is wrong with a module."""
    found, tree = [], ast.parse(source)
    alias = {
        given.asname or given.name: given.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for given in node.names
    }
    for node in ast.walk(tree):
        names = [name for name in imported(node) if not name.startswith("urllib.parse.")]
        roots = {name.partition(".")[0] for name in names}
        banned = PICKLES | REPORTING | {"ruamel"} | (set() if networked else NETWORK)
        found += [f"line {node.lineno}: imports {name}" for name in roots & banned]
        found += [
            f"line {node.lineno}: imports {name}"
            for name in imported(node)
            if name in SHELLS or name == "numpy.load"
        ]
        if isinstance(node, ast.ImportFrom) and node.module == "yaml":
            found.append(f"line {node.lineno}: imports from yaml: use yaml.safe_load, safe_dump")
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = name_of(node.func).partition(".")
        called = alias.get(first, first) + dot + rest
        if called.endswith("import_module") and node.args and not reporting:
            given = ast.unparse(node.args[0]).strip("'\"").partition(".")[0]
            found += [f"line {node.lineno}: imports {given}"] * (given in REPORTING)
        if called in EXECUTORS | SHELLS or (first == "builtins" and rest in EXECUTORS):
            found.append(f"line {node.lineno}: calls {called}")
        plain = (
            called == "yaml.load" and ast.unparse(node.args[-1]) == "PlainLoader"
        )  # a SafeLoader
        if called.startswith("yaml.") and not (
            plain or called in ("yaml.safe_load", "yaml.safe_dump")
        ):
            found.append(f"line {node.lineno}: calls {called}")
        if called == "numpy.load" and keyword(node, "allow_pickle") != "False":
            found.append(f"line {node.lineno}: numpy.load without allow_pickle=False")
        if keyword(node, "allow_pickle") not in (None, "False") or keyword(node, "shell") not in (
            None,
            "False",
        ):
            found.append(f"line {node.lineno}: {called} with allow_pickle or shell")
    return found


def test_every_module_is_looked_at():
    assert {
        "__main__.py",
        "runs/checkpoint.py",
        "runs/session.py",
        "cli/main.py",
        FETCHER,
        "data/datasets/readers.py",
        "algorithms/flexcfl/flexcfl.py",
    } <= set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_dangerous(name):
    assert complaints(SOURCES[name].read_text(), name == FETCHER, name == REPORTER) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "import numpy as np; np.load(path)",
        "import numpy as np; np.load(path, allow_pickle=True)",
        "import numpy; numpy.load(path, allow_pickle=wanted)",
        "from numpy import load",
        "import yaml; yaml.load(text)",
        "import yaml as y; y.unsafe_load(text)",
        "from yaml import load",
        "from ruamel.yaml import YAML",
        "eval(text)",
        "exec(text)",
        "import builtins; builtins.exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "import os; os.system(line)",
        "from os import system",
        "import subprocess; subprocess.run(line, shell=True)",
        "import subprocess as s; s.getoutput(line)",
        "from urllib.request import urlopen",
        "import requests",
        "def f():\n    import wandb",
        "import importlib; importlib.import_module('mlflow.entities')",
    ],
)
def test_the_search_finds(line):
    assert complaints(line)


@pytest.mark.parametrize(
    "line",
    [
        "import re; re.compile(x)",
        "import yaml; yaml.safe_load(text)",
        "program.lower(x).compile()",
        "# import pickle",
        "'eval(x)'",
        "a.load(path)",
    ],
)
def test_the_search_lets_pass(line):
    assert complaints(line) == []


def test_only_the_registry_names_hosts_to_fetch_from():
    """An address elsewhere is a reference in a docstring: no other string of a module holds one."""
    for name in set(SOURCES) - {FETCHER}:
        tree = ast.parse(SOURCES[name].read_text())
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        }
        strings = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert [
            node.value
            for node in strings
            if "://" in node.value and node.value != "://" and id(node) not in documented
        ] == [], name


@pytest.fixture
def told(monkeypatch):
    """Returns what JAX is told, without telling it."""
    said = {}
    monkeypatch.setattr(jax.config, "update", said.__setitem__)
    return said


def test_compiled_programs_are_nobody_elses(told, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler.platformdirs, "user_cache_dir", lambda name: tmp_path / "cache")
    use_compile_cache()
    folder = Path(told["jax_compilation_cache_dir"])
    assert (
        folder.is_relative_to(tmp_path / "cache" / "compiled")
        and stat.S_IMODE(folder.stat().st_mode) == 0o700
    )
    folder.chmod(0o777)
    use_compile_cache()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "a folder that was open is closed"


def test_without_a_home_there_is_no_cache(told, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr(compiler.platformdirs, "user_cache_dir", lambda name: tmp_path / "cache")
    use_compile_cache()
    assert told == {}
