"""Compares finished runs: mean and standard deviation over seeds, as a table, a CSV, a
Markdown table and a plot.

A best accuracy is a maximum over the tests that count, which are fewer for a clustered
method: the table says how many they are, and gives the best over the tests that count
for all runs on the same data.
"""

import argparse
import math
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.analysis.compare_inputs import DATA, IDENTITY, find_runs, read_run
from fedjax_cfl.analysis.compare_outputs import (
    MEASURES,
    draw_comparison,
    format_cells,
    format_markdown,
    list_measures,
    print_table,
)
from fedjax_cfl.analysis.pivot import OF_TASK, Pivot, make_pivot, write_pivot
from fedjax_cfl.analysis.plot import format_written, save_pictures
from fedjax_cfl.analysis.relative import add_baseline
from fedjax_cfl.analysis.statistics import list_differences
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import escape_markdown, escape_markup, escape_text
from fedjax_cfl.runs.display import follow
from fedjax_cfl.runs.results import write_columns, write_text
from fedjax_cfl.runs.scoring import best_over, shared_rounds
from fedjax_cfl.scores import score_of


def compare(
    paths: Iterable[str | Path],
    out: str | Path | None = None,
    target: float | None = None,
    baseline: str | None = None,
    pivot: tuple[str, str] | None = None,
    measure: str = "best",
) -> list[dict[str, Any]]:
    """Prints the comparison and writes it into `out`: compare.csv, compare.md, the picture
    compare.png, .svg and .pdf, and differences.csv where sets share seeds; returns a dict per set
    of runs. The other arguments are those of `compare_runs`.
    """
    groups, table = compare_runs(paths, target, baseline, pivot, measure)
    measures = shown_measures(groups)
    names = {name: heading for name, (heading, _, _) in MEASURES.items()}
    if target is not None:
        shares = score_of(groups[0]["members"][0]["rows"]).percent
        said = f"{100 * target:g} %" if shares else f"RMSE {target:g}"
        names["rounds_to_target"] = f"rounds to {said}"
    header = ["runs of", "n", *(names[name] for name in measures)]
    lines = [format_cells(group, measures) for group in groups]
    out = Path(out or ".")
    try:
        out.mkdir(parents=True, exist_ok=True)
        before = {path.name for path in out.iterdir()}
        marked = [[escape_markup(text) for text in line] for line in lines]
        print_table("mean ± sample standard deviation over seeds", header, *marked)
        plain = [[escape_markdown(text) for text in line] for line in [header, *lines]]
        write_columns(out / "compare.csv", list_measures(groups))
        write_text(out / "compare.md", format_markdown(*plain))
        pictures = save_pictures(draw_comparison(groups), out / "compare")
        written = ["compare.csv", "compare.md", *(path.name for path in pictures)]
        if differences := list_differences(groups):
            write_columns(out / "differences.csv", differences)
            written.append("differences.csv")
        if table:
            write_pivot(table, out)
            written += ["pivot.csv", "pivot.md", "pivot.tex"]
    except BrokenPipeError:  # the reader of our output has gone
        raise
    except OSError as error:
        raise InputError(
            f"--out {out}: cannot be written ({error.strerror}), expected a folder, which is made"
            " if need be"
        ) from None
    print(f"wrote {format_written(written, before)} in {out}")
    return groups


def compare_runs(
    paths: Iterable[str | Path],
    target: float | None = None,
    baseline: str | None = None,
    pivot: tuple[str, str] | None = None,
    measure: str = "best",
) -> tuple[list[dict[str, Any]], Pivot | None]:
    """Returns a dict per set of runs, and the table of one setting by another, None: not asked for.

    Each measure of a set is (mean, sample sd, number of values).
    Args: `paths` are run directories and folders of them; `target` is an accuracy as a fraction,
    or an RMSE;
    `baseline` names the set that the others are compared with, by its label or algorithm, in two
    measures: the gain is that in final accuracy (mean over clients, last 5 % of the tests), the
    speed-up is the baseline's time to keep its own final accuracy, divided by the set's time to do
    so, in simulated seconds or, without a clock, in rounds; `pivot`, of two settings, asks for
    a table of one by the other, of a `measure`, as pivot.csv, .md and .tex, see `pivot.make_pivot`.
    """
    if target is not None and not target > 0:
        raise InputError(f"target must be a score above 0, as 0.8 of accuracy, not {target}")
    run_dirs = follow(find_runs(list(paths)), "reading runs")
    runs = [read_run(run_dir, target) for run_dir in run_dirs]
    shares = [kind.words for run in runs if (kind := score_of(run["rows"])).percent]
    if target is not None and target > 1 and shares:
        raise InputError(f"target must be a share in (0, 1], as {shares[0]} is, not {target}")
    sets = merge_seeds(add_shared_best(runs))
    sets = sets if baseline is None else add_baseline(sets, baseline)
    groups = [reduce_set(one) for one in sets]
    print_notes(groups, baseline)
    return groups, make_pivot(groups, *pivot, measure) if pivot else None


