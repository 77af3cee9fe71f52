"""How long does a person wait before training begins, and what of it is compiling?

Each command runs twice: with an empty cache of compiled programs (cold), and again
(warm). Seconds: the command as a whole, and what its summary says it spent.

    python benchmarks/cold_start.py
    python benchmarks/cold_start.py --quick              digits only
    python benchmarks/cold_start.py --before CHECKOUT    beside another checkout, alternating
    python benchmarks/cold_start.py --catalogue          every method on digits for two rounds, cold

Measured 2026-11-25 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2, beside the
package before it stopped importing all of scikit-learn for the digits and searching what is
imported for garbage:

                                                     cold  compiling  training  testing    warm
    digits, FlexCFL, before                           9.1        3.7       0.2      0.0     6.9
    digits, FlexCFL, now                              7.3        3.7       0.2      0.1     5.1
    MNIST-MLP, FlexCFL, swap_all, before             19.0       10.9       2.0      0.4    11.1
    MNIST-MLP, FlexCFL, swap_all, now                17.0       10.1       1.9      0.3     9.7
    48 x 1,000 images, LeNet, FlexCFL, before        18.6        7.9       1.4      2.0    14.4
    48 x 1,000 images, LeNet, FlexCFL, now           18.2        7.6       1.3      2.0    13.1

A run that differs from an earlier one in numbers alone starts warm, too.

The whole catalogue on digits (39 methods), beside the package before programs were compiled by
XLA's older emitters (see simulation/compiler.py), with other work on the machine: compiling takes
0.55 of the time before (0.43 to 0.82), the whole command 0.59 of the CPU seconds.

On 2026-11-27, 2 CPU cores of an Intel Xeon, beside the package of the day before (59b949a), twice:

    digits, FlexCFL, before                    15.5, 13.0    8.2, 6.6       0.3      0.1     9.7
    digits, FlexCFL, now                       12.5, 12.1    7.0, 6.5       0.3      0.1     9.5

What is left of compiling is the training loop, which FlexCFL with a shift has in four places
(`tests/test_flexcfl_drift.py`), the start and three in a round. What fewer would save was measured
by leaving places out, CPU seconds of XLA: of the digits' programs (4.9 in all) newcomers take 0.3;
of MNIST-MLP's under swap_all (12.8) newcomers 1.5 and shifted clients 1.7, so that a round with one
place would compile in 5.1 instead of 8.4, and the command take perhaps 15 seconds instead of 17.
XLA clones what is called twice, also where it is told not to inline (tried on a small program), so
that this needs a round that trains everybody in one loop: not done. Threefry unrolled, instead of
small loops, made starts slower. Importing Matplotlib and Orbax in a thread while programs compile
gained nothing: tracing keeps the interpreter as long. A warm start is 5 CPU seconds of Python:
imports 1.8, tracing 1.6, the rest configuration, four checkpoints and a plot.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from program import call, make_parser

HERE = Path(__file__).resolve().parent.parent
CASES = {
    "digits, FlexCFL": [],
    "MNIST-MLP, FlexCFL, swap_all": [
        "dataset=mnist", "model=mlp", "drift=swap_all", "drift.p=0.05", "rounds=20", "discard=none",
    ],
    "48 x 1,000 images, LeNet, FlexCFL": [
        "dataset=rotated_mnist", "model=lenet", "rounds=2", "discard=none", "clients_per_round=8",
    ],
}  # fmt: skip


METHODS = sorted(path.stem for path in (HERE / "conf" / "algorithm").glob("*.yaml"))


def timed(checkout: Path, folder: Path, overrides: list[str], warm: bool) -> dict[str, float]:
    """Runs a command of a checkout, with a cache of its own in `folder`; returns its seconds."""
    run_dir = folder / ("warm" if warm else "cold")
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(checkout)}
    before, began = cpu_of_children(), time.perf_counter()
    call(
        [sys.executable, "-m", "fedjax_cfl", "offline=true", f"run_dir={run_dir}", *overrides],
        " ".join(overrides),
        environment,
        cwd=folder,  # not where the package lies
    )
    whole = time.perf_counter() - began
    spent = json.loads((run_dir / "summary.json").read_text())
    seconds = {"whole": whole, "cpu": cpu_of_children() - before}
    return seconds | {name: spent[name] for name in ("compile_s", "train_s", "eval_s")}


def cpu_of_children() -> float:
    """Returns the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare_catalogue(checkouts: dict[str, Path]) -> None:
    """Prints the seconds of compiling and the CPU seconds of every method's command, cold."""
    print(f"{'':20s}" + "".join(f"{label + ': compiling':>20s} {'CPU':>7s}" for label in checkouts))
    for method in METHODS:
        line = f"{method:20s}"
        for checkout in checkouts.values():
            with tempfile.TemporaryDirectory() as folder:
                overrides = [f"algorithm={method}", "dataset.rounds=2"]
                spent = timed(checkout, Path(folder), overrides, warm=False)
            line += f"{spent['compile_s']:20.2f} {spent['cpu']:7.2f}"
        print(line, flush=True)


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__, "digits only")
    parser.add_argument("--before", type=Path, help="another checkout of the package")
    parser.add_argument("--catalogue", action="store_true", help="every method")
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.resolve()} if arguments.before else {}
    checkouts["now"] = HERE
    if arguments.catalogue:
        return compare_catalogue(checkouts)
    print(f"{'':45s} {'cold':>7s} {'compiling':>10s} {'training':>9s} {'testing':>8s} {'warm':>7s}")
    for name, overrides in list(CASES.items())[: 1 if arguments.quick else None]:
        for label, checkout in checkouts.items():
            with tempfile.TemporaryDirectory() as folder:
                cold, warm = (
                    timed(checkout, Path(folder), overrides, warm) for warm in (False, True)
                )
            print(
                f"{name + ', ' + label:45s} {cold['whole']:7.1f} {cold['compile_s']:10.1f}"
                f" {cold['train_s']:9.1f} {cold['eval_s']:8.1f} {warm['whole']:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
