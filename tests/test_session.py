"""One run in its directory: stopped, crashed, damaged or signalled, and continued as if
nothing had happened.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet
import pytest
from conftest import VARYING, last_arrays, nightly, others_nightly

from fedjax_cfl.analysis import plot
from fedjax_cfl.cli.main import main
from fedjax_cfl.runs import checkpoint, results, session
from fedjax_cfl.runs.assignments import ASSIGNMENTS_FILE
from fedjax_cfl.runs.checkpoint import list_steps, save
from fedjax_cfl.runs.results import METRICS_FILE, read_summary
from fedjax_cfl.runs.resume import CHECKPOINTS
from fedjax_cfl.runs.saved_models import load_arrays

FAULTS = (
    "faults.nan=0.1 faults.dropout=0.1 faults.straggler=0.2 faults.byzantine=0.2"
    " faults.attack=noise"
)
SMALL = "dataset.clients=30 model=mclr rounds=9 local.epochs=1 checkpoint.every=3 devices=1"
FLEXCFL = "algorithm=flexcfl algorithm.pretrain=iters:3 algorithm.alpha=4"
PLAIN = f"{SMALL} algorithm=fedavg"
CASES = {
    "fedavg, swap_part": (
        f"{SMALL} {FAULTS} algorithm=fedavg drift=swap_part drift.p=0.5 eval_auxiliary=false"
    ),
    "ifca_mig, swap_part": f"{SMALL} {FAULTS} algorithm=ifca_mig drift=swap_part drift.p=0.5",
    "flexcfl, incremental": (
        f"{SMALL} {FAULTS} {FLEXCFL} drift=incremental 'drift.schedule=[0,3,6,8]'"
    ),
    "fesem, a stream that is redrawn": (
        f"{SMALL} algorithm=fesem drift=stream_gradual drift.period=2 drift.retained=5"
    ),
}


class Answer(NamedTuple):
    """What a command ends with."""

    status: int
    out: str
    error: str


@pytest.fixture(scope="module")
def fedjax_cfl(tmp_path_factory):
    """Returns f(line, run_dir) -> Answer: the command, in this process; programs are
    compiled once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        patch.setattr(sys, "path", sys.path[:])
        patch.setenv("JAX_NUM_CPU_DEVICES", "1")  # other tests may have started JAX already
        patch.setattr(plot, "plot_curves", lambda run_dir, summary: None)

        def call(line: str, run_dir: Path) -> Answer:
            patch.setattr(sys, "argv", ["fedjax-cfl", *cli_words(line, run_dir)])
            out, error = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                try:
                    status = main()
                except SystemExit as end:
                    status = end.code
            return Answer(status, out.getvalue(), error.getvalue())

        yield call


def cli_words(line: str, run_dir: Path) -> list[str]:
    return [*line.replace("'", "").split(), f"run_dir={run_dir}"]


def done(answer: Answer) -> Answer:
    assert answer.status == 0, answer.error
    return answer


def refused(answer: Answer, status: int = 2) -> str:
    """Returns the one line that a command ended with."""
    assert answer.status == status, answer
    assert answer.error.startswith("fedjax-cfl: ") and answer.error.count("\n") == 1, answer.error
    return answer.error


@contextlib.contextmanager
def stopped_at(round: int):
    """The run hears SIGTERM while it writes the row of this round."""
    asked, real = [], results.append_row

    def append_row(handle, row):
        if row["round"] == round:
            asked.append(signal.SIGTERM)
        return real(handle, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "catch_signals", lambda: contextlib.nullcontext(asked))
        patch.setattr(results, "append_row", append_row)
        yield


@contextlib.contextmanager
def full_at(round: int):
    """The disk is full when the row of this round is half written."""
    real = results.append_row

    def append_row(handle, row):
        if row["round"] == round:
            handle.write('{"round": 7, "accur')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "append_row", append_row)
        yield


def rows(run_dir: Path) -> list[dict]:
    return [
        {name: value for name, value in json.loads(line).items() if name != "wall_s"}
        for line in open(run_dir / METRICS_FILE)
    ]


def clients(run_dir: Path) -> dict:
    return pyarrow.parquet.read_table(run_dir / "clients.parquet").to_pydict()


def steps(run_dir: Path) -> list[int]:
    return list_steps(run_dir / CHECKPOINTS)


