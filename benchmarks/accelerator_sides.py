"""The sides of `accelerator.py`: each runs in a process of its own and says what it found."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from accelerator_models import MODELS, Cell, as_torch
from workloads import WORKLOADS

import fedjax_cfl as cfl
from fedjax_cfl.data.drift import none as no_drift
from fedjax_cfl.data.prefetch import DeviceFeed
from fedjax_cfl.sharding import replicate
from fedjax_cfl.simulation import memory, program
from fedjax_cfl.simulation.compiler import compiler_options
from fedjax_cfl.simulation.rounds import Plan, Setup, make_functions
from fedjax_cfl.simulation.width import choose_width

BLOCK, QUICK_BLOCK = 10, 1  # rounds in one program


def federate(cell: Cell) -> cfl.FederatedData:
    """Returns random samples of the right shape; each client has one more, for testing."""
    held, model = cell.held(), MODELS[cell.model]
    owner = np.repeat(np.arange(held.size), held + 1).astype(np.int32)
    rng = np.random.RandomState(1)
    x = rng.randint(0, 256, (owner.size, *model.shape)).astype(np.uint8)
    y = rng.randint(0, model.classes, owner.size).astype(np.int32)
    test = np.append(owner[1:] != owner[:-1], True)
    pool = cfl.Pool(x, y, model.classes)
    return cfl.federate(pool, cfl.Partition(np.arange(owner.size), owner, test))


def make_algorithm(cell: Cell, data: Any, mesh: Any, width: int | None, table: np.ndarray) -> tuple:
    """Returns (task, settings of training, algorithm) of a set-up; the width is the machine's
    choice unless given.
    """
    model = MODELS[cell.model]
    task = cfl.as_task(model.module, model.shape, model.classes, l2=0.0)
    local = cfl.Local(cell.lr, cell.epochs, cell.batch, execution=cfl.make_execution(mesh))
    width = width or choose_width(local, task, data, cell.cohort)
    local = local.replace(execution=cfl.make_execution(mesh, width))
    chosen = cfl.select.from_table(table)
    if cell.method == "flexcfl":
        return task, local, cfl.algorithms.flexcfl(task, local, chosen, m=5)
    return task, local, cfl.algorithms.fedavg(task, local, chosen)


def draw_cohorts(cell: Cell, clients: int, rounds: int) -> np.ndarray:
    """Returns the clients [rounds, cohort] of each round, the same for all sides."""
    each = [np.random.RandomState(100 + number) for number in range(rounds)]
    return np.stack([rng.choice(clients, cell.cohort, replace=False) for rng in each])


def prepare(cell: Cell, block: int, width: int | None = None) -> tuple:
    """Returns what trains `block` rounds at a time: (start, step, data, ...), compiled."""
    mesh = cfl.make_mesh(1)
    data = replicate(federate(cell), mesh)
    table = draw_cohorts(cell, data.num_clients, 1000)
    task, local, algorithm = make_algorithm(cell, data, mesh, width, table)
    plan, feed = Plan(1000, block), DeviceFeed(data, 1000, block)
    functions = make_functions(
        lambda values: (algorithm, no_drift()), task, mesh, plan, block, on_host=False
    )
    key, setup = replicate(jax.random.key(0), mesh), Setup(algorithm, task, data, no_drift(), mesh)
    programs, shapes = {}, None
    for name, traced in program.trace_programs(program.Source(functions, setup, ({}, key), feed)):
        if name == "test":
            break
        lowered = traced.lower()
        shapes = shapes or lowered.out_info
        programs[name] = lowered.compile(compiler_options(mesh, task if name == "train" else None))
    assert shapes is not None
    planned = memory.plan_memory(shapes[0], data, programs.values())
    return programs, key, data, table, task, local, planned


def run_ours(cell: Cell, given: argparse.Namespace) -> dict:
    """Trains with this package."""
    cfl.use_cpu_cores(1) if given.quick else cfl.use_cpu_cores()
    jax.config.update("jax_default_matmul_precision", given.precision)
    block, began = QUICK_BLOCK if given.quick else BLOCK, time.perf_counter()
    programs, key, data, table, task, local, planned = prepare(cell, block)
    compiled = time.perf_counter() - began
    carry = programs["begin"]({}, key, data)
    start = jax.tree.map(np.asarray, carry[0].groups)

    def step(carry, done):
        *carry, _ = jax.block_until_ready(programs["train"]({}, key, data, *carry, done, block))
        return tuple(carry)

    carry = step(carry, 0)
    cold, first = time.time() - given.began, jax.tree.map(np.asarray, carry[0].groups)
    seconds, done = [], block
    while len(seconds) < 3 or (sum(seconds) < given.seconds and not given.quick):
        began = time.perf_counter()
        carry = step(carry, done)
        seconds.append(time.perf_counter() - began)
        done += block
    samples = np.asarray(data.train.size)[table[block:done]].sum() * cell.epochs
    flops = samples * gradient_flops(task, MODELS[cell.model].shape) / sum(seconds)
    ceiling = measure_product(given.precision, 1024 if given.quick else 8192)
    stats = jax.devices()[0].memory_stats() or {}
    return describe_rounds(cell, table.shape[1], seconds, block) | {
        "device": "cpu" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind,
        "driver": ask_nvidia("driver_version"),
        "versions": f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, {sys.version.split()[0]}",
        "width": local.execution.width,
        "gflops": round(flops / 1e9, 2),
        "ceiling_gflops": round(ceiling / 1e9, 1),
        "roofline": f"{flops / ceiling:.1%}",
        "cold_start_s": round(cold, 1),
        "compile_s": round(compiled, 1),
        "memory_planned": sum(planned.values()),
        "memory_peak": stats.get("peak_bytes_in_use", ""),
        "nvidia_smi_mib": ask_nvidia("memory.used"),
        "moved": f"{distance(start, first):.4g} in {block} rounds",
    }


def describe_rounds(cell: Cell, cohort: int, seconds: list[float], block: int) -> dict:
    """Returns what the times of blocks of rounds say."""
    each = [one / block for one in seconds]
    median = statistics.median(each)
    return {
        "cohort": cohort,
        "client_updates_per_s": round(cohort / median, 1),
        "seconds_per_round": float(f"{median:.4g}"),
        "spread": f"{min(each):.4g}..{max(each):.4g}",
        "rounds_timed": block * len(seconds),
        "published_rounds_s": round(median * cell.rounds, 1),
    }


def distance(before: Any, after: Any) -> float:
    """Returns the L2 distance of two models."""
    parts = [np.ravel(b - a) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
    return float(np.linalg.norm(np.concatenate(parts)))


def gradient_flops(task: Any, shape: tuple[int, ...]) -> int:
    """Returns the operations of the matrix products and convolutions of one sample's gradient."""
    model = jax.eval_shape(task.init, jax.random.key(0))
    x, y = jnp.zeros((1, *shape), jnp.uint8), jnp.zeros(1, jnp.int32)
    traced = jax.make_jaxpr(
        jax.grad(lambda params: task.loss(params, x, y, jax.random.key(0)).sum())
    )(model)
    return count_products(traced.jaxpr)


