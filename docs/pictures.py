"""Makes the pictures of the documentation: python docs/pictures.py (2 minutes on 2 cores).

report.png is a photograph: the page of the sweep in docs/tutorials/report.md, in a browser, as by
chromium --headless=new --hide-scrollbars --window-size=1280,1244 --screenshot=report.png sweep.html
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import fedjax_cfl as cfl

FOLDER = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, GREY, PINK = "#0072b2", "#d55e00", "#009e73", "#777777", "#cc79a7"


def draw_problem() -> None:
    """Four groups of clients that turn their images differently, and three ways to train."""
    cfl.use_cpu_cores()
    pool = cfl.datasets.digits()
    parts = cfl.partition.iid(pool, clients=40, seed=0)

    def concept(*arrays):
        return cfl.concept.rotate(*arrays, groups=4)

    data = cfl.federate(pool, parts, concept)
    task = cfl.as_task(cfl.models.MLP(10, hidden=(64,)), pool.x.shape[1:], 10)
    local = cfl.Local(lr=0.05, epochs=5, batch_size=10)
    some = cfl.select.rr_then_random(20)
    methods = {
        "one model for all (FedAvg)": (cfl.algorithms.fedavg(task, local, some), GREY, 76),
        "every client alone (NonFed)": (cfl.algorithms.nonfed(task, local, some), ORANGE, 69),
        "a model per group (FlexCFL)": (cfl.algorithms.flexcfl(task, local, some, m=4), BLUE, 90),
    }
    figure = plt.figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.25])
    held = np.asarray(data.owner)[np.asarray(data.train.order)]
    rows = left.subplots(4, 4)
    left.suptitle("40 clients, four hidden groups: what some of them hold", fontsize=10)
    for group in range(4):
        members = np.flatnonzero(np.asarray(data.concept) == group)[:4]
        for column, client in enumerate(members):
            row = np.asarray(data.train.order)[np.flatnonzero(held == client)[0]]
            sample = row if data.sample is None else int(data.sample[row])
            axes = rows[group, column]
            axes.imshow(np.asarray(data.x[sample]).reshape(8, 8), cmap="gray_r")
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set(color=(BLUE, ORANGE, GREEN, PINK)[group], linewidth=2)
        rows[group, 0].set_ylabel(f"group {group}", fontsize=9)
    axes = right.subplots()
    for name, (algorithm, color, height) in methods.items():
        found = cfl.run(algorithm, task, data, jax.random.key(0), rounds=60, discard="none")
        curve = [100 * row["accuracy"] for row in found.rows]
        axes.plot(range(1, 61), curve, color=color, linewidth=2)
        ari = found.rows[-1]["ari"]
        print(f"{name}: {curve[-1]:.1f} %, adjusted Rand index {ari}")
        label = f"{name}: {curve[-1]:.0f} %"
        axes.text(60, height, label, color=color, ha="right", va="top", fontsize=9)
    axes.set(xlabel="round", ylabel="test accuracy, %", ylim=(0, 100), xlim=(0, 61))
    axes.set_title("accuracy on the clients' own test samples", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(FOLDER / "problem.png", dpi=120)


def draw_round() -> None:
    """One round: what the server and the clients do, and which function of a method says how."""
    figure, axes = plt.subplots(figsize=(10, 4.1), layout="constrained")
    axes.set(xlim=(0, 100), ylim=(0, 41))
    axes.axis("off")
    boxes = (
        (1, 25, "1  migrate", "clients whose\ndata shifted move", GREY),
        (21, 25, "2  select", "who takes part:\nthe cohort", GREEN),
        (41, 25, "3  assign, prepare", "each client's group,\nits work", BLUE),
        (61, 3, "4  solve", "every client trains\nits group's model", ORANGE),
        (41, 3, "5  regroup", "move clients by\nwhat they sent", BLUE),
        (21, 3, "6  aggregate, server", "one step a group,\nany optax optimizer", GREEN),
        (1, 3, "7  finish", "mix group models,\nremember", GREY),
    )
    for x, y, name, said, color in boxes:
        axes.add_patch(plt.Rectangle((x, y), 17, 13, facecolor=color, alpha=0.14, edgecolor="none"))
        axes.add_patch(plt.Rectangle((x, y), 17, 13, fill=False, edgecolor=color, linewidth=1.5))
        axes.text(x + 8.5, y + 10.2, name, ha="center", va="center", fontsize=9.5, weight="bold")
        axes.text(x + 8.5, y + 4.8, said, ha="center", va="center", fontsize=9)
    arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    for start, end in (
        ((18.3, 31.5), (20.7, 31.5)),
        ((38.3, 31.5), (40.7, 31.5)),
        ((60.7, 9.5), (58.3, 9.5)),
        ((40.7, 9.5), (38.3, 9.5)),
        ((20.7, 9.5), (18.3, 9.5)),
        ((9.5, 16.3), (9.5, 24.7)),
    ):
        axes.annotate("", end, start, arrowprops=arrow)
    axes.plot([58.3, 69.5], [31.5, 31.5], color="black", linewidth=1.3)
    axes.annotate("", (69.5, 16.3), (69.5, 31.7), arrowprops=arrow)
    axes.text(70.6, 24.5, "models [m, ...]\ngo down", fontsize=9, va="center")
    axes.text(60, 0.2, "deltas [S, ...] go up", fontsize=9, ha="center", va="bottom")
    axes.text(10.6, 20.5, "next round", fontsize=9, va="center")
    axes.text(
        81,
        9.5,
        "the hot line:\nall clients in one\ncompiled program,\nrefilled lanes,\nover all devices",
        fontsize=9,
        va="center",
    )
    figure.savefig(FOLDER / "round.png", dpi=120)


MOVES = (
    "algorithm=flexcfl algorithm.m=4 dataset.groups=4 partition=iid concept=rotate model=mlp"
    " dataset.clients=60 clients_per_round=20 drift=swap_all drift.p=0.02 rounds=60"
)


def draw_moves() -> None:
    """Who moves where while pairs of clients exchange their data, and which groups were found."""
    with tempfile.TemporaryDirectory() as folder:
        command, run = [sys.executable, "-m", "fedjax_cfl"], f"{folder}/run"
        subprocess.run([*command, *MOVES.split(), f"run_dir={run}"], check=True)
        out = [f"--out={folder}/report.html", f"--pictures={folder}"]
        subprocess.run([*command, "report", run, *out], check=True)
        for name in ("alluvial", "groups"):
            (picture,) = Path(folder).glob(f"*-{name}.png")
            shutil.copy(picture, FOLDER / f"{name}.png")


if __name__ == "__main__":
    draw_round()
    draw_problem()
    draw_moves()
