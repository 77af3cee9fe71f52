"""Does a round cost the same, in time and in memory, however many clients there are?

FedAvg, softmax regression on 60 features, 20 samples a client (18 train, 2 test), 1,000
clients a round, B = 10, E = 1. Samples lie in memory-mapped files (4.8 GB for a million
clients) and stay there (resident=host); every size runs in a process of its own.

    python benchmarks/clients_scaling.py
    python benchmarks/clients_scaling.py --quick      1,000 and 10,000 clients, under two minutes
    python benchmarks/clients_scaling.py --rows       100,000, each keeps a model: 10 GB (results/host_rows)

`training` is rounds per second, fetching included; `own memory` is the peak of what the
process itself allocated, without the pages of the mapped files, which the system can
drop at any time.

Measured 2026-11-23 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2:

      clients  training, rounds/s  an evaluation, s  own memory, MB  with files, MB  accuracy
        1,000               93.79              0.01             522             704     0.180
       10,000               60.43              0.02             676             916     0.188
      100,000               53.73              0.15             959           1,623     0.189
    1,000,000               61.66              0.94           1,437           6,502     0.188

The samples cost no memory; what grows is 0.9 KB a client: the numbers of its 20
samples, of which this program holds two copies, and what every device knows of
everybody. A part of an evaluation only has a table of its own clients. Drawing a cohort
costs the same for any number of clients.
"""

import json
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from program import call_side, make_parser

FEATURES, CLASSES, HELD, COHORT, ROUNDS, EVERY = 60, 10, 20, 1000, 24, 8


def written(folder: Path, clients: int) -> None:
    """Writes the samples of all clients, in pieces; labels follow one of ten teachers."""
    rng = np.random.default_rng(0)
    total = clients * HELD
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (total, FEATURES))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int32, (total,))
    teacher = rng.standard_normal((FEATURES, CLASSES)).astype(np.float32)
    for begin in range(0, total, 200_000):
        piece = rng.standard_normal((min(200_000, total - begin), FEATURES), np.float32)
        x[begin : begin + len(piece)], y[begin : begin + len(piece)] = (
            piece,
            np.argmax(piece @ teacher, axis=1),
        )
    x.flush()
    y.flush()


def own_memory() -> int:
    """Returns the bytes that this process has allocated and that lie in memory now (Linux)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("RssAnon")).split()[1])


def measured(folder: Path, clients: int, rows: bool) -> dict[str, float]:
    """Runs one size in this process; with `rows` every client keeps a model (Ditto)."""
    import jax

    import fedjax_cfl as cfl

    cfl.use_cpu_cores()
    peak, running = [0], threading.Event()

    def watch():
        while not running.wait(0.05):
            peak[0] = max(peak[0], own_memory())

    threading.Thread(target=watch, daemon=True).start()
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    numbers = np.arange(clients * HELD, dtype=np.int32)
    held = cfl.Partition(numbers, numbers // HELD, numbers % HELD >= HELD - 2)
    data = cfl.federate(
        cfl.Pool(x.view(np.ndarray), y.view(np.ndarray), CLASSES), held, on_host=True
    )
    model = cfl.models.MLP(CLASSES, hidden=(352,)) if rows else cfl.models.MCLR(CLASSES)
    task = cfl.as_task(model, (FEATURES,), CLASSES)
    local = cfl.Local(0.05, 1, 10, personal=cfl.personal.ditto() if rows else None)
    algorithm = cfl.algorithms.fedavg(task, local, cfl.select.uniform(COHORT))
    began, every = time.perf_counter(), ROUNDS if rows else EVERY
    result = cfl.run(algorithm, task, data, jax.random.key(0), rounds=ROUNDS, eval_every=every)
    total = time.perf_counter() - began
    running.set()
    return {
        "training": ROUNDS / result.times["train_s"],
        "evaluation": result.times["eval_s"] * every / ROUNDS,
        "total": total,
        "own": peak[0],
        "resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "accuracy": result.rows[-1]["accuracy"],
        "planned": result.memory,
    }


def main() -> None:
    """Prints a line for each number of clients."""
    parser = make_parser(__doc__.splitlines()[0], "1,000 and 10,000 clients")
    parser.add_argument(
        "--folder", type=Path, help="where the files go (default: a temporary folder)"
    )
    parser.add_argument(
        "--rows", action="store_true", help="100,000 clients, each with 25,002 parameters: 10 GB"
    )
    parser.add_argument(
        "--side", type=int, metavar="K", help="measure this many clients here, in files that exist"
    )
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measured(given.folder, given.side, given.rows)))
        return
    print(
        f"{'clients':>9}{'training, rounds/s':>20}{'an evaluation, s':>18}{'own memory, MB':>16}{'with files, MB':>16}{'accuracy':>10}"
    )
    sizes = (10**3, 10**4) if given.quick else (10**3, 10**4, 10**5, 10**6)
    for clients in (10**3 if given.quick else 10**5,) if given.rows else sizes:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            written(Path(folder), clients)
            options = ["--side", str(clients), "--folder", folder, *["--rows"] * given.rows]
            found = call_side(options, f"{clients} clients")
        print(
            f"{clients:9,}{found['training']:20.2f}{found['evaluation']:18.2f}{found['own'] / 1e6:16,.0f}{found['resident'] / 1e6:16,.0f}"
            f"{found['accuracy']:10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
