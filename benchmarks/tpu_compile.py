"""Do the programs of a run compile for TPU pods, and do chips share the work as they should?

The start, a round and the evaluation of methods of conf/algorithm are compiled by the TPU's
own compiler, on a CPU, for chips that nobody has: from shapes alone, as a run on those chips
would compile them (width, convolutions and options are those of a TPU). Nothing runs.
h100:N is a node of N such GPUs, compiled in the same way, but for XLA's tuning of kernels,
which needs the GPU.

    pip install "fedjax-cfl[tpu]"                                  the compiler (libtpu)
    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12     that of GPUs, of jax's own version
    python benchmarks/tpu_compile.py                               every method for v5e:2x2
    python benchmarks/tpu_compile.py --topologies v5e:8x8 v5e:16x16 v4:4x4x4 --methods fedavg ifca
    python benchmarks/tpu_compile.py --topologies h100:1 h100:8 --methods fedavg
    python benchmarks/tpu_compile.py --drift none swap_all --workload mnist_mlp
    python benchmarks/tpu_compile.py --grid --methods flexcfl      two seeds by two settings as one program
    python benchmarks/tpu_compile.py --cost ...                    CPU seconds, loops, kernels of a step: compile_cost.py
    python benchmarks/tpu_compile.py --quick                       one method, no file

Every program is a line of results/tpu_compile/programs.csv as soon as it is compiled; what
stands there is not compiled again, and --minutes ends early. What the columns mean, and what
was found, stands in results/tpu_compile/README.md.

Measured 2026-11-25 on 2 CPU cores (AMD EPYC) with other work, Python 3.11, jax 0.10.2,
libtpu 0.0.42.1: see the tables there.
"""

import hashlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import compile_cost
import device_targets  # before JAX
import hlo
import jax
import jax.numpy as jnp
import numpy as np
from compiled_table import COLUMNS, write_markdown
from program import append_row, make_parser, read_rows

from fedjax_cfl.cli import build
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.data.drift import bound_client_samples
from fedjax_cfl.data.prefetch import DeviceFeed
from fedjax_cfl.errors import InputError
from fedjax_cfl.sharding import replicated_shapes
from fedjax_cfl.simulation import memory, program, vectorize
from fedjax_cfl.simulation.compiler import compiler_options
from fedjax_cfl.simulation.rounds import Plan, Setup, make_functions

RESULTS = Path(__file__).resolve().parent / "results" / "tpu_compile"
METHODS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))


class Workload(NamedTuple):
    """What is compiled for: nothing of it but shapes reaches a program."""

    shape: tuple[int, ...]  # of a sample, uint8
    classes: int
    per_device: int  # clients of a round on each device
    clients: int  # for each of a round
    samples: tuple[int, int]  # of training, and of testing, of each client
    parameters: int
    settings: tuple[str, ...]


CNN = "model.module._target_=accelerator_models.SmallCNN"
# Sizes that are found again in a program's arrays: no two products of them are equal.
WORKLOADS = {
    "small": Workload((8, 8), 10, 4, 3, (23, 6), 2_785, ("model=mlp", "model.module.hidden=[37]")),
    "mnist_mlp": Workload((28, 28), 10, 16, 10, (60, 10), 101_770, ("model=mlp",)),
    "femnist_cnn": Workload((28, 28, 1), 62, 16, 10, (200, 25), 6_603_710, ("model=leaf_cnn",)),
    # (c) and (d) of accelerator.py
    "small_cnn": Workload(
        (28, 28, 1),
        62,
        16,
        3,
        (150, 25),
        1_206_590,
        ("model=leaf_cnn", CNN, "~model.module.hidden", "local.batch_size=20"),
    ),
    "resnet18": Workload(
        (32, 32, 3), 100, 10, 5, (100, 10), 11_220_132, ("model=resnet18", "local.batch_size=20")
    ),
}
UPDATES = {name: 4 * work.parameters * work.per_device for name, work in WORKLOADS.items()}
SETTINGS = ("dataset=npz", "partition=by_user", "rounds=10", "dataset.alpha=3", "local.epochs=2")


class Setting(NamedTuple):
    """One row of the table, but for its program."""

    topology: str
    workload: str
    method: str
    drift: str
    grid: bool

    @property
    def given(self) -> list[str]:
        """Its columns."""
        return [self.topology, self.workload, self.method, self.drift, "yes" if self.grid else ""]


def write_samples(work: Workload, devices: int, path: Path) -> int:
    """Writes the samples of a workload, all of them 0; returns the clients of a round."""
    cohort = devices * work.per_device
    clients, (train, test) = cohort * work.clients, work.samples
    client = np.repeat(np.arange(clients), train + test)
    label = (np.arange(client.size) % (train + test) + client) % work.classes
    split = np.tile(np.arange(train + test) >= train, clients).astype(np.int32)
    np.savez(
        path, x=np.zeros((client.size, *work.shape), np.uint8), y=label, client=client, split=split
    )
    return cohort


