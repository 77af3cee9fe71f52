"""Records short runs of every method, drift and kind of run, and says where two records differ.

For a change that must not change numbers: record before it, record after it, compare. Every file
of a run counts, to the last bit, but for times, memory and versions. On the same machine and with
the same versions of JAX.

    python tests/golden.py record before [NAME ...]    # all: 113 runs, 15 minutes on 2 cores
    python tests/golden.py record after
    python tests/golden.py compare before after        # a line for each run that differs
"""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq

from fedjax_cfl.runs import checkpoint
from fedjax_cfl.runs.saved_models import load_arrays

CONF = Path(__file__).resolve().parent.parent / "conf"
SMALL = ["dataset.clients=20", "model=mclr", "local.epochs=1", "clients_per_round=6", "rounds=4"]
# differ between two runs that are the same
VARYING = {"wall_s", "compile_s", "train_s", "eval_s", "client_updates_per_s", "local_steps_per_s"}
VARYING |= {"peak_memory_bytes", "planned_memory_bytes", "overrides", "programs", "versions"}
VARYING |= {"programs_from_cache", "run_id", "data_id"}
IFCA = ["algorithm=ifca", "algorithm.m=2"]
SWAP = ["drift=swap_all", "drift.p=0.4"]


def list_runs() -> dict[str, list[list[str]]]:
    """Returns by name the command lines of each run, one after another."""

    def names(group: str) -> list[str]:
        return sorted(path.stem for path in (CONF / group).glob("*.yaml"))

    once = {f"algorithm-{name}": [f"algorithm={name}"] for name in names("algorithm")}
    special = "by_time", "by_stage", "scheduled"  # need data with times, or stages
    drifts = [name for name in names("drift") if name not in special]
    once |= {f"drift-{name}": [*IFCA, f"drift={name}"] for name in drifts}
    staged = [*IFCA, "drift=scheduled", "drift.rounds=[2]", "concept=exchange_pairs"]
    once |= {"drift-scheduled": staged, "drift-by_stage": [*IFCA, "dataset=sine", "drift.period=2"]}
    once |= {f"selection-{name}": [*IFCA, f"selection={name}"] for name in names("selection")}
    once |= {
        "faults": [*IFCA, *(f"faults.{kind}=0.2" for kind in ("dropout", "straggler", "nan"))],
        "attack": ["algorithm=qfedavg", "faults.byzantine=0.3", "faults.attack=noise"],
        "clock": ["algorithm=fielding", "clock=fedscale", *SWAP],
        "grid": [*IFCA, "vectorize=[seed]", "seed=0,1"],
        "traced": [*IFCA, "vectorize=[local.lr]", "local.lr=0.05,0.1"],
        "host": [*IFCA, "resident=host"],
        "lanes": ["algorithm=flexcfl", "local.executor=lanes", "local.width=4"],
        "extras": [*IFCA, "evaluate.finetune=1", "evaluate.new_clients=0.2", "eval_distance=true"],
        "preset-paper": ["algorithm=flexcfl", "preset=paper"],
        "preset-fedscale": ["algorithm=fielding", "preset=fedscale"],
        "dual": ["algorithm=fedprox", "model=mlp", "local.first_layer=dual"],
    }
    layers = [name for name in names("personal") if name != "none"]
    with_layers = {name: f"personal={name}" for name in layers}
    mlp = ["model=mlp", "local.epochs=2", "local.momentum=0.5"]  # some layers split the model
    for name, layer in with_layers.items():
        model = ["model=resnet18_bn", "rounds=1"] if name == "fedbn" else mlp
        once[f"personal-{name}"] = [*IFCA, layer, *model]
    once |= {
        "personal-epochs": [*IFCA, "personal=ditto", "personal.epochs=2"],
        "personal-adaptive": ["algorithm=fedavg", "personal=apfl", "personal.adaptive=true"],
        "personal-second": [
            "algorithm=fedavg",
            "personal=per_fedavg",
            "personal.second_order=true",
        ],
        "personal-judge": [*IFCA, "model=mlp", "personal=fedper", "personal.judge=own"],
        "personal-lanes": [*IFCA, "personal=ditto", "local.executor=lanes", "local.width=4"],
        "personal-host": ["algorithm=ifca", "algorithm.m=2", "personal=apfl", "resident=host"],
        "personal-faults": [*IFCA, "personal=scaffold", "faults.dropout=0.3", *SWAP],
        "personal-cfl": ["algorithm=cfl", "personal=scaffold", "local.momentum=0.5"],
        "personal-stack": [*IFCA, "personal=[scaffold,ditto]", *SWAP],
        "personal-new": [*IFCA, "personal=ditto", "evaluate.new_clients=0.2"],
    }
    once["algorithm-known_groups"] += ["concept=rotate", "partition=iid", "dataset.groups=4"]
    runs = {name: [[*SMALL, *settings]] for name, settings in once.items()}
    first = [*SMALL, "algorithm=flexcfl", *SWAP]
    runs["resume"] = [[*first, "rounds=2"], first]
    return runs


