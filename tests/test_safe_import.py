"""Processes that a command starts import nothing from the current folder."""

import os
import subprocess
import sys

import pytest

from fedjax_cfl.cli import main as command

NEEDS = {
    "cores": "hydra_plugins.hydra_joblib_launcher",
    "processes": "hydra_plugins.hydra_submitit_launcher",
}
SMALL = "devices=1 dataset.clients=12 algorithm=fedavg model=mclr rounds=1 local.epochs=1".split()
# executed instead of the module that a worker wants: says so, and ends the worker
TRAP = "import os\nopen('executed', 'a').write(__name__ + '\\n')\nos._exit(3)\n"
NAMES = "joblib pickle cloudpickle submitit hydra_plugins omegaconf jax numpy yaml fedjax_cfl"


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", NEEDS)
def test_workers_of_a_sweep_do_not_import_from_the_current_folder(launcher, tmp_path):
    pytest.importorskip(NEEDS[launcher], reason="pip install '.[launchers]'")
    for name in NAMES.split():
        (tmp_path / f"{name}.py").write_text(TRAP)
    program = "import sys; from fedjax_cfl.cli.main import main; sys.exit(main())"
    sweep = ["-m", f"hydra/launcher={launcher}", *SMALL, "seed=3,4", "run_dir=sweep"]
    done = subprocess.run(
        # -P: as a console script, which has not the current folder on its own path
        [sys.executable, "-P", "-c", program, *sweep],
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        | {"JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
    assert done.returncode == 0, done.stderr[-3000:]
    assert all((tmp_path / "sweep" / number / "summary.json").is_file() for number in "01")


def test_what_a_command_starts_has_a_safe_path(tmp_path, monkeypatch):
    """As a launcher starts a worker: `python -m`, with the environment of the command."""
    (tmp_path / "trap.py").write_text(TRAP)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(sys, "argv", ["fedjax-cfl", "doctor"])
    found = []

    def start(*arguments):
        done = subprocess.run([sys.executable, "-c", "import trap"], cwd=tmp_path, check=False)
        found.append(done.returncode)
        return 0

    monkeypatch.setattr("fedjax_cfl.cli.doctor.main", start)
    assert command.main() == 0
    assert found == [1] and not (tmp_path / "executed").exists()
    assert "PYTHONSAFEPATH" not in os.environ  # a notebook's own processes are as they were


def test_the_module_itself_does_not_import_from_the_current_folder(tmp_path):
    for name in NAMES.replace("fedjax_cfl", "argparse rich hydra").split():
        (tmp_path / f"{name}.py").write_text(TRAP)
    root = str(command.HERE.parent)
    done = subprocess.run(
        [sys.executable, "-m", "fedjax_cfl", "--version"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        | {"PYTHONPATH": root},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and done.stdout.startswith("fedjax-cfl "), done.stderr
    assert not (tmp_path / "executed").exists()


def test_a_checkout_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(command, "find_version", lambda package: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/there", ""]))
    with command.guard_children():
        assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/there", str(command.HERE.parent)]
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["/there", ""])
