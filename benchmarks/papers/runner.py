"""`fedjax-cfl paper TABLE`: runs the cells of a published table or figure and shows the results
beside the published numbers.

A table is tables/TABLE.yaml: rows and columns of overrides, and the published
numbers; what all its runs share is conf/experiment/TABLE.yaml. Every cell is an ordinary
run in its own process and directory, so an interrupted reproduction continues with the
cells that are not finished. A row may be another measure of the runs of a row above it:
`runs: ROW, measure: NAME` in place of overrides; with `runs: [ROW, ROW, ...]` it shows the mean
of these rows. A figure of another table's runs names it, `experiment: TABLE`, and takes up what
that has run.
"""

import argparse
import contextlib
import importlib
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedjax_cfl.cli.build import assemble, resolve_settings
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import escape_text
from fedjax_cfl.runs.labels import is_execution
from fedjax_cfl.runs.run_dir import check_writable
from papers import benchmark, cells, figures, report
from papers.cells import Cell
from papers.processes import describe_progress, interrupt_on_sigterm, run_in_parallel
from papers.report import collect_records

# what the one-line error of a run says when its data are not here, and nothing else is wrong
MISSING = (f"a folder named in {DATA_ENV_VAR}", "expected the official train and test files")
# the kinds of figures made from cells
DRAW_FUNCTIONS = {
    "curves": figures.draw_panels,
    "communication": figures.draw_communication,
    "benchmark": benchmark.write,
}
# the modules beside this one that make figures of single papers, by kind of figure
PROGRAMS = {
    "edc_madc": "fedgroup_fig5",
    "model_map": "fesem_fig3",
    "pseudo_samples": "md_icfl_figs",
    "server": "fielding_server",
}
FOLDERS = ("--out", "--methods", "--cells")  # what follows may have a = in its name


def say(console: Console, text: str) -> None:
    """Prints one line as it is: no markup, no colour, no folding, nothing a terminal obeys."""
    console.print(escape_text(text), markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress(total: int, console: Console) -> Iterator[Callable[[int, list[Cell]], None]]:
    """Yields show(ended, active cells), which moves a progress bar; silent where the
    console is not a terminal.
    """
    times = TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("cells,"), *times
    # the pace is a mean over a day: a cell may take hours
    bar = Progress(
        *columns,
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=86400,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total)
        bar.advance(task, 0)  # the first cell's time counts, too

        def show(ended: int, active: list[Cell]) -> None:
            if console.is_terminal:
                said = "\n".join(f"{cell}: {describe_progress(cell)}" for cell in active)
                bar.update(task, completed=ended, description=said)

        yield show


def run_cells(todo: list[Cell], jobs: int, console: Console, ended: Callable[[Cell], str]) -> bool:
    """Runs the cells that are not finished and says a line about each; `ended` returns
    what to say. Returns whether one failed.
    """
    skipped: set[str] = set()
    failed, number = False, 0
    unfinished = [cell for cell in todo if not cells.has_run(cell)]
    if len(unfinished) < len(todo):
        console.print(f"{len(todo) - len(unfinished)} of {len(todo)} cells are finished already")
    with progress(len(unfinished), console) as show:
        for cell, status, error in run_in_parallel(unfinished, jobs, skipped, show):
            number += 1
            said = f"[{number}/{len(unfinished)}] {cell}: "
            if status == 0:
                say(console, said + ended(cell))
            elif status == 2 and any(text in error for text in MISSING):
                if cell.row not in skipped:
                    say(console, f"{cell.row}: skipped, data missing: {error}")
                skipped.add(cell.row)
            else:
                failed = True
                say(console, f"{said}failed: {error}")
    return failed


# the verb


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the verb's options; overrides KEY=VALUE are not among them."""
    made = argparse.ArgumentParser(
        prog="fedjax-cfl paper", description="Reproduce a published table or figure, cell by cell."
    )
    made.add_argument("table", help="an experiment with published numbers, e.g. flexcfl_table3")
    made.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="only these rows; * stands for anything, as in 'MNIST-*'",
    )
    made.add_argument(
        "--columns", nargs="+", metavar="COLUMN", help="only these columns; * stands for anything"
    )
    made.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="seeds 0 .. N-1 (default 1)"
    )
    made.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="cells at a time (default 1); several get one device each",
    )
    where = "runs and tables are in DIR/TABLE and go on from there (default paper)"
    made.add_argument("--out", type=Path, default=Path("paper"), metavar="DIR", help=where)
    methods = "a YAML file of columns of your own, NAME: [KEY=VALUE, ...]; see docs, reproduce"
    made.add_argument("--methods", type=Path, metavar="FILE", help=methods)
    made.add_argument(
        "--cells",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="of cflbench: files cells.csv of other folders; their cells are not run, but shown",
    )
    made.epilog = (
        "Any KEY=VALUE is a further override for every cell. Rows whose data are not on this"
        " computer are skipped and named. Exit status: 0 done, also where rows were skipped for"
        " their data; 1 a cell failed; 2 bad input; 130 interrupted."
    )
    return made


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the verb's options, and the overrides KEY=VALUE among them."""
    places = [
        place
        for place, text in enumerate(argv)
        if "=" in text and not text.startswith("-") and argv[max(place - 1, 0)] not in FOLDERS
    ]
    rest = [text for place, text in enumerate(argv) if place not in places]
    return parse_arguments(make_parser(), rest), [argv[place] for place in places]


