"""The command line in use: a run, a sweep, one's own data and model end in complete run
directories.
"""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet
import pytest
from conftest import nightly
from omegaconf import OmegaConf

from fedjax_cfl.cli.build import assemble

SMALL = (
    "dataset.clients=8 clients_per_round=3 rounds=2 local.epochs=1 algorithm.pretrain=iters:2"
    " algorithm.alpha=2 devices=1"
)
BARE = "clients_per_round=3 rounds=2 local.epochs=1 algorithm=fedavg devices=1"
SUMMARY = (
    "algorithm dataset partition model preset seed rounds best_accuracy best_round final_accuracy"
    " best_of last10_evals_accuracy last10_evals_best_accuracy macro_accuracy weighted_macro_f1"
    " macro_f1 worst10_accuracy ari group_sizes nonfinite_model_clients units_up"
    " units_down bytes_up bytes_down client_updates local_steps client_updates_per_s"
    " local_steps_per_s compile_s train_s eval_s programs programs_from_cache"
    " planned_memory_bytes peak_memory_bytes width devices versions"
)


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_all_its_files_and_repeats_itself(fedjax_cfl, tmp_path):
    for name in ("one", "two"):
        status, out, error = fedjax_cfl(
            f"{SMALL} rounds=5 eval_every=2 concept=rotate concept.groups=2 run_dir={name}"
            " 'partition.seed=${seed}'"
        )
        assert status == 0 and error == ""
    assert (
        out.startswith("flexcfl on digits: 8 clients, 10 classes,")
        and "without" not in out.splitlines()[0]
    )
    assert all(
        f" {words} " in out
        for words in ("best accuracy", "clients per group", "data sent", "peak memory", "devices")
    )
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert set(SUMMARY.split()) <= set(summary)
    assert "partition.seed=${seed}" in summary["overrides"]  # as it was asked for
    assert (
        summary["algorithm"] == "flexcfl"
        and summary["partition"] == "power_law"
        and summary["rounds"] == 5
    )
    assert (
        -1 <= summary["ari"] <= 1
        and 0 <= summary["best_accuracy"] <= 1
        and sum(summary["group_sizes"]) == 8
    )
    first, second = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["round"] for row in first] == [2, 4, 5]
    assert [row | {"wall_s": 0} for row in first] == [row | {"wall_s": 0} for row in second]
    clients = pyarrow.parquet.read_table(tmp_path / "one" / "clients.parquet")
    assert clients.num_rows == 8 and {
        "client",
        "group",
        "concept",
        "train_samples",
        "test_samples",
        "accuracy",
    } <= set(clients.column_names)
    assert sorted(path.name for path in (tmp_path / "one" / ".hydra").iterdir()) == [
        "config.yaml",
        "overrides.yaml",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("precision", "asked"),
    [nightly("float32", "HIGHEST"), ("tensorfloat32", "HIGH"), nightly("bfloat16", "DEFAULT")],
)
def test_an_accelerator_rounds_matrix_products_only_by_choice(
    precision, asked, monkeypatch, request
):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")  # other tests have started JAX already
    monkeypatch.setattr("fedjax_cfl.cli.build.is_cpu", lambda mesh: False)
    request.addfinalizer(lambda: jax.config.update("jax_default_matmul_precision", "float32"))
    _, task, data, _ = assemble([f"precision={precision}"])
    program = jax.jit(task.predict).lower(task.init(jax.random.key(0)), data.x[:2]).as_text()
    assert f"precision = [{asked}, {asked}]" in program


@pytest.mark.nightly
def test_a_short_run_says_why_it_has_no_accuracy(fedjax_cfl):
    status, out, _ = fedjax_cfl(f"{SMALL} rounds=1")
    assert status == 0 and "no accuracy yet: discard=rounds" in out