def describe(
    setting: Setting, folder: Path, devices: int, per_device: int | None = None
) -> list[str]:
    """Returns the overrides of a setting, whose samples it writes into `folder` once; with
    `per_device` clients of a round on each device, if not the workload's.
    """
    work = WORKLOADS[setting.workload]
    work = work._replace(per_device=per_device or work.per_device)
    path = folder / f"{setting.workload}-{devices}.npz"
    cohort = devices * work.per_device if path.exists() else write_samples(work, devices, path)
    return [
        *SETTINGS,
        *work.settings,
        f"dataset.source.path={path}",
        f"clients_per_round={cohort}",
        f"algorithm={setting.method}",
        f"drift={setting.drift}",
        *(["algorithm.m=3"] if setting.method.startswith("fielding") else []),
    ]


class Lowered(NamedTuple):
    """The programs of a run, traced one by one, and what they are given."""

    programs: Iterator[tuple[str, Any]]
    data: Any  # shapes
    drift: Any
    algorithm: Any
    task: Any
    cohort: int  # slots on all devices
    members: int  # runs of the program
    devices: int


def lower(setting: Setting, overrides: list[str], mesh: jax.sharding.Mesh) -> Lowered:
    """Traces the programs of a setting for a mesh that may be a topology's."""
    config = build.resolve_settings(overrides)
    algorithm, task, real, drift, *_ = build.build(config)[0]
    real = bound_client_samples(real, drift)
    data, local = replicated_shapes(real, mesh), build.build_local(config, task, real, mesh)
    setup = Setup(algorithm, task, real, drift, mesh)
    plan, feed = Plan(config["rounds"]), DeviceFeed(data, config["rounds"], 1)
    key = replicated_shapes(jax.eval_shape(lambda: jax.random.key(0)), mesh)
    if setting.grid:
        keys = replicated_shapes(jax.eval_shape(lambda: jax.random.split(jax.random.key(0))), mesh)
        values = {"local.lr": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=key.sharding)}

        def member(values):
            own = build.build_algorithm(config, task, real, local, values=values, runs_as_one=True)
            return own, drift

        functions = vectorize.member_functions(member, task, mesh, plan)
        lift, given = vectorize.make_lift(2, False), (values, keys)
        functions = [lift(f, *axes) for f, axes in zip(functions, vectorize.LIFTED, strict=True)]
    else:
        values, make, *_ = build.find_inputs(config, setup, local)
        functions = make_functions(make, task, mesh, plan, feed.length, feed.on_host)
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=key.sharding)
        given = dict.fromkeys(values, number), key
    slots = -(-config["clients_per_round"] // mesh.size) * mesh.size
    found = program.trace_programs(program.Source(functions, setup, given, feed))
    programs = ((name, traced.lower()) for name, traced in found)
    members = 4 if setting.grid else 1
    return Lowered(programs, data, drift, algorithm, task, slots, members, mesh.size)


def inspect(compiled: Any, traced: Lowered, state: Any) -> dict[str, Any]:
    """Returns what a compiled program takes and exchanges; memory and arrays of one device."""
    text, analysis = compiled.as_text(), compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}  # a GPU that is not there has none
    found = hlo.find_collectives(text)
    counts = hlo.count_collectives(found)
    rest = [n for kind, n in counts.items() if kind not in ("all-reduce", "all-gather")]
    model = jax.eval_shape(traced.task.init, jax.random.key(0))
    leaves = [leaf.size for leaf in jax.tree.leaves(model)]
    parts = {max(leaves), sum(leaves)}  # the widest layer, and whole models
    whole = {n * traced.cohort * k for n in parts for k in {1, traced.members}}
    whole = whole if traced.devices > 1 else set()
    plan = memory.plan_memory(state, traced.data, [])
    return {
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "alias_bytes": analysis.alias_size_in_bytes,
        "temp_bytes": analysis.temp_size_in_bytes,
        **{f"plan_{name}": plan[name] for name in ("data", "models", "client_memory")},
        "all_reduce": counts.get("all-reduce", (0, 0))[0],
        "all_reduce_bytes": counts.get("all-reduce", (0, 0))[1],
        "all_gather": counts.get("all-gather", (0, 0))[0],
        "all_gather_bytes": counts.get("all-gather", (0, 0))[1],
        "other_collectives": sum(n for n, _ in rest),
        "other_bytes": sum(size for _, size in rest),
        "collectives_in_loops": sum(each.in_loop for each in found),
        "whole_cohort": " ".join(f"{n}x{s}" for s, n in hlo.count_arrays(text, whole).items()),
        "host_transfers": " ".join(hlo.find_host_transfers(text)),
        "step_ops": max((ops for ops, _ in hlo.find_step_loops(text)), default=0),
        "step_copies": max((moves for _, moves in hlo.find_step_loops(text)), default=0),
        "flops": int(cost.get("flops", 0)),
        "bytes_accessed": int(cost.get("bytes accessed", 0)),
        "estimated_cycles": hlo.sum_cycles(text)[0],
    }


