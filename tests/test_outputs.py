"""What the command line prints, and where it cannot: flags without JAX, closed, full and
unread outputs, names that look like markup.
"""

import os
import subprocess
import sys

import pytest
from conftest import nightly

from fedjax_cfl.cli.outputs import ForgivingOutput

SMALL = (
    "dataset.clients=8 clients_per_round=3 rounds=1 local.epochs=1 algorithm=fedavg model=mclr"
    " devices=1 curves=false"
)
RUN_FILES = {"metrics.jsonl", "summary.json", "clients.parquet"}


def shell(line: str, folder, status: int = 0, program: str = "-m fedjax_cfl") -> str:
    """Runs a line of bash in which `fedjax-cfl` is the command; returns its stderr."""
    command = f'set -o pipefail; fedjax-cfl() {{ {sys.executable} {program} "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "Error" not in done.stderr + done.stdout, "nor an exception that Python ignored"
    return done.stderr


TRAPS = ("hydra_plugins/trap.py", "pandas.py", "libtpu.py", "jax_plugins/trap/__init__.py")
FULL = ">/dev/full"


def set_traps(folder):
    """Writes a script, as pip installs it, and what must not run; returns the script."""
    for trap in TRAPS:
        (folder / trap).parent.mkdir(parents=True, exist_ok=True)
        (folder / trap).write_text("open('sprung', 'w')")
    (folder / "bin").mkdir()
    script = folder / "bin" / "fedjax-cfl"
    script.write_text("import sys\nfrom fedjax_cfl.cli.main import main\nsys.exit(main())")
    return script


@pytest.fixture(scope="module")
def trapped(tmp_path_factory):
    """A folder of traps in which a script has run, and what it said of its full stdout."""
    folder = tmp_path_factory.mktemp("trapped")
    line = f"fedjax-cfl {SMALL} run_dir=run {FULL}"
    return folder, shell(line, folder, 1, str(set_traps(folder)))


@pytest.mark.parametrize("flag", ["--help", "--version", "--info=config", "--shell-completion"])
def test_what_only_shows_something_does_not_import_jax(flag, tmp_path):
    code = (
        "import sys; from fedjax_cfl.cli.main import main; status = main();"
        " sys.exit(status if 'jax' not in sys.modules else 'imported JAX')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, flag], cwd=tmp_path, capture_output=True, text=True
    )
    assert "imported JAX" not in done.stderr
    assert (done.returncode, bool(done.stdout)) == (
        (2, False) if flag == "--shell-completion" else (0, True)
    ), done.stderr


