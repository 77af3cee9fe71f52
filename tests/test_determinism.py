"""One seed, one outcome: the same bytes in this process and another, and nearly the same on any number of lanes."""

import contextlib
import io
import os
import re
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fedjax_cfl import __main__ as cli
from fedjax_cfl import plot, report

FAULTS = "faults.nan=0.3 faults.dropout=0.2 faults.straggler=0.3 faults.byzantine=0.2 faults.attack=noise"
SMALL = f"dataset.clients=30 model=mclr rounds=4 local.epochs=1 devices=1 drift=swap_all drift.p=0.3 {FAULTS}"
LINE = f"{SMALL} algorithm=flexcfl algorithm.pretrain=iters:3 algorithm.alpha=4"
COUNTED = ("dropped_clients", "nonfinite_clients", "hostile_clients", "shifted_clients", "client_updates", "local_steps", "units_up")


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    """Returns go(line) -> the directory of a new, finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "1")  # other tests may have started JAX already
        jax.config.update("jax_enable_compilation_cache", False)  # each run compiles for itself
        compilation_cache.reset_cache()
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(plot, "curves", lambda run_dir, summary: None)

        def go(line):
            run_dir = tmp_path_factory.mktemp("run") / "run"
            patch.setattr(sys, "argv", ["fedjax-cfl", *line.split(), f"run_dir={run_dir}"])
            with contextlib.redirect_stdout(io.StringIO()):
                assert cli.main() == 0
            return run_dir

        yield go
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def first(go):
    return go(LINE)


def timeless(run_dir) -> bytes:
    """Returns the bytes of metrics.jsonl without the one number that is a time."""
    found, times = re.subn(rb', "wall_s": [0-9.e-]+', b"", (run_dir / report.METRICS).read_bytes())
    assert times == found.count(b"\n") == 4
    return found


def apart(tmp_path, **environment):
    """Runs the line in a process of its own, which compiles for itself; returns its folder."""
    command = [sys.executable, "-m", "fedjax_cfl", *LINE.split(), f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"} | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tmp_path / "run"


def assert_same_but_for_rounding(run_dir, first):
    """Counts, faults and who is in which group are exact; losses agree to 1e-5, because float32 sums run in another order."""
    found = report.read_metrics(run_dir)
    for row, same in zip(found, report.read_metrics(first), strict=True):
        assert {name: row[name] for name in (*COUNTED, "group_sizes")} == {name: same[name] for name in (*COUNTED, "group_sizes")}
        for name in ("train_loss", "test_loss", "discrepancy"):
            assert row[name] == pytest.approx(same[name], rel=1e-5), (row["round"], name)
    assert all(sum(row[name] for row in found) for name in COUNTED), "nothing to get wrong"


def test_in_a_process_of_its_own(first, tmp_path):
    assert timeless(apart(tmp_path, PYTHONHASHSEED="7")) == timeless(first)


def test_optimised_as_users_have_it(first, tmp_path):
    assert_same_but_for_rounding(apart(tmp_path, XLA_FLAGS=""), first)


def test_another_seed_is_another_run(go, first):
    other = report.read_metrics(go(f"{LINE} seed=1"))
    for row, same in zip(other, report.read_metrics(first), strict=True):
        assert row["train_loss"] != same["train_loss"]


def test_width_changes_nothing_but_rounding(go, first):
    assert_same_but_for_rounding(go(f"{LINE} local.width=5"), first)
