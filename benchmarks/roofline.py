"""How near does local training come to what this machine can do?

Client updates per second of FedAvg on W1, W2 and W3 of `workloads.py` with K clients a round, and two ceilings measured in the same run:
matrix products (NumPy's sgemm at the shapes of a step) and memory bandwidth (p -= q on 256 MB). The operations counted are those of SGD on
the layers themselves, and the bytes those of reading and writing the parameters once a step, as if no cache held them: more than 100 % of
the bandwidth's ceiling means that a cache does; more than 100 % of the products' ceiling that training in sample space needs fewer.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --quick      W1, K = 20, under two minutes

Measured 2026-11-22 on 2 CPU cores (Intel Xeon, AVX-512), Python 3.11, jax 0.10.2 (the column of percentages is the share of each ceiling):

    W1: ceilings 18 GFLOP/s at its own shapes, 116 at 2048^3, 17 GB/s
    W1 K=20    direct        285 client updates/s     15740 steps/s    59.9 GFLOP/s   52%    19.2 GB/s  111%
    W1 K=20    auto          471 client updates/s     26006 steps/s    99.0 GFLOP/s   85%    31.8 GB/s  183%
    W1 K=100   direct        289 client updates/s     16927 steps/s    64.3 GFLOP/s   55%    20.7 GB/s  119%
    W1 K=100   auto          440 client updates/s     25808 steps/s    98.1 GFLOP/s   84%    31.5 GB/s  182%
    W1 K=1000  direct        221 client updates/s     14558 steps/s    55.7 GFLOP/s   48%    17.8 GB/s  103%
    W1 K=1000  auto          440 client updates/s     28987 steps/s   110.9 GFLOP/s   95%    35.4 GB/s  205%
    W2: ceilings 30 GFLOP/s at its own shapes, 179 at 2048^3, 17 GB/s
    W2 K=20    direct        582 client updates/s     32128 steps/s     9.4 GFLOP/s    5%     3.0 GB/s   17%
    W2 K=20    auto          598 client updates/s     32976 steps/s     9.6 GFLOP/s    5%     3.1 GB/s   18%
    W2 K=100   direct        631 client updates/s     37012 steps/s    10.8 GFLOP/s    6%     3.5 GB/s   20%
    W2 K=100   auto          847 client updates/s     49719 steps/s    14.5 GFLOP/s    8%     4.7 GB/s   27%
    W2 K=1000  direct        551 client updates/s     36337 steps/s    10.7 GFLOP/s    6%     3.4 GB/s   20%
    W2 K=1000  auto          752 client updates/s     49569 steps/s    14.5 GFLOP/s    8%     4.7 GB/s   27%
    W3: ceilings 121 GFLOP/s at its own shapes, 195 at 2048^3, 17 GB/s
    W3 K=20    direct         10 client updates/s       102 steps/s    61.3 GFLOP/s   31%     0.1 GB/s    1%
    W3 K=100   direct         15 client updates/s       150 steps/s    89.9 GFLOP/s   46%     0.1 GB/s    1%

The machine is shared: its best product was between 116 and 238 GFLOP/s within the hour. On 2 cores of an AMD EPYC (235 GFLOP/s, 58 GB/s)
W1 had 57 % directly and 68 to 78 % in sample space, W2 10 to 20 % and W3 71 to 75 %, the last with convolutions of whole batches.

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