def test_a_sweep_and_its_comparison(fedjax_cfl, tmp_path):
    status, out, error = fedjax_cfl(
        "algorithm=fedavg seed=0,1 dataset.clients=8 clients_per_round=3 rounds=1 model=mclr"
        " partition=iid local.epochs=1 devices=1 run_dir=sweep -m"
    )
    assert status == 0 and error == ""
    assert out.splitlines()[-1].startswith("wrote compare.csv, compare.md, ")
    assert (tmp_path / "sweep" / "compare.csv").is_file()
    runs = [
        json.loads((tmp_path / "sweep" / str(number) / "summary.json").read_text())
        for number in range(2)
    ]
    assert [(run["algorithm"], run["seed"]) for run in runs] == [("fedavg", 0), ("fedavg", 1)]
    assert (
        len({rows(tmp_path / "sweep" / str(number))[-1]["train_loss"] for number in range(2)}) == 2
    ), "another seed is another run"
    index = (tmp_path / "sweep" / "index.csv").read_text().splitlines()
    assert index[0] == "run,seed" and len(index) == 3
    for number, line in enumerate(index[1:]):
        assert line == f"{number},{runs[number]['seed']}"
    assert fedjax_cfl("-m seed=0,1 run_dir=sweep")[0] == 2  # never over another


@pytest.mark.nightly
def test_a_sweep_goes_on_with_its_first_unfinished_run(fedjax_cfl, tmp_path):
    line = (
        "-m algorithm=fedavg,fedsgd dataset.clients=8 clients_per_round=3 rounds=2"
        " local.epochs=1 model=mclr devices=1 run_dir=sweep"
    )
    assert fedjax_cfl(line)[0] == 0
    done = tmp_path / "sweep" / "0" / "summary.json"
    before = done.stat().st_mtime_ns, rows(tmp_path / "sweep" / "1")
    (tmp_path / "sweep" / "1" / "summary.json").unlink()
    status, out, error = fedjax_cfl(line)
    assert (status, error) == (0, "") and out.count("finished after 2 rounds; passed over") == 1
    assert "resuming after round 2" in out and (tmp_path / "sweep/1/summary.json").exists()
    assert (done.stat().st_mtime_ns, rows(tmp_path / "sweep" / "1")) == before
    assert fedjax_cfl(f"{line} resume=never")[0] == 2
    status, _, error = fedjax_cfl(f"{line} local.lr=0.5")
    assert status == 2 and "is of a different run (local.lr: 0.05 there, 0.5 here)" in error


def test_a_finished_grid_is_passed_over_by_its_own_command_alone(fedjax_cfl, tmp_path):
    line = (
        "-m checkpoint.keep=2,3 algorithm=fedavg vectorize=[seed] seed=0,1 dataset.clients=8"
        " clients_per_round=3 rounds=1 local.epochs=1 model=mclr devices=1 run_dir=sweep"
    )
    assert fedjax_cfl(line)[0] == 0
    status, out, error = fedjax_cfl(line)
    assert (status, error) == (0, "") and out.count("finished after 1 rounds; passed over") == 2
    status, _, error = fedjax_cfl(f"{line} local.lr=0.5")
    assert status == 2 and "is of a different run (local.lr: 0.05 there, 0.5 here)" in error


@pytest.mark.parametrize("folder", [".", "new"])
def test_a_sweep_that_cannot_begin_leaves_the_current_folder(
    folder, fedjax_cfl, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    line = "dataset=npz dataset.source.path=missing.npz algorithm=fedavg,fedsgd"
    status, _, error = fedjax_cfl(f"-m {line} run_dir={folder}")
    assert status == 2 and "missing.npz" in error
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "here"]


def test_a_grid_is_not_written_into_a_run(fedjax_cfl, tmp_path):
    assert fedjax_cfl(f"dataset.clients=8 {BARE} rounds=1 run_dir=7")[0] == 0
    status, _, error = fedjax_cfl("algorithm=fedavg seeds=2 run_dir=7")
    assert status == 2 and "run_dir=7: holds one run" in error
    assert not (tmp_path / "7" / "0").exists()


@pytest.mark.nightly
def test_rounds_without_updates_have_no_losses(fedjax_cfl, tmp_path):
    line = f"dataset.clients=8 {BARE} rounds=2 run_dir=run local.lr=1e30"
    status, out, _ = fedjax_cfl(line)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    lost = summary["nonfinite_clients"]
    assert status == 0 and lost and summary["client_updates"] == 0
    assert f"{lost} updates were not finite and were left out; 0 were used in all" in out
    names = ("train_loss", "train_loss_last", "discrepancy", "dissimilarity")
    assert [row[name] for row in rows(tmp_path / "run") for name in names] == [None] * 8


@pytest.mark.nightly
def test_simulated_time_is_in_the_results(fedjax_cfl, tmp_path):
    status, out, _ = fedjax_cfl(f"dataset.clients=8 {BARE} rounds=2 run_dir=run clock=fedscale")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert status == 0 and summary["sim_time_s"] == rows(tmp_path / "run")[-1]["sim_time_s"] > 0
    assert f"{summary['sim_time_s']:,.1f}" in out and "simulated seconds" in out


