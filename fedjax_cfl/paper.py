"""`fedjax-cfl paper TABLE`: runs a published table's cells and sets what came out beside what was printed.

A table is the `paper` node of conf/experiment/TABLE.yaml: rows and columns of overrides, and the published numbers. Every cell is an
ordinary run in its own process and directory, so an interrupted reproduction continues with the cells that have no summary.json.
"""

import argparse
import csv
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from fedjax_cfl import report
from fedjax_cfl.errors import InputError, require


def load(conf: Path, name: str) -> dict:
    """Returns the `paper` node of an experiment. Raises InputError if there is no such table."""
    tables = {}
    for path in sorted((conf / "experiment").glob("*.yaml")):
        node = OmegaConf.load(path).get("paper")
        if node is not None:
            tables[path.stem] = OmegaConf.to_container(node)
    require("paper", name, tables)
    return tables[name]


def cells(table: dict, rows: list[str] | None, columns: list[str] | None, seeds: int):
    """Yields (row, column, seed, overrides) of the cells asked for; a published row without a value for a column has no such cell."""
    for field, asked, known in (("--rows", rows, table["rows"]), ("--columns", columns, table["columns"])):
        for name in asked or []:
            require(field, name, known)
    for seed in range(seeds):
        for row in rows or table["rows"]:
            for column in columns or table["columns"]:
                if column in table["rows"][row]["published"]:
                    yield row, column, seed, [*table["rows"][row]["overrides"], *table["columns"][column]]


def run_cell(name: str, folder: Path, overrides: list[str]) -> dict | None:
    """Runs one cell unless it has finished; returns its summary, or None if it failed (its output is in run.log)."""
    if (done := report.read_summary(folder)) is not None:
        return done
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    command = [sys.executable, "-m", "fedjax_cfl", f"experiment={name}", *overrides, f"run_dir={folder}"]
    with log.open("w") as out:
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
    return report.read_summary(folder)


def collect(table: dict, found: dict) -> list[dict]:
    """Returns one record per row and column: published, mean, sd (n - 1) and number of seeds, in the table's own unit."""
    records = []
    for row, entry in table["rows"].items():
        for column, published in entry["published"].items():
            values = [summary[table["measure"]] * table.get("scale", 1) for summary in found.get((row, column), [])]
            spread = statistics.stdev(values) if len(values) > 1 else None
            mean = statistics.fmean(values) if values else None
            records.append({"row": row, "column": column, "published": published, "mean": mean, "sd": spread, "seeds": len(values)})
    return records


def cell_text(record: dict) -> str:
    """Formats `obtained +- sd (published)`; a cell that was not run shows only the published number."""
    if record["mean"] is None:
        return f"- ({record['published']})"
    spread = "" if record["sd"] is None else f" ± {record['sd']:.1f}"
    return f"{record['mean']:.1f}{spread} ({record['published']})"


def write(table: dict, records: list[dict], out: Path, command: str) -> None:
    """Writes table.csv and table.md: obtained, spread over seeds, published in brackets, and the command and machine behind them."""
    rows = [row for row in table["rows"] if any(r["row"] == row and r["mean"] is not None for r in records)]
    text = {(r["row"], r["column"]): cell_text(r) for r in records}
    lines = [f"# {table['title']}", "", "Obtained mean ± sd over seeds (published). `-`: not run.", ""]
    lines += ["| | " + " | ".join(table["columns"]) + " |", "|---" * (len(table["columns"]) + 1) + "|"]
    lines += ["| " + " | ".join([row, *(text.get((row, column), "") for column in table["columns"])]) + " |" for row in rows]
    seeds = sorted({r["seeds"] for r in records if r["seeds"]})
    lines += ["", f"Command: `{command}`", "", f"Machine: {platform.machine()} {platform.system()}; seeds per cell: {seeds}."]
    with report.replacing(out / "table.md") as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with report.replacing(out / "table.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def show(table: dict, records: list[dict]) -> Table:
    """Builds the table for the terminal: a line per method, a column per row of the paper that was run."""
    ran = [row for row in table["rows"] if any(r["row"] == row and r["mean"] is not None for r in records)]
    shown = Table("", *ran, title=f"{table['title']}; obtained (published)")
    text = {(r["row"], r["column"]): cell_text(r) for r in records}
    for column in table["columns"]:
        shown.add_row(column, *(text.get((row, column), "") for row in ran))
    return shown


def main(argv: list[str], conf: Path) -> int:
    """Runs the verb; returns 0, or 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl paper", description="Reproduce a published table, cell by cell.")
    parser.add_argument("table", help="an experiment with published numbers, e.g. flexcfl_table3")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help="only these columns")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 .. N-1 (default 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where runs and tables go (default paper/TABLE); continues what is there")
    parser.epilog = "Any KEY=VALUE is a further override for every cell."
    extra = [argument for argument in argv if "=" in argument and not argument.startswith("-")]
    given = parser.parse_args([argument for argument in argv if argument not in extra])
    if given.seeds < 1:
        raise InputError(f"--seeds {given.seeds}: a whole number >= 1")
    table, out = load(conf, given.table), given.out or Path("paper") / given.table
    console, found, failed = Console(), {}, []
    todo = list(cells(table, given.rows, given.columns, given.seeds))
    for number, (row, column, seed, overrides) in enumerate(todo, start=1):
        folder = out / row / column / f"seed{seed}"
        summary = run_cell(given.table, folder, [*overrides, f"seed={seed}", *extra])
        if summary is None:
            failed.append(f"{folder}.log")
            console.print(f"[{number}/{len(todo)}] {row}, {column}, seed {seed}: failed, see {folder}.log", markup=False)
            continue
        found.setdefault((row, column), []).append(summary)
        value = summary[table["measure"]] * table.get("scale", 1)
        console.print(f"[{number}/{len(todo)}] {row}, {column}, seed {seed}: {value:.2f}", markup=False)
        write(table, collect(table, found), out, "fedjax-cfl paper " + " ".join(argv))
    console.print(show(table, collect(table, found)))
    console.print(f"written to {out}", soft_wrap=True)
    return 1 if failed else 0
