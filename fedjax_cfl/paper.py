"""`fedjax-cfl paper TABLE`: runs a published table's or figure's cells and sets what came out beside what was printed.

A table is the `paper` node of conf/experiment/TABLE.yaml: rows and columns of overrides, and the published numbers. Every cell is an
ordinary run in its own process and directory, so an interrupted reproduction continues with the cells that are not finished. A row
may be another measure of the runs of a row above it: `runs: ROW, measure: NAME` in place of overrides. A figure of another table's runs
names it, `experiment: TABLE`, and takes up what that has run.
"""

import argparse
import contextlib
import fnmatch
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedjax_cfl import download, edc_madc, figures, model_map, paper_report, report
from fedjax_cfl.errors import InputError, require

# what the one-line error of a run says when its data are not here, and nothing else is wrong
MISSING = (f"a folder named in {download.VARIABLE}", "expected the official train and test files")
COMMAND = [sys.executable, "-m", "fedjax_cfl"]
PASSING = ("run_dir=", "devices=", "rounds=", "offline=", "resume=", "checkpoint.")  # overrides in which a finished cell may differ
# the kinds of figures made from cells
DRAWN = {"curves": figures.curves, "communication": figures.communication, "model_map": model_map.draw}


class Cell(NamedTuple):
    """One run of a table."""

    row: str
    column: str  # "" where the table's columns are measures of one run
    seed: int
    folder: Path
    overrides: list[str]

    def __str__(self) -> str:
        return ", ".join([self.row, *([self.column] if self.column else []), f"seed {self.seed}"])


def load(conf: Path, name: str) -> dict:
    """Returns the `paper` node of an experiment. Raises InputError if there is no such table."""
    tables = {}
    for path in sorted((conf / "experiment").glob("*.yaml")):
        node = OmegaConf.load(path).get("paper")
        if node is not None:
            tables[path.stem] = OmegaConf.to_container(node)
    require("paper", name, tables)
    return tables[name]


def chosen(field: str, asked: list[str] | None, known: Iterable[str]) -> list[str]:
    """Returns the names that `asked` lists, all of them if it is None; `*` stands for anything. Raises InputError for unknown names."""
    known = list(known)
    for pattern in asked or []:
        if not fnmatch.filter(known, pattern):
            require(field, pattern, known)
    return [name for name in known if asked is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in asked)]


def cells(name: str, table: dict, out: Path, rows: list[str], columns: list[str] | None, seeds: Iterable[int], extra: list[str]):
    """Yields the cells of the given rows, columns (None: all) and seeds; seeds are outermost, so that a whole table comes first.

    Rows that share their runs have one cell together, that of the row which owns them.
    """
    owners = list(dict.fromkeys(paper_report.runs_of(table, row) for row in rows))
    for seed in seeds:
        for row in owners:
            own = table["rows"][row]["overrides"]
            if "measures" in table:
                options = {"": []}
            else:
                options = {c: table["columns"][c] for c in paper_report.columns_of(table, row) if columns is None or c in columns}
            for column, overrides in options.items():
                folder = out / row / column / f"seed{seed}"
                yield Cell(row, column, seed, folder, [f"experiment={name}", *own, *overrides, f"seed={seed}", *extra])


def kept(overrides: list[str]) -> list[str]:
    """Returns the overrides that bear on what a cell is."""
    return [override for override in overrides if not override.startswith(PASSING)]


def rounds_asked(overrides: list[str]) -> str | None:
    """Returns the last `rounds=`."""
    return next((override for override in reversed(overrides) if override.startswith("rounds=")), None)


def finished(cell: Cell) -> bool:
    """Returns whether the cell has run as asked. Raises InputError if another cell did, of the same name but with other settings."""
    summary = report.read_summary(cell.folder)
    if summary is None:
        return False
    ran = summary.get("overrides") or []
    if kept(ran) != kept(cell.overrides):
        differ = sorted(set(kept(ran)) ^ set(kept(cell.overrides)))
        raise InputError(f"{cell.folder}: was run with other settings ({', '.join(differ)}); choose another folder with --out")
    return rounds_asked(ran) == rounds_asked(cell.overrides)


