"""How does local training scale with devices?

FedAvg on W1, W2 and W3 of `workloads.py` with 1, 2, 4, ... devices up to the cores of
this machine (or its accelerators), each number in a process of its own, in alternating
repetitions; the first rounds, which compile, are dropped.

    python benchmarks/devices_scaling.py
    python benchmarks/devices_scaling.py --quick      W1 only, few rounds, under two minutes

Measured 2026-11-23 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2,
`--rounds 24`:

    W1  1 device       638..679 client updates/s  1.00 times one device (1.00..1.00)
    W1  2 devices     1064..1101 client updates/s  1.64 times one device (1.59..1.67)
    W2  1 device       977..1016 client updates/s  1.00 times one device (1.00..1.00)
    W2  2 devices     1823..1910 client updates/s  1.87 times one device (1.83..1.88)
    W3  1 device        20..24 client updates/s  1.00 times one device (1.00..1.00)
    W3  2 devices       40..42 client updates/s  1.77 times one device (1.77..2.14)

A round of 20 clients takes at least as long as its largest client on one device, and a
client of a size not met before costs some milliseconds once: in the usual 9 rounds W1
gains 1.32 times (1.24..1.62), W2 1.58 (1.44..1.59).
"""

import json
import os
import sys
from pathlib import Path

from program import call_side, make_parser
from workloads import COHORT, WORKLOADS

WARM = 2  # rounds that are dropped


def speed(name: str, devices: int, rounds: int) -> float:
    """Returns client updates per second of a process with so many CPU devices."""
    options = ["--side", name, "--rounds", str(rounds)]
    environment = {"JAX_NUM_CPU_DEVICES": str(devices)}
    seconds = call_side(options, f"{name} on {devices} devices", environment)[WARM:]
    return COHORT * len(seconds) / sum(seconds)


def main() -> None:
    """Prints a line for each workload."""
    parser = make_parser(__doc__.splitlines()[0], "W1 only, few rounds")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=tuple(WORKLOADS), help="train this one here")
    given = parser.parse_args()
    if given.side:
        from peers import ours

        print(json.dumps(ours.train(WORKLOADS[given.side], given.rounds).seconds))
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    counts = [2**i for i in range(cores.bit_length()) if 2**i <= cores]
    rounds, repeats = (WARM + 2, 1) if given.quick else (given.rounds, given.repeats)
    for name in ["W1"] if given.quick else WORKLOADS:
        found = {count: [] for count in counts}
        for _ in range(repeats):
            for count in counts:
                found[count].append(speed(name, count, rounds))
        ratios = {
            count: sorted(a / b for a, b in zip(found[count], found[1], strict=True))
            for count in counts
        }
        for count in counts:
            median = ratios[count][repeats // 2]
            print(
                f"{name}  {count} device{'s' * (count > 1):1} "
                f" {min(found[count]):7.0f}..{max(found[count]):.0f} client updates/s  {median:.2f}"
                f" times one device ({ratios[count][0]:.2f}..{ratios[count][-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