def print_notes(groups: list[dict[str, Any]], baseline: str | None) -> None:
    """Prints what makes numbers of sets of runs less than they seem."""
    for group in groups:
        if len(set(group["seeds"].split())) < group["runs"]:
            print(
                f"note: {group['label']} holds the same seed more than once (seeds"
                f" {group['seeds']}), so its sd is too small"
            )
        if chosen := sum("chosen_round" in run for run in group["members"]):
            print(
                f"note: {chosen} of {group['runs']} runs of {group['label']} report the round that"
                " was best on validation samples; it is also what best and final are"
            )
        alone = sum("speedup" not in run for run in group["members"])
        if baseline is not None and alone:
            print(
                f"note: {alone} of {group['runs']} runs of {group['label']} have no gain: no run of"
                f" {baseline} has the same seed and the same data"
            )


def add_shared_best(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the runs with their best score over the tests that count for all runs
    on the same data set, partition and model, and the number of these tests.
    """
    same: dict[tuple, list[list[dict[str, Any]]]] = {}
    for run in runs:
        same.setdefault(_data_of(run), []).append(run["rows"])
    windows = {name: shared_rounds(rows) for name, rows in same.items()}
    shared = [(run, windows[_data_of(run)]) for run in runs]
    return [
        run
        | {
            # a round that was chosen on validation samples is nobody's best test
            f"shared_best_{(name := score_of(run['rows']).name)}": run[f"best_{name}"]
            if "chosen_round" in run
            else best_over(run["rows"], window),
            "shared_evaluations": len(window),
        }
        for run, window in shared
    ]


def _data_of(run: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(run.get(name) or "") for name in DATA)


def merge_seeds(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts together the runs that differ in nothing but the seed and where and how they
    ran, and labels each set by what tells it from the others; `method` is the label without the
    data.
    """
    same: dict[tuple, list[dict[str, Any]]] = {}
    for run in runs:
        same.setdefault(tuple(str(run.get(name) or "") for name in IDENTITY), []).append(run)
    varying = [
        name
        for i, name in enumerate(IDENTITY)
        if i == 0 or len({identity[i] for identity in same}) > 1
    ]
    every = {name for members in same.values() for run in members for name in run["overrides"]}
    short = shorten_names(every)
    sets: dict[tuple, dict[str, Any]] = {}
    for identity, members in same.items():
        names = sorted({name for run in members for name in run["overrides"]})
        swept = [name for name in names if len({run["overrides"].get(name) for run in members}) > 1]
        fields: dict[str, str] = dict(zip(IDENTITY, identity, strict=True))
        for run in members:
            given = [name for name in swept if name in run["overrides"]]
            extra = " ".join(f"{name}={run['overrides'][name]}" for name in given)
            said = [f"{short[name]}={shorten_value(run['overrides'][name])}" for name in given]
            label = " ".join([*(fields[name] for name in varying), *said])
            method = " ".join([*(fields[name] for name in varying if name not in DATA), *said])
            new = {**fields, "overrides": extra, "label": label, "method": method, "members": []}
            sets.setdefault((*identity, extra), new)["members"].append(run)
    return [sets[name] for name in sorted(sets)]


def shorten_value(value: str) -> str:
    """Returns a value as labels have it: of a long one its first signs, and a number of its own."""
    number = zlib.crc32(value.encode(errors="surrogatepass"))
    return escape_text(value if len(value) <= 200 else f"{value[:100]}... ({number:08x})")


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the last part of each setting's name, m of algorithm.m, where only one has it and it
    does not name another setting alone.
    """
    last = {name: name.rpartition(".")[2] for name in names}
    counts = Counter([*last.values(), *IDENTITY, "seed"])
    return {name: part if counts[part] == 1 else name for name, part in last.items()}


def reduce_set(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a set of runs with its measures over seeds."""
    members = group["members"]
    return {
        **group,
        "runs": len(members),
        "seeds": " ".join(str(run.get("seed")) for run in members),
        **{name: _mean_sd(run.get(name) for run in members) for name in MEASURES},
    }


def _mean_sd(values: Iterable[float | None]) -> tuple[float, float, int]:
    """Returns mean, sample standard deviation (n - 1; NaN for one value) and the number
    of values, without nulls.
    """
    kept = [value for value in values if value is not None]
    mean = float(np.mean(kept)) if kept else math.nan
    return mean, float(np.std(kept, ddof=1)) if len(kept) > 1 else math.nan, len(kept)


def shown_measures(groups: list[dict[str, Any]]) -> list[str]:
    """Returns the measures that the table shows: those that some run has, and the best
    over shared tests only where it is over fewer than some run's own.
    """
    fewer = any(group["evaluations"][0] != group["shared_evaluations"][0] for group in groups)
    hidden = {name for name in MEASURES if name.startswith("shared_") and not fewer}
    known = [name for name in MEASURES if any(group[name][2] for group in groups)]
    return [name for name in known if name not in hidden]


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl compare RUN_DIR... [--out DIR] [--target ACC] [--baseline NAME]`."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl compare", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="a run directory, or a folder to search for runs"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where the files go (default: the current directory)"
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
        " algorithm+algorithm.m local.lr; in Markdown and LaTeX, the best of each column bold",
    )
    parser.add_argument(
        "--measure",
        default="best",
        metavar="NAME",
        help="what --pivot shows (default: best); of each task its own score:"
        f" {', '.join(OF_TASK)}; or {', '.join(MEASURES)}",
    )
    options = parse_arguments(parser, argv)
    pivot = tuple(options.pivot) if options.pivot else None
    compare(options.runs, options.out, options.target, options.baseline, pivot, options.measure)
    return 0
