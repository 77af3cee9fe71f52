"""A run that is killed again and again ends exactly as one that never was.

pytest tests/test_kill.py -m slow -s        50 kills, about 5 minutes on 2 cores; prints
what it survived
"""

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet
import pytest
from conftest import VARYING

from fedjax_cfl.runs import checkpoint
from fedjax_cfl.runs.checkpoint import list_steps
from fedjax_cfl.runs.results import METRICS_FILE, read_metrics


def command(run_dir, *settings):
    common = [
        "dataset.clients=30",
        "model=mclr",
        "drift=swap_all",
        "faults.nan=0.05",
        "faults.dropout=0.1",
    ]
    return [sys.executable, "-m", "fedjax_cfl", *common, *settings, f"run_dir={run_dir}"]


def finish(run_dir, *settings):
    done = subprocess.run(command(run_dir, *settings), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def rounds_of(run_dir):
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    return rows[-1]["round"] if rows else 0


def killed(run_dir, settings, rounds, kills, rng):
    """Kills the run `kills` times, in turn while it starts and amid its rounds; returns
    (rounds trained twice because of it, kills).
    """
    lost = 0
    for kill in range(kills):
        done = rounds_of(run_dir)
        process = subprocess.Popen(
            command(run_dir, *settings),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if kill % 2:  # by its rounds, not by the clock: a quick machine would be finished
            target = done + rng.randint(1, (rounds - done) // (kills - kill + 1))
            while process.poll() is None and rounds_of(run_dir) < target:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.05))
        else:
            time.sleep(rng.uniform(0.5, 2.5))
        if process.poll() is not None:
            assert process.returncode == 0, process.stderr.read()
            return lost, kill
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps = list_steps(run_dir / "checkpoints")
        lost += max(0, rounds_of(run_dir) - (steps[-1] if steps else 0))
    return lost, kills


def outcome(run_dir):
    """Returns everything a run leaves that does not depend on the clock."""
    rows = [
        {name: value for name, value in row.items() if name not in VARYING}
        for row in read_metrics(run_dir)
    ]
    summary = {
        name: value
        for name, value in json.loads((run_dir / "summary.json").read_text()).items()
        if name not in VARYING
    }
    clients = {
        name: pyarrow.parquet.read_table(run_dir / f"{name}.parquet").to_pydict()
        for name in ("clients", "assignments")
    }
    return rows, summary, clients, checkpoint.load_arrays(run_dir / "checkpoints")


def compare(tmp_path, algorithm, rounds, every, kills, seed):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    settings = f"algorithm={algorithm}", f"rounds={rounds}", f"checkpoint.every={every}"
    finish(whole, *settings)
    started = time.monotonic()
    lost, survived = killed(torn, settings, rounds, kills, random.Random(seed))
    if not (torn / "summary.json").exists():
        finish(torn, *settings)
    rows, summary, clients, arrays = outcome(whole)
    again = outcome(torn)
    assert [row["round"] for row in again[0]] == list(range(1, rounds + 1)), "every round once"
    assert again[0] == rows and again[1] == summary
    np.testing.assert_equal(again[2], clients)
    assert arrays.keys() == again[3].keys()
    different = sum(
        not np.array_equal(arrays[name], again[3][name], equal_nan=True) for name in arrays
    )
    assert different == 0
    print(
        f"\nkills survived {survived}, rounds trained twice {lost} of {rounds}, "
        f"arrays different {different} of {len(arrays)}, {time.monotonic() - started:.0f} s"
    )
    return survived


@pytest.mark.nightly
def test_a_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    assert compare(tmp_path, "fedavg", rounds=30, every=2, kills=2, seed=0) == 2


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    assert compare(tmp_path, "flexcfl", rounds=900, every=1, kills=50, seed=1) == 50
