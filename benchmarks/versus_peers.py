"""Is local training faster than each peer's on the same machine, in the same run?

One round of FedAvg, client updates and aggregation: the same cohorts, data, first model
and hyperparameters (`workloads.py`) for all.

    python benchmarks/versus_peers.py --make-environments DIR [PEER ...]     a virtual environment for each peer in DIR, about 6 GB
    python benchmarks/versus_peers.py --environments DIR                     the table; a peer without environment is not measured
    python benchmarks/versus_peers.py --quick                                only ours, two rounds of each workload, under two minutes

Results come first: after two epochs of full batches, where the order of samples cannot
matter, every parameter of the aggregated model has to agree with ours to 1/1,000 of the
largest movement; and in the timed rounds, where each shuffles as it does, the model has
to have moved as far as ours within 10 %. A peer that fails either gets no speed, and
the program exits with 1. Then: ours, the peer, ours, the peer, each in a fresh process;
the ratio of every such pair, median (least..most). The first rounds, which compile and
fill caches, have a column.

Measured 2026-11-23 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2 on both
sides, PyTorch 2.13.0; 20 clients a round. W1: three repetitions of 30 rounds, W2: two;
W3: four of 9 rounds, pfl and the PyTorch loop again with another four, fluke and FedJAX
three of 7:

                      client updates/s        ours over the peer           steps/s  first 2 rounds, s     largest
                          ours    peer            median (range)      ours    peer       ours    peer  difference
    W1  FedJAX jit      1220.6   200.9         6.08 (5.86..6.16)     72514   11082        2.6     1.0     3.1e-06
    W1  PyTorch loop    1233.2    90.8         13.3 (12.9..20.6)     73267    5396        2.7     0.3     6.2e-06
    W1  pfl             1227.6    80.3         15.3 (12.9..15.5)     72931    4768        2.6     0.3     3.1e-06
    W1  fluke           1220.6    82.0         15.2 (14.6..15.6)     72517    4871        2.6     0.3     6.2e-06
    W1  Flower          1222.5    54.9         22.3 (21.1..22.4)     72628    3261        2.7     8.6     6.2e-06
    W2  FedJAX jit      1990.5   374.2         5.33 (5.09..5.58)    118258   20643        2.2     0.8     2.4e-06
    W2  PyTorch loop    1949.7   181.2         10.8 (10.7..10.8)    115832   10766        2.1     0.2     4.7e-06
    W2  pfl             1913.8   137.6         13.9 (13.7..14.1)    113702    8177        2.1     0.2     2.4e-06
    W3  pfl               39.8    33.8          1.2 (1.07..1.56)       405     344        3.7     1.2     2.4e-04
    W3  pfl               37.8    32.2          1.16 (1.1..1.32)       385     328        3.9     1.3     2.4e-04
    W3  PyTorch loop      40.3    32.1         1.26 (1.15..1.31)       410     327        3.6     1.3     2.4e-04
    W3  PyTorch loop      38.8    26.5         1.45 (1.11..1.59)       395     270        4.0     1.5     2.3e-04
    W3  fluke             40.8    25.4         1.61 (1.55..1.68)       417     260        3.6     1.5     2.4e-04
    W3  Flower            40.6    25.2         1.62 (1.49..1.77)       413     256        3.6     7.5     2.4e-04
    W3  FedJAX jit        39.4    20.9         1.95 (1.88..1.96)       402     214        3.8     3.4     2.3e-04

    W3 ours: 247 GFLOP/s, 95% (94%..97%) of the GEMM peak (215 at own shapes, 260 at 2048^3 GFLOP/s)

In the first rounds after compiling, a client of a size not met before costs up to 10 ms
more, once: over rounds 3 to 9 alone W1 has 860 to 890 client updates/s, 5.1 times
FedJAX, 10.6 times the PyTorch loop, 11.8 times pfl and 17.4 times Flower.

What limits W1: a round of 20 clients is as long as its largest client, which one core
trains, or half of all. With the times of single clients on a core, interpolated from 14
sizes measured apart from this program, these rounds cannot take less than 11.9 ms:
1,675 client updates/s, 30 times Flower. With 100 clients a round, measured in the same
way, ours has 1,610 to 1,750.

On other 2 cores (Intel Xeon, AVX-512; 2026-11-22), two repetitions of 6 to 8 rounds, ours over the
peer: W1 PyTorch loop 13.2 (10.2..16.2), Flower 13.4 (12.7..14.1); W3 PyTorch loop 1.1, pfl 1.17,
Flower 1.12 (0.94..1.38 in all), at 30 % of that machine's GEMM peak.

CFLA, on the AMD EPYC of 2026-11-22: W1 745.8 against 40.3 client updates/s, 20.2 times
(14.3..26); W3 1.04 times, with convolutions of whole batches. The machines are shared;
what holds is the ratio within a pair, to about a third. The last column is the largest
difference of the aggregated model from ours in the check, over the largest movement.

W3's share of the GEMM peak: the matrix products of forward and backward pass per
second, over the most that NumPy's sgemm reaches in the same run, at W3's own im2col
shapes and at 2,048 x 2,048.

What is done to peers (see `peers/`): FedJAX gets the one line that lets 0.0.17 run on a
current JAX. CFLA's FedAvg client gets SGD for its Adam and no evaluation. pfl keeps the
order of its batches. PyTorch peers take one thread or PyTorch's default number,
whichever is faster here; Flower's workers take one each. Not here: TensorFlow code of
FlexCFL, which is not packaged.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from program import make_parser
from workloads import COHORT, WORKLOADS, Workload, cohorts, flops, gemm_peak, initial, sizes

TORCH = "torch==2.13.0"
WARM = 2  # rounds that are dropped
SAME = 1e-3  # of the largest movement
AS_FAR = 0.1  # of the length of ours: shuffles alone change it by 2.7 % (W3, standard deviation)


class Peer(NamedTuple):
    """A peer and what its environment needs."""

    module: str  # of peers/
    shown: str
    installs: tuple[tuple[str, ...], ...]  # arguments of pip install, one call after another


PEERS = {
    "fedjax": Peer(
        "fedjax_jit",
        "FedJAX jit",
        (
            (
                "jax==0.10.2",
                "jaxlib==0.10.2",
                "dm-haiku==0.0.17",
                "optax==0.2.8",
                "chex==0.1.92",
                "numpy==2.4.6",
                "pandas==3.1.1",
            ),
            ("msgpack==1.2.4", "absl-py==2.5.1", "tqdm==4.70.1", "requests==2.34.2"),
            ("--no-deps", "fedjax==0.0.17"),
        ),
    ),
    "torch": Peer("torch_loop", "PyTorch loop", ((TORCH, "numpy==2.4.6"),)),
    "pfl": Peer("pfl_simulated", "pfl", (("pfl==0.6.0", TORCH),)),
    "flower": Peer(
        "flower_simulation", "Flower", (("flwr[simulation]==1.41.0", "ray==2.55.1", TORCH),)
    ),
    "fluke": Peer("fluke_federation", "fluke", (("fluke-fl==0.8.1", TORCH),)),
    "cfla": Peer(
        "cfla_server", "CFLA", ((TORCH, "numpy==2.4.6"), ("--no-deps", "cfla==1.0.4"))
    ),  # it asks for torch 2.0.1
}


class Failed(Exception):
    """A side that came to no result, or to another one."""


def make_environments(folder: Path, names: list[str]) -> None:
    """Creates a virtual environment for each peer named; one that exists is completed."""
    for name in names:
        python = interpreter(folder, name)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        for arguments in PEERS[name].installs:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *arguments], check=True)
        print(f"{name}: {python}", flush=True)


def interpreter(folder: Path, name: str) -> Path:
    """Returns the interpreter of a peer's environment, whether there is one or not."""
    return folder / name / "bin" / "python"


