"""How near does local training come to what this machine can do?

Client updates per second of FedAvg on W1, W2 and W3 of `workloads.py` with K clients a
round, and two ceilings measured in the same run: matrix products (NumPy's sgemm at the
shapes of a step) and memory bandwidth (p -= q on 256 MB). The operations counted are
those of SGD on the layers themselves, and the bytes those of reading and writing the
parameters once a step, as if no cache held them: more than 100 % of the bandwidth's
ceiling means that a cache does; more than 100 % of the products' ceiling that training
in sample space needs fewer.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --quick      W1, K = 20, under two minutes

Measured 2026-11-23 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2 (the
column of percentages is the share of each ceiling):

    W1: ceilings 30 GFLOP/s at its own shapes, 261 at 2048^3, 59 GB/s
    W1 K=20    direct        787 client updates/s     43394 steps/s   165.2 GFLOP/s   63%    53.0 GB/s   89%
    W1 K=20    auto         1222 client updates/s     67441 steps/s   256.8 GFLOP/s   99%    82.4 GB/s  139%
    W1 K=100   direct        843 client updates/s     49477 steps/s   188.0 GFLOP/s   72%    60.4 GB/s  102%
    W1 K=100   auto         1625 client updates/s     95360 steps/s   362.4 GFLOP/s  139%   116.5 GB/s  196%
    W1 K=1000  direct        692 client updates/s     45660 steps/s   174.7 GFLOP/s   67%    55.8 GB/s   94%
    W1 K=1000  auto         1252 client updates/s     82578 steps/s   316.0 GFLOP/s  121%   100.8 GB/s  170%
    W2: ceilings 37 GFLOP/s at its own shapes, 258 at 2048^3, 59 GB/s
    W2 K=20    direct       1989 client updates/s    109702 steps/s    32.0 GFLOP/s   12%    10.3 GB/s   17%
    W2 K=20    auto         2267 client updates/s    125084 steps/s    36.5 GFLOP/s   14%    11.8 GB/s   20%
    W2 K=100   direct       2286 client updates/s    134085 steps/s    39.1 GFLOP/s   15%    12.6 GB/s   21%
    W2 K=100   auto         2662 client updates/s    156186 steps/s    45.5 GFLOP/s   18%    14.7 GB/s   25%
    W2 K=1000  direct       2144 client updates/s    141375 steps/s    41.5 GFLOP/s   16%    13.3 GB/s   22%
    W2 K=1000  auto         2750 client updates/s    181314 steps/s    53.2 GFLOP/s   21%    17.1 GB/s   29%
    W3: ceilings 215 GFLOP/s at its own shapes, 260 at 2048^3, 59 GB/s
    W3 K=20    direct         41 client updates/s       422 steps/s   253.3 GFLOP/s   97%     0.4 GB/s    1%
    W3 K=100   direct         43 client updates/s       431 steps/s   258.9 GFLOP/s   99%     0.4 GB/s    1%

On accelerators the ceilings have to be measured there; this program has only been run
on a CPU. ResNet-18 is not among the models.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from program import call_side, make_parser
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


def line(
    name: str, count: int, first_layer: str, rounds: int, flop_ceiling: float, byte_ceiling: float
) -> None:
    """Measures one number of clients in a process of its own and prints it."""
    options = ["--side", name, "--count", str(count), "--rounds", str(rounds)]
    options += ["--first-layer", first_layer]
    seconds = sum(call_side(options, f"{name}, K={count}")[WARM:])
    work, held = WORKLOADS[name], sizes(WORKLOADS[name].model)
    clients = cohorts(work, rounds, count)[WARM:]
    samples = work.epochs * held[clients].sum()
    steps = work.epochs * np.ceil(held[clients] / work.batch).sum()
    parameters = sum(kernel.size + bias.size for kernel, bias in initial(work.model))
    gflops = samples * flops(work.model) / seconds / 1e9
    gbytes = steps * 3 * 4 * parameters / seconds / 1e9
    print(
        f"{name} K={count:<5} {first_layer:7}{clients.size / seconds:10.0f} client"
        f" updates/s{steps / seconds:10.0f} steps/s{gflops:8.1f} GFLOP/s"
        f" {gflops / flop_ceiling:5.0%}{gbytes:8.1f} GB/s {gbytes / byte_ceiling:5.0%}",
        flush=True,
    )


def main() -> None:
    """Prints the ceilings and a line for each workload and number of clients."""
    parser = make_parser(__doc__.splitlines()[0], "W1 with 20 clients only")
    parser.add_argument("--side", choices=tuple(WORKLOADS), help="train this one here")
    parser.add_argument("--count", type=int)
    parser.add_argument("--rounds", type=int, default=WARM + 3)
    parser.add_argument("--first-layer", default="auto")
    given = parser.parse_args()
    if given.side:
        from peers import ours

        work = WORKLOADS[given.side]
        done = ours.train(work, given.rounds, given.count, given.first_layer)
        return print(json.dumps(done.seconds))
    byte_ceiling = bandwidth()
    for name in ["W1"] if given.quick else WORKLOADS:
        peaks = gemm_peak(WORKLOADS[name])
        own, square = (peaks[shapes] for shapes in ("own shapes", "2048^3"))
        print(
            f"{name}: ceilings {own:.0f} GFLOP/s at its own shapes, {square:.0f} at 2048^3,"
            f" {byte_ceiling:.0f} GB/s"
        )
        for count in (20,) if given.quick else COUNTS[name]:
            for first_layer in ("direct",) if name == "W3" else ("direct", "auto"):
                line(name, count, first_layer, given.rounds, square, byte_ceiling)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
