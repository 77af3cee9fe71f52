"""How many chips does a round pay for, on paper?

A MODEL OF A ROUND, NO MEASUREMENT: no TPU has run any of it. FedAvg's local training on 4 to 256
chips of TPU v5e, for cohorts of 1,000 to 100,000 clients. It adds up

- steps: each chip trains its clients in the lanes of `client/lanes.py`, as many as cost least for
  that round; clients are dealt over the chips as `client/cohort.py` deals them, with the sizes of
  real clients, so that a chip is as slow as its longest client;
- a step of w lanes: the most of the TPU compiler's own estimate of cycles, of its count of
  operations over the peak and of its count of bytes over the memory's bandwidth, from
  programs compiled for a v5e without one; in between and beyond, a straight line. Optimistic:
  what fetches samples, and the loop itself, are not in it;
- the all-reduce of the update over the links, and a latency per hop.

Not in it: the server's own work, evaluation, starting a program, and contention.

    python benchmarks/pod_model.py --steps    compiles steps of several widths (needs the extra
                                              tpu); writes steps.csv
    python benchmarks/pod_model.py            the table and the plot from them, in
                                              results/tpu_compile/
    python benchmarks/pod_model.py --quick    the table of one cohort, no file

Measured 2026-11-26 on 2 CPU cores (AMD EPYC), the steps a day before, jax 0.10.2, libtpu
0.0.42.1: nothing but the compiler's estimates. Results: results/tpu_compile/README.md.
"""

import csv
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from program import make_parser
from workloads import sizes

from fedjax_cfl.simulation.width import count_lane_steps

RESULTS = Path(__file__).resolve().parent / "results" / "tpu_compile"
CHIPS = tuple(2**power for power in range(2, 9))
COHORTS = (1_000, 3_000, 10_000, 30_000, 100_000)
WIDTHS = (1, 8, 64)
SAVED = 0.2  # twice the chips have to save so much of a round to be worth it


class Chip(NamedTuple):
    """What is assumed of a chip, as Google publishes it."""

    name: str
    clock: float  # 1/s: 4 matrix units x 128 x 128 x 2 x 1.5 GHz = 197 TFLOP/s
    peak: float  # FLOP/s of float32 products: six passes of bfloat16
    bandwidth: float  # bytes/s of the memory
    link: float  # bytes/s to all neighbours together
    hop: float  # s, latency from chip to chip
    memory: float  # bytes


V5E = Chip("v5e", 1.5e9, 197e12 / 6, 819e9, 1600e9 / 8, 1e-6, 16 * 2**30)