def standing(name: str, table: dict, out: Path, extra: list[str]) -> dict[tuple[str, str], list[Path]]:
    """Returns the folders of all finished cells of these settings in `out`, by (row, column), seeds in order; rounds may differ."""
    found: dict[tuple[str, str], list[Path]] = {}
    seeds = sorted({int(path.name[4:]) for path in out.glob("**/seed*") if path.is_dir() and path.name[4:].isdecimal()})
    for cell in cells(name, table, out, list(table["rows"]), None, seeds, extra):
        summary = report.read_summary(cell.folder)
        if summary is not None and kept(summary.get("overrides") or []) == kept(cell.overrides):
            found.setdefault((cell.row, cell.column), []).append(cell.folder)
    return found


# running


def start(cell: Cell, alone: bool) -> subprocess.Popen:
    """Starts a cell's process, its output going to seedN.log; beside others it gets one device."""
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    devices = [] if alone or any(override.startswith("devices=") for override in cell.overrides) else ["devices=1"]
    command = [*COMMAND, *cell.overrides, *devices, f"run_dir={cell.folder}"]
    with cell.folder.with_name(f"{cell.folder.name}.log").open("w") as log:
        # a session of its own: Ctrl-C must reach it once, from here, because a second one would end it at once
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def running(todo: list[Cell], jobs: int, skipped: set[str], show: Callable[[int, list[Cell]], None]) -> Iterator[tuple[Cell, int]]:
    """Yields (cell, exit status) as cells end, `jobs` at a time; rows that the caller puts into `skipped` are not begun any more.

    `show` is told again and again how many have ended, and which run. Whatever ends the loop, an interrupt too, ends the cells: they save
    where they stand, and go on from there another time.
    """
    queue, active = deque(todo), {}
    try:
        while queue or active:
            while queue and len(active) < jobs:
                cell = queue.popleft()
                if cell.row not in skipped:
                    active[start(cell, alone=jobs == 1)] = cell
            for process in [process for process in active if process.poll() is not None]:
                yield active.pop(process), process.returncode
            show(len(todo) - len(queue) - len(active), list(active.values()))
            time.sleep(0.1 if active else 0)
    finally:
        stop(list(active))


@contextlib.contextmanager
def progress(total: int, console: Console) -> Iterator[Callable[[int, list[Cell]], None]]:
    """Yields show(ended, active cells), which moves a progress bar; silent where the console is not a terminal."""
    times = TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("cells,"), *times, TextColumn("{task.description}"))
    # the pace is a mean over a day: a cell may take hours
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=86400, transient=True) as bar:
        task = bar.add_task("", total=total)
        bar.advance(task, 0)  # the first cell's time counts, too

        def show(ended: int, active: list[Cell]) -> None:
            if console.is_terminal:
                bar.update(task, completed=ended, description="\n".join(f"{cell}: round {last_round(cell)}" for cell in active))

        yield show


def last_round(cell: Cell) -> int:
    """Returns the last round that a cell has evaluated so far, 0 if none."""
    metrics = cell.folder / "metrics.jsonl"
    return int([b"0", *re.findall(rb'^{"round": (\d+)', metrics.read_bytes() if metrics.exists() else b"", re.MULTILINE)][-1])


def stop(processes: list[subprocess.Popen]) -> None:
    """Asks processes to stop and waits until they have; an interrupt meanwhile kills them."""
    for process in processes:
        process.terminate()
    try:
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM interrupt as Ctrl-C does, so that no cell is left running alone."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def complaint(cell: Cell) -> str:
    """Returns the one-line error a cell ended with, or where to look."""
    log = cell.folder.with_name(f"{cell.folder.name}.log")
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("fedjax-cfl: ")]
    return lines[-1].removeprefix("fedjax-cfl: ") if lines else f"see {log}"


