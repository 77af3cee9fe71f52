"""How long do the jobs that other simulators publish take here, run as they publish them?

Whole runs by `cfl.run`, with real images, evaluation inside the time, and compiling apart:

- pfl: pfl-research's CIFAR-10 job, as its benchmarks' image_classification/configs/baseline.yaml has it: 1,000
  users of 50 images (IID), 50 a round, 1,500 rounds, B = 10, SGD with a step of 0.1, updates of equal weight,
  dropout 0.25 and 0.5; the model is tested on all test images every 10 rounds. Published: 4.2 min on an A100
  (arXiv 2404.06430; from memory, not verified).
- pfl-ifca, pfl-flexcfl: the same with IFCA and FlexCFL, 4 groups. Nobody has published it.
- blazefl: BlazeFL's CNN job: 100 clients, all of them in each of 5 rounds, 2 shards of one label each,
  E = 5, B = 50. Published: 25 to 30 s on four Quadro RTX 6000. Its network is not known to us: it is
  the one of the other jobs here, with their dropout.

Images: CIFAR-10's binary version, or the part of it that is here, under FEDJAX_CFL_DATA; without any,
random ones, of which nothing is learned. A part is repeated until the clients have as many as in the
published job; the column `images` says so.

    python benchmarks/versus_peers.py --make-environments DIR pfl      once: pfl 0.6.0 and PyTorch in DIR/pfl
    python benchmarks/published_jobs.py --environments DIR --seeds 3   everything: all jobs, float32 and, on a GPU, TF32; pfl's beside pfl itself
    python benchmarks/published_jobs.py --jobs pfl --rounds 20         ours alone, shorter
    python benchmarks/published_jobs.py --quick                        every job with few clients and rounds: does it run?

The job `pfl` runs in pfl 0.6.0, too, with 1 and 5 processes (`--processes`), and where `--peers pfl loop` asks
for it in a plain PyTorch loop: for each seed ours, then the peers, each in fresh processes, on the same device.

The same for all: images and who holds them; the network (1,626,442 parameters) and its first parameters, checked
by their logits; 50 users a round, none twice; their steps; equal weights; a test on all test images after rounds
10, 20, ..., inside the time. What differs: the cohorts drawn and dropout's masks; pfl keeps the order of a
client's batches, ours and the loop shuffle them. pfl's own program does some more than is timed here: it
standardises images (all sides here read x / 255), may draw a user twice, tests the cohort's users before and
after training every 10 rounds, and prints and writes metrics. On a CPU the peers test in batches of 1,000, not
10,000, and their processes share the cores: one process has one thread or all, whichever takes a few steps
faster. More processes than GPUs talk through gloo, for NCCL takes one a GPU: written for that, and not run yet.

Lines go to results/accelerator/published_jobs.csv as soon as they are known. `seconds` are those of the job
without `apart_s`: compiling (ours), one user a process and 1,000 test images before the clock starts (peers).
Starting a process and reading images is in neither. `cpu_s`: CPU seconds of training and tests, of all
processes. `load`: the machine's, before the side started.

Measured 2026-11-26 on 2 CPU cores (Intel Xeon), Python 3.11, jax 0.10.2, torch 2.13.0+cpu, at a load average of
7 to 13 by other work: 2 rounds of the job `pfl`, 3 seeds, a fifth of CIFAR-10. What pfl took, times ours, median (range):

    pfl, 1 process    training 0.93 (0.53..0.96)   the job 1.08 (0.72..1.08)   CPU seconds 1.11 (1.09..1.19)
    pfl, 2 processes  training 0.90 (0.73..0.99)   the job 1.15 (0.90..1.21)   CPU seconds 1.27 (1.21..1.35)
    pfl, 5 processes  training 0.60 (0.40..0.93)   the job 0.75 (0.51..1.00)   CPU seconds 1.16 (1.12..1.35)

No order by the clock follows for a free machine: of the two cores ours got 0.50, pfl 0.61, 0.61 and 0.81. Lines
and command: results/accelerator/README.md. No GPU was at hand.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from accelerator import device_name, note_row
from accelerator_models import SmallCNN
from accelerator_sides import ask_nvidia
from program import call_side, make_parser
from versus_peers import interpreter

import fedjax_cfl as cfl
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.simulation.width import choose_width

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "accelerator" / "published_jobs.csv"
COLUMNS = (
    "job,side,seed,precision,images,rounds,device,driver,versions,load,lanes,seconds,train_s,eval_s,"
    "apart_s,cpu_s,client_updates_per_s,accuracy,published,quick,note"
).split(",")
LR, LIMIT_S = 0.1, 4 * 3600
PEERS = {"pfl": "pfl_job", "loop": "loop_job"}  # modules of peers/


class Failed(Exception):
    """A peer that came to no result."""


class Job(NamedTuple):
    """A published job."""

    clients: int
    cohort: int
    samples: int  # of training, of each client
    rounds: int
    epochs: int
    batch: int
    method: str
    eval_every: int
    shards: int = 0  # of one label, of each client; 0: IID
    published: str = ""

    def shrink(self) -> "Job":
        """Returns the same with few clients and rounds."""
        return self._replace(published="", clients=10, cohort=5, samples=20, rounds=2, eval_every=1)

    def cut(self, rounds: int | None) -> "Job":
        """Returns the same with so many rounds, where a number is given."""
        return self if rounds is None else self._replace(published="", rounds=rounds)


PFL = Job(1000, 50, 50, 1500, 1, 10, "fedavg", 10, published="4.2 min, A100 (unverified)")
JOBS = {
    "pfl": PFL,
    "pfl-ifca": PFL._replace(method="ifca", published=""),
    "pfl-flexcfl": PFL._replace(method="flexcfl", published=""),
    "blazefl": Job(
        *(100, 100, 500, 5, 5, 50, "fedavg", 1, 2), published="25 to 30 s, four Quadro RTX 6000"
    ),
}


def load_images(train: int, test: int) -> tuple[cfl.Pool, str]:
    """Returns `train` + `test` images, those for testing last, and what they are."""
    try:
        pool = cfl.datasets.cifar10()
    except InputError:
        rng = np.random.RandomState(0)
        x = rng.randint(0, 256, (train + test, 32, 32, 3)).astype(np.uint8)
        return cfl.Pool(x, rng.randint(0, 10, len(x)).astype(np.int32), 10), "random"
    order = np.random.RandomState(0).permutation(len(pool.y))
    kept = pool.test if pool.test is not None else np.arange(len(order)) >= len(order) * 5 // 6
    own, held_out = order[~kept[order]], order[kept[order]][:test]
    rows = np.concatenate([np.resize(own, train), np.resize(held_out, test)])
    said = f"CIFAR-10, {len(own):,} for training" + (", repeated" if len(own) < train else "")
    said += f"; {len(held_out):,} for testing" + (", repeated" if len(held_out) < test else "")
    return cfl.Pool(pool.x[rows], pool.y[rows], 10), said


def deal(job: Job) -> tuple[cfl.FederatedData, str]:
    """Returns the clients' images, and what they are: all clients share the test images."""
    train, test = job.clients * job.samples, max(job.clients, min(10_000, 10 * job.clients))
    pool, said = load_images(train, test)
    order = np.arange(train)
    if job.shards:  # sorted by label, cut into shards, of which each client has some
        order = np.argsort(pool.y[:train], kind="stable").reshape(job.clients * job.shards, -1)
        order = order[np.random.RandomState(1).permutation(len(order))].ravel()
    owner = np.repeat(np.arange(job.clients), job.samples)
    tested = np.resize(np.arange(job.clients), test)
    held = cfl.Partition(
        np.concatenate([order, np.arange(train, train + test)]),
        np.concatenate([owner, tested]).astype(np.int32),
        np.arange(train + test) >= train,
    )
    return cfl.federate(pool, held), said