class Job(NamedTuple):
    """What a client trains."""

    name: str
    what: str
    batch: int
    epochs: int
    parameters: int
    lane_bytes: int  # of memory that a client takes, about

    def steps(self, held: np.ndarray) -> np.ndarray:
        """Returns the steps of clients of `held` samples."""
        return self.epochs * -(-held // self.batch)


JOBS = {
    job.name: job
    for job in (
        Job("mlp", "MLP 784-128-10, power-law sizes (1 to 1,707), E=10, B=10", 10, 10, 101_770, 2_000_000),
        Job("cnn", "FEMNIST CNN 3x3 32/64, 128; 207 writers (2 to 320), E=1, B=20", 20, 1, 1_206_590, 40_000_000),
    )
}  # fmt: skip


def client_sizes(name: str) -> np.ndarray:
    """Returns the training samples of real clients: FedProx's power law, or those of FEMNIST's
    writers, as steps.csv was made with.
    """
    if name == "mlp":
        return sizes("mlp")
    return np.loadtxt(RESULTS / "femnist_sizes.txt", dtype=int)


def compile_steps(path: Path) -> None:
    """Writes what the TPU's compiler says of a step of several widths."""
    import device_targets
    import hlo
    import jax
    import jax.numpy as jnp
    from accelerator_models import SmallCNN
    from jax.sharding import SingleDeviceSharding

    import fedjax_cfl as cfl

    mesh = device_targets.make_topology_mesh("v5e:2x2")
    place = SingleDeviceSharding(mesh.devices.flat[0])
    jax.config.update("jax_default_matmul_precision", "float32")
    modules = {"mlp": (cfl.models.MLP(10), (28, 28)), "cnn": (SmallCNN(62), (28, 28, 1))}

    def shape(size, kind):
        return jax.ShapeDtypeStruct(size, kind, sharding=place)

    rows = []
    with device_targets.act_as_device(mesh, int(V5E.memory)):
        for name, (module, sample) in modules.items():
            classes = 10 if name == "mlp" else 62
            task = cfl.as_task(module, sample, classes, l2=0.0)
            model = jax.eval_shape(task.init, jax.random.key(0))

            def step(params, x, y, task=task):
                grad = jax.grad(lambda p: task.loss(p, x, y, jax.random.key(0)).mean())(params)
                return jax.tree.map(lambda p, g: p - 0.03 * g, params, grad)

            for width in WIDTHS:
                lanes = jax.tree.map(
                    lambda leaf, w=width: shape((w, *leaf.shape), leaf.dtype), model
                )
                x = shape((width, JOBS[name].batch, *sample), jnp.uint8)
                y = shape((width, JOBS[name].batch), jnp.int32)
                compiled = jax.jit(jax.vmap(step), donate_argnums=0).lower(lanes, x, y).compile()
                cost = compiled.cost_analysis()
                cycles = hlo.sum_cycles(compiled.as_text())[0]
                rows.append([name, width, int(cost["flops"]), int(cost["bytes accessed"]), cycles])
                print(*rows[-1], flush=True)
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [["job", "width", "flops", "bytes", "cycles"], *rows]
        )