def run_cells(todo: list[Cell], jobs: int, console: Console, ended: Callable[[Cell], str]) -> bool:
    """Runs the cells that are not finished and says a line about each; `ended` returns what to say. Returns whether one failed."""
    skipped: set[str] = set()
    failed, number = False, 0
    unfinished = [cell for cell in todo if not finished(cell)]
    if len(unfinished) < len(todo):
        console.print(f"{len(todo) - len(unfinished)} of {len(todo)} cells are finished already")
    with progress(len(unfinished), console) as show:
        for cell, status in running(unfinished, jobs, skipped, show):
            number += 1
            said = f"[{number}/{len(unfinished)}] {cell}: "
            if status == 0:
                console.print(said + ended(cell), markup=False, highlight=False)
            elif status == 2 and any(text in complaint(cell) for text in MISSING):
                if cell.row not in skipped:
                    console.print(f"{cell.row}: skipped, data missing: {complaint(cell)}", markup=False, highlight=False, soft_wrap=True)
                skipped.add(cell.row)
            else:
                failed = True
                console.print(f"{said}failed: {complaint(cell)}", markup=False, highlight=False, soft_wrap=True)
    return failed


# the verb


def parser() -> argparse.ArgumentParser:
    """Returns what the verb takes, besides KEY=VALUE."""
    made = argparse.ArgumentParser(prog="fedjax-cfl paper", description="Reproduce a published table or figure, cell by cell.")
    made.add_argument("table", help="an experiment with published numbers, e.g. flexcfl_table3")
    made.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows; * stands for anything, as in 'MNIST-*'")
    made.add_argument("--columns", nargs="+", metavar="COLUMN", help="only these columns; * stands for anything")
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 .. N-1 (default 1)")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time (default 1); several get one device each")
    where = "runs and tables are in DIR/TABLE and go on from there (default paper)"
    made.add_argument("--out", type=Path, default=Path("paper"), metavar="DIR", help=where)
    made.epilog = (
        "Any KEY=VALUE is a further override for every cell. Rows whose data are not on this computer are skipped and named. "
        "Exit status: 0 done, also where rows were skipped for their data; 1 a cell failed; 2 bad input; 130 interrupted."
    )
    return made


def main(argv: list[str], conf: Path, build: Callable[[list[str]], tuple]) -> int:
    """Runs the verb; returns 0, or 1 if a cell failed. `build(overrides)` returns (config, task, data, local) as a run would have them."""
    extra = [argument for argument in argv if "=" in argument and not argument.startswith("-")]
    given = parser().parse_args([argument for argument in argv if argument not in extra])
    for flag, number in (("--seeds", given.seeds), ("--jobs", given.jobs)):
        if number < 1:
            raise InputError(f"{flag} {number}: a whole number >= 1")
    table, console = load(conf, given.table), Console()
    experiment = table.get("experiment", given.table)
    out, runs = given.out / given.table, given.out / experiment
    rows = chosen("--rows", given.rows, table["rows"])
    if given.columns and "columns" not in table:
        raise InputError(f"--columns {' '.join(given.columns)}: {given.table} has one run a row, so that only --rows can be chosen")
    columns = given.columns and chosen("--columns", given.columns, table["columns"])
    if table.get("figure") == "edc_madc":
        return edc_madc.reproduce(given.table, table, out, rows, range(given.seeds), extra, build, console, MISSING)

    def write() -> list[dict]:
        records = paper_report.collect(table, standing(experiment, table, runs, extra))
        if any(record["runs"] for record in records):
            out.mkdir(parents=True, exist_ok=True)
            paper_report.write(table, records, out, f"fedjax-cfl paper {shlex.join(argv)}")
        return records

    def ended(cell: Cell) -> str:
        write()
        return paper_report.said(table, cell.row, cell.folder)

    todo = list(cells(experiment, table, runs, rows, columns, range(given.seeds), extra))
    if not todo:
        raise InputError(
            f"--rows and --columns: {given.table} has no such cell; {rows[0]} has {', '.join(paper_report.columns_of(table, rows[0]))}"
        )
    try:
        with terminable():
            failed = run_cells(todo, given.jobs, console, ended)
    except KeyboardInterrupt:
        console.print("the same command goes on from here")
        raise
    records = write()
    if any(record["runs"] for record in records):
        paper_report.plot(table, records, out / "plot.png")
        if "figure" in table:
            DRAWN[table["figure"]](table, standing(experiment, table, runs, extra), out / "figure.png")
        console.print(*paper_report.show(table, records, console))
        console.print(f"written to {out}", soft_wrap=True)
    return 1 if failed else 0