def side(module: str, work: Workload, rounds: int, model: str) -> None:
    """Trains in this process and prints seconds and steps per round as one line of
    JSON; the first round's model goes to a file.
    """
    done = importlib.import_module(f"peers.{module}").train(work, rounds)
    np.savez(model, *(array for layer in done.model for array in layer))
    sys.stdout.flush()
    print("\n" + json.dumps({"seconds": done.seconds, "steps": done.steps}), flush=True)


class Side(NamedTuple):
    """What one process measured."""

    seconds: np.ndarray  # [rounds]
    steps: np.ndarray  # [rounds]
    moved: np.ndarray  # [P], the global model's movement in the first round

    @property
    def rates(self) -> np.ndarray:
        """Client updates and local steps per second, after the first rounds."""
        done = np.array([COHORT * len(self.seconds[WARM:]), self.steps[WARM:].sum()])
        return done / self.seconds[WARM:].sum()


def measure(python, module: str, work: Workload, rounds: int, check: bool = False) -> Side:
    """Runs one side in its own process; raises Failed if it does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model.npz")
        command = [str(python), __file__, "--side", module, "--workload", work.name]
        command += ["--rounds", str(rounds), "--model", model]
        process = subprocess.Popen(
            command + ["--check"] * check,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
        try:
            out, error = process.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            out, error = "", "no result within 15 minutes"
        finally:  # and whatever it left behind
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        if process.returncode or not out.strip():
            raise Failed(f"failed: {error.strip()[-800:]}")
        found = json.loads(out.splitlines()[-1])
        with np.load(model) as arrays:
            first = (array for layer in initial(work.model) for array in layer)
            pairs = zip(arrays.files, first, strict=True)
            moved = np.concatenate([(arrays[name] - start).ravel() for name, start in pairs])
    return Side(np.array(found["seconds"]), np.array(found["steps"]), moved)


def compared(ours: Side, theirs: Side) -> float:
    """Returns the largest difference over our largest movement; raises Failed if it is
    too large.
    """
    apart, most = np.abs(theirs.moved - ours.moved).max(), np.abs(ours.moved).max()
    if not apart <= SAME * most:
        raise Failed(
            f"another result: parameters differ by up to {apart:.1e}, ours moved by up to"
            f" {most:.1e}; no speed is reported"
        )
    return float(apart / most)


def as_far(ours: Side, theirs: Side) -> None:
    """Raises Failed unless the timed model moved as far as ours and took about as many steps."""
    far = np.linalg.norm(theirs.moved) / np.linalg.norm(ours.moved)
    steps = theirs.steps.sum() / ours.steps.sum()
    if not (abs(far - 1) <= AS_FAR and abs(steps - 1) <= AS_FAR):
        raise Failed(
            f"another result: {steps:.2f} times our steps, moved {far:.3f} times as far; no speed"
            " is reported"
        )


def of_peak(work: Workload, rounds: int, ours: list[Side], peaks: list[dict[str, float]]) -> str:
    """Returns a line: the matrix products per second of ours, as a share of the best
    sgemm of the run.
    """
    samples = sizes(work.model)[cohorts(work, rounds)[WARM:]].sum() * work.epochs
    reached = [samples * flops(work.model) / one.seconds[WARM:].sum() / 1e9 for one in ours]
    best = {name: max(peak[name] for peak in peaks) for name in peaks[0]}
    share = np.array(reached) / max(best.values())
    told = ", ".join(f"{value:.0f} at {name}" for name, value in best.items())
    spread = f"{np.median(share):.0%} ({share.min():.0%}..{share.max():.0%})"
    return (
        f"{work.name} ours: {np.median(reached):.0f} GFLOP/s, {spread} of the GEMM peak ({told}"
        " GFLOP/s)"
    )


def row(work: Workload, shown: str, pairs: list[tuple[Side, Side]], difference: float) -> str:
    """Returns a line of the table."""
    rates = np.array([[one.rates for one in pair] for pair in pairs])  # [repeats, 2, 2]
    ratio = rates[:, 0, 0] / rates[:, 1, 0]
    (mine, my_steps), (theirs, their_steps) = np.median(rates, axis=0)
    first = [np.median([pair[i].seconds[:WARM].sum() for pair in pairs]) for i in (0, 1)]
    spread = f"{np.median(ratio):.3g} ({ratio.min():.3g}..{ratio.max():.3g})"
    text = f"{work.name:4s}{shown:14s}{mine:8.1f}{theirs:8.1f}{spread:>26s}{my_steps:10.0f}{their_steps:8.0f}"
    return text + f"{first[0]:11.1f}{first[1]:8.1f}{difference:12.1e}"


HEAD = (
    f"{'':18s}{'client updates/s':>16s}{'ours over the peer':>26s}{'steps/s':>18s}{'first 2 rounds, s':>19s}{'largest':>12s}\n"
    + f"{'':18s}{'ours':>8s}{'peer':>8s}{'median (range)':>26s}{'ours':>10s}{'peer':>8s}{'ours':>11s}{'peer':>8s}{'difference':>12s}"
)


def table(
    folder: Path, names: list[str], chosen: list[Workload], rounds: int, repeats: int
) -> bool:
    """Prints the table and returns whether every peer measured came to our result."""
    present = [name for name in names if interpreter(folder, name).exists()]
    missing = ", ".join(name for name in names if name not in present) or "none"
    print("not measured, no environment:", missing, flush=True)
    print(HEAD, flush=True)
    wrong = []
    for work in chosen:
        here, everyone, peaks = measure(sys.executable, "ours", work, 1, check=True), [], []
        differences, pairs = {}, {name: [] for name in present}
        for name in present:
            python, module = interpreter(folder, name), PEERS[name].module
            try:
                differences[name] = compared(here, measure(python, module, work, 1, check=True))
            except Failed as failure:
                wrong.append(f"{work.name:4s}{PEERS[name].shown:14s}{failure}")
        for _ in range(repeats):
            peaks.append(gemm_peak(work))
            for name in list(differences):
                mine = measure(sys.executable, "ours", work, rounds)
                everyone.append(mine)
                try:
                    theirs = measure(interpreter(folder, name), PEERS[name].module, work, rounds)
                    as_far(mine, theirs)
                    pairs[name].append((mine, theirs))
                except Failed as failure:
                    del differences[name]
                    wrong.append(f"{work.name:4s}{PEERS[name].shown:14s}{failure}")
        for name, difference in differences.items():
            print(row(work, PEERS[name].shown, pairs[name], difference), flush=True)
        if work.model == "cnn" and everyone:
            print(of_peak(work, rounds, everyone, peaks), flush=True)
    print(*wrong, sep="\n", end="\n" * bool(wrong), flush=True)
    return not wrong


def quick(chosen: list[Workload]) -> None:
    """Prints our own speed in two rounds of each workload."""
    for work in chosen:
        mine = measure(sys.executable, "ours", work, WARM + 2)
        updates, steps = mine.rates
        first = mine.seconds[:WARM].sum()
        print(
            f"{work.name}, {work.what}: {updates:.0f} client updates/s, {steps:.0f} steps/s; first"
            f" {WARM} rounds {first:.1f} s",
            flush=True,
        )


def main() -> None:
    """Reads the arguments and does what they ask for."""
    parser = make_parser(__doc__, "only ours, two rounds")
    parser.add_argument(
        "--make-environments",
        metavar="DIR",
        type=Path,
        help="create the environments of the peers in DIR",
    )
    parser.add_argument(
        "--environments",
        metavar="DIR",
        type=Path,
        help="measure the peers that have an environment in DIR",
    )
    parser.add_argument(
        "peers", nargs="*", metavar="PEER", help=f"which (default: all): {', '.join(PEERS)}"
    )
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=tuple(WORKLOADS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help=f"rounds of a repetition, the first {WARM} are dropped",
    )
    parser.add_argument("--repeats", type=int, default=3, help="alternating repetitions")
    for inner in ("--side", "--workload", "--model"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        work = WORKLOADS[given.workload]
        return side(given.side, work.check() if given.check else work, given.rounds, given.model)
    if unknown := [name for name in given.peers if name not in PEERS]:
        parser.error(f"no peer is called {unknown[0]}: {', '.join(PEERS)}")
    names, chosen = given.peers or list(PEERS), [WORKLOADS[name] for name in given.workloads]
    if given.make_environments:
        make_environments(given.make_environments.resolve(), names)
    elif given.quick:
        quick(chosen)
    elif given.environments:
        # so that a side in progress ends too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        if not table(given.environments.absolute(), names, chosen, given.rounds, given.repeats):
            sys.exit(1)
    else:
        parser.error("--environments DIR is needed, or --make-environments DIR, or --quick")


if __name__ == "__main__":
    main()