def read_steps(path: Path, chip: Chip) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns job -> (widths, seconds of a step)."""
    found: dict[str, list] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            seconds = max(
                float(row["cycles"]) / chip.clock,
                float(row["flops"]) / chip.peak,
                float(row["bytes"]) / chip.bandwidth,
            )
            found.setdefault(row["job"], []).append((int(row["width"]), seconds))
    return {name: tuple(np.array(sorted(each)).T) for name, each in found.items()}


def step_seconds(measured: tuple[np.ndarray, np.ndarray], lanes: np.ndarray) -> np.ndarray:
    """Returns the seconds of a step of so many lanes: along straight lines, the last of which
    goes on.
    """
    widths, seconds = measured
    slope = (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2])
    beyond = seconds[-1] + slope * (lanes - widths[-1])
    return np.where(lanes > widths[-1], beyond, np.interp(lanes, widths, seconds))


def deal(held: np.ndarray, chips: int) -> np.ndarray:
    """Returns the clients' samples [chips, share], longest first, handed out back and forth as
    `cohort.balance_over_devices` does; 0 in an empty place.
    """
    share = -(-held.size // chips)
    rows = np.zeros(share * chips, int)
    rows[: held.size] = np.sort(held)[::-1]
    rows = rows.reshape(share, chips)
    rows[1::2] = rows[1::2, ::-1]
    return rows.T


def chip_seconds(steps: np.ndarray, most: int, measured) -> float:
    """Returns the seconds of one chip whose clients take `steps`, longest first, in the number of
    lanes, `most` of them at most, that takes least.
    """
    own = tuple(steps[steps > 0].tolist())
    tried = {min(round(1.2**n), most, max(len(own), 1)) for n in range(60)}
    seconds = [
        count_lane_steps(own, lanes) * float(step_seconds(measured, np.array(lanes)))
        for lanes in tried
    ]
    return min(seconds)


class Round(NamedTuple):
    """A round on some chips, in seconds."""

    train: float
    reduce: float
    mean: float  # of the chips' training
    floor: float  # the longest client alone

    @property
    def whole(self) -> float:
        return self.train + self.reduce


def model_round(job: Job, held: np.ndarray, chips: int, measured, chip: Chip = V5E) -> Round:
    """Returns the model of a round of clients with `held` samples."""
    most = max(1, int(chip.memory / 2 / job.lane_bytes))
    each = [chip_seconds(job.steps(own), most, measured) for own in deal(held, chips)]
    size = 4 * job.parameters
    reduce = 2 * (chips - 1) / chips * size / chip.link + 2 * np.sqrt(chips) * chip.hop
    floor = job.steps(held).max() * float(measured[1][0])
    return Round(max(each), float(reduce), float(np.mean(each)), float(floor))


def draw_cohort(job: Job, count: int) -> np.ndarray:
    """Returns the samples of a cohort, drawn with repeats from real clients."""
    return np.random.RandomState(0).choice(client_sizes(job.name), count)


def last_useful(rounds: dict[int, Round]) -> int:
    """Returns the chips from which on twice as many save less than a fifth of the round."""
    for chips, more in pairwise(sorted(rounds)):
        if 1 - rounds[more].whole / rounds[chips].whole < SAVED:
            return chips
    return max(rounds)


def plot(found: dict[tuple[str, int], dict[int, Round]], path: Path) -> None:
    """Draws a panel for each job: seconds of a round over chips, a line for each cohort."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(JOBS), figsize=(10, 4.4), layout="constrained")
    for axis, job in zip(axes, JOBS.values(), strict=True):
        for color, cohort in zip(
            plt.colormaps["viridis"](np.linspace(0, 0.85, 5)), COHORTS, strict=True
        ):
            rounds = found[job.name, cohort]
            seconds = [rounds[chips].whole for chips in CHIPS]
            axis.loglog(CHIPS, seconds, color=color, marker="o", ms=3, label=f"{cohort:,}")
            axis.loglog(CHIPS, [seconds[0] * 4 / c for c in CHIPS], color=color, ls=":", lw=0.8)
            if (last := last_useful(rounds)) < CHIPS[-1]:
                axis.plot(last, rounds[last].whole, "s", ms=9, mfc="none", mec=color)
        floor = max(found[job.name, COHORTS[-1]][4].floor, 1e-9)
        axis.axhline(floor, color="0.4", ls="--", lw=0.8)
        axis.text(4, floor * 1.1, "longest client alone", color="0.3", fontsize=8)
        axis.set_title(job.what, fontsize=8)
        axis.set_xticks(CHIPS, [str(c) for c in CHIPS])
        axis.minorticks_off()
        axis.set_xlabel("TPU v5e chips")
    axes[0].set_ylabel("seconds of a round (model)")
    axes[1].legend(title="clients a round", fontsize=8, title_fontsize=8)
    figure.suptitle(
        "A model on paper, nothing measured. Dotted: in proportion; square: twice the chips save"
        " less than 20 %",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    """Prints the table; writes it and the plot."""
    parser = make_parser(__doc__, "one cohort, no file")
    parser.add_argument("--steps", action="store_true", help="compile steps of several widths")
    given = parser.parse_args()
    if given.steps:
        return compile_steps(RESULTS / "steps.csv")
    measured, found = read_steps(RESULTS / "steps.csv", V5E), {}
    lines = [
        "| job | clients a round | "
        + " | ".join(f"{c} chips" for c in CHIPS)
        + " | last useful | balance at 256 | all-reduce at 256 |",
        "| --- " * (len(CHIPS) + 5) + "|",
    ]
    for job in JOBS.values():
        for cohort in COHORTS[:1] if given.quick else COHORTS:
            held = draw_cohort(job, cohort)
            rounds = {chips: model_round(job, held, chips, measured[job.name]) for chips in CHIPS}
            found[job.name, cohort] = rounds
            most = rounds[CHIPS[-1]]
            lines.append(
                f"| {job.name} | {cohort:,} | "
                + " | ".join(f"{rounds[c].whole:.3g}" for c in CHIPS)
                + f" | {last if (last := last_useful(rounds)) < CHIPS[-1] else f'beyond {last}'} | {most.mean / most.train:.0%} | {most.reduce / most.whole:.1%} |"
            )
    print("seconds of a round, a model on paper", *lines, sep="\n")
    if not given.quick:
        (RESULTS / "pod_model.md").write_text("\n".join(lines) + "\n")
        plot(found, RESULTS / "pod_model.png")


if __name__ == "__main__":
    main()
