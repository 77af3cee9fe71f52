"""How long do the jobs that other simulators publish take here, run as they publish them?

Whole runs by `cfl.run`, with real images, evaluation inside the time, and compiling apart:

- pfl: pfl-research's CIFAR-10 job: 1,000 users of 50 images (IID), 50 a round, 1,500 rounds, B = 10, SGD
  with a step of 0.1, updates of equal weight, dropout 0.25 and 0.5; the model is tested on all test
  images every 10 rounds. Published: 4.2 min on an A100 (arXiv 2404.06430; from memory, not verified).
- pfl-ifca, pfl-flexcfl: the same with IFCA and FlexCFL, 4 groups. Nobody has published it.
- blazefl: BlazeFL's CNN job: 100 clients, all of them in each of 5 rounds, 2 shards of one label each,
  E = 5, B = 50. Published: 25 to 30 s on four Quadro RTX 6000. Its network is not known to us: it is
  the one of the other jobs here, without dropout's rates being theirs.

Images: CIFAR-10's binary version, or the part of it that is here, under FEDJAX_CFL_DATA; without any,
random ones, of which nothing is learned. A part is repeated until the clients have as many as in the
published job; the column `images` says so.

    python benchmarks/published_jobs.py                       all jobs, float32 and, on a GPU, TF32
    python benchmarks/published_jobs.py --jobs pfl --seeds 3
    python benchmarks/published_jobs.py --quick               every job with few clients and rounds: does it run?

Lines go to results/accelerator/published_jobs.csv as soon as they are known. Peers (pfl 0.6.0, FedJAX,
a PyTorch loop) stand beside `accelerator.py`'s set-ups; pfl with several processes has not been set up.

Measured 2026-11-26 on 2 CPU cores (AMD EPYC), Python 3.11, jax 0.10.2: --quick only, whether it runs.
No GPU was at hand.
"""

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from accelerator import append_row
from accelerator_models import SmallCNN
from accelerator_sides import ask_nvidia
from program import make_parser

import fedjax_cfl as cfl
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.sharding import is_cpu
from fedjax_cfl.simulation.width import choose_width

RESULTS = Path(__file__).resolve().parent / "results" / "accelerator" / "published_jobs.csv"
COLUMNS = (
    "job,seed,precision,images,rounds,device,driver,versions,lanes,seconds,train_s,eval_s,compile_s,"
    "client_updates_per_s,accuracy,published,quick"
).split(",")


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
        return self._replace(
            published="", clients=8, cohort=min(self.cohort, 4), samples=20, rounds=2, eval_every=1
        )


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
    return cfl.Pool(pool.x[rows], pool.y[rows], 10), f"{said}; {len(held_out):,} for testing"


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


def run_job(name: str, job: Job, seed: int, precision: str) -> dict[str, Any]:
    """Runs a job to its end; returns its line."""
    jax.config.update("jax_default_matmul_precision", precision)
    mesh, (data, said) = cfl.make_mesh(), deal(job)
    task = cfl.as_task(SmallCNN(10), (32, 32, 3), 10, l2=0.0)
    chosen = {"width": "auto", "executor": "auto", "batch_size": job.batch, "epochs": job.epochs}
    lanes = choose_width(chosen | {"first_layer": "auto"}, task, data, mesh, job.cohort)
    local = cfl.Local(0.1, job.epochs, job.batch, lanes, mesh)
    select = cfl.select.uniform(job.cohort)
    if job.method == "fedavg":
        algorithm = cfl.algorithms.fedavg(task, local, select, aggregate=uniform_mean)
    else:
        algorithm = getattr(cfl.algorithms, job.method)(task, local, select, m=4)
    began = time.perf_counter()
    result = cfl.run(
        algorithm,
        task,
        data,
        jax.random.key(seed),
        rounds=job.rounds,
        eval_every=job.eval_every,
        discard="none",
        mesh=mesh,
    )
    seconds, times = time.perf_counter() - began, result.times
    return {
        "job": name,
        "seed": seed,
        "precision": precision,
        "images": said,
        "rounds": job.rounds,
        "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "driver": ask_nvidia("driver_version"),
        "versions": f"jax {jax.__version__}, {sys.version.split()[0]}",
        "lanes": lanes,
        "seconds": round(seconds - times["compile_s"], 2),
        **{part: round(times[part], 2) for part in ("train_s", "eval_s", "compile_s")},
        "client_updates_per_s": round(job.rounds * job.cohort / times["train_s"], 1),
        "accuracy": round(float(result.rows[-1]["accuracy"]), 4),
        "published": job.published,
    }


def main() -> None:
    """Reads the arguments and runs the jobs."""
    parser = make_parser(__doc__, "few clients and rounds, no file")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    cfl.use_cpu_cores()
    cpu = is_cpu(cfl.make_mesh())
    for name in given.jobs:
        job = JOBS[name].shrink() if given.quick else JOBS[name]
        for precision in ("float32",) if cpu else ("float32", "tensorfloat32"):
            for seed in range(given.seeds):
                line = run_job(name, job, seed, precision) | {"quick": given.quick}
                if given.quick:
                    print(" | ".join(f"{key} {line[key]}" for key in COLUMNS if line[key] != ""))
                else:
                    append_row(given.results, COLUMNS, line)


if __name__ == "__main__":
    main()
