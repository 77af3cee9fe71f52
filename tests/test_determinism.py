"""One seed, one outcome: the same bytes in this process and another, and nearly the
same on any number of lanes.
"""

import contextlib
import io
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import build, jit_as_users_do, nightly, with_execution
from jax.experimental.compilation_cache import compilation_cache

import fedjax_cfl as cfl
from fedjax_cfl.analysis import plot
from fedjax_cfl.cli.main import main
from fedjax_cfl.runs.results import METRICS_FILE, read_metrics

FAULTS = (
    "faults.nan=0.3 faults.dropout=0.2 faults.straggler=0.3 faults.byzantine=0.2"
    " faults.attack=noise"
)
SMALL = (
    "dataset.clients=30 model=mclr rounds=4 local.epochs=1 devices=1 drift=swap_all drift.p=0.3"
    f" {FAULTS}"
)
LINE = f"{SMALL} algorithm=flexcfl algorithm.pretrain=iters:3 algorithm.alpha=4"
COUNTED = (
    "dropped_clients",
    "nonfinite_clients",
    "hostile_clients",
    "shifted_clients",
    "client_updates",
    "local_steps",
    "units_up",
)


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    """Returns go(line) -> the directory of a new, finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "1")  # other tests may have started JAX already
        jax.config.update("jax_enable_compilation_cache", False)  # each run compiles for itself
        compilation_cache.reset_cache()
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(plot, "plot_curves", lambda run_dir, summary: None)

        def go(line):
            run_dir = tmp_path_factory.mktemp("run") / "run"
            patch.setattr(sys, "argv", ["fedjax-cfl", *line.split(), f"run_dir={run_dir}"])
            with contextlib.redirect_stdout(io.StringIO()):
                assert main() == 0
            return run_dir

        yield go
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def first(go):
    return go(LINE)


def timeless(run_dir) -> bytes:
    """Returns the bytes of metrics.jsonl without the one number that is a time."""
    found, times = re.subn(rb', "wall_s": [0-9.e-]+', b"", (run_dir / METRICS_FILE).read_bytes())
    assert times == found.count(b"\n") == 4
    return found


@pytest.mark.nightly
def test_in_a_process_of_its_own(first, tmp_path):
    command = [sys.executable, "-m", "fedjax_cfl", *LINE.split(), f"run_dir={tmp_path / 'run'}"]
    # it compiles for itself
    alone = os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "PYTHONHASHSEED": "7",
    }
    done = subprocess.run(command, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert timeless(tmp_path / "run") == timeless(first)


@pytest.mark.nightly
def test_width_changes_nothing_but_rounding(go, first):
    """Counts, faults and who is in which group are exact; losses agree to 1e-5, because
    float32 sums run in another order.
    """
    found = read_metrics(go(f"{LINE} local.width=5"))
    for row, same in zip(found, read_metrics(first), strict=True):
        assert {name: row[name] for name in (*COUNTED, "group_sizes")} == {
            name: same[name] for name in (*COUNTED, "group_sizes")
        }
        for name in ("train_loss", "test_loss", "discrepancy"):
            assert row[name] == pytest.approx(same[name], rel=1e-5), (row["round"], name)
    assert all(sum(row[name] for row in found) for name in COUNTED), "nothing to get wrong"


OPTIONS = {"m": 2}
FOUNDED = OPTIONS | {"alpha": 2, "pretrain": "iters:3"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "options"),
    [(cfl.algorithms.ifca, OPTIONS), nightly(cfl.algorithms.flexcfl, FOUNDED)],
    ids=["ifca", "flexcfl"],
)
def test_optimised_as_users_have_it(method, options, toy, mlp, local):
    """Nearly all other tests run what XLA makes without optimisation."""
    faults = cfl.Faults(nan=0.3, dropout=0.2, straggler=0.3, byzantine=0.2, attack="noise")
    local = with_execution(local, width=3, first_layer="dual")
    algorithm = build(method, mlp, local, cfl.System(cfl.select.uniform(6), faults), **options)

    def first_round(key, data):
        return algorithm.round(key, algorithm.init(key, data), data)

    plain, optimised = (
        compiled(first_round)(jax.random.key(6), toy) for compiled in (jax.jit, jit_as_users_do)
    )
    assert plain[1].fault_counts.byzantine > 0
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(optimised), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
