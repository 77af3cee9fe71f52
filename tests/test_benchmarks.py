"""Every benchmark still runs: `--quick`, for its numbers alone."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SHARED = {  # what programs import
    "workloads.py",
    "program.py",
    "hlo.py",
    "device_targets.py",
    "compiled_table.py",
    "accelerator_models.py",
    "accelerator_sides.py",
    "compile_cost.py",
}
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name not in SHARED)
LONGER = set(PROGRAMS) - {"clients_scaling.py", "round_breakdown.py"}  # up to a minute each


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONGER else pytest.mark.nightly)
        for name in PROGRAMS
    ],
)
def test_a_quick_run_of_a_benchmark_prints_its_numbers(name):
    if name == "tpu_compile.py" and importlib.util.find_spec("libtpu") is None:
        pytest.skip("no TPU compiler: pip install 'fedjax-cfl[tpu]'")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(FOLDER / name), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\d", done.stdout) and "nan" not in done.stdout.lower(), done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_says_its_question_its_command_and_when_it_was_measured(name):
    text = (FOLDER / name).read_text().split('"""')[1]
    assert text.splitlines()[0].endswith("?")
    assert f"python benchmarks/{name} --quick" in text
    assert re.search(r"Measured 20\d\d-\d\d-\d\d on .*CPU", text) and "jax 0." in text
    assert name in (FOLDER / "README.md").read_text()
