"""Two processes over the network, with collectives of their own: the run of one process
with two devices.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import last_arrays, lasting_rows, nightly

SMALL = [
    "dataset.clients=20",
    "model=mclr",
    "local.epochs=1",
    "clients_per_round=6",
    "checkpoint.every=2",
    "faults.dropout=0.2",
]
SWAP = ["drift=swap_all", "drift.p=0.4"]
IFCA = [*SWAP, "algorithm=ifca", "algorithm.m=2"]
FLEXCFL = [
    *SWAP,
    "algorithm=flexcfl",
    "algorithm.alpha=2",
    "algorithm.m=2",
    "algorithm.pretrain=iters:3",
]


def begin(folder, processes: int, *more: str, last: tuple = ()) -> list[subprocess.Popen]:
    """Starts the processes of one run; alone, a process has two devices. `last`: settings of
    the last process only.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(2 // processes)}
    started = []
    for number in range(processes):
        joined = (
            [f"coordinator=127.0.0.1:{port}", "processes=2", f"process={number}"]
            if processes > 1
            else []
        )
        joined += last if number == processes - 1 else ()
        command = [sys.executable, "-m", "fedjax_cfl", *SMALL, *more, *joined, f"run_dir={folder}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
    return started


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Returns (exit status, stdout, stderr) of each."""
    try:
        texts = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def agree(folder, other):
    for ours, theirs in zip(lasting_rows(folder), lasting_rows(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(
                np.array(ours[name], float),
                np.array(value, float),
                rtol=1e-5,
                atol=1e-6,
                err_msg=name,
            )


@pytest.mark.nightly
@pytest.mark.parametrize("method", [IFCA, FLEXCFL], ids=["ifca", "flexcfl"])
def test_two_processes_are_one_run_and_a_signal_to_any_stops_both(method, tmp_path):
    """A method stopped by a signal to process 1, gone on with, and compared with one process
    that was never stopped.
    """
    folder = tmp_path / "both"
    started = begin(folder, 2, *method, "rounds=100000")
    for _ in range(900):
        if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 5000:
            break
        time.sleep(0.1)
    started[1].send_signal(signal.SIGTERM)
    done = ended(started)
    assert [status for status, *_ in done] == [128 + signal.SIGTERM] * 2, done
    last = lasting_rows(folder)[-1]["round"]
    assert f"stopped after round {last}" in done[0][1] and "2 CPU devices on 2 hosts" in done[0][1]
    assert "round" not in done[1][1]  # process 0 alone speaks and writes
    assert (folder / "checkpoints" / f"{last}.header").is_file()
    more = f"rounds={last + 2}"
    done = ended(begin(folder, 2, *method, more))
    assert [status for status, *_ in done] == [0, 0], done
    assert f"resuming after round {last}" in done[0][1]
    (status, _, errors), *_ = ended(begin(tmp_path / "alone", 1, *method, more))
    assert status == 0, errors
    agree(folder, tmp_path / "alone")
    refused = ended(begin(folder, 2, *method, more))
    assert [status for status, *_ in refused] == [2, 2]
    assert f"already holds this run, finished after {last + 2} rounds" in refused[0][2]
    assert "fedjax-cfl" not in refused[1][2]  # said once


@pytest.mark.slow
def test_processes_share_the_models_of_clients(tmp_path):
    """FeSEM, whose checkpoints are put together from both, gone on with by both, and compared
    with one process that was never stopped.
    """
    fesem = ["algorithm=fesem", "algorithm.restarts=2", "checkpoint.every=1"]
    for rounds in (2, 4):
        done = ended(begin(tmp_path / "both", 2, *fesem, f"rounds={rounds}"))
        assert [status for status, *_ in done] == [0, 0], done
    assert "resuming after round 2" in done[0][1]
    (status, _, errors), *_ = ended(begin(tmp_path / "alone", 1, *fesem, "rounds=4"))
    assert status == 0, errors
    agree(tmp_path / "both", tmp_path / "alone")


@pytest.mark.slow
def test_a_stream_over_two_processes(tmp_path):
    """Windows, drift events, representations and the clock: as in one process."""
    stream = ["drift=stream_burst", "drift.intervals=6", "drift.period=1", "drift.retained=2"]
    stream += ["drift.begin=2", "drift.end=4", "clock=fedscale", "rounds=6"]
    both = ended(begin(tmp_path / "both", 2, "algorithm=fielding", *stream))
    alone = ended(begin(tmp_path / "alone", 1, "algorithm=fielding", *stream))
    assert [status for status, *_ in both + alone] == [0, 0, 0], both + alone
    agree(tmp_path / "both", tmp_path / "alone")
    assert sum(row["shifted_clients"] for row in lasting_rows(tmp_path / "both")) > 20


@pytest.mark.nightly
def test_processes_with_other_settings_are_refused(tmp_path):
    started = begin(tmp_path / "run", 2, "algorithm=fedavg", "rounds=4", last=("local.lr=0.07",))
    for status, _, error in ended(started):
        assert status == 2, error
        assert "fedjax-cfl: local.lr: 0.07 in process 1, 0.05 in process 0; all processes" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [nightly(0), 1])
def test_a_killed_process_ends_the_other(number, tmp_path):
    started = begin(tmp_path / "run", 2, "algorithm=fedavg", "rounds=1000000")
    path = tmp_path / "run" / "metrics.jsonl"
    for _ in range(1800):
        if path.exists() and path.stat().st_size > 5000:
            break
        time.sleep(0.1)
    started[number].kill()
    status, _, error = ended(started)[1 - number]
    assert status != 0, error
    if number == 1:  # process 0 coordinates: without it JAX aborts the others before Python can
        assert status == 1 and "Traceback" not in error, error
        assert error.count("fedjax-cfl: another process of this run has ended") == 1
    assert last_arrays(tmp_path / "run")  # is whole


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["coordinator=nowhere"], "coordinator=nowhere: must be null, auto or HOST:PORT"),
        (
            ["coordinator=127.0.0.1:1"],
            (
                "coordinator=127.0.0.1:1: needs processes=N and process=0 .. N-1, not"
                " processes=None process=None"
            ),
        ),
        (
            ["coordinator=127.0.0.1:1", "processes=2", "process=2"],
            "needs processes=N and process=0 .. N-1, not processes=2 process=2",
        ),
        (["coordinator=auto", "seeds=2"], "coordinator=auto: several seeds run in one process"),
    ],
)
def test_what_cannot_be_joined_is_refused(line, said, fedjax_cfl, tmp_path):
    status, _, error = fedjax_cfl(" ".join([*SMALL, "algorithm=fedavg", *line, "run_dir=run"]))
    assert (status, (tmp_path / "run").exists()) == (2, False), error
    assert said in error and error.count("\n") == 1


@pytest.mark.nightly
def test_a_cluster_that_is_not_there_is_refused(tmp_path):
    """By a process that has not started JAX."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "OMPI", "TPU"))
    }
    command = [
        sys.executable,
        "-m",
        "fedjax_cfl",
        *SMALL,
        "algorithm=fedavg",
        "coordinator=auto",
        f"run_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        command, env=clean | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, (tmp_path / "run").exists()) == (2, False), done.stderr
    assert "coordinator=auto: no cluster was found in the environment" in done.stderr
