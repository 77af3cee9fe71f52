"""A table as papers print it, methods by data sets or any settings by any others: mean ± standard
deviation over seeds, the best of each column bold, and what seeds do not tell from it. Written as
CSV, Markdown and LaTeX.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from fedjax_cfl.analysis.runs import IDENTITY, list_settings
from fedjax_cfl.analysis.sets import keep_known, list_measures, score_of_set, split_sets
from fedjax_cfl.analysis.statistics import bootstrap_mean, list_gaps
from fedjax_cfl.analysis.tables import (
    MEASURES,
    format_markdown,
    format_mean,
    format_number,
    list_records,
    print_table,
)
from fedjax_cfl.errors import InputError, suggest_options
from fedjax_cfl.formatting import escape_latex, escape_markdown, escape_markup
from fedjax_cfl.runs.results import write_columns, write_text

# settings that choose an option, which a summary names
NAMED = (*IDENTITY, "concept", "drift")
# of these the smallest is best
COSTS = ("rounds_to_target", "units", "sim_time_s", "wall_s")
# measures that are each task's own: best is best_accuracy, of a regression best_rmse
OF_TASK = ("best", "shared_best", "final", "last10_evals", "macro", "worst10")
PLAIN, BEST, TIED = "plain", "best", "tied"
LEGEND = "bold: the best of its column, and what seeds do not tell from it (paired 95 % interval)"


def make_pivot(runs: pd.DataFrame, rows: str, columns: str, measure: str = "best") -> pd.DataFrame:
    """Returns the table of sets of runs (see `sets`), a line per cell: its row and column, measure,
    mean, sd, how many values and runs, and its rank: BEST of its column, or PLAIN, or TIED if the
    95 % bootstrap interval of its difference from the best, over the seeds that both have, holds 0;
    of few seeds such an interval is too narrow. A column of several measures has no best.

    Args: `rows` and `columns` are names of settings, several joined by +, as
    algorithm+algorithm.m, where a set of runs without one goes by the others; `measure` is one of
    `MEASURES`, or of `OF_TASK`.
    Raises InputError for a measure or setting that does not exist or that no run has, and where two
    sets of runs would share a cell.
    """
    check_measure(runs, measure)
    asked, sets = {*rows.split("+"), *columns.split("+")}, dict(split_sets(runs))
    settings = {label: _read_settings(members, asked) for label, members in sets.items()}
    for axis, names in (("rows", rows), ("columns", columns)):
        check_names([*settings.values()], names, axis)
    cells = []
    for cell in list_measures(runs).to_dict("records"):
        label = cell["label"]
        shown = f"{measure}_{score_of_set(sets[label]).name}" if measure in OF_TASK else measure
        place = {"row": _name_place(settings[label], rows)}
        place |= {"column": _name_place(settings[label], columns), "measure": shown}
        numbers = {name: cell[f"{shown}_{name}"] for name in ("mean", "sd", "n")}
        cells.append(place | numbers | {"runs": cell["runs"], "label": label})
    found = pd.DataFrame(cells).rename(columns={"n": "values"})
    for (row, column), same in found.groupby(["row", "column"], sort=False):
        if len(same) > 1:
            raise InputError(
                f"--pivot {rows} {columns}: two sets of runs share the cell {row} x {column},"
                f" {' and '.join(same['label'][:2])}; add what tells them apart to the rows or"
                " columns, as algorithm+algorithm.m, or compare fewer runs"
            )
    parts = []
    for _, cells in found.groupby("column", sort=False):
        inside = {row: sets[label] for row, label in zip(cells["row"], cells["label"], strict=True)}
        one = cells["measure"].nunique() == 1
        ranks = (
            rank_cells(inside, cells["measure"].iloc[0]) if one else dict.fromkeys(inside, PLAIN)
        )
        parts.append(cells.assign(rank=cells["row"].map(ranks)))
    return pd.concat(parts).drop(columns="label")


def check_measure(runs: pd.DataFrame, measure: str) -> None:
    """Raises InputError for a measure that does not exist, or that none of the runs has."""
    if measure not in (*OF_TASK, *MEASURES):
        options = suggest_options(measure, [*OF_TASK, *MEASURES])
        raise InputError(f"--measure {measure}: unknown measure{options}")
    if measure not in (*OF_TASK, *keep_known([measure], runs)):
        name = score_of_set(runs).name
        raise InputError(f"--measure {measure}: none of these runs has it; use best_{name}")


def _read_settings(members: pd.DataFrame, asked: set[str]) -> dict[str, Any]:
    """Returns the settings of a set of runs by name, all that it has of those `asked` for among
    them.
    """
    run = members.iloc[0]
    named = {name: value if pd.notna(value := run.get(name)) else None for name in NAMED}
    return named if asked <= {*named} else {**list_settings(run["run_dir"]), **named}


def check_names(settings: list[dict[str, Any]], names: str, axis: str) -> None:
    """Raises InputError for one of the settings `names` that no run has."""
    for name in names.split("+"):
        if not any(name in of_set for of_set in settings):
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


def rank_cells(inside: dict[str, pd.DataFrame], measure: str) -> dict[str, str]:
    """Returns the rank of each set of runs of one column, by row."""
    sign = -1 if measure in COSTS or measure.endswith(("rmse", "mae")) else 1
    means = {row: sign * members[measure].mean() for row, members in inside.items()}
    known = {row: mean for row, mean in means.items() if mean == mean}
    ranks = dict.fromkeys(inside, PLAIN)
    if len(known) < 2:
        return ranks
    best = max(known, key=lambda row: known[row])
    _, factor, digits = MEASURES[measure]
    shown = {row: format_number(value, factor, digits) for row, value in known.items()}
    for row, mean in known.items():
        gap = bootstrap_mean(sign * list_gaps(inside[best], inside[row], measure))
        # of numbers that look alike no reader could tell why one is bold
        alike = shown[row] == shown[best] or (gap.values > 1 and gap.low <= 0)
        ranks[row] = BEST if mean == known[best] else TIED if alike else PLAIN
    return ranks


def lay_out(
    pivot: pd.DataFrame, escape: Callable[[str], str], bold: str, plus: str = " ± "
) -> list[list[str]]:
    """Returns the lines of the table, the first one the columns' names. `bold` is the format of
    what is not PLAIN; `escape` makes texts from files harmless.
    """
    marks = ["{}" if rank == PLAIN else bold for rank in pivot["rank"]]
    numbers = pivot[["mean", "sd", "values"]].itertuples(index=False, name=None)
    each = zip(numbers, pivot["runs"], pivot["measure"], strict=True)
    texts = [format_mean(*cell, plus) for cell in each]
    shown = pivot.assign(text=[mark.format(text) for mark, text in zip(marks, texts, strict=True)])
    grid = shown.pivot(index="row", columns="column", values="text").fillna("-")
    grid = grid.loc[pivot["row"].unique(), pivot["column"].unique()]

    def name(line: str, axis: str) -> str:
        """Says what a line shows where others show something else."""
        shown = pivot.loc[pivot[axis] == line, "measure"].unique()
        one = len(shown) == 1 and pivot["measure"].nunique() > 1
        return escape(f"{line}, {MEASURES[shown[0]][0]}" if one else line)

    head = ["", *(name(column, "column") for column in grid)]
    return [head, *([name(line.Index, "row"), *line[1:]] for line in grid.itertuples())]


def describe(pivot: pd.DataFrame) -> str:
    """Returns what the numbers are, in one line."""
    least, most = pivot["runs"].min(), pivot["runs"].max()
    runs = f"{least} to {most}" if least < most else f"{least}"
    shown = " and ".join(MEASURES[measure][0] for measure in pivot["measure"].unique())
    return f"{shown}, mean ± sample sd, {runs} runs a cell"


def write_pivot(pivot: pd.DataFrame, out: Path) -> None:
    """Prints the table and writes pivot.csv, pivot.md and pivot.tex into `out`."""
    print_table(describe(pivot), *lay_out(pivot, escape_markup, "[bold]{}[/bold]"))
    print(LEGEND)
    write_columns(out / "pivot.csv", list_records(pivot))
    text = format_markdown(*lay_out(pivot, escape_markdown, "**{}**"))
    write_text(out / "pivot.md", f"{text}\n{describe(pivot)}; {LEGEND}\n")
    write_text(out / "pivot.tex", format_latex(pivot))


def format_latex(pivot: pd.DataFrame) -> str:
    """Returns the table for LaTeX with the package booktabs."""
    grid = lay_out(pivot, escape_latex, r"\textbf{{{}}}", r" $\pm$ ")
    head, *lines = (" & ".join(line) + r" \\" for line in grid)
    shape = "l" + "r" * (len(grid[0]) - 1)
    top = [f"% {describe(pivot)}; {LEGEND}", rf"\begin{{tabular}}{{{shape}}}", r"\toprule"]
    bottom = [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([*top, head, r"\midrule", *lines, *bottom])