def summary(run_dir: Path) -> dict:
    return {name: value for name, value in read_summary(run_dir).items() if name not in VARYING}


def assert_same(one: Path, other: Path, rounds: int = 9) -> None:
    """Asserts that two finished runs left the same, bit for bit, and every round once."""
    assert [row["round"] for row in rows(one)] == list(range(1, rounds + 1))
    assert rows(one) == rows(other) and summary(one) == summary(other)
    np.testing.assert_equal(clients(one), clients(other))
    assert (one / ASSIGNMENTS_FILE).read_bytes() == (other / ASSIGNMENTS_FILE).read_bytes()
    left, right = last_arrays(one), last_arrays(other)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


@pytest.fixture(scope="module")
def whole(fedjax_cfl, tmp_path_factory):
    """The plain run, never interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert done(fedjax_cfl(PLAIN, run_dir)).error == ""
    return run_dir


@pytest.fixture(scope="module")
def stopped(fedjax_cfl, tmp_path_factory):
    """The plain run, stopped after round 7."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    with stopped_at(7):
        answer = fedjax_cfl(PLAIN, run_dir)
    assert answer.status == 143 and answer.out.endswith(
        f"stopped after round 7\nthe same command with run_dir={run_dir} goes on from there\n"
    )
    return run_dir


@pytest.fixture
def run_dir(stopped, tmp_path):
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


# continuing


@pytest.mark.parametrize("case", others_nightly(CASES, ["fedavg, swap_part"]))
def test_a_stop_and_a_crash_leave_no_trace(case, fedjax_cfl, tmp_path):
    line, whole, torn = CASES[case], tmp_path / "whole", tmp_path / "torn"
    done(fedjax_cfl(line, whole))
    with stopped_at(2):
        assert fedjax_cfl(line, torn).status == 143
    assert steps(torn)[-1] == 2, "saved although it was not due"
    with full_at(7):
        assert "No space left on device" in refused(fedjax_cfl(line, torn), 1)
    assert steps(torn)[-1] == 5 and not (torn / "summary.json").exists()
    answer = done(fedjax_cfl(line, torn))
    assert answer.out.startswith("resuming after round 5\n") and answer.error == ""
    assert_same(torn, whole)
    lost = [
        row["dropped_clients"] + row["nonfinite_clients"] + row["shifted_clients"]
        for row in rows(whole)
    ]
    assert sum(lost[:5]) and sum(lost[5:]), "nothing to get wrong"