def test_the_package_exports_what_type_checkers_see():
    """Names are imported when asked for; `import *` and `dir` find all of them."""
    import ast
    from pathlib import Path

    import fedjax_cfl as cfl

    tree = ast.parse(Path(cfl.__file__).read_text())
    shown = {
        alias.name: (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(shown) == set(cfl.__all__) == set(dir(cfl))
    for name, (home, _) in shown.items():
        found = getattr(cfl, name)
        assert found is getattr(sys.modules[home], name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = cfl.nonsense


def test_a_shell_completion_says_for_which_shell(tmp_path):
    assert "install=bash" in shell("fedjax-cfl --shell-completion", tmp_path, status=2)
    shell("fedjax-cfl --shell-completion install=bash", tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        nightly("fedjax-cfl --info | head -1"),
        "fedjax-cfl --help | head -1",
        nightly("fedjax-cfl --help | true"),
        nightly("fedjax-cfl algorithm=ifca --cfg job | true"),
    ],
)
def test_a_reader_that_goes_is_no_error(line, tmp_path):
    assert shell(line, tmp_path) == ""


@pytest.mark.nightly
def test_bad_input_with_a_closed_stderr(tmp_path):
    shell("fedjax-cfl rounds=x 2>&-", tmp_path, status=2)


@pytest.mark.parametrize(
    "sink, status, said",
    [
        nightly("| true", 0, ""),
        nightly(">&-", 0, ""),
        (FULL, 1, "fedjax-cfl: stdout: No space left on device; not all could be printed\n"),
    ],
)
def test_a_run_whose_output_is_lost_writes_its_files(sink, status, said, trapped, tmp_path):
    """A run's results are its files; what cannot be printed is blamed on stdout."""
    folder, error = trapped
    if sink != FULL:
        folder, error = tmp_path, shell(f"fedjax-cfl {SMALL} run_dir=run {sink}", tmp_path, status)
    assert error == said
    assert {path.name for path in (folder / "run").iterdir()} >= RUN_FILES


@pytest.mark.parametrize("grid", ["", nightly(" seeds=2")])
def test_names_that_look_like_markup_are_printed(grid, fedjax_cfl):
    status, out, error = fedjax_cfl(f"{SMALL}{grid} run_dir=run \"dataset.name='[x]'\"")
    assert status == 0 and error == "" and "fedavg on [x]: " in out


@pytest.mark.parametrize("setting", ["algorithm.name", "dataset.name"])
@pytest.mark.parametrize("name", ["../../x", "a/b", "x" * 300])
def test_a_name_stays_in_its_folder(setting, name, fedjax_cfl, tmp_path):
    status, _, error = fedjax_cfl(f"{SMALL} {setting}={name}")
    assert status == 2 and error.count("\n") == 1
    assert f"{setting}={name}: must be text of up to 100 characters" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    ["-m seed=0,1 run_dir={}", "report {}", "report . --out {}", "predict . {}", "tune seed=0 {}"],
)
def test_a_name_that_is_too_long_is_one_line(line, fedjax_cfl):
    status, _, error = fedjax_cfl(line.format("x" * 300))
    assert status in (1, 2) and error.startswith("fedjax-cfl: ") and error.count("\n") == 1


def test_a_current_folder_that_is_gone_is_one_line(fedjax_cfl, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, _, error = fedjax_cfl(SMALL)
    assert (status, error) == (1, "fedjax-cfl: the current folder: No such file or directory\n")


def test_letters_that_an_output_does_not_have_are_spelled_out():
    code = "from fedjax_cfl.cli.outputs import guard_outputs; guard_outputs(); print('r\\u00fc')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("r\\xfc\n", "")


def test_an_output_that_fails_is_not_written_to_again():
    reader, writer = os.pipe()
    output = ForgivingOutput(writer)
    assert output.write(b"read") == 4 and os.read(reader, 4) == b"read" and output.error is None
    os.close(reader)
    assert output.write(b"lost") == 4 and isinstance(output.error, BrokenPipeError)
    os.close(writer)
    assert output.write(b"lost") == 4 and isinstance(output.error, BrokenPipeError)


# code from elsewhere


def test_a_pickle_is_not_rerun(fedjax_cfl):
    for flag in ("--experimental-rerun x.pickle", "--experimental-rerun=x.pickle"):
        status, _, error = fedjax_cfl(flag)
        assert status == 2 and "a pickle can run any code" in error


def test_nothing_in_the_current_folder_runs_unasked(trapped):
    folder, _ = trapped
    assert (folder / "run").exists() and not (folder / "sprung").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "way, line", [("script", "--info=plugins"), ("script", "doctor"), ("module", SMALL)]
)
def test_nothing_there_runs_by_other_ways(way, line, tmp_path):
    script = set_traps(tmp_path)
    command = [sys.executable, *(["-m", "fedjax_cfl"] if way == "module" else [str(script)])]
    subprocess.run([*command, *line.split()], cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "sprung").exists()


def test_a_target_of_ones_own_is_found_last(tmp_path, monkeypatch):
    from fedjax_cfl.cli.build import instantiate_target

    (tmp_path / "my_parts.py").write_text("def make():\n    return 'mine'")
    (tmp_path / "csv.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    instantiate_target("drift", {"_target_": "fedjax_cfl.data.drift.none"})
    assert str(tmp_path) not in sys.path
    assert instantiate_target("concept", {"_target_": "my_parts.make"}) == "mine"
    assert sys.path[-1] == str(tmp_path)
