"""The table of compiled programs: a line of CSV for each, and of markdown for each setting."""

import math
from collections.abc import Mapping
from pathlib import Path

from program import read_rows

COLUMNS = (
    "topology,workload,method,drift,grid,program,error,same_as,trace_s,compile_cpu_s,compile_s,"
    "argument_bytes,output_bytes,alias_bytes,temp_bytes,plan_data,plan_models,plan_client_memory,"
    "all_reduce,all_reduce_bytes,all_gather,all_gather_bytes,other_collectives,other_bytes,"
    "collectives_in_loops,whole_cohort,host_transfers,step_ops,step_copies,flops,bytes_accessed,"
    "estimated_cycles,fingerprint"
).split(",")


def count_devices(topology: str) -> int:
    """Returns the devices of a topology by its name: v5e:8x8 has 64, each v4 chip two."""
    kind, _, size = topology.partition(":")
    return math.prod(map(int, size.split("x"))) * (2 if kind == "v4" else 1)


def describe_programs(programs: dict[str, dict[str, str]], updates: int) -> list[str]:
    """Returns the cells of a line of the markdown table, of start, round and evaluation;
    `updates`: bytes of the updates of a device's clients.
    """

    def number(row: dict[str, str], column: str) -> int:
        return int(row[column] or 0)

    rows, train = list(programs.values()), programs["train"]
    cohort = updates * count_devices(train["topology"])
    parts = ("plan_data", "plan_models", "plan_client_memory")
    plan = sum(number(train, part) for part in parts) + max(number(r, "temp_bytes") for r in rows)
    sizes = ("argument_bytes", "output_bytes", "temp_bytes")
    chip = max(sum(number(r, part) for part in sizes) - number(r, "alias_bytes") for r in rows)
    exchanged = [
        f"{number(train, kind)}, {number(train, size) / 1e3:.1f}"
        for kind, size in (
            ("all_reduce", "all_reduce_bytes"),
            ("all_gather", "all_gather_bytes"),
            ("other_collectives", "other_bytes"),
        )
    ]
    return [
        ", ".join(row["compile_cpu_s"] or "-" for row in rows),
        f"{chip / 1e6:.2f}",
        f"{plan / 1e6:.2f}",
        *exchanged,
        f"{(number(train, 'all_gather_bytes') + number(train, 'all_reduce_bytes')) / cohort:.2f}",
        train["collectives_in_loops"] or "0",
        f"{number(train, 'step_ops')}, {number(train, 'step_copies')}",
        str(sum(bool(row["host_transfers"]) for row in rows)),
    ]


HEAD = (
    "topology | workload | method | drift | compiling: CPU s of start, round, evaluation | MB a chip, compiler | MB a chip, plan |"
    " all-reduces, kB | all-gathers, kB | others, kB | gathered and reduced, in cohorts | exchanges in loops | operations in a step, copies |"
    " programs with host transfers"
)


def write_markdown(table: Path, updates: Mapping[str, int]) -> None:
    """Writes the table beside the CSV file, a line for each setting that has all its programs;
    `updates`: workload -> bytes of the updates of a device's clients.
    """
    rows = read_rows(table)
    compiled = {row["fingerprint"]: row for row in rows if row["compile_s"]}
    settings: dict[tuple[str, ...], dict] = {}
    for row in rows:
        key = tuple(row[name] for name in COLUMNS[:5])
        found = compiled.get(row["fingerprint"], row)
        seconds = {"compile_cpu_s": row["compile_cpu_s"]}
        settings.setdefault(key, {})[row["program"] or "error"] = row | found | seconds
    lines = ["| " + HEAD + " |", "|" + " --- |" * len(HEAD.split(" | "))]
    for key, programs in sorted(settings.items()):
        name = key[2] + (" (grid of 4)" if key[4] else "")
        cells = [*key[:2], name, key[3]]
        if "error" in programs:
            lines.append(f"| {' | '.join([*cells, programs['error']['error']])} |")
        elif "test" in programs:
            lines.append(
                f"| {' | '.join([*cells, *describe_programs(programs, updates[key[1]])])} |"
            )
    table.with_suffix(".md").write_text("\n".join(lines) + "\n")
