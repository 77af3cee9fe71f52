"""How fast are published set-ups on one accelerator, and how near to what it can do?

One script, by priority; every line of its tables is written when it is known, and a second call
goes on where the first stopped. Stages:

1. agree      the tests of invariances, reductions and sample space on the device; a round on it and on the
              CPU; the same run twice; programs of widths 1 and 8: nothing for the host, transposes in a step
2. w          W1 to W3 of workloads.py with 20, 200 and 1,000 clients a round
3. a, b, f    pfl's CIFAR-10 job; FLUTE's FEMNIST job; FlexCFL with EDC and 1,000 clients a round
4. tables     the columns of FlexCFL's Tables 3 and 4 that are short of rounds (`fedjax-cfl paper`)
5. c, d       FEMNIST with 1,000 clients a round; CIFAR-100 with ResNet-18 and group normalisation

    python benchmarks/accelerator.py                    everything, on JAX's default device
    python benchmarks/accelerator.py --stages agree w   some of it
    python benchmarks/accelerator.py --quick            every set-up with few clients and rounds: does it run? (CPU, minutes)

A set-up runs in a process of its own for each precision (float32, and TF32 on a GPU), ours and a
PyTorch loop on the same device, alternating; pfl and FedJAX (W1 to W3 with 20 clients, `versus_peers.py`)
where they can be imported. A peer that cannot be is a line that says so. Samples are random, of the
right shape: nothing is learned, and dropout is on where the published job has it (whole jobs with real
images: published_jobs.py). Share of the
roofline: matrix products of the gradients per second over the best product measured there, in the
same precision.

Measured 2026-11-25 on 2 CPU cores (AMD EPYC), Python 3.11, jax 0.10.2: --quick only, whether it
runs. W1, W3, a, c and d on an H100 (2026-11-27, and before clients went through lanes):
results/accelerator/README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from program import append_row, make_parser, read_rows

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "accelerator"
COLUMNS = (
    "cell,what,side,precision,device,driver,versions,cohort,width,client_updates_per_s,"
    "seconds_per_round,spread,rounds_timed,published_rounds_s,published,goal,gflops,ceiling_gflops,"
    "roofline,cold_start_s,compile_s,memory_planned,memory_peak,nvidia_smi_mib,moved,quick,note"
).split(",")
AGREE = ("check", "result", "device", "quick")
TESTS = ("test_invariances.py", "test_reductions.py", "test_dual_sgd.py")
TABLES = (
    ("flexcfl_table3", ("MNIST-CNN", "FEMNIST-CNN", "FashionMNIST-CNN", "Sent140-*")),
    ("flexcfl_table4", ("MNIST-CNN-*", "FEMNIST-CNN-*", "FashionMNIST-CNN-*", "Sent140-*")),
)
STAGES = ("agree", "w", "a", "b", "f", "tables", "c", "d")


def list_cells() -> dict[str, list]:
    """Returns stage -> its set-ups."""
    from accelerator_models import Cell

    w = [
        Cell(f"{name}-{cohort}", what, model, 1000, samples, cohort, 100, epochs=epochs)
        for cohort in (20, 200, 1000)
        for name, what, model, samples, epochs in (
            ("W1", "MLP 784-128-10, E=10, B=10", "mlp", "power law", 10),
            ("W2", "MCLR 784-10, E=10, B=10", "mclr", "power law", 10),
            ("W3", "CNN 5x5x32, 5x5x64, E=1, B=10", "cnn5", "86 to 106", 1),
        )
    ]
    femnist = "FEMNIST CNN, 3,400 writers, E=1, B=20"
    return {
        "w": w,
        "a": [
            Cell(
                *("a", "pfl-research, CIFAR-10: CNN, 50 samples a user, B=10", "cifar_cnn"),
                *(1000, "50 each", 50, 1500, 10, 1, 0.1),
                goal="30 s (float32), 10 s (TF32) for 1,500 rounds on an H100",
            )
        ],
        "b": [
            Cell(
                *("b", femnist, "femnist_cnn", 3400, "FEMNIST", 10, 800, 20, 1, 0.1),
                published="FLUTE 502 s for 800 rounds, four processes, unnamed card",
                goal="32 s for 800 rounds",
            )
        ],
        "f": [
            Cell(
                *("f", "FlexCFL with EDC, MLP 784-128-10, E=10, B=10", "mlp", 5000),
                *("power law", 1000, 100, 10, 10, 0.03, "flexcfl"),
            )
        ],
        "c": [
            Cell(
                *("c", femnist, "femnist_cnn", 3400, "FEMNIST", 1000, 1500, 20, 1, 0.1),
                goal="2,000 client updates/s",
            )
        ],
        "d": [
            Cell(
                *("d", "CIFAR-100, ResNet-18-GN, 100 samples a client, B=20", "resnet18"),
                *(500, "100 each", 10, 4000, 20, 1, 0.1),
                published="FLUTE 6,121 s, four processes, unnamed card",
                goal="65 client updates/s",
            )
        ],
    }


def run_side(cell: str, side: str, precision: str, quick: bool, seconds: float) -> dict:
    """Runs one side of a set-up in a process of its own; returns what it found, or a note."""
    command = [sys.executable, __file__, "--side", side, "--cell", cell]
    command += ["--precision", precision, "--seconds", str(seconds), "--began", str(time.time())]
    environment = os.environ | {
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    }
    try:
        done = subprocess.run(
            command + ["--quick"] * quick,
            capture_output=True,
            text=True,
            timeout=1800,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"note": "no result within 30 minutes"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        if "ModuleNotFoundError" in lines[-1]:
            return {"note": f"peer not installed ({lines[-1].rpartition(' ')[2]})"}
        return {"note": f"failed: {lines[-1][:300]}"}
    return json.loads(done.stdout.splitlines()[-1])


def read_done(path: Path, names: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Returns the lines that a table has, by these columns; failed ones do not count."""
    return {
        tuple(row[name] for name in names)
        for row in read_rows(path)
        if not (row.get("note") or "").startswith("failed")
    }