def run_command(folder: Path, commands: list[list[str]]) -> str:
    """Runs command lines one after another into one folder; returns what went wrong."""
    cache = folder.parent / ".cache"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
    environment |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    for command in commands:
        line = [sys.executable, "-m", "fedjax_cfl", *command, f"run_dir={folder}", "offline=true"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
        if done.returncode:
            return f"{folder.name}: exit {done.returncode}: {done.stderr.strip()[-300:]}"
    return ""


def run_two_processes(folder: Path) -> str:
    """Runs two processes as one run; returns what went wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    joined = [*SMALL, *IFCA, *SWAP, f"coordinator=127.0.0.1:{port}", "processes=2"]
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda k: run_command(folder, [[*joined, f"process={k}"]]), range(2))
        return " ".join(ends).strip()


def record(folder: Path, only: list[str]) -> None:
    """Runs everything into a folder, two at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = {name: lines for name, lines in list_runs().items() if not only or name in only}
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda name: run_command(folder / name, runs[name]), runs)
        for line in filter(None, ends):
            print(line, flush=True)
    if not only or "hosts" in only:
        print(run_two_processes(folder / "hosts"))


def read_facts(folder: Path) -> dict[str, object]:
    """Returns by name all that the files of a run say, without what varies."""
    facts: dict[str, object] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.name in ("metrics.jsonl", "summary.json"):
            text = path.read_text()
            lines = text.splitlines() if path.suffix == ".jsonl" else [text]
            for number, line in enumerate(lines):
                found = json.loads(line)
                facts |= {f"{name}:{number}:{k}": v for k, v in found.items() if k not in VARYING}
        elif path.suffix == ".parquet":
            facts[name] = pq.read_table(path).to_pydict()
        elif path.suffix == checkpoint.HEADER:
            arrays = checkpoint.load_arrays(path.parent, int(path.stem))
            title = f"checkpoints of round {path.stem}"
            facts |= {title + leaf: array.tobytes() for leaf, array in arrays.items()}
        elif path.suffix == ".npz":
            arrays, about = load_arrays(path)
            title = f"{path.stem} of round {about['round']}"
            facts |= {title + leaf: array.tobytes() for leaf, array in arrays.items()}
    return facts


def compare(first: Path, second: Path) -> int:
    """Prints the runs whose files differ; returns the exit status."""
    differing = 0
    names = sorted({path.name for folder in (first, second) for path in folder.glob("[a-z]*")})
    for name in names:
        before, after = (read_facts(folder / name) for folder in (first, second))
        wrong = sorted(
            key
            for key in before.keys() | after.keys()
            if repr(before.get(key)) != repr(after.get(key))
        )
        if wrong or not before:
            differing += 1
            print(f"{name}: {len(wrong)} of {len(before)} differ: {', '.join(wrong[:4])}")
    print(f"{len(names) - differing} of {len(names)} runs are equal")
    return int(differing > 0)


def main(arguments: list[str]) -> int:
    """Records or compares, as the module's text says."""
    if len(arguments) > 1 and arguments[0] == "record":
        record(Path(arguments[1]).resolve(), arguments[2:])
        return 0
    if len(arguments) == 3 and arguments[0] == "compare":
        return compare(Path(arguments[1]), Path(arguments[2]))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
