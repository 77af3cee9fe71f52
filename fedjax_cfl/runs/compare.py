"""Compares finished runs: mean and standard deviation over seeds, as a table, a CSV, a
Markdown table and a plot.
"""

import argparse
import csv
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.runs.plot import format_percent_axis, make_palette, style_axes
from fedjax_cfl.runs.results import (
    METRICS_FILE,
    atomic_write,
    read_metrics,
    read_summary,
    rounds_to,
    series,
    summarize_rows,
)

IDENTITY = ("algorithm", "dataset", "partition", "model", "preset")
# name in the CSV -> heading, factor and decimals of the printed table
MEASURES = {
    "best_accuracy": ("best %", 100, 2),
    "final_accuracy": ("final %", 100, 2),
    "last10_evals_accuracy": ("last 10 tests %", 100, 2),
    "macro_accuracy": ("macro %", 100, 2),
    "worst10_accuracy": ("worst 10 %", 100, 2),
    "ari": ("ARI", 1, 3),
    "rounds_to_target": ("rounds to target", 1, 1),
    "units": ("models down + up", 1, 0),
    "wall_s": ("wall s", 1, 1),
}
NUMBERS = (
    *MEASURES,
    "accuracy",
    "discrepancy",
    "units_down",
    "units_up",
    "bytes_down",
    "bytes_up",
)  # what is read from a row or summary
MAX_RUN_FILE_BYTES = 2**28  # of a file; as Python objects it takes up to twenty times that
MAX_NUMBER = 1e18  # of a number; a curve through greater ones cannot be drawn


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Returns the finished runs at or below `paths`, sorted, each once; prints a line
    for every unfinished one.
    """
    finished, unfinished = set(), set()
    for path in map(Path, paths):
        if not path.is_dir():
            siblings = (
                [item.name for item in path.parent.iterdir() if item.is_dir()]
                if path.parent.is_dir()
                else []
            )
            raise InputError(
                f"no folder {str(path)!r}{suggest_nearest(path.name, siblings)}: expected a run"
                " directory or a folder of runs"
            )
        finished |= {file.parent.resolve() for file in path.rglob("summary.json")}
        unfinished |= {file.parent.resolve() for file in path.rglob(METRICS_FILE)}
    for run_dir in sorted(unfinished - finished):
        print(f"skipped, unfinished ({METRICS_FILE} but no summary.json): {run_dir}", flush=True)
    if not finished:
        raise InputError(
            f"no finished run (summary.json) in {', '.join(repr(str(path)) for path in paths)}"
        )
    return sorted(finished)


def _overrides(run_dir: Path, summary: dict[str, Any]) -> dict[str, str]:
    """Reads what the command line changed, without the fields that identify or seed a
    run and without Hydra's own.
    """
    lines = summary.get("overrides")
    file = run_dir / ".hydra" / "overrides.yaml"
    if lines is None and file.is_file():
        # a flat YAML list of strings, so that no YAML parser is needed
        lines = [
            line[2:].strip().strip("'\"")
            for line in _file(file).read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("- ")
        ]
        _check_texts(file, lines)
    pairs = (str(line).lstrip("+~").partition("=") for line in lines or [])
    return {
        name: value
        for name, _, value in pairs
        if name not in IDENTITY and name.split(".")[-1] != "seed" and name[:6] != "hydra."
    }


def _file(path: Path) -> Path:
    """Returns the path of a file of a run, if it can be read whole."""
    try:
        if not path.is_file():
            raise InputError(
                f"{path}: file is missing or no regular file, expected one as a run writes it"
            )
        if path.stat().st_size > MAX_RUN_FILE_BYTES:
            raise InputError(
                f"{path}: file has {path.stat().st_size} bytes, expected at most"
                f" {MAX_RUN_FILE_BYTES}"
            )
        with path.open("rb"):
            return path
    except OSError as error:
        raise InputError(
            f"{path}: file cannot be read ({error.strerror}), expected a readable file"
        ) from None


def _check_texts(path: Path, texts: Any) -> None:
    """Raises InputError unless `texts` are lines that a table and a plot can show."""
    if not isinstance(texts, list) or not all(
        isinstance(text, str) and text.isprintable() and len(text) <= 1000 for text in texts
    ):
        raise InputError(
            f"{path}: overrides or names are no plain text, expected what a run writes"
        )


def _check_numbers(path: Path, holder: dict[str, Any]) -> None:
    """Raises InputError unless the numbers of a row or summary are numbers, or null."""
    for name in (*NUMBERS, "round"):
        value = holder.get(name)
        if value is not None and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= MAX_NUMBER
        ):
            where = f", round {holder['round']}" if name != "round" and "round" in holder else ""
            raise InputError(
                f"{path}{where}: {name} is no number up to {MAX_NUMBER:g}, expected what a run"
                " writes"
            )


def _read(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the summary and the rows of a run, checked: their files may have been
    edited, or be of something else.
    """
    summary_file, metrics_file = run_dir / "summary.json", run_dir / METRICS_FILE
    summary, rows = (
        read_summary(_file(summary_file).parent),
        read_metrics(_file(metrics_file).parent),
    )
    names = [summary[name] for name in (*IDENTITY, "seed") if summary.get(name) is not None]
    _check_texts(summary_file, [str(name) if isinstance(name, int) else name for name in names])
    _check_texts(summary_file, summary.get("overrides") or [])
    _check_numbers(summary_file, summary)
    for row in rows:
        _check_numbers(metrics_file, row)
    return summary, rows


