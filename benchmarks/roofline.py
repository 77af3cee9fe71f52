"""How near does local training come to what this machine can do?

Client updates per second of FedAvg on W1, W2 and W3 of `workloads.py` with K clients a round, and two ceilings measured in the same run:
matrix products (NumPy's sgemm at the shapes of a step) and memory bandwidth (p -= q on 256 MB). The operations counted are those of SGD on
the layers themselves, and the bytes those of reading and writing the parameters once a step, as if no cache held them: more than 100 % of
the bandwidth's ceiling means that a cache does; more than 100 % of the products' ceiling that training in sample space needs fewer.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --quick      W1, K = 20, under two minutes

Measured 2026-11-21 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2 (the column of percentages is the share of each ceiling):

    W1: ceilings 27 GFLOP/s at its own shapes, 235 at 2048^3, 58 GB/s
    W1 K=20    direct        638 client updates/s     35216 steps/s   134.1 GFLOP/s   57%    43.0 GB/s   74%
    W1 K=20    auto          765 client updates/s     42224 steps/s   160.8 GFLOP/s   68%    51.6 GB/s   88%
    W1 K=100   direct        620 client updates/s     36393 steps/s   138.3 GFLOP/s   59%    44.4 GB/s   76%
    W1 K=100   auto          826 client updates/s     48455 steps/s   184.1 GFLOP/s   78%    59.2 GB/s  101%
    W1 K=1000  direct        521 client updates/s     34344 steps/s   131.4 GFLOP/s   56%    41.9 GB/s   72%
    W1 K=1000  auto          638 client updates/s     42051 steps/s   160.9 GFLOP/s   68%    51.4 GB/s   88%
    W2: ceilings 33 GFLOP/s at its own shapes, 224 at 2048^3, 58 GB/s
    W2 K=20    direct       1259 client updates/s     69461 steps/s    20.3 GFLOP/s    9%     6.5 GB/s   11%
    W2 K=20    auto         1319 client updates/s     72776 steps/s    21.2 GFLOP/s   10%     6.9 GB/s   12%
    W2 K=100   direct       1279 client updates/s     75036 steps/s    21.9 GFLOP/s   10%     7.1 GB/s   12%
    W2 K=100   auto         2005 client updates/s    117630 steps/s    34.3 GFLOP/s   15%    11.1 GB/s   19%
    W2 K=1000  direct       1196 client updates/s     78882 steps/s    23.1 GFLOP/s   10%     7.4 GB/s   13%
    W2 K=1000  auto         2263 client updates/s    149251 steps/s    43.8 GFLOP/s   20%    14.1 GB/s   24%
    W3: ceilings 182 GFLOP/s at its own shapes, 234 at 2048^3, 58 GB/s
    W3 K=20    direct         29 client updates/s       294 steps/s   176.3 GFLOP/s   75%     0.3 GB/s    1%
    W3 K=100   direct         27 client updates/s       276 steps/s   166.1 GFLOP/s   71%     0.3 GB/s    0%

On accelerators the ceilings have to be measured there; this program has only been run on a CPU. ResNet-18 is not among the models.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from workloads import WORKLOADS, cohorts, flops, gemm_peak, initial, sizes

WARM = 2  # rounds that are dropped
COUNTS = {"W1": (20, 100, 1000), "W2": (20, 100, 1000), "W3": (20, 100)}


def bandwidth() -> float:
    """Returns GB/s of p -= q, two reads and a write, in NumPy's one thread."""
    p, q = (np.ones(2**26, np.float32) for _ in range(2))
    best = np.inf
    for _ in range(8):
        began = time.perf_counter()
        p -= q
        best = min(best, time.perf_counter() - began)
    return 3 * p.nbytes / best / 1e9


def line(name: str, count: int, first_layer: str, rounds: int, flop_ceiling: float, byte_ceiling: float) -> None:
    """Measures one number of clients in a process of its own and prints it."""
    command = [sys.executable, __file__, "--side", name, "--count", str(count), "--rounds", str(rounds), "--first-layer", first_layer]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}, K={count} failed:\n{done.stderr[-2000:]}")
    seconds = sum(json.loads(done.stdout.splitlines()[-1])[WARM:])
    work, held = WORKLOADS[name], sizes(WORKLOADS[name].model)
    clients = cohorts(work, rounds, count)[WARM:]
    samples = work.epochs * held[clients].sum()
    steps = work.epochs * np.ceil(held[clients] / work.batch).sum()
    parameters = sum(kernel.size + bias.size for kernel, bias in initial(work.model))
    gflops, gbytes = samples * flops(work.model) / seconds / 1e9, steps * 3 * 4 * parameters / seconds / 1e9
    print(
        f"{name} K={count:<5} {first_layer:7}{clients.size / seconds:10.0f} client updates/s{steps / seconds:10.0f} steps/s"
        f"{gflops:8.1f} GFLOP/s {gflops / flop_ceiling:5.0%}{gbytes:8.1f} GB/s {gbytes / byte_ceiling:5.0%}",
        flush=True,
    )


def main() -> None:
    """Prints the ceilings and a line for each workload and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="W1 with 20 clients only")
    parser.add_argument("--side", choices=tuple(WORKLOADS), help="train this one here")
    parser.add_argument("--count", type=int)
    parser.add_argument("--rounds", type=int, default=WARM + 3)
    parser.add_argument("--first-layer", default="auto")
    given = parser.parse_args()
    if given.side:
        from peers import ours

        print(json.dumps(ours.train(WORKLOADS[given.side], given.rounds, given.count, given.first_layer).seconds))
        return
    byte_ceiling = bandwidth()
    for name in ["W1"] if given.quick else WORKLOADS:
        peaks = gemm_peak(WORKLOADS[name])
        own, square = (peaks[shapes] for shapes in ("own shapes", "2048^3"))
        print(f"{name}: ceilings {own:.0f} GFLOP/s at its own shapes, {square:.0f} at 2048^3, {byte_ceiling:.0f} GB/s")
        for count in (20,) if given.quick else COUNTS[name]:
            for first_layer in ("direct",) if name == "W3" else ("direct", "auto"):
                line(name, count, first_layer, given.rounds, square, byte_ceiling)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
