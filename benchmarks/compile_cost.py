"""What compiling a run's programs costs, and what a step of training is made of: `--cost` of
`tpu_compile.py`.

    python benchmarks/tpu_compile.py --cost --topologies h100:1 --workload mnist_mlp --drift swap_all \
        --methods flexcfl --cohort 1000 --label after
    PYTHONPATH=/an/older/checkout python benchmarks/tpu_compile.py --cost ... --label before

CPU seconds are those of this process and its children; kernels of a GPU are fusions, copies and calls
of libraries. A step's operations are those of the loop that multiplies matrices: its counter is one of
them. The last table stands in results/tpu_compile/cost.md.
"""

import os
import time
from pathlib import Path
from typing import Any

import device_targets
import hlo
from accelerator import note_row

from fedjax_cfl.simulation.compiler import compiler_options

COLUMNS = (
    "label,topology,workload,method,drift,clients_per_round,program,cpu_s,seconds,loops,steps,"
    "kernels,products,hlo_lines,temp_bytes,host_transfers"
).split(",")
COPIES = ("copy", "copy-start", "dynamic-update-slice", "dynamic-slice", "sort")


def count_parts(text: str) -> dict[str, Any]:
    """Returns what a compiled program is made of."""
    found = hlo.parse_instructions(text)
    inside = {
        name.strip().lstrip("%")
        for each in found
        if each.op == "fusion"
        for attribute, names in hlo.CALLED.findall(each.rest)
        for name in names.split(",")
    }
    own = [each for each in found if each.computation not in inside]
    kernels = [each for each in own if each.op in ("fusion", "custom-call", *COPIES)]
    tuned = [each for each in own if hlo.is_product(each) or "triton_gemm" in each.rest]
    return {
        "loops": sum(each.op == "while" for each in own),
        "steps": " ".join(str(ops) for ops, _ in sorted(hlo.find_step_loops(text))),
        "kernels": len(kernels),
        "products": len(tuned),
        "hlo_lines": len(text.splitlines()),
        "host_transfers": len(hlo.find_host_transfers(text)),
    }


def measure(traced: Any, mesh: Any, row: dict[str, Any], path: Path) -> None:
    """Compiles start and round of a setting, and adds a line for each to the table."""
    for name, program in traced.programs:
        if name == "test":
            return
        options = compiler_options(mesh, traced.task if name == "train" else None)
        cpu, began = sum(os.times()[:4]), time.perf_counter()
        compiled = program.compile(options)
        line = row | {
            "program": name,
            "cpu_s": round(sum(os.times()[:4]) - cpu, 1),
            "seconds": round(time.perf_counter() - began, 1),
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
            **count_parts(compiled.as_text()),
        }
        note_row(path, COLUMNS, line)


def measure_setting(setting: Any, lower: Any, describe: Any, folder: Path, given: Any) -> None:
    """Compiles a `tpu_compile.Setting` for chips that are not there, by that program's `lower`."""
    mesh = device_targets.make_topology_mesh(setting.topology)
    chip = device_targets.CHIP_BYTES[setting.topology.partition(":")[0]]
    with device_targets.act_as_device(mesh, chip):
        overrides = describe(setting, folder, mesh.size, given.cohort) + given.override
        traced = lower(setting, overrides, mesh)
        row = dict(zip(COLUMNS[1:5], setting.given, strict=False))
        row |= {"label": given.label, "clients_per_round": traced.cohort}
        measure(traced, mesh, row, given.results / "cost.csv")
