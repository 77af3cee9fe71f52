"""One seed, one outcome: the same bytes again and again, in this process and another, and nearly the same on any number of lanes."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

from fedjax_cfl import __main__ as cli
from fedjax_cfl import plot, report

FAULTS = "faults.nan=0.3 faults.dropout=0.2 faults.straggler=0.3 faults.byzantine=0.2 faults.attack=noise"
SMALL = f"dataset.clients=30 model=mclr rounds=4 local.epochs=1 devices=1 drift=swap_all drift.p=0.3 {FAULTS}"
METHODS = {
    "fedavg": f"{SMALL} algorithm=fedavg",
    "flexcfl": f"{SMALL} algorithm=flexcfl algorithm.pretrain=iters:3 algorithm.alpha=4",
}
COUNTED = ("dropped_clients", "nonfinite_clients", "hostile_clients", "shifted_clients", "client_updates", "local_steps", "units_up")


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    """Returns go(line) -> the directory of a new, finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "1")  # other tests may have started JAX already
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("no_cache")))  # each run compiles for itself
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(plot, "curves", lambda run_dir, summary: None)

        def go(line):
            run_dir = tmp_path_factory.mktemp("run") / "run"
            patch.setattr(sys, "argv", ["fedjax-cfl", *line.split(), f"run_dir={run_dir}"])
            with contextlib.redirect_stdout(io.StringIO()):
                assert cli.main() == 0
            return run_dir

        yield go


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def first(go, method):
    return go(METHODS[method])


def timeless(run_dir) -> bytes:
    """Returns the bytes of metrics.jsonl without the one number that is a time."""
    found, times = re.subn(rb', "wall_s": [0-9.e-]+', b"", (run_dir / report.METRICS).read_bytes())
    assert times == found.count(b"\n") == 4
    return found


@pytest.mark.parametrize("method", ["fedavg"], indirect=True)
def test_again_in_this_process(go, method, first):
    assert timeless(go(METHODS[method])) == timeless(first)


@pytest.mark.parametrize("method", ["flexcfl"], indirect=True)
def test_in_a_process_of_its_own(method, first, tmp_path):
    command = [sys.executable, "-m", "fedjax_cfl", *METHODS[method].split(), f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert timeless(tmp_path / "run") == timeless(first)


@pytest.mark.parametrize("method", ["fedavg"], indirect=True)
def test_another_seed_is_another_run(go, method, first):
    other = report.read_metrics(go(f"{METHODS[method]} seed=1"))
    for row, same in zip(other, report.read_metrics(first), strict=True):
        assert row["train_loss"] != same["train_loss"]


@pytest.mark.parametrize(("method", "width"), [("fedavg", 2), ("flexcfl", 5)], indirect=["method"])
def test_width_changes_nothing_but_rounding(go, method, first, width):
    """Counts, faults and who is in which group are exact; losses agree to 1e-5, because float32 sums run in another order."""
    wide = report.read_metrics(go(f"{METHODS[method]} local.width={width}"))
    for row, same in zip(wide, report.read_metrics(first), strict=True):
        assert {name: row[name] for name in (*COUNTED, "group_sizes")} == {name: same[name] for name in (*COUNTED, "group_sizes")}
        for name in ("train_loss", "test_loss", "discrepancy"):
            assert row[name] == pytest.approx(same[name], rel=1e-5), (row["round"], name)
    assert all(sum(row[name] for row in wide) for name in COUNTED), "nothing to get wrong"