def choose_cells(
    table: dict, experiment: str, runs: Path, given: argparse.Namespace, extra: list[str]
) -> list[Cell]:
    """Returns the cells that --rows, --columns and --seeds ask for. Raises InputError if
    there is none.

    Args: `table` is that of `load_table`; `experiment` is the name of the experiment whose runs
    it shows; `runs` is the folder of their cells; `given` is what `make_parser` has read;
    `extra` are further overrides of every cell.
    """
    for flag, number in (("--seeds", given.seeds), ("--jobs", given.jobs)):
        if number < 1:
            raise InputError(f"{flag} {number}: a whole number >= 1")
    rows = cells.match_names("--rows", given.rows, table["rows"])
    if given.columns and "columns" not in table:
        raise InputError(
            f"--columns {' '.join(given.columns)}: {given.table} has one run a row, so that only"
            " --rows can be chosen"
        )
    columns = given.columns and cells.match_names("--columns", given.columns, table["columns"])
    seeds = range(given.seeds)
    todo = list(cells.make_cells(experiment, table, runs, rows, columns, seeds, extra))
    if not todo:
        raise InputError(
            f"--rows and --columns: {given.table} has no such cell; {rows[0]} has"
            f" {', '.join(cells.row_columns(table, rows[0]))}"
        )
    return todo


def read_others(table: dict, given: argparse.Namespace, extra: list[str]) -> benchmark.Cells:
    """Returns the cells of the files of --cells. Raises InputError where the table has no such
    files, or `extra` makes its cells others than theirs.
    """
    if not given.cells:
        return {}
    if table.get("figure") != "benchmark":
        raise InputError(f"--cells: {given.table} writes no cells.csv; only cflbench does")
    for override in extra:
        if not is_execution(override.partition("=")[0].lstrip("+~")):
            raise InputError(
                f"{override}: the cells of --cells ran with the settings of the table; leave out"
                " one of the two"
            )
    return benchmark.read_cells(table, given.cells)


def leave_out(todo: list[Cell], others: benchmark.Cells, console: Console) -> list[Cell]:
    """Returns the cells that `others` have not with as many seeds, and says how many those are."""
    if not others:
        return todo
    seeds = {place: cell["seeds"] for place, cell in others.items()}
    left = [cell for cell in todo if len(cell.seeds) > seeds.get((cell.row, cell.column), 0)]
    console.print(f"{len(todo) - len(left)} of {len(todo)} cells are in the files of --cells")
    return left


def main(argv: list[str]) -> int:
    """Runs the verb; returns 0, or 1 if a cell failed."""
    given, extra = read_arguments(argv)
    table, console = cells.load_table(given.table), Console()
    cells.add_methods(table, given.methods)
    experiment = table.get("experiment", given.table)
    out, runs = given.out / given.table, given.out / experiment
    todo = choose_cells(table, experiment, runs, given, extra)
    check_writable(out, f"--out={given.out}")
    cells.check_cells(todo, extra, table.get("own", ()), resolve_settings)
    todo = leave_out(todo, others := read_others(table, given, extra), console)
    figure, command = table.get("figure"), f"fedjax-cfl paper {shlex.join(argv)}"
    name = PROGRAMS.get(figure or "")
    program = importlib.import_module(f"papers.{name}") if name else None
    if program and figure == "edc_madc":
        return program.reproduce(table, todo, out, assemble, console, MISSING)
    if program and figure == "server":
        return program.reproduce(table, todo, out, command, console)

    def write() -> list[dict]:
        found = cells.find_finished(experiment, table, runs, extra)
        records = report.add_cells(table, collect_records(table, found), others)
        if any(record["runs"] for record in records):
            out.mkdir(parents=True, exist_ok=True)
            report.write(table, records, out, command)
        return records

    def ended(cell: Cell) -> str:
        write()
        return report.format_finished_cell(table, cell.row, cells.list_runs(cell))

    try:
        with interrupt_on_sigterm():
            failed = run_cells(todo, given.jobs, console, ended)
    except KeyboardInterrupt:
        console.print("the same command goes on from here")
        raise
    records = write()
    if any(record["runs"] for record in records):
        figures.plot(table, records, out / "plot.png")
        if figure:
            found = cells.find_finished(experiment, table, runs, extra)
            draw = (
                partial(program.draw_figures, assemble, todo) if program else DRAW_FUNCTIONS[figure]
            )
            draw(table, found, out / "figure.png", **({"others": others} if others else {}))
        console.print(*report.build_table(table, records, console))
        say(console, f"written to {out}")
    return 1 if failed else 0
