"""Compares finished runs: mean and standard deviation over seeds, as a table, a CSV, a
Markdown table and a plot.

The last test is what is compared. A best over tests is a choice on test data, and a maximum over
the tests that count, which are fewer for a clustered method: it stands behind, and says so.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from fedjax_cfl.analysis import plot, plot_costs, sets, statistics, tables
from fedjax_cfl.analysis.pivot import OF_TASK, make_pivot, write_pivot
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import escape_markdown, escape_markup
from fedjax_cfl.runs.results import write_columns, write_text
from fedjax_cfl.runs.run_dir import common_folder

SPREAD = "mean ± sample standard deviation over seeds"


def compare(
    paths: Iterable[str | Path],
    out: str | Path | None = None,
    target: float | None = None,
    baseline: str | None = None,
    pivot: tuple[str, str] | None = None,
    measure: str = "final",
    transpose: bool = False,
    decimals: int | None = None,
) -> pd.DataFrame:
    """Prints the comparison and writes it into `out`, None: the folder that the runs have in
    common: compare.csv, compare.md, the picture compare.png, .svg and .pdf, and differences.csv
    where sets share seeds; returns compare.csv, a row per set of runs.

    `transpose` exchanges rows and columns of the `pivot`, `decimals` are those of its numbers; the
    other arguments are those of `compare_runs`.
    """
    paths = list(paths)
    if decimals is not None and not 0 <= decimals <= 6:
        raise InputError(f"--decimals {decimals}: between 0 and 6 is allowed")
    runs, table = compare_runs(paths, target, baseline, pivot, measure)
    measured, differences = sets.list_measures(runs), statistics.list_differences(runs)
    grid, out = format_sets(runs, measured, target), Path(out or common_folder(paths))
    try:
        out.mkdir(parents=True, exist_ok=True)
        before = {path.name for path in out.iterdir()}
        marked = [[escape_markup(text) for text in line] for line in grid]
        tables.print_table(SPREAD, *marked, where=f"in {out / 'compare.csv'}")
        plain = [[escape_markdown(text) for text in line] for line in grid]
        write_columns(out / "compare.csv", tables.list_records(measured))
        write_text(out / "compare.md", tables.format_markdown(*plain))
        pictures = plot.save_pictures(plot_costs.draw_costs(runs), out / "compare")
        written = ["compare.csv", "compare.md", *(path.name for path in pictures)]
        if len(differences):
            write_columns(out / "differences.csv", tables.list_records(differences))
            written.append("differences.csv")
        if table is not None:
            write_pivot(table, out, transpose, decimals)
            written += ["pivot.csv", "pivot.md", "pivot.tex"]
    except BrokenPipeError:  # the reader of our output has gone
        raise
    except OSError as error:
        raise InputError(
            f"--out {out}: cannot be written ({error.strerror}), expected a folder, which is made"
            " if need be"
        ) from None
    replaced = ", ".join(name for name in written if name in before)
    said = f" (replaced: {replaced})" if replaced else ""
    print(f"wrote {', '.join(written)}{said} in {out}")
    return measured


def compare_runs(
    paths: Iterable[str | Path],
    target: float | None = None,
    baseline: str | None = None,
    pivot: tuple[str, str] | None = None,
    measure: str = "final",
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Returns a row per run, with the name of its set (see `sets`), and the table of one setting by
    another, None: not asked for.

    Args: `paths` are run directories and folders of them; `target` is an accuracy as a fraction,
    or an RMSE; `baseline` names the set that the others are compared with, by its label or
    algorithm, in two measures: the gain is that in final accuracy (mean over clients, last 5 % of
    the tests), the speed-up is the baseline's time to keep its own final accuracy, divided by the
    set's time to do so, in simulated seconds or, without a clock, in rounds; `pivot`, of two
    settings, asks for a table of one by the other, of a `measure`, as pivot.csv, .md and .tex, see
    `pivot.make_pivot`.
    """
    if target is not None and not target > 0:
        raise InputError(f"target must be a score above 0, as 0.8 of accuracy, not {target}")
    runs = sets.read_sets(paths, target, baseline)
    shares = [score.words for score in runs["score"] if score.percent]
    if target is not None and target > 1 and shares:
        raise InputError(f"target must be a share in (0, 1], as {shares[0]} is, not {target}")
    print_notes(runs, baseline)
    return runs, make_pivot(runs, *pivot, measure) if pivot else None


def print_notes(runs: pd.DataFrame, baseline: str | None) -> None:
    """Prints what makes numbers of sets of runs less than they seem."""
    for label, members in runs.groupby("label", sort=False):
        if members["seed"].astype(str).duplicated().any():
            print(
                f"note: {label} holds the same seed more than once (seeds"
                f" {' '.join(map(str, members['seed']))}), so its sd is too small"
            )
        if chosen := members["chosen_round"].count():
            print(
                f"note: {chosen} of {len(members)} runs of {label} report the round that"
                " was best on validation samples; it is also what best and final are"
            )
        if baseline is not None and (alone := (~members["paired"]).sum()):
            print(
                f"note: {alone} of {len(members)} runs of {label} have no gain: no run of"
                f" {baseline} has the same seed and the same data"
            )


def format_sets(
    runs: pd.DataFrame, measured: pd.DataFrame, target: float | None = None
) -> list[list[str]]:
    """Returns the lines of the table, the first one its headings; `measured` is `list_measures` of
    the runs.
    """
    names = [name for name in tables.MEASURES if runs[name].notna().any()]
    shown = {n: tables.fit_digits(tables.MEASURES[n], measured[f"{n}_mean"]) for n in names}
    if target is not None and "rounds_to_target" in shown:
        shares = runs["score"].iloc[0].percent
        words = f"rounds to {100 * target:g} %" if shares else f"rounds to RMSE {target:g}"
        shown["rounds_to_target"] = tables.MEASURES["rounds_to_target"]._replace(heading=words)
    lines = [["runs of", "n", *(measure.heading for measure in shown.values())]]
    for row in measured.to_dict("records"):
        estimates = [tuple(row[f"{n}_{part}"] for part in ("mean", "sd", "n")) for n in shown]
        cells = map(tables.format_mean, estimates, [row["runs"]] * len(shown), shown.values())
        lines.append([row["label"], str(row["runs"]), *cells])
    return lines


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl compare RUN_DIR... [--out DIR] [--target ACC] [--baseline NAME]`."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl compare", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="a run directory, or a folder to search for runs"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where the files go (default: the folder of all these runs)"
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="ACC",
        help="also report the first round that reaches this accuracy, e.g. 0.8, or this RMSE",
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="also report gain and speed-up (time to accuracy) over the runs of this algorithm"
        " or label, seed by seed",
    )
    parser.add_argument(
        "--pivot",
        nargs=2,
        metavar=("ROWS", "COLUMNS"),
        help="also make a table of one setting by another, as algorithm dataset, or"
        " algorithm+algorithm.m local.lr; in Markdown and LaTeX, what is the best of its column"
        " beyond chance in bold",
    )
    parser.add_argument(
        "--measure",
        default="final",
        metavar="NAME",
        help="what --pivot shows (default: final); of each task its own score:"
        f" {', '.join(OF_TASK)}; or {', '.join(tables.MEASURES)}",
    )
    parser.add_argument(
        "--transpose", action="store_true", help="exchange rows and columns of the --pivot"
    )
    parser.add_argument(
        "--decimals", type=int, metavar="N", help="of the numbers of the --pivot (default: 2 of %%)"
    )
    options = vars(parse_arguments(parser, argv))
    compare(options.pop("runs"), **options)
    return 0
