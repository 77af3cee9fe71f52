"""A table as papers print it, methods by data sets or any settings by any others: mean ± sample
standard deviation over seeds, bold the best of a column where an exact test tells it from all
others. Written as CSV, Markdown and LaTeX.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedjax_cfl.analysis import sets, statistics, tables
from fedjax_cfl.analysis.runs import IDENTITY, list_settings
from fedjax_cfl.errors import InputError, suggest_options
from fedjax_cfl.formatting import escape_latex, escape_markdown, escape_markup
from fedjax_cfl.runs.results import write_columns, write_text

# settings that choose an option, which a summary names
NAMED = (*IDENTITY, "concept", "drift")
# measures that are each task's own: final is final_accuracy, of a regression final_rmse
OF_TASK = ("final", "worst10", "macro", "last10_evals", "best")
PLAIN, FIRST, BEST = "plain", "first", "best"  # FIRST: the best mean, but not BEST beyond chance
# characters of a line, some of them bold, that a page of LaTeX's `article` has room for, by size
ROOM = {"": 64, "\\small": 75, "\\footnotesize": 84}


def make_pivot(runs: pd.DataFrame, rows: str, columns: str, measure: str = "final") -> pd.DataFrame:
    """Returns the table of sets of runs (see `sets`) of one setting by another, see `fill_cells`.

    Args: `rows` and `columns` are names of settings, several joined by +, as
    algorithm+algorithm.m, where a set of runs without one goes by the others; `measure` is one of
    `MEASURES`, or of `OF_TASK`.
    Raises InputError for a measure or setting that does not exist or that no run has, and where two
    sets of runs would share a cell.
    """
    if measure not in (*OF_TASK, *tables.MEASURES):
        options = suggest_options(measure, [*OF_TASK, *tables.MEASURES])
        raise InputError(f"--measure {measure}: unknown measure{options}")
    if measure not in (*OF_TASK, *sets.keep_known([measure], runs)):
        name = runs["score"].iloc[0].name
        raise InputError(f"--measure {measure}: none of these runs has it; use final_{name}")
    names = {*rows.split("+"), *columns.split("+")}
    firsts = runs.drop_duplicates("label").set_index("label", drop=False)
    settings = {str(label): _read_settings(run, names) for label, run in firsts.iterrows()}
    for axis, each in (("rows", rows), ("columns", columns)):
        for name in each.split("+"):
            if not any(name in of_set for of_set in settings.values()):
                raise InputError(
                    f"--pivot: no setting {name}, of the {axis}, in any run; {', '.join(NAMED)},"
                    " or one of .hydra/config.yaml, as algorithm.m"
                )
    places = {
        label: (_name_place(values, rows), _name_place(values, columns))
        for label, values in settings.items()
    }
    taken: dict[tuple[str, str], str] = {}
    for label, (row, column) in places.items():
        if (other := taken.setdefault((row, column), label)) != label:
            raise InputError(
                f"--pivot {rows} {columns}: two sets of runs share the cell {row} x {column},"
                f" {other} and {label}; add what differs between them to the rows or"
                " columns, as algorithm+algorithm.m, or compare fewer runs"
            )
    return fill_cells(runs, places, measure)


def fill_cells(
    runs: pd.DataFrame, places: Mapping[str, tuple[str, str]], measure: str
) -> pd.DataFrame:
    """Returns a line per cell, in the order of the sets: its row and column, measure, mean, sd, how
    many values and runs, and its rank, see `rank_cells`; a column of several measures has no best.
    `places` are the row and column of each set of runs by its label.
    """
    members, cells = dict(iter(runs.groupby("label", sort=False))), []
    for cell in sets.list_measures(runs).to_dict("records"):
        score = members[cell["label"]]["score"].iloc[0].name
        field = f"{measure}_{score}" if measure in OF_TASK else measure
        found = (cell[f"{field}_{part}"] for part in ("mean", "sd", "n"))
        cells.append((*places[cell["label"]], field, *found, cell["runs"]))
    names = ["row", "column", "measure", "mean", "sd", "values", "runs"]
    table, labels = pd.DataFrame(cells, columns=names).assign(rank=PLAIN), [*members]
    for _, same in table.groupby("column"):
        if same["measure"].nunique() == 1:
            inside = {place: members[labels[place]] for place in same.index}
            table.loc[same.index, "rank"] = rank_cells(inside, same["measure"].iloc[0])
    return table


def _read_settings(run: pd.Series, names: set[str]) -> dict[str, Any]:
    """Returns the settings of a run by name, all that it has of `names` among them."""
    named = {name: value if pd.notna(value := run.get(name)) else None for name in NAMED}
    return named if names <= {*named} else {**list_settings(run["run_dir"]), **named}


def _name_place(settings: dict[str, Any], names: str) -> str:
    """Returns the row or column of a set of runs, by those of the settings `names` that it has."""
    words = [
        "+".join(tables.PAPER_NAMES.get(one, one) for one in str(settings[name]).split("+"))
        if name in NAMED
        else f"{name.rpartition('.')[2]}={settings[name]}"
        for name in names.split("+")
        if name in settings
    ]
    return ", ".join(words) or "-"


def rank_cells(inside: Mapping[Any, pd.DataFrame], measure: str) -> pd.Series:
    """Returns the rank of each set of runs of a column, by its key. The best mean is BEST where the
    exact test says of it and of each other set, over `MIN_SEEDS` shared seeds at least and after
    Holm's correction, that chance alone is less likely than ALPHA; else FIRST. Others are PLAIN.
    """
    lower = tables.MEASURES[measure].cost or measure.endswith(("rmse", "mae"))
    means = pd.Series({key: members[measure].mean() for key, members in inside.items()})
    ranks = pd.Series(PLAIN, means.index)
    if means.count() < 2:
        return ranks
    best = means.idxmin() if lower else means.idxmax()
    others = means.dropna().drop(best).index
    gaps = [statistics.list_gaps(inside[best], inside[other], measure) for other in others]
    chances = statistics.correct_holm([statistics.find_chance(each) for each in gaps])
    enough = min(each.size for each in gaps) >= statistics.MIN_SEEDS
    rank = BEST if enough and (chances < statistics.ALPHA).all() else FIRST
    return ranks.mask(ranks.index == best, rank)


def lay_out(
    pivot: pd.DataFrame,
    escape: Callable[[str], str],
    bold: str,
    plus: str = " ± ",
    transpose: bool = False,
    decimals: int | None = None,
) -> list[list[str]]:
    """Returns the lines of the table, the first one the columns' names.

    Args: `escape` makes texts from files harmless; `bold` is the format of what is BEST, `plus`
    stands before an sd; `transpose` exchanges rows and columns; `decimals` are those of all
    numbers, None: of each measure its own, see `tables.fit_digits`.
    """
    texts, groups = [], pivot.groupby(["column", "measure"])["mean"]
    for cell in tables.list_records(pivot):
        measure = tables.MEASURES[cell["measure"]]
        if decimals is not None:
            measure = measure._replace(digits=decimals)
        measure = tables.fit_digits(measure, groups.get_group((cell["column"], cell["measure"])))
        estimate = cell["mean"], cell["sd"] or 0.0, cell["values"]
        text = tables.format_mean(estimate, cell["runs"], measure, plus)
        texts.append(bold.format(text) if cell["rank"] == BEST else text)
    shown = pivot.assign(text=pd.Series(texts, pivot.index, dtype=object))
    grid = shown.pivot(index="row", columns="column", values="text").fillna("-")
    grid = grid.loc[pivot["row"].unique(), pivot["column"].unique()]

    several = pivot["measure"].nunique() > 1
    for axis, names in (("row", "index"), ("column", "columns")):
        shown = pivot.groupby(axis)["measure"].unique()
        # each line says what it shows where others show something else
        each = several and shown.map(len).max() == 1
        more = {n: f", {tables.MEASURES[shown[n][0]].heading}" if each else "" for n in shown.index}
        setattr(grid, names, [escape(f"{n}{more[n]}") for n in getattr(grid, names)])
    grid = grid.T if transpose else grid
    return [["", *grid.columns], *map(list, grid.itertuples(name=None))]


def describe(pivot: pd.DataFrame, transpose: bool = False) -> str:
    """Returns what the numbers and what is bold are, for a caption."""
    least, most = pivot["runs"].min(), pivot["runs"].max()
    runs = f"{least} to {most}" if least < most else f"{least}"
    measures = [tables.MEASURES[name] for name in pivot["measure"].unique()]
    shown = " and ".join(measure.words or measure.heading for measure in measures)
    line, rivals = "row" if transpose else "column", pivot["column"].value_counts().max() - 1
    test = f"an exact paired test, p < {statistics.ALPHA} after Holm's correction"
    bold = f"Bold: the best mean of its {line}, if it differs from every other in it by {test}."
    if not (pivot["rank"] == BEST).any():
        needed = statistics.count_seeds(rivals)
        bold = f"Nothing is bold: no best mean of a {line} differs from every other by {test}"
        bold += f", which takes {needed} seeds or more." if most < needed else "."
    return f"{shown[0].upper()}{shown[1:]}: mean ± sample sd over {runs} seeds. {bold}"


def write_pivot(
    pivot: pd.DataFrame, out: Path, transpose: bool = False, decimals: int | None = None
) -> None:
    """Prints the table and writes pivot.csv, pivot.md and pivot.tex into `out`."""
    caption, shape = describe(pivot, transpose), {"transpose": transpose, "decimals": decimals}
    grid = lay_out(pivot, escape_markup, "[bold]{}[/bold]", **shape)
    tables.print_table(caption, *grid, where=f"in {out / 'pivot.csv'}")
    write_columns(out / "pivot.csv", tables.list_records(pivot))
    text = tables.format_markdown(*lay_out(pivot, escape_markdown, "**{}**", **shape))
    write_text(out / "pivot.md", f"{text}\n{caption}\n")
    grid = lay_out(pivot, escape_latex, r"\textbf{{{}}}", r" $\pm$ ", **shape)
    wide = max(len("  ".join(line)) for line in lay_out(pivot, str, "{}", **shape))
    size = next((each for each, room in ROOM.items() if wide <= room), [*ROOM][-1])
    write_text(out / "pivot.tex", format_latex(grid, caption, pivot["measure"].iloc[0], size))
    if wide > ROOM[size]:
        print(
            f"note: lines of pivot.tex have {wide} characters, and a page has room for some"
            f" {ROOM[size]}: try {'no ' * transpose}--transpose, --decimals 1, or fewer columns"
        )


def format_latex(grid: list[list[str]], caption: str, measure: str, size: str = "") -> str:
    """Returns lines that are escaped already as a table of LaTeX with the package booktabs; with a
    `size` other than that of the text, as \\small, gaps between columns are narrow, too.
    """
    caption = escape_latex(caption).replace("±", r"$\pm$")
    chance, start = f"p < {statistics.ALPHA}", r"\begin{tabular}"
    table = (
        pd.DataFrame(grid[1:], columns=pd.Index(grid[0]))
        .style.hide(axis="index")
        .to_latex(
            hrules=True,
            position="t",
            position_float="centering",
            caption=caption.replace(chance, f"${chance}$"),
            label=f"tab:{measure.replace('_', '-')}",
            column_format="l" + "r" * (len(grid[0]) - 1),
        )
    )
    smaller = f"{size}\\setlength{{\\tabcolsep}}{{3pt}}\n" if size else ""
    table = table.replace(start, f"\\smallskip\n{smaller}{start}")
    return f"% needs \\usepackage{{booktabs}}\n{table}"