@pytest.mark.nightly
def test_a_run_may_go_on_on_other_devices(fedjax_cfl, run_dir, whole):
    """Float32 sums in another order: the numbers of two rounds agree to 1e-4, counts exactly."""
    answer = done(fedjax_cfl(PLAIN.replace("devices=1", "devices=4"), run_dir))
    assert "4 CPU devices" in answer.out and answer.out.startswith("resuming after round 7\n")
    for name, value in last_arrays(whole).items():
        np.testing.assert_allclose(
            last_arrays(run_dir)[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )
    for row, other in zip(rows(run_dir), rows(whole), strict=True):
        assert all(row[name] == value for name, value in other.items() if isinstance(value, int)), (
            row["round"]
        )
        np.testing.assert_allclose(row["train_loss"], other["train_loss"], rtol=1e-4)


@pytest.mark.nightly
def test_what_does_not_bear_on_the_numbers_may_change(fedjax_cfl, run_dir, whole):
    """Blocks of two rounds are another program, so the last bit may differ."""
    done(
        fedjax_cfl(
            f"{PLAIN} checkpoint.every=1 checkpoint.keep=1 eval_every=2 eval_auxiliary=false"
            " offline=true",
            run_dir,
        )
    )
    assert [row["round"] for row in rows(run_dir)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for name, value in last_arrays(whole).items():
        np.testing.assert_allclose(
            last_arrays(run_dir)[name], value, rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.nightly
def test_a_torn_last_line_is_written_again(fedjax_cfl, run_dir, whole):
    with open(run_dir / METRICS_FILE, "ab") as handle:
        handle.write(b'{"round": 8, "accuracy": 0.')
    done(fedjax_cfl(PLAIN, run_dir))
    assert_same(run_dir, whole)


@pytest.mark.nightly
def test_rows_beyond_the_checkpoint_are_written_again(fedjax_cfl, run_dir, whole):
    with open(run_dir / METRICS_FILE, "a") as handle:
        handle.write('{"round": 8, "accuracy": 0.5}\n{"round": 9, "accuracy": 0.5}\n')
    done(fedjax_cfl(PLAIN, run_dir))
    assert_same(run_dir, whole)


@pytest.mark.nightly
def test_more_rounds_continue_a_finished_run(fedjax_cfl, run_dir, whole, tmp_path):
    short = f"{PLAIN} rounds=7"
    done(fedjax_cfl(short, run_dir))
    assert read_summary(run_dir)["rounds"] == 7
    assert "finished after 7 rounds; choose another or more rounds" in refused(
        fedjax_cfl(short, run_dir)
    )
    done(fedjax_cfl(PLAIN, run_dir))
    assert_same(run_dir, whole)


@pytest.mark.nightly
def test_the_models_of_the_best_evaluation_are_kept(fedjax_cfl, whole, tmp_path):
    """Also where no checkpoint was due then, and after a stop; of exactly that round."""
    line, run_dir = f"{PLAIN} local.lr=0.5 checkpoint.every=9", tmp_path / "run"
    with stopped_at(4):
        assert fedjax_cfl(line, run_dir).status == 143
    done(fedjax_cfl(line, run_dir))
    best = read_summary(run_dir)["best_round"]
    assert best < 9, "the last round is the best: nothing to get wrong"
    kept, facts = load_arrays(run_dir / "best.npz")
    assert facts["round"] == best
    done(fedjax_cfl(f"{line} rounds={best}", tmp_path / "short"))
    there = last_arrays(tmp_path / "short")
    for name, value in kept.items():
        if name.startswith("['models']"):
            twin = there[name.replace("['models']", "[0].groups")]
            np.testing.assert_array_equal(value, twin, err_msg=name)


def test_a_log_says_how_far_the_run_is(whole):
    lines = (whole / "run.log").read_text().splitlines()
    assert len(lines) == 9 and re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d round 9 of 9, accuracy \d+\.\d\d%, 1 group", lines[-1]
    )


@pytest.mark.nightly
def test_models_that_are_not_finite_have_no_accuracy(fedjax_cfl, tmp_path):
    """A step of the server that is near the largest float32."""
    line = f"{SMALL} algorithm=fedadam algorithm.server_lr=3e38 rounds=2"
    answer = done(fedjax_cfl(line, tmp_path / "run"))
    assert "30 clients have a model that is not finite, so that there is no accuracy" in answer.out
    last = rows(tmp_path / "run")[-1]
    assert last["nonfinite_model_clients"] == 30
    names = ("accuracy", "macro_accuracy", "worst10_accuracy", "macro_f1", "pooled_micro_f1")
    assert [last[name] for name in names] == [None] * 5
    assert read_summary(tmp_path / "run")["best_accuracy"] is None
    assert not (tmp_path / "run" / "best.npz").exists()


# refusing


def change(lines: list[bytes], kind: str) -> list[bytes]:
    return {
        "deleted": [],
        "a row missing": lines[:2] + lines[3:],
    }[kind]


def test_a_run_goes_on_from_where_its_rows_still_are(fedjax_cfl, run_dir, whole):
    """Row 7 is lost: there is a checkpoint of the round before."""
    path, before = run_dir / METRICS_FILE, steps(run_dir)[-2]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:6], b'{"round": 7, "acc']))
    answer = done(fedjax_cfl(PLAIN, run_dir))
    assert f"has lost rows before round 7; goes on from round {before}, whose rows" in answer.error
    assert answer.error.count("\n") == 1
    assert answer.out.startswith(f"resuming after round {before}\n")
    assert_same(run_dir, whole)


@pytest.mark.nightly
def test_a_damaged_summary_is_written_again(fedjax_cfl, whole, tmp_path):
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    os.truncate(run_dir / "summary.json", 100)
    answer = done(fedjax_cfl(PLAIN, run_dir))
    assert "summary.json: cannot be read" in answer.error and answer.error.count("\n") == 1
    assert_same(run_dir, whole)