@pytest.mark.nightly
def test_a_grid_says_what_its_runs_differ_in(fedjax_cfl, tmp_path):
    line = f"dataset.clients=8 {BARE} vectorize=[seed,local.lr] seed=3,4 local.lr=0.1,0.2"
    assert fedjax_cfl(f"{line} rounds=1 run_dir=grid")[0] == 0
    assert (tmp_path / "grid" / "index.csv").read_text() == (
        "run,seed,local.lr\n0,3,0.1\n1,3,0.2\n2,4,0.1\n3,4,0.2\n"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["fedavg", nightly("flexcfl")])
def test_a_run_of_the_reference_code_can_go_on(algorithm, fedjax_cfl, tmp_path):
    """No setting but `rounds` says how many rounds there are, so that more can be asked for."""
    line = f"{SMALL} preset=ref algorithm={algorithm} discard=none"
    line = line if algorithm == "flexcfl" else line.replace(" algorithm.pretrain=iters:2", "")
    line = line if algorithm == "flexcfl" else line.replace(" algorithm.alpha=2", "")
    for run_dir, rounds in (("two", 2), ("two", 4), ("whole", 4)):
        status, _, error = fedjax_cfl(f"{line} rounds={rounds} run_dir={run_dir}")
        assert status == 0, error
    pairs = zip(rows(tmp_path / "two"), rows(tmp_path / "whole"), strict=True)
    assert all(one | {"wall_s": 0} == other | {"wall_s": 0} for one, other in pairs)


def test_what_was_asked_for_is_written_down_as_values(fedjax_cfl, tmp_path):
    """Every setting has its value, and a published table is none of them."""
    status, _, error = fedjax_cfl(
        f"experiment=planted_clusters dataset.clients=8 {BARE} run_dir=run"
    )
    assert status == 0, error
    text = (tmp_path / "run" / ".hydra" / "config.yaml").read_text()
    written = OmegaConf.create(text)
    assert "${" not in text and "paper" not in written
    assert (written.rounds, written.partition.clients) == (2, 8)


@pytest.mark.nightly
def test_runs_that_differ_in_numbers_share_their_programs(fedjax_cfl, tmp_path):
    kept = "jax_persistent_cache_min_compile_time_secs"
    seconds = getattr(jax.config, kept)
    jax.config.update(kept, 0.0)  # programs as small as these are kept, too
    default = "seed=0 local.lr=0.1 algorithm.mu=0.3 algorithm.eta_g=0.02"
    first = f"{default} drift.p=0.5"
    other = "seed=1 local.lr=0.2 algorithm.mu=0.1 algorithm.eta_g=0.01 drift.p=0.9"
    try:
        for name, numbers in (("first", first), ("other", other), ("default", default)):
            status, _, error = fedjax_cfl(
                f"{SMALL} algorithm=fedgrouprox partition.seed=0 drift=swap_all discard=none"
                f" {numbers} run_dir={name}"
            )
            assert (status, error) == (0, "")
    finally:
        jax.config.update(kept, seconds)
    for name in ("other", "default"):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["programs"] == summary["programs_from_cache"] == 3
    ends = {name: rows(tmp_path / name)[-1]["accuracy"] for name in ("first", "other", "default")}
    assert len(set(ends.values())) > 1  # they are other runs nevertheless


def test_own_data_keep_their_owners_and_empty_clients_are_mentioned(fedjax_cfl, tmp_path):
    client, split = np.repeat([0, 1, 2, 4], 10), np.tile([0, 0, 0, 0, 1], 8)  # nobody is client 3
    # client 4 never trains, client 2 has no test samples
    split[client == 2], split[client == 4] = (
        0,
        1,
    )
    np.savez(
        tmp_path / "owned.npz",
        x=np.ones((40, 5), np.float32),
        y=np.arange(40) % 3,
        client=client,
        split=split,
    )
    status, out, error = fedjax_cfl(f"dataset=npz dataset.source.path=owned.npz {BARE} run_dir=run")
    assert status == 0 and error == ""
    line = out.splitlines()[0]
    assert line.startswith("fedavg on npz: 4 clients, 3 classes,")
    assert "1 client without train samples, 1 client without test samples" in line
    assert pyarrow.parquet.read_table(tmp_path / "run" / "clients.parquet")[
        "train_samples"
    ].to_pylist() == [8, 8, 10, 0]