def _load(run_dir: Path, target: float | None) -> dict[str, Any]:
    summary, rows = _read(run_dir)
    last = rows[-1] if rows else {}
    sent = [last[name] for name in ("units_down", "units_up") if last.get(name) is not None]
    return {
        **summary,
        **summarize_rows(rows),
        "rows": rows,
        "overrides": _overrides(run_dir, summary),
        "rounds_to_target": None if target is None else rounds_to(rows, target),
        "units": sum(sent) if sent else None,
        "wall_s": last.get("wall_s"),
    }


def _merge_seeds(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts together the runs that differ in nothing but the seed, and labels each set
    by what tells it from the others.
    """
    same: dict[tuple, list[dict[str, Any]]] = {}
    for run in runs:
        same.setdefault(tuple(str(run.get(name) or "") for name in IDENTITY), []).append(run)
    varying = [
        name
        for i, name in enumerate(IDENTITY)
        if i == 0 or len({identity[i] for identity in same}) > 1
    ]
    sets: dict[tuple, dict[str, Any]] = {}
    for identity, members in same.items():
        names = sorted({name for run in members for name in run["overrides"]})
        swept = [name for name in names if len({run["overrides"].get(name) for run in members}) > 1]
        for run in members:
            extra = " ".join(
                f"{name}={run['overrides'][name]}" for name in swept if name in run["overrides"]
            )
            fields = dict(zip(IDENTITY, identity, strict=True))
            label = " ".join([*(fields[name] for name in varying), *([extra] if extra else [])])
            sets.setdefault(
                (*identity, extra), {**fields, "overrides": extra, "label": label, "members": []}
            )["members"].append(run)
    return [sets[name] for name in sorted(sets)]


def _mean_sd(values: Iterable[float | None]) -> tuple[float, float, int]:
    """Returns mean, sample standard deviation (n - 1; NaN for one value) and the number
    of values, without nulls.
    """
    kept = [value for value in values if value is not None]
    mean = float(np.mean(kept)) if kept else math.nan
    return mean, float(np.std(kept, ddof=1)) if len(kept) > 1 else math.nan, len(kept)


def _reduce(group: dict[str, Any]) -> dict[str, Any]:
    members = group["members"]
    return {
        **group,
        "runs": len(members),
        "seeds": " ".join(str(run.get("seed")) for run in members),
        **{name: _mean_sd(run.get(name) for run in members) for name in MEASURES},
    }


def _cells(group: dict[str, Any], measures: list[str]) -> list[str]:
    cells = [group["label"], str(group["runs"])]
    for name in measures:
        (mean, sd, count), (_, factor, digits) = group[name], MEASURES[name]
        text = (
            "-"
            if not count
            else f"{factor * mean:,.{digits}f}"
            + (f" ± {factor * sd:,.{digits}f}" if count > 1 else "")
        )
        # a mean over fewer runs than the row's would flatter the method
        cells.append(text + (f" ({count}/{group['runs']})" if 0 < count < group["runs"] else ""))
    return cells


def _print(header: list[str], lines: list[list[str]]) -> None:
    table = Table(title="mean ± sample standard deviation over seeds", title_justify="left")
    for position, heading in enumerate(header):
        table.add_column(heading, justify="right" if position else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(escape, line))
    # redirected output has no width of its own
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def _write_tables(
    out: Path, groups: list[dict[str, Any]], header: list[str], lines: list[list[str]]
) -> None:
    with (
        atomic_write(out / "compare.csv") as temporary,
        temporary.open("w", newline="", encoding="utf-8") as handle,
    ):
        writer = csv.writer(handle)
        writer.writerow(
            [
                *IDENTITY,
                "overrides",
                "runs",
                "seeds",
                *(f"{name}_{part}" for name in MEASURES for part in ("mean", "sd", "n")),
            ]
        )
        for group in groups:
            numbers = [
                "" if isinstance(value, float) and math.isnan(value) else value
                for name in MEASURES
                for value in group[name]
            ]
            writer.writerow(
                [*(group[name] for name in (*IDENTITY, "overrides", "runs", "seeds")), *numbers]
            )
    rule = ["---", *["---:"] * (len(header) - 1)]
    text = "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n"
        for line in [header, rule, *lines]
    )
    with atomic_write(out / "compare.md") as temporary:
        temporary.write_text(text, encoding="utf-8")


def _mean_curve(
    members: list[dict[str, Any]], cost: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns round, communication, mean accuracy and its sd, each [R], at the rounds
    that every run has evaluated.
    """
    by_round = [{row["round"]: row for row in run["rows"]} for run in members]
    rounds = sorted(set.intersection(*map(set, by_round)))

    def table(names: list[str]) -> np.ndarray:  # [runs, R]
        return np.array(
            [
                sum(series([rows[round_] for round_ in rounds], name) for name in names)
                for rows in by_round
            ]
        )

    accuracy = table(["accuracy"])
    sd = accuracy.std(axis=0, ddof=1) if len(members) > 1 else np.zeros(len(rounds))
    return (
        np.array(rounds, float),
        table([f"{cost}_down", f"{cost}_up"]).mean(axis=0),
        accuracy.mean(axis=0),
        sd,
    )


def _plot(out: Path, groups: list[dict[str, Any]]) -> None:
    last_rows = [run["rows"][-1] for group in groups for run in group["members"] if run["rows"]]
    cost = (
        "bytes"
        if all(
            row.get("bytes_up") is not None and row.get("bytes_down") is not None
            for row in last_rows
        )
        else "units"
    )
    drawn = [_mean_curve(group["members"], cost) for group in groups]
    largest = max((float(np.nanmax(curve[1], initial=0.0)) for curve in drawn), default=0.0)
    scale, unit = next(
        pair
        for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
        if largest >= pair[0] or pair[0] == 1
    )
    scale, heading = (
        (scale, f"communication, down + up ({unit})")
        if cost == "bytes"
        else (1, "communication, down + up (models)")
    )
    columns = min(4, len(groups))
    figure = Figure(
        figsize=(13, 5.2 + 0.25 * math.ceil(len(groups) / columns)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    left, right = figure.subplots(1, 2, sharey=True)
    palette = make_palette(7)  # yellow, the eighth, is too pale for a line
    for position, (group, (rounds, sent, mean, sd)) in enumerate(zip(groups, drawn, strict=True)):
        label = group["label"].replace("$", r"\$")  # matplotlib would read formulas between them
        style = {
            "color": palette[position % 7],
            "linestyle": ("-", "--", ":", "-.")[position // 7 % 4],
        }
        for axes, x in ((left, rounds), (right, sent / scale)):
            axes.plot(
                x,
                mean,
                linewidth=1.9,
                marker="o" if len(x) <= 20 else "",
                markersize=4,
                label=label,
                **style,
            )
            axes.fill_between(
                x, mean - sd, mean + sd, color=style["color"], alpha=0.18, linewidth=0
            )
    style_axes(left, "Accuracy against round", "round", "test accuracy, mean ± sd over seeds")
    style_axes(right, "Accuracy against communication", heading, "")
    for axes in (left, right):
        axes.set_xlim(left=0)
        format_percent_axis(axes)
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=10,
    )
    with atomic_write(out / "compare.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def compare(
    paths: Iterable[str | Path], out: str | Path | None = None, target: float | None = None
) -> list[dict[str, Any]]:
    """Prints the comparison and writes compare.csv, compare.md and compare.png in
    `out`; returns a dict per set of runs.

    Each measure of a set is (mean, sample sd, number of values). `target` is an
    accuracy as a fraction.
    """
    if target is not None and not 0 < target <= 1:
        raise InputError(f"target must be an accuracy in (0, 1], not {target}")
    groups = [
        _reduce(group)
        for group in _merge_seeds([_load(run_dir, target) for run_dir in find_runs(list(paths))])
    ]
    for group in groups:
        if len(set(group["seeds"].split())) < group["runs"]:
            print(
                f"note: {group['label']} holds the same seed more than once (seeds"
                f" {group['seeds']}), so its sd is too small"
            )
    measures = [name for name in MEASURES if name != "rounds_to_target" or target is not None]
    header = [
        "runs of",
        "n",
        *(
            f"rounds to {100 * target:g} %" if name == "rounds_to_target" else MEASURES[name][0]
            for name in measures
        ),
    ]
    lines = [_cells(group, measures) for group in groups]
    out = Path(out or ".")
    try:
        out.mkdir(parents=True, exist_ok=True)
        _print(header, lines)
        _write_tables(out, groups, header, lines)
        _plot(out, groups)
    except BrokenPipeError:  # the reader of our output has gone
        raise
    except OSError as error:
        raise InputError(
            f"--out {out}: cannot be written ({error.strerror}), expected a folder, which is made"
            " if need be"
        ) from None
    print(f"wrote compare.csv, compare.md and compare.png in {out}")
    return groups


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl compare RUN_DIR... [--out DIR] [--target ACC]`."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl compare", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="a run directory, or a folder to search for runs"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where the three files go (default: the current directory)"
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="ACC",
        help="also report the first round that reaches this accuracy, e.g. 0.8",
    )
    options = parser.parse_args(argv)
    compare(options.runs, options.out, options.target)
    return 0
