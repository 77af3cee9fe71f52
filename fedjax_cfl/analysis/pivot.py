"""A table as papers print it, methods by data sets or any settings by any others: mean ± standard
deviation over seeds, the best of each column bold, and what seeds do not tell from it. Written as
CSV, Markdown and LaTeX.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_cfl.analysis.compare_inputs import IDENTITY
from fedjax_cfl.analysis.compare_outputs import (
    MEASURES,
    format_markdown,
    format_mean,
    format_number,
    keep_known,
    print_table,
)
from fedjax_cfl.analysis.plot_costs import score_of_set
from fedjax_cfl.analysis.statistics import bootstrap_mean, list_gaps, pair_runs
from fedjax_cfl.errors import InputError, suggest_options
from fedjax_cfl.formatting import escape_latex, escape_markdown, escape_markup
from fedjax_cfl.runs.results import read_settings, write_columns, write_text
from fedjax_cfl.validation import flatten_settings

# settings that choose an option, which a summary names
NAMED = (*IDENTITY, "concept", "drift")
# of these the smallest is best
COSTS = ("rounds_to_target", "units", "sim_time_s", "wall_s")
# measures that are each task's own: best is best_accuracy, of a regression best_rmse
OF_TASK = ("best", "shared_best", "final", "last10_evals", "macro", "worst10")
PLAIN, BEST, TIED = "plain", "best", "tied"
LEGEND = "bold: the best of its column, and what seeds do not tell from it (paired 95 % interval)"


class Cell(NamedTuple):
    """A set of runs in the table."""

    measure: str  # one of `MEASURES`
    mean: float  # of the measure, as in compare.csv
    sd: float
    values: int  # runs that have it
    runs: int
    rank: str  # PLAIN | BEST of its column | TIED: seeds do not tell it from the best


class Pivot(NamedTuple):
    """The table."""

    rows: list[str]
    columns: list[str]
    cells: dict[tuple[str, str], Cell]  # by row and column

    def list_cells(self) -> list[dict[str, Any]]:
        """Returns a row per cell."""
        return [
            {"row": row, "column": column, **cell._asdict()}
            for (row, column), cell in self.cells.items()
        ]

    def list_measures(self, name: str | None = None, axis: int = 1) -> list[str]:
        """Returns the measures of the cells in column `name`, with an `axis` of 0 in that row,
        None: in the table.
        """
        inside = [cell for place, cell in self.cells.items() if name in (None, place[axis])]
        return list(dict.fromkeys(cell.measure for cell in inside))

    def name_line(self, name: str, axis: int) -> str:
        """Returns a row's or column's name, with what it shows where others show something else."""
        own = self.list_measures(name, axis)
        mixed = len(self.list_measures()) > 1
        return f"{name}, {MEASURES[own[0]][0]}" if mixed and len(own) == 1 else name


def make_pivot(
    groups: list[dict[str, Any]], rows: str, columns: str, measure: str = "best"
) -> Pivot:
    """Returns the table of sets of runs (see `compare.reduce_set`).

    A cell is TIED if the 95 % bootstrap interval of its difference from the best of its column,
    over the seeds that both have, holds 0; of few seeds such an interval is too narrow. A column of
    several measures has no best.
    Args: `rows` and `columns` are names of settings, several joined by +, as
    algorithm+algorithm.m, where a set of runs without one goes by the others; `measure` is one of
    `MEASURES`, or of `OF_TASK`.
    Raises InputError for a measure or setting that does not exist or that no run has, and where two
    sets of runs would share a cell.
    """
    if measure not in (*OF_TASK, *MEASURES):
        options = suggest_options(measure, [*OF_TASK, *MEASURES])
        raise InputError(f"--measure {measure}: unknown measure{options}")
    if measure not in (*OF_TASK, *keep_known([measure], groups)):
        name = score_of_set(groups[0]).name
        raise InputError(f"--measure {measure}: none of these runs has it; use best_{name}")
    asked = {*rows.split("+"), *columns.split("+")}
    settings = [_read_settings(group["members"][0], asked) for group in groups]
    for axis, names in (("rows", rows), ("columns", columns)):
        check_names(settings, names, axis)
    placed: dict[tuple[str, str], dict[str, Any]] = {}
    for group, own in zip(groups, settings, strict=True):
        place = (_name_place(own, rows), _name_place(own, columns))
        if place in placed:
            raise InputError(
                f"--pivot {rows} {columns}: two sets of runs share the cell {place[0]} x"
                f" {place[1]}, {placed[place]['label']} and {group['label']}; add what tells them"
                " apart to the rows or columns, as algorithm+algorithm.m, or compare fewer runs"
            )
        placed[place] = group
    own_rows, own_columns = (
        list(dict.fromkeys(place[axis] for place in placed)) for axis in (0, 1)
    )
    cells = {}
    for column in own_columns:
        inside = {row: placed[row, column] for row in own_rows if (row, column) in placed}
        shown = {row: _measure_of(group, measure) for row, group in inside.items()}
        one = next(iter(shown.values()))
        alike = set(shown.values()) == {one}
        ranks = rank_cells(inside, one) if alike else dict.fromkeys(inside, PLAIN)
        for row, group in inside.items():
            mean, sd, values = group[shown[row]]
            cells[row, column] = Cell(shown[row], mean, sd, values, group["runs"], ranks[row])
    return Pivot(own_rows, own_columns, cells)


def _measure_of(group: dict[str, Any], measure: str) -> str:
    """Returns the name of the `measure` that a set of runs shows."""
    return f"{measure}_{score_of_set(group).name}" if measure in OF_TASK else measure


def _read_settings(run: dict[str, Any], asked: set[str]) -> dict[str, Any]:
    """Returns the settings of a run by name, all that it has of those `asked` for among them."""
    named = {name: run.get(name) for name in NAMED}
    if asked <= named.keys():
        return named
    return {**dict(flatten_settings(read_settings(run["run_dir"]))), **run["overrides"], **named}


def check_names(settings: list[dict[str, Any]], names: str, axis: str) -> None:
    """Raises InputError for one of the settings `names` that no run has."""
    for name in names.split("+"):
        if not any(name in own for own in settings):
            raise InputError(
                f"--pivot: no setting {name}, of the {axis}, in any run; {', '.join(NAMED)},"
                " or one of .hydra/config.yaml, as algorithm.m"
            )


def _name_place(settings: dict[str, Any], names: str) -> str:
    """Returns the row or column of a set of runs, by those of the settings `names` that it has."""
    found = [
        str(settings[name]) if name in NAMED else f"{name.rpartition('.')[2]}={settings[name]}"
        for name in names.split("+")
        if name in settings
    ]
    return ", ".join(found) or "-"


def rank_cells(inside: dict[str, dict[str, Any]], measure: str) -> dict[str, str]:
    """Returns the rank of each set of runs of one column, by row."""
    sign = -1 if measure in COSTS or measure.endswith(("rmse", "mae")) else 1
    known = {row: sign * group[measure][0] for row, group in inside.items() if group[measure][2]}
    if len(known) < 2:
        return dict.fromkeys(inside, PLAIN)
    _, factor, digits = MEASURES[measure]
    shown = {row: format_number(value, factor, digits) for row, value in known.items()}
    top = max(known.values())
    best = next(row for row in known if known[row] == top)

    def rank(row: str) -> str:
        if row not in known:
            return PLAIN
        if known[row] == top:
            return BEST
        if shown[row] == shown[best]:  # no reader could tell why one is bold
            return TIED
        gaps = list_gaps(pair_runs(inside[best], inside[row]), measure)
        gap = bootstrap_mean([sign * gap for gap in gaps])
        return TIED if gap.values > 1 and gap.low <= 0 else PLAIN

    return {row: rank(row) for row in inside}


def format_cell(cell: Cell | None, plus: str = " ± ") -> str:
    """Returns a cell in the units of its measure, - where no run has it."""
    if cell is None or not cell.values:
        return "-"
    _, factor, digits = MEASURES[cell.measure]
    text = format_mean((cell.mean, cell.sd, cell.values), factor, digits, plus)
    return text + (f" ({cell.values}/{cell.runs})" if cell.values < cell.runs else "")


def lay_out(
    pivot: Pivot, escape: Callable[[str], str], bold: str, plus: str = " ± "
) -> list[list[str]]:
    """Returns the lines of the table, the first one the columns' names. `bold` is the format of
    what is not PLAIN; `escape` makes texts from files harmless.
    """
    lines = [["", *(escape(pivot.name_line(column, 1)) for column in pivot.columns)]]
    for row in pivot.rows:
        cells = [pivot.cells.get((row, column)) for column in pivot.columns]
        shown = [format_cell(cell, plus) for cell in cells]
        marked = [
            bold.format(text) if cell and cell.rank != PLAIN else text
            for cell, text in zip(cells, shown, strict=True)
        ]
        lines.append([escape(pivot.name_line(row, 0)), *marked])
    return lines


def describe(pivot: Pivot) -> str:
    """Returns what the numbers are, in one line."""
    counts = sorted({cell.runs for cell in pivot.cells.values()})
    runs = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    shown = " and ".join(MEASURES[measure][0] for measure in pivot.list_measures())
    return f"{shown}, mean ± sample sd, {runs} runs a cell"


def write_pivot(pivot: Pivot, out: Path) -> None:
    """Prints the table and writes pivot.csv, pivot.md and pivot.tex into `out`."""
    print_table(describe(pivot), *lay_out(pivot, escape_markup, "[bold]{}[/bold]"))
    print(LEGEND)
    write_columns(out / "pivot.csv", pivot.list_cells())
    text = format_markdown(*lay_out(pivot, escape_markdown, "**{}**"))
    write_text(out / "pivot.md", f"{text}\n{describe(pivot)}; {LEGEND}\n")
    write_text(out / "pivot.tex", format_latex(pivot))


def format_latex(pivot: Pivot) -> str:
    """Returns the table for LaTeX with the package booktabs."""
    grid = lay_out(pivot, escape_latex, r"\textbf{{{}}}", r" $\pm$ ")
    head, *lines = (" & ".join(line) + r" \\" for line in grid)
    shape = "l" + "r" * len(pivot.columns)
    top = [f"% {describe(pivot)}; {LEGEND}", rf"\begin{{tabular}}{{{shape}}}", r"\toprule"]
    bottom = [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([*top, head, r"\midrule", *lines, *bottom])