def make_algorithm(job: Job, data: Any, mesh: Any) -> tuple:
    """Returns (task, lanes, algorithm) of a job."""
    task = cfl.as_task(SmallCNN(10), (32, 32, 3), 10, l2=0.0)
    local = cfl.Local(LR, job.epochs, job.batch, execution=cfl.make_execution(mesh))
    lanes = choose_width(local, task, data, job.cohort)
    local = local.replace(execution=cfl.make_execution(mesh, lanes))
    select = cfl.select.uniform(job.cohort)
    if job.method == "fedavg":
        return task, lanes, cfl.algorithms.fedavg(task, local, select, aggregate=uniform_mean)
    return task, lanes, getattr(cfl.algorithms, job.method)(task, local, select, m=4)


def run_ours(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    """Runs a job to its end, in this process, and writes what its peers need; returns its line."""
    cfl.use_cpu_cores()
    jax.config.update("jax_default_matmul_precision", given.precision)
    mesh, (data, said) = cfl.make_mesh(), deal(job)
    task, lanes, algorithm = make_algorithm(job, data, mesh)
    if given.folder:
        write_inputs(given.folder, job, given, data, (task, algorithm))
    with watch_cpu() as clock:
        result = cfl.run(
            algorithm,
            task,
            data,
            jax.random.key(given.seed),
            rounds=job.rounds,
            eval_every=job.eval_every,
            discard="none",
            mesh=mesh,
        )
    times, (began, ended) = result.times, (clock[0][0], clock[-1][0])
    starts = ended - times["train_s"] - times["eval_s"]
    before = max(cpu for now, cpu in clock if now <= max(starts, began))
    return {
        "images": said,
        "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": f"jax {jax.__version__}, python {sys.version.split()[0]}",
        "lanes": lanes,
        "seconds": ended - began - times["compile_s"],
        "eval_s": times["eval_s"],
        "train_s": times["train_s"],
        "apart_s": times["compile_s"],
        "cpu_s": clock[-1][1] - before,
        "accuracy": float(result.rows[-1]["accuracy"]),
    }


@contextlib.contextmanager
def watch_cpu() -> Iterator[list[tuple[float, float]]]:
    """Notes (time, CPU seconds of this process) from beginning to end, 20 times a second."""

    def look() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    noted, over = [look()], threading.Event()

    def go_on() -> None:
        while not over.wait(0.05):
            noted.append(look())

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield noted
    finally:
        over.set()
        thread.join()
        noted.append(look())


def write_inputs(
    folder: Path, job: Job, given: argparse.Namespace, data: Any, ours: tuple[Any, Any]
) -> None:
    """Writes the images of each client, those for testing, the first model, what it says of a
    few of them, and the settings.
    """
    task, algorithm = ours
    key = jax.random.key(given.seed)
    model = jax.tree.map(lambda leaf: leaf[0], jax.jit(algorithm.init)(key, data).groups)
    rows, test = data.train.order, data.test.order
    np.savez(
        folder / "images.npz",
        x=data.x[rows],
        y=data.y[rows],
        test_x=data.x[test],
        test_y=data.y[test],
        logits=task.predict(model, data.x[test[:64]]),
    )
    layers = ("Conv_0", "Conv_1", "hidden", "head")
    arrays = [np.asarray(model[name][part]) for name in layers for part in ("kernel", "bias")]
    np.savez(folder / "model.npz", *arrays)
    settings = job._asdict() | {"lr": LR, "seed": given.seed, "precision": given.precision}
    (folder / "job.json").write_text(json.dumps(settings))


def run_peer(python: Path, peer: str, processes: int, folder: Path) -> dict[str, Any]:
    """Runs a peer on a job, in processes of its own, which end with it; returns its line.
    Raises Failed if one of them fails.
    """
    port, started = find_port(), []
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    if processes > 1:
        addresses = [f"localhost:{port + rank}" for rank in range(processes)]
        environment["PFL_WORKER_ADDRESSES"] = ",".join(addresses)
    try:
        for rank in range(processes):
            command = [str(python), "-m", "peers", PEERS[peer], str(folder), str(rank)]
            with (folder / f"out{rank}").open("w") as out, (folder / f"err{rank}").open("w") as err:
                started.append(
                    subprocess.Popen(
                        [*command, str(processes)],
                        env=environment | {"PFL_WORKER_RANK": str(rank)},
                        stdout=out,
                        stderr=err,
                        cwd=folder,
                    )
                )
        wait_for(started, folder)
    finally:
        for process in started:
            process.kill()
            process.wait()
    each = [
        json.loads((folder / f"out{rank}").read_text().splitlines()[-1])
        for rank in range(processes)
    ]
    found = each[0] | {"cpu_s": sum(one["cpu_s"] for one in each)}
    threads = f"{found.pop('threads')} thread(s) each"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    found |= {"versions": versions, "train_s": found["seconds"] - found["eval_s"]}
    return found | {"note": threads if found["device"] == "cpu" else ""}


def find_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def wait_for(started: list[subprocess.Popen], folder: Path) -> None:
    """Waits until all processes have ended; raises Failed as soon as one fails."""
    ends = time.monotonic() + LIMIT_S
    while (codes := [process.poll() for process in started]) and None in codes:
        if any(codes) or time.monotonic() > ends:
            break
        time.sleep(0.1)
    for rank, code in enumerate(codes):
        if code:
            lines = (folder / f"err{rank}").read_text().strip().splitlines() or ["no message"]
            raise Failed(f"failed: {lines[-1][:300]}")
    if None in codes:
        raise Failed(f"no result within {LIMIT_S / 3600:.0f} hours")


def list_sides(name: str, given: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Returns (what to call it, peer, processes) of the peers of a job."""
    sides = []
    if name == "pfl" and given.python:
        counts = given.processes if "pfl" in given.peers else []
        sides = [(f"pfl, {n} process{'es' * (n > 1)}", "pfl", n) for n in counts]
        sides += [("PyTorch loop", "loop", 1)] * ("loop" in given.peers)
    return sides


def measure(
    name: str, job: Job, precision: str, seed: int, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Runs our side and the peers of a job; returns their lines, and prints or writes each as
    soon as it is known.
    """
    lines: list[dict[str, Any]] = []
    common = {"job": name, "seed": seed, "precision": precision, "rounds": job.rounds}
    common |= {
        "driver": ask_nvidia("driver_version"),
        "published": job.published,
        "quick": given.quick,
    }

    def note(side: str, found: dict[str, Any]) -> None:
        if "seconds" in found:
            rate = round(job.rounds * job.cohort / found["train_s"], 1)
            found = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
            found |= {"client_updates_per_s": rate}
        lines.append(dict.fromkeys(COLUMNS, "") | common | {"side": side} | found)
        if given.quick:
            print(" | ".join(f"{k} {v}" for k, v in lines[-1].items() if v != ""), flush=True)
        else:
            note_row(given.results, COLUMNS, lines[-1])

    with tempfile.TemporaryDirectory() as folder:
        load, command = os.getloadavg()[0], ["--jobs", name, "--precision", precision]
        command += ["--seed", str(seed), *(["--quick"] if given.quick else [])]
        command += ["--rounds", str(given.rounds)] if given.rounds else []
        sides = list_sides(name, given)
        found = call_side(command + ["--folder", folder] * bool(sides), f"{name}, ours")
        note("ours", found | {"load": round(load, 1)})
        common["images"] = found["images"]
        for side, peer, processes in sides:
            load = round(os.getloadavg()[0], 1)
            try:
                found = run_peer(given.python, peer, processes, Path(folder))
            except Failed as failure:
                found = {"note": str(failure)}
            note(side, {"load": load} | found)
    return lines


def compare(lines: list[dict[str, Any]]) -> None:
    """Prints how many times as long as ours each peer takes, within a seed: median (range)."""
    ours: dict[tuple, dict] = {}
    pairs: dict[tuple, list] = {}
    for line in lines:
        key = (line["job"], line["precision"], line["seed"])
        if line["side"] == "ours":
            ours[key] = line
        elif line["seconds"]:
            pairs.setdefault((*key[:2], line["side"]), []).append((ours[key], line))
    for (job, precision, side), both in pairs.items():
        parts = []
        for what, column in (
            ("training", "train_s"),
            ("the job", "seconds"),
            ("CPU seconds", "cpu_s"),
        ):
            ratio = [theirs[column] / mine[column] for mine, theirs in both]
            spread = f"{min(ratio):.2f}..{max(ratio):.2f}"
            parts.append(f"{what} {statistics.median(ratio):.2f} ({spread})")
        print(f"{job}, {precision}: {side}, times ours: {', '.join(parts)}", flush=True)


def find_peers(given: argparse.Namespace) -> Path | None:
    """Returns the interpreter that has pfl and PyTorch; says how to get one where there is none."""
    python = given.environments and interpreter(given.environments.absolute(), "pfl")
    if python and python.exists():
        return python
    print(
        "only ours: pfl comes by `python benchmarks/versus_peers.py --make-environments DIR pfl`,"
        " then --environments DIR",
        flush=True,
    )
    return None


def main() -> None:
    """Reads the arguments and runs the jobs."""
    parser = make_parser(__doc__, "few clients and rounds, no file")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="instead of the published ones")
    parser.add_argument("--environments", metavar="DIR", type=Path, help="of versus_peers.py")
    parser.add_argument("--peers", nargs="*", default=["pfl"], choices=list(PEERS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 5], help="of pfl")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--precision", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()

    def shape(name: str) -> Job:
        return (JOBS[name].shrink() if given.quick else JOBS[name]).cut(given.rounds)

    if uneven := [n for n in given.processes if shape("pfl").cohort % n]:
        parser.error(f"pfl's processes share the cohort, {shape('pfl').cohort}: not {uneven[0]}")
    if given.precision:
        print(json.dumps(run_ours(shape(given.jobs[0]), given)))
        return
    given.python, lines = find_peers(given), []
    for name in given.jobs:
        for precision in ("float32",) if device_name() == "cpu" else ("float32", "tensorfloat32"):
            for seed in range(given.seeds):
                lines += measure(name, shape(name), precision, seed, given)
    compare(lines)


if __name__ == "__main__":
    main()
