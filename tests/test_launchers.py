"""Sweeps through Hydra's launchers: side by side on this machine, and what would be
sent to a cluster.
"""

import os
import subprocess
import sys

import hydra
import pytest

from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.runs.results import read_summary

SMALL = [
    "dataset.clients=12",
    "algorithm=fedavg",
    "model=mclr",
    "rounds=1",
    "local.epochs=1",
    "devices=1",
]
NEEDS = {
    "cores": "hydra_plugins.hydra_joblib_launcher",
    "processes": "hydra_plugins.hydra_submitit_launcher",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", NEEDS)
def test_a_sweep_is_spread_over_processes(launcher, tmp_path):
    pytest.importorskip(NEEDS[launcher], reason="pip install '.[launchers]'")
    command = [
        sys.executable,
        "-m",
        "fedjax_cfl",
        "-m",
        f"hydra/launcher={launcher}",
        *SMALL,
        "seed=3,4",
        f"run_dir={tmp_path / 'sweep'}",
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [read_summary(tmp_path / "sweep" / number)["seed"] for number in "01"] == [3, 4]


def test_the_cluster_gets_what_the_file_says():
    pytest.importorskip(NEEDS["processes"], reason="pip install '.[launchers]'")
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = hydra.compose(
            "config",
            ["hydra/launcher=slurm", "hydra.launcher.partition=gpu"],
            return_hydra_config=True,
        )
    launcher = config.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.partition, launcher.timeout_min, launcher.cpus_per_task, launcher.mem_gb) == (
        "gpu",
        240,
        8,
        16,
    )