@pytest.mark.parametrize("kind", ["deleted", "a row missing"])
def test_rows_that_a_checkpoint_vouches_for_are_missed(kind, fedjax_cfl, run_dir):
    path = run_dir / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines, kind)))
    if kind == "deleted":
        path.unlink()
    error = refused(fedjax_cfl(PLAIN, run_dir))
    assert "metrics.jsonl has lost rows before round 7" in error
    assert steps(run_dir)[-1] == 7 and path.exists() == (kind != "deleted")


def test_a_checkpoint_of_another_format_is_refused(fedjax_cfl, run_dir):
    for header in (run_dir / CHECKPOINTS).glob("*.header"):
        text = re.sub(r'"format": \d+', '"format": 1', header.read_text().partition("\n")[2])
        header.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    assert "has format 1, this version reads 5: go on with" in refused(fedjax_cfl(PLAIN, run_dir))


def test_a_run_whose_directory_goes_away_ends(fedjax_cfl, tmp_path, monkeypatch):
    real, run_dir = results.append_row, tmp_path / "run"

    def append_row(handle, row):
        line = real(handle, row)
        if row["round"] == 4:
            shutil.rmtree(run_dir)
        return line

    monkeypatch.setattr(results, "append_row", append_row)
    error = refused(fedjax_cfl(f"{PLAIN} checkpoint.every=100", run_dir), 1)
    assert "metrics.jsonl was removed or replaced while the run went on" in error
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("line", "field", "base"),
    [
        ("algorithm=fedprox", "(algorithm.name: fedavg there, fedprox here;", PLAIN),
        ("local.lr=0.06", "(local.lr: 0.05 there, 0.06 here)", PLAIN),
        nightly("seed=1", "(seed: 0 there, 1 here;", PLAIN),
        nightly("faults.nan=0.5", "(faults.nan: 0.0 there, 0.5 here)", PLAIN),
        ("dataset=synthetic", "(dataset.name: digits there, synthetic here;", PLAIN),
        nightly("algorithm.m=2", "(algorithm.m: 3 there, 2 here)", f"{SMALL} algorithm=ifca"),
    ],
)
def test_another_run_is_refused_and_the_difference_named(
    line, field, base, fedjax_cfl, run_dir, tmp_path
):
    if base != PLAIN:
        run_dir = tmp_path / "other"
        done(fedjax_cfl(f"{base} rounds=1", run_dir))
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    error = refused(fedjax_cfl(f"{base} {line}", run_dir))
    assert "is of a different run" in error and field in error
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.nightly
def test_never_must_and_finished(fedjax_cfl, run_dir, whole, tmp_path):
    assert "not empty" in refused(fedjax_cfl(f"{PLAIN} resume=never", run_dir))
    assert "already holds this run, finished after 9 rounds" in refused(
        fedjax_cfl(f"{PLAIN} resume=must", whole)
    )
    assert "no checkpoint" in refused(fedjax_cfl(f"{PLAIN} resume=must", tmp_path / "new"))
    done(fedjax_cfl(f"{PLAIN} resume=must", run_dir))
    assert_same(run_dir, whole)