@pytest.mark.nightly
def test_own_data_without_owners_of_any_shape(fedjax_cfl, tmp_path):
    np.savez(
        tmp_path / "pixels.npz",
        x=np.random.default_rng(0).integers(0, 256, (40, 4, 3, 2), np.uint8),
        y=np.arange(40) % 3,
    )
    line = (
        f"dataset=npz dataset.source.path=pixels.npz {BARE} dataset.clients=4"
        " partition.min_samples=2 model=mlp"
    )
    # a full batch, and a name that reads as a number
    status, out, error = fedjax_cfl(f"{line} local.batch_size=1000000000 run_dir=5")
    assert (
        status == 0
        and error == ""
        and "4 clients, 3 classes, " in out
        and (tmp_path / "5" / "summary.json").is_file()
    )


@pytest.mark.nightly
def test_own_model_in_the_current_directory(fedjax_cfl, tmp_path):
    (tmp_path / "my_models.py").write_text(
        "import flax.linen as nn\n\n\nclass Tiny(nn.Module):\n    num_classes: int\n    width: int"
        " = 4\n\n    @nn.compact\n    def __call__(self, x):\n        return"
        " nn.Dense(self.num_classes)(nn.Dense(self.width)(x.reshape(len(x), -1)))\n"
    )
    line = "model.module._target_=my_models.Tiny +model.module.width=3 dataset.clients=8"
    status, _, error = fedjax_cfl(f"{line} {BARE} run_dir=run")
    assert status == 0 and error == ""
    status, _, error = fedjax_cfl(f"{line} {BARE} run_dir=run")  # the model may have been edited
    assert status == 2 and "(edits of my_models.Tiny since then are not seen); choose" in error
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["model"] == "my_models.Tiny" and summary["algorithm"] == "fedavg"


@pytest.mark.nightly
def test_a_run_that_seldom_scores_says_so(fedjax_cfl):
    asked = f"{BARE} algorithm=ifca algorithm.m=2 dataset.clients=30 model=mclr"
    status, out, _ = fedjax_cfl(f"preset=paper {asked} run_dir=paper")
    assert status == 0 and "discard=met: accuracies count once every client has taken part" in out
    assert "discard=met" not in fedjax_cfl(f"{asked} run_dir=clean")[1]
    grid = fedjax_cfl(f"preset=paper seeds=2 {asked} run_dir=grid")[1]
    assert "discard=met: accuracies count" in grid


@pytest.mark.nightly
def test_drift_reaches_the_run(fedjax_cfl, tmp_path):
    status, _, error = fedjax_cfl(f"drift=swap_all drift.p=1 dataset.clients=8 {BARE} run_dir=run")
    assert status == 0 and error == ""
    fedjax_cfl(f"dataset.clients=8 {BARE} run_dir=still")
    assert rows(tmp_path / "run")[-1]["train_loss"] != rows(tmp_path / "still")[-1]["train_loss"]


@pytest.mark.nightly
def test_the_process_runs_from_anywhere(tmp_path):
    command = [sys.executable, "-m", "fedjax_cfl", *f"dataset.clients=8 {BARE}".split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("fedavg-digits-") and (run_dir / "summary.json").is_file()
    assert (run_dir / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.nightly
def test_a_run_ends_well_without_metadata_and_without_a_picture(fedjax_cfl, monkeypatch, tmp_path):
    """From a source tree that nobody installed, and with settings of matplotlib that fail."""
    real = importlib.metadata.version

    def version(package):
        if package == "fedjax-cfl":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    def plot_curves(run_dir, summary):
        raise RuntimeError("Failed to process string with tex\nbecause latex could not be found")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("fedjax_cfl.cli.launch.draw_curves", plot_curves)
    status, _, err = fedjax_cfl(f"{SMALL} rounds=1 run_dir=run")
    assert status == 0
    (line,) = [line for line in err.splitlines() if "warning" in line]
    assert line.endswith(
        "curves.png is not drawn: RuntimeError: Failed to process string with tex"
        " because latex could not be found"
    )
    versions = json.loads((tmp_path / "run" / "summary.json").read_text())["versions"]
    assert versions["fedjax-cfl"] is None and versions["jax"] == jax.__version__
    assert fedjax_cfl("--version")[1] == "fedjax-cfl (source tree, not installed)\n"