def count_products(jaxpr: Any) -> int:
    """Returns the operations of the products of a traced function, of loops' bodies once for
    each pass.
    """
    total = 0
    for each in jaxpr.eqns:
        inner = list(find_jaxprs(each.params))
        passes = each.params.get("length", 1) if each.primitive.name == "scan" else 1
        total += passes * sum(map(count_products, inner))
        if each.primitive.name == "dot_general":
            (contracted, _), _ = each.params["dimension_numbers"]
            depth = np.prod([each.invars[0].aval.shape[axis] for axis in contracted], dtype=int)
            total += 2 * int(depth) * each.outvars[0].aval.size
        elif each.primitive.name == "conv_general_dilated":
            kernel, layout = each.invars[1].aval, each.params["dimension_numbers"]
            total += 2 * each.outvars[0].aval.size * kernel.size // kernel.shape[layout.rhs_spec[0]]
    return total


def find_jaxprs(params: dict[str, Any]) -> Any:
    """Yields the functions within an operation."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner


def measure_product(precision: str, side: int) -> float:
    """Returns the operations per second of the best of several products of large squares."""
    a = jnp.ones((side, side), jnp.float32)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    jax.block_until_ready(product(a, a))
    best = np.inf
    for _ in range(10):
        began = time.perf_counter()
        jax.block_until_ready(product(a, a))
        best = min(best, time.perf_counter() - began)
    return 2 * side**3 / best


def ask_nvidia(what: str) -> str:
    """Returns what nvidia-smi says of the first GPU, nothing without one."""
    try:
        command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.split("\n")[0].strip() if not done.returncode else ""


def run_torch(cell: Cell, given: argparse.Namespace) -> dict:
    """Trains with a plain PyTorch loop over clients and batches, on a GPU if there is one."""
    import torch
    from torch.nn.functional import cross_entropy

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as fast on matrices so small, and steady
    torch.backends.cuda.matmul.allow_tf32 = given.precision == "tensorfloat32"
    torch.backends.cudnn.allow_tf32 = given.precision == "tensorfloat32"
    data = jax.device_get(federate(cell))
    x = torch.from_numpy(np.moveaxis(data.x, -1, 1).copy() if data.x.ndim == 4 else data.x.copy())
    x, y = x.to(device).float().div_(255), torch.from_numpy(data.y).long().to(device)
    order, begins, sizes = data.train.order, data.train.start, data.train.size
    rows = [
        torch.from_numpy(order[b : b + n].astype(np.int64)).to(device)
        for b, n in zip(begins, sizes, strict=True)
    ]
    table = draw_cohorts(cell, data.num_clients, 1000)
    module = as_torch(cell.model).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=cell.lr)

    def train(client: int) -> None:
        for _ in range(cell.epochs):
            mine = rows[client][torch.randperm(len(rows[client]), device=device)]
            for batch in mine.split(cell.batch):
                optimizer.zero_grad()
                cross_entropy(module(x[batch]), y[batch]).backward()
                optimizer.step()

    def step(number: int) -> None:
        shared = [p.detach().clone() for p in module.parameters()]
        total, weight = [torch.zeros_like(p) for p in shared], float(sizes[table[number]].sum())
        for client in table[number]:
            with torch.no_grad():
                torch._foreach_copy_(list(module.parameters()), shared)
            train(client)
            with torch.no_grad():
                share = float(sizes[client]) / weight
                torch._foreach_add_(total, list(module.parameters()), alpha=share)
        with torch.no_grad():
            torch._foreach_copy_(list(module.parameters()), total)
        if device.type == "cuda":
            torch.cuda.synchronize()

    start = [p.detach().cpu().numpy().copy() for p in module.parameters()]
    step(0)
    cold = time.time() - given.began
    moved = distance(start, [p.detach().cpu().numpy() for p in module.parameters()])
    seconds = []
    while len(seconds) < 3 or (sum(seconds) < given.seconds and not given.quick):
        began = time.perf_counter()
        step(1 + len(seconds))
        seconds.append(time.perf_counter() - began)
    note = "FedAvg: a loop over clients has no groups" if cell.method != "fedavg" else ""
    return describe_rounds(cell, table.shape[1], seconds, 1) | {
        "driver": ask_nvidia("driver_version"),
        "versions": f"torch {torch.__version__}, {sys.version.split()[0]}",
        "cold_start_s": round(cold, 1),
        "memory_peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else "",
        "nvidia_smi_mib": ask_nvidia("memory.used"),
        "moved": f"{moved:.4g} in 1 rounds",
        "note": note,
    }


def peer_side(module: str) -> Callable[[Cell, argparse.Namespace], dict]:
    """Returns the side of a peer of `versus_peers.py`, on its W1, W2 or W3."""

    def run(cell: Cell, given: argparse.Namespace) -> dict:
        import importlib

        work = WORKLOADS[cell.name[:2]]
        done = importlib.import_module(f"peers.{module}").train(work, 3 if given.quick else 9)
        return describe_rounds(cell, cell.cohort, done.seconds[2:], 1) | {
            "note": "workload of versus_peers.py, on the device that the peer chooses"
        }

    return run


SIDES = {
    "ours": run_ours,
    "torch": run_torch,
    "pfl": peer_side("pfl_simulated"),
    "fedjax": peer_side("fedjax_jit"),
}
CHECKED = Cell("check", "", "mlp", 40, "power law", 8, 3, 10, 2)
IMAGES = Cell("check", "", "cifar_cnn", 40, "50 each", 8, 3, 10, 1)


def train_check(cell: Cell, width: int | None = None) -> tuple[Any, Any]:
    """Returns the models before and after three rounds."""
    programs, key, data, *_ = prepare(cell, 3, width)
    carry = programs["begin"]({}, key, data)
    start = jax.tree.map(np.asarray, carry[0].groups)
    carry = programs["train"]({}, key, data, *carry, 0, 3)
    return start, jax.tree.map(np.asarray, carry[0].groups)


def largest_difference(start: Any, one: Any, other: Any) -> float:
    """Returns the largest difference of two models over the largest movement."""
    leaves = [jax.tree.leaves(tree) for tree in (start, one, other)]
    apart = max(np.abs(a - b).max() for _, a, b in zip(*leaves, strict=True))
    return float(apart / max(np.abs(a - s).max() for s, a, _ in zip(*leaves, strict=True)))


def check(name: str) -> str:
    """Returns one line: what a check of the device found."""
    jax.config.update("jax_default_matmul_precision", "float32")
    if name.startswith("hlo"):
        return describe_program(int(name.rpartition("-")[2]))
    start, found = train_check(CHECKED)
    if name.startswith("twice"):
        again = train_check(CHECKED)[1]
        same = all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(again)))
        return f"three rounds of W1's model, run twice: {'the same bits' if same else 'other bits'}"
    with jax.default_device(jax.devices("cpu")[0]):
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("clients",))
        cfl.make_mesh = lambda devices=None: mesh
        other = train_check(CHECKED, width=4)[1]
    apart = largest_difference(start, found, other)
    word = "agrees" if apart < 1e-3 else "DISAGREES"
    return f"three rounds of W1's model {word} with the CPU at width 4: {apart:.1e} of the movement (allowed 1e-3)"


def describe_program(width: int) -> str:
    """Returns what the compiled rounds of an MLP and of a CNN exchange with the host, and the
    operations and transposes of a step.
    """
    parts = []
    for cell in (CHECKED, IMAGES):
        text = prepare(cell, 3, width)[0]["train"].as_text()
        loops = hlo.find_step_loops(text)
        most, moves = (
            max((ops for ops, _ in loops), default=0),
            max((m for _, m in loops), default=0),
        )
        host = hlo.find_host_transfers(text)
        parts.append(
            f"{cell.model}: {len(host)} transfers to the host, at most {most} operations in a step,"
            f" {moves} of them copies or transposes"
        )
    return f"width {width}: " + "; ".join(parts)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "")
    print(check(sys.argv[1]))