def compile_setting(
    setting: Setting, folder: Path, known: dict[str, str], dump: Path | None = None
) -> Iterator[dict]:
    """Yields a row for each program of a setting; one whose text is that of a program in
    `known`, fingerprint -> where, is not compiled again.
    """
    mesh = device_targets.make_topology_mesh(setting.topology)
    base = dict(zip(COLUMNS, setting.given, strict=False))
    chip = device_targets.CHIP_BYTES[setting.topology.partition(":")[0]]
    with device_targets.act_as_device(mesh, chip):
        options = compiler_options(mesh)
        assert "xla_cpu_use_fusion_emitters" not in options, "options of CPU compilers"
        state, began = None, time.perf_counter()
        traced = lower(setting, describe(setting, folder, mesh.size), mesh)
        for name, program in traced.programs:
            if name == "begin":
                state = program.out_info[0]
            row = base | {"program": name, "trace_s": round(time.perf_counter() - began, 1)}
            text = f"{setting.topology} {program.as_text()}"
            row["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()[:16]
            where = "/".join([*setting.given[2:4], name])
            if row["fingerprint"] in known:
                row["same_as"] = known[row["fingerprint"]]
            else:
                cpu, began = time.process_time(), time.perf_counter()
                compiled = program.compile(options)
                row["compile_s"] = round(time.perf_counter() - began, 1)
                row["compile_cpu_s"] = round(time.process_time() - cpu, 1)
                row |= inspect(compiled, traced, state)
                known[row["fingerprint"]] = where
                if dump:
                    stem = "-".join([*setting.given, name]).replace(":", "-")
                    (dump / f"{stem}.txt").write_text(compiled.as_text())
            yield row
            began = time.perf_counter()


def compile_all(settings: list[Setting], path: Path, minutes: float, dump: Path | None) -> None:
    """Compiles what the table does not have yet, and adds it."""
    ends = time.monotonic() + 60 * minutes
    rows = read_rows(path)
    known = {
        row["fingerprint"]: f"{row['method']}/{row['drift']}/{row['program']}"
        for row in rows
        if row["compile_s"]
    }
    done = {tuple(row[name] for name in COLUMNS[:5]) for row in rows if row["program"] == "test"}
    done |= {tuple(row[name] for name in COLUMNS[:5]) for row in rows if row["error"]}
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            if tuple(setting.given) in done:
                continue
            if time.monotonic() > ends:
                return print("more is left: run this again")
            have = {
                row["program"] for row in rows if [row[c] for c in COLUMNS[:5]] == setting.given
            }
            try:
                for row in compile_setting(setting, Path(folder), known, dump):
                    if row["program"] not in have:
                        append_row(path, COLUMNS, row)
                    print(
                        *setting, row["program"], row.get("same_as") or row["compile_s"], flush=True
                    )
            except Exception as error:  # what does not compile is a row of the table
                text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
                if isinstance(error, InputError):
                    text = str(error)
                row = dict(zip(COLUMNS, setting.given, strict=False)) | {"error": text}
                append_row(path, COLUMNS, row)
                print(*setting, "FAILED", text, flush=True)
            write_markdown(path, UPDATES)


def main() -> None:
    """Reads the arguments, compiles and writes the tables."""
    parser = make_parser(__doc__, "FedAvg for v5e:2x2, no file")
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2"])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--drift", nargs="+", default=["none"], help="options of conf/drift")
    parser.add_argument("--workload", default="small", choices=tuple(WORKLOADS))
    parser.add_argument("--grid", action="store_true", help="two seeds by two step sizes")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing after these")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cost", action="store_true", help="of compiling, see compile_cost.py")
    parser.add_argument("--cohort", type=int, help="clients of a round on each device, with --cost")
    parser.add_argument("--label", default="", help="of the lines, with --cost")
    parser.add_argument("--override", nargs="*", default=[], metavar="K=V", help="with --cost")
    parser.add_argument("--dump", type=Path, help="a folder for the compiled programs' text")
    given = parser.parse_args()
    if any(name.startswith("h100") for name in given.topologies):
        device_targets.compile_without_gpu()
    try:
        device_targets.make_topology_mesh(given.topologies[0])
    except Exception as error:
        sys.exit(f"no compiler for {given.topologies[0]}, see --help: {str(error).splitlines()[0]}")
    if given.quick:
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting("v5e:2x2", "small", "fedavg", "none", False)
            for row in compile_setting(setting, Path(folder), {}):
                print({name: value for name, value in row.items() if value not in ("", 0)})
        return
    settings = [
        Setting(topology, given.workload, method, drift, given.grid)
        for topology in given.topologies
        for drift in given.drift
        for method in given.methods
    ]
    if given.cost:
        with tempfile.TemporaryDirectory() as folder:
            for setting in settings:
                compile_cost.measure_setting(setting, lower, describe, Path(folder), given)
        return
    compile_all(settings, given.results / "programs.csv", given.minutes, given.dump)
    if (given.results / "programs.csv").exists():
        write_markdown(given.results / "programs.csv", UPDATES)


if __name__ == "__main__":
    main()