def note_row(path: Path, columns: Sequence[str], row: dict) -> None:
    """Writes a line at the end of a table, and prints it."""
    append_row(path, columns, row)
    said = (f"{key} {value}" for key, value in row.items() if value not in ("", None))
    print(" | ".join(said), flush=True)


def measure_cells(cells: list, folder: Path, given: argparse.Namespace) -> None:
    """Measures the set-ups that the table does not have yet."""
    path = folder / "cells.csv"
    precisions = ["float32"] if given.device == "cpu" else ["float32", "tensorfloat32"]
    for cell in cells:
        for precision in precisions:
            peers = ["torch"]
            if cell.name in ("W1-20", "W2-20", "W3-20") and precision == "float32":
                peers += ["pfl", "fedjax"]
            for side in ["ours", *peers]:
                key = (cell.name, side, precision, given.device, str(given.quick))
                if key in read_done(path, ("cell", "side", "precision", "device", "quick")):
                    continue
                found = run_side(cell.name, side, precision, given.quick, given.seconds)
                own = {"cell": cell.name, "what": cell.what, "side": side, "precision": precision}
                own |= {"published": cell.published, "goal": cell.goal, "quick": given.quick}
                if given.quick:  # of other cohorts than the published ones
                    found.pop("published_rounds_s", None)
                note_row(path, COLUMNS, own | {"device": given.device} | found)


def check_agreement(folder: Path, given: argparse.Namespace) -> None:
    """Writes whether the device computes what the CPU does, and what its programs look like."""
    path = folder / "agree.csv"
    checks = ["cpu", "twice", "hlo-1", "hlo-8"] + [f"tests/{name}" for name in TESTS]
    if given.device != "cpu":
        checks.insert(2, "twice-deterministic")
    for check in checks:
        if (check, given.device, str(given.quick)) in read_done(path, ("check", "device", "quick")):
            continue
        if check.startswith("tests/"):
            result = run_tests(check, given.quick)
        else:
            flag = "--xla_gpu_deterministic_ops=true" if check.endswith("deterministic") else ""
            result = run_check(check, flag)
        row = {"check": check, "result": result, "device": given.device, "quick": given.quick}
        note_row(path, AGREE, row)


def run_tests(name: str, quick: bool) -> str:
    """Returns the last line of a file of tests, run on the device; a quick run only collects
    them.
    """
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "not slow", "-q"]
    command += [str(HERE.parent / name), *(["--collect-only"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith("FAILED")]
    return "; ".join([*failed[:5], lines[-1] if lines else done.stderr[-200:]])[:600]


def run_check(check: str, flag: str) -> str:
    """Returns the line that a check of `accelerator_sides` prints, in a process of its own."""
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), flag)))
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "XLA_FLAGS": flags}
    command = [sys.executable, str(HERE / "accelerator_sides.py"), check]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines()
    return ("" if not done.returncode else "failed: ") + (lines[-1] if lines else "nothing")[:600]


def fill_tables(folder: Path, given: argparse.Namespace) -> None:
    """Runs the rows of published tables that are short of rounds; they go on by themselves."""
    for table, rows in TABLES:
        command = [sys.executable, "-m", "fedjax_cfl", "paper", table, "--rows", *rows]
        command += ["--out", str(folder / "paper")]
        if given.quick:
            print("not in a quick run:", " ".join(command[1:]), flush=True)
        else:
            subprocess.run(command, env=os.environ | {"PYTHONPATH": str(HERE.parent)}, check=False)


def device_name() -> str:
    """Returns what JAX calls its first device; asked in a process of its own, which gives it back."""
    ask = "import jax; d = jax.devices()[0]; print('cpu' if d.platform == 'cpu' else d.device_kind)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"no JAX here: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.split("\n")[-2]


def main() -> None:
    """Reads the arguments and measures what they ask for."""
    parser = make_parser(__doc__, "few clients and rounds; W1 to W3 with 20 only")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--seconds", type=float, default=20.0, help="of timed rounds, about")
    parser.add_argument("--results", type=Path, help="folder of the tables")
    for inner in ("--side", "--cell", "--precision"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    cells = list_cells()
    if given.side:
        import accelerator_sides

        cell = next(c for each in cells.values() for c in each if c.name == given.cell)
        cell = cell.shrink() if given.quick else cell
        print(json.dumps(accelerator_sides.SIDES[given.side](cell, given)))
        return
    given.device = device_name()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.results or (Path(temporary) if given.quick else RESULTS)
        for stage in [stage for stage in STAGES if stage in given.stages]:
            if stage == "agree":
                check_agreement(folder, given)
            elif stage == "tables":
                fill_tables(folder, given)
            else:
                few = given.quick and stage == "w"
                measure_cells(cells[stage][:3] if few else cells[stage], folder, given)


if __name__ == "__main__":
    main()