@pytest.mark.parametrize(("resume", "reason"), [("must", "no checkpoint"), ("auto", "not empty")])
def test_somebody_elses_folder_of_checkpoints_is_left_alone(resume, reason, fedjax_cfl, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "model.pt"):
        (tmp_path / name).write_text("precious")
    assert reason in refused(fedjax_cfl(f"{PLAIN} resume={resume}", tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == "precious"


# failing


@pytest.mark.nightly
def test_a_full_disk_while_saving_ends_in_one_line(fedjax_cfl, tmp_path, whole, monkeypatch):
    real, run_dir = save, tmp_path / "run"
    # too little room, then a save that fails outright
    for refuse in (
        real.__globals__["shutil"],
        checkpoint,
    ):
        with monkeypatch.context() as patch:
            if refuse is checkpoint:
                patch.setattr(
                    checkpoint,
                    "save",
                    lambda *a, **k: (_ for _ in ()).throw(
                        OSError(errno.ENOSPC, "No space left on device")
                    ),
                )
            else:
                usage = shutil.disk_usage(tmp_path)
                patch.setattr(
                    shutil,
                    "disk_usage",
                    lambda path: usage._replace(free=usage.free * (not steps(run_dir))),
                )
            assert "No space left on device" in refused(fedjax_cfl(PLAIN, run_dir), 1)
        assert steps(run_dir) == [0]
    done(fedjax_cfl(PLAIN, run_dir))
    assert_same(run_dir, whole)


@pytest.mark.nightly
def test_an_update_that_is_not_finite_ends_the_run_every_time(fedjax_cfl, tmp_path):
    line, pattern = (
        f"{PLAIN} checkpoint.every=1 faults.nan=0.02 faults.nonfinite=raise",
        r"round (\d+): client \d+ sent .* of head/\w+\n$",
    )
    error = refused(fedjax_cfl(line, tmp_path), 1)
    stop = int(re.search(pattern, error)[1])
    assert (
        stop > 1
        and [row["round"] for row in rows(tmp_path)] == list(range(1, stop))
        and steps(tmp_path)[-1] == stop - 1
    )
    assert refused(fedjax_cfl(line, tmp_path), 1) == error, "a continuation does not slip past it"


# signals


@contextlib.contextmanager
def started(line: str, run_dir: Path):
    """A process that has compiled its programs and begins its first round."""
    command = [sys.executable, "-m", "fedjax_cfl", *cli_words(line, run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not steps(run_dir):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def long(fedjax_cfl, tmp_path_factory):
    line, run_dir = (
        f"{PLAIN} rounds=400 checkpoint.every=1000 eval_every=2",
        tmp_path_factory.mktemp("long") / "run",
    )
    done(fedjax_cfl(line, run_dir))
    return line, run_dir


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, nightly(signal.SIGINT)])
def test_a_signal_saves_and_the_same_command_finishes(number, fedjax_cfl, long, tmp_path):
    (line, whole), run_dir = long, tmp_path / "run"
    with started(line, run_dir) as process:
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert error == "fedjax-cfl: stopping after this block of rounds; once more stops at once\n"
    assert (
        0 < steps(run_dir)[-1] == rows(run_dir)[-1]["round"] < 400
        and f"stopped after round {steps(run_dir)[-1]}\n" in out
    )
    done(fedjax_cfl(line, run_dir))
    assert rows(run_dir) == rows(whole) and summary(run_dir) == summary(whole)
    np.testing.assert_equal(
        (clients(run_dir), last_arrays(run_dir)), (clients(whole), last_arrays(whole))
    )


@pytest.mark.nightly
def test_one_process_at_a_time_and_a_second_signal_ends_it(fedjax_cfl, tmp_path):
    line = f"{PLAIN} rounds=1000000 eval_every=1000000"
    with started(line, tmp_path / "run") as process:
        assert f"in use by process {process.pid} on " in refused(fedjax_cfl(line, tmp_path / "run"))
        process.send_signal(signal.SIGTERM)
        assert "once more stops at once" in process.stderr.readline()
        time.sleep(0.2)
        assert process.poll() is None, "the block goes on"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    assert steps(tmp_path / "run") == [0]


# damage


def damage(path: Path) -> None:
    """Flips one bit of the largest array file of a checkpoint."""
    file = max(
        (file for file in path.rglob("*") if file.is_file()),
        key=lambda file: file.stat().st_size,
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_falls_back_with_a_warning(fedjax_cfl, run_dir, whole):
    damage(run_dir / CHECKPOINTS / "7")
    answer = done(fedjax_cfl(PLAIN, run_dir))
    assert (
        answer.error.startswith("fedjax-cfl: warning: checkpoint ")
        and answer.error.count("\n") == 1
    )
    assert "checkpoints/7 cannot be read and is skipped" in answer.error and answer.out.startswith(
        "resuming after round 6\n"
    )
    assert_same(run_dir, whole)


def test_damaged_checkpoints_alone_are_refused(fedjax_cfl, run_dir):
    paths = [run_dir / CHECKPOINTS / str(step) for step in steps(run_dir)]
    for path in paths:
        damage(path)
    before = (run_dir / METRICS_FILE).read_bytes()
    status, _, error = fedjax_cfl(PLAIN, run_dir)
    assert (
        status == 2
        and "none of" in error.splitlines()[-1]
        and len(error.splitlines()) == len(paths) + 1
    )
    assert (
        all("is skipped" in line for line in error.splitlines()[:-1])
        and (run_dir / METRICS_FILE).read_bytes() == before
    )
