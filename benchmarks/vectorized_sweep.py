"""What does training a sweep as one program gain over its runs one after another?

FlexCFL, 5 seeds x 5 eta_g, end to end as a user waits for it: two commands, each with
an empty cache of compiled programs.

    python benchmarks/vectorized_sweep.py                 digits (60 rounds), and MNIST-MLP (20 rounds) where the data are
    python benchmarks/vectorized_sweep.py --quick         digits, 2 x 2 runs of 5 rounds, under two minutes

Measured 2026-11-30 on 2 CPU cores (Intel Xeon), Python 3.11, jax 0.10.2; the sums of what the runs
say they spent, and the mean of their best accuracies:

                                 runs  seconds  compiling  training  evaluating  accuracy
    digits, one after another      25     35.6        9.8       6.8         1.9    0.9509
    digits, one program            25     31.7        5.5       2.4         0.3    0.9509
    digits: 1.1 times as fast

Runs one after another share their programs, and have room for the data of all seeds from the first
on; before, they took 171.5 s (95.8 of it compiling), and one program 83.2 s. Two of the 25
compile: eta_g = 0 leaves a part out. With programs in the cache, as on another day, the 25 commands
take 21.9 s. What is left beside compiling, training and testing is some 15 s: starting, checking
the 25 commands, checkpoints, tables, one comparison.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from program import call, make_parser

COMMAND = [sys.executable, "-m", "fedjax_cfl"]
CASES = {
    "digits": ["dataset=digits", "rounds=60"],
    "MNIST-MLP": ["dataset=mnist", "model=mlp", "rounds=20", "discard=none", "offline=true"],
}


def timed(folder: Path, *overrides: str) -> float:
    """Runs a command with a cache of its own; returns its seconds."""
    began = time.perf_counter()
    command = [*COMMAND, *overrides, f"run_dir={folder / 'runs'}"]
    call(command, " ".join(overrides), {"XDG_CACHE_HOME": str(folder / "cache")})
    return time.perf_counter() - began


def totals(folder: Path) -> dict[str, float]:
    """Returns the sums over all runs of what they say they spent, and their mean best accuracy."""
    runs = [
        json.loads(path.read_text()) for path in sorted((folder / "runs").rglob("summary.json"))
    ]
    return {name: sum(run[name] for run in runs) for name in ("compile_s", "train_s", "eval_s")} | {
        "accuracy": sum(run["best_accuracy"] or 0.0 for run in runs) / len(runs),
        "runs": len(runs),
    }


def main() -> None:
    """Prints a line for each way and the ratio."""
    parser = make_parser(__doc__.splitlines()[0], "digits only, 2 x 2 runs of 5 rounds")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    given = parser.parse_args()
    cases = (
        {"digits": ["dataset=digits", "rounds=5", "discard=none"]}
        if given.quick
        else {name: CASES[name] for name in given.cases}
    )
    seeds, rates = ("0,1", "0,0.1") if given.quick else ("0,1,2,3,4", "0,0.05,0.1,0.5,1")
    grid = [f"seed={seeds}", f"algorithm.eta_g={rates}"]
    print(
        f"{'':28}{'runs':>5}{'seconds':>9}{'compiling':>11}{'training':>10}{'evaluating':>12}{'accuracy':>10}"
    )
    for name, overrides in cases.items():
        seconds = {}
        for way, more in (
            ("one after another", ["-m"]),
            ("one program", ["vectorize=[seed,algorithm.eta_g]"]),
        ):
            with tempfile.TemporaryDirectory() as folder:
                seconds[way] = timed(Path(folder), *more, "algorithm=flexcfl", *overrides, *grid)
                parts = totals(Path(folder))
            print(
                f"{name + ', ' + way:28}{parts['runs']:5}{seconds[way]:9.1f}{parts['compile_s']:11.1f}{parts['train_s']:10.1f}"
                f"{parts['eval_s']:12.1f}{parts['accuracy']:10.4f}"
            )
        print(f"{name}: {seconds['one after another'] / seconds['one program']:.1f} times as fast")


if __name__ == "__main__":
    main()
